"""When requests reached the server's machine: the kernel's stamp of each packet that begins one.

A server that is handed a thousand requests at once reads them one after the other, so the instants it notes itself
spread over its own work. The kernel knows when each had come. Looking needs the right to open packet sockets
(CAP_NET_RAW, which root has); without it there is nothing, and what the server noted has to do.

    the filter, over IPv4 on the loopback interface        accept when
    [9] protocol, [x+2] port, [x+12] length of the head    TCP, to our port, and the data begins with "POST"
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from collections.abc import Iterator

_ETHERTYPE_IPV4 = 0x0800
_ATTACH_FILTER, _RECEIVE_BUFFER_FORCE, _TIMESTAMP_NS = 26, 33, 35
"""SO_ATTACH_FILTER, SO_RCVBUFFORCE and SO_TIMESTAMPNS of asm-generic/socket.h."""
_BUFFER_BYTES = 1 << 29
"""Packets wait here, at their full size, until the run is over: nothing is done while it goes on."""
_KEPT_BYTES = 256
_TIMESPEC = struct.Struct("@qq")
_INSTRUCTION = struct.Struct("=HBBI")
"""linux/filter.h, struct sock_filter: what to do, where to go if true, if false (both counted from the next), value."""


class Watch:
    """A socket that has kept the beginning of every POST to one port."""

    def __init__(self, packets: socket.socket | None) -> None:
        self._packets = packets

    def arrivals_ns(self) -> list[int] | None:
        """CLOCK_REALTIME at which each request for tokens had come, in order; None when nobody could look."""
        if self._packets is None:
            return None
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data, control, _, _ = self._packets.recvmsg(_KEPT_BYTES, 256)
                if b"completions HTTP/1.1\r\n" in data:
                    found += [_instant_ns(value) for _, kind, value in control if kind == _TIMESTAMP_NS]
        return sorted(found)


def permitted() -> bool:
    """Whether this process may look."""
    try:
        _opened().close()
    except PermissionError:
        return False
    return True


@contextlib.contextmanager
def watching(port: int) -> Iterator[Watch]:
    """Watches the loopback interface for requests to `port`."""
    if not permitted():
        yield Watch(None)
        return
    with _opened() as packets:
        packets.setblocking(False)
        packets.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCE, _BUFFER_BYTES)
        packets.setsockopt(socket.SOL_SOCKET, _TIMESTAMP_NS, 1)
        _attach(packets, port)
        packets.bind(("lo", _ETHERTYPE_IPV4))
        yield Watch(packets)


def _opened() -> socket.socket:
    return socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETHERTYPE_IPV4))


def _attach(packets: socket.socket, port: int) -> None:
    program = b"".join(_INSTRUCTION.pack(*each) for each in _program(port))
    space = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HP", len(program) // _INSTRUCTION.size, ctypes.addressof(space))
    packets.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)


def _program(port: int) -> list[tuple[int, int, int, int]]:
    """Classic BPF. x is the offset of the TCP head, then of the data."""
    return [
        (0x30, 0, 0, 9),  # A = protocol
        (0x15, 0, 10, socket.IPPROTO_TCP),
        (0xB1, 0, 0, 0),  # x = length of the IP head
        (0x48, 0, 0, 2),  # A = destination port
        (0x15, 0, 7, port),
        (0x50, 0, 0, 12),  # A = byte with the length of the TCP head, in words of four bytes, in its upper half
        (0x54, 0, 0, 0xF0),
        (0x74, 0, 0, 2),
        (0x0C, 0, 0, 0),  # A += x
        (0x07, 0, 0, 0),  # x = A
        (0x40, 0, 0, 0),  # A = first four bytes of the data; a packet without any is refused here
        (0x15, 1, 0, int.from_bytes(b"POST", "big")),
        (0x06, 0, 0, 0),
        (0x06, 0, 0, _KEPT_BYTES),
    ]


def _instant_ns(value: bytes) -> int:
    seconds, nanoseconds = _TIMESPEC.unpack(value)
    return int(seconds * 1_000_000_000 + nanoseconds)
