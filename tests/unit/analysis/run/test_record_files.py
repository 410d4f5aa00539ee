"""The files of Records that a long run has completed: written, compressed, removed and read."""

from __future__ import annotations

import errno
import os
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from loadgen.analysis import parallel_scan
from loadgen.analysis.build_summary import summarise
from loadgen.analysis.parallel_scan import read_columns
from loadgen.analysis.report.findings import findings
from loadgen.analysis.run import runfile
from loadgen.analysis.run.packed_ids import unpack_ids
from loadgen.analysis.run.record import shift_record
from loadgen.analysis.run.record_files import record_files
from loadgen.analysis.run.runfile import RunFileError, RunWriter, read
from loadgen.analysis.steady_window import load_run
from loadgen.engine.record_keeper import PART, compress, remove_old
from tests.support.runs import complete, footer, header, healthy, write

MS = 1_000_000
SECOND_NS = 1_000_000_000


def long_run(folder: Path, requests: int = 300, rotate_bytes: int = 25_000, *, ended: bool = True) -> Path:
    """Write a run of one worker with files of Records. The last Records are in `run.jsonl` if the run has ended."""
    records = [shift_record(complete(number, [MS, 2 * MS]), number * SECOND_NS) for number in range(requests)]
    write(folder, [header(requests), *healthy()])
    writer = RunWriter(folder / "part-0.jsonl", 0, rotate_bytes)
    telemetry = healthy(requests)
    for record in records:
        writer.add(record)
        writer.add(telemetry[record.id])
        if record.id % 10 == 9:  # as a worker does each second
            writer.flush()
    writer.close()
    if ended:
        part = folder / "part-0.jsonl"
        with (folder / "run.jsonl").open("ab") as file:
            file.write(part.read_bytes())
        part.unlink()
        end = RunWriter(folder / "run.jsonl")
        end.add(footer(records))
        end.close()
    return folder


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("processes", [1, 2])
def test_every_record_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, *, ended: bool) -> None:
    """Plain and compressed files give every Record once, for one process and for two, also after a kill."""
    folder = long_run(tmp_path / "run", ended=ended)
    files = record_files(folder)
    assert len(files) > 3
    compress(files[0])
    compress(files[1])
    names = [file.name for file in record_files(folder)[:3]]
    assert names == [f"{files[0].name}.gz", f"{files[1].name}.gz", files[2].name]
    monkeypatch.setattr(parallel_scan, "MIN_BYTES", 1 << 60)
    alone, alone_frame = read_columns(folder)
    monkeypatch.setattr(parallel_scan, "MIN_BYTES", 1 if processes == 2 else 1 << 60)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("threading.active_count", lambda: 1)
    run, frame = read_columns(folder)
    assert run == alone
    assert frame.id.tolist() == alone_frame.id.tolist()
    assert len(run.telemetry) == 310
    assert sorted(frame.id.tolist()) == list(range(300))
    assert (run.footer is not None) is ended
    assert sorted(record.id for record in read(folder).records) == list(range(300))


def test_a_crash_while_compressing_loses_no_record(tmp_path: Path) -> None:
    """A file that is there twice, plain and compressed, counts once. A compressed file that is not complete is not
    read.
    """
    folder = long_run(tmp_path / "run")
    first = record_files(folder)[0]
    plain = first.read_bytes()
    compress(first)
    first.write_bytes(plain)
    (folder / f".{first.name}.part").write_bytes(b"\x1f\x8b")
    assert sorted(read_columns(folder)[1].id.tolist()) == list(range(300))


def test_a_damaged_compressed_file_is_an_error(tmp_path: Path) -> None:
    """The message names the file."""
    folder = long_run(tmp_path / "run")
    file = compress(record_files(folder)[0])
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(RunFileError, match=r"cannot read .*records-0-000001\.jsonl\.gz"):
        read_columns(folder)


def test_figures_of_removed_records_remain(tmp_path: Path) -> None:
    """Old files are removed, with their figures in windows of a minute or more. The report says what is missing."""
    folder = long_run(tmp_path / "run")
    old, *others = record_files(folder)
    removed = read_ids(old)
    os.utime(old, (0, 0))
    remove_old(folder, keep_ns=3600 * SECOND_NS)
    assert record_files(folder) == others
    run, frame = load_run(folder)
    assert sorted(frame.id.tolist()) == list(range(max(removed) + 1, 300))
    (part,) = run.removed
    assert (part.requests, list(unpack_ids(part.ids)), part.file) == (len(removed), sorted(removed), old.name)
    assert sum(window.requests for window in part.windows) == len(removed)
    assert {window.ttft_p50_ns for window in part.windows} == {MS}
    assert {window.e2e_p50_ns for window in part.windows} == {2 * MS}  # to the last token, as in every report
    summary = summarise(run, frame)
    assert summary.removed is not None
    assert summary.removed.complete == len(removed)
    assert {window.worker for window in summary.removed.windows} == {0}
    (finding,) = (finding for finding in findings(summary) if finding.id == "removed")
    assert "are in no figure, because --keep-records removed their records" in finding.sentence
    assert (folder / PART).exists()


@pytest.mark.parametrize("call", ["open", "rename"])
def test_a_failed_rotation_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The old file stays open under its name. The next flush begins another file."""
    writer = RunWriter(tmp_path / "part-0.jsonl", 0, 1)

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer.add(complete(0, [MS]))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        writer.flush()
    assert isinstance(writer.error, OSError)
    assert not record_files(tmp_path)
    writer.add(complete(1, [MS]))
    writer.close()
    assert writer.error is None
    (file,) = record_files(tmp_path)
    assert file.name == "records-0-000001.jsonl"
    assert read_ids(file) == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-0.jsonl", file.name]


def test_a_file_that_is_begun_while_a_run_is_read_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker renames its part file after the files of Records were listed. Each Record is read once."""
    folder = long_run(tmp_path / "run", ended=False)
    assert (folder / "part-0.jsonl").stat().st_size
    listed = record_files(folder)

    def list_and_rotate(*_: object) -> list[Path]:
        (folder / "part-0.jsonl").rename(folder / "records-0-000099.jsonl")
        (folder / "part-0.jsonl").touch()
        return listed

    monkeypatch.setattr(runfile, "record_files", list_and_rotate)
    run = read(folder)
    assert sorted(record.id for record in run.records) == list(range(300))
    assert len(run.telemetry) == 310


def test_a_file_that_is_renamed_before_the_listing_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker renames its part file after a reader has opened it and before the reader lists the files."""
    folder = long_run(tmp_path / "run", ended=False)
    assert (folder / "part-0.jsonl").stat().st_size

    def rotate_and_list(folder: Path, worker: int | None = None) -> list[Path]:
        (folder / "part-0.jsonl").rename(folder / "records-0-000099.jsonl")
        (folder / "part-0.jsonl").touch()
        return record_files(folder, worker)

    monkeypatch.setattr(runfile, "record_files", rotate_and_list)
    run = read(folder)
    assert sorted(record.id for record in run.records) == list(range(300))
    assert len(run.telemetry) == 310


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_is_read_while_its_files_are_compressed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """A file that was compressed since the listing is read. The figures of a file that was removed remain, although it
    was the first removed file.
    """
    folder = long_run(tmp_path / "run")
    first, second, *others = record_files(folder)
    removed = set(read_ids(first))
    os.utime(first, (0, 0))
    remove_old(folder, keep_ns=3600 * SECOND_NS)
    compress(second)
    monkeypatch.setattr(parallel_scan, "record_files", lambda *_: [first, second, *others])
    monkeypatch.setattr(runfile, "record_files", lambda *_: [first, second, *others])
    monkeypatch.setattr(parallel_scan, "MIN_BYTES", 1 if processes == 2 else 1 << 60)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("threading.active_count", lambda: 1)
    run, frame = read_columns(folder)
    assert set(frame.id.tolist()) == set(range(300)) - removed
    assert [part.requests for part in run.removed] == [len(removed)]


@pytest.mark.parametrize("processes", [1, 2])
def test_records_that_were_read_are_not_counted_as_removed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """A file whose figures were written, but which was not removed, counts once. Figures that occur twice count once
    too.
    """
    folder = long_run(tmp_path / "run")
    first, second, *_ = record_files(folder)
    content = first.read_bytes()
    for file in (first, second):
        os.utime(file, (0, 0))
    remove_old(folder, keep_ns=3600 * SECOND_NS)
    first.write_bytes(content)
    part = folder / PART
    part.write_bytes(part.read_bytes() * 2)
    monkeypatch.setattr(parallel_scan, "MIN_BYTES", 1 if processes == 2 else 1 << 60)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("threading.active_count", lambda: 1)
    run, frame = read_columns(folder)
    assert [removed.file for removed in run.removed] == [second.name]
    assert len(frame.id) + run.removed[0].requests == 300


def read_ids(file: Path) -> list[int]:
    """Return the ids of the Records in a plain file."""
    lines = map(msgspec.json.decode, file.read_bytes().splitlines())
    return [line["id"] for line in lines if line["type"] == "request"]


def test_memory_does_not_grow_with_the_number_of_records(tmp_path: Path) -> None:
    """After 90,000 Records, a writer of files of 256 kB holds at most 30 kB more memory than after 30,000."""
    writer = RunWriter(tmp_path / "part-0.jsonl", 0, 1 << 18)
    record = complete(0, [MS, 2 * MS])
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(3):
            for number in range(30_000):
                record.id = number
                writer.add(record)
            writer.flush()
            sizes.append(tracemalloc.get_traced_memory()[0])
            for file in record_files(tmp_path):
                file.unlink()
        assert sizes[2] - sizes[0] <= 30_000
    finally:
        tracemalloc.stop()
        writer.close()
