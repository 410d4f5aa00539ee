"""Classes of traffic: the checks of `[[traffic]]` tables, the plans of the classes, and shares by weight."""

import math
from collections import Counter
from typing import Any

import pytest

from loadgen import traffic
from loadgen.errors import PlanError
from loadgen.plan import Plan

CHAT: dict[str, Any] = {"name": "chat", "rate": 5}


def plan_of(*tables: dict[str, Any], **settings: Any) -> Plan:
    """Return a plan with these classes of traffic, on the simulated server."""
    return Plan(**({"simulated": True, "server": "vllm", "duration_s": 10} | settings | {"traffic": list(tables)}))


def test_a_class_has_the_settings_of_its_table() -> None:
    """A class inherits the settings above the tables, except for the load. Its own settings come first."""
    plan = plan_of(
        CHAT,
        {"name": "burst", "n": 100, "input_tokens": 64, "timeout_s": "5s"},
        {"name": "batch", "concurrency": 4, "model": "coder", "header": "X-Tenant: b"},
        {"name": "late", "rate": 2, "concurrency": 3, "duration_s": 4},
        input_tokens=300,
        output_tokens=20,
        header=["X-Team: a"],
        workers=2,
    )
    classes = {each.name: each.plan for each in traffic.traffic_classes(plan)}
    assert [classes[name].arrivals for name in classes] == ["poisson:5", "burst", "closed:4", "poisson:2"]
    assert [classes[name].duration_s for name in classes] == [10, None, 10, 4]
    assert [classes[name].input_tokens for name in classes] == [300, 64, 300, 300]
    assert [classes[name].header for name in classes] == [("X-Team: a",)] * 2 + [("X-Tenant: b",), ("X-Team: a",)]
    assert classes["late"].concurrency == 3
    assert classes["burst"].timeout_s == 5
    assert {each.workers for each in classes.values()} == {2}
    assert classes["batch"].model == "coder"
    assert len({each.seed for each in classes.values()}) == 4, "equal seeds would give equal prompts"
    again = traffic.traffic_classes(Plan(**plan.to_dict()))
    assert [each.plan.seed for each in again] == [each.seed for each in classes.values()]


def test_objectives_of_a_class_name_it() -> None:
    """The plan has the objectives of all classes. Reading a stored plan again does not repeat them."""
    plan = plan_of({**CHAT, "objectives": ["ttft.p99 < 1s"]}, objectives=["failed <= 0"])
    assert plan.objectives == ("failed <= 0", "chat: ttft.p99 < 1s")
    assert Plan(**plan.to_dict()).objectives == plan.objectives
    assert plan_of({**CHAT, "objectives": "ttft.p99 < 1s"}).objectives == ("chat: ttft.p99 < 1s",)


def test_an_output_length_follows_the_workload_of_the_class(tmp_path: Any) -> None:
    """A class that reads a file has the lengths of the file's answers, although the whole plan has a default."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "x", "max_tokens": 3}\n')
    plan = plan_of({"name": "file", "rate": 1, "workload": f"jsonl:{file}"}, CHAT)
    assert [each.plan.output_tokens for each in traffic.traffic_classes(plan)] == ["answers", 128]


@pytest.mark.parametrize(
    ("tables", "settings", "message"),
    [
        (3, {}, "traffic: must be a list of tables"),
        ([3], {}, "traffic: must be a list of tables"),
        ([{}], {}, "[[traffic]] table 1 has no name"),
        ([{"name": 3}], {}, "[[traffic]] table 1 has the name 3: write name ="),
        ([{"name": "a b", "rate": 1}], {}, "[[traffic]] table 1 has the name 'a b'"),
        ([CHAT, CHAT], {}, "[[traffic]] table 2 has the name 'chat' of another table"),
        ([{**CHAT, "rat": 1}], {}, "[[traffic]] 'chat': rat: unknown setting; did you mean rate?"),
        ([{**CHAT, "timeout": 1}], {}, "[[traffic]] 'chat': timeout: unknown setting; did you mean timeout_s?"),
        ([{**CHAT, "zzz": 1}], {}, "[[traffic]] 'chat': zzz: unknown setting"),
        ([{**CHAT, "url": "http://x"}], {}, "[[traffic]] 'chat': url applies to the whole run; write it above"),
        ([{"name": "a"}], {}, "[[traffic]] 'a': has no load: write rate = 5"),
        ([{"name": "a", "duration_s": 3}], {}, "[[traffic]] 'a': has no load: write rate = 5"),
        ([{"name": "a", "rate": 1, "weight": 1}], {"rate": 2}, "has a weight and its own rate: leave one of them out"),
        ([{"name": "a", "n": 1, "weight": 1}], {"rate": 2}, "has a weight and its own n"),
        ([{"name": "a", "weight": 1}], {}, "has a weight, but the plan has no load to share: write rate = 20"),
        ([{"name": "a", "weight": 0}], {"rate": 2}, "weight 0 is not a number above 0"),
        ([{"name": "a", "weight": True}], {"rate": 2}, "weight True is not a number above 0"),
        ([{"name": "a", "weight": 1}], {"concurrency": 2, "n": 5}, "limit clients that share a load by duration_s"),
        ([CHAT], {"rate": 2}, "no table has a weight, so no class uses arrivals = 'poisson:2' of the whole plan"),
        ([{**CHAT, "duration_s": 3}], {"n": 2, "duration_s": None}, "no table has a weight, so no class uses n = 2"),
        ([CHAT], {"duration_s": None}, "[[traffic]] 'chat': --arrivals poisson:5 would never end"),
        ([{**CHAT, "rate": "x"}], {}, "[[traffic]] 'chat': --rate x: rate 'x' is not a plain decimal number"),
        ([{**CHAT, "objectives": 3}], {}, "[[traffic]] 'chat': objectives 3 is not a list of texts"),
        ([{**CHAT, "goodput": [3]}], {}, "[[traffic]] 'chat': goodput [3] is not a list of texts"),
        ([{**CHAT, "goodput": ["x < 1s"]}], {}, "[[traffic]] 'chat': --goodput 'x < 1s': 'x' is not a latency"),
        ([CHAT], {"objectives": ["rag: ttft.p99 < 1s"]}, "no class of traffic and no model 'rag'; choose chat"),
        ([{"name": f"c{number}", "rate": 1} for number in range(33)], {}, "[[traffic]]: 33 tables, but at most 32"),
    ],
)
def test_wrong_tables_are_refused(tables: Any, settings: dict[str, Any], message: str) -> None:
    """Each message names the table and says what to write."""
    with pytest.raises(PlanError) as error:
        Plan(**({"simulated": True, "duration_s": 10} | settings | {"traffic": tables}))
    assert message in str(error.value)


@pytest.mark.parametrize("key", [key for key in traffic.CLASS_KEYS if key not in ("name", "extra_body")])
def test_every_setting_of_a_class_is_checked(key: str) -> None:
    """A value of a wrong type is refused, and the message names the table and the setting."""
    with pytest.raises(PlanError) as error:
        plan_of({**CHAT, key: {"wrong": 1}})
    line = str(error.value).splitlines()[0]
    assert line.startswith("[[traffic]] 'chat': ")
    word = key.removesuffix("_s")
    assert word.replace("_", "-") in line or word in line


def test_all_mistakes_are_reported_at_once() -> None:
    """The message has one line per mistake in any table."""
    with pytest.raises(PlanError) as error:
        plan_of({**CHAT, "input_tokens": "x", "endpoint": "y"}, {"name": "b", "rate": 1, "extra_body": 3})
    assert [line.split(" ")[1] for line in str(error.value).splitlines()] == ["'chat':", "'chat':", "'b':"]


def test_weights_share_the_load_of_the_plan() -> None:
    """Every due time belongs to exactly one class. The numbers are multinomial, and the seed gives the same split."""
    plan = plan_of({"name": "a", "weight": 70}, {"name": "b", "weight": 30}, CHAT, rate=50)
    classes = traffic.traffic_classes(plan)
    assert [each.share for each in classes] == [0.7, 0.3, 0]
    due_ns = list(range(2000))
    parts = traffic.shared_due_times(classes, due_ns, 4)
    assert sorted([*parts["a"], *parts["b"]]) == due_ns
    assert parts == traffic.shared_due_times(classes, due_ns, 4) != traffic.shared_due_times(classes, due_ns, 5)
    half_width = 2.576 * math.sqrt(2000 * 0.7 * 0.3)
    counts = [len(traffic.shared_due_times(classes, due_ns, seed)["a"]) for seed in range(20)]
    assert sum(abs(count - 1400) > half_width for count in counts) <= 1
    load = traffic.scaled_load(plan.arrival_process.facts, 0.3)
    assert (load.rate_per_s, load.cv, load.law) == (15, 1, "gamma")


@pytest.mark.parametrize(("clients", "numbers"), [(10, [7, 3]), (4, [3, 1]), (5, [4, 1]), (2, [1, 1])])
def test_weights_divide_clients(clients: int, numbers: list[int]) -> None:
    """The clients of a closed loop are divided in proportion, and none is lost."""
    plan = plan_of({"name": "a", "weight": 70}, {"name": "b", "weight": 30}, concurrency=clients)
    classes = traffic.with_shared_clients(traffic.traffic_classes(plan), clients)
    assert [each.plan.arrival_process.facts.clients for each in classes] == numbers


def test_a_class_without_clients_is_refused() -> None:
    """A weight that gives no client is a mistake, because the class would send nothing."""
    plan = plan_of({"name": "a", "weight": 99}, {"name": "b", "weight": 1}, concurrency=3)
    with pytest.raises(PlanError, match="its weight gives it none of the 3 clients"):
        traffic.with_shared_clients(traffic.traffic_classes(plan), 3)


def test_secrets_of_a_class_are_not_stored() -> None:
    """Headers and body fields with secrets are redacted in the stored plan."""
    table = {**CHAT, "header": ["Authorization: Bearer abcdef123456"], "extra_body": {"api_key": "sk-abcdef123456"}}
    stored = str(plan_of(table).to_dict())
    assert "abcdef123456" not in stored
    assert Counter(table) == Counter(plan_of(table).traffic[0])
