"""The search for the largest rate that a server keeps up with."""

from __future__ import annotations

import pytest

from loadgen.analysis.sweep.capacity_search import LoadObservation
from loadgen.analysis.sweep.edge_search import EdgeSearch

CAPACITY = 40.0


def search(estimate: float, unclear: float, *, time_left: bool = False) -> tuple[EdgeSearch, list[LoadObservation]]:
    """Search with an estimate of the pilot. Loads nearer than `unclear` to the capacity have no clear result."""
    edges = EdgeSearch(estimate)
    runs: list[LoadObservation] = []
    while (load := edges.next_load(runs, time_left=time_left)) is not None and len(runs) < 20:
        over = 0.99 if load > CAPACITY else 0.01
        runs.append(LoadObservation(load, 0.5 if abs(load / CAPACITY - 1) < unclear else over))
    return edges, runs


@pytest.mark.parametrize("unclear", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("error", [0.5, 0.8, 0.9, 0.97, 1.0, 1.04, 1.1, 1.25, 2.0])
def test_the_interval_contains_the_capacity(error: float, unclear: float) -> None:
    """A pilot that is right needs two runs, one that is wrong a few more."""
    edges, runs = search(error * CAPACITY, unclear)
    found = edges.capacity(runs)
    assert found.state == "found"
    assert found.high is not None
    assert found.capacity is not None
    assert found.low <= CAPACITY * 1.005
    assert found.high >= CAPACITY * 0.995
    assert (found.high - found.low) / 2 <= 0.1 * found.capacity
    if error in {0.97, 1.0, 1.04}:
        assert len(runs) <= 4


def test_time_that_is_left_narrows_the_interval() -> None:
    """Runs between the estimate and the ends, but not next to the estimate."""
    wide, wide_runs = search(CAPACITY, 0.0)
    narrow, narrow_runs = search(CAPACITY, 0.0, time_left=True)
    assert len(narrow_runs) > len(wide_runs)
    first, second = wide.capacity(wide_runs), narrow.capacity(narrow_runs)
    assert first.high is not None
    assert second.high is not None
    assert second.high - second.low < first.high - first.low
    assert second.low <= CAPACITY <= second.high


def test_without_a_clear_run_on_both_sides_nothing_is_found() -> None:
    """The pilot alone is not enough."""
    edges = EdgeSearch(CAPACITY)
    assert edges.capacity([]).state == "open"
    assert edges.capacity([LoadObservation(37.0, 0.01)]).state == "open"
    assert edges.capacity([LoadObservation(37.0, 0.01), LoadObservation(44.0, 0.99)]).state == "found"
