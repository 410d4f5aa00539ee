"""The decoding benchmark keeps working."""

from __future__ import annotations

import pytest

from benchmarks.decode import main


def test_the_decoding_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """At tiny size it prints one line per dialect it measures, each with three costs above zero."""
    main(["--tiny"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert {row[0] for row in rows} >= {"vllm/completions", "tgi/generate", "lightllm/generate"}
    assert all(float(cost) > 0 for row in rows for cost in row[1:])
