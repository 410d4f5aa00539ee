"""Decides how long reads may be deferred when packets are timestamped by the kernel.

Such reads can be deferred and batched, because a late read does not change a timestamp. The more of a core the reads
take, the longer they are deferred. A sweep is one pass in which every readable socket is read.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

SELDOM = (4.0, 0.03)
MODERATE = (0.1, 0.3)
OFTEN = (0.001, 0.8)
"""(maximum delay in seconds, share of a core beyond which reads are deferred) for ReadPacer. OFTEN: the end of a
response lets the next request be sent. MODERATE: it only frees a connection for it. SELDOM: a burst, in which no
request waits for a response."""
RECEIVE_BUFFER_BYTES = 1 << 18
"""The receive buffer to ask for where reads may be late. Linux gives twice as much, or what net.core.rmem_max
permits."""
MIN_DELAY_S = 0.005
RATE_CHECK_S = 0.25
"""Interval at which a long pause checks whether the arrival rate has dropped."""
WIDER = 16
"""Maximum factor by which one step lengthens the delay, while the receive buffers have room."""
SWEPT_SHARE = 16
"""One read may take 1/16 of a receive buffer, because small segments take six times their size in it."""
SWEPT_BYTES = 1 << 25
"""Maximum bytes of one sweep, over all sockets: they are held in the system's memory for sockets."""
IDLE_SHARE = 0.1
"""Share of a core below which the delay shrinks, or a third of `busy` if that is less."""
FEWER, COMPARED = 0.75, 4
"""A rate below FEWER times each of the previous COMPARED rates counts as a drop."""
LOOK_NS = 50_000_000
SCHEDULED = Path("/proc/thread-self/schedstat")


def core_demand_ns() -> int:
    """Return for how long this thread has used a core or waited for one."""
    try:
        return sum(map(int, SCHEDULED.read_bytes().split()[:2]))
    except OSError:
        return time.process_time_ns()


class ReadPacer:
    """Adapts the delay between sweeps: longer while reading takes much of a core, shorter when it does not or when the
    sockets hold much data."""

    def __init__(
        self,
        max_delay_s: float,
        busy: float,
        *,
        rate_dropped: Callable[[], bool] = bool,
        by_read: Callable[[], bool] = bool,
    ) -> None:
        """`busy` is the share of a core, used or waited for, beyond which sweeps are delayed.

        `rate_dropped` tells whether the arrival rate has dropped since its last call. Responses may have ended then, so
        a long pause ends too. While `by_read` returns True, timestamps depend on reads and no read is deferred.
        """
        self.rate_dropped = rate_dropped
        self._by_read = by_read
        self._max_delay_s = max_delay_s
        self._busy = busy
        self._idle = min(IDLE_SHARE, busy / 3)
        self._swept_bytes = 1  # What one read may take
        self._fullness = 0.0  # Largest read relative to its limit, since the last look
        self._delay_s = 0.0
        self._widest_s = 0.0
        self._looked_ns = time.monotonic_ns()
        self._demand_ns = core_demand_ns()

    def watch(self, sock: socket.socket) -> None:
        """Note the receive buffer of the first socket. Every socket has the same size."""
        self._swept_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // SWEPT_SHARE

    def next_delay_s(self, now_ns: int, largest_read: int, bytes_read: int) -> float:
        """Return the delay until the next sweep, given the bytes of this sweep's largest read and of all its reads."""
        if self._by_read():
            return 0.0
        self._fullness = max(self._fullness, largest_read / self._swept_bytes, bytes_read / SWEPT_BYTES)
        wall_ns = now_ns - self._looked_ns
        if wall_ns >= LOOK_NS:
            demand_before_ns, self._demand_ns = self._demand_ns, core_demand_ns()
            share = (self._demand_ns - demand_before_ns) / wall_ns
            self._looked_ns = now_ns
            if self._fullness > 1 or share < self._idle:
                self._delay_s = self._delay_s / 2 if self._delay_s > MIN_DELAY_S else 0.0
            elif share > self._busy:
                wider_s = self._delay_s * min(WIDER, 1 / (self._fullness or 1))
                self._delay_s = min(max(wider_s, MIN_DELAY_S), self._max_delay_s)
            self._fullness = 0.0
            self._widest_s = max(self._widest_s, self._delay_s)
        return self._delay_s

    def widest_ns(self) -> int:
        """Return the longest delay between sweeps since the last call, in ns; 0 if every socket was read at once."""
        widest_s, self._widest_s = self._widest_s, self._delay_s
        return round(widest_s * 1e9)


class RateDropDetector:
    """Detects that fewer segments arrive per second than before."""

    def __init__(self) -> None:
        self.arrived = 0
        """Segments since the last call of `rate_dropped`. The caller adds to it."""
        self._asked_ns = time.monotonic_ns()
        self._per_ns = deque([0.0], COMPARED)
        self._may_end = False
        """Whether something has arrived since the last drop."""

    def rate_dropped(self) -> bool:
        """Return True if the rate since the last call is clearly below each of the previous rates, or if nothing has
        arrived in two calls after something had. Several rates are compared, because tokens of many streams arrive in
        steps."""
        lowest = min(self._per_ns)
        previous = self._per_ns[-1]
        asked_ns, self._asked_ns = self._asked_ns, time.monotonic_ns()
        self._per_ns.append(self.arrived / max(self._asked_ns - asked_ns, 1))
        self._may_end |= self.arrived > 0
        dropped = self._per_ns[-1] < FEWER * lowest or (self._may_end and not self.arrived and not previous)
        self.arrived = 0
        self._may_end = self._may_end and not dropped
        return dropped
