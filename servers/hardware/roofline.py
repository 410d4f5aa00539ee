"""What a GPU allows for a model and a load, and what a framework is expected to make of it: the document behind
`loadgen limits`. How far a run is from the first, `loadgen.analysis.hardware_limit` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.servers.hardware import HardwareError, ModelShape, changed, framework, gpu, model, number_format
from loadgen.servers.hardware.inference import ARCHITECTURES, Deployment, gemms, sending_s
from loadgen.servers.hardware.kernels import gemm_bytes, gemm_s
from loadgen.servers.hardware.throughput_model import Load, Times, bound, expected, limit, parts

MEMORY_FRACTION = 0.9
"""Of a GPU's memory, what weights and KV cache may fill."""
DEFAULT_FRAMEWORK = "vLLM"
SUMMED = ("attention output", "down")
"""GEMMs of which each GPU has a part of the sum: an all-reduce follows."""
IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Of the latency-throughput curve."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a load in steady state."""

    ttft_s: float
    tpot_s: float
    prefill_s: float
    """All prompts in flight at once, as a static batch."""
    prompt_prefill_s: float
    """One prompt alone."""
    decode_step_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    kv_tokens: int
    """That the KV cache holds, over all GPUs of the deployment."""
    bound: str
    """What is busiest: compute, memory or network; overhead too where it is expected."""


@dataclass(frozen=True, slots=True)
class GemmBound:
    """One of a layer's GEMMs, in prefill or decode. Network binds those whose results take longer to add up."""

    gemm: str
    phase: str
    m: int
    n: int
    k: int
    flops_per_byte: float
    bound: str
    limit_s: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What `loadgen limits --json` prints."""

    gpu: str
    model: str
    format: str
    gpus: int
    framework: str
    input_tokens: int
    output_tokens: int
    in_flight: int
    running: int
    """Of those in flight, how many the KV cache holds at a time."""
    flops_per_byte: float
    """Of the GPU: a GEMM with fewer is bound by memory."""
    limit: Figures
    expected: Figures
    shares: Mapping[str, float]
    """Of the expected decode step: compute, memory, network and overhead."""
    gemms: Sequence[GemmBound]
    curve: Mapping[str, Sequence[float]]
    """Expected TTFT, TPOT and tokens per second by the number in flight, and the limits of the last two."""


def deploy(  # noqa: PLR0913, PLR0917 - what a deployment is
    gpu_name: str,
    model_name: str | ModelShape,
    format_name: str = "bf16",
    tensor: int = 1,
    pipeline: int = 1,
    framework_name: str = DEFAULT_FRAMEWORK,
    kv_format: str | None = None,
    architecture: str = "standard",
    file: Path | None = None,
    changes: Sequence[str] = (),
) -> Deployment:
    """A deployment by names, or of a shape; `file` as in `gpu`, `changes` as in `changed`. Raises HardwareError."""
    if tensor < 1 or pipeline < 1:
        raise HardwareError(f"{tensor} x {pipeline} GPUs: give 1 or more for --tp and --pp")
    if architecture not in ARCHITECTURES:
        raise HardwareError(f"unknown architecture {architecture!r}: choose one of {', '.join(ARCHITECTURES)}")
    card, engine, weights = gpu(gpu_name, file), framework(framework_name), number_format(format_name)
    card = changed(card, changes)
    small = weights.computes in ("fp8", "fp4") and (engine.fp8_kv or "fp4" in card.peaks)
    kv_bytes = number_format(kv_format or ("fp8" if small else "bf16")).weight_bytes
    shape = model(model_name, file) if isinstance(model_name, str) else model_name
    return Deployment(card, shape, weights, engine, tensor, pipeline, kv_bytes, architecture)


def limits_of(
    deployment: Deployment, load: Load, memory_fraction: float = MEMORY_FRACTION, replicas: int = 1
) -> Limits:
    """All of it; `load` is that of one of `replicas`, figures are those of all together. Raises HardwareError where
    the model does not fit."""
    best, likely = limit(deployment, load, memory_fraction), expected(deployment, load, memory_fraction)
    kv_tokens = deployment.kv_tokens(memory_fraction)
    spent = parts(deployment, load, memory_fraction)
    loads = [Load(load.prompt_tokens, load.output_tokens, number) for number in IN_FLIGHT]
    curve = [expected(deployment, load, memory_fraction) for load in loads]
    best_curve = [limit(deployment, load, memory_fraction) for load in loads]
    peak = deployment.gpu.peaks[deployment.gpu.stored(deployment.weights).computes]
    return Limits(
        gpu=deployment.gpu.name,
        model=deployment.model.name,
        format=deployment.weights.name,
        gpus=deployment.gpus * replicas,
        framework=deployment.framework.name,
        input_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        in_flight=int(load.in_flight) * replicas,
        running=int(best.running) * replicas,
        flops_per_byte=peak / deployment.gpu.memory_bytes_per_s,
        limit=_figures(best, deployment, kv_tokens, replicas, bound(deployment, load, memory_fraction)),
        expected=_figures(likely, deployment, kv_tokens, replicas, max(spent, key=lambda name: spent[name])),
        shares={name: seconds / sum(spent.values()) for name, seconds in spent.items()},
        gemms=_gemm_bounds(deployment, load.prompt_tokens, int(best.running)),
        curve={
            "in_flight": [replicas * number for number in IN_FLIGHT],
            "ttft_s": [each.ttft_s for each in curve],
            "tpot_s": [each.tpot_s for each in curve],
            "output_tokens_per_s": [replicas * each.output_tokens_per_s for each in curve],
            "limit_tpot_s": [each.tpot_s for each in best_curve],
            "limit_output_tokens_per_s": [replicas * each.output_tokens_per_s for each in best_curve],
        },
    )


def _figures(times: Times, deployment: Deployment, kv_tokens: int, replicas: int, busiest: str) -> Figures:
    return Figures(
        ttft_s=float(times.ttft_s),
        tpot_s=float(times.tpot_s),
        prefill_s=float(times.prefill_s),
        prompt_prefill_s=float(times.prompt_prefill_s),
        decode_step_s=float(times.decode_step_s),
        output_tokens_per_s=float(times.output_tokens_per_s) * replicas,
        output_tokens_per_s_per_gpu=float(times.output_tokens_per_s / deployment.gpus),
        kv_tokens=kv_tokens * replicas,
        bound=busiest,
    )


def _gemm_bounds(deployment: Deployment, prompt_tokens: int, batch: int) -> list[GemmBound]:
    card, rows = deployment.gpu, []
    for phase, tokens in (("prefill", prompt_tokens), ("decode", batch)):
        for gemm in gemms(deployment):
            m = tokens if gemm.count > 1 else (1 if phase == "prefill" else batch)
            flops, moved = 2.0 * m * gemm.n * gemm.k, float(gemm_bytes(gemm.format, m, gemm.n, gemm.k))
            minimum = {"compute": flops / card.peaks[gemm.format.computes], "memory": moved / card.memory_bytes_per_s}
            if gemm.name in SUMMED:
                minimum["network"] = float(sending_s(deployment, m))
            rows.append(
                GemmBound(
                    *(gemm.name, phase, m, gemm.n, gemm.k, flops / moved),
                    bound=max(minimum, key=lambda name: minimum[name]),
                    limit_s=max(minimum["compute"], minimum["memory"]),
                    expected_s=_seconds(gemm_s(card, gemm.format, m, gemm.n, gemm.k)),
                )
            )
    return rows


def _seconds(value: Any) -> float:
    return float(value)
