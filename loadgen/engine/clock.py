"""Clocks: monotonic for instants and durations, and the bridge from the kernel's receive stamps to it.

The kernel stamps received bytes on CLOCK_REALTIME, which may be slewed or stepped while we run. So both clocks
are read together at the start, about once a second and at the end, and a stamp is converted with the two pairs
around it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from loadgen.servers.wire.poller import Timer

if TYPE_CHECKING:
    import asyncio

SLEW_TOLERANCE_NS = 1_000
"""Offsets that stay this close to each other are taken as one, because reading two clocks is no more exact."""


class ClockPairs:
    """Paired readings of CLOCK_REALTIME and CLOCK_MONOTONIC, and the conversion they allow."""

    def __init__(
        self, realtime_ns: Callable[[], int] = time.time_ns, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._realtime_ns = realtime_ns
        self._monotonic_ns = monotonic_ns
        self._realtime: list[int] = []
        self._offsets: list[int] = []
        self.disagreement_ns = 0
        """How far the two clocks moved against each other since the first pair, at most."""
        self.take()

    def take(self) -> None:
        """Read both clocks; the tightest of five tries counts."""
        tries = [(self._monotonic_ns(), self._realtime_ns(), self._monotonic_ns()) for _ in range(5)]
        before, realtime, after = min(tries, key=lambda each: each[2] - each[0])
        self._realtime.append(realtime)
        self._offsets.append((before + after) // 2 - realtime)
        self.disagreement_ns = max(self.disagreement_ns, abs(self._offsets[-1] - self._offsets[0]))

    def to_monotonic(self, stamps: Sequence[int]) -> list[int]:
        """CLOCK_REALTIME stamps in ns to CLOCK_MONOTONIC; between two pairs the offset is interpolated."""
        if self.disagreement_ns <= SLEW_TOLERANCE_NS:
            offset = self._offsets[-1]
            return [stamp + offset for stamp in stamps]
        return [stamp + self._offset_at(stamp) for stamp in stamps]

    def to_realtime(self, instant_ns: int) -> int:
        """CLOCK_MONOTONIC to CLOCK_REALTIME by the newest pair."""
        return instant_ns - self._offsets[-1]

    def _offset_at(self, realtime: int) -> int:
        after = bisect_right(self._realtime, realtime)
        if after == 0:
            return self._offsets[0]
        if after == len(self._realtime):
            return self._offsets[-1]
        begin, end = self._realtime[after - 1], self._realtime[after]
        first, last = self._offsets[after - 1], self._offsets[after]
        return first + (last - first) * (realtime - begin) // (end - begin)


class SystemClock:
    """Wake-ups at exact instants in the running event loop: absolute deadlines on one timer
    (loadgen.servers.wire.poller)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = Timer(loop, self._run)
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._taken = count()

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def at(self, instant_ns: int, callback: Callable[[], None]) -> None:
        """Call back at this instant, or as soon as possible after it; those of one instant in their order."""
        if instant_ns <= time.monotonic_ns() and not self._agenda:
            self._timer.loop.call_soon(callback)  # to set a timer that goes off at once takes 20 us
            return
        heappush(self._agenda, (instant_ns, next(self._taken), callback))
        if self._agenda[0][0] == instant_ns:
            self._timer.arm(instant_ns)

    def _run(self) -> None:
        while self._agenda and self._agenda[0][0] <= time.monotonic_ns():
            heappop(self._agenda)[2]()
        self._timer.arm(self._agenda[0][0] if self._agenda else None)
