"""Runs of single classes of traffic (--alone): what they share with the run with all classes, and what they do not."""

from __future__ import annotations

from pathlib import Path

from loadgen.analysis.run.runfile import Footer
from loadgen.engine.alone_runs import run_alone
from loadgen.plan import Plan


def test_commands_run_only_with_all_classes(tmp_path: Path) -> None:
    """A command of --at, such as one that kills a replica, disturbs the run with all classes and no run before it."""
    tables = [{"name": name, "rate": 5, "n": 10} for name in ("a", "b")]
    plan = Plan(server="vllm", simulated=True, traffic=tables, at=("1s kill 1",))
    plans: list[Plan] = []

    def run_class(alone: Plan, _: Path) -> Footer:
        plans.append(alone)
        return Footer(ended_ns=1, sent=10, complete=10, truncated=0, failed=0, dropped=0)

    assert run_alone(plan, tmp_path / "run", run_class) == {"a": "../run-alone/a", "b": "../run-alone/b"}
    assert [(alone.only_class, alone.at) for alone in plans] == [("a", ()), ("b", ())]
    assert plan.at == ("1s kill 1",)
