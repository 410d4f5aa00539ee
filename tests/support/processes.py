"""Finds processes on this machine and waits for their end.

A process is identified by its pid and its start time, because the system reuses pids.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

END_LIMIT_S = 60.0
"""Generous: a process that ends by itself takes about two seconds on an idle machine."""


class ProcessIdentity(NamedTuple):
    """A process, identified by its pid and its start time in clock ticks after boot."""

    pid: int
    start_ticks: int

    def is_running(self) -> bool:
        """Return True if the process exists and is not a zombie."""
        state, start_ticks = _stat(self.pid)
        return start_ticks == self.start_ticks and state != "Z"

    @property
    def command(self) -> str:
        """The command line of the process, or "" if the process has ended."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return ""


def descendants(pid: int) -> Iterator[ProcessIdentity]:
    """Yield all descendants of a process."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                yield ProcessIdentity(child, _stat(child)[1])
                yield from descendants(child)


def left_over(processes: list[ProcessIdentity]) -> list[str]:
    """Wait up to END_LIMIT_S for these processes to end. Kill the remaining ones, and return their command lines."""
    deadline_s = time.monotonic() + END_LIMIT_S
    while running := [process for process in processes if process.is_running()]:
        if time.monotonic() > deadline_s:
            commands = [f"{process.pid} {process.command}" for process in running]
            for process in running:
                with suppress(OSError):
                    os.kill(process.pid, 9)
            return commands
        time.sleep(0.05)
    return []


def _stat(pid: int) -> tuple[str, int]:
    """Return the state letter of a process and its start time in clock ticks, or ("", 0) if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])
