"""Two processes read the halves of a large run file; the result is the same as that of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.make_run import make_run
from loadgen.analysis import parallel_scan
from loadgen.analysis.frame import Frame
from loadgen.analysis.parallel_scan import read_columns
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Run
from tests.support.runs import complete, footer, header, healthy, rejected, truncated, write

MS = 1_000_000


def both(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[tuple[Run, Frame], tuple[Run, Frame]]:
    """Return a run as two processes read it, and as one process reads it."""
    monkeypatch.setattr(parallel_scan, "MIN_BYTES", 1 << 60)
    alone = read_columns(folder)
    monkeypatch.setattr(parallel_scan, "MIN_BYTES", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("threading.active_count", lambda: 1)
    return read_columns(folder), alone


def assert_equal(a: Frame, b: Frame) -> None:
    for name in a.__struct_fields__:
        left, right = getattr(a, name), getattr(b, name)
        if name == "chunk_ns":
            left, right = left.steps, right.steps
        if name in ("models", "replicas") and left is not None:
            assert left.names == right.names
            left, right = left.index, right.index
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, name
            assert np.array_equal(left, right, equal_nan=left.dtype.kind == "f"), name
        elif name == "marks":
            assert left.keys() == right.keys()
            assert all(np.array_equal(left[mark], right[mark], equal_nan=True) for mark in left)
        else:
            assert left == right, name


def test_a_large_run_is_read_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Columns, outcomes, telemetry and footer of 3,000 requests are those of a single process."""
    make_run(tmp_path / "run", 3000, 8)
    (run, frame), (alone, alone_frame) = both(monkeypatch, tmp_path / "run")
    assert len(frame) == 3000
    assert_equal(frame, alone_frame)
    assert run == alone


def test_names_marks_and_messages_of_both_halves_are_joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models, replicas, marks, errors and messages that occur in one half only are those of a single process."""
    records: list[Record] = []
    for number in range(200):
        late = number >= 100
        changes = {"model": "b" if late else "", "replica": f"node-{number // 50}", "marks": {"inputs": number}}
        if number % 7 == 0:
            records.append(truncated(number, [MS], error_detail=f"cut off {number // 40}"))
        elif number % 11 == 0:
            records.append(rejected(number))
        else:
            records.append(complete(number, [MS, 2 * MS], tokens=[1, 300 if late else 1], **changes))
    write(tmp_path / "run", [header(200), *records, *healthy(), footer(records)])
    (run, frame), (alone, alone_frame) = both(monkeypatch, tmp_path / "run")
    assert_equal(frame, alone_frame)
    assert run == alone


def test_a_request_in_both_halves_counts_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the second half repeats a request of the first one, the first Record counts, as for a single process."""
    records = [complete(number, [MS, 2 * MS]) for number in range(100)]
    repeated = [*records, complete(3, [5 * MS])]
    write(tmp_path / "run", [header(100), *repeated, footer(records)])
    (_, frame), (_, alone_frame) = both(monkeypatch, tmp_path / "run")
    assert len(frame) == 100
    assert_equal(frame, alone_frame)


def test_a_run_in_parts_is_read_by_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Part files of a killed run are read too."""
    records = [complete(number, [MS, 2 * MS]) for number in range(100)]
    write(tmp_path / "run", [header(100), *records[:60]])
    write(tmp_path / "parts", records[60:])
    (tmp_path / "parts" / "run.jsonl").rename(tmp_path / "run" / "part-0.jsonl")
    (_, frame), (_, alone_frame) = both(monkeypatch, tmp_path / "run")
    assert len(frame) == 100
    assert_equal(frame, alone_frame)
