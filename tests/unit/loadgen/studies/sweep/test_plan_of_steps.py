"""The plan that all steps of a sweep share, and the plans of single steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.errors import PlanError
from loadgen.studies.sweep.measure import new_sweep, parse_targets, plan_of_steps


def test_a_corrected_url_is_reported() -> None:
    """A sweep prints the same line as a run."""
    lines: list[str] = []
    targets = parse_targets(None, "1,2", None, "rate")
    url = "http://127.0.0.1:9/v1/chat/completions"
    plan = plan_of_steps({"server": "vllm", "url": url}, targets, lines.append)
    assert (plan.url, plan.endpoint) == ("http://127.0.0.1:9", "chat")
    assert lines == [f"--url {url}: using http://127.0.0.1:9, endpoint chat"]


def test_a_low_concurrency_uses_fewer_workers(tmp_path: Path) -> None:
    """Each worker needs at least one request in flight."""
    targets = parse_targets(None, None, "1,2,8", "concurrency")
    plan = plan_of_steps({"server": "vllm", "simulated": True, "workers": 4}, targets)
    sweep = new_sweep(plan, tmp_path, targets, None, adaptive=False, speed=1.0)
    assert [sweep.step(1, load).workers for load in (1, 2, 8)] == [1, 2, 4]


def test_a_sweep_runs_no_commands() -> None:
    """Every step would run them again, and the steps before the command of --at would differ from those after it."""
    targets = parse_targets(None, "1,2", None, "rate")
    with pytest.raises(PlanError, match="--at: a sweep runs no commands"):
        plan_of_steps({"server": "vllm", "simulated": True, "at": ("10s kill 1",)}, targets)
