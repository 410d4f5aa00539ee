"""Predicts how long one training iteration of Megatron-LM takes, and how much memory it needs.

The duration is that of the busiest pipeline stage with the 1F1B schedule, interleaved or not (arXiv 2104.04473). With
`m` micro-batches, `p` stages and `v` chunks of layers per stage:

    iteration = m * (forward + backward) * (1 + (p - 1) / (m * v)) + gradient all-reduce + optimiser.

Sources of the memory model:

- activations: arXiv 2205.05198, tables 2 and 3.
- parameters, gradients and optimiser states: ZeRO (arXiv 1910.02054).
- adapters: LoRA (arXiv 2106.09685) and QLoRA (arXiv 2305.14314).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from loadgen.servers.hardware import Format, Gpu, HardwareError, ModelShape, constant, number_format
from loadgen.servers.hardware.inference import NODE_GPUS, check_heads
from loadgen.servers.hardware.kernels import all_reduce_s, gemm_s, prefill_attention_s, rates, ring_s

Recomputation = Literal["none", "selective", "full"]
WEIGHT_BYTES = 2
GRADIENT_BYTES = 4
OPTIMISER_BYTES = 12
"""Bytes per parameter in mixed precision with Adam: 16-bit weights, fp32 gradients, fp32 weights with two moments."""
NF4_BYTES = 0.516
"""Bytes per parameter of QLoRA's base: 4 bits plus 0.127 bits of double-quantised scales (arXiv 2305.14314, sec. 3)."""
ADAPTED_MATRICES = 7
"""Matrices per layer to which QLoRA adds an adapter: all of attention and MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """A training job of Megatron-LM on `tensor * pipeline * data` GPUs."""

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
    """Number format in which GEMMs compute."""
    recomputation: Recomputation = "none"
    sequence_parallel: bool = False
    flash: bool = False
    """FlashAttention: attention stores no scores (arXiv 2205.14135)."""
    zero: int = 0
    """ZeRO stage. Stage 1 splits optimiser states over replicas, stage 2 also gradients, stage 3 also weights."""
    offload: bool = False
    """The host holds the optimiser states, and the tensors that ZeRO splits together with them."""
    adapter_rank: int = 0
    """Rank of LoRA adapters, which are then the only trained parameters. 0: all parameters are trained."""
    base_bytes: float = WEIGHT_BYTES
    """Bytes per parameter of a frozen base model; NF4_BYTES for QLoRA."""

    def __post_init__(self) -> None:
        if not self.model.plain:
            raise HardwareError(f"training is modelled for dense models only, and {self.model.name} is none")
        check_heads(self.model, self.tensor)

    @property
    def gpus(self) -> int:
        """Number of GPUs of the training job."""
        return self.tensor * self.pipeline * self.data

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per replica and iteration.

        Raises HardwareError if the batch is not a multiple of `data * micro_batch` sequences.
        """
        if self.batch % (self.data * self.micro_batch):
            raise HardwareError(
                f"a batch of {self.batch} is not a multiple of {self.data} replicas x {self.micro_batch} sequences"
            )
        return self.batch // (self.data * self.micro_batch)


@dataclass(frozen=True, slots=True)
class IterationTime:
    """Duration of one iteration in seconds, by component."""

    forward_s: float
    backward_s: float
    recomputation_s: float
    tensor_s: float  # Waiting for all-reduces within a layer
    bubble_s: float  # Idle time of the pipeline
    data_s: float  # All-reduce of gradients between replicas, minus the part that the backward pass hides
    optimiser_s: float

    @property
    def total_s(self) -> float:
        """Duration of the whole iteration in seconds: the sum of all components."""
        parts = (self.forward_s, self.backward_s, self.recomputation_s, self.tensor_s)
        return sum(parts) + self.bubble_s + self.data_s + self.optimiser_s


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Memory in bytes on a GPU of the first pipeline stage.

    The first stage keeps the most activations, so it needs the most memory. The embedding is not counted.
    """

    parameters: float
    gradients: float
    optimiser: float
    activations: float

    @property
    def total(self) -> float:
        """Total memory in bytes: parameters, gradients, optimiser states and activations."""
        return self.parameters + self.gradients + self.optimiser + self.activations


def layer_activation_bytes(training: TrainingSetup) -> float:
    """Return the bytes of activations that one layer stores on each GPU, per micro-batch, for the backward pass."""
    model = training.model
    tensor = training.tensor
    tokens = training.sequence * training.micro_batch
    if training.recomputation == "full":
        return 2.0 * tokens * model.hidden
    scores = 0.0 if training.flash or training.recomputation == "selective" else 5 * model.heads * training.sequence
    split = 24 * model.hidden + scores  # divided among the GPUs of the layer
    whole = 10 * model.hidden  # on each GPU, unless sequence parallelism divides it too
    if training.sequence_parallel:
        return tokens * ((split + whole) / tensor)
    return tokens * (split / tensor + whole)


MEMORY_SHARE = 0.9
"""Share of the GPU memory that weights, optimiser states and activations may use. The rest is for buffers, and for the
embedding and the output head, which `predict_memory` does not count."""


def fits_memory(training: TrainingSetup) -> bool:
    """Return True if the training job needs at most the share MEMORY_SHARE of the GPU's memory."""
    return predict_memory(training).total <= MEMORY_SHARE * training.gpu.memory_bytes


def predict_memory(training: TrainingSetup) -> TrainingMemory:
    """Return the predicted memory on a GPU of the first pipeline stage, which needs the most memory.

    This stage stores the activations of `pipeline` micro-batches at the same time. As in arXiv 2205.05198, the
    embedding and the output head are not counted.
    """
    model = training.model
    parameters = model.layer_parameters / (training.tensor * training.pipeline)
    interleaving = 1.0
    if training.interleave > 1:
        interleaving = 1 + (training.pipeline - 1) / (training.pipeline * training.interleave)
    trained = parameters
    base_bytes = 0.0
    if training.adapter_rank:
        trained = adapter_parameters(training) / (training.tensor * training.pipeline)
        base_bytes = parameters * training.base_bytes
    optimiser_split, gradient_split, weight_split = (
        training.data if training.zero >= stage else 1 for stage in (1, 2, 3)
    )
    optimiser_bytes = 0 if training.offload else OPTIMISER_BYTES
    return TrainingMemory(
        parameters=(base_bytes + trained * WEIGHT_BYTES) / weight_split,
        gradients=trained * GRADIENT_BYTES / gradient_split,
        optimiser=trained * optimiser_bytes / optimiser_split,
        activations=layer_activation_bytes(training) * model.layers * interleaving,
    )


def adapter_parameters(training: TrainingSetup) -> int:
    """Return the number of parameters of all LoRA adapters.

    Each matrix of attention and MLP has an adapter, which consists of two thin matrices.
    """
    model = training.model
    rank = training.adapter_rank
    queries = model.heads * model.head_dim
    cache = model.kv_heads * model.head_dim
    attention = 2 * (model.hidden + queries) + 2 * (model.hidden + cache)
    return model.layers * rank * (attention + model.mlp_matrices * (model.hidden + model.intermediate))


def predict_iteration(training: TrainingSetup) -> IterationTime:
    """Return the predicted duration of one iteration, by component.

    The duration is that of the last pipeline stage, which is the busiest, because it also computes the output head.
    """
    layers = training.model.layers / training.pipeline
    count = training.micro_batches
    layer_s, attention_s, reduce_s = _layer_times(training)
    forward = layers * layer_s + _head_s(training)
    backward = (1.0 if training.adapter_rank else 2.0) * forward  # a frozen base needs no weight gradients
    recomputed_s = {"none": 0.0, "selective": attention_s, "full": layer_s}[training.recomputation]
    recomputation = layers * recomputed_s
    reduces = 2 * (3 if training.recomputation == "full" else 2)  # per layer and micro-batch
    all_reduces = layers * reduces * reduce_s
    hop = _hop_s(training)
    micro_batch = forward + backward + recomputation + all_reduces + 2 * hop
    return IterationTime(
        forward_s=count * forward,
        backward_s=count * backward,
        recomputation_s=count * recomputation,
        tensor_s=count * all_reduces,
        bubble_s=(training.pipeline - 1) / training.interleave * micro_batch + count * 2 * hop,
        data_s=_replicas_s(training, count * backward),
        optimiser_s=_optimiser_s(training),
    )


def mfu(training: TrainingSetup, seconds: float) -> float:
    """Return the model FLOPs utilisation of an iteration that takes `seconds` (arXiv 2204.02311).

    The utilisation is `flops / (seconds * peak FLOP/s of all GPUs)`. `flops` consists of 6 FLOPs per trained parameter
    and token, and of the FLOPs of attention. A frozen parameter counts 4 FLOPs, because its gradient is not computed.
    """
    model = training.model
    tokens = training.batch * training.sequence
    base = model.layer_parameters + model.head_parameters
    flops = (4 * base + 6 * adapter_parameters(training)) * tokens if training.adapter_rank else 6 * base * tokens
    flops += 12 * model.layers * model.heads * model.head_dim * training.sequence * tokens
    return flops / (seconds * training.gpus * training.gpu.flops_per_s)


def _layer_times(training: TrainingSetup) -> tuple[float, float, float]:
    """Return three times in seconds. Each is a time of one layer in the forward pass of one micro-batch.

    - The time of the whole layer without its all-reduces.
    - The part of this time for the attention scores, and for their products with the values.
    - The time of one all-reduce.
    """
    model = training.model
    gpu = training.gpu
    tensor = training.tensor
    tokens = training.sequence * training.micro_batch
    number = _gemm_format(training)
    queries = model.heads * model.head_dim // tensor
    cache = max(1, model.kv_heads // tensor) * model.head_dim
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
    whole_split = tensor if training.sequence_parallel else 1
    elementwise_bytes = tokens * (24 * model.hidden / tensor + 10 * model.hidden / whole_split)
    elementwise = constant("training_passes") * elementwise_bytes / rates(gpu, number).bytes_per_s
    reduce = float(all_reduce_s(gpu.link_for(tensor), tensor, 2.0 * tokens * model.hidden, "nccl"))
    return gemm + core + elementwise, core, reduce


def _gemm_format(training: TrainingSetup) -> Format:
    """Return the number format in which a training step computes its GEMMs.

    Training quantises whole tensors with one scale, before a GEMM loads them. A GEMM therefore loads operands of the
    quantised size.
    """
    stored = training.gpu.effective_format(number_format(training.number))
    return replace(stored, operand_bytes=stored.activation_bytes)


def _scores_s(training: TrainingSetup, number: Format, heads: int) -> float:
    """Return the time that one layer needs for attention in the forward pass without FlashAttention.

    `number` is the number format, and `heads` is the number of heads on one GPU. Without FlashAttention, all attention
    scores are written to memory. The result is the sum of these times:

    - two batched GEMMs: one computes the scores, and the other multiplies them by the values.
    - softmax and dropout, which read and write 5 bytes per score.

    GEMMs with weights are not included.
    """
    rate = rates(training.gpu, number)
    scores = training.micro_batch * heads * training.sequence**2
    flops = 4 * scores * training.model.head_dim
    gemms = flops / rate.flops_per_s / constant("training_share")
    return gemms + constant("training_passes") * 5 * scores / rate.bytes_per_s


def _head_s(training: TrainingSetup) -> float:
    model = training.model
    tokens = training.sequence * training.micro_batch
    return float(gemm_s(training.gpu, number_format("bf16"), tokens, model.vocabulary // training.tensor, model.hidden))


def _hop_s(training: TrainingSetup) -> float:
    """Return the time to send the activations of a micro-batch from one pipeline stage to the next.

    Each stage is assumed to be on a separate node, so the link is that between machines.
    """
    if training.pipeline == 1:
        return 0.0
    message = 2.0 * training.sequence * training.micro_batch * training.model.hidden / training.tensor
    return float(ring_s(training.gpu.machine_link, 2, message, "point to point"))


def replicas_in_one_machine(training: TrainingSetup) -> bool:
    """Return True if a training job has several replicas, which exchange gradients over the link within a machine."""
    return training.data > 1 and training.gpus <= NODE_GPUS


def sends_in_machine(training: TrainingSetup) -> bool:
    """Return True if the GPUs within a machine exchange data in a training job."""
    return training.tensor > 1 or replicas_in_one_machine(training)


def sends_between_machines(training: TrainingSetup) -> bool:
    """Return True if machines exchange data in a training job.

    The model assumes that the stages of a pipeline are in different machines.
    """
    return training.pipeline > 1 or (training.data > 1 and not replicas_in_one_machine(training))


def _replicas_s(training: TrainingSetup, backward_s: float) -> float:
    """Return the time in seconds by which the all-reduce of the gradients makes an iteration longer.

    The replicas of a training job sum their gradients with an all-reduce. A part of the all-reduce happens during the
    backward pass, and does not make the iteration longer. `backward_s` is the duration of the backward pass. ZeRO stage
    3 transfers 1.5 times as many bytes, because it gathers the weights twice per iteration.
    """
    if training.data == 1:
        return 0.0
    parameters = training.model.layer_parameters
    if training.adapter_rank:
        parameters = adapter_parameters(training)
    trained = parameters / (training.tensor * training.pipeline)
    link = training.gpu.link if replicas_in_one_machine(training) else training.gpu.machine_link
    volume = trained * WEIGHT_BYTES * (1.5 if training.zero == 3 else 1.0)
    all_reduce = float(all_reduce_s(link, training.data, volume, "nccl"))
    return max(0.0, all_reduce - backward_s * constant("gradient_overlap"))


def _optimiser_s(training: TrainingSetup) -> float:
    """Return the duration of the optimiser step, which reads and writes every state of the trained parameters once.

    The frozen base of LoRA adapters is not read. With offloading, the states are in host memory. Gradients and
    parameters are then transferred over PCIe.
    """
    memory = predict_memory(training)
    parameter_bytes = memory.parameters
    if training.adapter_rank:
        trained = adapter_parameters(training) / (training.tensor * training.pipeline)
        parameter_bytes = trained * WEIGHT_BYTES / (training.data if training.zero >= 3 else 1)
    if not training.offload:
        bytes_per_s = rates(training.gpu, number_format("bf16")).bytes_per_s
        return (2 * memory.optimiser + memory.gradients + parameter_bytes) / bytes_per_s
    moved = memory.gradients + parameter_bytes
    pcie = training.gpu.pcie
    return moved / (pcie.bytes_per_s * pcie.share) + moved * 2 / constant("host_bytes_per_s")
