"""The benchmark of the client's priority keeps working."""

from __future__ import annotations

import pytest

from benchmarks.priority import PRIORITIES, main


def test_the_priority_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """At tiny size, next to one endless loop per core, it prints a row for each priority."""
    main(["--loops", "1", "--rounds", "1", "--n", "8", "--output-tokens", "4"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == list(PRIORITIES)
    assert all(float(row[3]) > 0 for row in rows)
