"""Runs the shell commands of --at during a run, for example to restart a server, and records their results.

The coordinator of the run starts the commands, with one thread per command. The worker processes, which measure, start
no commands. Each command leads a separate process group. When the run ends, the coordinator ends the process groups. If
the coordinator is killed, a guard process ends them (loadgen.engine.command_guard).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from loadgen.analysis.run.command_record import MAX_OUTPUT, CommandRecord
from loadgen.analysis.run.runfile import RunWriter
from loadgen.engine.command_guard import POLL_S, TERMINATION_LIMIT_S, CommandGuard, is_alive, send_signal
from loadgen.servers.auth import hide_secrets, redact_command
from loadgen.timed_commands import TimedCommand, parse

PART = "part-commands.jsonl"
READ_BYTES = 1 << 16
PIPE_BYTES = 1 << 20
"""Maximum size in bytes of what a pipe contains, unless an administrator has raised the limit."""


class _Output:
    """Reads the output of a command from a pipe, and keeps only the end of the output."""

    def __init__(self, pipe: int) -> None:
        """Prepare to read from `pipe`, the file descriptor of the reading end of a pipe."""
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._end = b""
        self._at_end = False

    def read(self, wait_s: float) -> bool:
        """Read up to READ_BYTES from the pipe. Return True if data was read, otherwise False.

        If the pipe is empty, wait for up to `wait_s` seconds.
        """
        if self._at_end:  # every process of the command has closed the pipe
            time.sleep(wait_s)
            return False
        if not self._poll.poll(wait_s * 1000):
            return False
        data = os.read(self._pipe, READ_BYTES)
        self._at_end = not data
        self._end = (self._end + data)[-4 * MAX_OUTPUT :]  # a character has up to four bytes
        return bool(data)

    def read_rest(self) -> None:
        """Read the rest of the command's output, at most PIPE_BYTES, after the command has ended.

        Without this maximum, reading might never end, because other processes that the command has started may still
        write to the pipe.
        """
        for _ in range(PIPE_BYTES // READ_BYTES):
            if not self.read(0):
                break

    def text(self) -> str:
        """Return the end of the output as text, without secrets."""
        return hide_secrets(self._end.decode("utf-8", "replace"))[-MAX_OUTPUT:]


class CommandRunner:
    """Runs the commands of one run. Call `begin` when the run starts and `end` when it ends."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Prepare to run the commands in `texts`. Each text contains a time and a command (loadgen.timed_commands)."""
        self._commands = [parse(text) for text in texts]
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._guard = CommandGuard()
        self._lock = threading.Lock()
        self._part: RunWriter | None = None
        self._start_ns = 0
        self._not_due: list[TimedCommand] = []

    @property
    def notes(self) -> list[str]:
        """Messages for the footer of the run file about commands that did not run, because the run ended before they
        were due.
        """
        if not self._not_due:
            return []
        count, first_s = len(self._not_due), min(command.at_s for command in self._not_due)
        if count == 1:
            return [f"The command of --at {first_s:g}s did not run: the run ended before it was due"]
        return [f"{count} commands of --at, from {first_s:g}s on, did not run: the run ended before they were due"]

    def begin(self, start_ns: int, folder: Path) -> None:
        """Start one thread per command. Each thread waits until its command is due, and runs it.

        The run starts at `start_ns` (CLOCK_MONOTONIC). The results are written to the part file PART in `folder`.
        """
        if not self._commands:
            return
        self._start_ns = start_ns
        self._part = RunWriter(folder / PART)
        self._guard.start()  # before the commands, so that each is without a guard for microseconds only
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
        self._guard.end()
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
            with self._lock:
                self._not_due.append(command)
            return
        record = CommandRecord(command=redact_command(command.command), at_ns=self._now_ns())
        try:
            process = subprocess.Popen(  # noqa: S602 - the user's own command line
                command.command,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: the command contains a NUL character
            record.output = f"cannot start a shell: {getattr(error, 'strerror', None) or error}"
            self._store(record)
            return
        self._guard.add(process.pid)
        assert process.stdout is not None
        with process.stdout as pipe:
            output = _Output(pipe.fileno())
            while not _has_exited(process) and not self._ended.is_set():
                output.read(POLL_S)
            record.end_ns = self._now_ns()
            record.ended_with_run = not _has_exited(process)
            if record.ended_with_run:
                self._end_group(process, output)
            else:
                record.exit_code = _exit_code(process)
            output.read_rest()
            record.output = output.text()
            self._store(record)
            if not record.ended_with_run:
                # Processes that the command has left behind may go on to write. A full pipe would block them.
                while not self._ended.is_set():
                    output.read(POLL_S)
                self._end_group(process, output)

    def _end_group(self, process: subprocess.Popen[bytes], output: _Output) -> None:
        """Terminate the process group of a command. Processes that ignore SIGTERM are killed after TERMINATION_LIMIT_S.

        The output is read meanwhile, because a process may write while it ends."""
        send_signal(process.pid, signal.SIGTERM)
        limit_s = time.monotonic() + TERMINATION_LIMIT_S
        while is_alive(process.pid) and time.monotonic() < limit_s:
            output.read(POLL_S)
        send_signal(process.pid, signal.SIGKILL)
        self._guard.remove(process.pid)
        process.wait()

    def _store(self, record: CommandRecord) -> None:
        with self._lock:
            assert self._part is not None
            self._part.add(record)
            self._part.flush()

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Return True if a command has exited.

    The exit code is not read yet, so the process remains a zombie. Until it is read, no other process group can get the
    same id.
    """
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a command that has ended. If a signal ended it, return the negative signal number."""
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
