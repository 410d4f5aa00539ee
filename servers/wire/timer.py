"""One wake-up at an exact instant of the monotonic clock, for an event loop whose own timers are coarser."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_TFD_TIMER_ABSTIME = 1
_SECOND_NS = 1_000_000_000


def timer(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Timer:
    """The most exact timer there is: timerfd on Linux (timerfd_create(2)), the loop's own elsewhere."""
    return TimerFd(loop, callback) if sys.platform == "linux" else LoopTimer(loop, callback)


class TimerFd:
    """uvloop rounds its timers to a millisecond; a timerfd becomes readable within tens of microseconds.

    It is never read: arming it again takes the readiness back, and each call is followed by arming.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._fd = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
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


class LoopTimer:
    """As exact as the event loop: a millisecond in uvloop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, at_ns: int | None) -> None:
        self.close()
        if at_ns is not None:
            delay_s = (at_ns - time.monotonic_ns()) / _SECOND_NS
            self._handle = self._loop.call_later(max(0.0, delay_s), self._callback)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


Timer = TimerFd | LoopTimer
"""Calls back once, at or shortly after the instant it was last armed with."""
