"""Everything that a simulated server says carries its mark."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.dialects import STREAMING_BACKENDS
from tests.support.simulated import running

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a", "max_tokens": 3}
GENERATE: dict[str, Any] = {"inputs": "a", "parameters": {"max_new_tokens": 3}}
ROUTES = [
    *((name, path, body) for name in STREAMING_BACKENDS for path, body in (("/v1/completions", COMPLETION),)),
    *((name, "/v1/chat/completions", CHAT) for name in STREAMING_BACKENDS),
    *((name, path, GENERATE) for name in ("tgi", "lightllm") for path in ("/generate", "/generate_stream", "/")),
    ("vllm", "/v1/responses", {"model": "m", "input": "a", "max_output_tokens": 3}),
    ("vllm", "/v1/messages", CHAT),
    ("vllm", "/v1/embeddings", {"model": "m", "input": "a"}),
    ("vllm", "/v1/rerank", {"model": "m", "query": "a", "documents": ["b"]}),
]
PAGES = [
    *((name, "/v1/models") for name in STREAMING_BACKENDS),
    *((name, "/metrics") for name in STREAMING_BACKENDS),
    ("vllm", "/version"),
    ("tgi", "/info"),
    ("lightllm", "/get_server_info"),
    ("lightllm", "/get_model_name"),
]


@pytest.mark.parametrize("name", STREAMING_BACKENDS)
def test_every_head_has_the_mark(name: str) -> None:
    """Pages, refusals and unknown paths too, so that no response looks like a real server's."""
    with running(SimulatedConfig(server=name, speed=2.5)) as server, httpx.Client(base_url=server.url) as client:
        answers = [client.get(path) for path in ("/health", "/v1/models", "/nothing", "/metrics")]
        answers.append(client.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}))
        answers.append(client.post("/v1/completions", json=COMPLETION, headers={"X-Simulated-Fault": "429"}))
    assert {answer.headers["x-simulated-speed"] for answer in answers} == {"2.5"}


@pytest.mark.parametrize(("name", "path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_every_response_has_the_mark_in_its_body(name: str, path: str, body: dict[str, Any], stream: bool) -> None:
    """A gateway that rewrites headers leaves ids, fingerprints and fields, and one of them is in the first event."""
    config = SimulatedConfig(server=name, model="m", speed=2.5, ttft_s=0, itl_s=0)
    asked = {**body, "stream": True} if stream else body
    with running(config) as server:
        said = httpx.post(f"{server.url}{path}", json=asked).raise_for_status().text
    first = said.split("\n\n")[0]
    assert "simulated-x2.5" in first or '"simulated_speed":2.5' in first


@pytest.mark.parametrize(("name", "path"), PAGES)
def test_pages_about_the_server_have_the_mark(name: str, path: str) -> None:
    """The model card, what the server is, and its metrics."""
    with running(SimulatedConfig(server=name, speed=2.5)) as server:
        page = httpx.get(f"{server.url}{path}").text
    if path == "/metrics":
        assert "simulated_speed 2.5" in page.splitlines()
        return
    found = json.loads(page)
    assert (found["data"][0] if path == "/v1/models" else found)["simulated_speed"] == 2.5
