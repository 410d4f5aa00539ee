"""Predicts how fast a model runs on hypothetical GPUs, for example the time per output token.

The user chooses several technology nodes, memories and networks. There is one hypothetical GPU for each combination.
`loadgen hardware sweep` prints the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from loadgen.servers.hardware import Change, Gpu, HardwareError
from loadgen.servers.hardware.inference import Deployment, predict_step
from loadgen.servers.hardware.resource_shares import DividedTime, TimeOf, divide_time
from loadgen.servers.hardware.technology import scaled_gpu, technology, unused_networks
from loadgen.servers.hardware.throughput_model import Load, running_requests
from loadgen.servers.hardware.training import (
    MEMORY_SHARE,
    TrainingSetup,
    fits_memory,
    predict_iteration,
    predict_memory,
    sends_between_machines,
    sends_in_machine,
)

DECODE = "time per output token"
PREFILL = "prefill of one prompt"
TRAINING_STEP = "time per training step"
"""Names of the times that a sweep predicts."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One hypothetical GPU of a sweep: its technologies, its figures, and the times of a model on this GPU."""

    technology: str
    projected: bool
    """True if the technology node is not in production."""
    memory: str
    network: str
    """Empty for the network of the original GPU."""
    gpu: str
    sms: int
    clock_hz: float
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    limited_by: str
    """`power` or `area`: the limit of the chip. Empty for the original node."""
    times: Mapping[str, DividedTime]
    """Times by name: DECODE and PREFILL for inference, TRAINING_STEP for training. Empty if the model does not fit."""
    running: int
    """Requests in flight that fit into memory at the same time; 0 for training."""
    problem: str
    """The reason if the model does not fit into memory; otherwise empty."""
    changes: Sequence[Change]
    """Figures that differ from the original GPU, with reasons."""


@dataclass(frozen=True, slots=True)
class TechnologySweep:
    """Result of `loadgen hardware sweep`.

    `points` has one entry for every combination of a technology node, a memory and a network. The networks vary
    fastest, and the nodes vary slowest.
    """

    gpu: str
    purpose: str
    """`inference` or `training`."""
    model: str
    gpus: int
    format: str
    load: str
    """The load or the training step in words."""
    technologies: Sequence[str]
    memories: Sequence[str]
    networks: Sequence[str]
    points: Sequence[SweepPoint]
    validated: bool = False
    """Always false: the GPUs do not exist, so nothing was compared with measurements."""
    unused_networks: Sequence[str] = ()
    """Networks among `networks`, or parts of them, over which the deployment or the training job sends nothing."""

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the predicted times: TRAINING_STEP for a training sweep, otherwise DECODE and PREFILL."""
        return (TRAINING_STEP,) if self.purpose == "training" else (DECODE, PREFILL)

    def point(self, technology_name: str, memory: str, network: str) -> SweepPoint:
        """Return the SweepPoint of the hypothetical GPU with this technology node, memory and network."""
        names = (technology_name, memory, network)
        return next(point for point in self.points if (point.technology, point.memory, point.network) == names)


@dataclass(frozen=True, slots=True)
class SweepAxes:
    """The technology nodes, memories and networks that a sweep combines, by name.

    The network `""` stands for the links of the original GPU.
    """

    technologies: Sequence[str]
    memories: Sequence[str]
    networks: Sequence[str] = ("",)


@dataclass(frozen=True, slots=True)
class _Work:
    """The functions that predict the times of a model on a GPU, and the number of requests that fit into memory.

    `times` maps the name of each time, such as `time per output token`, to its function. The function takes a GPU and
    returns the time in seconds. `running` is the number of requests whose KV cache fits into memory at the same time (0
    for training).
    """

    times: Mapping[str, TimeOf]
    running: int = 0


def sweep_inference(
    deployment: Deployment, load: Load, axes: SweepAxes, memory_fraction: float = 0.9
) -> TechnologySweep:
    """Predict two times for every hypothetical GPU of `axes`: per output token, and to prefill one prompt.

    The time per output token is the duration of a step that only decodes. The step contains all requests in flight. If
    fewer requests can run at once, for example because of the GPU's memory, it contains only these. Every request has
    generated half of its response.

    `memory_fraction` is the fraction of the GPU memory that weights and KV cache may use.
    """

    def work_on(gpu: Gpu) -> _Work:
        here = replace(deployment, gpu=gpu)
        running = int(running_requests(here, load, memory_fraction))
        context = load.prompt_tokens + load.output_tokens / 2

        def token_s(card: Gpu) -> float:
            return float(predict_step(replace(here, gpu=card), decoding=running, context=context).total)

        def prompt_s(card: Gpu) -> float:
            return float(predict_step(replace(here, gpu=card), 1, load.prompt_tokens).total)

        return _Work({DECODE: token_s, PREFILL: prompt_s}, running)

    words = f"{load.prompt_tokens:,} + {load.output_tokens:,} tokens, {int(load.in_flight):,} in flight"
    return TechnologySweep(
        gpu=deployment.gpu.name,
        purpose="inference",
        model=deployment.model.name,
        gpus=deployment.gpus,
        format=deployment.weights.name,
        load=f"{words}, {deployment.framework.name}",
        technologies=axes.technologies,
        memories=axes.memories,
        networks=axes.networks,
        points=list(_points(deployment.gpu, axes, work_on)),
        unused_networks=unused_networks(
            axes.networks,
            in_machine=deployment.sends_in_machine,
            between_machines=deployment.far_hops > 0,
        ),
    )


def sweep_training(setup: TrainingSetup, axes: SweepAxes) -> TechnologySweep:
    """Return the time of one training iteration on every hypothetical GPU."""

    def work_on(gpu: Gpu) -> _Work:
        here = replace(setup, gpu=gpu)
        if not fits_memory(here):
            used = predict_memory(here).total
            raise HardwareError(
                f"the training step needs {used / 1e9:,.0f} GB per GPU, more than {MEMORY_SHARE:.0%} of the memory"
            )
        return _Work({TRAINING_STEP: lambda card: predict_iteration(replace(setup, gpu=card)).total_s})

    return TechnologySweep(
        gpu=setup.gpu.name,
        purpose="training",
        model=setup.model.name,
        gpus=setup.gpus,
        format=setup.number,
        load=f"{setup.batch:,} sequences of {setup.sequence:,} tokens, recomputation {setup.recomputation}",
        technologies=axes.technologies,
        memories=axes.memories,
        networks=axes.networks,
        points=list(_points(setup.gpu, axes, work_on)),
        unused_networks=unused_networks(
            axes.networks, in_machine=sends_in_machine(setup), between_machines=sends_between_machines(setup)
        ),
    )


def _points(original: Gpu, axes: SweepAxes, work_on: Callable[[Gpu], _Work]) -> Iterable[SweepPoint]:
    """Predict the times on every hypothetical GPU of `axes`, and yield one SweepPoint per GPU.

    `work_on` takes a GPU and returns a _Work: the functions that predict the times on this GPU. If the model does not
    fit into the memory of the GPU, `work_on` raises HardwareError. The SweepPoint then contains the error message and
    no times.
    """
    for names in product(axes.technologies, axes.memories, axes.networks):
        scaled = scaled_gpu(original, *names)
        gpu = scaled.gpu
        times: dict[str, DividedTime] = {}
        running, problem = 0, ""
        try:
            work = work_on(gpu)
        except HardwareError as error:
            problem = str(error)
        else:
            times = {name: divide_time(time_of, gpu) for name, time_of in work.times.items()}
            running = work.running
        yield SweepPoint(
            technology=names[0],
            projected=technology(names[0]).projected,
            memory=names[1],
            network=names[2],
            gpu=gpu.name,
            sms=gpu.sms,
            clock_hz=gpu.clock_hz,
            flops_per_s=gpu.flops_per_s,
            memory_bytes_per_s=gpu.memory_bytes_per_s,
            memory_bytes=gpu.memory_bytes,
            limited_by=scaled.limited_by,
            times=times,
            running=running,
            problem=problem,
            changes=scaled.changes,
        )
