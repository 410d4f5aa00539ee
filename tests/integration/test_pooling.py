"""Embeddings, rerank, score and classify, end to end against the simulated vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, accounted, burst, in_process, summary_of
from tests.support.simulated import running

SERVERS = ("vllm", "sglang")
ENDPOINTS = ("embeddings", "rerank", "score", "classify")


def config(server: str, model: str = "embedding-model") -> SimulatedConfig:
    """A fast simulated server. SGLang has all of these endpoints only for a model that embeds."""
    return SimulatedConfig(server=server, **FAST, model=model)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_burst_has_the_metrics_that_make_sense(server: str, endpoint: str, tmp_path: Path) -> None:
    """Prompts of exactly the length asked for; E2E, requests and prompt tokens per second; nothing of tokens."""
    with running(config(server)) as simulated:
        common = ["--server", server, "--url", simulated.url, "--endpoint", endpoint, "--n", "12"]
        more = ["--input-tokens", "40", "--warmup", "2"]
        code, out, err = burst(tmp_path, *common, *more, report=True)
    assert code in (0, 5), err
    found: dict[str, Any] = summary_of(tmp_path)
    assert (found["requests"]["complete"], found["requests"]["warmup"]) == (12, 2)
    assert (found["tokens"]["prompt_reported"], found["tokens"]["prompt_mismatches"]) == (480, 0)
    assert (found["tokens"]["output_asked"], found["tokens"]["output_mismatches"]) == (0, 0)
    rates, latency = found["throughput"], found["latency"]
    assert rates["requests_per_s"] * 40 == pytest.approx(rates["input_tokens_per_s"], rel=1e-6)
    assert (latency["e2e_s"]["n"], latency["ttft_s"]["n"], latency["tpot_s"]["n"]) == (12, 0, 0)
    assert "Input throughput" in out
    assert "E2E" in out
    assert not any(word in out for word in ("Output throughput", "TTFT", "TPOT", "output lengths"))
    assert (tmp_path / "run" / "report.html").exists()
    assert f"40 tokens in, {endpoint}" in out
    assert runfile.read(tmp_path / "run").header.plan["output_tokens"] == 0


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_several_inputs_per_request(server: str, endpoint: str, tmp_path: Path) -> None:
    """Lengths stay exact, inputs are a rate of their own, and the server's counters of inputs agree."""
    with running(config(server)) as simulated:
        common = ["--server", server, "--url", simulated.url, "--endpoint", endpoint, "--n", "6", "--workers", "2"]
        more = ["--input-tokens", "40", "--warmup", "1", "--batch-size", "4"]
        code, out, err = burst(tmp_path, *common, *more, report=True)
    assert code in (0, 5), err
    found: dict[str, Any] = summary_of(tmp_path)
    assert found["requests"]["complete"] == 6
    assert (found["tokens"]["prompt_reported"], found["tokens"]["prompt_mismatches"]) == (6 * 4 * 40, 0)
    rates, counters = found["throughput"], found["server_counters"]
    assert rates["inputs_per_s"] == pytest.approx(4 * rates["requests_per_s"], rel=1e-6)
    assert (counters["requests_finished"]["server"], counters["requests_finished"]["agree"]) == (28, True)
    assert "4 inputs of 40 tokens" in out
    assert "4 per request" in out
    assert "--batch-size 4" in found["run"]["command"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "completions"], "--batch-size 4: a request to --endpoint completions has only one prompt"),
        (
            ["--endpoint", "rerank", "--workload", "shared-prefix:groups=2,tokens=8"],
            "--batch-size 4: the inputs of a request to --endpoint rerank share a query",
        ),
    ],
)
def test_impossible_batches_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    """Before anything is sent, with the endpoints that take several inputs."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--n", "2", "--batch-size", "4"]
        code, _, err = burst(tmp_path, *common, *arguments)
    assert (code, message in " ".join(err.split())) == (2, True), err


def test_runs_of_embeddings_are_compared(tmp_path: Path) -> None:
    """What neither has is not told apart; work is equal."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            common = ["--server", "vllm", "--url", simulated.url, "--endpoint", "embeddings", "--n", "5"]
            burst(tmp_path / name, *common, "--input-tokens", "16")
    _, out, err = in_process(tmp_path, "compare", "a/run", "b/run")
    assert "e2e.p50" in out + err
    assert "output lengths" not in out + err


def test_sessions_are_refused(tmp_path: Path) -> None:
    """A turn quotes the answer before it, and there is none."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--endpoint", "embeddings", "--n", "2"]
        code, _, err = burst(tmp_path, *common, "--workload", "multi-turn:turns=2", command="run")
    assert (code, "--endpoint embeddings cannot be used for sessions" in err) == (2, True)


@pytest.mark.parametrize("fault", ["500", "cut", "error", "malformed", "truncate", "reset", "content-length"])
def test_a_broken_answer_is_not_complete(fault: str, tmp_path: Path) -> None:
    """Whatever goes wrong on the wire, it is no embedding."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--endpoint", "embeddings", "--n", "2"]
        header = ["--header", f"X-Simulated-Fault: {fault}", "--timeout", "5s", "--quiet"]
        code, _, _ = burst(tmp_path, *common, "--input-tokens", "16", *header)
    assert code == 1
    assert "complete" not in accounted(tmp_path, 2)


def test_the_simulated_server_embeds_and_ranks_several() -> None:
    """One vector per text, one score per document, and the tokens of all of them."""
    with running(SimulatedConfig(server="vllm", ttft_s=0)) as server, httpx.Client(base_url=server.url) as client:
        one = client.post("/v1/embeddings", json={"input": "the one"}).json()
        two = client.post("/v1/embeddings", json={"input": ["the one", "the one"]}).json()
        assert [each["index"] for each in two["data"]] == [0, 1]
        assert two["usage"]["prompt_tokens"] == 2 * one["usage"]["prompt_tokens"]
        ranked = client.post("/v1/rerank", json={"query": "the", "documents": [" one", " other"], "top_n": 1}).json()
        assert [each["document"]["text"] for each in ranked["results"]] == [" one"]
        assert client.post("/v1/embeddings", json={"input": "a", "model": "nope"}).status_code == 404
        assert client.post("/v1/rerank", json={"query": "a"}).status_code == 400
        scored = client.post("/score", json={"text_1": "the", "text_2": [" one", " other"]}).json()
        assert [each["object"] for each in scored["data"]] == ["score", "score"]
        assert client.post("/v1/score", json={"text_1": ["a", "b"], "text_2": ["c"] * 3}).status_code == 400
        assert client.post("/v1/score", json={"text_1": "a", "text_2": [7]}).status_code == 400
        assert [each["num_classes"] for each in client.post("/classify", json={"input": "a"}).json()["data"]] == [2]
        page = client.get("/metrics").text
    assert "vllm:generation_tokens_total{" in page
    generated = next(line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total{"))
    assert generated.endswith(" 0.0")


@pytest.mark.parametrize("endpoint", ["embeddings", "rerank", "classify"])
def test_sglang_embeds_only_with_its_option(endpoint: str, tmp_path: Path) -> None:
    """A server for text refuses the request, and the run shows its message."""
    with running(config("sglang", "llama-2-7b")) as simulated:
        common = ["--server", "sglang", "--url", simulated.url, "--endpoint", endpoint, "--n", "2"]
        code, out, err = burst(tmp_path, *common, "--input-tokens", "40", "--lengths", "approximate")
    assert code in (1, 3, 5), out
    assert "Please add `--is-embedding` when launching the server" in " ".join((out + err).split())


def test_sglang_scores_with_a_model_for_text(tmp_path: Path) -> None:
    """The probabilities of two tokens after query and item. Without `--endpoint`, such a server generates text."""
    with running(config("sglang", "llama-2-7b")) as simulated:
        common = ["--server", "sglang", "--url", simulated.url, "--n", "2", "--input-tokens", "40"]
        code, _, err = burst(tmp_path, *common, "--endpoint", "score")
        answer = httpx.post(f"{simulated.url}/v1/score", json={"query": "a b", "items": ["c"]})
    assert code in (0, 5), err
    assert (answer.status_code, "label_token_ids is required" in answer.text) == (400, True)


def test_a_server_for_embeddings_is_measured_on_its_endpoint(tmp_path: Path) -> None:
    """`/server_info` says so, and no endpoint needs to be named."""
    with running(config("sglang")) as simulated:
        code, _, err = burst(tmp_path, "--url", simulated.url, "--n", "2", "--input-tokens", "40")
    assert code in (0, 5), err
    found: dict[str, Any] = summary_of(tmp_path)
    assert found["server"]["endpoint"] == "embeddings"


def test_documents_of_sglang_are_ranked(tmp_path: Path) -> None:
    """The response is a list with one object per document, or with the best `top_n` of them."""
    with running(config("sglang", "reranker")) as simulated:
        body = {"query": "a b", "documents": ["c d", "e"], "top_n": 1, "return_documents": False}
        ranked = httpx.post(f"{simulated.url}/v1/rerank", json=body).json()
        refused = httpx.post(f"{simulated.url}/v1/rerank", json=body | {"documents": []}).json()
    assert [(document["index"], "document" in document) for document in ranked] == [(0, False)]
    assert refused["message"] == "Documents cannot be empty"
