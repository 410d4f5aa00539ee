"""How far the hardware model was off in published measurements, as `loadgen limits` says next to every figure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import hardware_goals, hardware_model, twin_transfer
from loadgen.servers.hardware import framework, gpu, with_changes
from loadgen.servers.hardware.roofline import compute_limits, make_deployment
from loadgen.servers.hardware.speculation import TokenDraft
from loadgen.servers.hardware.throughput_model import Load
from loadgen.servers.hardware.validation import (
    FIGURES,
    KERNEL_FIGURES,
    PUBLISHED_SETTINGS,
    SPEED_UP,
    SPEED_UP_JOIN,
    TRAINING,
    TRANSFERRED,
    Accuracy,
    _table,
    accuracies,
    accuracy,
    describe,
    kernel_accuracies,
    speed_up_accuracy,
)


def test_the_table_is_what_the_benchmark_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m benchmarks.hardware_goals --write` writes it again after a change of the model."""
    monkeypatch.setattr(hardware_goals, "transferred_points", list)  # fitting twins takes a minute
    table = {key: row for key, row in _table().items() if not key[3].startswith(TRANSFERRED)}
    found = {tuple(row[:4]): row[4:7] for row in hardware_goals.validation_rows()}
    assert found.keys() == table.keys()
    for key, row in table.items():
        rows, p50, p90 = map(float, found[key])
        assert (row.rows, row.error_p50, row.error_p90) == pytest.approx((rows, p50, p90), abs=0.005), key


def test_rows_of_twins_count_different_measurements() -> None:
    """Several twins predict each measured loop. The table counts the loop once."""
    loads = twin_transfer.servers(hardware_model.read_rows("closed_loops"), twin_transfer.MODELLED)
    loops: Counter[tuple[str, str]] = Counter()
    for server, rows in loads.items():
        loops[server.framework, server.gpu] += len(twin_transfer.spaced(rows, twin_transfer.PREDICTED_LOADS))
    for figure in ("TTFT", "TPOT"):
        name = f"{TRANSFERRED} {figure}"
        counted = {key[:2]: (key[2], row.rows) for key, row in _table().items() if key[3] == name}
        assert not any(row.settings for key, row in _table().items() if key[3] == name)
        assert counted == {key: ("dense", count) for key, count in loops.items()}
    speed_up = _table()["vLLM", "H100 SXM to B200 SXM", "dense", SPEED_UP]
    assert speed_up.rows == 20  # loops on H100, each compared with two number formats on B200


def test_names_are_those_of_the_other_tables() -> None:
    """A row of an unknown framework or GPU would never be looked up."""
    for engine, cards, models, figure in _table():
        names = cards.split(SPEED_UP_JOIN)
        assert [gpu(name).name for name in names] == names
        assert len(names) == (2 if figure == SPEED_UP else 1)
        assert models in ("dense", "mixture of experts")
        assert engine == TRAINING or framework(engine).name == engine
        assert figure in (*FIGURES, *KERNEL_FIGURES, SPEED_UP, "iteration", "transferred TTFT", "transferred TPOT")


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
    assert kernel_accuracies("H100 SXM")["GEMM"].rows > 100
    assert not kernel_accuracies("V100-32GB SXM")["GEMM"].validated


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
        {"gpu": with_changes(gpu("H100"), ["memory_bandwidth=8TB/s"])},
        {"gpu": replace(gpu("H100"), name="my GPU")},
    ],
)
def test_options_without_measurements_are_not_validated(options: dict[str, Any]) -> None:
    """The errors of a plain server say nothing about a server with such an option."""
    plain = make_deployment("H100", "llama-3.1-8b", tensor=2)
    assert accuracies(plain)["TPOT"].validated
    assert accuracies(replace(plain, chunked_prefill="mixed")) == accuracies(plain)
    assert not any(figure.validated for figure in accuracies(replace(plain, **options)).values())
    assert not any(figure.validated for figure in accuracies(plain, separate_workers=True).values())


def test_the_settings_of_the_compared_runs_are_named() -> None:
    """The predictions of TensorRT-LLM were compared with other settings than the defaults of `limits`."""
    of_8b = describe(accuracies(make_deployment("H100", "llama-3.1-8b", framework_name="trtllm")))
    assert "these errors are of runs with at most in flight + input + 1,500 tokens and in flight - 1 sequences" in of_8b
    assert "inferred from the same measurements" in of_8b
    assert "runs with" not in describe(accuracies(make_deployment("H100", "llama-3.1-8b")))
    compared = {(engine, models, row.source) for (engine, _, models, _), row in _table().items()}
    assert compared >= PUBLISHED_SETTINGS.keys()


def test_every_result_of_limits_has_it() -> None:
    """The text and the page are made from the same field as the JSON."""
    result = compute_limits(make_deployment("A100", "llama-3-8b", framework_name="nim"), Load(200, 200, 10))
    assert set(result.accuracy) == set(FIGURES)
    assert "rows" in str(result.accuracy["TTFT"])
    assert str(result.accuracy["prefill"]) == "not validated"
