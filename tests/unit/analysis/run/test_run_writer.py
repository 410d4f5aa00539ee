"""The part file: lines are kept until the disk has taken them."""

import tempfile
from pathlib import Path

import msgspec
import pytest

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import RunWriter

RECORDS = [Record(id=index, state="complete") for index in range(3)]
LINES = b"".join(msgspec.json.encode(record) + b"\n" for record in RECORDS)


def test_lines_are_on_disk_after_a_flush(tmp_path: Path) -> None:
    """What was added is readable by others once flushed; nothing is rescued."""
    part = RunWriter(tmp_path / "part")
    for record in RECORDS:
        part.add(record)
    part.flush()
    assert (tmp_path / "part").read_bytes() == LINES
    assert part.close() is None


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk refuses stays pending, with the reason, and goes at the end to a file that is no other run's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rescued = set()
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        (folder / "run.jsonl").symlink_to("/dev/full")
        part = RunWriter(folder / "run.jsonl")
        for record in RECORDS:
            part.add(record)
        part.flush()
        assert part.error is not None
        assert part.unwritten_bytes == len(LINES)
        rescued.add(part.close())
    assert [path.read_bytes() for path in rescued if path and path.parent == tmp_path] == [LINES, LINES]
