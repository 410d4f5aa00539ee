"""The memory of a training step, counted by hand for a model of a few numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadgen.servers.hardware import ModelShape
from loadgen.servers.hardware.training_memory import TorchStep, peak_memory

SMALL = ModelShape("small", 2, 8, 16, 2, 2, 4, 32, 0)
LAYER = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8
PARAMETERS = 2 * LAYER + 2 * 8 * 32 + 8
LARGE = ModelShape("large", 12, 768, 2048, 12, 12, 64, 16000, 0)


def test_few_tokens_leave_weights_gradients_and_moments() -> None:
    """Four numbers of each parameter: at the end of the backward pass there is nothing else."""
    held = peak_memory(TorchStep(model=replace(SMALL, vocabulary=3200), sequences=1, sequence=1))
    parameters = PARAMETERS + 2 * 8 * (3200 - 32)
    assert held.weights == 4 * parameters
    assert held.optimiser == 2 * held.weights
    assert held.gradients == held.weights


def test_many_tokens_leave_what_autograd_keeps() -> None:
    """In fp32, of T tokens in S sequences: three of the hidden state and two numbers for each norm, four of the
    queries, the scores with their mask, four of the MLP; and the logits three times."""
    sequences, sequence = 64, 64
    tokens = sequences * sequence
    held = peak_memory(TorchStep(model=SMALL, sequences=sequences, sequence=sequence))
    norm = tokens * (3 * 8 * 4 + 8)
    layer = 2 * norm + 4 * tokens * 8 * 4 + sequences * 2 * sequence**2 * 4 + sequence**2 + 4 * tokens * 16 * 4
    assert held.activations == 2 * layer + norm + 3 * tokens * 32 * 4
    assert held.gradients == 0


def test_bf16_halves_all_but_norms_and_loss() -> None:
    """Those compute in fp32; scores are there in both."""
    whole = peak_memory(TorchStep(model=SMALL, sequences=64, sequence=64))
    half = peak_memory(TorchStep(model=SMALL, sequences=64, sequence=64, value_bytes=2.0))
    assert (half.weights, half.optimiser) == (whole.weights / 2, whole.optimiser / 2)
    assert whole.activations / 2 < half.activations < whole.activations * 1.1


def test_sums_in_fp32_stand_beside_the_gradient_of_the_output_head() -> None:
    """DDP's buckets have all gradients; besides them one is made in bf16, and summed in fp32 where the CPU does so."""
    step = TorchStep(model=LARGE, sequences=1, sequence=1, data=2, zero=1, value_bytes=2.0)
    made, summed = (peak_memory(replace(step, sums_in_fp32=each)).activations for each in (False, True))
    assert [made, summed] == pytest.approx([2 * LARGE.head_parameters, (2 + 4) * LARGE.head_parameters], rel=0.05)


@pytest.mark.parametrize(("zero", "weights", "optimiser"), [(0, 1, 1), (1, 1, 2), (2, 2, 2), (3, 2, 2)])
def test_zero_splits_by_stage(zero: int, weights: int, optimiser: int) -> None:
    """Over two devices: moments from stage 1, weights from stage 2 (FSDP2), and more of the peak at each."""
    step = TorchStep(model=LARGE, sequences=1, sequence=128, data=2)
    alone, split = peak_memory(step), peak_memory(replace(step, zero=zero))
    assert split.weights == alone.weights / weights
    assert split.optimiser == alone.optimiser / optimiser
    assert split.total <= peak_memory(replace(step, zero=max(0, zero - 1))).total


def test_what_saves_memory_saves_memory() -> None:
    """Recomputation, attention without scores, adapters, 4 bits: each less than the one before it."""
    step = TorchStep(model=LARGE, sequences=8, sequence=350)
    steps = [step, replace(step, flash=True), replace(step, recompute=True)]
    adapters = replace(step, recompute=True, adapter_rank=64)
    totals = [peak_memory(each).total for each in (*steps, adapters, replace(adapters, base_bytes=0.516))]
    assert totals == sorted(totals, reverse=True)
