"""Predicts how long a step takes for models with experts, latent attention, sliding windows or linear attention.

The functions `predict_step` and `lower_bounds_s` of inference.py call `predict_mixture_step` and
`mixture_lower_bounds_s` for such models.

- Routing: a router chooses `k` of `E` experts for each token. If every expert is equally likely, `n` tokens use
  `E * (1 - (1 - k / E)**n)` different experts on average. A step reads only the weights of these experts.
- Tensor parallelism splits every expert. Expert parallelism gives each GPU whole experts, and the step waits for the
  busiest GPU.
- Attention data parallelism: groups of GPUs compute attention for different sequences. Tokens then travel to the GPUs
  of their experts and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loadgen.servers.hardware import Format, constant, mixture_overheads, number_format
from loadgen.servers.hardware.attention import (
    FULL,
    LINEAR,
    StepSequences,
    WeightMatrix,
    attention_bytes,
    attention_flops,
    attention_gemms_s,
    attention_kernel_s,
    attention_layers,
    attention_matrices,
)
from loadgen.servers.hardware.kernels import all_reduce_s, gemm_s, rates
from loadgen.servers.hardware.numeric import as_float, elementwise_max, elementwise_min, where
from loadgen.servers.hardware.shapes import Experts

if TYPE_CHECKING:
    from loadgen.servers.hardware.inference import Deployment

ROW_TILE = 128
"""Largest number of rows that a tile of a grouped GEMM has."""
SMALL_TILE = 16
"""Smallest number of rows that a tile of a grouped GEMM has. It is used if each expert has few rows, as in decode."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Expected work in a layer with experts, for the GPU that has the most work."""

    touched: Any
    """Number of different experts on this GPU that at least one token uses."""
    rows: Any
    """Number of pairs of a token and an expert on this GPU."""


def touched_experts(experts: Experts, tokens: Any) -> Any:
    """Return the expected number of different experts that `tokens` tokens use, if all are equally likely."""
    independent = as_float(tokens) ** constant("routing_independence")
    return experts.count * (1 - (1 - experts.per_token / experts.count) ** independent)


def route(experts: Experts, tokens: Any, groups: int) -> Routing:
    """Return the expected work of the busiest group of GPUs. Each of the `groups` groups holds a part of the experts.

    The tokens choose experts at random, so some groups get more work than others. The work of one group has a binomial
    distribution. The result is its mean plus `sqrt(2 * ln(groups))` standard deviations. This sum approximates the
    expected maximum of `groups` normal variables.
    """
    mean_touched = touched_experts(experts, tokens) / groups
    mean_rows = as_float(tokens) * experts.per_token / groups
    if groups == 1:
        return Routing(mean_touched, mean_rows)
    deviations = math.sqrt(2 * math.log(groups))
    local = experts.count / groups
    touched_share = mean_touched / local
    touched = mean_touched + deviations * (local * touched_share * (1 - touched_share)) ** 0.5
    rows = mean_rows + deviations * (mean_rows * (1 - 1 / groups)) ** 0.5
    pairs = as_float(tokens) * min(experts.per_token, local)
    rows = elementwise_min(rows, pairs)
    return Routing(elementwise_min(touched, elementwise_min(local, rows)), rows)


def grouped_gemm_s(deployment: Deployment, stored: Format, routing: Routing, n: float, k: float) -> Any:
    """Return the duration of a grouped GEMM: one kernel that computes a GEMM for every expert that has tokens.

    `stored` is the number format of the weights. The GEMM of an expert is `[rows, k] @ [k, n]`, with one row per token
    of the expert. The kernel computes whole tiles of rows. The last tile of an expert is half empty on average.
    """
    gpu = deployment.gpu
    rate = rates(gpu, stored)
    per_expert = routing.rows / elementwise_max(routing.touched, 1e-9)
    tile = elementwise_min(ROW_TILE, elementwise_max(SMALL_TILE, per_expert))
    padded = routing.rows + routing.touched * tile / 2
    computing = 2 * padded * n * k / (rate.flops_per_s * constant("grouped_compute"))
    reading = grouped_bytes(stored, routing, n, k) / (rate.bytes_per_s * stored.grouped_read)
    overlap = constant("gemm_overlap")
    return gpu.architecture.launch_s + (computing**overlap + reading**overlap) ** (1 / overlap)


def grouped_bytes(stored: Format, routing: Routing, n: float, k: float) -> Any:
    """Return the bytes that a grouped GEMM reads and writes.

    A grouped GEMM multiplies the tokens of each expert by the weight matrix of this expert. Experts without tokens are
    left out.

    - `stored` is the number format of the weights and the activations.
    - `routing` states how many experts have tokens, and how many tokens they have in total.
    - `k` is the number of values of a token, and `n` is the number of values of its result. The result has 16 bits per
      value.
    """
    return routing.touched * n * k * stored.weight_bytes + routing.rows * (k * stored.activation_bytes + 2 * n)


def predict_mixture_step(deployment: Deployment, sequences: StepSequences, head: Format) -> dict[str, Any]:
    """Return the predicted seconds of one step, by component: the fields of `inference.Step`.

    `sequences` describes the sequences on all GPUs together. `head` is the number format of the output head.
    """
    model = deployment.model
    framework = deployment.framework
    overheads = mixture_overheads(framework.name)
    local = _share_of_step(deployment, sequences)
    rows = local.rows
    stored = expert_format(deployment)
    prefill_speed = where(sequences.prompts > 0, framework.prefill_share, 1.0)

    gemms: Any = 0.0
    attention: Any = 0.0
    for kind, layers in attention_layers(deployment):
        gemms = gemms + layers * attention_gemms_s(deployment, kind, attention_format(deployment), rows)
        prefill, decode = attention_kernel_s(deployment, kind, local)
        decode = where(local.decoding > 0, decode, 0) / framework.kv_share
        attention = attention + layers * (where(local.prompts > 0, prefill, 0) + decode)
    dense_layers = model.layers - model.moe_layers
    if dense_layers:
        gemms = gemms + dense_layers * _mlp_gemms_s(deployment, stored, rows, model.intermediate)
    if model.experts:
        all_rows = _micro_batch(deployment, sequences).rows
        gemms = gemms + model.moe_layers * _expert_gemms_s(deployment, stored, rows, all_rows)
    columns = model.vocabulary // deployment.tensor
    gemms = gemms + gemm_s(deployment.gpu, head, elementwise_max(local.outputs, 1e-9), columns, model.hidden)

    elementwise = model.layers * rows * _elementwise_bytes(deployment)
    elementwise = elementwise / rates(deployment.gpu, stored).bytes_per_s
    network = _network_s(deployment, rows) + deployment.hops_s(rows * model.hidden * 2.0)
    latent_s = overheads.latent_layer_s * (model.layers if model.latent else 0)
    linear_s = overheads.linear_layer_s * model.linear_layers
    prompt_layer_s = where(sequences.prompts > 0, overheads.prompt_layer_s, 0.0)
    layers_s = model.layers * (overheads.layer_s + prompt_layer_s) + latent_s + linear_s
    whole = _share_of_step(replace(deployment, pipeline=1), sequences)  # each group has a scheduler
    return {
        "gemm": gemms / prefill_speed,
        "attention": attention,
        "all_reduce": network,
        "elementwise": elementwise,
        "layers": layers_s + 0 * rows,
        "step": overheads.step_s + overheads.sequence_s * (whole.prompts + whole.decoding),
    }


def attention_format(deployment: Deployment) -> Format:
    """Return the number format of attention weights.

    Some formats of mixture-of-experts models quantise only the experts.
    """
    stored = expert_format(deployment)
    if deployment.model.experts and deployment.weights.attention_format:
        return number_format(deployment.weights.attention_format)
    return stored


def expert_format(deployment: Deployment) -> Format:
    """Return the number format of experts and dense MLPs on the GPU.

    The format states how the weights are stored, and in what number format their GEMMs compute.
    """
    weights = deployment.weights
    if weights.name == "fp8" and deployment.model.experts:  # published checkpoints of mixtures have one scale per block
        weights = number_format("fp8-block")
    stored = deployment.gpu.effective_format(weights)
    if stored.compute_type == "fp4" and stored.activation_bytes >= 1:  # 4-bit weights and 8-bit activations
        return replace(stored, compute_type="fp8")
    if stored.compute_type == "bf16" and stored.weight_bytes < 1:  # tensor cores get the weights after a conversion
        return replace(stored, grouped_read=min(stored.grouped_read, constant("converted_read")))
    return stored


def _micro_batch(deployment: Deployment, sequences: StepSequences) -> StepSequences:
    """Return the sequences of the largest micro-batch of a step.

    Pipeline parallelism divides the sequences of a step into micro-batches.
    """
    prompts, decoding = deployment.micro_batch(sequences.prompts), deployment.micro_batch(sequences.decoding)
    return replace(sequences, prompts=prompts, decoding=decoding)


def _share_of_step(deployment: Deployment, sequences: StepSequences) -> StepSequences:
    """Return the share of `sequences` that the busiest attention group of a pipeline stage computes at a time.

    A pipeline stage computes one micro-batch at a time. With data-parallel attention, its GPUs form attention groups,
    and the sequences of the micro-batch are divided equally among these groups. However, a single prompt is not
    divided. If there are fewer prompts than groups, the busiest group computes one whole prompt.
    """
    batch = _micro_batch(deployment, sequences)
    share = 1 / deployment.attention_data
    prompts = elementwise_max(batch.prompts * share, elementwise_min(batch.prompts, 1.0))
    return replace(batch, prompts=prompts, decoding=batch.decoding * share)


def _mlp_gemms_s(deployment: Deployment, stored: Format, rows: Any, intermediate: int) -> Any:
    """Return the time of all GEMMs in one dense MLP or one shared expert.

    `rows` is the number of tokens, and `intermediate` is the width of the hidden layer of the MLP or the expert.
    """
    rows = elementwise_max(rows, 1e-9)
    return sum(
        gemm_s(deployment.gpu, stored, rows, matrix.n, matrix.k) for matrix in mlp_matrices(deployment, intermediate)
    )


def mlp_matrices(deployment: Deployment, intermediate: int) -> list[WeightMatrix]:
    """Return the weight matrices of a dense MLP or of a shared expert on one GPU."""
    hidden = deployment.model.hidden
    split = max(1, intermediate // deployment.tensor)
    return [WeightMatrix("gate and up", 2 * split, hidden), WeightMatrix("down", hidden, split)]


def _expert_gemms_s(deployment: Deployment, stored: Format, rows: Any, all_rows: Any) -> Any:
    """Return the duration in seconds of the router, the experts and the shared expert in one layer.

    An attention group is a group of GPUs that computes attention for some of the sequences. The router and the shared
    expert process the tokens of one group: `rows` tokens. The experts process the tokens of all groups: `all_rows`
    tokens.
    """
    model = deployment.model
    experts = model.experts
    if experts is None:
        raise ValueError(model.name)
    router = gemm_s(deployment.gpu, number_format("bf16"), elementwise_max(rows, 1e-9), experts.count, model.hidden)
    routing = route(experts, all_rows, deployment.expert_parallel)
    split = experts.intermediate / deployment.expert_tensor
    wide = grouped_gemm_s(deployment, stored, routing, 2 * split, model.hidden)
    narrow = grouped_gemm_s(deployment, stored, routing, model.hidden, split)
    shared: Any = 0.0
    if experts.shared_intermediate:
        shared = _mlp_gemms_s(deployment, stored, rows, experts.shared_intermediate)
    return router + wide + narrow + shared


def _elementwise_bytes(deployment: Deployment) -> float:
    """Return the bytes per token that an average layer reads and writes in kernels other than GEMMs and attention.

    All values have 16 bits. Every layer has norms and a rotary embedding. A layer with experts also copies each token
    to its experts, applies the activation function of the experts, and adds the results of the experts.
    """
    model = deployment.model
    values: float = constant("norm_passes") * model.hidden
    values += 2 * (model.heads + model.kv_heads) * model.head_dim / deployment.tensor
    if model.experts:
        share = model.moe_layers / model.layers / deployment.expert_parallel
        expert_values = 3 * model.hidden + 3 * model.experts.intermediate / deployment.expert_tensor
        values += share * model.experts.per_token * expert_values
    return 2.0 * values


def _network_s(deployment: Deployment, rows: Any) -> Any:
    """Return the seconds of communication in all layers for `rows` tokens per attention group.

    An attention group consists of GPUs that compute attention for the same sequences.

    - If there is one group, each layer has two all-reduces.
    - If there are several groups, each layer has one all-reduce within the group. Each layer with experts also has two
      all-to-alls, which send tokens to their experts and back.
    """
    model = deployment.model
    framework = deployment.framework
    message = rows * model.hidden * 2.0
    library = "nccl" if framework.nccl else "custom"
    reduce: Any = 0.0
    if deployment.tensor > 1:
        reduce = all_reduce_s(deployment.gpu.link_for(deployment.tensor), deployment.tensor, message, library)
        reduce = reduce + framework.sync_s
    if deployment.attention_data == 1:
        return 2 * model.layers * reduce
    link = deployment.gpu.link_for(deployment.stage_gpus)
    groups = deployment.expert_parallel * deployment.expert_tensor
    tokens = rows / deployment.tensor  # each GPU of an attention group sends its share
    copies = groups * (1 - (1 - 1 / groups) ** (model.experts.per_token if model.experts else 1))
    sent = tokens * copies * model.hidden * (2.0 + 2.0) * (groups - 1) / groups
    exchange = 2 * link.nccl_s + sent / (link.bytes_per_s * link.share)
    return model.layers * reduce + model.moe_layers * exchange


def mixture_lower_bounds_s(deployment: Deployment, sequences: StepSequences, head: Format) -> dict[str, Any]:
    """Return the minimum time in seconds for which one step occupies `compute`, `memory` and `network`.

    `sequences` are the sequences that the step computes on all GPUs together. `head` is the number format of the output
    head.
    """
    model = deployment.model
    gpu = deployment.gpu
    sequences = replace(  # a limit: a prompt may be divided into chunks, so that all stages compute it at once
        sequences,
        prompts=sequences.prompts / deployment.pipeline,
        decoding=sequences.decoding / deployment.pipeline,
    )
    local = _share_of_step(replace(deployment, pipeline=1), sequences)
    rows = local.rows
    stored = expert_format(deployment)
    attention_stored = attention_format(deployment)
    compute_s: Any = 0.0
    read: Any = 0.0
    for kind, layers in attention_layers(deployment):
        values = sum(matrix.n * matrix.k for matrix in attention_matrices(deployment, kind))
        flops = 2.0 * rows * values
        compute_s = compute_s + layers * flops / gpu.peaks[attention_stored.compute_type]
        compute_s = compute_s + layers * attention_flops(deployment, kind, local) / gpu.peaks["bf16"]
        read = read + layers * (values * attention_stored.weight_bytes + attention_bytes(deployment, kind, local))
    dense: float = 3 * model.hidden * model.intermediate / deployment.tensor * (model.layers - model.moe_layers)
    peak = gpu.peaks[stored.compute_type]
    if model.experts:
        experts = model.experts
        all_rows = sequences.rows
        dense += model.moe_layers * 3 * model.hidden * experts.shared_intermediate / deployment.tensor
        one_expert = 3 * model.hidden * experts.intermediate / deployment.stage_gpus
        compute_s = compute_s + 2 * model.moe_layers * all_rows * experts.per_token * one_expert / peak
        read = read + model.moe_layers * touched_experts(experts, all_rows) * one_expert * stored.weight_bytes
    compute_s = compute_s + 2 * rows * dense / peak
    read = read + dense * stored.weight_bytes
    head_values = model.head_parameters / deployment.tensor
    compute_s = compute_s + 2 * local.outputs * head_values / gpu.peaks[head.compute_type]
    read = read + head_values * head.weight_bytes
    link = deployment.gpu.link_for(deployment.tensor)
    crossings = min(1.0, deployment.tensor - 1.0) if link.switch_share else 2 * (1 - 1 / deployment.tensor)
    messages = 2 * model.layers if deployment.attention_data == 1 else model.layers
    return {
        "compute": compute_s,
        "memory": read / gpu.memory_bytes_per_s,
        "network": messages * rows * model.hidden * 2.0 * crossings / link.bytes_per_s,
    }


@dataclass(frozen=True, slots=True)
class LayerGemm:
    """A matrix multiplication of one layer on one GPU, for the table of `loadgen limits`."""

    name: str
    m: Any  # Rows; for experts, those of one touched expert
    n: int
    k: int
    format: Format
    copies: float = 1.0  # Number of such multiplications in one kernel: the touched experts
    seconds: Any = None  # Expected duration of all copies; None for a single GEMM

    @property
    def all_reduced(self) -> bool:
        """True if the results are partial sums on each GPU, which an all-reduce adds."""
        return self.name in ("attention output", "experts down")


def layer_gemms(deployment: Deployment, tokens: int) -> list[LayerGemm]:
    """Return the GEMMs of each kind of layer for `tokens` tokens in one step."""
    model = deployment.model
    experts = model.experts
    stored = expert_format(deployment)
    rows = max(1, tokens // deployment.attention_data)
    gemms = [
        LayerGemm(matrix.name, rows, matrix.n, matrix.k, attention_format(deployment))
        for kind in dict.fromkeys(LINEAR if kind == LINEAR else FULL for kind, _ in attention_layers(deployment))
        for matrix in attention_matrices(deployment, kind)
    ]
    if model.layers > model.moe_layers:
        gemms += [
            LayerGemm(f"dense {matrix.name}", rows, matrix.n, matrix.k, stored)
            for matrix in mlp_matrices(deployment, model.intermediate)
        ]
    if experts is None:
        return gemms
    routing = route(experts, tokens, deployment.expert_parallel)
    split = experts.intermediate // deployment.expert_tensor
    each = max(1, round(float(routing.rows / routing.touched)))
    for name, n, k in (("experts gate, up", 2 * split, model.hidden), ("experts down", model.hidden, split)):
        seconds = grouped_gemm_s(deployment, stored, routing, n, k)
        gemms.append(LayerGemm(name, each, n, k, stored, float(routing.touched), seconds))
    if experts.shared_intermediate:
        gemms += [
            LayerGemm(f"shared {matrix.name}", rows, matrix.n, matrix.k, stored)
            for matrix in mlp_matrices(deployment, experts.shared_intermediate)
        ]
    return gemms
