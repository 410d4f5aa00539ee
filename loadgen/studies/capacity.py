"""Finds how many GPUs a load needs in one configuration, with simulations in virtual time.

- If all replicas are equal, a search finds the highest request rate at which one replica meets the objectives.
- If prefill and decode have separate workers, a search finds the smallest numbers of workers that meet the objectives
  at the requested rate.

The result is an interval, because the real server may be slower or faster than the performance model. Further searches
find the ends of this interval. They reuse the simulations of the model, because a server that is `f` times slower
behaves like the model with a slower clock. At the request rate `r`, the latency of this server is

    latency_server(r) = f * latency_model(f * r).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from loadgen.analysis.capacity import objectives_check
from loadgen.analysis.objectives import Objective
from loadgen.analysis.run.runfile import Run
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.hardware import constant
from loadgen.servers.hardware.disaggregation import transfer_s
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.hardware.validation import Accuracy
from loadgen.servers.simulated.disaggregated_engine import WorkerPools
from loadgen.servers.simulated.scheduler_presets import CURRENT
from loadgen.servers.simulated.step_time import StepDurations
from loadgen.studies.configurations import ENGINES, Configuration, SearchSpace
from loadgen.studies.price_list import Purchase, ReplicaPool
from loadgen.studies.simulate import ResolvedModel, ServerModel, model_accuracy, run_in_memory

RATE_STEP = 1.03
"""The search tries the rates `RATE_STEP**power` in requests per second, where `power` is an integer."""
FIRST_STRIDE = 2
"""First change of `power` in the search, which begins at the result of a formula."""
MIN_POWER = -140
"""Lowest `power` in the search: about one request per minute, where requests do not overlap."""
MAX_POWER = 389
"""Highest `power` in the search: about 100,000 requests per second, more than any server can answer."""
SIMULATED_S = 60
"""Duration of a simulation in s, long enough for a growing queue to show."""
REQUEST_COUNTS = range(1000, 5001)
"""Allowed number of requests in a simulation. With fewer requests, a p99 is unreliable
(loadgen.analysis.stats.samples_needed)."""
REQUESTS_PER_SLOT = 4
"""Minimum number of requests in a simulation, as a multiple of the number in flight, so that this number is reached."""
MAX_WORKERS = 10
"""Maximum number of separate workers that are simulated together. Larger pools are divided into equal parts."""
MAX_GROWTH_STEPS = 12
"""Maximum number of times that pools of workers are enlarged until they meet the objectives."""
SMALLER_POOLS = ((-1, 0), (0, -1), (1, -2), (-2, 1))
"""Changes of (prefill workers, decode workers) that lower the total number of workers."""

ComputeFigures = Callable[[Run], Sequence[float | None]]
"""Returns the measured value for each objective of a run, in the order of the objectives. Times are in seconds."""
ObjectivesMet = Callable[[Sequence[float | None], float], bool]
"""Returns True if these values, multiplied by a factor, meet the objectives."""


class CapacityOption(msgspec.Struct, kw_only=True):
    """The number of GPUs that the load needs in one configuration, and what they cost.

    The predictions of the performance model are not exact: nine of ten measured step times differ from the predicted
    time by at most the factor `1 + step_error`. Fields whose names end in `_low` or `_high` therefore hold the ends of
    intervals. They are the results for a server that is slower or faster than predicted by this factor.
    """

    gpu: str
    format: str = "bf16"
    engine: str = "vllm"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    attention_parallel: int = 1
    """Attention groups of `tensor_parallel` GPUs, which share the experts."""
    draft_tokens: int = 0
    """Drafted tokens per step; 0 without speculative decoding."""
    replica_gpus: int = 1
    """Number of GPUs of one replica, or of one worker."""
    prefill_workers: int | None = None
    """Number of separate workers that compute prompts; None if each replica computes prompts and decodes."""
    decode_workers: int | None = None
    not_possible: str = ""
    """Reason why the configuration cannot serve the load; empty if it can. With a reason, the rate, GPU and cost fields
    are None."""
    replica_per_s: float | None = None
    """Highest rate of one replica in requests per second. With separate workers: of all workers together."""
    replica_per_s_low: float | None = None
    """Lower end of the interval; 0 if the slower server meets the objectives at no rate. None if not computed."""
    replica_per_s_high: float | None = None
    gpus: int | None = None
    """Number of GPUs without spare replicas."""
    gpus_low: int | None = None
    gpus_high: int | None = None
    """Upper end of the interval; None if the slower server meets the objectives at no rate."""
    spare_gpus: int = 0
    """Number of GPUs in spare replicas, which replace interrupted spot instances."""
    region: str = ""
    spot: bool = False
    """True if the cost is that of spot instances."""
    cost_per_hour: float | None = None
    """Cost of all GPUs, including spare replicas."""
    currency: str = ""
    """Currency of the costs: a sign such as `$` or a code such as `EUR`. Empty if the price did not name it."""
    cost_per_million_tokens: float | None = None
    """Cost of a million output tokens at the requested rate."""
    accuracy: dict[str, Accuracy] = {}
    """Accuracy of the predicted latencies in published measurements of this engine and GPU type."""
    figures: list[float | None] = []
    """Predicted value for each objective if `gpus` GPUs share the requested rate."""
    commands: dict[str, str] = {}
    """Command lines by name: `limits` and `simulate` of loadgen, and `server`, which starts the engine. If there are
    separate workers, a command for each kind of worker replaces `server`."""
    notes: list[str] = []
    """Sentences about the server's commands: what their placeholders stand for, and which settings they lack."""

    @property
    def layout(self) -> str:
        """Text that says how the GPUs of this option are used.

        For example, `TP2 PP2` means 2 pipeline stages of 2 GPUs each. `TP1 2P+3D` means 2 prefill workers and 3 decode
        workers of 1 GPU each.
        """
        layout = configuration_of(self).layout
        if self.prefill_workers is None:
            return layout
        return f"{layout} {self.prefill_workers}P+{self.decode_workers}D" if self.prefill_workers else f"{layout} P+D"

    @property
    def pools(self) -> list[ReplicaPool]:
        """The pool of replicas, or the pools of prefill workers and decode workers. Spare replicas are not included."""
        if self.prefill_workers is not None and self.decode_workers is not None:
            return [
                ReplicaPool(self.prefill_workers, self.replica_gpus),
                ReplicaPool(self.decode_workers, self.replica_gpus),
            ]
        return [ReplicaPool((self.gpus or 0) // self.replica_gpus, self.replica_gpus)]

    def pay(self, purchase: Purchase | None, rate_per_s: float, output_tokens: float) -> None:
        """Store the cost of this option. Nothing is stored if `purchase` is None.

        `purchase` is the price of the GPUs per hour. `rate_per_s` is the number of arrivals per second, and
        `output_tokens` is the number of output tokens per arrival.
        """
        if purchase is None:
            return
        self.cost_per_hour = purchase.amount
        self.currency = purchase.currency
        self.region = purchase.region
        self.spot = purchase.spot
        self.spare_gpus = purchase.spare_gpus
        self.cost_per_million_tokens = purchase.amount / (3600 * rate_per_s * output_tokens) * 1e6


def configuration_of(option: CapacityOption) -> Configuration:
    """Return the configuration that an option describes."""
    return Configuration(
        gpu=option.gpu,
        format=option.format,
        engine=option.engine,
        tensor=option.tensor_parallel,
        pipeline=option.pipeline_parallel,
        expert_parallel=option.expert_parallel,
        attention_data=option.attention_parallel,
        draft_tokens=option.draft_tokens,
        disaggregated=option.prefill_workers is not None,
    )


def option_of(configuration: Configuration, **fields: object) -> CapacityOption:
    """Return a CapacityOption for a configuration. `fields` contains values of additional fields, such as `gpus`."""
    workers = {"prefill_workers": 0, "decode_workers": 0} if configuration.disaggregated else {}
    return CapacityOption(
        gpu=configuration.gpu,
        format=configuration.format,
        engine=configuration.engine,
        tensor_parallel=configuration.tensor,
        pipeline_parallel=configuration.pipeline,
        expert_parallel=configuration.expert_parallel,
        attention_parallel=configuration.attention_data,
        draft_tokens=configuration.draft_tokens,
        replica_gpus=configuration.gpus,
        **(workers | fields),  # type: ignore[arg-type]
    )


def enough_requests(in_flight: float) -> int:
    """Return how many requests to simulate if about `in_flight` of them are in flight at the same time."""
    return max(REQUEST_COUNTS[0], math.ceil(REQUESTS_PER_SLOT * in_flight))


class SimulatedServer:
    """A server with one configuration, simulated in virtual time.

    Results are cached by request rate and number of workers.
    """

    def __init__(
        self,
        plan: Plan,
        configuration: Configuration,
        space: SearchSpace,
        deployment: Deployment,
        compute: ComputeFigures,
    ) -> None:
        self._plan = plan
        self._compute_figures = compute
        self._space = space
        self.configuration = configuration
        self.deployment = deployment
        self._preset = ENGINES[configuration.engine].preset()
        self._step_time: StepDurations | None = None
        self._results: dict[tuple[float, WorkerPools | None], Sequence[float | None]] = {}

    @property
    def simulations(self) -> int:
        """Number of simulations so far."""
        return len(self._results)

    @property
    def accuracy(self) -> dict[str, Accuracy]:
        """The errors of predicted latencies, as compared with published measurements of this engine, GPU and kind of
        model.
        """
        separate = WorkerPools(1, 1) if self.configuration.disaggregated else None
        changed = ["--step-tokens"] if self._space.step_tokens else []
        return model_accuracy(self._plan, self.configuration.engine, CURRENT, self.deployment, separate, changed)

    def run(self, per_s: float, workers: WorkerPools | None = None, requests: int | None = None) -> Run:
        """Simulate `per_s` arrivals per second, and return the run.

        `requests` is the number of requests. By default, the number depends on the rate.
        """
        if self._step_time is None:
            self._step_time = self._preset.step_time(self.deployment)
        kv_tokens = self._preset.kv_tokens(self.deployment)
        resolved = ResolvedModel(
            policy=self._space.policy(self.configuration.engine, kv_tokens),
            kv_tokens=kv_tokens,
            step_time=self._step_time,
            request_s=0.0,
            path_s=self.deployment.framework.server_s,
            version=self._preset.version,
            model=self.deployment.model.name,
            hardware={},
            workers=workers,
            transfer_s=partial(transfer_s, self.deployment),
        )
        number = requests or max(REQUEST_COUNTS[0], min(REQUEST_COUNTS[-1], round(SIMULATED_S * per_s)))
        plan = self._plan.replaced(arrivals=f"poisson:{per_s:.6g}", n=number)
        return run_in_memory(plan, ServerModel(), resolved=resolved)

    def figures_at(self, per_s: float, workers: WorkerPools | None = None) -> Sequence[float | None]:
        """Return one predicted figure per objective, for `per_s` arrivals per second.

        For example, the figure for the objective `ttft.p99 < 500ms` is the p99 of TTFT. `workers` is needed only for a
        server with separate prefill and decode workers.
        """
        key = per_s, workers
        if key not in self._results:
            self._results[key] = self._compute_figures(self.run(per_s, workers))
        return self._results[key]

    def highest_power(self, met: ObjectivesMet, slowdown: float, start: int) -> int | None:
        """Return the largest exponent `power` for which the objectives are met at `RATE_STEP**power` requests per
        second.

        For each exponent, the server is simulated at this rate. The simulated latencies are multiplied by `slowdown`,
        and `met` compares them with the objectives.

        The factor `slowdown` is for a server that is slower than the simulation. With 1.2, for example, everything
        takes 1.2 times as long there. If the request rate is also 1.2 times lower, this server behaves like the
        simulated server in slow motion, so all latencies are 1.2 times as long. The highest rate of the slower server
        is therefore `RATE_STEP**power / slowdown`. The caller must do this division.

        The search begins at the exponent `start`. Return None if the objectives are not met even at
        `RATE_STEP**MIN_POWER`. Raises PlanError if they are still met at `RATE_STEP**MAX_POWER`.
        """

        def meets(power: int) -> bool:
            return met(self.figures_at(RATE_STEP**power), slowdown)

        low = max(MIN_POWER, min(start, MAX_POWER - 1))
        high = None
        stride = FIRST_STRIDE
        while low > MIN_POWER and not meets(low):
            high = low
            low = max(MIN_POWER, low - stride)
            stride *= 2
        if low == MIN_POWER and not meets(low):
            return None
        stride = FIRST_STRIDE
        if high is None:
            high = min(MAX_POWER, low + stride)
            while meets(high):
                if high == MAX_POWER:
                    raise PlanError(
                        f"the objectives limit no rate: {self.configuration.gpu} meets them at {RATE_STEP**high:,.0f} "
                        "requests/s",
                        f"Use bounds that requests can exceed within {SIMULATED_S} s, the length of a simulation, such "
                        "as --objective 'ttft.p99 < 1s'.",
                    )
                low = high
                stride *= 2
                high = min(MAX_POWER, low + stride)
        while high - low > 1:
            middle = (low + high) // 2
            if meets(middle):
                low = middle
            else:
                high = middle
        return low

    def smallest_pools(
        self, objectives: Sequence[Objective], slowdown: float, per_s: float, start: WorkerPools
    ) -> WorkerPools | None:
        """Return the smallest pools of workers with which a server meets the objectives at `per_s` arrivals per second.

        The server is slower than the model by the factor `slowdown`. Pools of more than MAX_WORKERS workers are divided
        into equal parts that share the load, and only one part is simulated.

        The search begins with the pools `start` and enlarges them until they meet the objectives. In each step, it
        tries a larger prefill pool and a larger decode pool, and keeps the one that comes closer to the objectives. If
        neither helps, it enlarges both. Finally the search makes the pools smaller as long as they meet the objectives.
        Return None if no pools are found that meet the objectives.
        """
        parts = max(1, math.ceil((start.prefill + start.decode) / MAX_WORKERS))
        prefill, decode = math.ceil(start.prefill / parts), math.ceil(start.decode / parts)
        rate = per_s * slowdown / parts

        def excess(prefill: int, decode: int) -> float:
            """Return the largest ratio of a predicted figure to its bound, with `prefill` and `decode` workers in the
            two pools.

            The smaller the result, the closer the pools are to the objectives. The result is infinity if a figure is
            missing or a bound is 0.
            """
            figures = self.figures_at(rate, WorkerPools(prefill, decode))
            if None in figures or any(objective.bound <= 0 for objective in objectives):
                return math.inf
            return max(
                figure * slowdown / objective.bound
                for objective, figure in zip(objectives, figures, strict=True)
                if figure is not None
            )

        def meets(prefill: int, decode: int) -> bool:
            figures = self.figures_at(rate, WorkerPools(prefill, decode))
            return objectives_check(objectives)(figures, slowdown)

        for _ in range(MAX_GROWTH_STEPS):
            if meets(prefill, decode):
                break
            more_prefill, more_decode = prefill + max(1, prefill // 4), decode + max(1, decode // 4)
            with_prefill, with_decode = excess(more_prefill, decode), excess(prefill, more_decode)
            if min(with_prefill, with_decode) >= excess(prefill, decode):
                prefill, decode = more_prefill, more_decode
            elif with_prefill <= with_decode:
                prefill = more_prefill
            else:
                decode = more_decode
        else:
            return None
        smaller: tuple[int, int] | None = (prefill, decode)
        while smaller is not None:
            prefill, decode = smaller
            neighbours = [(prefill + change, decode + other) for change, other in SMALLER_POOLS]
            smaller = next((pools for pools in neighbours if min(pools) >= 1 and meets(*pools)), None)
        return WorkerPools(prefill * parts, decode * parts)


def replica_option(server: SimulatedServer, per_s: float, met: ObjectivesMet, expected_per_s: float) -> CapacityOption:
    """Return an option with enough equal replicas of `server` to serve `per_s` arrivals per second.

    A search finds the highest rate at which one replica meets the objectives. The search begins at `expected_per_s`,
    the rate that a formula predicts. If even a single request misses an objective, no number of replicas is enough. The
    option then has no number of GPUs, and its field `not_possible` states the reason.
    """
    result = option_of(server.configuration, accuracy=server.accuracy)
    start = round(math.log(max(expected_per_s, 1e-3), RATE_STEP))
    power = server.highest_power(met, 1.0, start)
    if power is None:
        result.not_possible = "a single request misses an objective"
        result.figures = list(server.figures_at(RATE_STEP**MIN_POWER))
        return result
    result.replica_per_s = RATE_STEP**power
    replicas = math.ceil(per_s / result.replica_per_s)
    result.gpus = replicas * result.replica_gpus
    result.figures = list(server.figures_at(per_s / replicas))
    return result


def add_interval(result: CapacityOption, server: SimulatedServer, per_s: float, met: ObjectivesMet) -> None:
    """Set the fields of the option `result` whose names end in `_low` and `_high`: the ends of two intervals.

    One interval is for the rate of a replica. The other one is for the number of GPUs that are needed for `per_s`
    requests per second. The option must consist of equal replicas.

    Predicted times may be wrong by the factor `1 + step_error`. One end of each interval is therefore computed for a
    server that is slower than `server` by this factor. The other end is for a server that is faster by this factor.
    `met` checks whether a server meets the objectives.
    """
    assert result.replica_per_s
    power = round(math.log(result.replica_per_s, RATE_STEP))
    factor = 1 + constant("step_error")
    slow_power = server.highest_power(met, factor, power)
    fast_power = server.highest_power(met, 1 / factor, power)
    assert fast_power is not None
    result.replica_per_s_high = RATE_STEP**fast_power * factor
    result.replica_per_s_low = 0.0 if slow_power is None else RATE_STEP**slow_power / factor
    result.gpus_low = math.ceil(per_s / result.replica_per_s_high) * result.replica_gpus
    if result.replica_per_s_low:
        result.gpus_high = math.ceil(per_s / result.replica_per_s_low) * result.replica_gpus


def worker_option(
    server: SimulatedServer, per_s: float, objectives: Sequence[Objective], start: WorkerPools
) -> CapacityOption:
    """Return an option with enough separate prefill and decode workers to serve `per_s` arrivals per second.

    The search for the numbers of workers begins with the pools `start`.
    """
    result = option_of(server.configuration, accuracy=server.accuracy)
    pools = server.smallest_pools(objectives, 1.0, per_s, start)
    if pools is None:
        result.not_possible = "separate workers miss an objective"
        return result
    result.prefill_workers, result.decode_workers = pools.prefill, pools.decode
    result.replica_per_s = per_s
    result.gpus = (pools.prefill + pools.decode) * result.replica_gpus
    parts = max(1, math.ceil((start.prefill + start.decode) / MAX_WORKERS))
    one_part = WorkerPools(pools.prefill // parts, pools.decode // parts)
    result.figures = list(server.figures_at(per_s / parts, one_part))
    return result


def add_worker_interval(
    result: CapacityOption, server: SimulatedServer, per_s: float, objectives: Sequence[Objective]
) -> None:
    """Set `gpus_low` and `gpus_high` of `result`, an option with separate workers for prefill and decoding.

    These numbers of GPUs show the uncertainty of the prediction for `per_s` arrivals per second. `gpus_low` GPUs are
    enough if the server is faster than predicted by the factor `1 + step_error`. `gpus_high` GPUs are enough if the
    server is slower by this factor. If the slower server cannot meet the objectives, `gpus_high` is None.
    """
    assert result.prefill_workers
    assert result.decode_workers
    factor = 1 + constant("step_error")
    start = WorkerPools(result.prefill_workers, result.decode_workers)
    fast = server.smallest_pools(objectives, 1 / factor, per_s, start)
    slow = server.smallest_pools(objectives, factor, per_s, start)
    result.gpus_low = (fast.prefill + fast.decode) * result.replica_gpus if fast else result.gpus
    result.gpus_high = (slow.prefill + slow.decode) * result.replica_gpus if slow else None
