"""Matrices and kernels of attention layers: ordinary heads, latent attention, sliding windows and linear attention.

A model may have layers of several kinds. `attention_layers` lists the kinds of a model with the number of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadgen.servers.hardware import Format
from loadgen.servers.hardware.kernels import Rates, decode_attention_s, gemm_s, prefill_attention_s, rates
from loadgen.servers.hardware.numeric import as_float, elementwise_max, elementwise_min

if TYPE_CHECKING:
    from loadgen.servers.hardware.inference import Deployment

FULL = "full"
WINDOW = "window"
LINEAR = "linear"
STATE_BYTES = 4.0
"""Bytes per value in the state of linear attention, which engines keep in fp32."""
LINEAR_CHUNK = 64
"""Tokens that linear attention processes at a time in prefill."""


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """A weight matrix of one layer on one GPU, with `k` rows and `n` columns."""

    name: str
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class StepSequences:
    """The sequences that one step computes: prompts, and sequences that decode. Each count is a number or an array."""

    prompts: Any
    tokens: Any  # New tokens per prompt
    before: Any  # Tokens of each prompt that are already in the KV cache
    decoding: Any
    context: Any  # Tokens that each decoding sequence holds
    queries: int = 1  # Tokens that the step computes for each decoding sequence; more than 1 with speculation

    @property
    def rows(self) -> Any:
        """Number of tokens in the step."""
        return self.prompts * self.tokens + self.decoding * self.queries

    @property
    def outputs(self) -> Any:
        """Number of tokens for which the output head computes logits in this step.

        A prompt needs logits for one token. A decoding sequence needs logits for each of its `queries` new tokens.
        """
        return self.prompts + self.decoding * self.queries


def attention_layers(deployment: Deployment) -> list[tuple[str, int]]:
    """Return the kinds of attention layers that the model has, each with the number of layers."""
    model = deployment.model
    kinds = [(FULL, model.full_layers), (WINDOW, model.window_layers), (LINEAR, model.linear_layers)]
    return [(kind, layers) for kind, layers in kinds if layers]


def attention_matrices(deployment: Deployment, kind: str) -> list[WeightMatrix]:
    """Return the weight matrices of one attention layer on one GPU.

    Tensor parallelism splits heads. The matrices that compress queries, keys and values in latent attention are not
    split, so every GPU computes them completely.
    """
    model = deployment.model
    tensor = deployment.tensor
    hidden = model.hidden
    if kind == LINEAR and model.linear:
        linear = model.linear
        return [
            WeightMatrix("linear attention input", -(-linear.input_size // tensor), hidden),
            WeightMatrix("linear attention output", hidden, linear.value_heads * linear.head_dim // tensor),
        ]
    heads = -(-model.heads // tensor)
    if model.latent:
        latent = model.latent
        query_size = heads * (model.head_dim + latent.rope_dim)
        matrices = [WeightMatrix("latent down", latent.q_rank + latent.cached_values, hidden)]
        matrices.append(WeightMatrix("latent query", query_size, latent.q_rank or hidden))
        matrices.append(WeightMatrix("latent key", heads * model.head_dim, latent.kv_rank))
        matrices.append(WeightMatrix("latent value", heads * latent.value_dim, latent.kv_rank))
        matrices.append(WeightMatrix("attention output", hidden, heads * latent.value_dim))
        return matrices
    columns = ((1 + model.gated) * heads + 2 * deployment.kv_heads) * model.head_dim
    return [WeightMatrix("QKV", columns, hidden), WeightMatrix("attention output", hidden, heads * model.head_dim)]


def attention_gemms_s(deployment: Deployment, kind: str, stored: Format, rows: Any) -> Any:
    """Return the duration of all GEMMs of one attention layer for `rows` tokens.

    `stored` is the number format of the weights.
    """
    gpu = deployment.gpu
    rows = elementwise_max(rows, 1e-9)
    return sum(gemm_s(gpu, stored, rows, matrix.n, matrix.k) for matrix in attention_matrices(deployment, kind))


def attention_kernel_s(deployment: Deployment, kind: str, sequences: StepSequences) -> tuple[Any, Any]:
    """Return the durations of the attention kernels of one layer as (prefill, decode).

    The durations are meaningless, but finite, if there are no prompts or no decoding sequences.
    """
    if kind == LINEAR:
        return _linear_s(deployment, sequences)
    if deployment.model.latent:
        return _latent_s(deployment, sequences)
    model = deployment.model
    gpu = deployment.gpu
    heads = -(-model.heads // deployment.tensor)
    context, before = sequences.context, sequences.before
    tokens = elementwise_max(sequences.tokens, 1)
    if kind == WINDOW:
        context = elementwise_min(context, model.window)
    decode = decode_attention_s(
        gpu, sequences.decoding, context, deployment.kv_heads, model.head_dim, deployment.kv_bytes
    )
    if kind == WINDOW:  # each block of queries attends to the window before it, as if it were a prompt of its own
        blocks = sequences.prompts * elementwise_max(tokens / model.window, 1)
        length = elementwise_min(tokens, model.window)
        prefill = prefill_attention_s(gpu, blocks, length, heads, model.head_dim, elementwise_min(before, model.window))
    else:
        prefill = prefill_attention_s(gpu, sequences.prompts, tokens, heads, model.head_dim, before)
    return prefill, decode


def _latent_s(deployment: Deployment, sequences: StepSequences) -> tuple[Any, Any]:
    """Return the durations of latent attention in one layer as (prefill, decode).

    Latent attention caches one compressed vector per token. Prefill expands these vectors to the keys and values of
    each head. Decode multiplies the queries by the expansion matrix instead. All heads then share the compressed
    vectors, which are read only once.
    """
    model = deployment.model
    latent = model.latent
    if latent is None:
        raise ValueError(model.name)
    gpu = deployment.gpu
    heads = -(-model.heads // deployment.tensor)
    key_size = model.head_dim + latent.rope_dim
    prefill = prefill_attention_s(
        gpu,
        sequences.prompts,
        elementwise_max(sequences.tokens, 1),
        heads,
        (key_size + latent.value_dim) / 2,
        sequences.before,
    )
    decoding, context = sequences.decoding, sequences.context
    reading = decode_attention_s(gpu, decoding, context, 1, latent.cached_values / 2, deployment.kv_bytes)
    flops = 2.0 * decoding * sequences.queries * context * heads * (latent.cached_values + latent.kv_rank)
    computing = flops / (gpu.peaks["bf16"] * gpu.architecture.attention_share)
    return prefill, (reading**2 + computing**2) ** 0.5


def _linear_s(deployment: Deployment, sequences: StepSequences) -> tuple[Any, Any]:
    """Return the durations of linear attention in one layer as (prefill, decode).

    Linear attention has a state of constant size per sequence instead of a KV cache. Decode reads and writes the state
    of each sequence. Prefill divides a prompt into chunks of LINEAR_CHUNK tokens, and multiplies the tokens of a chunk
    by each other and by the state.
    """
    linear = deployment.model.linear
    if linear is None:
        raise ValueError(deployment.model.name)
    gpu = deployment.gpu
    rate: Rates = rates(gpu, Format("any", 2.0, 2.0, "bf16", 2.0))
    state_bytes = linear.state_values / deployment.tensor * STATE_BYTES
    decode = gpu.architecture.attention_launch_s + 2 * as_float(sequences.decoding) * state_bytes / rate.bytes_per_s
    rows = sequences.prompts * sequences.tokens
    heads = linear.value_heads / deployment.tensor
    flops = 4.0 * rows * heads * linear.head_dim * (LINEAR_CHUNK + linear.head_dim)
    computing = flops / (gpu.peaks["bf16"] * gpu.architecture.attention_share)
    moved = rows * heads * linear.head_dim * 4 * 2.0 + 2 * sequences.prompts * state_bytes
    return gpu.architecture.attention_launch_s + computing + moved / rate.bytes_per_s, decode


def attention_flops(deployment: Deployment, kind: str, sequences: StepSequences) -> Any:
    """Return the minimum FLOPs of attention in one layer on one GPU. The GEMMs with weight matrices are not included.

    `kind` is the kind of attention in the layer: FULL, WINDOW or LINEAR. `sequences` contains the sequences of the
    step.
    """
    model = deployment.model
    heads = model.heads / deployment.tensor
    tokens, context = sequences.tokens, sequences.context
    if kind == LINEAR and model.linear:
        return 4.0 * sequences.rows * model.linear.state_values / deployment.tensor
    if kind == WINDOW:
        context = elementwise_min(context, model.window)
        pairs = sequences.prompts * tokens * elementwise_min((tokens + 1) / 2, model.window)
    else:
        pairs = sequences.prompts * tokens * (tokens + 1) / 2
    if model.latent:
        prefill = 2 * (model.head_dim + model.latent.rope_dim + model.latent.value_dim)
        decode = 2 * (model.latent.cached_values + model.latent.kv_rank)
        return heads * (prefill * pairs + decode * sequences.decoding * context)
    return 4.0 * heads * model.head_dim * (pairs + sequences.decoding * context)


def attention_bytes(deployment: Deployment, kind: str, sequences: StepSequences) -> Any:
    """Return the minimum bytes of KV cache or state that one attention layer reads or writes on one GPU.

    `kind` is the kind of the layer, and `sequences` contains the sequences of the step.
    """
    model = deployment.model
    if kind == LINEAR and model.linear:
        return 2 * sequences.decoding * model.linear.state_values / deployment.tensor * STATE_BYTES
    context = elementwise_min(sequences.context, model.window) if kind == WINDOW else sequences.context
    cached = sequences.decoding * context + sequences.prompts * sequences.tokens
    values = model.latent.cached_values if model.latent else 2 * deployment.kv_heads * model.head_dim
    return cached * values * deployment.kv_bytes
