"""How many GPUs a load takes: the search, its interval, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.capacity import figure_reader, objectives_check, unplannable
from loadgen.analysis.objectives import Objective, parse
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Run
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.hardware import constant, model
from loadgen.servers.simulated.disaggregated_engine import WorkerPools
from loadgen.studies import capacity
from loadgen.studies.capacity import (
    MIN_POWER,
    RATE_STEP,
    CapacityOption,
    SimulatedServer,
    add_interval,
    replica_option,
)
from loadgen.studies.capacity_report import CapacityReport, gpus_text
from loadgen.studies.capacity_search import (
    FORMULA,
    LIMIT,
    CapacitySearch,
    ParetoPoint,
    SearchCounts,
    SearchResult,
    rank,
)
from loadgen.studies.configurations import Configuration, SearchSpace
from loadgen.studies.simulate import ServerModel, run_in_memory
from tests.support.runs import header

PLAN = Plan(server="vllm", arrivals="poisson:1", n=1, metrics_every_s=0)
OBJECTIVES = parse(["ttft.p99 < 500ms"])
MET = objectives_check(OBJECTIVES)
SHAPE = model("llama-3.1-8b")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations of a fifth of the requests."""
    monkeypatch.setattr(capacity, "REQUEST_COUNTS", range(200, 1001))


def server_of(configuration: Configuration, objectives: Sequence[Objective] = OBJECTIVES) -> SimulatedServer:
    """Return the server of a configuration in virtual time."""
    deployment = configuration.deployment(SHAPE, SearchSpace([configuration.gpu]))
    return SimulatedServer(PLAN, configuration, SearchSpace([configuration.gpu]), deployment, figure_reader(objectives))


class Queue(SimulatedServer):
    """A server whose latency is that of a queue that serves 20 requests a second: 50 ms / (1 - rate / 20)."""

    def __init__(self, idle_s: float = 0.05) -> None:
        configuration = Configuration("L4")
        deployment = configuration.deployment(SHAPE, SearchSpace(["L4"]))
        super().__init__(PLAN, configuration, SearchSpace(["L4"]), deployment, lambda _: [])
        self.idle_s = idle_s
        self.asked: list[float] = []

    def figures_at(self, per_s: float, workers: WorkerPools | None = None) -> Sequence[float | None]:
        assert workers is None
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
    """H100 against L40S; the interval holds the figure, and the load is shared."""
    found = {}
    for name in ("H100 SXM", "L40S"):
        server = server_of(Configuration(name))
        found[name] = replica_option(server, 50.0, MET, 30.0)
        add_interval(found[name], server, 50.0, MET)
    fast, slow = found["H100 SXM"], found["L40S"]
    assert None not in (fast.gpus, slow.gpus)
    assert fast.gpus < slow.gpus  # type: ignore[operator]
    for each in (fast, slow):
        low, high = each.replica_per_s_low, each.replica_per_s_high
        assert low is not None
        assert high is not None
        assert low < each.replica_per_s < high  # type: ignore[operator]
        assert each.gpus_low <= each.gpus <= each.gpus_high  # type: ignore[operator]
        assert MET(each.figures, 1.0)
        assert high / low >= (1 + constant("step_error")) ** 2 * 0.99
    assert [each.gpu for each in sorted([slow, fast], key=rank)] == ["H100 SXM", "L40S"]


def test_the_search_begins_anywhere() -> None:
    """A formula that is wrong by a factor of ten leads to the same rate.

    The bound of the TTFT is exceeded at one rate only: below this rate, every rate meets it.
    """
    met = objectives_check(parse(["ttft.p99 < 2s"]))
    rates = {
        replica_option(server_of(Configuration("L4")), 5.0, met, start).replica_per_s for start in (0.1, 1.0, 10.0)
    }
    assert len(rates) == 1


def test_what_cannot_be_is_said() -> None:
    """A model that does not fit, and a card that is too slow, with what it reaches."""
    strict = parse(["tpot.p50 < 58ms"])
    space = SearchSpace(["L4"], tensors=[1])
    large = CapacitySearch(PLAN, model("llama-3.1-70b"), "llama-3.1-70b", space, [], strict, 1.0).run()
    slow = CapacitySearch(PLAN, SHAPE, "llama-3.1-8b", space, [], strict, 1.0).run()
    said = report_of(large.options, space, strict, not_simulated=large.not_simulated).text()
    assert "L4 TP1: Llama-3.1-70B does not fit 1 x L4 in bf16" in said
    said = report_of(slow.options, space, strict).text()
    assert "L4 TP1: a single request has tpot.p50 6" in said


ROOMY = SearchSpace(["H100 SXM"], formats=["bf16", "nvfp4"], engines=["vllm", "trtllm"], drafts=[0, 3])


def report_of(
    options: Sequence[CapacityOption],
    space: SearchSpace = ROOMY,
    objectives: Sequence[Objective] = OBJECTIVES,
    **fields: Any,
) -> CapacityReport:
    """Return a report of these options."""
    result = SearchResult(
        **({"rate_per_s": 50.0, "options": list(options), "not_simulated": [], "pareto": []} | fields),
        search=SearchCounts(considered=9, simulated=2, simulations=12, seconds=3.0),
    )
    return CapacityReport(result, PLAN, "llama-3.1-8b", objectives, space)


RATES: dict[str, Any] = {"replica_per_s": 1234.5, "replica_per_s_low": 1004.2, "replica_per_s_high": 1500.1}
LONGEST = CapacityOption(
    gpu="A100-80GB PCIe",
    format="nvfp4",
    engine="trtllm",
    tensor_parallel=8,
    pipeline_parallel=4,
    expert_parallel=16,
    draft_tokens=3,
    replica_gpus=32,
    gpus=128,
    gpus_low=96,
    gpus_high=160,
    cost_per_hour=1234.56,
    cost_per_million_tokens=12.34,
    currency="$",
    **RATES,
)
ENDLESS = CapacityOption(gpu="L4", gpus=8, gpus_low=8, gpus_high=None, **RATES)


def test_the_tables_fit_a_terminal() -> None:
    """80 columns, with the longest name there is, prices and intervals."""
    point = ParetoPoint(
        option=LONGEST,
        per_s=10.0,
        in_flight=100.0,
        tokens_per_s_per_user=123.4,
        tokens_per_s_per_gpu=1234.5,
        ttft_p99_s=0.0123,
        tpot_p99_s=0.0123,
        cost_per_million_tokens=12.34,
        meets=False,
    )
    lines = report_of([LONGEST, ENDLESS], pareto=[point]).text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("128 (96-160)") for line in lines)
    assert any(line.startswith("8 (8-∞)") for line in lines)
    assert any(line.startswith("A100-80GB PCIe nvfp4 trtllm TP8 PP4 EP16 draft3") for line in lines)


def test_short_names_have_all_columns() -> None:
    """With one format and engine, the rates of replicas have their intervals."""
    text = report_of([ENDLESS], SearchSpace(["L4"])).text()
    assert "1,234 (1,004-1,500)" in text or "1,235 (1,004-1,500)" in text
    assert "TP1" in text


def test_a_range_that_was_not_computed_is_marked() -> None:
    """A question mark, which a note explains. A range of one number has none."""
    exact = CapacityOption(gpu="H100 SXM", gpus=2, gpus_low=2, gpus_high=2, **RATES)
    unknown = CapacityOption(gpu="L4", gpus=7, replica_per_s=1.0)
    assert (gpus_text(exact), gpus_text(unknown)) == ("2", "7 (?)")
    assert "(?): no range was computed." not in report_of([exact]).text()
    assert "(?): no range was computed." in report_of([exact, unknown]).text()


def test_the_report_names_the_assumptions() -> None:
    """Each assumption of the user is in the text, also in the sentence about caches."""
    space = SearchSpace(["L4"], cache_hit_rate=0.8, chunked_prefill="mixed", step_tokens=1024, acceptance=0.7)
    text = " ".join(report_of([ENDLESS], space).text().split())
    assert "Assumed: cache hit rate 0.8, chunked prefill mixed, step tokens 1024" in text
    assert "acceptance" not in text
    assert "find 80% of the prompt tokens in their caches" in text
    assert "Assumed" not in report_of([ENDLESS]).text()


def test_sessions_are_not_called_requests() -> None:
    """The rate and the head of the table count sessions if the workload has sessions."""
    report = report_of([ENDLESS], SearchSpace(["L4"]))
    sessions = replace(report, plan=PLAN.replaced(workload="multi-turn:turns=4"))
    assert "50 sessions/s of" in sessions.text()
    assert "sessions/s each" in sessions.text()
    assert "requests/s" not in sessions.text()


def test_the_report_counts_what_was_pruned() -> None:
    """The numbers of the search are in one sentence."""
    report = report_of([ENDLESS])
    report.result.search.pruned = {FORMULA: 4, LIMIT: 1, "more expensive by formula": 3}
    report.result.search.impossible = {"the engine has no pipelines": 5, "more stages than layers": 1}
    said = " ".join(report.text().split())
    assert "4 miss an objective by formula; 1 misses an objective even at the physical limit; 3 more expensive" in said
    assert "Searched 9 configurations in 3.0 s: 4 miss" in said
    assert "6 further combinations cannot run: the engine has no pipelines (5); more stages than layers (1)." in said


def test_spot_prices_have_an_asterisk_and_prices_their_region() -> None:
    """The reader sees which price a cost is: spot or on demand, and in which region."""
    costs: dict[str, Any] = {"gpus": 2, "gpus_low": 2, "gpus_high": 2, "currency": "$"}
    costs |= {"cost_per_hour": 2.2, "cost_per_million_tokens": 0.1}
    spot = CapacityOption(gpu="H100 SXM", spot=True, region="us-east", **costs, **RATES)
    demand = CapacityOption(gpu="L40S", region="eu-west", **costs, **RATES)
    text = report_of([spot, demand], SearchSpace(["H100 SXM", "L40S"])).text()
    rows = {line.split()[1]: line for line in text.splitlines() if " TP1 " in line}
    assert "$2.20*" in rows["H100"]
    assert "$0.10*" in rows["H100"]
    assert "*" not in rows["L40S"]
    said = " ".join(text.split())
    assert "Prices: H100 SXM spot in us-east, L40S on demand in eu-west." in said
    assert "* Spot price." in said
    assert "Costs of the Pareto set include the time in which machines are down, but no spare replicas." in said
    text = report_of([CapacityOption(gpu="L4", **costs, **RATES)], SearchSpace(["L4"])).text()
    assert "Prices:" not in text
    assert "*" not in text


def test_gpus_without_a_price_are_named() -> None:
    """If other GPUs have a price. Without any price, the report has no costs."""
    said = " ".join(report_of([LONGEST, ENDLESS]).text().split())
    assert "No price is known of L4." in said
    assert "No price" not in report_of([ENDLESS]).text()
    assert "No price" not in report_of([LONGEST]).text()


def test_accuracy_is_stated_for_every_combination() -> None:
    """Validated on H100 with vLLM; not with TensorRT-LLM in the virtual engine, and not with pipelines."""
    options = []
    for configuration in (
        Configuration("H100 SXM", "fp8", tensor=2),
        Configuration("H100 SXM", "fp8", tensor=2, pipeline=2),
        Configuration("H100 SXM", "fp8", "trtllm", tensor=2),
    ):
        server = server_of(configuration)
        options.append(CapacityOption(gpu="H100 SXM", engine=configuration.engine, gpus=1, accuracy=server.accuracy))
        options[-1].pipeline_parallel = configuration.pipeline
    said = " ".join(report_of(options).text().split())
    assert "Accuracy of the model for vLLM on H100 SXM: TTFT 3% (p50)" in said
    others = "vLLM with pipelines on H100 SXM; TensorRT-LLM on H100 SXM"
    assert f"Accuracy of the model for {others}: TTFT, TPOT not validated." in said


def test_only_bounds_on_latencies_can_be_planned_for() -> None:
    """The others are named."""
    assert unplannable(parse(["ttft.p99 < 1s", "complete >= 99%", "tpot.p50 > 1ms"])) == [
        "complete >= 99%",
        "tpot.p50 > 1ms",
    ]
