"""What loadgen.servers.hardware makes of a technique, a model and the bounds of a device; without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.dissect.results import DATA_SHEET, DeviceLimits
from loadgen.dissect.techniques import ADAPTER_RANK, Technique
from loadgen.servers.hardware import Architecture, Gpu, Link, gpu, gpu_links
from loadgen.servers.hardware.training import NF4_BYTES
from loadgen.servers.hardware.training_memory import StepMemory, TorchStep, peak_memory
from loadgen.servers.hardware.training_time import StepSeconds, TorchMachine, predict_step_time

if TYPE_CHECKING:
    from loadgen.dissect.training import TrainingSpec

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
INT8_BYTES = 1.0


def predict_memory_bytes(
    asked: TrainingSpec, technique: Technique, allowed: DeviceLimits, count: int
) -> dict[str, float]:
    """By kind."""
    held: StepMemory = peak_memory(_step(asked, technique, allowed, count))
    return {
        "weights": held.weights,
        "gradients": held.gradients,
        "optimiser": held.optimiser,
        "activations": held.activations,
    }


def predict_step_seconds(asked: TrainingSpec, technique: Technique, allowed: DeviceLimits, count: int) -> StepSeconds:
    """By phase, where each process has these bounds."""
    links = {
        name: Link(name, each.bytes_per_s, 1.0, 0.0, 0.0, 0.0, 0.0, each.latency_s, 0.0)
        for name, each in allowed.links.items()
    }
    machine = TorchMachine(_card(allowed), links, allowed.fresh_bytes_per_s)
    return predict_step_time(_step(asked, technique, allowed, count), machine)


def _step(asked: TrainingSpec, technique: Technique, allowed: DeviceLimits, count: int) -> TorchStep:
    return TorchStep(
        model=asked.shape,
        sequences=asked.batch // count,
        sequence=asked.sequence,
        value_bytes=BYTES[asked.dtype],
        recompute=technique.recompute,
        flash=technique.flash,
        cpu=asked.device == "cpu",
        sums_in_fp32=allowed.sums_in_fp32,
        zero=technique.zero,
        data=count,
        adapter_rank=ADAPTER_RANK if technique.adapters else 0,
        base_bytes=NF4_BYTES if technique.qlora else INT8_BYTES if technique.quantised else None,
        offload=technique.offload,
    )


def _card(allowed: DeviceLimits) -> Gpu:
    """A GPU by its row where the bounds are the data sheet's, or one core that reaches them."""
    if allowed.source == DATA_SHEET:
        return gpu(allowed.device)
    link = gpu_links()["PCIe"]
    plain = Architecture("probed", 1.0, 1.0, 1.0, 1.0, 1e6, allowed.launch_s, 0.0, allowed.launch_s, 0.0)
    return Gpu(
        *("probed", plain, {"bf16": allowed.flops_per_s}, 1e15, allowed.bytes_per_s, 1, 1e9, 0.0, 0.0),
        link=link,
        pcie=link,
    )
