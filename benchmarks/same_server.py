"""How often does `loadgen compare` cry wolf, and what does it see? Runs of a simulated engine with chance in its steps.

python -m benchmarks.same_server                      the tables of docs/concepts/intervals.md (some minutes)
python -m benchmarks.same_server --trials 20 --n 200  a first look
python -m benchmarks.same_server --scenes tuning      the loads on which the method was made, again
python -m benchmarks.same_server --scenes repeats     groups of five runs each

What a method was tuned on cannot judge it: FRESH are other cards, models, limits and kinds of chance, with other seeds,
that had no part in it. But the last two of them are why single runs have a floor under their errors.

Each run is a real batching engine (loadgen.servers.simulated.token_clock) driven through a burst, or Poisson arrivals,
under a fake clock. Its steps last what the model of the GPU says, times chance that lingers from step to step and a
stall now and then, so that requests depend on each other as they do on a server: they queue behind each other and
share steps.
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
    """What varies in a server that is the same: the defaults are those on which the method was tuned."""

    step_cv: float = 0.10
    """In a step's length."""
    lingers: float = 0.8
    """How much of it stays for the next step."""
    stall_share: float = 0.002
    stall_times: float = 8.0
    """How many steps stall, and by what they take longer."""
    run_cv: float = 0.0
    """Of one more factor on all steps of a run, which no single run can show."""


@dataclass(frozen=True)
class Scene:
    """A kind of load on a kind of engine."""

    name: str
    server: str
    running: int | None
    """Sequences in a step; None: as many as the server's own policy admits."""
    rate_per_s: float | None
    """Poisson arrivals; None is a burst."""
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
    Scene("burst, LightLLM on RTX 4090, steps jitter 30 %", "lightllm", None, None, "RTX 4090", chance=JITTER),
    Scene("burst, 48 at a time, slowness lingers 50 steps", "vllm", 48, None, chance=LONG),
    Scene(
        "open loop, 3 per second, TGI 13B, steps jitter 30 %", "tgi", None, 3.0, "A800-80GB SXM", "Llama-2-13B", JITTER
    ),
    Scene(
        "open loop, 12 per second, 8B on H100, slowness lingers", "vllm", None, 12.0, "H100 SXM", "Llama-3.1-8B", LONG
    ),
    Scene("burst, 64 at a time, runs vary by 1 %", "vllm", 64, None, chance=Chance(run_cv=0.01)),
    Scene("burst, 64 at a time, runs vary by 2 %", "vllm", 64, None, chance=Chance(run_cv=0.02)),
    Scene("open loop, 8 per second, runs vary by 1 %", "vllm", None, 8.0, chance=Chance(run_cv=0.01)),
    Scene("open loop, 8 per second, runs vary by 2 %", "vllm", None, 8.0, chance=Chance(run_cv=0.02)),
)
SETS = {"tuning": TUNING, "fresh": FRESH}
REPEATED = (
    Scene("bursts, 32 at a time, runs vary by 2 %", "vllm", 32, None, chance=Chance(run_cv=0.02)),
    Scene("open loops, 8 per second, runs vary by 2 %", "vllm", None, 8.0, chance=Chance(run_cv=0.02)),
)
FIRST_SEED = {"tuning": 12_000_000, "fresh": 11_000_000, "repeats": 9_000_000}


def one_run(scene: Scene, seed: int, n: int = 1000, *, slower: float = 1.0, output: int = OUTPUT) -> ComparedRun:
    """A run whose every step takes `slower` times as long.

    The same load whatever the seed: it drives the server's chance alone.
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
    """The figures that a comparison calls better or worse."""
    return [row.figure for row in found.rows if row.verdict in ("better", "worse")]


def _served(scene: Scene, jobs: Sequence[Job], step_ns: Callable[[Batch], int]) -> dict[int, list[int]]:
    """The instants of each job's tokens."""
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
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", choices=(*SETS, "repeats"), default="fresh")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--change", type=float, default=1.1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, help="the first; others than those of the tables by default")
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
    """Comparisons of one group of runs with another, for each way in which the other is slower."""
    found: dict[str, list[Comparison]] = {title: [] for title, _ in titles}
    for _ in range(trials):
        a = [one_run(scene, next(seeds), n) for _ in range(repeats)]
        for title, slower in titles:
            found[title].append(compare(a, [one_run(scene, next(seeds), n, slower=slower) for _ in range(repeats)]))
    return found


if __name__ == "__main__":
    main()
