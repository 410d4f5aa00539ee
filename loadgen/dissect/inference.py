"""Measures how long one inference step of a model takes, in total and for each module and operator.

The model has real tensor shapes and random weights. The measurement is repeated several times. Each repeat runs the
step up to three times:

1. Without instruments, to measure the time of the whole step.
2. With `OpProfiler`, to measure the times of modules and operators.
3. With torch.profiler, to check the total time of the operators. Only the first PROFILED_STEPS repeats include this
   run.
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

from loadgen.dissect import DissectError, device_probe
from loadgen.dissect.models.llama import Llama, build_model
from loadgen.dissect.models.process_group import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_WAIT, ProcessGroup
from loadgen.dissect.op_profiler import Clock, OperatorCall, OpProfiler
from loadgen.dissect.processes import run_in_processes
from loadgen.dissect.results import DeviceLimits, InferenceResult, Operator, Phase, StepCase
from loadgen.servers.hardware import model as shape_of

PROFILED_STEPS = 5
"""Maximum number of steps with torch.profiler."""
SEED = 17
COLLECTIVES = (ALL_REDUCE, ALL_REDUCE_WAIT, ALL_GATHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSpec:
    """Options of `loadgen dissect inference`."""

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


def measure_inference(spec: InferenceSpec) -> InferenceResult:
    """Measure an inference step at every batch size.

    Raises DissectError if the device or the options do not allow the measurement, and HardwareError for an unknown
    model.
    """
    device_probe.check_device(spec.device, spec.dtype)
    if spec.backward and spec.phase == "decode":
        raise DissectError("a decode step has no backward pass", "Choose --phase prefill for --backward.")
    if spec.link_delay_s and spec.tensor_parallel == 1:
        raise DissectError("one process has no link", "Choose --tp 2 or more for --link-delay.")
    shape = shape_of(spec.model, spec.hardware)
    if spec.layers > shape.layers:
        raise DissectError(f"{shape.name} has {shape.layers} layers", f"Choose --layers {shape.layers} or fewer.")
    return run_in_processes(_measure, spec, spec.tensor_parallel, spec.device, spec.threads)


def _measure(spec: InferenceSpec) -> InferenceResult:
    """Measure an inference step at every batch size of `spec`.

    With tensor parallelism, several processes share the model, and each of them calls this function.
    """
    shape = shape_of(spec.model, spec.hardware)
    torch.manual_seed(SEED)
    group = ProcessGroup(spec.link_delay_s) if spec.tensor_parallel > 1 else None
    model = build_model(
        shape,
        architecture=spec.architecture,
        layers=spec.layers,
        group=group,
        flash=spec.flash,
        device=spec.device,
        dtype=device_probe.DTYPES[spec.dtype],
    )
    limits = device_probe.device_limits(spec.device, spec.dtype)
    if group:
        limits = replace(limits, links=device_probe.measure_links(spec.device))
    return InferenceResult(
        model=shape.name,
        architecture=spec.architecture,
        layers=spec.layers,
        model_layers=shape.layers,
        input_tokens=spec.input_tokens,
        phase=spec.phase,
        device=spec.device,
        dtype=spec.dtype,
        tensor_parallel=spec.tensor_parallel,
        threads=torch.get_num_threads(),
        flash=spec.flash,
        bounds=limits,
        cases=[_measure_batch(model, spec, batch, limits) for batch in spec.batches],
        torch=str(torch.__version__),
        link_delay_s=spec.link_delay_s,
    )


@dataclass(frozen=True, slots=True)
class _Passes:
    """The forward pass of a step, and its backward pass if it has one.

    `backward` is called with the result of `forward`.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None] | None

    def step(self) -> None:
        """Run the forward pass, then the backward pass if there is one."""
        result = self.forward()
        if self.backward:
            self.backward(result)


def _passes(model: Llama, spec: InferenceSpec, batch: int) -> _Passes:
    new_tokens = 1 if spec.phase == "decode" else spec.input_tokens
    tokens = torch.randint(model.shape.vocabulary, (batch, new_tokens), device=spec.device)
    if spec.backward:

        def forward_with_loss() -> Tensor:
            model.zero_grad()
            return functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())

        return _Passes(forward_with_loss, lambda loss: loss.backward())
    caches = model.caches(batch, spec.input_tokens + 1) if spec.phase == "decode" else None

    def forward() -> Tensor:
        for cache in caches or ():
            cache.used = spec.input_tokens
        with torch.no_grad():
            return model(tokens, caches, last=True)

    return _Passes(forward, None)


def _measure_batch(model: Llama, spec: InferenceSpec, batch: int, limits: DeviceLimits) -> StepCase:
    passes = _passes(model, spec, batch)
    device = spec.device

    def barrier() -> None:
        if spec.tensor_parallel > 1:
            distributed.barrier()

    for _ in range(spec.warmup):
        passes.step()
    plain_s: list[float] = []
    calls: list[list[OperatorCall]] = []
    parts_s: dict[str, list[float]] = {}
    profiled_s: list[list[float]] = []
    clock = Clock(device == "cuda")
    for repeat in range(spec.repeats):
        barrier()
        plain_s.append(device_probe.time_call(device, passes.step))
        barrier()
        profiler = OpProfiler(model, clock)
        _run_profiled(profiler, passes, device)
        calls.append(profiler.calls)
        for name, seconds in _part_times(profiler).items():
            parts_s.setdefault(name, []).append(seconds)
        if repeat < PROFILED_STEPS:
            barrier()
            profiled_s.append(_torch_profiler_times(passes.step, device))
    call_s = [[clock.seconds(call.begin, call.end) for call in step] for step in calls]
    return StepCase(
        batch=batch,
        tokens=batch * (1 if spec.phase == "decode" else spec.input_tokens),
        step_s=plain_s,
        parts_s=parts_s,
        operators=_operators(calls, clock, limits),
        least_s=(_fastest_total(call_s), _fastest_total(profiled_s)),
        beside_s=interleaved_step_times(model, spec, batch),
    )


def interleaved_step_times(model: Llama, spec: InferenceSpec, batch: int) -> dict[str, list[float]]:
    """Measure the step times of three architectures. Return a dict from the name of each architecture to its times in
    seconds.

    The architectures are the standard one, the requested one (`spec.architecture`), and one without communication. They
    share the weights of `model`, and their steps are run in turn. From the differences, the caller computes how much of
    the all-reduce time the requested architecture hides. `batch` is the number of sequences.

    The dict is empty in two cases: the model runs in a single process, or the requested architecture is the standard
    one and no link delay is simulated.
    """
    if spec.tensor_parallel == 1 or (spec.architecture == "standard" and not spec.link_delay_s):
        return {}
    steps = {}
    for name in dict.fromkeys(("standard", spec.architecture, "no-communication")):
        with torch.device("meta"):
            variant = Llama(model.shape, model.group, name, spec.flash)
        variant.load_state_dict(model.state_dict(), assign=True)
        steps[name] = _passes(variant, spec, batch).step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(spec.warmup + spec.repeats):
        for name, step in steps.items():
            distributed.barrier()
            step_s = device_probe.time_call(spec.device, step)
            if repeat >= spec.warmup:
                seconds[name].append(step_s)
    return seconds


def _run_profiled(profiler: OpProfiler, passes: _Passes, device: str) -> None:
    if device == "cuda":  # keep the GPU busy first, so that no operator waits for the profiler to launch it
        device_probe.synchronize(device)
        torch.cuda._sleep(200_000_000)
    with profiler.recording():
        begin = profiler.clock.now()
        result = passes.forward()
        middle = profiler.clock.now()
        profiler.spans.append(("step", begin, middle))
        if passes.backward:
            passes.backward(result)
            profiler.spans.append(("step backward", middle, profiler.clock.now()))
    device_probe.synchronize(device)


def _part_times(profiler: OpProfiler) -> dict[str, float]:
    """Return the measured seconds of each part of a step, such as `layers` or `LM head`, by the name of the part."""
    seconds: dict[str, float] = {}
    for name, begin, end in profiler.spans:
        seconds[name] = seconds.get(name, 0.0) + profiler.clock.seconds(begin, end)
    return seconds


def _operators(repeats: list[list[OperatorCall]], clock: Clock, limits: DeviceLimits) -> list[Operator]:
    """Group calls of operators, and return the totals of each group. The group with the longest time comes first.

    A group contains the calls with the same module, operator, shape and direction. `repeats` contains the calls of each
    repeat of the step.
    """
    groups: dict[tuple[Any, ...], list[list[OperatorCall]]] = {}
    for index, calls in enumerate(repeats):
        for call in calls:
            key = (call.module, call.operator, call.shape, call.direction, call.in_layers)
            groups.setdefault(key, [[] for _ in repeats])[index].append(call)
    operators = [_operator(by_repeat, clock, limits) for by_repeat in groups.values()]
    return sorted(operators, key=lambda operator: -sum(operator.seconds))


def _operator(by_repeat: list[list[OperatorCall]], clock: Clock, limits: DeviceLimits) -> Operator:
    """Return the totals of a group of operator calls, and the minimum time that these calls take on the device.

    `by_repeat` contains the calls of each repeat. The minimum time follows from the `limits` of the device.
    """
    calls = max(by_repeat, key=len)
    call = calls[0]
    flops = sum(call.flops for call in calls)
    moved_bytes = sum(call.bytes for call in calls)
    bounds = {"compute": flops / limits.flops_per_s, "memory": moved_bytes / limits.bytes_per_s}
    bound_s = max(bounds.values())
    bound = max(bounds, key=lambda name: bounds[name]) if bound_s else ""
    if call.operator in COLLECTIVES:
        bound_s = 0.0
        bound = "network"
    return Operator(
        module=call.module,
        operator=call.operator,
        shape=call.shape,
        direction=call.direction,
        in_layers=call.in_layers,
        calls=len(calls),
        flops=flops,
        bytes=moved_bytes,
        bound_s=bound_s,
        bound=bound,
        seconds=[sum(clock.seconds(call.begin, call.end) for call in repeat) for repeat in by_repeat],
    )


def _fastest_total(repeats: list[list[float]]) -> float:
    """Return the sum of the shortest measured time of each call, in seconds.

    The same calls were measured several times: `repeats[i][j]` is the time of call j in repeat i. If the repeats have
    different numbers of calls, only the calls that every repeat has are added.
    """
    same_calls = len({*map(len, repeats)}) == 1
    return math.fsum(map(min, zip(*repeats, strict=same_calls)))


def _torch_profiler_times(step: Callable[[], None], device: str) -> list[float]:
    """Run one step with torch.profiler, and return the self time of each operator in s, in the order of the calls.

    The self time of an operator does not include the operators that it calls.
    """
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        step()
        device_probe.synchronize(device)
    return self_times_s(profiler.events(), device)


def self_times_s(events: Iterable[Any], device: str) -> list[float]:
    """Return the self time of each operator in s, in the order in which the operators started.

    The self time of an operator does not include other operators that it calls. torch.profiler also lists GPU kernels
    as separate events. They are not returned, because the time of a kernel is part of its operator's time.
    """
    field = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    operators = [event for event in events if event.device_type == DeviceType.CPU]
    operators.sort(key=lambda event: event.time_range.start)
    return [float(getattr(operator, field)) / 1e6 for operator in operators]
