"""What a GPU allows for a model and a load, and what a framework is expected to make of it: the document behind
`loadgen limits`. How far a run is from the first, `loadgen.analysis.hardware_limit` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.servers.hardware import HardwareError, ModelShape, framework, gpu, model, number_format, with_changes
from loadgen.servers.hardware.inference import Deployment, all_reduce_lower_bound_s, model_gemms
from loadgen.servers.hardware.kernels import gemm_bytes, gemm_s
from loadgen.servers.hardware.throughput_model import (
    Load,
    LoadTimes,
    bottleneck,
    decode_step_parts,
    expected_times,
    limit_times,
)

MEMORY_FRACTION = 0.9
"""Of a GPU's memory, what weights and KV cache may fill."""
DEFAULT_FRAMEWORK = "vLLM"
ALL_REDUCED_GEMMS = ("attention output", "down")
"""GEMMs of which each GPU has a part of the sum: an all-reduce follows."""
CURVE_IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Of the latency-throughput curve."""


@dataclass(frozen=True, slots=True)
class LoadFigures:
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
    limit: LoadFigures
    expected: LoadFigures
    shares: Mapping[str, float]
    """Of the expected decode step: compute, memory, network and overhead."""
    gemms: Sequence[GemmBound]
    curve: Mapping[str, Sequence[float]]
    """Expected TTFT, TPOT and tokens per second by the number in flight, and the limits of the last two."""


def make_deployment(
    gpu_name: str,
    model_name: str | ModelShape,
    format_name: str = "bf16",
    tensor: int = 1,
    pipeline: int = 1,
    framework_name: str = DEFAULT_FRAMEWORK,
    *,
    file: Path | None = None,
    changes: Sequence[str] = (),
) -> Deployment:
    """Return a deployment whose parts are looked up by name. Raises HardwareError for an unknown or invalid part.

    `file` is a TOML file with further GPUs and models. `changes` override figures of the GPU, as in `with_changes`.
    The KV cache has the format that the engine uses by default for this model format.
    """
    if tensor < 1 or pipeline < 1:
        raise HardwareError(f"{tensor} x {pipeline} GPUs: give 1 or more for --tp and --pp")
    card = gpu(gpu_name, file)
    engine = framework(framework_name)
    weights = number_format(format_name)
    card = with_changes(card, changes)
    fp8_kv = weights.compute_type in ("fp8", "fp4") and (engine.fp8_kv or "fp4" in card.peaks)
    kv_bytes = number_format("fp8" if fp8_kv else "bf16").weight_bytes
    shape = model(model_name, file) if isinstance(model_name, str) else model_name
    return Deployment(card, shape, weights, engine, tensor, pipeline, kv_bytes)


def compute_limits(
    deployment: Deployment, load: Load, memory_fraction: float = MEMORY_FRACTION, replicas: int = 1
) -> Limits:
    """All of it; `load` is that of one of `replicas`, figures are those of all together. Raises HardwareError where
    the model does not fit."""
    best, likely = limit_times(deployment, load, memory_fraction), expected_times(deployment, load, memory_fraction)
    kv_tokens = deployment.kv_tokens(memory_fraction)
    spent = decode_step_parts(deployment, load, memory_fraction)
    loads = [Load(load.prompt_tokens, load.output_tokens, number) for number in CURVE_IN_FLIGHT]
    curve = [expected_times(deployment, load, memory_fraction) for load in loads]
    best_curve = [limit_times(deployment, load, memory_fraction) for load in loads]
    peak = deployment.gpu.peaks[deployment.gpu.effective_format(deployment.weights).compute_type]
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
        limit=_figures(best, deployment, kv_tokens, replicas, bottleneck(deployment, load, memory_fraction)),
        expected=_figures(likely, deployment, kv_tokens, replicas, max(spent, key=lambda name: spent[name])),
        shares={name: seconds / sum(spent.values()) for name, seconds in spent.items()},
        gemms=_gemm_bounds(deployment, load.prompt_tokens, int(best.running)),
        curve={
            "in_flight": [replicas * number for number in CURVE_IN_FLIGHT],
            "ttft_s": [each.ttft_s for each in curve],
            "tpot_s": [each.tpot_s for each in curve],
            "output_tokens_per_s": [replicas * each.output_tokens_per_s for each in curve],
            "limit_tpot_s": [each.tpot_s for each in best_curve],
            "limit_output_tokens_per_s": [replicas * each.output_tokens_per_s for each in best_curve],
        },
    )


def _figures(times: LoadTimes, deployment: Deployment, kv_tokens: int, replicas: int, busiest: str) -> LoadFigures:
    return LoadFigures(
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
        for gemm in model_gemms(deployment):
            m = tokens if gemm.count > 1 else (1 if phase == "prefill" else batch)
            flops, moved = 2.0 * m * gemm.n * gemm.k, float(gemm_bytes(gemm.format, m, gemm.n, gemm.k))
            minimum = {
                "compute": flops / card.peaks[gemm.format.compute_type],
                "memory": moved / card.memory_bytes_per_s,
            }
            if gemm.name in ALL_REDUCED_GEMMS:
                minimum["network"] = float(all_reduce_lower_bound_s(deployment, m))
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
