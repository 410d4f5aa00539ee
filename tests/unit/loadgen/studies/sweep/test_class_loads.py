"""The loads of classes of traffic in the steps of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen.engine.prepare import build_schedule
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.studies.sweep.class_loads import class_loads, describe_load, divided_clients, with_total_load
from loadgen.studies.sweep.measure import class_settings, new_sweep, parse_targets, plan_of_steps
from loadgen.traffic import traffic_classes

TABLES: list[dict[str, Any]] = [
    {"name": "chat", "weight": 3},
    {"name": "search", "weight": 1},
    {"name": "bursts", "arrivals": "gamma:6,cv=2", "concurrency": 50},
    {"name": "batch", "concurrency": 4},
    {"name": "nightly", "arrivals": "closed:2,think=1s"},
]


def plan_with(*tables: dict[str, Any], **settings: Any) -> Plan:
    """Return a plan with these classes of traffic."""
    return Plan(server="vllm", duration_s=60.0, traffic=list(tables), **settings)


def loads_of(plan: Plan) -> dict[str, str]:
    """Return the arrivals and the limit of each class of a plan, after the checks of the tables."""
    checked = Plan(**plan.to_dict() | {"seed_choice": "stated"})
    return {
        part.name: f"{part.plan.arrivals} {part.plan.concurrency or ''}".strip() for part in traffic_classes(checked)
    }


def test_rates_are_multiplied_and_the_mix_stays() -> None:
    """Shared and own rates grow by one factor, with the law of their arrivals. Closed loops keep their clients."""
    plan = plan_with(*TABLES, rate=4)
    assert class_loads(plan, "rate") == {"chat": 3, "search": 1, "bursts": 6}
    assert loads_of(with_total_load(plan, "rate", 25)) == {
        "chat": "poisson:10", "search": "poisson:10", "bursts": "gamma:15,cv=2 50",
        "batch": "closed:4", "nightly": "closed:2,think=1s",
    }  # fmt: skip
    assert describe_load(plan, "rate") == (
        "the load of the plan is 10 requests/s: chat 30%, search 10%, bursts 60%; batch stays at closed:4; "
        "nightly stays at closed:2,think=1s"
    )


def test_clients_are_divided_in_proportion() -> None:
    """A sweep over the concurrency leaves rates alone. Think times stay, and no class is without a client."""
    plan = plan_with(*TABLES[2:])
    assert class_loads(plan, "concurrency") == {"batch": 4, "nightly": 2}
    assert loads_of(with_total_load(plan, "concurrency", 9)) == {
        "bursts": "gamma:6,cv=2 50", "batch": "closed:6", "nightly": "closed:3,think=1s",
    }  # fmt: skip
    shared = plan_with({"name": "a", "weight": 9}, {"name": "b", "weight": 1}, concurrency=20)
    assert class_loads(shared, "concurrency") == {"a": 18, "b": 2}
    assert loads_of(with_total_load(shared, "concurrency", 4)) == {"a": "closed:3", "b": "closed:1"}


@pytest.mark.parametrize(("clients", "workers"), [(2, 1), (7, 2), (12, 4), (60, 4)])
def test_no_worker_is_without_a_client(clients: int, workers: int) -> None:
    """A step with few clients has fewer workers, as many as the smallest class has clients."""
    plan = plan_with({"name": "a", "concurrency": 8}, {"name": "b", "concurrency": 4}, workers=4)
    step = with_total_load(plan, "concurrency", clients)
    assert step.workers == workers
    for traffic_class in traffic_classes(step):
        assert build_schedule(traffic_class.plan).clients >= workers


@pytest.mark.parametrize("clients", range(3, 40))
def test_no_client_is_lost(clients: int) -> None:
    """The numbers add up, and each class has at least one client."""
    numbers = divided_clients({"a": 100.0, "b": 1.0, "c": 0.5}, clients)
    assert sum(numbers.values()) == clients
    assert min(numbers.values()) == 1


def test_the_steps_of_a_sweep_have_the_scaled_loads(tmp_path: Path) -> None:
    """The search begins with the load of the plan."""
    settings = {"server": "vllm", "simulated": True, "rate": 4, "traffic": TABLES}
    targets = parse_targets(["chat: ttft.p99 < 1s", "e2e.p50 < 9s"], None, None, "rate", parts=True)
    lines: list[str] = []
    plan = plan_of_steps(settings, targets, lines.append)
    assert lines[0].startswith("the load of the plan is 10 requests/s")
    assert plan.duration_s == 60
    sweep = new_sweep(plan, tmp_path, targets, None)
    step = sweep.step(3, 20.0, 30.0)
    assert (step.seed, step.duration_s, step.over_limit) == (plan.seed + 2, 30, True)
    assert loads_of(step)["chat"] == "poisson:8"
    assert class_settings(plan, "rate", None) == {"plan_load": 10, "start": 10}
    assert class_settings(plan, "rate", 2.5) == {"plan_load": 10, "start": 2.5}
    assert class_settings(plan, "concurrency", None) == {"plan_load": 6, "start": 6, "lowest": 2}
    assert [bound.text for bound in targets.bounds] == ["e2e < 9s"]
    assert targets.class_bounds("chat") == ["ttft < 1s"]


@pytest.mark.parametrize(
    ("tables", "objectives", "rates", "over", "message"),
    [
        (TABLES[2:], None, None, "rate", "a sweep of classes of traffic needs an objective"),
        (TABLES[2:], ["chat: ttft.p99 < 1s"], None, "rate", "the plan has no class of traffic 'chat'"),
        (TABLES[3:], ["ttft.p99 < 1s"], None, "rate", "no class of traffic has a rate"),
        (TABLES[2:3], ["ttft.p99 < 1s"], None, "concurrency", "no class of traffic has a concurrency"),
    ],
)  # fmt: skip
def test_mistakes_say_what_to_do(
    tables: list[dict[str, Any]], objectives: list[str] | None, rates: str | None, over: Any, message: str
) -> None:
    """Each mistake is reported before the first step."""
    targets = parse_targets(objectives, rates, None, over, parts=True)
    with pytest.raises(PlanError, match=message) as error:
        plan_of_steps({"server": "vllm", "simulated": True, "traffic": tables}, targets)
    assert error.value.hint


def test_too_few_clients_are_refused() -> None:
    """A list of loads cannot begin below one client for each class."""
    targets = parse_targets(None, None, "1,2,4", "concurrency", parts=True)
    with pytest.raises(PlanError, match="--concurrency 1: 2 classes need at least 2 clients"):
        plan_of_steps({"server": "vllm", "simulated": True, "traffic": TABLES[2:]}, targets)
