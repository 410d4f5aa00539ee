"""A network link with a delay, for kernels without netem: two TUN devices, and a process between them that holds each
packet for a while. What goes in at one comes out at the other.

    python delay.py LEFT RIGHT MILLISECONDS [LEFT RIGHT MILLISECONDS ...]     prints a line once the devices are there

The devices are there until this process ends, also in network namespaces to which they were moved meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES = 1 << 16

Held = deque[tuple[float, bytes]]


def device(name: str) -> int:
    """Make a TUN device; its file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return file


def relay(ways: dict[int, tuple[int, float]]) -> None:
    """From each file to another, after so many seconds. For ever."""
    held: dict[int, Held] = {source: deque() for source in ways}
    while True:
        now = time.monotonic()
        for source, packets in held.items():
            while packets and packets[0][0] <= now:
                with contextlib.suppress(OSError):  # a device that is down loses packets, as a cable does
                    os.write(ways[source][0], packets.popleft()[1])
        next_due = min((packets[0][0] for packets in held.values() if packets), default=now + 1)
        for source in select.select(list(ways), [], [], max(0.0, next_due - time.monotonic()))[0]:
            with contextlib.suppress(OSError):
                while packet := os.read(source, PACKET_BYTES):
                    held[source].append((time.monotonic() + ways[source][1], packet))


def main(arguments: list[str]) -> None:
    """Make the devices, say so, and relay."""
    ways: dict[int, tuple[int, float]] = {}
    for left, right, delay_ms in zip(*[iter(arguments)] * 3, strict=True):
        ends = device(left), device(right)
        ways[ends[0]] = ends[1], float(delay_ms) / 1000
        ways[ends[1]] = ends[0], float(delay_ms) / 1000
    print("ready", flush=True)
    relay(ways)


if __name__ == "__main__":
    main(sys.argv[1:])
