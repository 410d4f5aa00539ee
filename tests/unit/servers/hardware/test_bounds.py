"""What binds each GEMM and attention kernel: intensities, times and batches calculated by hand."""

from __future__ import annotations

import pytest

from loadgen.servers.hardware import HardwareError, gpu, model
from loadgen.servers.hardware.bounds import BOUNDS, GpuBounds, KernelBound, serving_bounds, training_bounds
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.hardware.roofline import make_deployment

STREAMED = (
    ("A100", "llama-2-70b", "fp16", 2, 33.83, 48.9914),
    ("A100", "mistral-7b", "fp16", 1, 7.102, 11.1733),
    ("A100", "gpt-j-6b", "fp16", 1, 5.934, 9.54693),
    ("A100", "llama-2-7b", "fp16", 1, 6.611, 10.1675),
    ("H100", "llama-2-7b", "fp16", 1, 4.024, 6.76157),
    ("H100", "llama-2-70b", "fp16", 2, 20.591, 28.6667),
    ("H100", "llama-2-70b", "fp8", 1, 20.591, 27.04),
    ("L40S", "llama-2-70b", "fp8", 2, 39.919, 62.7365),
)
"""GPU, model, format, tensor parallelism, time to read the weights once, and measured TPOT of one sequence, in ms
(TensorRT-LLM 0.9). The first time is that of all weights without the embedding at the data sheet's bandwidth."""


def llama(card: str, tensor: int = 1) -> Deployment:
    return make_deployment(card, "llama-2-13b", "bf16", tensor, 1, "kernels")


def by_name(found: GpuBounds, phase: str) -> dict[str, KernelBound]:
    return {each.kernel: each for each in found.kernels if each.phase == phase}


@pytest.mark.parametrize(
    ("kernel", "prefill", "a100_us", "h100_us"),
    [
        ("QKV", 190, 100.8, 49.4),
        ("attention output", 186, 33.6, 16.9),
        ("gate and up", 191, 181.5, 88.4),
        ("down", 190, 90.7, 44.5),
    ],
)
def test_gemms_of_llama_2_13b_by_hand(kernel: str, prefill: float, a100_us: float, h100_us: float) -> None:
    """A prompt of 200 tokens is bound by compute on A100 (ridge 153) and by memory on H100 (ridge 295).

    For the QKV GEMM, FLOPs are 2 * 200 * 15,360 * 5,120, and bytes 2 * (200 * 5,120 + 15,360 * 5,120 + 200 * 15,360).
    """
    a100, h100 = (by_name(serving_bounds(llama(card), 1, 200, 300), "prefill")[kernel] for card in ("A100", "H100"))
    assert (a100.ridge, h100.ridge) == (pytest.approx(153, abs=0.5), pytest.approx(295, abs=0.5))
    assert a100.flops_per_byte == h100.flops_per_byte == pytest.approx(prefill, abs=0.6)
    assert (a100.bound, h100.bound) == ("compute", "memory")
    assert 1e6 * a100.limit_s == pytest.approx(a100_us, rel=0.005)
    assert 1e6 * h100.limit_s == pytest.approx(h100_us, rel=0.005)
    assert a100.expected_s > a100.limit_s
    assert h100.expected_s > h100.limit_s


def test_one_sequence_decodes_with_one_flop_per_byte() -> None:
    """Every GEMM reads two bytes per weight for two FLOPs. The output head of a single prompt does so too."""
    for card in ("V100", "A100", "H100", "H200", "B200"):
        found = serving_bounds(llama(card), 1, 200, 300)
        decode = by_name(found, "decode")
        assert all(each.flops_per_byte == pytest.approx(1.0, abs=0.01) for each in decode.values())
        assert {name for name, each in decode.items() if each.bound != "memory"} == {"attention"}
        assert by_name(found, "prefill")["output head"].flops_per_byte == pytest.approx(1.0, abs=0.01)


def test_short_contexts_wait_for_the_launch_of_attention() -> None:
    """300 cached tokens take 3 us to read on A100, and the kernel takes longer to start."""
    attention = by_name(serving_bounds(llama("A100"), 1, 200, 300), "decode")["attention"]
    assert 1e6 * attention.limit_s == pytest.approx(3.0, rel=0.02)
    assert attention.bound == "latency"
    longer = by_name(serving_bounds(llama("A100"), 16, 200, 4096), "decode")["attention"]
    assert longer.bound == "memory"


def test_attention_of_prompts_by_hand() -> None:
    """Causal attention of t tokens has 2 t (t + 1) FLOPs per value, and reads and writes four values of two bytes."""
    attention = by_name(serving_bounds(llama("A100"), 1, 200, 300), "prefill")["attention"]
    assert attention.flops_per_byte == pytest.approx(2 * 201 / (4 * 2), rel=1e-3)
    assert attention.compute_from == 612  # (t + 1) / 4 >= 153


def test_compute_binds_a_gemm_from_this_batch_on() -> None:
    """2 m n k / peak equals the time for m k + k n + m n values at m = R n k / (n k - R (k + n)), R the ridge."""
    card, shape = gpu("H100"), model("llama-2-13b")
    n, k, ridge = 3 * shape.hidden, shape.hidden, card.flops_per_s / card.memory_bytes_per_s
    by_hand = ridge * n * k / (n * k - ridge * (k + n))
    for phase in ("prefill", "decode"):
        found = by_name(serving_bounds(llama("H100"), 1, 200, 300), phase)["QKV"].compute_from
        assert found == pytest.approx(by_hand, abs=1)


def test_no_batch_makes_decode_attention_bound_by_compute() -> None:
    """Each sequence has a KV cache of its own. Eight query heads share it, which makes nearly eight FLOPs per byte."""
    attention = by_name(
        serving_bounds(make_deployment("H100", "llama-3.1-70b", "bf16", 8, 1, "kernels"), 64, 512, 4096), "decode"
    )["attention"]
    assert attention.compute_from is None
    assert attention.flops_per_byte == pytest.approx(8.0, rel=0.01)


def test_latent_attention_has_far_more_flops_per_byte() -> None:
    """All 128 heads share 576 cached values, of which 512 are also the values: 128 * 2 * 1,088 / (576 * 2) FLOPs."""
    made = make_deployment("H200", "deepseek-r1", "bf16", 1, 1, "kernels")
    attention = by_name(serving_bounds(made, 64, 512, 1 << 20), "decode")["attention"]
    assert attention.flops_per_byte == pytest.approx(128 * 1088 / 576, rel=0.01)
    assert attention.bound == "compute"  # the ridge of H200 is 206


@pytest.mark.parametrize("name", ["deepseek-r1", "gpt-oss-120b", "qwen3.5-397b-a17b", "qwen3-30b-a3b"])
def test_models_with_experts_have_every_kernel(name: str) -> None:
    """Router, experts and each kind of attention. Experts need a larger batch than a dense GEMM with the same shape."""
    made = make_deployment("B200", name, "bf16", 1, 1, "kernels")
    found = serving_bounds(made, 64, 1024, 1024)
    kernels = by_name(found, "decode")
    assert {"router", "experts gate, up", "experts down", "attention", "attention output", "output head"} <= set(
        kernels
    )
    assert ("window attention" in kernels) == bool(made.model.window_layers)
    assert ("linear attention" in kernels) == bool(made.model.linear_layers)
    experts, output = kernels["experts gate, up"].compute_from, kernels["attention output"].compute_from
    assert experts is None or (output or 0) < experts
    assert kernels["attention"].layers + made.model.window_layers + made.model.linear_layers == made.model.layers


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_shares_add_up(phase: str) -> None:
    """Shares of kernels and of bounds are parts of one time."""
    found = serving_bounds(llama("A100"), 8, 512, 512)
    kernels = by_name(found, phase).values()
    assert sum(each.time_share for each in kernels) == pytest.approx(1)
    assert sum(found.shares[phase].values()) == pytest.approx(1)
    assert set(found.shares[phase]) == set(BOUNDS)
    total = sum(each.layers * each.expected_s for each in kernels)
    assert all(each.time_share == pytest.approx(each.layers * each.expected_s / total) for each in kernels)


@pytest.mark.parametrize(("card", "name", "stored", "tensor", "weights_ms", "measured_ms"), STREAMED)
def test_decoding_reads_the_weights_once(
    card: str, name: str, stored: str, tensor: int, weights_ms: float, measured_ms: float
) -> None:
    """At batch 1, the limits of the GEMMs add up to the time to read the weights, and no measurement is faster.

    The published times of the weights include the embedding, of which decoding reads one row, and store the output
    head in the format of the other weights.
    """
    made = make_deployment(card, name, stored, tensor, 1, "kernels")
    decode = by_name(serving_bounds(made, 1, 192, 192), "decode")
    gemms_s = sum(each.layers * each.limit_s for name, each in decode.items() if name != "attention")
    head_s = made.model.head_parameters / tensor / made.gpu.memory_bytes_per_s
    expected_ms = weights_ms - 1e3 * made.weights.weight_bytes * head_s + 1e3 * (2 - made.weights.weight_bytes) * head_s
    assert 1e3 * gemms_s == pytest.approx(expected_ms, rel=0.02)
    assert 1e3 * gemms_s < measured_ms
    assert gemms_s < sum(each.layers * each.expected_s for each in decode.values()) < 1e-3 * 1.1 * measured_ms


def test_training_has_two_gemms_backward_for_each_forward() -> None:
    """2,048 tokens are bound by compute everywhere, the optimiser by memory. Both backward GEMMs have the FLOPs of the
    forward one."""
    found = training_bounds(llama("A100"), 1, 2048)
    forward, backward = by_name(found, "forward"), by_name(found, "backward")
    assert len(backward) == 2 * len(forward) - 1
    assert {each.bound for each in (*forward.values(), *backward.values())} == {"compute"}
    for name in ("QKV, inputs", "QKV, weights"):
        assert backward[name].limit_s == pytest.approx(forward["QKV"].limit_s)
    assert backward["attention"].limit_s == pytest.approx(2.5 * forward["attention"].limit_s)
    (optimiser,) = by_name(found, "optimiser").values()
    assert (optimiser.bound, optimiser.compute_from) == ("memory", None)


def test_experts_are_not_trained() -> None:
    """As in the model of the iteration."""
    with pytest.raises(HardwareError, match="dense models only"):
        training_bounds(make_deployment("B200", "deepseek-r1", "bf16", 8, 1, "kernels"), 1, 2048)
