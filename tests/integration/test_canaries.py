"""`--verify` on simulated servers: answers under load are compared with those without load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
from tests.support.command import FAST, burst, loadgen
from tests.support.simulated import running

SUCCESS = (0, 5)
"""Exit codes of commands whose requests were all complete. A busy machine may limit the client."""
LENGTHS = ("--output-tokens", "64", "--input-tokens", "16")


def measured(
    folder: Path, server: SimulatedConfig, arrivals: str, duration: str, *arguments: str
) -> tuple[dict[str, Any], str]:
    """Return the summary and the text of a run with six canaries."""
    with running(server) as simulated:
        words = ("--url", simulated.url, "--arrivals", arrivals, "--duration", duration, *LENGTHS, "--verify", "6")
        code, out, err = burst(folder, *words, *arguments, command="run")
    assert code in SUCCESS, err
    return json.loads((folder / "run" / "summary.json").read_text()), " ".join(out.split())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_swaps_answers_under_load_is_found(workers: int, tmp_path: Path) -> None:
    """With more than 20 requests in flight, each gets the answer to the prompt before it. The finding names the level,
    canaries are in no figure of the load, and the server's counters agree with the client's counts."""
    server = SimulatedConfig(server="vllm", ttft_s=0.2, itl_s=0.01, faults=(parse_rule("wrong-answer@20"),))
    # The load rises to about 40 requests in flight.
    summary, text = measured(tmp_path, server, "ramp:5..50/3s", "3s", "--workers", str(workers))
    canaries = summary["canaries"]
    assert canaries["canaries"] == canaries["alone"] == canaries["alone_same"] == 6
    assert 0 < canaries["same"] < canaries["answers"]
    assert canaries["right_to"] < canaries["wrong_from"]
    assert 8 <= canaries["wrong_from"] <= 45
    assert f"Answers are right with up to {canaries['right_to']} requests in flight" in text
    assert f"wrong from {canaries['wrong_from']} on" in text
    run = runfile.read(tmp_path / "run")
    assert len(run.canaries) >= 6 + canaries["answers"] + 6
    assert all(record.id >= 0 for record in run.records)
    assert len(run.records) == summary["requests"]["sent"]
    assert {check.get("agree") for check in summary["server_counters"].values()} - {None} == {True}


@pytest.mark.parametrize("server", ["vllm", "tgi", "sglang", "lightllm"])
def test_a_correct_server_answers_as_without_load(server: str, tmp_path: Path) -> None:
    """Every answer is the same, on every backend, and there is neither a warning nor a suspect text."""
    summary, text = measured(tmp_path, SimulatedConfig(server=server, **FAST), "constant:60", "1s")
    canaries = summary["canaries"]
    assert canaries["same"] == canaries["answers"] > 0
    assert canaries["alone_same"] == canaries["alone"] == 6
    assert 20 <= summary["suspect_texts"]["checked"] < 40
    assert not summary["suspect_texts"]["counts"]
    assert "canaries had the same answer under load as without load (100%" in text


def test_every_class_with_text_is_checked(tmp_path: Path) -> None:
    """Canaries are asked on each endpoint of a plan with classes. Classes with one endpoint and model share them."""
    plan = tmp_path / "plan.toml"
    loads = "n = 40\narrivals = 'constant:20'\ninput_tokens = 16\noutput_tokens = 8\n"
    classes = (("first", "completions"), ("second", "chat"), ("third", "chat"))
    tables = (f"[[traffic]]\nname = '{name}'\nendpoint = '{endpoint}'\n{loads}" for name, endpoint in classes)
    plan.write_text("".join(tables))
    with running(SimulatedConfig(server="vllm", ttft_s=0.05, itl_s=0.01)) as server:
        words = (str(plan), "--url", server.url, "--verify", "3")
        code, out, err = burst(tmp_path, *words, command="run")
    assert code in SUCCESS, err
    canaries = json.loads((tmp_path / "run" / "summary.json").read_text())["canaries"]
    assert "3 canaries before, during and after the load (--verify) for each of 2 endpoints or models" in err + out
    assert canaries["canaries"] == canaries["alone"] == canaries["alone_same"] == 6
    assert canaries["same"] == canaries["answers"] > 0
    asked = runfile.read(tmp_path / "run").canaries
    assert {canary.number for canary in asked if canary.moment == "during"} == set(range(6))


def test_responses_without_text_have_no_canaries(tmp_path: Path) -> None:
    """Embeddings have no text. Several machines cannot share the canaries, and virtual time has no texts."""
    with running(SimulatedConfig(server="tei", ttft_s=0.01, itl_s=0.01)) as server:
        code, _, err = burst(tmp_path, "--url", server.url, "--n", "2", "--verify", "2")
    assert code == 2
    assert "--verify: responses of --endpoint embed have no text" in err
    virtual = loadgen(tmp_path, "simulate", "--server", "vllm", "--gpu", "H100", "--n", "2", "--verify", "2")
    assert virtual.returncode == 2
    assert "--verify: virtual time has no texts" in virtual.stderr


def test_a_line_of_a_file_may_state_the_text_that_it_expects(tmp_path: Path) -> None:
    """`expect` is not sent. The response must contain it, which `--assert 'expected >= 99%'` judges."""
    with running(SimulatedConfig(server="vllm", ttft_s=0.01, itl_s=0.001)) as server:
        first = tmp_path / "first.jsonl"
        lines = [{"prompt": f"question {number}", "output_tokens": 4} for number in range(4)]
        first.write_text("".join(json.dumps(line | {"expect": "the"}) + "\n" for line in lines))
        words = ("--url", server.url, "--workload", f"jsonl:{first}", "--assert", "expected >= 99%")
        code, out, err = burst(tmp_path, *words)
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        whole = tmp_path / "whole.jsonl"
        body = {"model": "llama-2-7b", "prompt": "x", "max_tokens": 4}
        whole.write_text("".join(json.dumps({"body": body, "expect": ""}) + "\n" for _ in range(2)))
        done = loadgen(tmp_path, "burst", "--url", server.url, "--workload", f"requests:{whole}", "--no-report")
    assert summary["expected_texts"]["checked"] == 4
    assert code == (4 if summary["expected_texts"]["expected"] < 4 else 0), err
    assert "responses contain the expected text" in " ".join(out.split())
    assert done.returncode in SUCCESS, done.stderr
