"""Explains why one GPU trains faster than another: divides the speed-up into factors, such as the memory bandwidth.

The speed is the number of trained tokens per second. The two GPUs may train with different settings: each GPU has the
settings that are fastest on this GPU and fit into its memory. The settings are the GPUs per layer, the pipeline stages,
the size of a micro-batch, the chunks per stage, and the recomputation of activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from loadgen.servers.hardware import Gpu, HardwareError, ModelShape, gpu, model, with_changes
from loadgen.servers.hardware.dissection import (
    CAPACITY,
    NATIVE,
    UNLIMITED_BYTES,
    ComparedGpu,
    Dissection,
    FactorChange,
    capacity_change,
    compute_change,
    dissection,
    divide_speed_up,
    format_changes,
    launch_change,
    link_change,
    memory_change,
    native_format,
    network_change,
)
from loadgen.servers.hardware.technology import refuse_unused_networks, scaling_changes
from loadgen.servers.hardware.training import (
    IterationTime,
    Recomputation,
    TrainingSetup,
    fits_memory,
    predict_iteration,
    replicas_in_one_machine,
    sends_between_machines,
    sends_in_machine,
)
from loadgen.servers.hardware.validation import Accuracy, training_accuracy

TENSORS = (1, 2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8)
CHUNKS = (1, 2, 3, 4, 6)
"""GPUs per layer, sequences per micro-batch, and layer chunks per pipeline stage that are tried."""
Attention = Literal["fused", "stored"]
"""`fused` is FlashAttention. `stored` writes all attention scores to memory."""


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """One of the compared GPUs, and how the model is trained on GPUs of this type."""

    gpu: str
    format: str = NATIVE
    gpus: int = 64
    batch: int = 256  # Sequences per iteration, on all GPUs
    recomputation: str = "auto"  # `auto`, or the value of TrainingSetup.recomputation
    attention: Attention = "fused"
    network: str = ""  # Link within or between machines, as of `loadgen limits --network`; empty for the GPU's own


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The training job that all compared GPUs run."""

    model: str
    sequence: int = 2048
    tensor: int | None = None  # GPUs that share each layer; None for the fastest of TENSORS
    file: Path | None = None
    """TOML file with additional GPUs and models."""


def dissect_training(uses: Sequence[TrainedOn], job: TrainingJob) -> list[Dissection]:
    """Return the speed-up from each GPU in `uses` to the next GPU in `uses`, divided into factors such as memory and
    network.

    Raises HardwareError if there are no settings with which the training job fits one of the GPUs.
    """
    shape = model(job.model, job.file)
    setups = [_fastest_setup(use, job, shape) for use in uses]
    compared = [_compared(setup, gpu(use.gpu, job.file).name) for use, setup in zip(uses, setups, strict=True)]
    results = []
    for index in range(len(uses) - 1):
        before, after = setups[index], setups[index + 1]
        middle = after
        if (uses[index].gpus, uses[index].batch) != (uses[index + 1].gpus, uses[index + 1].batch):
            same_scale = replace(uses[index + 1], gpus=uses[index].gpus, batch=uses[index].batch)
            middle = _fastest_setup(same_scale, job, shape)
        start = replace(before, gpu=replace(before.gpu, memory_bytes=UNLIMITED_BYTES))
        factors = divide_speed_up(start, _changes(before, middle, after), training_speed)
        pair = compared[index], compared[index + 1]
        results.append(dissection(pair, (before.gpu, after.gpu), factors, Accuracy(validated=False)))
    return results


def training_speed(setup: TrainingSetup) -> float:
    """Return the speed of a training job, in trained tokens per second of all GPUs together."""
    return setup.batch * setup.sequence / predict_iteration(setup).total_s


def _fastest_setup(use: TrainedOn, job: TrainingJob, shape: ModelShape) -> TrainingSetup:
    """Return the training job with the settings that train fastest among those that fit into memory."""
    possible = list(_possible_setups(use, job, shape))
    if not possible:
        raise HardwareError(
            f"{use.gpus} GPUs cannot divide {shape.layers} layers and {shape.heads} heads of {shape.name}, and a batch "
            f"of {use.batch}, into equal parts: choose other numbers (--gpus, --batch, --tp), such as powers of 2"
        )
    fitting = [setup for setup in possible if fits_memory(setup)]
    if not fitting:
        raise HardwareError(
            f"training {shape.name} does not fit {use.gpus} x {use.gpu} with a batch of {use.batch}: choose more GPUs "
            "(--gpus), a larger batch (--batch), or a smaller model"
        )
    fastest = min(fitting, key=lambda setup: predict_iteration(setup).total_s)
    refuse_unused_networks(
        scaling_changes(None, None, use.network),
        in_machine=sends_in_machine(fastest),
        between_machines=sends_between_machines(fastest),
    )
    return fastest


def _possible_setups(use: TrainedOn, job: TrainingJob, shape: ModelShape) -> Iterator[TrainingSetup]:
    """Yield the job with each combination of settings that divides heads, layers, GPUs and batch evenly."""
    card = with_changes(gpu(use.gpu, job.file), scaling_changes(None, None, use.network))
    base = TrainingSetup(
        gpu=card,
        model=shape,
        batch=use.batch,
        sequence=job.sequence,
        number=native_format(card) if use.format == NATIVE else use.format,
        flash=use.attention == "fused",
        zero=1,
    )
    recomputations = get_args(Recomputation) if use.recomputation == "auto" else (use.recomputation,)
    for tensor, pipeline, data in _divisions(use.gpus, job.tensor, shape):
        for micro_batch, chunks, recomputation in product(MICRO_BATCHES, CHUNKS, recomputations):
            micro_batches, rest = divmod(use.batch, data * micro_batch)
            if rest or shape.layers % (pipeline * chunks):
                continue
            if chunks > 1 and (pipeline == 1 or micro_batches % pipeline):
                continue  # the interleaved schedule needs a multiple of the stages as number of micro-batches
            yield replace(
                base,
                tensor=tensor,
                pipeline=pipeline,
                data=data,
                micro_batch=micro_batch,
                interleave=chunks,
                recomputation=recomputation,
                sequence_parallel=tensor > 1,
            )


def _divisions(gpus: int, tensor: int | None, shape: ModelShape) -> Iterator[tuple[int, int, int]]:
    """Yield the ways to divide a number of GPUs, as (GPUs per layer, pipeline stages, replicas)."""
    for size in (tensor,) if tensor else TENSORS:
        if gpus % size or shape.heads % size:
            continue
        groups = gpus // size
        yield from ((size, stages, groups // stages) for stages in range(1, groups + 1) if groups % stages == 0)


def _compared(setup: TrainingSetup, name: str) -> ComparedGpu:
    times = predict_iteration(setup)
    settings = {
        "batch": f"{setup.batch:,}",
        "TP x PP x DP": f"{setup.tensor} x {setup.pipeline} x {setup.data}",
        "micro-batch": str(setup.micro_batch),
        "chunks": str(setup.interleave),
        "recomputation": setup.recomputation,
        "attention": "fused" if setup.flash else "stored",
        "network": setup.gpu.machine_link.name,
    }
    seconds = {field.name.removesuffix("_s"): getattr(times, field.name) for field in fields(IterationTime)}
    return ComparedGpu(
        name,
        setup.gpus,
        setup.number,
        settings,
        training_speed(setup),
        {name: value / times.total_s for name, value in seconds.items()},
        f"iteration {training_accuracy(setup)}",
    )


def _changes(old: TrainingSetup, middle: TrainingSetup, new: TrainingSetup) -> list[FactorChange[TrainingSetup]]:
    """Return the changes that turn the training job `old` on the first GPU into the job `new` on the second GPU.

    Each change replaces one property of the GPU, or settings of the job. The list is in the order in which the changes
    are applied.

    `middle` is the fastest job on the second GPU with the batch and the number of GPUs of `old`. It supplies the
    settings that depend on the memory of the second GPU, such as the micro-batch.
    """
    changes = [
        _on_gpu(compute_change(old.gpu, new.gpu, old.number)),
        *format_changes((old.number, new.number), (old.gpu, new.gpu), lambda setup, name: replace(setup, number=name)),
        _on_gpu(memory_change(old.gpu, new.gpu)),
        capacity_change(old.gpu, new.gpu, lambda setup: replace(setup, **_settings_of(middle))),
    ]
    setups = old, middle, new
    if any(setup.tensor > 1 or replicas_in_one_machine(setup) for setup in setups):
        sharing = max(2, *(setup.tensor for setup in setups))
        changes.append(_on_gpu(link_change(old.gpu, new.gpu, sharing)))
    if old.gpu.machine_link != new.gpu.machine_link:
        changes.append(_on_gpu(network_change(old.gpu, new.gpu)))
    changes.append(_on_gpu(launch_change(old.gpu, new.gpu)))
    if old.flash != new.flash:
        before, after = ("fused" if setup.flash else "stored" for setup in (old, new))
        changes.append(
            FactorChange("attention kernel", before, after, None, lambda setup: replace(setup, flash=new.flash))
        )
    if (old.gpus, old.batch) != (new.gpus, new.batch):
        changes.append(_scale_change(old, new))
    return changes


def _scale_change(old: TrainingSetup, new: TrainingSetup) -> FactorChange[TrainingSetup]:
    """Return the change that replaces the number of GPUs and the batch size of `old` by those of `new`.

    Other settings depend on the number of GPUs, such as the number of pipeline stages. The change also replaces these
    settings by those of `new`.
    """
    if old.gpus == new.gpus:
        name, sizes = "batch", (old.batch, new.batch)
    else:
        name, sizes = "number of GPUs" if old.batch == new.batch else "number of GPUs, batch", (old.gpus, new.gpus)
    return FactorChange(
        name,
        f"{sizes[0]:,}",
        f"{sizes[1]:,}",
        sizes[1] / sizes[0],
        lambda setup: replace(setup, batch=new.batch, **_settings_of(new)),
        needs=[CAPACITY],
    )


def _settings_of(setup: TrainingSetup) -> dict[str, Any]:
    """Return the settings of `setup` that depend on the number and the memory of the GPUs, such as the pipeline stages.

    The result can be passed to `dataclasses.replace` as keyword arguments.
    """
    names = ("tensor", "pipeline", "data", "micro_batch", "interleave", "recomputation", "sequence_parallel")
    return {name: getattr(setup, name) for name in names}


def _on_gpu(change: FactorChange[Gpu]) -> FactorChange[TrainingSetup]:
    """Return a change of a training setup that applies `change` to the GPU of the setup."""

    def apply(setup: TrainingSetup) -> TrainingSetup:
        return replace(setup, gpu=change.apply(setup.gpu))

    return FactorChange(change.name, change.before, change.after, change.grew, apply)
