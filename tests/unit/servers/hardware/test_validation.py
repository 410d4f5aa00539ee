"""How far the hardware model was off in published measurements, as `loadgen limits` says next to every figure."""

from __future__ import annotations

import pytest

from benchmarks import hardware_goals
from loadgen.servers.hardware import framework, gpu
from loadgen.servers.hardware.roofline import compute_limits, make_deployment
from loadgen.servers.hardware.throughput_model import Load
from loadgen.servers.hardware.validation import FIGURES, TRAINING, Accuracy, _table, accuracies, accuracy, describe


def test_the_table_is_what_the_benchmark_finds() -> None:
    """`python -m benchmarks.hardware_goals --write` writes it again after a change of the model."""
    found = {tuple(row[:4]): row[4:7] for row in hardware_goals.validation_rows()}
    assert found.keys() == _table().keys()
    for key, row in _table().items():
        rows, p50, p90 = map(float, found[key])
        assert (row.rows, row.error_p50, row.error_p90) == pytest.approx((rows, p50, p90), abs=0.005), key


def test_names_are_those_of_the_other_tables() -> None:
    """A row of an unknown framework or GPU would never be looked up."""
    for engine, card, models, figure in _table():
        assert gpu(card).name == card
        assert models in ("dense", "mixture of experts")
        assert engine == TRAINING or framework(engine).name == engine
        assert figure in (*FIGURES, "iteration")


def test_what_was_not_compared_says_so() -> None:
    """SGLang was measured on H100 alone, and only in closed loops."""
    known = accuracies(make_deployment("H100", "qwen3-32b", tensor=2, framework_name="sglang"))
    assert known["TPOT"].validated
    assert known["TPOT"].rows > 20
    assert known["prefill"] == Accuracy(validated=False)
    assert not accuracy("SGLang", "B200 SXM", "dense", "TPOT").validated
    assert describe(known).endswith("; prefill, decode step not validated")


def test_every_result_of_limits_has_it() -> None:
    """The text and the page are made from the same field as the JSON."""
    result = compute_limits(make_deployment("A100", "llama-3-8b", framework_name="nim"), Load(200, 200, 10))
    assert set(result.accuracy) == set(FIGURES)
    assert "rows" in str(result.accuracy["TTFT"])
    assert str(result.accuracy["prefill"]) == "not validated"
