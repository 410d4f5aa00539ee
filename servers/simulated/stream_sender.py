"""The sending path: one pump for all streams, one wake-up per due instant, one `write` per emission.

Frames go straight to the connection's file descriptor, because a write through the event loop's transport leaves at the
end of the loop's turn, behind every other callback.

    clock ──emissions(now)──> pump ──events──> chunk coding ──write(fd)──> kernel
                                │                              └─ would block: transport.write, order kept
                                └─ detour of a fault: FAULTS
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

from loadgen.servers.simulated.protocol import Encoding
from loadgen.servers.simulated.scheduler import Job
from loadgen.servers.simulated.token_clock import TokenClock
from loadgen.servers.wire.poller import Timer
from loadgen.servers.wire.timestamps import PLAIN

Ending = Literal["", "complete", "truncated", "failed", "reset", "cut", "stall"]
"""How a stream ends. Empty: not yet. `complete`, `truncated` and `failed` end the body as HTTP wants it, `cut` closes
the connection, `reset` does so with RST, `stall` sends nothing more and keeps it open."""
WHOLE = ("complete", "truncated", "failed")


class LogLine(msgspec.Struct):
    """The account of one request for tokens: a line of the log, and what the metrics count. Instants are of
    CLOCK_MONOTONIC until it is settled, and from then on of CLOCK_REALTIME, as the kernel's receive stamps are."""

    request_id: str  # the client's X-Request-Id; empty when it sent none
    received_ns: int  # when its last byte came, or with `user` stamps when this process had read its head
    due_ns: list[int] = []  # when the clock wanted each send to happen
    sent_ns: list[int] = []  # read immediately before the call that sent it
    tokens: list[int] = []  # how many tokens left with it
    prompt_tokens: int = 0
    output_tokens: int = 0  # tokens that left
    fault: str = ""  # the fault this request was given; empty for none
    stamps: str = PLAIN.name  # which source of stamps (loadgen.servers.wire.timestamp_sources) says when it came


class Stream:
    """One answer on its way. Mutable: it is the hot path's."""

    def __init__(self, encoding: Encoding, transport: asyncio.Transport, line: LogLine, arrived_ns: int) -> None:
        self.encoding = encoding
        self.completion = completion = encoding.completion
        self.event = encoding.event
        self.total = completion.steps
        self.transport = transport
        self.line = line
        self.fd: int = transport.get_extra_info("socket").fileno()
        self.finished: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        prompt, salt = completion.prompt, completion.salt
        self.job = Job(completion.prompt_tokens, self.total, arrived_ns, owner=self, prompt=prompt, salt=salt)
        self.detour: Detour | None = None if completion.streamed else collect
        if encoding.silent and completion.streamed:
            self.detour = Stream.events_of
        self.ending: Ending = ""
        self.chunked = True
        self.head = b""  # status line and headers, until they leave together with the first bytes of the body
        self.backlogged = True  # the transport may still hold bytes of the answer before
        self.count = 0
        self.held: list[tuple[int, int]] = []  # what a detour keeps back, as (first, tokens)
        self.held_due_ns = 0  # when the last emission was due that sent nothing

    def events(self, first: int, tokens: int) -> list[bytes]:
        """The events that carry tokens `first` to `first + tokens - 1`, with what goes before and behind them."""
        if not self.completion.streamed:
            return []
        step = tokens if self.encoding.merges else 1
        end = first + tokens
        result = [self.event(at, step, at + step == self.total) for at in range(first, end, step)]
        if first == 0:
            result[:0] = self.encoding.opening
        if end == self.total:
            result += self.encoding.closing
        return [event for event in result if event]

    def events_of(self, first: int, tokens: int) -> tuple[list[bytes], int]:
        """A detour that changes nothing. The direct way takes no token that has no event."""
        return self.events(first, tokens), tokens

    def framed(self, events: list[bytes]) -> bytes:
        """The events in chunked coding, one chunk each (RFC 9112, section 7.1)."""
        if not self.chunked:
            return b"".join(events)
        return b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events])

    def with_head(self, data: bytes) -> bytes:
        """Return `data` behind the response head, if the head has not been sent yet."""
        head, self.head = self.head, b""
        return head + data

    def send(self, data: bytes) -> None:
        """Hands `data` to the kernel, or to the transport when its buffer is full. Raises OSError: nobody is there."""
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


Detour = Callable[[Stream, int, int], tuple[list[bytes], int]]
"""In place of `Stream.events`: (stream, tokens sent before, tokens due) to the events to send and how many tokens they
hold. It may set `ending`."""


def collect(_stream: Stream, _first: int, _tokens: int) -> tuple[list[bytes], int]:
    """Detour of an answer that is not streamed: nothing leaves before the last token is there."""
    return [], 0


def _ends(ending: Ending, at: int, stream: Stream, first: int, tokens: int) -> tuple[list[bytes], int]:
    """Ends the stream after K tokens."""
    shown = max(0, min(tokens, at - first))
    if first + tokens >= at:
        stream.ending = ending
    events = stream.events(first, shown) if shown else []
    if stream.ending == "failed" and stream.completion.streamed:
        events += stream.encoding.failure
    return events, shown


def _malformed(at: int, stream: Stream, first: int, tokens: int) -> tuple[list[bytes], int]:
    """Breaks the event that holds token K (the first, where K is 0); its second half is missing."""
    events = stream.events(first, tokens)
    if events and first < max(1, at) <= first + tokens:
        index = 0 if first else len(stream.encoding.opening)
        events[index] = events[index][: len(events[index]) // 2] + b"\n\n"
    return events, tokens


def _held_back(merges: bool, at: int, stream: Stream, first: int, tokens: int) -> tuple[list[bytes], int]:
    """Holds tokens back until there are K, then sends them at once; with `merges` they share an event where the
    protocol can."""
    held = stream.held
    held.append((first, tokens))
    shown = sum(number for _, number in held)
    if shown < at and first + tokens < stream.total:
        return [], 0
    groups = [(held[0][0], shown)] if merges else held
    events = [event for group in groups for event in stream.events(*group)]
    held.clear()
    return events, shown


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in the documentation's words, and its detour, which gets K first; what has none is done in server.py."""

    description: str
    detour: Callable[..., tuple[list[bytes], int]] | None = None


FAULTS: dict[str, Fault] = {
    "refuse": Fault("the connection is reset before a byte of an answer"),
    "429": Fault("HTTP 429 with the server's own body"),
    "500": Fault("HTTP 500 with the server's own body"),
    "503": Fault("HTTP 503 with the server's own body"),
    "slow-headers": Fault("the response head trickles in over K milliseconds (1000)"),
    "content-length": Fault("the head promises more bytes than come before the connection ends"),
    "reset": Fault("RST after K tokens", partial(_ends, "reset")),
    "cut": Fault("the connection is closed after K tokens, without the terminating chunk", partial(_ends, "cut")),
    "truncate": Fault(
        "the body ends after K tokens as HTTP wants it, without the end marker", partial(_ends, "truncated")
    ),
    "stall": Fault("nothing more is sent after K tokens; the connection stays open", partial(_ends, "stall")),
    "error": Fault("the server's own error event after K tokens, under status 200", partial(_ends, "failed")),
    "malformed": Fault("the event with token K is half its JSON", _malformed),
    "role-first": Fault("chat: the role-only event is sent at once, before any token"),
    "merged": Fault("K tokens per event where the protocol can, else K events in one send", partial(_held_back, True)),
    "coalesced": Fault("the events of K tokens in one send", partial(_held_back, False)),
    "early-stop": Fault("the model ends its answer after K tokens"),
}


LATE_NS = 5_000_000
"""The server falls behind when over 1 send in 100 is later than this: a quarter of the gap at 50 tokens/s."""
_BIN_NS, _BINS = 1_000, 100_000


class Lateness:
    """Sends counted by their delay, in bins of a microsecond; those above 100 ms share the last bin."""

    def __init__(self) -> None:
        self.bins = [0] * (_BINS + 1)
        self.max_ns = 0

    def add(self, late_ns: int) -> None:
        """Counts one send. Hot path."""
        if late_ns > self.max_ns:  # noqa: PLR1730 - max() costs four times as much
            self.max_ns = late_ns
        self.bins[late_ns // _BIN_NS if late_ns < _BINS * _BIN_NS else _BINS] += 1

    def figures(self) -> dict[str, Any]:
        """How many sends there were, how late, and whether the server falls behind: see LATE_NS."""
        counts = list(accumulate(self.bins))
        events = counts[-1]
        late_events = events - counts[LATE_NS // _BIN_NS - 1]

        def percentile_ns(percent: int) -> int:
            """The upper edge of the bin that holds it, at most the maximum; 0 when nothing was sent."""
            index = bisect_left(counts, events * percent / 100)
            return min(self.max_ns, (index + 1) * _BIN_NS) if index < _BINS else self.max_ns

        return {
            "events": events,
            "late_ns": {"p50": percentile_ns(50), "p99": percentile_ns(99), "max": self.max_ns},
            "late_events": late_events,
            "falling_behind": late_events > events / 100,
        }


class StreamSender:
    """Sends what the clock says is due."""

    def __init__(self, clock: TokenClock, loop: asyncio.AbstractEventLoop) -> None:
        self.lateness = Lateness()
        self.timer = Timer(loop, self._run)
        self._clock = clock
        self._armed_ns: int | None = None

    def submit(self, stream: Stream) -> None:
        """Starts a stream's clock."""
        self._clock.submit(stream.job, time.monotonic_ns())
        next_ns = self._clock.next_ns()
        if next_ns is not None and (self._armed_ns is None or next_ns < self._armed_ns):
            self._arm(next_ns)

    def cancel(self, stream: Stream) -> None:
        """Forgets a stream whose client went away, or that ended before its last token."""
        stream.detour = collect  # emissions already handed out for this stream are dropped
        self._clock.cancel(stream.job, time.monotonic_ns())

    def send(self, stream: Stream, data: bytes, tokens: int, due_ns: int) -> None:
        """Sends what holds so many tokens and was due at this instant. Raises OSError when the client has gone."""
        sent_ns = time.monotonic_ns()
        stream.send(data)
        line = stream.line
        line.due_ns.append(due_ns)
        line.sent_ns.append(sent_ns)
        line.tokens.append(tokens)
        self.lateness.add(sent_ns - due_ns)

    def _arm(self, at_ns: int | None) -> None:
        self._armed_ns = at_ns
        self.timer.arm(at_ns)

    def _run(self) -> None:
        """Sends everything due by now. What comes due meanwhile waits for the next wake-up, so that reading goes on."""
        for job, tokens, due_ns in self._clock.emissions(time.monotonic_ns()):
            stream: Stream = job.owner
            first = stream.count
            if tokens == 1 and first and first + 1 < stream.total and stream.detour is None and stream.chunked:
                event = stream.event(first, 1, False)
                data = b"%x\r\n%b\r\n" % (len(event), event)
                stream.count = first + 1
            else:
                data, tokens = self._compose(stream, tokens)  # noqa: PLW2901
            if data:
                try:
                    self.send(stream, data, tokens, due_ns)
                except OSError:  # the client has gone, in one way or another
                    self.cancel(stream)
                    continue
            else:
                stream.held_due_ns = due_ns
            if stream.ending:
                self._end(stream)
        self._arm(self._clock.next_ns())

    def _compose(self, stream: Stream, tokens: int) -> tuple[bytes, int]:
        """The bytes of one emission, where it is a stream's first or last, or goes by a detour."""
        first = stream.count
        stream.count = first + tokens
        if stream.finished.done():  # it ended with an emission of this very wake-up
            return b"", 0
        events, shown = (
            stream.detour(stream, first, tokens) if stream.detour else (stream.events(first, tokens), tokens)
        )
        if stream.count == stream.total and not stream.ending:
            stream.ending = "complete"
        data = stream.framed(events)
        if stream.chunked and stream.completion.streamed and stream.ending in WHOLE:
            data += b"0\r\n\r\n"
        if stream.head and (data or stream.ending):
            data = stream.with_head(data)
        return data, shown

    def _end(self, stream: Stream) -> None:
        if stream.ending != "complete":
            self.cancel(stream)
        if stream.ending == "stall" or stream.finished.done():
            return
        if stream.ending == "reset":
            reset(stream.transport)
        elif stream.ending == "cut":
            stream.transport.close()
        stream.finished.set_result(stream.ending)


def reset(transport: asyncio.Transport) -> None:
    """Closes the connection with RST instead of FIN (SO_LINGER with a linger time of zero, socket(7))."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
