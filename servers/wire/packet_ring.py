"""The packet ring: the kernel stamps each TCP segment that a server sends us, whether or not anybody reads.

segment ──> loadgen.servers.wire.packet_socket ──> its headers and its stamp, in memory shared with us ──> Ring.read
    └─────> the socket's buffer, which is read whenever there is time

offset of a segment = sequence number - that of the SYN-ACK - 1, modulo 2^32
arrival of a byte   = stamp of the segment that made it deliverable, with all bytes before it
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from loadgen.servers.wire.packet_headers import Segments, parse_segments
from loadgen.servers.wire.packet_socket import BLOCK_BYTES, dropped_segments, open_packet_socket
from loadgen.servers.wire.ports import PortRange

UNKNOWN = -1


class TcpStream:
    """When what came on one connection was deliverable."""

    __slots__ = ("closed_ns", "discarded_end", "ends", "has_gap", "opened_ns", "out_of_order", "reordered", "stamps")

    def __init__(self, opened_ns: int) -> None:
        self.opened_ns = opened_ns  # CLOCK_REALTIME; the SYN-ACK came before
        self.ends = array("q")  # Up to here everything was there ...
        self.stamps = array("q")  # ... at this instant, or UNKNOWN where a segment is missing in the ring
        self.out_of_order: list[tuple[int, int, int]] = []  # (start, end, stamp) of segments behind a missing one
        self.discarded_end = 0  # Marks up to this offset are gone
        self.closed_ns = 0  # When its FIN came
        self.reordered = False  # Whether something was lost or came out of order
        self.has_gap = False  # Whether a segment is missing in the ring

    def arrivals(self, offsets: Sequence[int]) -> list[int]:
        """CLOCK_REALTIME ns at which the byte before each of these offsets was deliverable, or UNKNOWN. The last one is
        the largest."""
        if self.out_of_order and self.contiguous_end < offsets[-1]:
            self._skip(offsets[-1])
        if not self.ends:
            return [UNKNOWN] * len(offsets)
        wanted, stamps = np.array(offsets), np.frombuffer(self.stamps, np.int64)
        at = np.frombuffer(self.ends, np.int64).searchsorted(wanted)
        if self.has_gap or self.discarded_end or offsets[-1] > self.contiguous_end:
            unknown = (at == len(stamps)) | (wanted <= self.discarded_end)
            at[unknown] = 0
            unknown |= stamps[at] == UNKNOWN
            arrived = np.where(unknown, UNKNOWN, np.maximum.accumulate(stamps)[at])
        else:  # nearly always
            arrived = np.maximum.accumulate(stamps)[at]
        result: list[int] = arrived.tolist()
        return result

    def whole(self, offsets: Sequence[int]) -> bool:
        """Whether a stamp of each of these offsets is known, and nothing is left to be put in order."""
        if self.out_of_order or self.has_gap:
            return False
        return self.discarded_end < offsets[0] and offsets[-1] <= self.contiguous_end

    @property
    def contiguous_end(self) -> int:
        """Up to this offset everything has come."""
        return self.ends[-1] if self.ends else self.discarded_end

    def discard_before(self, offset: int) -> None:
        """Nobody will ask for anything up to this offset any more."""
        gone = bisect_right(self.ends, offset)
        if gone:
            self.discarded_end = self.ends[gone - 1]
            del self.ends[:gone], self.stamps[:gone]

    def add(self, start: int, end: int, stamp: int) -> None:
        """A segment, one of a flow in which not everything came in its order."""
        through = self.contiguous_end
        if start > through:
            self.reordered = True
            heappush(self.out_of_order, (start, end, stamp))
        elif end > through:
            while self.out_of_order and self.out_of_order[0][0] <= end:
                end = max(end, heappop(self.out_of_order)[1])
            self.ends.append(end)
            self.stamps.append(stamp)

    def _skip(self, wanted: int) -> None:
        """The socket has delivered everything up to `wanted`: what is missing before it is missing in the ring only."""
        self.has_gap = True
        while self.out_of_order and self.contiguous_end < wanted:
            start, end, stamp = heappop(self.out_of_order)
            for index, at in (start, UNKNOWN), (end, stamp):
                if index > self.contiguous_end:
                    self.ends.append(index)
                    self.stamps.append(at)


def arrivals_batch(wanted: Sequence[tuple[TcpStream, array[int]]]) -> list[int]:
    """`TcpStream.arrivals` of several, at most 100, in one list: numpy takes longer to be asked than for all of
    them."""
    if len(wanted) < 2 or not all(flow.whole(offsets) for flow, offsets in wanted):
        return [arrived for flow, offsets in wanted for arrived in flow.arrivals(offsets)]
    apart = np.arange(len(wanted)) << 56  # so that each finds its own
    by_mark = np.repeat(apart, [len(flow.ends) for flow, _ in wanted])
    by_offset = np.repeat(apart, [len(offsets) for _, offsets in wanted])
    columns = [flow.ends for flow, _ in wanted], [flow.stamps for flow, _ in wanted], [each for _, each in wanted]
    ends, stamps, offsets = (np.frombuffer(b"".join(column), np.int64) for column in columns)
    at = (ends + by_mark).searchsorted(offsets + by_offset)
    first = stamps.min()
    arrived: list[int] = (np.maximum.accumulate(stamps - first + by_mark)[at] - by_offset + first).tolist()
    return arrived


class TcpStreamTable:
    """Sorts segments by the connections that are watched."""

    def __init__(self, addresses: int = 1) -> None:
        self._flows: dict[int, TcpStream] = {}
        self._first = np.zeros(addresses << 16, np.int64)
        """Of each key the sequence number of its stream's first byte; UNKNOWN before the SYN-ACK was seen."""
        self._through = np.full(addresses << 16, UNKNOWN)
        """Of each key `TcpStream.through`; UNKNOWN where nothing is watched."""
        self._began_ns = np.zeros(addresses << 16, np.int64)
        """Of each key the stamp of its SYN-ACK: what came before is of a connection before this one."""
        self._holding: set[int] = set()
        """Keys of flows of which something is missing before what came."""
        self.syn_acks: dict[int, tuple[int, int]] = {}
        """First sequence number and stamp of connections that are not watched yet."""

    def __contains__(self, key: int) -> bool:
        return key in self._flows

    def watch(self, key: int, opened_ns: int) -> TcpStream:
        """From now on. What came on a connection that was watched by this key is to be added first."""
        flow = self._flows[key] = TcpStream(opened_ns)
        self._holding.discard(key)
        self._first[key], self._began_ns[key] = self.syn_acks.pop(key, (UNKNOWN, 0))
        self._through[key] = 0
        return flow

    def count(self, came: Segments) -> int:
        """How many of these segments bring something on connections that are watched."""
        return int(np.count_nonzero((came.length > 0) & (self._through[came.key] != UNKNOWN)))

    def add(self, *parts: Segments) -> None:
        """Segments, in the order in which they came."""
        received = Segments(*map(np.concatenate, zip(*parts, strict=True)))
        for at in np.flatnonzero(received.syn).tolist():
            self._greet(
                int(received.key[at]), (int(received.sequence[at]) + 1) & 0xFFFFFFFF, int(received.stamp_ns[at])
            )
        for at in np.flatnonzero(received.fin).tolist():
            if (ending := self._flows.get(int(received.key[at]))) is not None:
                ending.closed_ns = int(received.stamp_ns[at])
        key = received.key
        retained = (
            (received.length > 0) & ~received.syn & (self._through[key] != UNKNOWN) & (self._first[key] != UNKNOWN)
        )
        retained &= received.stamp_ns >= self._began_ns[key]
        order = np.flatnonzero(retained)
        if not len(order):
            return
        narrow = np.uint16 if len(self._first) == 1 << 16 else np.int64  # the narrow is sorted in a tenth of the time
        order = order[np.argsort(key[order].astype(narrow), kind="stable")]
        key, stamp = key[order], received.stamp_ns[order]
        through = self._through[key]
        away = (received.sequence[order].astype(np.int64) - self._first[key] - through) & 0xFFFFFFFF
        start = through + away - ((away >> 31) << 32)
        end = start + received.length[order]
        first = np.diff(key, prepend=UNKNOWN) != 0
        apart = np.cumsum(first) << 40  # so that how far each flow had come is found of all of them at once
        furthest = np.maximum.accumulate(apart + np.maximum(end, through)) - apart
        before = np.where(first, through, np.roll(furthest, 1))
        amiss = self._holding.union(key[start > before].tolist())
        new = end > before  # else it was sent again, and is known
        if amiss:
            new |= np.isin(key, [*amiss])
        start, end, stamp, key = start[new], end[new], stamp[new], key[new]
        heads = np.flatnonzero(np.diff(key, prepend=UNKNOWN))
        tails = np.append(heads[1:], len(key))[: len(heads)]
        self._through[key[heads]] = end[tails - 1]
        ends, stamps = end.tobytes(), stamp.tobytes()
        for head, tail, name in zip(heads.tolist(), tails.tolist(), key[heads].tolist(), strict=True):
            flow = self._flows[name]
            if name in amiss:
                for each in zip(start[head:tail].tolist(), end[head:tail].tolist(), stamp[head:tail].tolist()):  # noqa: B905
                    flow.add(*each)
                self._through[name] = flow.contiguous_end
                (self._holding.add if flow.out_of_order else self._holding.discard)(name)
            else:
                flow.ends.frombytes(ends[8 * head : 8 * tail])
                flow.stamps.frombytes(stamps[8 * head : 8 * tail])

    def _greet(self, key: int, first: int, stamp_ns: int) -> None:
        flow = self._flows.get(key)
        if flow is not None and not flow.contiguous_end and stamp_ns <= flow.opened_ns:
            self._first[key], self._began_ns[key] = first, stamp_ns
        elif self._first[key] != first or flow is None:
            self.syn_acks[key] = first, stamp_ns


class PacketRing:
    """A packet socket with a memory-mapped ring, for the addresses of one family, and for these ports of ours."""

    def __init__(self, family: int, addresses: Sequence[tuple[Any, ...]], ports: PortRange | None = None) -> None:
        """Raises OSError where the kernel does not let us."""
        self.family, self.addresses = family, addresses
        self._next = 0
        self._socket, self._memory = open_packet_socket(family, addresses, ports)
        self.words = np.frombuffer(self._memory, np.uint32).reshape(-1, BLOCK_BYTES // 4)

    def read(self) -> Segments | None:
        """What has been handed over since the last time; None for nothing."""
        count, looked_at, maximum = 0, 1, len(self.words)
        while count < maximum and self.words[at := (self._next + count) % maximum, 2] & 1:
            ours = self.words[at : min(at + looked_at, at + maximum - count), 2] & 1
            count += len(ours) if ours.all() else int(ours.argmin())
            looked_at *= 2
        if not count:
            return None
        blocks = (self._next + np.arange(count)) % maximum
        result = parse_segments(self.words, blocks, self.family, self.addresses)
        self.words[blocks, 2] = 0
        self._next = (self._next + count) % maximum
        return result

    def drops(self) -> int:
        """Segments that found no room since the last time."""
        return dropped_segments(self._socket)

    def close(self) -> None:
        """Keep nothing more."""
        del self.words
        self._memory.close()
        self._socket.close()
