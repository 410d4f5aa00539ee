"""Reads losses, the round-trip time and the receive window of a TCP connection from the kernel (tcp(7), TCP_INFO)."""

from __future__ import annotations

import socket
import sys
from typing import NamedTuple

LAST_DATA_RECV_OFFSET = 52
TOTAL_RETRANS_OFFSET = 100
MIN_RTT_OFFSET = 148  # since Linux 4.6
RCV_OOOPACK_OFFSET = 224  # since Linux 5.4
RCV_WND_OFFSET = 232  # since Linux 6.2


NO_RTT = 0xFFFFFFFF
"""Value of the minimum round-trip time if the kernel has not measured any."""


class NetworkFacts(NamedTuple):
    """Facts that the kernel has measured on a connection since it was opened."""

    retransmits: int
    """Number of segments that this machine retransmitted."""
    out_of_order: int
    """Number of segments that arrived out of order. Retransmissions by the server are counted only here, if the
    segments arrive out of order."""
    min_rtt_us: int | None
    """Minimum round-trip time in us. None if the kernel has measured none. A peer that delays its acknowledgements
    cannot make the minimum longer, because the handshake of TCP is acknowledged at once."""
    last_data_age_ms: int
    """Time since data last arrived, in ms. It has the resolution of the kernel's timer, at worst 10 ms. 0 if the kernel
    does not report it."""


NOTHING_MEASURED = NetworkFacts(0, 0, None, 0)


def network_facts(sock: socket.socket) -> NetworkFacts:
    """Return what the kernel has measured on a connection: losses, round-trip time, and the time since data last
    arrived.

    If the kernel does not report a value, the round-trip time is None, and any other value is 0.
    """
    info = _info(sock, RCV_OOOPACK_OFFSET + 4)
    rtt_us = _uint32(info, MIN_RTT_OFFSET)
    return NetworkFacts(
        _uint32(info, TOTAL_RETRANS_OFFSET) or 0,
        _uint32(info, RCV_OOOPACK_OFFSET) or 0,
        None if rtt_us in (None, 0, NO_RTT) else rtt_us,
        _uint32(info, LAST_DATA_RECV_OFFSET) or 0,
    )


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
