"""Counts the verdicts of `loadgen compare --fail-if` on pairs of simulated servers with a known difference.

python -m benchmarks.gates                     the table of docs/guides/compare.md (some minutes)
python -m benchmarks.gates --pairs 20          a first look
python -m benchmarks.gates --variation 0.02    runs of one server that differ by 2%

The servers of a pair are equal, or the steps of the second server take 10% longer. Each server has three repeats with
consecutive seeds, as with `loadgen run --repeats 3`. The simulated server runs in virtual time
(loadgen.studies.simulate): a scheduler on a modelled GPU handles the requests of the plan. In each run, all step
durations are multiplied by a random factor, which is the variation between runs of one server.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.compare import compare
from loadgen.analysis.compare.gates import GateResult, parse_gates
from loadgen.analysis.compare.run_variance import ComparedRun
from loadgen.analysis.steady_window import frame_of_run
from loadgen.plan import Plan
from loadgen.servers.simulated.scheduler import Batch
from loadgen.servers.simulated.step_time import StepDurations
from loadgen.studies import simulate

GATE = "tpot.p50 worse by 5%"
REPEATS = 3
SLOWER = 1.10
RUN_VARIATION = 0.01
"""Default standard deviation of the random factor on the step durations of a run."""
MODEL = simulate.ServerModel("A800", "llama-2-7b")
LOADS: dict[str, dict[str, Any]] = {
    "burst of 200": {"arrivals": "burst", "n": 200},
    "closed loop of 16": {"arrivals": "closed:16", "n": 200},
    "Poisson, 5 per second": {"arrivals": "poisson:5", "duration_s": 60.0},
    "Poisson, 5 per second, random lengths": {
        **{"arrivals": "poisson:5", "duration_s": 60.0},
        **{"input_tokens": "uniform:128..1024", "output_tokens": "uniform:16..128"},
    },
}
EXIT_CODES = {"pass": 0, "fail": 4, "inconclusive": 6}


@dataclass(frozen=True, slots=True)
class ScaledSteps:
    """Step durations of a model, multiplied by a factor."""

    steps: StepDurations
    factor: float

    def __call__(self, batch: Batch) -> int:
        return int(self.steps(batch) * self.factor)

    def decode_trend(self, decoding: int, context: int) -> tuple[float, float, int]:
        """Return the scaled durations of consecutive decode steps (see StepDurations)."""
        first, growth, steps = self.steps.decode_trend(decoding, context)
        return first * self.factor, growth * self.factor, steps


def plan_of(load: str) -> Plan:
    """Return the plan of a load. The default lengths are 512 prompt tokens and 64 output tokens per request."""
    return Plan(server="vllm", metrics_every_s=0.0, **{"input_tokens": 512, "output_tokens": 64} | LOADS[load])


@cache
def resolved_model(load: str) -> simulate.ResolvedModel:
    """Return the server model of a load. The result is cached, because computing it takes a second."""
    return simulate.resolve_model(plan_of(load), MODEL)


def one_run(load: str, seed: int, factor: float) -> ComparedRun:
    """Simulate one run of a load. The server's steps take `factor` times as long as those of the model."""
    resolved = resolved_model(load)
    scaled = replace(resolved, step_time=ScaledSteps(resolved.step_time, factor))
    run = simulate.run_in_memory(plan_of(load).replaced(seed=seed), MODEL, None, scaled)
    frame = frame_of_run(run)
    summary = summarise(run, frame)
    run.records = []
    return ComparedRun(run, frame, summary)


def judged_pair(load: str, variation: float, slower: float, pair: int) -> GateResult:
    """Return the result of the --fail-if condition for one pair of servers.

    Each server has REPEATS runs. Both servers get loads with the same seeds. The steps of the second server take
    `slower` times as long, and `variation` is the standard deviation between runs of one server.
    """
    random = np.random.default_rng((pair, round(slower * 1000)))
    sides = [
        [
            one_run(load, 1000 * pair + repeat, side * float(np.exp(random.normal(0, variation))))
            for repeat in range(REPEATS)
        ]
        for side in (1.0, slower)
    ]
    (result,) = compare(*sides, gates=parse_gates([GATE])).gates
    return result


def exit_codes(results: Sequence[GateResult]) -> dict[int, int]:
    """Return the number of comparisons for each exit code of `loadgen compare`."""
    counts = Counter(EXIT_CODES[result.verdict] for result in results)
    return {code: counts[code] for code in EXIT_CODES.values()}


def main() -> None:
    """Print a table with the number of pairs for each exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--variation", type=float, default=RUN_VARIATION)
    given = parser.parse_args()
    print(f"{given.pairs} pairs, --repeats {REPEATS}, --fail-if '{GATE}'; runs vary by {given.variation:.1%}\n")
    print("| load | servers | exit 0 | exit 4 | exit 6 |")
    print("| --- | --- | --- | --- | --- |")
    with ProcessPoolExecutor() as pool:
        for load in LOADS:
            for title, slower in (("identical", 1.0), (f"B {SLOWER - 1:.0%} slower", SLOWER)):
                results = list(pool.map(partial(judged_pair, load, given.variation, slower), range(given.pairs)))
                counts = " | ".join(map(str, exit_codes(results).values()))
                print(f"| {load} | {title} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
