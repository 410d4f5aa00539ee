"""The Frame: a run's Records as flat arrays, so that each metric takes only a few array operations.

Records are converted to columns in blocks while the run file is read. A Record with 64 chunks takes 5 kB as Python
objects and 0.5 kB as columns. Two flat arrays contain the chunks of all requests, one request after another. The
entries `offsets[i]:offsets[i + 1]` belong to request i.

Times are float64 nanoseconds from the run's start, which are exact up to 2**53 ns (104 days). NaN means that the event
never happened. The arrival time of a chunk is stored as the time since the previous chunk, usually in four bytes
(loadgen.analysis.chunk_columns). Code that needs all chunks processes them block by block (`Frame.blocks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.analysis.chunk_columns import (
    ChunkInstants,
    GrowingArray,
    chunk_steps,
    constant_array,
    is_constant,
    map_values,
    read_only,
)
from loadgen.analysis.chunk_lists import ChunkLists, lists_of_records, lists_of_texts
from loadgen.analysis.graph_columns import GraphColumns, GraphColumnsBuilder
from loadgen.analysis.record_groups import RecordGroups
from loadgen.analysis.row_labels import RowLabels, RowLabelsBuilder
from loadgen.analysis.run.compact_record import CompactRecord
from loadgen.analysis.run.record import Record, State
from loadgen.analysis.run.token_counts import BASES, Basis, streamed_tokens

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

NS_PER_S = 1e9
ENTRIES_PER_BLOCK = 1 << 20
RECORDS_PER_BLOCK = 256
MAX_DETAILS = 1000
"""Maximum number of different outcomes. Further error messages are counted together, because each message
of a server may be different."""
OTHER_DETAIL = "(other messages)"
FLOATS = ("due_ns", "released_ns", "sent_end_ns", "first_byte_ns", "min_rtt_us")
NUMBERS = ("id", "late_ns_max", "reads", "coalesced_reads")


class Outcome(NamedTuple):
    """The outcome of a request: its state, its error and its HTTP status, from its Record."""

    measured: bool
    state: State
    kind: str
    detail: str
    http_status: int | None


class CountSource(NamedTuple):
    """Facts about a request by which a Frame counts its requests. Requests with equal facts are counted together.

    - `measured`: False for warm-up requests.
    - `state`: the state of the request, such as `complete`.
    - `counted_by`: the source of the token counts.
    - `stamps`: the source of the timestamps.
    """

    measured: bool
    state: State
    counted_by: str
    stamps: str


class OutcomeCount(NamedTuple):
    """The number of requests with one outcome, and the id of the first of these requests."""

    requests: int
    first_id: int


class Window(msgspec.Struct, frozen=True):
    """The measurement window in ns from the run's start, and how it was chosen."""

    from_ns: float
    to_ns: float
    chosen: Literal["auto", "set", "whole"]
    """`set` if the plan sets the window, `auto` if a test showed a steady state, `whole` for the whole run."""
    reason: str
    steady: bool = False
    """True if a test found no trend in the window, so that parts of the window are comparable."""
    unsteady: str = ""
    """Description of the trend if a load with a constant rate never became steady; otherwise empty."""
    overloaded: bool = False
    """True if requests arrived faster than the server completed them until the last request was due."""


class Frame(msgspec.Struct, frozen=True, dict=True):
    """A run's Records as columns, for computations with NumPy.

    Most columns have one value per Record, in the order of the run file. The columns about chunks have one value per
    chunk. Arrays of a Frame must not be changed: its masks and other derived columns are computed only once."""

    id: Integers
    measured: Booleans
    """False for warm-up requests, which are excluded from all figures."""
    complete: Booleans
    dropped: Booleans
    """True for requests that were never sent, because too many requests were in flight or the session had ended."""
    turn: Integers
    """Index of the request's turn in its session, from 0."""
    due_ns: Floats
    released_ns: Floats
    """Time at which a request that had waited because of `--concurrency` could be sent; NaN if it did not wait."""
    sent_ns: Floats
    first_sent_ns: Floats
    """Send time of the first attempt. Equal to `sent_ns` unless the request was sent twice."""
    sent_again: Booleans
    """True for requests that were sent twice, because the server closed the idle connection during the first
    attempt."""
    sent_end_ns: Floats
    first_byte_ns: Floats
    """Arrival of the first byte of the response. If all bytes of a read share a timestamp: arrival of the last byte of
    the first read."""
    min_rtt_us: Floats
    """Minimum round-trip time of the request's connection in us; NaN if unknown."""
    end_ns: Floats
    """Arrival of the end marker, or the time when the request was given up. If neither is known: arrival of the last
    chunk."""
    first_ns: Floats
    """Arrival of the first chunk. For a row without chunks, `first_ns`, `last_ns` and `first_tokens` are NaN."""
    last_ns: Floats
    """Arrival of the last chunk. For a complete request of zero output tokens: the end of the response."""
    first_tokens: Floats
    """Streamed tokens in the first chunk. loadgen.analysis.run.token_counts defines how all token columns are
    counted."""
    arrived_tokens: Floats
    """Sum of the tokens over all chunks, where each chunk counts as at least one token."""
    streamed_tokens: Floats
    """Number of streamed tokens. It is smaller than the number of chunks if a token arrives in several chunks."""
    unstreamed_tokens: Floats
    """Generated tokens that the server did not stream. Negative (total - chunks) if the server's total is smaller than
    the sum over the chunks."""
    recorded_tokens: Floats
    """Sum of the chunks' own token counts, even if the server's total contradicts it."""
    basis: Integers
    """Basis of the streamed token counts, as an index into loadgen.analysis.run.token_counts.BASES."""
    prompt_asked: Floats
    """Requested prompt length in tokens; NaN if the length was not known in advance."""
    prompt_reported: Floats
    """Prompt length that the server reported; NaN if it reported none."""
    output_asked: Floats
    output_reported: Floats
    """Output length as counted by the server or the tokenizer; NaN if only chunks were counted."""
    worker: Integers
    late_ns_max: Integers
    reads: Integers
    coalesced_reads: Integers
    first_token_merged: Booleans
    reopened: Integers
    chunk_ns: ChunkInstants
    chunk_tokens: NDArray[np.unsignedinteger]
    """Number of streamed tokens in each chunk."""
    offsets: Integers
    """Index of each row's first chunk in the flat arrays, followed by the total number of chunks."""
    outcome_index: Integers
    """Index of the row's outcome in `outcomes`."""
    outcomes: Mapping[Outcome, OutcomeCount]
    sources: Mapping[CountSource, int]
    marks: Mapping[str, Floats] = {}
    """Columns of `Record.marks` by name, NaN for a row without the mark. Use `mark` to read them."""
    graphs: GraphColumns | None = None
    """Requests of sessions that are graphs, and the edges between them. None if the run has no such sessions."""
    output_errors: Mapping[str, int] = {}
    """Number of complete, measured requests by the reason why their tool call or JSON is not valid."""
    models: RowLabels | None = None
    """Model of each row. None if all requests went to the model of the run."""
    replicas: RowLabels | None = None
    """Replica that answered each row. None if no Record names a replica."""
    classes: RowLabels | None = None
    """Class of traffic of each row. None if the plan has no classes."""
    span_of_run: tuple[float, float] | None = None
    """Start and end of the window of the whole run, if this Frame holds only a part of the run's requests."""
    window: Window | None = None
    """Measurement window. None for bursts and interactive users, which are measured as a whole."""

    def __len__(self) -> int:
        return len(self.complete)

    def ended_as(self, state: str) -> Booleans:
        """Return a mask of the rows whose requests ended in the state `state`, such as `failed`."""
        return np.array([outcome.state == state for outcome in self.outcomes], np.bool_)[self.outcome_index]

    def mark(self, name: str) -> Floats:
        """Return the entry `name` of `Record.marks` for each row, or NaN for a row whose marks lack this entry.

        An entry is a time in ns if its name ends in `_ns`, otherwise a count.
        """
        return self.marks.get(name, np.full(len(self), np.nan))

    @cached_property
    def chunk_counts(self) -> Integers:
        """The number of chunks in each row."""
        return read_only(np.diff(self.offsets))

    @cached_property
    def output_tokens(self) -> Floats:
        """The output length of each row in tokens.

        This is the reported length, or the sum over the row's chunks if no length was reported. The sum is also used
        for an incomplete response whose reported length exceeds the requested length.
        """
        excess = ~self.complete & (self.output_reported > self.output_asked)
        return read_only(np.where(np.isnan(self.output_reported) | excess, self.arrived_tokens, self.output_reported))

    @property
    def prompt_tokens(self) -> Floats:
        """The prompt length of each row in tokens: the reported length, or else the requested length."""
        return np.where(np.isnan(self.prompt_reported), self.prompt_asked, self.prompt_reported)

    @property
    def later_tokens(self) -> Floats:
        """The number of streamed tokens after the first chunk of each row, or NaN for a row without such tokens."""
        later = self.streamed_tokens - self.first_tokens
        return np.where(later > 0, later, np.nan)

    def has_basis(self, *bases: Basis) -> Booleans:
        """Return a mask of the rows whose streamed tokens were counted in one of the ways in `bases`.

        For example, `chunks` means that every chunk was counted as one token (loadgen.analysis.run.token_counts.Basis).
        """
        return np.isin(self.basis, [BASES.index(basis) for basis in bases])

    @property
    def generated_tokens(self) -> Floats:
        """The output length of each row in tokens (`output_tokens`), with NaN in place of 0."""
        return np.where(self.output_tokens > 0, self.output_tokens, np.nan)

    @property
    def prefill_end_ns(self) -> Floats:
        """The end of the prefill of each row's request: the arrival of the first chunk.

        If a complete response has no tokens, the end of the response is used instead.
        """
        return np.where(np.isnan(self.first_ns), self.last_ns, self.first_ns)

    @property
    def whole(self) -> bool:
        """True if the figures cover the whole run, from the first byte sent to the end of the last request."""
        return self.window is None or self.window.chosen == "whole"

    @cached_property
    def sent(self) -> Booleans:
        """A mask of the measured requests that were sent."""
        return read_only(self.measured & ~np.isnan(self.sent_ns))

    @cached_property
    def inside(self) -> Booleans:
        """A mask of the measured requests that were due inside the window, complete or not."""
        return read_only(self.measured & self.within(self.due_ns))

    @property
    def send_delay_ns(self) -> Floats:
        """Delay in ns between the due time and the first send of each request, caused by the client.

        If a request waited because of `--concurrency`, its delay begins only when the wait ends. The delay is NaN for a
        request that was not sent.
        """
        return self.first_sent_ns - np.fmax(self.due_ns, self.released_ns)

    @cached_property
    def sampled(self) -> Booleans:
        """A mask of the rows from which latencies are computed.

        These are the complete, measured requests that were due inside the window.
        """
        return read_only(self.complete & self.inside)

    @cached_property
    def span_ns(self) -> tuple[float, float] | None:
        """The start and the end of the measurement window, or None if the window is empty or no request was sent.

        If the whole run is measured, the window begins when the first request is sent. It ends when the last request
        ends, complete or not. If this Frame holds only a part of a run, the window is that of the whole run.
        """
        if self.span_of_run is not None:
            return self.span_of_run
        if self.window is not None and not self.whole:
            ends = (self.window.from_ns, self.window.to_ns)
            return ends if ends[1] > ends[0] and self.sent.any() else None
        ended = self.end_ns[self.sent & ~np.isnan(self.end_ns)]
        begun = self.sent_ns[self.sent]
        return None if len(ended) == 0 or ended.max() <= begun.min() else (float(begun.min()), float(ended.max()))

    def within(self, instants_ns: Floats) -> Booleans:
        """Return a mask of the times that lie in the window.

        If the whole run is measured, all times lie in the window, including unknown times (NaN).
        """
        if self.window is None or self.whole:
            return np.ones(len(instants_ns), np.bool_)
        return (instants_ns >= self.window.from_ns) & (instants_ns <= self.window.to_ns)

    @property
    def completed_inside(self) -> int:
        """The number of complete, measured requests that ended inside the window."""
        return int((self.measured & self.complete & self.within(self.end_ns)).sum())

    @property
    def inputs_inside(self) -> float:
        """The number of inputs of complete requests that ended inside the window.

        It is 0 if the run has no pooling requests.
        """
        ended = self.measured & self.complete & self.within(self.end_ns)
        return float(np.nansum(self.mark("inputs")[ended]))

    @property
    def has_audio(self) -> bool:
        """True if requests contain recordings, or if responses contain speech."""
        return "audio_us" in self.marks or "audio_bytes" in self.marks

    @property
    def audio_s(self) -> Floats:
        """The length of each row's recording or speech in seconds; NaN if it is unknown or 0."""
        lengths_us = self.mark("audio_us")
        return np.where(lengths_us > 0, lengths_us, np.nan) / 1e6

    def sum_inside(self, amounts: Floats) -> float | None:
        """Return the sum of `amounts` over the complete requests that ended inside the window.

        `amounts` has one value per row. The result is None if one of the added values is NaN, or if no complete request
        ended inside the window.
        """
        ended = self.measured & self.complete & self.within(self.end_ns)
        return float(amounts[ended].sum()) if ended.any() and not np.isnan(amounts[ended]).any() else None

    def tokens_inside(self) -> float:
        """Return the number of generated tokens that arrived inside the window.

        If the server's token count differs from the sum over the chunks, the server's count is spread over the chunks
        in proportion to their tokens.
        """
        tokens = np.where(self.sent, self.output_tokens, 0.0)
        if self.whole:
            return float(tokens.sum())
        # All chunks of most requests lie on one side of each end of the window, so only the others are examined.
        first_inside, last_inside = self.within(self.first_ns), self.within(self.last_ns)
        has_chunks = self.chunk_counts > 0
        received = np.where(first_inside & last_inside & has_chunks, self.arrived_tokens, 0.0)
        crosses = has_chunks & ~(first_inside & last_inside) & ~self._all_outside()
        for rows, counts, instants, chunk_tokens in self.chunk_blocks(crosses):
            received[rows] = sum_by_row(chunk_tokens * self.within(instants), offsets_of(counts))
        return float((tokens * received / np.maximum(self.arrived_tokens, 1)).sum())

    def _all_outside(self) -> Booleans:
        """Return a mask of the rows whose chunks all arrived before the window, or all arrived after it."""
        assert self.window is not None
        return (self.last_ns < self.window.from_ns) | (self.first_ns > self.window.to_ns)

    def prompt_tokens_inside(self) -> float:
        """Return the total number of prompt tokens of the requests whose response began inside the window.

        A prompt of unknown length counts as 0. For example, a turn may fail before the server has counted its prompt.
        """
        answered = self.sent & ~np.isnan(self.prefill_end_ns) & self.within(self.prefill_end_ns)
        return float(np.nansum(self.prompt_tokens[answered]))

    @cached_property
    def gap_counts(self) -> Integers:
        """The number of gaps between the chunks of each row: one less than the number of chunks.

        The number is 0 for rows without chunks, and for rows that the mask `sampled` does not select.
        """
        return read_only(np.where(self.sampled, np.maximum(self.chunk_counts - 1, 0), 0))

    @cached_property
    def later_counts(self) -> Integers:
        """The number of tokens in the chunks of each row, without the first token.

        The number is 0 for rows that the mask `sampled` does not select.
        """
        return read_only(np.where(self.sampled, np.maximum(self.arrived_tokens - 1, 0), 0).astype(np.int64))

    @property
    def is_streamed(self) -> Booleans:
        """A mask of the rows whose first token arrived before the other tokens, so that the time of the first token is
        known.

        A response of several tokens in a single chunk is therefore not selected. A response of a single token is
        selected.
        """
        return (self.gap_counts > 0) | (self.output_tokens <= 1)

    def gaps_s(self) -> Floats:
        """Return the gaps between the consecutive chunks of each request, in seconds.

        Only the rows that the mask `sampled` selects are included.
        """
        return np.concatenate([gaps_ns / NS_PER_S for _, gaps_ns in self.gap_blocks()])

    def token_gaps_s(self) -> Floats:
        """Return the inter-token latencies in seconds of all rows that the mask `sampled` selects, as one array.

        Each row has one latency per token after its first token. For the first token of a chunk, the latency is the gap
        since the previous chunk. For every further token of a chunk, the latency is 0.

        In the result, the gaps of a row come first, and its zeros follow.
        """
        starts, gap_counts = offsets_of(self.later_counts), self.gap_counts
        samples = np.zeros(starts[-1])
        for rows, gaps_ns in self.gap_blocks():
            first, counts = starts[:-1][rows], gap_counts[rows]
            index = np.arange(len(gaps_ns)) - np.repeat(np.cumsum(counts) - counts, counts)
            samples[np.repeat(first, counts) + index] = gaps_ns / NS_PER_S
        return samples

    def sorted_gaps_s(self) -> Floats:
        """Return the gaps of `gaps_s` in ascending order.

        The gaps are sorted as integers, which takes half the time of sorting floats.
        """
        gaps_ns = np.concatenate([block for _, block in self.gap_blocks()])
        gaps_ns.sort()
        return gaps_ns / NS_PER_S

    def sorted_token_gaps_s(self) -> Floats:
        """Return the samples of `token_gaps_s` in ascending order."""
        gaps = self.sorted_gaps_s()
        zeros = np.zeros(int((self.later_counts - self.gap_counts).sum()))
        below_zero = int(np.searchsorted(gaps, 0.0))
        return np.concatenate((gaps[:below_zero], zeros, gaps[below_zero:])) if len(zeros) else gaps

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Divide the rows into blocks. For each block, yield a slice of the rows and a slice of their chunks."""
        return blocks(self.offsets)

    def chunk_blocks(self, selected: Booleans) -> Iterator[tuple[Integers, Integers, Floats, NDArray[Any]]]:
        """Yield the chunks of the rows that the mask `selected` selects, block by block.

        Each block consists of four arrays: the indices of its rows, the number of chunks of each row, the arrival time
        of each chunk in ns, and the number of tokens in each chunk. A row without chunks must not be selected.
        """
        if not selected.any():
            return
        chunk_counts = self.chunk_counts
        for rows, chunks in self.blocks():
            is_selected = selected[rows]
            if not is_selected.any():
                continue
            own = np.repeat(is_selected, chunk_counts[rows])
            indices = np.flatnonzero(is_selected) + rows.start
            counts = chunk_counts[indices]
            offsets = offsets_of(counts)
            instants = ChunkInstants(self.chunk_ns.steps[chunks][own], self.first_ns[indices], offsets)
            yield indices, counts, instants[:], self.chunk_tokens[chunks][own]

    def gap_blocks(self) -> Iterator[tuple[slice, NDArray[np.integer]]]:
        """Yield (rows, gaps) for each block: a slice of rows, and the gaps between the chunks of these rows in ns.

        Only the rows that the mask `sampled` selects are included.
        """
        sampled = self.sampled
        for rows, chunks in self.blocks():
            counts = np.diff(self.offsets[rows.start : rows.stop + 1])
            ends_gap = np.repeat(sampled[rows], counts)
            ends_gap[self.offsets[rows][counts > 0] - chunks.start] = False  # not the first chunk of a request
            yield rows, self.chunk_ns.steps[chunks][ends_gap]

    def step_blocks(self) -> Iterator[tuple[slice, NDArray[np.integer], Integers]]:
        """Yield (rows, steps, ignored) for each block of rows, to process the gaps of `gap_blocks` in less time.

        `steps` contains the time since the previous chunk in ns for all chunks of the rows, in the order of the rows.
        `ignored` contains the indices of the steps that are no gaps: those of the first chunk of each row, which are 0,
        and those of rows that the mask `sampled` does not select.
        """
        sampled = self.sampled
        for rows, chunks in self.blocks():
            counts = np.diff(self.offsets[rows.start : rows.stop + 1])
            ignored = self.offsets[rows][sampled[rows] & (counts > 0)] - chunks.start
            if not sampled[rows].all():
                ignored = np.concatenate((ignored, np.flatnonzero(np.repeat(~sampled[rows], counts))))
            yield rows, self.chunk_ns.steps[chunks], ignored


def offsets_of(counts: Integers) -> Integers:
    """Return the index of each row's first entry in a flat array, followed by the total number of entries.

    `counts` is the number of entries of each row.
    """
    return np.concatenate(([0], np.cumsum(counts)))


def blocks(offsets: Integers) -> Iterator[tuple[slice, slice]]:
    """Divide the rows into blocks, and yield two slices per block.

    The entries of all rows are in one flat array, and `offsets` contains the index of each row's first entry. The first
    slice selects the rows of the block, and the second selects their entries. A block has about ENTRIES_PER_BLOCK
    entries, so the temporary arrays of a computation are much smaller than the flat array.
    """
    starts = np.searchsorted(offsets, np.arange(0, max(1, int(offsets[-1])), ENTRIES_PER_BLOCK))
    starts = starts[np.diff(starts, prepend=-1) > 0]  # np.unique would import masked arrays, which takes 20 ms
    for first, last in zip(starts, [*starts[1:], len(offsets) - 1], strict=True):
        yield slice(first, last), slice(int(offsets[first]), int(offsets[last]))


def sum_by_row(values: NDArray[np.number] | Booleans, offsets: Integers) -> Floats:
    """Return the sum of the values of each row. A row without values has the sum 0.

    `values` contains the values of all rows, one row after another. `offsets` contains the index of each row's first
    value, followed by the number of all values.
    """
    sums = np.zeros(len(offsets) - 1)
    for rows, entries in blocks(offsets):
        firsts = offsets[rows] - entries.start
        filled = np.diff(offsets[rows.start : rows.stop + 1]) > 0
        if filled.any():
            sums[rows][filled] = np.add.reduceat(values[entries], firsts[filled], dtype=np.float64)
    return sums


def sum_known(values: Floats, rows: Booleans) -> int:
    """Return the sum of `values` over the rows of the mask `rows`, ignoring NaN."""
    return int(np.nansum(values[rows]))


def build_frame(records: Iterable[Record]) -> Frame:
    """Return the Frame of these Records. Its measurement window is the whole run."""
    builder = FrameBuilder()
    for record in records:
        builder.add(record)
    return builder.frame()


class FrameBuilder:
    """Builds a Frame from Records that are added one by one. Call `frame` once, after the last Record."""

    def __init__(self) -> None:
        self._pending: list[Record] = []
        self._columns: dict[str, GrowingArray] = {}
        self._outcomes: dict[Outcome, OutcomeCount] = {}
        self._indices: dict[Outcome, int] = {}
        self._sources = Counter[CountSource]()
        self._marks: dict[str, dict[int, int]] = {}
        """Marks by name and row."""
        self._graphs = GraphColumnsBuilder()
        self._output_errors = Counter[str]()
        self._models = RowLabelsBuilder()
        self._replicas = RowLabelsBuilder()
        self._rows = 0

    def add(self, record: Record) -> None:
        """Add one Record to the Frame."""
        self._pending.append(record)
        if len(self._pending) == RECORDS_PER_BLOCK:
            self.close()

    def add_block(self, records: Sequence[CompactRecord]) -> bool:
        """Add Records whose chunks are JSON text.

        Return False, and add nothing, if the chunks of a Record are not valid.
        """
        chunks = lists_of_texts(records)
        if chunks is None:
            return False
        if self._pending:
            self.close()
        self._add(records, chunks)
        return True

    def frame(self) -> Frame:
        """Return the Frame of all added Records."""
        self.close()
        columns: dict[str, Any] = {name: column.array() for name, column in self._columns.items()}
        offsets = offsets_of(columns.pop("chunk_counts"))
        instants = ChunkInstants(columns.pop("steps"), columns["first_ns"], offsets)
        marks = {name: self._mark_column(values) for name, values in self._marks.items()}
        return Frame(
            **columns,
            chunk_ns=instants,
            offsets=offsets,
            outcomes=self._outcomes,
            sources=self._sources,
            marks=marks,
            graphs=self._graphs.columns(),
            output_errors=dict(self._output_errors.most_common()),
            models=self._models.labels(),
            replicas=self._replicas.labels(),
        )

    def close(self) -> None:
        """Convert the last Records to columns, so that the builder can be sent to another process."""
        records, self._pending = self._pending, []
        self._add(records, lists_of_records(records))

    def absorb(self, later: FrameBuilder) -> None:
        """Add the rows of the builder `later` after the rows of this builder. Call `close` on both builders first."""
        mapping = np.zeros(max(1, len(later._indices)), np.uint16)
        for outcome, count in later._outcomes.items():
            target = outcome
            if outcome not in self._outcomes and len(self._outcomes) >= MAX_DETAILS:
                target = outcome._replace(detail=OTHER_DETAIL)
            count_before, first_id = self._outcomes.get(target, (0, count.first_id))
            self._outcomes[target] = OutcomeCount(count_before + count.requests, first_id)
            mapping[later._indices[outcome]] = self._indices.setdefault(target, len(self._indices))
        for name in list(later._columns):
            column = later._columns.pop(name)  # frees its memory as soon as it has been copied
            values = mapping[column.array()] if name == "outcome_index" else column.array()
            self._columns.setdefault(name, GrowingArray(values.dtype)).extend(values)
        self._sources.update(later._sources)
        for name, values_by_row in later._marks.items():
            own = self._marks.setdefault(name, {})
            own.update((row + self._rows, value) for row, value in values_by_row.items())
        self._graphs.absorb(later._graphs, self._rows)
        for error, count_of_error in later._output_errors.items():
            known = error in self._output_errors or len(self._output_errors) < MAX_DETAILS
            self._output_errors[error if known else OTHER_DETAIL] += count_of_error
        self._models.absorb(later._models)
        self._replicas.absorb(later._replicas)
        self._rows += later._rows

    def _mark_column(self, values: Mapping[int, int]) -> Floats:
        column = np.full(self._rows, np.nan)
        column[np.fromiter(values, np.int64)] = np.fromiter(values.values(), np.float64)
        return column

    def _add(self, records: Sequence[Record], chunks: ChunkLists) -> None:
        for row, record in enumerate(records, self._rows):
            if record.marks:
                for name, value in record.marks.items():
                    self._marks.setdefault(name, {})[row] = value
            if record.role or record.parents:
                self._graphs.add(row, record)
        self._rows += len(records)
        groups = RecordGroups(records)
        columns = _columns_of(records, chunks, groups)
        columns["outcome_index"] = self._count_outcomes(groups, columns["id"])
        for name, values in columns.items():
            self._columns.setdefault(name, GrowingArray(values.dtype)).extend(values)
        self._models.extend(groups, [fields.model for fields in groups.fields])
        self._replicas.extend(groups, [fields.replica for fields in groups.fields])
        for fields, count in zip(groups.fields, groups.counts, strict=True):
            self._sources[CountSource(fields.measured, fields.state, fields.counted_by, fields.stamps)] += count
            if fields.output_error and fields.measured and fields.state == "complete":
                known = fields.output_error in self._output_errors or len(self._output_errors) < MAX_DETAILS
                self._output_errors[fields.output_error if known else OTHER_DETAIL] += count

    def _count_outcomes(self, groups: RecordGroups, ids: Integers) -> NDArray[np.uint16]:
        """Add the outcomes of these Records to `_outcomes`, and return the index of each Record's outcome."""
        indices = []
        for fields, count, first_id in zip(groups.fields, groups.counts, groups.first_ids(ids), strict=True):
            kind = "" if fields.state == "complete" else fields.error_kind or fields.state
            detail = fields.error_detail if kind else ""
            outcome = Outcome(fields.measured, fields.state, kind, detail, fields.http_status)
            if outcome not in self._outcomes and len(self._outcomes) >= MAX_DETAILS:
                outcome = outcome._replace(detail=OTHER_DETAIL)
            count_before, first_id_before = self._outcomes.get(outcome, (0, first_id))
            self._outcomes[outcome] = OutcomeCount(count_before + count, first_id_before)
            indices.append(self._indices.setdefault(outcome, len(self._indices)))
        return groups.spread(np.array(indices, np.uint16))


def _columns_of(records: Sequence[Record], chunks: ChunkLists, groups: RecordGroups) -> dict[str, NDArray[Any]]:
    """Return the Frame columns of these Records, by column name.

    `chunks` are the chunks of the Records, and `groups` are their groups.
    """

    def column(name: str, kind: type = np.float64) -> NDArray[Any]:
        values = [*map(attrgetter(name), records)]
        if values and values.count(values[0]) == len(values):  # Often all values are equal, which takes less time.
            return constant_array(np.nan if values[0] is None else values[0], kind, len(values))
        try:  # Converting through integers takes a fifth of the time.
            return np.array(values, np.int64).astype(kind) if kind is np.float64 else np.array(values, kind)
        except TypeError:  # A value is None, which becomes NaN.
            return np.array(values, kind)

    counts, instants = chunks.counts, chunks.instants
    offsets = offsets_of(counts)
    end_ns, complete = column("end_ns"), groups.column(lambda fields: fields.state == "complete", np.bool_)
    output_asked, prompt_asked = column("output_tokens_asked"), column("prompt_tokens_asked")
    output_tokens = column("output_tokens")
    sent_ns, first_sent_ns = column("sent_ns"), column("first_sent_ns")
    sent_again = map_values(lambda values: ~np.isnan(values), first_sent_ns)
    without_tokens = (counts == 0) & (output_asked == 0) & complete
    last_ns = np.where(without_tokens, end_ns, _at_chunk(instants, offsets[1:] - 1, counts))
    return {
        "chunk_counts": counts,
        "steps": chunk_steps(instants, offsets),
        **_tokens_of(records, chunks, groups, output_tokens),
        "measured": groups.column(lambda fields: fields.measured, np.bool_),
        "complete": complete,
        "dropped": groups.column(lambda fields: fields.state == "dropped", np.bool_),
        "end_ns": np.where(np.isnan(end_ns), last_ns, end_ns),
        "first_ns": _at_chunk(instants, offsets[:-1], counts),
        "last_ns": last_ns,
        "prompt_asked": map_values(lambda values: np.where(values == 0, np.nan, values), prompt_asked),
        "prompt_reported": column("prompt_tokens"),
        "output_asked": output_asked,
        # The number of chunks is not the length of a response.
        "output_reported": np.where(
            groups.column(lambda fields: fields.counted_by == "chunks", np.bool_), np.nan, output_tokens
        ),
        "first_token_merged": groups.column(lambda fields: fields.first_token_merged, np.bool_),
        "worker": groups.column(lambda fields: fields.worker, np.int64),
        "turn": groups.column(lambda fields: fields.turn, np.int64),
        "reopened": groups.column(lambda fields: fields.reopened, np.int64),
        "sent_ns": sent_ns,
        "first_sent_ns": np.where(sent_again, first_sent_ns, sent_ns),
        "sent_again": sent_again,
        **{name: column(name) for name in FLOATS},
        **{name: column(name, np.int64) for name in NUMBERS},
    }


def _tokens_of(
    records: Sequence[Record], chunks: ChunkLists, groups: RecordGroups, output_tokens: Floats
) -> dict[str, NDArray[Any]]:
    """Return the Frame columns with token counts for these Records, by column name.

    `output_tokens` contains the output length that the server reported for each Record, or NaN.

    In nearly all Records, the token counts of the chunks add up to the output length that the server reported. Such
    rows get the counts unchanged. Only the other rows are examined one by one.
    """
    counts, tokens = chunks.counts, chunks.tokens
    offsets = offsets_of(counts)
    constant = is_constant(tokens)
    recorded = counts * float(tokens[0]) if constant else sum_by_row(tokens, offsets)
    first = _at_chunk(tokens, offsets[:-1], counts)
    arrived, in_stream = recorded.copy(), recorded.copy()
    unstreamed = np.zeros(len(records))
    by_chunks = groups.column(lambda fields: fields.chunk_counts == "chunk" or fields.counted_by == "chunks", np.bool_)
    by_server = groups.column(lambda fields: fields.counted_by == "server", np.bool_)
    # `streamed_tokens` must compute the tokens of these responses, even if the token counts of the chunks add up to the
    # output length: the server generated hidden tokens, which may be included in these counts, or it reported an output
    # length of 0 although it streamed tokens.
    special = groups.column(lambda fields: bool(fields.hidden_tokens) or fields.refuted_total is not None, np.bool_)
    basis = np.where(by_chunks, BASES.index("chunks"), BASES.index("counted")).astype(np.uint8)
    contradicted = ~(output_tokens == recorded) & ~np.isnan(output_tokens)
    different = (counts > 0) & (special | (by_server & contradicted))
    if different.any():
        tokens, constant = tokens.astype(np.uint32), False
    for row in np.flatnonzero(different).tolist():
        record = records[row]
        result = streamed_tokens(record.expanded() if isinstance(record, CompactRecord) else record)
        tokens[offsets[row] : offsets[row + 1]] = result.counts
        first[row] = result.first
        in_stream[row] = result.tokens
        unstreamed[row] = result.hidden
        arrived[row] = sum(result.counts)
        basis[row] = BASES.index(result.basis)
    return {
        "chunk_tokens": tokens if constant else tokens.astype(np.min_scalar_type(int(tokens.max(initial=0)))),
        "first_tokens": first,
        "arrived_tokens": arrived,
        "streamed_tokens": in_stream,
        "unstreamed_tokens": unstreamed,
        "recorded_tokens": recorded,
        "basis": basis,
    }


def _at_chunk(values: NDArray[np.integer], positions: Integers, counts: Integers) -> Floats:
    """Return `values[positions[i]]` for each row i with chunks, and NaN for each row without chunks."""
    result = np.full(len(counts), np.nan)
    filled = counts > 0
    result[filled] = values[positions[filled]]
    return result
