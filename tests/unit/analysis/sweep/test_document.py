"""What is said of sweeps: of servers whose GPUs are known, and of others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadgen.analysis.prices import format_price
from loadgen.analysis.report.page import render
from loadgen.analysis.report.terminal import render as printed
from loadgen.analysis.sweep import SweepResult, throughput_field
from loadgen.analysis.sweep.document import capacity_sentence, ended_sentence, frontier_document, terminal_document

RECORDED = Path(__file__).parents[4] / "docs/results/vllm-cpu-sweep/sweep.json"


@pytest.fixture
def without() -> SweepResult:
    """A server on a CPU, as it was measured."""
    return msgspec.json.decode(RECORDED.read_bytes(), type=SweepResult)


@pytest.fixture
def with_two(without: SweepResult) -> SweepResult:
    """The same with two GPUs."""
    steps = [
        msgspec.structs.replace(step, output_tokens_per_s_per_gpu=(step.output_tokens_per_s or 0) / 2)
        for step in without.steps
    ]
    return msgspec.structs.replace(without, gpus=2, steps=steps)


def page(**sweeps: SweepResult) -> str:
    return render(frontier_document(sweeps, lambda _found, folder: folder))


def test_nothing_is_per_gpu_where_nobody_knows_how_many_there_are(without: SweepResult, with_two: SweepResult) -> None:
    """Not in the terminal, not on the page, also beside a server whose GPUs are known; the page says what it shows."""
    assert without.gpus is None
    assert "per GPU" not in printed(terminal_document(without))
    assert "Throughput" in printed(terminal_document(without))
    assert "tokens/s per GPU" in printed(terminal_document(with_two))
    for text in (page(one=without), page(one=without, two=with_two)):
        assert "tokens/s per GPU" not in text
        assert "those of whole servers" in text
    text = page(two=with_two)
    assert "tokens/s per GPU" in text
    assert "those of whole servers" not in text


def test_whole_servers_are_compared_with_whole_servers(without: SweepResult, with_two: SweepResult) -> None:
    """Both have the same throughput, so each point lies on the other's."""
    rate = throughput_field([without, with_two])
    assert len({getattr(step, rate) for each in (without, with_two) for step in each.steps}) == len(without.steps)
    joined = frontier_document({"one": without, "two": with_two}, lambda _found, folder: folder).data["runs"]
    rates = [[step["rate"] for step in run["steps"]] for run in joined]
    assert rates[0] == rates[1]
    assert None not in rates[0]


def test_a_price_is_shown_with_its_currency(with_two: SweepResult) -> None:
    """In the terminal, on the tiles and in the tables; a price without a currency stays a number."""
    steps = [msgspec.structs.replace(step, cost_per_million_tokens=0.2591) for step in with_two.steps]
    for currency, cost, price in (("$", "$0.259 per", "$2.50 per"), ("EUR", "0.259 EUR per", "2.50 EUR per")):
        priced = msgspec.structs.replace(with_two, gpu_hour_cost=2.5, currency=currency, steps=steps)
        text = " ".join(printed(terminal_document(priced)).split())
        assert cost in text
        assert price in text
        assert format_price(0.2591, currency) in page(one=priced, two=priced)
    assert " 0.259 per million tokens" in " ".join(
        printed(terminal_document(msgspec.structs.replace(priced, currency=""))).split()
    )


def test_the_star_is_a_load_within_the_capacity(without: SweepResult) -> None:
    """Also if the knee, the most efficient load, misses the objectives. The bracket holds the loads around it."""
    steps = [
        msgspec.structs.replace(
            step, load=float(2**index), over=float(index > 1), verdict="not met" if index > 1 else "met"
        )
        for index, step in enumerate(without.steps[:4])
    ]
    result = msgspec.structs.replace(without, steps=steps, knee=steps[3].step, capacity=2.0)
    (run,) = frontier_document({"one": result}, lambda _found, folder: folder).data["runs"]
    assert [step["best"] for step in run["steps"]] == [False, True, False, False]
    assert run["bracket"] == [steps[1].step, steps[2].step]
    assert [step["verdict"] for step in run["steps"]] == ["met", "met", "not met", "not met"]


def test_a_list_says_between_which_loads_the_capacity_is(without: SweepResult) -> None:
    """The ends are measured loads with their verdicts, and a concurrency is a whole number."""
    few, many = without.steps[:2]
    steps = [
        msgspec.structs.replace(few, load=32.0, over=0.0, verdict="met"),
        msgspec.structs.replace(many, load=64.0, over=1.0, verdict="not met"),
    ]
    listed = msgspec.structs.replace(
        without,
        over="concurrency",
        fixed_loads=True,
        state="open",
        capacity=32.0,
        capacity_low=32.0,
        capacity_high=64.0,
        ended="done",
        steps=steps,
    )
    assert capacity_sentence(listed).startswith("Capacity: between 32 (met) and 64 (not met) at a time with ")
    text = printed(terminal_document(listed))
    assert "between 32 (met) and 64 (not met)" in text
    assert " 64.0 " not in text


def test_the_factor_of_the_plan_has_an_interval(without: SweepResult) -> None:
    """The capacity as a multiple of the plan's load has the interval of the capacity, divided by this load."""
    sweep = msgspec.structs.replace(
        without,
        plan_load=20.0,
        fixed_loads=False,
        capacity=28.6,
        capacity_low=18.0,
        capacity_high=52.6,
        confidence=0.95,
    )
    assert "The capacity is 1.43 times the load of the plan (95% CI 0.900–2.63)." in capacity_sentence(sweep)  # noqa: RUF001


def test_without_objectives_there_is_no_verdict_on_them(without: SweepResult) -> None:
    """Neither the word `met` nor a column of that name; a search says what the server did."""
    steps = [msgspec.structs.replace(step, verdict="", over=0.0) for step in without.steps]
    listed = msgspec.structs.replace(without, objectives=[], fixed_loads=True, state=None, capacity=None, steps=steps)
    text = printed(terminal_document(listed))
    assert " met" not in text
    assert "objectives:" not in text
    verdicts = [msgspec.structs.replace(step, verdict="met") for step in without.steps]
    sought = msgspec.structs.replace(without, objectives=[], steps=verdicts)
    text = printed(terminal_document(sought))
    assert "keeps up" in text
    assert " met" not in text


def test_a_limited_client_is_explained(without: SweepResult) -> None:
    """The sentence names the client's own reason and the load, not a general remedy."""
    reason = "TCP retransmits per request 2% (limit 1%): the network lost parts of requests"
    steps = [msgspec.structs.replace(step, client="ok", client_reasons=[]) for step in without.steps]
    steps[-1] = msgspec.structs.replace(steps[-1], client="limited", client_reasons=[reason])
    sentence = ended_sentence(msgspec.structs.replace(without, ended="client", steps=steps))
    assert reason in sentence
    assert "--workers" not in sentence
