"""Intervals of the rates of a run with a window: what they hold, and when there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.analysis import stats
from loadgen.analysis.frame import Floats
from loadgen.analysis.run.record import Record
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import burst, complete, header, run_of, summarise, text_of

RATES = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "input_tokens_per_s")
Draw = Callable[[np.random.Generator, int], Floats]


def asked_at(due_ms: Sequence[float], stay_ms: float) -> list[Record]:
    """Requests sent when due, with a token half-way and one at the end of their stay."""
    return [
        complete(
            number,
            [round((due + stay_ms / 2) * MS), round((due + stay_ms) * MS)],
            due_ns=round(due * MS),
            sent_ns=round(due * MS),
            sent_end_ns=round(due * MS),
            end_ns=round((due + stay_ms) * MS),
        )
        for number, due in enumerate(due_ms)
    ]


def summary_of(folder: Path, records: Sequence[Record], arrivals: str, **plan: object) -> dict[str, Any]:
    return summarise(run_of(folder, records, plan=header(len(records)).plan | {"arrivals": arrivals} | plan))


def poisson(folder: Path, *, seed: int = 1, stay_ms: float = 300) -> dict[str, Any]:
    """Requests that come 20 times a second in the mean, for 50 s."""
    due_ms = np.random.default_rng(seed).exponential(50, 1000).cumsum().tolist()
    return summary_of(folder, asked_at(due_ms, stay_ms), "poisson:20")


@pytest.mark.parametrize("count", [10, 30])
@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        (lambda random, count: random.normal(10, 1, count), 10.0),
        (lambda random, count: random.gamma(2, 1, count), 2.0),
        (lambda random, count: random.poisson(3, count).astype(float), 3.0),
    ],
    ids=["normal", "gamma", "poisson"],
)
def test_the_interval_holds_the_truth_as_often_as_it_says(draw: Draw, mean: float, count: int) -> None:
    """95% of 200 samples of rates, lopsided ones too; fewer than 90% would be chance less than once in a hundred."""
    random = np.random.default_rng(5)
    found = [stats.rate_interval(draw(random, count)) for _ in range(200)]
    assert sum(ends is not None and ends[0] <= mean <= ends[1] for ends in found) >= 180


def test_an_open_loop_knows_its_rates(tmp_path: Path) -> None:
    """Each figure lies in its interval, which is about as wide as Poisson's chance makes it, and is always the same."""
    found = poisson(tmp_path / "run")
    throughput = found["throughput"]
    assert set(throughput["ci95"]) == set(RATES)
    assert throughput["ci95_none"] is None
    for rate in RATES:
        low, high = throughput["ci95"][rate]
        assert low < throughput[rate] < high
    low, high = throughput["ci95"]["requests_per_s"]
    length_s = found["window"]["to_s"] - found["window"]["from_s"]
    expected = 2 * 1.96 * (throughput["requests_per_s"] / length_s) ** 0.5
    assert 0.5 * expected < high - low < 2 * expected
    assert poisson(tmp_path / "again")["throughput"] == throughput
    assert "95% CI " in text_of(found)


def test_a_burst_leaves_it_to_repeats(tmp_path: Path) -> None:
    """It has no parts that are alike: no interval of its rates, and a line below the latencies that says what tells."""
    found = summarise(run_of(tmp_path / "run", burst(40, 8)))
    assert found["throughput"]["ci95"] == {}
    assert "repeats" in found["throughput"]["ci95_none"]
    assert "not independent" in found["intervals"]["note"]
    assert "only --repeats shows" in text_of(found)
    assert "only --repeats shows" not in text_of(poisson(tmp_path / "open"))


def test_a_window_must_have_parts_to_tell(tmp_path: Path) -> None:
    """A run of a few stays, a load that changes by plan and one without any chance have none, and say why."""
    assert "shorter" in poisson(tmp_path / "short", stay_ms=10_000)["throughput"]["ci95_none"]
    even = asked_at([place * 10 for place in range(1000)], 100)
    assert (
        "no test showed a steady state"
        in summary_of(tmp_path / "ramp", even, "ramp:1..100/10s")["throughput"]["ci95_none"]
    )
    assert stats.rate_interval(np.full(12, 3.0)) is None


def test_batches_that_are_nearly_all_equal_have_no_interval() -> None:
    """Samples drawn from them have no spread but rounding, which must not become an interval of any width."""
    assert stats.rate_interval(np.array([7.23] * 14 + [8.0])) is None


def test_nothing_sent_is_no_rate(tmp_path: Path) -> None:
    """A run without a record still has its summary."""
    assert summarise(run_of(tmp_path / "run", []))["throughput"]["ci95"] == {}
