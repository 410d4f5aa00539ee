"""The benchmark of runs without a fault keeps working."""

from __future__ import annotations

import pytest

from benchmarks.clean_runs import main


def test_clean_runs_raise_no_false_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """At tiny size, it makes its runs and prints the totals."""
    assert main(["--runs", "2"]) == 0
    assert "2 runs, 0 with a false warning: {}" in capsys.readouterr().out
