"""When to read, when to send: an epoll and a timer of our own inside the event loop.

    uvloop ── watches one descriptor ──> epoll ── watches all sockets ──> callbacks
                    └─ not for a while, when reading takes much of a core and stamps do not depend on it (sweeps)

Not the loop's `add_reader`: when a connection is reset right behind its last bytes, libuv stops watching it after one
callback (uv__poll_io, POLLERR), so the reset would never be seen. It is also cheaper: one turn of the loop serves all
sockets that are ready. And not the loop's timers: uvloop rounds them to a millisecond.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

EVENTS_PER_TURN = 256  # Sockets served before timers and other callbacks get their turn
SWEEP_S_LEAST = 0.005
EBB_S = 0.25  # How often to ask in a long pause whether less comes than before
SWEPT_SHARE = 16  # Of a receive buffer what may come in one read: small segments take six times their room
IDLE_SHARE = 0.1  # Of a core, below which sweeps are closer again ...
IDLE_OF_BUSY = 1 / 3  # ... or below so much of what is busy
LOOK_NS = 50_000_000
LATE_NS = 10_000_000
SCHEDULED = Path("/proc/thread-self/schedstat")
_TFD_TIMER_ABSTIME = 1
_SECOND_NS = 1_000_000_000


def wanted_ns() -> int:
    """How long this thread had a core, or waited for one that others had."""
    try:
        return sum(map(int, SCHEDULED.read_bytes().split()[:2]))
    except OSError:
        return time.process_time_ns()


class Poller:
    """Readiness to read, level-triggered. Sockets are served at once, or in sweeps: `sweep_s` apart at most, farther
    while reading takes much of a core, closer again when it does not or a socket held much."""

    late = False  # Whether what is served in this turn may have waited, so that the window is to be looked at

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        sweep_s: float = 0.0,
        busy: float = 0.4,
        ebbs: Callable[[], bool] = bool,
    ) -> None:
        """`busy` is the share of a core, had or waited for, beyond which reading is to take less. `ebbs` says whether
        less comes than when it was last asked: then answers may have ended, and a long pause does too."""
        self.loop = loop
        self.most = 0  # Bytes of the largest read since the last look
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll()
        self._sweep_s, self._busy, self._ebbs = sweep_s, busy, ebbs
        self._swept_bytes = 0
        self._apart_s = self._left_s = 0.0
        self._widest_s = 0.0
        self._served = 0  # In this sweep
        self._ended_ns = self._looked_ns = time.monotonic_ns()
        self._wanted_ns = wanted_ns()
        self._resume: asyncio.TimerHandle | None = None
        loop.add_reader(self._epoll.fileno(), self._run)

    def add(self, sock: socket.socket, callback: Callable[[], None]) -> None:
        """Call back whenever `sock` can be read, which includes that it has been closed or reset."""
        if self._sweep_s and not self._callbacks:
            self._swept_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // SWEPT_SHARE
        self._callbacks[sock.fileno()] = callback
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def remove(self, sock: socket.socket) -> None:
        """No more calls for `sock`; one that is not watched is ignored. Before the socket is closed."""
        if self._callbacks.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def close(self) -> None:
        """Watch nothing any more."""
        if self._resume is not None:
            self._resume.cancel()
        if not self._epoll.closed:
            self.loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
        self._callbacks.clear()

    def widest_ns(self) -> int:
        """How far apart sweeps were at most since the last time this was asked; 0: everything was served at once."""
        widest, self._widest_s = self._widest_s, self._apart_s
        return round(widest * 1e9)

    def _run(self) -> None:
        callbacks = self._callbacks
        began_ns = time.monotonic_ns()
        self.late = began_ns - self._ended_ns > LATE_NS
        ready = self._epoll.poll(0, EVENTS_PER_TURN)
        for descriptor, _ in ready:
            callback = callbacks.get(descriptor)
            if callback is not None:  # removed by a callback before it in this very turn
                callback()
        self._served += len(ready)
        if len(ready) < EVENTS_PER_TURN or self._served >= len(callbacks):  # else the same sweep goes on, as late
            self._served = 0
            self._ended_ns = time.monotonic_ns()
            if self._sweep_s:
                self._pause()

    def _pause(self) -> None:
        """The sweep is over: when is the next?"""
        wall_ns = self._ended_ns - self._looked_ns
        if wall_ns >= LOOK_NS:
            before, self._wanted_ns = self._wanted_ns, wanted_ns()
            share = (self._wanted_ns - before) / wall_ns
            self._looked_ns = self._ended_ns
            if self.most > self._swept_bytes or share < min(IDLE_SHARE, IDLE_OF_BUSY * self._busy):
                self._apart_s = self._apart_s / 2 if self._apart_s > SWEEP_S_LEAST else 0.0
            elif share > self._busy:
                wider = self._apart_s * min(4, self._swept_bytes / max(self.most, 1))
                self._apart_s = min(max(wider, SWEEP_S_LEAST), self._sweep_s)
            self.most = 0
            self._widest_s = max(self._widest_s, self._apart_s)
        if self._apart_s:
            self.loop.remove_reader(self._epoll.fileno())
            self._left_s = self._apart_s
            self._wait()

    def _wait(self) -> None:
        part_s = min(self._left_s, EBB_S)
        self._left_s -= part_s
        self._resume = self.loop.call_later(part_s, self._go_on)

    def _go_on(self) -> None:
        if self._left_s > 0 and not self._ebbs():
            self._wait()
        else:
            self.loop.add_reader(self._epoll.fileno(), self._run)


class Timer:
    """Calls back once, within tens of microseconds after the instant it was last armed with (timerfd_create(2)). The
    descriptor is never read: arming it again takes the readiness back, and each call is followed by arming."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._fd = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = (ctypes.c_long * 4)()  # struct itimerspec: interval and value, each in seconds and nanoseconds
        self._pointer = ctypes.byref(self._spec)
        self._loop = loop
        loop.add_reader(self._fd, callback)

    def arm(self, at_ns: int | None) -> None:
        """Call back at that instant of time.monotonic_ns or shortly after it, in place of the one before; None: not."""
        self._spec[2], self._spec[3] = divmod(at_ns or 0, _SECOND_NS)
        self._settime(self._fd, _TFD_TIMER_ABSTIME, self._pointer, None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
