"""Converts kernel receive timestamps to the monotonic clock, and runs callbacks at exact times.

The kernel timestamps received bytes on CLOCK_REALTIME, which may be slewed or stepped during a run. For this reason
CLOCK_REALTIME and CLOCK_MONOTONIC are read together at the start, about once a second, and at the end. A timestamp is
converted with the last pair of readings before it and the first pair after it.
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
"""Clock offsets that differ by at most this many ns count as equal, because two clocks cannot be read more exactly."""


class ClockPairs:
    """Pairs of readings of CLOCK_REALTIME and CLOCK_MONOTONIC, taken at almost the same time.

    The difference of a pair is the offset between the clocks. It converts times of one clock to times of the other.
    """

    def __init__(
        self, realtime_ns: Callable[[], int] = time.time_ns, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._realtime_ns = realtime_ns
        self._monotonic_ns = monotonic_ns
        self._realtime: list[int] = []
        self._offsets: list[int] = []
        self.disagreement_ns = 0
        """Largest change of the offset between the two clocks since the first pair, in ns."""
        self.take()

    def take(self) -> None:
        """Read both clocks at almost the same time, and store the pair of readings.

        Five pairs are read. Only the pair that took the least time is stored, because it is the most exact one.
        """
        readings = [(self._monotonic_ns(), self._realtime_ns(), self._monotonic_ns()) for _ in range(5)]
        before, realtime, after = min(readings, key=lambda reading: reading[2] - reading[0])
        self._realtime.append(realtime)
        self._offsets.append((before + after) // 2 - realtime)
        self.disagreement_ns = max(self.disagreement_ns, abs(self._offsets[-1] - self._offsets[0]))

    def to_monotonic(self, stamps: Sequence[int]) -> list[int]:
        """Convert timestamps from CLOCK_REALTIME to CLOCK_MONOTONIC, both in ns.

        The offset between the clocks is known from pairs of readings. If it has changed by at most SLEW_TOLERANCE_NS
        during the run, the newest offset is used for all timestamps. Otherwise each timestamp gets an interpolated
        offset, from the last pair of readings before it and the first pair after it.
        """
        if self.disagreement_ns <= SLEW_TOLERANCE_NS:
            offset = self._offsets[-1]
            return [stamp + offset for stamp in stamps]
        return [stamp + self._offset_at(stamp) for stamp in stamps]

    def to_realtime(self, instant_ns: int) -> int:
        """Convert a time in ns from CLOCK_MONOTONIC to CLOCK_REALTIME.

        The offset between the clocks is that of the newest pair of readings.
        """
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
    """Runs callbacks in an asyncio event loop at exact times.

    All callbacks share one timer, which is set to the absolute time of the next callback (loadgen.servers.wire.poller).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = Timer(loop, self._run)
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = count()  # keeps the order of callbacks with the same instant

    def now_ns(self) -> int:
        """Return the current time of CLOCK_MONOTONIC in ns."""
        return time.monotonic_ns()

    def at(self, instant_ns: int, callback: Callable[[], None]) -> None:
        """Schedule `callback` for `instant_ns` (CLOCK_MONOTONIC). It runs then, or as soon as possible afterwards.

        Callbacks for the same time run in the order in which they were scheduled.
        """
        if instant_ns <= time.monotonic_ns() and not self._agenda:
            self._timer.loop.call_soon(callback)  # arming a timer that expires at once would take 20 us
            return
        heappush(self._agenda, (instant_ns, next(self._sequence), callback))
        if self._agenda[0][0] == instant_ns:
            self._timer.arm(instant_ns)

    def _run(self) -> None:
        while self._agenda and self._agenda[0][0] <= time.monotonic_ns():
            heappop(self._agenda)[2]()
        self._timer.arm(self._agenda[0][0] if self._agenda else None)
