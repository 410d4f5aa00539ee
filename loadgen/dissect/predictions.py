"""Predicts the time and memory of a training step with `loadgen.servers.hardware`. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.dissect.results import DATA_SHEET, DeviceLimits, LinkProbe
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
    spec: TrainingSpec, technique: Technique, limits: DeviceLimits, processes: int
) -> dict[str, float]:
    """Return the predicted memory in bytes at the peak of a training step, by purpose.

    The purposes are weights, gradients, optimiser and activations. The step runs on `processes` devices, and `limits`
    are the limits of each device.
    """
    memory: StepMemory = peak_memory(_torch_step(spec, technique, limits, processes))
    return {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimiser": memory.optimiser,
        "activations": memory.activations,
    }


def predict_step_seconds(spec: TrainingSpec, technique: Technique, limits: DeviceLimits, processes: int) -> StepSeconds:
    """Return the predicted seconds of each phase of a training step.

    The step runs in `processes` processes. Each process has a device with the limits `limits`.
    """
    links = {name: _link(name, probe) for name, probe in limits.links.items()}
    machine = TorchMachine(_gpu(limits), links, limits.fresh_bytes_per_s)
    return predict_step_time(_torch_step(spec, technique, limits, processes), machine)


def _torch_step(spec: TrainingSpec, technique: Technique, limits: DeviceLimits, processes: int) -> TorchStep:
    base_bytes = None
    if technique.qlora:
        base_bytes = NF4_BYTES
    elif technique.quantised:
        base_bytes = INT8_BYTES
    return TorchStep(
        model=spec.shape,
        sequences=spec.batch // processes,
        sequence=spec.sequence,
        value_bytes=BYTES[spec.dtype],
        recompute=technique.recompute,
        flash=technique.flash,
        cpu=spec.device == "cpu",
        sums_in_fp32=limits.sums_in_fp32,
        zero=technique.zero,
        data=processes,
        adapter_rank=ADAPTER_RANK if technique.adapters else 0,
        base_bytes=base_bytes,
        offload=technique.offload,
    )


def _link(name: str, probe: LinkProbe) -> Link:
    """Return a link of the hardware model with this name, and with the bandwidth and latency that `probe` measured."""
    return Link(
        name,
        bytes_per_s=probe.bytes_per_s,
        share=1.0,
        switch_share=0.0,
        custom_s=0.0,
        peer_s=0.0,
        two_shot_s=0.0,
        nccl_s=probe.latency_s,
        step_s=0.0,
    )


def _gpu(limits: DeviceLimits) -> Gpu:
    """Return a description of the device with the limits `limits`, as a `Gpu` for the prediction of times.

    If the limits come from a data sheet, the result is the GPU of this data sheet. If the limits were measured, the
    result is an imaginary GPU that reaches exactly these limits. It has a single streaming multiprocessor (SM).
    """
    if limits.source == DATA_SHEET:
        return gpu(limits.device)
    architecture = Architecture(
        "probed",
        compute_share=1.0,
        watts_per_TFLOP=1.0,
        memory_share=1.0,
        attention_share=1.0,
        load_share=1e6,
        launch_s=limits.launch_s,
        tile_s=0.0,
        attention_launch_s=limits.launch_s,
        attention_turn_s=0.0,
    )
    link = gpu_links()["PCIe"]
    return Gpu(
        name="probed",
        architecture=architecture,
        peaks={"bf16": limits.flops_per_s},
        memory_bytes=1e15,
        memory_bytes_per_s=limits.bytes_per_s,
        sms=1,
        clock_hz=1e9,
        watts=0.0,
        l2_bytes=0.0,
        link=link,
        pcie=link,
    )
