"""How many GPUs a load takes: the search, its interval, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.capacity import figure_reader, objectives_check, unplannable
from loadgen.analysis.objectives import parse
from loadgen.analysis.prices import Price
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Run
from loadgen.cli.capacity import format_options, ranked
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.hardware import constant
from loadgen.studies import capacity
from loadgen.studies.capacity import MIN_POWER, RATE_STEP, Candidate, CapacityOption, Replica, capacity_option
from loadgen.studies.simulate import ServerModel, run_in_memory
from tests.support.runs import header

PLAN = Plan(server="vllm", arrivals="poisson:1", n=1, metrics_every_s=0)
OBJECTIVES = parse(["ttft.p99 < 500ms"])
MET = objectives_check(OBJECTIVES)


class Queue(Replica):
    """A server whose latency is that of a queue that serves 20 requests a second: 50 ms / (1 - rate / 20)."""

    def __init__(self, idle_s: float = 0.05) -> None:
        super().__init__(PLAN, ServerModel(), lambda _: [])
        self.idle_s = idle_s
        self.asked: list[float] = []

    def figures_at(self, per_s: float) -> Sequence[float | None]:
        self.asked.append(per_s)
        return [self.idle_s / (1 - per_s / 20)] if per_s < 20 else [None]


@pytest.mark.parametrize("start", [MIN_POWER, 0, 60, 101, 400])
def test_the_highest_rate_is_found_from_anywhere(start: int) -> None:
    """50 ms / (1 - r / 20) < 500 ms up to r = 18, within one step of the grid, in few simulations."""
    queue = Queue()
    found = queue.highest_power(MET, 1.0, start)
    assert found is not None
    assert RATE_STEP**found < 18 <= RATE_STEP ** (found + 1)
    assert len(queue.asked) < 20


def test_a_slower_server_is_the_model_with_a_slower_clock() -> None:
    """Half as fast: 100 ms / (1 - r / 10) < 500 ms up to r = 8; the model's clock saw twice that."""
    found = Queue().highest_power(MET, 2.0, 50)
    assert found is not None
    assert RATE_STEP**found / 2 < 8 <= RATE_STEP ** (found + 1) / 2


def test_what_is_too_slow_alone_carries_nothing() -> None:
    """At no rate."""
    assert Queue(idle_s=0.6).highest_power(MET, 1.0, 50) is None


def test_a_bound_that_nothing_exceeds_is_a_mistake() -> None:
    """The search ends at a rate that no server answers, and the message says what to do."""
    with pytest.raises(PlanError, match=r"the objectives limit no rate: .* meets them at 98,555 requests/s") as mistake:
        Queue().highest_power(lambda _figures, _slowdown: True, 1.0, 50)
    assert "within 60 s" in mistake.value.hint


def test_figures_are_those_of_the_report() -> None:
    """Of the requests in the window; None where any was lost."""
    run = run_in_memory(PLAN.replaced(arrivals="poisson:4", n=300), ServerModel(gpu="H100", model="llama-3.1-8b"))
    objectives = parse(["ttft.p50 < 1s", "tpot.mean < 1s", "e2e.max <= 9s"])
    ttft, tpot, e2e = figure_reader(objectives)(run)
    assert ttft is not None
    assert tpot is not None
    assert e2e is not None
    assert 0.01 < ttft < 0.1
    assert 0.004 < tpot < 0.02
    assert ttft + 127 * tpot < e2e < 2
    lost = Run(Path(), header(1), [*run.records, Record(id=999, state="failed")], [], run.footer)
    assert figure_reader(objectives)(lost) == [None, None, None]


def test_a_faster_card_takes_fewer() -> None:
    """H100 against L40S; the interval holds the figure, the cost is that of all GPUs, and the load is shared."""
    base = ServerModel(model="llama-3.1-8b")
    figures = figure_reader(OBJECTIVES)
    found = {
        name: capacity_option(PLAN, Candidate(name, 1, "bf16", Price(2.0, "$")), base, 50.0, figures, MET)
        for name in ("H100 SXM", "L40S")
    }
    fast, slow = found["H100 SXM"], found["L40S"]
    assert None not in (fast.gpus, slow.gpus)
    assert fast.gpus < slow.gpus  # type: ignore[operator]
    for each in (fast, slow):
        low, high = each.replica_per_s_low, each.replica_per_s_high
        assert low is not None
        assert high is not None
        assert low < each.replica_per_s < high  # type: ignore[operator]
        assert each.gpus_low <= each.gpus <= each.gpus_high  # type: ignore[operator]
        assert each.cost_per_hour == 2 * each.gpus  # type: ignore[operator]
        assert each.cost_per_million_tokens == pytest.approx(each.cost_per_hour / (3600 * 50 * 128) * 1e6)  # type: ignore[operator]
        assert MET(each.figures, 1.0)
        assert high / low >= (1 + constant("step_error")) ** 2 * 0.99
    assert [each.gpu for each in ranked([slow, fast])] == ["H100 SXM", "L40S"]


def test_what_cannot_be_is_said() -> None:
    """A model that does not fit, and a card that is too slow, with what it reaches."""
    figures, base = figure_reader(OBJECTIVES), ServerModel(model="llama-3.1-70b")
    large = capacity_option(PLAN, Candidate("L4", 1, "bf16", None), base, 1.0, figures, MET)
    assert large.not_possible == (
        "Llama-3.1-70B does not fit 1 x L4 in bf16: its weights of 141 GB need 8 GPUs or more"
    )
    strict = parse(["tpot.p50 < 1ms"])
    slow = capacity_option(
        PLAN,
        Candidate("L4", 1, "bf16", None),
        ServerModel(model="llama-3.1-8b"),
        1.0,
        figure_reader(strict),
        objectives_check(strict),
    )
    said = format_options([large, slow], strict)
    assert "  L4 x 1: Llama-3.1-70B does not fit 1 x L4 in bf16" in said
    assert "  L4 x 1: a single request has tpot.p50 6" in said


def test_the_table_fits_a_terminal() -> None:
    """80 columns, with the longest name there is, prices and intervals."""
    more: dict[str, Any] = {"replica_per_s": 1234.5, "replica_per_s_low": 1004.2, "replica_per_s_high": 1500.1}
    row = CapacityOption(
        **{
            "gpu": "A100-80GB PCIe",
            "tensor_parallel": 8,
            "format": "bf16",
            "gpus": 128,
            "gpus_low": 96,
            "gpus_high": 160,
        },
        **more,
        cost_per_hour=1234.56,
        cost_per_million_tokens=12.34,
    )
    endless = CapacityOption(
        **{"gpu": "L4", "tensor_parallel": 1, "format": "bf16", "gpus": 8, "gpus_low": 8, "gpus_high": None}, **more
    )
    table = format_options([endless, row], OBJECTIVES).splitlines()
    assert max(map(len, table)) <= 80
    assert table[1].startswith("128 (96-160)")
    assert table[2].startswith("8 (8-∞)")


@pytest.mark.parametrize("named", ["nothing", "H100=", "H100=two", "H100=-1", "H100=nan"])
def test_a_wrong_candidate_is_a_sentence(named: str) -> None:
    """An unknown GPU, or a price that is none."""
    with pytest.raises(PlanError):
        capacity.candidates([named], [1], ["bf16"], ServerModel())


def test_only_bounds_on_latencies_can_be_planned_for() -> None:
    """The others are named."""
    assert unplannable(parse(["ttft.p99 < 1s", "complete >= 99%", "tpot.p50 > 1ms"])) == [
        "complete >= 99%",
        "tpot.p50 > 1ms",
    ]
