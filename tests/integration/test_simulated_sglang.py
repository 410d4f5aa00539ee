"""The simulated SGLang: runs on each endpoint, counters that grow late, its cache, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.analysis.run import runfile
from loadgen.analysis.telemetry import all_series
from loadgen.servers.backends import BACKENDS
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.telemetry import page_values, parse_page
from tests.support.command import FAST, accounted, burst
from tests.support.simulated import running

LENGTHS = ("--n", "6", "--input-tokens", "32", "--output-tokens", "8")
SGLANG = BACKENDS["sglang"]


@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
@pytest.mark.parametrize("tokens_per_event", [1, 3])
def test_a_burst_has_exact_lengths_on_each_endpoint(endpoint: str, tokens_per_event: int, tmp_path: Path) -> None:
    """The server is recognised by its URL. Prompts and responses have the requested length, with one token per event or
    several."""
    with running(SimulatedConfig(server="sglang", tokens_per_event=tokens_per_event, **FAST)) as server:
        code, out, err = burst(tmp_path, "--url", server.url, "--endpoint", endpoint, *LENGTHS)
    assert code in (0, 5), err
    assert out.startswith("SIMULATED sglang")
    assert accounted(tmp_path, 6) == {"complete": 6}
    run = runfile.read(tmp_path / "run")
    assert run.header.server["version"] == "0.5.23"
    assert {(record.prompt_tokens, record.output_tokens) for record in run.records} == {(32, 8)}
    assert {sum(record.chunk_tokens) for record in run.records} == {8}
    assert {record.chunk_counts for record in run.records} == {"usage"}


def test_totals_grow_when_a_request_ends_and_live_totals_before() -> None:
    """While a stream runs, only `realtime_tokens_total` shows its tokens, without the first one."""
    with running(SimulatedConfig(server="sglang", ttft_s=0, itl_s=0.02)) as server:
        body = {"prompt": [5] * 7, "max_tokens": 50, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            for _ in range(8):  # four events, each with a blank line
                next(lines)
            during = values(server.url)
            for _ in lines:
                pass
        after = values(server.url)
    assert (during["prompt_tokens"], during["output_tokens"], during["requests_finished"]) == (0, 0, 0)
    assert during["live_prompt_tokens"] == 7
    assert 3 <= during["live_output_tokens"] <= 49
    assert (after["prompt_tokens"], after["output_tokens"], after["requests_finished"]) == (7, 50, 1)
    assert (after["live_prompt_tokens"], after["live_output_tokens"]) == (7, 49)


def test_curves_of_tokens_use_the_live_totals(tmp_path: Path) -> None:
    """The curve of output tokens ends at all tokens except the first one of each request."""
    config = SimulatedConfig(server="sglang", ttft_s=0, itl_s=0.01)
    with running(config) as server:
        code, _, err = burst(tmp_path, "--url", server.url, *LENGTHS[:4], "--no-gpu")
    assert code in (0, 5), err
    run = runfile.read(tmp_path / "run")
    (curve,) = (series for series in all_series(run) if series.name == "output_tokens_per_s")
    steps = zip([curve.x_s[0], *curve.x_s], curve.x_s, curve.y, strict=False)
    tokens = sum((now_s - before_s) * rate for before_s, now_s, rate in steps if rate is not None)
    generated = sum(record.output_tokens or 0 for record in run.records)
    assert tokens == pytest.approx(generated - len(run.records))


def test_a_repeated_prompt_is_cached_until_the_cache_is_flushed() -> None:
    """Only whole blocks of 16 tokens are shared, and the last token is always computed."""
    config = SimulatedConfig(server="sglang", clock="batching", speed=50)
    body = {"prompt": [*range(300, 364)], "max_tokens": 2}
    cached = []
    with running(config) as server:
        for _ in range(2):
            httpx.post(f"{server.url}/v1/completions", json=body).raise_for_status()
            cached.append(values(server.url)["cached_prompt_tokens"])
        assert httpx.post(f"{server.url}/flush_cache").text.startswith("Cache flushed.")
        httpx.post(f"{server.url}/v1/completions", json=body).raise_for_status()
        cached.append(values(server.url)["cached_prompt_tokens"])
    assert cached == [0, 48, 48]


def test_the_last_tokens_of_the_context_are_cut_without_a_word() -> None:
    """A response that fits the context, but not the usable part, ends with the finish reason `length`."""
    with running(SimulatedConfig(server="sglang", max_model_len=64, **FAST)) as server:
        body = {"prompt": [5] * 50, "max_tokens": 14}
        answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["choices"][0]["finish_reason"] == "length"
        refused = httpx.post(f"{server.url}/v1/completions", json={**body, "prompt": [5] * 58, "max_tokens": 1})
        assert (refused.status_code, "exceeds the maximum allowed length" in refused.text) == (400, True)


def test_a_load_beyond_the_context_is_refused_with_its_option(tmp_path: Path) -> None:
    """Prompt and output may use the context less two tokens."""
    with running(SimulatedConfig(server="sglang", max_model_len=64, **FAST)) as server:
        lengths = ("--n", "2", "--input-tokens", "50", "--output-tokens", "13")
        code, _, err = burst(tmp_path, "--url", server.url, *lengths)
    assert code == 2
    assert "exceed its max_model_len of 64 (2 of them cannot be used)" in " ".join(err.split())
    assert "--context-length" in err


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"stop": True}, "2 validation errors:"),
        ({"stop": ["a", ["b"]]}, "'loc': ('body', 'stop', 'list[str]', 1), 'msg': 'Input should be a valid string'"),
        ({"stream_options": True}, "'loc': ('body', 'stream_options')"),
    ],
)
def test_a_field_of_a_wrong_type_is_refused(fields: dict[str, Any], problem: str) -> None:
    """The refusal has status 400 and names the field, as pydantic does in the real server."""
    with running(SimulatedConfig(server="sglang", **FAST)) as server:
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5], "max_tokens": 2, **fields})
    assert (refused.status_code, problem in refused.json()["message"]) == (400, True), refused.text


@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
def test_a_full_queue_rejects_a_request(endpoint: str) -> None:
    """The refusal of a stream has status 200, as in the real server, and the dialect calls it rejected."""
    dialect = SGLANG.dialects[endpoint]
    long_body = {"prompt": [5], "max_tokens": 100, "stream": True}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    bodies: dict[str, Any] = {
        "completions": {"prompt": [5], "max_tokens": 2, **usage},
        "chat": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **usage},
        "generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}, "stream": True},
    }
    config = SimulatedConfig(server="sglang", max_concurrent_requests=1, ttft_s=0, itl_s=600)
    with running(config) as server, httpx.stream("POST", f"{server.url}/v1/completions", json=long_body) as stream:
        pieces = stream.iter_raw()  # kept, because a forgotten iterator closes the connection
        next(pieces)
        answer = httpx.post(server.url + dialect.path, json=bodies[endpoint])
    assert answer.status_code == 200
    payloads = [line.removeprefix("data: ").encode() for line in answer.text.splitlines() if line]
    decoded = dialect.decode(payloads)
    assert (decoded.error_kind, "The request queue is full." in decoded.error_detail) == ("rejected", True)
    if endpoint != "generate":
        assert json.loads(payloads[1])["usage"]["prompt_tokens"] == 0


def values(url: str) -> dict[str, Any]:
    """Return the values of the server's metrics page under loadgen's names."""
    return page_values(parse_page(httpx.get(f"{url}/metrics").content, ("sglang:",)), "sglang")
