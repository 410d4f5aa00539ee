"""The search finds what simulating everything finds, and its bounds are bounds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from loadgen.analysis.objectives import parse
from loadgen.analysis.prices import Price
from loadgen.plan import Plan
from loadgen.servers.hardware import model
from loadgen.servers.simulated.disaggregated_engine import WorkerPools
from loadgen.studies import capacity, capacity_search
from loadgen.studies.capacity_score import formula_curve, physical_limit, request_facts
from loadgen.studies.capacity_search import (
    MIN_COMPLETED,
    CapacitySearch,
    ParetoPoint,
    completed_share,
    undominated,
    whole_workers,
)
from loadgen.studies.configurations import ENGINES, Configuration, SearchSpace
from loadgen.studies.price_list import GpuPrice

PLAN = Plan(server="vllm", n=1, output_tokens="32", metrics_every_s=0.0)
OBJECTIVES = parse(["ttft.p99 < 400ms", "tpot.p99 < 40ms"])
PRICES = [
    GpuPrice("H100 SXM", on_demand=Price(2.5, "$")),
    GpuPrice("L40S", "us", Price(0.9, "$"), Price(0.4, "$"), 0.1),
    GpuPrice("L4", on_demand=Price(0.45, "$")),
]
SPACE = SearchSpace(
    ["H100 SXM", "L40S", "L4"],
    engines=["vllm", "sglang", "tgi"],
    tensors=[1, 2],
    pipelines=[1, 2],
    disaggregation=[False, True],
)
SHAPE = model("llama-3.1-8b")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations of a tenth of the requests."""
    monkeypatch.setattr(capacity, "REQUEST_COUNTS", range(100, 301))


@pytest.fixture
def only_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches simulate neither the intervals of options nor points of a Pareto set."""

    def no_points(self: CapacitySearch, candidates: object) -> list[object]:
        return []

    monkeypatch.setattr(capacity_search, "WITH_INTERVAL", 0)
    monkeypatch.setattr(capacity_search, "WORKERS_WITH_INTERVAL", 0)
    monkeypatch.setattr(CapacitySearch, "_frontier", no_points)


def search(space: SearchSpace = SPACE, **fields: object) -> capacity_search.SearchResult:
    """Return the result of a search for 20 requests/s."""
    return CapacitySearch(PLAN, SHAPE, "llama-3.1-8b", space, PRICES, OBJECTIVES, 20.0, **fields).run()  # type: ignore[arg-type]


@cache
def whole_search() -> capacity_search.SearchResult:
    """Return the result of a search in the whole of SPACE. Tests of one group read it."""
    return search()


@pytest.mark.usefixtures("only_options")
@pytest.mark.parametrize(
    ("spot", "space"),
    [
        (False, replace(SPACE, gpus=["H100 SXM", "L40S"], engines=["vllm", "tgi"], pipelines=[1])),
        (True, replace(SPACE, engines=["sglang"], tensors=[1], disaggregation=[False])),
    ],
)
def test_the_best_is_that_of_an_exhaustive_search(
    spot: bool, space: SearchSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning loses nothing: the same cost as with every configuration simulated, in fewer simulations."""
    monkeypatch.setattr(capacity_search, "ALWAYS_SIMULATED", 0)
    pruned, complete = search(space, spot=spot), search(space, spot=spot, exhaustive=True)
    assert pruned.options[0].cost_per_hour == complete.options[0].cost_per_hour
    assert pruned.options[0].gpus
    assert pruned.search.simulated < complete.search.simulated
    assert {option.gpu for option in pruned.options} <= {option.gpu for option in complete.options}


@pytest.mark.usefixtures("only_options")
@pytest.mark.parametrize(("rate", "max_gpus"), [(58.0, 2), (116.0, 4)])
def test_a_rate_slightly_above_the_formula_is_simulated(
    rate: float, max_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By formula, a replica carries 56 requests/s. With a margin, the search finds the plan of an exhaustive search."""
    monkeypatch.setattr(capacity, "REQUEST_COUNTS", range(1000, 5001))
    monkeypatch.setattr(capacity_search, "ALWAYS_SIMULATED", 0)
    plan = Plan(server="vllm", n=1, metrics_every_s=0.0)
    objectives = parse(["ttft.p99 < 500ms", "tpot.p99 < 50ms"])
    gpus = []
    for exhaustive in (False, True):
        space = SearchSpace(["H100 SXM"], tensors=[2], max_gpus=max_gpus)
        found = CapacitySearch(plan, SHAPE, "m", space, [], objectives, rate, exhaustive=exhaustive)
        gpus.append(found.run().options[0].gpus)
    assert gpus == [max_gpus, max_gpus]


@pytest.mark.xdist_group("whole search")
def test_counts_add_up() -> None:
    """Each configuration that was considered is simulated or pruned for a reason."""
    result = whole_search()
    counts = result.search
    assert counts.considered == counts.simulated + sum(counts.pruned.values())
    assert counts.considered + sum(counts.impossible.values()) == 3 * 3 * 2 * 2 * 2
    assert counts.simulated == len(result.options)
    assert len(result.not_simulated) == sum(counts.pruned.values())


@pytest.mark.usefixtures("only_options")
def test_too_many_gpus_are_no_option() -> None:
    """With at most one GPU, no plan with two remains."""
    result = search(replace(SPACE, max_gpus=1))
    assert all(option.gpus is None or option.gpus <= 1 for option in result.options)
    assert result.search.pruned[capacity_search.TOO_MANY] > 0


def test_the_physical_limit_is_better_than_the_formula_and_the_simulation() -> None:
    """No replica carries more than its limit allows, with one or separate workers."""
    facts = request_facts(PLAN)
    for gpu, engine, pipeline, separate in (
        ("H100 SXM", "vllm", 1, False),
        ("L40S", "trtllm", 2, False),
        ("L40S", "sglang", 1, True),
    ):
        configuration = Configuration(gpu, engine=engine, pipeline=pipeline, disaggregated=separate)
        deployment = configuration.deployment(SHAPE, SPACE)
        preset = ENGINES[engine].preset()
        limit = physical_limit(deployment, preset.kv_tokens(deployment), facts, OBJECTIVES, separate=separate)
        curve = formula_curve(deployment, facts, preset.policy, separate=separate)
        highest = curve.highest_per_s(OBJECTIVES)
        assert not limit.missed
        assert highest is not None
        assert 0.05 * limit.per_s < highest < limit.per_s
        if separate:
            assert limit.prefill_per_s
            assert curve.prefill_per_s
            assert curve.prefill_per_s < limit.prefill_per_s


@pytest.mark.usefixtures("only_options")
def test_an_objective_beyond_physics_is_told() -> None:
    """L4 reads 16 GB in 54 ms at least, so a TPOT of 40 ms is impossible on one."""
    result = search(SearchSpace(["L4"], tensors=[1]))
    assert not result.options
    assert "tpot.p99 < 40ms is beyond the physical limit" in result.not_simulated[0].not_possible


def test_facts_of_requests() -> None:
    """Lengths of independent prompts are those of the plan. A conversation computes only new tokens."""
    facts = request_facts(PLAN)
    assert (facts.prompt_tokens, facts.output_tokens, facts.per_arrival) == (512, 32, 1.0)
    turns = request_facts(Plan(server="vllm", n=1, workload="multi-turn:turns=4", metrics_every_s=0.0))
    assert turns.per_arrival == pytest.approx(4.0)
    assert turns.prompt_tokens < 800
    assert set(np.unique(turns.prompts)) == {1}


def test_more_workers_are_added_where_they_are_missing() -> None:
    """A search that begins with one worker of each kind ends with enough of both, and with no more than needed."""
    configuration = Configuration("L40S", disaggregated=True)
    deployment = configuration.deployment(SHAPE, SPACE)
    reader = capacity_search.figure_reader(OBJECTIVES)
    server = capacity.SimulatedServer(PLAN, configuration, SPACE, deployment, reader)
    small = server.smallest_pools(OBJECTIVES, 1.0, 60.0, WorkerPools(1, 1))
    large = server.smallest_pools(OBJECTIVES, 1.0, 60.0, WorkerPools(5, 5))
    assert small
    assert large
    assert small.prefill >= 3  # a prompt takes about 45 ms
    assert abs(small.prefill + small.decode - large.prefill - large.decode) <= 1
    strict = parse(["ttft.p99 < 1ms"])
    hopeless = capacity.SimulatedServer(PLAN, configuration, SPACE, deployment, capacity_search.figure_reader(strict))
    assert hopeless.smallest_pools(strict, 1.0, 60.0, WorkerPools(1, 1)) is None


class Workers(capacity.SimulatedServer):
    """Workers whose latency is a function of the numbers of workers, instead of a simulation."""

    def __init__(self, figures: Callable[[int, int], Sequence[float | None]]) -> None:
        configuration = Configuration("L40S", disaggregated=True)
        super().__init__(PLAN, configuration, SPACE, configuration.deployment(SHAPE, SPACE), lambda _: [])
        self.figures = figures

    def figures_at(self, per_s: float, workers: WorkerPools | None = None) -> Sequence[float | None]:
        assert workers
        return self.figures(workers.prefill, workers.decode) if per_s else []


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        # Only more prefill workers shorten the end-to-end latency.
        (lambda prefill, _: [4 / prefill], WorkerPools(4, 1)),
        # Only more decode workers shorten it.
        (lambda _, decode: [3 / decode], WorkerPools(1, 3)),
        # Responses are unfinished until both pools are large enough.
        (lambda prefill, decode: [1.0 if prefill >= 3 and decode >= 2 else None], WorkerPools(3, 2)),
        # One more prefill worker replaces two decode workers.
        (lambda prefill, decode: [5 / (2 * prefill + decode)], WorkerPools(2, 1)),
    ],
)
def test_the_pool_grows_that_lowers_the_latency(
    figures: Callable[[int, int], Sequence[float | None]], expected: WorkerPools
) -> None:
    """From one worker of each kind and from many, the search ends with the smallest total number."""
    objectives = parse(["e2e.p99 <= 1s"])
    for start in (WorkerPools(1, 1), WorkerPools(1, 5)):
        assert Workers(figures).smallest_pools(objectives, 1.0, 10.0, start) == expected


@pytest.mark.usefixtures("only_options")
def test_workers_with_a_short_wait_are_not_excluded() -> None:
    """A prompt takes 0.8 s. The wait for busy workers would miss the objective, but less busy workers meet it."""
    plan = Plan(server="vllm", n=1, input_tokens="8192", output_tokens="128", metrics_every_s=0.0)
    objectives = parse(["ttft.p99 < 2s", "tpot.p99 < 50ms"])
    space = SearchSpace(["L40S"], tensors=[1], disaggregation=[True])
    (option,) = CapacitySearch(plan, SHAPE, "llama-3.1-8b", space, [], objectives, 1.0).run().options
    assert (option.prefill_workers, option.decode_workers) == (2, 1)


def test_prefill_workers_are_less_busy_for_a_tighter_bound() -> None:
    """A tight bound on TTFT or the end-to-end latency lowers the rate of a prefill worker. A loose bound does not."""
    configuration = Configuration("L40S", disaggregated=True)
    deployment, policy = configuration.deployment(SHAPE, SPACE), ENGINES["vllm"].preset().policy
    rates = []
    for bound in ("ttft.p99 < 9s", "ttft.p99 < 100ms", "ttft.p99 < 80ms", "e2e.p99 < 900ms"):
        curve = formula_curve(deployment, request_facts(PLAN), policy, separate=True, objectives=parse([bound]))
        assert curve.prefill_per_s
        rates.append(curve.prefill_per_s)
    assert rates[0] > rates[1] > rates[2]
    assert rates[3] < rates[0]


@pytest.mark.usefixtures("only_options")
def test_a_gpu_without_a_price_is_not_called_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search states the missing price as the reason."""
    monkeypatch.setattr(capacity_search, "ALWAYS_SIMULATED", 0)
    result = search(SearchSpace(["H100 SXM", "A100-80GB SXM"], tensors=[1, 2]))
    reasons = {each.gpu: each.not_possible for each in result.not_simulated}
    assert reasons["A100-80GB SXM"] == capacity_search.NO_PRICE
    assert result.search.pruned[capacity_search.NO_PRICE] == 1


def test_the_formula_knows_the_tokens_of_a_step() -> None:
    """With smaller steps, a prefill worker computes fewer prompts together, so the formula expects a lower rate."""
    rates = []
    for step_tokens in (None, 512):
        space = SearchSpace(["H100 SXM"], tensors=[1], disaggregation=[True], step_tokens=step_tokens)
        found = CapacitySearch(PLAN, SHAPE, "m", space, [], OBJECTIVES, 20.0)
        facts = request_facts(PLAN)
        candidates = found._survivors(facts)
        found._score(candidates, facts)
        assert candidates[0].curve
        rates.append(candidates[0].curve.prefill_per_s)
    assert rates[1] < rates[0]


def point(speed: float, cost: float | None, per_gpu: float = 1.0) -> ParetoPoint:
    """Return a point of the Pareto set."""
    return ParetoPoint(
        option=capacity.option_of(Configuration("L4")),
        per_s=1.0,
        in_flight=1.0,
        tokens_per_s_per_user=speed,
        tokens_per_s_per_gpu=per_gpu,
        ttft_p99_s=0.1,
        tpot_p99_s=0.1,
        cost_per_million_tokens=cost,
    )


def test_points_that_another_point_beats_are_left_out() -> None:
    """Faster and cheaper wins. Without costs, throughput per GPU counts."""
    found = undominated([point(10, 1.0), point(20, 2.0), point(15, 3.0), point(5, 1.5)])
    assert [each.tokens_per_s_per_user for each in found] == [20, 10]
    found = undominated([point(10, None, 5), point(20, None, 6), point(5, None, 9)])
    assert [each.tokens_per_s_per_user for each in found] == [20, 5]


def test_workers_of_a_point_carry_its_load() -> None:
    """There are enough prefill workers for each decode worker, or there is no such point."""
    assert whole_workers(0.4) == WorkerPools(2, 5)
    assert whole_workers(5.0) == WorkerPools(5, 1)
    assert whole_workers(5.0, max_workers=5) is None
    assert whole_workers(40.0) is None
    assert whole_workers(0.1, max_workers=1) is None


def test_a_point_is_overloaded_if_requests_end_more_slowly_than_they_arrive() -> None:
    """A constant latency is no overload. A queue that grows by a fifth of the arrivals is one."""
    due = np.arange(1000.0)
    assert completed_share(due, due + 100) == pytest.approx(1, abs=0.01)
    assert MIN_COMPLETED < completed_share(due, due * 1.05 + 100) < 0.96
    assert completed_share(due, due * 1.25 + 100) < MIN_COMPLETED


def test_points_have_the_completed_rate_and_options_have_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that completes 95% of the requests is not credited with the others. JSON contains the notes."""
    space = SearchSpace(["H100 SXM"], tensors=[1])
    monkeypatch.setattr(capacity_search, "completed_share", lambda *_: 0.95)
    completed = search(space)
    for each in completed.pareto:
        words = shlex.split(each.option.commands["simulate"])
        arrivals_per_s = float(words[words.index("--arrivals") + 1].removeprefix("poisson:"))
        assert each.per_s == pytest.approx(0.95 * arrivals_per_s, rel=1e-3)
        assert each.tokens_per_s_per_gpu == pytest.approx(32 * each.per_s)
        assert each.cost_per_million_tokens == pytest.approx(2.5 / 3600 / (32 * each.per_s) * 1e6)
    for option in (completed.options[0], completed.pareto[0].option):
        assert option.notes == ["CHECKPOINT stands for the folder or Hugging Face id of llama-3.1-8b in bf16."]


def test_no_point_of_the_pareto_set_has_queues_that_grow() -> None:
    """With long prompts and short responses, one prefill worker cannot supply a decode worker: more are simulated."""
    plan = Plan(server="vllm", n=1, input_tokens="8192", output_tokens="16", metrics_every_s=0.0)
    space = SearchSpace(["H100 SXM"], tensors=[1], disaggregation=[True])
    points = CapacitySearch(plan, SHAPE, "llama-3.1-8b", space, [], parse(["ttft.p99 < 30s"]), 5.0).run().pareto
    assert points
    for each in points:
        assert each.ttft_p99_s < 3
        assert (each.option.prefill_workers or 0) > (each.option.decode_workers or 0)


def test_points_of_the_pareto_set_need_at_most_the_allowed_gpus() -> None:
    """`--max-gpus` limits the replica or the workers of each point."""
    points = search(replace(SPACE, engines=["vllm"], max_gpus=3)).pareto
    assert points
    assert max(each.option.gpus or 0 for each in points) <= 3


def test_a_point_has_more_requests_than_are_in_flight() -> None:
    """The number in flight is reached, and a p99 is reliable."""
    assert capacity.enough_requests(1.0) == capacity.REQUEST_COUNTS[0]
    assert capacity.enough_requests(724.0) == 2896


@pytest.mark.xdist_group("whole search")
def test_pareto_points_are_undominated_and_simulated() -> None:
    """The fastest first, each cheaper than the one before, with commands."""
    points = whole_search().pareto
    speeds = [each.tokens_per_s_per_user for each in points]
    costs = [each.cost_per_million_tokens or 0 for each in points]
    assert speeds == sorted(speeds, reverse=True)
    assert costs == sorted(costs, reverse=True)
    assert len(points) >= 3
    assert all({"limits"} < set(each.option.commands) for each in points)
