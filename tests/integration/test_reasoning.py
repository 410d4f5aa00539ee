"""Responses that begin with reasoning, from the simulated servers to every output of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import burst, in_process, summary_of
from tests.support.simulated import running

REASONING, TOKENS = 5, 12


@pytest.mark.parametrize(
    ("server", "endpoint"),
    [("vllm", "chat"), ("vllm", "responses"), ("vllm", "messages"), ("sglang", "chat"), ("openai", "chat")],
)
def test_a_run_measures_reasoning_and_answer(tmp_path: Path, server: str, endpoint: str) -> None:
    """The time to the first answer agrees with the server's log, request by request."""
    imitated = "vllm" if server == "openai" else server
    config = SimulatedConfig(server=imitated, ttft_s=0.2, itl_s=0.02, reasoning_tokens=REASONING)
    load = ("--n", "6", "--input-tokens", "16", "--output-tokens", str(TOKENS), "--metrics-every", "0")
    judged = (
        "--assert",
        "ttfa.p50 < 10s",
        "--assert",
        f"reasoning_tokens.max <= {REASONING}",
        "--goodput",
        "think < 9s",
    )
    with running(config) as simulated:
        where = ("--server", server, "--endpoint", endpoint, "--url", simulated.url)
        code, out, err = burst(tmp_path, *where, *load, *judged)
    assert code in (0, 5), (out, err)  # 5: this machine is busy
    summary = summary_of(tmp_path)
    assert summary["tokens"]["reasoning"] == 6 * REASONING
    assert summary["goodput"]["good"] == 6
    latency = summary["latency"]
    assert latency["reasoning_tokens"]["p50"] == REASONING  # type: ignore[index]
    for name in ("ttfa_s", "think_s", "tpot_reasoning_s", "tpot_answer_s"):
        assert latency[name]["n"] == 6, name  # type: ignore[index]
    sent = sorted(line.sent_ns[REASONING] - line.sent_ns[0] for line in simulated.log if len(line.sent_ns) == TOKENS)
    records = runfile.read(tmp_path / "run").records
    measured = sorted(record.marks["first_answer_ns"] - record.chunk_ns[0] for record in records)
    assert measured == pytest.approx(sent, abs=30e6)
    for title in ("TTFA", "Think", "Reasoning", "TPOT reasoning", "TPOT answer"):
        assert title in out
    _, text, _ = in_process(tmp_path, "report", "run", "--json")
    assert json.loads(text)["latency"]["ttfa_s"]["p50"] == latency["ttfa_s"]["p50"]  # type: ignore[index]


def test_a_response_may_end_during_its_reasoning(tmp_path: Path) -> None:
    """Then the report says how many responses have no answer."""
    config = SimulatedConfig(server="vllm", ttft_s=0.02, itl_s=0.001, reasoning_tokens=50)
    with running(config) as simulated:
        where = ("--server", "vllm", "--endpoint", "chat", "--url", simulated.url, "--metrics-every", "0")
        code, out, err = burst(tmp_path, *where, "--n", "4", "--input-tokens", "16", "--output-tokens", "8")
    assert code in (0, 5), (out, err)  # 5: this machine is busy
    assert "4 of 4 responses never reached an answer" in " ".join(out.split())
    assert summary_of(tmp_path)["tokens"]["unanswered_requests"] == 4
