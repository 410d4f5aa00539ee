"""Gives each worker a separate range of local ports, so that its packet ring holds only packets for this worker.

A packet ring is memory in which the kernel stores the headers of received packets. Linux 6.3 and later can limit the
local port of a socket to a range (IP_LOCAL_PORT_RANGE of ip(7)). On older kernels, each ring contains the packets of
all workers, and each worker ignores the packets of other workers.
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
    """A range of port numbers, including both ends."""

    first: int
    last: int

    def claim(self, sock: socket.socket) -> None:
        """Make a socket (IPv4 or IPv6) use a local port in this range when it connects.

        Raises OSError if the kernel does not support this."""
        sock.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, struct.pack("I", self.last << 16 | self.first))


def ports_for_worker(worker: int, workers: int) -> PortRange | None:
    """Return the range of local ports for worker number `worker` of `workers`.

    All workers get the same number of ports. The result is None, which means all ports, if there is only one worker or
    if the kernel cannot limit a socket to a range.
    """
    with suppress(OSError, ValueError):
        first, last = map(int, _RANGE.read_text("ascii").split())
        count = (last + 1 - first) // workers
        ports = PortRange(first + worker * count, first + (worker + 1) * count - 1)
        with socket.socket() as probe:
            ports.claim(probe)
        return ports if workers > 1 else None
    return None
