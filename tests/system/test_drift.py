"""Drifts of simulated servers: a server that becomes slower misses its bound, and a steady one does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
