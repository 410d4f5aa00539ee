"""How long one iteration of training takes, and what it holds in memory.

Time is that of the pipeline's busiest stage under 1F1B, interleaved or not (arXiv 2104.04473): with m micro-batches, p
stages and v chunks of layers on each,

    iteration = m * (forward + backward) * (1 + (p - 1) / (m v)) + gradients between replicas + optimiser

Activations are those of arXiv 2205.05198, tables 2 and 3; parameters, gradients and optimiser states those of ZeRO
(arXiv 1910.02054), adapters those of LoRA (arXiv 2106.09685) and QLoRA (arXiv 2305.14314).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from loadgen.servers.hardware import Format, Gpu, HardwareError, ModelShape, constant, gpu_links, number_format
from loadgen.servers.hardware.kernels import all_reduce_s, gemm_s, prefill_attention_s, rates, ring_s

Recomputation = Literal["none", "selective", "full"]
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMISER_BYTES = 2, 4, 12
"""Per parameter, mixed precision with Adam: 16-bit weights, fp32 gradients, and fp32 weights with two moments."""
NF4_BYTES = 0.516
"""Per parameter of QLoRA's base: 4 bits, and 0.127 bits of twice quantised scales (arXiv 2305.14314, section 3)."""
ADAPTED_MATRICES = 7
"""Matrices per layer that QLoRA gives an adapter: all of attention and MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """One set-up: `tensor` * `pipeline` * `data` GPUs."""

    gpu: Gpu
    model: ModelShape
    batch: int  # Sequences per iteration, on all GPUs
    sequence: int = 2048
    micro_batch: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    interleave: int = 1
    number: str = "bf16"
    """The format in which GEMMs compute."""
    recomputation: Recomputation = "none"
    sequence_parallel: bool = False
    flash: bool = False
    """Whether attention keeps no scores (arXiv 2205.14135)."""
    zero: int = 0
    """ZeRO stage: 1 splits optimiser states over replicas, 2 gradients too, 3 weights too."""
    offload: bool = False
    """Optimiser states, and what ZeRO splits with them, are held by the host."""
    adapter_rank: int = 0
    """LoRA: adapters alone are trained; 0 trains all."""
    base_bytes: float = WEIGHT_BYTES
    """Per parameter of a frozen base: NF4_BYTES is QLoRA."""

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def micro_batches(self) -> int:
        """Per replica and iteration."""
        if self.batch % (self.data * self.micro_batch):
            raise HardwareError(f"a batch of {self.batch} is no multiple of {self.data} replicas x {self.micro_batch}")
        return self.batch // (self.data * self.micro_batch)


@dataclass(frozen=True, slots=True)
class IterationTime:
    """Seconds of one iteration, by what takes them."""

    forward_s: float
    backward_s: float
    recomputation_s: float
    tensor_s: float  # Waiting for the GPUs that share a layer
    bubble_s: float
    data_s: float  # Gradients between replicas, as far as the backward pass does not hide them
    optimiser_s: float

    @property
    def total_s(self) -> float:
        parts = (self.forward_s, self.backward_s, self.recomputation_s, self.tensor_s)
        return sum(parts) + self.bubble_s + self.data_s + self.optimiser_s


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes on the GPU that holds most: one of the first stage, without its embedding."""

    parameters: float
    gradients: float
    optimiser: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimiser + self.activations


def layer_activation_bytes(training: TrainingSetup) -> float:
    """What one layer keeps of one micro-batch for its backward pass, on each GPU."""
    model, tensor = training.model, training.tensor
    tokens = training.sequence * training.micro_batch
    scores = 0.0 if training.flash or training.recomputation == "selective" else 5 * model.heads * training.sequence
    if training.recomputation == "full":
        return 2.0 * tokens * model.hidden
    split = 24 * model.hidden + scores
    whole = 10 * model.hidden
    return tokens * ((split + whole) / tensor if training.sequence_parallel else split / tensor + whole)


def predict_memory(training: TrainingSetup) -> TrainingMemory:
    """Parameters of the layers alone, as arXiv 2205.05198 counts; its first stage keeps `pipeline` micro-batches."""
    model = training.model
    own = model.layer_parameters / (training.tensor * training.pipeline)
    bubble = 1 + (training.pipeline - 1) / (training.pipeline * training.interleave) if training.interleave > 1 else 1.0
    activations = layer_activation_bytes(training) * model.layers * bubble
    trained, base = own, 0.0
    if training.adapter_rank:
        trained, base = adapter_parameters(training) / (training.tensor * training.pipeline), own * training.base_bytes
    split = [training.data if training.zero >= stage else 1 for stage in (1, 2, 3)]
    host = 0.0 if training.offload else 1.0
    return TrainingMemory(
        parameters=(base + trained * WEIGHT_BYTES) / split[2],
        gradients=trained * GRADIENT_BYTES / split[1],
        optimiser=host * trained * OPTIMISER_BYTES / split[0],
        activations=activations,
    )


def adapter_parameters(training: TrainingSetup) -> int:
    """Two thin matrices beside each matrix of attention and MLP."""
    model, rank = training.model, training.adapter_rank
    queries, cache = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = 2 * (model.hidden + queries) + 2 * (model.hidden + cache)
    return model.layers * rank * (attention + model.mlp_matrices * (model.hidden + model.intermediate))


def predict_iteration(training: TrainingSetup) -> IterationTime:
    """The busiest stage, which is the last: it has the output head beside its layers."""
    layers, count = training.model.layers / training.pipeline, training.micro_batches
    forward, core, reduce = _layer_s(training)
    head = _head_s(training)
    again = {"none": 0.0, "selective": core, "full": forward}[training.recomputation]
    passes = 1.0 if training.adapter_rank else 2.0  # a frozen base has no gradients of its own
    reduces = 2 * (3 if training.recomputation == "full" else 2)
    parts = [layers * forward + head, passes * (layers * forward + head), layers * again, layers * reduces * reduce]
    hop = _hop_s(training)
    once = sum(parts) + 2 * hop
    bubble = (training.pipeline - 1) / training.interleave * once + count * 2 * hop
    data, optimiser = _replicas_s(training, count * passes * parts[0]), _optimiser_s(training)
    spent = [count * part for part in parts]
    return IterationTime(spent[0], spent[1], spent[2], spent[3], bubble, data, optimiser)


def mfu(training: TrainingSetup, seconds: float) -> float:
    """Model FLOPs over what all GPUs could compute: 6 per parameter and token, and attention (arXiv 2204.02311)."""
    model, tokens = training.model, training.batch * training.sequence
    flops = 6 * (model.layer_parameters + model.head_parameters) * tokens
    flops += 12 * model.layers * model.heads * model.head_dim * training.sequence * tokens
    return flops / (seconds * training.gpus * training.gpu.flops_per_s)


def _layer_s(training: TrainingSetup) -> tuple[float, float, float]:
    """One layer forward on one micro-batch: all of it without communication, its attention core, one all-reduce."""
    model, gpu, tensor = training.model, training.gpu, training.tensor
    tokens, number = training.sequence * training.micro_batch, _gemm_format(training)
    rate = rates(gpu, number).bytes_per_s
    queries, cache = model.heads * model.head_dim // tensor, max(1, model.kv_heads // tensor) * model.head_dim
    wide = model.intermediate // tensor
    shapes = (
        (queries + 2 * cache, model.hidden),
        (model.hidden, queries),
        ((model.mlp_matrices - 1) * wide, model.hidden),
        (model.hidden, wide),
    )
    gemm = sum(float(gemm_s(gpu, number, tokens, n, k)) for n, k in shapes) / constant("training_share")
    heads = model.heads // tensor
    if training.flash:
        core = float(prefill_attention_s(gpu, training.micro_batch, training.sequence, heads, model.head_dim))
    else:
        core = _scores_s(training, number, heads)
    between = tokens * (24 * model.hidden / tensor + 10 * model.hidden / (tensor if training.sequence_parallel else 1))
    moving = constant("training_passes") * between / rate
    reduce = float(all_reduce_s(gpu.link_for(tensor), tensor, 2.0 * tokens * model.hidden, "nccl"))
    return gemm + core + moving, core, reduce


def _gemm_format(training: TrainingSetup) -> Format:
    """With one scale for each tensor, as training has them."""
    stored = training.gpu.effective_format(number_format(training.number))
    return replace(stored, operand_bytes=stored.activation_bytes)


def _scores_s(training: TrainingSetup, number: Format, heads: int) -> float:
    """Attention with its scores in memory: two batched GEMMs, and softmax and dropout over 5 bytes of each score."""
    gpu, model, sequence = training.gpu, training.model, training.sequence
    rate = rates(gpu, number)
    flops = 4 * training.micro_batch * heads * model.head_dim * sequence**2
    scores = training.micro_batch * heads * sequence**2
    return (
        flops / rate.flops_per_s / constant("training_share")
        + constant("training_passes") * 5 * scores / rate.bytes_per_s
    )


def _head_s(training: TrainingSetup) -> float:
    tokens, model = training.sequence * training.micro_batch, training.model
    return float(gemm_s(training.gpu, number_format("bf16"), tokens, model.vocabulary // training.tensor, model.hidden))


def _hop_s(training: TrainingSetup) -> float:
    """From one stage to the next: between nodes where a node is full."""
    if training.pipeline == 1:
        return 0.0
    message = 2.0 * training.sequence * training.micro_batch * training.model.hidden / training.tensor
    return float(ring_s(gpu_links()["InfiniBand"], 2, message, "point to point"))


def _replicas_s(training: TrainingSetup, backward_s: float) -> float:
    """What of the gradients' all-reduce outlasts the backward pass; ZeRO 3 gathers weights twice more."""
    if training.data == 1:
        return 0.0
    trained = training.model.layer_parameters / (training.tensor * training.pipeline)
    if training.adapter_rank:
        trained = adapter_parameters(training) / (training.tensor * training.pipeline)
    link = training.gpu.link if training.gpus <= 8 else gpu_links()["InfiniBand"]
    volume = trained * WEIGHT_BYTES * (1.5 if training.zero == 3 else 1.0)
    return max(
        0.0, float(all_reduce_s(link, training.data, volume, "nccl")) - backward_s * constant("gradient_overlap")
    )


def _optimiser_s(training: TrainingSetup) -> float:
    """Every state is read and written once; over PCIe where the host holds it."""
    trained = predict_memory(training)
    if not training.offload:
        bytes_per_s = rates(training.gpu, number_format("bf16")).bytes_per_s
        return (2 * trained.optimiser + trained.gradients + trained.parameters) / bytes_per_s
    moved = trained.gradients + trained.parameters
    return moved / (training.gpu.pcie.bytes_per_s * training.gpu.pcie.share) + moved * 2 / constant("host_bytes_per_s")
