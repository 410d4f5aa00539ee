"""What is said of sweeps: of servers whose GPUs are known, and of others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadgen.analysis.report.page import render
from loadgen.analysis.report.terminal import render as printed
from loadgen.analysis.sweep import SweepResult, pareto_front, throughput_field
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
    assert joined[0]["data"]["frontier"]["y"] == joined[1]["data"]["frontier"]["y"]
    assert None not in joined[0]["data"]["frontier"]["knee_y"]
    best = pareto_front(without.steps, "tokens_per_s_per_user", rate)
    assert [step.step for step in best][-1] == 3


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
