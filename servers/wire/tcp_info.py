"""What the kernel knows of a connection (tcp(7), TCP_INFO): losses, and how much it still takes."""

from __future__ import annotations

import socket
import sys

TOTAL_RETRANS_AT = 100
RCV_OOOPACK_AT = 224  # since Linux 5.4
RCV_WND_AT = 232  # since Linux 6.2


def losses(sock: socket.socket) -> tuple[int, int]:
    """(segments we sent again, segments that came out of order) on this connection. The server's own retransmissions
    show only as what they leave: segments out of order. 0 where the kernel does not say."""
    info = _info(sock, RCV_OOOPACK_AT + 4)
    return _at(info, TOTAL_RETRANS_AT) or 0, _at(info, RCV_OOOPACK_AT) or 0


def receive_window(sock: socket.socket) -> int | None:
    """Bytes that the peer may still send before we read, as it was last told; None where the kernel does not say."""
    return _at(_info(sock, RCV_WND_AT + 4), RCV_WND_AT)


def _info(sock: socket.socket, size: int) -> bytes:
    """The beginning of struct tcp_info, as much as the kernel has of it."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except OSError:
        return b""


def _at(info: bytes, place: int) -> int | None:
    """The field of 32 bits at this offset, one of those of <linux/tcp.h>."""
    return int.from_bytes(info[place : place + 4], sys.byteorder) if len(info) >= place + 4 else None
