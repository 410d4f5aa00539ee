"""Turns an Exchange that has ended into a Record: decodes the response and timestamps its events."""

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
from loadgen.servers.backends.output_check import check_output
from loadgen.servers.errors import decompress
from loadgen.servers.gateways import gateways_in_head
from loadgen.servers.replica_identity import replica_name
from loadgen.servers.server_timing import times_in_response
from loadgen.servers.wire.http1 import ProtocolError, ResponseFraming, join_pieces
from loadgen.servers.wire.sse import is_event_stream, payloads_of_chunks, split_events
from loadgen.servers.wire.stamp_check import LIMIT_NS, checked_instants
from loadgen.servers.wire.timestamps import Instants, SocketTimestamps, TimestampSource, kernel_stamps
from loadgen.servers.wire.transport import Exchange
from loadgen.workloads.request import Request

COMPRESSED = "the response is compressed ({}), which hides when its tokens came: turn it off in the server or proxy"
EARLY = "the server sent a response before the request"
EARLY_NS = 20_000_000
"""Uncertainty of the age of the last data in ns (Exchange.last_data_age_ms): twice the slowest timer of a kernel."""
ERROR_LIMIT_BYTES = 1 << 20
HEAD_LIMIT_BYTES = 1 << 16
"""Number of bytes at the beginning of a response that are searched for its head."""
FULL_WINDOW_BYTES = 65_536
"""Minimum size in bytes of a read that counts as having found a full receive window. Linux offers this much on a new
connection."""
FEW_EVENTS = 4
"""Number of events at the beginning of a response that are searched first for the first token."""
_USUAL_EVENT = re.compile(rb"data: ?([^\r\n]+)\r?\n\r?\n")
_OK = (b"HTTP/1.1 200", b"HTTP/1.0 200")


class _Response(NamedTuple):
    """A received response without its HTTP framing, and the Record that is built from it."""

    exchange: Exchange
    request: Request
    record: Record
    dialect: Dialect
    bounds: array[int]  # start and end of each piece of the body
    coding: str
    payloads: Sequence[bytes] | None  # payload of each event; None if the response cannot hold an answer
    ends: Sequence[int]  # offset in the received bytes at which each payload ended


def build_records(
    exchanges: Sequence[tuple[Exchange, Request]],
    dialect: Dialect,
    clocks: ClockPairs,
    start_ns: int,
    health: Health,
    stamps: TimestampSource = SocketTimestamps(),  # noqa: B008 - it has no state that matters here
    *,
    replica_header: str = "",
    server_timing: bool = False,
) -> list[Record]:
    """Decode the responses of `exchanges`, and return one Record for each Exchange (a request with its response).

    - `dialect` is the response format, except for an Exchange that has its own dialect.
    - `start_ns` is the start of the run.
    - `stamps` is the source of timestamps. If the timestamps of a response are impossible, for example not in order,
      `stamps.fallback` is used for this response instead.
    - `replica_header` is the lower-case name of the response header that names the replica. A response without this
      header gets the address of its connection as the name of its replica, if the server has several addresses.
    - If `server_timing` is True, complete Records get the times that the server states about the request
      (loadgen.servers.server_timing).

    A malformed response does not raise an error. Each decoding step is applied to all responses before the next step
    begins, which keeps the code of the step in the CPU cache.
    """
    responses = [
        _read_response(exchange, request, exchange.dialect or dialect, start_ns) for exchange, request in exchanges
    ]
    received = [response for response in responses if response.exchange.sizes]
    for response in received:
        if _came_early(response.exchange, clocks):
            response.record.state = "failed"
            response.record.error_kind = "protocol"
            response.record.error_detail = EARLY
    if health.wants_mark:
        _look_for_mark(received, health)

    # Timestamp the first byte (offset 1) and the end of each event.
    offsets = [(response.exchange, array("q", (1, *response.ends))) for response in received]
    stamped = checked_instants(stamps, offsets, clocks.to_monotonic)

    answers = [
        None if response.payloads is None else response.dialect.decode(response.payloads) for response in received
    ]
    for response, answer, (arrivals, instants) in zip(received, answers, stamped, strict=True):
        exchange = response.exchange
        record = response.record
        late = [*map(sub, exchange.user_ns, arrivals)]
        if min(late) < 0:  # two clocks never agree to the last nanosecond
            late = [max(0, late_ns) for late_ns in late]
        record.late_ns_max = max(late)
        first_token_read = _complete(response, answer, instants, start_ns)
        if record.state == "complete":
            _check_output(response, response.dialect)
            if server_timing:
                _note_server_times(response, health)
        full_reads = exchange.full_windows or _full_reads(exchange.sizes, first_token_read)
        record.replica = _replica(exchange, replica_header)
        health.add(late, record.coalesced_reads, full_reads, exchange.window_checks, *exchange.losses)
    return [response.record for response in responses]


def _came_early(exchange: Exchange, clocks: ClockPairs) -> bool:
    """Return True if the whole response arrived before the request was sent, and so cannot answer this request.

    The function compares two durations at the end of the exchange: the age of the last received data, as the kernel
    reports it, and the time since the request was sent.

    - If the age is longer by more than EARLY_NS, the response came early.
    - If the age is shorter by more than EARLY_NS, it did not.
    - In between, the kernel's timestamp of the last data decides. It is used only in this case, because a step of the
      wall clock makes it wrong.
    """
    if exchange.sent_ns is None or exchange.ended_at_ns is None:
        return False
    age_ns, since_sent_ns = exchange.last_data_age_ms * 1_000_000, exchange.ended_at_ns - exchange.sent_ns
    if age_ns > since_sent_ns + EARLY_NS:
        return True
    if age_ns + EARLY_NS < since_sent_ns:  # nearly always
        return False
    stamps = kernel_stamps(exchange)
    return stamps is not None and clocks.to_monotonic(stamps[-1:])[0] < exchange.sent_ns - LIMIT_NS


def first_token_end(raw: bytes, dialect: Dialect) -> int | None:
    """Return the offset just past the first event with a token, or None if no event contains a token.

    `raw` is the beginning of a response. A malformed response does not raise an error.

    Decoding the first FEW_EVENTS (4) events takes 10 us and is usually enough. If these events contain no token, or if
    the response is unusual, all of `raw` is decoded, which takes 100 us.
    """
    first = [*islice(_USUAL_EVENT.finditer(raw), FEW_EVENTS)]
    answer = dialect.decode([event[1] for event in first])
    index = next((index for index, count in enumerate(answer.tokens) if count), None)
    if index is not None and raw.startswith(_OK):
        return first[index].end()
    if 0 < len(first) < FEW_EVENTS and not answer.error_kind:
        return None
    return _first_token_anywhere(raw, dialect)


def _first_token_anywhere(raw: bytes, dialect: Dialect) -> int | None:
    """Return the offset just past the first event with a token, or None if no event contains a token.

    Unlike `first_token_end`, this function decodes all of `raw`.
    """
    tokens, ends = _events_so_far(raw, dialect)
    return next((end for count, end in zip(tokens, ends, strict=False) if count), None)


def tokens_so_far(raw: bytes, dialect: Dialect) -> tuple[int, int]:
    """Return two numbers for the beginning of a response (`raw`).

    The first is the number of tokens in its complete events. The second is the offset just past the last of these
    events. A malformed response does not raise an error.
    """
    tokens, ends = _events_so_far(raw, dialect)
    return sum(tokens), ends[-1] if ends else 0


def _events_so_far(raw: bytes, dialect: Dialect) -> tuple[Sequence[int], Sequence[int]]:
    """Return two lists about the complete events in `raw`, the beginning of a response.

    The first list contains the number of tokens in each event. The second list contains the offset in `raw` just past
    each event. Both lists are empty for a response that is malformed, failed or not streamed.
    """
    framing = ResponseFraming()
    try:
        framing.scan(raw)
        bounds = framing.body_bounds(raw)
    except ProtocolError:
        return (), ()
    if framing.status != 200 or not dialect.streams:
        return (), ()
    payloads, ends, _ = split_events(join_pieces(raw, bounds))
    return dialect.decode(payloads).tokens, raw_offsets(ends, bounds)


def _read_response(exchange: Exchange, request: Request, dialect: Dialect, start_ns: int) -> _Response:
    """Return the events of a response together with its Record.

    Times in the Record are in ns after `start_ns`, the start of the run.
    """
    record = record_for(
        request,
        _state_of(exchange.error_kind),
        sent_ns=_since(start_ns, exchange.sent_ns),
        sent_end_ns=_since(start_ns, exchange.sent_end_ns),
        end_ns=_since(start_ns, exchange.ended_at_ns),
        error_kind=exchange.error_kind,
        error_detail=exchange.error_detail,
        http_status=exchange.framing.status,
        reads=len(exchange.sizes),
        min_rtt_us=exchange.min_rtt_us,
    )
    if not exchange.sizes:
        return _Response(exchange, request, record, dialect, array("q"), "", None, ())
    bounds = _bounds(exchange, record)
    coding = exchange.framing.coding
    may_answer = exchange.framing.status == 200 and not coding
    payloads, ends = _events(exchange, bounds, dialect) if may_answer else (None, ())
    return _Response(exchange, request, record, dialect, bounds, coding, payloads, ends)


def _look_for_mark(responses: Sequence[_Response], health: Health) -> None:
    """Search responses for the mark of a simulated server, and for the names of gateways. Store both in `health`.

    The mark is a field or header that identifies a simulated server. The search ends at the first response that
    contains the mark or an event, because such a response comes from the server itself, and one response is enough. A
    response without events, such as an HTTP error, may come from a gateway, so the search continues after it.
    """
    for response in responses:
        head = bytes(response.exchange.raw[:HEAD_LIMIT_BYTES]).partition(b"\r\n\r\n")[0]
        health.gateways |= gateways_in_head(head)
        payloads = response.payloads or ()
        results = (marks.in_payload(payload) for payload in (*payloads[:2], *payloads[-2:]))
        health.mark = health.mark or marks.in_head(head) or next(filter(None, results), None)
        if payloads or health.mark:
            health.wants_mark = False
            return


def _complete(response: _Response, answer: Answer | None, stamped: Instants, start_ns: int) -> int:
    """Complete the Record of a response. Return the index of the socket read that contained the first token.

    If there was no token, return the number of reads.

    - `answer` is the decoded response, or None if the response cannot contain an answer, for example because of its
      HTTP status.
    - `stamped` contains the times of the first byte and of each event, and the source of these times.
    - `start_ns` is the start of the run (CLOCK_MONOTONIC).
    """
    exchange = response.exchange
    record = response.record
    dialect = response.dialect
    instants, source = stamped
    first_token_read = len(exchange.sizes)
    record.first_byte_ns = instants.pop(0) - start_ns
    record.stamps = source.name
    if answer is not None and response.payloads is not None:
        if answer.error_detail:  # text of the server: remove secrets from it before it is shortened
            answer = dialect.decode([*map(hide_secrets, response.payloads)])
        _note_prompt_tokens(answer, response, dialect)
        dialect.complete(answer, response.request)
        sizes = exchange.sizes
        token_ends = [*compress(response.ends, answer.tokens)]
        first_token_read = bisect_left(sizes, token_ends[0] if token_ends else sizes[-1] + 1)
        _fill(record, answer, instants, start_ns)
        if source.by_read:  # otherwise every event has its own timestamp, even if one read brought several
            _note_merged(record, [bisect_left(sizes, end) for end in token_ends])
        if not response.payloads:
            _note_other_body(response, answer, dialect)
        exact = dialect.fixed_output and response.request.ignore_eos
        verdict = _verdict(record, answer, exact=exact, piece_tokens=dialect.piece_tokens)
        record.state, record.error_kind, record.error_detail = verdict
    elif exchange.framing.status == 200:
        record.state = "failed"
        record.error_kind = "protocol"
        record.error_detail = COMPRESSED.format(response.coding)
    elif exchange.framing.status is not None:
        _note_http_error(response, exchange.framing.status)
    if record.state == "rejected":
        wait = hide_secrets(exchange.framing.retry_after)
        if wait:
            record.error_detail = one_line(f"{record.error_detail}; {_retry_words(wait)}")
    if record.error_detail or record.finish_reason not in ("", "length", "stop"):  # takes 40 us, and is seldom needed
        record.error_detail = hide_secrets(record.error_detail)
        record.finish_reason = hide_secrets(record.finish_reason)
    return first_token_read


def _replica(exchange: Exchange, replica_header: str) -> str:
    """Return the name of the replica that sent a response, or "" if it is unknown.

    `replica_header` is the response header that names the replica.
    """
    return (replica_name(exchange.framing.header(replica_header)) if replica_header else "") or exchange.address


def _check_output(response: _Response, dialect: Dialect) -> None:
    """Compare a complete response with the output that its request expects: a text, tool calls or valid JSON."""
    request, record = response.request, response.record
    expected = request.expected
    if request.expect and response.payloads:
        record.marks = record.marks | {"expected_text": int(request.expect in dialect.text(response.payloads))}
    if expected is None or not response.payloads:
        return
    calls = dialect.calls(response.payloads) if expected.tools else ()
    text = dialect.text(response.payloads) if expected.schema is not None else ""
    verdict, reason = check_output(expected, text, calls, cut=record.finish_reason == "length")
    mark = {"unchecked": {"unchecked_output": 1}, "no_call": {"uncalled_output": 1}}
    record.marks = record.marks | mark.get(verdict, {"valid_output": int(verdict == "valid")})
    record.output_error = hide_secrets(reason)


def _note_server_times(response: _Response, health: Health) -> None:
    """Store the times that the server states in a complete response, in the `marks` of the response's Record.

    For example, a header `Server-Timing` may state how long the request was queued. `health` collects two more things:
    where these times were found, and which of their names loadgen does not know.
    """
    exchange = response.exchange
    trailer = bytes(exchange.raw[response.bounds[-1] :]) if exchange.framing.chunked and response.bounds else b""
    times = times_in_response(exchange.framing.head, response.payloads or (), trailer)
    response.record.marks = response.record.marks | times.marks
    health.timing_sources |= times.sources
    health.add_unknown_timing_names(map(hide_secrets, times.unknown_names))


def _note_http_error(response: _Response, status: int) -> None:
    """Store in the Record that the server answered with the HTTP status `status`, which is not 200.

    The error detail contains the server's message, or the target of a redirect. The request counts as rejected or
    failed, depending on the status and the message.
    """
    record = response.record
    location = hide_secrets(response.exchange.framing.location)
    body = decompress(join_pieces(response.exchange.raw, response.bounds), response.coding, ERROR_LIMIT_BYTES)
    record.error_detail = f"a redirect to {one_line(location)}" if location else error_text(status, hide_secrets(body))
    if is_rejection(status, body):
        record.state, record.error_kind = "rejected", "rejected"
    else:
        record.state, record.error_kind = "failed", "http_status"


def _note_other_body(response: _Response, answer: Answer, dialect: Dialect) -> None:
    """If a response with status 200 is not an event stream, store the beginning of its body as the answer's error."""
    body = join_pieces(response.exchange.raw, response.bounds)
    if answer.error_kind or not body.strip() or (dialect.streams and is_event_stream(body)):
        return
    takes_json = dialect.may_be_whole or not dialect.streams
    if takes_json and not response.exchange.framing.ended and body.lstrip()[:1] in (b"{", b"["):
        return  # the beginning of a response that was cut off
    answer.error_kind = "protocol"
    answer.error_detail = f"a 200 that is not an event stream: {error_text(200, hide_secrets(body))}"


def _note_prompt_tokens(answer: Answer, response: _Response, dialect: Dialect) -> None:
    """Store in `answer` the number of prompt tokens that a header of the response states.

    The dialect names this header. Nothing is stored if it names none or the response has no such header.
    """
    name = dialect.prompt_tokens_header
    if not name or not response.bounds:
        return
    head = bytes(response.exchange.raw[: min(response.bounds[0], HEAD_LIMIT_BYTES)])
    counts = re.findall(rb"(?im)^%b:[ \t]*(\d{1,8})[ \t]*\r?$" % re.escape(name.encode()), head)
    if counts:
        answer.prompt_tokens = int(counts[-1])


def _since(start_ns: int, instant: int | None) -> int | None:
    """Return the time from the start of the run to `instant` in ns, or None if `instant` is None."""
    return None if instant is None else instant - start_ns


def _full_reads(sizes: Sequence[int], first_token_read: int) -> int:
    """Return the number of socket reads that found a full or nearly full TCP receive window.

    `sizes` contains the total number of bytes received up to each read. `first_token_read` is the index of the read
    that contained the first token. Earlier reads are not counted, because no token is delayed there. They may find a
    full window if a response begins with a long event, such as an echo of the prompt.
    """
    if sizes[-1] < FULL_WINDOW_BYTES:
        return 0
    reads = islice(pairwise((0, *sizes)), first_token_read, None)
    return sum(after - before >= FULL_WINDOW_BYTES for before, after in reads)


def _bounds(exchange: Exchange, record: Record) -> array[int]:
    """Return the start and end of each piece of a response's body, as offsets in the received bytes.

    Each HTTP chunk is a piece. A body without chunked transfer coding is a single piece. If the framing is malformed,
    the error is stored in `record`, and the pieces before the error are returned.
    """
    try:
        return exchange.framing.body_bounds(exchange.raw)
    except ProtocolError as error:
        record.error_kind, record.error_detail = "protocol", str(error)
        return exchange.framing.bounds


def _events(exchange: Exchange, bounds: array[int], dialect: Dialect) -> tuple[Sequence[bytes], Sequence[int]]:
    """Return two lists about the events of a response: their payloads, and their ends as offsets in the received bytes.

    `bounds` contains the start and the end of each piece of the body. A piece is, for example, an HTTP chunk.
    """
    raw = exchange.raw
    payloads: Sequence[bytes]
    ends: Sequence[int]
    if dialect.streams and exchange.framing.events and exchange.framing.ended and exchange.framing.chunked:
        # The usual case: each chunk is one event.
        chunk_payloads = payloads_of_chunks(raw, bounds)
        if chunk_payloads is not None:
            return chunk_payloads, bounds[1::2]
    body = join_pieces(raw, bounds)
    if dialect.split is not None:
        payloads = dialect.split(body, exchange.framing.ended and not exchange.framing.by_close)
        ends = [*accumulate(map(len, payloads))]
    elif dialect.streams and not (dialect.may_be_whole and body.startswith(b"{")):
        payloads, ends, _ = split_events(body, closed=exchange.framing.ended)
    else:
        payloads = [body] if exchange.framing.ended and body else []
        ends = [*map(len, payloads)]
    return payloads, raw_offsets(ends, bounds)


def _note_merged(record: Record, reads: Sequence[int]) -> None:
    """Store in the Record whether socket reads returned several chunks at once.

    The Record gets the number of such reads, and states whether one read returned the first two chunks. `reads`
    contains, for each chunk, the index of the read that returned its end.
    """
    record.coalesced_reads = len({read for read, following in pairwise(reads) if read == following})
    record.first_token_merged = len(reads) > 1 and reads[0] == reads[1]


def _fill(record: Record, answer: Answer, instants: Sequence[int], start_ns: int) -> None:
    """Copy the decoded response into the Record. `instants` holds the time of each event in ns (CLOCK_MONOTONIC)."""
    record.chunk_ns = [instant - start_ns for instant in compress(instants, answer.tokens)]
    record.chunk_tokens = [*filter(None, answer.tokens)]
    record.finish_reason = answer.finish_reason
    record.prompt_tokens = answer.prompt_tokens
    record.output_tokens = answer.output_tokens
    record.counted_by = answer.counted_by
    record.refuted_total = answer.refuted_total
    record.chunk_counts = answer.chunk_counts
    record.hidden_tokens = answer.hidden_tokens
    record.reasoning_reported = answer.reasoning_reported
    record.text_bytes = answer.text_bytes
    record.phrase_chunks = answer.phrase_chunks
    if answer.counts or answer.events:
        record.marks = answer.counts | {name: instants[event] - start_ns for name, event in answer.events.items()}
    if answer.end_event is not None:
        record.end_ns = instants[answer.end_event] - start_ns


def raw_offsets(ends: Sequence[int], bounds: array[int]) -> list[int]:
    """Convert offsets in the body of a response to offsets in the received bytes, which also contain HTTP framing.

    `ends` contains the offset in the body at which each event ends. `bounds` contains the start and end of each piece
    of the body in the received bytes. A piece is, for example, an HTTP chunk.
    """
    stops = bounds[1::2]
    passed = [*accumulate(stop - start for start, stop in zip(bounds[::2], stops, strict=True))]
    at_stop = dict(zip(passed, stops, strict=True))  # most events end where a piece ends
    for end in [end for end in ends if end not in at_stop]:
        piece = bisect_left(passed, end)
        at_stop[end] = stops[piece] - passed[piece] + end
    return [at_stop[end] for end in ends]


def _verdict(record: Record, answer: Answer, *, exact: bool, piece_tokens: int) -> tuple[State, NoneOrKind, str]:
    """Judge a response. Return its state, error kind and error detail.

    A complete response has the end marker of its format, contains no error, and has a permitted length. With `exact`,
    it must not be shorter than requested. A server that generates in pieces of `piece_tokens` may exceed the requested
    length to complete the last piece.
    """
    if answer.error_kind == "rejected":
        if not record.chunk_ns:
            return "rejected", "rejected", answer.error_detail
        return "failed", "in_band_error", answer.error_detail  # a request with tokens was accepted and failed later
    if answer.error_kind:
        return "failed", answer.error_kind, answer.error_detail
    if record.error_kind == "protocol":
        return "failed", record.error_kind, record.error_detail
    if answer.end_event is None:
        kind: NoneOrKind = record.error_kind or "truncated"
        detail = record.error_detail or "the response ended"
        state = _state_of(kind)
        # Without the number of tokens, so that failures of the same kind have the same text.
        received = "after tokens had come" if record.chunk_ns else "before any token"
        marker = "the end marker"
        if "audio_bytes" in record.marks:
            received = "after audio had come" if record.marks["audio_bytes"] else "before any audio"
            marker = "a proven end of the body"
        end = "" if state == "abandoned" else f" and without {marker}"
        return state, kind, f"{detail}, {received}{end}"
    return _length_verdict(record, exact=exact, piece_tokens=piece_tokens)


def _state_of(kind: NoneOrKind) -> State:
    """Return the state of a request whose response did not end properly. `kind` is the error kind of the request."""
    if kind == "abandoned":
        return "abandoned"
    return "truncated" if kind == "truncated" else "failed"


def _retry_words(wait: str) -> str:
    """Return words such as `retry after 5 s` for `wait`, the value of a Retry-After header.

    The value is a number of seconds or a date.
    """
    return f"retry after {wait} s" if wait.isdecimal() else f"retry after {one_line(wait, 40)}"


def _describe_length(record: Record) -> str:
    """Return the requested and the received number of output tokens as text, with the reason why the response ended."""
    requested, got, reason = record.output_tokens_asked, record.output_tokens or 0, record.finish_reason
    if reason == "content_filter":
        return f"the server's content filter ended the response ({reason}) after {got} of {requested} requested tokens"
    if record.counted_by == "chunks" and reason not in ("", "length"):
        return (
            f"ended by itself ({reason}) after {got} chunks, without a token count; {requested} tokens were requested"
        )
    return f"asked for {requested} output tokens, got {got}" + (f" ({reason})" if reason else "")


def _length_verdict(record: Record, *, exact: bool, piece_tokens: int) -> tuple[State, NoneOrKind, str]:
    """Judge a response that has ended properly by its number of tokens. Return its state, error kind and error detail.

    - Failed: the server has counted more tokens than requested. Some servers generate in pieces of `piece_tokens`. They
      may exceed the requested length up to the end of the last piece.
    - Truncated: the response has no token, or a content filter ended it. With `exact`, a response that is shorter than
      requested is truncated too.
    - Complete: all other responses, and responses to requests without an output length.
    """
    requested = record.output_tokens_asked
    got = record.output_tokens or 0
    reason = record.finish_reason
    if not requested:  # embeddings, scores
        return "complete", "", ""
    if not record.chunk_ns and got:
        return "truncated", "truncated", f"no token was streamed, although the server counted {got}"
    if not record.chunk_ns:
        return "truncated", "truncated", "the response ended without a token"
    length = _describe_length(record)
    if got > round_up_to_pieces(requested, piece_tokens) and record.counted_by != "chunks":
        return "failed", "wrong_length", length
    early = reason not in ("", "length") if record.counted_by == "chunks" else got < requested
    if not got or reason == "content_filter" or (early and exact):
        allowed = "" if reason in ("", "length", "content_filter") else "; --output-tokens max:N allows that"
        return "truncated", "truncated", f"{length}{allowed}"
    return "complete", "", ""
