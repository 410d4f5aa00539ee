"""Classes for the results of `loadgen dissect`, which `--json` prints.

The results contain the measured seconds of every repeat. The modules `inference_report` and `training_report` compute
the figures of the reports from these seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["forward", "backward"]
Phase = Literal["prefill", "decode"]

DATA_SHEET = "data sheet"
"""Value of `DeviceLimits.source` for limits that were not measured on this machine."""


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """Measured latency and bandwidth of one collective between the processes of a group."""

    latency_s: float
    """Time of a small message in s."""
    bytes_per_s: float
    """Bytes per second of a large message on the busiest link (the bus bandwidth of nccl-tests)."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of the device, from a short probe or from the data sheet."""

    device: str
    flops_per_s: float
    """Peak FLOP/s in the number format of the run."""
    bytes_per_s: float
    """Memory bandwidth."""
    source: str
    """`DATA_SHEET`, or a description of the probe."""
    launch_s: float = 0.0
    """Time to start one small operator."""
    fresh_bytes_per_s: float = 0.0
    """Bytes per second of new memory from the operating system; 0 if an allocator reuses freed memory (CUDA)."""
    sums_in_fp32: bool = False
    """True if 16-bit GEMMs keep an fp32 copy of their result while they run, as oneDNN does on AVX-512 without bf16."""
    links: Mapping[str, LinkProbe] = field(default_factory=dict)
    """Links by collective; empty with one process."""


@dataclass(frozen=True, slots=True)
class Operator:
    """The calls of an operator in one step, added up over all calls of the same kind.

    Calls are of the same kind if their module, operator, shape and direction (forward or backward) are equal.
    """

    module: str
    operator: str
    shape: str
    """m x n x k of a GEMM; the largest tensor shape of any other operator."""
    direction: Direction
    in_layers: bool
    """True if the operator is part of a decoder layer."""
    calls: int
    flops: float
    """FLOPs of all calls in one step."""
    bytes: float
    """Bytes of arguments and results of all calls, each read or written once."""
    bound_s: float
    """Minimum time of all calls in s, according to the device limits."""
    bound: str
    """Limiting resource: compute, memory or network; empty for an operator without work."""
    seconds: Sequence[float]
    """Total time of all calls in s, one value per repeat."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """The measurements of an inference step at one batch size."""

    batch: int
    tokens: int
    """Tokens that pass the layers in one step."""
    step_s: Sequence[float]
    """Seconds of steps without the profiler, one value per repeat."""
    parts_s: Mapping[str, Sequence[float]]
    """Seconds of parts of profiled steps, per repeat: model, Embedding, layers, RMSNorm (the last one), LM head, step.

    `step backward` is the backward pass.
    """
    operators: Sequence[Operator]
    least_s: tuple[float, float]
    """Sum of the fastest times of all operators: as OpProfiler measured them, and as torch.profiler measured them.

    The two profilers measured different steps. The fastest times reduce the effect of other programs on the machine.
    """
    beside_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seconds of alternating steps by architecture, with the same weights.

    Empty if the run has no all-reduces that could be hidden.
    """


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """Result of `loadgen dissect inference`, as `--json` prints it."""

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
"""Kinds of memory. `activations` contains everything temporary: activations, gathered weights, buffers."""


@dataclass(frozen=True, slots=True)
class TechniqueResult:
    """Measurement and prediction of one training technique.

    With several processes, the values are those of the first process.
    """

    technique: str
    processes: int
    cannot: str = ""
    """Reason why the technique was not measured; empty if it was measured."""
    parts_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seconds of forward, backward and optimiser, per repeat."""
    communication_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase during which a collective was in progress, in one step."""
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    """Allocated bytes at the peak of one step by kind, as the allocator reports them."""
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase that `loadgen.servers.hardware` predicts from `bounds`."""
    predicted_communication_s: Mapping[str, float] = field(default_factory=dict)
    bounds: DeviceLimits | None = None
    """Limits of each process while all processes are busy, measured just before the technique."""
    predicted_bytes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Result of `loadgen dissect training`, as `--json` prints it."""

    model: str
    parameters: int
    layers: int
    model_layers: int
    batch: int
    """Sequences in one step, over all processes."""
    sequence: int
    """Tokens per sequence."""
    device: str
    dtype: str
    bounds: DeviceLimits
    techniques: Sequence[TechniqueResult]
    torch: str
