"""How far the hardware model was off in published measurements, as `loadgen limits` says next to every figure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import hardware_goals, hardware_model, twin_transfer
from loadgen.servers.hardware import framework, gpu, model, with_changes
from loadgen.servers.hardware.roofline import compute_limits, make_deployment
from loadgen.servers.hardware.speculation import TokenDraft
from loadgen.servers.hardware.throughput_model import EngineSettings, Load
from loadgen.servers.hardware.training import TrainingSetup
from loadgen.servers.hardware.validation import (
    COVERED,
    FIGURES,
    KERNEL_FIGURES,
    PUBLISHED_SETTINGS,
    SPEED_UP,
    SPEED_UP_JOIN,
    TRAINING,
    TRANSFERRED,
    Accuracy,
    PredictedLoad,
    _table,
    accuracies,
    accuracy,
    describe,
    kernel_accuracies,
    speed_up_accuracy,
    training_accuracy,
)


@pytest.mark.xdist_group("published measurements")  # the tests of this group share the simulations of benchmarks
def test_the_table_is_what_the_benchmark_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m benchmarks.hardware_goals --write` writes it again after a change of the model."""
    monkeypatch.setattr(hardware_goals, "transferred_points", list)  # fitting twins takes a minute
    table = {key: row for key, row in _table().items() if not key[3].startswith(TRANSFERRED)}
    found = {tuple(row[:4]): row for row in hardware_goals.validation_rows()}
    assert found.keys() == table.keys()
    for key, row in table.items():
        rows, p50, p90 = map(float, found[key][4:7])
        known = row.accuracy
        assert (known.rows, known.error_p50, known.error_p90) == pytest.approx((rows, p50, p90), abs=0.005), key
        assert [" ".join(row.covered[column]) for column in COVERED] == found[key][8:]


def test_rows_of_twins_count_different_measurements() -> None:
    """Several twins predict each measured loop. The table counts the loop once."""
    loads = twin_transfer.servers(hardware_model.read_rows("closed_loops"), twin_transfer.MODELLED)
    loops: Counter[tuple[str, str]] = Counter()
    for server, rows in loads.items():
        loops[server.framework, server.gpu] += len(twin_transfer.spaced(rows, twin_transfer.PREDICTED_LOADS))
    for figure in ("TTFT", "TPOT"):
        name = f"{TRANSFERRED} {figure}"
        counted = {key[:2]: (key[2], row.accuracy.rows) for key, row in _table().items() if key[3] == name}
        assert not any(row.accuracy.settings for key, row in _table().items() if key[3] == name)
        assert counted == {key: ("dense", count) for key, count in loops.items()}
    speed_up = _table()["vLLM", "H100 SXM to B200 SXM", "dense", SPEED_UP]
    assert speed_up.accuracy.rows == 20  # loops on H100, each compared with two number formats on B200


def test_names_are_those_of_the_other_tables() -> None:
    """A row of an unknown framework or GPU would never be looked up."""
    for engine, cards, models, figure in _table():
        names = cards.split(SPEED_UP_JOIN)
        assert [gpu(name).name for name in names] == names
        assert len(names) == (2 if figure == SPEED_UP else 1)
        assert models in ("dense", "mixture of experts")
        assert engine == TRAINING or framework(engine).name == engine
        kernel = figure.partition(" in ")[0]
        assert kernel in (*FIGURES, *KERNEL_FIGURES, SPEED_UP, "iteration", "transferred TTFT", "transferred TPOT")


def test_speed_ups_between_generations_are_compared() -> None:
    """A speed-up is the ratio of two measured times per token of the same engine, model and load."""
    a100, h100, b200 = (
        make_deployment(card, "llama-2-7b", framework_name="trtllm-0.9") for card in ("A100", "H100", "B200")
    )
    found = speed_up_accuracy(a100, h100)
    assert found.validated
    assert found.error_p50 < 0.10
    assert not speed_up_accuracy(h100, b200).validated
    assert not speed_up_accuracy(a100, make_deployment("H100", "llama-2-7b", framework_name="nim")).validated


def test_kernels_are_validated_in_their_format() -> None:
    """FP8 GEMMs were measured on H100 and not on A100, and attention in prefill only in 16 bits."""
    in_fp8 = kernel_accuracies(
        make_deployment("H100", "llama-3.1-8b", "fp8", framework_name="vllm").with_kv_format("fp8")
    )
    assert {name: found.validated for name, found in in_fp8.items()} == {
        "GEMM in fp8": True,
        "decode attention in fp8": True,
        "prefill attention in fp8": False,
    }
    in_16_bits = kernel_accuracies(make_deployment("A100", "llama-3.1-8b", "fp16"))
    assert in_16_bits["GEMM in bf16"].rows > 100
    assert not kernel_accuracies(make_deployment("A100", "llama-3.1-8b", "fp8"))["GEMM in fp8"].validated
    assert not any(found.validated for found in kernel_accuracies(make_deployment("V100", "llama-3.1-8b")).values())


def test_what_was_not_compared_says_so() -> None:
    """SGLang was measured on H100 alone, and only in closed loops."""
    known = accuracies(make_deployment("H100", "qwen3-32b", tensor=2, framework_name="sglang"))
    assert known["TPOT"].validated
    assert known["TPOT"].rows > 20
    assert known["prefill"] == Accuracy(validated=False)
    assert not accuracy("SGLang", "B200 SXM", "dense", "TPOT").validated
    assert describe(known).endswith("; prefill, decode step not validated")


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": 2},
        {"speculation": TokenDraft(3, 0.5)},
        {"cache_hit_rate": 0.5},
        {"chunked_prefill": "off"},
        {"architecture": "parallel"},
        {"kv_bytes": 1.0},
        {"gpu": with_changes(gpu("H100"), ["memory_bandwidth=8TB/s"])},
        {"gpu": replace(gpu("H100"), name="my GPU")},
    ],
)
def test_options_without_measurements_are_not_validated(options: dict[str, Any]) -> None:
    """The errors of a plain server say nothing about a server with such an option."""
    plain = make_deployment("H100", "llama-3.1-8b", tensor=2, framework_name="sglang")
    assert accuracies(plain)["TPOT"].validated
    assert accuracies(replace(plain, chunked_prefill="separate")) == accuracies(plain)
    assert not any(figure.validated for figure in accuracies(replace(plain, **options)).values())
    assert not any(figure.validated for figure in accuracies(plain, separate_workers=True).values())


def test_the_settings_of_the_compared_runs_are_named() -> None:
    """The predictions of TensorRT-LLM were compared with other settings than the defaults of `limits`."""
    of_8b = describe(accuracies(make_deployment("H100", "llama-3.1-8b", framework_name="trtllm")))
    assert "these errors are of runs with at most in flight + input + 1,500 tokens and in flight - 1 sequences" in of_8b
    assert "inferred from the same measurements" in of_8b
    assert "runs with" not in describe(accuracies(make_deployment("H100", "llama-3.1-8b", "fp8", 2)))
    assert "runs with a model that" in describe(accuracies(make_deployment("B200", "llama-3.1-8b", "fp8", 2)))
    compared = {(engine, models, row.accuracy.source) for (engine, _, models, _), row in _table().items()}
    assert compared >= PUBLISHED_SETTINGS.keys()


@pytest.mark.parametrize(
    ("weights", "tensor", "text"),
    [
        ("bf16", 8, "not validated (compared only in fp8)"),
        ("int4", 1, "not validated (compared only in fp8 and at TP 2 to 8)"),
    ],
)
def test_formats_and_sizes_without_measurements_are_not_validated(weights: str, tensor: int, text: str) -> None:
    """vLLM was measured on H100 in fp8, on two and eight GPUs."""
    assert str(accuracies(make_deployment("H100", "llama-3.1-70b", weights, tensor))["TPOT"]) == text
    assert accuracies(make_deployment("H100", "llama-3.1-70b", "fp8", 4))["TPOT"].validated


def test_bf16_and_fp16_have_one_speed() -> None:
    """NIM was measured in fp16."""
    assert accuracies(make_deployment("A100", "llama-3-8b", "bf16", framework_name="nim"))["TPOT"].validated
    assert not accuracies(make_deployment("A100", "llama-3-8b", "int8", framework_name="nim"))["TPOT"].validated


def test_groups_of_experts_and_attention_without_measurements_are_not_validated() -> None:
    """gpt-oss was measured on H100 without expert parallelism, and with vLLM always with one attention group."""
    plain = make_deployment("H100", "gpt-oss-120b", "mxfp4", 2)
    assert accuracies(plain)["TPOT"].validated
    assert str(accuracies(replace(plain, expert_parallel=2))["TPOT"]) == "not validated (compared only at EP 1)"
    assert not accuracies(replace(plain, attention_data=2))["TPOT"].validated


def test_training_is_validated_only_as_it_was_measured() -> None:
    """Megatron-LM was measured in 16 bits, with recomputation, without FlashAttention and ZeRO."""
    setup = TrainingSetup(gpu=gpu("A100"), model=model("gpt-3-175b"), batch=64, tensor=8, pipeline=8)
    assert str(training_accuracy(setup)) == "not validated (compared only with recomputation)"
    setup = replace(setup, recomputation="selective")
    assert training_accuracy(setup).validated
    assert not training_accuracy(replace(setup, gpu=with_changes(gpu("A100"), ["memory_bandwidth=8TB/s"]))).validated
    for changes in _OTHER_TRAINING:
        assert "compared only" in str(training_accuracy(replace(setup, **changes)))


_OTHER_TRAINING: list[dict[str, Any]] = [
    {"flash": True},
    {"zero": 1},
    {"offload": True},
    {"adapter_rank": 8},
    {"number": "fp8"},
]


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": EngineSettings(running_limit=8)},
        {"settings": EngineSettings(batch_wait_steps=20)},
        {"settings": EngineSettings(receive_steps=10)},
        {"rounds": 1},
        {"statistic": "median"},
        {"seconds": 60.0},
    ],
)
def test_engines_and_loops_with_other_settings_are_not_validated(changes: dict[str, Any]) -> None:
    """vLLM was measured with its defaults, in closed loops of ten requests per client."""
    deployment = make_deployment("H100", "llama-3.1-70b", "fp8", tensor=2)
    load = Load(922, 922, 64)
    assert compute_limits(deployment, load).accuracy["TPOT"].validated
    assert not compute_limits(deployment, replace(load, **changes)).accuracy["TPOT"].validated
    assert not compute_limits(deployment, load, 0.95).accuracy["TPOT"].validated
    limited = replace(deployment, framework=replace(deployment.framework, chunk_tokens=512))
    assert not compute_limits(limited, load).accuracy["TPOT"].validated


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (PredictedLoad(922, 922, 64), ""),
        (PredictedLoad(1500, 500, 120), ""),
        (PredictedLoad(None, None, None), ""),
        (PredictedLoad(100_000, 922, 64), "compared only with at most 922 tokens per prompt"),
        (
            PredictedLoad(922, 128, 1),
            "compared only with at least 922 tokens per response, at least 4 requests in flight",
        ),
        (PredictedLoad(922, 922, 5000), "compared only with at most 64 requests in flight"),
        (PredictedLoad(922, 922, None, closed_loop=False), "compared only in closed loops"),
        (
            PredictedLoad(9000, 922, None, closed_loop=False),
            "compared only in closed loops with at most 922 tokens per prompt",
        ),
    ],
)
def test_loads_far_from_the_measured_ones_are_not_validated(load: PredictedLoad, reason: str) -> None:
    """vLLM was measured on H100 with 922 + 922 and 922 + 7,373 tokens, and 4 to 64 requests in flight."""
    deployment = make_deployment("H100", "llama-3.1-70b", "fp8", tensor=2)
    known = accuracies(deployment, ("TTFT", "TPOT"), load=load)
    assert [figure.validated for figure in known.values()] == [not reason] * 2
    assert [figure.reason for figure in known.values()] == [reason] * 2
    assert [figure.rows for figure in known.values()] == [20, 20]
    text = describe(known)
    assert text.count("rows") == 2
    assert text.count(f"; not validated for this load ({reason})") == bool(reason)
    assert accuracies(replace(deployment, tensor=1), ("TPOT",), load=load)["TPOT"].rows == 0


def test_settings_that_the_compared_runs_changed_keep_the_statement() -> None:
    """The runs of TensorRT-LLM on B200 had more tokens per step and a batch wait, which the statement names."""
    deployment = make_deployment("B200", "llama-3.1-70b", "fp8", framework_name="trtllm")
    loop = Load(922, 922, 16, settings=EngineSettings(batch_wait_steps=20))
    assert "16,384 tokens per step" in describe(compute_limits(deployment, loop).accuracy)
    limited = replace(loop, settings=EngineSettings(running_limit=8))
    assert not compute_limits(deployment, limited).accuracy["TPOT"].validated


def test_every_result_of_limits_has_it() -> None:
    """The text and the page are made from the same field as the JSON."""
    result = compute_limits(make_deployment("A100", "llama-3-8b", framework_name="nim"), Load(200, 200, 10))
    assert set(result.accuracy) == set(FIGURES)
    assert "rows" in str(result.accuracy["TTFT"])
    assert str(result.accuracy["prefill"]) == "not validated"
