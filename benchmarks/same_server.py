"""Measures the false alarms of `loadgen compare`, and which changes it detects, with simulated runs.

python -m benchmarks.same_server                      the tables of docs/concepts/intervals.md (some minutes)
python -m benchmarks.same_server --trials 20 --n 200  a first look
python -m benchmarks.same_server --scenes tuning      the loads with which the method was tuned
python -m benchmarks.same_server --scenes repeats     groups of five runs each

The loads in TUNING were used to tune the method, so they cannot test it. The loads in FRESH had no part in the tuning
and have other GPUs, models, limits, random variations and seeds. There is one exception: the last two loads in FRESH
led to the minimum error that `loadgen compare` assumes for single runs.

Each run is a simulated batching engine (loadgen.servers.simulated.token_clock) under a fake clock, with a burst or
Poisson arrivals. The duration of a step is that of the GPU model times a random factor, which is correlated between
steps, and some steps stall. Requests queue behind each other and share steps, so their latencies are correlated, as on
a real server.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.compare import FIGURES, ComparedRun, Comparison, compare
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Footer, Header, Run, Telemetry
from loadgen.analysis.steady_window import frame_of_run
from loadgen.servers.simulated.scheduler import Batch, Job
from loadgen.servers.simulated.scheduler_presets import find_engine
from loadgen.servers.simulated.step_time import StepTime
from loadgen.servers.simulated.token_clock import BatchingClock

PROMPT, OUTPUT = 512, 64


@dataclass(frozen=True)
class Chance:
    """Random variation of a server that has not changed. The method was tuned with the default values."""

    step_cv: float = 0.10
    """Coefficient of variation of a step's duration."""
    lingers: float = 0.8
    """Correlation between the variations of consecutive steps, from 0 to 1."""
    stall_share: float = 0.002
    stall_times: float = 8.0
    """`stall_share` is the share of steps that stall. A stalled step takes `stall_times` times as long."""
    run_cv: float = 0.0
    """Standard deviation of an additional random factor on all steps of a run. A single run cannot show it."""


@dataclass(frozen=True)
class Scene:
    """A load on a simulated engine."""

    name: str
    server: str
    running: int | None
    """Maximum sequences per step. None means the limit of the server's own policy."""
    rate_per_s: float | None
    """Rate of Poisson arrivals per second. None means a burst."""
    gpu: str = "A800-80GB SXM"
    model: str = "Llama-2-7B"
    chance: Chance = Chance()


TUNING = (
    Scene("burst, all in one batch (vLLM)", "vllm", None, None),
    Scene("burst, 32 at a time", "vllm", 32, None),
    Scene("burst, prefill alone (TGI)", "tgi", None, None),
    Scene("open loop, 8 per second", "vllm", None, 8.0),
)
JITTER, LONG = Chance(0.30, 0.0, 0.01, 20.0), Chance(0.05, 0.98)
FRESH = (
    Scene("burst, 128 at a time, 13B on H100", "vllm", 128, None, "H100 SXM", "Llama-2-13B"),
    Scene("burst, LightLLM on RTX 4090, steps jitter 30%", "lightllm", None, None, "RTX 4090", chance=JITTER),
    Scene("burst, 48 at a time, slowness lingers 50 steps", "vllm", 48, None, chance=LONG),
    Scene(
        "open loop, 3 per second, TGI 13B, steps jitter 30%", "tgi", None, 3.0, "A800-80GB SXM", "Llama-2-13B", JITTER
    ),
    Scene(
        "open loop, 12 per second, 8B on H100, slowness lingers", "vllm", None, 12.0, "H100 SXM", "Llama-3.1-8B", LONG
    ),
    Scene("burst, 64 at a time, runs vary by 1%", "vllm", 64, None, chance=Chance(run_cv=0.01)),
    Scene("burst, 64 at a time, runs vary by 2%", "vllm", 64, None, chance=Chance(run_cv=0.02)),
    Scene("open loop, 8 per second, runs vary by 1%", "vllm", None, 8.0, chance=Chance(run_cv=0.01)),
    Scene("open loop, 8 per second, runs vary by 2%", "vllm", None, 8.0, chance=Chance(run_cv=0.02)),
)
SETS = {"tuning": TUNING, "fresh": FRESH}
REPEATED = (
    Scene("bursts, 32 at a time, runs vary by 2%", "vllm", 32, None, chance=Chance(run_cv=0.02)),
    Scene("open loops, 8 per second, runs vary by 2%", "vllm", None, 8.0, chance=Chance(run_cv=0.02)),
)
FIRST_SEED = {"tuning": 12_000_000, "fresh": 11_000_000, "repeats": 9_000_000}


def one_run(scene: Scene, seed: int, n: int = 1000, *, slower: float = 1.0, output: int = OUTPUT) -> ComparedRun:
    """Simulate a run in which every step takes `slower` times as long.

    The load is the same for every seed. The seed only affects the random variation of the server.
    """
    random = np.random.default_rng(seed)
    factor = slower * math.exp(random.normal(0, scene.chance.run_cv)) if scene.chance.run_cv else slower
    due_ns = [0] * n
    if scene.rate_per_s:
        gaps = np.random.default_rng(1).exponential(1e9 / scene.rate_per_s, n)
        due_ns = np.cumsum(gaps).astype(np.int64).tolist()
    jobs = [Job(PROMPT, output, due + 9_000 * place * (not scene.rate_per_s)) for place, due in enumerate(due_ns)]
    instants = _served(scene, jobs, _steps(scene, random, factor))
    records = [_record(place, due_ns[place], job, instants[id(job)]) for place, job in enumerate(jobs)]
    arrivals = f"poisson:{scene.rate_per_s:g}" if scene.rate_per_s else "burst"
    plan = {"server": scene.server, "arrivals": arrivals, "n": n, "input_tokens": PROMPT, "output_tokens": output}
    server = {"name": scene.server, "model": scene.model, "simulated": True, "speed": 1.0, "limits": {}}
    header = Header(version="0", started_at="2026-01-01T00:00:00Z", start_ns=0, plan=plan | {"seed": 0}, server=server)
    last_ns = max(record.end_ns or 0 for record in records)
    footer = Footer(ended_ns=last_ns, sent=n, complete=n, truncated=0, failed=0, rejected=0, dropped=0)
    idle = {"cpu_ns": 0, "wall_ns": 10**9, "reads": n, "coalesced_reads": 0, "stall_ns_max": 0, "late_counts": {}}
    client = Telemetry(source="client", at_ns=last_ns, values=idle | {"clock_disagreement_ns": 0})
    run = Run(Path(f"run-{seed}/run.jsonl"), header, records, [client], footer)
    frame = frame_of_run(run)
    run.records = []
    return ComparedRun(run, frame, summarise(run, frame))


def alarms(found: Comparison) -> list[str]:
    """Return the figures that a comparison calls better or worse."""
    return [row.figure for row in found.rows if row.verdict in ("better", "worse")]


def _served(scene: Scene, jobs: Sequence[Job], step_ns: Callable[[Batch], int]) -> dict[int, list[int]]:
    """Simulate all jobs. Return the times of each job's tokens in ns, by the id of the job."""
    engine = find_engine(scene.server)
    kv_tokens = engine.kv_tokens(engine.deployment(scene.gpu, scene.model))
    clock = BatchingClock(engine.policy_for(kv_tokens, scene.running), kv_tokens, step_ns)
    instants: dict[int, list[int]] = {id(job): [] for job in jobs}
    waiting = list(reversed(jobs))
    while waiting or clock.next_ns() is not None:
        next_ns = clock.next_ns()
        while waiting and (next_ns is None or waiting[-1].arrived_ns <= next_ns):
            job = waiting.pop()
            clock.submit(job, job.arrived_ns)
            next_ns = clock.next_ns()
        if next_ns is not None:
            for job, _, due_ns in clock.emissions(next_ns):
                instants[id(job)].append(due_ns)
    return instants


@cache
def _step_time(server: str, gpu: str, model: str) -> StepTime:
    engine = find_engine(server)
    return engine.step_time(engine.deployment(gpu, model))


def _steps(scene: Scene, random: np.random.Generator, factor: float) -> Callable[[Batch], int]:
    model, chance = _step_time(scene.server, scene.gpu, scene.model), scene.chance
    spread = math.sqrt(math.log1p(chance.step_cv**2))
    now = random.normal(0, spread)

    def step_ns(work: Batch) -> int:
        nonlocal now
        now = chance.lingers * now + math.sqrt(1 - chance.lingers**2) * random.normal(0, spread)
        stall = chance.stall_times if random.random() < chance.stall_share else 1.0
        return int(model(work) * factor * math.exp(now) * stall)

    return step_ns


def _record(place: int, due_ns: int, job: Job, instants: list[int]) -> Record:
    return Record(
        id=place,
        state="complete",
        due_ns=due_ns,
        sent_ns=job.arrived_ns,
        sent_end_ns=job.arrived_ns + 6_000,
        chunk_ns=instants,
        chunk_tokens=[1] * len(instants),
        end_ns=instants[-1],
        prompt_tokens_asked=job.prompt_tokens,
        prompt_tokens=job.prompt_tokens,
        output_tokens_asked=job.output_tokens,
        output_tokens=job.output_tokens,
        counted_by="server",
        stamps="auto",
    )


def _table(title: str, scene: Scene, compared: Sequence[Comparison]) -> None:
    called = [alarms(found) for found in compared]
    each = Counter(figure for figures in called for figure in figures)
    any_share = sum(bool(figures) for figures in called) / len(compared)
    tested = {row.figure for found in compared for row in found.rows if row.p_value is not None}
    cells = " | ".join(f"{each[figure] / len(compared):.0%}" if figure in tested else "" for figure in FIGURES)
    print(f"| {title} | {scene.name} | **{any_share:.1%}** | {cells} |", flush=True)


def main() -> None:
    """Print a table with the share of comparisons that call a figure better or worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", choices=(*SETS, "repeats"), default="fresh")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--change", type=float, default=1.1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, help="first seed; default: the first seed of the tables")
    given = parser.parse_args()
    seeds = itertools.count(FIRST_SEED[given.scenes] if given.seed is None else given.seed)
    print(f"{given.trials} trials, {given.n} requests a run. Share of trials called better or worse:\n")
    print("| case | load | any figure |", " | ".join(f"`{figure}`" for figure in FIGURES), "|")
    print("| --- " * (3 + len(FIGURES)) + "|")
    titles = ("same server", 1.0), (f"every step {given.change - 1:.0%} longer", given.change)
    repeats = given.repeats if given.scenes == "repeats" else 1
    for scene in SETS.get(given.scenes, REPEATED):
        for title, compared in _trials(scene, seeds, given.trials, given.n, repeats, titles).items():
            _table(title, scene, compared)


def _trials(
    scene: Scene, seeds: Iterator[int], trials: int, n: int, repeats: int, titles: Sequence[tuple[str, float]]
) -> dict[str, list[Comparison]]:
    """Compare groups of `repeats` runs, and return the comparisons by title.

    `titles` are pairs of a title and a factor. In each trial, a new group A is compared with one group B per pair,
    whose steps take `factor` times as long.
    """
    found: dict[str, list[Comparison]] = {title: [] for title, _ in titles}
    for _ in range(trials):
        a = [one_run(scene, next(seeds), n) for _ in range(repeats)]
        for title, slower in titles:
            found[title].append(compare(a, [one_run(scene, next(seeds), n, slower=slower) for _ in range(repeats)]))
    return found


if __name__ == "__main__":
    main()
