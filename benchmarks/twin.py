"""Measures the prediction errors of a twin. It is fitted to a part of the measurements and predicts the other part.

    python -m benchmarks.twin trace
    python -m benchmarks.twin real --server vllm --url http://127.0.0.1:8001

- `trace`: 300 requests to vLLM 0.19 on one RTX PRO 6000. The twin is fitted to the latencies of the first 100 requests.
  The recorded number of running requests is not used for the fit.
- `real`: a running server. The twin is fitted to a burst of 64 and a closed loop of 4, and predicts a Poisson load and
  a burst of 200. Every prompt has 512 tokens and is new to the server.
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
"""Options of the server from which the trace was recorded."""
FITTED, ALL = 100, 300
LOADS = {
    "burst-64": ("burst", "--n", "64"),
    "closed-4": ("run", "--arrivals", "closed:4", "--n", "60"),
    "poisson": ("run", "--arrivals", "poisson:4", "--n", "120"),
    "burst-200": ("burst", "--n", "200"),
}
"""Commands of the loads. The twin is fitted to the first two loads."""


@cache
def trace() -> tuple[dict[str, float], list[Compared], float]:
    """Fit a twin to the first 100 requests of the trace, and predict the other 200 requests.

    Return the fitted constants, the measured and predicted medians over the other requests, and the mean error of the
    number of running requests, relative to its mean. The error covers the time after the arrival of the first 100
    requests."""
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
    """Print the constants of the twin that was fitted to the trace, and the errors of its predictions."""
    constants, compared, off = trace()
    print(
        ", ".join(f"{name} {value:.4g}" for name, value in constants.items()) + f", from {FITTED} of {ALL} requests.\n"
    )
    for each in compared:
        figures = f"{1e3 * each.measured:.1f} ms measured, {1e3 * each.simulated:.1f} predicted: {each.error:+.1%}"
        print(f"Median {each.case} of the other {ALL - FITTED}: {figures}.")
    print(f"Number running, each second: off by {off:.1%} of its mean.")


def print_real(server: str, url: str, seed: int) -> None:
    """Measure a running server, fit a twin to two of the runs, and print how well it predicts the other runs."""
    with TemporaryDirectory() as folder:
        for place, (name, load) in enumerate(LOADS.items(), 1):
            options = ("--server", server, "--url", url, "--output-tokens", "64", "--seed", str(1000 * (seed + place)))
            _loadgen(*load, *options, "--warmup", "8", "--quiet", "--no-report", "--out", f"{folder}/{name}")
        first, second, *others = (f"{folder}/{name}" for name in LOADS)
        print(_loadgen("twin", "fit", first, second, "--out", f"{folder}/twin.json"))
        print(_loadgen("twin", "check", f"{folder}/twin.json", *others))


def _loadgen(*arguments: str) -> str:
    """Run loadgen and return its output. Any exit code other than 0 and 5 ends this process.

    Exit code 5 is expected if the client shares the server's cores and was the limit.
    """
    ended = subprocess.run([sys.executable, "-m", "loadgen", *arguments], capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 5):
        sys.exit(ended.stderr)
    return ended.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark `trace` or `real`, and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("trace", "real"))
    parser.add_argument("--server", default="vllm")
    parser.add_argument("--url", default="http://127.0.0.1:8001")
    parser.add_argument("--seed", type=int, default=0, help="choose a new seed if the server has cached the prompts")
    asked = parser.parse_args(arguments)
    if asked.what == "trace":
        print_trace()
    else:
        print_real(asked.server, asked.url, asked.seed)


if __name__ == "__main__":
    main()
