"""Ends the commands of --at if the coordinator of the run dies, for example because it was killed with SIGKILL.

A command starts processes that know nothing of the run, so they would go on forever. The guard is a separate process.
It reads the process groups of running commands from its standard input, and ends them when its standard input is
closed.

    python -m loadgen.engine.command_guard
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from loadgen.servers.own_process import own_process

TERMINATION_LIMIT_S = 2.0
"""Time in seconds that the processes of a command have to end after SIGTERM. After this time, they are killed."""
POLL_S = 0.05


class CommandGuard:
    """Controls the guard. The guard is a separate process that ends the commands of --at if the current process is
    killed.

    The methods may be called from several threads.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process of the guard, unless it runs already. Commands run without a guard if it cannot start."""
        with self._lock:
            if self._process is None:
                with suppress(OSError):
                    self._process = subprocess.Popen(  # noqa: S603
                        own_process("loadgen.engine.command_guard"), stdin=subprocess.PIPE, start_new_session=True
                    )

    def add(self, group: int) -> None:
        """Let the guard end the process group with the id `group` if the coordinator dies."""
        with self._lock:
            self._send(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a process group that has ended. Call this method before another group can get the same id."""
        with self._lock:
            self._send(f"-{group}\n")

    def end(self) -> None:
        """End the guard process. Before it exits, it ends every process group that was added and not removed."""
        with self._lock:
            if self._process is not None:
                self._process.communicate()
            self._process = None

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # The guard was killed.
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()


def guard(lines: Iterable[str]) -> None:
    """Read `lines` to their end, and then end the process groups that are still registered.

    The line `+123` registers the process group 123, and `-123` removes it again.
    """
    groups = set[int]()
    for line in lines:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    limit_s = time.monotonic() + TERMINATION_LIMIT_S
    for group in groups:
        send_signal(group, signal.SIGTERM)
    while any(map(is_alive, groups)) and time.monotonic() < limit_s:
        time.sleep(POLL_S)
    for group in groups:
        send_signal(group, signal.SIGKILL)


def send_signal(group: int, number: int) -> None:
    """Send a signal to a process group. Do nothing if the group has ended."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def is_alive(group: int) -> bool:
    """Return True if at least one process of the process group is alive. Zombies do not count as alive."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            # The fields after the name, which stands in parentheses, are the state, the parent and the group.
            state, _, own_group, *_ = file.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(own_group) == group and state not in "ZX":
                return True
    return False


if __name__ == "__main__":
    guard(sys.stdin)
