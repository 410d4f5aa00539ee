"""What has been measured: told by the run files, and by a journal that outlives a kill."""

from __future__ import annotations

import fcntl
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loadgen.errors import OutputError, PlanError
from loadgen.folders import LOCK_NAME, FolderClaim
from loadgen.journal import differences, move_aside
from loadgen.studies.matrix import MATRIX, Cell, Repeat, is_finished, journal, newest_lines, read_lines
from tests.support.runs import burst, footer, header, write

CELL = Cell("tgi", "a", "7b", "burst")
PLAN: dict[str, Any] = {"name": "x", "repeats": 2, "servers": [{"name": "tgi", "options": {"gpu": "A"}}]}


def test_a_run_with_its_footer_is_finished(tmp_path: Path) -> None:
    """Without one it was killed; with one that says interrupted it was stopped; neither counts."""
    records = burst(5, 4)
    write(tmp_path / Repeat(CELL, 1).folder, [header(5), *records, footer(records)])
    write(tmp_path / Repeat(CELL, 2).folder, [header(5), *records])
    write(tmp_path / Repeat(CELL, 3).folder, [header(5), *records, footer(records, interrupted=True)])
    write(tmp_path / Repeat(CELL, 4).folder, [header(5), *records, b'{"type":"footer","ended_ns":5,"se'])
    assert [is_finished(tmp_path, Repeat(CELL, number)) for number in range(1, 6)] == [True, False, False, False, False]


def test_what_an_attempt_left_is_moved_aside_and_kept(tmp_path: Path) -> None:
    """Nothing measured is deleted or overwritten, however often a run is tried."""
    repeat = Repeat(CELL, 1)
    assert move_aside(tmp_path / repeat.folder) is None
    for number in (1, 2):
        write(tmp_path / repeat.folder, [header(5)])
        aside = move_aside(tmp_path / repeat.folder)
        assert aside is not None
        assert aside.name == f"repeat-1-unfinished-{number}"
        assert (aside / "run.jsonl").exists()
        assert not (tmp_path / repeat.folder).exists()


def test_a_journal_goes_on_only_when_asked_to(tmp_path: Path) -> None:
    """A folder with a matrix is not begun again, and one with something else is not used."""
    with journal(tmp_path / "m", PLAN, resume=False) as book:
        book.write("down", start=1)
    with (
        pytest.raises(OutputError, match="already holds a matrix") as caught,
        journal(tmp_path / "m", PLAN, resume=False),
    ):
        pass
    assert "--resume" in caught.value.hint
    with journal(tmp_path / "m", PLAN, resume=True) as book:
        assert [line["type"] for line in book.lines] == ["plan", "down", "resumed"]
    with pytest.raises(OutputError, match="not empty"), journal(tmp_path, PLAN, resume=True):
        pass


def test_a_changed_plan_is_refused_with_what_changed(tmp_path: Path) -> None:
    """Each value that is not what it was, by its place."""
    with journal(tmp_path / "m", PLAN, resume=False):
        pass
    changed = PLAN | {"repeats": 3, "servers": [{"name": "tgi", "options": {"gpu": "B", "speed": 2}}]}
    with pytest.raises(PlanError) as caught, journal(tmp_path / "m", changed, resume=True):
        pass
    assert str(caught.value).splitlines()[1:] == [
        "repeats: 2 then, 3 now",
        'servers[0].options.gpu: "A" then, "B" now',
        "servers[0].options.speed: nothing then, 2 now",
    ]
    assert list(differences(PLAN, json.loads(json.dumps(PLAN)))) == []


def test_two_commands_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is resumed while it is still running is refused, and so is a run in its folder."""
    monkeypatch.setattr("loadgen.journal.LOCK_WAIT_S", 0.1)
    with journal(tmp_path / "m", PLAN, resume=False):
        with (
            pytest.raises(OutputError, match="another loadgen is writing to"),
            journal(tmp_path / "m", PLAN, resume=True),
        ):
            pass
        with pytest.raises(OutputError, match="another loadgen is writing to"):
            FolderClaim(tmp_path / "m")


def test_workers_of_a_killed_command_are_waited_for(tmp_path: Path) -> None:
    """A process that inherited the lock file holds the lock until it ends."""
    with journal(tmp_path / "m", PLAN, resume=False):
        pass
    with (tmp_path / "m" / LOCK_NAME).open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        orphan = subprocess.Popen(["sleep", "0.5"], pass_fds=(held.fileno(),))
    with journal(tmp_path / "m", PLAN, resume=True):
        assert orphan.wait() == 0
    assert [line["type"] for line in read_lines(tmp_path / "m")] == ["plan", "resumed"]


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path: Path) -> None:
    """What is written after a kill in the middle of a line can be read."""
    with journal(tmp_path / "m", PLAN, resume=False) as book:
        book.write("down", start=1)
    with (tmp_path / "m" / MATRIX.file).open("ab") as file:
        file.write(b'{"type": "beg')
    with journal(tmp_path / "m", PLAN, resume=True) as book:
        book.write("down", start=2)
    assert [line["type"] for line in read_lines(tmp_path / "m")] == ["plan", "down", "resumed", "down"]


def test_the_newest_word_on_a_run_counts() -> None:
    """A failure is forgotten when the run begins again, and stands where it did not."""
    one, two = Repeat(CELL, 1), Repeat(CELL, 2)

    def line(kind: str, repeat: Repeat, **values: Any) -> dict[str, Any]:
        return {"type": kind, **repeat.key, **values}

    lines = [
        line("begin", one, start=1, place=0),
        line("failure", one, reason="first"),
        line("failure", two, reason="never up"),
        line("begin", one, start=2, place=1),
        line("end", one, seconds=4.5),
    ]
    assert newest_lines(lines, "begin", "failure") == {one: lines[3], two: lines[2]}
    assert newest_lines(lines, "begin") == {one: lines[3]}
    assert newest_lines(lines, "end") == {one: lines[4]}


@pytest.mark.parametrize(
    "torn",
    [
        b"\xff",
        b"[" * 100_000,
        b"7",
        b'{"type": 7}',
        b'{"type": "up", "at": "x", "start": 1}',
        b'{"type": "begin", "at": "x", "cell": {"server": "tgi"}, "repeat": 1, "start": 1, "place": 0}',
        b'{"type": "end", "at": "x", "cell": {"server": 1, "host": "a", "model": "7b", "workload": "w"}, "repeat": 1}',
    ],
)
def test_a_damaged_line_costs_only_itself(tmp_path: Path, torn: bytes) -> None:
    """Whatever stands there; also at the end of a run file that nobody can read."""
    with journal(tmp_path / "m", PLAN, resume=False) as book:
        book.write("begin", **Repeat(CELL, 1).key, start=1, place=0)
    with (tmp_path / "m" / MATRIX.file).open("ab") as file:
        file.write(torn + b"\n")
    lines = read_lines(tmp_path / "m")
    assert [line["type"] for line in lines] == ["plan", "begin"]
    assert [*newest_lines(lines, "begin")] == [Repeat(CELL, 1)]
    write(tmp_path / Repeat(CELL, 1).folder, [header(5), torn])
    assert not is_finished(tmp_path, Repeat(CELL, 1))
