"""How far the hardware model is from published measurements: the budgets that `benchmarks.hardware_model` prints."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from benchmarks import hardware_model as bench
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.hardware.throughput_model import Load

# The tests of this group share the simulations that the functions of `benchmarks.hardware_model` cache.
pytestmark = pytest.mark.xdist_group("published measurements")


@pytest.mark.parametrize("budget", bench.BUDGETS, ids=lambda budget: budget.name)
def test_errors_stay_within_their_budget(budget: bench.Budget) -> None:
    """Median, p90, mean or largest error, whichever the budget names."""
    assert budget.kept(), budget.found()


def test_rows_of_ones_own_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--data` reads what it has from there, and the rest from here."""
    rows = "gpu,model,format,tp,input,output,batch,seconds\nMI300X,Llama-3.1-70B,fp8,8,128,128,1,1.0\n"
    with gzip.open(tmp_path / "mi300x.csv.gz", "wt", encoding="utf-8") as file:
        file.write(rows)
    before = [*bench.DATA]
    try:
        assert bench.main(["--data", str(tmp_path), "--rows", "iteration"]) == 0
        assert [tmp_path, *before] == bench.DATA
        assert len(bench.read_rows.__wrapped__("mi300x")) == 1
    finally:
        bench.DATA[:] = before
    assert len(bench.read_rows.__wrapped__("closed_loops")) > 200
    assert capsys.readouterr().out


def test_ladder_gains_what_was_published() -> None:
    """70B at TP 8 and batch 1: within 3 points with P2P, 8 without (arXiv 2501.06589, table 2)."""
    points = bench.ladder_gains()
    assert points
    for point in points:
        published, most = bench.GAINS[point.case.removeprefix("P2P ")]
        assert point.predicted == pytest.approx(published, abs=most), point.case


def test_the_four_architectures_are_in_order() -> None:
    """In every group of the published figure: standard, parallel, ladder, no communication."""
    assert bench.ladder_order() == 0


@pytest.mark.parametrize(("points", "most"), [(bench.mi300x, 0.10), (lambda: bench.splitwise("prefill"), 0.25)])
def test_what_nothing_was_fitted_to_is_near(points: object, most: float) -> None:
    """Eight MI300X, whose constants are assumed, and Llama-2-70B on the engines of 2023: medians."""
    assert callable(points)
    assert bench.Budget("", points).found()[1] < most


@pytest.mark.parametrize(
    ("model", "stored", "load", "steps", "spread", "step_tokens"),
    [
        ("deepseek-v3", "fp8", Load(921, 921, 64), 40, 1 / 9, 8192),
        ("deepseek-v3", "fp8", Load(921, 921, 32), 0, 1 / 9, 8192),
        ("deepseek-v3", "nvfp4", Load(921, 921, 64), 0, 1 / 9, 8192),
        ("gpt-oss-120b", "mxfp4", Load(921, 921, 64), 0, 1 / 9, 8192),
        ("qwen3-235b-a22b", "fp8", Load(1024, 256, 16), 0, 0.0, 2540),
    ],
)
def test_mixtures_are_predicted_with_the_protocol_of_their_source(
    model: str, stored: str, load: Load, steps: int, spread: float, step_tokens: int
) -> None:
    """InferenceX draws lengths at random and delays the prompts of DeepSeek in fp8. The lengths of Qwen3 are equal."""
    made = make_deployment("B200", model, stored, 8, framework_name="trtllm")
    deployment, predicted = bench.with_mixture_protocol(made, load)
    assert (predicted.settings.batch_wait_steps, predicted.spread) == (steps, spread)
    assert deployment.framework.chunk_tokens == step_tokens
