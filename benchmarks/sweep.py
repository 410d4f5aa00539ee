"""Tests whether the interval of `loadgen sweep` contains the true capacity, with simulated servers of known capacity.

    python -m benchmarks.sweep                        # 50 seeds of each case
    python -m benchmarks.sweep slow-70b --seeds 20

Every sweep runs in virtual time, with the defaults of the command. Cases without an objective look for the largest rate
at which no queue grows. The true capacity of a case is computed as follows:

- Usually, the rate is bisected with long runs. A long run is overloaded if it violates the objective. Without an
  objective, it is overloaded if its requests in flight still grow in its second half.
- The case `line` is a queue with one server and constant service times. Its capacity is known by formula (Erlang, "The
  theory of probabilities and telephone conversations", 1909).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loadgen.analysis.frame import Floats
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.objectives import LATENCIES, Objective, parse
from loadgen.analysis.steady_window import frame_of_run
from loadgen.plan import Plan
from loadgen.studies import simulate
from loadgen.studies.sweep.measure import DEFAULT_DURATION_S, SweepTargets, new_sweep, simulate_sweep

MAX_RUNS = 8
CONFIDENCE = 0.95
LONG_RUNS = 3
"""Number of long runs per rate from which a true capacity is computed."""
LONG_RUN_S = 900.0
"""Usual duration of a long run in s."""
HALVINGS = 6
GROWTH = 0.003
"""A queue grows if the requests in flight grow by more than this share of the rate."""


@dataclass(frozen=True, slots=True)
class Case:
    """A simulated server, its load and its objective."""

    name: str
    model: simulate.ServerModel
    output_tokens: int | str
    between: tuple[float, float]
    """Two rates in requests per second. The true capacity is bisected between them."""
    objective: str = ""
    """Empty for a sweep that looks for the largest rate at which no queue grows."""
    input_tokens: int | str = 512
    long_run_s: float = LONG_RUN_S
    """Duration of a long run in s. It is longer if responses take long, because the number of requests in flight then
    grows or shrinks by chance for longer."""

    @property
    def objectives(self) -> list[Objective]:
        """The parsed objective, or an empty list for a case without an objective."""
        return parse([self.objective] if self.objective else [])

    def plan(self, seed: int, duration_s: float = DEFAULT_DURATION_S, arrivals: str = "poisson:1") -> Plan:
        """Return the plan of a run."""
        return Plan(
            server="vllm",
            seed=seed,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            duration_s=duration_s,
            arrivals=arrivals,
            metrics_every_s=0.0,
        )


def h100(model: str, running_limit: int | None = None) -> simulate.ServerModel:
    """Return the model of a vLLM server on one H100."""
    return simulate.ServerModel("H100", model, running_limit=running_limit)


CASES = {
    case.name: case
    for case in (
        Case("fast-8b", h100("llama-3.1-8b"), "lognormal:mean=128,cv=0.7", (38.0, 46.0)),
        Case("fast-1b", h100("llama-3.2-1b"), "uniform:64..192", (125.0, 165.0)),
        Case(
            "slow-70b", simulate.ServerModel("A100", "llama-2-70b", tensor=4), "lognormal:mean=128,cv=0.5", (7.0, 9.0)
        ),
        Case(
            "slow-long", simulate.ServerModel("L40S", "llama-3.1-8b"), "uniform:256..768", (1.5, 6.0), long_run_s=3600.0
        ),
        Case("line", h100("llama-3.1-8b", 1), 16, (5.0, 8.0), "ttft.p90 < 500ms"),
        Case("batch", h100("llama-3.1-8b", 8), "exponential:mean=64,min=8,max=512", (9.0, 14.0), "ttft.p95 < 500ms"),
        Case("users", h100("llama-3.1-8b"), "lognormal:mean=128,cv=0.7", (25.0, 46.0), "e2e.p90 < 8s"),
    )
}


class Truth(NamedTuple):
    """The true capacity of a case in requests per second, and its standard error."""

    capacity: float
    error: float


class Outcome(NamedTuple):
    """The result of one sweep."""

    low: float
    capacity: float
    high: float
    run_s: float
    """Duration of all runs in the time of the server."""
    steps: int


def share_waiting_longer(rate: float, service_s: float, wait_s: float) -> float:
    """Return the share of requests that wait longer than `wait_s` in an M/D/1 queue.

    Erlang's formula; Tijms, "A first course in stochastic models", 2003, section 9.5.
    """
    utilisation = rate * service_s
    if utilisation >= 1:
        return 1.0
    terms = (
        ((-rate * (wait_s - index * service_s)) ** index / math.factorial(index))
        * math.exp(rate * (wait_s - index * service_s))
        for index in range(math.floor(wait_s / service_s) + 1)
    )
    return 1 - (1 - utilisation) * math.fsum(terms)


def bisect(overloaded: Callable[[float], bool], low: float, high: float, halvings: int) -> float:
    """Return the rate between `low` and `high` above which the server is overloaded."""
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        if overloaded(middle):
            high = middle
        else:
            low = middle
    return math.sqrt(low * high)


def latencies(case: Case, plan: Plan) -> Floats:
    """Return the latency of each request in a simulated run, for the metric of the case's objective."""
    return LATENCIES[case.objectives[0].figure].values(frame_of_run(simulate.run_in_memory(plan, case.model)))


def true_capacity(case: Case) -> Truth:
    """Return the true capacity of a case: by formula if there is one, otherwise from long runs."""
    if case.name == "line":
        return Truth(capacity_of_line(case), 0.0)
    with ProcessPoolExecutor() as pool:
        capacities = list(pool.map(partial(long_run_capacity, case), range(LONG_RUNS)))
    return Truth(statistics.fmean(capacities), statistics.stdev(capacities) / math.sqrt(LONG_RUNS))


def capacity_of_line(case: Case) -> float:
    """Return the capacity of the case `line` by formula. Its server handles one request at a time."""
    (objective,) = case.objectives
    alone = case.plan(0).replaced(n=1, duration_s=None)
    e2e_s = float(METRICS["e2e_s"].values(frame_of_run(simulate.run_in_memory(alone, case.model)))[0])
    service_s = e2e_s - simulate.resolve_model(alone, case.model).path_s
    wait_s = objective.bound - float(latencies(case, alone)[0])
    max_share = 1 - (objective.percentile or 0.0)
    share = partial(share_waiting_longer, service_s=service_s, wait_s=wait_s)
    return bisect(lambda rate: share(rate) > max_share, 0.01 / service_s, 1 / service_s, 60)


def long_run_capacity(case: Case, seed: int) -> float:
    """Return the capacity according to long runs, one per rate. All runs have the same seed."""
    return bisect(partial(is_overloaded, case, 10_000 + seed), *case.between, HALVINGS)


def is_overloaded(case: Case, seed: int, rate: float) -> bool:
    """Return True if a long run at this rate violates the objective or, without an objective, if its queue grows."""
    if case.objective:
        (objective,) = case.objectives
        values = latencies(case, case.plan(seed, case.long_run_s, f"poisson:{rate:.6f}"))
        return float(np.mean(values > objective.bound)) > 1 - (objective.percentile or 0.0)
    plan = case.plan(seed, case.long_run_s, f"constant:{rate:.6f}").replaced(timeout_s=100 * case.long_run_s)
    frame = frame_of_run(simulate.run_in_memory(plan, case.model))
    times_ns = np.linspace(case.long_run_s / 2, case.long_run_s, 200) * 1e9
    ends_ns = np.sort(frame.end_ns)
    in_flight = rate * times_ns / 1e9 - np.searchsorted(ends_ns, times_ns)
    return bool(np.polyfit(times_ns / 1e9, in_flight, 1)[0] > GROWTH * rate)


def run_sweep(case: Case, seed: int) -> Outcome:
    """Simulate one sweep with the defaults of `loadgen sweep`."""
    targets = SweepTargets(objectives=case.objectives, over="rate")
    sweep = new_sweep(case.plan(10_000 * seed), Path(), targets, None, adaptive=True)
    result = simulate_sweep(sweep, targets, case.model, {"confidence": CONFIDENCE}, MAX_RUNS)
    capacity = result.capacity
    assert capacity is not None
    return Outcome(capacity.low, capacity.capacity or 0.0, capacity.high or math.inf, result.run_s, len(result.steps))


def table_row(case: Case, truth: Truth, outcomes: Sequence[Outcome]) -> str:
    """Return the table row of one case: true capacity, and how the outcomes of its sweeps compare with it."""
    holding = sum(outcome.low <= truth.capacity <= outcome.high for outcome in outcomes)
    off = statistics.median(outcome.capacity / truth.capacity - 1 for outcome in outcomes)
    widths = sorted((outcome.high - outcome.low) / 2 / outcome.capacity for outcome in outcomes)
    times_s = sorted(outcome.run_s for outcome in outcomes)
    steps = statistics.fmean(outcome.steps for outcome in outcomes)
    error = f" ± {truth.error:.2f}" if truth.error else ""
    objective = f"`{case.objective}`" if case.objective else "none"
    return (
        f"| {case.name} | {objective} | {truth.capacity:.2f}{error} | {holding} of {len(outcomes)} | {off:+.1%} "
        f"| {statistics.median(widths):.1%}, at most {widths[-1]:.1%} "
        f"| {statistics.median(times_s):.0f} s, at most {times_s[-1]:.0f} s | {steps:.1f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table with one row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"any of {', '.join(CASES)}; all by default")
    parser.add_argument("--seeds", type=int, default=50)
    options = parser.parse_args(arguments)
    print(
        "| case | objective | capacity, requests/s | intervals that contain it | estimate | half width | time | steps |"
    )
    print("| --- | --- | --: | --: | --: | --: | --: | --: |")
    for name in options.cases or CASES:
        case = CASES[name]
        with ProcessPoolExecutor() as pool:
            outcomes = list(pool.map(partial(run_sweep, case), range(1, options.seeds + 1)))
        print(table_row(case, true_capacity(case), outcomes), flush=True)


if __name__ == "__main__":
    main()
