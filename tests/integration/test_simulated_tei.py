"""The simulated TEI and the TEI backend, end to end: lengths, truncation, limits, counters and broken responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.servers.discovery import probe
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, accounted, burst, in_process, summary_of
from tests.support.simulated import running

MODELS = {"embed": "bert", "embeddings": "bert", "rerank": "bert-reranker", "classify": "bert-classifier"}


@pytest.mark.parametrize("endpoint", MODELS)
@pytest.mark.parametrize("inputs", [1, 3])
def test_a_burst_is_exact_and_the_counters_agree(endpoint: str, inputs: int, tmp_path: Path) -> None:
    """Every input has the requested length, with the special tokens of a text or of a pair."""
    with running(SimulatedConfig(server="tei", model=MODELS[endpoint], **FAST)) as simulated:
        default = ["--endpoint", endpoint] if endpoint == "embeddings" else []
        common = ["--url", simulated.url, "--n", "6", "--warmup", "1", "--batch-size", str(inputs), *default]
        code, out, err = burst(tmp_path, *common, "--input-tokens", "40")
    assert code in (0, 5), err
    found: dict[str, Any] = summary_of(tmp_path)
    assert (found["requests"]["complete"], found["server"]["endpoint"]) == (6, endpoint)
    assert (found["tokens"]["prompt_reported"], found["tokens"]["prompt_mismatches"]) == (6 * 40 * inputs, 0)
    assert found["throughput"]["inputs_per_s"] == pytest.approx(
        inputs * found["throughput"]["requests_per_s"], rel=1e-6
    )
    counters = found["server_counters"]
    assert [counters[name]["agree"] for name in ("prompt_tokens", "requests_finished")] == [True, True]
    assert "All prompt lengths as requested." in out


@pytest.mark.parametrize(("length", "sentence"), [("200", "all inputs to 64 tokens"), ("uniform:8..200", "inputs of ")])
def test_truncated_inputs_are_said_so(length: str, sentence: str, tmp_path: Path) -> None:
    """Before the run and after it; the run goes on, because the server accepts longer inputs."""
    with running(SimulatedConfig(server="tei", max_model_len=64, **FAST)) as simulated:
        common = ["--url", simulated.url, "--n", "8", "--batch-size", "2"]
        code, out, err = burst(tmp_path, *common, "--input-tokens", length)
    assert code in (0, 5), err
    assert "TEI truncates inputs to 64 tokens" in err + out
    assert f"The server truncated {sentence}" in " ".join(out.split())
    truncated = summary_of(tmp_path)["tokens"]["truncated"]
    assert (truncated["tokens"], truncated["every_input"]) == (64, length == "200")  # type: ignore[index]


def test_inputs_beyond_the_limit_are_rejected_and_counted(tmp_path: Path) -> None:
    """The limit is one on inputs: of four requests with three inputs each, three fit into ten places."""
    config = SimulatedConfig(server="tei", max_concurrent_requests=10, ttft_s=0.5)
    with running(config) as simulated:
        common = ["--url", simulated.url, "--n", "4", "--batch-size", "3", "--input-tokens", "16"]
        code, _, err = burst(tmp_path, *common)
        assert (code, "12 inputs at once exceed its max_concurrent_requests of 10" in err) == (2, True)
        code, out, _ = burst(tmp_path, *common, "--over-limit")
    assert code == 1
    assert accounted(tmp_path, 4) == {"complete": 3, "rejected": 1}
    assert "Model is overloaded (Overloaded)" in out
    assert summary_of(tmp_path)["server_counters"]["rejections"]["agree"] is True  # type: ignore[index]


def test_a_model_has_its_own_endpoints(tmp_path: Path) -> None:
    """A reranker does not embed. The message names what it does."""
    with running(SimulatedConfig(server="tei", model="bert-reranker", **FAST)) as simulated:
        code, _, err = burst(tmp_path, "--url", simulated.url, "--n", "2", "--endpoint", "embed")
        assert probe(simulated.url).endpoints == ("rerank", "classify")
    assert code == 2
    assert "--endpoint embed: the model bert-reranker at" in err
    assert "Use --endpoint rerank or classify." in err


def test_a_simulated_tei_starts_by_itself(tmp_path: Path) -> None:
    """Without a server, the model fits the endpoint, and the limit the load."""
    for endpoint in MODELS:
        arguments = ["--server", "tei", "--simulated", "--speed", "50", "--endpoint", endpoint, "--n", "40"]
        code, out, err = in_process(
            tmp_path, "burst", *arguments, "--batch-size", "16", "--input-tokens", "32", "--out", endpoint
        )
        assert code in (0, 5), err
        assert "All 40 requests complete." in out


@pytest.mark.parametrize("fault", ["500", "429", "cut", "truncate", "reset", "content-length"])
def test_a_broken_answer_is_not_complete(fault: str, tmp_path: Path) -> None:
    """Whatever goes wrong on the wire, it is no embedding."""
    with running(SimulatedConfig(server="tei", **FAST)) as simulated:
        common = ["--url", simulated.url, "--n", "2", "--input-tokens", "16", "--lengths", "approximate"]
        header = ["--header", f"X-Simulated-Fault: {fault}", "--timeout", "5s", "--quiet"]
        code, _, _ = burst(tmp_path, *common, *header)
    assert code == 1
    assert "complete" not in accounted(tmp_path, 2)


def test_what_only_some_requests_ask_for() -> None:
    """Dimensions, texts in ranks, truncation forbidden, and the wrong route for the model."""
    with running(SimulatedConfig(server="tei", max_model_len=16, ttft_s=0)) as server:
        client = httpx.Client(base_url=server.url)
        assert [
            len(vector) for vector in client.post("/embed", json={"inputs": ["a", "b"], "dimensions": 8}).json()
        ] == [8, 8]
        long = "the one " * 20
        assert client.post("/embed", json={"inputs": long}).headers["x-compute-tokens"] == "16"
        refused = client.post("/embed", json={"inputs": long, "truncate": False})
        assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")
        assert client.post("/", json={"inputs": "a"}).status_code == 200
        assert client.post("/", json={"query": "a"}).status_code == 422
        assert len(client.post("/tokenize", json={"inputs": ["a", "a"]}).json()) == 2
        assert client.get("/v1/models").status_code == 404
        client.close()
