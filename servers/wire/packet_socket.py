"""The packet socket of a ring: the kernel keeps each TCP segment's headers and stamp in memory that it shares with us.

A packet socket (packet(7), TPACKET_V3 of Documentation/networking/packet_mmap.rst) sees what comes in on the interface
of the route to the server. It asks for all protocols: one that asks for IP alone is served after IP, TCP and the
wake-up of the reader, and stamps up to 0.1 ms late (net/core/dev.c, __netif_receive_skb_core). The filter keeps the IP
header and 14 bytes of the TCP header: of what was said nothing is ever copied.

A server that listens sees its clients' requests so: their address has port 0, any, and `ports` is its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

from loadgen.servers.wire.capabilities import give_up_capability, take_capability
from loadgen.servers.wire.ports import PortRange

BLOCK_BYTES, BLOCKS, BLOCKS_OF_REQUESTS = 8_192, 4_096, 256
"""What is not read for long is kept as long as it fits 32 MiB, about 230,000 segments, and for 4 s of any load; of
requests 2 MiB, 14,000 segments, a quarter of a second."""
RETIRE_MS = 1
"""A block is handed over when it is full, or this long after its first segment."""
MAX_ADDRESSES: dict[int, int] = {socket.AF_INET: 59, socket.AF_INET6: 20}
"""What jumps of a filter reach over: 255 instructions."""
_ETHERTYPE: dict[int, int] = {socket.AF_INET: 0x0800, socket.AF_INET6: 0x86DD}
_ALL, _PROTOCOL = 0x0003, 0xFFFFF000
"""linux/if_ether.h, ETH_P_ALL; linux/filter.h, SKF_AD_OFF + SKF_AD_PROTOCOL."""
_SOL_PACKET, _RX_RING, _STATISTICS, _VERSION, _TIMESTAMP, _IGNORE_OUTGOING = 263, 5, 6, 10, 17, 23
_TPACKET_V3, _SOFTWARE_STAMPS, _ATTACH_FILTER = 2, 1 << 4, 26
_INSTRUCTION = struct.Struct("=HBBI")
"""linux/filter.h, struct sock_filter: what to do, where to go if true, if false (both counted from the next), value."""
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _LOAD_HALF_X, _LOAD_IP_LENGTH_X = 0x20, 0x28, 0x30, 0x48, 0xB1
_LOAD_X, _X_TO_A, _ADD, _EQUAL, _ANY_BIT, _RETURN_A, _RETURN = 0x01, 0x87, 0x04, 0x15, 0x45, 0x16, 0x06
_GREATER, _AT_LEAST, _LOAD_BYTE_X, _AND, _SHIFT_RIGHT, _ADD_X, _A_TO_X = 0x25, 0x35, 0x50, 0x54, 0x74, 0x0C, 0x07
_SOCKET_ADDRESS = struct.Struct("HHi12x")
"""linux/if_packet.h, struct sockaddr_ll: family, protocol, interface."""
_NETLINK_ROUTE, _GET_ROUTE, _NEW_ROUTE, _REQUEST, _DESTINATION, _INTERFACE = 0, 26, 24, 1, 1, 4
_MESSAGE, _ROUTE, _ATTRIBUTE = struct.Struct("IHHII"), struct.Struct("8BI"), struct.Struct("HH")
"""linux/rtnetlink.h: struct nlmsghdr, rtmsg, rtattr."""
_TCP, _FRAGMENT, _KEPT_OF_TCP, _FIN, _SYN = 6, 0x1FFF, 14, 0x01, 0x02
CAP_NET_RAW = 13
"""linux/capability.h."""
IPV6_BYTES = 40


def open_packet_socket(
    family: int, addresses: Sequence[tuple[Any, ...]], ports: PortRange | None = None
) -> tuple[socket.socket, mmap.mmap]:
    """The socket that sees segments from these addresses of a family to `ports` of ours, and the memory in which they
    are. Raises OSError where the kernel does not let us."""
    if sys.byteorder != "little" or len(addresses) > MAX_ADDRESSES[family]:
        raise OSError(f"packet rings are read on little-endian machines, of addresses up to {MAX_ADDRESSES}")
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
    try:
        _attach(packets, filter_program(family, addresses, ports))
        packets.setsockopt(_SOL_PACKET, _VERSION, _TPACKET_V3)
        packets.setsockopt(_SOL_PACKET, _TIMESTAMP, _SOFTWARE_STAMPS)
        packets.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        blocks = BLOCKS if addresses[0][1] else BLOCKS_OF_REQUESTS
        frames = blocks * BLOCK_BYTES // 2048
        packets.setsockopt(_SOL_PACKET, _RX_RING, struct.pack("7I", BLOCK_BYTES, blocks, 2048, frames, RETIRE_MS, 0, 0))
        memory = mmap.mmap(packets.fileno(), blocks * BLOCK_BYTES)
        _bind(packets, {_interface(family, address) for address in addresses})
    except BaseException:
        packets.close()
        raise
    return packets, memory


def set_packet_capability(*, effective: bool) -> None:
    """Take what right this thread has to open packet sockets (file capabilities only permit it), or give it up for
    good. Sockets that are open go on."""
    if effective:
        take_capability(CAP_NET_RAW)
    else:
        give_up_capability(CAP_NET_RAW)


def dropped_segments(packets: socket.socket) -> int:
    """Segments that found no room since the last time."""
    return int(struct.unpack("3I", packets.getsockopt(_SOL_PACKET, _STATISTICS, 12))[1])


def filter_program(family: int, addresses: Sequence[tuple[Any, ...]], ports: PortRange | None = None) -> bytes:
    """The filter: of TCP segments from these addresses to `ports`, how many bytes are kept; of others none. X is where
    TCP begins, and a jump to `accept` or `reject` is known by its place in the end."""
    accept, reject = -1, -2
    four = family == socket.AF_INET
    code: list[tuple[int, int, int, int]] = [
        (_LOAD_HALF, 0, 0, _PROTOCOL),
        (_EQUAL, 0, reject, _ETHERTYPE[family]),
        (_LOAD_BYTE, 0, 0, 9 if four else 6),
        (_EQUAL, 0, reject, _TCP),
    ]
    to_tcp = (_LOAD_IP_LENGTH_X, 0, 0, 0) if four else (_LOAD_X, 0, 0, IPV6_BYTES)
    if four:
        code += [(_LOAD_HALF, 0, 0, 6), (_ANY_BIT, reject, 0, _FRAGMENT)]
    code += [to_tcp]
    if ports is not None:
        code += [(_LOAD_HALF_X, 0, 0, 2), (_AT_LEAST, 0, reject, ports.first), (_GREATER, reject, 0, ports.last)]
    # What opens, what ends, or what has a first byte (else loading it rejects): no ACK alone.
    code += [(_LOAD_BYTE_X, 0, 0, 13), (_ANY_BIT, 7, 0, _SYN | _FIN), (_LOAD_BYTE_X, 0, 0, 12), (_AND, 0, 0, 0xF0)]
    code += [(_SHIFT_RIGHT, 0, 0, 2), (_ADD_X, 0, 0, 0), (_A_TO_X, 0, 0, 0), (_LOAD_BYTE_X, 0, 0, 0), to_tcp]
    for address in addresses:
        words = address_words(family, address)
        for index, word in enumerate(words):
            code += [(_LOAD_WORD, 0, 0, (12 if four else 8) + 4 * index), (_EQUAL, 0, 2 * (len(words) - index), word)]
        code += [(_LOAD_HALF_X, 0, 0, 0), (_EQUAL if address[1] else _AT_LEAST, accept, 0, address[1])]
    end = len(code)
    code += [(_RETURN, 0, 0, 0), (_X_TO_A, 0, 0, 0), (_ADD, 0, 0, _KEPT_OF_TCP), (_RETURN_A, 0, 0, 0)]
    ends = {reject: end, accept: end + 1}
    return b"".join(
        _INSTRUCTION.pack(do, *(ends[to] - at - 1 if to < 0 else to for to in jumps), value)
        for at, (do, *jumps, value) in enumerate(code)
    )


def address_words(family: int, address: tuple[Any, ...]) -> tuple[int, ...]:
    """As the kernel has it in a packet, in words of the network's order."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    return struct.unpack(f"!{len(packed) // 4}I", packed)


def _attach(packets: socket.socket, code: bytes) -> None:
    space = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HP", len(code) // _INSTRUCTION.size, ctypes.addressof(space))
    packets.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)


def _bind(packets: socket.socket, interfaces: set[int]) -> None:
    """To the interface, or to all where there are several; Python's own `bind` knows them by name only. Before it
    nothing comes, and so nothing unfiltered."""
    libc = ctypes.CDLL(None, use_errno=True)
    only = interfaces.pop() if len(interfaces) == 1 else 0
    address = _SOCKET_ADDRESS.pack(socket.AF_PACKET, socket.htons(_ALL), only)
    if libc.bind(packets.fileno(), address, len(address)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _interface(family: int, address: tuple[Any, ...]) -> int:
    """Index of the interface by which the kernel would reach this address (rtnetlink(7)); 0 where it does not say."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    requested = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0)
    requested += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _DESTINATION) + packed
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as netlink:
        netlink.send(_MESSAGE.pack(_MESSAGE.size + len(requested), _GET_ROUTE, _REQUEST, 1, 0) + requested)
        told = netlink.recv(65_536)
    at, end = _MESSAGE.size + _ROUTE.size, len(told)
    while _MESSAGE.unpack_from(told)[1] == _NEW_ROUTE and at + _ATTRIBUTE.size < end:
        size, kind = _ATTRIBUTE.unpack_from(told, at)
        if kind == _INTERFACE:
            return int.from_bytes(told[at + _ATTRIBUTE.size : at + size], sys.byteorder)
        at += max(size + 3 & ~3, _ATTRIBUTE.size)
    return 0
