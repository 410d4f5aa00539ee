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
from typing import TYPE_CHECKING

from loadgen.servers.wire.deferred_reads import RATE_CHECK_S, ReadPacer

if TYPE_CHECKING:
    import asyncio

EVENTS_PER_TURN = 256  # Sockets served before timers and other callbacks get their turn
LATE_NS = 10_000_000
LITTLE_BYTES = 8_192  # While no read has more, the windows of a sweep's first sockets speak for those of all
_TFD_TIMER_ABSTIME = 1
_SECOND_NS = 1_000_000_000


class Poller:
    """Readiness to read, level-triggered. Sockets are served at once, or in sweeps."""

    late = False  # Whether what is served in this turn may have waited, and the window is to be looked at

    def __init__(self, loop: asyncio.AbstractEventLoop, sweeps: ReadPacer | None = None) -> None:
        """With `sweeps` reads may be late: they say by how much."""
        self.loop = loop
        self.largest_read = 0
        self.bytes_read = 0
        self._before = 0
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll()
        self._sweeps = sweeps
        self._unserved = 0  # In this sweep, at most
        self._ended_ns = time.monotonic_ns()
        self._left_s = 0.0
        self._resume: asyncio.TimerHandle | None = None
        loop.add_reader(self._epoll.fileno(), self._run)

    def add(self, sock: socket.socket, callback: Callable[[], None]) -> None:
        """Call back whenever `sock` can be read, which includes that it has been closed or reset."""
        if self._sweeps is not None and not self._callbacks:
            self._sweeps.watch(sock)
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

    def _run(self) -> None:
        callbacks = self._callbacks
        began_ns = time.monotonic_ns()
        looks = not self._unserved or max(self.largest_read, self._before) > LITTLE_BYTES
        self.late = looks and began_ns - self._ended_ns > LATE_NS
        self._unserved = self._unserved or len(callbacks)
        ready = self._epoll.poll(0, EVENTS_PER_TURN)
        for descriptor, _ in ready:
            callback = callbacks.get(descriptor)
            if callback is not None:  # removed by a callback before it in this very turn
                callback()
        self._unserved -= len(ready)
        if len(ready) < EVENTS_PER_TURN or self._unserved <= 0:  # else the same sweep goes on, as late
            self._unserved = 0
            self._ended_ns = time.monotonic_ns()
            if self._sweeps is not None and (
                apart_s := self._sweeps.next_delay_s(self._ended_ns, self.largest_read, self.bytes_read)
            ):
                self.loop.remove_reader(self._epoll.fileno())
                self._left_s = apart_s
                self._wait()
            self._before, self.largest_read, self.bytes_read = self.largest_read, 0, 0

    def _wait(self) -> None:
        part_s = min(self._left_s, RATE_CHECK_S)
        self._left_s -= part_s
        self._resume = self.loop.call_later(part_s, self._go_on)

    def _go_on(self) -> None:
        if self._left_s > 0 and self._sweeps is not None and not self._sweeps.rate_dropped():
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
        self.loop = loop
        loop.add_reader(self._fd, callback)

    def arm(self, at_ns: int | None) -> None:
        """Call back at that instant of time.monotonic_ns or shortly after it, in place of the one before; None: not."""
        self._spec[2], self._spec[3] = divmod(0 if at_ns is None else max(at_ns, 1), _SECOND_NS)
        self._settime(self._fd, _TFD_TIMER_ABSTIME, self._pointer, None)

    def close(self) -> None:
        self.loop.remove_reader(self._fd)
        os.close(self._fd)
