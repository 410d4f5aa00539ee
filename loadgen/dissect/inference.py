"""One step of a model of real shape and random weights, module by module and operator by operator.

Each repeat is one step unwatched, which is the time that counts, then one with `OpProfiler`, which says where it goes.
In between, torch.profiler times operators in its own way: both must come to the same total.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from loadgen.dissect import DissectError
from loadgen.dissect import device_probe as machine
from loadgen.dissect.models.llama import Llama, build_model
from loadgen.dissect.models.process_group import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_WAIT, ProcessGroup
from loadgen.dissect.op_profiler import Clock, OperatorCall, OpProfiler
from loadgen.dissect.processes import run_in_processes
from loadgen.dissect.results import DeviceLimits, InferenceResult, Operator, Phase, StepCase
from loadgen.servers.hardware import model as shape_of

PROFILED = 5
"""Steps that torch.profiler sees, at most."""
SEED = 17
COLLECTIVES = (ALL_REDUCE, ALL_REDUCE_WAIT, ALL_GATHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSpec:
    """What to measure."""

    model: str
    layers: int = 2
    batches: tuple[int, ...] = (1,)
    input_tokens: int = 512
    phase: Phase = "prefill"
    backward: bool = False
    device: str = "cpu"
    dtype: str = "fp32"
    architecture: str = "standard"
    flash: bool = False
    tensor_parallel: int = 1
    link_delay_s: float = 0.0
    repeats: int = 5
    warmup: int = 2
    threads: int | None = None
    hardware: Path | None = None


def measure_inference(asked: InferenceSpec) -> InferenceResult:
    """All batch sizes. Raises DissectError, HardwareError."""
    machine.check_device(asked.device, asked.dtype)
    if asked.backward and asked.phase == "decode":
        raise DissectError("a decode step has no backward pass", "Choose --phase prefill for --backward.")
    if asked.link_delay_s and asked.tensor_parallel == 1:
        raise DissectError("one process has no link", "Choose --tp 2 or more for --link-delay.")
    shape = shape_of(asked.model, asked.hardware)
    if asked.layers > shape.layers:
        raise DissectError(f"{shape.name} has {shape.layers} layers", f"Choose --layers {shape.layers} or fewer.")
    return run_in_processes(_measured, asked, asked.tensor_parallel, asked.device, asked.threads)


def _measured(asked: InferenceSpec) -> InferenceResult:
    shape = shape_of(asked.model, asked.hardware)
    torch.manual_seed(SEED)
    group = ProcessGroup(asked.link_delay_s) if asked.tensor_parallel > 1 else None
    model = build_model(
        shape,
        architecture=asked.architecture,
        layers=asked.layers,
        group=group,
        flash=asked.flash,
        device=asked.device,
        dtype=machine.DTYPES[asked.dtype],
    )
    allowed = machine.device_limits(asked.device, asked.dtype)
    if group:
        allowed = replace(allowed, links=machine.measure_links(asked.device))
    return InferenceResult(
        model=shape.name,
        architecture=asked.architecture,
        layers=asked.layers,
        model_layers=shape.layers,
        input_tokens=asked.input_tokens,
        phase=asked.phase,
        device=asked.device,
        dtype=asked.dtype,
        tensor_parallel=asked.tensor_parallel,
        threads=torch.get_num_threads(),
        flash=asked.flash,
        bounds=allowed,
        cases=[_case(model, asked, batch, allowed) for batch in asked.batches],
        torch=str(torch.__version__),
        link_delay_s=asked.link_delay_s,
    )


@dataclass(frozen=True, slots=True)
class _Passes:
    """One step as two parts, of which the second takes what the first gives."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None] | None

    def step(self) -> None:
        result = self.forward()
        if self.backward:
            self.backward(result)


def _passes(model: Llama, asked: InferenceSpec, batch: int) -> _Passes:
    new = 1 if asked.phase == "decode" else asked.input_tokens
    tokens = torch.randint(model.shape.vocabulary, (batch, new), device=asked.device)
    if asked.backward:

        def trained() -> Tensor:
            model.zero_grad()
            return functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())

        return _Passes(trained, lambda loss: loss.backward())
    caches = model.caches(batch, asked.input_tokens + 1) if asked.phase == "decode" else None

    def asked_step() -> Tensor:
        for cache in caches or ():
            cache.used = asked.input_tokens
        with torch.no_grad():
            return model(tokens, caches, last=True)

    return _Passes(asked_step, None)


def _case(model: Llama, asked: InferenceSpec, batch: int, allowed: DeviceLimits) -> StepCase:
    passes, device = _passes(model, asked, batch), asked.device

    def together() -> None:
        if asked.tensor_parallel > 1:
            distributed.barrier()

    for _ in range(asked.warmup):
        passes.step()
    plain: list[float] = []
    seen: list[list[OperatorCall]] = []
    parts: dict[str, list[float]] = {}
    profiled: list[list[float]] = []
    clock = Clock(device == "cuda")
    for repeat in range(asked.repeats):
        together()
        plain.append(machine.time_call(device, passes.step))
        together()
        watch = OpProfiler(model, clock)
        _watched(watch, passes, device)
        seen.append(watch.seen)
        for name, seconds in _parts(watch).items():
            parts.setdefault(name, []).append(seconds)
        if repeat < PROFILED:
            together()
            profiled.append(_profiled(passes.step, device))
    return StepCase(
        batch=batch,
        tokens=batch * (1 if asked.phase == "decode" else asked.input_tokens),
        step_s=plain,
        parts_s=parts,
        operators=_operators(seen, clock, allowed),
        least_s=(_least([[clock.seconds(call.begin, call.end) for call in calls] for calls in seen]), _least(profiled)),
        beside_s=interleaved_step_times(model, asked, batch),
    )


def interleaved_step_times(model: Llama, asked: InferenceSpec, batch: int) -> dict[str, list[float]]:
    """Steps as standard, as asked and without communication, by turns, which tell what of all-reduces is hidden."""
    if asked.tensor_parallel == 1 or (asked.architecture == "standard" and not asked.link_delay_s):
        return {}
    steps = {}
    for name in dict.fromkeys(("standard", asked.architecture, "no-communication")):
        with torch.device("meta"):
            other = Llama(model.shape, model.group, name, asked.flash)
        other.load_state_dict(model.state_dict(), assign=True)
        steps[name] = _passes(other, asked, batch).step
    result: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(asked.warmup + asked.repeats):
        for name, step in steps.items():
            distributed.barrier()
            took_s = machine.time_call(asked.device, step)
            if repeat >= asked.warmup:
                result[name].append(took_s)
    return result


def _watched(watch: OpProfiler, passes: _Passes, device: str) -> None:
    """A GPU is given something to do first, so that no operator waits for the instruments to ask for it."""
    if device == "cuda":
        machine.synchronize(device)
        torch.cuda._sleep(200_000_000)
    with watch.watching():
        begin = watch.clock.now()
        result = passes.forward()
        middle = watch.clock.now()
        watch.spans.append(("step", begin, middle))
        if passes.backward:
            passes.backward(result)
            watch.spans.append(("step backward", middle, watch.clock.now()))
    machine.synchronize(device)


def _parts(watch: OpProfiler) -> dict[str, float]:
    result: dict[str, float] = {}
    for name, begin, end in watch.spans:
        result[name] = result.get(name, 0.0) + watch.clock.seconds(begin, end)
    return result


def _operators(repeats: list[list[OperatorCall]], clock: Clock, allowed: DeviceLimits) -> list[Operator]:
    """Calls of one kind together, the longest first."""
    kinds: dict[tuple[Any, ...], list[list[OperatorCall]]] = {}
    for index, calls in enumerate(repeats):
        for call in calls:
            kind = (call.module, call.operator, call.shape, call.direction, call.in_layers)
            kinds.setdefault(kind, [[] for _ in repeats])[index].append(call)
    result = []
    for (module, operator, shape, direction, in_layers), by_repeat in kinds.items():
        one = max(by_repeat, key=len)
        flops, moved = sum(each.flops for each in one), sum(each.bytes for each in one)
        minimum = {"compute": flops / allowed.flops_per_s, "memory": moved / allowed.bytes_per_s}
        network = operator in COLLECTIVES
        bound = max(minimum, key=lambda name: minimum[name]) if any(minimum.values()) else ""
        result.append(
            Operator(
                *(module, operator, shape, direction, in_layers, len(one), flops, moved),
                bound_s=0.0 if network else max(minimum.values()),
                bound="network" if network else bound,
                seconds=[sum(clock.seconds(call.begin, call.end) for call in calls) for calls in by_repeat],
            )
        )
    return sorted(result, key=lambda each: -sum(each.seconds))


def _least(repeats: list[list[float]]) -> float:
    """The sum of each call at its fastest."""
    return math.fsum(map(min, zip(*repeats, strict=len({*map(len, repeats)}) == 1)))


def _profiled(step: Callable[[], None], device: str) -> list[float]:
    """Seconds of every operator of one step in order, each without those that it called."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        step()
        machine.synchronize(device)
    return self_times_s(profiler.events(), device)


def self_times_s(events: Iterable[Any], device: str) -> list[float]:
    """A GPU's kernels are in the list once more, by themselves: here they are their operator's."""
    figure = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    calls = sorted(
        (event for event in events if event.device_type == DeviceType.CPU), key=lambda each: each.time_range.start
    )
    return [float(getattr(call, figure)) / 1e6 for call in calls]
