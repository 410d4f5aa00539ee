"""The distributions of a run are the same with and without a second process for the gaps."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from loadgen.analysis import itl_distribution, metrics
from loadgen.analysis.frame import Frame, build_frame
from loadgen.analysis.itl_distribution import (
    NO_FIGURES,
    Distributions,
    GapFigures,
    describe_metrics,
    describe_sorted_metrics,
    start_gap_figures,
    with_gap_metrics,
)
from loadgen.analysis.metrics import METRICS
from tests.support.runs import complete

MS = 1_000_000
LATENCIES = [metric for metric in METRICS.values() if metric.per != "run"]


@pytest.fixture
def frame(monkeypatch: pytest.MonkeyPatch) -> Frame:
    """A run whose gaps count as too many to sort. Some chunks hold two tokens."""
    monkeypatch.setattr(metrics, "MAX_SORTED_GAPS", 0)
    times = [[MS * (number % 7 + 2 * index**2) for index in range(1, 6)] for number in range(40)]
    tokens = [[1, 1, 1 + number % 2, 1, 1] for number in range(40)]
    return build_frame(complete(number, times[number], tokens=tokens[number]) for number in range(40))


def described(frame: Frame, gap_figures: Callable[[], GapFigures]) -> Distributions:
    return with_gap_metrics(describe_sorted_metrics(LATENCIES, frame), LATENCIES, frame, gap_figures)


def test_a_second_process_gives_the_same_distributions(frame: Frame, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process describes the metrics of gaps, and all metrics keep their order."""
    alone = describe_metrics(LATENCIES, frame)
    monkeypatch.setattr(itl_distribution, "can_fork", lambda: True)
    with start_gap_figures(LATENCIES, frame) as gap_figures:
        monkeypatch.setattr(itl_distribution, "describe_gaps", None)  # this process must not describe them
        together = described(frame, gap_figures)
    assert together == alone
    assert list(together) == [metric.name for metric in LATENCIES]


def test_a_failed_second_process_is_replaced(frame: Frame, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second process fails, this process describes the gaps."""
    alone, here = describe_metrics(LATENCIES, frame), os.getpid()
    describe = itl_distribution.describe_gap_metrics

    def fails_elsewhere(*arguments: object) -> GapFigures:
        if os.getpid() != here:
            raise MemoryError
        return describe(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(itl_distribution, "can_fork", lambda: True)
    monkeypatch.setattr(itl_distribution, "describe_gap_metrics", fails_elsewhere)
    with start_gap_figures(LATENCIES, frame) as gap_figures:
        assert gap_figures() is NO_FIGURES
        assert described(frame, gap_figures) == alone


@pytest.mark.parametrize(("forks", "limit"), [(False, 0), (True, 1 << 30)])
def test_small_runs_and_single_cores_need_no_second_process(
    frame: Frame, monkeypatch: pytest.MonkeyPatch, forks: bool, limit: int
) -> None:
    """Without a second core, or with few gaps, there is no second process, and nothing is known in advance."""
    monkeypatch.setattr(itl_distribution, "can_fork", lambda: forks)
    monkeypatch.setattr(itl_distribution, "ChildProcess", None)
    monkeypatch.setattr(metrics, "MAX_SORTED_GAPS", limit)
    with start_gap_figures(LATENCIES, frame) as gap_figures:
        assert gap_figures() is NO_FIGURES
