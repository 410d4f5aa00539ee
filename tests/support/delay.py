"""Simulates network links with a delay, for kernels without netem.

    python delay.py LEFT RIGHT MILLISECONDS [LEFT RIGHT MILLISECONDS ...]

A link consists of two TUN devices, LEFT and RIGHT. This process forwards each packet from one device to the other after
the delay. It prints a line when the devices exist. The devices exist until the process ends, even if they are moved to
other network namespaces.

If the environment variable SPOILED names a file, packets with data from each LEFT device are disturbed: every 11th is
lost, and every 7th is delayed by a further HELD_S seconds. Each forwarded packet is written to the file, after its send
time (CLOCK_REALTIME, ns) and its length, in eight bytes each.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import BinaryIO

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES = 1 << 16

HELD_S = 0.06
LOST, LATE = 11, 7


def device(name: str) -> int:
    """Create a TUN device, and return its file descriptor."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return file


def relay(ways: dict[int, tuple[int, float]], spoiled: set[int], told: BinaryIO | None) -> None:
    """Forward packets between TUN devices. This function does not return.

    - `ways` maps the file descriptor of each device to the descriptor of the opposite device and the delay in seconds.
    - `spoiled` contains the devices whose packets are lost or delayed further.
    - `told` is the file to which forwarded packets are written, or None.
    """
    held: list[tuple[float, int, int, bytes]] = []
    turns, with_data = count(), dict.fromkeys(ways, 0)
    while True:
        while held and held[0][0] <= time.monotonic():
            *_, source, packet = heappop(held)
            if told is not None:
                told.write(struct.pack("2q", time.time_ns(), len(packet)) + packet)
            with contextlib.suppress(OSError):  # a device that is down loses packets, as a cable does
                os.write(ways[source][0], packet)
        if told is not None:
            told.flush()
        next_due = held[0][0] if held else time.monotonic() + 1
        for source in select.select(list(ways), [], [], max(0.0, next_due - time.monotonic()))[0]:
            with contextlib.suppress(OSError):
                while packet := os.read(source, PACKET_BYTES):
                    due = time.monotonic() + ways[source][1]
                    if source in spoiled and len(packet) > 100:
                        with_data[source] += 1
                        if with_data[source] % LOST == 0:
                            continue
                        due += HELD_S * (with_data[source] % LATE == 0)
                    heappush(held, (due, next(turns), source, packet))


def main(arguments: list[str]) -> None:
    """Create the devices, print `ready`, and forward packets. This function does not return."""
    ways: dict[int, tuple[int, float]] = {}
    for left, right, delay_ms in zip(*[iter(arguments)] * 3, strict=True):
        ends = device(left), device(right)
        ways[ends[0]] = ends[1], float(delay_ms) / 1000
        ways[ends[1]] = ends[0], float(delay_ms) / 1000
    print("ready", flush=True)
    file = os.environ.get("SPOILED")
    with Path(file or os.devnull).open("wb") as told:
        relay(ways, set([*ways][::2]) if file else set(), told if file else None)


if __name__ == "__main__":
    main(sys.argv[1:])
