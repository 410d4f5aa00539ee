"""Sends the tokens of all streams of a simulated server when the tokens are due.

All tokens that are due at the same time are sent in one wake-up of the event loop, with one write per stream. The bytes
are written directly to the file descriptor of the connection, because the event loop's transport would send them only
at the end of the loop's iteration. If the send buffer of the socket is full, the transport sends the remaining bytes.

    clock ──emissions(now)──> StreamSender ──events──> chunked coding ──write(fd)──> kernel
                                   │                                       └─ buffer full: transport.write
                                   └─ fault hook of the stream: FAULTS
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import msgspec

from loadgen.servers.simulated.protocol import Encoding, RequestTimes
from loadgen.servers.simulated.scheduler import Job
from loadgen.servers.simulated.token_clock import TokenClock
from loadgen.servers.wire.poller import Timer
from loadgen.servers.wire.timestamps import PLAIN

Ending = Literal["", "complete", "truncated", "failed", "reset", "cut", "stall"]
"""How a stream ended; empty while the stream is active.

- `complete`, `truncated` and `failed`: the body ends as HTTP requires.
- `cut`: the connection is closed before the end of the body.
- `reset`: the connection is closed with RST.
- `stall`: nothing more is sent, and the connection stays open.
"""
COMPLETE_BODY = ("complete", "truncated", "failed")
"""Endings with a complete HTTP body."""


SESSION_HEADERS = ("X-Session-ID", "X-Dynamo-Session-ID", "X-SMG-Routing-Key")
"""Headers that name the session of a request. The simulated servers only log them."""


class LogLine(msgspec.Struct):
    """One request that generates tokens, as a line of the log. The metrics page is computed from the same data.

    Times are in ns of CLOCK_MONOTONIC. When the line is written, they are converted to CLOCK_REALTIME, the clock of the
    kernel's receive timestamps.
    """

    request_id: str  # the client's X-Request-Id; empty if it sent none
    received_ns: int  # when the last byte arrived; with `user` timestamps, when this process had read the head
    due_ns: list[int] = []  # when each send was due
    sent_ns: list[int] = []  # taken immediately before the call that sent the bytes
    first_send_end_ns: int = 0  # when the call that sent the first token returned; 0 if nothing was sent
    tokens: list[int] = []  # number of tokens in each send
    prompt_tokens: int = 0
    output_tokens: int = 0  # tokens sent
    fault: str = ""  # the fault of this request; empty for none
    model: str = ""  # model that the request named; empty if it named none
    session: str = ""  # the first header of SESSION_HEADERS that the client sent
    parent_session: str = ""  # the client's X-Dynamo-Parent-Session-ID
    stamps: str = PLAIN.name  # source of `received_ns` (loadgen.servers.wire.timestamp_sources)


class Stream:
    """A response that is being generated and sent."""

    def __init__(self, encoding: Encoding, transport: asyncio.Transport, line: LogLine, arrived_ns: int) -> None:
        completion = encoding.completion
        self.encoding = encoding
        self.completion = completion
        self.encode = encoding.encode
        self.total_tokens = completion.steps
        self.transport = transport
        self.line = line
        self.fd: int = transport.get_extra_info("socket").fileno()
        self.finished: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.job = Job(
            completion.prompt_tokens,
            self.total_tokens,
            arrived_ns,
            owner=self,
            prompt=completion.prompt,
            cache_salt=completion.cache_salt,
        )
        if encoding.on_job is not None:
            encoding.on_job(self.job)
        self.fault_hook: FaultHook | None = None if completion.streamed else withhold_all
        if encoding.silent and completion.streamed:
            self.fault_hook = Stream.send_unchanged
        self.ending: Ending = ""
        self.chunked = True
        self.head = b""  # status line and headers, until they are sent with the first bytes of the body
        self.backlogged = True  # the transport may still hold bytes of the previous response
        self.token_count = 0  # tokens that were due so far
        self.withheld: list[tuple[int, int]] = []  # tokens that a fault hook keeps back, as (first, number)
        self.withheld_due_ns = 0  # when the latest withheld tokens were due

    def events(self, first: int, tokens: int) -> list[bytes]:
        """Return the events of a stream that contain tokens `first` to `first + tokens - 1`.

        If the first token is among them, the opening events come first. If the last token is among them, the closing
        events follow. A response that is not streamed has no events.
        """
        if not self.completion.streamed:
            return []
        step = tokens if self.encoding.merges else 1
        end = first + tokens
        result = [self.encode(index, step, index + step == self.total_tokens) for index in range(first, end, step)]
        if first == 0:
            result[:0] = self.encoding.opening
        if end == self.total_tokens:
            timed = self.encoding.timed_closing
            result += self.encoding.closing if timed is None else timed(self.times())
        return [event for event in result if event]

    def times(self) -> RequestTimes:
        """Return the durations of the phases of this request: queue, prefill, and decoding until now.

        The method is called at the instant at which the latest token is due.
        """
        now_ns = time.monotonic_ns()
        first_ns = self.line.sent_ns[0] if self.line.sent_ns else now_ns
        queue_ns = self.job.queue_ns
        prefill_ns = max(0, first_ns - self.line.received_ns - queue_ns)
        return RequestTimes(queue_ns / 1e9, prefill_ns / 1e9, (now_ns - first_ns) / 1e9)

    def send_unchanged(self, first: int, tokens: int) -> tuple[list[bytes], int]:
        """Return the events of the tokens that are due, and the number of these tokens.

        `first` is the index of the first of these tokens. This method is used as a fault hook, which is a function that
        decides which events of a stream are sent. It sends all events.

        Streams in which some tokens have no event need this hook. Without a hook, StreamSender would send an empty
        chunk for such a token, and an empty chunk ends the HTTP body.
        """
        return self.events(first, tokens), tokens

    def to_body(self, events: list[bytes]) -> bytes:
        """Return events as bytes of the HTTP body.

        With chunked transfer coding, each event is one chunk (RFC 9112, section 7.1).
        """
        if not self.chunked:
            return b"".join(events)
        return b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events])

    def with_head(self, data: bytes) -> bytes:
        """Return `data`, preceded by the response head if the head has not been sent yet."""
        head, self.head = self.head, b""
        return head + data

    def send(self, data: bytes) -> None:
        """Write `data` to the connection.

        If the socket's send buffer is full, the event loop's transport sends the remaining bytes later. Raises OSError
        if the client has closed the connection.
        """
        transport = self.transport
        if transport.is_closing():
            raise ConnectionResetError
        if self.backlogged:
            if transport.get_write_buffer_size():
                transport.write(data)
                return
            self.backlogged = False
        try:
            sent = os.write(self.fd, data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self.backlogged = True
            transport.write(data[sent:])


FaultHook = Callable[[Stream, int, int], tuple[list[bytes], int]]
"""Function that replaces `Stream.events`, from (stream, tokens due before, tokens due now) to (events to send, number
of their tokens). A hook may set `Stream.ending`."""


def withhold_all(_stream: Stream, _first: int, _tokens: int) -> tuple[list[bytes], int]:
    """Fault hook that sends nothing.

    Non-streamed responses use this hook, because they are sent as a whole after their last token.
    """
    return [], 0


def _end_after(ending: Ending, k: int, stream: Stream, first: int, tokens: int) -> tuple[list[bytes], int]:
    """Fault hook that ends a stream after `k` tokens.

    `ending` is the way in which the stream ends, for example with an error event. `first` is the number of tokens that
    were due before this call, and `tokens` is the number of tokens that are due now.
    """
    sent_tokens = max(0, min(tokens, k - first))
    if first + tokens >= k:
        stream.ending = "cut" if ending == "failed" and stream.encoding.media else ending
    events = stream.events(first, sent_tokens) if sent_tokens else []
    if stream.ending == "failed" and stream.completion.streamed:
        events += stream.encoding.failure
    return events, sent_tokens


def _malformed(k: int, stream: Stream, first: int, tokens: int) -> tuple[list[bytes], int]:
    """Fault hook that removes the second half of one event: the event that contains token number `k`.

    Tokens are counted from 1. If `k` is 0, the hook cuts the event with the first token.
    """
    events = stream.events(first, tokens)
    if events and first < max(1, k) <= first + tokens:
        index = 0 if first else len(stream.encoding.opening)
        events[index] = events[index][: len(events[index]) // 2] + b"\n\n"
    return events, tokens


def _coalesce(merges: bool, k: int, stream: Stream, first: int, tokens: int) -> tuple[list[bytes], int]:
    """Fault hook that withholds events until they contain `k` tokens, and then sends these events in one write.

    Return the events to send now, and the number of their tokens. At the end of the response, the withheld events are
    sent even if they contain fewer than `k` tokens.

    `first` is the number of tokens that were due before this call, and `tokens` is the number of tokens that are due
    now. If `merges` is True, all withheld tokens are sent in a single event, provided that the protocol allows events
    with several tokens.
    """
    withheld = stream.withheld
    withheld.append((first, tokens))
    total = sum(number for _, number in withheld)
    if total < k and first + tokens < stream.total_tokens:
        return [], 0
    groups = [(withheld[0][0], total)] if merges else withheld
    events = [event for group in groups for event in stream.events(*group)]
    withheld.clear()
    return events, total


def send_at_intervals(k: int, stream: Stream, first: int, tokens: int) -> tuple[list[bytes], int]:
    """Fault hook that sends the first token at once, and later tokens in events of `k` tokens.

    The option `--stream-interval` of vLLM has the same effect.
    """
    if first == 0:
        return stream.events(first, tokens), tokens
    return _coalesce(True, k, stream, first, tokens)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that a user can inject into the responses of a simulated server.

    `description` explains the fault in the documentation. `hook` is the function that implements it. The first
    parameter of `hook` is the number K in `NAME@K`. Faults without a hook are implemented in server.py.
    """

    description: str
    hook: Callable[..., tuple[list[bytes], int]] | None = None


FAULTS: dict[str, Fault] = {
    "refuse": Fault("the connection is reset before any byte of a response"),
    "429": Fault("HTTP 429 with the server's own body"),
    "500": Fault("HTTP 500 with the server's own body"),
    "503": Fault("HTTP 503 with the server's own body"),
    "slow-headers": Fault("the response head arrives in small pieces over K milliseconds (1000)"),
    "content-length": Fault("the content-length is larger than the body; then the connection is closed"),
    "reset": Fault("RST after K tokens", partial(_end_after, "reset")),
    "cut": Fault("the connection is closed after K tokens, without the terminating chunk", partial(_end_after, "cut")),
    "truncate": Fault(
        "the body ends correctly after K tokens, but without the end marker", partial(_end_after, "truncated")
    ),
    "stall": Fault("nothing more is sent after K tokens; the connection stays open", partial(_end_after, "stall")),
    "error": Fault("the server's own error event after K tokens, under status 200", partial(_end_after, "failed")),
    "malformed": Fault("the event with token K contains only half of its JSON", _malformed),
    "role-first": Fault("chat: the event with the role alone is sent at once, before any token"),
    "merged": Fault(
        "K tokens per event if the protocol supports it, otherwise K events in one send", partial(_coalesce, True)
    ),
    "coalesced": Fault("the events of K tokens in one send", partial(_coalesce, False)),
    "early-stop": Fault("the model stops after K tokens"),
    "wrong-answer": Fault("with more than K requests in flight, the answer to another prompt (0)"),
    "invalid-json": Fault("with --structured: the JSON of the response lacks its last character"),
    "wrong-json": Fault("with --structured: the JSON of the response does not fit the schema"),
}


LATE_NS = 5_000_000
"""The server falls behind if more than 1% of its sends are later than this. It is a quarter of the time between two
tokens at 50 tokens/s."""
_BIN_NS = 1_000
_BINS = 100_000


class Lateness:
    """A histogram of send delays, with bins of 1 microsecond. Delays above 100 ms share the last bin."""

    def __init__(self) -> None:
        self.bins = [0] * (_BINS + 1)
        self.max_ns = 0

    def add(self, late_ns: int) -> None:
        """Add one send to the histogram. It took place `late_ns` after the time at which it was due."""
        if late_ns > self.max_ns:  # noqa: PLR1730 - max() costs four times as much
            self.max_ns = late_ns
        self.bins[late_ns // _BIN_NS if late_ns < _BINS * _BIN_NS else _BINS] += 1

    def figures(self) -> dict[str, Any]:
        """Return the number of sends, their delays in ns, and whether the server falls behind.

        The server falls behind if more than 1% of the sends are at least LATE_NS late.
        """
        counts = list(accumulate(self.bins))
        events = counts[-1]
        late_events = events - counts[LATE_NS // _BIN_NS - 1]

        def percentile_ns(percent: int) -> int:
            """Return a percentile of the send delays in ns, or 0 if nothing was sent.

            The result is the upper edge of the percentile's bin, but at most the maximum delay.
            """
            index = bisect_left(counts, events * percent / 100)
            return min(self.max_ns, (index + 1) * _BIN_NS) if index < _BINS else self.max_ns

        return {
            "events": events,
            "late_ns": {"p50": percentile_ns(50), "p99": percentile_ns(99), "max": self.max_ns},
            "late_events": late_events,
            "falling_behind": late_events > events / 100,
        }


class StreamSender:
    """Sends the tokens of all streams at the times that a clock determines."""

    def __init__(self, clock: TokenClock, loop: asyncio.AbstractEventLoop) -> None:
        self.lateness = Lateness()
        self.timer = Timer(loop, self._run)
        self._clock = clock
        self._armed_ns: int | None = None

    def submit(self, stream: Stream) -> None:
        """Start a stream: submit the stream's job to the clock, which determines when each token is sent."""
        self._clock.submit(stream.job, time.monotonic_ns())
        next_ns = self._clock.next_ns()
        if next_ns is not None and (self._armed_ns is None or next_ns < self._armed_ns):
            self._arm(next_ns)

    def cancel(self, stream: Stream) -> None:
        """Stop a stream before its last token, for example because its client has disconnected. Ended streams are
        ignored.
        """
        stream.fault_hook = withhold_all  # tokens that the clock has already returned are dropped
        self._clock.cancel(stream.job, time.monotonic_ns())

    def send(self, stream: Stream, data: bytes, tokens: int, due_ns: int) -> None:
        """Send `data` to the client of `stream`, and record the send in the stream's log line.

        `tokens` is the number of tokens in `data`, and `due_ns` is the time at which they were due. Raises OSError if
        the client has closed the connection.
        """
        sent_ns = time.monotonic_ns()
        stream.send(data)
        line = stream.line
        if not line.sent_ns:
            line.first_send_end_ns = time.monotonic_ns()
        line.due_ns.append(due_ns)
        line.sent_ns.append(sent_ns)
        line.tokens.append(tokens)
        self.lateness.add(sent_ns - due_ns)

    def _arm(self, at_ns: int | None) -> None:
        self._armed_ns = at_ns
        self.timer.arm(at_ns)

    def _run(self) -> None:
        """Send all tokens that are due now.

        Tokens that become due during this method are sent at the next wake-up, after the event loop has read from its
        sockets.
        """
        for job, tokens, due_ns in self._clock.emissions(time.monotonic_ns()):
            stream: Stream = job.owner
            first = stream.token_count
            if (
                tokens == 1
                and first
                and first + 1 < stream.total_tokens
                and stream.fault_hook is None
                and stream.chunked
            ):
                event = stream.encode(first, 1, False)
                data = b"%x\r\n%b\r\n" % (len(event), event)
                stream.token_count = first + 1
            else:
                data, tokens = self._compose(stream, tokens)  # noqa: PLW2901
            if data:
                try:
                    self.send(stream, data, tokens, due_ns)
                except OSError:  # the client has disconnected
                    self.cancel(stream)
                    continue
            else:
                stream.withheld_due_ns = due_ns
            if stream.ending:
                self._end(stream)
        self._arm(self._clock.next_ns())

    def _compose(self, stream: Stream, tokens: int) -> tuple[bytes, int]:
        """Return the bytes to send when the next `tokens` tokens are due, and the number of tokens in these bytes.

        The number is normally `tokens`. It can differ if the stream has a fault hook, which can withhold tokens. It is
        0 if the stream has already finished.

        `_run` encodes most single tokens without this method, which is faster. It calls this method for the first and
        the last token of a stream, for several tokens at once, and for all tokens of a stream with a fault hook or
        without chunked encoding.
        """
        first = stream.token_count
        stream.token_count = first + tokens
        if stream.finished.done():  # the stream ended with earlier tokens of this wake-up
            return b"", 0
        if stream.fault_hook:
            events, sent_tokens = stream.fault_hook(stream, first, tokens)
        else:
            events, sent_tokens = stream.events(first, tokens), tokens
        if stream.token_count == stream.total_tokens and not stream.ending:
            stream.ending = "complete"
        data = stream.to_body(events)
        if stream.chunked and stream.completion.streamed and stream.ending in COMPLETE_BODY:
            data += b"0\r\n\r\n"
        if stream.head and (data or stream.ending):
            data = stream.with_head(data)
        return data, sent_tokens

    def _end(self, stream: Stream) -> None:
        if stream.ending != "complete":
            self.cancel(stream)
        if stream.ending == "stall" or stream.finished.done():
            return
        if stream.ending == "reset":
            reset_connection(stream.transport)
        elif stream.ending == "cut":
            stream.transport.close()
        stream.finished.set_result(stream.ending)


def reset_connection(transport: asyncio.Transport) -> None:
    """Close the connection with RST instead of FIN, through SO_LINGER with a time of zero (socket(7))."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
