"""Ports of our own for each worker: its packet ring then holds its own packets, not those of all.

Linux lets a socket choose among fewer ports than the machine has for that (IP_LOCAL_PORT_RANGE of ip(7), from 6.3).
Before that a ring holds the packets of all workers, each of which finds its own.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_IP_LOCAL_PORT_RANGE = 51
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortRange(NamedTuple):
    """From the first to the last."""

    first: int
    last: int

    def claim(self, sock: socket.socket) -> None:
        """Have a socket, of IPv4 or IPv6, connect from one of these. Raises OSError."""
        sock.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, struct.pack("I", self.last << 16 | self.first))


def ports_for_worker(worker: int, workers: int) -> PortRange | None:
    """Those of one worker: equal parts of what the machine has for outgoing connections. None, all of them, for one
    that is alone, or where sockets cannot be held to them."""
    with suppress(OSError, ValueError):
        first, last = map(int, _RANGE.read_text("ascii").split())
        each = (last + 1 - first) // workers
        ports = PortRange(first + worker * each, first + (worker + 1) * each - 1)
        with socket.socket() as tried:
            ports.claim(tried)
        return ports if workers > 1 else None
    return None
