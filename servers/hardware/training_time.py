"""How long the step of `loadgen.servers.hardware.training_memory` takes: its GEMMs, every byte that operators between
them read and write, the collectives of its processes, and memory that is touched for the first time. Counted; nothing
is fitted.

`loadgen.servers.hardware.training` has a step of Megatron: fused kernels, 16-bit activations, collectives beside the
backward pass. PyTorch as it stands starts one operator after the other, each of which reads its operands from memory
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loadgen.servers.hardware import Format, Gpu, Link, constant
from loadgen.servers.hardware.kernels import all_reduce_s, gemm_s, prefill_attention_s, rates, ring_s
from loadgen.servers.hardware.training_memory import FP32_BYTES, TorchStep

MAPPED_BYTES = 32 * 2**20
"""From this size on, memory that is freed goes back to the system (M_MMAP_THRESHOLD's maximum: mallopt(3))."""


@dataclass(frozen=True, slots=True)
class TorchMachine:
    """What each process has."""

    gpu: Gpu
    links: Mapping[str, Link]
    """By collective: all-reduce, all-gather, reduce-scatter, broadcast."""
    fresh_bytes_per_s: float = 0.0
    """At which the system hands out memory; 0 where an allocator keeps it (CUDA)."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """By phase, communication in it and alone."""

    parts: dict[str, float]
    communication: dict[str, float]


def predict_step_time(step: TorchStep, machine: TorchMachine) -> StepSeconds:
    """One step on each of `step.data` devices."""
    layers, adapted = step.model.layers, step.adapter_rank > 0
    layer, head = _layer_gemms_s(step, machine), _head_s(step, machine)
    between, back = (layers * _moved_s(machine, between_byte) for between_byte in _between_bytes(step))
    loss, unloss = (_moved_s(machine, loss_byte) for loss_byte in _loss_bytes(step))
    thin, thin_bytes = _adapters_s(step, machine), _adapter_bytes(step)
    unpacked = _moved_s(machine, 2 * layers * _unpacked_bytes(step))
    forward = layers * (layer + thin) + between + _moved_s(machine, layers * thin_bytes) + head + loss + unpacked
    again = layers * (layer + thin) + between + unpacked if step.recompute else 0.0
    passes = 1.0 if adapted else 2.0  # a frozen base has no gradients of its own
    backward = passes * (layers * layer + head) + layers * 2 * thin + back + unloss + unpacked + again
    backward += _moved_s(machine, 1.5 * layers * thin_bytes)
    logits = step.tokens * step.model.vocabulary
    wide = FP32_BYTES + (step.value_bytes if step.value_bytes < FP32_BYTES else 0.0)
    forward += _fresh_s(machine, [logits * step.value_bytes, logits * FP32_BYTES])
    backward += _fresh_s(machine, [logits * wide, logits * FP32_BYTES, *_gradients(step)])
    talk, copied = _communication(step, machine)
    parts = {
        "forward": forward + talk["forward"] + copied["forward"],
        "backward": backward + talk["backward"] + copied["backward"],
        "optimiser": _optimiser_s(step, machine) + talk["optimiser"],
    }
    return StepSeconds(parts, {name: took for name, took in talk.items() if took})


def _format(step: TorchStep) -> Format:
    return Format("torch", step.value_bytes, step.value_bytes, "bf16", step.value_bytes)


def _gemm_s(step: TorchStep, machine: TorchMachine, n: float, k: float) -> float:
    return float(gemm_s(machine.gpu, _format(step), step.tokens, n, k)) / constant("training_share")


def _layer_gemms_s(step: TorchStep, machine: TorchMachine) -> float:
    """The seven matrices, each by itself, and attention."""
    took = sum(_gemm_s(step, machine, n, k) for n, k in _matrices(step))
    model, gpu = step.model, machine.gpu
    if step.flash and not step.cpu:
        return took + float(prefill_attention_s(gpu, step.sequences, step.sequence, model.heads, model.head_dim))
    flops = 4.0 * _scores(step) * model.head_dim * (0.5 if step.flash else 1.0)  # a kernel leaves out what is masked
    return took + flops / rates(gpu, _format(step)).flops_per_s / constant("training_share")


def _matrices(step: TorchStep) -> list[tuple[int, int]]:
    """Rows and columns: what is given, and what is read."""
    model = step.model
    queries, cache = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = [(queries, model.hidden), (cache, model.hidden), (cache, model.hidden), (model.hidden, queries)]
    wide = [(model.intermediate, model.hidden)] * (model.mlp_matrices - 1)
    return [*attention, *wide, (model.hidden, model.intermediate)]


def _scores(step: TorchStep) -> float:
    return float(step.sequences * step.model.heads * step.sequence**2)


def _head_s(step: TorchStep, machine: TorchMachine) -> float:
    return _gemm_s(step, machine, step.model.vocabulary, step.model.hidden)


def _between_bytes(step: TorchStep) -> tuple[float, float]:
    """Of one layer, forward and backward: what its operators read and write besides the GEMMs' operands.

    Values per token: each norm 8 (square, mean, product with the root, product with the weight), or 2 where one kernel
    does it; rotary positions 10 of each query and key (two products, a turn of two copies, a sum); heads in order and
    back 8; SiLU and its product 5; residuals 6. A score is scaled, masked in a copy and normalised: 8. Gradients
    pass the same operators, products twice, and are added where a value was read by several.
    """
    model, each = step.model, step.value_bytes
    turned = (model.heads + model.kv_heads) * model.head_dim
    norms, norms_back = (16, 32) if step.cpu else (4, 8)
    hidden, wide = model.hidden, model.intermediate
    forward = (norms + 6) * hidden + 10 * turned + 8 * hidden + 5 * wide
    backward = (norms_back + 6 + 9) * hidden + 14 * turned + 8 * hidden + 9 * wide
    scores = (0.0, 0.0) if step.flash else (8 * _scores(step), 9 * _scores(step))
    return each * (step.tokens * forward + scores[0]), each * (step.tokens * backward + scores[1])


def _loss_bytes(step: TorchStep) -> tuple[float, float]:
    """Logarithms of a softmax over all logits, in fp32, and its gradient, which is first filled with zeros; from and to
    16 bits on the way. The embedding's gradient is filled too."""
    logits = step.tokens * step.model.vocabulary
    cast = 1 + step.value_bytes / FP32_BYTES if step.value_bytes < FP32_BYTES else 0.0
    table = 0.0 if step.adapter_rank else step.model.head_parameters * step.value_bytes
    return (2 + cast) * logits * FP32_BYTES, (4 + cast) * logits * FP32_BYTES + table


def _adapters_s(step: TorchStep, machine: TorchMachine) -> float:
    """Two thin GEMMs beside each of a layer's; each has two in the backward pass."""
    rank = step.adapter_rank
    if not rank:
        return 0.0
    return sum(_gemm_s(step, machine, rank, k) + _gemm_s(step, machine, n, rank) for n, k in _matrices(step))


def _adapter_bytes(step: TorchStep) -> float:
    """What a thin pair gives is scaled, and added to what the base gives."""
    if not step.adapter_rank:
        return 0.0
    return step.tokens * step.value_bytes * 5 * sum(n for n, _ in _matrices(step))


def _unpacked_bytes(step: TorchStep) -> float:
    """Of one layer, whose quantised base is made whole where a GEMM needs it: half of the way there, half in it."""
    if step.base_bytes is None:
        return 0.0
    return step.model.layer_parameters / step.model.layers * (step.base_bytes + step.value_bytes) / 2


def _gradients(step: TorchStep) -> list[float]:
    """Of matrices outside the layers, which are the large ones; they are given back after each step."""
    if step.adapter_rank:
        return []
    return [step.model.head_parameters * step.value_bytes] * 2


def _moved_s(machine: TorchMachine, moved: float) -> float:
    return moved / rates(machine.gpu, Format("any", 2.0, 2.0, "bf16", 2.0)).bytes_per_s


def _fresh_s(machine: TorchMachine, sizes: list[float]) -> float:
    """Pages of what was just mapped are cleared one by one."""
    if not machine.fresh_bytes_per_s:
        return 0.0
    return sum(size for size in sizes if size > MAPPED_BYTES) / machine.fresh_bytes_per_s


def _communication(step: TorchStep, machine: TorchMachine) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of collectives by phase, and of the copies around them. DDP adds gradients up as they come; FSDP gathers
    the weights of a layer before it is computed, at stage 3 for the backward pass again, and scatters its gradients."""
    talk, copied = ({"forward": 0.0, "backward": 0.0, "optimiser": 0.0} for _ in range(2))
    if step.data == 1:
        return talk, copied
    links, ranks = machine.links, step.data
    groups = _group_bytes(step)
    trained = [_trained_share(step) * group for group in groups]
    if step.zero >= 2:
        gathered = sum(float(ring_s(links["all-gather"], ranks, group, "all-gather")) for group in groups)
        scattered = sum(
            float(ring_s(links["reduce-scatter"], ranks, each, "reduce-scatter")) for each in trained if each
        )
        whole = [sum(groups)]  # besides what travelled: FSDP gives both back
        there = _moved_s(machine, 2 * sum(groups) * (1 + 1 / ranks)) + _fresh_s(machine, [*groups, *whole])
        times = 1 if step.zero == 3 else 0
        talk["forward"], copied["forward"] = gathered, there
        talk["backward"] = times * gathered + scattered
        copied["backward"] = times * there + _moved_s(machine, 2 * sum(trained)) + _fresh_s(machine, trained)
    else:
        talk["backward"] = float(all_reduce_s(links["all-reduce"], ranks, sum(trained), "nccl"))
        copied["backward"] = _moved_s(machine, 4 * sum(trained))  # into the bucket, and divided
        if step.zero == 1:
            talk["optimiser"] = float(ring_s(links["broadcast"], ranks, sum(trained), "point to point"))
    return talk, copied


def _group_bytes(step: TorchStep) -> list[float]:
    """Weights that travel together: of each layer, and of all else."""
    model = step.model
    layer = model.layer_parameters / model.layers + 2 * model.hidden
    ends = (2 - model.tied) * model.head_parameters + model.hidden
    return [each * step.value_bytes for each in [layer + _adapter_parameters(step)] * model.layers + [ends]]


def _adapter_parameters(step: TorchStep) -> float:
    """Of one layer."""
    return float(step.adapter_rank * sum(n + k for n, k in _matrices(step)))


def _trained_share(step: TorchStep) -> float:
    if not step.adapter_rank:
        return 1.0
    return _adapter_parameters(step) * step.model.layers * step.value_bytes / sum(_group_bytes(step))


def _optimiser_s(step: TorchStep, machine: TorchMachine) -> float:
    """AdamW reads weight, gradient and two moments, and writes all but the gradient; over PCIe where the host does."""
    mine = sum(_group_bytes(step)) * _trained_share(step) / (step.data if step.zero else 1)
    if not step.offload:
        return _moved_s(machine, 7 * mine)
    pcie = machine.gpu.pcie
    return 2 * mine / (pcie.bytes_per_s * pcie.share) + 7 * mine / constant("host_bytes_per_s")
