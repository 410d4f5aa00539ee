"""What a training step of plain PyTorch takes by the model, on machines of which one resource alone is scarce."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadgen.servers.hardware import Architecture, Gpu, Link, gpu_links, model
from loadgen.servers.hardware.training_memory import TorchStep
from loadgen.servers.hardware.training_time import MAPPED_BYTES, TorchMachine, predict_step_time

NEVER = 1e30
SHAPE = replace(model("llama-2-7b"), layers=2)
STEP = TorchStep(model=SHAPE, sequences=2, sequence=512)
NAMES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")


def machine(
    flops_per_s: float = NEVER, bytes_per_s: float = NEVER, link_bytes_per_s: float = NEVER, fresh: float = 0.0
) -> TorchMachine:
    """Whatever is not named is for nothing."""
    plain = Architecture("ideal", 1.0, 1.0, 1.0, 1.0, 1e6, 0.0, 0.0, 0.0, 0.0)
    pcie = gpu_links()["PCIe"]
    card = Gpu("ideal", plain, {"bf16": flops_per_s}, NEVER, bytes_per_s, 1, 1e30, 0.0, 0.0, link=pcie, pcie=pcie)
    return TorchMachine(
        card, {name: Link(name, link_bytes_per_s, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for name in NAMES}, fresh
    )


def test_computing_is_six_flops_per_parameter_and_token() -> None:
    """Two forward and four backward, attention beside them; adapters leave out those of frozen weights. Training
    reaches 82% of what the best GEMM does, and that 95% of the peak."""
    computing = machine(flops_per_s=1e12)
    found = predict_step_time(STEP, computing).parts
    flops = 2 * STEP.tokens * (SHAPE.layer_parameters + SHAPE.head_parameters)
    scores = 4 * SHAPE.layers * 2 * SHAPE.hidden * 512**2
    assert found["forward"] == pytest.approx((flops + scores) / 0.95e12 / 0.82, rel=0.01)
    assert found["backward"] == pytest.approx(2 * found["forward"], rel=0.01)
    lora = predict_step_time(replace(STEP, adapter_rank=64), computing).parts
    assert found["forward"] < lora["forward"] < 1.1 * found["forward"]
    assert lora["backward"] < 0.65 * found["backward"]
    again = predict_step_time(replace(STEP, recompute=True), computing).parts
    assert again["backward"] > 1.3 * found["backward"]


def test_the_optimiser_reads_and_writes_seven_times() -> None:
    """Weight, gradient and two moments in, all but the gradient out; a part of it each under ZeRO."""
    reading = machine(bytes_per_s=1e10)
    trained = 4 * (SHAPE.layer_parameters + 2 * SHAPE.head_parameters)
    alone = predict_step_time(STEP, reading).parts["optimiser"]
    assert alone == pytest.approx(7 * trained / 1e10, rel=0.001)
    assert predict_step_time(replace(STEP, zero=3, data=2), reading).parts["optimiser"] == pytest.approx(alone / 2)
    assert predict_step_time(replace(STEP, adapter_rank=64), reading).parts["optimiser"] < alone / 20


def test_adapters_and_bases_in_few_bits_move_more() -> None:
    """What adapters give is scaled and added, NF4 is unpacked twice; a kernel for attention moves no scores."""
    reading = machine(bytes_per_s=1e10)
    lora, qlora = (replace(STEP, adapter_rank=64, base_bytes=base) for base in (None, 0.516))
    plain, flash = (predict_step_time(replace(STEP, flash=flash), reading).parts["forward"] for flash in (False, True))
    assert (
        plain < predict_step_time(lora, reading).parts["forward"] < predict_step_time(qlora, reading).parts["forward"]
    )
    assert flash < plain


def test_communication_is_what_each_stage_sends() -> None:
    """At 1 GB/s: DDP adds gradients up, ZeRO 1 hands out weights too, FSDP gathers once or twice and scatters."""
    linked, size = machine(link_bytes_per_s=1e9), 4 * (SHAPE.layer_parameters + 2 * SHAPE.head_parameters)
    half = size / 2 / 1e9  # of two, each sends and gets so much
    told = {zero: predict_step_time(replace(STEP, zero=zero, data=2), linked).communication for zero in (0, 1, 2, 3)}
    expected = {
        0: {"backward": 2 * half},
        1: {"backward": 2 * half, "optimiser": 2 * half},
        2: {"forward": half, "backward": half},
        3: {"forward": half, "backward": 2 * half},
    }
    for zero, parts in expected.items():
        assert told[zero] == pytest.approx(parts, rel=0.001)
    assert predict_step_time(STEP, linked).communication == {}
    adapted = predict_step_time(replace(STEP, zero=3, data=2, adapter_rank=64), linked).communication
    assert adapted["backward"] == pytest.approx(adapted["forward"], rel=0.05)  # gradients of adapters alone


def test_large_tensors_are_mapped_anew() -> None:
    """Logits and gradients of the head above 32 MiB, at the rate at which pages come; nothing for small ones."""
    found = predict_step_time(STEP, machine(fresh=1e9)).parts
    logits = 4 * STEP.tokens * SHAPE.vocabulary
    assert logits > MAPPED_BYTES
    assert found["forward"] == pytest.approx(2 * logits / 1e9)
    assert found["backward"] == pytest.approx((2 * logits + 2 * 4 * SHAPE.head_parameters) / 1e9)
    small = TorchStep(model=replace(SHAPE, vocabulary=100), sequences=1, sequence=32)
    assert sum(predict_step_time(small, machine(fresh=1e9)).parts.values()) < 1e-9
