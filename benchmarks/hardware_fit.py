"""Fits the constants of frameworks.csv again, and tests them on measurements that were left out of the fit.

    python -m benchmarks.hardware_fit             # fitted constants and their errors, ten minutes
    python -m benchmarks.hardware_fit --held-out  # fits that leave out one GPU, TP or model at a time, half an hour

The fit minimises the mean of `|log(predicted / measured)|` with the Nelder-Mead method. The constants of kernels, links
and GPU architectures are not changed. Only the overheads of the inference engines are fitted, to static batches and
closed loops.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import minimize

from benchmarks import hardware_model as bench
from loadgen.servers import hardware
from loadgen.servers.hardware import Framework, inference
from loadgen.servers.hardware import roofline as limits

Points = list[bench.Point]
FITTED = {
    "TensorRT-LLM 0.9": ("layer_s", "sequence_s", "kv_share", "prefill_share"),
    "NIM": ("step_s", "sequence_s", "prefill_share", "server_s", "request_s"),
    "TensorRT-LLM": ("step_s", "sequence_s", "prefill_share", "server_s", "request_s", "prompt_launch_s"),
    "vLLM": ("layer_s", "step_s", "sequence_s", "kv_share", "prefill_share"),
}
"""Fitted constants by framework."""
LARGEST_LOSS = 0.4
"""A larger |log(predicted / measured)| of a measurement counts as this value in a fit, so that waits for memory do not
dominate it."""
AT_MOST_1 = {"kv_share", "prefill_share", "interference"}
TRIES = 60
HELD_OUT: dict[str, dict[str, Callable[[bench.Point], bool]]] = {
    "TensorRT-LLM 0.9": {
        "A100": lambda each: each.gpu.startswith("A100"),
        "L40 and L40S": lambda each: each.gpu.startswith("L40"),
        "H100 NVL": lambda each: each.gpu == "H100 NVL",
        "TP 8": lambda each: each.tp == 8,
        "Llama-2-70B": lambda each: "70B" in each.case,
    },
    "NIM": {
        "A100": lambda each: each.gpu.startswith("A100"),
        "Llama-3-70B at TP 4": lambda each: each.tp == 4,
        "fp8": lambda each: "fp8" in each.case,
    },
    "TensorRT-LLM": {"H100": lambda each: each.gpu.startswith("H100"), "TP 8": lambda each: each.tp == 8},
    "vLLM": {"H100": lambda each: each.gpu.startswith("H100"), "TP 8": lambda each: each.tp == 8},
}


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `gemm_s` that caches its results, because the fitted constants do not affect GEMM times."""
    known: dict[Any, Any] = {}

    def answer(card: Any, stored: Any, m: Any, n: int, k: int) -> Any:
        key = (card.name, stored, np.asarray(m).tobytes(), n, k)
        if key not in known:
            known[key] = function(card, stored, m, n, k)
        return known[key]

    return answer


def points_of(engine: Framework) -> Points:
    """Return all measurements of this engine, each with its prediction from the engine's current constants."""
    known = hardware.framework
    bench.framework = bench_framework = lambda name: engine if name == engine.name else known(name)
    limits.framework = bench_framework
    bench.closed_loop_times.cache_clear()
    try:
        if engine.name == "TensorRT-LLM 0.9":
            return [*bench.static.__wrapped__("prefill"), *bench.static.__wrapped__("TPOT")]
        quantities = ("TPOT", "TTFT") if "server_s" in FITTED[engine.name] else ("TPOT",)
        return [point for name in quantities for point in bench.closed_loops.__wrapped__(name, only=engine.name)]
    finally:
        bench.framework = limits.framework = known


def fit(name: str, without: Callable[[bench.Point], bool]) -> Framework:
    """Return the framework with fitted constants. Points for which `without` returns True are not used."""
    names, start = FITTED[name], hardware.framework(name)

    def made(logs: Sequence[float]) -> Framework:
        values = {each: float(np.exp(log)) for each, log in zip(names, logs, strict=True)}
        return replace(start, **{each: min(1.0, one) if each in AT_MOST_1 else one for each, one in values.items()})

    def loss(logs: Sequence[float]) -> float:
        kept = [each for each in points_of(made(logs)) if not without(each)]
        return float(np.mean([min(LARGEST_LOSS, abs(np.log(each.predicted / each.measured))) for each in kept]))

    first = [np.log(max(getattr(start, each), 1e-6)) for each in names]
    return made(minimize(loss, first, method="Nelder-Mead", options={"maxfev": TRIES}).x)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--held-out", action="store_true", help="leave one part out of each fit, and predict it")
    given = parser.parse_args(arguments)
    inference.gemm_s = remembered(inference.gemm_s)
    for name, names in FITTED.items():
        parts = HELD_OUT[name] if given.held_out else {"": lambda _: False}
        for part, of_it in parts.items():
            found = fit(name, of_it)
            judged = [each for each in points_of(found) if not part or of_it(each)]
            shown = ", ".join(f"{each} {getattr(found, each):.3g}" for each in names)
            print(f"{name}, {part or 'everything'}: {shown}")
            for quantity in sorted({each.quantity for each in judged}):
                errors = [each.error for each in judged if each.quantity == quantity]
                p50, p90 = np.quantile(errors, (0.5, 0.9))
                print(f"  {quantity:8} {len(errors):5}, median {100 * p50:4.1f}%, p90 {100 * p90:4.1f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
