"""Two processes read the halves of a large run file; the result is the same as that of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.make_run import make_run
from loadgen.analysis import parallel_scan
from loadgen.analysis.frame import Frame
from loadgen.analysis.parallel_scan import read_columns
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import WHOLE_FILE, Run, RunFileError
from tests.support.runs import complete, footer, header, healthy, rejected, truncated, write

MS = 1_000_000


def use_two_processes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let two processes read every run. Return a list that records, for each run, if both halves gave a result."""
    halves = parallel_scan._read_halves
    succeeded: list[bool] = []

    def read_halves(main: Path, middle: int) -> tuple[Run, Frame] | None:
        result = halves(main, middle)
        succeeded.append(result is not None)
        return result

    monkeypatch.setattr(parallel_scan, "MIN_BYTES", 1)
    monkeypatch.setattr(parallel_scan, "_read_halves", read_halves)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("threading.active_count", lambda: 1)
    return succeeded


def both(
    monkeypatch: pytest.MonkeyPatch, folder: Path, halves: tuple[bool, ...] = (True,)
) -> tuple[tuple[Run, Frame], tuple[Run, Frame]]:
    """Return a run as two processes read it, and as one process reads it.

    `halves` is (True,) if the two processes must succeed, (False,) if one process must read the file after they failed,
    and () if only one process must read the file.
    """
    monkeypatch.setattr(parallel_scan, "MIN_BYTES", 1 << 60)
    alone = read_columns(folder)
    succeeded = use_two_processes(monkeypatch)
    together = read_columns(folder)
    assert succeeded == list(halves)
    return together, alone


def replace_scan(
    monkeypatch: pytest.MonkeyPatch,
    *,
    parent: Callable[[], None] | None = None,
    child: Callable[[], None] | None = None,
) -> None:
    """Call a function at the beginning of each scan that the parent or the child process makes of a half."""
    scan, pid = parallel_scan.scan, os.getpid()

    def replaced(*arguments: Any, span: tuple[int, int | None] = WHOLE_FILE, **more: Any) -> Run:
        function = parent if os.getpid() == pid else child
        if function is not None and span != WHOLE_FILE:
            function()
        return scan(*arguments, span=span, **more)

    monkeypatch.setattr(parallel_scan, "scan", replaced)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each fork adds the process id of the child."""
    fork = os.fork
    pids: list[int] = []

    def recorded() -> int:
        pid = fork()
        pids.append(pid)
        return pid

    monkeypatch.setattr("os.fork", recorded)
    return pids


def assert_one_ended(pids: list[int]) -> None:
    """Check that there was one child process, and that its parent has waited for its end."""
    assert len(pids) == 1
    assert not Path(f"/proc/{pids[0]}").exists()


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
    (_, frame), (_, alone_frame) = both(monkeypatch, tmp_path / "run", halves=(False,))
    assert len(frame) == 100
    assert_equal(frame, alone_frame)


def test_a_run_in_parts_is_read_by_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Part files of a killed run are read too."""
    records = [complete(number, [MS, 2 * MS]) for number in range(100)]
    write(tmp_path / "run", [header(100), *records[:60]])
    write(tmp_path / "parts", records[60:])
    (tmp_path / "parts" / "run.jsonl").rename(tmp_path / "run" / "part-0.jsonl")
    (_, frame), (_, alone_frame) = both(monkeypatch, tmp_path / "run", halves=())
    assert len(frame) == 100
    assert_equal(frame, alone_frame)


@pytest.mark.parametrize("error", [RunFileError("no run"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.timeout(30)
def test_an_error_in_the_parent_ends_the_child(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, children: list[int], error: BaseException
) -> None:
    """The error is raised at once, although the child process is not ready."""
    records = [complete(number, [MS, 2 * MS]) for number in range(100)]
    write(tmp_path / "run", [header(100), *records, footer(records)])
    use_two_processes(monkeypatch)

    def fail() -> None:
        raise error

    replace_scan(monkeypatch, parent=fail, child=signal.pause)
    with pytest.raises(type(error)):
        read_columns(tmp_path / "run")
    assert_one_ended(children)


def test_an_error_in_the_child_leaves_the_file_to_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, children: list[int]
) -> None:
    """If the child process fails, this process reads the whole file."""
    records = [complete(number, [MS, 2 * MS]) for number in range(100)]
    write(tmp_path / "run", [header(100), *records, footer(records)])

    def fail() -> None:
        raise MemoryError

    replace_scan(monkeypatch, child=fail)
    (run, frame), (alone, alone_frame) = both(monkeypatch, tmp_path / "run", halves=(False,))
    assert_equal(frame, alone_frame)
    assert run == alone
    assert_one_ended(children)
