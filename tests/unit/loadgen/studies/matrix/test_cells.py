"""Which cells there are, in which order they are measured, and which options each start gets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loadgen.studies.matrix import MatrixPlan, build_matrix, journal, plan_cells, plan_starts, skipped_cells


def plan(**changes: Any) -> MatrixPlan:
    """Three servers on two hosts with two models under two workloads."""
    values: dict[str, Any] = {
        "name": "x",
        "servers": ["vllm", "lightllm", "tgi"],
        "hosts": [{"name": "a", "platform": "A"}, {"name": "b", "platform": "B"}],
        "models": ["7b", "70b"],
        "workloads": [{"name": "burst", "n": 10}, {"name": "long", "n": 5}],
        "repeats": 3,
        "starts": 2,
        "seed": 5,
    }
    return MatrixPlan(**values | changes)


def test_every_cell_is_measured_as_often_as_asked() -> None:
    """Each repeat of each cell once, numbered in the order in which they come."""
    found = [repeat for start in plan_starts(plan()) for repeat in start.repeats]
    numbers: dict[object, list[int]] = {}
    for repeat in found:
        numbers.setdefault(repeat.cell, []).append(repeat.number)
    assert set(numbers) == set(plan_cells(plan()))
    assert len(numbers) == 3 * 2 * 2 * 2
    assert all(each == [1, 2, 3] for each in numbers.values())


def test_a_start_serves_all_workloads_of_one_server() -> None:
    """Cells that share a server process share its start: one start per round, server, host and model."""
    found = plan_starts(plan())
    assert len(found) == 2 * 3 * 2 * 2
    for start in found:
        assert {repeat.cell.workload for repeat in start.repeats} == {"burst", "long"}
        assert {(repeat.cell.server, repeat.cell.host, repeat.cell.model) for repeat in start.repeats} == {
            (start.server.name, start.host.name, start.model.name)
        }


def test_rounds_hold_every_server_once() -> None:
    """Drift over time falls on all alike: no server is measured a second time before all were measured once."""
    found = plan_starts(plan())
    for each in (1, 2):
        seen = Counter((start.server.name, start.host.name, start.model.name) for start in found if start.round == each)
        assert set(seen.values()) == {1}
        assert len(seen) == 12
    assert [start.round for start in found] == sorted(start.round for start in found)
    assert [start.number for start in found] == list(range(1, len(found) + 1))


def test_the_order_is_random_and_repeatable() -> None:
    """The same seed gives the same order, another seed another; rounds differ from each other and from the plan's."""
    assert plan_starts(plan()) == plan_starts(plan())
    assert plan_starts(plan()) != plan_starts(plan(seed=6))
    orders = [[(s.server.name, s.host.name) for s in plan_starts(plan()) if s.round == each] for each in (1, 2)]
    assert orders[0] != orders[1]
    within = {tuple(repeat.cell.workload for repeat in start.repeats) for start in plan_starts(plan(repeats=6))}
    assert len(within) > 2


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_with_equal_work_the_leader_comes_first_in_each_round(rounds: int) -> None:
    """The others need the lengths that it produced."""
    found = plan_starts(plan(equal_work="tgi", starts=rounds))
    for each in range(1, rounds + 1):
        names = [start.server.name for start in found if start.round == each]
        assert names[:4] == ["tgi"] * 4
        assert "tgi" not in names[4:]


def test_the_more_particular_option_wins() -> None:
    """Plan, server, host, model, case: in this order, and only for the cells that a case names."""
    servers = [{"name": "vllm", "options": {"b": 2, "c": 2}}, "tgi"]
    asked = plan(
        options={"a": 1, "b": 1, "c": 1, "d": 1},
        servers=servers,
        models=[{"name": "7b", "options": {"c": 3}}, "70b"],
        cases=[{"model": "7b", "host": "a", "options": {"d": 4}}],
        launch="running",
    )
    found = {(s.server.name, s.host.name, s.model.name): s.options for s in plan_starts(asked)}
    assert found["vllm", "a", "7b"] == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert found["vllm", "b", "70b"] == {"a": 1, "b": 2, "c": 2, "d": 1}
    assert found["tgi", "a", "7b"] == {"a": 1, "b": 1, "c": 3, "d": 4}


def test_a_simulated_server_models_the_card_and_the_model_of_the_plan() -> None:
    """What the plan says of hosts and models is enough; options win over it."""
    asked = plan(
        launch="simulated",
        hosts=[{"name": "a", "platform": "A", "gpu": "RTX 4090"}],
        models=[{"name": "7b", "shape": "Llama-2-7B"}],
        options={"clock": "script"},
    )
    assert plan_starts(asked)[0].options == {"clock": "script", "gpu": "RTX 4090", "model_shape": "Llama-2-7B"}


def test_what_is_skipped_is_not_measured_and_said() -> None:
    """With its reason; the other cells stay."""
    asked = plan(cases=[{"host": "b", "model": "70b", "skip": "does not fit"}])
    assert len(plan_cells(asked)) == 24 - 6
    assert skipped_cells(asked) == {f"{server} on b, 70b": "does not fit" for server in ("vllm", "lightllm", "tgi")}
    assert not any((s.host.name, s.model.name) == ("b", "70b") for s in plan_starts(asked))


def test_repeats_of_a_workload_have_the_same_seed_in_every_cell(tmp_path: Path) -> None:
    """Repeats and workloads have different seeds, because a server measures several of them after one start."""
    matrix = build_matrix(plan(), tmp_path, [])
    seeds: dict[tuple[str, int], set[int]] = {}
    for repeat in matrix.repeats:
        settings = matrix.seed_settings(repeat)
        assert settings["seed_choice"] == "stated"
        seeds.setdefault((repeat.cell.workload, repeat.number), set()).add(settings["seed"])
    assert seeds == {
        **{("burst", number): {4 + number} for number in (1, 2, 3)},
        **{("long", number): {1_004 + number} for number in (1, 2, 3)},
    }


@pytest.mark.parametrize(("launch", "choice"), [("simulated", "fixed"), ("process", "random"), ("running", "random")])
def test_real_servers_get_a_random_seed(launch: str, choice: str, tmp_path: Path) -> None:
    """A resumed matrix keeps the seed that its journal records. The order of the runs is the same for every seed."""
    values = plan(launch=launch).model_dump(exclude={"seed"}, exclude_unset=True)
    first = build_matrix(MatrixPlan(**values), tmp_path / "first", [])
    assert first.seed_choice == choice
    assert (first.seed == 0) == (choice == "fixed")
    with journal(first.folder, first.journal_plan, resume=False):
        pass
    resumed = build_matrix(MatrixPlan(**values), first.folder, [])
    assert (resumed.seed, resumed.seed_choice) == (first.seed, choice)
    with journal(resumed.folder, resumed.journal_plan, resume=True):
        pass
    other = build_matrix(MatrixPlan(**values), tmp_path / "other", [])
    assert other.starts == first.starts
    assert (other.seed == first.seed) == (choice == "fixed")
