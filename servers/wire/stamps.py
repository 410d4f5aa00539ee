"""What the kernel knows of our sockets: receive stamps, and the losses of a connection.

Linux attaches to each `recvmsg` the instant at which the last byte returned was received, when SO_TIMESTAMPING
asks for RX_SOFTWARE | SOFTWARE (Documentation/networking/timestamping.rst). The stamp is right however late the
process gets round to reading.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from time import sleep

SO_TIMESTAMPING = 37  # <asm-generic/socket.h>; also the type of the control message that comes back
RX_SOFTWARE_AND_SOFTWARE = 1 << 3 | 1 << 4  # <linux/net_tstamp.h>
TIMESPEC_BYTES = 16  # the control message holds three; the first is the software stamp
CONTROL_BYTES = 128
TCP_INFO_BYTES = 232
TOTAL_RETRANS_AT = 100
RCV_OOOPACK_AT = 224  # since Linux 5.4
_U32 = struct.Struct("I")
TRIES = 200


def stamp_reads(sock: socket.socket) -> bool:
    """Ask the kernel for receive stamps. False where it has none to give (not Linux, some sandboxes)."""
    if sys.platform != "linux":
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, RX_SOFTWARE_AND_SOFTWARE)
    except OSError:
        return False
    return True


def hold_stamps() -> socket.socket | None:
    """Have the kernel stamp packets from now on; None where it does not. Keep the socket while stamps are needed.

    Linux starts stamping shortly after the first socket asks and stops after the last one is gone
    (net/core/dev.c, `net_enable_timestamp` defers to a work queue), so the first answers of a run could come
    without. This socket asks early, and sends itself datagrams until one arrives stamped.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.settimeout(0.1)
    with contextlib.suppress(OSError):
        for _ in range(TRIES if stamp_reads(sock) else 0):
            sock.sendto(b"?", sock.getsockname())
            if sock.recvmsg(1, CONTROL_BYTES)[1]:
                return sock
            sleep(0.001)
    sock.close()
    return None


def losses(sock: socket.socket) -> tuple[int, int]:
    """(segments we sent again, segments that came out of order) on this connection, from struct tcp_info.

    Offsets are those of <linux/tcp.h>. The server's own retransmissions show only as what they leave: segments out
    of order. (0, 0) where the kernel does not say.
    """
    if sys.platform != "linux":
        return 0, 0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except OSError:
        return 0, 0
    counts = [_U32.unpack_from(info, at)[0] if len(info) >= at + 4 else 0 for at in (TOTAL_RETRANS_AT, RCV_OOOPACK_AT)]
    return counts[0], counts[1]
