"""The packet ring: the kernel stamps each TCP segment that a server sends us, whether or not anybody reads.

    segment ──> filter: from the server? ──> its headers and its stamp, in memory shared with us ──> Ring.read
        └─────> the socket's buffer, which is read whenever there is time

A packet socket (packet(7), TPACKET_V3 of Documentation/networking/packet_mmap.rst) sees what comes in on the interface
of the route to the server, before IP does. The filter keeps the IP header and 14 bytes of the TCP header: of what was
said nothing is ever copied.

    offset of a segment = sequence number - that of the SYN-ACK - 1, modulo 2^32
    arrival of a byte   = stamp of the segment that made it deliverable, with all bytes before it
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import sys
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from time import monotonic_ns, time_ns
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from servers.wire.stamps import (
    PLAIN,
    Address,
    Instants,
    Received,
    RingStamps,
    SocketStamps,
    StampSource,
    ToMonotonic,
    kernel_stamps,
)

Words = NDArray[np.uint32]

BLOCK_BYTES, BLOCKS = 8_192, 4_096
"""What is not read for long is kept as long as it fits 32 MiB, about 230,000 segments, and for 4 s of any load."""
RETIRE_MS = 1
"""A block is handed over when it is full, or this long after its first segment."""
ADDRESSES_MOST = 60
"""What jumps of a filter reach over."""
UNKNOWN = -1
COLLECTED_EVERY_NS = 1_000_000
SETTLED_NS = 250_000_000  # What the ring has not said of a read by then, it will not say: it hands over within 1 ms

_ETHERTYPE_ALL, _ETHERTYPE_IPV4, _ETHERTYPE_IPV6, _ETHERTYPE_AT = 3, 0x0800, 0x86DD, 0xFFFFF000
_SOL_PACKET, _RX_RING, _STATISTICS, _VERSION, _TIMESTAMP, _IGNORE_OUTGOING = 263, 5, 6, 10, 17, 23
_TPACKET_V3, _SOFTWARE_STAMPS, _ATTACH_FILTER = 2, 1 << 4, 26
_INSTRUCTION = struct.Struct("=HBBI")
"""linux/filter.h, struct sock_filter: what to do, where to go if true, if false (both counted from the next), value."""
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _LOAD_HALF_X, _LOAD_IP_LENGTH_X = 0x20, 0x28, 0x30, 0x48, 0xB1
_LOAD_X, _X_TO_A, _ADD, _EQUAL, _ANY_BIT, _RETURN_A, _RETURN = 0x01, 0x87, 0x04, 0x15, 0x45, 0x16, 0x06
_SOCKET_ADDRESS = struct.Struct("HHi12x")
"""linux/if_packet.h, struct sockaddr_ll: family, protocol, interface."""
_NETLINK_ROUTE, _GET_ROUTE, _NEW_ROUTE, _REQUEST, _DESTINATION, _INTERFACE = 0, 26, 24, 1, 1, 4
_MESSAGE, _ROUTE, _ATTRIBUTE = struct.Struct("IHHII"), struct.Struct("8BI"), struct.Struct("HH")
"""linux/rtnetlink.h: struct nlmsghdr, rtmsg, rtattr."""
_TCP, _FRAGMENT, _KEPT_OF_TCP, _IPV6_BYTES = 6, 0x1FFF, 14, 40
_FIN, _SYN = 0x01, 0x02


class Segments(NamedTuple):
    """Columns of what came, in the order in which it came."""

    key: NDArray[np.int64]
    """Our port, and 65,536 for each of the addresses before the server's."""
    sequence: Words
    syn: NDArray[np.bool_]
    fin: NDArray[np.bool_]
    length: NDArray[np.int64]
    """Bytes of the stream."""
    stamp_ns: NDArray[np.int64]
    """CLOCK_REALTIME."""


def program(family: int, addresses: Sequence[tuple[Any, ...]]) -> bytes:
    """The filter: of TCP segments from these addresses, how many bytes are kept; of others none. X is where TCP begins,
    and a jump to `accept` or `reject` is known by its place in the end."""
    accept, reject = -1, -2
    four = family == socket.AF_INET
    code: list[tuple[int, int, int, int]] = [
        (_LOAD_WORD, 0, 0, _ETHERTYPE_AT),
        (_EQUAL, 0, reject, _ETHERTYPE_IPV4 if four else _ETHERTYPE_IPV6),
        (_LOAD_BYTE, 0, 0, 9 if four else 6),
        (_EQUAL, 0, reject, _TCP),
    ]
    if four:
        code += [(_LOAD_HALF, 0, 0, 6), (_ANY_BIT, reject, 0, _FRAGMENT), (_LOAD_IP_LENGTH_X, 0, 0, 0)]
    else:
        code += [(_LOAD_X, 0, 0, _IPV6_BYTES)]
    for address in addresses:
        words = _address_words(family, address)
        for index, word in enumerate(words):
            code += [
                (_LOAD_WORD, 0, 0, (12 if four else 8) + 4 * index),
                (_EQUAL, 0, 2 * (len(words) - index), word),
            ]
        code += [(_LOAD_HALF_X, 0, 0, 0), (_EQUAL, accept, 0, address[1])]
    end = len(code)
    code += [(_RETURN, 0, 0, 0), (_X_TO_A, 0, 0, 0), (_ADD, 0, 0, _KEPT_OF_TCP), (_RETURN_A, 0, 0, 0)]
    ends = {reject: end, accept: end + 1}
    return b"".join(
        _INSTRUCTION.pack(do, *(ends[to] - at - 1 if to < 0 else to for to in jumps), value)
        for at, (do, *jumps, value) in enumerate(code)
    )


def segments(words: Words, blocks: NDArray[np.int64], family: int, addresses: Sequence[tuple[Any, ...]]) -> Segments:
    """What blocks of a ring hold. `words` is the ring, a row per block; `blocks` which of them, in their order."""
    flat = words.reshape(-1)
    at = _packets(words, flat, blocks)
    ip = at + (flat[at + 6] >> 18)  # tp_net, in words
    if family == socket.AF_INET:
        first = flat[ip]
        tcp = ip + (first & 0xF)
        said = length = _half(first >> 16)
        source = [flat[ip + 3]]
    else:
        tcp = ip + _IPV6_BYTES // 4
        said = _half(flat[ip + 1] & 0xFFFF)
        length = said + _IPV6_BYTES
        source = [flat[ip + 2 + index] for index in range(4)]
    total = np.where(said == 0, flat[at + 4], length)  # tp_len, where IP cannot say it (BIG TCP)
    ports, last = flat[tcp], flat[tcp + 3]
    key = _half(ports >> 16)
    for index, address in enumerate(addresses[1:], 1):
        wanted = _address_words(family, address)
        same = _half(ports & 0xFFFF) == address[1]
        for word, column in zip(wanted, source, strict=True):
            same &= column.byteswap() == word
        key += same * (index << 16)
    return Segments(
        key,
        flat[tcp + 1].byteswap(),
        (last >> 8 & _SYN).astype(np.bool_),
        (last >> 8 & _FIN).astype(np.bool_),
        total.astype(np.int64) - 4 * (tcp - ip) - 4 * (last >> 4 & 0xF).astype(np.int64),
        flat[at + 1].astype(np.int64) * 1_000_000_000 + flat[at + 2],
    )


def _half(column: NDArray[Any]) -> NDArray[np.int64]:
    """Sixteen bits in the network's order."""
    return column.astype(np.uint16).byteswap().astype(np.int64)


def _packets(words: Words, flat: Words, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each packet's header is, in words of `flat`. Packets of one kind have one stride; others are walked."""
    counts = words[blocks, 3].astype(np.int64)
    blocks, counts = blocks[counts > 0], counts[counts > 0]
    first = blocks * words.shape[1] + (words[blocks, 4] >> 2)
    if not len(blocks):
        return np.asarray(first, np.int64)
    stride = int(flat[first].max()) >> 2
    if int(counts.max()) * stride <= words.shape[1]:
        before = np.cumsum(counts) - counts
        at = np.repeat(first - stride * before, counts) + stride * np.arange(int(counts.sum()))
        following = flat[at] == stride << 2
        following[before + counts - 1] = True  # the last of a block is followed by none
        if following.all():
            return np.asarray(at, np.int64)
    walked = []
    for place, count in zip(first.tolist(), counts.tolist(), strict=True):
        for _ in range(count):
            walked.append(place)
            place += int(flat[place]) >> 2  # noqa: PLW2901 - a walk
    return np.array(walked, np.int64)


def _address_words(family: int, address: tuple[Any, ...]) -> tuple[int, ...]:
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    return struct.unpack(f"!{len(packed) // 4}I", packed)


class Flow:
    """When what came on one connection was deliverable."""

    __slots__ = ("closed_ns", "ends", "forgotten", "greeted", "held", "opened_ns", "stamps", "swapped")

    def __init__(self, opened_ns: int) -> None:
        self.opened_ns = opened_ns  # CLOCK_REALTIME; the SYN-ACK came before ...
        self.greeted = False  # ... and was seen, without which nothing is known of it
        self.ends = array("q")  # Up to here everything was there ...
        self.stamps = array("q")  # ... at this instant, or UNKNOWN where a segment is missing in the ring
        self.held: list[tuple[int, int, int]] = []  # (start, end, stamp) of what came before bytes in front of it
        self.forgotten = 0  # Marks up to this offset are gone
        self.closed_ns = 0  # When its FIN came
        self.swapped = False  # Whether something was lost or came out of order

    def arrivals(self, offsets: Sequence[int]) -> list[int]:
        """CLOCK_REALTIME ns at which the byte before each of these offsets was deliverable, or UNKNOWN."""
        if self.held and self.through < offsets[-1]:
            self._skip(offsets[-1])
        ends, stamps = np.array(self.ends), np.array(self.stamps)
        at = np.searchsorted(ends, offsets)
        known = (at < len(ends)) & (np.array(offsets) > self.forgotten)
        at[~known] = 0
        if not known.any():
            return [UNKNOWN] * len(offsets)
        known &= stamps[at] != UNKNOWN
        found: list[int] = np.where(known, np.maximum.accumulate(stamps)[at], UNKNOWN).tolist()
        return found

    @property
    def through(self) -> int:
        """Up to this offset everything has come."""
        return self.ends[-1] if self.ends else self.forgotten

    def forget(self, offset: int) -> None:
        """Nobody will ask for anything up to this offset any more."""
        gone = int(np.searchsorted(np.array(self.ends), offset, side="right"))
        if gone:
            self.forgotten = self.ends[gone - 1]
            del self.ends[:gone], self.stamps[:gone]

    def add(self, start: int, end: int, stamp: int) -> None:
        """A segment, one of a flow in which not everything came in its order."""
        through = self.through
        if start > through:
            self.swapped = True
            heappush(self.held, (start, end, stamp))
        elif end > through:
            while self.held and self.held[0][0] <= end:
                end = max(end, heappop(self.held)[1])
            self._mark(end, stamp)

    def _skip(self, wanted: int) -> None:
        """The socket has delivered everything up to `wanted`: what is missing before it is missing in the ring only."""
        while self.held and self.through < wanted:
            start, end, stamp = heappop(self.held)
            if start > self.through:
                self._mark(start, UNKNOWN)
            if end > self.through:
                self._mark(end, stamp)

    def _mark(self, end: int, stamp: int) -> None:
        self.ends.append(end)
        self.stamps.append(stamp)


class Flows:
    """Sorts segments by the connections that are watched."""

    def __init__(self, addresses: int = 1) -> None:
        self._flows: dict[int, Flow] = {}
        self._first = np.zeros(addresses << 16, np.int64)
        """Of each key the sequence number of its stream's first byte; UNKNOWN before the SYN-ACK was seen."""
        self._through = np.full(addresses << 16, UNKNOWN)
        """Of each key `Flow.through`; UNKNOWN where nothing is watched."""
        self._began_ns = np.zeros(addresses << 16, np.int64)
        """Of each key the stamp of its SYN-ACK: what came before is of a connection before this one."""
        self._greeted: dict[int, tuple[int, int]] = {}
        """First sequence number and stamp of connections that are not watched yet."""

    def watch(self, key: int, opened_ns: int) -> Flow:
        """From now on. What came before on this key is to be added first, but for its SYN-ACK."""
        flow = self._flows[key] = Flow(opened_ns)
        flow.greeted = key in self._greeted
        self._first[key], self._began_ns[key] = self._greeted.pop(key, (UNKNOWN, 0))
        self._through[key] = 0
        return flow

    def add(self, came: Segments) -> None:
        """Segments, in the order in which they came."""
        for at in np.flatnonzero(came.syn).tolist():
            self._greet(int(came.key[at]), (int(came.sequence[at]) + 1) & 0xFFFFFFFF, int(came.stamp_ns[at]))
        for at in np.flatnonzero(came.fin).tolist():
            if (ending := self._flows.get(int(came.key[at]))) is not None:
                ending.closed_ns = int(came.stamp_ns[at])
        key = came.key
        kept = (came.length > 0) & ~came.syn & (self._through[key] != UNKNOWN) & (self._first[key] != UNKNOWN)
        kept &= came.stamp_ns >= self._began_ns[key]
        order = np.flatnonzero(kept)
        if not len(order):
            return
        order = order[np.argsort(key[order], kind="stable")]
        key, stamp = key[order], came.stamp_ns[order]
        through = self._through[key]
        away = (came.sequence[order].astype(np.int64) - self._first[key] - through) & 0xFFFFFFFF
        start = through + away - ((away >> 31) << 32)
        end = start + came.length[order]
        heads = np.flatnonzero(np.diff(key, prepend=UNKNOWN))
        before = np.concatenate((through[:1], end[:-1]))
        before[heads] = through[heads]
        amiss = set(key[start != before].tolist())
        tails = [*heads[1:].tolist(), len(key)]
        for head, tail, name in zip(heads.tolist(), tails, key[heads].tolist(), strict=True):
            flow = self._flows[name]
            if name in amiss or flow.held:
                for each in zip(start[head:tail].tolist(), end[head:tail].tolist(), stamp[head:tail].tolist()):  # noqa: B905
                    flow.add(*each)
                self._through[name] = flow.through
            else:
                flow.ends.frombytes(end[head:tail].tobytes())
                flow.stamps.frombytes(stamp[head:tail].tobytes())
                self._through[name] = end[tail - 1]

    def _greet(self, key: int, first: int, stamp_ns: int) -> None:
        flow = self._flows.get(key)
        if flow is not None and not flow.through and stamp_ns <= flow.opened_ns:
            self._first[key], self._began_ns[key], flow.greeted = first, stamp_ns, True
        elif self._first[key] != first or flow is None:
            self._greeted[key] = first, stamp_ns


class Ring:
    """A packet socket with a memory-mapped ring, for the addresses of one family."""

    def __init__(self, family: int, addresses: Sequence[tuple[Any, ...]]) -> None:
        """Raises OSError where the kernel does not let us."""
        if sys.byteorder != "little" or len(addresses) > ADDRESSES_MOST:
            raise OSError("packet rings are read on little-endian machines, of up to 60 addresses")
        self.family, self.addresses = family, addresses
        self._next = 0
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
        try:
            _attach(self._socket, program(family, addresses))
            self._socket.setsockopt(_SOL_PACKET, _VERSION, _TPACKET_V3)
            self._socket.setsockopt(_SOL_PACKET, _TIMESTAMP, _SOFTWARE_STAMPS)
            self._socket.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
            frames = BLOCKS * BLOCK_BYTES // 2048
            request = struct.pack("7I", BLOCK_BYTES, BLOCKS, 2048, frames, RETIRE_MS, 0, 0)
            self._socket.setsockopt(_SOL_PACKET, _RX_RING, request)
            self._memory = mmap.mmap(self._socket.fileno(), BLOCKS * BLOCK_BYTES)
            _bind(self._socket, {_interface(family, address) for address in addresses})
        except BaseException:
            self._socket.close()
            raise
        self.words: Words = np.frombuffer(self._memory, np.uint32).reshape(BLOCKS, -1)

    def read(self) -> Segments | None:
        """What has been handed over since the last time; None for nothing."""
        count, looked_at = 0, 1
        while count < BLOCKS and self.words[(self._next + count) % BLOCKS, 2] & 1:
            at = (self._next + count) % BLOCKS
            ours = self.words[at : min(at + looked_at, at + BLOCKS - count), 2] & 1
            count += len(ours) if ours.all() else int(ours.argmin())
            looked_at *= 2
        if not count:
            return None
        blocks = (self._next + np.arange(count)) % BLOCKS
        found = segments(self.words, blocks, self.family, self.addresses)
        self.words[blocks, 2] = 0
        self._next = (self._next + count) % BLOCKS
        return found

    def drops(self) -> int:
        """Segments that found no room since the last time."""
        return int(struct.unpack("3I", self._socket.getsockopt(_SOL_PACKET, _STATISTICS, 12))[1])

    def close(self) -> None:
        """Keep nothing more."""
        del self.words
        self._memory.close()
        self._socket.close()


def _attach(packets: socket.socket, code: bytes) -> None:
    space = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HP", len(code) // _INSTRUCTION.size, ctypes.addressof(space))
    packets.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)


def _bind(packets: socket.socket, interfaces: set[int]) -> None:
    """To the interface, or to all where there are several; Python's own `bind` knows them by name only. Before it
    nothing comes, and so nothing unfiltered."""
    libc = ctypes.CDLL(None, use_errno=True)
    only = interfaces.pop() if len(interfaces) == 1 else 0
    address = _SOCKET_ADDRESS.pack(socket.AF_PACKET, socket.htons(_ETHERTYPE_ALL), only)
    if libc.bind(packets.fileno(), address, len(address)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _interface(family: int, address: tuple[Any, ...]) -> int:
    """Index of the interface by which the kernel would reach this address (rtnetlink(7)); 0 where it does not say."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    asked = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0)
    asked += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _DESTINATION) + packed
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as netlink:
        netlink.send(_MESSAGE.pack(_MESSAGE.size + len(asked), _GET_ROUTE, _REQUEST, 1, 0) + asked)
        told = netlink.recv(65_536)
    at, end = _MESSAGE.size + _ROUTE.size, len(told)
    while _MESSAGE.unpack_from(told)[1] == _NEW_ROUTE and at + _ATTRIBUTE.size < end:
        size, kind = _ATTRIBUTE.unpack_from(told, at)
        if kind == _INTERFACE:
            return int.from_bytes(told[at + _ATTRIBUTE.size : at + size], sys.byteorder)
        at += max(size + 3 & ~3, _ATTRIBUTE.size)
    return 0


class OpenRings(RingStamps):
    """A ring for each family of the server's addresses, and the socket's stamps to hold them against."""

    def __init__(self, rings: Sequence[Ring], sorted_by: Sequence[Flows], instead: StampSource) -> None:
        self._rings, self._sorted_by, self._instead = rings, sorted_by, instead
        self._collected_ns = 0
        self._reset()

    def _reset(self) -> None:
        self._missed, self._off = 0, Counter[int]()

    @classmethod
    def open(cls, servers: Sequence[Address] = ()) -> Self:
        rings: list[Ring] = []
        try:
            for family in dict(servers):
                addresses = [address[:2] for each, address in servers if each == family]
                rings += [Ring(family, addresses)]
        except OSError:
            for ring in rings:
                ring.close()
            raise
        return cls(rings, [Flows(len(ring.addresses)) for ring in rings], SocketStamps.open(servers) or PLAIN)

    def watch(self, sock: socket.socket) -> Flow | None:
        self._instead.watch(sock)
        peer = sock.getpeername()[:2]
        for ring, flows in zip(self._rings, self._sorted_by, strict=True):
            if ring.family == sock.family and peer in ring.addresses:
                self.collect()
                return flows.watch(ring.addresses.index(peer) << 16 | sock.getsockname()[1], time_ns())
        return None

    def ready(self, received: Received) -> bool:
        flow: Flow | None = received.watched
        if flow is None or not received.sizes:
            return True
        wanted = received.offsets(received.sizes[-1:])[0]
        if flow.through < wanted:
            self.collect()
        return flow.through >= wanted or monotonic_ns() - received.user[-1] > SETTLED_NS

    def pieces(self, received: Received) -> int:
        flow: Flow | None = received.watched
        if flow is None:
            return self._instead.pieces(received)
        return len(flow.ends) - bisect_right(flow.ends, received.begins)

    def collect(self) -> None:
        now_ns = monotonic_ns()
        if now_ns - self._collected_ns >= COLLECTED_EVERY_NS:
            self._collected_ns = now_ns
            for ring, flows in zip(self._rings, self._sorted_by, strict=True):
                if (came := ring.read()) is not None:
                    flows.add(came)

    def instants(self, received: Received, ends: Sequence[int], to_monotonic: ToMonotonic) -> Instants:
        flow: Flow | None = received.watched
        if flow is None:
            return self._instead.instants(received, ends, to_monotonic)
        flow.forget(received.begins)
        found = flow.arrivals(received.offsets(ends))
        if ends is received.sizes and not flow.swapped and (stamps := kernel_stamps(received)) is not None:
            ours = np.array(flow.arrivals(received.read_ends) if received.read_ends else found)
            # A FIN that is read with the last bytes lends them its stamp.
            off = np.minimum(abs(ours - stamps), abs(flow.closed_ns - np.array(stamps)))[ours >= 0]
            self._off.update(np.frexp(off)[1].tolist())  # as int.bit_length
        instants, missing = to_monotonic(found), [at for at, stamp in enumerate(found) if stamp < 0]
        if not missing:
            return instants, self
        self._missed += len(missing)
        others, by = self._instead.instants(received, [ends[at] for at in missing], to_monotonic)
        for at, instant in zip(reversed(missing), reversed(others), strict=True):  # no later than what came behind it
            instants[at] = min([instant, *instants[at + 1 : at + 2]])
        return instants, by

    def counts(self) -> dict[str, Any]:
        self.collect()
        found = {
            "ring_drops": sum(ring.drops() for ring in self._rings),
            "ring_missed": self._missed,
            "ring_off_counts": {str(bits): count for bits, count in sorted(self._off.items())},
        }
        self._reset()
        return found

    def close(self) -> None:
        self._instead.close()
        for ring in self._rings:
            ring.close()
