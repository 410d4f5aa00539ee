"""The Responses API and the Messages API, end to end against the simulated vLLM."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from loadgen.analysis.calibration import compare_with_log, read_log
from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst, summary_of
from tests.support.simulated import running

OK = (0, 5)  # 5: this machine was too busy, which is not what is tested here
ENDPOINTS = ("responses", "messages")


@pytest.mark.parametrize("server", ["vllm", "openai"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_burst_agrees_with_the_log_of_the_server(server: str, endpoint: str, tmp_path: Path) -> None:
    """Every request is complete, prompts have exactly the requested length, and the log has each token that came."""
    log = tmp_path / "sim.jsonl"
    with running(SimulatedConfig(server="vllm", log=log, **FAST)) as simulated:
        common = ["--server", server, "--url", simulated.url, "--endpoint", endpoint, "--n", "12"]
        code, _, err = burst(tmp_path, *common, "--input-tokens", "40", "--output-tokens", "6")
    assert code in OK, err
    found = summary_of(tmp_path)
    assert found["requests"]["complete"] == 12
    assert (found["tokens"]["prompt_reported"], found["tokens"]["prompt_mismatches"]) == (480, 0)
    run = runfile.read(tmp_path / "run")
    assert {(sum(record.chunk_tokens), record.finish_reason) for record in run.records} == {(6, "length")}
    assert compare_with_log(run, read_log(log)).requests == 12


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_full_url_names_the_endpoint(endpoint: str, tmp_path: Path) -> None:
    """As people paste it."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        code, _, err = burst(tmp_path, "--url", f"{simulated.url}/v1/{endpoint}", "--n", "3", "--output-tokens", "4")
    assert code in OK, err
    assert runfile.read(tmp_path / "run").header.plan["endpoint"] == endpoint


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_sessions_quote_the_answers(endpoint: str, tmp_path: Path) -> None:
    """The second turn has the first question and its answer, so its prompt is longer than both."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--endpoint", endpoint, "--n", "4"]
        more = [
            "--workload",
            "multi-turn:turns=2",
            "--input-tokens",
            "20",
            "--output-tokens",
            "8",
            "--concurrency",
            "2",
        ]
        code, _, err = burst(tmp_path, *common, *more, command="run")
    assert code in OK, err
    first, second = (
        [record.prompt_tokens or 0 for record in runfile.read(tmp_path / "run").records if record.turn == turn]
        for turn in (0, 1)
    )
    assert min(second) >= max(first) + 8 + 20


@pytest.mark.parametrize("fault", ["500", "cut", "error", "malformed", "truncate", "reset"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_fault_is_no_complete_request(endpoint: str, fault: str, tmp_path: Path) -> None:
    """Whatever goes wrong in mid-stream is seen."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        common = [
            "--server",
            "vllm",
            "--url",
            simulated.url,
            "--endpoint",
            endpoint,
            "--n",
            "2",
            "--output-tokens",
            "6",
        ]
        at = fault if fault == "500" else f"{fault}@3"
        code, _, _ = burst(tmp_path, *common, "--header", f"X-Simulated-Fault: {at}")
    assert code == 1
    assert summary_of(tmp_path)["requests"]["complete"] == 0


def test_a_key_opens_the_messages_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes no x-api-key. The key is sent as a bearer token, also before the server is known."""
    monkeypatch.setenv("LOADGEN_API_KEY", "sesame-open")
    with running(SimulatedConfig(server="vllm", api_key="sesame-open", **FAST)) as simulated:
        common = ["--url", simulated.url, "--endpoint", "messages", "--n", "2", "--output-tokens", "4"]
        code, _, err = burst(tmp_path, *common)
    assert code in OK, err


def test_the_simulated_server_refuses_as_the_protocol_does() -> None:
    """A wrong model is an error in the format of the Messages API. Tokens are counted without a response."""
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "a b c"}]}
    with (
        running(SimulatedConfig(server="vllm", model="m", **FAST)) as simulated,
        httpx.Client(base_url=simulated.url) as client,
    ):
        refusal = client.post("/v1/messages", json=body | {"model": "nope"})
        missing = client.post("/v1/messages", json={"model": "m"})
        counted = client.post("/v1/messages/count_tokens", json=body | {"system": "Be brief."})
        answer = client.post("/v1/messages", json=body | {"system": "Be brief."}).json()
        uncounted = client.post("/v1/messages/count_tokens", json={"model": "m"})
    assert (refusal.status_code, refusal.json()["type"], refusal.json()["error"]["type"]) == (
        404,
        "error",
        "NotFoundError",
    )
    assert (missing.status_code, uncounted.status_code) == (400, 400)
    assert counted.json()["input_tokens"] == answer["usage"]["input_tokens"]
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 4)
    assert len(answer["content"][0]["text"].split()) == 4
