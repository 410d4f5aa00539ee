"""Searches for the configuration that serves a load at the lowest cost, and for the Pareto set of speed and cost.

A configuration is a GPU type, an engine, and the way in which the engine uses the GPUs. The search has four steps:

1. List the configurations that the engines can run.
2. Exclude every configuration that does not fit into memory, that needs more GPUs than --max-gpus, or that misses an
   objective even at the physical limit of its GPUs.
3. Predict the cost of each remaining configuration with a formula. Exclude every configuration that, by this formula,
   misses an objective or needs more GPUs than --max-gpus.
4. Simulate the remaining configurations, beginning with the cheapest. The simulated configurations are the options of
   the result. For the Pareto set, the configurations that are best by formula are also simulated at other loads.

Simulations take long, so step 4 leaves out configurations that are probably too expensive. The cheapest configuration
of each GPU type is always simulated. Any other configuration is left out in these cases:

- It has no price, but a simulated configuration with a price can serve the load.
- Even at its physical limit, it costs more than the cheapest simulated configuration.
- It costs more than the cheapest simulated configuration, even if each replica serves MARGIN times the rate that the
  formula predicts.
- MAX_SIMULATED configurations were already simulated.

Nothing is left out if at most ALWAYS_SIMULATED configurations remain after step 3. With --exhaustive, a configuration
is excluded only in step 2, by memory or --max-gpus, and all other configurations are simulated.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from loadgen.analysis.capacity import figure_reader, objectives_check
from loadgen.analysis.objectives import LATENCIES, Objective
from loadgen.analysis.steady_window import frame_of_run
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.hardware import HardwareError, ModelShape
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.simulated.disaggregated_engine import WorkerPools
from loadgen.studies.capacity import (
    CapacityOption,
    SimulatedServer,
    add_interval,
    add_worker_interval,
    configuration_of,
    enough_requests,
    option_of,
    replica_option,
    worker_option,
)
from loadgen.studies.capacity_commands import CommandContext, commands_of, server_notes
from loadgen.studies.capacity_score import (
    Limit,
    LoadCurve,
    RequestFacts,
    formula_curve,
    formula_slack,
    physical_limit,
    request_facts,
)
from loadgen.studies.configurations import ENGINES, Configuration, SearchSpace
from loadgen.studies.price_list import GpuPrice, Purchase, ReplicaPool, cheapest, gpu_hour

ALWAYS_SIMULATED = 8
"""If no more configurations than this number remain after pruning, all of them are simulated."""
MARGIN = 1.15
"""A configuration is excluded if it would be too large or too expensive even with this multiple of the rate that the
formula predicts for each replica and worker."""
WITH_INTERVAL = 8
WORKERS_WITH_INTERVAL = 2
"""Numbers of the cheapest options for which the interval is computed: among all options, and among those with separate
workers, whose simulation takes longer."""
MAX_SIMULATED = 24
"""Maximum number of configurations that are simulated, if their costs hardly differ."""
PARETO_POINTS = 12
"""Maximum number of points of the Pareto set that are simulated."""
PARETO_LOAD = 0.95
"""A point is simulated at this share of the rate that the formula predicts, as queues grow without limit at 1."""
MAX_PARETO_WORKERS = 12
"""Maximum number of separate workers in the simulation of a point."""
MIN_COMPLETED = 0.9
"""A point is overloaded if its `completed_share` is lower."""

MEMORY = "without enough memory"
LIMIT = "misses an objective even at the physical limit"
TOO_MANY = "more GPUs than --max-gpus"
FORMULA = "misses an objective by formula"
EXPENSIVE_LIMIT = "more expensive even at the physical limit"
EXPENSIVE = "more expensive by formula"
"""Reasons why a configuration is not simulated."""
PLURALS = {LIMIT: "miss an objective even at the physical limit", FORMULA: "miss an objective by formula"}
"""Forms of reasons for several configurations, where they differ from the form for one."""

COSTS_MORE = "costs more than others"
"""Reason of a configuration that was not simulated, because other configurations are cheaper."""
NO_PRICE = "without a price"
"""Reason of a configuration that was not simulated, because its GPU type has no price, but other types have one."""
OnProgress = Callable[[str], None]


class ParetoPoint(msgspec.Struct, kw_only=True):
    """A configuration at one load. No other point is better in both speed per user and cost (or GPUs)."""

    option: CapacityOption
    """The configuration. Its GPUs are those of one replica, or of the simulated workers."""
    per_s: float
    """Simulated requests per second that the server completes."""
    in_flight: float
    tokens_per_s_per_user: float
    """1 / median TPOT."""
    tokens_per_s_per_gpu: float
    ttft_p99_s: float
    tpot_p99_s: float
    cost_per_million_tokens: float | None = None
    """Cost of a million output tokens if the load is always this high. None without a price."""
    meets: bool = True
    """True if the point meets all objectives."""


class SearchCounts(msgspec.Struct, kw_only=True):
    """How many configurations a search considered, excluded, judged by formula and simulated."""

    considered: int = 0
    """Configurations that their engine can run."""
    impossible: dict[str, int] = {}
    """Further combinations that an engine cannot run, by reason."""
    pruned: dict[str, int] = {}
    """Configurations that were not simulated, by reason."""
    scored: int = 0
    """Configurations that a formula judged."""
    simulated: int = 0
    """Configurations that were simulated."""
    simulations: int = 0
    """Simulated runs."""
    seconds: float = 0.0


class SearchResult(msgspec.Struct, kw_only=True):
    """The result of `loadgen plan-capacity`. `--json` prints its fields."""

    rate_per_s: float
    options: list[CapacityOption]
    """The simulated configurations that meet the objectives, the cheapest first; then those that do not."""
    not_simulated: list[CapacityOption]
    """Configurations that were not simulated, with the reason."""
    pareto: list[ParetoPoint]
    search: SearchCounts
    assumptions: dict[str, float | int | str] = {}
    """Assumptions that the user set, by option: `cache_hit_rate`, `chunked_prefill`, `step_tokens`, `acceptance`."""


@dataclass(slots=True)
class _Candidate:
    """A configuration that fits into memory and may meet the objectives."""

    configuration: Configuration
    deployment: Deployment
    limit: Limit
    limit_cost: float
    """Cost at the physical limit: no plan with this configuration is cheaper."""
    curve: LoadCurve | None = None
    cost: float = math.inf
    """Cost by formula."""
    cost_with_margin: float = math.inf
    """Cost by formula if each replica and worker carries MARGIN times the rate of the formula."""
    expected_per_s: float = 0.0
    """Highest arrivals per second of one replica, by formula."""
    start: WorkerPools | None = None
    """Numbers of separate workers, by formula."""
    result: CapacityOption | None = None
    """The option, once the configuration is simulated."""
    server: SimulatedServer | None = None

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: the cheapest candidate (by formula) comes first. Simpler configurations precede others of the same
        cost.
        """
        return self.cost, self.configuration.extras, self.limit_cost


@dataclass(slots=True)
class CapacitySearch:
    """One search of `loadgen plan-capacity`. Call `run` once to get the result."""

    plan: Plan
    model: ModelShape
    model_name: str
    space: SearchSpace
    prices: Sequence[GpuPrice]
    objectives: Sequence[Objective]
    rate_per_s: float
    spot: bool = False
    exhaustive: bool = False
    """Simulate every configuration that fits into memory."""
    progress: OnProgress = lambda _: None
    _counts: SearchCounts = field(default_factory=SearchCounts)
    _pruned: Counter[str] = field(default_factory=Counter)
    _not_simulated: list[CapacityOption] = field(default_factory=list)

    def run(self) -> SearchResult:
        """Search, and return the result.

        Raises LoadgenError if a GPU, a model or a number format is unknown, or if the load cannot be simulated.
        """
        started = time.perf_counter()
        facts = request_facts(self.plan)
        candidates = self._survivors(facts)
        self._score(candidates, facts)
        options = self._simulate(candidates, facts)
        pareto = self._pareto(candidates, facts)
        counts = self._counts
        counts.pruned = dict(self._pruned)
        counts.seconds = time.perf_counter() - started
        return SearchResult(
            rate_per_s=self.rate_per_s,
            options=options,
            not_simulated=self._not_simulated,
            pareto=pareto,
            search=counts,
            assumptions=self.space.assumptions,
        )

    def _survivors(self, facts: RequestFacts) -> list[_Candidate]:
        """Return the configurations that memory, --max-gpus and the physical limits do not exclude.

        They are sorted by their lowest possible cost, the cheapest first. Raises PlanError if no configuration can run
        the model.
        """
        impossible = Counter[str]()
        candidates = []
        for configuration, reason in self.space.configurations(self.model):
            if reason:
                impossible[reason] += 1
                continue
            self._counts.considered += 1
            candidate = self._candidate(configuration, facts)
            if candidate is not None:
                candidates.append(candidate)
        self._counts.impossible = dict(impossible)
        if not self._counts.considered:
            raise PlanError(
                f"no configuration can run {self.model.name}: {'; '.join(impossible)}",
                "Name other values of --tp, --pp, --ep or --dp-attention, or another --engine.",
            )
        return sorted(candidates, key=lambda candidate: candidate.limit_cost)

    def _candidate(self, configuration: Configuration, facts: RequestFacts) -> _Candidate | None:
        """Return a candidate of the search for `configuration`, or None if this configuration is excluded.

        A configuration is excluded in three cases:

        - The model and the longest request in `facts` do not fit into the memory of its GPUs.
        - It misses an objective even at the physical limit, where the GPUs reach all rates of their data sheet. With
          --exhaustive, such a configuration is not excluded.
        - It needs more GPUs than --max-gpus even at the physical limit.
        """
        try:
            deployment = configuration.deployment(self.model, self.space)
        except HardwareError as error:
            raise PlanError(str(error)) from None
        try:
            kv_tokens = ENGINES[configuration.engine].preset().kv_tokens(deployment)
        except HardwareError as error:
            self._prune(configuration, MEMORY, str(error).partition(";")[0])
            return None
        longest = int((facts.prompts + facts.outputs).max())
        if kv_tokens < longest:
            self._prune(
                configuration, MEMORY, f"the KV cache has room for {kv_tokens:,} tokens, and a request has {longest:,}"
            )
            return None
        limit = physical_limit(deployment, kv_tokens, facts, self.objectives, separate=configuration.disaggregated)
        if limit.missed and not self.exhaustive:
            self._prune(configuration, LIMIT, f"{limit.missed} is beyond the physical limit of a single request")
            return None
        replicas, prefill = limit.min_replicas(self.rate_per_s * facts.per_arrival)
        pools = [ReplicaPool(each, configuration.gpus) for each in (replicas, prefill) if each]
        gpus = sum(pool.replicas * pool.gpus for pool in pools)
        if self.space.max_gpus is not None and gpus > self.space.max_gpus:
            self._prune(configuration, TOO_MANY, f"needs {gpus} GPUs or more, even at the physical limit")
            return None
        return _Candidate(configuration, deployment, limit, self._cost(configuration, pools)[0])

    def _prune(self, configuration: Configuration, reason: str, text: str) -> None:
        self._pruned[reason] += 1
        self._not_simulated.append(option_of(configuration, not_possible=text))

    def _cost(self, configuration: Configuration, pools: Sequence[ReplicaPool]) -> tuple[float, Purchase | None]:
        """Return the cost per hour of the GPUs in `pools`, and the purchase with this cost.

        `pools` contains the replicas that the load needs. If the user gave no prices, the number of GPUs stands for the
        cost, and there is no purchase. If the GPU has no price, the cost is infinite.
        """
        if not self.prices:
            return float(sum(pool.replicas * pool.gpus for pool in pools)), None
        of_gpu = [price for price in self.prices if price.gpu == configuration.gpu]
        purchase = cheapest(of_gpu, pools, spot=self.spot, node_gpus=self.space.node_gpus)
        return (math.inf, None) if purchase is None else (purchase.amount, purchase)

    def _gpu_hour(self, configuration: Configuration) -> Purchase | None:
        """Return the lowest price per hour of work for a GPU of the type in `configuration`. Return None if no price is
        known.

        An hour of work on a spot machine costs more than the listed price, because of interruptions (see `gpu_hour`).
        """
        return gpu_hour([price for price in self.prices if price.gpu == configuration.gpu], spot=self.spot)

    def _score(self, candidates: Sequence[_Candidate], facts: RequestFacts) -> None:
        """Compute the load curve, the rate and the cost of each candidate with a formula."""
        for number, candidate in enumerate(candidates):
            if number % 20 == 0:
                self.progress(f"formula: {number} of {len(candidates)}")
            self._score_one(candidate, facts)
        self._counts.scored = len(candidates)

    def _score_one(self, candidate: _Candidate, facts: RequestFacts) -> None:
        """Compute the load curve, the rate and the cost of a candidate with a formula.

        Without --exhaustive, the candidate is excluded in two cases:

        - Even a single request misses an objective.
        - Too many GPUs are needed, even if each replica serves MARGIN times the rate that the formula predicts.
        """
        configuration = candidate.configuration
        policy = ENGINES[configuration.engine].preset().policy
        deployment = candidate.deployment
        if self.space.step_tokens:
            limited = replace(deployment.framework, chunk_tokens=self.space.step_tokens)
            deployment = replace(deployment, framework=limited)
        curve = formula_curve(
            deployment, facts, policy, separate=configuration.disaggregated, objectives=self.objectives
        )
        candidate.curve = curve
        per_s = curve.highest_per_s(self.objectives)
        if per_s is None:
            per_s = curve.highest_per_s(self.objectives, formula_slack())
        if per_s is None and not self.exhaustive:
            self._prune(configuration, FORMULA, "a single request misses an objective by formula")
            return
        expected_per_s = (per_s or float(curve.per_s[0])) / facts.per_arrival
        prefill_per_s = curve.prefill_per_s and curve.prefill_per_s / facts.per_arrival
        fewest = self._pools(configuration, MARGIN * expected_per_s, prefill_per_s and MARGIN * prefill_per_s)
        gpus = sum(pool.replicas * pool.gpus for pool in fewest)
        if self.space.max_gpus is not None and gpus > self.space.max_gpus and not self.exhaustive:
            self._prune(configuration, TOO_MANY, f"needs {gpus} GPUs or more by formula")
            return
        pools = self._pools(configuration, expected_per_s, prefill_per_s)
        if prefill_per_s is not None:
            candidate.start = WorkerPools(pools[1].replicas, pools[0].replicas)
        candidate.cost = self._cost(configuration, pools)[0]
        candidate.cost_with_margin = self._cost(configuration, fewest)[0]
        candidate.expected_per_s = expected_per_s

    def _pools(
        self, configuration: Configuration, replica_per_s: float, prefill_per_s: float | None
    ) -> list[ReplicaPool]:
        """Return the pool of replicas that the load needs, or the pools of separate decode workers and prefill workers.

        `replica_per_s` and `prefill_per_s` are the arrivals per second that one replica or worker can serve.
        """
        rates = [replica_per_s] if prefill_per_s is None else [replica_per_s, prefill_per_s]
        return [ReplicaPool(max(1, math.ceil(self.rate_per_s / rate)), configuration.gpus) for rate in rates]

    def _simulate(self, candidates: Sequence[_Candidate], facts: RequestFacts) -> list[CapacityOption]:
        """Simulate the most promising of the `candidates`, and return the resulting options, cheapest first.

        A candidate is skipped, for example, if it probably costs more than the cheapest candidate simulated so far, or
        if enough candidates have been simulated. The best candidate of each GPU type is never skipped, so that the
        result compares GPU types. With --exhaustive or few candidates, no candidate is skipped.
        """
        ready = sorted((each for each in candidates if each.expected_per_s), key=lambda each: each.order)
        everything = self.exhaustive or len(ready) <= ALWAYS_SIMULATED
        best_of_gpu: dict[str, _Candidate] = {}
        for candidate in ready:
            best_of_gpu.setdefault(candidate.configuration.gpu, candidate)
        lowest = math.inf
        simulated: list[_Candidate] = []
        for candidate in ready:
            configuration = candidate.configuration
            if not everything and best_of_gpu[configuration.gpu] is not candidate:
                if math.isinf(candidate.limit_cost) and math.isfinite(lowest):
                    self._prune(configuration, NO_PRICE, NO_PRICE)
                    continue
                if candidate.limit_cost > lowest:
                    self._prune(configuration, EXPENSIVE_LIMIT, COSTS_MORE)
                    continue
                enough = len(simulated) >= MAX_SIMULATED and math.isfinite(lowest)
                if candidate.cost_with_margin > lowest or enough:
                    self._prune(configuration, EXPENSIVE, COSTS_MORE)
                    continue
            self.progress(f"simulation {len(simulated) + 1}: {configuration.gpu} {configuration.layout}")
            lowest = min(lowest, self._simulate_one(candidate, facts))
            simulated.append(candidate)
        self._add_intervals(simulated)
        self._counts.simulated = len(simulated)
        self._counts.simulations = sum(each.server.simulations for each in simulated if each.server)
        return sorted((each.result for each in simulated if each.result), key=rank)

    def _simulate_one(self, candidate: _Candidate, facts: RequestFacts) -> float:
        """Simulate a candidate, and return its cost."""
        reader = figure_reader(self.objectives)
        server = SimulatedServer(self.plan, candidate.configuration, self.space, candidate.deployment, reader)
        if candidate.start is not None:
            option = worker_option(server, self.rate_per_s, self.objectives, candidate.start)
        else:
            met = objectives_check(self.objectives)
            option = replica_option(server, self.rate_per_s, met, candidate.expected_per_s)
        candidate.server, candidate.result = server, option
        self._finish(option, candidate, facts)
        return self._cost(candidate.configuration, option.pools)[0] if option.gpus else math.inf

    def _add_intervals(self, simulated: Sequence[_Candidate]) -> None:
        """Set the intervals of the cheapest options.

        The ends of an interval are the results for a server that is faster than predicted, and for one that is slower.
        """
        met = objectives_check(self.objectives)
        pairs = [(each.result, each.server) for each in simulated if each.result and each.server]
        best = sorted((pair for pair in pairs if pair[0].gpus), key=lambda pair: rank(pair[0]))
        for option, server in best[:WITH_INTERVAL]:
            self.progress(f"interval: {option.gpu} {option.layout}")
            if option.prefill_workers is None:
                add_interval(option, server, self.rate_per_s, met)
        separate = [pair for pair in best if pair[0].prefill_workers is not None]
        for option, server in separate[:WORKERS_WITH_INTERVAL]:
            add_worker_interval(option, server, self.rate_per_s, self.objectives)

    def _finish(self, option: CapacityOption, candidate: _Candidate, facts: RequestFacts) -> None:
        """Set the cost and the commands of an option.

        If the option needs more GPUs than --max-gpus, set the reason why it is not possible instead.
        """
        if not option.gpus:
            return
        if self.space.max_gpus is not None and option.gpus > self.space.max_gpus:
            option.not_possible = f"needs {option.gpus} GPUs, more than --max-gpus"
            option.gpus = option.replica_per_s = None
            return
        _, purchase = self._cost(candidate.configuration, option.pools)
        option.pay(purchase, self.rate_per_s, facts.output_tokens * facts.per_arrival)
        assert candidate.curve is not None
        parts = option.decode_workers or option.pools[0].replicas
        share = self.rate_per_s * facts.per_arrival / parts
        in_flight = parts * float(np.interp(share, candidate.curve.per_s, candidate.curve.in_flight))
        self._add_commands(option, self._context(facts, self.rate_per_s), in_flight)

    def _add_commands(self, option: CapacityOption, context: CommandContext, in_flight: float) -> None:
        """Set the fields `commands` and `notes` of an option.

        `in_flight` is the expected number of requests in flight on all replicas together.
        """
        option.commands = commands_of(option, context, in_flight)
        option.notes = server_notes(option, context)

    def _context(self, facts: RequestFacts, rate_per_s: float) -> CommandContext:
        return CommandContext(
            self.plan,
            self.model_name,
            rate_per_s,
            facts.prompt_tokens,
            facts.output_tokens,
            self.space,
        )

    def _pareto(self, candidates: Sequence[_Candidate], facts: RequestFacts) -> list[ParetoPoint]:
        """Return the Pareto set: the points for which no other point has both more speed per user and a lower cost.

        A point is a configuration at one load. Simulating all points would take too long. The speed and the cost of
        each point are first estimated with formulas. Only the points that are best by these estimates (`_frontier`) are
        simulated. The simulated points are then compared with each other.
        """
        points = self._frontier(candidates)
        found: list[ParetoPoint] = []
        for number, (candidate, index) in enumerate(points, 1):
            self.progress(f"Pareto set: {number} of {len(points)}")
            point = self._point(candidate, index, facts)
            if point is not None:
                found.append(point)
        self._counts.simulations += len(points)
        return undominated(found)

    def _frontier(self, candidates: Sequence[_Candidate]) -> list[tuple[_Candidate, int]]:
        """Return the points that are best by formula, as pairs of a candidate and an index in the candidate's curve.

        A candidate is a configuration, and a point is a candidate at one load. A point is best if no other point has
        both a lower cost per token and a lower TPOT. If more than PARETO_POINTS points are best, about PARETO_POINTS of
        them are returned, evenly spaced.

        Points of these three groups are ignored:

        - points whose TTFT misses an objective.
        - points that need too many GPUs or too many separate workers.
        - points on a GPU that has no price, if the user has given prices.
        """
        rows: list[tuple[float, float, _Candidate, int]] = []
        for candidate in candidates:
            curve = candidate.curve
            paid = self._gpu_hour(candidate.configuration)
            if curve is None or (paid is None and self.prices):
                continue
            price = paid.amount if paid else 1.0
            allowed = [each for each in self.objectives if each.figure.startswith("ttft")]
            fits = np.ones(len(curve.in_flight), bool)
            for objective in allowed:
                fits &= curve.ttft_s <= objective.bound
            for index in np.flatnonzero(fits).tolist():
                pools = self._point_pools(candidate, index)
                if pools is not None:
                    gpus = sum(pool.replicas * pool.gpus for pool in pools)
                    cost = price * gpus / (pools[0].replicas * float(curve.per_s[index]))
                    rows.append((1 / float(curve.tpot_s[index]), cost, candidate, index))
        rows.sort(key=lambda row: (-row[0], row[1]))
        best, frontier = math.inf, []
        for _, cost, candidate, index in rows:
            if cost < best:
                best = cost
                frontier.append((candidate, index))
        if len(frontier) > PARETO_POINTS:
            chosen = np.unique(np.round(np.linspace(0, len(frontier) - 1, PARETO_POINTS)).astype(int))
            frontier = [frontier[index] for index in chosen]
        return frontier

    def _point_pools(self, candidate: _Candidate, index: int) -> list[ReplicaPool] | None:
        """Return the pools of GPUs with which `candidate` serves the load at one point of its load curve.

        `index` is the index of the point. If the configuration has separate workers for prefill and decode, the result
        is a pool of decode workers and a pool of prefill workers. Otherwise it is one pool with a single replica.

        Return None in two cases:

        - The pools would need more GPUs than --max-gpus.
        - More than MAX_PARETO_WORKERS workers would be needed to match the ratio of prefill to decode.
        """
        configuration, curve = candidate.configuration, candidate.curve
        assert curve is not None
        max_replicas = MAX_PARETO_WORKERS
        if self.space.max_gpus is not None:
            max_replicas = min(max_replicas, self.space.max_gpus // configuration.gpus)
        if not configuration.disaggregated:
            return [ReplicaPool(1, configuration.gpus)] if max_replicas else None
        workers = whole_workers(float(curve.prefill_workers[index]), max_replicas)
        if workers is None:
            return None
        return [ReplicaPool(workers.decode, configuration.gpus), ReplicaPool(workers.prefill, configuration.gpus)]

    def _point(self, candidate: _Candidate, index: int, facts: RequestFacts) -> ParetoPoint | None:
        """Simulate the point `index` of a candidate's curve.

        Return None if a request does not complete, or if the server is overloaded.
        """
        curve, configuration = candidate.curve, candidate.configuration
        pools = self._point_pools(candidate, index)
        assert curve is not None
        assert pools
        replicas = pools[0].replicas
        workers = WorkerPools(pools[1].replicas, replicas) if configuration.disaggregated else None
        in_flight = replicas * float(curve.in_flight[index])
        per_s = PARETO_LOAD * replicas * float(curve.per_s[index]) / facts.per_arrival
        server = SimulatedServer(
            self.plan, configuration, self.space, candidate.deployment, figure_reader(self.objectives)
        )
        run = server.run(per_s, workers, enough_requests(in_flight))
        frame = frame_of_run(run)
        ttft, tpot = (LATENCIES[name].values(frame) for name in ("ttft", "tpot"))
        completed = completed_share(frame.due_ns, frame.end_ns)
        if not frame.complete.all() or not len(tpot) or completed < MIN_COMPLETED:
            return None
        option = option_of(configuration, accuracy=server.accuracy, gpus=configuration.gpus)
        if workers is not None:
            option.prefill_workers, option.decode_workers = workers.prefill, workers.decode
            option.gpus = configuration.gpus * (workers.prefill + workers.decode)
        assert option.gpus
        paid = self._gpu_hour(configuration)
        purchase = paid and replace(paid, amount=paid.amount * option.gpus)
        option.figures = list(figure_reader(self.objectives)(run))
        self._add_commands(option, self._context(facts, per_s), in_flight)
        completed_per_s = per_s * min(1.0, completed)
        option.pay(purchase, completed_per_s, facts.output_tokens * facts.per_arrival)
        rate = completed_per_s * facts.per_arrival
        return ParetoPoint(
            option=option,
            per_s=completed_per_s,
            in_flight=in_flight,
            tokens_per_s_per_user=1 / float(np.median(tpot)),
            tokens_per_s_per_gpu=rate * facts.output_tokens / option.gpus,
            ttft_p99_s=float(np.quantile(ttft, 0.99)),
            tpot_p99_s=float(np.quantile(tpot, 0.99)),
            cost_per_million_tokens=option.cost_per_million_tokens,
            meets=objectives_check(self.objectives)(option.figures, 1.0),
        )


def completed_share(due_ns: Any, end_ns: Any) -> float:
    """Return how many requests end for each request that arrives: about 1, or less than 1 if the server is overloaded.

    `due_ns` and `end_ns` contain the due time and the end of each request. Only arrivals and ends in the second half of
    the time between the first and the last due time are counted.
    """
    begin_ns, last_ns = (due_ns.min() + due_ns.max()) / 2, due_ns.max()
    arrived = int(((due_ns > begin_ns) & (due_ns <= last_ns)).sum())
    ended = int(((end_ns > begin_ns) & (end_ns <= last_ns)).sum())
    return ended / max(1, arrived)


def whole_workers(prefill_workers: float, max_workers: int = MAX_PARETO_WORKERS) -> WorkerPools | None:
    """Return the numbers of prefill and decode workers for a ratio of `prefill_workers` prefill workers per decode
    worker.

    The ratio may be a fraction, but the result consists of whole numbers. There are always enough prefill workers for
    the decode workers. Of all pairs with at most `max_workers` workers, the pair that wastes the least capacity is
    returned. Return None if there is no such pair.
    """
    best = None
    waste = math.inf
    for decode in range(1, max_workers):
        prefill = max(1, math.ceil(prefill_workers * decode))
        if prefill + decode > max_workers:
            break
        excess = (prefill + decode) / (decode * (1 + prefill_workers))
        if excess < waste - 1e-3:
            best, waste = WorkerPools(prefill, decode), excess
    return best


def undominated(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """Return the best points: no other point has both a higher speed per user and a lower cost. The fastest comes
    first.

    Of two points with an equal speed or an equal cost, only the better one is returned. The cost is that of a million
    output tokens. If the price of the GPUs is unknown, the GPU time per token is compared instead of the cost.
    """

    def cost(point: ParetoPoint) -> float:
        if point.cost_per_million_tokens is not None:
            return point.cost_per_million_tokens
        return 1 / point.tokens_per_s_per_gpu

    result = []
    lowest = math.inf
    for point in sorted(points, key=lambda each: (-each.tokens_per_s_per_user, cost(each))):
        if cost(point) < lowest:
            lowest = cost(point)
            result.append(point)
    return result


def rank(option: CapacityOption) -> tuple[Any, ...]:
    """Return the sort key of an option.

    Options are sorted by cost per hour, then by the number of GPUs. Of two otherwise equal options, the simpler
    configuration comes first. Options without a price follow the options with a price. Options that do not meet the
    objectives come last.
    """
    unknown = option.cost_per_hour is None
    extras = configuration_of(option).extras
    return not option.gpus, unknown, option.cost_per_hour or 0.0, option.gpus or 0, extras, option.gpu, option.layout
