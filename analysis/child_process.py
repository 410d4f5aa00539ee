"""Runs a function in a forked process, so that a report of a large run uses two CPU cores."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

Value = TypeVar("Value")

PIPE_BYTES = 1 << 20
"""Size of the pipe for the result. A large pipe needs fewer switches between the two processes."""


def can_fork() -> bool:
    """Return True if a second process would run on a separate core, and if this process can be forked safely.

    A process with several threads cannot be forked safely, because a lock that another thread holds would never be
    released in the child.
    """
    return len(os.sched_getaffinity(0)) > 1 and threading.active_count() == 1


class ChildProcess(Generic[Value]):
    """A forked process that calls a function and sends its result to the parent.

    Use it in a `with` statement. If the block raises an exception, the child is killed.
    """

    def __init__(self, function: Callable[[], Value]) -> None:
        receiving, sending = os.pipe()
        with suppress(OSError):  # Unprivileged users may have reached their limit for the memory of all pipes.
            fcntl.fcntl(sending, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        gc.freeze()  # a garbage collection in the child would copy the memory of every object
        self._child = os.fork()
        if not self._child:
            _send_result(function, receiving, sending)
        os.close(sending)
        self._stream = os.fdopen(receiving, "rb")

    def result(self) -> Value | None:
        """Wait for the result of the function. Return None if the child failed."""
        try:
            value: Value = pickle.load(self._stream)  # noqa: S301 - from our own child process
        except (EOFError, pickle.UnpicklingError):
            return None
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            os.kill(self._child, signal.SIGKILL)  # the caller no longer waits for the result
        self._stream.close()
        os.waitpid(self._child, 0)
        gc.unfreeze()


def _send_result(function: Callable[[], object], receiving: int, sending: int) -> None:
    """Call the function in the forked process, send its result, and end the process.

    `receiving` and `sending` are the ends of the pipe. The process closes its copy of the receiving end. If the parent
    process has died, sending then fails instead of blocking.
    """
    code = 1
    try:
        os.close(receiving)
        result = function()
        with os.fdopen(sending, "wb") as stream:
            pickle.dump(result, stream, protocol=5)
        code = 0
    finally:
        os._exit(code)
