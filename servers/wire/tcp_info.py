"""Reads losses and the receive window of a connection from the kernel (tcp(7), TCP_INFO)."""

from __future__ import annotations

import socket
import sys

TOTAL_RETRANS_OFFSET = 100
RCV_OOOPACK_OFFSET = 224  # since Linux 5.4
RCV_WND_OFFSET = 232  # since Linux 6.2


def losses(sock: socket.socket) -> tuple[int, int]:
    """Return (segments that we retransmitted, segments that arrived out of order) on this connection. The server's
    retransmissions are visible only as segments out of order. A count is 0 if the kernel does not report it."""
    info = _info(sock, RCV_OOOPACK_OFFSET + 4)
    return _uint32(info, TOTAL_RETRANS_OFFSET) or 0, _uint32(info, RCV_OOOPACK_OFFSET) or 0


def receive_window(sock: socket.socket) -> int | None:
    """Return how many bytes the peer may still send before we read, as last advertised to it. None if the kernel does
    not report it."""
    return _uint32(_info(sock, RCV_WND_OFFSET + 4), RCV_WND_OFFSET)


def _info(sock: socket.socket, size: int) -> bytes:
    """Return the first `size` bytes of struct tcp_info, or fewer on older kernels."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except OSError:
        return b""


def _uint32(info: bytes, offset: int) -> int | None:
    """Return the 32-bit field at an offset of struct tcp_info (<linux/tcp.h>)."""
    return int.from_bytes(info[offset : offset + 4], sys.byteorder) if len(info) >= offset + 4 else None
