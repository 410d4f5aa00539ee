"""Computes the hardware limits of a model under a load, and the times that an inference engine is expected to reach.

`loadgen limits` prints the results. `loadgen.analysis.hardware_limit` compares measured runs with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadgen.servers.hardware import (
    Change,
    HardwareError,
    ModelShape,
    framework,
    gpu,
    model,
    number_format,
    with_changes,
)
from loadgen.servers.hardware.experts import LayerGemm, layer_gemms
from loadgen.servers.hardware.inference import (
    HEAD_FORMAT,
    Deployment,
    Gemm,
    all_reduce_lower_bound_s,
    default_kv_bytes,
    model_gemms,
)
from loadgen.servers.hardware.kernels import gemm_bytes, gemm_s
from loadgen.servers.hardware.throughput_model import (
    MEMORY_FRACTION,
    Load,
    LoadTimes,
    bottleneck,
    decode_step_parts,
    formula_times,
    limit_times,
)
from loadgen.servers.hardware.validation import Accuracy, PredictedLoad, accuracies, changed_settings

DEFAULT_FRAMEWORK = "vLLM"
ALL_REDUCED_GEMMS = ("attention output", "down")
"""GEMMs whose results are partial sums on each GPU and need an all-reduce."""
Expect = Callable[[Deployment, Load, float], LoadTimes]
"""Function that predicts the times under a load. The last argument is the fraction of the GPU memory for weights and KV
cache."""
CURVE_IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of requests in flight at which the latency-throughput curve is computed."""


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Latency and throughput under a load in steady state."""

    ttft_s: float
    tpot_s: float
    prefill_s: float
    """Prefill time of all prompts in flight at once, as a static batch."""
    prompt_prefill_s: float
    """Prefill time of one prompt alone."""
    decode_step_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    kv_tokens: int
    """Number of tokens that the KV cache of all GPUs can hold."""
    bound: str
    """Busiest resource: compute, memory or network. For expected figures it may also be overhead."""


@dataclass(frozen=True, slots=True)
class GemmBound:
    """One GEMM of the model in prefill or decode: its size, its bottleneck and its duration.

    The GEMM multiplies an m by k matrix of activations by a k by n matrix of weights. `bound` is the bottleneck:
    compute, memory or network. The bottleneck is the network if the all-reduce after the GEMM takes longer than the
    GEMM itself.
    """

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
    """Result of `loadgen limits`. `--json` prints its fields."""

    gpu: str
    model: str
    format: str
    gpus: int
    framework: str
    input_tokens: int
    output_tokens: int
    in_flight: int
    cache_hit_rate: float
    """Share of the prompt tokens that the engine finds in its prefix cache."""
    spread: float
    """Maximum relative deviation of a request's token counts from `input_tokens` and `output_tokens`."""
    rounds: int
    """Number of requests that each client sends, one after the other."""
    statistic: str
    """Statistic of the expected TTFT and TPOT over all requests: `mean` or `median`."""
    replayed: bool
    """True if the expected TTFT and TPOT come from a replay of the closed loop, with `spread`, `rounds` and
    `statistic`. False if they come from a formula for the steady state."""
    running: int
    """Number of requests in flight that fit into the KV cache at the same time."""
    flops_per_byte: float
    """Peak FLOP/s of the GPU divided by its memory bandwidth. A GEMM with fewer FLOPs per byte is bound by memory."""
    limit: LoadFigures
    expected: LoadFigures
    shares: Mapping[str, float]
    """Shares of compute, memory, network and overhead in the expected decode step."""
    gemms: Sequence[GemmBound]
    accuracy: Mapping[str, Accuracy]
    """Accuracy of the expected figures in published measurements of this framework, GPU and kind of model."""
    curve: Mapping[str, Sequence[float]]
    """Expected TTFT, TPOT and tokens/s by requests in flight, and the hardware limits of TPOT and tokens/s."""
    gpu_changes: Sequence[Change] = ()
    """Figures of a hypothetical GPU that differ from the original GPU, with reasons."""
    notes: Sequence[str] = ()
    """Sentences on options that have no effect."""


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
    """Return a deployment of a model on GPUs. The GPU, the model, the number format and the engine are looked up by
    name.

    - `tensor` and `pipeline` are the degrees of tensor and pipeline parallelism.
    - `file` is a TOML file with additional GPUs and models.
    - `changes` replace figures of the GPU, for example `memory_bandwidth=8TB/s`.

    The KV cache has the number format that the engine uses by default for weights in the format `format_name`. Raises
    HardwareError for an unknown name or an invalid value.
    """
    if tensor < 1 or pipeline < 1:
        raise HardwareError(f"{tensor} x {pipeline} GPUs: give 1 or more for --tp and --pp")
    card = gpu(gpu_name, file)
    engine = framework(framework_name)
    weights = number_format(format_name)
    card = with_changes(card, changes)
    shape = model(model_name, file) if isinstance(model_name, str) else model_name
    return Deployment(card, shape, weights, engine, tensor, pipeline, default_kv_bytes(card, weights, engine))


def compute_limits(
    deployment: Deployment,
    load: Load,
    memory_fraction: float = MEMORY_FRACTION,
    replicas: int = 1,
    expect: Expect = formula_times,
) -> Limits:
    """Return the hardware limits and the expected figures of `replicas` deployments, each of which serves `load`.

    Throughput, requests in flight and KV cache are those of all replicas together. `expect` predicts the expected times
    of one deployment: `formula_times`, or `expected_times` of loadgen.servers.simulated.closed_loop.

    Raises HardwareError if the model does not fit into the GPU memory.
    """
    best = limit_times(deployment, load, memory_fraction)
    likely = expect(deployment, load, memory_fraction)
    kv_tokens = deployment.kv_tokens(memory_fraction)
    spent = decode_step_parts(deployment, load, memory_fraction)
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
        cache_hit_rate=deployment.cache_hit_rate,
        spread=load.spread,
        rounds=load.rounds,
        statistic=load.statistic,
        replayed=likely.replayed,
        running=int(best.running) * replicas,
        flops_per_byte=peak / deployment.gpu.memory_bytes_per_s,
        limit=_figures(best, deployment, kv_tokens, replicas, bottleneck(deployment, load, memory_fraction)),
        expected=_figures(likely, deployment, kv_tokens, replicas, max(spent, key=lambda name: spent[name])),
        shares={name: seconds / sum(spent.values()) for name, seconds in spent.items()},
        gemms=_gemm_bounds(deployment, deployment.prompt_parts(load.prompt_tokens)[0], int(best.running)),
        accuracy=accuracies(
            deployment,
            load=PredictedLoad(load.prompt_tokens, load.output_tokens, load.in_flight),
            changed_settings=changed_settings(deployment, load, memory_fraction),
        ),
        curve=_curve(deployment, load, memory_fraction, replicas, expect),
        gpu_changes=deployment.gpu.changes,
    )


def _curve(
    deployment: Deployment, load: Load, memory_fraction: float, replicas: int, expect: Expect
) -> dict[str, list[Any]]:
    loads = [replace(load, in_flight=in_flight) for in_flight in CURVE_IN_FLIGHT]
    likely = [expect(deployment, point, memory_fraction) for point in loads]
    best = [limit_times(deployment, point, memory_fraction) for point in loads]
    return {
        "in_flight": [replicas * in_flight for in_flight in CURVE_IN_FLIGHT],
        "ttft_s": [times.ttft_s for times in likely],
        "tpot_s": [times.tpot_s for times in likely],
        "output_tokens_per_s": [replicas * times.output_tokens_per_s for times in likely],
        "limit_tpot_s": [times.tpot_s for times in best],
        "limit_output_tokens_per_s": [replicas * times.output_tokens_per_s for times in best],
    }


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
    if not deployment.model.plain:
        phases = (("prefill", prompt_tokens, 1), ("decode", batch, batch))
        return [bound for phase in phases for bound in _mixture_bounds(deployment, *phase)]
    prefill = [_gemm_bound(deployment, gemm, "prefill", prompt_tokens, 1) for gemm in model_gemms(deployment)]
    decode = [_gemm_bound(deployment, gemm, "decode", batch, batch) for gemm in model_gemms(deployment)]
    return prefill + decode


def _gemm_bound(deployment: Deployment, gemm: Gemm, phase: str, tokens: int, sequences: int) -> GemmBound:
    """Return the size, the bottleneck and the duration of one GEMM (matrix multiplication) in a phase of the model.

    `tokens` is the number of tokens that the phase processes, and `sequences` is the number of sequences. The GEMM of
    the output head has one row per sequence, for the last token. Every other GEMM has one row per token.
    """
    card = deployment.gpu
    m = tokens if gemm.count > 1 else sequences
    flops = 2.0 * m * gemm.n * gemm.k
    moved_bytes = float(gemm_bytes(gemm.format, m, gemm.n, gemm.k))
    bounds = {"compute": flops / card.peaks[gemm.format.compute_type], "memory": moved_bytes / card.memory_bytes_per_s}
    if gemm.name in ALL_REDUCED_GEMMS:
        bounds["network"] = float(all_reduce_lower_bound_s(deployment, m))
    return GemmBound(
        gemm=gemm.name,
        phase=phase,
        m=m,
        n=gemm.n,
        k=gemm.k,
        flops_per_byte=flops / moved_bytes,
        bound=max(bounds, key=lambda name: bounds[name]),
        limit_s=max(bounds["compute"], bounds["memory"]),
        expected_s=float(gemm_s(card, gemm.format, m, gemm.n, gemm.k)),
    )


def _mixture_bounds(deployment: Deployment, phase: str, tokens: int, sequences: int) -> list[GemmBound]:
    """Return the limits of all GEMMs of a model with experts or several kinds of layers, including the output head.

    `phase` is `prefill` or `decode`. One step computes `tokens` tokens of `sequences` sequences. All experts of a layer
    are one entry. Its dimensions are those of one expert, but its times cover all experts that receive tokens.
    """
    card = deployment.gpu
    head = number_format(HEAD_FORMAT)
    columns = deployment.model.vocabulary // deployment.tensor
    gemms = layer_gemms(deployment, tokens)
    gemms.append(LayerGemm("output head", sequences, columns, deployment.model.hidden, head))
    bounds = []
    for gemm in gemms:
        flops = 2.0 * gemm.m * gemm.n * gemm.k
        moved_bytes = float(gemm_bytes(gemm.format, gemm.m, gemm.n, gemm.k))
        seconds = {
            "compute": gemm.copies * flops / card.peaks[gemm.format.compute_type],
            "memory": gemm.copies * moved_bytes / card.memory_bytes_per_s,
        }
        limit_s = max(seconds.values())
        if gemm.all_reduced and deployment.tensor > 1:
            seconds["network"] = float(all_reduce_lower_bound_s(deployment, tokens / deployment.attention_data))
        single = gemm.seconds is None
        expected = gemm_s(card, gemm.format, gemm.m, gemm.n, gemm.k) if single else gemm.seconds
        bounds.append(
            GemmBound(
                gemm=gemm.name if single else f"{gemm.name} x {gemm.copies:.0f}",
                phase=phase,
                m=gemm.m,
                n=gemm.n,
                k=gemm.k,
                flops_per_byte=flops / moved_bytes,
                bound=max(seconds, key=lambda name: seconds[name]),
                limit_s=limit_s,
                expected_s=float(expected),
            )
        )
    return bounds
