"""The sources of arrival instants (loadgen.servers.wire.timestamps) by name, and the one that reads packet rings.

    open_source(name)      before the first connection; the next best where the machine has none of that name

Another source is one class and its line in SOURCES.
"""

from __future__ import annotations

import socket
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from operator import attrgetter
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any

from loadgen.servers.wire.deferred_reads import RateDropDetector
from loadgen.servers.wire.stamp_check import (
    REJECTED_MIN,
    REJECTED_SHARE,
    stamp_differences,
    stamps_agree,
    wait_for_syn_ack,
)
from loadgen.servers.wire.timestamps import (
    PLAIN,
    Address,
    Instants,
    Received,
    Response,
    Share,
    SocketTimestamps,
    TimestampSource,
    ToMonotonic,
    kernel_stamps,
)

if TYPE_CHECKING:
    from loadgen.servers.wire.packet_headers import Segments
    from loadgen.servers.wire.packet_ring import PacketRing, TcpStream, TcpStreamTable
    from loadgen.servers.wire.ports import PortRange

AUTO = "auto"  # In plans: the best that this machine has
COLLECTED_EVERY_NS, SORTED_EVERY_NS = 1_000_000, 1_000_000_000
OPENING_NS = 20_000_000  # While connections are opened: each millisecond takes a block of the ring, however little came
SETTLED_NS = 250_000_000  # What the ring has not said of a read by then, it will not say: it hands over within 1 ms
_WATCHED, _BEGINS, _ENDS = map(attrgetter, ("tcp_stream", "stream_start", "tcp_stream.ends"))


class PacketRingTimestamps(TimestampSource):
    """The kernel's stamp of each packet, in memory that it shares with us (loadgen.servers.wire.packet_ring). Reads
    may be late, and no token shares a stamp with another unless the server sent both in one packet. Each read is
    compared with the socket's timestamp, which also replaces what the ring does not have and what it has wrong."""

    name = "ring"
    title = "kernel timestamps of each packet"
    exact = True
    error_s = 20e-6
    by_read = False
    needs = "each packet has a stamp of its own on Linux with CAP_NET_RAW (see `loadgen calibrate`) and without NAT"

    def __init__(
        self,
        rings: Sequence[PacketRing],
        sorted_by: Sequence[TcpStreamTable],
        instead: TimestampSource,
        ports: PortRange | None = None,
    ) -> None:
        """A ring for each family of the server's addresses, which holds what comes to these ports of ours (None: to
        all), and the source to use where they have nothing or are wrong."""
        self._rings, self._sorted_by, self._instead, self._ports = rings, sorted_by, instead, ports
        self._unsorted: list[list[Segments]] = [[] for _ in rings]
        self._collected_ns = self._sorted_ns = 0
        self._sees: bool | None = None  # Packets of our connections; None before the first
        self._given_up = False  # Whether too many timestamps were rejected to use any more of them
        self._ebb = RateDropDetector()
        self._missed, self._off = 0, Counter[int]()
        self._checked = self._all_rejected = self._rejected = 0  # Responses; the last one since `counts`

    @classmethod
    def open(cls, servers: Sequence[Address] = (), share: Share = (0, 1)) -> TimestampSource | None:
        from loadgen.servers.wire import packet_ring as ring
        from loadgen.servers.wire.ports import ports_for_worker

        rings: list[PacketRing] = []
        ports = ports_for_worker(*share)
        try:
            for family in dict(servers):
                rings += [ring.PacketRing(family, [address[:2] for each, address in servers if each == family], ports)]
        except (AttributeError, OSError):  # not Linux, or not permitted
            for each in rings:
                each.close()
            return None
        sorted_by = [ring.TcpStreamTable(len(each.addresses)) for each in rings]
        return cls(rings, sorted_by, SocketTimestamps.open(servers) or PLAIN, ports)

    def claim(self, sock: socket.socket) -> None:
        if self._ports is not None:
            self._ports.claim(sock)

    def watch(self, sock: socket.socket) -> TcpStream | None:
        self._instead.watch(sock)
        peer = sock.getpeername()[:2]
        for ring, flows in zip(self._rings, self._sorted_by, strict=True):
            if peer in ring.addresses:
                key = ring.addresses.index(peer) << 16 | sock.getsockname()[1]
                if key in flows:
                    self.collect(at_once=True)
                elif monotonic_ns() - self._collected_ns > OPENING_NS:
                    self.collect()
                if self._sees is None:
                    self._sees = wait_for_syn_ack(key, flows.syn_acks, partial(self.collect, at_once=True), SETTLED_NS)
                return flows.watch(key, time_ns()) if self._sees and not self._given_up else None
        return None

    @property
    def active_source(self) -> TimestampSource:
        return self._instead if self._sees is False or self._given_up else self

    @property
    def fallback(self) -> TimestampSource:
        return self._instead

    def reject(self) -> None:
        self._rejected += 1
        self._all_rejected += 1
        if self._all_rejected >= REJECTED_MIN and self._all_rejected > REJECTED_SHARE * self._checked:
            self._given_up = True

    def ready(self, received: Received) -> bool:
        flow: TcpStream | None = received.tcp_stream
        if flow is None or not received.sizes or self._given_up:
            return True
        wanted = received.read_ends[-1] if received.read_ends else received.offsets(received.sizes[-1:])[0]
        if flow.contiguous_end < wanted:
            self.collect(at_once=True)
        return flow.contiguous_end >= wanted or monotonic_ns() - received.user_ns[-1] > SETTLED_NS

    def piece_counts(self, several: Collection[Received]) -> list[int]:
        if all(map(_WATCHED, several)) and not any(map(_BEGINS, several)):  # as in a burst; five times as fast
            return [*map(len, map(_ENDS, several))]
        seen = [(each, each.tcp_stream.ends if each.tcp_stream else each.sizes) for each in several]
        return [len(ends) - (bisect_right(ends, each.stream_start) if each.tcp_stream else 0) for each, ends in seen]

    def collect(self, *, at_once: bool = False) -> None:
        """What has come is sorted by connections `at_once`, or after a while, which costs less of many together."""
        now_ns = monotonic_ns()
        if now_ns - self._collected_ns < COLLECTED_EVERY_NS and not at_once:
            return
        self._collected_ns, sorts = now_ns, at_once or now_ns - self._sorted_ns >= SORTED_EVERY_NS
        for ring, flows, unsorted in zip(self._rings, self._sorted_by, self._unsorted, strict=True):
            if (received := ring.read()) is not None:
                self._ebb.came += len(received.key)
                self.unsorted += flows.count(received)
                unsorted.append(received)
            if sorts and unsorted:
                flows.add(*unsorted)
                unsorted.clear()
        if sorts:
            self._sorted_ns, self.unsorted = now_ns, 0

    def rate_dropped(self) -> bool:
        self.collect()
        return self._ebb.rate_dropped()

    def instants(self, received: Received, ends: Sequence[int], to_monotonic: ToMonotonic) -> Instants:
        flow: TcpStream | None = received.tcp_stream
        if flow is None or self._given_up:
            return self._instead.instants(received, ends, to_monotonic)
        result = flow.arrivals(received.offsets(ends))
        instants = to_monotonic(result)
        if min(result) >= 0:
            return instants, self
        missing = [at for at, stamp in enumerate(result) if stamp < 0]
        self._missed += len(missing)
        others, by = self._instead.instants(received, [ends[at] for at in missing], to_monotonic)
        for at, instant in zip(reversed(missing), reversed(others), strict=True):  # no later than what came behind it
            instants[at] = min([instant, *instants[at + 1 : at + 2]])
        return instants, by

    def instants_batch(
        self, several: Sequence[tuple[Response, Sequence[int]]], to_monotonic: ToMonotonic
    ) -> list[tuple[list[int], Instants]]:
        if self._given_up or any(received.tcp_stream is None for received, _ in several):
            return [self._of_one(*each, to_monotonic) for each in several]
        from loadgen.servers.wire.packet_ring import arrivals_batch

        wanted = [(received.tcp_stream, _wanted(received, ends)) for received, ends in several]
        result, given, at = arrivals_batch(wanted), list[tuple[list[int], Instants]](), 0
        instants = to_monotonic(result)
        for (received, ends), (flow, places) in zip(several, wanted, strict=True):
            begin, at = at, at + len(places)
            flow.discard_before(received.stream_start)  # not before: others may have come on the same connection
            read, stop = begin + len(ends), begin + len(ends) + len(received.sizes)
            if not self._agrees(received, result[at - len(received.sizes) : at]):
                self.reject()
                given += self._instead.instants_batch([(received, ends)], to_monotonic)
            elif min(result[begin:stop]) < 0:
                given += super().instants_batch([(received, ends)], to_monotonic)
            else:
                given.append((instants[read:stop], (instants[begin:read], self)))
        return given

    def _of_one(self, received: Response, ends: Sequence[int], to_monotonic: ToMonotonic) -> tuple[list[int], Instants]:
        """Timestamp one response: with the fallback, unless the ring sees its connection."""
        if received.tcp_stream is not None and not self._given_up:
            return self.instants_batch([(received, ends)], to_monotonic)[0]
        if received.tcp_stream is not None:
            received.tcp_stream.discard_before(received.stream_start)
        return self._instead.instants_batch([(received, ends)], to_monotonic)[0]

    def _agrees(self, received: Response, by_ring: Sequence[int]) -> bool:
        """Compare the ring's timestamp of each read with the socket's, and count the differences."""
        self._checked += 1
        stamps = None if received.tcp_stream.reordered else kernel_stamps(received)
        if stamps is None:  # the socket says nothing of segments that came again or out of order
            return True
        if received.cut_reads:
            retained = [index for index in range(len(stamps)) if index not in received.cut_reads]
            by_ring, stamps = [by_ring[index] for index in retained], [stamps[index] for index in retained]
        apart = stamp_differences(by_ring, stamps, received.tcp_stream.closed_ns)
        self._off.update(map(int.bit_length, apart))
        return stamps_agree(apart)

    def counts(self) -> dict[str, Any]:
        self.collect()
        result = {
            "ring_drops": sum(ring.drops() for ring in self._rings),
            "ring_missed": self._missed,
            "ring_rejected": self._rejected,
            "ring_given_up": int(self._given_up),
            "ring_off_counts": {str(bits): count for bits, count in sorted(self._off.items())},
        }
        self._missed, self._rejected, self._off = 0, 0, Counter()
        return result | self._instead.counts()

    def close(self) -> None:
        self._instead.close()
        for ring in self._rings:
            ring.close()


def _wanted(received: Received, ends: Sequence[int]) -> array[int]:
    """Where on its connection these places are, and the ends of its reads, in plain bytes and as they came."""
    of_ends, of_reads = received.offsets(ends), received.offsets(received.sizes)
    return array("q", of_ends) + array("q", of_reads) + array("q", received.read_ends)


SOURCES: dict[str, type[TimestampSource]] = {
    each.name: each for each in (PacketRingTimestamps, SocketTimestamps, TimestampSource)
}
"""By name, the best first."""


def preload_source(name: str) -> None:
    """Import what opening this source takes: once, for all processes that are forked later."""
    if name in (AUTO, PacketRingTimestamps.name):
        from loadgen.servers.wire import packet_ring as ring  # noqa: F401


def open_source(name: str, servers: Sequence[Address], share: Share = (0, 1)) -> TimestampSource:
    """The source of this name (a key of SOURCES, or AUTO), or the best after it that this machine has."""
    better = 0 if name == AUTO else [*SOURCES].index(name)
    return next((opened for source in [*SOURCES.values()][better:] if (opened := source.open(servers, share))), PLAIN)


def missing_requirement(wanted: str, name: str) -> str:
    """What it would have taken to have the source that was wanted, or with AUTO the best, instead of this one."""
    best = next(iter(SOURCES)) if wanted == AUTO else wanted
    return SOURCES[best].needs if best in SOURCES and best != name else ""


def least_exact_source(names: Iterable[str]) -> str:
    """The source that all of a run's stamps are as good as: the least of them; the plain one of one not known here."""
    known = [*SOURCES]
    return known[max((known.index(name) if name in known else len(known) - 1 for name in names), default=-1)]
