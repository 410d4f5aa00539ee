"""Sweeps of simulated servers whose capacity is known by formula or from long runs."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import sweep


def test_the_formula_is_that_of_the_simulated_server() -> None:
    """In long runs at its capacity the share of late first tokens is the objective's, within four standard errors."""
    case = sweep.CASES["line"]
    rate = f"poisson:{sweep.true_capacity(case).capacity:.6f}"
    late = [np.mean(sweep.latencies(case, case.plan(seed, 900.0, rate)) > 0.5) for seed in range(8)]
    assert abs(np.mean(late) - 0.1) < 4 * np.std(late, ddof=1) / 8**0.5


def test_intervals_hold_the_true_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    """Of six sweeps with an objective in virtual time at least five; fifty are in the guide."""
    sweep.main(["line", "--seeds", "6"])
    row = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")]
    assert int(row[4].split()[0]) >= 5


@pytest.mark.parametrize(
    ("name", "capacity", "max_s"), [("fast-8b", 42.9, 180.0), ("fast-1b", 154.9, 300.0), ("slow-70b", 7.7, 600.0)]
)
def test_sweeps_without_objectives_are_narrow_and_short(name: str, capacity: float, max_s: float) -> None:
    """Of four sweeps at least three hold the capacity, which long runs gave. All are at most 10% wide up and down, and
    as short as promised in the time of the server."""
    outcomes = [sweep.run_sweep(sweep.CASES[name], seed) for seed in range(1, 5)]
    assert sum(outcome.low <= capacity <= outcome.high for outcome in outcomes) >= 3
    for outcome in outcomes:
        assert outcome.high - outcome.low <= 0.2 * outcome.capacity
        assert outcome.run_s <= max_s
