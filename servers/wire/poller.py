"""Calls functions when sockets are readable, and at exact times.

The module adds a separate epoll and a separate timer to the event loop:

    uvloop ── watches one descriptor ──> epoll ── watches all sockets ──> callbacks
                    └─ paused while reads are deferred (loadgen.servers.wire.deferred_reads)

The loop's `add_reader` is not used for every socket, for two reasons:

- libuv stops watching a socket after one callback if the connection is reset right after its last bytes (uv__poll_io,
  POLLERR). The reset would then never be noticed.
- An epoll is cheaper, because one iteration of the loop serves all sockets that are ready.

The loop's timers are not used either, because uvloop rounds them to a millisecond.
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

EVENTS_PER_TURN = 256
"""Maximum number of sockets that are served before timers and other callbacks of the event loop run."""
LATE_NS = 10_000_000
"""An iteration of the event loop that begins this long after the last sweep counts as late."""
LITTLE_BYTES = 8_192
"""If no read exceeds this size, the receive windows are checked only for the first sockets of a sweep."""
_TFD_TIMER_ABSTIME = 1
_SECOND_NS = 1_000_000_000


class Poller:
    """Calls functions when sockets are readable (level-triggered).

    A Poller with a ReadPacer serves sockets in sweeps, with pauses between them. A sweep is one pass over all readable
    sockets.
    """

    late = False
    """Whether the sockets that are served now may have waited, so that their receive windows should be checked."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pacer: ReadPacer | None = None) -> None:
        """Add an epoll to the event loop.

        Without a `pacer`, a readable socket is served at once. With a `pacer`, sockets are served in sweeps, and the
        pacer determines the pause after each sweep.
        """
        self.loop = loop
        self.largest_read = 0
        """Bytes of the largest read of this sweep. The callbacks update it."""
        self.bytes_read = 0
        """Bytes of all reads of this sweep. The callbacks update it."""
        self._largest_read_before = 0
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll()
        self._pacer = pacer
        self._unserved = 0
        """Maximum number of sockets that the current sweep may still serve."""
        self._ended_ns = time.monotonic_ns()
        self._pause_left_s = 0.0
        self._resume: asyncio.TimerHandle | None = None
        loop.add_reader(self._epoll.fileno(), self._run)

    def add(self, sock: socket.socket, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `sock` is readable. A closed or reset connection is also readable."""
        if self._pacer is not None and not self._callbacks:
            self._pacer.watch(sock)
        self._callbacks[sock.fileno()] = callback
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def remove(self, sock: socket.socket) -> None:
        """Stop watching `sock`. A socket that is not watched is ignored. Call this method before closing the socket."""
        if self._callbacks.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def close(self) -> None:
        """Stop watching every socket, and close the epoll."""
        if self._resume is not None:
            self._resume.cancel()
        if not self._epoll.closed:
            self.loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
        self._callbacks.clear()

    def _run(self) -> None:
        """Call the callbacks of up to EVENTS_PER_TURN readable sockets.

        A sweep is one pass over all readable sockets. One call of this method may be only a part of a sweep. The event
        loop then calls the method again to continue the sweep. After a complete sweep, the ReadPacer may request a
        pause.
        """
        callbacks = self._callbacks
        began_ns = time.monotonic_ns()
        check_windows = not self._unserved or max(self.largest_read, self._largest_read_before) > LITTLE_BYTES
        self.late = check_windows and began_ns - self._ended_ns > LATE_NS
        self._unserved = self._unserved or len(callbacks)
        ready = self._epoll.poll(0, EVENTS_PER_TURN)
        for descriptor, _ in ready:
            callback = callbacks.get(descriptor)
            if callback is not None:  # else an earlier callback of this turn removed it
                callback()
        self._unserved -= len(ready)
        if len(ready) == EVENTS_PER_TURN and self._unserved > 0:
            return  # the sweep goes on in the next turn, as late as this one

        self._unserved = 0
        self._ended_ns = time.monotonic_ns()
        if self._pacer is not None:
            delay_s = self._pacer.next_delay_s(self._ended_ns, self.largest_read, self.bytes_read)
            if delay_s:
                self.loop.remove_reader(self._epoll.fileno())
                self._pause_left_s = delay_s
                self._wait()
        self._largest_read_before = self.largest_read
        self.largest_read = 0
        self.bytes_read = 0

    def _wait(self) -> None:
        """Wait until the next sweep, or until the next check. A sweep is one pass over the readable sockets.

        The pause between two sweeps is divided into parts of at most RATE_CHECK_S seconds. After each part,
        `_after_part` checks whether the pause must end early.
        """
        part_s = min(self._pause_left_s, RATE_CHECK_S)
        self._pause_left_s -= part_s
        self._resume = self.loop.call_later(part_s, self._after_part)

    def _after_part(self) -> None:
        if self._pause_left_s > 0 and self._pacer is not None and not self._pacer.rate_dropped():
            self._wait()
        else:
            self.loop.add_reader(self._epoll.fileno(), self._run)


class Timer:
    """A timer of the event loop that calls `callback` within tens of microseconds after a given time
    (timerfd_create(2)).

    The method `arm` sets this time. The callback itself must always call `arm`. Otherwise the event loop would call the
    callback again at once, because the timer's file descriptor stays readable until the next call of `arm`.
    """

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

    def arm(self, instant_ns: int | None) -> None:
        """Call back when `time.monotonic_ns` reaches `instant_ns`, or shortly after.

        Each call replaces the instant of the previous call. If `instant_ns` is None, the timer does not call back.
        """
        self._spec[2], self._spec[3] = divmod(0 if instant_ns is None else max(instant_ns, 1), _SECOND_NS)
        self._settime(self._fd, _TFD_TIMER_ABSTIME, self._pointer, None)

    def close(self) -> None:
        self.loop.remove_reader(self._fd)
        os.close(self._fd)
