"""The simulated server as a whole: exact times, its log, its limits, clients that leave or do not read, its end."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from benchmarks.simulated import main as measure
from loadgen.analysis.run import runfile
from loadgen.servers.simulated import ConfigError
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.wire.sse import split_events
from loadgen.workloads.request import Request
from tests.support.command import accounted, burst, summary_of
from tests.support.dialects import DIALECTS, STREAMING_BACKENDS
from tests.support.simulated import Running, running

FAST: dict[str, float] = {"ttft_s": 0.004, "itl_s": 0.0005}
GENERATE: dict[str, Any] = {"inputs": "a b c", "parameters": {"max_new_tokens": 6, "details": True}}


def until(true: Callable[[], object], limit_s: float = 10) -> None:
    """Waits for another thread or process to have got somewhere."""
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.002)


@pytest.fixture
def tgi() -> Iterator[Running]:
    """A fast TGI."""
    with running(SimulatedConfig(server="tgi", **FAST)) as started:
        yield started


def test_sends_are_due_exactly_when_the_script_says() -> None:
    """Due instants are arrival + TTFT + k x ITL, divided by the speed, to the nanosecond; nothing is sent early."""
    config = SimulatedConfig(server="tgi", ttft_s=0.02, itl_s=0.003, speed=2)
    with running(config) as server:
        httpx.post(f"{server.url}/generate_stream", json=GENERATE, headers={"X-Request-Id": "a"})
        until(lambda: server.log)
    line = server.log[0]
    assert line.request_id == "a"
    assert [due_ns - line.received_ns for due_ns in line.due_ns] == [10_000_000 + k * 1_500_000 for k in range(6)]
    assert all(sent_ns >= due_ns for due_ns, sent_ns in zip(line.due_ns, line.sent_ns, strict=True))
    assert line.sent_ns[0] < line.first_send_end_ns
    assert (line.tokens, line.prompt_tokens, line.output_tokens) == ([1] * 6, 4, 6)


@pytest.mark.parametrize("name", STREAMING_BACKENDS)
@pytest.mark.parametrize("streamed", [True, False])
def test_the_head_leaves_with_the_first_bytes_of_the_body(name: str, streamed: bool) -> None:
    """No byte of a response leaves before the server has something to say. The head and the first event leave in one
    write: Go proxies cut streams whose head overtakes the request's body."""
    body = json.dumps({"prompt": "a b", "model": "llama-2-7b", "max_tokens": 3, "stream": streamed}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with running(SimulatedConfig(server=name, ttft_s=0.2, itl_s=0.05)) as server:
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            first_read = connection.recv(1 << 20)
    assert first_read.startswith(b"HTTP/1.1 200 OK\r\n")
    _, blank, beginning = first_read.partition(b"\r\n\r\n")
    assert blank
    assert b'"text":' in beginning


@pytest.mark.parametrize("name", STREAMING_BACKENDS)
@pytest.mark.parametrize("clock", ["script", "batching"])
def test_our_own_dialects_find_every_answer_complete(name: str, clock: str) -> None:
    """Each dialect proves the stream of its server complete, with exactly the tokens asked, on either clock."""
    request = Request(id=0, prompt="say it", input_tokens=3, output_tokens=9)
    config = SimulatedConfig(server=name, model="m", clock=clock, speed=20, **FAST)
    with running(config) as server, httpx.Client(base_url=server.url) as client:
        for (dialect_server, _), dialect in DIALECTS.items():
            if dialect_server != name:
                continue
            body = dialect.encode(request, "m")
            response = client.post(dialect.path, content=body, headers={"Content-Type": "application/json"})
            payloads, _, rest = split_events(response.content)
            answer = dialect.decode(payloads)
            assert (sum(answer.tokens), answer.output_tokens, answer.error_kind, rest) == (9, 9, "", b"")
            assert answer.end_event is not None
            assert answer.finish_reason == "length"


def test_the_same_seed_says_the_same() -> None:
    """Two servers of one seed give the same words; another seed gives others."""
    said = []
    for seed in (0, 0, 1):
        with running(SimulatedConfig(server="tgi", seed=seed, **FAST)) as server:
            said.append(httpx.post(f"{server.url}/generate", json=GENERATE).json()["generated_text"])
    assert said[0] == said[1] != said[2]


def test_a_connection_serves_many_requests(tgi: Running) -> None:
    """Streams, whole answers, pages and refusals leave the connection in a state for the next request."""
    address = urlsplit(tgi.url)
    with httpx.Client(base_url=tgi.url, limits=httpx.Limits(max_connections=1)) as client:
        for _ in range(3):
            assert len(split_events(client.post("/generate_stream", json=GENERATE).content)[0]) == 6
            assert client.post("/generate", json=GENERATE).status_code == 200
            assert client.post("/generate", json={"inputs": ""}).status_code == 422
            assert client.get("/nowhere").status_code == 404
            assert client.get("/health", headers={"Host": address.netloc}).content == b""


def test_the_gpu_that_is_simulated_is_said(tgi: Running) -> None:
    """Under the batching clock, for the limit line of reports; a script is no GPU."""
    with running(SimulatedConfig(server="vllm", clock="batching", gpu="H100", tensor_parallel=2)) as server:
        told = httpx.get(f"{server.url}/simulated/status").json()["hardware"]
    assert told == {"gpu": "H100", "model": "Llama-2-7B", "tensor_parallel": 2}
    assert "hardware" not in httpx.get(f"{tgi.url}/simulated/status").json()


def test_a_client_that_leaves_is_forgotten() -> None:
    """Its stream no longer counts, and its line in the log has what was sent until then."""
    with running(SimulatedConfig(server="tgi", ttft_s=0.001, itl_s=0.001)) as server:
        long = {"inputs": "a", "parameters": {"max_new_tokens": 4000}}
        with httpx.stream("POST", f"{server.url}/generate_stream", json=long) as response:
            pieces = response.iter_raw()  # kept: a forgotten iterator closes the connection
            next(pieces)
            assert httpx.get(f"{server.url}/simulated/status").json()["active"] == 1
        until(lambda: server.log)
        assert httpx.get(f"{server.url}/simulated/status").json()["active"] == 0
        assert 'tgi_request_failure{err="dropped"} 1.0' in httpx.get(f"{server.url}/metrics").text
    assert 0 < server.log[0].output_tokens < 4000


def test_a_client_that_does_not_read_loses_nothing() -> None:
    """When the socket's buffer is full the rest waits in order, and other streams go on."""
    tokens = 30_000  # eight megabytes: more than the kernel keeps for a connection
    with running(SimulatedConfig(server="vllm", ttft_s=0, itl_s=0, max_model_len=40_000)) as server:
        address = urlsplit(server.url)
        body = json.dumps({"prompt": [5], "max_tokens": tokens, "stream": True}).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(10)
            slow.connect((address.hostname, address.port))
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: server.log)  # everything has been handed over; the client has read nothing
            quick = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5], "max_tokens": 3})
            assert quick.json()["usage"]["completion_tokens"] == 3
            answer = b"".join(iter(lambda: slow.recv(65536), b""))
    assert answer.count(b'"text":" ') == tokens
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_lightllm_lets_requests_wait() -> None:
    """With one place, three requests are served one after the other, and none is refused."""
    config = SimulatedConfig(server="lightllm", max_concurrent_requests=1, ttft_s=0.15, itl_s=0)

    async def ask(client: httpx.AsyncClient) -> int:
        return (await client.post("/generate", json=GENERATE)).status_code

    async def ask_all(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url) as client:
            return await asyncio.gather(*(ask(client) for _ in range(3)))

    with running(config) as server:
        assert asyncio.run(ask_all(server.url)) == [200] * 3
    due_ns = sorted(line.due_ns[0] for line in server.log)  # a late wake-up moves when they were sent, but not these
    assert all(later_ns - earlier_ns >= 150_000_000 for earlier_ns, later_ns in pairwise(due_ns))


def test_vllm_refuses_past_its_queue_limit() -> None:
    """503 before the body has begun, the same words as an event after it has, and [DONE] behind them."""
    with (
        running(SimulatedConfig(server="vllm", ttft_s=0, itl_s=60, max_concurrent_requests=1)) as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": [5], "stream": True}),
    ):
        whole = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5]})
        streamed = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5], "stream": True})
    assert (whole.status_code, streamed.status_code) == (503, 200)
    assert streamed.text == f"data: {whole.text}\n\ndata: [DONE]\n\n"


def test_outputs_that_do_not_fit_are_clamped_or_refused() -> None:
    """vLLM and LightLLM shorten them without a word; TGI refuses, under status 200 when streaming."""
    with running(SimulatedConfig(server="vllm", max_model_len=20, **FAST)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5] * 8, "max_tokens": 19})
        assert answer.json()["usage"]["completion_tokens"] == 12
    with running(SimulatedConfig(server="lightllm", max_model_len=20, **FAST)) as server:
        body = {"inputs": [5] * 8, "parameters": {"max_new_tokens": 1000}}
        assert httpx.post(f"{server.url}/generate", json=body).json()["count_output_tokens"] == 12
        body["inputs"] = [5] * 20
        refused = httpx.post(f"{server.url}/generate_stream", json=body)
        assert (refused.status_code, b"invalid_request_error" in refused.content) == (200, True)
    with running(SimulatedConfig(server="tgi", max_model_len=20, **FAST)) as server:
        body = {"inputs": "a", "parameters": {"max_new_tokens": 1000}}
        assert httpx.post(f"{server.url}/generate", json=body).status_code == 422
        refused = httpx.post(f"{server.url}/generate_stream", json=body)
        assert (refused.status_code, b'"error_type":"validation"' in refused.content) == (200, True)


def test_tgi_ends_by_itself_when_told_to() -> None:
    """Lengths vary about the mean and end in the end-of-sequence token; none is longer than asked."""
    body = {"inputs": "a", "parameters": {"max_new_tokens": 100, "details": True}}
    config = SimulatedConfig(server="tgi", ttft_s=0, itl_s=0, eos_mean_tokens=20)
    with running(config) as server, httpx.Client(base_url=server.url) as client:
        details = [client.post("/generate", json=body).json()["details"] for _ in range(60)]
    lengths = [each["generated_tokens"] for each in details]
    assert len(set(lengths)) > 10
    assert 10 < sum(lengths) / len(lengths) < 35
    for each in details:
        assert (
            (each["finish_reason"] == "eos_token")
            == (each["tokens"][-1]["special"])
            == (each["generated_tokens"] < 100)
        )


def test_a_batching_server_reports_its_queue() -> None:
    """vLLM's gauges are those of the engine model: some run, and the cache is in use."""
    config = SimulatedConfig(server="vllm", clock="batching")
    body = {"prompt": [5] * 64, "max_tokens": 500, "stream": True}
    with (
        running(config) as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        pieces = response.iter_raw()  # kept: a forgotten iterator closes the connection
        next(pieces)
        page = httpx.get(f"{server.url}/metrics").text
    gauges = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    labels = '{engine="0",model_name="llama-2-7b"}'
    assert gauges[f"vllm:num_requests_running{labels}"] == "1.0"
    assert 0 < float(gauges[f"vllm:kv_cache_usage_perc{labels}"]) < 1


def test_an_unknown_card_is_said_so() -> None:
    """The message lists the cards there are; a port that is taken is an OSError."""
    with pytest.raises(ConfigError, match="A800"), running(SimulatedConfig(server="vllm", clock="batching", gpu="x")):
        pass
    with running(SimulatedConfig(server="tgi")) as first:
        taken = urlsplit(first.url).port or 0
        with pytest.raises(OSError, match="in use"), running(SimulatedConfig(server="tgi", port=taken)):
            pass


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """At tiny size it accounts for every send."""
    measure(["--n", "8", "--tokens", "5", "--ttft-ms", "5", "--itl-ms", "1"])
    assert "40 sends" in capsys.readouterr().out


def test_a_shared_prefix_shows_in_the_metrics_and_the_time() -> None:
    """Under the batching clock vLLM's second request of the same tokens is quicker, and the hits are counted."""
    body = {"prompt": [*range(300, 4300)], "max_tokens": 1}
    with running(SimulatedConfig(server="vllm", clock="batching", max_model_len=8192)) as server:
        for _ in range(2):
            httpx.post(f"{server.url}/v1/completions", json=body)
        page = httpx.get(f"{server.url}/metrics").text
        until(lambda: len(server.log) == 2)
    first_ns, second_ns = (line.due_ns[0] - line.received_ns for line in server.log)
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="llama-2-7b"} 3984.0' in page
    assert 'vllm:prefix_cache_queries_total{engine="0",model_name="llama-2-7b"} 8000.0' in page
    assert second_ns < first_ns / 3


def test_all_answers_of_a_request_are_counted() -> None:
    """Two prompts with three answers of five tokens each are thirty tokens, to the client and on the metrics page."""
    body = {"prompt": [[5, 6], [7]], "n": 3, "max_tokens": 5}
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
        page = httpx.get(f"{server.url}/metrics").text
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 30
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len({choice["text"] for choice in answer["choices"]}) == 6
    assert 'vllm:generation_tokens_total{engine="0",model_name="llama-2-7b"} 30.0' in page


def test_an_old_lightllm_is_measured_as_one(tmp_path: Path) -> None:
    """Version 0.0.1 is recognised by its routes, its streams are complete, and its marks are found."""
    config = SimulatedConfig(server="lightllm", server_version="0.0.1", **FAST)
    load = ("--n", "3", "--input-tokens", "8", "--output-tokens", "4", "--lengths", "approximate", "--no-report")
    with running(config) as server:
        code, out, err = burst(tmp_path, "--server", "lightllm", "--url", server.url, *load)
    assert code in (0, 5), out + err
    assert accounted(tmp_path, 3) == {"complete": 3}
    assert summary_of(tmp_path)["server"]["version"] == "before 1.0"
    run = runfile.read(tmp_path / "run")
    assert any(sample.values.get("simulated") for sample in run.telemetry if sample.source == "client")


def test_an_old_lightllm_breaks_off_a_stream_that_does_not_fit() -> None:
    """Its 200 has left by the time the prompt is counted; without streaming the same request gets a 417."""
    config = SimulatedConfig(server="lightllm", server_version="0.0.1", max_model_len=20, **FAST)
    body = {"inputs": "a " * 100, "parameters": {"max_new_tokens": 4}}
    with running(config) as server, httpx.Client(base_url=server.url) as client:
        assert client.post("/generate", json=body).status_code == 417
        with client.stream("POST", "/generate_stream", json=body) as answer:
            assert answer.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                answer.read()


def test_a_version_that_no_server_has_is_refused() -> None:
    """The message names those that there are."""
    with pytest.raises(ConfigError, match=r"server_version of lightllm must be one of 0.0.1, 0.0.1-tgi-api, not '9'"):
        SimulatedConfig(server="lightllm", server_version="9")
    with pytest.raises(ConfigError, match=r"server_version of tgi must be one of none, not '0.0.1'"):
        SimulatedConfig(server="tgi", server_version="0.0.1")
