"""Decides how long reads may be deferred when the kernel timestamps every packet.

A late read does not change the kernel's timestamps. Reads can therefore be deferred, and many sockets can be read in
one sweep. A sweep is one pass that reads every readable socket. The delay between sweeps is longer if reads use a
larger share of a CPU core.
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
"""Settings of ReadPacer: (maximum delay in seconds, share of a core above which reads are deferred).

- OFTEN: the next request is sent when a response ends.
- MODERATE: the end of a response only frees a connection for the next request.
- SELDOM: in a burst, no request waits for a response.
"""
RECEIVE_BUFFER_BYTES = 1 << 18
"""Requested receive buffer size if reads may be late. Linux allocates twice this size, or what net.core.rmem_max
permits."""
MIN_DELAY_S = 0.005
RATE_CHECK_S = 0.25
"""Interval at which a long pause checks whether the arrival rate has dropped."""
WIDER = 16
"""Maximum factor by which one step lengthens the delay, while the receive buffers have free space."""
SWEPT_SHARE = 16
"""One read may return 1/16 of a receive buffer, because small segments occupy six times their size in the buffer."""
SWEPT_BYTES = 1 << 25
"""Maximum bytes of one sweep over all sockets. Until they are read, they occupy the system's memory for sockets."""
IDLE_SHARE = 0.1
"""The delay shrinks if reading takes less than this share of a core, or less than `busy / 3` if that is smaller."""
FEWER, COMPARED = 0.75, 4
"""A rate below FEWER times each of the previous COMPARED rates counts as a drop."""
LOOK_NS = 50_000_000
SCHEDULED = Path("/proc/thread-self/schedstat")


def core_demand_ns() -> int:
    """Return the total time in ns during which this thread has used a CPU core, or has waited for one."""
    try:
        return sum(map(int, SCHEDULED.read_bytes().split()[:2]))
    except OSError:
        return time.process_time_ns()


class ReadPacer:
    """Adapts the delay between sweeps to the CPU time of this thread. A sweep reads every readable socket once.

    The delay grows while the thread needs a large share of a CPU core. It shrinks while the thread needs a small share,
    or while the sockets contain a lot of unread data.
    """

    def __init__(
        self,
        max_delay_s: float,
        busy: float,
        *,
        rate_dropped: Callable[[], bool] = bool,
        by_read: Callable[[], bool] = bool,
    ) -> None:
        """Create a pacer. Its delay is the pause between two sweeps, and is 0 at first. A sweep reads every readable
        socket once.

        - `max_delay_s` is the maximum delay in seconds.
        - `busy` is a share of the time, such as 0.5. The delay grows while this thread runs on a CPU core, or waits for
          a core, for more than this share of the time.
        - `rate_dropped` returns True if packets arrive more slowly than before the last call. Responses may then have
          ended, so the current delay ends early.
        - `by_read` returns True while timestamps depend on the time of the read. The delay is 0 during this time.
        """
        self.rate_dropped = rate_dropped
        self._by_read = by_read
        self._max_delay_s = max_delay_s
        self._busy = busy
        self._idle = min(IDLE_SHARE, busy / 3)
        self._swept_bytes = 1  # Bytes that one read may return
        self._fullness = 0.0  # Largest read relative to its limit, since the delay was last adapted
        self._delay_s = 0.0
        self._widest_s = 0.0
        self._looked_ns = time.monotonic_ns()
        self._demand_ns = core_demand_ns()

    def watch(self, sock: socket.socket) -> None:
        """Store the size of this socket's receive buffer. All sockets are assumed to have buffers of the same size."""
        self._swept_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // SWEPT_SHARE

    def next_delay_s(self, now_ns: int, largest_read: int, bytes_read: int) -> float:
        """Return the delay in seconds until the next sweep, which reads every readable socket once.

        - `now_ns` is the current time (CLOCK_MONOTONIC).
        - `largest_read` is the number of bytes in the largest read of the last sweep.
        - `bytes_read` is the number of bytes in all reads of the last sweep.
        """
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
        """Return the longest delay that was in use since the last call of this method, in ns.

        The delay is the pause that this object requires between two sweeps. A sweep is one pass that reads every
        readable socket. The result is 0 if no pause was required.
        """
        widest_s, self._widest_s = self._widest_s, self._delay_s
        return round(widest_s * 1e9)


class RateDropDetector:
    """Detects a drop in the number of TCP segments that arrive per second."""

    def __init__(self) -> None:
        self.arrived = 0
        """Number of segments since the last call of `rate_dropped`. The caller increases this number."""
        self._asked_ns = time.monotonic_ns()
        self._per_ns = deque([0.0], COMPARED)
        self._may_end = False
        """Whether a segment has arrived since the last drop."""

    def rate_dropped(self) -> bool:
        """Return True if the rate of TCP segments has dropped since the last call of this method.

        The rate is the number of segments per second in the interval between two calls. There are two kinds of drops:

        - The new rate is less than FEWER times the lowest of the previous COMPARED rates. Several rates are compared,
          because rates vary: the tokens of many streams arrive together at each step of the engine.
        - No segment has arrived in the last two intervals. After a drop of either kind, this kind is not reported until
          another segment has arrived.
        """
        lowest = min(self._per_ns)
        previous = self._per_ns[-1]
        asked_ns, self._asked_ns = self._asked_ns, time.monotonic_ns()
        self._per_ns.append(self.arrived / max(self._asked_ns - asked_ns, 1))
        self._may_end |= self.arrived > 0
        dropped = self._per_ns[-1] < FEWER * lowest or (self._may_end and not self.arrived and not previous)
        self.arrived = 0
        self._may_end = self._may_end and not dropped
        return dropped
