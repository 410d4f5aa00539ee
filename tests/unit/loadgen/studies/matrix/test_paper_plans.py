"""The plans that come with the project can be used as they are, but for the names of the hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.studies.matrix import build_matrix, plan_cells, read_matrix_plan, resolve_hosts, run_settings
from loadgen.studies.matrix.estimate import estimate_runs

PAPER = Path(__file__).parents[5] / "examples/paper"
PLANS = sorted(file.name for file in PAPER.glob("*.toml") if file.name != "hosts.toml")


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_whole(name: str) -> None:
    """It has no mistake, its hosts are known, every server is in it, and every model fits the cards that it is given:
    only then can its length be modelled."""
    plan = read_matrix_plan(PAPER / name)
    matrix = build_matrix(plan, Path("matrix"), [])
    assert {start.server.server for start in matrix.starts} == {"vllm", "lightllm", "tgi"}
    assert all(host.platform for host in matrix.hosts.values())
    assert {each.source for each in estimate_runs(matrix, []).values()} == {"modelled"}


def test_the_paper_is_three_servers_on_three_platforms_with_three_models() -> None:
    """27 cells, on hosts that are examples and nobody's."""
    plan = read_matrix_plan(PAPER / "paper.toml")
    assert len(plan_cells(plan)) == 27
    hosts = resolve_hosts(plan)
    assert [host.platform for host in hosts.values()] == ["A800", "RTX4090", "RTX3090"]
    assert all(host.address.startswith("192.0.2.") for host in hosts.values())  # RFC 5737: documentation
    runs = [run_settings(plan, each["name"], server="vllm") for each in plan.workloads]
    assert all((run.n, run.input_tokens) == (1000, 512) for run in runs)
