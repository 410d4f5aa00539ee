"""One training step: its time by phase, its memory by kind, measured beside what loadgen.servers.hardware predicts.

Existing libraries do the work: FSDP2 (`fully_shard`) and ZeroRedundancyOptimizer for ZeRO, peft for adapters, torchao
and bitsandbytes for weights in 8 and 4 bits, SDPA for attention without scores, torch.utils.checkpoint. Memory is the
allocator's own account, which torch.profiler hands out: what a step still holds at its end are gradients.
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

from loadgen.dissect import DissectError, check_installed
from loadgen.dissect import device_probe as machine
from loadgen.dissect.models.llama import DecoderLayer, Llama, build_model
from loadgen.dissect.predictions import predict_memory_bytes, predict_step_seconds
from loadgen.dissect.processes import run_in_processes
from loadgen.dissect.results import TechniqueResult, TrainingResult
from loadgen.dissect.techniques import ADAPTER_RANK, Technique, unsupported_reason
from loadgen.servers.hardware import ModelShape
from loadgen.servers.hardware import model as shape_of

SEED = 17
ADAPTED_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PARTS = ("forward", "backward", "optimiser")
COLLECTIVES = ("gloo:", "ncclDevKernel", "ncclKernel")
"""How torch.profiler's names of collectives under way begin; `nccl:` is their launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """What to measure."""

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
        """The model, of fewer layers where told."""
        shape = shape_of(self.model, self.hardware)
        return replace(shape, layers=self.layers or shape.layers)

    def count(self, technique: Technique) -> int:
        """Processes: two where states are split, unless told otherwise."""
        return self.processes or (2 if technique.zero else 1)


def measure_training(asked: TrainingSpec) -> TrainingResult:
    """Every technique in turn. Raises DissectError, also where none of them can be measured here; HardwareError."""
    machine.check_device(asked.device, asked.dtype)
    whole = shape_of(asked.model, asked.hardware)
    if (asked.layers or 1) > whole.layers:
        raise DissectError(f"{whole.name} has {whole.layers} layers", f"Choose --layers {whole.layers} or fewer.")
    reasons = {technique.name: _cannot(asked, technique) for technique in asked.techniques}
    if all(reasons.values()):
        raise DissectError("; ".join(dict.fromkeys(reasons.values())), "Choose another --technique.")
    allowed = run_in_processes(_bounds, asked, 1, asked.device, asked.threads)
    shape, result = asked.shape, []
    for technique in asked.techniques:
        count, reason = asked.count(technique), reasons[technique.name]
        if reason:
            result.append(TechniqueResult(technique.name, count, reason))
            continue
        try:
            measured = run_in_processes(_measured, (asked, technique), count, asked.device, asked.threads)
        except (torch.OutOfMemoryError, DissectError) as problem:
            if "out of memory" not in str(problem):
                raise
            result.append(TechniqueResult(technique.name, count, "it does not fit the memory of this GPU"))
            continue
        there = measured.bounds or allowed
        predicted = predict_step_seconds(asked, technique, there, count)
        result.append(
            replace(
                measured,
                predicted_s=predicted.parts,
                predicted_communication_s=predicted.communication,
                predicted_bytes=predict_memory_bytes(asked, technique, there, count),
            )
        )
    if all(each.cannot for each in result):
        raise DissectError("none of these fits the memory of this GPU", "Choose fewer --layers, or --technique Z3.")
    return TrainingResult(
        model=shape.name,
        parameters=sum(parameter.numel() for parameter in build_model(shape, device="meta").parameters()),
        layers=shape.layers,
        model_layers=whole.layers,
        batch=asked.batch,
        sequence=asked.sequence,
        device=asked.device,
        dtype=asked.dtype,
        bounds=allowed,
        techniques=result,
        torch=str(torch.__version__),
    )


def _cannot(asked: TrainingSpec, technique: Technique) -> str:
    count = asked.count(technique)
    if asked.batch % count:
        return f"a batch of {asked.batch} is no multiple of {count} processes"
    with suppress(DissectError):
        check_installed(
            *(["peft"] if technique.adapters else []),
            *(["bitsandbytes"] if technique.qlora else []),
            *(["torchao"] if technique.quantised else []),
        )
        return unsupported_reason(technique, asked.device, count)
    return f"{technique.name} needs peft, bitsandbytes or torchao: pip install 'llm-loadgen[dissect]'"


def _bounds(asked: TrainingSpec) -> Any:
    return machine.device_limits(asked.device, asked.dtype)


def _measured(both: tuple[TrainingSpec, Technique]) -> TechniqueResult:
    """In one of the processes."""
    requested, technique = both
    allowed = machine.group_device_limits(requested.device, requested.dtype)
    torch.manual_seed(SEED)
    count = requested.count(technique)
    plain = build_model(
        requested.shape,
        layers=requested.layers,
        flash=technique.flash,
        device=requested.device,
        dtype=machine.DTYPES[requested.dtype],
    )
    model = _prepared(plain, technique, requested.device, count)
    optimiser = _optimiser(model, technique)
    tokens = torch.randint(
        requested.shape.vocabulary, (requested.batch // count, requested.sequence), device=requested.device
    )

    def step() -> list[float]:
        optimiser.zero_grad()
        marks = [_now(requested.device)]
        with record_function("forward"):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            marks.append(_now(requested.device))
        with record_function("backward"):
            loss.backward()
            marks.append(_now(requested.device))
        with record_function("optimiser"):
            optimiser.step()
            marks.append(_now(requested.device))
        return [later - sooner for sooner, later in pairwise(marks)]

    for _ in range(max(1, requested.warmup)):  # optimiser states are made by the first
        step()
    took = [step() for _ in range(requested.repeats)]
    optimiser.zero_grad()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if requested.device == "cuda" else [])]
    with profile(activities=activities, profile_memory=True) as profiler:
        step()
    bucketed = isinstance(model, nn.parallel.DistributedDataParallel)  # in buckets that are always there
    gradients, passing = _at_the_peak(profiler, requested.device)
    held = {
        "weights": _bytes(model.parameters(), requested.device) + _quantiser_bytes(model),
        "gradients": gradients + (_bytes(_trained(model), requested.device) if bucketed else 0.0),
        "optimiser": _bytes(_states(optimiser), requested.device),
        "activations": passing,
    }
    parts = dict(zip(PARTS, zip(*took, strict=True), strict=True))
    return TechniqueResult(technique.name, count, "", parts, _communication_s(profiler), held, bounds=allowed)


def _now(device: str) -> float:
    machine.synchronize(device)
    return time.perf_counter()


def _prepared(model: Llama, technique: Technique, device: str, count: int) -> nn.Module:
    """The model with everything that the technique asks for."""
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
        return _split(model, technique, device, count)
    if count > 1:
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model


def _to_int8(model: Llama) -> None:
    """Matrices of the layers in 8 bits, which are trained as they are."""
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    quantize_(model.model.layers, int8_weight_only_quantized_training())
    for layer in model.model.layers:  # torchao wants gradients in order, those of heads are transposed
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.register_forward_hook(_in_order)


def _adapt(model: Llama) -> None:
    """LoRA on all seven matrices of a layer, in the format of the model."""
    import peft

    dtype = model.lm_head.weight.dtype
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=ADAPTER_RANK, lora_dropout=0.0, target_modules=ADAPTED_MODULES), model
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)


def _in_order(_module: nn.Module, _given: Any, result: Tensor) -> None:
    result.register_hook(lambda gradient: gradient.contiguous())


def _split(model: Llama, technique: Technique, device: str, count: int) -> nn.Module:
    """ZeRO 2 and 3."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    how: dict[str, Any] = {
        "mesh": init_device_mesh(device, (count,)),
        "reshard_after_forward": technique.zero == 3,
        "offload_policy": CPUOffloadPolicy() if technique.offload else OffloadPolicy(),
    }
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    return model


def _to_nf4(model: Llama) -> None:
    """Matrices of the layers in 4 bits, their scales quantised too."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    device, dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, linear in [*module.named_children()]:
                if isinstance(linear, nn.Linear):
                    small = Linear4bit(
                        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
                    )
                    small.weight = Params4bit(linear.weight.data.cpu(), requires_grad=False, quant_type="nf4")
                    setattr(module, name, small.to(device))


def _optimiser(model: nn.Module, technique: Technique) -> Any:
    trained = _trained(model)
    if technique.zero == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(trained, torch.optim.AdamW, fused=True)
    if technique.quantised:
        from torchao.optim import _AdamW  # that of torch does not write weights in 8 bits

        torch.compiler.set_stance("force_eager")  # it compiles itself, which takes a C++ compiler and a minute
        return _AdamW(trained)
    return torch.optim.AdamW(trained, fused=not technique.offload)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _states(optimiser: Any) -> Iterator[Tensor]:
    optimiser = getattr(optimiser, "optim", optimiser)  # that of one part, under ZeRO 1
    for state in optimiser.state.values():
        yield from (each for each in state.values() if isinstance(each, Tensor))


def _bytes(tensors: Any, device: str) -> float:
    """On this device: what is offloaded is not."""
    own = [_local(each) for each in {id(tensor): tensor for tensor in tensors}.values()]
    return float(sum(each.untyped_storage().nbytes() for each in own if each.device.type == device))


def _local(tensor: Any) -> Tensor:
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return getattr(own, "int_data", own)


def _quantiser_bytes(model: nn.Module) -> float:
    """What else belongs to weights in few bits: scales, and scales of scales."""
    result = 0.0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        nested = getattr(state, "state2", None)
        result += sum(
            each.nbytes
            for each in (getattr(state, "absmax", None), getattr(nested, "absmax", None))
            if each is not None
        )
        scale = getattr(getattr(parameter, "data", None), "scale", None)
        result += scale.nbytes if isinstance(scale, Tensor) else 0.0
    return result


def _at_the_peak(profiler: Any, device: str) -> tuple[float, float]:
    """Bytes that a step has beyond what there was before, when they are most: those that it holds at its end, and all
    others."""
    live: dict[int, int] = {}
    now = maximum = 0
    then: dict[int, int] = {}
    born: dict[int, int] = {}
    for index, (_, address, size) in enumerate(machine.allocations(profiler, device)):
        if size > 0:
            live[address], born[address] = size, index
        elif address in live:
            del live[address]
        else:
            continue
        now += size
        if now > maximum:
            maximum, then = now, {born[each]: size_ for each, size_ in live.items()}
    last = {born[address] for address in live}
    gradients = sum(size for index, size in then.items() if index in last)
    return float(gradients), float(maximum - gradients)


def _communication_s(profiler: Any) -> dict[str, float]:
    """How long any collective was under way in each phase; nothing where there is one process."""
    if not distributed.is_initialized():
        return {}
    events = [(event.name, event.time_range.start, event.time_range.end) for event in profiler.events()]
    spans = sorted((begin, end) for name, begin, end in events if name.startswith(COLLECTIVES))
    result = {}
    for part in PARTS:
        last, first = max((end, begin) for name, begin, end in events if name == part)  # until the device had ended
        total, until = 0.0, first
        for begin, end in spans:
            total += max(0.0, min(end, last) - max(begin, until))
            until = max(until, end)
        result[part] = total / 1e6
    return result
