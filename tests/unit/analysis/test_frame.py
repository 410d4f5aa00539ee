"""Gathering Records into columns: block by block, with nothing lost at the seams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import fields

from loadgen.analysis import frame
from loadgen.analysis.frame import MAX_DETAILS, OTHER_DETAIL, RECORDS_PER_BLOCK, Frame, blocks, build_frame, sum_by_row
from loadgen.analysis.steady_window import frame_of_run, load_run
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import burst, complete, dropped, failed, part_of, run_of, summarise, truncated

RECORDS = [
    *burst(30, 7),
    dropped(100),
    truncated(101, [40 * MS]),
    failed(102),
    complete(103, [80 * MS, 90 * MS], tokens=[300, 70_000]),
    complete(104, []),
    complete(105, [-5 * MS], sent_ns=-9 * MS, phase="warmup"),
]


def same(one: Frame, other: Frame) -> bool:
    """Whether every column has the same values."""

    def value(frame: Frame, name: str) -> Any:
        return frame.chunk_ns[:] if name == "chunk_ns" else getattr(frame, name)

    return all(
        np.array_equal(left, right, equal_nan=left.dtype.kind == "f") if isinstance(left, np.ndarray) else left == right
        for left, right in ((value(one, field.name), value(other, field.name)) for field in fields(Frame))
    )


@pytest.mark.parametrize("size", [1, 2, 7, 36, 1000])
def test_the_size_of_a_block_changes_nothing(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """One Record at a time or all at once give the same columns, also where a later block needs wider counts."""
    whole = build_frame(RECORDS)
    monkeypatch.setattr(frame, "RECORDS_PER_BLOCK", size)
    assert same(build_frame(RECORDS), whole)
    assert whole.chunk_tokens.max() == 70_000
    assert whole.chunk_tokens.sum() == 30 * 7 + 1 + 70_300 + 1


@pytest.mark.parametrize("entries", [1, 3, 50])
def test_figures_and_curves_do_not_depend_on_blocks_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    """A million requests are computed in pieces; the same run in pieces of any size gives the same figures."""
    run = run_of(tmp_path / "run", RECORDS)
    run.header.plan["window_s"] = [0.0, 0.4]
    whole = part_of(run)
    monkeypatch.setattr(frame, "ENTRIES_PER_BLOCK", entries)
    assert part_of(run) == whole


def test_more_records_than_a_block_are_all_there() -> None:
    """Two and a half blocks of Records make as many rows, in their order."""
    number = RECORDS_PER_BLOCK * 5 // 2
    found = build_frame(complete(i, [i, i + 1]) for i in range(number))
    assert len(found) == number
    assert found.first_ns.tolist() == list(range(number))


def test_a_loaded_run_is_the_one_that_was_read(tmp_path: Path) -> None:
    """Without its Records in memory, a run has the same header, telemetry, footer and columns."""
    run = run_of(tmp_path / "run", RECORDS)
    loaded, columns = load_run(tmp_path / "run")
    assert loaded.records == []
    assert (loaded.header, loaded.telemetry, loaded.footer) == (run.header, run.telemetry, run.footer)
    assert same(columns, frame_of_run(run))
    assert summarise(loaded, columns) == summarise(run)


def test_words_of_errors_are_told_apart_up_to_a_limit() -> None:
    """Something new in each refusal fills no memory: beyond the limit they are counted together."""
    found = build_frame(failed(i, detail=f"no room for request {i}") for i in range(MAX_DETAILS + 50)).outcomes
    assert len(found) == MAX_DETAILS + 1
    assert sum(seen.requests for seen in found.values()) == MAX_DETAILS + 50
    assert {ending: seen for ending, seen in found.items() if ending.detail == OTHER_DETAIL}.popitem()[1] == (50, 1000)


def test_pieces_cover_every_row_once() -> None:
    """Rows and entries follow each other without gap, with empty and with oversized rows among them."""
    offsets = np.concatenate(([0], np.cumsum([0, 3, 0, frame.ENTRIES_PER_BLOCK * 2 + 5, 1, 0])))
    pieces = list(blocks(offsets))
    assert len(pieces) > 1
    assert [row for rows, _ in pieces for row in range(rows.start, rows.stop)] == list(range(6))
    assert [entries.start for _, entries in pieces][1:] == [entries.stop for _, entries in pieces][:-1]
    assert pieces[-1][1].stop == offsets[-1]


def test_rows_without_entries_sum_to_nothing() -> None:
    """At the beginning, in the middle and at the end, and where there is nothing at all."""
    assert sum_by_row(np.array([1, 2, 3]), np.array([0, 0, 2, 2, 3, 3])).tolist() == [0, 3, 0, 3, 0]
    assert sum_by_row(np.array([], np.int64), np.array([0, 0])).tolist() == [0]
