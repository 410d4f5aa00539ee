"""Sweeps of a simulated server whose capacity is known by formula."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import sweep


def test_the_formula_is_that_of_the_simulated_server() -> None:
    """In long runs at its capacity the share of late first tokens is the objective's, within four standard errors."""
    case = sweep.CASES["line"]
    rate = f"poisson:{sweep.truth_of(case).capacity:.6f}"
    late = [np.mean(sweep.latencies(case, case.plan(seed, 900.0, rate)) > 0.5) for seed in range(8)]
    assert abs(np.mean(late) - 0.1) < 4 * np.std(late, ddof=1) / 8**0.5


def test_intervals_hold_the_true_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    """Of ten sweeps in virtual time at least nine, in at most eight runs each; a hundred are in the guide."""
    sweep.main(["line", "--seeds", "10"])
    row = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")]
    assert int(row[4].split()[0]) >= 9
    assert row[7].endswith("at most 8")
