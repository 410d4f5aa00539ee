"""What one training step of plain PyTorch holds in memory at its peak, counted tensor by tensor: nothing is fitted.

`loadgen.servers.hardware.training` counts as arXiv 2205.05198 does for Megatron, layers alone and in mixed precision.
This counts a Llama as `loadgen.dissect.models.llama` has it: every number in the format of the run, embedding, output
head and loss too, Adam with two moments, and what autograd keeps of each operator. ZeRO stages are those of FSDP2,
which at stage 2 has its part of the weights and, until the backward pass, all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.servers.hardware import ModelShape

FP32_BYTES = 4.0
MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchStep:
    """One step on each of `data` devices."""

    model: ModelShape
    sequences: int  # On each device
    sequence: int
    value_bytes: float = FP32_BYTES  # Of weights, gradients, optimiser states and activations
    recompute: bool = False  # Of each layer its input alone is kept
    flash: bool = False  # Attention keeps no scores
    cpu: bool = True  # Norms are not fused, gloo sums a copy
    sums_in_fp32: bool = False  # A GEMM of 16-bit numbers, in a copy of its result
    zero: int = 0
    data: int = 1
    adapter_rank: int = 0  # LoRA on all seven matrices of a layer
    base_bytes: float | None = None  # Per element of those matrices, where they are frozen and quantised
    offload: bool = False  # The host has this device's part of weights, gradients and optimiser states

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on one device at the instant at which they are most."""

    weights: float
    gradients: float
    optimiser: float
    activations: float  # And all else that is there for a while: gathered weights, buffers

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimiser + self.activations


def peak_memory(step: TorchStep) -> StepMemory:
    """The largest of all instants, from the end of the forward pass to the optimiser."""
    if step.offload:
        return StepMemory(0.0, 0.0, 0.0, max(rest for _, rest in _instants(step)))
    gradients, rest = max(_instants(step), key=sum)
    return StepMemory(_weights_bytes(step), gradients, _optimiser_bytes(step), rest)


def _instants(step: TorchStep) -> Iterator[tuple[float, float]]:
    """Bytes of gradients that stay, and of all that passes: behind the loss, behind the output head, before and behind
    the backward pass of each layer, and behind the embedding."""
    layers, ends, split = step.model.layers, _ends(step), step.data if step.zero >= 2 else 1
    retained, one, layer = _kept_bytes(step), _layer_bytes(step), _trained(step) / step.model.layers * step.value_bytes
    resident = step.data > 1 and step.zero < 2  # in DDP's buckets, from the start
    whole = ends.head_gradient + layers * layer + ends.embedding_gradient
    waiting = ends.head_gradient if split > 1 else 0.0  # FSDP sums those of head and embedding together, at the end
    logits = step.tokens * step.model.vocabulary
    before = layers * retained + ends.kept
    yield whole * resident, before + 3 * FP32_BYTES * logits + _gathered_bytes(step, layers)
    staying = 0.0 if split > 1 else ends.head_gradient
    made = _made_bytes(step, resident)
    yield (
        whole if resident else staying,
        before + step.value_bytes * logits + made * ends.head_gradient + waiting + _gathered_bytes(step, layers),
    )
    for left in range(layers, 0, -1):
        again = one if step.recompute else 0.0
        passing = waiting + _gathered_bytes(step, left)
        yield (whole if resident else staying), left * retained + again + _passing_bytes(step) + passing
        staying += layer / split
        done = (left - 1) * retained if not step.recompute else left * retained
        yield (whole if resident else staying), done + passing + _summing_bytes(step, layer)
    last = ends.head_gradient + ends.embedding_gradient
    yield whole / split, _summing_bytes(step, last) + resident * ends.embedding_gradient


@dataclass(frozen=True, slots=True)
class _Ends:
    """Of what stands before and behind the layers."""

    kept: float
    head_gradient: float
    embedding_gradient: float


def _ends(step: TorchStep) -> _Ends:
    """Embedding, last norm and output head; a frozen base has no gradients of them."""
    matrix, norm = step.model.head_parameters * step.value_bytes, step.model.hidden * step.value_bytes
    if step.adapter_rank:
        return _Ends(_norm_bytes(step), 0.0, 0.0)
    return _Ends(_norm_bytes(step), norm + matrix * (1 - step.model.tied), matrix)


def _norm_bytes(step: TorchStep) -> float:
    """Its input, what it was divided by, the quotient where its weight is trained, and what it gives."""
    tokens, hidden = step.tokens, step.model.hidden
    if not step.cpu:
        return 2 * tokens * hidden * step.value_bytes
    inner = 1 if step.adapter_rank else 2  # in fp32: the input, or a copy of it, and the quotient
    return tokens * (hidden * (inner * FP32_BYTES + step.value_bytes) + 2 * FP32_BYTES)


def _layer_bytes(step: TorchStep) -> float:
    """All that one layer keeps for its backward pass."""
    model, tokens, each = step.model, step.tokens, step.value_bytes
    queries, cache = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if step.flash:
        attention = tokens * ((2 * queries + 2 * cache) * each + model.heads * FP32_BYTES)
    else:
        scores = step.sequences * model.heads * step.sequence**2
        copies = FP32_BYTES + (each if each < FP32_BYTES else 0.0)
        attention = 4 * tokens * queries * each + scores * copies + step.sequence**2
    mlp = 4 * tokens * model.intermediate * each
    adapters = 7 * tokens * step.adapter_rank * each
    return 2 * _norm_bytes(step) + attention + mlp + adapters


def _kept_bytes(step: TorchStep) -> float:
    """Of one layer, from its forward to its backward pass."""
    return step.tokens * step.model.hidden * step.value_bytes if step.recompute else _layer_bytes(step)


def _passing_bytes(step: TorchStep) -> float:
    """What is there for a moment in the backward pass of an MLP: two gradients of its width, and of what goes by it."""
    model = step.model
    return step.tokens * (2 * model.intermediate + 2 * model.hidden) * step.value_bytes


def _trained(step: TorchStep) -> float:
    """Parameters of all layers that have a gradient."""
    model, rank = step.model, step.adapter_rank
    if not rank:
        return model.layer_parameters + 2 * model.layers * model.hidden
    queries, cache = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return (
        model.layers
        * rank
        * (2 * (model.hidden + queries) + 2 * (model.hidden + cache) + 3 * (model.hidden + model.intermediate))
    )


def _all_bytes(step: TorchStep) -> float:
    """Weights of the whole model, adapters too."""
    model, each = step.model, step.value_bytes
    layers = model.layer_parameters * (each if step.base_bytes is None else step.base_bytes)
    adapters = _trained(step) * each if step.adapter_rank else 0.0
    norms = (2 * model.layers + 1) * model.hidden * each
    return layers + adapters + norms + (2 - model.tied) * model.head_parameters * each


def _weights_bytes(step: TorchStep) -> float:
    return _all_bytes(step) / (step.data if step.zero >= 2 else 1)


def _optimiser_bytes(step: TorchStep) -> float:
    ends = _ends(step)
    trained = _trained(step) * step.value_bytes + ends.head_gradient + ends.embedding_gradient
    return MOMENTS * trained / (step.data if step.zero >= 1 else 1)


def _gathered_bytes(step: TorchStep, left: int) -> float:
    """Whole weights beside the parts, where so many layers are still to go back: at stage 2 all of those, at stage 3
    the layer that is computed and the one that is fetched meanwhile."""
    if step.zero < 2:
        return 0.0
    ends = (2 - step.model.tied) * step.model.head_parameters * step.value_bytes
    layer = (_all_bytes(step) - ends) / step.model.layers
    return ends + layer * (left if step.zero == 2 else min(left, 2))


def _made_bytes(step: TorchStep, resident: bool) -> float:
    """While a gradient is made, how often it is there besides: on its way into DDP's bucket, and in fp32."""
    return resident + step.sums_in_fp32 * FP32_BYTES / step.value_bytes


def _summing_bytes(step: TorchStep, gradients: float) -> float:
    """Whole gradients, and the copy that is sent, where each device keeps a part of the sum."""
    if step.zero < 2:
        return 0.0
    return gradients * (2 + (1 / step.data if step.cpu else 0))
