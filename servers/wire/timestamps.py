"""Timestamp sources, which return the times at which received bytes arrived.

This module contains the base class of all sources, which takes timestamps in user space, and a source with timestamps
of Linux sockets. loadgen.servers.wire.timestamp_sources lists all sources. A run uses a source as follows. Here,
`Source` stands for the class, and `source` for an instance of this class:

    Source.open(servers)   Call before the first connection. Returns None if the machine does not support the source.
    source.claim(sock)     Call for each connection before it is opened.
    source.watch(sock)     Call for each connection after it is opened.
    source.instants(...)   Call after the end of a response, with positions in its bytes.
    source.counts()        Call once a second, for the health telemetry of the run.

Each source also states its name, its maximum error, and whether its timestamps are exact. Run files store these facts.

The timestamps of sockets come from the option SO_TIMESTAMPING of Linux. With the flags RX_SOFTWARE | SOFTWARE, each
`recvmsg` returns a timestamp, which is the instant at which the last returned byte was received
(Documentation/networking/timestamping.rst). This timestamp is correct even if the process reads late.
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
Address = tuple[int, tuple[Any, ...] | str]  # Family and socket address of a server; a Unix socket has a path
Share = tuple[int, int]  # Index of a worker, from 0, and the number of workers
ToMonotonic = Callable[[Sequence[int]], list[int]]  # Converts CLOCK_REALTIME ns to CLOCK_MONOTONIC ns (ClockPairs)
_SIZES = attrgetter("sizes")
Instants = tuple[list[int], "TimestampSource"]  # CLOCK_MONOTONIC ns, and the least exact source of these times


class Received(Protocol):
    """The interface of a received response: the attributes that a timestamp source needs.

    loadgen.servers.wire.transport.Exchange has these attributes."""

    sizes: array[int]  # After each read, the number of bytes received
    user_ns: array[int]  # After each read, the instant in this process (CLOCK_MONOTONIC)
    kernel_timespecs: bytearray  # The kernel's timespec of each read
    tcp_stream: Any  # What `watch` returned for the connection
    stream_start: int  # Offset in the TCP stream of the connection at which the response starts
    read_ends: list[int]  # With TLS, the offset in the TCP stream at which each read ended; else empty

    def offsets(self, raw_offsets: Sequence[int]) -> Sequence[int]:
        """Convert offsets in the received bytes to offsets in the TCP stream.

        With TLS, the TCP stream contains encrypted records, so the offsets differ."""
        ...


class Response(Received, Protocol):
    """Interface of a received response that includes the send time of its request. It extends `Received`."""

    sent_ns: int | None  # CLOCK_MONOTONIC immediately before the request was sent
    cut_reads: list[int]  # Indexes of reads whose kernel timestamps may be too late (loadgen.servers.wire.transport)


class TimestampSource:
    """Returns the arrival times of received bytes.

    This is the base class of all timestamp sources, and also a source itself, which works on every machine: it takes a
    timestamp in user space after each read. If the process reads late, these timestamps are late too.
    """

    name: ClassVar[str] = "user"  # In plans, Records, headers and summaries
    title: ClassVar[str] = "user-space timestamps"  # In sentences
    exact: ClassVar[bool] = False  # Whether a timestamp is correct even if this process reads late
    error_s: ClassVar[float | None] = None
    """Maximum error in seconds of 99% of the timestamps. None: the error is as long as the process may have waited."""
    by_read: ClassVar[bool] = True  # Whether all bytes of one read share a timestamp, so its tokens share it too
    unsorted_bytes = 0  # Bytes that have arrived and are not assigned to a response yet
    needs: ClassVar[str] = ""  # What a machine needs for this source, as a sentence

    @property
    def fallback(self) -> TimestampSource | None:
        """The source that replaces this source if its timestamps are wrong, or None if there is no such source."""
        return None

    def reject(self) -> None:
        """Record that the timestamps of one response are wrong, and that the fallback source replaces them."""

    @classmethod
    def open(cls, servers: Sequence[Address] = (), share: Share = (0, 1)) -> TimestampSource | None:  # noqa: ARG003
        """Open a source that timestamps data from `servers`. Return None if this machine does not support the source.

        `share` contains two numbers: the index of this worker process, and the number of worker processes.
        """
        return cls()

    def claim(self, sock: socket.socket) -> None:
        """Prepare a socket, before its connection is opened, so that the data of the connection will be timestamped."""

    def watch(self, sock: socket.socket) -> Any:
        """Start timestamping a connection that has been opened but not read from.

        The caller stores the result in the connection's attribute `tcp_stream`."""

    @property
    def active_source(self) -> TimestampSource:
        """The source whose timestamps are used for open connections. Normally, this is the object itself.

        If the object sees no packets, or if too many of its timestamps were wrong, this is its `fallback`.
        """
        return self

    def ready(self, received: Received) -> bool:  # noqa: ARG002
        """Return True if no more timestamps of a response will arrive.

        Either all timestamps are available, or the missing ones are lost. If the result is False, the caller must try
        again after RETRY_S seconds.
        """
        return True

    def arrived_bytes(self, responses: Collection[Received]) -> list[int]:
        """Return, for each of `responses`, the number of its bytes that are known to have arrived.

        Some sources see the packets from the server. They also count bytes that have not been read from the socket yet.
        All other sources only count bytes that have been read. Each response must be the latest one on its connection.
        """
        return [sizes[-1] if sizes else 0 for sizes in map(_SIZES, responses)]

    def collect(self) -> None:
        """Collect the timestamps that are available. The worker calls this method several times a second."""

    def rate_dropped(self) -> bool:
        """Return True if the rate of arriving packets has clearly dropped since the last call of this method.

        A source that does not see packets always returns False.
        """
        return False

    def instants(self, received: Received, ends: Sequence[int], to_monotonic: ToMonotonic) -> Instants:  # noqa: ARG002
        """Return the arrival time of the byte before each offset in `ends`, and the source that provided these times.

        The offsets refer to the received bytes. If this source lacks a timestamp, a less exact source provides it. The
        result then names the less exact source.
        """
        return _of_reads(received, ends, received.user_ns.tolist()), self

    def instants_batch(
        self, responses: Sequence[tuple[Response, Sequence[int]]], to_monotonic: ToMonotonic
    ) -> list[tuple[list[int], Instants]]:
        """Return the arrival times of the bytes of several responses, as one pair per response.

        `responses` contains each response together with offsets in its received bytes.

        - The first value of a pair is a list with the arrival time of the last byte of each read.
        - The second value is the result of `instants` for the offsets: the arrival time of the byte before each offset.
        """
        return [
            (self.instants(received, received.sizes, to_monotonic)[0], self.instants(received, ends, to_monotonic))
            for received, ends in responses
        ]

    def counts(self) -> dict[str, Any]:
        """Return what this source has counted since the last call, such as missing timestamps.

        The result maps the keys of the counters in the run file to their values.
        """
        return {}

    def close(self) -> None:
        """Release the resources of the source."""


class SocketTimestamps(TimestampSource):
    """Timestamp source that uses the kernel's timestamp of the last byte of each read (SO_TIMESTAMPING)."""

    name = "socket"
    title = "kernel timestamps"
    exact = True
    error_s = 20e-6  # 99% lie within 0.011 ms of the server's own log (docs/concepts/stamps.md), rounded up generously

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
        """Open the source, or return None if this machine does not support kernel timestamps.

        This method opens a socket, sends a datagram to the same socket, and waits until it arrives with a timestamp.
        Without this, the first responses of a run could lack timestamps: Linux starts to take timestamps shortly after
        the first socket requests them (net/core/dev.c, `net_enable_timestamp` defers to a work queue). The socket stays
        open, because Linux stops taking timestamps when the last such socket is closed."""
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
    """Return the kernel's timestamp of each read in CLOCK_REALTIME ns, or None if at least one read has none."""
    timespecs = array("q")
    timespecs.frombytes(received.kernel_timespecs)
    seconds, nanoseconds = timespecs[::2], timespecs[1::2]
    if not all(seconds):
        return None
    return [s * 1_000_000_000 + n for s, n in zip(seconds, nanoseconds, strict=True)]


def _of_reads(received: Received, ends: Sequence[int], instants: list[int]) -> list[int]:
    """Return the arrival time of the byte before each offset in `ends`.

    `instants` contains one arrival time per read. All bytes of a read get the arrival time of this read.
    """
    if ends is received.sizes:
        return instants
    return [instants[bisect_left(received.sizes, end)] for end in ends]
