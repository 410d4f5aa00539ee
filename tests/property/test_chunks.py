"""Chunks in little room: nothing is lost, and what is counted is what sorting gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.analysis import chunk_columns as chunks
from loadgen.analysis import frame, metrics
from loadgen.analysis.build_summary import summarise
from loadgen.analysis.chunk_columns import ChunkInstants, GrowingArray, OrderStatistics, chunk_steps
from loadgen.analysis.frame import build_frame, offsets_of
from loadgen.analysis.itl_distribution import ranked_gaps, sorted_values
from loadgen.analysis.report.chart_data import distribution
from loadgen.analysis.stats import describe
from tests.support.runs import complete, run_of

NUMBERS = st.lists(st.integers(0, 1 << 40) | st.integers(0, 50), min_size=1, max_size=60)


@given(st.lists(st.lists(st.integers(0, 1 << 50), max_size=6), max_size=8), st.data())
def test_instants_come_back_to_the_nanosecond(rows: list[list[int]], data: st.DataObject) -> None:
    """Of any part, in any order of instants, whole rows or not, rows without chunks included."""
    flat = [instant for row in rows for instant in row]
    offsets = offsets_of(np.array([*map(len, rows)], np.int64))
    firsts = np.array([row[0] if row else np.nan for row in rows])
    found = ChunkInstants(chunk_steps(np.array(flat, np.int64), offsets), firsts, offsets)
    first = data.draw(st.integers(0, len(flat)))
    last = data.draw(st.integers(0, len(flat)))
    assert found[first:last].tolist() == flat[first:last]
    assert found[:].tolist() == flat


@given(NUMBERS, st.integers(0, 5), st.integers(1, 7))
def test_ranks_are_those_of_the_sorted_numbers(numbers: list[int], zeros: int, pieces: int) -> None:
    """Each of them, with zeros beside them, in however many blocks; asked for together or one by one."""
    blocks = [(np.append(piece, 0), np.array([len(piece)])) for piece in np.array_split(np.array(numbers), pieces)]
    ranked = OrderStatistics(lambda: blocks, len(numbers) + zeros, zeros, max(numbers), 1.0)
    ordered = sorted([*numbers, *[0] * zeros])
    assert ranked.values_at(range(len(ordered))) == ordered
    again = OrderStatistics(lambda: blocks, len(numbers) + zeros, zeros, max(numbers), 1.0)
    assert [again[rank] for rank in (0, -1, len(ordered) // 2)] == [ordered[0], ordered[-1], ordered[len(ordered) // 2]]


@given(st.lists(st.lists(st.integers(0, 300), max_size=5), max_size=6))
def test_values_are_kept(parts: list[list[int]]) -> None:
    """Whether or not blocks of equal values come as one value, which takes no room."""
    found = GrowingArray(np.dtype(np.uint8))
    for part in parts:
        values = np.array(part, np.uint16)
        constant = len(set(part)) == 1
        found.extend(np.broadcast_to(values[0], len(values)) if constant else values)
    assert found.array().tolist() == [number for part in parts for number in part]


@pytest.mark.parametrize("merged", [False, True])
def test_what_is_counted_is_what_sorting_gives(merged: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A summary of gaps that are too many to be sorted, and their curve, to the last digit; in small blocks."""
    random = np.random.default_rng(1)
    records = []
    for number in range(300):
        instants = np.cumsum(random.lognormal(17, 1, random.integers(1, 30))).astype(np.int64)
        records.append(complete(number, instants.tolist(), tokens=[1 + merged] * len(instants)))
    run = run_of(tmp_path / "run", records)
    whole = summarise(run)
    found = build_frame(records)
    curve = distribution(sorted_values(metrics.METRICS["itl_s"], found), 300)
    monkeypatch.setattr(metrics, "MAX_SORTED_GAPS", 0)
    monkeypatch.setattr(frame, "ENTRIES_PER_BLOCK", 64)
    monkeypatch.setattr(chunks, "MAX_COUNTERS", 1 << 10)
    assert summarise(run) == whole
    itl = metrics.METRICS["itl_s"]
    assert whole.latencies["itl_s"] == describe(itl.values(found), itl.groups(found))
    zeros = itl.zero_counts(found)
    assert zeros is not None
    assert distribution(ranked_gaps(found, int(zeros.sum())), 300) == curve


@given(st.lists(st.lists(st.tuples(st.integers(-50, 10**12), st.integers(1, 3)), min_size=1, max_size=6), max_size=8))
def test_sorted_gaps_are_the_gaps_in_ascending_order(chunks_of_requests: list[list[tuple[int, int]]]) -> None:
    """Gaps are sorted as integers. ITL and ICL are the same as if they were sorted in seconds, negative ones too."""
    records = []
    for number, sent_chunks in enumerate(chunks_of_requests):
        instants = [10**9 + instant for instant, _ in sent_chunks]
        records.append(complete(number, instants, tokens=[count for _, count in sent_chunks]))
    found = build_frame(records)
    for name in ("itl_s", "icl_s"):
        metric = metrics.METRICS[name]
        assert sorted_values(metric, found).tolist() == sorted(metric.values(found).tolist())
