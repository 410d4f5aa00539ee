"""Processes on this machine, identified by number and start time, because numbers are used again."""

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
    """One process."""

    pid: int
    start_ticks: int

    def is_running(self) -> bool:
        """Return whether this process still exists and is no zombie."""
        state, start_ticks = _stat(self.pid)
        return start_ticks == self.start_ticks and state != "Z"

    @property
    def command(self) -> str:
        """The command line, for messages."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return ""


def descendants(pid: int) -> Iterator[ProcessIdentity]:
    """Yield the children of a process and their descendants."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                yield ProcessIdentity(child, _stat(child)[1])
                yield from descendants(child)


def left_over(processes: list[ProcessIdentity]) -> list[str]:
    """Wait until these processes have ended. Return the command lines of those that have not, and kill them."""
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
    """Return the state of a process and its start time in clock ticks; no state if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])
