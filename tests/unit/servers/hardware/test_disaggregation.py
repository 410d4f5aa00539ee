"""Separate workers for prompts and for decoding in the hardware model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loadgen.servers.hardware.disaggregation import disaggregated_times, transfer_s, with_prefill_workers
from loadgen.servers.hardware.inference import ServingOptions, predict_step
from loadgen.servers.hardware.roofline import compute_limits, make_deployment
from loadgen.servers.hardware.throughput_model import Load

LOAD = Load(4096, 512, 64)
WORKER = make_deployment("B200", "deepseek-r1", "nvfp4", 4, framework_name="TensorRT-LLM")


def test_decode_steps_have_no_prompts() -> None:
    """With many prefill workers, TPOT is the duration of a decode step of the requests that decode."""
    times = disaggregated_times(WORKER, LOAD, prefill_workers=100)
    whole = float(predict_step(WORKER, decoding=64, context=4096 + 256).total)
    assert 0.8 * whole < float(times.tpot_s) <= whole


def test_the_slower_workers_determine_the_throughput() -> None:
    """One prefill worker for many clients: requests wait for their prompts, and few decode."""
    few, many = (disaggregated_times(WORKER, LOAD, prefill_workers=count) for count in (0.1, 10))
    assert few.output_tokens_per_s < many.output_tokens_per_s / 2
    assert few.tpot_s < many.tpot_s
    assert few.ttft_s > 10 * many.ttft_s
    rate = float(few.output_tokens_per_s) / LOAD.output_tokens
    assert rate == pytest.approx(0.1 * 2 / float(predict_step(WORKER, 2, 4096).total), rel=0.05)


def test_the_cache_travels() -> None:
    """The KV cache of a prompt takes its bytes over the port of one GPU, as each GPU has a copy of the latent cache."""
    alone = ServingOptions(4, 4).apply(replace(WORKER, tensor=1))
    expected = 4096 * 61 * 576 * alone.kv_bytes / (25e9 * 0.85)
    assert transfer_s(alone, 4096) == pytest.approx(expected + 15e-6)
    assert transfer_s(WORKER, 4096) == pytest.approx(transfer_s(alone, 4096))


def test_arrays_are_many_numbers() -> None:
    """Several loads give what each gives alone."""
    together = disaggregated_times(WORKER, replace(LOAD, in_flight=np.array([1, 16, 256])))
    alone = [float(disaggregated_times(WORKER, replace(LOAD, in_flight=clients)).tpot_s) for clients in (1, 16, 256)]
    assert together.tpot_s.tolist() == pytest.approx(alone)


def test_prefill_workers_count_as_gpus() -> None:
    """Throughput per GPU is that of all GPUs."""
    limits = compute_limits(WORKER, LOAD, expect=disaggregated_times)
    both = with_prefill_workers(limits, WORKER, 2)
    assert both.gpus == 12
    assert not any(accuracy.validated for accuracy in both.accuracy.values())
    assert both.expected.output_tokens_per_s_per_gpu == pytest.approx(both.expected.output_tokens_per_s / 12)
