"""Several tokens per event, from the simulated servers to the report: TPOT stays exact, and acceptance is known."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import burst, summary_of
from tests.support.simulated import running

TOKENS = 40


@pytest.mark.parametrize(
    ("server", "endpoint", "source", "basis"),
    [
        ("vllm", "completions", "counters", "counted"),
        ("vllm", "responses", "counters", "spread"),
        ("vllm", "messages", "counters", "spread"),
        ("sglang", "chat", "gauges", "counted"),
        ("openai", "chat", "counters", "counted"),
    ],
)
def test_speculative_decoding_is_measured(tmp_path: Path, server: str, endpoint: str, source: str, basis: str) -> None:
    """TPOT is the time of the stream per token, also if the server states only the total of a response."""
    imitated = "vllm" if server == "openai" else server
    config = SimulatedConfig(server=imitated, ttft_s=0.1, itl_s=0.01, draft_tokens=3, acceptance=0.6)
    with running(config) as simulated:
        where = ("--server", server, "--endpoint", endpoint, "--url", simulated.url)
        code, out, err = burst(tmp_path, *where, "--n", "8", "--input-tokens", "16", "--output-tokens", str(TOKENS))
    assert code in (0, 5), (out, err)  # 5: this machine is busy
    summary = summary_of(tmp_path)
    lines = [line for line in simulated.log if line.output_tokens == TOKENS]
    sizes = [tokens for line in lines for tokens in line.tokens]
    later = [tokens for line in lines for tokens in line.tokens[1:]]
    speculation, per_event = summary["speculation"], summary["tokens_per_event"]
    assert speculation["source"] == source
    assert speculation["acceptance_length"] == pytest.approx(sum(later) / len(later), abs=0.002)
    assert per_event["mean"] == pytest.approx(sum(sizes) / len(sizes), abs=0.002)
    assert summary["tokens"]["streamed_by"] == {basis: 8}
    if basis == "counted":
        assert per_event["counts"] == {str(size): sizes.count(size) for size in sorted(set(sizes))}
    per_token_s = []
    for record in runfile.read(tmp_path / "run").records:
        first = record.chunk_tokens[0] if basis == "counted" else TOKENS / len(record.chunk_ns)
        per_token_s.append((record.chunk_ns[-1] - record.chunk_ns[0]) / 1e9 / (TOKENS - first))
    assert summary["latency"]["tpot_s"]["mean"] == pytest.approx(fmean(per_token_s), rel=1e-6)  # type: ignore[index]
    text = " ".join(out.split())
    assert f"{speculation['acceptance_length']:.2f} tokens per decode step" in text
    assert ("Events contain" in text) == (basis == "counted")


@pytest.mark.parametrize(
    ("server", "endpoint"), [("vllm", "chat"), ("sglang", "completions"), ("lightllm", "generate")]
)
def test_a_stream_interval_gives_events_of_several_tokens(tmp_path: Path, server: str, endpoint: str) -> None:
    """The first token is sent at once. LightLLM has one event per token, and several of them are sent together."""
    config = SimulatedConfig(server=server, ttft_s=0.05, itl_s=0.004, stream_interval=4)
    with running(config) as simulated:
        where = ("--server", server, "--endpoint", endpoint, "--url", simulated.url, "--metrics-every", "0")
        code, out, err = burst(tmp_path, *where, "--n", "4", "--input-tokens", "16", "--output-tokens", "16")
    assert code in (0, 5), (out, err)  # 5: this machine is busy
    for record in runfile.read(tmp_path / "run").records:
        assert record.chunk_tokens == ([1] * 16 if server == "lightllm" else [1, 4, 4, 4, 3])
    assert all(line.tokens == [1, 4, 4, 4, 3] for line in simulated.log if line.output_tokens == 16)
