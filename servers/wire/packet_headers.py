"""What a ring holds of each TCP segment (loadgen.servers.wire.packet_socket), as columns."""

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
    """Columns of what came, in the order in which it came."""

    key: NDArray[np.int64]
    """Our port (theirs, of addresses with port 0), and 65,536 for each of the addresses before the server's."""
    sequence: Words
    syn: NDArray[np.bool_]
    fin: NDArray[np.bool_]
    length: NDArray[np.int64]
    """Bytes of the stream."""
    stamp_ns: NDArray[np.int64]
    """CLOCK_REALTIME."""


def parse_segments(
    words: Words, blocks: NDArray[np.int64], family: int, addresses: Sequence[tuple[Any, ...]]
) -> Segments:
    """What blocks of a ring hold. `words` is the ring, a row per block; `blocks` which of them, in their order."""
    flat = words.reshape(-1)
    at = _packets(words, flat, blocks)
    ip = at + (flat[at + 6] >> 18)  # tp_net, in words
    if family == socket.AF_INET:
        first = flat[ip]
        tcp = ip + (first & 0xF)
        said, more, source = _half(first >> 16), 0, ip + 3
    else:
        tcp = ip + IPV6_BYTES // 4
        said, more, source = _half(flat[ip + 1] & 0xFFFF), IPV6_BYTES, ip + 2
    total = said + more if said.all() else np.where(said == 0, flat[at + 4], said + more)  # tp_len: BIG TCP says none
    ports, last = flat[tcp], flat[tcp + 3]
    key = _half(ports >> 16 if addresses[0][1] else ports & 0xFFFF)
    for index, address in enumerate(addresses[1:], 1):
        wanted = address_words(family, address)
        same = _half(ports & 0xFFFF) == address[1]
        for position, word in enumerate(wanted):
            same &= flat[source + position].byteswap() == word
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
    for index, count in zip(first.tolist(), counts.tolist(), strict=True):
        for _ in range(count):
            walked.append(index)
            index += int(flat[index]) >> 2  # noqa: PLW2901 - a walk
    return np.array(walked, np.int64)
