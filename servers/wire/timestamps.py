"""Where arrival instants come from: a StampSource.

    Source.open(servers)   before the first connection (loadgen.servers.wire.timestamp_sources knows them all)
    source.claim(sock)     each connection before it is opened, and
    source.watch(sock)     after that
    source.instants(...)   after the end of an exchange, for places in its bytes
    source.counts()        once a second, what there is to say of it in the Run

It says its name, whether it is exact, and what its stamps are off by; Records and headers keep that.

Linux attaches to each `recvmsg` the instant at which the last byte returned was received, when SO_TIMESTAMPING
asks for RX_SOFTWARE | SOFTWARE (Documentation/networking/timestamping.rst). The stamp is right however late the
process gets round to reading.
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

SO_TIMESTAMPING = 37  # <asm-generic/socket.h>; also the type of the control message that comes back
RX_SOFTWARE_AND_SOFTWARE = 1 << 3 | 1 << 4  # <linux/net_tstamp.h>
TIMESPEC_BYTES = 16  # the control message holds three; the first is the software stamp
CONTROL_BYTES = 128
TRIES, RETRY_S = 200, 0.002
Address = tuple[int, tuple[Any, ...]]  # Family and socket address of a server
Share = tuple[int, int]  # Number of a worker, from 0, and how many there are
ToMonotonic = Callable[[Sequence[int]], list[int]]  # CLOCK_REALTIME ns to CLOCK_MONOTONIC ns (ClockPairs)
_SIZES = attrgetter("sizes")
Instants = tuple[list[int], "TimestampSource"]  # CLOCK_MONOTONIC ns, and the least of the sources that they are from


class Received(Protocol):
    """What a source sees of an exchange (loadgen.servers.wire.transport.Exchange): after each read the bytes so far,
    its instant, and the timespec of the kernel."""

    sizes: array[int]
    user_ns: array[int]
    kernel_timespecs: bytearray
    tcp_stream: Any  # What `watch` gave of its connection
    stream_start: int  # Where it begins in all that came on the connection, TLS included ...
    read_ends: list[int]  # ... and where each read ended there; empty without TLS, where `offsets` says it

    def offsets(self, places: Sequence[int]) -> Sequence[int]:
        """Where these places are in all that came on the connection."""
        ...


class Response(Received, Protocol):
    """The received response to a request that this process sent."""

    sent_ns: int | None  # CLOCK_MONOTONIC immediately before the request was sent
    cut_reads: list[int]  # Indexes of reads whose kernel timestamps may be too late (loadgen.servers.wire.transport)


class TimestampSource:
    """Arrival instants of received bytes. This one, the plain one, is there on every machine: the instant at which this
    process had read them, and as late as the process was. Others say what they do otherwise."""

    name: ClassVar[str] = "user"  # In plans, Records, headers and summaries
    title: ClassVar[str] = "user-space timestamps"  # In sentences
    exact: ClassVar[bool] = False  # Whether a stamp is right however late this process reads
    error_s: ClassVar[float | None] = None
    """What 99 % of exact stamps are off by at most; None: by as long as the process may have been away."""
    by_read: ClassVar[bool] = True  # Whether one read's bytes share a stamp: its tokens cannot be told apart
    unsorted = 0  # Pieces that have come of nobody knows yet which answers
    needs: ClassVar[str] = ""  # What a machine lacks that does not have it, in a sentence of a run

    @property
    def fallback(self) -> TimestampSource | None:
        """The source to use for a response that this source's timestamps contradict. None: there is no other."""
        return None

    def reject(self) -> None:
        """Note that the timestamps of one response contradicted its own request, so that the fallback's are used."""

    @classmethod
    def open(cls, servers: Sequence[Address] = (), share: Share = (0, 1)) -> TimestampSource | None:  # noqa: ARG003
        """Ready to stamp what arrives from these at this share of the connections from now on; None where this machine
        has no such stamps."""
        return cls()

    def claim(self, sock: socket.socket) -> None:
        """A connection is about to be opened, for this share."""

    def watch(self, sock: socket.socket) -> Any:
        """A connection has been opened, and nothing was read from it yet. What is given back belongs to it."""

    @property
    def active_source(self) -> TimestampSource:
        """What stamps connections that are open: this, or what stands in for it where it sees nothing of them."""
        return self

    def ready(self, received: Received) -> bool:  # noqa: ARG002
        """Whether all is known that will be. Otherwise ask again in RETRY_S."""
        return True

    def piece_counts(self, several: Collection[Received]) -> list[int]:
        """How many pieces of each of these answers have come, as far as is known by now."""
        return [*map(len, map(_SIZES, several))]

    def collect(self) -> None:
        """Several times a second: take what has come."""

    def rate_dropped(self) -> bool:
        """Whether clearly less has come per second since this was last asked than before that."""
        return False

    def instants(self, received: Received, ends: Sequence[int], to_monotonic: ToMonotonic) -> Instants:  # noqa: ARG002
        """When the byte before each of these places in the received bytes had arrived, and the source that says so:
        a lesser one where something came without a stamp of this one."""
        return _of_reads(received, ends, received.user_ns.tolist()), self

    def instants_batch(
        self, several: Sequence[tuple[Response, Sequence[int]]], to_monotonic: ToMonotonic
    ) -> list[tuple[list[int], Instants]]:
        """Of each when the last byte of each read had arrived, and `instants` of its places."""
        return [
            (self.instants(received, received.sizes, to_monotonic)[0], self.instants(received, ends, to_monotonic))
            for received, ends in several
        ]

    def counts(self) -> dict[str, Any]:
        """What a second of health telemetry says of it, such as stamps that were lost; by word of the run file."""
        return {}

    def close(self) -> None:
        """No stamps are needed any more."""


class SocketTimestamps(TimestampSource):
    """The kernel's own stamp of the last byte that each read returned (SO_TIMESTAMPING)."""

    name = "socket"
    title = "kernel timestamps"
    exact = True
    error_s = 20e-6  # 99 % lie within 0.011 ms of the server's own log (docs/concepts/stamps.md), rounded up generously

    def __init__(self, held: socket.socket | None = None) -> None:
        self._held = held
        self._rejected = 0

    @property
    def fallback(self) -> TimestampSource | None:
        return PLAIN

    def reject(self) -> None:
        self._rejected += 1

    @classmethod
    def open(cls, servers: Sequence[Address] = (), share: Share = (0, 1)) -> TimestampSource | None:  # noqa: ARG003
        """Linux starts stamping shortly after the first socket asks and stops after the last one is gone
        (net/core/dev.c, `net_enable_timestamp` defers to a work queue), so the first answers of a run could come
        without. The socket that is held asks early, and sends itself datagrams until one arrives stamped."""
        held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        held.bind(("127.0.0.1", 0))
        held.settimeout(0.1)
        with suppress(OSError):
            held.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, RX_SOFTWARE_AND_SOFTWARE)
            for _ in range(TRIES):
                held.sendto(b"?", held.getsockname())
                if held.recvmsg(1, CONTROL_BYTES)[1]:
                    return cls(held)
                sleep(0.001)
        held.close()
        return None

    def watch(self, sock: socket.socket) -> None:
        with suppress(OSError):  # some sandboxes have no stamps to give
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
        if self._held is not None:
            self._held.close()


PLAIN = TimestampSource()  # What is left where a better source has nothing to say


def kernel_stamps(received: Received) -> list[int] | None:
    """CLOCK_REALTIME ns of each read by the kernel; None where one has none."""
    timespecs = array("q")
    timespecs.frombytes(received.kernel_timespecs)
    seconds, nanoseconds = timespecs[::2], timespecs[1::2]
    if not all(seconds):
        return None
    return [s * 1_000_000_000 + n for s, n in zip(seconds, nanoseconds, strict=True)]


def _of_reads(received: Received, ends: Sequence[int], instants: list[int]) -> list[int]:
    """From an instant for each read to one for each place."""
    if ends is received.sizes:
        return instants
    return [instants[bisect_left(received.sizes, end)] for end in ends]
