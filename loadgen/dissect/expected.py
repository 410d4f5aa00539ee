"""What servers.hardware makes of a technique, a model and the bounds of a device; without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.dissect.found import Bounds
from loadgen.dissect.techniques import RANK, Technique
from servers.hardware import Architecture, Gpu, HardwareError, gpu, gpu_links
from servers.hardware.torch_step import StepMemory, TorchStep, peak
from servers.hardware.training import NF4_BYTES, WEIGHT_BYTES, Training, iteration

if TYPE_CHECKING:
    from loadgen.dissect.training import TrainingAsked

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
INT8_BYTES = 1.0


def expected_bytes(asked: TrainingAsked, technique: Technique, count: int) -> dict[str, float]:
    """By kind."""
    held: StepMemory = peak(
        TorchStep(
            model=asked.shape,
            sequences=asked.batch // count,
            sequence=asked.sequence,
            value_bytes=BYTES[asked.dtype],
            recompute=technique.recompute,
            flash=technique.flash,
            cpu=asked.device == "cpu",
            zero=technique.zero,
            data=count,
            adapter_rank=RANK if technique.adapters else 0,
            base_bytes=NF4_BYTES if technique.qlora else INT8_BYTES if technique.quantised else None,
        )
    )
    return {
        "weights": held.weights,
        "gradients": held.gradients,
        "optimiser": held.optimiser,
        "activations": held.activations,
    }


def expected_s(asked: TrainingAsked, technique: Technique, allowed: Bounds, count: int) -> dict[str, float]:
    """By phase, on devices of these bounds. Of a CPU each process has its part."""
    took = iteration(
        Training(
            gpu=_card(allowed, count if asked.device == "cpu" else 1),
            model=asked.shape,
            batch=asked.batch,
            sequence=asked.sequence,
            micro_batch=asked.batch // count,
            data=count,
            recomputation="full" if technique.recompute else "none",
            flash=technique.flash,
            zero=technique.zero,
            offload=technique.offload,
            adapter_rank=RANK if technique.adapters else 0,
            base_bytes=NF4_BYTES if technique.qlora else WEIGHT_BYTES,
        )
    )
    backward = took.backward_s + took.recomputation_s + took.data_s
    held = expected_bytes(asked, technique, count)
    moved = 2 * held["optimiser"] + (3 if not technique.adapters else 0) * held["weights"]
    optimiser = took.optimiser_s if technique.offload else moved * count / allowed.bytes_per_s
    return {"forward": took.forward_s, "backward": backward, "optimiser": optimiser}


def _card(allowed: Bounds, parts: int) -> Gpu:
    """A GPU by its row, or one core that reaches its bounds."""
    try:
        return gpu(allowed.device)
    except HardwareError:
        pass
    link = gpu_links()["PCIe"]
    plain = Architecture("probed", 1.0, 1.0, 1.0, 1.0, 1e6, allowed.launch_s, 0.0, allowed.launch_s, 0.0)
    peaks = {"bf16": allowed.flops_per_s / parts}
    return Gpu(
        *("probed", plain, peaks, 1e15, allowed.bytes_per_s / parts, 1, 1e9, 0.0, 0.0),
        link=link,
        pcie=link,
    )
