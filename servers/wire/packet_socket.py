"""Opens a packet socket with a ring. The kernel writes the headers and the timestamp of each TCP segment to this ring.

A ring is memory that the kernel shares with this process (packet(7), TPACKET_V3 of
Documentation/networking/packet_mmap.rst). The kernel copies only the IP header and 14 bytes of the TCP header of a
segment, and never its payload.

The socket receives the packets that arrive on one network interface: the interface of the route to the server. If the
routes to the server's addresses use several interfaces, the socket receives the packets of every interface.

The socket requests the packets of all protocols. A socket that requests only IP packets would receive a packet later,
after the kernel has processed IP and TCP and has woken the process that reads the data. Its timestamps would be up to
0.1 ms late (net/core/dev.c, __netif_receive_skb_core).

A simulated server uses such a socket to timestamp the requests of its clients. It opens the socket with addresses whose
port is 0, which matches any client port. The local ports contain only the port of the server.
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

BLOCK_BYTES = 8_192
BLOCKS = 4_096
"""The ring of a client holds 32 MiB: about 230,000 segments, or 4 s of any load."""
BLOCKS_OF_REQUESTS = 256
"""The ring of a simulated server holds 2 MiB: 14,000 segments, or a quarter of a second."""
RETIRE_MS = 1
"""The kernel hands over a block when it is full, or this long after its first segment."""
MAX_ADDRESSES: dict[int, int] = {socket.AF_INET: 59, socket.AF_INET6: 20}
"""Maximum number of addresses in a filter, by family: a jump reaches over at most 255 instructions."""
_ETHERTYPE: dict[int, int] = {socket.AF_INET: 0x0800, socket.AF_INET6: 0x86DD}
_ALL, _PROTOCOL = 0x0003, 0xFFFFF000
"""linux/if_ether.h, ETH_P_ALL; linux/filter.h, SKF_AD_OFF + SKF_AD_PROTOCOL."""
# linux/if_packet.h: socket options and their values.
_SOL_PACKET = 263
_RX_RING = 5
_STATISTICS = 6
_VERSION = 10
_TIMESTAMP = 17
_IGNORE_OUTGOING = 23
_TPACKET_V3 = 2
_SOFTWARE_STAMPS = 1 << 4  # linux/net_tstamp.h, SOF_TIMESTAMPING_SOFTWARE
_ATTACH_FILTER = 26  # asm-generic/socket.h, SO_ATTACH_FILTER
# linux/bpf_common.h: opcodes of classic BPF. A is the accumulator, X the index register.
_LOAD_WORD = 0x20
_LOAD_HALF = 0x28
_LOAD_BYTE = 0x30
_LOAD_HALF_X = 0x48
_LOAD_BYTE_X = 0x50
_LOAD_IP_LENGTH_X = 0xB1
_LOAD_X = 0x01
_X_TO_A = 0x87
_A_TO_X = 0x07
_ADD = 0x04
_ADD_X = 0x0C
_AND = 0x54
_SHIFT_RIGHT = 0x74
_EQUAL = 0x15
_GREATER = 0x25
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_RETURN_A = 0x16
_INSTRUCTION = struct.Struct("=HBBI")
"""linux/filter.h, struct sock_filter: opcode, jump if true, jump if false (both relative to the next one), value."""
_SOCKET_ADDRESS = struct.Struct("HHi12x")
"""linux/if_packet.h, struct sockaddr_ll: family, protocol, interface."""
# linux/rtnetlink.h: messages, attributes, and struct nlmsghdr, rtmsg and rtattr.
_NETLINK_ROUTE = 0
_GET_ROUTE = 26
_NEW_ROUTE = 24
_REQUEST = 1
_DESTINATION = 1
_INTERFACE = 4
_MESSAGE = struct.Struct("IHHII")
_ROUTE = struct.Struct("8BI")
_ATTRIBUTE = struct.Struct("HH")
_TCP = 6
_FRAGMENT = 0x1FFF
"""Mask of the fragment offset in an IPv4 header."""
_KEPT_OF_TCP = 14
_FIN = 0x01
_SYN = 0x02
CAP_NET_RAW = 13
"""linux/capability.h."""
IPV6_BYTES = 40


def open_packet_socket(
    family: int, addresses: Sequence[tuple[Any, ...]], ports: PortRange | None = None
) -> tuple[socket.socket, mmap.mmap]:
    """Open a packet socket for TCP segments from `addresses` to local `ports`. Return the socket and its ring's memory.

    `ports` is None for all ports. All addresses must be of the given `family`. Raises OSError if the kernel does not
    permit packet sockets."""
    if sys.byteorder != "little" or len(addresses) > MAX_ADDRESSES[family]:
        raise OSError(f"a packet ring needs a little-endian machine and at most {MAX_ADDRESSES[family]} addresses")
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
    """Make this thread's capability to open packet sockets (CAP_NET_RAW) effective, or give it up permanently.

    If the capability comes from the executable file, it must be made effective before a packet socket is opened. When
    the sockets are open, the thread can give up the capability, and the sockets keep working.
    """
    if effective:
        take_capability(CAP_NET_RAW)
    else:
        give_up_capability(CAP_NET_RAW)


def dropped_segments(packets: socket.socket) -> int:
    """Return the number of segments that were dropped since the last call because the ring was full."""
    return int(struct.unpack("3I", packets.getsockopt(_SOL_PACKET, _STATISTICS, 12))[1])


def filter_program(family: int, addresses: Sequence[tuple[Any, ...]], ports: PortRange | None = None) -> bytes:
    """Return the BPF program with which the kernel filters the packets of the socket.

    For each packet, the program returns the number of bytes that the kernel stores:

    - For a TCP segment from `addresses` to `ports` (None: all) that has data, SYN or FIN: the length of its headers.
    - For any other packet: 0.

    In the code of this function, an instruction is (opcode, jump if true, jump if false, value). The jump targets
    `accept` and `reject` are the two ends of the program. Register X contains the offset of the TCP header.
    """
    accept, reject = -1, -2
    ipv4 = family == socket.AF_INET
    tcp_offset_to_x = (_LOAD_IP_LENGTH_X, 0, 0, 0) if ipv4 else (_LOAD_X, 0, 0, IPV6_BYTES)

    # Accept only TCP. Of a fragmented IPv4 packet, accept only the first fragment.
    code: list[tuple[int, int, int, int]] = [
        (_LOAD_HALF, 0, 0, _PROTOCOL),
        (_EQUAL, 0, reject, _ETHERTYPE[family]),
        (_LOAD_BYTE, 0, 0, 9 if ipv4 else 6),
        (_EQUAL, 0, reject, _TCP),
    ]
    if ipv4:
        code += [
            (_LOAD_HALF, 0, 0, 6),
            (_ANY_BIT, reject, 0, _FRAGMENT),
        ]
    code += [tcp_offset_to_x]

    # Accept only segments to `ports`.
    if ports is not None:
        code += [
            (_LOAD_HALF_X, 0, 0, 2),
            (_AT_LEAST, 0, reject, ports.first),
            (_GREATER, reject, 0, ports.last),
        ]

    # Accept only segments with SYN, FIN or data. To check for data, the program loads the first byte after the TCP
    # header. If there is no such byte, as in an ACK without data, the load fails and the kernel rejects the packet.
    code += [
        (_LOAD_BYTE_X, 0, 0, 13),
        (_ANY_BIT, 7, 0, _SYN | _FIN),  # skips the next seven instructions, to the addresses
        (_LOAD_BYTE_X, 0, 0, 12),
        (_AND, 0, 0, 0xF0),
        (_SHIFT_RIGHT, 0, 0, 2),
        (_ADD_X, 0, 0, 0),
        (_A_TO_X, 0, 0, 0),
        (_LOAD_BYTE_X, 0, 0, 0),
        tcp_offset_to_x,
    ]

    # Accept only segments from one of the addresses. If a word differs, the program skips the rest of the address.
    source_offset = 12 if ipv4 else 8
    for address in addresses:
        words = address_words(family, address)
        for index, word in enumerate(words):
            code += [
                (_LOAD_WORD, 0, 0, source_offset + 4 * index),
                (_EQUAL, 0, 2 * (len(words) - index), word),
            ]
        same_port = _EQUAL if address[1] else _AT_LEAST  # port 0 matches every port
        code += [
            (_LOAD_HALF_X, 0, 0, 0),
            (same_port, accept, 0, address[1]),
        ]

    # The two ends: `reject` keeps nothing, `accept` keeps everything before TCP and the first bytes of TCP.
    ends = {reject: len(code), accept: len(code) + 1}
    code += [
        (_RETURN, 0, 0, 0),
        (_X_TO_A, 0, 0, 0),
        (_ADD, 0, 0, _KEPT_OF_TCP),
        (_RETURN_A, 0, 0, 0),
    ]
    packed = []
    for position, (opcode, if_true, if_false, value) in enumerate(code):
        jumps = [ends[jump] - position - 1 if jump < 0 else jump for jump in (if_true, if_false)]
        packed.append(_INSTRUCTION.pack(opcode, *jumps, value))
    return b"".join(packed)


def address_words(family: int, address: tuple[Any, ...]) -> tuple[int, ...]:
    """Return an IP address as the 32-bit words that a filter program reads from a packet header: one or four words."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    return struct.unpack(f"!{len(packed) // 4}I", packed)


def _attach(packets: socket.socket, code: bytes) -> None:
    """Attach a filter program to a packet socket (struct sock_fprog of linux/filter.h)."""
    space = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HP", len(code) // _INSTRUCTION.size, ctypes.addressof(space))
    packets.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)


def _bind(packets: socket.socket, interfaces: set[int]) -> None:
    """Bind the socket `packets` to a network interface. The socket receives packets only after this call.

    `interfaces` contains interface indexes. If it contains more than one index, the socket receives the packets of
    every interface of this machine.

    The caller attaches the packet filter before this call, so that every received packet has passed the filter.
    Python's `socket.bind` cannot be used, because it takes only the names of interfaces.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    interface = interfaces.pop() if len(interfaces) == 1 else 0
    address = _SOCKET_ADDRESS.pack(socket.AF_PACKET, socket.htons(_ALL), interface)
    if libc.bind(packets.fileno(), address, len(address)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _interface(family: int, address: tuple[Any, ...]) -> int:
    """Return the index of the network interface on the kernel's route to an address (rtnetlink(7)).

    Returns 0 if the kernel reports no interface."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    request = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0)
    request += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _DESTINATION) + packed
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as netlink:
        netlink.send(_MESSAGE.pack(_MESSAGE.size + len(request), _GET_ROUTE, _REQUEST, 1, 0) + request)
        reply = netlink.recv(65_536)
    if _MESSAGE.unpack_from(reply)[1] != _NEW_ROUTE:
        return 0
    position = _MESSAGE.size + _ROUTE.size
    while position + _ATTRIBUTE.size < len(reply):
        size, attribute = _ATTRIBUTE.unpack_from(reply, position)
        if attribute == _INTERFACE:
            return int.from_bytes(reply[position + _ATTRIBUTE.size : position + size], sys.byteorder)
        position += max(size + 3 & ~3, _ATTRIBUTE.size)  # attributes are aligned to four bytes
    return 0
