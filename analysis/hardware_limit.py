"""What the hardware of a run allows for its load, where GPU and model are known: the limit line of every report.

No guess: of a GPU, a model or a load that is not known there is none. A simulated server says which GPU it simulates;
of a real one `--gpu-model` does, or NVML or DCGM, where one GPU alone is seen or is in use. Prompts that a prefix cache
may know are no work that could be counted: sessions and shared prefixes have no limit here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from loadgen.analysis.frame import Frame
    from loadgen.analysis.objectives import Distribution
    from loadgen.analysis.run.runfile import Run
    from loadgen.servers.hardware.inference import Deployment

FORMATS = {
    **{"fp8": "fp8", "w8a8": "int8", "int8": "int8", "awq": "int4", "gptq": "int4", "int4": "int4", "w4a16": "int4"},
    "nvfp4": "nvfp4",
}
"""Number formats by what names of models end in; bf16 without one."""
CACHED = ("multi-turn", "shared-prefix")
"""Workloads whose prompts begin alike."""
IN_USE = 0.2
"""Of a GPU's memory: with more, something runs on it."""
ALL_MEMORY = 1.0
"""The limit is that of the whole card, not of what an engine takes of it."""


class HardwareLimit(msgspec.Struct, kw_only=True):
    """What the hardware allows for the load as measured: every FLOP, byte and message at the rate of the data sheet.
    Rates and times are at the speed of the run's server, as those that were measured."""

    gpu: str
    gpus: int
    model: str
    format: str
    """Of the weights: bf16 where the model's name does not end in another."""
    known_from: str
    """`simulated`, `--gpu-model`, `NVML` or `DCGM`."""
    data_sheet: str
    """Where the GPU's figures are from."""
    speed: float = 1.0
    """How many times faster than real time the clock of a simulated server ran."""
    input_tokens: float
    """Mean of complete requests, as of output_tokens."""
    output_tokens: float
    in_flight: float
    """Mean over the window."""
    decoding: float
    """Those of them that had their first token."""
    output_tokens_per_s: float
    """At most, with so many in flight."""
    ttft_s: float
    """At least: the prompt alone."""
    tpot_s: float
    """At least: a step that decodes for so many."""
    bound: str
    """What binds throughput: compute, memory or network."""
    tpot_bound: str
    """Likewise of a decode step."""
    throughput_share: float | None
    """Measured / limit; what is left is the rest."""
    ttft_ratio: float | None
    """Measured mean / limit."""
    tpot_ratio: float | None
    """Likewise."""
    mbu: float | None
    """Model bandwidth utilisation: weights and KV cache read per step / (TPOT * memory bandwidth)."""
    mfu: float | None
    """Model FLOP/s utilisation: FLOPs of prompts and answers per second / peak FLOP/s."""
    framework: str
    overhead_share: float
    """Of a decode step of that framework, as others measured it: launches, gaps, scheduling."""

    @property
    def exceeds_limit(self) -> bool:
        """Whether more was measured than there can be, beyond what means of a load that varies leave open."""
        minimum = min(self.ttft_ratio or 1, self.tpot_ratio or 1)
        return (self.throughput_share or 0) > 1.02 or minimum < 0.98


class _Known(NamedTuple):
    gpu: str
    gpus: int
    model: str
    by: str


def limit_of(run: Run, frame: Frame, latencies: Mapping[str, Distribution], rate: float | None) -> HardwareLimit | None:
    """None where GPU, model or load are unknown; `rate` is the measured output tokens per second."""
    from loadgen.servers.hardware import HardwareError

    try:
        known = _known(run)
    except HardwareError:
        return None
    rows, workload = frame.inside & frame.complete, str(run.header.plan.get("workload") or "")
    if known is None or frame.span_ns is None or not rows.any() or workload.startswith(CACHED) or not rate:
        return None
    prompt, output = float(frame.prompt_tokens[rows].mean()), float(frame.output_tokens[rows].mean())
    if not (prompt >= 1 and output >= 1):  # NaN is neither
        return None
    try:
        return _limit(known, run, frame, (prompt, output), (latencies["ttft_s"].mean, latencies["tpot_s"].mean, rate))
    except HardwareError:
        return None


def _limit(
    known: _Known,
    run: Run,
    frame: Frame,
    tokens: tuple[float, float],
    measured: tuple[float | None, float | None, float],
) -> HardwareLimit:
    """Raises HardwareError for what the tables do not know, or what does not fit."""
    from loadgen.servers.hardware.inference import lower_bounds_s
    from loadgen.servers.hardware.throughput_model import Load, bottleneck, decode_step_parts, limit_times

    (prompt, output), (ttft_s, tpot_s, rate), speed = tokens, measured, float(run.header.server.get("speed") or 1)
    made = _deployment(known, str(run.header.server.get("name") or ""))
    in_flight, decoding = _mean(frame, frame.sent_ns), _mean(frame, frame.first_ns)
    load = Load(round(prompt), round(output), max(in_flight, 1.0))
    best = limit_times(made, load, ALL_MEMORY)
    maximum = float(best.output_tokens_per_s) * min(in_flight, 1.0) * speed
    step = lower_bounds_s(made, 0, 0, max(decoding, 1.0), prompt + output / 2)
    one, token = lower_bounds_s(made, 1, prompt), lower_bounds_s(made, 0, 0, 1, prompt + output / 2)
    busiest = max(step, key=lambda name: float(step[name]))
    least_tpot_s, least_ttft_s = float(step[busiest]) / speed, float(max(one.values())) / speed
    spent = decode_step_parts(made, Load(load.prompt_tokens, load.output_tokens, max(decoding, 1.0)), ALL_MEMORY)
    computing = rate / output * (float(one["compute"]) + (output - 1) * float(token["compute"])) / speed
    return HardwareLimit(
        gpu=made.gpu.name,
        gpus=made.gpus,
        model=made.model.name,
        format=made.weights.name,
        known_from=known.by,
        data_sheet=made.gpu.source,
        speed=speed,
        input_tokens=_rounded(prompt),
        output_tokens=_rounded(output),
        in_flight=_rounded(in_flight),
        decoding=_rounded(decoding),
        output_tokens_per_s=_rounded(maximum),
        ttft_s=_rounded(least_ttft_s),
        tpot_s=_rounded(least_tpot_s),
        bound=bottleneck(made, load, ALL_MEMORY),
        tpot_bound=busiest,
        throughput_share=_rounded(rate / maximum),
        ttft_ratio=None if ttft_s is None else _rounded(ttft_s / least_ttft_s),
        tpot_ratio=None if tpot_s is None else _rounded(tpot_s / least_tpot_s),
        mbu=None if tpot_s is None else _rounded(float(step["memory"]) / speed / tpot_s),
        mfu=_rounded(computing),
        framework=made.framework.name,
        overhead_share=_rounded(spent["overhead"] / sum(spent.values())),
    )


def _known(run: Run) -> _Known | None:
    """Which GPUs hold which model."""
    server, plan = run.header.server, run.header.plan
    model = str(server.get("model") or plan.get("model") or "")
    if server.get("simulated"):
        told = server.get("hardware") or {}
        if not {"gpu", "model", "tensor_parallel"} <= told.keys():
            return None
        return _Known(told["gpu"], told["tensor_parallel"], told["model"], "simulated")
    if named := plan.get("gpu_model"):
        from loadgen.servers.hardware import parse_gpus

        gpus, name = parse_gpus(str(named))
        return _Known(name, gpus, model, "--gpu-model")
    told = run.header.telemetry.get("gpu") or {}
    seen = {str(each.get("index")): each for each in told.get("gpus") or ()}
    busy = set(seen) if len(seen) == 1 else _in_use(run, seen)
    used = {of: each for of, each in seen.items() if of in busy}
    name, *others = {str(each.get("name") or "") for each in used.values()} or {""}
    return None if others or not name else _Known(name, len(used), model, str(told.get("by") or "telemetry"))


def _in_use(run: Run, seen: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """GPUs whose memory something holds, by their index."""
    read = [each for sample in run.telemetry if sample.source == "gpu" for each in sample.values.get("gpus", ())]
    sizes = {of: each.get("memory_total_bytes") for of, each in seen.items()}
    used = ((str(each.get("index")), each.get("memory_used_bytes") or 0) for each in read)
    return {of for of, bytes_used in used if (size := sizes.get(of)) and bytes_used > IN_USE * size}


def _deployment(known: _Known, server: str) -> Deployment:
    from loadgen.servers.hardware import HardwareError, framework, listed_model
    from loadgen.servers.hardware.roofline import DEFAULT_FRAMEWORK, make_deployment

    ending = re.search(rf"[-_.]({'|'.join(FORMATS)})\b", known.model, re.IGNORECASE)
    model = listed_model(known.model[: ending.start()] if ending else known.model)
    try:
        engine = framework(server).name
    except HardwareError:
        engine = DEFAULT_FRAMEWORK
    weights = FORMATS[ending[1].lower()] if ending else "bf16"
    return make_deployment(known.gpu, model, weights, known.gpus, framework_name=engine)


def _mean(frame: Frame, begun_ns: Any) -> float:
    """How many requests were between this instant and their end, on average over the window."""
    import numpy as np

    low, high = frame.span_ns or (0.0, 1.0)
    inside = np.clip(frame.end_ns, low, high) - np.clip(begun_ns, low, high)
    return float(np.nansum(inside)) / max(high - low, 1.0)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
