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
    show only as what they leave: segments out of order. 0 where the kernel does not say."""
    sent_again, out_of_order = _told(sock, TOTAL_RETRANS_AT, RCV_OOOPACK_AT)
    return sent_again or 0, out_of_order or 0


def window(sock: socket.socket) -> int | None:
    """Bytes that the peer may still send before we read, as it was last told; None where the kernel does not say."""
    return _told(sock, RCV_WND_AT)[0]


def _told(sock: socket.socket, *places: int) -> list[int | None]:
    """Fields of struct tcp_info at these offsets, those of <linux/tcp.h>, in their order."""
    info = b""
    with suppress(OSError):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, places[-1] + _U32.size)
    return [_U32.unpack_from(info, at)[0] if len(info) >= at + _U32.size else None for at in places]
