"""Commands of --at run at their instants, are recorded, and end with the run."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import msgspec
import pytest

from loadgen.analysis.run.command_record import MAX_OUTPUT, CommandRecord
from loadgen.engine.command_guard import CommandGuard
from loadgen.engine.command_runner import PART, CommandRunner
from loadgen.servers.auth import register_secret

PATIENCE_S = 60.0


def records_in(folder: Path) -> list[CommandRecord]:
    lines = (folder / PART).read_bytes().splitlines() if (folder / PART).exists() else []
    return [msgspec.json.decode(line, type=CommandRecord) for line in lines]


def ran(folder: Path, *texts: str, records: int = 1, runner: CommandRunner | None = None) -> list[CommandRecord]:
    """Return the records of these commands. The run ends when `records` of them have been recorded.

    `runner` has commands already."""
    runner = runner or CommandRunner(texts)
    runner.begin(time.monotonic_ns(), folder)
    limit_s = time.monotonic() + PATIENCE_S
    while len(records_in(folder)) < records and time.monotonic() < limit_s:
        time.sleep(0.02)
    assert runner.end() == [folder / PART]
    return records_in(folder)


def test_output_and_exit_code_are_recorded(tmp_path: Path) -> None:
    """Both streams and the exit code of the shell are recorded, and the command starts no earlier than its instant."""
    [record] = ran(tmp_path, "50ms echo out; echo err >&2; exit 3")
    assert record.output == "out\nerr\n"
    assert record.exit_code == 3
    assert record.command == "echo out; echo err >&2; exit 3"
    assert record.at_ns >= 50_000_000
    assert record.end_ns is not None
    assert record.end_ns >= record.at_ns
    assert not record.ended_with_run


def test_a_signal_is_a_negative_exit_code(tmp_path: Path) -> None:
    """A command that a signal ends has the negative number of the signal."""
    [record] = ran(tmp_path, "0s kill -9 $$")
    assert record.exit_code == -9


def test_commands_end_with_the_run(tmp_path: Path) -> None:
    """A command that still runs at the end is ended with its children, even if it ignores SIGTERM, and is recorded."""
    pids = tmp_path / "pids"
    runner = CommandRunner([f"0s trap '' TERM; sleep 600 & echo $! > {pids}; while true; do sleep 1; done"])
    runner.begin(time.monotonic_ns(), tmp_path)
    limit_s = time.monotonic() + PATIENCE_S
    while not (pids.exists() and pids.read_text()) and time.monotonic() < limit_s:
        time.sleep(0.02)
    runner.end()
    [record] = records_in(tmp_path)
    assert record.ended_with_run
    assert record.exit_code is None
    assert _ends(int(pids.read_text()))


def test_processes_that_a_command_leaves_behind_end_too(tmp_path: Path) -> None:
    """A background process of a command that has exited ends with the run."""
    [record] = ran(tmp_path, "0s sleep 600 > /dev/null 2>&1 & echo $!")
    assert record.exit_code == 0
    assert _ends(int(record.output))


def test_a_command_after_the_end_never_runs(tmp_path: Path) -> None:
    """A command that was not due yet leaves no record, and a note for the footer of the run."""
    runner = CommandRunner(["0s true", "1h echo late"])
    assert len(ran(tmp_path, runner=runner)) == 1
    assert runner.notes == ["The command of --at 3600s did not run: the run ended before it was due"]


def test_several_commands_after_the_end_share_a_note(tmp_path: Path) -> None:
    """The note counts the commands, and names the time of the first. Without such commands there is no note."""
    runner = CommandRunner(["0s true", "2h echo late", "1h echo late"])
    ran(tmp_path, runner=runner)
    assert runner.notes == ["2 commands of --at, from 3600s on, did not run: the run ended before they were due"]
    runner = CommandRunner(["0s true"])
    ran(tmp_path, runner=runner)
    assert runner.notes == []


def test_a_command_that_cannot_be_started_is_recorded(tmp_path: Path) -> None:
    """A plan file may contain a NUL character, which no command line can contain."""
    [record] = ran(tmp_path, "0s echo \0")
    assert record.output == "cannot start a shell: embedded null byte"
    assert record.exit_code is None
    assert not record.ended_with_run


def test_output_needs_no_more_memory_or_disk_than_its_end(tmp_path: Path) -> None:
    """A command that writes much without end holds a few kilobytes. Its processes are not blocked by a full pipe."""
    done = tmp_path / "done"
    [record] = ran(tmp_path, f"0s (head -c 4000000 /dev/zero | tr '\\0' x; echo end; echo > {done}) & wait; echo last")
    assert record.output.endswith("xend\nlast\n")
    assert len(record.output) == MAX_OUTPUT
    runner = CommandRunner([f"0s (sleep 0.2; head -c 400000 /dev/zero; echo > {done}2) & exit 0"])
    runner.begin(time.monotonic_ns(), tmp_path)
    limit_s = time.monotonic() + PATIENCE_S
    while not Path(f"{done}2").exists() and time.monotonic() < limit_s:
        time.sleep(0.02)
    runner.end()
    assert Path(f"{done}2").exists(), "a process that the command left behind was blocked"


def test_long_output_keeps_its_end_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long output the end is kept. A registered secret is hidden, also in the text of the command."""
    secret = "sk-0123456789abcdef"
    register_secret(secret)
    monkeypatch.setenv("SECRET", secret)
    long, hidden = ran(tmp_path, "0s yes word | head -5000; echo end", f"0s echo $SECRET {secret}", records=2)
    if "yes" not in long.command:
        long, hidden = hidden, long
    assert len(long.output) <= MAX_OUTPUT
    assert long.output.endswith("word\nend\n")
    assert secret not in hidden.output + hidden.command
    assert hidden.output == "*** ***\n"


def test_a_secret_in_a_command_is_stored_nowhere(tmp_path: Path) -> None:
    """A secret that only the command contains is hidden in its record and in its output, but the shell gets it."""
    secret = "tok3n-that-is-typed"
    [record] = ran(tmp_path, f"0s TOKEN={secret}; echo $TOKEN ${{#TOKEN}}")
    assert record.command == "TOKEN=***; echo $TOKEN ${#TOKEN}"
    assert record.output == f"*** {len(secret)}\n"


def test_without_commands_there_is_no_file(tmp_path: Path) -> None:
    """A run without --at has no part file of commands."""
    runner = CommandRunner([])
    runner.begin(time.monotonic_ns(), tmp_path)
    assert runner.end() == []
    assert not (tmp_path / PART).exists()


def test_commands_end_if_the_coordinator_is_killed(tmp_path: Path) -> None:
    """SIGKILL gives the coordinator no time to end its commands. Their guard ends them, children included."""
    pids, guarded = tmp_path / "pids", tmp_path / "guarded"
    texts = [f"0s trap '' TERM; sleep 600 & echo $! $$ > {pids}; while true; do sleep 1; done"]
    coordinator = multiprocessing.get_context("fork").Process(target=_run_until_killed, args=(texts, tmp_path))
    coordinator.start()
    limit_s = time.monotonic() + PATIENCE_S
    while not (guarded.exists() and pids.exists() and pids.read_text().endswith("\n")) and time.monotonic() < limit_s:
        time.sleep(0.02)
    coordinator.kill()
    coordinator.join()
    assert all(_ends(int(pid)) for pid in pids.read_text().split())


def _run_until_killed(texts: list[str], folder: Path) -> None:
    """Run commands until this process is killed. The file `guarded` exists as soon as the guard knows a command."""

    class NotedGuard(CommandGuard):
        def add(self, group: int) -> None:
            super().add(group)
            (folder / "guarded").touch()

    runner = CommandRunner(texts)
    runner._guard = NotedGuard()
    runner.begin(time.monotonic_ns(), folder)
    time.sleep(PATIENCE_S)


def _signal_unless_zombie(pid: int) -> None:
    """Send signal 0 to a process. Raises ProcessLookupError if it has ended, even if nobody has reaped it."""
    os.kill(pid, 0)
    if Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "Z":
        raise ProcessLookupError


def _ends(pid: int) -> bool:
    """Return True if a process ends soon. A killed process may live a moment longer on a busy machine."""
    limit_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit_s:
        try:
            _signal_unless_zombie(pid)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False
