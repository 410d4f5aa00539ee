"""What is said of sweeps: of servers whose GPUs are known, and of others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadgen.analysis.report.page import render
from loadgen.analysis.report.terminal import render as printed
from loadgen.analysis.sweep import SweepResult, pareto_front, throughput_field
from loadgen.analysis.sweep.document import frontier_document, terminal_document

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
