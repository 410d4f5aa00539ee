"""Measures the duration and the memory of a training step, and compares them with predictions.

Durations are measured per phase, such as the backward pass. Memory is measured per kind, such as weights or gradients.
The predictions come from `loadgen.servers.hardware`.

The measured techniques are implemented by existing libraries:

- ZeRO: FSDP2 (`fully_shard`) and ZeroRedundancyOptimizer.
- Adapters: peft.
- Weights in 8 and 4 bits: torchao and bitsandbytes.
- Attention without stored scores: SDPA.
- Recomputation of activations: torch.utils.checkpoint.

torch.profiler reports the allocations of memory during the step. Memory that is allocated during the step and not freed
at its end counts as gradients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from loadgen.dissect import DissectError, check_installed, device_probe
from loadgen.dissect.models.llama import DecoderLayer, Llama, build_model
from loadgen.dissect.predictions import predict_memory_bytes, predict_step_seconds
from loadgen.dissect.processes import run_in_processes
from loadgen.dissect.results import DeviceLimits, TechniqueResult, TrainingResult
from loadgen.dissect.techniques import ADAPTER_RANK, Technique, unsupported_reason
from loadgen.errors import install_hint
from loadgen.servers.hardware import ModelShape
from loadgen.servers.hardware import model as shape_of

SEED = 17
ADAPTED_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PARTS = ("forward", "backward", "optimiser")
COLLECTIVES = ("gloo:", "ncclDevKernel", "ncclKernel")
"""Prefixes of the names of running collectives in torch.profiler. Names with the prefix `nccl:` are only their
launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """Options of `loadgen dissect training`."""

    model: str
    techniques: tuple[Technique, ...]
    layers: int | None = None
    batch: int = 2
    sequence: int = 350
    processes: int | None = None
    device: str = "cpu"
    dtype: str = "bf16"
    repeats: int = 3
    warmup: int = 2
    threads: int | None = None
    hardware: Path | None = None

    @property
    def shape(self) -> ModelShape:
        """Dimensions of the model, with the requested number of layers."""
        shape = shape_of(self.model, self.hardware)
        return replace(shape, layers=self.layers or shape.layers)

    def process_count(self, technique: Technique) -> int:
        """Return the number of processes for a technique.

        The default is 2 for ZeRO, because it splits states between processes, and 1 for other techniques.
        """
        return self.processes or (2 if technique.zero else 1)


def measure_training(spec: TrainingSpec) -> TrainingResult:
    """Measure the training step of `spec` with each of its techniques, such as `zero3`, one after another.

    Raises DissectError if no technique can be measured on this device, or if the model has fewer layers than requested.
    Raises HardwareError for an unknown model.
    """
    device_probe.check_device(spec.device, spec.dtype)
    full_shape = shape_of(spec.model, spec.hardware)
    if (spec.layers or 1) > full_shape.layers:
        raise DissectError(
            f"{full_shape.name} has {full_shape.layers} layers", f"Choose --layers {full_shape.layers} or fewer."
        )
    reasons = {technique.name: _unsupported_reason(spec, technique) for technique in spec.techniques}
    if all(reasons.values()):
        raise DissectError("; ".join(dict.fromkeys(reasons.values())), "Choose another --technique.")
    limits: DeviceLimits = run_in_processes(_measure_limits, spec, 1, spec.device, spec.threads)
    results = []
    for technique in spec.techniques:
        reason = reasons[technique.name]
        if reason:
            results.append(TechniqueResult(technique.name, spec.process_count(technique), reason))
        else:
            results.append(_measure_and_predict(spec, technique, limits))
    if all(result.cannot for result in results):
        raise DissectError("none of these fits the memory of this GPU", "Choose fewer --layers, or --technique Z3.")
    shape = spec.shape
    return TrainingResult(
        model=shape.name,
        parameters=sum(parameter.numel() for parameter in build_model(shape, device="meta").parameters()),
        layers=shape.layers,
        model_layers=full_shape.layers,
        batch=spec.batch,
        sequence=spec.sequence,
        device=spec.device,
        dtype=spec.dtype,
        bounds=limits,
        techniques=results,
        torch=str(torch.__version__),
    )


def _measure_and_predict(spec: TrainingSpec, technique: Technique, limits: DeviceLimits) -> TechniqueResult:
    """Measure a technique, and add predictions of its times and memory.

    The predictions use the device limits that were measured together with the technique. If there are none, they use
    `limits`. If the technique does not fit into the GPU's memory, the result says so and has no measurements.
    """
    count = spec.process_count(technique)
    try:
        measured = run_in_processes(_measure_technique, (spec, technique), count, spec.device, spec.threads)
    except (torch.OutOfMemoryError, DissectError) as problem:
        if "out of memory" not in str(problem):
            raise
        return TechniqueResult(technique.name, count, "it does not fit the memory of this GPU")
    own_limits = measured.bounds or limits
    predicted = predict_step_seconds(spec, technique, own_limits, count)
    return replace(
        measured,
        predicted_s=predicted.parts,
        predicted_communication_s=predicted.communication,
        predicted_bytes=predict_memory_bytes(spec, technique, own_limits, count),
    )


def _unsupported_reason(spec: TrainingSpec, technique: Technique) -> str:
    """Return the reason why a technique cannot be measured with these options, or "" if it can be measured."""
    count = spec.process_count(technique)
    if spec.batch % count:
        return f"a batch of {spec.batch} is not a multiple of {count} processes"
    required = {
        "peft": technique.adapters,
        "bitsandbytes": technique.qlora,
        "torchao": technique.quantised,
    }
    with suppress(DissectError):
        check_installed(*(module for module, needed in required.items() if needed))
        return unsupported_reason(technique, spec.device, count)
    return f"{technique.name} needs peft, bitsandbytes or torchao. {install_hint('dissect')}"


def _measure_limits(spec: TrainingSpec) -> DeviceLimits:
    return device_probe.device_limits(spec.device, spec.dtype)


def _measure_technique(spec_and_technique: tuple[TrainingSpec, Technique]) -> TechniqueResult:
    """Measure a training technique, and return the result.

    Every process that shares the work calls this function at the same time.
    """
    spec, technique = spec_and_technique
    limits = device_probe.group_device_limits(spec.device, spec.dtype)
    torch.manual_seed(SEED)
    count = spec.process_count(technique)
    plain_model = build_model(
        spec.shape,
        layers=spec.layers,
        flash=technique.flash,
        device=spec.device,
        dtype=device_probe.DTYPES[spec.dtype],
    )
    model = _apply_technique(plain_model, technique, spec.device, count)
    optimiser = _optimiser(model, technique)
    tokens = torch.randint(spec.shape.vocabulary, (spec.batch // count, spec.sequence), device=spec.device)

    def step() -> list[float]:
        optimiser.zero_grad()
        times = [_now(spec.device)]
        with record_function("forward"):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            times.append(_now(spec.device))
        with record_function("backward"):
            loss.backward()
            times.append(_now(spec.device))
        with record_function("optimiser"):
            optimiser.step()
            times.append(_now(spec.device))
        return [end - begin for begin, end in pairwise(times)]

    for _ in range(max(1, spec.warmup)):  # the first step creates the optimiser states
        step()
    seconds = [step() for _ in range(spec.repeats)]
    optimiser.zero_grad()
    activities = [ProfilerActivity.CPU]
    if spec.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as profiler:
        step()
    gradients, temporary = _peak_bytes(profiler, spec.device)
    if isinstance(model, nn.parallel.DistributedDataParallel):  # its buckets are allocated permanently
        gradients += _bytes(_trained_parameters(model), spec.device)
    memory = {
        "weights": _bytes(model.parameters(), spec.device) + _quantiser_bytes(model),
        "gradients": gradients,
        "optimiser": _bytes(_states(optimiser), spec.device),
        "activations": temporary,
    }
    parts = dict(zip(PARTS, zip(*seconds, strict=True), strict=True))
    return TechniqueResult(technique.name, count, "", parts, _communication_s(profiler), memory, bounds=limits)


def _now(device: str) -> float:
    """Wait until the device has finished its work, and return the current time in seconds."""
    device_probe.synchronize(device)
    return time.perf_counter()


def _apply_technique(model: Llama, technique: Technique, device: str, count: int) -> nn.Module:
    """Apply a training technique to the model, and return the changed model. `count` is the number of processes."""
    if technique.qlora:
        _to_nf4(model)
    if technique.quantised:
        _to_int8(model)
    if technique.adapters:
        _adapt(model)
    if technique.recompute:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, DecoderLayer))
    if technique.zero >= 2:
        return _shard(model, technique, device, count)
    if count > 1:
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model


def _to_int8(model: Llama) -> None:
    """Quantise the weight matrices of the layers to 8 bits. Training updates the quantised weights."""
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    quantize_(model.model.layers, int8_weight_only_quantized_training())
    for layer in model.model.layers:  # torchao needs contiguous gradients, but those of heads are transposed
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.register_forward_hook(_make_gradient_contiguous)


def _adapt(model: Llama) -> None:
    """Add LoRA adapters to all seven matrices of each layer, in the number format of the model."""
    import peft

    dtype = model.lm_head.weight.dtype
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=ADAPTER_RANK, lora_dropout=0.0, target_modules=ADAPTED_MODULES), model
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)


def _make_gradient_contiguous(_module: nn.Module, _inputs: Any, result: Tensor) -> None:
    result.register_hook(lambda gradient: gradient.contiguous())


def _shard(model: Llama, technique: Technique, device: str, count: int) -> nn.Module:
    """Shard the model over `count` processes for ZeRO stage 2 or 3, and return the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (count,)),
        "reshard_after_forward": technique.zero == 3,
        "offload_policy": CPUOffloadPolicy() if technique.offload else OffloadPolicy(),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def _to_nf4(model: Llama) -> None:
    """Quantise the weight matrices of the layers to 4 bits (NF4). The scales of the matrices are quantised too."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    device = model.lm_head.weight.device
    dtype = model.lm_head.weight.dtype
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, linear in list(module.named_children()):
                if isinstance(linear, nn.Linear):
                    quantised = Linear4bit(
                        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
                    )
                    quantised.weight = Params4bit(linear.weight.data.cpu(), requires_grad=False, quant_type="nf4")
                    setattr(module, name, quantised.to(device))


def _optimiser(model: nn.Module, technique: Technique) -> Any:
    trained = _trained_parameters(model)
    if technique.zero == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(trained, torch.optim.AdamW, fused=True)
    if technique.quantised:
        from torchao.optim import _AdamW  # torch's AdamW does not write 8-bit weights

        torch.compiler.set_stance("force_eager")  # compiling it would need a C++ compiler and a minute
        return _AdamW(trained)
    return torch.optim.AdamW(trained, fused=not technique.offload)


def _trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _states(optimiser: Any) -> Iterator[Tensor]:
    """Yield every tensor of the optimiser states."""
    optimiser = getattr(optimiser, "optim", optimiser)  # ZeroRedundancyOptimizer wraps the optimiser of its shard
    for state in optimiser.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes(tensors: Any, device: str) -> float:
    """Return the total bytes of tensors on a device. Each tensor counts once. Offloaded tensors do not count."""
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    local = [_local(tensor) for tensor in distinct]
    return float(sum(tensor.untyped_storage().nbytes() for tensor in local if tensor.device.type == device))


def _local(tensor: Any) -> Tensor:
    """Return the values of `tensor` that this process stores, as a plain tensor.

    A tensor may be sharded over several processes. The result is then the shard of this process. If the tensor is
    quantised, the result contains its integers.
    """
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return getattr(part, "int_data", part)


def _quantiser_bytes(model: nn.Module) -> float:
    """Return the size in bytes of the scales with which the weights of a model are quantised.

    If the scales are quantised too, the scales with which they are quantised are included.
    """
    result = 0.0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        nested = getattr(state, "state2", None)
        for scales in (getattr(state, "absmax", None), getattr(nested, "absmax", None)):
            if scales is not None:
                result += scales.nbytes
        scale = getattr(getattr(parameter, "data", None), "scale", None)
        result += scale.nbytes if isinstance(scale, Tensor) else 0.0
    return result


def _peak_bytes(profiler: Any, device: str) -> tuple[float, float]:
    """Return the peak memory of a training step in bytes, as two parts: the memory of gradients, and all other memory.

    `profiler` is the torch profiler that recorded the step. Memory that is still allocated at the end of the step
    counts as gradients.
    """
    live: dict[int, int] = {}  # bytes by address
    allocated_at: dict[int, int] = {}  # index of the allocation by address
    live_at_peak: dict[int, int] = {}  # bytes by index of the allocation
    current = peak = 0
    for index, (_, address, size) in enumerate(device_probe.allocations(profiler, device)):
        if size > 0:
            live[address] = size
            allocated_at[address] = index
        elif address in live:
            del live[address]
        else:
            continue
        current += size
        if current > peak:
            peak = current
            live_at_peak = {allocated_at[live_address]: live_size for live_address, live_size in live.items()}
    live_at_end = {allocated_at[address] for address in live}
    gradients = sum(size for index, size in live_at_peak.items() if index in live_at_end)
    return float(gradients), float(peak - gradients)


def _communication_s(profiler: Any) -> dict[str, float]:
    """Return how long each phase of a training step communicates, in seconds. The keys are the names of the phases.

    A phase communicates while at least one collective (such as an all-reduce) is in progress. The events come from
    `profiler`. If the training uses only one process, it does not communicate, and the result is empty.
    """
    if not distributed.is_initialized():
        return {}
    events = [(event.name, event.time_range.start, event.time_range.end) for event in profiler.events()]
    spans = sorted((begin, end) for name, begin, end in events if name.startswith(COLLECTIVES))
    result = {}
    for part in PARTS:
        # torch.profiler may list a phase twice; the one that ends last includes the work of the device.
        phase_end, phase_begin = max((end, begin) for name, begin, end in events if name == part)
        total = 0.0
        counted_until = phase_begin
        for begin, end in spans:
            total += max(0.0, min(end, phase_end) - max(begin, counted_until))
            counted_until = max(counted_until, end)
        result[part] = total / 1e6
    return result
