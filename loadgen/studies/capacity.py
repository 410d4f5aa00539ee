"""Finds how many GPUs a load needs, for each GPU type and each size of a replica in GPUs.

For each GPU type and replica size, a search in virtual time finds the highest request rate at which one replica of
the server meets the objectives.

The number of GPUs is given as an interval, because the real server may be slower or faster than the performance model.
A server that is `f` times slower behaves like the model with a slower clock:

    latency_server(r) = f * latency_model(f * r), where r is the request rate.

The searches for the ends of the interval can therefore reuse simulations of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from loadgen.analysis.prices import HINT, Price, parse_price
from loadgen.analysis.run.runfile import Run
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.hardware import HardwareError, constant, gpu
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.hardware.throughput_model import Load, formula_times
from loadgen.servers.hardware.validation import Accuracy
from loadgen.servers.simulated.scheduler_presets import CURRENT, Engine, find_engine
from loadgen.studies.simulate import ResolvedModel, ServerModel, model_accuracy, resolve_model, run_in_memory

RATE_STEP = 1.03
"""The search tries the rates `RATE_STEP**power` in requests per second, where `power` is an integer."""
FIRST_STRIDE = 16
"""First change of `power` in the search."""
MIN_POWER = -140
"""Lowest `power` in the search: about one request per minute, where requests do not overlap."""
MAX_POWER = 389
"""Highest `power` in the search: about 100,000 requests per second, more than any server can answer."""
SIMULATED_S = 60
"""Duration of a simulation in s, long enough for a growing queue to show."""
REQUEST_COUNTS = range(1000, 5001)
"""Allowed number of requests in a simulation. With fewer requests, a p99 is unreliable
(loadgen.analysis.stats.samples_needed)."""
START_IN_FLIGHT = 64
"""The search starts at the rate that keeps this number of requests in flight."""
START_PROMPT_TOKENS = 512
START_OUTPUT_TOKENS = 128

ComputeFigures = Callable[[Run], Sequence[float | None]]
"""Returns the measured value for each objective of a run, in the order of the objectives. Times are in seconds."""
ObjectivesMet = Callable[[Sequence[float | None], float], bool]
"""Returns True if these values, multiplied by a factor, meet the objectives."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The GPUs of one replica: `tensor` GPUs of one type that share the model."""

    gpu: str
    """GPU name in the hardware tables."""
    tensor: int
    format: str
    hour_cost: Price | None
    """Price of one GPU per hour."""


class CapacityOption(msgspec.Struct, kw_only=True):
    """The number of GPUs of one type that the load needs, with intervals and costs.

    Fields that end in `_low` or `_high` are the ends of intervals. These fields hold the results for a server that is
    slower or faster than the performance model by the factor `1 + step_error`. The model predicts nine of ten measured
    step times within this factor.
    """

    gpu: str
    tensor_parallel: int
    format: str
    not_possible: str = ""
    """Reason why the candidate cannot serve the load; empty if it can. With a reason, the rate, GPU and cost fields are
    None."""
    replica_per_s: float | None = None
    """Highest rate of one replica in requests per second."""
    replica_per_s_low: float | None = None
    """Lower end of the interval; 0 if the slower server meets the objectives at no rate."""
    replica_per_s_high: float | None = None
    gpus: int | None = None
    gpus_low: int | None = None
    gpus_high: int | None = None
    """Upper end of the interval; None if the slower server meets the objectives at no rate."""
    cost_per_hour: float | None = None
    currency: str = ""
    """Currency of the costs: a sign such as `$` or a code such as `EUR`. Empty if the price did not name it."""
    cost_per_million_tokens: float | None = None
    """Cost of a million output tokens at the requested rate."""
    accuracy: dict[str, Accuracy] = {}
    """Accuracy of the predicted latencies in published measurements of this engine and GPU type."""
    figures: list[float | None] = []
    """Predicted value for each objective if `gpus` GPUs share the requested rate."""


class Replica:
    """A simulated replica of the server. Results are cached by request rate."""

    def __init__(self, plan: Plan, server_model: ServerModel, compute_figures: ComputeFigures) -> None:
        self._plan = plan
        self._server_model = server_model
        self._compute_figures = compute_figures
        self._resolved: ResolvedModel | None = None
        self._results: dict[float, Sequence[float | None]] = {}
        self.output_tokens = 0.0
        """Mean output tokens per request of the latest simulation."""

    def figures_at(self, per_s: float) -> Sequence[float | None]:
        """Return the predicted value for each objective at `per_s` requests per second."""
        if per_s not in self._results:
            if self._resolved is None:
                self._resolved = resolve_model(self._plan, self._server_model)
            number = max(REQUEST_COUNTS[0], min(REQUEST_COUNTS[-1], round(SIMULATED_S * per_s)))
            plan = self._plan.replaced(arrivals=f"poisson:{per_s:.6g}", n=number)
            run = run_in_memory(plan, self._server_model, resolved=self._resolved)
            self._results[per_s] = self._compute_figures(run)
            self.output_tokens = sum(record.output_tokens or 0 for record in run.records) / max(1, len(run.records))
        return self._results[per_s]

    def highest_power(self, met: ObjectivesMet, slowdown: float, start: int) -> int | None:
        """Return the largest exponent `power` for which the objectives are met at the rate `RATE_STEP**power`.

        The rate is in requests per second, and `power` is an integer. The model is simulated at this rate, and its
        latencies are multiplied by `slowdown` before they are compared with the objectives. This is equivalent to a
        server that is slower by this factor, at the rate `RATE_STEP**power / slowdown`.

        The search begins at the exponent `start`. Return None if the objectives are not met at any rate. Raises
        PlanError if they are met at every rate, up to MAX_POWER.
        """

        def meets(power: int) -> bool:
            return met(self.figures_at(RATE_STEP**power), slowdown)

        if not meets(MIN_POWER):
            return None
        low = min(start, MAX_POWER - 1)
        stride = FIRST_STRIDE
        while low > MIN_POWER and not meets(low):
            low = max(MIN_POWER, low - stride)
            stride *= 2
        stride = FIRST_STRIDE
        high = min(MAX_POWER, low + stride)
        while meets(high):
            if high == MAX_POWER:
                raise PlanError(
                    f"the objectives limit no rate: {self._server_model.gpu} meets them at {RATE_STEP**high:,.0f} "
                    "requests/s",
                    f"Use bounds that requests can exceed within {SIMULATED_S} s, the length of a simulation, such as "
                    "--objective 'ttft.p99 < 1s'.",
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


def capacity_option(
    plan: Plan,
    candidate: Candidate,
    base: ServerModel,
    per_s: float,
    compute_figures: ComputeFigures,
    met: ObjectivesMet,
) -> CapacityOption:
    """Return how many GPUs of the candidate's type are needed for `per_s` requests per second, and their costs.

    - `plan` describes the requests.
    - `base` is the simulated server. The candidate replaces its hardware.
    - `compute_figures` computes the value for each objective from a simulated run.
    - `met` tests whether these values meet the objectives.

    If the candidate cannot serve the load, the result contains the reason. Raises LoadgenError for an unknown GPU or
    model, and for requests that cannot be simulated.
    """
    result = CapacityOption(gpu=candidate.gpu, tensor_parallel=candidate.tensor, format=candidate.format)
    server_model = replace(base, gpu=candidate.gpu, tensor=candidate.tensor, format=candidate.format)
    engine, deployment = _deployment(plan, server_model)
    result.accuracy = model_accuracy(plan.server, server_model.vintage or CURRENT, deployment)
    try:
        engine.kv_tokens(deployment)
    except HardwareError as error:
        result.not_possible = str(error).partition(";")[0]
        return result
    load = Load(START_PROMPT_TOKENS, START_OUTPUT_TOKENS, START_IN_FLIGHT)
    expected_per_s = formula_times(deployment, load).output_tokens_per_s / START_OUTPUT_TOKENS
    start = max(MIN_POWER, round(math.log(expected_per_s, RATE_STEP)))
    replica = Replica(plan, server_model, compute_figures)
    power = replica.highest_power(met, 1.0, start)
    if power is None:
        result.not_possible = "meets the objectives at no rate"
        result.figures = list(replica.figures_at(RATE_STEP**MIN_POWER))
        return result
    result.replica_per_s = RATE_STEP**power
    replicas = math.ceil(per_s / result.replica_per_s)
    result.gpus = replicas * candidate.tensor
    _add_interval(result, replica, met, power, per_s)
    result.figures = list(replica.figures_at(per_s / replicas))
    if candidate.hour_cost is not None:
        result.cost_per_hour = result.gpus * candidate.hour_cost.amount
        result.currency = candidate.hour_cost.currency
        result.cost_per_million_tokens = result.cost_per_hour / (3600 * per_s * replica.output_tokens) * 1e6
    return result


def _add_interval(result: CapacityOption, replica: Replica, met: ObjectivesMet, power: int, per_s: float) -> None:
    """Set the `_low` and `_high` fields of a result.

    `power` stands for the request rate `RATE_STEP**power` in the middle of the interval, at which the searches for both
    ends begin. `per_s` is the request rate of the load.
    """
    factor = 1 + constant("step_error")
    slow_power = replica.highest_power(met, factor, power)
    fast_power = replica.highest_power(met, 1 / factor, power)
    assert fast_power is not None
    result.replica_per_s_high = RATE_STEP**fast_power * factor
    result.replica_per_s_low = 0.0 if slow_power is None else RATE_STEP**slow_power / factor
    result.gpus_low = math.ceil(per_s / result.replica_per_s_high) * result.tensor_parallel
    if result.replica_per_s_low:
        result.gpus_high = math.ceil(per_s / result.replica_per_s_low) * result.tensor_parallel


def candidates(
    gpus: Sequence[str], tensors: Sequence[int], formats: Sequence[str], server_model: ServerModel
) -> list[Candidate]:
    """Return all combinations of GPU types, numbers of GPUs and weight formats.

    `gpus` are names with an optional price per hour, such as `H100=2.50` or `H100=$2.50`.
    Raises PlanError for an unknown GPU, an invalid price or prices in different currencies.
    """
    result = []
    for text in gpus:
        name, priced, price = text.partition("=")
        hint = "Write --gpu H100, or with the price of one GPU per hour: --gpu 'H100=$2.50'"
        try:
            card = gpu(name, server_model.hardware)
        except HardwareError as error:
            raise PlanError(str(error), hint) from None
        try:
            hour_cost = parse_price(price) if priced else None
        except ValueError as error:
            raise PlanError(f"--gpu {text}: {error}", f"{HINT}, such as --gpu 'H100=$2.50'") from None
        result += [Candidate(card.name, tensor, name, hour_cost) for tensor in tensors for name in formats]
    currencies = sorted({candidate.hour_cost.currency for candidate in result if candidate.hour_cost})
    if len(currencies) > 1:
        named = " and ".join(currency or "none" for currency in currencies)
        raise PlanError(f"--gpu: prices in different currencies ({named})", "Give all prices in the same currency.")
    return result


def _deployment(plan: Plan, server_model: ServerModel) -> tuple[Engine, Deployment]:
    """Return the engine and the deployment of a server model.

    Raises PlanError for unknown hardware or an unknown model.
    """
    try:
        engine = find_engine(plan.server, server_model.vintage or CURRENT)
        deployment = engine.deployment(
            server_model.gpu or "",
            server_model.model or "",
            format_name=server_model.format,
            tensor=server_model.tensor,
            file=server_model.hardware,
        )
        deployment = server_model.serving.apply(deployment)
    except HardwareError as error:
        raise PlanError(str(error)) from None
    return engine, deployment
