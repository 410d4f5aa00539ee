"""Reads receive timestamps from a packet ring: memory in which the kernel stores the headers of each TCP segment.

The kernel timestamps every segment from the server when it arrives, even while the client does not read.

    segment ──> loadgen.servers.wire.packet_socket ──> headers and timestamp in shared memory ──> PacketRing.read
        └─────> the socket's receive buffer, which is read whenever there is time

    stream offset of a segment = (sequence number - sequence number of the SYN-ACK - 1) mod 2^32
    arrival of a byte          = timestamp of the segment that completed the stream up to this byte
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
    """The arrival times of the bytes that the server sent on one connection.

    There is one entry per segment in the arrays `ends` and `stamps`: at time `stamps[i]` (CLOCK_REALTIME ns), every
    byte before stream offset `ends[i]` had arrived. If the packet ring has missed a segment, its timestamp is UNKNOWN.
    """

    __slots__ = ("closed_ns", "discarded_end", "ends", "has_gap", "opened_ns", "out_of_order", "reordered", "stamps")

    def __init__(self, opened_ns: int) -> None:
        self.opened_ns = opened_ns  # CLOCK_REALTIME ns when the connection was open. The SYN-ACK arrived earlier.
        self.ends = array("q")
        self.stamps = array("q")
        # A heap of (start, end, stamp) of segments that arrived while bytes before them were still missing.
        self.out_of_order: list[tuple[int, int, int]] = []
        self.discarded_end = 0  # Timestamps up to this stream offset have been discarded
        self.closed_ns = 0  # Timestamp of the FIN
        self.reordered = False  # Whether a segment was lost or arrived out of order
        self.has_gap = False  # Whether the ring has missed a segment

    def arrivals(self, offsets: Sequence[int]) -> list[int]:
        """Return, for each stream offset, the time (CLOCK_REALTIME ns) at which all bytes before it had arrived.

        The time is UNKNOWN if the ring has missed the segment with the last of these bytes. The last element of
        `offsets` must be the largest.
        """
        if self.out_of_order and self.contiguous_end < offsets[-1]:
            self._accept_gaps(offsets[-1])
        if not self.ends:
            return [UNKNOWN] * len(offsets)
        requested = np.array(offsets)
        stamps = np.frombuffer(self.stamps, np.int64)
        marks = np.frombuffer(self.ends, np.int64).searchsorted(requested)
        if self.has_gap or self.discarded_end or offsets[-1] > self.contiguous_end:
            unknown = (marks == len(stamps)) | (requested <= self.discarded_end)
            marks[unknown] = 0
            unknown |= stamps[marks] == UNKNOWN
            arrived = np.where(unknown, UNKNOWN, np.maximum.accumulate(stamps)[marks])
        else:  # nearly always
            arrived = np.maximum.accumulate(stamps)[marks]
        result: list[int] = arrived.tolist()
        return result

    def covers(self, offsets: Sequence[int]) -> bool:
        """Return True if the timestamps for all of `offsets` are known, and no segment was lost or arrived too early.

        `offsets` contains ascending stream offsets.
        """
        return (
            not (self.out_of_order or self.has_gap)
            and self.discarded_end < offsets[0]
            and offsets[-1] <= self.contiguous_end
        )

    @property
    def contiguous_end(self) -> int:
        """The offset of the first byte of the stream that is still missing. All bytes before it have arrived."""
        return self.ends[-1] if self.ends else self.discarded_end

    def discard_before(self, offset: int) -> None:
        """Discard the timestamps of bytes before the stream offset `offset`.

        These timestamps can no longer be requested afterwards.
        """
        count = bisect_right(self.ends, offset)
        if count:
            self.discarded_end = self.ends[count - 1]
            del self.ends[:count], self.stamps[:count]

    def add(self, start: int, end: int, stamp: int) -> None:
        """Add one segment with its start and end offset in the stream and its timestamp.

        This method is slow. It is used only for streams with a lost or reordered segment.
        """
        contiguous_end = self.contiguous_end
        if start > contiguous_end:
            self.reordered = True
            heappush(self.out_of_order, (start, end, stamp))
        elif end > contiguous_end:
            # The segment fills a hole. The waiting segments behind it become deliverable at the same instant.
            while self.out_of_order and self.out_of_order[0][0] <= end:
                end = max(end, heappop(self.out_of_order)[1])
            self.ends.append(end)
            self.stamps.append(stamp)

    def _accept_gaps(self, read_end: int) -> None:
        """Mark segments as lost if they lie before the stream offset `read_end` and are missing in the ring.

        The socket has already delivered every byte before this offset. The ring can therefore not receive these
        segments later.
        """
        self.has_gap = True
        while self.out_of_order and self.contiguous_end < read_end:
            start, end, stamp = heappop(self.out_of_order)
            for offset, known_stamp in (start, UNKNOWN), (end, stamp):
                if offset > self.contiguous_end:
                    self.ends.append(offset)
                    self.stamps.append(known_stamp)


def arrivals_batch(requests: Sequence[tuple[TcpStream, array[int]]]) -> list[int]:
    """Return the arrival times in several TCP streams in one list.

    `requests` contains up to 100 pairs: a stream, and offsets in this stream. The list contains the arrival times for
    the offsets of the first pair (see `TcpStream.arrivals`), then those of the second pair, and so on. One numpy call
    searches all streams together, because the overhead of a call exceeds the time of the search.
    """
    if len(requests) < 2 or not all(stream.covers(offsets) for stream, offsets in requests):
        return [arrived for stream, offsets in requests for arrived in stream.arrivals(offsets)]
    # Stream number n is shifted by n << 56, so that one sorted array holds every stream.
    shifts = np.arange(len(requests)) << 56
    shift_of_mark = np.repeat(shifts, [len(stream.ends) for stream, _ in requests])
    shift_of_offset = np.repeat(shifts, [len(offsets) for _, offsets in requests])
    ends = np.frombuffer(b"".join([stream.ends for stream, _ in requests]), np.int64)
    stamps = np.frombuffer(b"".join([stream.stamps for stream, _ in requests]), np.int64)
    offsets = np.frombuffer(b"".join([offsets for _, offsets in requests]), np.int64)
    marks = (ends + shift_of_mark).searchsorted(offsets + shift_of_offset)
    # The cumulative maximum of the timestamps must not run from one stream into the next either. The timestamps are
    # first made small, because the shift would overflow otherwise.
    first = stamps.min()
    arrived = np.maximum.accumulate(stamps - first + shift_of_mark)[marks] - shift_of_offset + first
    result: list[int] = arrived.tolist()
    return result


class TcpStreamTable:
    """Assigns TCP segments to the TcpStream objects of the connections whose data is timestamped.

    The key of a connection is `local port + 65,536 * index of the server's address`."""

    def __init__(self, addresses: int = 1) -> None:
        self._streams: dict[int, TcpStream] = {}
        self._first_sequence = np.zeros(addresses << 16, np.int64)
        """By key, the sequence number of the stream's first byte; UNKNOWN until the SYN-ACK is seen."""
        self._contiguous_end = np.full(addresses << 16, UNKNOWN)
        """By key, a copy of `TcpStream.contiguous_end`; UNKNOWN if the connection is not watched."""
        self._syn_ack_ns = np.zeros(addresses << 16, np.int64)
        """By key, the timestamp of the SYN-ACK. Earlier segments belong to an earlier connection."""
        self._incomplete: set[int] = set()
        """Keys of streams in which a segment is missing before one that has arrived."""
        self.syn_acks: dict[int, tuple[int, int]] = {}
        """By key, the first sequence number and SYN-ACK timestamp of connections that are not watched yet."""

    def __contains__(self, key: int) -> bool:
        return key in self._streams

    def watch(self, key: int, opened_ns: int) -> TcpStream:
        """Start and return a new stream for the connection `key`, which was opened at `opened_ns` (CLOCK_REALTIME).

        A new connection can have the key of an earlier connection. The caller must therefore first pass the segments of
        the earlier connection to `add`.
        """
        stream = self._streams[key] = TcpStream(opened_ns)
        self._incomplete.discard(key)
        self._first_sequence[key], self._syn_ack_ns[key] = self.syn_acks.pop(key, (UNKNOWN, 0))
        self._contiguous_end[key] = 0
        return stream

    def data_bytes(self, segments: Segments) -> int:
        """Return the number of data bytes in `segments`. Only segments of watched connections count."""
        watched = (segments.length > 0) & (self._contiguous_end[segments.key] != UNKNOWN)
        return int(segments.length[watched].sum())

    def add(self, *parts: Segments) -> None:
        """Add TCP segments to the streams of their connections. `parts` contains the segments in the order of their
        arrival.

        Normally, the segments of a stream arrive in sequence. All such streams are processed together in numpy arrays.
        If segments of a stream were lost or reordered, `TcpStream.add` adds the segments of this stream one at a time.
        """
        received = Segments(*map(np.concatenate, zip(*parts, strict=True)))

        # SYN-ACKs give the first sequence number of a connection, FINs its end.
        for index in np.flatnonzero(received.syn).tolist():
            first_sequence = (int(received.sequence[index]) + 1) & 0xFFFFFFFF
            self._on_syn_ack(int(received.key[index]), first_sequence, int(received.stamp_ns[index]))
        for index in np.flatnonzero(received.fin).tolist():
            closing = self._streams.get(int(received.key[index]))
            if closing is not None:
                closing.closed_ns = int(received.stamp_ns[index])

        # Select the segments with data of watched connections, and no segment of an earlier connection.
        key = received.key
        selected = received.length > 0
        selected &= ~received.syn
        selected &= self._contiguous_end[key] != UNKNOWN
        selected &= self._first_sequence[key] != UNKNOWN
        selected &= received.stamp_ns >= self._syn_ack_ns[key]
        order = np.flatnonzero(selected)
        if not len(order):
            return

        # Sort them by connection. A stable sort keeps the order of arrival within each connection.
        # Sorting 16-bit keys takes a tenth of the time of 64-bit keys.
        key_type = np.uint16 if len(self._first_sequence) == 1 << 16 else np.int64
        order = order[np.argsort(key[order].astype(key_type), kind="stable")]
        key = key[order]
        stamp = received.stamp_ns[order]

        # Turn sequence numbers into stream offsets. Sequence numbers wrap at 2^32, so the distance to the end of the
        # stream so far is taken modulo 2^32 and read as a signed 32-bit number.
        known_end = self._contiguous_end[key]
        distance = (received.sequence[order].astype(np.int64) - self._first_sequence[key] - known_end) & 0xFFFFFFFF
        start = known_end + distance - ((distance >> 31) << 32)
        end = start + received.length[order]

        # For each segment, find how far its stream had come before it: a cumulative maximum that starts again at each
        # stream. Adding n << 40 to the offsets of stream n keeps the streams apart in one pass.
        first_of_stream = np.diff(key, prepend=UNKNOWN) != 0
        shift = np.cumsum(first_of_stream) << 40
        furthest = np.maximum.accumulate(shift + np.maximum(end, known_end)) - shift
        end_before = np.where(first_of_stream, known_end, np.roll(furthest, 1))

        # A segment that starts behind that point leaves a hole, so its stream takes the slow path. In the other streams
        # a segment without new bytes is a retransmission of bytes that have arrived, and is dropped.
        incomplete = self._incomplete.union(key[start > end_before].tolist())
        retained = end > end_before
        if incomplete:
            retained |= np.isin(key, [*incomplete])
        start = start[retained]
        end = end[retained]
        stamp = stamp[retained]
        key = key[retained]

        # Append the segments of each stream, which are now the rows from `head` to `tail`.
        heads = np.flatnonzero(np.diff(key, prepend=UNKNOWN))
        tails = np.append(heads[1:], len(key))[: len(heads)]
        self._contiguous_end[key[heads]] = end[tails - 1]
        end_bytes = end.tobytes()
        stamp_bytes = stamp.tobytes()
        for head, tail, stream_key in zip(heads.tolist(), tails.tolist(), key[heads].tolist(), strict=True):
            stream = self._streams[stream_key]
            if stream_key not in incomplete:
                stream.ends.frombytes(end_bytes[8 * head : 8 * tail])
                stream.stamps.frombytes(stamp_bytes[8 * head : 8 * tail])
                continue
            segments = zip(start[head:tail].tolist(), end[head:tail].tolist(), stamp[head:tail].tolist(), strict=True)
            for segment_start, segment_end, segment_stamp in segments:
                stream.add(segment_start, segment_end, segment_stamp)
            self._contiguous_end[stream_key] = stream.contiguous_end
            if stream.out_of_order:
                self._incomplete.add(stream_key)
            else:
                self._incomplete.discard(stream_key)

    def _on_syn_ack(self, key: int, first_sequence: int, stamp_ns: int) -> None:
        """Record the SYN-ACK of a connection: the first sequence number of the server, and the arrival time `stamp_ns`.

        `key` stands for the local port and the server's address. Several connections can have this key, one after the
        other. This method decides to which of them the SYN-ACK belongs:

        - It belongs to the current connection with this key if no data of this connection has arrived, and if the
          SYN-ACK arrived before `connect` returned (`opened_ns`).
        - If it has the first sequence number of the current connection, it was sent again, and is ignored.
        - Otherwise it belongs to the next connection with this key.
        """
        stream = self._streams.get(key)
        if stream is not None and not stream.contiguous_end and stamp_ns <= stream.opened_ns:
            self._first_sequence[key], self._syn_ack_ns[key] = first_sequence, stamp_ns
        elif self._first_sequence[key] != first_sequence or stream is None:
            self.syn_acks[key] = first_sequence, stamp_ns


class PacketRing:
    """A packet socket with a memory-mapped ring, for server addresses of one family and a range of local ports."""

    def __init__(self, family: int, addresses: Sequence[tuple[Any, ...]], ports: PortRange | None = None) -> None:
        """Open the ring for segments from `addresses` to the local `ports` (None: all ports).

        Raises OSError if the kernel does not permit packet sockets."""
        self.family = family
        self.addresses = addresses
        self._next_block = 0
        self._socket, self._memory = open_packet_socket(family, addresses, ports)
        self.words = np.frombuffer(self._memory, np.uint32).reshape(-1, BLOCK_BYTES // 4)

    def read(self) -> Segments | None:
        """Return the segments in the ring that were not returned before, or None if there are none."""
        block_count = len(self.words)
        count = 0
        # Word 2 of a block is its status: bit 0 is set while the block belongs to us. Look at 1, 2, 4, ... at a time.
        step = 1
        while count < block_count:
            first = (self._next_block + count) % block_count
            if not self.words[first, 2] & 1:
                break
            ready = self.words[first : min(first + step, first + block_count - count), 2] & 1
            count += len(ready) if ready.all() else int(ready.argmin())
            step *= 2
        if not count:
            return None
        blocks = (self._next_block + np.arange(count)) % block_count
        result = parse_segments(self.words, blocks, self.family, self.addresses)
        self.words[blocks, 2] = 0  # gives the blocks back to the kernel
        self._next_block = (self._next_block + count) % block_count
        return result

    def drops(self) -> int:
        """Return the number of segments that were dropped since the last call because the ring was full."""
        return dropped_segments(self._socket)

    def close(self) -> None:
        """Close the ring and its socket."""
        del self.words
        self._memory.close()
        self._socket.close()
