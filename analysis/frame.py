"""The Frame: a Run's Records as flat arrays, built once, so that every metric is a few array operations.

Records become columns in blocks as they come: of 64 chunks, a Record is 5 kB of Python objects and 0.5 kB of columns.
Chunks of all requests lie end to end in two arrays; `offsets[i]:offsets[i + 1]` are those of request i. Instants are
float64 nanoseconds from the run's start: exact to 2**53 ns, which is 104 days, and NaN where something never happened.
Those of chunks are kept as steps of four bytes (loadgen.analysis.chunk_columns), so whatever walks over chunks does it
in `blocks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.analysis.chunk_columns import ChunkInstants, GrowingArray, GrowingTokens, chunk_steps
from loadgen.analysis.run.record import Record, State
from loadgen.analysis.run.token_counts import BASES, Basis, streamed_tokens

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

NS_PER_S = 1e9
ENTRIES_PER_BLOCK = 1 << 20
RECORDS_PER_BLOCK = 256
MAX_DETAILS = 1000
"""Different words of errors that are told apart; a server may put something new into each."""
OTHER_DETAIL = "(other words)"
COUNTED = attrgetter("phase", "state", "counted_by", "stamps")
ENDED = attrgetter("phase", "state", "error_kind", "error_detail", "http_status")
COUNT_FACTS = attrgetter("chunk_counts", "counted_by", "hidden_tokens", "refuted_total")
NUMBERS = ("id", "worker", "late_ns_max", "reads", "coalesced_reads", "reopened", "turn")


class Outcome(NamedTuple):
    """How a request ended, in the words of its Record."""

    measured: bool
    state: State
    kind: str
    detail: str
    http_status: int | None


class CountSource(NamedTuple):
    """Who counted a request's tokens, and who stamped them."""

    measured: bool
    state: State
    counted_by: str
    stamps: str


class OutcomeCount(NamedTuple):
    """How many requests ended in one way, and the first of them."""

    number: int
    id: int


class Window(msgspec.Struct, frozen=True):
    """The measuring window, in nanoseconds from the run's start, and how it was chosen."""

    from_ns: float
    to_ns: float
    chosen: Literal["auto", "set", "whole"]
    """`set` by the plan, `auto` where a test showed a steady state, or the `whole` run."""
    reason: str
    steady: bool = False
    """Whether a test found no trend in the window, so that its parts are alike."""
    unsteady: str = ""
    """How a load of one rate failed to become steady, in words; empty otherwise."""


class Frame(msgspec.Struct, frozen=True):
    """One row per Record, in the order of the run file, and one entry per chunk."""

    id: Integers
    measured: Booleans
    """False for warm-up requests, which are in no figure."""
    complete: Booleans
    dropped: Booleans
    """Never sent, because too many were in flight or their session had ended."""
    turn: Integers
    """Of its session, from 0."""
    due_ns: Floats
    sent_ns: Floats
    first_sent_ns: Floats
    """When the first attempt was sent; the same as `sent_ns` for a request that was not sent again."""
    sent_again: Booleans
    """Sent twice, because the server closed an idle connection as the request was first sent on it."""
    sent_end_ns: Floats
    first_byte_ns: Floats
    """The newest byte of the first read."""
    end_ns: Floats
    """The dialect's end marker, or the instant the request was given up, or its last chunk where neither is known."""
    first_ns: Floats
    """First chunk. NaN where there was none, as in the next two."""
    last_ns: Floats
    """Last chunk; of a complete request that asked for no token, the end of its answer."""
    first_tokens: Floats
    """Streamed tokens of the first chunk, by the rule of loadgen.analysis.run.token_counts, as all that follows."""
    arrived_tokens: Floats
    """The sum over chunks, each of which counts as one token at least."""
    streamed_tokens: Floats
    """All streamed tokens: fewer than the chunks, where chunks are pieces of tokens."""
    unstreamed_tokens: Floats
    """Generated tokens that were never streamed. Where the server's total contradicts the chunks: total minus chunks,
    which is below 0."""
    recorded_tokens: Floats
    """The sum over the chunks' own counts, also where the server's total contradicts it."""
    basis: Integers
    """How the streamed tokens are known: an index into loadgen.analysis.run.token_counts.BASES."""
    prompt_asked: Floats
    """NaN where it could not be known beforehand."""
    prompt_reported: Floats
    """NaN where the server did not say."""
    output_asked: Floats
    output_reported: Floats
    """NaN where nobody counted more than chunks."""
    worker: Integers
    late_ns_max: Integers
    reads: Integers
    coalesced_reads: Integers
    first_token_merged: Booleans
    reopened: Integers
    chunk_ns: ChunkInstants
    chunk_tokens: NDArray[np.unsignedinteger]
    """Streamed tokens of each chunk."""
    offsets: Integers
    """Length of the rows + 1."""
    outcome_index: Integers
    """Which of `endings`, by its place there."""
    outcomes: Mapping[Outcome, OutcomeCount]
    sources: Mapping[CountSource, int]
    window: Window | None = None
    """None is the whole run of a burst or of interactive users."""

    def __len__(self) -> int:
        return len(self.complete)

    def ended_as(self, state: str) -> Booleans:
        """Return which requests ended in this state."""
        return np.array([ending.state == state for ending in self.outcomes], np.bool_)[self.outcome_index]

    @property
    def chunk_counts(self) -> Integers:
        """Chunks per row."""
        return np.diff(self.offsets)

    @property
    def output_tokens(self) -> Floats:
        """The reported count, else the sum over chunks: what arrived, also of a request that failed later, and of one
        that is not complete and said to be longer than asked."""
        excess = ~self.complete & (self.output_reported > self.output_asked)
        return np.where(np.isnan(self.output_reported) | excess, self.arrived_tokens, self.output_reported)

    @property
    def prompt_tokens(self) -> Floats:
        """The reported count, else what was asked."""
        return np.where(np.isnan(self.prompt_reported), self.prompt_asked, self.prompt_reported)

    @property
    def later_tokens(self) -> Floats:
        """Streamed tokens after the first chunk; NaN where there are none."""
        later = self.streamed_tokens - self.first_tokens
        return np.where(later > 0, later, np.nan)

    def has_basis(self, basis: Basis) -> Booleans:
        """The rows whose streamed tokens are known in this way."""
        return np.equal(self.basis, BASES.index(basis))

    @property
    def generated_tokens(self) -> Floats:
        """`output_tokens`; NaN where there are none."""
        return np.where(self.output_tokens > 0, self.output_tokens, np.nan)

    @property
    def prefill_end_ns(self) -> Floats:
        """When the server had run the prompt: the first chunk, or the end of an answer without tokens."""
        return np.where(np.isnan(self.first_ns), self.last_ns, self.first_ns)

    @property
    def whole(self) -> bool:
        """Whether the figures are of the whole run, from the first byte sent to the last end."""
        return self.window is None or self.window.chosen == "whole"

    @property
    def sent(self) -> Booleans:
        """Measured requests of which a byte was sent."""
        return self.measured & ~np.isnan(self.sent_ns)

    @property
    def inside(self) -> Booleans:
        """Measured requests due inside the window: those whose latencies count, if they are complete."""
        return self.measured & self.within(self.due_ns)

    @property
    def sampled(self) -> Booleans:
        """The rows that latencies are of."""
        return self.complete & self.inside

    @property
    def span_ns(self) -> tuple[float, float] | None:
        """The ends of the window. A whole run spans the first t_sent to the last t_end of all requests sent, complete
        or not. None when nothing was sent or came back."""
        if self.window is not None and not self.whole:
            ends = (self.window.from_ns, self.window.to_ns)
            return ends if ends[1] > ends[0] and self.sent.any() else None
        ended = self.end_ns[self.sent & ~np.isnan(self.end_ns)]
        begun = self.sent_ns[self.sent]
        return None if len(ended) == 0 or ended.max() <= begun.min() else (float(begun.min()), float(ended.max()))

    def within(self, instants_ns: Floats) -> Booleans:
        """Return which instants lie in the window. A whole run contains all, unknown (NaN) instants included."""
        if self.window is None or self.whole:
            return np.ones(len(instants_ns), np.bool_)
        return (instants_ns >= self.window.from_ns) & (instants_ns <= self.window.to_ns)

    @property
    def completed_inside(self) -> int:
        """Complete measured requests that ended in the window."""
        return int((self.measured & self.complete & self.within(self.end_ns)).sum())

    def tokens_inside(self) -> float:
        """Generated tokens that arrived inside the window. Where a server's own count differs from what its chunks
        held, it is spread over them as they came."""
        tokens = np.where(self.sent, self.output_tokens, 0.0)
        if self.whole:
            return float(tokens.sum())
        inside = 0.0
        for rows, chunks in self.blocks():
            part = self.chunk_tokens[chunks] * self.within(self.chunk_ns[chunks])
            received = sum_by_row(part, self.offsets[rows.start : rows.stop + 1] - chunks.start)
            inside += float((tokens[rows] * received / np.maximum(self.arrived_tokens[rows], 1)).sum())
        return inside

    def prompt_tokens_inside(self) -> float:
        """Prompt tokens of requests whose answer began inside the window. A prompt whose length nobody told (a
        turn of a session that broke off before the server counted it) adds nothing."""
        answered = self.sent & ~np.isnan(self.prefill_end_ns) & self.within(self.prefill_end_ns)
        return float(np.nansum(self.prompt_tokens[answered]))

    @property
    def gap_counts(self) -> Integers:
        """Gaps between the chunks of each row; 0 where it is not sampled."""
        return np.where(self.sampled, np.maximum(self.chunk_counts - 1, 0), 0)

    @property
    def later_counts(self) -> Integers:
        """Tokens after the first one, by the chunks' own counts; 0 where the row is not sampled."""
        return np.where(self.sampled, np.maximum(self.arrived_tokens - 1, 0), 0).astype(np.int64)

    def gaps_s(self) -> Floats:
        """t_{j+1} - t_j in seconds, for every gap of every sampled row, in order."""
        return np.concatenate([part / NS_PER_S for _, part in self.gap_blocks()])

    def token_gaps_s(self) -> Floats:
        """The gaps and, for each further token of a chunk, a zero; row by row, n - 1 of each: first its gaps, then its
        zeros."""
        starts, gaps = offsets_of(self.later_counts), self.gap_counts
        samples = np.zeros(starts[-1])
        for rows, part in self.gap_blocks():
            first, counts = starts[:-1][rows], gaps[rows]
            index = np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts)
            samples[np.repeat(first, counts) + index] = part / NS_PER_S
        return samples

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows and their chunks, piece by piece: see `blocks`."""
        return blocks(self.offsets)

    def gap_blocks(self) -> Iterator[tuple[slice, NDArray[np.integer]]]:
        """Gaps in nanoseconds between the chunks of each sampled row, for one block of rows after the other."""
        sampled = self.sampled
        for rows, chunks in self.blocks():
            counts = np.diff(self.offsets[rows.start : rows.stop + 1])
            retained = np.repeat(sampled[rows], counts)
            retained[self.offsets[rows][counts > 0] - chunks.start] = False  # a request's first chunk ends no gap
            yield rows, self.chunk_ns.steps[chunks][retained]


def offsets_of(counts: Integers) -> Integers:
    """Where the entries of each row begin in a flat array, and where the last one's end."""
    return np.concatenate(([0], np.cumsum(counts)))


def blocks(offsets: Integers) -> Iterator[tuple[slice, slice]]:
    """Rows, and their entries in a flat array, in pieces of about ENTRIES_PER_BLOCK entries. What is made on the way of
    a computation then never has the size of the flat array itself."""
    starts = np.searchsorted(offsets, np.arange(0, max(1, int(offsets[-1])), ENTRIES_PER_BLOCK))
    starts = starts[np.diff(starts, prepend=-1) > 0]  # np.unique would import masked arrays: 20 ms
    for first, last in zip(starts, [*starts[1:], len(offsets) - 1], strict=True):
        yield slice(first, last), slice(int(offsets[first]), int(offsets[last]))


def sum_by_row(values: NDArray[np.number] | Booleans, offsets: Integers) -> Floats:
    """Sum of a flat array over each row's part of it; 0 for a row without entries."""
    sums = np.zeros(len(offsets) - 1)
    for rows, entries in blocks(offsets):
        firsts = offsets[rows] - entries.start
        held = np.diff(offsets[rows.start : rows.stop + 1]) > 0
        if held.any():
            sums[rows][held] = np.add.reduceat(values[entries], firsts[held], dtype=np.float64)
    return sums


def sum_known(values: Floats, rows: Booleans) -> int:
    """Sum over these rows of what is known."""
    return int(np.nansum(values[rows]))


def build_frame(records: Iterable[Record]) -> Frame:
    """The Frame of these Records; its window is the whole run."""
    gathering = FrameBuilder()
    for record in records:
        gathering.add(record)
    return gathering.frame()


class FrameBuilder:
    """Takes Records one by one; `frame` is called once, after the last."""

    def __init__(self) -> None:
        self._pending: list[Record] = []
        self._columns: dict[str, GrowingArray | GrowingTokens] = {"chunk_tokens": GrowingTokens()}
        self._endings: dict[Outcome, OutcomeCount] = {}
        self._places: dict[Outcome, int] = {}
        self._sources = Counter[CountSource]()

    def add(self, record: Record) -> None:
        """Take one Record."""
        self._pending.append(record)
        if len(self._pending) == RECORDS_PER_BLOCK:
            self._close_block()

    def frame(self) -> Frame:
        """The Frame of everything taken."""
        self._close_block()
        columns: dict[str, Any] = {name: column.array() for name, column in self._columns.items()}
        offsets = offsets_of(columns.pop("chunk_counts"))
        instants = ChunkInstants(columns.pop("steps"), columns["first_ns"], offsets)
        return Frame(**columns, chunk_ns=instants, offsets=offsets, outcomes=self._endings, sources=self._sources)

    def _close_block(self) -> None:
        records, self._pending = self._pending, []
        for name, values in _block(records).items():
            self._columns.setdefault(name, GrowingArray(values.dtype)).extend(values)
        for (phase, state, *said), number in Counter(map(COUNTED, records)).items():
            self._sources[CountSource(phase == "measured", state, *said)] += number
        firsts = {ENDED(record): record.id for record in reversed(records)}
        ended, places = [*map(ENDED, records)], {}
        for how, number in Counter(ended).items():
            phase, state, kind, detail, http_status = how
            kind = "" if state == "complete" else kind or state
            ending = Outcome(phase == "measured", state, kind, detail if kind else "", http_status)
            if ending not in self._endings and len(self._endings) >= MAX_DETAILS:
                ending = ending._replace(detail=OTHER_DETAIL)
            before, first = self._endings.get(ending, (0, firsts[how]))
            self._endings[ending] = OutcomeCount(before + number, first)
            places[how] = self._places.setdefault(ending, len(self._places))
        self._columns.setdefault("outcome_index", GrowingArray(np.dtype(np.uint16))).extend(
            np.array([places[how] for how in ended], np.uint16)
        )


def _block(records: Sequence[Record]) -> dict[str, NDArray[Any]]:
    """One pass per column over the Records, one over the chunks."""

    def column(name: str, kind: type = np.float64) -> NDArray[Any]:
        values = [*map(attrgetter(name), records)]
        try:  # integers become floats in a fifth of the time
            return np.array(values, np.int64).astype(kind) if kind is np.float64 else np.array(values, kind)
        except TypeError:  # of floats None is NaN
            return np.array(values, kind)

    counts = np.fromiter((len(record.chunk_ns) for record in records), np.int64, len(records))
    offsets = offsets_of(counts)
    entries = chain.from_iterable(record.chunk_ns for record in records)
    instants = np.fromiter(entries, np.int64, offsets[-1])
    chunk_ns = instants.astype(np.float64)  # half the time of floats at once
    end_ns, last_ns, state = column("end_ns"), _at_chunk(chunk_ns, offsets[1:] - 1, counts), column("state", np.str_)
    output_asked = column("output_tokens_asked")
    sent_ns, first_sent_ns = column("sent_ns"), column("first_sent_ns")
    sent_again = ~np.isnan(first_sent_ns)
    last_ns = np.where((counts == 0) & (output_asked == 0) & (state == "complete"), end_ns, last_ns)
    return {
        "chunk_counts": counts,
        "steps": chunk_steps(instants, offsets),
        **_tokens_of(records, counts, offsets),
        "measured": column("phase", np.str_) == "measured",
        "complete": state == "complete",
        "dropped": state == "dropped",
        "end_ns": np.where(np.isnan(end_ns), last_ns, end_ns),
        "first_ns": _at_chunk(chunk_ns, offsets[:-1], counts),
        "last_ns": last_ns,
        "prompt_asked": np.array([record.prompt_tokens_asked or np.nan for record in records], np.float64),
        "prompt_reported": column("prompt_tokens"),
        "output_asked": output_asked,
        # How many chunks came says nothing of the length of an answer.
        "output_reported": np.where(column("counted_by", np.str_) == "chunks", np.nan, column("output_tokens")),
        "first_token_merged": column("first_token_merged", np.bool_),
        "sent_ns": sent_ns,
        "first_sent_ns": np.where(sent_again, first_sent_ns, sent_ns),
        "sent_again": sent_again,
        **{name: column(name) for name in ("due_ns", "sent_end_ns", "first_byte_ns")},
        **{name: column(name, np.int64) for name in NUMBERS},
    }


def _tokens_of(records: Sequence[Record], counts: Integers, offsets: Integers) -> dict[str, NDArray[Any]]:
    """The columns of streamed tokens. In nearly all records chunks and total agree, and the chunks' counts stand."""
    held = [record.chunk_tokens for record in records]
    try:  # a third of the time, and of ones a tenth
        ones = all(each.count(1) == len(each) for each in held)
        tokens = np.frombuffer(b"\1" * int(offsets[-1]) if ones else b"".join(map(bytes, held)), np.uint8)
    except ValueError:  # more than 255 in one
        tokens = np.array([*chain.from_iterable(held)], np.uint32)
    recorded = sum_by_row(tokens, offsets)
    first, arrived = _at_chunk(tokens.astype(np.float64), offsets[:-1], counts), recorded.copy()
    in_stream, unstreamed = recorded.copy(), np.zeros(len(records))
    facts = [*map(COUNT_FACTS, records)]
    # Nearly always all records of a block have the same facts, which are looked at once.
    looks = {fact: _looks(*fact) for fact in set(facts)}
    flags = np.array([*looks.values()] if len(looks) == 1 else [looks[fact] for fact in facts], np.bool_)
    by_chunks, by_server, special = np.broadcast_to(flags.reshape(-1, 3), (len(facts), 3)).T
    basis = np.where(by_chunks, BASES.index("chunks"), BASES.index("counted")).astype(np.uint8)
    totals = np.array([record.output_tokens for record in records], np.float64)
    unlike = (counts > 0) & (special | (by_server & ~(totals == recorded) & ~np.isnan(totals)))
    if unlike.any():
        tokens = tokens.astype(np.uint32)
    for row in np.flatnonzero(unlike).tolist():
        result = streamed_tokens(records[row])
        tokens[offsets[row] : offsets[row + 1]] = result.counts
        first[row], in_stream[row], unstreamed[row] = result.first, result.tokens, result.hidden
        arrived[row], basis[row] = sum(result.counts), BASES.index(result.basis)
    return {
        "chunk_tokens": tokens.astype(np.min_scalar_type(int(tokens.max(initial=0)))),
        "first_tokens": first,
        "arrived_tokens": arrived,
        "streamed_tokens": in_stream,
        "unstreamed_tokens": unstreamed,
        "recorded_tokens": recorded,
        "basis": basis,
    }


def _looks(chunk_counts: str, counted_by: str, hidden_tokens: int, refuted_total: int | None) -> tuple[bool, ...]:
    """Whether tokens are those of chunks of unknown length, whether the server stated a total, and whether chunks and
    total need a closer look in any case."""
    by_chunks = chunk_counts == "chunk" or counted_by == "chunks"
    return by_chunks, counted_by == "server", bool(hidden_tokens) or refuted_total is not None


def _at_chunk(values: Floats, positions: Integers, counts: Integers) -> Floats:
    result = np.full(len(counts), np.nan)
    held = counts > 0
    result[held] = values[positions[held]]
    return result
