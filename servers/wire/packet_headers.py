"""Parses the TCP segments in a packet ring (loadgen.servers.wire.packet_socket) into numpy arrays, one per field."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.servers.wire.packet_socket import IPV6_BYTES, address_words

Words = NDArray[np.uint32]

_FIN, _SYN = 0x01, 0x02


class Segments(NamedTuple):
    """TCP segments in order of arrival, with one array per field."""

    key: NDArray[np.int64]
    """Key of the connection: `local port + 65,536 * index of the server's address`. If the server addresses have port
    0, the client's port is used in place of the local port."""
    sequence: Words
    syn: NDArray[np.bool_]
    fin: NDArray[np.bool_]
    length: NDArray[np.int64]
    """Bytes of data in the segment."""
    stamp_ns: NDArray[np.int64]
    """Kernel timestamp in CLOCK_REALTIME ns."""


def parse_segments(
    words: Words, blocks: NDArray[np.int64], family: int, addresses: Sequence[tuple[Any, ...]]
) -> Segments:
    """Return the TCP segments in some blocks of a packet ring. The headers of all packets are parsed together.

    - `words` is the memory of the ring as an array of 32-bit words, with one row per block.
    - `blocks` contains the indices of the blocks to parse, oldest first.
    - `addresses` contains the addresses of the servers whose packets are in the ring.
    - `family` is the address family of `addresses`: AF_INET or AF_INET6.
    """
    flat = words.reshape(-1)

    # struct tpacket3_hdr, in words: 0 offset of the next packet, 1 seconds, 2 nanoseconds, 4 length of the packet,
    # 6 (upper half) offset of the IP header in bytes.
    packet = _packets(words, flat, blocks)
    ip = packet + (flat[packet + 6] >> 18)
    if family == socket.AF_INET:
        first_word = flat[ip]
        tcp = ip + (first_word & 0xF)
        ip_length = _network_uint16(first_word >> 16)
        header_bytes = 0  # IPv4's length field includes its header
        source = ip + 3
    else:
        tcp = ip + IPV6_BYTES // 4
        ip_length = _network_uint16(flat[ip + 1] & 0xFFFF)
        header_bytes = IPV6_BYTES
        source = ip + 2
    total = ip_length + header_bytes
    if not ip_length.all():  # BIG TCP: packets over 64 KiB have length 0 in their IP header
        total = np.where(ip_length == 0, flat[packet + 4], total)

    ports = flat[tcp]
    flags = flat[tcp + 3]
    key = _network_uint16(ports >> 16 if addresses[0][1] else ports & 0xFFFF)
    for index, address in enumerate(addresses[1:], 1):
        matches = _network_uint16(ports & 0xFFFF) == address[1]
        for position, word in enumerate(address_words(family, address)):
            matches &= flat[source + position].byteswap() == word
        key += matches * (index << 16)
    return Segments(
        key,
        sequence=flat[tcp + 1].byteswap(),
        syn=(flags >> 8 & _SYN).astype(np.bool_),
        fin=(flags >> 8 & _FIN).astype(np.bool_),
        length=total.astype(np.int64) - 4 * (tcp - ip) - 4 * (flags >> 4 & 0xF).astype(np.int64),
        stamp_ns=flat[packet + 1].astype(np.int64) * 1_000_000_000 + flat[packet + 2],
    )


def _network_uint16(column: NDArray[Any]) -> NDArray[np.int64]:
    """Convert an array of 16-bit numbers in network byte order to int64."""
    return column.astype(np.uint16).byteswap().astype(np.int64)


def _packets(words: Words, flat: Words, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index in `flat` of the header of each packet in some blocks of a packet ring.

    A packet ring is memory into which the kernel writes captured packets. `flat` is this memory as a flat array of
    32-bit words. `words` is the same memory with one row per block. `blocks` contains the row numbers of the blocks to
    search.
    """
    # Words of a block's header: 3 is the number of packets, 4 the offset of the first one in bytes.
    counts = words[blocks, 3].astype(np.int64)
    blocks, counts = blocks[counts > 0], counts[counts > 0]
    first = blocks * words.shape[1] + (words[blocks, 4] >> 2)
    if not len(blocks):
        return np.asarray(first, np.int64)

    # Packets of one kind nearly always have the same distance (stride), so their positions can be computed.
    stride = int(flat[first].max()) >> 2
    if int(counts.max()) * stride <= words.shape[1]:
        before = np.cumsum(counts) - counts
        packets = np.repeat(first - stride * before, counts) + stride * np.arange(int(counts.sum()))
        as_computed = flat[packets] == stride << 2
        as_computed[before + counts - 1] = True  # the last packet of a block has no next one
        if as_computed.all():
            return np.asarray(packets, np.int64)

    # Otherwise follow the offset from each packet to the next.
    walked = []
    for start, count in zip(first.tolist(), counts.tolist(), strict=True):
        position = start
        for _ in range(count):
            walked.append(position)
            position += int(flat[position]) >> 2
    return np.array(walked, np.int64)
