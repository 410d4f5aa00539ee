"""The roofline, by hand and against a published data set."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from servers.hardware import (
    ALL_REDUCE_LATENCY_S,
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    OVERHEAD_S,
    HardwareError,
    Work,
    gpu,
    model,
    number_format,
    roofline,
    tables,
)
from servers.simulated.server import protocol_of
from servers.simulated.timing import BatchingClock, Job


@pytest.mark.parametrize("name", [row["model"] for row in tables()["models"]])
def test_shapes_agree_with_the_parameter_counts(name: str) -> None:
    """Layers, head and an embedding of the head's size make up the published count, but for a thousandth: vectors of
    norms and biases, and learned positions."""
    shape = model(name)
    matrices = shape.layer_parameters + (2 - shape.tied) * shape.head_parameters
    assert shape.parameters == pytest.approx(matrices, rel=1e-3)
    assert shape.parameters >= matrices


def test_kv_cache_per_token() -> None:
    """Keys and values of all layers in 16 bits; 70B groups its queries and needs less than 7B."""
    sizes = {name: roofline(model_name=name).kv_bytes for name in ("Llama-2-7B", "Llama-2-13B", "Llama-2-70B")}
    assert sizes == {"Llama-2-7B": 524288, "Llama-2-13B": 819200, "Llama-2-70B": 327680}


def test_decoding_is_bound_by_memory() -> None:
    """One token alone takes as long as reading all weights that it passes, and its context."""
    shape, card = model("Llama-2-7B"), gpu("A800-80GB SXM")
    read_bytes = 2 * (shape.parameters - shape.head_parameters) + 1001 * 2 * shape.kv_values
    expected_s = read_bytes / (card.memory_bytes_per_s * MEMORY_EFFICIENCY) + OVERHEAD_S
    step_ns = roofline().step_ns(Work(tokens=1, logits=1, pairs=1000, kv_tokens=1000))
    assert step_ns == pytest.approx(1e9 * expected_s, rel=1e-4)


def test_prefill_is_bound_by_compute() -> None:
    """A chunk of 8192 tokens takes as long as two operations per parameter and token, and its attention."""
    shape, card = model("Llama-2-7B"), gpu("A800-80GB SXM")
    pairs = 16 * (512 * 513 // 2)
    flops = 2 * shape.layer_parameters * 8192 + 2 * shape.head_parameters * 16 + 4 * 32 * 4096 * pairs
    expected_s = flops / (card.flops_per_s * COMPUTE_EFFICIENCY) + OVERHEAD_S
    step_ns = roofline().step_ns(Work(tokens=8192, logits=16, pairs=pairs, kv_tokens=8192))
    assert step_ns == pytest.approx(1e9 * expected_s, rel=1e-9)


def test_tensor_parallel_divides_work_and_pays_for_the_link() -> None:
    """Two GPUs halve the roofline's term and add two all-reduces per layer over NVLink, or PCIe where there is none."""
    work = Work(tokens=256, logits=256, pairs=256 * 600, kv_tokens=256 * 600)
    for card, one_way_bytes_per_s in (("A800-80GB SXM", 200e9), ("RTX 4090", 32e9)):
        one, two = roofline(card), roofline(card, tensor_parallel=2)
        halved_s = (one.step_ns(work) / 1e9 - OVERHEAD_S) / 2
        all_reduce_s = 256 * 4096 * 2 / one_way_bytes_per_s + ALL_REDUCE_LATENCY_S
        expected_s = halved_s + 2 * 32 * all_reduce_s + OVERHEAD_S
        assert two.step_ns(work) == pytest.approx(1e9 * expected_s, rel=1e-6)


def test_kv_cache_is_what_the_weights_leave() -> None:
    """80 GB x 0.9 without 13.48 GB of weights hold 111,624 tokens of 512 KiB; two GPUs hold more than twice as many."""
    assert roofline().kv_tokens(0.9) == 111_624
    assert roofline(tensor_parallel=2).kv_tokens(0.9) > 2 * 111_624


def test_a_model_that_does_not_fit_is_an_error() -> None:
    """The message says what to choose instead."""
    with pytest.raises(ValueError, match="Llama-2-13B does not fit 1 x RTX 3090: choose more GPUs"):
        roofline("RTX 3090", "Llama-2-13B").kv_tokens(0.9)


def test_unknown_names_are_errors_that_name_the_nearest_one() -> None:
    """GPU, model and degree of tensor parallelism are checked when the roofline is made."""
    with pytest.raises(
        ValueError, match=r"unknown GPU 'a8000' \(did you mean A800-80GB SXM.*\?\): choose one of RTX 3090"
    ):
        roofline("a8000")
    with pytest.raises(ValueError, match=r"unknown model 'Llama-2-7' \(did you mean Llama-2-7B.*\?\): choose one of"):
        roofline(model_name="Llama-2-7")
    with pytest.raises(HardwareError, match="unknown number format 'xyz': choose one of fp32, bf16"):
        number_format("xyz")
    with pytest.raises(ValueError, match="tensor parallel over 0 GPUs"):
        roofline(tensor_parallel=0)


# Input plus output tokens per second of 1000 prompts of 512 tokens in one burst, Llama-2-13B on one A800, by the cap on
# the output length: github.com/L1aoXingyu/llm-infer-bench, commit a13f639 (September 2023).
MEASURED = {
    "lightllm": {32: 6821.80, 128: 6063.72, 512: 4404.93, 1536: 4102.28},
    "vllm": {32: 6841.49, 128: 5086.82, 512: 3533.67, 1536: 3325.49},
    "tgi": {32: 4937.88, 128: 3837.65, 512: 3391.89, 1536: 3307.23},
}


@pytest.mark.parametrize("cap", [32, 128, 512, 1536])
@pytest.mark.parametrize(("server", "within"), [("lightllm", 1.2), ("vllm", 1.5), ("tgi", 1.5)])
def test_throughput_is_that_of_a_published_run(server: str, within: float, cap: int) -> None:
    """The simulated server is faster than the measured ones of 2023, by at most a fifth or a half."""
    outputs = published_outputs(cap)
    policy = replace(protocol_of(server).policy, running_limit=256)
    clock = BatchingClock(policy, 68_700, roofline(model_name="Llama-2-13B").step_ns)
    for output_tokens in outputs:
        clock.submit(Job(512, output_tokens, 0), 0)
    last_ns = 0
    while (now_ns := clock.next_ns()) is not None:
        last_ns = now_ns
        clock.emissions(now_ns)
    tokens_per_s = (512 * 1000 + sum(outputs)) / (last_ns / 1e9)
    assert 1 < tokens_per_s / MEASURED[server][cap] < within


def published_outputs(cap: int) -> list[int]:
    """1000 lengths by the data set's rule: exponential with mean 128, redrawn above the cap, at least 10."""
    random = Random(0xCADE)
    draws = (random.expovariate(1 / 128) for _ in range(1_000_000))
    within_cap = (max(10, int(length)) for length in draws if length <= cap)
    return [next(within_cap) for _ in range(1000)]
