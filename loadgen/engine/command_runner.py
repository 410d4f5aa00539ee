"""Runs shell commands at instants of a run (--at), for example to restart a server, and records their results.

The commands run in the coordinator's process, one thread per command, and never in a process that measures. Each
command is the leader of its own process group, which is ended with the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from loadgen.analysis.run.command_record import MAX_OUTPUT, CommandRecord
from loadgen.analysis.run.runfile import RunWriter
from loadgen.servers.auth import hide_secrets
from loadgen.timed_commands import TimedCommand, parse

PART = "part-commands.jsonl"
TERMINATION_LIMIT_S = 2.0
"""Time in seconds that the processes of a command have to end after SIGTERM. After this time, they are killed."""
POLL_S = 0.05


class CommandRunner:
    """Runs the commands of one run. Call `begin` when the run starts and `end` when it ends."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Prepare to run `texts`: times and commands, as the user wrote them (loadgen.timed_commands)."""
        self._commands = [parse(text) for text in texts]
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._part: RunWriter | None = None
        self._start_ns = 0

    def begin(self, start_ns: int, folder: Path) -> None:
        """Start to wait for the instants of the commands. The run starts at `start_ns` (CLOCK_MONOTONIC).

        Results are written to a part file in `folder`.
        """
        if not self._commands:
            return
        self._start_ns = start_ns
        self._part = RunWriter(folder / PART)
        for command in self._commands:
            thread = threading.Thread(target=self._run, args=(command,), name="timed-command", daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> list[Path]:
        """Terminate all commands, and return the files with their results. Commands that were not due yet never run."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._part is None:
            return []
        rescued = self._part.close()
        parts = [self._part.path, *([rescued] if rescued else [])]
        self._part = None
        return parts

    def _run(self, command: TimedCommand) -> None:
        """Wait for the instant of a command, run it, and record its result."""
        due_ns = self._start_ns + round(command.at_s * 1e9)
        if self._ended.wait(max(0.0, (due_ns - time.monotonic_ns()) / 1e9)):
            return
        record = CommandRecord(command=hide_secrets(command.command, whole=True), at_ns=self._now_ns())
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(  # noqa: S602 - the user's own command line
                    command.command,
                    shell=True,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                record.output = f"cannot start a shell: {error.strerror}"
                self._store(record)
                return
            while not _has_exited(process) and not self._ended.wait(POLL_S):
                pass
            record.end_ns = self._now_ns()
            record.ended_with_run = not _has_exited(process)
            if record.ended_with_run:
                _end_group(process)
            else:
                record.exit_code = _exit_code(process)
            record.output = _end_of(output)
        self._store(record)
        if not record.ended_with_run:
            self._ended.wait()
            _end_group(process)  # processes that the command has left behind

    def _store(self, record: CommandRecord) -> None:
        with self._lock:
            assert self._part is not None
            self._part.add(record)
            self._part.flush()

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Return True if a command has exited. Its process stays a zombie, so that no other process group gets its id."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a command that has exited, or the negative number of the signal that ended it."""
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process group of a command. Processes that ignore SIGTERM are killed after TERMINATION_LIMIT_S."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    limit_s = time.monotonic() + TERMINATION_LIMIT_S
    while _is_alive(process.pid) and time.monotonic() < limit_s:
        time.sleep(POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_alive(group: int) -> bool:
    """Return True if at least one process of the process group is alive. Zombies do not count as alive."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            # The fields after the name, which stands in parentheses, are the state, the parent and the group.
            state, _, own_group, *_ = file.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(own_group) == group and state not in "ZX":
                return True
    return False


def _end_of(output: IO[bytes]) -> str:
    """Return the end of a command's output as text, without secrets."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - 4 * MAX_OUTPUT))
    return hide_secrets(output.read().decode("utf-8", "replace"))[-MAX_OUTPUT:]
