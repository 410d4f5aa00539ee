"""Commands of --at run at their instants, are recorded, and end with the run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from loadgen.analysis.run.command_record import MAX_OUTPUT, CommandRecord
from loadgen.engine.command_runner import PART, CommandRunner
from loadgen.servers.auth import register_secret

PATIENCE_S = 60.0


def records_in(folder: Path) -> list[CommandRecord]:
    lines = (folder / PART).read_bytes().splitlines() if (folder / PART).exists() else []
    return [msgspec.json.decode(line, type=CommandRecord) for line in lines]


def ran(folder: Path, *texts: str, records: int = 1) -> list[CommandRecord]:
    """Return the records of these commands. The run ends when `records` of them have been recorded."""
    runner = CommandRunner(texts)
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
    with pytest.raises(ProcessLookupError):
        _signal_unless_zombie(int(pids.read_text()))


def test_processes_that_a_command_leaves_behind_end_too(tmp_path: Path) -> None:
    """A background process of a command that has exited ends with the run."""
    [record] = ran(tmp_path, "0s sleep 600 > /dev/null 2>&1 & echo $!")
    assert record.exit_code == 0
    with pytest.raises(ProcessLookupError):
        _signal_unless_zombie(int(record.output))


def test_a_command_after_the_end_never_runs(tmp_path: Path) -> None:
    """A command that was not due yet leaves no record."""
    assert len(ran(tmp_path, "0s true", "1h echo late")) == 1


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


def test_without_commands_there_is_no_file(tmp_path: Path) -> None:
    """A run without --at has no part file of commands."""
    runner = CommandRunner([])
    runner.begin(time.monotonic_ns(), tmp_path)
    assert runner.end() == []
    assert not (tmp_path / PART).exists()


def _signal_unless_zombie(pid: int) -> None:
    """Send signal 0 to a process. Raises ProcessLookupError if it has ended, even if nobody has reaped it."""
    os.kill(pid, 0)
    if Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "Z":
        raise ProcessLookupError
