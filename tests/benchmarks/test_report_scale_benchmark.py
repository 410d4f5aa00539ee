"""The benchmark of reading and reporting keeps working, and its made-up runs are runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import make_run, report_scale
from loadgen.analysis.run.runfile import read
from tests.support.runs import summarise


def test_the_benchmark_prints_a_row_per_size(capsys: pytest.CaptureFixture[str]) -> None:
    """At tiny size: time, cost per request, peak memory and the size of the page."""
    report_scale.main(["--sizes", "40", "--chunks", "4"])
    row = capsys.readouterr().out.splitlines()[-1].split("|")
    assert row[1].strip() == "40"
    assert all(float(cell.split()[0].replace(",", "")) > 0 for cell in (row[3], row[4], row[6], row[7]))


def test_a_made_up_run_is_whole_and_the_same_each_time(tmp_path: Path) -> None:
    """The same seed gives the same bytes, another seed others; every request is there, with every kind of ending."""
    files = [make_run.make_run(tmp_path / name, 3000, 4, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    contents = [file.read_bytes() for file in files]
    assert contents[0] == contents[1] != contents[2]
    requests = summarise(read(tmp_path / "a"))["requests"]
    assert (requests["sent"], requests["unrecorded"]) == (3000, 0)
    assert min(requests[state] for state in ("complete", "failed", "truncated")) > 0


def test_a_made_up_load_is_what_it_is_called(tmp_path: Path) -> None:
    """Its gaps pass the check of the arrivals that its plan names, and it is steady."""
    make_run.main([str(tmp_path / "run"), "--n", "4000", "--chunks", "8"])
    summary = summarise(read(tmp_path / "run"))
    assert summary["delivery"]["ks"]["due"]["p_value"] > 0.01
    assert summary["window"]["reason"].endswith("in flight")
