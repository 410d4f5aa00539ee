"""The process that compresses files of Records during a long run: started again, and ended by an interrupt."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from threading import Timer

import pytest

from loadgen.engine import record_keeper
from loadgen.engine.record_keeper import ENDED_EARLY, FAILED, MAX_STARTS, RecordKeeper
from loadgen.engine.signals import Interrupts

PATIENCE_S = 60.0


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
