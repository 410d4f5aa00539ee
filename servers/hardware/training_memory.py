"""Predicts the peak memory of one training step in plain PyTorch, by adding up the sizes of all tensors.

No constant is fitted to measurements. The model is the Llama of `loadgen.dissect.models.llama`, trained in a single
number format. These tensors are counted:

- the weights, including the embedding and the output head.
- the gradients, and the two moments of Adam.
- the tensors that autograd saves for the backward pass, and those of the loss.

ZeRO stages 2 and 3 are predicted as FSDP2 implements them. At stage 2, each device stores a part (shard) of all
weights. Until the backward pass of a layer, the device also stores all weights of this layer.

Another module, `loadgen.servers.hardware.training`, predicts the memory of Megatron-LM. Like arXiv 2205.05198, that
module counts only the layers, in mixed precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.servers.hardware import ModelShape

FP32_BYTES = 4.0
MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchStep:
    """A training step in plain PyTorch. `data` is the number of devices that share the batch (data parallelism)."""

    model: ModelShape
    sequences: int  # On each device
    sequence: int  # Tokens per sequence
    value_bytes: float = FP32_BYTES  # Bytes per weight, gradient, optimiser state and activation
    recompute: bool = False  # Keep only the input of each layer
    flash: bool = False  # Attention stores no scores
    cpu: bool = True  # On a CPU, norms are not fused, and gloo sums a copy of the gradients
    sums_in_fp32: bool = False  # GEMMs of 16-bit values keep an fp32 copy of their result while they run
    zero: int = 0  # ZeRO stage
    data: int = 1  # Devices that share the batch
    adapter_rank: int = 0  # Rank of LoRA adapters on all seven matrices of a layer
    base_bytes: float | None = None  # Bytes per element of those matrices if they are frozen and quantised
    offload: bool = False  # The host holds this device's part of weights, gradients and optimiser states

    @property
    def tokens(self) -> int:
        """Number of tokens on each device."""
        return self.sequences * self.sequence


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory in bytes on one device at the peak of a training step."""

    weights: float
    gradients: float
    optimiser: float
    activations: float  # Activations and all other temporary tensors: gathered weights, buffers

    @property
    def total(self) -> float:
        """Total memory in bytes: weights, gradients, optimiser states, activations and temporary tensors."""
        return self.weights + self.gradients + self.optimiser + self.activations


def peak_memory(step: TorchStep) -> StepMemory:
    """Return the peak memory of a training step on one device.

    The peak is in the backward pass, or just before it. With offloading, weights, gradients and optimiser states count
    as 0, because they are in host memory.
    """
    if step.offload:
        return StepMemory(0.0, 0.0, 0.0, max(temporary for _, temporary in _memory_over_time(step)))
    gradients, temporary = max(_memory_over_time(step), key=sum)
    return StepMemory(_weights_bytes(step), gradients, _optimiser_bytes(step), temporary)


def _memory_over_time(step: TorchStep) -> Iterator[tuple[float, float]]:
    """Yield the memory of a step at each moment that may be the peak, as two numbers of bytes.

    The first number is the size of the gradients. The second number is the size of activations and temporary tensors.
    The moments are:

    - after the loss.
    - after the backward pass of the output head.
    - before and after the backward pass of each layer.
    - after the backward pass of the embedding.
    """
    layers = step.model.layers
    ends = _ends(step)
    split = step.data if step.zero >= 2 else 1
    saved = _saved_bytes(step)
    layer_activations = _layer_bytes(step)
    layer_gradient = _trained_parameters(step) / layers * step.value_bytes
    in_buckets = step.data > 1 and step.zero < 2  # DDP's buckets hold all gradients from the start
    all_gradients = ends.head_gradient + layers * layer_gradient + ends.embedding_gradient
    waiting = ends.head_gradient if split > 1 else 0.0  # FSDP sums the gradients of head and embedding at the end
    logits = step.tokens * step.model.vocabulary
    before_backward = layers * saved + ends.saved

    loss = before_backward + 3 * FP32_BYTES * logits + _gathered_bytes(step, layers)
    yield all_gradients * in_buckets, loss

    gradients = 0.0 if split > 1 else ends.head_gradient
    head_copies = _gradient_copies(step, in_buckets) * ends.head_gradient
    output_head = before_backward + step.value_bytes * logits + head_copies + waiting + _gathered_bytes(step, layers)
    yield all_gradients if in_buckets else gradients, output_head

    for remaining in range(layers, 0, -1):
        recomputed = layer_activations if step.recompute else 0.0
        other = waiting + _gathered_bytes(step, remaining)
        before_layer = remaining * saved + recomputed + _mlp_backward_bytes(step) + other
        yield all_gradients if in_buckets else gradients, before_layer
        gradients += layer_gradient / split
        still_saved = remaining * saved if step.recompute else (remaining - 1) * saved
        after_layer = still_saved + other + _summing_bytes(step, layer_gradient)
        yield all_gradients if in_buckets else gradients, after_layer

    ends_gradient = ends.head_gradient + ends.embedding_gradient
    yield all_gradients / split, _summing_bytes(step, ends_gradient) + in_buckets * ends.embedding_gradient


@dataclass(frozen=True, slots=True)
class _Ends:
    """Memory of the parts of a model outside its layers: embedding, last norm and output head. All values in bytes."""

    saved: float  # Activations that are saved for the backward pass
    head_gradient: float
    embedding_gradient: float


def _ends(step: TorchStep) -> _Ends:
    """Return the memory of the parts outside the layers: the embedding, the last norm and the output head.

    The result contains the saved activations and the gradients of these parts. With adapters, the parts are frozen and
    have no gradients.
    """
    matrix = step.model.head_parameters * step.value_bytes
    norm = step.model.hidden * step.value_bytes
    if step.adapter_rank:
        return _Ends(_norm_bytes(step), 0.0, 0.0)
    return _Ends(_norm_bytes(step), norm + matrix * (1 - step.model.tied), matrix)


def _norm_bytes(step: TorchStep) -> float:
    """Return the bytes that one RMSNorm saves for its backward pass, including the result of the RMSNorm.

    On a GPU, the fused kernel saves its input and its result. On a CPU, these tensors are saved:

    - the fp32 input.
    - the root mean square and its inverse.
    - the fp32 quotient, if the weight is trained.
    - the result.
    """
    tokens = step.tokens
    hidden = step.model.hidden
    if not step.cpu:
        return 2 * tokens * hidden * step.value_bytes
    fp32_tensors = 1 if step.adapter_rank else 2  # the input or a copy of it, and the quotient
    return tokens * (hidden * (fp32_tensors * FP32_BYTES + step.value_bytes) + 2 * FP32_BYTES)


def _layer_bytes(step: TorchStep) -> float:
    """Return the bytes that one layer saves for its backward pass if nothing is recomputed."""
    model = step.model
    tokens = step.tokens
    value = step.value_bytes
    queries = model.heads * model.head_dim
    cache = model.kv_heads * model.head_dim
    if step.flash:
        attention = tokens * ((2 * queries + 2 * cache) * value + model.heads * FP32_BYTES)
    else:
        scores = step.sequences * model.heads * step.sequence**2
        copies = FP32_BYTES + (value if value < FP32_BYTES else 0.0)
        attention = 4 * tokens * queries * value + scores * copies + step.sequence**2
    mlp = 4 * tokens * model.intermediate * value
    adapters = 7 * tokens * step.adapter_rank * value
    return 2 * _norm_bytes(step) + attention + mlp + adapters


def _saved_bytes(step: TorchStep) -> float:
    """Return the bytes that one layer keeps from its forward pass to its backward pass.

    With recomputation, a layer keeps only its input.
    """
    return step.tokens * step.model.hidden * step.value_bytes if step.recompute else _layer_bytes(step)


def _mlp_backward_bytes(step: TorchStep) -> float:
    """Return the bytes of the temporary tensors in the backward pass of an MLP.

    There are four such tensors: two gradients as wide as the MLP's intermediate layer, and two as wide as its input.
    """
    model = step.model
    return step.tokens * (2 * model.intermediate + 2 * model.hidden) * step.value_bytes


def _trained_parameters(step: TorchStep) -> float:
    """Return the number of trained parameters in all layers. With adapters, only the adapters are trained."""
    model = step.model
    rank = step.adapter_rank
    if not rank:
        return model.layer_parameters + 2 * model.layers * model.hidden
    queries = model.heads * model.head_dim
    cache = model.kv_heads * model.head_dim
    attention = 2 * (model.hidden + queries) + 2 * (model.hidden + cache)
    return model.layers * rank * (attention + 3 * (model.hidden + model.intermediate))


def _model_bytes(step: TorchStep) -> float:
    """Return the bytes of all weights of the model, including adapters."""
    model = step.model
    value = step.value_bytes
    layers = model.layer_parameters * (value if step.base_bytes is None else step.base_bytes)
    adapters = _trained_parameters(step) * value if step.adapter_rank else 0.0
    norms = (2 * model.layers + 1) * model.hidden * value
    return layers + adapters + norms + (2 - model.tied) * model.head_parameters * value


def _weights_bytes(step: TorchStep) -> float:
    return _model_bytes(step) / (step.data if step.zero >= 2 else 1)


def _optimiser_bytes(step: TorchStep) -> float:
    ends = _ends(step)
    trained = _trained_parameters(step) * step.value_bytes + ends.head_gradient + ends.embedding_gradient
    return MOMENTS * trained / (step.data if step.zero >= 1 else 1)


def _gathered_bytes(step: TorchStep, remaining: int) -> float:
    """Return the bytes of weights that a device holds during the backward pass because it gathered them from other
    devices.

    `remaining` is the number of layers whose backward pass has not finished. The gathered weights depend on the ZeRO
    stage:

    - stage 2: all `remaining` layers, the embedding and the output head.
    - stage 3: the current layer, the next layer, the embedding and the output head.
    - lower stages: none, so the result is 0.
    """
    if step.zero < 2:
        return 0.0
    ends = (2 - step.model.tied) * step.model.head_parameters * step.value_bytes
    layer = (_model_bytes(step) - ends) / step.model.layers
    return ends + layer * (remaining if step.zero == 2 else min(remaining, 2))


def _gradient_copies(step: TorchStep, in_buckets: bool) -> float:
    """Return the size of the temporary copies of a gradient, as a multiple of the size of the gradient.

    Two copies are possible:

    - If `in_buckets` is True, DDP copies the gradient into a bucket before it sums the gradients of all devices.
    - If GEMMs sum in fp32, the GEMM that computes the gradient keeps an fp32 copy. This copy is `FP32_BYTES /
      value_bytes` times as large as the gradient.
    """
    return in_buckets + step.sums_in_fp32 * FP32_BYTES / step.value_bytes


def _summing_bytes(step: TorchStep, gradients: float) -> float:
    """Return the bytes of the temporary tensors that a device needs to sum gradients with other devices.

    `gradients` is the size of the gradients in bytes. At ZeRO stages 2 and 3, the temporary tensors are the complete
    gradients and copies of them. At lower stages, the result is 0.
    """
    if step.zero < 2:
        return 0.0
    return gradients * (2 + (1 / step.data if step.cpu else 0))
