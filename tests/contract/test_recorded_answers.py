"""The simulated servers answer the recorded requests as the real servers did: status, headers and shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from loadgen.servers import marks
from loadgen.servers.simulated.config import SimulatedConfig
from tests.contract.recorded import TRANSCRIPTS
from tests.contract.recorded_requests import (
    LIGHTLLM,
    SGLANG,
    TEI,
    TGI,
    VLLM,
    WHISPER,
    Recorded,
    exchange,
    recording,
    shape_of,
)
from tests.support.simulated import running

FAST: dict[str, Any] = {"model": "tiny", "max_model_len": 2048, "ttft_s": 0.002, "itl_s": 0.0001, "speed": 10}
"""As the recorded servers were started, but for their speed."""
TGI_CONFIG = SimulatedConfig(server="tgi", **FAST)
VLLM_CONFIG = SimulatedConfig(server="vllm", **FAST)
SGLANG_CONFIG = SimulatedConfig(server="sglang", **{**FAST, "max_model_len": 4096})
LIGHTLLM_CONFIG = SimulatedConfig(server="lightllm", server_version="0.0.1", **FAST)
TEI_CONFIG = SimulatedConfig(server="tei", **{**FAST, "model": "tiny-bert", "max_model_len": 512})
CONFIGS = {
    "idle tgi": TGI_CONFIG,
    "idle vllm": VLLM_CONFIG,
    "idle lightllm": LIGHTLLM_CONFIG,
    "idle sglang": SGLANG_CONFIG,
    "guarded sglang": replace(SGLANG_CONFIG, api_key="sesame"),
    "guarded vllm": replace(VLLM_CONFIG, api_key="sesame"),
    "idle whisper": replace(VLLM_CONFIG, model="tiny-whisper"),
    "idle tei": TEI_CONFIG,
    "rerank tei": replace(TEI_CONFIG, model="tiny-rerank"),
    "classify tei": replace(TEI_CONFIG, model="tiny-classify"),
    "guarded tei": replace(TEI_CONFIG, api_key="sesame"),
    "tgi_api lightllm": replace(LIGHTLLM_CONFIG, server_version="0.0.1-tgi-api"),
}
RECORDINGS = {"tgi": TGI, "vllm": VLLM, "lightllm": LIGHTLLM, "sglang": SGLANG, "tei": TEI, "whisper": WHISPER}
EVERY = [(name, request) for name, requests in RECORDINGS.items() for request in requests]


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """URLs of simulated servers in the states that the requests want, by state and kind."""
    with ExitStack() as stack:
        found = {name: stack.enter_context(running(config)).url for name, config in CONFIGS.items()}
        busy = replace(TGI_CONFIG, max_concurrent_requests=1, itl_s=6000)
        found["busy tgi"] = stack.enter_context(running(busy)).url
        stack.enter_context(taking_its_place(found["busy tgi"]))
        yield found


@contextmanager
def asked_server(urls: dict[str, str], name: str, request: Recorded) -> Iterator[str]:
    """The URL of the server that a request is for."""
    if request.server == "fresh":
        with running(CONFIGS[f"idle {name}"]) as server:
            yield server.url
    else:
        yield urls[f"{request.server} {name}"]


@contextmanager
def taking_its_place(url: str) -> Iterator[None]:
    """One stream that goes on."""
    body = {"inputs": "a", "parameters": {"max_new_tokens": 100}}
    with httpx.stream("POST", f"{url}/generate_stream", json=body, timeout=30) as stream:
        pieces = stream.iter_raw()  # kept: a forgotten iterator closes the connection
        next(pieces)
        yield


@pytest.mark.parametrize(
    ("folder", "name"), [("tgi-3.3.7", "tgi"), ("vllm-0.32.0", "vllm"), ("lightllm-0.0.1", "lightllm")]
)
def test_every_recording_has_its_request(folder: str, name: str) -> None:
    """A recording that no request is made for would prove nothing."""
    files = {f"{folder}/{path.name}" for path in (TRANSCRIPTS / folder).glob("*.txt")}
    assert files == {request.file for request in RECORDINGS[name]}
    assert len(files) == len(RECORDINGS[name])


@pytest.mark.parametrize(("name", "request_"), EVERY, ids=lambda value: getattr(value, "file", value))
def test_a_simulated_server_answers_as_the_recorded_one(urls: dict[str, str], name: str, request_: Recorded) -> None:
    """Status line, headers in their order, and the shape of the body, with every word of a refusal."""
    with asked_server(urls, name, request_) as url:
        ours = shape_of(exchange(url, request_), request_)
    recorded = recording(request_)
    if request_.path == "/metrics":
        assert metric_types(ours.body) <= metric_types(recorded.decode())
    if not recorded.startswith(b"HTTP/"):  # a page of metrics without its head
        return
    theirs = shape_of(recorded, request_)
    assert ours.status == theirs.status
    assert ours.headers == theirs.headers
    if request_.path != "/metrics":
        assert json.dumps(ours.body) == json.dumps(theirs.body)


def metric_types(page: str) -> set[str]:
    """Names and types of a page of metrics, without the mark of the simulated servers."""
    return {line for line in page.splitlines() if line.startswith("# TYPE") and marks.FIELD not in line}
