"""Drifts and changes: a simulated server that becomes slower is found, and a steady one raises no warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.analysis import run_course
from loadgen.analysis.steady_window import load_run
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import burst
from tests.support.simulated import running

pytestmark = pytest.mark.alone  # a busy machine would add a drift of its own

LOAD = ("--rate", "40", "--duration", "12s", "--output-tokens", "4", "--input-tokens", "16")


@pytest.mark.parametrize(
    ("slower_per_hour", "objective", "verdicts"),
    [(900.0, "ttft.p50 drift < 2000%/h", {"fail"}), (0.0, "ttft.p50 drift < 40000%/h", {"pass", "inconclusive"})],
)
def test_a_server_that_becomes_slower_misses_its_bound(
    slower_per_hour: float, objective: str, verdicts: set[str], tmp_path: Path
) -> None:
    """A TTFT that grows fourfold in twelve seconds misses the bound on its drift. One that stays does not."""
    config = SimulatedConfig(server="vllm", ttft_s=0.05, itl_s=0.002, slower_per_hour=slower_per_hour)
    with running(config) as simulated:
        code, _, err = burst(tmp_path, "--url", simulated.url, *LOAD, "--assert", objective, command="run")
    assert code in ((4,) if "fail" in verdicts else (0, 5)), err
    [result] = json.loads((tmp_path / "run" / "summary.json").read_text())["objectives"]
    assert result["verdict"] in verdicts
    assert result["unit"] == "share per hour"
    assert result["interval"][0] <= result["measured"] <= result["interval"][1]


@pytest.mark.parametrize("slow_after_s", [7.0, None])
def test_a_change_of_the_server_is_found(
    slow_after_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TTFT that doubles in mid-run is reported with its time and size. A server that stays as it is has no change."""
    monkeypatch.setattr(run_course, "MIN_WINDOW_S", 0.5)  # a run of 14 s instead of two minutes
    config = SimulatedConfig(server="vllm", ttft_s=0.05, itl_s=0.002, slow_after_s=slow_after_s, slow_factor=2)
    with running(config) as simulated:
        load = ("--rate", "40", "--duration", "14s", "--output-tokens", "4", "--input-tokens", "16")
        code, _, err = burst(tmp_path, "--url", simulated.url, *load, command="run")
    assert code in (0, 5), err
    course = run_course.describe_course(*load_run(tmp_path / "run"))
    changes = [change for change in (course.changes if course else []) if change.figure == "ttft.p50"]
    if slow_after_s is None:
        assert changes == []
        return
    [change] = changes
    assert abs(change.at_s - slow_after_s) <= 1
    assert change.after / change.before == pytest.approx(2, rel=0.1)
