"""How far off is a twin? Fitted to a part of what was measured, beside the rest.

    python -m benchmarks.twin trace
    python -m benchmarks.twin real --server vllm --url http://127.0.0.1:8001

`trace`: 300 requests to vLLM 0.19 on one RTX PRO 6000, of which the first 100 are fitted to; how many ran in each
second is not. `real`: a server that is up gets a burst of 64 and a closed loop of 4, to which the twin is fitted, then
a Poisson load and a burst of 200, which it predicts. Every prompt has 512 tokens and is new to the server.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.schedulers import Compared, rows
from loadgen.servers.simulated.scheduler_presets import find_engine
from loadgen.studies.twin_fitting import FitProblem, Floats, ObservedRun, StepLimits

RUNNING_LIMIT, STEP_TOKENS = 128, 2048
"""Of the server of the trace, as its options were."""
FITTED, ALL = 100, 300
LOADS = {
    "burst-64": ("burst", "--n", "64"),
    "closed-4": ("run", "--arrivals", "closed:4", "--n", "60"),
    "poisson": ("run", "--arrivals", "poisson:4", "--n", "120"),
    "burst-200": ("burst", "--n", "200"),
}
"""The first two are fitted to."""


@cache
def trace() -> tuple[dict[str, float], list[Compared], float]:
    """The constants; medians over the last 200 requests, measured and predicted; and by how much the number running is
    off in each second after the first 100 have come, as a share of its mean."""
    recorded = sorted(rows("trace_vllm"), key=lambda row: float(row["arrival_s"]))
    arrived_s, prompt, output, ttft_s, tpot_s = (
        np.array([float(row[name]) for row in recorded]) / scale
        for name, scale in (("arrival_s", 1), ("input", 1), ("output", 1), ("ttft_ms", 1e3), ("tpot_ms", 1e3))
    )
    seen = np.arange(len(recorded)) < FITTED
    load = ([round(1e9 * at_s) for at_s in arrived_s], prompt.astype(int).tolist(), output.astype(int).tolist())
    latencies = np.where(seen, ttft_s, np.nan), np.where(seen, tpot_s, np.nan)
    ended_s = float((arrived_s + ttft_s + tpot_s * (output - 1))[seen].max())
    run = ObservedRun("trace", *load, [()] * len(recorded), *latencies, ended_s, np.zeros((0, 3)))
    engine = find_engine("vllm")
    deployment = engine.deployment("RTX PRO 6000", "llama-3.1-8b")
    problem = FitProblem(
        [run], StepLimits(engine, engine.kv_tokens(deployment), RUNNING_LIMIT, STEP_TOKENS), deployment
    )
    found = problem.solve()
    told_ttft_s, told_tpot_s, _ = problem.replay_run(run, found)
    compared = [
        Compared("", name, float(np.median(measured[~seen])), float(np.median(told[~seen])))
        for name, measured, told in (("TTFT", ttft_s, told_ttft_s), ("TPOT", tpot_s, told_tpot_s))
    ]
    ends_s = arrived_s + told_ttft_s + told_tpot_s * (output - 1)
    off = _running_off(arrived_s, ends_s, float(arrived_s[FITTED]))
    return dict(zip(problem.constants, np.exp(found).tolist(), strict=True)), compared, off


def _running_off(arrived_s: Floats, ends_s: Floats, from_s: float) -> float:
    counted = [(float(row["at_s"]), int(row["running"])) for row in rows("trace_vllm_running")]
    counted = [(at_s, running) for at_s, running in counted if at_s >= from_s]
    there = [min(RUNNING_LIMIT, int(((arrived_s < at_s) & (at_s < ends_s)).sum())) for at_s, _ in counted]
    off = statistics.mean(abs(told - running) for told, (_, running) in zip(there, counted, strict=True))
    return off / statistics.mean(running for _, running in counted)


def print_trace() -> None:
    """The constants, and what they predict."""
    constants, compared, off = trace()
    print(
        ", ".join(f"{name} {value:.4g}" for name, value in constants.items()) + f", from {FITTED} of {ALL} requests.\n"
    )
    for each in compared:
        figures = f"{1e3 * each.measured:.1f} ms measured, {1e3 * each.simulated:.1f} predicted: {each.error:+.1%}"
        print(f"Median {each.case} of the other {ALL - FITTED}: {figures}.")
    print(f"Number running, each second: off by {off:.1%} of its mean.")


def print_real(server: str, url: str, seed: int) -> None:
    """What `loadgen twin` says of a server that is up."""
    with TemporaryDirectory() as folder:
        for place, (name, load) in enumerate(LOADS.items(), 1):
            options = ("--server", server, "--url", url, "--output-tokens", "64", "--seed", str(1000 * (seed + place)))
            _loadgen(*load, *options, "--warmup", "8", "--quiet", "--no-report", "--out", f"{folder}/{name}")
        first, second, *others = (f"{folder}/{name}" for name in LOADS)
        print(_loadgen("twin", "fit", first, second, "--out", f"{folder}/twin.json"))
        print(_loadgen("twin", "check", f"{folder}/twin.json", *others))


def _loadgen(*arguments: str) -> str:
    """What it prints; exit code 5 is right where the client, on the server's own cores, was the limit."""
    ended = subprocess.run([sys.executable, "-m", "loadgen", *arguments], capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 5):
        sys.exit(ended.stderr)
    return ended.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("trace", "real"))
    parser.add_argument("--server", default="vllm")
    parser.add_argument("--url", default="http://127.0.0.1:8001")
    parser.add_argument("--seed", type=int, default=0, help="another one for prompts that the server has not seen")
    asked = parser.parse_args(arguments)
    if asked.what == "trace":
        print_trace()
    else:
        print_real(asked.server, asked.url, asked.seed)


if __name__ == "__main__":
    main()
