"""Compares published measurements of servers under load with simulations in virtual time.

    python -m benchmarks.schedulers              # every table
    python -m benchmarks.schedulers burst trace

- `burst`: 1000 prompts of 512 tokens at once, on the engines of 2023.
- `poisson`: 2, 4 and 8 requests per second on the same engines. The constants of each engine were fitted to both
  tables.
- `closed`: closed loops on engines of 2024 and 2025, as `benchmarks.hardware_model` replays them.
- `trace`: 300 requests to vLLM 0.19. No constants were fitted to them.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

from benchmarks import hardware_model
from loadgen.servers.simulated.discrete_event import FOREVER_NS, TokenTimes, VirtualEngine
from loadgen.servers.simulated.scheduler import Job, Scheduler
from loadgen.servers.simulated.scheduler_presets import Engine, find_engine

DATA = Path(__file__).parent / "data"
KV_TOKENS = 68_700
"""KV cache size of every server in llm-infer-bench, in tokens, as set by its README or as near as memory allows."""
SEED = 0xCADE


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured value and the simulated value."""

    group: str
    case: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a file in benchmarks/data. The README of the folder names its source."""
    text = gzip.decompress((DATA / f"{name}.csv.gz").read_bytes()).decode()
    return list(csv.DictReader(io.StringIO(text)))


def output_lengths(cap: int) -> list[int]:
    """Return 1000 random output lengths, drawn as in llm-infer-bench.

    The lengths are exponentially distributed with mean 128 and at least 10. Lengths above `cap` are drawn again.
    """
    random = Random(SEED)  # noqa: S311 - not secret
    draws = (random.expovariate(1 / 128) for _ in range(1_000_000))
    within_cap = (max(10, int(length)) for length in draws if length <= cap)
    return [next(within_cap) for _ in range(1000)]


def served(
    engine: VirtualEngine, jobs: Sequence[Job], following: Callable[[TokenTimes], Job | None] | None = None
) -> list[TokenTimes]:
    """Simulate all jobs until they have ended, and return the token times of each job.

    `following` receives the token times of an ended job, and returns the next job of its client, or None.
    """
    waiting, answers = sorted(jobs, key=lambda job: -job.arrived_ns), []
    while waiting or engine.busy:
        while waiting and (waiting[-1].arrived_ns <= engine.now_ns or not engine.busy):
            engine.submit(waiting.pop())
        for answer in engine.run(waiting[-1].arrived_ns if waiting else FOREVER_NS):
            answers.append(answer)
            job = following(answer) if following else None
            if job is not None:
                waiting.append(job)
                waiting.sort(key=lambda job: -job.arrived_ns)
    return answers


@cache
def engine_2023(server: str) -> tuple[Engine, Callable[[], VirtualEngine]]:
    engine = find_engine(server, "2023")
    step_time = engine.step_time(engine.deployment("A800", "llama-2-13b"))
    policy = engine.policy_for(KV_TOKENS)
    return engine, lambda: VirtualEngine(Scheduler(policy, KV_TOKENS), step_time)


@cache
def bursts() -> list[Compared]:
    """Return the measured and simulated throughput of bursts of 1000 requests: prompt and output tokens per second."""
    found = []
    for row in rows("llm_infer_bench"):
        if row["kind"] == "burst":
            lengths = output_lengths(int(row["limit"]))
            answers = served(engine_2023(row["server"])[1](), [Job(512, length, 0) for length in lengths])
            took_s = max(answer.instants[-1] for answer in answers) / 1e9
            rate = (512 * 1000 + sum(lengths)) / took_s
            found.append(Compared(row["server"], row["limit"], float(row["value"]), rate))
    return found


def order_kept(found: Sequence[Compared]) -> tuple[int, int]:
    """Return for how many pairs of servers the simulation gives the measured order, and the number of all pairs.

    A pair consists of two servers under the same load.
    """
    pairs = [(a, b) for a, b in combinations(found, 2) if a.case == b.case]
    return sum((a.measured < b.measured) == (a.simulated < b.simulated) for a, b in pairs), len(pairs)


def poisson() -> list[Compared]:
    """Return the measured and simulated median latency of 1000 requests with Poisson arrivals, per token or per
    request.

    Prompts have 128 to 384 tokens. Latencies are in seconds.
    """
    found = []
    for row in rows("llm_infer_bench"):
        if row["kind"] == "poisson":
            random, at_ns, jobs = Random(SEED), 0.0, []  # noqa: S311 - not secret
            for length in output_lengths(512):
                at_ns += random.expovariate(float(row["limit"])) * 1e9
                jobs.append(Job(random.randint(128, 384), length, int(at_ns)))
            answers = served(engine_2023(row["server"])[1](), jobs)
            each_s = [(answer.instants[-1] - answer.job.arrived_ns) / 1e9 for answer in answers]
            if row["what"] == "token_s":
                each_s = [took_s / answer.job.output_tokens for took_s, answer in zip(each_s, answers, strict=True)]
            case = f"{row['limit']}/s, {row['what']}"
            found.append(Compared(row["server"], case, float(row["value"]), statistics.median(each_s)))
    return found


def closed_loops() -> dict[str, list[Compared]]:
    """Return measured and simulated values of closed loops, by metric: TPOT, output tokens per second, and TTFT."""
    return {
        quantity: [
            Compared(point.source, point.case, point.measured, point.predicted)
            for point in hardware_model.closed_loops(quantity)
        ]
        for quantity in ("TPOT", "tokens/s", "TTFT")
    }


@cache
def trace() -> tuple[list[Compared], float]:
    """Compare a simulation with a trace of 300 requests to vLLM 0.19 on one RTX PRO 6000.

    Return the TTFT and TPOT of each request, and the mean error of the number of running requests, relative to its
    mean. The server's limits were 128 sequences and 2048 tokens per step."""
    current = find_engine("vllm")
    deployment = current.deployment("RTX PRO 6000", "llama-3.1-8b")
    kv_tokens = current.kv_tokens(deployment)
    policy = current.policy_for(kv_tokens, running_limit=128, step_tokens=2048)
    engine = VirtualEngine(Scheduler(policy, kv_tokens), current.step_time(deployment))
    recorded = rows("trace_vllm")
    jobs = [
        Job(int(row["input"]), int(row["output"]), int(1e9 * float(row["arrival_s"])), owner=row) for row in recorded
    ]
    answers, found = served(engine, jobs), []
    for each in answers:
        row, first_ns, last_ns = each.job.owner, each.instants[0], each.instants[-1]
        ttft_s, tpot_s = (
            (first_ns - each.job.arrived_ns) / 1e9,
            (last_ns - first_ns) / 1e9 / (each.job.output_tokens - 1),
        )
        found.append(Compared("TTFT", "", float(row["ttft_ms"]) / 1e3, ttft_s))
        found.append(Compared("TPOT", "", float(row["tpot_ms"]) / 1e3, tpot_s))
    counted = [(float(row["at_s"]), int(row["running"])) for row in rows("trace_vllm_running")]
    off = 0
    for at_s, running in counted:
        there = sum(each.job.arrived_ns < 1e9 * at_s < each.instants[-1] for each in answers)
        off += abs(min(there, 128) - running)
    return found, off / sum(running for _, running in counted)


def mean_error(found: Sequence[Compared]) -> float:
    return statistics.mean(abs(each.error) for each in found)


def median_error(found: Sequence[Compared]) -> float:
    return statistics.median(abs(each.error) for each in found)


def cells(found: Sequence[Compared], digits: int) -> None:
    """Print a table with one row per measurement."""
    print("| server | load | measured | simulated | error |\n| --- | --- | --- | --- | --- |")
    for each in found:
        figures = f"{each.measured:.{digits}f} | {each.simulated:.{digits}f} | {each.error:+.1%}"
        print(f"| {each.group} | {each.case} | {figures} |")


def print_bursts() -> None:
    """Print the table of the bursts of llm-infer-bench."""
    cells(bursts(), 0)
    kept, pairs = order_kept(bursts())
    print(f"\nMean error {mean_error(bursts()):.1%}; {kept} of {pairs} pairs of servers in the order measured.")


def print_poisson() -> None:
    """Print the table of the latencies of llm-infer-bench under Poisson arrivals."""
    cells(poisson(), 4)
    print(f"\nMean error {mean_error(poisson()):.1%}, median {median_error(poisson()):.1%}.")


def print_closed_loops() -> None:
    """Print the median absolute errors for closed loops, by source and framework."""
    print("| source | points | TPOT | tokens/s | TTFT |\n| --- | --- | --- | --- | --- |")
    by = closed_loops()
    for group in [*dict.fromkeys(each.group for each in by["TPOT"]), ""]:
        parts = [[each for each in found if group in ("", each.group)] for found in by.values()]
        print(f"| {group or 'all'} | {len(parts[0])} |", " | ".join(f"{median_error(part):.1%}" for part in parts), "|")


def print_trace() -> None:
    """Print measured and simulated medians of the trace, and the error of the number of running requests."""
    found, off = trace()
    for what in ("TTFT", "TPOT"):
        measured, simulated = (
            statistics.median(getattr(each, side) for each in found if each.group == what)
            for side in ("measured", "simulated")
        )
        error = f"{simulated / measured - 1:+.1%}"
        print(f"Median {what}: {1e3 * measured:.1f} ms measured, {1e3 * simulated:.1f} simulated: {error}.")
    print(f"Number running, each second: off by {off:.1%} of its mean.")


TABLES = {"burst": print_bursts, "poisson": print_poisson, "closed": print_closed_loops, "trace": print_trace}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help=", ".join(TABLES))
    for name in parser.parse_args(arguments).tables or TABLES:
        print(f"\n## {name}\n")
        TABLES[name]()


if __name__ == "__main__":
    main()
