"""The table of timestamp sources (SOURCES), and the source that reads timestamps from packet rings.

Call `open_source(name)` before the first connection is opened. To add a source, add a class with the interface in
loadgen.servers.wire.timestamps, and an entry in SOURCES.
"""

from __future__ import annotations

import socket
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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

AUTO = "auto"  # In plans: the best source of this machine
COLLECTED_EVERY_NS, SORTED_EVERY_NS = 1_000_000, 1_000_000_000
"""Minimum time between two readings of the rings, and between two assignments of segments to connections. The limits
do not apply if a timestamp is needed at once."""
OPENING_NS = 20_000_000
"""Time between readings of the rings while connections are opened. Each millisecond takes a block of the ring, even if
few segments arrive."""
SETTLED_NS = 250_000_000
"""A timestamp that the ring does not have this long after the read is missing. The kernel hands over each block of the
ring within 1 ms."""
_TCP_STREAM = attrgetter("tcp_stream")
_STREAM_START = attrgetter("stream_start")
_STREAM_ENDS = attrgetter("tcp_stream.ends")


class PacketRingTimestamps(TimestampSource):
    """Timestamp source that uses the kernel's timestamp of each packet, from a packet ring in shared memory.

    These ring timestamps are correct even if the process reads late. Two tokens have the same timestamp only if the
    server sent both in one packet.

    The source compares the ring timestamps of each response with the socket timestamps of this response. The kernel
    delivers a socket timestamp with each read from the socket. If the two do not agree, the socket timestamps are used
    for the whole response. They also replace single timestamps that are missing in the ring.
    """

    name = "ring"
    title = "kernel timestamps of each packet"
    exact = True
    error_s = 20e-6
    by_read = False
    needs = "a separate timestamp for each packet requires Linux with CAP_NET_RAW (see `loadgen calibrate`) and no NAT"

    def __init__(
        self,
        rings: Sequence[PacketRing],
        tables: Sequence[TcpStreamTable],
        fallback: TimestampSource,
        ports: PortRange | None = None,
    ) -> None:
        """Create the source from open packet rings.

        - `rings` contains one ring per address family of the server. A ring receives segments to the local `ports`
          (None: all).
        - `tables` contains one table per ring, which assigns the segments to connections.
        - `fallback` is the source that replaces timestamps which are missing or wrong in the ring.
        """
        self._rings = rings
        self._tables = tables
        self._fallback = fallback
        self._ports = ports
        self._unsorted: list[list[Segments]] = [[] for _ in rings]
        self._collected_ns = 0
        self._sorted_ns = 0
        self._sees_packets: bool | None = None  # Whether the ring sees our packets; None before the first connection
        self._given_up = False  # Whether the ring is no longer used, because too many timestamps were rejected
        self._rate = RateDropDetector()
        self._missed = 0  # Timestamps missing in the ring, since `counts`
        self._difference_bits = Counter[int]()  # Ring minus socket timestamp, in bits of ns, since `counts`
        self._checked = 0  # Number of checked responses
        self._all_rejected = 0
        self._rejected = 0  # Since `counts`

    @classmethod
    def open(cls, servers: Sequence[Address] = (), share: Share = (0, 1)) -> TimestampSource | None:
        from loadgen.servers.wire import packet_ring
        from loadgen.servers.wire.ports import ports_for_worker

        rings: list[PacketRing] = []
        ports = ports_for_worker(*share)
        try:
            for family in dict(servers):
                of_family = [address for address_family, address in servers if address_family == family]
                addresses = [address[:2] for address in of_family if isinstance(address, tuple)]
                rings.append(packet_ring.PacketRing(family, addresses, ports))
        except (AttributeError, OSError):  # not Linux, or not permitted
            for ring in rings:
                ring.close()
            return None
        tables = [packet_ring.TcpStreamTable(len(ring.addresses)) for ring in rings]
        return cls(rings, tables, SocketTimestamps.open(servers) or PLAIN, ports)

    def claim(self, sock: socket.socket) -> None:
        if self._ports is not None:
            self._ports.claim(sock)

    def watch(self, sock: socket.socket) -> TcpStream | None:
        self._fallback.watch(sock)
        peer = sock.getpeername()[:2]
        for ring, table in zip(self._rings, self._tables, strict=True):
            if peer not in ring.addresses:
                continue
            key = ring.addresses.index(peer) << 16 | sock.getsockname()[1]
            if key in table:  # the port was used before: its old segments must be added to the old stream
                self.collect(at_once=True)
            elif monotonic_ns() - self._collected_ns > OPENING_NS:
                self.collect()
            if self._sees_packets is None:
                collect = partial(self.collect, at_once=True)
                self._sees_packets = wait_for_syn_ack(key, table.syn_acks, collect, SETTLED_NS)
            return table.watch(key, time_ns()) if self._sees_packets and not self._given_up else None
        return None

    @property
    def active_source(self) -> TimestampSource:
        return self._fallback if self._sees_packets is False or self._given_up else self

    @property
    def fallback(self) -> TimestampSource:
        return self._fallback

    def reject(self) -> None:
        self._rejected += 1
        self._all_rejected += 1
        if self._all_rejected >= REJECTED_MIN and self._all_rejected > REJECTED_SHARE * self._checked:
            self._given_up = True

    def ready(self, received: Received) -> bool:
        stream: TcpStream | None = received.tcp_stream
        if stream is None or not received.sizes or self._given_up:
            return True
        read_end = received.read_ends[-1] if received.read_ends else received.offsets(received.sizes[-1:])[0]
        if stream.contiguous_end < read_end:
            self.collect(at_once=True)
        return stream.contiguous_end >= read_end or monotonic_ns() - received.user_ns[-1] > SETTLED_NS

    def arrived_bytes(self, responses: Collection[Received]) -> list[int]:
        # In a burst, every response is the first one on its connection. This case takes a fifth of the time.
        if all(map(_TCP_STREAM, responses)) and not any(map(_STREAM_START, responses)):
            return [ends[-1] if ends else 0 for ends in map(_STREAM_ENDS, responses)]
        counts = []
        for received in responses:
            if received.tcp_stream:
                counts.append(max(0, received.tcp_stream.contiguous_end - received.stream_start))
            else:
                counts.append(received.sizes[-1] if received.sizes else 0)
        return counts

    def collect(self, *, at_once: bool = False) -> None:
        """Read the rings, and assign the segments to their connections.

        By default, the rings are read at most once per millisecond, and segments are assigned at most once per second,
        because assigning many segments together costs less. If `at_once` is True, this call reads the rings and assigns
        all segments, regardless of these limits."""
        now_ns = monotonic_ns()
        if now_ns - self._collected_ns < COLLECTED_EVERY_NS and not at_once:
            return
        self._collected_ns = now_ns
        sort_now = at_once or now_ns - self._sorted_ns >= SORTED_EVERY_NS
        for ring, table, unsorted in zip(self._rings, self._tables, self._unsorted, strict=True):
            segments = ring.read()
            if segments is not None:
                self._rate.arrived += len(segments.key)
                self.unsorted_bytes += table.data_bytes(segments)
                unsorted.append(segments)
            if sort_now and unsorted:
                table.add(*unsorted)
                unsorted.clear()
        if sort_now:
            self._sorted_ns = now_ns
            self.unsorted_bytes = 0

    def rate_dropped(self) -> bool:
        self.collect()
        return self._rate.rate_dropped()

    def instants(self, received: Received, ends: Sequence[int], to_monotonic: ToMonotonic) -> Instants:
        stream: TcpStream | None = received.tcp_stream
        if stream is None or self._given_up:
            return self._fallback.instants(received, ends, to_monotonic)
        arrivals = stream.arrivals(received.offsets(ends))
        instants = to_monotonic(arrivals)
        if min(arrivals) >= 0:
            return instants, self

        # The ring lacks some of the timestamps. Timestamps of the fallback may be later than those of the following
        # bytes, which is impossible, so the next instant limits them.
        missing = [index for index, stamp in enumerate(arrivals) if stamp < 0]
        self._missed += len(missing)
        replacements, source = self._fallback.instants(received, [ends[index] for index in missing], to_monotonic)
        for index, instant in zip(reversed(missing), reversed(replacements), strict=True):
            instants[index] = min([instant, *instants[index + 1 : index + 2]])
        return instants, source

    def instants_batch(
        self, responses: Sequence[tuple[Response, Sequence[int]]], to_monotonic: ToMonotonic
    ) -> list[tuple[list[int], Instants]]:
        if self._given_up or any(received.tcp_stream is None for received, _ in responses):
            return [self._timestamp_one(received, ends, to_monotonic) for received, ends in responses]
        from loadgen.servers.wire.packet_ring import arrivals_batch

        requests = [(received.tcp_stream, _stream_offsets(received, ends)) for received, ends in responses]
        arrivals = arrivals_batch(requests)
        instants = to_monotonic(arrivals)
        results = list[tuple[list[int], Instants]]()
        stop = 0
        for (received, ends), (stream, offsets) in zip(responses, requests, strict=True):
            # For each response, `arrivals` has the times of its offsets (`ends`), then the times of its reads, and with
            # TLS also the times of the encrypted bytes of its reads.
            start, stop = stop, stop + len(offsets)
            reads_start = start + len(ends)
            reads_stop = reads_start + len(received.sizes)
            stream.discard_before(received.stream_start)  # no further: later responses may share the connection
            if not self._agrees(received, arrivals[stop - len(received.sizes) : stop]):
                self.reject()
                results += self._fallback.instants_batch([(received, ends)], to_monotonic)
            elif min(arrivals[start:reads_stop]) < 0:
                results += super().instants_batch([(received, ends)], to_monotonic)
            else:
                results.append((instants[reads_start:reads_stop], (instants[start:reads_start], self)))
        return results

    def _timestamp_one(
        self, received: Response, ends: Sequence[int], to_monotonic: ToMonotonic
    ) -> tuple[list[int], Instants]:
        """Return the timestamps of one response.

        If the ring cannot be used for this response, the fallback source provides the timestamps.
        """
        if received.tcp_stream is not None and not self._given_up:
            return self.instants_batch([(received, ends)], to_monotonic)[0]
        if received.tcp_stream is not None:
            received.tcp_stream.discard_before(received.stream_start)
        return self._fallback.instants_batch([(received, ends)], to_monotonic)[0]

    def _agrees(self, received: Response, ring_stamps: Sequence[int]) -> bool:
        """Return True if the ring timestamps of a response agree with its socket timestamps.

        The kernel takes both: a ring timestamp when a packet arrives, and a socket timestamp for each read from the
        socket. `ring_stamps` contains one ring timestamp per read. The result is also True if the timestamps cannot be
        compared, for example after a packet was lost and sent again.

        The differences between the timestamps are counted for the health telemetry of the run.
        """
        self._checked += 1
        # The socket timestamps of retransmitted or reordered segments cannot be compared with the ring's.
        socket_stamps = None if received.tcp_stream.reordered else kernel_stamps(received)
        if socket_stamps is None:
            return True
        if received.cut_reads:
            whole_reads = [index for index in range(len(socket_stamps)) if index not in received.cut_reads]
            ring_stamps = [ring_stamps[index] for index in whole_reads]
            socket_stamps = [socket_stamps[index] for index in whole_reads]
        differences = stamp_differences(ring_stamps, socket_stamps, received.tcp_stream.closed_ns)
        self._difference_bits.update(map(int.bit_length, differences))
        return stamps_agree(differences)

    def counts(self) -> dict[str, Any]:
        self.collect()
        result = {
            "ring_drops": sum(ring.drops() for ring in self._rings),
            "ring_missed": self._missed,
            "ring_rejected": self._rejected,
            "ring_given_up": int(self._given_up),
            "ring_off_counts": {str(bits): count for bits, count in sorted(self._difference_bits.items())},
        }
        self._missed = 0
        self._rejected = 0
        self._difference_bits = Counter()
        return result | self._fallback.counts()

    def close(self) -> None:
        self._fallback.close()
        for ring in self._rings:
            ring.close()


def _stream_offsets(received: Received, ends: Sequence[int]) -> array[int]:
    """Return the offsets in the TCP stream for which the response `received` needs timestamps.

    The result contains three groups of offsets, one after the other:

    1. The offsets `ends`. They are offsets in the received bytes, and are converted to offsets in the TCP stream.
    2. The end of each read, converted in the same way.
    3. Only with TLS: the end of the encrypted bytes of each read.
    """
    end_offsets = received.offsets(ends)
    read_offsets = received.offsets(received.sizes)
    return array("q", end_offsets) + array("q", read_offsets) + array("q", received.read_ends)


SOURCES: dict[str, type[TimestampSource]] = {
    source.name: source for source in (PacketRingTimestamps, SocketTimestamps, TimestampSource)
}
"""The sources by name, best first."""


def preload_source(name: str) -> None:
    """Import the modules that a timestamp source needs. Call this function before forking the worker processes."""
    if name in (AUTO, PacketRingTimestamps.name):
        from loadgen.servers.wire import packet_ring  # noqa: F401


def open_source(name: str, servers: Sequence[Address], share: Share = (0, 1)) -> TimestampSource:
    """Open the timestamp source `name`, or the next best source if this machine does not support `name`.

    - `name` is a key of SOURCES, or AUTO for the best source.
    - `servers` contains the addresses from which data is received. The kernel takes no timestamps of data from a Unix
      socket, so a Unix socket always gets the source of user-space timestamps.
    - `share` is the index of this worker process and the number of workers.
    """
    if any(isinstance(address, str) for _, address in servers):
        return PLAIN
    first = 0 if name == AUTO else [*SOURCES].index(name)
    for source in [*SOURCES.values()][first:]:
        opened = source.open(servers, share)
        if opened:
            return opened
    return PLAIN


def missing_requirement(requested: str, name: str, server: Mapping[str, Any] = {}) -> str:
    """Explain why the requested timestamp source is not in use. Return "" if it is in use.

    - `requested` is the name of the requested source, or AUTO for the best source.
    - `name` is the name of the source in use.
    - `server` contains the facts about the server from the run file. Its `protocol` and `addresses` may be the reason.
    """
    best = next(iter(SOURCES)) if requested == AUTO else requested
    if best not in SOURCES or best == name:
        return ""
    if server.get("protocol"):
        return f"{server['protocol']} requests share connections, so their data has no kernel timestamps"
    if any(address.startswith("/") for address in server.get("addresses", ())):
        return "data from a Unix socket has no kernel timestamps; use the server's TCP port for exact timestamps"
    return SOURCES[best].needs


def least_exact_source(names: Iterable[str]) -> str:
    """Return the least exact of the timestamp sources in `names`. A run is only as exact as this source.

    An unknown name counts as `user`, the source that takes timestamps in user space. It is the least exact source of
    all.
    """
    ranking = [*SOURCES]
    ranks = [ranking.index(name) if name in ranking else len(ranking) - 1 for name in names]
    return ranking[max(ranks, default=-1)]
