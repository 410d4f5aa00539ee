"""What `loadgen dissect inference` says of all-reduces that are hidden, without torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadgen.dissect import inference_report
from tests.support.dissected import inference_found, operator

STEPS = {"standard": [0.21, 0.20], "ladder": [0.13, 0.105], "no-communication": [0.10, 0.11]}


def said(steps: dict[str, list[float]], architecture: str) -> str:
    """Of two layers whose MLPs take three times as long as attention, and nothing else."""
    found = inference_found()
    operators = [operator("QKV", "GEMM", "1 x 1", 0.02), operator("up", "GEMM", "1 x 1", 0.06)]
    cases = [replace(found.cases[0], beside_s=steps, operators=operators)]
    return " ".join(inference_report.format_text(replace(found, architecture=architecture, cases=cases)).split())


def test_the_share_is_of_what_standard_waits_for() -> None:
    """By the fastest step of each: of 100 ms the ladder waits for 5."""
    assert inference_report.hidden_share(STEPS, "ladder") == pytest.approx(0.95)
    assert inference_report.hidden_share(STEPS, "standard") == 0
    assert inference_report.hidden_share(STEPS, "no-communication") == 1


def test_noise_is_not_more_than_all() -> None:
    """A ladder that was faster than no communication at all has hidden 100%; where nothing was lost there is none."""
    assert inference_report.hidden_share(STEPS | {"ladder": [0.09]}, "ladder") == 1
    assert inference_report.hidden_share(STEPS | {"standard": [0.09]}, "ladder") == 0


def test_measured_and_expected_stand_side_by_side() -> None:
    """All-reduces of 25 ms: two run beside an MLP of 37.5, one beside an attention of 12.5, the last beside nothing."""
    text = said(STEPS, "ladder")
    assert "standard 200 ms, ladder 105 ms, no-communication 100 ms. Attention takes 12.5 ms, an MLP 37.5 ms" in text
    assert "lengthens the standard step by 25.0 ms" in text
    assert "ladder hides 95% of that; loadgen limits expects 62%" in text
    assert "hides 95% of that; loadgen limits expects 50%" in said(STEPS | {"parallel": STEPS["ladder"]}, "parallel")


def test_of_the_standard_model_the_cost_is_told() -> None:
    """It hides nothing; without other architectures there is no such sentence."""
    steps = {name: seconds for name, seconds in STEPS.items() if name != "ladder"}
    assert said(steps, "standard").count("lengthens the standard step by 25.0 ms.") == 1
    assert "alternating steps" not in said({}, "standard")
