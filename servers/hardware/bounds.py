"""Says what binds each GEMM and each attention kernel of a model on a GPU: compute, memory or latency.

A kernel takes at least the longest of three times (roofline model, Williams, Waterman and Patterson, CACM 2009):

- compute: FLOPs divided by the peak FLOP/s of the number format.
- memory: bytes divided by the memory bandwidth. Every operand is read once, and every result is written once.
- latency: the measured time to start and end the kernel on this GPU.

The longest of the three binds the kernel. The arithmetic intensity is FLOPs divided by bytes. A kernel with a higher
intensity than the ridge, `peak / bandwidth`, needs more time to compute than to read memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

from loadgen.servers.hardware import Format, Gpu, HardwareError, constant, number_format
from loadgen.servers.hardware.attention import (
    FULL,
    LINEAR,
    STATE_BYTES,
    WINDOW,
    StepSequences,
    attention_bytes,
    attention_flops,
    attention_kernel_s,
    attention_layers,
)
from loadgen.servers.hardware.experts import Routing, expert_format, grouped_bytes, grouped_gemm_s, layer_gemms, route
from loadgen.servers.hardware.inference import HEAD_FORMAT, Deployment, Gemm, model_gemms
from loadgen.servers.hardware.kernels import gemm_bytes, gemm_s, quantises_separately, rates
from loadgen.servers.hardware.training import GRADIENT_BYTES, OPTIMISER_BYTES, WEIGHT_BYTES
from loadgen.servers.hardware.validation import Accuracy, kernel_accuracies

Bound = Literal["compute", "memory", "latency"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)
MAX_BATCH = 1 << 20
"""Largest batch that is tried when the batch is sought from which compute binds a kernel."""
ATTENTION_NAMES = {FULL: "attention", WINDOW: "window attention", LINEAR: "linear attention"}
ATTENTION_OUTPUTS = ("attention output", "linear attention output")
"""GEMMs that follow the attention kernel of a layer."""
ATTENTION_FORMAT = "bf16"
"""Number format in which attention kernels compute."""
ATTENTION_BACKWARD = 2.5
ADAM_FLOPS = 12.0
"""FLOPs per parameter of the optimiser, counted: two moments, their corrections, the root, the division, the update."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """One kernel of a model on one GPU, before its bound is known."""

    kernel: str
    layers: int  # Number of layers that run this kernel
    flops: float
    moved_bytes: float
    format: Format  # Number format in which the kernel computes
    start_s: float  # Time to start and end the kernel
    expected: Callable[[], float]  # Returns the expected duration in seconds; the search for a batch does not need it


@dataclass(frozen=True, slots=True)
class PhaseKernels:
    """The kernels of one phase, such as prefill, and functions that return these kernels for other input sizes."""

    works: list[KernelWork]
    by_tokens: Callable[[int], list[KernelWork]] | None  # For the number of rows of GEMMs; None if no size matters
    by_length: Callable[[int], list[KernelWork]] | None  # For the size that attention grows with

    def by_size(self, index: int) -> Callable[[int], KernelWork] | None:
        """Return a function that takes an input size, and returns the kernel with the index `index` for this size.

        The returned function calls `by_length` for an attention kernel, and `by_tokens` for any other kernel. The
        result is None if the kernel does not depend on a size.
        """
        is_attention = self.works[index].kernel in ATTENTION_NAMES.values()
        kernels = self.by_length if is_attention else self.by_tokens
        return None if kernels is None else lambda size: kernels(size)[index]


@dataclass(frozen=True, slots=True)
class KernelBound:
    """The bound of one kernel on one GPU (compute, memory or latency), and the figures that determine this bound."""

    kernel: str
    phase: str
    """`prefill` or `decode`; `forward`, `backward` or `optimiser` of a training step."""
    layers: int
    """Number of times that a step runs this kernel."""
    flops_per_byte: float
    ridge: float
    """FLOPs per byte above which the GPU needs longer to compute than to read memory, in the kernel's number format."""
    bound: Bound
    compute_share: float
    """Time to compute at the peak rate, as a share of the sum of this time and the time to read memory."""
    limit_s: float
    """Shortest possible duration: the larger of the times to compute and to read memory, at data-sheet rates."""
    expected_s: float
    """Expected duration of one such kernel."""
    time_share: float
    """Share of this kernel in the expected time of all kernels of the phase, over all layers."""
    compute_from: int | None
    """Smallest batch at which compute binds the kernel more than memory does. None if no batch does."""


@dataclass(frozen=True, slots=True)
class GpuBounds:
    """The bound of each kernel that a model runs on one GPU: compute, memory or latency."""

    gpu: str
    format: str
    kernels: Sequence[KernelBound]
    shares: dict[str, dict[Bound, float]]
    """Shares of the kernel time that is bound by compute, memory and latency, by phase."""
    accuracy: Mapping[str, Accuracy] = field(default_factory=dict)
    """How far the predicted durations of kernels were from measurements, by kernel and format. Empty for training and
    for mixtures of experts, whose kernels were not compared with measurements."""


def serving_bounds(deployment: Deployment, batch: int, prompt_tokens: int, context: int) -> GpuBounds:
    """Return what binds each kernel of a prefill step and of a decode step: compute, memory or latency.

    The prefill step computes `batch` prompts of `prompt_tokens` tokens. In the decode step, `batch` sequences hold
    `context` tokens each.

    The field `compute_from` of a kernel is the smallest size at which compute binds the kernel. What counts as the size
    depends on the kernel:

    - Every kernel of the decode step: the number of sequences.
    - Attention in the prefill step: the number of tokens of one prompt.
    - The output head in the prefill step: the number of prompts.
    - Every other kernel of the prefill step: the number of tokens of all prompts together.
    """

    def prefill(prompts: int, tokens: int) -> list[KernelWork]:
        return step_kernels(deployment, StepSequences(prompts, tokens, 0, 0, 0))

    def decode(sequences: int) -> list[KernelWork]:
        return step_kernels(deployment, StepSequences(0, 0, 0, sequences, context))

    phases = {
        "prefill": PhaseKernels(prefill(batch, prompt_tokens), lambda n: prefill(n, 1), lambda n: prefill(1, n)),
        "decode": PhaseKernels(decode(batch), decode, decode),
    }
    bounds = phase_bounds(deployment.gpu, deployment.weights.name, phases)
    return bounds if deployment.model.experts else replace(bounds, accuracy=kernel_accuracies(deployment))


def training_bounds(deployment: Deployment, micro_batch: int, sequence: int) -> GpuBounds:
    """Return what binds each kernel in the training of one micro-batch: compute, memory or latency.

    The training consists of the forward pass, the backward pass and the optimiser step. The micro-batch has
    `micro_batch` sequences of `sequence` tokens.

    In the result, the field `compute_from` of a kernel is the smallest number of tokens at which compute binds it:

    - For attention, this is a number of tokens in one sequence.
    - For the optimiser, the field is None, because the number of tokens does not matter.
    - For any other kernel, this is a number of tokens in the whole micro-batch.

    Raises HardwareError for a model that is not a plain dense model.
    """
    if not deployment.model.plain:
        raise HardwareError(f"training is modelled for dense models only, and {deployment.model.name} is none")

    def forward(sequences: int, tokens: int) -> list[KernelWork]:
        return _training_kernels(deployment, sequences, tokens, backward=False)

    def backward(sequences: int, tokens: int) -> list[KernelWork]:
        return _training_kernels(deployment, sequences, tokens, backward=True)

    phases = {
        "forward": PhaseKernels(forward(micro_batch, sequence), lambda n: forward(n, 1), lambda n: forward(1, n)),
        "backward": PhaseKernels(backward(micro_batch, sequence), lambda n: backward(n, 1), lambda n: backward(1, n)),
        "optimiser": PhaseKernels([_optimiser(deployment)], None, None),
    }
    return phase_bounds(deployment.gpu, deployment.weights.name, phases)


def phase_bounds(gpu: Gpu, format_name: str, phases: Mapping[str, PhaseKernels]) -> GpuBounds:
    """Return what limits each kernel of all phases on one GPU: compute, memory or latency.

    `phases` maps the name of a phase, such as `prefill`, to its kernels.
    """
    bounds: list[KernelBound] = []
    shares = {}
    for phase, kernels in phases.items():
        total_s = sum(work.layers * work.expected() for work in kernels.works)
        phase_result = [
            _kernel_bound(gpu, phase, work, total_s, kernels.by_size(index)) for index, work in enumerate(kernels.works)
        ]
        bounds += phase_result
        shares[phase] = {
            name: sum(bound.time_share for bound in phase_result if bound.bound == name) for name in BOUNDS
        }
    return GpuBounds(gpu.name, format_name, bounds, shares)


def _kernel_bound(
    gpu: Gpu, phase: str, work: KernelWork, total_s: float, by_batch: Callable[[int], KernelWork] | None
) -> KernelBound:
    compute_s, memory_s = _limits_s(gpu, work)
    expected_s = work.expected()
    seconds: dict[Bound, float] = {"compute": compute_s, "memory": memory_s, "latency": work.start_s}
    return KernelBound(
        kernel=work.kernel,
        phase=phase,
        layers=work.layers,
        flops_per_byte=work.flops / work.moved_bytes,
        ridge=_peak(gpu, work) / gpu.memory_bytes_per_s,
        bound=max(seconds, key=lambda name: seconds[name]),
        compute_share=compute_s / (compute_s + memory_s),
        limit_s=max(compute_s, memory_s),
        expected_s=expected_s,
        time_share=work.layers * expected_s / total_s,
        compute_from=None if by_batch is None else _compute_from(gpu, by_batch),
    )


def _limits_s(gpu: Gpu, work: KernelWork) -> tuple[float, float]:
    """Return two minimum times of a kernel in seconds: the time to compute, and the time to read and write memory."""
    return work.flops / _peak(gpu, work), work.moved_bytes / gpu.memory_bytes_per_s


def _peak(gpu: Gpu, work: KernelWork) -> float:
    return gpu.peaks[work.format.compute_type]


def _compute_from(gpu: Gpu, by_batch: Callable[[int], KernelWork]) -> int | None:
    """Return the smallest batch size at which a kernel needs at least as long for compute as for memory.

    `by_batch` takes a batch size and returns the work of the kernel for a batch of this size. The larger the batch, the
    more the kernel computes for each byte that it reads, so the smallest size can be found by bisection. Return None if
    it is larger than MAX_BATCH.
    """

    def binds(batch: int) -> bool:
        compute_s, memory_s = _limits_s(gpu, by_batch(batch))
        return compute_s >= memory_s

    if not binds(MAX_BATCH):
        return None
    low, high = 0, MAX_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if binds(middle) else (middle, high)
    return high


def step_kernels(deployment: Deployment, sequences: StepSequences) -> list[KernelWork]:
    """Return the GEMMs and attention kernels of one step on one GPU, in the order in which a layer runs them."""
    gemms = _plain_gemms(deployment, sequences) if deployment.model.plain else _mixture_gemms(deployment, sequences)
    works = []
    for gemm in gemms:
        if gemm.kernel in ATTENTION_OUTPUTS:
            kinds = (LINEAR,) if gemm.kernel.startswith("linear") else (FULL, WINDOW)
            works += [
                _attention(deployment, kind, layers, sequences)
                for kind, layers in attention_layers(deployment)
                if kind in kinds
            ]
        works.append(gemm)
    return works


def _plain_gemms(deployment: Deployment, sequences: StepSequences) -> list[KernelWork]:
    return [
        _gemm(deployment.gpu, gemm, sequences.outputs if gemm.count == 1 else sequences.rows)
        for gemm in model_gemms(deployment)
    ]


def _mixture_gemms(deployment: Deployment, sequences: StepSequences) -> list[KernelWork]:
    """Return the GEMMs of a model with experts or several kinds of layers. All experts of a layer are one kernel."""
    model = deployment.model
    others = model.layers - model.linear_layers
    layers = {"linear": model.linear_layers, "dense": model.layers - model.moe_layers, "shared": model.moe_layers}
    works = []
    for gemm in layer_gemms(deployment, sequences.rows):
        if gemm.seconds is not None:  # experts: replaced below, because these rows are rounded
            continue
        count = layers.get(gemm.name.partition(" ")[0], others)
        works.append(_gemm(deployment.gpu, Gemm(gemm.name, gemm.n, gemm.k, count, gemm.format), gemm.m))
    works += _expert_gemms(deployment, sequences.rows)
    head = Gemm("output head", model.vocabulary // deployment.tensor, model.hidden, 1, number_format(HEAD_FORMAT))
    rows = max(1, sequences.outputs // deployment.attention_data)
    return [*works, _gemm(deployment.gpu, head, rows)]


def _expert_gemms(deployment: Deployment, tokens: int) -> list[KernelWork]:
    """Return the kernels of the experts in a layer: the GEMM of the router, and the grouped GEMMs of the experts.

    The list is empty for a model without experts.
    """
    model = deployment.model
    experts = model.experts
    if experts is None:
        return []
    stored = expert_format(deployment)
    routing = route(experts, tokens, deployment.expert_parallel)
    split = experts.intermediate // deployment.expert_tensor
    rows = max(1, tokens // deployment.attention_data)
    router = Gemm("router", experts.count, model.hidden, model.moe_layers, number_format(HEAD_FORMAT))
    works = [_gemm(deployment.gpu, router, rows)]
    for name, n, k in (("experts gate, up", 2 * split, model.hidden), ("experts down", model.hidden, split)):
        works.append(
            KernelWork(
                name,
                model.moe_layers,
                flops=float(2 * routing.rows * n * k),
                moved_bytes=float(grouped_bytes(stored, routing, n, k)),
                format=stored,
                start_s=deployment.gpu.architecture.launch_s,
                expected=partial(_grouped_s, deployment, stored, routing, n, k),
            )
        )
    return works


def _grouped_s(deployment: Deployment, stored: Format, routing: Routing, n: int, k: int) -> float:
    return float(grouped_gemm_s(deployment, stored, routing, n, k))


def _gemm(gpu: Gpu, gemm: Gemm, rows: int) -> KernelWork:
    return KernelWork(
        gemm.name,
        gemm.count,
        flops=2.0 * rows * gemm.n * gemm.k,
        moved_bytes=float(gemm_bytes(gemm.format, rows, gemm.n, gemm.k)),
        format=gemm.format,
        start_s=_gemm_start_s(gpu, gemm.format),
        expected=lambda: float(gemm_s(gpu, gemm.format, rows, gemm.n, gemm.k)),
    )


def _gemm_start_s(gpu: Gpu, stored: Format) -> float:
    """Return the part of a GEMM's duration that does not depend on its size.

    This part consists of the time to start and end the kernel, and the time to start and end one tile. If a separate
    kernel quantises the activations, the time of this kernel is included.
    """
    start = gpu.architecture.launch_s + gpu.architecture.tile_s
    return start + (stored.quantise_s if quantises_separately(stored) else 0.0)


def _attention(deployment: Deployment, kind: str, layers: int, sequences: StepSequences) -> KernelWork:
    gpu = deployment.gpu
    start = gpu.architecture.attention_launch_s
    if sequences.decoding and kind != LINEAR:
        start += gpu.architecture.attention_turn_s
    return KernelWork(
        ATTENTION_NAMES[kind],
        layers,
        flops=float(attention_flops(deployment, kind, sequences)),
        moved_bytes=float(_attention_bytes(deployment, kind, sequences)),
        format=number_format(ATTENTION_FORMAT),
        start_s=start,
        expected=lambda: float(attention_kernel_s(deployment, kind, sequences)[1 if sequences.decoding else 0]),
    )


def _attention_bytes(deployment: Deployment, kind: str, sequences: StepSequences) -> float:
    """Return the number of bytes that the attention kernel of one layer reads and writes in a step.

    The bytes are those of the KV cache (or of the state of linear attention), and those of the kernel's other inputs
    and outputs, such as queries. Each value of these inputs and outputs has 16 bits.
    """
    model = deployment.model
    heads = model.heads / deployment.tensor
    cache_bytes = float(attention_bytes(deployment, kind, sequences))
    if kind == LINEAR and model.linear:
        values = 4 * model.linear.value_heads / deployment.tensor * model.linear.head_dim
        cache_bytes += 2 * sequences.prompts * model.linear.state_values / deployment.tensor * STATE_BYTES
    elif model.latent and sequences.decoding:  # queries and results have the size of the compressed vectors
        values = heads * (model.latent.cached_values + model.latent.kv_rank)
    elif model.latent:  # queries, keys, values and results of each head
        values = 2 * heads * (model.head_dim + model.latent.rope_dim + model.latent.value_dim)
    else:
        values = 2 * heads * model.head_dim
    return float(cache_bytes + 2.0 * sequences.rows * values)


def _training_kernels(deployment: Deployment, sequences: int, tokens: int, *, backward: bool) -> list[KernelWork]:
    """Return the kernels of the forward or the backward pass of a micro-batch, for every layer and for the output head.

    The backward pass has two GEMMs for each GEMM of the forward pass: one for the gradients of its input, and one for
    the gradients of its weights. Fused attention computes its scores again, so its backward pass has 2.5 times the
    FLOPs (FlashAttention-2, arXiv 2307.08691).
    """
    gpu = deployment.gpu
    rows = sequences * tokens
    works = []
    for gemm in model_gemms(deployment):
        stored = replace(gemm.format, operand_bytes=gemm.format.activation_bytes)  # one scale per tensor
        if gemm.name == "attention output":
            prompts = StepSequences(sequences, tokens, 0, 0, 0)
            forward = _attention(deployment, FULL, deployment.model.layers, prompts)
            works.append(_times(forward, ATTENTION_BACKWARD) if backward else forward)
        if not backward:
            works.append(_trained(_gemm(gpu, replace(gemm, format=stored), rows)))
            continue
        inputs = replace(gemm, name=f"{gemm.name}, inputs", n=gemm.k, k=gemm.n, format=stored)
        weights = replace(
            gemm, name=f"{gemm.name}, weights", k=rows, format=replace(stored, weight_bytes=stored.activation_bytes)
        )
        works += [_trained(_gemm(gpu, inputs, rows)), _trained(_gemm(gpu, weights, gemm.k))]
    return works


def _times(work: KernelWork, factor: float) -> KernelWork:
    """Return a kernel with `factor` times the FLOPs, bytes and time."""
    return replace(
        work,
        flops=factor * work.flops,
        moved_bytes=factor * work.moved_bytes,
        expected=lambda: factor * work.expected(),
    )


def _trained(work: KernelWork) -> KernelWork:
    """Return a copy of the GEMM `work` with a longer expected duration, because a GEMM takes longer in training."""
    return replace(work, expected=lambda: work.expected() / constant("training_share"))


def _optimiser(deployment: Deployment) -> KernelWork:
    """Return the work of one Adam step on one GPU. The step reads and writes every parameter state of this GPU once."""
    gpu = deployment.gpu
    parameters = deployment.model.layer_parameters / deployment.tensor
    moved = parameters * (2 * OPTIMISER_BYTES + GRADIENT_BYTES + WEIGHT_BYTES)
    stored = number_format(HEAD_FORMAT)
    return KernelWork(
        "optimiser",
        1,
        flops=ADAM_FLOPS * parameters,
        moved_bytes=moved,
        format=stored,
        start_s=gpu.architecture.launch_s,
        expected=lambda: float(moved / rates(gpu, stored).bytes_per_s),
    )
