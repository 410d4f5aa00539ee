"""Sweeps over technology nodes, memories and networks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadgen.servers.hardware import gpu, model
from loadgen.servers.hardware.inference import predict_step
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.hardware.technology_sweep import (
    DECODE,
    PREFILL,
    TRAINING_STEP,
    SweepAxes,
    TechnologySweep,
    sweep_inference,
    sweep_training,
)
from loadgen.servers.hardware.throughput_model import Load
from loadgen.servers.hardware.training import TrainingSetup, fits_memory, predict_iteration, predict_memory

LOAD = Load(512, 128, 16)
DEPLOYMENT = make_deployment("A100", "llama-2-70b", tensor=8)
SETUP = TrainingSetup(
    gpu=gpu("A100"),
    model=model("gpt-3-175b"),
    batch=128,
    tensor=8,
    pipeline=8,
    data=2,
    recomputation="selective",
    sequence_parallel=True,
    zero=1,
)
NODES = ("12nm", "7nm", "3nm", "1nm")


@pytest.fixture(scope="module")
def serving() -> TechnologySweep:
    """A sweep over nodes and memories."""
    return sweep_inference(DEPLOYMENT, LOAD, SweepAxes(NODES, ("HBM2E", "HBM4")))


def test_the_original_gpu_has_its_own_times(serving: TechnologySweep) -> None:
    """The point with the parts of A100 is A100."""
    times = serving.point("7nm", "HBM2E", "").times
    assert times[DECODE].total_s == float(predict_step(DEPLOYMENT, decoding=16, context=512 + 64).total)
    assert times[PREFILL].total_s == float(predict_step(DEPLOYMENT, 1, 512).total)


def test_newer_parts_are_never_slower(serving: TechnologySweep) -> None:
    """Along the nodes and from memory to memory; compute's part falls, and latency's rises."""
    for figure in serving.figures:
        for memory in serving.memories:
            times = [serving.point(node, memory, "").times[figure] for node in NODES]
            assert [time.total_s for time in times] == sorted((time.total_s for time in times), reverse=True)
            assert times[-1].shares["compute"] < times[0].shares["compute"]
            assert times[-1].shares["latency"] > times[0].shares["latency"]
        pairs = [
            [serving.point(node, memory, "").times[figure].total_s for memory in serving.memories] for node in NODES
        ]
        assert all(new < old for old, new in pairs)


def test_what_binds_moves_from_compute_to_the_rest(serving: TechnologySweep) -> None:
    """Decoding on HBM2E is bound by memory at the last node, and by latency on HBM4."""
    assert serving.point("12nm", "HBM2E", "").times[DECODE].bound == "compute"
    assert serving.point("1nm", "HBM2E", "").times[DECODE].bound == "memory"
    assert serving.point("1nm", "HBM4", "").times[DECODE].bound == "latency"
    assert not serving.validated


def test_a_model_that_does_not_fit_has_no_times() -> None:
    """The reason names what is missing; other points are not affected."""
    two = replace(DEPLOYMENT, tensor=2)
    found = sweep_inference(two, LOAD, SweepAxes(("7nm",), ("HBM2", "HBM2E")))
    small, large = found.points
    assert (small.times, small.running) == ({}, 0)
    assert "Llama-2-70B does not fit 2 x A100-80GB SXM (7nm, HBM2)" in small.problem
    assert large.times
    assert large.problem == ""


def test_training_sees_both_networks() -> None:
    """A step of the original is that of the iteration model; faster links take less time, and the rest stays."""
    found = sweep_training(SETUP, SweepAxes(("7nm",), ("HBM2E",), ("", "NVLink 5", "NVLink 5+InfiniBand XDR")))
    own, inner, both = (point.times[TRAINING_STEP] for point in found.points)
    assert own.total_s == predict_iteration(SETUP).total_s
    assert own.total_s > inner.total_s > both.total_s
    assert both.parts_s["compute"] == pytest.approx(own.parts_s["compute"], rel=0.02)
    assert found.gpus == 128


def test_training_that_needs_more_memory_is_left_out() -> None:
    """HBM2 halves the memory of A100."""
    found = sweep_training(replace(SETUP, recomputation="none"), SweepAxes(("7nm",), ("HBM2",)))
    assert found.points[0].problem.startswith("the training step needs ")


def test_networks_over_which_nothing_is_sent_are_named() -> None:
    """One stage has no hop to another machine, and one GPU has no link at all."""
    axes = SweepAxes(("7nm",), ("HBM2E",), ("NVLink 4", "NVLink 5 + InfiniBand XDR"))
    pipeline = make_deployment("A100", "llama-2-70b", tensor=8, pipeline=2)
    alone = make_deployment("A100", "llama-2-7b")
    assert sweep_inference(DEPLOYMENT, LOAD, axes).unused_networks == ["InfiniBand XDR"]
    assert sweep_inference(pipeline, LOAD, axes).unused_networks == []
    assert sweep_inference(alone, LOAD, axes).unused_networks == ["NVLink 4", "NVLink 5", "InfiniBand XDR"]
    small = TrainingSetup(gpu=gpu("A100"), model=model("llama-2-7b"), batch=64, tensor=8, zero=1)
    assert sweep_training(SETUP, axes).unused_networks == []
    assert sweep_training(small, axes).unused_networks == ["InfiniBand XDR"]


def test_training_has_one_limit_of_memory() -> None:
    """A job that needs 95% of the memory does not fit, as in `limits` and in `hardware compare`."""
    needed = predict_memory(SETUP).total
    for share, fits in ((0.85, True), (0.95, False)):
        card = replace(SETUP.gpu, memory_bytes=needed / share)
        setup = replace(SETUP, gpu=card)
        assert fits_memory(setup) == fits
        points = sweep_training(setup, SweepAxes(("7nm",), ("HBM2E",))).points
        assert bool(points[0].times) == fits
