"""The benchmarks of the hardware model run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import hardware_fit, hardware_goals, hardware_model


def test_the_model_is_held_against_its_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    """All are kept. The rows are printed on request."""
    assert hardware_model.main([]) == 0
    assert "NOT KEPT" not in capsys.readouterr().out
    hardware_model.main(["--rows", "memory"])
    assert '"GPT-3-175B, none",66.84375,66.84375' in capsys.readouterr().out


def test_the_constants_are_fitted_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From those of the table, of one engine, in three steps."""
    monkeypatch.setattr(hardware_fit, "TRIES", 3)
    monkeypatch.setattr(hardware_fit, "FITTED", {"vLLM": hardware_fit.FITTED["vLLM"]})
    monkeypatch.setattr(hardware_fit.inference, "gemm_s", hardware_fit.inference.gemm_s)
    assert hardware_fit.main(["--held-out"]) == 0
    assert "vLLM, H100: layer_s" in capsys.readouterr().out


def test_the_goals_are_compared_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has lines by framework, from the repository or from a folder. A goal that is not kept fails."""
    code = hardware_goals.main([])
    printed = capsys.readouterr().out
    missed = {line[:44].rstrip() for line in printed.splitlines() if "NOT KEPT" in line}
    assert missed <= {"twin of another server: TTFT"}
    assert code == (1 if missed else 0)
    assert [printed.count(f"  {name} ") for name in hardware_goals.FRAMEWORKS] == [3, 3, 3, 2]
    head = "gpu,tp,model,precision,framework,isl,osl,concurrency,ttft_ms,tpot_ms\n"
    rows = {
        "e2e_inferencex_dense": "B200-SXM,8,meta-llama/Llama-3.1-70B,fp8,vllm,1024,1024,8,155.6,6.9\n",
        "e2e_nim_llama3": "A100-SXM-80GB,1,meta-llama3-8b-instruct,fp16,NVIDIA NIM (x),200,1000,5,75.4,12.7\n",
        "e2e_sglang_open": "H100-SXM-80GB,4,Qwen/Qwen3-32B,bf16?,sglang 0.5.1.post1,1024,128,16,492.8,10.6\n",
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.csv").write_text(head + row, "utf-8")
    hardware_goals.main(["--measured", str(tmp_path)])
    assert "closed loops: TPOT                                3" in capsys.readouterr().out


@pytest.mark.parametrize(("limits", "code"), [((0.1, 0.2, 0.15), 0), ((0.05, 0.2, 0.15), 1), ((0.1, 0.2, 0.05), 1)])
def test_the_exit_code_says_if_all_goals_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limits: tuple[float, float, float], code: int
) -> None:
    """An error above one of the limits, median, p90 or mean, is a failure."""
    points = [hardware_model.Point("example", "TPOT", "H100", 1, "", 1.0, 1.1 - 1e-9)] * 3
    goal = hardware_goals.Goal("example", lambda: points, *limits)
    monkeypatch.setattr(hardware_goals, "goals", lambda _: [goal])
    monkeypatch.setattr(hardware_goals.schedulers, "bursts", list)
    monkeypatch.setattr(hardware_goals.schedulers, "order_kept", lambda _: (0, 0))
    assert hardware_goals.main([]) == code
    assert ("NOT KEPT" in capsys.readouterr().out) == bool(code)
