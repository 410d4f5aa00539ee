"""The hardware limit of a run: the best throughput and latency that the run's GPUs allow for its load.

The limit is computed only if the GPU, the model and the load are known. A simulated server reports the GPU that it
simulates. For a real server, `--gpu-model` names the GPU. Without this option, the GPU that NVML or DCGM reports is
used. In this case, the machine must have a single GPU, or all GPUs in use must be of the same model. Workloads of
sessions or shared prefixes have no limit, because a prefix cache may save an unknown part of the work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from loadgen.analysis.frame import Floats, Frame
    from loadgen.analysis.objectives import Distribution
    from loadgen.analysis.run.runfile import Run
    from loadgen.servers.hardware.inference import Deployment

FORMATS = {
    **{"fp8": "fp8", "w8a8": "int8", "int8": "int8", "awq": "int4", "gptq": "int4", "int4": "int4", "w4a16": "int4"},
    "nvfp4": "nvfp4",
}
"""Number format of the weights by the ending of a model's name. A name without such an ending stands for bf16."""
MIN_MEMORY_IN_USE = 0.2
"""A GPU is in use if more than this share of its memory is occupied."""
ALL_MEMORY = 1.0
"""Share of the GPU's memory that the limit assumes: the whole memory, not the part that an engine reserves."""


class HardwareLimit(msgspec.Struct, kw_only=True):
    """The best throughput and latency that the GPUs allow for the measured load.

    This limit assumes that compute, memory and network run at the rates of the data sheet. Rates and times use the
    clock of the server, like the measured figures. This clock differs from real time only for a simulated server, whose
    clock may run faster.
    """

    gpu: str
    gpus: int
    model: str
    format: str
    """Number format of the weights: bf16, unless the model's name ends in another format."""
    known_from: str
    """The source of the GPU model: `simulated`, `--gpu-model`, `NVML` or `DCGM`."""
    data_sheet: str
    """The source of the GPU's peak rates and memory size."""
    speed: float = 1.0
    """Speed of a simulated server's clock, relative to real time."""
    input_tokens: float
    """Mean prompt tokens of complete requests."""
    output_tokens: float
    """Mean output tokens of complete requests."""
    in_flight: float
    """Mean number of requests in flight over the window."""
    decoding: float
    """Mean number of requests in flight whose first token has arrived."""
    output_tokens_per_s: float
    """Maximum output throughput with `in_flight` requests in flight."""
    ttft_s: float
    """Minimum TTFT: the time for the prefill of one prompt."""
    tpot_s: float
    """Minimum TPOT: the time of one decode step for `decoding` requests."""
    bound: str
    """The resource that limits throughput: `compute`, `memory` or `network`."""
    tpot_bound: str
    """The resource that limits a decode step: `compute`, `memory` or `network`."""
    throughput_share: float | None
    """Measured output throughput / `output_tokens_per_s`."""
    ttft_ratio: float | None
    """Measured mean TTFT / `ttft_s`."""
    tpot_ratio: float | None
    """Measured mean TPOT / `tpot_s`."""
    mbu: float | None
    """Model bandwidth utilisation: bytes of weights and KV cache read per decode step / (measured TPOT * memory
    bandwidth)."""
    mfu: float | None
    """Model FLOP/s utilisation: FLOPs per second for prompts and responses / peak FLOP/s."""
    framework: str
    overhead_share: float
    """Share of a decode step that the framework spends on overhead (kernel launches, gaps, scheduling), as
    published."""

    @property
    def exceeds_limit(self) -> bool:
        """True if the run is more than 2% better than its hardware limit.

        Smaller differences can come from a varying load.
        """
        lowest_ratio = min(self.ttft_ratio or 1, self.tpot_ratio or 1)
        return (self.throughput_share or 0) > 1.02 or lowest_ratio < 0.98


class _Hardware(NamedTuple):
    """The GPUs and the model of a run. `source` states where the name of the GPU comes from."""

    gpu: str
    gpus: int
    model: str
    source: str
    changes: tuple[str, ...] = ()
    """Changed figures of the GPU, in the syntax of loadgen.servers.hardware.with_changes."""


class _Measured(NamedTuple):
    """The measured averages that are compared with the hardware limit."""

    prompt_tokens: float
    output_tokens: float
    ttft_s: float | None
    tpot_s: float | None
    output_tokens_per_s: float


def limit_of(run: Run, frame: Frame, latencies: Mapping[str, Distribution], rate: float | None) -> HardwareLimit | None:
    """Return the hardware limit of a run, or None if the GPU, the model or the load is unknown.

    The result is also None if requests share prefixes, or if the model does not fit into the memory of the GPUs.
    `latencies` contains the measured latency distributions by metric name. `rate` is the measured output throughput in
    tokens/s.
    """
    hardware = _hardware(run)
    rows = frame.inside & frame.complete
    shares_prefixes = any(facts.shares_prefixes for facts in run.header.workloads)
    if hardware is None or frame.span_ns is None or not rows.any() or shares_prefixes or not rate:
        return None
    measured = _Measured(
        prompt_tokens=float(frame.prompt_tokens[rows].mean()),
        output_tokens=float(frame.output_tokens[rows].mean()),
        ttft_s=latencies["ttft_s"].mean,
        tpot_s=latencies["tpot_s"].mean or None,  # 0 if every response came in one read; no ratio exists
        output_tokens_per_s=rate,
    )
    if not (measured.prompt_tokens >= 1 and measured.output_tokens >= 1):  # Also false for NaN.
        return None
    from loadgen.servers.hardware import HardwareError

    try:
        return _limit(hardware, run, frame, measured)
    except HardwareError:
        return None


def _limit(hardware: _Hardware, run: Run, frame: Frame, measured: _Measured) -> HardwareLimit:
    """Return the hardware limit of a run.

    Raises HardwareError if the GPU or model is not listed, or if the model does not fit into GPU memory.
    """
    from loadgen.servers.hardware.inference import lower_bounds_s
    from loadgen.servers.hardware.throughput_model import Load, bottleneck, decode_step_parts, limit_times

    prompt, output, ttft_s, tpot_s, rate = measured
    speed = float(run.header.server.get("speed") or 1)
    deployment = _deployment(hardware, str(run.header.server.get("name") or ""))
    in_flight, decoding = _mean_in_flight(frame, frame.sent_ns), _mean_in_flight(frame, frame.first_ns)
    load = Load(round(prompt), round(output), max(in_flight, 1.0))
    max_rate = float(limit_times(deployment, load, ALL_MEMORY).output_tokens_per_s) * min(in_flight, 1.0) * speed
    # Times by resource: of a decode step for all requests, of the prefill of one prompt, and of one token of a request.
    decode_step = lower_bounds_s(deployment, 0, 0, max(decoding, 1.0), prompt + output / 2)
    prefill = lower_bounds_s(deployment, 1, prompt)
    one_token = lower_bounds_s(deployment, 0, 0, 1, prompt + output / 2)
    tpot_bound = max(decode_step, key=lambda name: float(decode_step[name]))
    min_tpot_s = float(decode_step[tpot_bound]) / speed
    min_ttft_s = float(max(prefill.values())) / speed
    decode_load = Load(load.prompt_tokens, load.output_tokens, max(decoding, 1.0))
    step_parts = decode_step_parts(deployment, decode_load, ALL_MEMORY)
    compute_s = float(prefill["compute"]) + (output - 1) * float(one_token["compute"])
    mfu = rate / output * compute_s / speed
    return HardwareLimit(
        gpu=deployment.gpu.name,
        gpus=deployment.gpus,
        model=deployment.model.name,
        format=deployment.weights.name,
        known_from=hardware.source,
        data_sheet=", with ".join(
            [deployment.gpu.source, *([", ".join(hardware.changes)] if hardware.changes else [])]
        ),
        speed=speed,
        input_tokens=_rounded(prompt),
        output_tokens=_rounded(output),
        in_flight=_rounded(in_flight),
        decoding=_rounded(decoding),
        output_tokens_per_s=_rounded(max_rate),
        ttft_s=_rounded(min_ttft_s),
        tpot_s=_rounded(min_tpot_s),
        bound=bottleneck(deployment, load, ALL_MEMORY),
        tpot_bound=tpot_bound,
        throughput_share=_rounded(rate / max_rate),
        ttft_ratio=None if ttft_s is None else _rounded(ttft_s / min_ttft_s),
        tpot_ratio=None if tpot_s is None else _rounded(tpot_s / min_tpot_s),
        mbu=None if tpot_s is None else _rounded(float(decode_step["memory"]) / speed / tpot_s),
        mfu=_rounded(mfu),
        framework=deployment.framework.name,
        overhead_share=_rounded(step_parts["overhead"] / sum(step_parts.values())),
    )


def _hardware(run: Run) -> _Hardware | None:
    """Return the GPUs and the model of `run`, or None if they are unknown.

    A simulated server states its GPUs and its model. For a real server, the GPUs come from `--gpu-model`, or else from
    the telemetry of the GPUs. The function also returns None in these cases:

    - The value of `--gpu-model` is not valid.
    - According to the telemetry, the GPUs in use are of different models.
    - The GPUs of a simulated server do not form a single tensor-parallel group, for example because of a pipeline.
    - A simulated server saves work: it drafts tokens, or assumes that a share of the prompts is cached.
    - The GPU of a simulated server is described by a file of the user.
    """
    server, plan = run.header.server, run.header.plan
    model = str(server.get("model") or plan.get("model") or "")
    if server.get("simulated"):
        facts = server.get("hardware") or {}
        known = {"gpu", "model", "tensor_parallel"} <= facts.keys()
        # Pipelines, attention groups and separate workers have other limits.
        has_other_limit = not known or facts.get("gpus", facts["tensor_parallel"]) != facts["tensor_parallel"]
        if has_other_limit or facts.get("saves_work") or facts.get("own_gpu"):
            return None
        changes = tuple(facts.get("changes") or ())
        return _Hardware(facts["gpu"], facts["tensor_parallel"], facts["model"], "simulated", changes)
    if plan.get("gpu_model"):
        from loadgen.servers.hardware import HardwareError, parse_gpus

        try:
            count, name = parse_gpus(str(plan["gpu_model"]))
        except HardwareError:
            return None
        return _Hardware(name, count, model, "--gpu-model")
    facts = run.header.telemetry.get("gpu") or {}
    gpus = {str(gpu.get("index")): gpu for gpu in facts.get("gpus") or ()}
    in_use = set(gpus) if len(gpus) == 1 else _gpus_in_use(run, gpus)
    names = {str(gpu.get("name") or "") for index, gpu in gpus.items() if index in in_use}
    if len(names) != 1 or "" in names:
        return None
    return _Hardware(names.pop(), len(in_use), model, str(facts.get("by") or "telemetry"))


def _gpus_in_use(run: Run, gpus: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the indices of the GPUs that the run used.

    A GPU was used if more than MIN_MEMORY_IN_USE of its memory was occupied.
    """
    in_use = set()
    for sample in run.telemetry:
        if sample.source == "gpu":
            for reading in sample.values.get("gpus", ()):
                index = str(reading.get("index"))
                size = gpus.get(index, {}).get("memory_total_bytes")
                if size and (reading.get("memory_used_bytes") or 0) > MIN_MEMORY_IN_USE * size:
                    in_use.add(index)
    return in_use


def _deployment(hardware: _Hardware, server: str) -> Deployment:
    """Return the deployment of the model on the run's GPUs, with the engine `server` as the framework.

    The ending of the model's name, such as `-FP8`, determines the number format of the weights.
    """
    from loadgen.servers.hardware import HardwareError, framework, listed_model
    from loadgen.servers.hardware.roofline import DEFAULT_FRAMEWORK, make_deployment

    ending = re.search(rf"[-_.]({'|'.join(FORMATS)})\b", hardware.model, re.IGNORECASE)
    model = listed_model(hardware.model[: ending.start()] if ending else hardware.model)
    try:
        engine = framework(server).name
    except HardwareError:
        engine = DEFAULT_FRAMEWORK
    weights = FORMATS[ending[1].lower()] if ending else "bf16"
    return make_deployment(hardware.gpu, model, weights, hardware.gpus, framework_name=engine, changes=hardware.changes)


def _mean_in_flight(frame: Frame, begin_ns: Floats) -> float:
    """Return the mean number of requests in flight over the measurement window.

    `begin_ns` contains a time for each request. The request counts as in flight from this time to its end.
    """
    import numpy as np

    low, high = frame.span_ns or (0.0, 1.0)
    inside = np.clip(frame.end_ns, low, high) - np.clip(begin_ns, low, high)
    return float(np.nansum(inside)) / max(high - low, 1.0)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
