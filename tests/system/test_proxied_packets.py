"""Packet timestamps of runs through an HTTP proxy (`--proxy`), with nginx in front of the server."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import pytest
import trustme

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst, summary_of
from tests.support.forward_proxy import forward_proxy
from tests.support.simulated import check_timestamps, running
from tests.support.tls import certificate_files
from tests.support.tls_servers import nginx
from tests.support.ui import behind_tls, headless

CREDENTIALS = "loadgen:correct-horse"
ITL_S = 0.02
SMALL = ("--n", "6", "--input-tokens", "16", "--output-tokens", "6")


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
def test_packets_through_a_proxy_are_timestamped(tmp_path: Path, secure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst through a proxy with a password has the packet timestamps of the server's bytes. Every request before and
    during the run uses the proxy, and the password is in no file."""
    monkeypatch.setenv("LOADGEN_PROXY_AUTH", CREDENTIALS)
    log = tmp_path / "sent.jsonl"
    config = SimulatedConfig(server="vllm", ttft_s=0.1, itl_s=ITL_S, log=log)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(running(config)).url
        options: tuple[str, ...] = ()
        if secure:
            certificate, authority = certificate_files(tmp_path)
            url = stack.enter_context(nginx(tmp_path, certificate, url, "1.3"))
            options = ("--ca-file", str(authority))
        proxy = stack.enter_context(forward_proxy(credentials=CREDENTIALS))
        code, out, err = burst(tmp_path, "--url", url, "--proxy", proxy.url, *SMALL, *options)
    assert code in (0, 5), err
    measured = runfile.read(tmp_path / "run")
    assert {(record.state, record.stamps) for record in measured.records} == {("complete", "ring")}
    check_timestamps(measured, log)
    client = summary_of(tmp_path)["client"]  # the ring's timestamps agree with those of the socket
    assert [client[name] for name in ("ring_missed", "ring_rejected", "socket_rejected")] == [0, 0, 0]
    netloc = url.partition("//")[2]
    expected = f"CONNECT {netloc} HTTP/1.1" if secure else f" {url}/v1/"
    assert all(expected in line for line in proxy.request_lines if "/v1/" in line or secure)
    assert measured.header.server["proxy"] == proxy.url
    assert ["--proxy", proxy.url] == measured.header.command[measured.header.command.index("--proxy") :][:2]
    assert f"through the proxy {proxy.url}" in out
    written = b"".join(file.read_bytes() for file in (tmp_path / "run").iterdir())
    assert b"correct-horse" not in written


def test_users_and_the_sampler_use_the_proxy(tmp_path: Path) -> None:
    """The users of `loadgen ui` connect through the tunnel, and so does the process that reads the server's metrics."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with (
        running(SimulatedConfig(server="vllm", **FAST)) as server,
        behind_tls(server.url, context) as url,
        forward_proxy() as proxy,
    ):
        options = ("--url", url, "--ca-file", str(tmp_path / "ca.pem"), "--proxy", proxy.url)
        code, _, err = headless(
            tmp_path, "--server", "vllm", *options, *SMALL[2:], "--users", "2", "--run-time", "2s", "--no-report"
        )
    assert code in (0, 5), err
    measured = runfile.read(tmp_path / "run")
    assert {(record.state, record.stamps) for record in measured.records} == {("complete", "ring")}
    assert {line.split(" ")[0] for line in proxy.request_lines} == {"CONNECT"}
    assert len(proxy.request_lines) >= 4  # the probe, the sampler, and two users
