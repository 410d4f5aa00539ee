"""Runs through an HTTP proxy (`--proxy`), on a Unix socket, with a client certificate, and behind a redirect."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from loadgen import Plan, run
from loadgen.analysis.run import runfile
from loadgen.servers.auth import Access
from loadgen.servers.discovery import probe
from loadgen.servers.errors import UnreachableError
from loadgen.servers.json_client import JsonClient
from loadgen.servers.proxy import proxy_at
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst, loadgen
from tests.support.forward_proxy import forward_proxy
from tests.support.simulated import check_timestamps, running
from tests.support.small_servers import models
from tests.support.stub_server import Answer, answering
from tests.support.tls import HOST
from tests.support.ui import behind_tls, headless

CREDENTIALS = "loadgen:correct-horse"
TOKENS, ITL_S = 6, 0.02
SMALL = ("--n", "6", "--input-tokens", "16", "--output-tokens", str(TOKENS))


REFUSALS = {
    "credentials are missing": ({"credentials": CREDENTIALS}, "407", "put USER:PASSWORD into LOADGEN_PROXY_AUTH"),
    "the server is forbidden": ({"refusal": "403 Forbidden"}, "answers 403 Forbidden to CONNECT", "check --proxy"),
}


@pytest.mark.parametrize(("behaviour", "message", "advice"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_refusal_of_the_proxy_is_named(scheme: str, behaviour: dict[str, str], message: str, advice: str) -> None:
    """A proxy that refuses is named together with its answer, instead of the server behind it."""
    with forward_proxy(**behaviour) as proxy, running(SimulatedConfig(server="vllm", **FAST)) as server:
        url = server.url.replace("http", scheme)
        client = JsonClient(url, Access(proxy=proxy_at(proxy.url, {})))
        if scheme == "http" and "refusal" in behaviour:
            assert client.request("/v1/models").status == 200  # only tunnels are refused
        else:
            with pytest.raises(UnreachableError) as caught:
                client.request("/v1/models")
            assert message in str(caught.value)
            assert proxy.url in str(caught.value)
            assert advice in f"{caught.value} {caught.value.hint}"
        client.close()


def test_a_run_is_stopped_if_the_proxy_fails(tmp_path: Path) -> None:
    """Without a proxy at the named address, no request is sent, and the proxy is named."""
    done = loadgen(tmp_path, "burst", "--url", "http://127.0.0.1:1", "--proxy", "127.0.0.1:1", "--n", "1")
    assert done.returncode == 3
    assert "the proxy http://127.0.0.1:1 cannot be reached: Connection refused" in done.stderr


def test_a_proxy_of_the_environment_is_a_hint(tmp_path: Path) -> None:
    """If the server cannot be reached and HTTPS_PROXY is set, the hint shows the option, without the password."""
    done = loadgen(
        tmp_path,
        *("burst", "--url", "https://127.0.0.1:1", "--n", "1"),
        HTTPS_PROXY="http://me:correct-horse@proxy.test:8080",
    )
    assert done.returncode == 3
    assert "HTTPS_PROXY is set, but loadgen uses a proxy only if an option names it" in done.stderr
    assert "--proxy http://proxy.test:8080" in done.stderr
    assert "correct-horse" not in done.stderr


@contextlib.contextmanager
def on_unix_socket(url: str, path: Path) -> Iterator[str]:
    """Listen on a Unix socket, forward every connection to the server at `url`, and yield the socket's URL."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as opened:
        listening.bind(str(path))
        listening.listen(128)

        def copy(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65_536):
                    sink.sendall(data)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    server = socket.create_connection((host, int(port)))
                    opened.callback(client.close)
                    opened.callback(server.close)
                    for pair in ((client, server), (server, client)):
                        threading.Thread(target=copy, args=pair, daemon=True).start()

        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        yield f"unix:{path}"
        listening.shutdown(socket.SHUT_RDWR)
        acceptor.join()


def test_a_server_on_a_unix_socket_is_measured(tmp_path: Path) -> None:
    """A burst, users of `loadgen ui` and the Python function reach a Unix socket. The run says that the timestamps are
    those of reads, and why."""
    log = tmp_path / "sent.jsonl"
    with (
        running(SimulatedConfig(server="vllm", ttft_s=0.1, itl_s=ITL_S, log=log)) as server,
        on_unix_socket(server.url, tmp_path / "vllm.sock") as url,
    ):
        code, out, err = burst(tmp_path, "--url", f"{url}:/v1/completions", *SMALL)
        measured = runfile.read(tmp_path / "run")
        check_timestamps(measured, log)
        result = run(Plan(url=url, n=2, input_tokens=16, output_tokens=4), out=tmp_path / "by-function")
        ui = headless(tmp_path / "", "--url", url, *SMALL[2:], "--users", "2", "--run-time", "2s", "--no-report")
    assert code in (0, 5), err
    assert {(record.state, record.stamps) for record in measured.records} == {("complete", "user")}
    assert measured.header.server["addresses"] == [str(tmp_path / "vllm.sock")]
    assert measured.header.plan["url"] == url
    assert "host" not in measured.header.client.get("not_measured", {})
    assert "data from a Unix socket has no kernel timestamps" in " ".join(out.split())
    assert result.summary.requests.complete == 2
    assert ui[0] in (0, 2, 5), ui


def test_mistakes_of_unix_sockets_are_named(tmp_path: Path) -> None:
    """A socket that nobody listens on, and a file that is no socket, end the command before the run."""
    (tmp_path / "file").write_text("")
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path / "file", "Connection refused")):
        with pytest.raises(UnreachableError, match=reason) as caught:
            probe(f"unix:{path}")
        assert f"nothing listens at unix:{path}" in str(caught.value)


@pytest.fixture
def client_files(tmp_path: Path) -> tuple[trustme.CA, Path, Path]:
    """An authority, and the files of a client certificate and its private key, which is encrypted."""
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    authority = trustme.CA()
    issued = authority.issue_cert("client.test")
    cert, key = tmp_path / "client.pem", tmp_path / "client.key"
    issued.cert_chain_pems[0].write_to_path(cert)
    private_key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    encryption = BestAvailableEncryption(b"correct-horse")
    key.write_bytes(private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    return authority, cert, key


def test_a_client_certificate_opens_the_server(tmp_path: Path, client_files: tuple[trustme.CA, Path, Path]) -> None:
    """A server that requires a client certificate is measured with --cert and --key. Without them, the message names
    the options. The passphrase comes from the environment and is in no file."""
    authority, cert, key = client_files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    named = ("--ca-file", str(tmp_path / "ca.pem"))
    certified = (*named, "--cert", str(cert), "--key", str(key))
    with running(SimulatedConfig(server="vllm", **FAST)) as server, behind_tls(server.url, context) as url:
        refused = burst(tmp_path, "--url", url, *named, *SMALL)
        locked = burst(tmp_path, "--url", url, *certified, *SMALL)
        code, _, err = burst(tmp_path, "--url", url, *certified, *SMALL, LOADGEN_KEY_PASSPHRASE="correct-horse")
    assert (refused[0], "--cert and --key name" in refused[2]) == (3, True), refused
    assert locked[0] == 2, locked
    assert "LOADGEN_KEY_PASSPHRASE" in locked[2]
    assert code in (0, 5), err
    measured = runfile.read(tmp_path / "run")
    assert {record.state for record in measured.records} == {"complete"}
    command = measured.header.command
    assert command[command.index("--key") + 1] == str(key)
    assert json.loads(json.dumps(measured.header.plan))["cert"] == str(cert)
    written = b"".join(file.read_bytes() for file in (tmp_path / "run").iterdir())
    assert b"correct-horse" not in written


def test_a_redirect_during_a_run_is_named_with_its_target(tmp_path: Path) -> None:
    """The server accepts the requests before the run, and redirects those of the run. The record names the target."""
    accepted = (200, {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]})

    def answer(body: dict[str, Any]) -> Answer:
        return (307, b"", "location: https://login.test/") if body["max_tokens"] == TOKENS else accepted

    routes: dict[str, Answer] = {"GET /v1/models": (200, models("test")), "POST /v1/completions": answer}
    with answering(routes) as stub:
        code, _, err = burst(tmp_path, "--url", stub.url, *SMALL, "--lengths", "approximate")
    assert code == 1, err
    details = {(record.http_status, record.error_detail) for record in runfile.read(tmp_path / "run").records}
    assert details == {(307, "a redirect to https://login.test/")}
