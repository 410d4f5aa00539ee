"""Servers that accept only HTTP/2: haproxy with `proto h2` in front of a simulated server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen import Plan, run
from loadgen.analysis.calibration import read_log
from loadgen.analysis.run import runfile
from loadgen.servers import http2
from loadgen.servers.auth import NO_AUTH, Access, TlsFiles, tls_context
from loadgen.servers.errors import UnreachableError
from loadgen.servers.json_client import JsonClient
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst
from tests.support.forward_proxy import forward_proxy
from tests.support.simulated import running
from tests.support.stub_server import answering
from tests.support.tls import certificate_files
from tests.support.tls_servers import only_http2
from tests.support.ui import headless

TOKENS, ITL_S = 6, 0.02
SMALL = ("--input-tokens", "16", "--output-tokens", str(TOKENS))


@pytest.fixture(autouse=True)
def _no_translator_is_left() -> Iterator[None]:
    """End the translators that a test starts in this process."""
    yield
    http2.stop_translators()


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
def test_a_burst_is_measured(tmp_path: Path, secure: bool) -> None:
    """A burst with more requests than the server allows streams per connection is complete. No token arrives before the
    server sent it. The run says that the server speaks HTTP/2, and that the timestamps are those of reads."""
    log = tmp_path / "sent.jsonl"
    certificate, authority = certificate_files(tmp_path) if secure else (None, None)
    options = ("--ca-file", str(authority)) if secure else ()
    config = SimulatedConfig(server="vllm", ttft_s=0.3, itl_s=ITL_S, log=log)
    with running(config) as server, only_http2(tmp_path, server.url, certificate, streams=4) as url:
        code, out, err = burst(tmp_path, "--url", url, "--n", "10", *SMALL, *options)
    assert code in (0, 5), err
    measured = runfile.read(tmp_path / "run")
    assert [(record.state, record.stamps, len(record.chunk_ns)) for record in measured.records] == [
        ("complete", "user", TOKENS)
    ] * 10
    assert measured.header.server["protocol"] == "HTTP/2"
    assert measured.header.plan["url"] == url
    sent_ns = {number: line.sent_ns for number, line in read_log(log).items()}
    late_s = [
        [
            (measured.header.start_realtime_ns + at - sent) / 1e9
            for at, sent in zip(record.chunk_ns, sent_ns[record.id], strict=True)
        ]
        for record in measured.records
    ]
    assert min(map(min, late_s)) >= 0
    words = " ".join(out.split())
    assert "The server accepts only HTTP/2" in words
    assert "HTTP/2 requests share connections, so their data has no kernel timestamps" in words


def test_users_and_functions_reach_the_server(tmp_path: Path) -> None:
    """The users of `loadgen ui`, and the Python function, use HTTP/2 too."""
    with running(SimulatedConfig(server="vllm", **FAST)) as server, only_http2(tmp_path, server.url) as url:
        result = run(Plan(url=url, n=2, input_tokens=16, output_tokens=4), out=tmp_path / "by-function")
        code, _, err = headless(tmp_path, "--url", url, *SMALL, "--users", "2", "--run-time", "2s", "--no-report")
    assert result.summary.requests.complete == 2
    assert result.summary.server.protocol == "HTTP/2"
    assert code in (0, 5), err
    assert {record.state for record in runfile.read(tmp_path / "run").records} == {"complete"}


def test_a_tunnel_of_a_proxy_carries_http2(tmp_path: Path) -> None:
    """With `--proxy`, the translator connects through the proxy."""
    certificate, authority = certificate_files(tmp_path)
    with (
        running(SimulatedConfig(server="vllm", **FAST)) as server,
        only_http2(tmp_path, server.url, certificate) as url,
        forward_proxy() as proxy,
    ):
        options = ("--ca-file", str(authority), "--proxy", proxy.url)
        code, _, err = burst(tmp_path, "--url", url, "--n", "3", *SMALL, *options)
    assert code in (0, 5), err
    assert {line.split(" ")[0] for line in proxy.request_lines} == {"CONNECT"}


def test_cancelled_requests_and_large_bodies_do_no_harm(tmp_path: Path) -> None:
    """A request that times out is cancelled, and later ones are answered. A prompt larger than the first flow-control
    window arrives whole."""
    config = SimulatedConfig(server="vllm", ttft_s=0.2, itl_s=0.01)
    with running(config) as server, only_http2(tmp_path, server.url) as url:
        client = JsonClient(url)
        assert client.request("/v1/models").status == 200
        large = client.request("/tokenize", {"prompt": "word " * 100_000})
        assert large.status == 200
        hurried = JsonClient(url, timeout_s=0.05)
        with pytest.raises(UnreachableError, match="did not answer within"):
            hurried.request("/v1/completions", {"model": "llama-2-7b", "prompt": "a", "max_tokens": 100})
        assert client.request("/v1/models").status == 200
        client.close()
        hurried.close()


@pytest.mark.parametrize("status", [426, 505])
def test_a_status_that_refuses_http1_starts_the_translator(tmp_path: Path, status: int) -> None:
    """A server that answers requests in HTTP/1.1 with such a status is asked in HTTP/2. A server that speaks no HTTP/2
    keeps its status."""
    with (
        running(SimulatedConfig(server="vllm", **FAST)) as server,
        only_http2(tmp_path, server.url, status=status) as url,
    ):
        client = JsonClient(url)
        assert client.request("/v1/models").status == 200
        client.close()
        assert http2.translator_socket(url)
    with answering({"GET /v1/models": (status, b"")}) as stub:
        client = JsonClient(stub.url)
        assert client.request("/v1/models").status == status
        client.close()
        assert not http2.translator_socket(stub.url)


def test_only_servers_without_http1_are_translated(tmp_path: Path) -> None:
    """No translator is started for a server that answers in HTTP/1.1."""
    certificate, authority = certificate_files(tmp_path)
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        client = JsonClient(server.url)
        assert client.request("/v1/models").status == 200
        assert not http2.translator_socket(server.url)
        assert not http2.speaks_http2(server.url, NO_AUTH)
        client.close()
        with only_http2(tmp_path, server.url, certificate) as url:
            assert http2.speaks_http2(url, Access(tls_context(authority), files=TlsFiles(authority)))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without h2, the message says what to install."""
    (tmp_path / "h2.py").write_text("raise ImportError('no h2 here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running(SimulatedConfig(server="vllm", **FAST)) as server, only_http2(tmp_path, server.url) as url:
        client = JsonClient(url)
        with pytest.raises(UnreachableError, match="accepts only HTTP/2") as caught:
            client.request("/v1/models")
        client.close()
    assert "pip install" in caught.value.hint
