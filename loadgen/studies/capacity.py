"""How many GPUs a load takes: of each kind, and for each number of them that share the model, the highest rate at which
one replica meets the objectives, in virtual time.

A server f times slower than its model is that model with a slower clock: at a rate r its latencies are f times what the
model has at f * r. So the same simulations give the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from loadgen.analysis.run.runfile import Run
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.hardware import HardwareError, constant, gpu
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.hardware.throughput_model import Load, expected_times
from loadgen.servers.simulated.scheduler_presets import CURRENT, Engine, find_engine
from loadgen.studies.simulate import ResolvedModel, ServerModel, resolve_model, run_in_memory

RATE_STEP = 1.03
"""Rates that are tried are powers of it."""
FIRST_STRIDE = 16
"""So many powers apart at first."""
MIN_POWER = -140
"""The lowest power that is tried, one request a minute: they meet no other."""
SIMULATED_S, REQUEST_COUNTS = 60, range(1000, 5001)
"""Each simulation lasts so long that a growing queue is seen, and has so many requests: the p99 of fewer means little
(loadgen.analysis.stats.samples_needed)."""
START_IN_FLIGHT = 64
"""From the rate of so many the search starts."""

ComputeFigures = Callable[[Run], Sequence[float | None]]
"""What the objectives speak of, in seconds and in their order."""
ObjectivesMet = Callable[[Sequence[float | None], float], bool]
"""Whether these figures, so many times as large, meet the objectives."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """GPUs that could serve: `gpu` as the hardware tables call it."""

    gpu: str
    tensor: int
    format: str
    hour_cost: float | None
    """Of one GPU."""


class CapacityOption(msgspec.Struct, kw_only=True):
    """What one kind of GPU takes for the load. Ends of intervals, `_low` and `_high`, are of a server as much slower,
    or faster, than its model as nine of ten measurements are at most."""

    gpu: str
    tensor_parallel: int
    format: str
    not_possible: str = ""
    """Why the objectives cannot be met, or the model does not fit; then there are no figures."""
    replica_per_s: float | None = None
    """Requests per second of one replica."""
    replica_per_s_low: float | None = None
    """0 where a slower server meets the objectives at no rate."""
    replica_per_s_high: float | None = None
    gpus: int | None = None
    gpus_low: int | None = None
    gpus_high: int | None = None
    """None where a slower server meets the objectives at no rate."""
    cost_per_hour: float | None = None
    cost_per_million_tokens: float | None = None
    """Of output, at the rate that was asked for."""
    figures: list[float | None] = []
    """Of the objectives, at the rate of each replica: the load shared by all of `gpus`."""


class Replica:
    """One replica under any rate."""

    def __init__(self, plan: Plan, modelled: ServerModel, figures: ComputeFigures) -> None:
        self._plan, self._modelled, self._figures = plan, modelled, figures
        self._served: ResolvedModel | None = None
        self._known: dict[float, Sequence[float | None]] = {}
        self.output_tokens = 0.0
        """Mean of a request."""

    def figures_at(self, per_s: float) -> Sequence[float | None]:
        """The objectives' figures at this rate."""
        if per_s not in self._known:
            self._served = self._served or resolve_model(self._plan, self._modelled)
            number = max(REQUEST_COUNTS[0], min(REQUEST_COUNTS[-1], round(SIMULATED_S * per_s)))
            run = run_in_memory(
                self._plan.replaced(arrivals=f"poisson:{per_s:.6g}", n=number), self._modelled, served=self._served
            )
            self._known[per_s] = self._figures(run)
            self.output_tokens = sum(record.output_tokens or 0 for record in run.records) / max(1, len(run.records))
        return self._known[per_s]

    def highest_power(self, met: ObjectivesMet, slower: float, start: int) -> int | None:
        """The largest power of FINE at which a server so many times `slower` meets the objectives, as of its model's
        clock; None where it meets them at no rate."""

        def fine(power: int) -> bool:
            return met(self.figures_at(RATE_STEP**power), slower)

        if not fine(MIN_POWER):
            return None
        low, stride = start, FIRST_STRIDE
        while low > MIN_POWER and not fine(low):
            low, stride = max(MIN_POWER, low - stride), 2 * stride
        high, stride = low + FIRST_STRIDE, FIRST_STRIDE
        while fine(high):
            low, stride = high, 2 * stride
            high = low + stride
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fine(middle) else (low, middle)
        return low


def capacity_option(
    plan: Plan, candidate: Candidate, base: ServerModel, per_s: float, figures: ComputeFigures, met: ObjectivesMet
) -> CapacityOption:
    """What this candidate takes for `per_s` requests a second of `plan`; the rest of what serves is that of `base`.
    Raises LoadgenError."""
    result = CapacityOption(gpu=candidate.gpu, tensor_parallel=candidate.tensor, format=candidate.format)
    modelled = replace(base, gpu=candidate.gpu, tensor=candidate.tensor, format=candidate.format)
    engine, made = _deployed(plan, modelled)
    try:
        engine.kv_tokens(made)
    except HardwareError as problem:
        result.not_possible = str(problem).partition(":")[0]
        return result
    likely = expected_times(made, Load(512, 128, START_IN_FLIGHT)).output_tokens_per_s / 128
    start = max(MIN_POWER, round(math.log(likely, RATE_STEP)))
    replica, error = Replica(plan, modelled, figures), 1 + constant("step_error")
    power = replica.highest_power(met, 1.0, start)
    if power is None:
        result.not_possible = "meets the objectives at no rate"
        result.figures = [*replica.figures_at(RATE_STEP**MIN_POWER)]
        return result
    slow, fast = replica.highest_power(met, error, power), replica.highest_power(met, 1 / error, power)
    assert fast is not None
    result.replica_per_s, result.replica_per_s_high = RATE_STEP**power, RATE_STEP**fast * error
    result.replica_per_s_low = 0.0 if slow is None else RATE_STEP**slow / error
    replicas = math.ceil(per_s / result.replica_per_s)
    result.gpus = replicas * candidate.tensor
    result.gpus_low = math.ceil(per_s / result.replica_per_s_high) * candidate.tensor
    if result.replica_per_s_low:
        result.gpus_high = math.ceil(per_s / result.replica_per_s_low) * candidate.tensor
    result.figures = [*replica.figures_at(per_s / replicas)]
    if candidate.hour_cost is not None:
        result.cost_per_hour = result.gpus * candidate.hour_cost
        result.cost_per_million_tokens = result.cost_per_hour / (3600 * per_s * replica.output_tokens) * 1e6
    return result


def candidates(
    gpus: Sequence[str], tensors: Sequence[int], formats: Sequence[str], modelled: ServerModel
) -> list[Candidate]:
    """Of `H100=2.50` and so on, with or without what an hour costs. Raises PlanError."""
    result = []
    for named in gpus:
        name, priced, cost = named.partition("=")
        try:
            card, hour = gpu(name, modelled.hardware), float(cost) if priced else None
        except ValueError as problem:  # HardwareError is one
            said = str(problem) if isinstance(problem, HardwareError) else f"--gpu {named}: the price is no number"
            raise PlanError(said, "Write --gpu H100, or with what one costs per hour: --gpu H100=2.50") from None
        if hour is not None and not 0 <= hour < math.inf:
            raise PlanError(f"--gpu {named}: the price must be 0 or more", "Write --gpu H100=2.50")
        result += [Candidate(card.name, tensor, each, hour) for tensor in tensors for each in formats]
    return result


def _deployed(plan: Plan, modelled: ServerModel) -> tuple[Engine, Deployment]:
    """Raises PlanError for what nobody knows."""
    more: dict[str, Any] = {"format_name": modelled.format, "tensor": modelled.tensor, "file": modelled.hardware}
    try:
        engine = find_engine(plan.server, modelled.vintage or CURRENT)
        return engine, engine.deployment(modelled.gpu or "", modelled.model or "", **more)
    except HardwareError as problem:
        raise PlanError(str(problem)) from None
