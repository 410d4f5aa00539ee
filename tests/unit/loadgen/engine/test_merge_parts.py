"""Part files are merged at the end of a long run, although some of its files of Records are damaged or removed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from loadgen.analysis.run.packed_ids import pack_ids
from loadgen.analysis.run.removed_records import RemovedRecords
from loadgen.analysis.run.runfile import Footer, read
from loadgen.engine.merge_parts import WorkerExit, merge_parts
from loadgen.engine.record_keeper import PART, compress
from loadgen.workloads.request import Request
from tests.support.runs import complete, header, write

MS = 1_000_000


def merged(folder: Path, removed_parts: list[Path], due: int = 10) -> Footer:
    """Merge a run in which `due` requests were due. Five are in `records-0-000001`, and five in the part file."""
    task: Any = SimpleNamespace(
        number=0,
        part=folder / "part-0.jsonl",
        rotate_bytes=1,
        prompts=SimpleNamespace(has_sessions=False),
        schedule=SimpleNamespace(due_ns=None),
        requests=lambda: (Request(number, "", 1, 1) for number in range(due)),
    )
    return merge_parts(
        [WorkerExit(task, due, "signal SIGKILL", None)],
        header(10),
        folder / "run.jsonl",
        interrupted=False,
        removed_parts=removed_parts,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run that has not been merged yet."""
    result = tmp_path / "run"
    for name, ids in (("records-0-000001.jsonl", range(5)), ("part-0.jsonl", range(5, 10))):
        written = write(tmp_path / name, [complete(number, [MS]) for number in ids])
        result.mkdir(exist_ok=True)
        (written / "run.jsonl").rename(result / name)
    (write(tmp_path / "header", [header(10)]) / "run.jsonl").rename(result / "run.jsonl")
    return result


@pytest.mark.parametrize("damage", ["shortened", "changed", "not compressed"])
def test_a_damaged_file_does_not_stop_the_merge(folder: Path, damage: str) -> None:
    """A note in the footer names the file. The other Records are in the run file."""
    file = compress(folder / "records-0-000001.jsonl")
    content = file.read_bytes()
    damaged = {
        "shortened": content[:-20],
        "changed": content[:30] + bytes(20) + content[50:],
        "not compressed": b"{}" * 20,
    }
    file.write_bytes(damaged[damage])
    footer = merged(folder, [])
    assert [note for note in footer.notes if "cannot read records-0-000001.jsonl.gz" in note]
    assert footer.complete >= 5
    assert not (folder / "part-0.jsonl").exists()


def test_a_file_counts_once_although_its_figures_were_written(folder: Path) -> None:
    """The process that removes files was killed between the figures and the removal, or wrote the figures twice."""
    files = [f"records-0-{number:06}.jsonl.gz" for number in (0, 1, 0)]
    figures = [RemovedRecords(file=file, worker=0, states={"complete": 5}, windows=[]) for file in files]
    lines = map(msgspec.json.encode, figures)
    (folder / PART).write_bytes(b"\n".join(lines) + b"\n")
    assert merged(folder, [folder / PART]).complete == 5 + 5 + 5


def test_open_requests_below_a_removed_one_are_lost_with_their_worker(folder: Path) -> None:
    """Late turns of long sessions have smaller ids than requests of later sessions, whose Records were removed."""
    (folder / "records-0-000001.jsonl").unlink()
    removed = RemovedRecords(
        file="records-0-000001.jsonl", worker=0, states={"complete": 4}, windows=[], ids=pack_ids([0, 2, 4, 12])
    )
    (folder / PART).write_bytes(msgspec.json.encode(removed) + b"\n")
    footer = merged(folder, [folder / PART], due=13)
    lost = [record.id for record in read(folder).records if record.error_kind == "worker_lost"]
    assert lost == [1, 3, 10, 11]
    assert (footer.complete, footer.failed) == (9, 4)
