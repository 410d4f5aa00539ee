"""The benchmarks of the hardware model run."""

from __future__ import annotations

import pytest

from benchmarks import hardware_fit, hardware_model


def test_the_model_is_held_against_its_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    """All are kept; what each row is, and what makes B200 faster, is printed when asked."""
    assert hardware_model.main([]) == 0
    assert "NOT KEPT" not in capsys.readouterr().out
    hardware_model.main(["--rows", "memory"])
    assert '"GPT-3-175B, none",66.84375,66.84375' in capsys.readouterr().out
    hardware_model.main(["--factors"])
    assert "fp8" in capsys.readouterr().out


def test_the_constants_are_fitted_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From those of the table, of one engine, in three steps."""
    monkeypatch.setattr(hardware_fit, "TRIES", 3)
    monkeypatch.setattr(hardware_fit, "FITTED", {"vLLM": hardware_fit.FITTED["vLLM"]})
    monkeypatch.setattr(hardware_fit.inference, "gemm_s", hardware_fit.inference.gemm_s)
    assert hardware_fit.main(["--held-out"]) == 0
    assert "vLLM               TP 8" in capsys.readouterr().out
