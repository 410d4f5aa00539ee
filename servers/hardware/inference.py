"""Predicts how long one step of an inference engine takes: GEMMs, attention, all-reduces and overheads.

A step processes two groups of sequences:

- prefill: `prompts` sequences of `tokens` new tokens each.
- decode: `decoding` sequences that hold `context` tokens each and get one more token.

Arguments are numbers or NumPy arrays, and times are in seconds. `predict_step` returns expected times. `lower_bounds_s`
returns minimum times, at data-sheet rates and without latencies and overheads.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from loadgen.servers.hardware import (
    Format,
    Framework,
    Gpu,
    HardwareError,
    ModelShape,
    constant,
    mixture_overheads,
    number_format,
)
from loadgen.servers.hardware.attention import StepSequences
from loadgen.servers.hardware.experts import mixture_lower_bounds_s, predict_mixture_step
from loadgen.servers.hardware.kernels import (
    Seconds,
    all_reduce_s,
    decode_attention_s,
    gemm_s,
    prefill_attention_s,
    rates,
    ring_s,
    whole_context_attention_s,
)
from loadgen.servers.hardware.numeric import as_float, elementwise_max, elementwise_min, where
from loadgen.servers.hardware.speculation import DEFAULT_ACCEPTANCE, TokenDraft

ARCHITECTURES = {"standard": 2, "parallel": 1, "ladder": 2, "no-communication": 0}
"""All-reduces per layer, by architecture (Ladder Residual, arXiv 2501.06589).

- `standard`: each block waits for its all-reduce.
- `parallel`: attention and MLP share one all-reduce.
- `ladder`: each all-reduce runs during the next block.
- `no-communication`: there are no all-reduces, which shows the maximum gain.
"""
LARGE_GPU_BYTES = 70 * 2**30
SMALL_GPU_TOKENS = 2048
"""Maximum tokens in one step on GPUs with less than LARGE_GPU_BYTES (vLLM, `get_batch_defaults`)."""
SAMPLED_SEQUENCES = 256
"""Number of sequences for which an engine reserves memory to sample the next token."""
HEAD_FORMAT = "bf16"
"""Engines keep the output head in 16 bits when they quantise the rest (defaults of ModelOpt, AutoAWQ, vLLM)."""


CHUNKED_PREFILL = ("mixed", "separate", "off")
"""Ways to combine prompts with decoding.

- `mixed`: chunks of prompts share steps with decoding (default of vLLM; SGLang: --enable-mixed-chunk).
- `separate`: chunks of prompts are computed in steps without decoding (default of SGLang).
- `off`: prompts are computed as a whole (vLLM: --no-enable-chunked-prefill; SGLang: --chunked-prefill-size -1). Whether
  they share steps with decoding remains as in the default of the engine.
"""
NODE_GPUS = 8
"""Number of GPUs in a usual machine with NVLink (DGX, HGX)."""


def heads_problem(shape: ModelShape, tensor: int) -> str:
    """Return why no engine can split the attention heads of a model over `tensor` GPUs, or "" if this is possible."""
    if shape.heads % tensor == 0:
        return ""
    return f"--tp {tensor} does not divide the {shape.heads} attention heads of {shape.name}"


def check_heads(shape: ModelShape, tensor: int) -> None:
    """Raise HardwareError if the attention heads of a model cannot be split over `tensor` GPUs."""
    problem = heads_problem(shape, tensor)
    if problem:
        raise HardwareError(
            f"{problem}: every engine needs whole heads on each GPU; choose a --tp such as 1, 2, 4 or 8"
        )


def default_kv_bytes(gpu: Gpu, weights: Format, framework: Framework) -> float:
    """Return the bytes per value in the KV cache that an engine uses by default with these weights on this GPU."""
    fp8 = weights.compute_type in ("fp8", "fp4") and (framework.fp8_kv or "fp4" in gpu.peaks)
    return number_format("fp8" if fp8 else "bf16").weight_bytes


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model, and how it is served: the GPU, the inference engine (`framework`), and the number of GPUs.

    The layers of the model are divided into `pipeline` stages. The GPUs of a stage form `attention_data` groups of
    `tensor` GPUs each. By default, a stage has one group. The number of GPUs is `pipeline * attention_data * tensor`.
    """

    gpu: Gpu
    model: ModelShape
    weights: Format
    framework: Framework
    tensor: int = 1
    pipeline: int = 1
    kv_bytes: float = 2.0
    """Bytes per value in the KV cache."""
    attention_data: int = 1
    """Groups of `tensor` GPUs that compute attention for different sequences and share the experts."""
    expert_parallel: int = 1
    """Groups of GPUs among which the experts are divided. Each expert is split over the GPUs of its group."""
    speculation: TokenDraft | None = None
    """Speculative decoding; None if each step adds one token to each sequence."""
    architecture: str = "standard"
    """A key of `ARCHITECTURES`. Raises HardwareError for any other value."""
    cache_hit_rate: float = 0.0
    """Share of the tokens of each prompt that the engine finds in its prefix cache and does not compute."""
    chunked_prefill: str = ""
    """How the engine combines prompts with decoding: a value of CHUNKED_PREFILL, or "" for the engine's default."""
    host: tuple[float, float] | None = None
    """Measured overhead of the host CPU in seconds: per step, and per sequence of a step. None stands for the values of
    the engine in the hardware tables."""
    node_gpus: int = NODE_GPUS
    """Number of GPUs in one machine. Pipeline stages in different machines communicate over InfiniBand."""

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise HardwareError(f"unknown architecture {self.architecture!r}: choose one of {', '.join(ARCHITECTURES)}")
        if not 0 <= self.cache_hit_rate <= 1:
            raise HardwareError(f"--cache-hit-rate {self.cache_hit_rate:g}: give a share from 0 to 1")
        check_heads(self.model, self.tensor)
        if self.node_gpus < min(self.stage_gpus, NODE_GPUS):
            raise HardwareError(
                f"--gpus-per-node {self.node_gpus}: the {self.stage_gpus} GPUs that share a layer must be in one "
                "machine; choose fewer GPUs per layer (--tp), and more pipeline stages (--pp)"
            )
        if self.expert_parallel > 1 or self.attention_data > 1:
            self._check_parallel_experts()

    def _check_parallel_experts(self) -> None:
        experts = self.model.experts
        if experts is None:
            raise HardwareError(f"{self.model.name} has no experts: --ep and --dp-attention need a mixture of experts")
        if self.stage_gpus % self.expert_parallel or experts.count < self.expert_parallel:
            raise HardwareError(
                f"--ep {self.expert_parallel}: choose a number that divides the {self.stage_gpus} GPUs of "
                f"--tp times --dp-attention, at most the {experts.count} experts of {self.model.name}"
            )

    def prompt_parts(self, prompt_tokens: int) -> tuple[int, int]:
        """Return the number of tokens of a prompt that are computed, and the number found in the prefix cache.

        The last token of a prompt is always computed, because it generates the first token of the response."""
        cached_tokens = min(int(self.cache_hit_rate * prompt_tokens), prompt_tokens - 1)
        return prompt_tokens - cached_tokens, cached_tokens

    @property
    def default_kv_bytes(self) -> float:
        """Bytes per value in the KV cache that the engine uses by default with these weights on this GPU."""
        return default_kv_bytes(self.gpu, self.weights, self.framework)

    def with_kv_format(self, name: str) -> Deployment:
        """Return a copy of this deployment with another number format for the KV cache.

        Raises HardwareError for an unknown format.
        """
        return replace(self, kv_bytes=number_format(name).weight_bytes)

    @property
    def gpus(self) -> int:
        """Number of GPUs of the deployment."""
        return self.stage_gpus * self.pipeline

    @property
    def stage_gpus(self) -> int:
        """Number of GPUs of one pipeline stage."""
        return self.tensor * self.attention_data

    @property
    def far_hops(self) -> int:
        """Number of hops from one machine to another when data passes through all pipeline stages."""
        stages_per_machine = max(1, self.node_gpus // self.stage_gpus)
        return (self.pipeline - 1) // stages_per_machine

    @property
    def sends_in_machine(self) -> bool:
        """True if GPUs of the same machine send data to each other.

        They do so if they divide a layer between them, or if they compute consecutive pipeline stages.
        """
        return self.stage_gpus > 1 or self.pipeline - 1 > self.far_hops

    def hops_s(self, message_bytes: Any) -> Any:
        """Return the time in seconds to send the activations of a micro-batch through all pipeline stages.

        A hop sends `message_bytes` bytes from one stage to the next. Each machine holds as many whole stages as fit.
        Hops between stages of one machine use the link between its GPUs, and all other hops use the network between
        machines.
        """
        far_hops = self.far_hops
        near_link = self.gpu.link_for(min(self.gpus, self.node_gpus))
        hops = [(near_link, self.pipeline - 1 - far_hops), (self.gpu.machine_link, far_hops)]
        return sum(count * ring_s(link, 2, message_bytes, "point to point") for link, count in hops if count)

    def micro_batch(self, sequences: Any) -> Any:
        """Return the number of sequences in the largest micro-batch of a step with `sequences` sequences.

        A step has one micro-batch per pipeline stage, because all stages compute at the same time. The sequences are
        divided evenly among the micro-batches. The largest micro-batch has at least one sequence.
        """
        return elementwise_max(sequences / self.pipeline, elementwise_min(sequences, 1.0))

    @property
    def expert_tensor(self) -> int:
        """Number of GPUs over which each expert is split."""
        return self.stage_gpus // self.expert_parallel

    @property
    def host_s(self) -> tuple[float, float]:
        """The engine's overhead on the host CPU, as two times in seconds: per step, and per sequence in a step.

        The overhead of a step is the first time, plus the second time for each sequence of the step. Two features
        reduce these times:

        - Speculative decoding adds several tokens to a sequence in each step. Both times are divided by the mean number
          of tokens per step and sequence.
        - With attention groups, each group has a separate scheduler. The time per sequence is divided by the number of
          groups.
        """
        tokens = self.speculation.tokens_per_step if self.speculation else 1.0
        if self.host is not None:
            step_s, sequence_s = self.host
        else:
            overheads = self.framework if self.model.plain else mixture_overheads(self.framework.name)
            step_s, sequence_s = overheads.step_s, overheads.sequence_s
        return step_s / tokens, sequence_s / tokens / self.attention_data

    @property
    def prompt_launch_s(self) -> float:
        """Time in seconds to launch the kernels of one layer in a step that computes prompts.

        The time is 0 unless the model is `plain`: dense, with ordinary attention in every layer. For other models, the
        launches are part of another time, `prompt_layer_s` in mixture_overheads.csv.
        """
        return self.framework.prompt_launch_s if self.model.plain else 0.0

    @property
    def kv_heads(self) -> int:
        """Number of KV heads that each GPU stores.

        The heads are divided among the `tensor` GPUs that share a layer, and the result is rounded up. For example, if
        8 GPUs share 4 KV heads, every GPU stores one head.
        """
        return -(-self.model.kv_heads // self.tensor)

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of KV cache per token, over all layers and all GPUs.

        If several GPUs hold a copy of the same KV head, all copies count.
        """
        copies = self.kv_heads * self.tensor / self.model.kv_heads
        if self.model.latent:
            copies = self.tensor  # all heads share one entry, so every GPU of the group has it
        return self.model.kv_values * self.kv_bytes * copies

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights on all GPUs together.

        Layers are stored in the format of the weights. The output head and the embedding are stored in 16 bits.
        """
        model = self.model
        heads_bytes = model.head_parameters * 2.0 * (2 - model.tied)
        attention_bytes = self.weights.weight_bytes
        if model.experts and self.weights.attention_format:
            attention_bytes = number_format(self.weights.attention_format).weight_bytes
        attention = model.attention_parameters * attention_bytes * self.attention_data
        others = model.layer_parameters - model.attention_parameters
        return attention + others * self.weights.weight_bytes + heads_bytes * self.attention_data

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens in one step.

        This is `chunk_tokens` of the engine. On a GPU with less memory than LARGE_GPU_BYTES, it is at most
        SMALL_GPU_TOKENS.
        """
        tokens = int(self.framework.chunk_tokens)
        return tokens if self.gpu.memory_bytes >= LARGE_GPU_BYTES else min(SMALL_GPU_TOKENS, tokens)

    @property
    def activation_bytes(self) -> float:
        """Bytes that a step of maximum size takes on each GPU, for activations and for sampling.

        Only one layer has activations at any time. They are in 16 bits: two copies of the hidden state, and the input
        and the output of the MLP's activation function. Sampling keeps three copies of the logits in 32 bits.
        """
        model = self.model
        per_token = 2.0 * (2 * model.hidden + model.mlp_matrices * model.intermediate / self.tensor)
        return self.step_tokens * per_token + SAMPLED_SEQUENCES * model.vocabulary * 3 * 4.0

    def kv_tokens(self, memory_fraction: float) -> int:
        """Return the number of tokens that the KV cache of all GPUs can hold.

        Weights, activations and KV cache may use `memory_fraction` of the GPU memory. In TensorRT-LLM, the KV cache may
        use `memory_fraction` of the memory that weights and activations leave free. Raises HardwareError if not even
        one token fits.
        """
        used_bytes = self.gpus * self.activation_bytes + self.weight_bytes
        if self.framework.free_memory:
            free_bytes = memory_fraction * (self.gpus * self.gpu.memory_bytes - used_bytes)
        else:
            free_bytes = memory_fraction * self.gpus * self.gpu.memory_bytes - used_bytes
        tokens = int(free_bytes / self.kv_token_bytes)
        if tokens < 1:
            needed = self._gpus_for_weights(memory_fraction)
            raise HardwareError(
                f"{self.model.name} does not fit {self.gpus} x {self.gpu.name} in {self.weights.name}: "
                f"its weights of {self.weight_bytes / 1e9:,.0f} GB need {needed} GPUs or more; "
                "choose more GPUs (--tp), a larger GPU, a smaller model or a smaller format"
            )
        return tokens

    def _gpus_for_weights(self, memory_fraction: float) -> int:
        """Return how many GPUs the weights need: the smallest power of 2 with enough memory.

        `memory_fraction` is the fraction of the GPU memory that may be used. For TensorRT-LLM, the fraction does not
        apply to weights, so they may use all of the memory.
        """
        share = 1.0 if self.framework.free_memory else memory_fraction  # TensorRT-LLM: of the memory without weights
        gpus = 1
        while gpus * self.gpu.memory_bytes * share <= self.weight_bytes:
            gpus *= 2
        return gpus


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Serving options of an engine: pipeline stages, parallelism for mixtures of experts, and speculative decoding."""

    expert_parallel: int = 1
    attention_data: int = 1
    draft_tokens: int = 0
    """Number of drafted tokens per step and sequence; 0 without speculative decoding."""
    acceptance: float | None = None
    """Probability that a drafted token is accepted. None stands for DEFAULT_ACCEPTANCE."""
    pipeline: int = 1
    """Number of pipeline stages."""
    node_gpus: int = NODE_GPUS
    cache_hit_rate: float = 0.0
    """Share of the prompt tokens that the engine finds in its prefix cache."""
    chunked_prefill: str = ""
    """A value of CHUNKED_PREFILL, or "" for the engine's default."""

    @property
    def needs_hardware(self) -> bool:
        """True if any option requires a hardware model.

        Only `cache_hit_rate` and `chunked_prefill` require none, because they change the rules of the scheduler.
        """
        return replace(self, cache_hit_rate=0.0, chunked_prefill="") != ServingOptions()

    def apply(self, deployment: Deployment) -> Deployment:
        """Return a copy of a deployment with these options. Raises HardwareError if they do not fit the model."""
        acceptance = DEFAULT_ACCEPTANCE if self.acceptance is None else self.acceptance
        return replace(
            deployment,
            expert_parallel=self.expert_parallel,
            attention_data=self.attention_data,
            speculation=TokenDraft(self.draft_tokens, acceptance) if self.draft_tokens else None,
            pipeline=self.pipeline,
            node_gpus=self.node_gpus,
            cache_hit_rate=self.cache_hit_rate,
            chunked_prefill=self.chunked_prefill,
        )


PLAIN_SERVING = ServingOptions()
"""Options without parallel experts, pipeline stages and speculative decoding."""


@dataclass(frozen=True, slots=True)
class Step:
    """Duration of one step in seconds, by component."""

    gemm: Seconds
    attention: Seconds
    all_reduce: Seconds
    elementwise: Seconds  # Norms, rotary embedding, activations, residuals
    layers: Seconds  # Kernel launches and gaps in all layers
    step: Seconds  # Scheduling and sampling

    @property
    def total(self) -> Seconds:
        """Duration of the whole step in seconds: the sum of all components."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Gemm:
    """One matrix multiplication of a layer or of the output head, on one GPU. The weights are a k by n matrix."""

    name: str
    n: int
    k: int
    count: int  # Number of such GEMMs per step: the number of layers, or 1 for the output head
    format: Format


ATTENTION, MLP, OUTPUT_HEAD = range(3)
GEMM_BLOCKS = (ATTENTION, ATTENTION, MLP, MLP, OUTPUT_HEAD)
"""Part of the model to which each GEMM of `model_gemms` belongs, in the same order."""


def model_gemms(deployment: Deployment) -> tuple[Gemm, ...]:
    """Return the GEMMs of one layer and those of the output head, on one GPU.

    Tensor parallelism splits the weight matrices as in Megatron-LM (arXiv 1909.08053): the attention output and the
    down projection by rows, and all other matrices by columns.
    """
    model = deployment.model
    tensor = deployment.tensor
    stored = deployment.gpu.effective_format(deployment.weights)
    if stored.compute_type in ("fp8", "int8"):
        stored = replace(stored, operand_bytes=deployment.framework.scaled)
    layers = model.layers
    heads = -(-model.heads // tensor)
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
    """Return the predicted duration of one step, by component.

    - Prefill: `prompts` sequences. Each has `tokens` new tokens, after `before` tokens that are already in the KV
      cache.
    - Decode: `decoding` sequences that hold `context` tokens each and get one more token.

    With several pipeline stages, the sequences are divided into one micro-batch per stage. The duration of the step is
    the time that the largest micro-batch needs to pass through all stages. Each stage finishes the smaller
    micro-batches sooner, and is idle until the next micro-batch arrives. For example, if there are fewer prompts than
    stages, the micro-batches without a prompt are smaller. The idle time is called the pipeline bubble (Sarathi, arXiv
    2308.16369).

    With speculative decoding, one step drafts and verifies several tokens per decoding sequence. The predicted duration
    of decoding is the duration of such a step, divided by the mean number of tokens that it adds to a sequence.
    """
    speculation = deployment.speculation
    if speculation is None:
        return _predict_one_step(deployment, prompts, tokens, decoding, context, before)
    queries = speculation.verified_tokens
    together = _predict_one_step(deployment, prompts, tokens, decoding, context, before, queries)
    verifying = _predict_one_step(deployment, 0, 0, decoding, context, 0, queries)
    drafting = _draft_step(deployment, speculation, decoding, context)
    saved = 1 - 1 / speculation.tokens_per_step
    is_decoding = as_float(decoding) > 0
    parts = {}
    for field in fields(Step):
        verify_s = where(is_decoding, getattr(verifying, field.name), 0.0)
        draft_s = where(is_decoding, getattr(drafting, field.name), 0.0)
        parts[field.name] = getattr(together, field.name) - saved * verify_s + (1 - saved) * draft_s
    return Step(**parts)


def _draft_step(deployment: Deployment, speculation: TokenDraft, decoding: Any, context: Any) -> Step:
    """Return the time that drafting tokens takes in one step, by component.

    The step has `decoding` sequences with `context` tokens each. `speculation` states how many tokens are drafted for
    each sequence. One drafted token takes as long as one layer of the model and the output head. Multi-token prediction
    (DeepSeek-V3, arXiv 2412.19437) and EAGLE (arXiv 2401.15077) draft tokens in this way.
    """
    model = deployment.model
    whole = _predict_one_step(deployment, 0, 0, decoding, context, 0)
    columns = model.vocabulary // deployment.tensor
    outputs = elementwise_max(deployment.micro_batch(as_float(decoding)), 1e-9)
    head = gemm_s(deployment.gpu, number_format(HEAD_FORMAT), outputs, columns, model.hidden)
    share = speculation.draft_tokens / model.layers
    return Step(
        gemm=share * (whole.gemm - head) + speculation.draft_tokens * head,
        attention=share * whole.attention,
        all_reduce=share * whole.all_reduce,
        elementwise=share * whole.elementwise,
        layers=share * whole.layers,
        step=0.0 * whole.step,
    )


def _predict_one_step(
    deployment: Deployment, prompts: Any, tokens: Any, decoding: Any, context: Any, before: Any, queries: int = 1
) -> Step:
    """Return the predicted duration of one step that computes `queries` tokens for each decoding sequence.

    The other arguments are those of `predict_step`.
    """
    model = deployment.model
    framework = deployment.framework
    prompts, tokens, decoding, context = (as_float(argument) for argument in (prompts, tokens, decoding, context))
    if not model.plain:
        sequences = StepSequences(prompts, tokens, before, decoding, context, queries)
        return Step(**predict_mixture_step(deployment, sequences, number_format(HEAD_FORMAT)))
    sequences = prompts + decoding
    prompts, decoding = deployment.micro_batch(prompts), deployment.micro_batch(decoding)
    rows = prompts * tokens + decoding * queries
    outputs = prompts + decoding * queries
    attention_gemms, mlp_gemms, head_gemm = _gemm_times(deployment, rows, outputs)
    attention = _attention_time(deployment, prompts, tokens, decoding, context, before)
    message = rows * model.hidden * 2.0
    elementwise_bytes_per_s = rates(deployment.gpu, deployment.weights).bytes_per_s * constant("elementwise_share")
    elementwise = rows * _elementwise_bytes(deployment) / elementwise_bytes_per_s
    speed = where(prompts > 0, framework.prefill_share, 1.0)
    attention_block = attention_gemms / speed + (elementwise + framework.layer_s) / 2 + attention
    mlp_block = mlp_gemms / speed + (elementwise + framework.layer_s) / 2
    link = deployment.gpu.link_for(deployment.tensor)
    reduce = all_reduce_s(link, deployment.tensor, message, "nccl" if framework.nccl else "custom")
    if deployment.tensor > 1:
        reduce = reduce + framework.sync_s
    all_reduces = exposed_all_reduce_s(deployment.architecture, model.layers, reduce, attention_block, mlp_block)
    gemm = (model.layers * (attention_gemms + mlp_gemms) + head_gemm) / speed
    all_reduce = all_reduces + deployment.hops_s(message)
    kernels = gemm + all_reduce + model.layers * (attention + elementwise)
    launches = where(prompts > 0, model.layers * deployment.prompt_launch_s, 0.0)
    return Step(
        gemm=gemm,
        attention=model.layers * attention,
        all_reduce=all_reduce,
        elementwise=model.layers * elementwise,
        layers=elementwise_max(model.layers * framework.layer_s + 0 * rows, launches - kernels),
        step=framework.step_s + framework.sequence_s * sequences,
    )


def start_times_s(deployment: Deployment) -> tuple[float, float, float]:
    """Return the seconds that one step needs to start its kernels, as three sums: GEMMs, attention, and all-reduces."""
    architecture = deployment.gpu.architecture
    layers = deployment.model.layers
    gemms = sum(gemm.count for gemm in model_gemms(deployment)) * architecture.launch_s
    library = "nccl" if deployment.framework.nccl else "custom"
    reduce = float(all_reduce_s(deployment.gpu.link_for(deployment.tensor), deployment.tensor, 0.0, library))
    if deployment.tensor > 1:
        reduce += deployment.framework.sync_s
    return gemms, layers * architecture.attention_launch_s, ARCHITECTURES[deployment.architecture] * layers * reduce


def _gemm_times(deployment: Deployment, rows: Any, sequences: Any) -> list[Any]:
    """Return three sums of GEMM durations in seconds: for one attention block, for one MLP block, and for the output
    head.

    A GEMM has one row per token that it processes. The output head processes `sequences` tokens, one per sequence. The
    other GEMMs process `rows` tokens.
    """
    times: list[Any] = [0.0, 0.0, 0.0]
    for block, gemm in zip(GEMM_BLOCKS, model_gemms(deployment), strict=True):
        m = sequences if block == OUTPUT_HEAD else rows
        times[block] = times[block] + gemm_s(deployment.gpu, gemm.format, elementwise_max(m, 1e-9), gemm.n, gemm.k)
    return times


def _attention_time(deployment: Deployment, prompts: Any, tokens: Any, decoding: Any, context: Any, before: Any) -> Any:
    """Return the seconds of attention in one layer, for all prompts and all decoding sequences of a micro-batch
    together.

    The arguments are those of `predict_step`. With grouped-query attention, several query heads share one KV head.
    Kernels of 2024 and later read the KV head once for the whole group. Earlier kernels read it again for each query
    head.
    """
    gpu = deployment.gpu
    head_dim = deployment.model.head_dim
    heads = -(-deployment.model.heads // deployment.tensor)
    framework = deployment.framework
    heads_read = heads if framework.kv_per_query_head else deployment.kv_heads
    kv_bytes = deployment.kv_bytes * (framework.fp8_kv_cost if deployment.kv_bytes < 2 else 1)
    attention_s = whole_context_attention_s if framework.whole_context else decode_attention_s
    decode = attention_s(gpu, decoding, context, heads_read, head_dim, kv_bytes)
    prefill = prefill_attention_s(gpu, prompts, elementwise_max(tokens, 1), heads, head_dim, before)
    return where(decoding > 0, decode, 0) / framework.kv_share + where(prompts > 0, prefill, 0)


def _elementwise_bytes(deployment: Deployment) -> float:
    """Return the bytes per token that one layer reads and writes in kernels other than GEMMs and attention.

    All values have 16 bits. These kernels are:

    - the two norms with residuals. Every GPU computes them completely.
    - the rotary embedding, including the write to the KV cache. It is split over the GPUs.
    - the activation function of the MLP. It is split over the GPUs.
    """
    model = deployment.model
    rotary = 2 * (model.heads + model.kv_heads) * model.head_dim
    activation = model.mlp_matrices * model.intermediate
    return 2.0 * (constant("norm_passes") * model.hidden + (rotary + activation) / deployment.tensor)


def exposed_all_reduce_s(architecture: str, layers: int, reduce: Seconds, attention: Seconds, mlp: Seconds) -> Seconds:
    """Return the seconds that a step waits for its all-reduces, each of which takes `reduce` seconds.

    A layer consists of two blocks: attention and MLP, which take `attention` and `mlp` seconds. In most architectures,
    the step waits for the whole time of every all-reduce.

    In the architecture `ladder`, an all-reduce runs during the next block. The step then waits only for the part of the
    all-reduce that is left after this block. The wait is at least the constant `join_s`, the time to synchronise the
    block and the all-reduce. The last all-reduce has no next block, so the step waits for its whole time.
    """
    if architecture == "ladder":
        joining = constant("join_s")
        after_attention = layers * elementwise_max(reduce - mlp, joining)
        after_mlp = (layers - 1) * elementwise_max(reduce - attention, joining)
        return after_attention + after_mlp + reduce
    return ARCHITECTURES[architecture] * layers * reduce


def lower_bounds_s(
    deployment: Deployment, prompts: Any = 0, tokens: Any = 0, decoding: Any = 0, context: Any = 0, before: Any = 0
) -> dict[str, Any]:
    """Return the minimum time in seconds for which one step occupies each resource: `compute`, `memory` and `network`.

    - Prefill: `prompts` sequences. Each has `tokens` new tokens, after `before` tokens that are already in the KV
      cache.
    - Decode: `decoding` sequences that hold `context` tokens each and get one more token.

    The resources may work at the same time, so the step takes at least the largest of the three times.

    With speculative decoding, one step adds several tokens to a sequence. The times for decoding are then divided by
    the mean number of these tokens. The time of the draft model is not included.
    """
    speculation = deployment.speculation
    if speculation is None:
        return _one_step_bounds_s(deployment, prompts, tokens, decoding, context, before)
    queries = speculation.verified_tokens
    together = _one_step_bounds_s(deployment, prompts, tokens, decoding, context, before, queries)
    verifying = _one_step_bounds_s(deployment, 0, 0, decoding, context, 0, queries)
    saved = 1 - 1 / speculation.tokens_per_step
    return {name: together[name] - saved * verifying[name] for name in together}


def _one_step_bounds_s(
    deployment: Deployment, prompts: Any, tokens: Any, decoding: Any, context: Any, before: Any, queries: int = 1
) -> dict[str, Any]:
    """Return the minimum time in seconds for which a step occupies each resource: `compute`, `memory` and `network`.

    Sequences in prefill:

    - `prompts`: number of sequences.
    - `tokens`: number of new tokens of each sequence.
    - `before`: number of tokens of each sequence that are already in the KV cache.

    Sequences that decode:

    - `decoding`: number of sequences.
    - `context`: number of tokens of each sequence in the KV cache.
    - `queries`: number of tokens that the step computes for each sequence. It is larger than 1 with speculative
      decoding.
    """
    gpu = deployment.gpu
    model = deployment.model
    if not model.plain:
        sequences = StepSequences(prompts, tokens, before, decoding, context, queries)
        return mixture_lower_bounds_s(deployment, sequences, number_format(HEAD_FORMAT))
    prompts = prompts / deployment.pipeline  # a limit: chunks of a prompt may occupy all stages at once
    decoding = decoding / deployment.pipeline
    rows = prompts * tokens + decoding * queries
    outputs = prompts + decoding * queries
    compute_s: Any = 0.0
    read_bytes: Any = 0.0
    for gemm in model_gemms(deployment):
        m = outputs if gemm.count == 1 else rows
        peak = gpu.peaks[gemm.format.compute_type]
        compute_s = compute_s + gemm.count * 2 * m * gemm.n * gemm.k / peak
        read_bytes = read_bytes + gemm.count * gemm.n * gemm.k * gemm.format.weight_bytes
    heads = model.heads / deployment.tensor
    pairs = prompts * tokens * ((tokens + 1) / 2 + before) + decoding * queries * context  # of a query and a key
    compute_s = compute_s + 4 * model.layers * heads * model.head_dim * pairs / gpu.peaks["bf16"]
    cached_tokens = decoding * context + prompts * (tokens + before)
    read_bytes = read_bytes + deployment.kv_token_bytes / deployment.tensor * cached_tokens
    all_reduces = ARCHITECTURES[deployment.architecture] * model.layers
    return {
        "compute": compute_s,
        "memory": read_bytes / gpu.memory_bytes_per_s,
        "network": all_reduces * all_reduce_lower_bound_s(deployment, rows),
    }


def all_reduce_lower_bound_s(deployment: Deployment, rows: Any) -> Seconds:
    """Return the minimum seconds of one all-reduce over the activations of `rows` tokens.

    In a ring of N GPUs, each byte crosses the link of a GPU `2 * (N - 1) / N` times. If the switch computes the sums,
    each byte crosses the link once in each direction.
    """
    link = deployment.gpu.link_for(deployment.tensor)
    tensor = deployment.tensor
    crossings = min(1.0, tensor - 1.0) if link.switch_share else 2 * (tensor - 1) / tensor
    return rows * deployment.model.hidden * 2.0 * crossings / link.bytes_per_s
