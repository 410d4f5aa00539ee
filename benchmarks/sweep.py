"""Does the interval of `loadgen sweep` hold the true capacity? Sweeps of a simulated server whose capacity is known.

    python -m benchmarks.sweep                   # 100 seeds of each case
    python -m benchmarks.sweep line --seeds 20

`line`: vLLM's scheduler with one sequence at a time and answers of one length is a queue with one server and constant
service, of which the capacity is known by formula (Erlang, "The theory of probabilities and telephone conversations",
1909). `batch`: eight at a time and answers of any length; the truth is that of hours, bisected, with its own error.
Both run on the state machine of the simulated server, in virtual time, with the command's defaults.
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
from loadgen.analysis.sweep import observations
from loadgen.analysis.sweep.capacity_search import Search
from loadgen.plan import Plan
from loadgen.studies import simulate
from loadgen.studies.sweep import Sweep
from loadgen.studies.sweep.measure import SEARCH_RANGE_FACTOR, SweepTargets, simulate_sweep

RUNS_MOST, CONFIDENCE, START = 8, 0.95, 1.0
TRUTHS, TRUTH_S = 24, 1200.0
"""So many times so long, for a capacity that no formula gives."""
HALVINGS = 7


@dataclass(frozen=True, slots=True)
class Case:
    """A server, and what it shall keep."""

    name: str
    running: int
    output_tokens: int | str
    objective: str
    between: tuple[float, float]
    """Requests per second: wide limits of the capacity, for its long runs."""
    duration_s: float = 60.0

    @property
    def judged(self) -> list[Objective]:
        return parse([self.objective])

    @property
    def modelled(self) -> simulate.ServerModel:
        return simulate.ServerModel("H100", "llama-3.1-8b", running_limit=self.running)

    def plan(self, seed: int, duration_s: float = 0.0, arrivals: str = "poisson:1") -> Plan:
        lengths = {"input_tokens": 512, "output_tokens": self.output_tokens}
        of = {"duration_s": duration_s or self.duration_s, "arrivals": arrivals, "metrics_every_s": 0.0}
        return Plan(server="vllm", seed=seed, **lengths, **of)


CASES = {
    case.name: case
    for case in (
        Case("line", 1, 16, "ttft.p90 < 500ms", (5.0, 8.0)),
        Case("batch", 8, "exponential:mean=64,min=8,max=512", "ttft.p95 < 500ms", (9.0, 14.0)),
    )
}


class Truth(NamedTuple):
    """A capacity, and how surely that is known (one standard error)."""

    capacity: float
    error: float


class Found(NamedTuple):
    """What one sweep said."""

    low: float
    capacity: float
    high: float
    runs: int


def waits_longer(rate: float, served_s: float, than_s: float) -> float:
    """M/D/1: the share of requests that wait longer (Erlang's formula; Tijms, "A first course in stochastic models",
    2003, section 9.5)."""
    used = rate * served_s
    if used >= 1:
        return 1.0
    terms = (
        ((-rate * (than_s - place * served_s)) ** place / math.factorial(place))
        * math.exp(rate * (than_s - place * served_s))
        for place in range(math.floor(than_s / served_s) + 1)
    )
    return 1 - (1 - used) * math.fsum(terms)


def bisected(broken: Callable[[float], bool], low: float, high: float, halvings: int) -> float:
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if broken(middle) else (middle, high)
    return math.sqrt(low * high)


def latencies(case: Case, plan: Plan) -> Floats:
    """What the objective is about, of each request."""
    return LATENCIES[case.judged[0].figure].values(frame_of_run(simulate.run_in_memory(plan, case.modelled)))


def truth_of(case: Case) -> Truth:
    """By formula where there is one, else of long runs."""
    (objective,) = case.judged
    alone = case.plan(0).replaced(n=1, duration_s=None)
    whole_s = float(METRICS["e2e_s"].values(frame_of_run(simulate.run_in_memory(alone, case.modelled)))[0])
    if case.running == 1:
        served_s = whole_s - simulate.resolve_model(alone, case.modelled).path_s
        wait_s = objective.bound - float(latencies(case, alone)[0])
        most = 1 - (objective.percentile or 0.0)
        over = partial(waits_longer, served_s=served_s, than_s=wait_s)
        return Truth(bisected(lambda rate: over(rate) > most, 0.01 / served_s, 1 / served_s, 60), 0.0)
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(partial(long_run, case), range(TRUTHS)))
    return Truth(statistics.fmean(found), statistics.stdev(found) / math.sqrt(TRUTHS))


def long_run(case: Case, seed: int) -> float:
    """The capacity by a long run at each rate, with the same random numbers."""
    (objective,) = case.judged

    def broken(rate: float) -> bool:
        found = latencies(case, case.plan(10_000 + seed, TRUTH_S, f"poisson:{rate:.6f}"))
        return float(np.mean(found > objective.bound)) > 1 - (objective.percentile or 0.0)

    return bisected(broken, *case.between, HALVINGS)


def swept(case: Case, seed: int) -> Found:
    """One sweep, as the command makes it."""
    sweep = Sweep(case.plan(100 * seed), "rate", Path())
    search = Search(START / 64, START * SEARCH_RANGE_FACTOR, confidence=CONFIDENCE)
    targets = SweepTargets(objectives=case.judged, over="rate")
    steps = simulate_sweep(sweep, targets, case.modelled, search, START, RUNS_MOST)
    found = search.capacity(observations(line for line, _ in steps))
    return Found(found.low, found.capacity or 0.0, found.high or math.inf, len(steps))


def said(case: Case, truth: Truth, found: Sequence[Found]) -> str:
    """One row."""
    held = sum(each.low <= truth.capacity <= each.high for each in found)
    off = statistics.median(each.capacity / truth.capacity - 1 for each in found)
    width = statistics.median((each.high - each.low) / 2 / each.capacity for each in found)
    runs = statistics.fmean(each.runs for each in found)
    error = f" ± {truth.error:.2f}" if truth.error else ""
    return (
        f"| {case.name} | `{case.objective}` | {truth.capacity:.2f}{error} | {held} of {len(found)} | {off:+.1%} "
        f"| {width:.0%} | {runs:.1f}, at most {max(each.runs for each in found)} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--seeds", type=int, default=100)
    asked = parser.parse_args(arguments)
    print("| case | objective | capacity, requests/s | intervals that hold it | estimate | half width | runs |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for name in asked.cases or CASES:
        case = CASES[name]
        with ProcessPoolExecutor() as pool:
            found = list(pool.map(partial(swept, case), range(1, asked.seeds + 1)))
        print(said(case, truth_of(case), found), flush=True)


if __name__ == "__main__":
    main()
