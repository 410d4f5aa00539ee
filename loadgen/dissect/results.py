"""What was measured, as `--json` prints it: raw seconds of every repeat; figures are made of them in
`loadgen.dissect.inference_report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["forward", "backward"]
Phase = Literal["prefill", "decode"]


DATA_SHEET = "data sheet"
"""Where bounds are from that nobody measured here."""


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """One collective between the processes of a group, measured: what a small message takes, and the rate of a large
    one as the busiest link sees it (the bus bandwidth of nccl-tests)."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the device allows, and who says so: a short probe, or the data sheet."""

    device: str
    flops_per_s: float
    """In the number format of the run."""
    bytes_per_s: float
    source: str
    launch_s: float = 0.0
    """To start one small operator."""
    fresh_bytes_per_s: float = 0.0
    """At which memory is handed out that nobody has touched yet; 0 where an allocator keeps it (CUDA)."""
    sums_in_fp32: bool = False
    """A GEMM in 16 bits has an fp32 copy of its result while it runs, as oneDNN's on AVX-512 without bf16."""
    links: Mapping[str, LinkProbe] = field(default_factory=dict)
    """By collective, where there are several processes."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One kind of operator of one module: all calls of it in one step."""

    module: str
    operator: str
    shape: str
    """m x n x k of a GEMM; what it is made of for any other."""
    direction: Direction
    in_layers: bool
    calls: int
    flops: float
    """Of all calls in one step; bytes likewise."""
    bytes: float
    """Of arguments and results, each read or written once."""
    bound_s: float
    """No device of these bounds is faster."""
    bound: str
    """What that is by: compute, memory or network; nothing where it moves nothing."""
    seconds: Sequence[float]
    """Of all calls, in each repeat."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """One batch size."""

    batch: int
    tokens: int
    """That pass through the layers in one step."""
    step_s: Sequence[float]
    """Unwatched; so is what is split into `forward` and `backward`."""
    parts_s: Mapping[str, Sequence[float]]
    """Of watched steps, by their clock: model, Embedding, layers, RMSNorm (the last), LM head, loss; `backward` behind
    those of the backward pass."""
    operators: Sequence[Operator]
    least_s: tuple[float, float]
    """All operators, each at its fastest, so that whatever else the machine did counts little: by our clock, and by
    torch.profiler's in steps of its own."""
    beside_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Steps by turns with other architectures of these weights; nothing where no all-reduce could be hidden."""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """What `loadgen dissect inference --json` prints."""

    model: str
    architecture: str
    layers: int
    model_layers: int
    input_tokens: int
    phase: Phase
    device: str
    dtype: str
    tensor_parallel: int
    threads: int
    flash: bool
    bounds: DeviceLimits
    cases: Sequence[StepCase]
    torch: str
    link_delay_s: float = 0.0


MEMORY_KINDS = ("weights", "gradients", "optimiser", "activations")
"""Of memory; the last is all that is there for a while: activations, gathered weights, buffers."""


@dataclass(frozen=True, slots=True)
class TechniqueResult:
    """One technique, measured and predicted; of several processes the first."""

    technique: str
    processes: int
    cannot: str = ""
    """Why it was not measured."""
    parts_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seconds of forward, backward and optimiser, in each repeat."""
    communication_s: Mapping[str, float] = field(default_factory=dict)
    """Of each of those in one step: how long any collective was under way."""
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    """At the peak of one step, by kind: what the allocator says, not the operating system."""
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    """By loadgen.servers.hardware from the bounds; so are communication and memory."""
    predicted_communication_s: Mapping[str, float] = field(default_factory=dict)
    bounds: DeviceLimits | None = None
    """Of each process while all are busy, probed just before: what the prediction is made of."""
    predicted_bytes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What `loadgen dissect training --json` prints."""

    model: str
    parameters: int
    layers: int
    model_layers: int
    batch: int
    """Sequences in one step, of all processes."""
    sequence: int
    device: str
    dtype: str
    bounds: DeviceLimits
    techniques: Sequence[TechniqueResult]
    torch: str
