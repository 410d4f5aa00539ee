"""The benchmark of the memory of long runs keeps working."""

from __future__ import annotations

import pytest

from benchmarks import soak_memory


def test_it_prints_the_memory_of_each_process(capsys: pytest.CaptureFixture[str]) -> None:
    """At small size it prints a row for the coordinator, the worker and the process that compresses."""
    soak_memory.main(["--sizes", "2000"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 2,000")]
    assert {row[3] for row in rows} == {"coordinator", "worker", "compression"}
    assert all(float(row[4]) > 0 for row in rows)
