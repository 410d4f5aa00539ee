"""The interface of a timestamp source, which returns when received bytes had arrived, and two simple sources.

    Source.open(servers)   before the first connection (loadgen.servers.wire.timestamp_sources lists the sources)
    source.claim(sock)     for each connection, before it is opened
    source.watch(sock)     for each connection, after it is opened
    source.instants(...)   after the end of an exchange, for offsets in its bytes
    source.counts()        once a second, for the health telemetry of the run

A source states its name, whether it is exact, and its error. Records and headers store these facts.

If SO_TIMESTAMPING requests RX_SOFTWARE | SOFTWARE, Linux attaches to each `recvmsg` the instant at which the last
returned byte was received (Documentation/networking/timestamping.rst). This timestamp is right however late the process
reads.
"""

from __future__ import annotations

import socket
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from operator import attrgetter
from time import sleep
from typing import Any, ClassVar, Protocol

SO_TIMESTAMPING = 37  # <asm-generic/socket.h>; also the type of the control message that holds the timestamp
RX_SOFTWARE_AND_SOFTWARE = 1 << 3 | 1 << 4  # <linux/net_tstamp.h>
TIMESPEC_BYTES = 16  # The control message holds three timespecs; the first is the software timestamp
CONTROL_BYTES = 128
TRIES, RETRY_S = 200, 0.002
Address = tuple[int, tuple[Any, ...]]  # Family and socket address of a server
Share = tuple[int, int]  # Index of a worker, from 0, and the number of workers
ToMonotonic = Callable[[Sequence[int]], list[int]]  # Converts CLOCK_REALTIME ns to CLOCK_MONOTONIC ns (ClockPairs)
_SIZES = attrgetter("sizes")
Instants = tuple[list[int], "TimestampSource"]  # CLOCK_MONOTONIC ns, and the least exact source that they come from


class Received(Protocol):
    """The part of an exchange (loadgen.servers.wire.transport.Exchange) that a timestamp source needs."""

    sizes: array[int]  # After each read, the number of bytes received
    user_ns: array[int]  # After each read, the instant in this process (CLOCK_MONOTONIC)
    kernel_timespecs: bytearray  # The kernel's timespec of each read
    tcp_stream: Any  # What `watch` returned for the connection
    stream_start: int  # Offset in the TCP stream of the connection at which the response starts
    read_ends: list[int]  # With TLS, the offset in the TCP stream at which each read ended; else empty

    def offsets(self, raw_offsets: Sequence[int]) -> Sequence[int]:
        """Convert offsets in the received bytes to offsets in the TCP stream, which includes TLS."""
        ...


class Response(Received, Protocol):
    """The received response to a request that this process sent."""

    sent_ns: int | None  # CLOCK_MONOTONIC immediately before the request was sent
    cut_reads: list[int]  # Indexes of reads whose kernel timestamps may be too late (loadgen.servers.wire.transport)


class TimestampSource:
    """Returns the arrival instants of received bytes.

    This base class is a source itself, and works on every machine: it returns the instant at which this process had
    read the bytes, which is as late as the process was.
    """

    name: ClassVar[str] = "user"  # In plans, Records, headers and summaries
    title: ClassVar[str] = "user-space timestamps"  # In sentences
    exact: ClassVar[bool] = False  # Whether a timestamp is right however late this process reads
    error_s: ClassVar[float | None] = None
    """Error that 99 % of exact timestamps stay within. None: the error is as long as the process may have waited."""
    by_read: ClassVar[bool] = True  # Whether all bytes of one read share a timestamp, so its tokens share it too
    unsorted = 0  # Pieces that have arrived and are not assigned to a response yet
    needs: ClassVar[str] = ""  # What a machine needs for this source, as a sentence

    @property
    def fallback(self) -> TimestampSource | None:
        """The source to use for a response whose timestamps from this source cannot be right. None: there is none."""
        return None

    def reject(self) -> None:
        """Note that the timestamps of one response contradicted its request, and that the fallback is used for it."""

    @classmethod
    def open(cls, servers: Sequence[Address] = (), share: Share = (0, 1)) -> TimestampSource | None:  # noqa: ARG003
        """Open the source for data from `servers` on this worker's `share` of the connections. Return None if this
        machine cannot provide it."""
        return cls()

    def claim(self, sock: socket.socket) -> None:
        """Prepare a socket whose connection is about to be opened."""

    def watch(self, sock: socket.socket) -> Any:
        """Start to watch a connection that has been opened and not read from. The caller stores the result as
        `tcp_stream` of the connection."""

    @property
    def active_source(self) -> TimestampSource:
        """The source in use for open connections: this one, or its fallback if it does not see their packets."""
        return self

    def ready(self, received: Received) -> bool:  # noqa: ARG002
        """Return whether every timestamp of a response is available that ever will be. If not, call again after
        RETRY_S."""
        return True

    def piece_counts(self, responses: Collection[Received]) -> list[int]:
        """Return how many pieces (packets or reads) of each of these responses are known to have arrived."""
        return [*map(len, map(_SIZES, responses))]

    def collect(self) -> None:
        """Take the timestamps that are available. Called several times a second."""

    def rate_dropped(self) -> bool:
        """Return whether the arrival rate since the last call is clearly below the rate before it."""
        return False

    def instants(self, received: Received, ends: Sequence[int], to_monotonic: ToMonotonic) -> Instants:  # noqa: ARG002
        """Return when the byte before each of these offsets in the received bytes had arrived, and the source of these
        instants: a less exact one if this source lacks a timestamp."""
        return _of_reads(received, ends, received.user_ns.tolist()), self

    def instants_batch(
        self, responses: Sequence[tuple[Response, Sequence[int]]], to_monotonic: ToMonotonic
    ) -> list[tuple[list[int], Instants]]:
        """Return, for each response, when the last byte of each read had arrived, and `instants` of its offsets."""
        return [
            (self.instants(received, received.sizes, to_monotonic)[0], self.instants(received, ends, to_monotonic))
            for received, ends in responses
        ]

    def counts(self) -> dict[str, Any]:
        """Return counters for one second of health telemetry, such as lost timestamps, by their key in the run file."""
        return {}

    def close(self) -> None:
        """Release the source's resources."""


class SocketTimestamps(TimestampSource):
    """The kernel's timestamp of the last byte that each read returned (SO_TIMESTAMPING)."""

    name = "socket"
    title = "kernel timestamps"
    exact = True
    error_s = 20e-6  # 99 % lie within 0.011 ms of the server's own log (docs/concepts/stamps.md), rounded up generously

    def __init__(self, primer: socket.socket | None = None) -> None:
        self._primer = primer  # Stays open so that the kernel keeps taking timestamps
        self._rejected = 0

    @property
    def fallback(self) -> TimestampSource | None:
        return PLAIN

    def reject(self) -> None:
        self._rejected += 1

    @classmethod
    def open(cls, servers: Sequence[Address] = (), share: Share = (0, 1)) -> TimestampSource | None:  # noqa: ARG003
        """Open the source. It works once a datagram to itself has arrived with a timestamp.

        Linux starts to take timestamps shortly after the first socket requests them, and stops when the last such
        socket is closed (net/core/dev.c, `net_enable_timestamp` defers to a work queue). Without this early socket, the
        first responses of a run could lack timestamps.
        """
        primer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        primer.bind(("127.0.0.1", 0))
        primer.settimeout(0.1)
        with suppress(OSError):
            primer.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, RX_SOFTWARE_AND_SOFTWARE)
            for _ in range(TRIES):
                primer.sendto(b"?", primer.getsockname())
                if primer.recvmsg(1, CONTROL_BYTES)[1]:
                    return cls(primer)
                sleep(0.001)
        primer.close()
        return None

    def watch(self, sock: socket.socket) -> None:
        with suppress(OSError):  # some sandboxes do not support timestamps
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, RX_SOFTWARE_AND_SOFTWARE)

    def instants(self, received: Received, ends: Sequence[int], to_monotonic: ToMonotonic) -> Instants:
        stamps = kernel_stamps(received)
        if stamps is None:
            return PLAIN.instants(received, ends, to_monotonic)
        return _of_reads(received, ends, to_monotonic(stamps)), self

    def counts(self) -> dict[str, Any]:
        rejected, self._rejected = self._rejected, 0
        return {"socket_rejected": rejected}

    def close(self) -> None:
        if self._primer is not None:
            self._primer.close()


PLAIN = TimestampSource()  # The last fallback


def kernel_stamps(received: Received) -> list[int] | None:
    """Return the kernel's timestamp of each read in CLOCK_REALTIME ns, or None if a read has none."""
    timespecs = array("q")
    timespecs.frombytes(received.kernel_timespecs)
    seconds, nanoseconds = timespecs[::2], timespecs[1::2]
    if not all(seconds):
        return None
    return [s * 1_000_000_000 + n for s, n in zip(seconds, nanoseconds, strict=True)]


def _of_reads(received: Received, ends: Sequence[int], instants: list[int]) -> list[int]:
    """Convert one instant per read to one instant per offset."""
    if ends is received.sizes:
        return instants
    return [instants[bisect_left(received.sizes, end)] for end in ends]
