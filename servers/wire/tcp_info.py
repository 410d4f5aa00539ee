"""Reads the packet losses and the receive window of a TCP connection from the kernel (tcp(7), TCP_INFO)."""

from __future__ import annotations

import socket
import sys

TOTAL_RETRANS_OFFSET = 100
RCV_OOOPACK_OFFSET = 224  # since Linux 5.4
RCV_WND_OFFSET = 232  # since Linux 6.2


def losses(sock: socket.socket) -> tuple[int, int]:
    """Return two counts of a connection: segments that this machine retransmitted, and segments received out of order.

    Retransmissions by the server are counted only if the segments arrive out of order here. A count is 0 if the kernel
    does not report it."""
    info = _info(sock, RCV_OOOPACK_OFFSET + 4)
    return _uint32(info, TOTAL_RETRANS_OFFSET) or 0, _uint32(info, RCV_OOOPACK_OFFSET) or 0


def receive_window(sock: socket.socket) -> int | None:
    """Return the receive window in bytes that was last advertised to the server, or None if it is unknown.

    The server may send this many bytes before this process reads. Kernels before Linux 6.2 do not report the window."""
    return _uint32(_info(sock, RCV_WND_OFFSET + 4), RCV_WND_OFFSET)


def _info(sock: socket.socket, size: int) -> bytes:
    """Return the first `size` bytes of struct tcp_info. An older kernel may return fewer bytes.

    Return b"" if the kernel does not support TCP_INFO."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except OSError:
        return b""


def _uint32(info: bytes, offset: int) -> int | None:
    """Return the 32-bit field at an offset of struct tcp_info (<linux/tcp.h>), or None if the field is missing."""
    return int.from_bytes(info[offset : offset + 4], sys.byteorder) if len(info) >= offset + 4 else None
