"""What the kernel knows of a connection (tcp(7), TCP_INFO): losses, and how much it still takes."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

TOTAL_RETRANS_AT = 100
RCV_OOOPACK_AT = 224  # since Linux 5.4
RCV_WND_AT = 232  # since Linux 6.2
_U32 = struct.Struct("I")


def losses(sock: socket.socket) -> tuple[int, int]:
    """(segments we sent again, segments that came out of order) on this connection. The server's own retransmissions
    show only as what they leave: segments out of order. (0, 0) where the kernel does not say."""
    return _told(sock, TOTAL_RETRANS_AT) or 0, _told(sock, RCV_OOOPACK_AT) or 0


def window(sock: socket.socket) -> int | None:
    """Bytes that the peer may still send before we read, as it was last told; None where the kernel does not say."""
    return _told(sock, RCV_WND_AT)


def _told(sock: socket.socket, at: int) -> int | None:
    """A field of struct tcp_info, whose offsets are those of <linux/tcp.h>."""
    with suppress(OSError):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, at + 4)
        return int(_U32.unpack_from(info, at)[0]) if len(info) >= at + 4 else None
    return None
