"""How far apart reads may be where they are not what stamps: less is read at a time the more it costs a core."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

SELDOM, MODERATE, OFTEN = (4.0, 0.03), (0.1, 0.3), (0.001, 0.8)
"""Seconds that reads may be apart at most, and the share of a core beyond which they are: `OFTEN` where an end makes
the next request due or lets it be sent, `MODERATE` where it only frees a connection for it, `SELDOM` in a burst."""
RECEIVE_BUFFER_BYTES = 1 << 18
"""The receive buffer that is asked for where reads may be late: Linux gives twice as much, or what net.core.rmem_max
permits."""
MIN_DELAY_S = 0.005
RATE_CHECK_S = 0.25
"""How often to ask in a long pause whether less comes than before."""
WIDER = 16
"""Times as far apart as before, at most, while what a socket holds allows it."""
SWEPT_SHARE = 16
"""What part of a receive buffer may come in one read: small segments take six times their room."""
SWEPT_BYTES = 1 << 25
"""What all may hold together: it is the system's memory for sockets."""
IDLE_SHARE = 0.1
"""Of a core, below which sweeps are closer again; with a low `busy` a third of that."""
FEWER, COMPARED = 0.75, 4
"""Of what came per second before, so many times: clearly less."""
LOOK_NS = 50_000_000
SCHEDULED = Path("/proc/thread-self/schedstat")


def core_demand_ns() -> int:
    """How long this thread had a core, or waited for one that others had."""
    try:
        return sum(map(int, SCHEDULED.read_bytes().split()[:2]))
    except OSError:
        return time.process_time_ns()


class ReadPacer:
    """At most `most_s` apart: farther while reading takes much of a core, closer again when it does not or sockets
    held much."""

    def __init__(
        self, most_s: float, busy: float, *, rate_dropped: Callable[[], bool] = bool, by_read: Callable[[], bool] = bool
    ) -> None:
        """`busy` is the share of a core, had or waited for, beyond which reading is to take less. `rate_dropped` says
        whether less comes than when it was last asked: then answers may have ended, and a long pause does too. While
        it is reads that stamp, `by_read`, none is put off."""
        self.rate_dropped, self._by_read = rate_dropped, by_read
        self._most_s, self._busy, self._idle = most_s, busy, min(IDLE_SHARE, busy / 3)
        self._swept_bytes, self._full = 1, 0.0
        self._apart_s = self._widest_s = 0.0
        self._looked_ns, self._wanted_ns = time.monotonic_ns(), core_demand_ns()

    def watch(self, sock: socket.socket) -> None:
        """The first of the sockets, whose receive buffers are alike."""
        self._swept_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // SWEPT_SHARE

    def next_delay_s(self, now_ns: int, most: int, total: int) -> float:
        """A sweep is over, in which the largest read had so many bytes, and all together: when is the next?"""
        if self._by_read():
            return 0.0
        self._full = max(self._full, most / self._swept_bytes, total / SWEPT_BYTES)
        wall_ns = now_ns - self._looked_ns
        if wall_ns >= LOOK_NS:
            before, self._wanted_ns = self._wanted_ns, core_demand_ns()
            share = (self._wanted_ns - before) / wall_ns
            self._looked_ns = now_ns
            if self._full > 1 or share < self._idle:
                self._apart_s = self._apart_s / 2 if self._apart_s > MIN_DELAY_S else 0.0
            elif share > self._busy:
                wider_s = self._apart_s * min(WIDER, 1 / (self._full or 1))
                self._apart_s = min(max(wider_s, MIN_DELAY_S), self._most_s)
            self._full = 0.0
            self._widest_s = max(self._widest_s, self._apart_s)
        return self._apart_s

    def widest_ns(self) -> int:
        """How far apart sweeps were at most since the last time this was asked; 0: everything was served at once."""
        widest, self._widest_s = self._widest_s, self._apart_s
        return round(widest * 1e9)


class RateDropDetector:
    """Whether less comes than before."""

    def __init__(self) -> None:
        self.came = 0
        self._asked_ns, self._per_ns, self._waits = time.monotonic_ns(), deque([0.0], COMPARED), False

    def rate_dropped(self) -> bool:
        """Whether clearly less has come per second since this was last asked than between any two of the questions
        before: tokens of many streams come in steps. Or nothing twice, after something."""
        minimum, before = min(self._per_ns), self._per_ns[-1]
        asked_ns, self._asked_ns = self._asked_ns, time.monotonic_ns()
        self._per_ns.append(self.came / max(self._asked_ns - asked_ns, 1))
        self._waits |= self.came > 0
        ended = self._per_ns[-1] < FEWER * minimum or (self._waits and not self.came and not before)
        self.came, self._waits = 0, self._waits and not ended
        return ended
