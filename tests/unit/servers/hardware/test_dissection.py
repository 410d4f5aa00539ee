"""The speed-up from one GPU to the next: factors whose product is the whole, in one order and in any order."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest

from loadgen.servers.hardware import HardwareError, gpu, model
from loadgen.servers.hardware.dissect_serving import MOST_IN_FLIGHT, ServedBy, dissect_serving
from loadgen.servers.hardware.dissect_training import (
    TrainedOn,
    TrainingJob,
    _fastest_setup,
    dissect_training,
)
from loadgen.servers.hardware.dissection import Dissection, FactorChange, divide_speed_up, native_format
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.hardware.throughput_model import Load, formula_times
from loadgen.servers.hardware.training import TrainingSetup, fits_memory, predict_iteration

GPT = TrainingJob("gpt-3-175b")


def check(found: Dissection) -> None:
    """Compare the products of the gains with the speed-up, in the stated order and in any order."""
    assert math.prod(each.gain for each in found.factors) == pytest.approx(found.speed_up)
    assert math.prod(each.share for each in found.factors) == pytest.approx(found.speed_up)
    assert found.factors[-1].total == pytest.approx(found.speed_up)
    assert found.speed_up == pytest.approx(found.after.tokens_per_s / found.before.tokens_per_s)


@pytest.mark.parametrize(
    "uses",
    [
        [ServedBy("A100", tensor=8), ServedBy("B200", tensor=8)],
        [ServedBy("A100", tensor=4, in_flight=16), ServedBy("H100", tensor=8, in_flight=16)],
        [ServedBy("B200", tensor=2), ServedBy("H100", "fp8", "trtllm", 4, 2)],
        [ServedBy("H100", "bf16", tensor=4), ServedBy("H100", "fp8", tensor=4)],
        [ServedBy("H100", "fp8", tensor=8), ServedBy("MI355X", "mxfp4", tensor=8)],
        [ServedBy("A100", "int4", tensor=2), ServedBy("L40S", "int4", tensor=2)],
    ],
)
def test_factors_of_serving_multiply_to_the_speed_up(uses: list[ServedBy]) -> None:
    """Other formats, engines and numbers of GPUs are factors too, also from a fast GPU to a slow one."""
    (found,) = dissect_serving(uses, "llama-3.1-70b", 512, 128)
    check(found)
    names = [each.name for each in found.factors]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "uses",
    [
        [TrainedOn("A100"), TrainedOn("B200")],
        [TrainedOn("A100", batch=64, recomputation="full", attention="stored"), TrainedOn("B200")],
        [TrainedOn("A100", gpus=64), TrainedOn("H100", "bf16", gpus=256, batch=1024)],
        [TrainedOn("A100", network="InfiniBand HDR"), TrainedOn("B200", network="InfiniBand NDR")],
    ],
)
def test_factors_of_training_multiply_to_the_speed_up(uses: list[TrainedOn]) -> None:
    """Settings, attention kernels, batches and numbers of GPUs may differ."""
    (found,) = dissect_training(uses, GPT)
    check(found)
    assert found.peak_growth == pytest.approx(math.prod(each.grew or 1 for each in found.factors[: _formats(found)]))


@pytest.mark.parametrize("gpus", [4, 8])
def test_the_link_is_a_factor_if_only_gradients_use_it(gpus: int) -> None:
    """Replicas on whole GPUs in one machine exchange their gradients over its links. No layer is shared."""
    uses = [TrainedOn(name, "bf16", gpus=gpus, batch=16) for name in ("A100", "B200")]
    (found,) = dissect_training(uses, TrainingJob("llama-3.1-8b", tensor=1))
    check(found)
    assert "link between GPUs" in [factor.name for factor in found.factors]


def _formats(found: Dissection) -> int:
    return sum(each.kind in ("compute rate", "number format") for each in found.factors)


def test_peaks_grow_as_the_data_sheets_say() -> None:
    """From 312 to 2,250 TFLOP/s, and twice as much for each half of the bits: 28.8."""
    (found,) = dissect_training([TrainedOn("A100"), TrainedOn("B200")], GPT)
    assert [each.name for each in found.factors[:3]] == [
        "compute rate, fp16",
        "number format, fp8",
        "number format, nvfp4",
    ]
    assert [each.grew for each in found.factors[:3]] == [pytest.approx(2250 / 312), 2.0, 2.0]
    assert found.peak_growth == pytest.approx(4 * 2250 / 312)
    assert found.speed_up < found.peak_growth


def test_a_format_of_weights_alone_does_not_raise_the_peak() -> None:
    """GPUs compute with int4 weights in 16 bits, so only the peak from 312 to 989 TFLOP/s counts."""
    uses = [ServedBy("A100", "bf16", tensor=2), ServedBy("H100", "int4", tensor=2)]
    (found,) = dissect_serving(uses, "llama-3.1-8b", 512, 128)
    assert found.peak_growth == pytest.approx(989.4 / 312, rel=0.01)


def test_requests_that_do_not_fit_are_stated() -> None:
    """A GPU on which fewer requests fit than requested is compared with these requests."""
    uses = [ServedBy("L4", in_flight=900), ServedBy("B200", in_flight=900)]
    (found,) = dissect_serving(uses, "llama-3.1-8b", 512, 128)
    assert found.before.use["requests in flight"].endswith(" of 900")
    assert found.after.use["requests in flight"] == "900"


def test_every_change_has_its_place_in_each_order() -> None:
    """By hand: three changes of a number, one of which needs another. Three orders remain of six."""
    changes = [
        FactorChange("double", "", "", None, lambda value: 2 * value),
        FactorChange("add", "", "", None, lambda value: value + 4),
        FactorChange("square", "", "", None, lambda value: value * value, needs=["double"]),
    ]

    def apply(names: tuple[str, ...]) -> list[float]:
        """Return the logarithms of the value after the first changes of an order; sets are applied in list order."""
        values = []
        for count in range(len(names) + 1):
            value = 3.0
            for change in changes:
                if change.name in names[:count]:
                    value = change.apply(value)
            values.append(math.log(value))
        return values

    allowed = [
        order
        for order in permutations(change.name for change in changes)
        if order.index("double") < order.index("square")
    ]
    by_hand = {change.name: 0.0 for change in changes}
    for order in allowed:
        values = apply(order)
        for index, name in enumerate(order):
            by_hand[name] += (values[index + 1] - values[index]) / len(allowed)
    found = divide_speed_up(3.0, changes, lambda value: value)
    assert [each.gain for each in found] == [pytest.approx(2), pytest.approx(10 / 6), pytest.approx(10)]
    assert {each.name: math.log(each.share) for each in found} == pytest.approx(by_hand)


def test_the_ends_are_what_the_model_says_of_each_gpu() -> None:
    """The last state has every property of the second GPU, so nothing is left out of the factors."""
    (found,) = dissect_serving(
        [ServedBy("A100", "bf16", "nim", in_flight=8), ServedBy("H100", "fp8", "nim", in_flight=8)],
        "llama-3-8b",
        200,
        200,
    )
    made = make_deployment("H100", "llama-3-8b", "fp8", 1, framework_name="nim")
    engine = replace(made.framework, server_s=0.0, request_s=0.0, queueing=0.0)
    alone = formula_times(replace(made, framework=engine), Load(200, 200, 8)).output_tokens_per_s
    assert found.after.tokens_per_s == pytest.approx(alone)
    assert "not validated" not in found.accuracy
    check(found)


def test_the_same_gpu_twice_gains_nothing() -> None:
    """Every factor is 1."""
    (found,) = dissect_serving([ServedBy("H100"), ServedBy("H100")], "llama-3.1-8b", 512, 128)
    assert all(each.gain == pytest.approx(1) for each in found.factors)
    assert all(each.share == pytest.approx(1) for each in found.factors)


def test_memory_capacity_holds_more_requests() -> None:
    """H200 differs from H100 in its memory alone. Capacity brings nothing to a fixed number of requests that fits."""
    (found,) = dissect_serving([ServedBy("H100"), ServedBy("H200")], "llama-3.1-8b", 8000, 1000)
    gains = {each.name: each.gain for each in found.factors}
    assert gains["memory capacity"] > 1.05
    assert gains["memory bandwidth"] > 1.05
    assert gains["compute rate, fp8"] == pytest.approx(1)
    (fixed,) = dissect_serving(
        [ServedBy("H100", in_flight=4), ServedBy("H200", in_flight=4)], "llama-3.1-8b", 8000, 1000
    )
    assert {each.name: each.gain for each in fixed.factors}["memory capacity"] == pytest.approx(1)
    (short,) = dissect_serving([ServedBy("B200"), ServedBy("B300")], "llama-3.1-8b", 100, 100)
    assert short.before.use["requests in flight"] == f"{MOST_IN_FLIGHT:,}"


def test_steps_join() -> None:
    """Three GPUs make two steps, and the second begins where the first ends."""
    found = dissect_serving([ServedBy(name, tensor=8) for name in ("A100", "H100", "B200")], "llama-3.1-70b", 512, 128)
    assert found[0].after == found[1].before
    for each in found:
        check(each)


def test_native_formats_are_those_of_the_tensor_cores() -> None:
    """The fewest bits that a GPU computes in."""
    names = ("V100", "A100", "H100", "B200", "MI355X", "MI300X")
    assert [native_format(gpu(name)) for name in names] == ["fp16", "fp16", "fp8", "nvfp4", "mxfp4", "fp8"]


def test_training_uses_the_fastest_settings_that_fit() -> None:
    """No published setting for 64 A100 that fits is faster, and the chosen one fits."""
    chosen = _fastest_setup(TrainedOn("A100", "bf16", 64, 64), GPT, model("gpt-3-175b"))
    published = TrainingSetup(
        gpu=gpu("A100"),
        model=model("gpt-3-175b"),
        batch=64,
        tensor=8,
        pipeline=8,
        interleave=3,
        recomputation="selective",
        sequence_parallel=True,
        flash=True,
    )
    assert fits_memory(chosen)
    assert predict_iteration(chosen).total_s <= predict_iteration(published).total_s


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dissect_serving([ServedBy("A100")] * 2, "llama-3.1-70b", 512, 128), "does not fit 1 x A100"),
        (lambda: dissect_serving([ServedBy("H100")] * 2, "llama-3.1-8b", 500_000, 128), "not even one request"),
        (lambda: dissect_training([TrainedOn("A100", gpus=8)] * 2, GPT), "does not fit 8 x A100"),
        (lambda: dissect_training([TrainedOn("A100", gpus=7)] * 2, GPT), "7 GPUs cannot divide 96 layers and 96 heads"),
        (lambda: dissect_training([TrainedOn("A100")] * 2, TrainingJob("deepseek-r1")), "dense models only"),
        (lambda: dissect_serving([ServedBy("A10000")] * 2, "llama-3.1-8b", 512, 128), "unknown GPU"),
    ],
)
def test_what_does_not_fit_says_what_to_do(call: object, words: str) -> None:
    """A model, a request or a training job that is too large, and unknown names."""
    assert callable(call)
    with pytest.raises(HardwareError, match=words):
        call()
