"""Ends child processes when their parent process ends, even if the parent was killed with SIGKILL.

A child watches its parent in a separate thread, so that the child also ends if its main thread is busy or blocked. The
thread sleeps in poll() until the parent's pidfd (Linux) reports that the parent has ended, or until the pipe or socket
to the parent is closed. A sibling that is forked later inherits the parent's end of this pipe, and would keep the pipe
open after the parent has ended. The sibling therefore calls `close_inherited` first.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

GRACE_S = 2.0
"""Time in seconds between the end of the parent and SIGKILL for the child, which writes its data meanwhile."""
CHECK_EVERY_MS = 500.0

_open: list[Closable] = []
"""The parent's ends of the pipes through which its children detect that the parent has ended."""


class Closable(Protocol):
    """An object that can be closed, such as a file or a socket."""

    def close(self) -> None:
        """Close the object."""


@contextmanager
def lifeline(end: Closable | None) -> Iterator[None]:
    """Register `end`, this process's end of a pipe to a child process, while the context is open.

    If another process is forked during this time, it inherits a copy of `end`. The forked process calls
    `close_inherited`, which closes this copy. Otherwise the pipe would stay open after this process has ended.
    """
    assert end is not None
    _open.append(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # A forked process has already closed and removed `end`
            _open.remove(end)


def close_inherited() -> None:
    """Close the inherited ends of the parent's pipes to its other children.

    A forked process must call this function before any other function."""
    while _open:
        with suppress(OSError):
            _open.pop().close()


def end_with_parent(parent: int | None = None, pipe: int | None = None) -> None:
    """End this process when the process with the pid `parent` ends (default: the current parent).

    `pipe` is the file descriptor of a pipe or socket whose other end the parent holds. When the parent ends, this
    process receives SIGTERM, and SIGKILL after GRACE_S seconds."""
    parent = os.getppid() if parent is None else parent
    threading.Thread(target=_watch, args=(parent, pipe), name="lifeline", daemon=True).start()


def _watch(parent: int, pipe: int | None) -> None:
    poll = select.poll()
    wait_ms: float | None = CHECK_EVERY_MS if pipe is None else None
    if pipe is not None:
        poll.register(pipe, 0)  # POLLHUP is always reported; data is left for the reader of the pipe
    if sys.platform == "linux":
        with suppress(OSError):  # Old kernels and some sandboxes have no pidfds; a parent may be outside a namespace
            poll.register(os.pidfd_open(parent), select.POLLIN)
            wait_ms = None
    # The parent may have ended before the pidfd was opened, and another process may have its number.
    while os.getppid() == parent and not poll.poll(wait_ms):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
