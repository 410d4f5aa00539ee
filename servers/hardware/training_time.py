"""Predicts how long one training step of plain PyTorch takes, for the model in `loadgen.dissect.models.llama`.

The predicted time is the sum of the times for:

- the matrix multiplications (GEMMs),
- the memory traffic of the operators between the GEMMs,
- the collective operations between the processes,
- the page faults in memory that the operating system has just provided (on a CPU only).

No constant is fitted to measurements of plain PyTorch.

In plain PyTorch, operators run one after the other, and each of them reads its operands from memory again.
`loadgen.servers.hardware.training` predicts Megatron-LM instead, with fused kernels, 16-bit activations and collective
operations during the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loadgen.servers.hardware import Format, Gpu, Link, constant
from loadgen.servers.hardware.kernels import all_reduce_s, gemm_s, prefill_attention_s, rates, ring_s
from loadgen.servers.hardware.training_memory import FP32_BYTES, TorchStep

MAPPED_BYTES = 32 * 2**20
"""A freed memory block of this size or above returns to the system (maximum of M_MMAP_THRESHOLD, mallopt(3))."""


@dataclass(frozen=True, slots=True)
class TorchMachine:
    """Hardware of one process in a training step."""

    gpu: Gpu
    links: Mapping[str, Link]
    """Links by collective operation: all-reduce, all-gather, reduce-scatter, broadcast."""
    fresh_bytes_per_s: float = 0.0
    """Rate at which the system provides unused memory. 0: an allocator keeps freed memory (CUDA)."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Duration of one step in seconds, by phase: forward, backward and optimiser.

    `communication` is the part of each phase that is spent in collective operations.
    """

    parts: dict[str, float]
    communication: dict[str, float]


def predict_step_time(step: TorchStep, machine: TorchMachine) -> StepSeconds:
    """Return the predicted duration of one training step by phase: forward, backward and optimiser.

    `step` runs on `step.data` devices at the same time. `machine` is the hardware of one of them.
    """
    communication, copies = _communication(step, machine)
    parts = {
        "forward": _forward_s(step, machine) + communication["forward"] + copies["forward"],
        "backward": _backward_s(step, machine) + communication["backward"] + copies["backward"],
        "optimiser": _optimiser_s(step, machine) + communication["optimiser"],
    }
    return StepSeconds(parts, {phase: seconds for phase, seconds in communication.items() if seconds})


def _forward_s(step: TorchStep, machine: TorchMachine) -> float:
    layers = step.model.layers
    elementwise_bytes, _ = _elementwise_bytes(step)
    loss_bytes, _ = _loss_bytes(step)
    seconds = (
        layers * (_layer_gemms_s(step, machine) + _adapters_s(step, machine))
        + layers * _memory_s(machine, elementwise_bytes)
        + _memory_s(machine, layers * _adapter_bytes(step))
        + _head_s(step, machine)
        + _memory_s(machine, loss_bytes)
        + _dequantising_s(step, machine)
    )
    logits = step.tokens * step.model.vocabulary
    return seconds + _fresh_memory_s(machine, [logits * step.value_bytes, logits * FP32_BYTES])


def _backward_s(step: TorchStep, machine: TorchMachine) -> float:
    layers = step.model.layers
    layer = _layer_gemms_s(step, machine)
    adapters = _adapters_s(step, machine)
    forward_bytes, backward_bytes = _elementwise_bytes(step)
    _, loss_bytes = _loss_bytes(step)
    recomputation = 0.0
    if step.recompute:
        elementwise = layers * _memory_s(machine, forward_bytes)
        recomputation = layers * (layer + adapters) + elementwise + _dequantising_s(step, machine)
    passes = 1.0 if step.adapter_rank > 0 else 2.0  # a frozen base needs no weight gradients
    seconds = (
        passes * (layers * layer + _head_s(step, machine))
        + layers * 2 * adapters
        + layers * _memory_s(machine, backward_bytes)
        + _memory_s(machine, loss_bytes)
        + _dequantising_s(step, machine)
        + recomputation
    )
    seconds += _memory_s(machine, 1.5 * layers * _adapter_bytes(step))
    logits = step.tokens * step.model.vocabulary
    logit_bytes = FP32_BYTES + (step.value_bytes if step.value_bytes < FP32_BYTES else 0.0)
    fresh = [logits * logit_bytes, logits * FP32_BYTES, *_large_gradients(step)]
    return seconds + _fresh_memory_s(machine, fresh)


def _format(step: TorchStep) -> Format:
    return Format("torch", step.value_bytes, step.value_bytes, "bf16", step.value_bytes)


def _gemm_s(step: TorchStep, machine: TorchMachine, n: float, k: float) -> float:
    return float(gemm_s(machine.gpu, _format(step), step.tokens, n, k)) / constant("training_share")


def _layer_gemms_s(step: TorchStep, machine: TorchMachine) -> float:
    """Return the forward time of a layer's attention and GEMMs. Each of the seven matrices needs a separate GEMM."""
    gemms = sum(_gemm_s(step, machine, n, k) for n, k in _matrices(step))
    model = step.model
    gpu = machine.gpu
    if step.flash and not step.cpu:
        return gemms + float(prefill_attention_s(gpu, step.sequences, step.sequence, model.heads, model.head_dim))
    computed = 0.5 if step.flash else 1.0  # a flash kernel skips masked scores
    flops = 4.0 * _scores(step) * model.head_dim * computed
    return gemms + flops / rates(gpu, _format(step)).flops_per_s / constant("training_share")


def _matrices(step: TorchStep) -> list[tuple[int, int]]:
    """Return the output width and the input width of each matrix of a layer."""
    model = step.model
    queries = model.heads * model.head_dim
    cache = model.kv_heads * model.head_dim
    attention = [(queries, model.hidden), (cache, model.hidden), (cache, model.hidden), (model.hidden, queries)]
    wide = [(model.intermediate, model.hidden)] * (model.mlp_matrices - 1)
    return [*attention, *wide, (model.hidden, model.intermediate)]


def _scores(step: TorchStep) -> float:
    return float(step.sequences * step.model.heads * step.sequence**2)


def _head_s(step: TorchStep, machine: TorchMachine) -> float:
    return _gemm_s(step, machine, step.model.vocabulary, step.model.hidden)


def _elementwise_bytes(step: TorchStep) -> tuple[float, float]:
    """Return the bytes that the operators of one layer read and write, as (forward pass, backward pass).

    GEMMs are not included. The following list contains the number of values that each operator reads and writes in the
    forward pass, per element of its input:

    - Norm: 8 (square, mean, product with the root, product with the weight), or 2 if the norm is one fused kernel.
    - Rotary positions of queries and keys: 10 (two products, a rotation of two copies, a sum).
    - Reordering of elements by attention head, and back: 8.
    - SiLU, and the product of its result with another value: 5.
    - Both residuals together: 6.
    - Attention scores, which FlashAttention does not store: 8 (scaled, masked in a copy, normalised).

    In the backward pass, the same operators are applied to the gradients, and each factor of a product gets a gradient.
    If several operators read the same value, their gradients are added up.
    """
    model = step.model
    rotated = (model.heads + model.kv_heads) * model.head_dim
    hidden = model.hidden
    wide = model.intermediate
    norms, norms_backward = (16, 32) if step.cpu else (4, 8)
    forward = (norms + 6) * hidden + 10 * rotated + 8 * hidden + 5 * wide
    backward = (norms_backward + 6 + 9) * hidden + 14 * rotated + 8 * hidden + 9 * wide
    scores = 0.0 if step.flash else _scores(step)
    forward_bytes = step.value_bytes * (step.tokens * forward + 8 * scores)
    backward_bytes = step.value_bytes * (step.tokens * backward + 9 * scores)
    return forward_bytes, backward_bytes


def _loss_bytes(step: TorchStep) -> tuple[float, float]:
    """Return the bytes that the loss reads and writes, in the forward and in the backward pass.

    The forward pass converts 16-bit logits to fp32, and computes the log-softmax of all logits. The backward pass fills
    the gradients of logits and embedding with zeros before it computes them.
    """
    logits = step.tokens * step.model.vocabulary
    conversion = 1 + step.value_bytes / FP32_BYTES if step.value_bytes < FP32_BYTES else 0.0
    embedding = 0.0 if step.adapter_rank else step.model.head_parameters * step.value_bytes
    return (2 + conversion) * logits * FP32_BYTES, (4 + conversion) * logits * FP32_BYTES + embedding


def _adapters_s(step: TorchStep, machine: TorchMachine) -> float:
    """Return the time in seconds that the LoRA adapters of one layer take in the forward pass.

    Each matrix of the layer has an adapter, which consists of two small GEMMs.
    """
    rank = step.adapter_rank
    if not rank:
        return 0.0
    return sum(_gemm_s(step, machine, rank, k) + _gemm_s(step, machine, n, rank) for n, k in _matrices(step))


def _adapter_bytes(step: TorchStep) -> float:
    """Return the bytes that one layer reads and writes to add the results of its adapters to those of the base weights.

    The results of the adapters (LoRA) are scaled first.
    """
    if not step.adapter_rank:
        return 0.0
    return step.tokens * step.value_bytes * 5 * sum(n for n, _ in _matrices(step))


def _dequantising_s(step: TorchStep, machine: TorchMachine) -> float:
    """Return the time to dequantise the base weights of all layers once, for the GEMMs of one pass."""
    if step.base_bytes is None:
        return 0.0
    layer_bytes = step.model.layer_parameters / step.model.layers * (step.base_bytes + step.value_bytes) / 2
    return _memory_s(machine, 2 * step.model.layers * layer_bytes)


def _large_gradients(step: TorchStep) -> list[float]:
    """Return the sizes in bytes of the gradients of the embedding and of the output head, which are freed after each
    step.

    The list is empty if only adapters are trained.
    """
    if step.adapter_rank:
        return []
    return [step.model.head_parameters * step.value_bytes] * 2


def _memory_s(machine: TorchMachine, moved_bytes: float) -> float:
    return moved_bytes / rates(machine.gpu, Format("any", 2.0, 2.0, "bf16", 2.0)).bytes_per_s


def _fresh_memory_s(machine: TorchMachine, sizes: list[float]) -> float:
    """Return the time in seconds that the operating system needs to clear new memory for blocks of the given `sizes`.

    The sizes are in bytes. Blocks of up to MAPPED_BYTES are not counted, because their memory is reused.
    """
    if not machine.fresh_bytes_per_s:
        return 0.0
    return sum(size for size in sizes if size > MAPPED_BYTES) / machine.fresh_bytes_per_s


def _communication(step: TorchStep, machine: TorchMachine) -> tuple[dict[str, float], dict[str, float]]:
    """Return the durations in seconds of collective operations, and of the copies of tensors for these operations.

    Both are dicts by phase: forward, backward and optimiser. On a single device, all durations are 0.
    """
    if step.data == 1:
        return _phases(), _phases()
    return _fsdp_communication(step, machine) if step.zero >= 2 else _ddp_communication(step, machine)


def _phases() -> dict[str, float]:
    return {"forward": 0.0, "backward": 0.0, "optimiser": 0.0}


def _fsdp_communication(step: TorchStep, machine: TorchMachine) -> tuple[dict[str, float], dict[str, float]]:
    """Return two durations of FSDP in seconds, each by phase: of collective operations, and of copies of tensors.

    The phases are forward, backward and optimiser. FSDP gathers the weights of a layer before the layer is computed,
    and reduce-scatters the gradients of the layer. At ZeRO stage 3, the weights are gathered again for the backward
    pass.
    """
    ranks = step.data
    groups = _group_bytes(step)
    trained = [_trained_share(step) * group for group in groups]
    gather_link = machine.links["all-gather"]
    scatter_link = machine.links["reduce-scatter"]
    gathering = sum(float(ring_s(gather_link, ranks, size, "all-gather")) for size in groups)
    scattering = sum(float(ring_s(scatter_link, ranks, size, "reduce-scatter")) for size in trained if size)
    all_weights = sum(groups)  # a second copy next to the gathered groups; FSDP frees both
    copying_weights = _memory_s(machine, 2 * all_weights * (1 + 1 / ranks))
    copying_weights += _fresh_memory_s(machine, [*groups, all_weights])
    gathers_again = 1 if step.zero == 3 else 0
    communication = _phases()
    communication["forward"] = gathering
    communication["backward"] = gathers_again * gathering + scattering
    copies = _phases()
    copies["forward"] = copying_weights
    copies["backward"] = (
        gathers_again * copying_weights + _memory_s(machine, 2 * sum(trained)) + _fresh_memory_s(machine, trained)
    )
    return communication, copies


def _ddp_communication(step: TorchStep, machine: TorchMachine) -> tuple[dict[str, float], dict[str, float]]:
    """Return how long a training step with DDP spends on collective operations, and how long on copies.

    Each result is a dictionary with the time in seconds for each phase: forward, backward and optimiser. During the
    backward pass, DDP copies the gradients into buckets, and sums each bucket over all devices. At ZeRO stage 1, the
    updated weights are broadcast after the optimiser.
    """
    trained = sum(_trained_share(step) * group for group in _group_bytes(step))
    communication = _phases()
    communication["backward"] = float(all_reduce_s(machine.links["all-reduce"], step.data, trained, "nccl"))
    if step.zero == 1:
        broadcast_link = machine.links["broadcast"]
        communication["optimiser"] = float(ring_s(broadcast_link, step.data, trained, "point to point"))
    copies = _phases()
    copies["backward"] = _memory_s(machine, 4 * trained)  # into the bucket, and divided
    return communication, copies


def _group_bytes(step: TorchStep) -> list[float]:
    """Return the size in bytes of each group of weights that FSDP transfers together.

    Each layer is one group. The weights outside the layers are the last group.
    """
    model = step.model
    layer = model.layer_parameters / model.layers + 2 * model.hidden
    ends = (2 - model.tied) * model.head_parameters + model.hidden
    parameters = [layer + _adapter_parameters(step)] * model.layers + [ends]
    return [count * step.value_bytes for count in parameters]


def _adapter_parameters(step: TorchStep) -> float:
    """Return the number of adapter parameters in one layer."""
    return float(step.adapter_rank * sum(n + k for n, k in _matrices(step)))


def _trained_share(step: TorchStep) -> float:
    if not step.adapter_rank:
        return 1.0
    return _adapter_parameters(step) * step.model.layers * step.value_bytes / sum(_group_bytes(step))


def _optimiser_s(step: TorchStep, machine: TorchMachine) -> float:
    """Return the duration of an AdamW step, which moves seven values per parameter.

    AdamW reads weight, gradient and two moments, and writes weight and moments. With offloading, the host runs AdamW.
    Gradients and weights are then transferred over PCIe.
    """
    own_bytes = sum(_group_bytes(step)) * _trained_share(step) / (step.data if step.zero else 1)
    if not step.offload:
        return _memory_s(machine, 7 * own_bytes)
    pcie = machine.gpu.pcie
    return 2 * own_bytes / (pcie.bytes_per_s * pcie.share) + 7 * own_bytes / constant("host_bytes_per_s")
