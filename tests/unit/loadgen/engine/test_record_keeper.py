"""The process that compresses and removes files of Records during a long run: started again, ended by an interrupt,
and with a disk that fails.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from threading import Timer

import pytest

from loadgen.analysis.run.errors import OutputError
from loadgen.engine import record_keeper
from loadgen.engine.record_keeper import (
    ENDED_EARLY,
    FAILED,
    MAX_STARTS,
    PART,
    RESERVED_BYTES,
    RecordKeeper,
    remove_old,
    reserve_space,
)
from loadgen.engine.signals import Interrupts
from tests.support.runs import complete, write

PATIENCE_S = 60.0
MS = 1_000_000
HOUR_NS = 3_600_000_000_000


def keeper_with(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> RecordKeeper:
    """Return a keeper that has started a Python program. Each start of the program adds a line to the file `starts`."""
    note = f"open({str(folder / 'starts')!r}, 'a').write('x\\n')"
    command = [sys.executable, "-c", f"import sys, time\n{note}\n{program}"]
    monkeypatch.setattr(record_keeper, "own_process", lambda *_: command)
    keeper = RecordKeeper()
    keeper.begin(folder, None)
    return keeper


def starts(folder: Path) -> int:
    file = folder / "starts"
    return len(file.read_text().splitlines()) if file.exists() else 0


def watch_until(keeper: RecordKeeper, folder: Path, number: int) -> None:
    limit_s = time.monotonic() + PATIENCE_S
    while starts(folder) < number and time.monotonic() < limit_s:
        keeper.watch()
        time.sleep(0.02)
    assert starts(folder) == number


def test_a_process_that_ended_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process fails. The second one works until its standard input is closed, so there is no note."""
    program = f"sys.exit(1) if len(open({str(tmp_path / 'starts')!r}).readlines()) == 1 else sys.stdin.read()"
    keeper = keeper_with(monkeypatch, tmp_path, program)
    watch_until(keeper, tmp_path, 2)
    notes: list[str] = []
    assert keeper.end(notes, Interrupts()) == []
    assert notes == []


def test_a_process_that_always_fails_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of starts is limited, so that a process that cannot work takes no CPU time."""
    keeper = keeper_with(monkeypatch, tmp_path, "sys.exit(1)")
    watch_until(keeper, tmp_path, MAX_STARTS)
    for _ in range(20):
        keeper.watch()
        time.sleep(0.02)
    notes: list[str] = []
    keeper.end(notes, Interrupts())
    assert (starts(tmp_path), notes) == (MAX_STARTS, [FAILED])


def test_an_interrupt_ends_the_last_compression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unfinished file is deleted, and a note says that some files are not compressed."""
    keeper = keeper_with(monkeypatch, tmp_path, "time.sleep(600)")
    unfinished = tmp_path / ".records-0-000001.jsonl.part"
    unfinished.write_bytes(b"x")
    interrupts = Interrupts()
    timer = Timer(0.3, lambda: setattr(interrupts, "count", 1))
    timer.start()
    notes: list[str] = []
    keeper.end(notes, interrupts)
    timer.join()
    assert notes == [ENDED_EARLY]
    assert not unfinished.exists()


def old_file(folder: Path) -> Path:
    """Write a file of Records that is old enough to be removed."""
    write(folder, [complete(0, [MS])])
    file = folder / "records-0-000001.jsonl"
    (folder / "run.jsonl").rename(file)
    os.utime(file, (0, 0))
    return file


def test_figures_of_a_file_that_cannot_be_removed_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt then does not write them a second time."""
    file = old_file(tmp_path / "run")

    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        with pytest.raises(PermissionError):
            remove_old(file.parent, HOUR_NS)
    assert (file.parent / PART).read_bytes() == b""
    remove_old(file.parent, HOUR_NS)
    assert not file.exists()
    assert len((file.parent / PART).read_bytes().splitlines()) == 1


def test_a_partial_line_of_figures_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, the file is kept, and the next line does not begin within a partial line."""
    file = old_file(tmp_path / "run")

    def write_half(file: Path, lines: list[bytes], *, sync: bool = True) -> None:
        with file.open("ab") as stream:
            stream.write(lines[0][:10])
        raise OutputError("cannot write", "")

    monkeypatch.setattr(record_keeper, "append_lines", write_half)
    with pytest.raises(OutputError):
        remove_old(file.parent, HOUR_NS)
    assert file.exists()
    assert (file.parent / PART).read_bytes() == b""


def test_space_for_figures_is_reserved_again_after_each_removal(tmp_path: Path) -> None:
    """The reserved space does not count in the size of the file. Without it, a full disk would prevent a removal."""
    file = old_file(tmp_path / "run")
    part = file.parent / PART
    reserve_space(part)
    assert part.stat().st_size == 0
    assert part.stat().st_blocks * 512 >= RESERVED_BYTES
    remove_old(file.parent, HOUR_NS)
    size = part.stat().st_size
    assert size > 0
    assert part.stat().st_blocks * 512 >= size + RESERVED_BYTES


def test_a_process_that_removed_nothing_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file with reserved space is deleted at the end of a run in which no Record was old enough."""
    keeper = keeper_with(monkeypatch, tmp_path, "sys.stdin.read()")
    reserve_space(tmp_path / PART)
    assert keeper.end([], Interrupts()) == []
    assert not (tmp_path / PART).exists()


def test_the_wait_for_the_last_compression_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The screen can therefore show what happens after the last request."""
    keeper = keeper_with(monkeypatch, tmp_path, "sys.stdin.read(); time.sleep(0.5)")
    watch_until(keeper, tmp_path, 1)
    waits: list[int] = []
    keeper.end([], Interrupts(), lambda: waits.append(1))
    assert waits


def test_unfinished_files_of_a_failed_process_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have been killed while it compressed a file."""
    keeper = keeper_with(monkeypatch, tmp_path, "sys.exit(1)")
    unfinished = tmp_path / ".records-0-000001.jsonl.part"
    unfinished.write_bytes(b"x")
    notes: list[str] = []
    keeper.end(notes, Interrupts())
    assert notes == [FAILED]
    assert not unfinished.exists()
