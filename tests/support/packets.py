"""Builds blocks of a packet ring from fabricated TCP segments, in the kernel's format (linux/if_packet.h)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from loadgen.servers.wire.packet_headers import Segments, parse_segments
from loadgen.servers.wire.packet_socket import BLOCK_BYTES

SERVER = ("10.1.2.3", 8000)
SERVER_6 = ("2001:db8::7", 8000)
SYN, ACK = 0x02, 0x10
PORT = 40_000


class Sent(NamedTuple):
    """A fabricated TCP segment from the server to the client."""

    sequence: int
    length: int = 0
    stamp_ns: int = 0
    port: int = PORT
    flags: int = ACK
    source: tuple[str, int] = SERVER
    ip_options: int = 0
    """Length of the IP options in 32-bit words."""
    padding: int = 0
    """Number of padding bytes after the packet in its Ethernet frame."""
    big: bool = False
    """Whether the packet is too long for the length field of IP, which is then 0."""


def block(sent: Sequence[Sent]) -> bytes:
    """Return the bytes of one ring block that contains these segments."""
    packets = [_packet(each) for each in sent]
    body = b"".join(_followed(packet, last=packet is packets[-1]) for packet in packets)
    head = struct.pack("6IQ4I", 1, 0, 1, len(sent), 48, 48 + len(body), 1, 0, 0, 0, 0)
    assert len(head) == 48
    return (head + body).ljust(BLOCK_BYTES, b"\0")


def came(
    *blocks: Sequence[Sent], family: int = socket.AF_INET, servers: Sequence[tuple[Any, ...]] = (SERVER,)
) -> Segments:
    """Return the result of `parse_segments` for a ring of these blocks."""
    words = np.frombuffer(b"".join(map(block, blocks)), np.uint32).reshape(len(blocks), -1)
    return parse_segments(words, np.arange(len(blocks)), family, servers)


def _packet(sent: Sent) -> bytes:
    tcp = struct.pack("!HHIIBB", sent.source[1], sent.port, sent.sequence, 0, 0x80, sent.flags)
    if ":" in sent.source[0]:
        total = 32 + sent.length
        ip = struct.pack("!IHBB16s16x", 6 << 28, 0 if sent.big else total, 6, 64, socket.inet_pton(10, sent.source[0]))
        total += 40
    else:
        words = 5 + sent.ip_options
        total = 4 * words + 32 + sent.length
        ip = struct.pack(
            "!BBHIBBH4s4x", 0x40 | words, 0, 0 if sent.big else total, 0, 64, 6, 0, socket.inet_aton(sent.source[0])
        )
        ip = ip.ljust(4 * words, b"\1")
    kept = ip + tcp
    seconds, nanoseconds = divmod(sent.stamp_ns, 1_000_000_000)
    length = total + sent.padding
    head = struct.pack("5IHH20x", seconds, nanoseconds, len(kept), length, 1, 96, 96)
    packet = (bytes(4) + head).ljust(96, b"\0") + kept
    return packet.ljust(len(packet) + 15 & ~15, b"\0")


def _followed(packet: bytes, *, last: bool) -> bytes:
    return struct.pack("I", 0 if last else len(packet)) + packet[4:]
