"""How long one step of an inference engine takes: every GEMM, attention, all-reduce and what lies between them.

A step takes `prompts` of `tokens` new tokens each (0 for none), and one more token for each of `decoding` sequences
that hold `context` tokens. Numbers or NumPy arrays; the parts are seconds. What the hardware allows at best is the same
without latencies and overheads, each resource at the data sheet's rate: `lower_bounds_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from loadgen.servers.hardware import Format, Framework, Gpu, HardwareError, ModelShape, constant, number_format
from loadgen.servers.hardware.kernels import (
    Seconds,
    all_reduce_s,
    decode_attention_s,
    gemm_s,
    prefill_attention_s,
    rates,
    ring_s,
)
from loadgen.servers.hardware.numeric import as_float, elementwise_max, where

ARCHITECTURES = {"standard": 2, "parallel": 1, "ladder": 2, "no-communication": 0}
"""All-reduces per layer. How they meet its blocks, after Ladder Residual (arXiv 2501.06589): each waits for its own;
attention and MLP share one; each runs beside the next block; there are none (what could be gained at most)."""
HEAD_FORMAT = "bf16"
"""Engines leave the output head in 16 bits where they quantise the rest (defaults of ModelOpt, AutoAWQ, vLLM)."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on GPUs: `tensor` of them share each layer, and `pipeline` groups of those share the layers."""

    gpu: Gpu
    model: ModelShape
    weights: Format
    framework: Framework
    tensor: int = 1
    pipeline: int = 1
    kv_bytes: float = 2.0
    """Of one value in the KV cache."""
    architecture: str = "standard"
    """How all-reduces meet the layers; see `ARCHITECTURES`."""

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise HardwareError(f"unknown architecture {self.architecture!r}: choose one of {', '.join(ARCHITECTURES)}")

    def with_kv_format(self, name: str) -> Deployment:
        """Return the same deployment with its KV cache in another number format. Raises HardwareError."""
        return replace(self, kv_bytes=number_format(name).weight_bytes)

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def kv_heads(self) -> int:
        """On each GPU: where there are fewer than GPUs, each holds one whole."""
        return -(-self.model.kv_heads // self.tensor)

    @property
    def kv_token_bytes(self) -> float:
        """KV cache of one token, over all layers, on all GPUs that hold it together."""
        copies = self.kv_heads * self.tensor / self.model.kv_heads
        return self.model.kv_values * self.kv_bytes * copies

    @property
    def weight_bytes(self) -> float:
        """Of all GPUs: layers as they are stored, output head and embedding in 16 bits."""
        model = self.model
        return model.layer_parameters * self.weights.weight_bytes + model.head_parameters * 2.0 * (2 - model.tied)

    def kv_tokens(self, memory_fraction: float) -> int:
        """Tokens of KV cache beside the weights in that part of the memory. Raises HardwareError for no room."""
        room_bytes = self.gpus * self.gpu.memory_bytes * memory_fraction - self.weight_bytes
        if (tokens := int(room_bytes / self.kv_token_bytes)) < 1:
            raise HardwareError(
                f"{self.model.name} does not fit {self.gpus} x {self.gpu.name} in {self.weights.name}: "
                "choose more GPUs (--tp), a larger GPU, a smaller model or a smaller format"
            )
        return tokens


@dataclass(frozen=True, slots=True)
class Step:
    """Where the time of a step goes, in seconds."""

    gemm: Seconds
    attention: Seconds
    all_reduce: Seconds
    elementwise: Seconds  # Norms, rotary embedding, activations, residuals
    layers: Seconds  # Launches and gaps, per layer
    step: Seconds  # Scheduling and sampling, per step and sequence

    @property
    def total(self) -> Seconds:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Gemm:
    """One of the GEMMs of a layer, or the output head, on one GPU: the weights are n by k."""

    name: str
    n: int
    k: int
    count: int  # In the whole model
    format: Format


GEMM_BLOCKS = (0, 0, 1, 1, 2)  # To which block of a layer each of `model_gemms` belongs: attention, MLP, neither


def model_gemms(deployment: Deployment) -> tuple[Gemm, ...]:
    """After Megatron-LM (arXiv 1909.08053): the first of each pair is split by columns, the second by rows."""
    model, tensor, stored = deployment.model, deployment.tensor, deployment.gpu.effective_format(deployment.weights)
    if stored.compute_type in ("fp8", "int8"):
        stored = replace(stored, operand_bytes=deployment.framework.scaled)
    heads, layers = -(-model.heads // tensor), model.layers
    wide = (model.mlp_matrices - 1) * model.intermediate // tensor
    qkv = (heads + 2 * deployment.kv_heads) * model.head_dim
    return (
        Gemm("QKV", qkv, model.hidden, layers, stored),
        Gemm("attention output", model.hidden, heads * model.head_dim, layers, stored),
        Gemm("gate and up" if model.mlp_matrices == 3 else "up", wide, model.hidden, layers, stored),
        Gemm("down", model.hidden, model.intermediate // tensor, layers, stored),
        Gemm("output head", model.vocabulary // tensor, model.hidden, 1, number_format(HEAD_FORMAT)),
    )


def predict_step(
    deployment: Deployment, prompts: Any = 0, tokens: Any = 0, decoding: Any = 0, context: Any = 0, before: Any = 0
) -> Step:
    """One step, as this module says; `before` tokens of each prompt are computed already. Under pipeline parallelism
    the sequences are split over the stages, and a step lasts until each has been through all of them."""
    gpu, model, framework = deployment.gpu, deployment.model, deployment.framework
    prompts, tokens, decoding, context = (as_float(each) for each in (prompts, tokens, decoding, context))
    rows = (prompts * tokens + decoding) / deployment.pipeline
    sequences = (prompts + decoding) / deployment.pipeline
    blocks: list[Any] = [0.0, 0.0, 0.0]  # attention, MLP, output head
    for block, each in zip(GEMM_BLOCKS, model_gemms(deployment), strict=True):
        m = sequences if block == 2 else rows
        blocks[block] = blocks[block] + gemm_s(gpu, each.format, elementwise_max(m, 1e-9), each.n, each.k)
    heads, dim = -(-model.heads // deployment.tensor), model.head_dim
    decode = decode_attention_s(
        gpu, decoding / deployment.pipeline, context, deployment.kv_heads, dim, deployment.kv_bytes
    )
    prefill = prefill_attention_s(gpu, prompts / deployment.pipeline, elementwise_max(tokens, 1), heads, dim, before)
    attention = where(decoding > 0, decode, 0) / framework.kv_share + where(prompts > 0, prefill, 0)
    message = rows * model.hidden * 2.0
    moved = rows * _elementwise_bytes(deployment) / rates(gpu, deployment.weights).bytes_per_s
    faster = where(prompts > 0, framework.prefill_share, 1.0)
    beside = [block / faster + (moved + framework.layer_s) / 2 for block in blocks[:2]]
    beside[0] = beside[0] + attention
    link = gpu.link_for(deployment.tensor)
    reduce = all_reduce_s(link, deployment.tensor, message, "nccl" if framework.nccl else "custom")
    if deployment.tensor > 1:
        reduce = reduce + framework.sync_s
    hop = ring_s(gpu.link_for(deployment.gpus), 2, message, "point to point") if deployment.pipeline > 1 else 0.0
    return Step(
        gemm=(model.layers * (blocks[0] + blocks[1]) + blocks[2]) / faster,
        attention=model.layers * attention,
        all_reduce=exposed_all_reduce_s(deployment.architecture, model.layers, reduce, *beside)
        + (deployment.pipeline - 1) * hop,
        elementwise=model.layers * moved,
        layers=model.layers * framework.layer_s + 0 * rows,
        step=framework.step_s + framework.sequence_s * sequences * deployment.pipeline,
    )


def _elementwise_bytes(deployment: Deployment) -> float:
    """What a layer reads and writes of each token outside GEMMs and attention, in 16 bits: two norms with residuals,
    on every GPU; rotary embedding and cache, and the activation of the MLP, split."""
    model = deployment.model
    rotary = 2 * (model.heads + model.kv_heads) * model.head_dim
    activation = model.mlp_matrices * model.intermediate
    return 2.0 * (constant("norm_passes") * model.hidden + (rotary + activation) / deployment.tensor)


def exposed_all_reduce_s(architecture: str, layers: int, reduce: Seconds, attention: Seconds, mlp: Seconds) -> Seconds:
    """What so many layers wait for their all-reduces. A ladder's runs beside the block that follows, and must still be
    joined; the last has none."""
    if architecture == "ladder":
        joining = constant("join_s")
        return (
            layers * elementwise_max(reduce - mlp, joining)
            + (layers - 1) * elementwise_max(reduce - attention, joining)
            + reduce
        )
    return ARCHITECTURES[architecture] * layers * reduce


def lower_bounds_s(
    deployment: Deployment, prompts: Any = 0, tokens: Any = 0, decoding: Any = 0, context: Any = 0
) -> dict[str, Any]:
    """The least time of a step by each resource alone, in seconds: no step is faster than the slowest of them."""
    gpu, model = deployment.gpu, deployment.model
    prompts, decoding = prompts / deployment.pipeline, decoding / deployment.pipeline  # as `predict_step` has it
    rows, sequences = prompts * tokens + decoding, prompts + decoding
    computing: Any = 0.0
    reading: Any = 0.0
    for gemm in model_gemms(deployment):
        m = sequences if gemm.count == 1 else rows
        peak = gpu.peaks[gemm.format.compute_type]
        computing = computing + gemm.count * 2 * m * gemm.n * gemm.k / peak
        reading = reading + gemm.count * gemm.n * gemm.k * gemm.format.weight_bytes
    heads = model.heads / deployment.tensor
    pairs = prompts * tokens * (tokens + 1) / 2 + decoding * context
    computing = computing + 4 * model.layers * heads * model.head_dim * pairs / gpu.peaks["bf16"]
    reading = reading + deployment.kv_token_bytes / deployment.tensor * (decoding * context + prompts * tokens)
    return {
        "compute": computing,
        "memory": reading / gpu.memory_bytes_per_s,
        "network": ARCHITECTURES[deployment.architecture] * model.layers * all_reduce_lower_bound_s(deployment, rows),
    }


def all_reduce_lower_bound_s(deployment: Deployment, rows: Any) -> Seconds:
    """The least time for one all-reduce of so many rows: each byte goes up and comes down once where the switch adds,
    or twice but for one part around a ring."""
    link, tensor = deployment.gpu.link_for(deployment.tensor), deployment.tensor
    crossing = min(1.0, tensor - 1.0) if link.switch_share else 2 * (tensor - 1) / tensor
    return rows * deployment.model.hidden * 2.0 * crossing / link.bytes_per_s
