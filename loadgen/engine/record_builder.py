"""From what was read to what is kept: an ended Exchange becomes a Record."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, compress, islice, pairwise
from operator import sub
from typing import NamedTuple

from loadgen.analysis.run.record import NoneOrKind, Record, State, record_for
from loadgen.engine.client_health import Health
from loadgen.engine.clock import ClockPairs
from loadgen.servers import marks
from loadgen.servers.auth import hide_secrets
from loadgen.servers.backends.dialect import Answer, Dialect, round_up_to_pieces
from loadgen.servers.backends.error_messages import error_text, is_rejection, one_line
from loadgen.servers.errors import decompress
from loadgen.servers.wire.http1 import ProtocolError, ResponseFraming, join_pieces
from loadgen.servers.wire.sse import is_event_stream, payloads_of_chunks, split_events
from loadgen.servers.wire.stamp_check import checked_instants
from loadgen.servers.wire.timestamps import Instants, SocketTimestamps, TimestampSource
from loadgen.servers.wire.transport import Exchange
from loadgen.workloads.request import Request

COMPRESSED = "the answer is compressed ({}), which hides when its tokens came: turn that off in the server or its proxy"
ERROR_LIMIT_BYTES = 1 << 20
HEAD_LIMIT_BYTES = 1 << 16
"""The head of a response is looked for in this many bytes."""
FULL_WINDOW_BYTES = 65_536
"""A read this large found a full receive window, as Linux offers it on a new connection."""
FEW_EVENTS = 4
_USUAL_EVENT = re.compile(rb"data: ?([^\r\n]+)\r?\n\r?\n")
_OK = (b"HTTP/1.1 200", b"HTTP/1.0 200")


class _Came(NamedTuple):
    """What an exchange received, without its framing, and the Record that it is for."""

    exchange: Exchange
    request: Request
    record: Record
    bounds: array[int]
    coding: str
    payloads: Sequence[bytes] | None  # None: nothing of it can be an answer
    ends: Sequence[int]  # Where in all that came each of the payloads ended


def build_records(
    several: Sequence[tuple[Exchange, Request]],
    dialect: Dialect,
    clocks: ClockPairs,
    start_ns: int,
    health: Health,
    stamps: TimestampSource = SocketTimestamps(),  # noqa: B008 - holds nothing; stamps that are there are used
) -> list[Record]:
    """Decode what these exchanges received, with the timestamps of `stamps`, or of its fallback where those cannot be
    right. Never raises on what a server sent. Each step runs over all exchanges: its code stays in the CPU cache."""
    every = [_came(exchange, request, dialect, start_ns) for exchange, request in several]
    received = [each for each in every if each.exchange.sizes]
    if health.wants_mark:
        _look_for_mark(received, health)
    exchanges = [(each.exchange, array("q", (1, *each.ends))) for each in received]
    stamped = checked_instants(stamps, exchanges, clocks.to_monotonic)
    answers = [None if each.payloads is None else dialect.decode(each.payloads) for each in received]
    for each, answer, (arrivals, instants) in zip(received, answers, stamped, strict=True):
        exchange, record = each.exchange, each.record
        late = [*map(sub, exchange.user_ns, arrivals)]
        if min(late) < 0:  # two clocks never agree to the last nanosecond
            late = [max(0, late_ns) for late_ns in late]
        record.late_ns_max = max(late)
        first_token_read = _finish(each, answer, instants, dialect, start_ns)
        full = exchange.full_windows or _full_reads(exchange.sizes, first_token_read)
        health.add(late, record.coalesced_reads, full, exchange.window_checks, *exchange.losses)
    return [each.record for each in every]


def first_token_end(raw: bytes, dialect: Dialect) -> int | None:
    """Return the offset just past the first event that holds a token, in the beginning of a response; None where there
    is none. Never raises on what a server sent.

    The token is nearly always in one of the first events, and their lines are whole. Only these are decoded then, which
    takes 10 us; a response that is written in another way takes 100 us."""
    first = [*islice(_USUAL_EVENT.finditer(raw), FEW_EVENTS)]
    answer = dialect.decode([event[1] for event in first])
    index = next((index for index, count in enumerate(answer.tokens) if count), None)
    if index is not None and raw.startswith(_OK):
        return first[index].end()
    if 0 < len(first) < FEW_EVENTS and not answer.error_kind:
        return None
    return _first_token_anywhere(raw, dialect)


def _first_token_anywhere(raw: bytes, dialect: Dialect) -> int | None:
    framing = ResponseFraming()
    try:
        framing.scan(raw)
        bounds = framing.body_bounds(raw)
    except ProtocolError:
        return None
    if framing.status != 200 or not dialect.streams:
        return None
    payloads, ends, _ = split_events(join_pieces(raw, bounds))
    tokens = dialect.decode(payloads).tokens
    index = next((index for index, count in enumerate(tokens) if count), None)
    return None if index is None else raw_offsets(ends, bounds)[index]


def _came(exchange: Exchange, request: Request, dialect: Dialect, start_ns: int) -> _Came:
    record = record_for(
        request,
        "truncated" if exchange.error_kind == "truncated" else "failed",
        sent_ns=_since(start_ns, exchange.sent_ns),
        sent_end_ns=_since(start_ns, exchange.sent_end_ns),
        end_ns=_since(start_ns, exchange.ended_at_ns),
        error_kind=exchange.error_kind,
        error_detail=exchange.error_detail,
        http_status=exchange.framing.status,
        reads=len(exchange.sizes),
    )
    if not exchange.sizes:
        return _Came(exchange, request, record, array("q"), "", None, ())
    bounds, coding = _bounds(exchange, record), exchange.framing.coding
    answer = exchange.framing.status == 200 and not coding
    events = _events(exchange, bounds, dialect) if answer else (None, ())
    return _Came(exchange, request, record, bounds, coding, *events)


def _look_for_mark(came: Sequence[_Came], health: Health) -> None:
    """Look into the first of these responses for the mark of a simulated server.

    One response per health sample is enough, and costs nothing per token. Errors may come from a gateway, so they do
    not end the search.
    """
    for each in came:
        head = bytes(each.exchange.raw[:HEAD_LIMIT_BYTES]).partition(b"\r\n\r\n")[0]
        payloads = each.payloads or ()
        result = (marks.in_payload(payload) for payload in (*payloads[:2], *payloads[-2:]))
        health.mark = health.mark or marks.in_head(head) or next(filter(None, result), None)
        if payloads or health.mark:
            health.wants_mark = False
            return


def _finish(came: _Came, answer: Answer | None, stamped: Instants, dialect: Dialect, start_ns: int) -> int:
    """Complete the Record. Which read brought the first token; how many there were where none did."""
    exchange, record, (instants, by) = came.exchange, came.record, stamped
    first_token_read = len(exchange.sizes)
    record.first_byte_ns, record.stamps = instants.pop(0) - start_ns, by.name
    if answer is not None and came.payloads is not None:
        if answer.error_detail:  # the server's words: a secret in them goes before they are cut
            answer = dialect.decode([*map(hide_secrets, came.payloads)])
        sizes, token_places = exchange.sizes, [*compress(came.ends, answer.tokens)]
        first_token_read = bisect_left(sizes, token_places[0] if token_places else sizes[-1] + 1)
        _fill(record, answer, instants, start_ns)
        if by.by_read:  # else every event has a stamp of its own, however many came in one read
            _note_merged(record, [bisect_left(sizes, index) for index in token_places])
        if not came.payloads:
            _note_other_body(came, answer, dialect)
        exact = dialect.fixed_output and came.request.ignore_eos
        verdict = _verdict(record, answer, exact=exact, piece_tokens=dialect.piece_tokens)
        record.state, record.error_kind, record.error_detail = verdict
    elif exchange.framing.status == 200:
        record.state, record.error_kind, record.error_detail = "failed", "protocol", COMPRESSED.format(came.coding)
    elif exchange.framing.status is not None:
        record.state, record.error_kind = "failed", "http_status"
        said = decompress(join_pieces(exchange.raw, came.bounds), came.coding, ERROR_LIMIT_BYTES)
        record.error_detail = error_text(exchange.framing.status, hide_secrets(said))
        if is_rejection(exchange.framing.status, said):
            record.state, record.error_kind = "rejected", "rejected"
    if record.state == "rejected" and (wait := hide_secrets(exchange.framing.retry_after)):
        record.error_detail = one_line(f"{record.error_detail}; {_retry_words(wait)}")
    if record.error_detail or record.finish_reason not in ("", "length", "stop"):  # 40 us, which most need not pay
        record.error_detail, record.finish_reason = (
            hide_secrets(record.error_detail),
            hide_secrets(record.finish_reason),
        )
    return first_token_read


def _note_other_body(came: _Came, answer: Answer, dialect: Dialect) -> None:
    """If a response with status 200 holds something else than an event stream, quote it in the answer."""
    body = join_pieces(came.exchange.raw, came.bounds)
    if answer.error_kind or not body.strip() or (dialect.streams and is_event_stream(body)):
        return
    answer.error_kind = "protocol"
    answer.error_detail = f"a 200 that is not an event stream: {error_text(200, hide_secrets(body))}"


def _since(start_ns: int, instant: int | None) -> int | None:
    return None if instant is None else instant - start_ns


def _full_reads(sizes: Sequence[int], first: int) -> int:
    """Count the reads that found a full receive window, or nearly. Reads before the one with the `first` token do not
    count: they delayed no token, but brought one long event, such as an echo of the prompt."""
    if sizes[-1] < FULL_WINDOW_BYTES:
        return 0
    return sum(after - before >= FULL_WINDOW_BYTES for before, after in islice(pairwise((0, *sizes)), first, None))


def _bounds(exchange: Exchange, record: Record) -> array[int]:
    try:
        return exchange.framing.body_bounds(exchange.raw)
    except ProtocolError as error:
        record.error_kind, record.error_detail = "protocol", str(error)
        return exchange.framing.bounds


def _events(exchange: Exchange, bounds: array[int], dialect: Dialect) -> tuple[Sequence[bytes], Sequence[int]]:
    """Return the payload of each event, and where in the buffer it ends."""
    raw = exchange.raw
    known = dialect.streams and exchange.framing.events and exchange.framing.ended
    if known and (payloads := payloads_of_chunks(raw, bounds)) is not None:
        return payloads, bounds[1::2]
    body = join_pieces(raw, bounds)
    if dialect.streams:
        payloads, ends, _ = split_events(body, closed=exchange.framing.ended)
    else:
        payloads = [body] if exchange.framing.ended and body else []
        ends = [*map(len, payloads)]
    return payloads, raw_offsets(ends, bounds)


def _note_merged(record: Record, reads: Sequence[int]) -> None:
    """`reads` brought the chunks."""
    record.coalesced_reads = len({read for read, following in pairwise(reads) if read == following})
    record.first_token_merged = len(reads) > 1 and reads[0] == reads[1]


def _fill(record: Record, answer: Answer, instants: Sequence[int], start_ns: int) -> None:
    """What the answer says, with the instant of each of its events."""
    record.chunk_ns = [instant - start_ns for instant in compress(instants, answer.tokens)]
    record.chunk_tokens = [*filter(None, answer.tokens)]
    record.finish_reason = answer.finish_reason
    record.prompt_tokens, record.output_tokens = answer.prompt_tokens, answer.output_tokens
    record.counted_by, record.refuted_total = answer.counted_by, answer.refuted_total
    record.chunk_counts, record.hidden_tokens = answer.chunk_counts, answer.hidden_tokens
    record.text_bytes, record.phrase_chunks = answer.text_bytes, answer.phrase_chunks
    if answer.end_event is not None:
        record.end_ns = instants[answer.end_event] - start_ns


def raw_offsets(ends: Sequence[int], bounds: array[int]) -> list[int]:
    """Where each event ends in the buffer: `ends` count in the body, whose pieces in the buffer have these bounds."""
    stops = bounds[1::2]
    passed = [*accumulate(stop - start for start, stop in zip(bounds[::2], stops, strict=True))]
    at_stop = dict(zip(passed, stops, strict=True))  # where most events end
    for end in [end for end in ends if end not in at_stop]:
        piece = bisect_left(passed, end)
        at_stop[end] = stops[piece] - passed[piece] + end
    return [at_stop[end] for end in ends]


def _verdict(record: Record, answer: Answer, *, exact: bool, piece_tokens: int) -> tuple[State, NoneOrKind, str]:
    """State, error kind and detail. Complete needs the end marker, no in-band error and, where the server was held to
    it (`exact`), the length asked for. A server that generates in pieces ends with a whole piece."""
    if answer.error_kind == "rejected":
        if not record.chunk_ns:
            return "rejected", "rejected", answer.error_detail
        return "failed", "in_band_error", answer.error_detail  # a request with tokens was taken, and failed later
    if answer.error_kind:
        return "failed", answer.error_kind, answer.error_detail
    if record.error_kind == "protocol":
        return "failed", record.error_kind, record.error_detail
    if answer.end_event is None:
        kind: NoneOrKind = record.error_kind or "truncated"
        detail = record.error_detail or "the answer ended"
        state: State = "truncated" if kind == "truncated" else "failed"
        received = (
            "after tokens had come" if record.chunk_ns else "before any token"
        )  # no number: like failures are one
        return state, kind, f"{detail}, {received} and without the end marker"
    return _length_verdict(record, exact=exact, piece_tokens=piece_tokens)


def _retry_words(wait: str) -> str:
    """Return the value of a Retry-After header as words: a number of seconds, or a date."""
    return f"retry after {wait} s" if wait.isdecimal() else f"retry after {one_line(wait, 40)}"


def _length_verdict(record: Record, *, exact: bool, piece_tokens: int) -> tuple[State, NoneOrKind, str]:
    requested, got, reason = record.output_tokens_asked, record.output_tokens or 0, record.finish_reason
    if not requested:  # embeddings, scores
        return "complete", "", ""
    if not record.chunk_ns and got:
        return "truncated", "truncated", f"no token was streamed, although the server counted {got}"
    if not record.chunk_ns:
        return "truncated", "truncated", "the answer ended without a token"
    length = f"asked for {requested} output tokens, got {got}" + (f" ({reason})" if reason else "")
    if got > round_up_to_pieces(requested, piece_tokens) and record.counted_by != "chunks":
        return "failed", "wrong_length", length
    early = reason not in ("", "length") if record.counted_by == "chunks" else got < requested
    if not got or reason == "content_filter" or (early and exact):
        allowed = "" if reason in ("", "length", "content_filter") else "; --output-tokens max:N allows that"
        return "truncated", "truncated", f"{length}{allowed}"
    return "complete", "", ""
