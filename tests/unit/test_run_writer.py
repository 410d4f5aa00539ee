"""The part file: lines are kept until the disk has taken them."""

from pathlib import Path

import msgspec

from loadgen.record import Record
from loadgen.runfile import RunWriter

RECORDS = [Record(id=index, state="complete") for index in range(3)]
LINES = b"".join(msgspec.json.encode(record) + b"\n" for record in RECORDS)


def test_lines_are_on_disk_after_a_flush(tmp_path: Path) -> None:
    """What was added is readable by others once flushed; nothing is rescued."""
    part = RunWriter(tmp_path / "part")
    for record in RECORDS:
        part.add(record)
    part.flush()
    assert (tmp_path / "part").read_bytes() == LINES
    assert part.close(tmp_path / "rescue") is None


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """What the disk refuses stays pending, with the reason, and goes to the rescue file at the end."""
    part = RunWriter(Path("/dev/full"))
    for record in RECORDS:
        part.add(record)
    part.flush()
    assert part.error is not None
    assert part.close(tmp_path / "rescue") == tmp_path / "rescue"
    assert (tmp_path / "rescue").read_bytes() == LINES
