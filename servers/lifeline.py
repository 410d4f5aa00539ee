"""Ends child processes when the process that started them ends, even if it was killed with SIGKILL.

A child watches its parent with a pidfd (Linux) and with the pipe or socket that connects both. A thread does this, so
that a child which is busy or blocked ends as well. The thread sleeps in poll() until the parent is gone. A forked
sibling inherits the parent's end of such a pipe and would keep it open: it calls `close_inherited` first.
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
"""Time in seconds that a child has to write its data after its parent has ended. Then it is killed."""
CHECK_EVERY_MS = 500.0

_open: list[Closable] = []
"""The parent's ends of the pipes that tell children of its end."""


class Closable(Protocol):
    """A file or a socket."""

    def close(self) -> None:
        """Close it."""


@contextmanager
def lifeline(end: Closable | None) -> Iterator[None]:
    """Within this block, `end` is the parent's end of a pipe to a child. A process that is forked meanwhile closes it
    with `close_inherited`."""
    assert end is not None
    _open.append(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # A forked process has closed it and forgotten it
            _open.remove(end)


def close_inherited() -> None:
    """Close the parent's ends of pipes to its other children. A forked process calls this first."""
    while _open:
        with suppress(OSError):
            _open.pop().close()


def end_with_parent(parent: int | None = None, pipe: int | None = None) -> None:
    """End this process when the process `parent` ends; by default its current parent.

    `pipe` is this side's end of a pipe or socket whose other end the parent holds. The process gets SIGTERM first, and
    SIGKILL after GRACE_S.
    """
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
