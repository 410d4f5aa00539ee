"""The probe against loopback servers that answer as vLLM, TGI and LightLLM do."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from math import inf
from typing import Any

import pytest
import trustme
from msgspec import structs

from loadgen.servers.auth import Access
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.base import ServerFacts
from loadgen.servers.backends.dialect import bearer_header
from loadgen.servers.discovery import probe, resolve
from loadgen.servers.errors import UnauthorizedError, UnreachableError, WrongServerError
from tests.support import raw_server
from tests.support.stub_server import (
    LIGHTLLM_0_0_1,
    LIGHTLLM_1_0,
    LIGHTLLM_1_1,
    LIGHTLLM_1_2,
    OPENAI,
    TGI,
    TGI_1_1,
    VLLM,
    VLLM_0_2,
    Answer,
    answering,
)


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        (VLLM, ServerFacts("vllm", "", "0.32.0", "tiny", {"max_model_len": 2048}, ("/tokenize",))),
        (VLLM_0_2, ServerFacts("vllm", "", "", "m")),
        (
            TGI,
            ServerFacts(
                "tgi",
                "",
                "3.3.6-dev0 (sha-dfb3fbe)",
                "meta-llama/Llama-2-7b-chat-hf",
                {"max_input_tokens": 3072, "max_total_tokens": 4096, "max_concurrent_requests": 128},
                ("/tokenize", "/chat_tokenize"),
                notes={"prompt_piece_tokens": 1024},
            ),
        ),
        (
            TGI_1_1,
            ServerFacts(
                "tgi",
                "",
                "1.1.1",
                "bigscience/bloom-560m",
                {
                    "max_input_tokens": 1024,
                    "max_total_tokens": 2048,
                    "max_concurrent_requests": 128,
                    "max_batch_total_tokens": 32000,
                },
            ),
        ),
        (LIGHTLLM_0_0_1, ServerFacts("lightllm", "", "before 1.0")),
        (LIGHTLLM_1_0, ServerFacts("lightllm", "", "1.0", "llama", {}, ("/tokens",))),
        (LIGHTLLM_1_1, ServerFacts("lightllm", "", "1.1.0", "llama", {}, ("/tokens",))),
        (
            LIGHTLLM_1_2,
            ServerFacts(
                "lightllm",
                "",
                "1.2.0 or later",
                "llama",
                {"max_model_len": 4060, "max_req_total_len": 4096, "running_max_req_size": 256},
                ("/tokens",),
            ),
        ),
        (OPENAI, ServerFacts("openai", "", "", "gpt")),
    ],
    ids=["vllm", "vllm-0.2", "tgi", "tgi-1.1", "lightllm-0.0.1", "lightllm-1.0", "lightllm-1.1", "lightllm-1.2", "any"],
)
def test_facts(routes: dict[str, Answer], expected: ServerFacts) -> None:
    """Each server in each version is recognised, with its model, limits and counting routes."""
    with answering(routes) as stub:
        facts = probe(f"{stub.url}/v1", expected.name)
    kind = BACKENDS[expected.name]
    notes = {**kind.notes, **expected.notes}
    assert facts == structs.replace(expected, url=stub.url, title=kind.title, notes=notes)


def test_a_question_never_counts_as_a_failed_request() -> None:
    """LightLLM raises its failure counter when /tokens gets no text, so the probe does not ask it."""
    with answering(LIGHTLLM_1_2) as stub:
        probe(stub.url, "lightllm")
    assert not [asked for asked in stub.heard if "tokens" in asked or "generate" in asked]


@pytest.mark.parametrize("routes", [VLLM, TGI, LIGHTLLM_1_2], ids=["vllm", "tgi", "lightllm"])
def test_simulated(routes: dict[str, Answer]) -> None:
    """A simulated server says so on a route of its own; its speed is part of the facts."""
    name = {id(VLLM): "vllm", id(TGI): "tgi"}.get(id(routes), "lightllm")
    status = {"speed": 5, "clock": "batching", "hardware": {"gpu": "H100 SXM"}}
    with answering(routes | {"GET /simulated/status": (200, status)}) as stub:
        facts = probe(stub.url, name)
    assert facts.simulated
    assert facts.hardware == {"gpu": "H100 SXM"}
    assert facts.speed == 5.0


@pytest.mark.parametrize(
    ("routes", "named", "found", "words"),
    [
        (VLLM, "tgi", "vllm", "this is vLLM 0.32.0, not TGI"),
        (TGI, "vllm", "tgi", "this is TGI 3.3.6-dev0 (sha-dfb3fbe), not vLLM"),
        (LIGHTLLM_1_2, "vllm", "lightllm", "this is LightLLM 1.2.0 or later, not vLLM"),
        (OPENAI, "lightllm", "openai", "this is an OpenAI-style server, not LightLLM"),
        ({"GET /": (200, b"<html>")}, "vllm", "", "but not as vLLM: /v1/models answers 404"),
        (
            {"GET /v1/models": (200, b"<html>")},
            "openai",
            "",
            "not as an OpenAI-style server: /v1/models answers 200 with a body that is not JSON",
        ),
        ({"GET /v1/models": (200, [7]), "GET /info": (500, "oops")}, "tgi", "", "but not as TGI"),
        (
            {"GET /": (200, b"<html>")},
            "",
            "",
            "not as vLLM, TGI, LightLLM, SGLang, TEI or an OpenAI-style server: /v1/models answers",
        ),
    ],
)
def test_wrong_server(routes: dict[str, Answer], named: str, found: str, words: str) -> None:
    """Another server than the one named is recognised, and the hint says which option names it."""
    with answering(routes) as stub, pytest.raises(WrongServerError) as caught:
        probe(stub.url, named)
    assert words in str(caught.value)
    assert f"--server {found}" in caught.value.hint or not found


@pytest.mark.parametrize("name", ["vllm", "tgi", "lightllm", "openai"])
def test_who_answers_is_asked_where_nobody_is_named(name: str) -> None:
    """The generic kind comes last, because the others answer like it as well."""
    with answering({"vllm": VLLM, "tgi": TGI, "lightllm": LIGHTLLM_1_2, "openai": OPENAI}[name]) as stub:
        assert probe(stub.url).name == name


def test_a_path_that_is_kept_from_us_says_nothing_of_the_server() -> None:
    """Hosted servers answer 403 to what they do not know; a key that is missing altogether is still an error."""
    known = {f"GET {path}": (403, b"") for path in ("/info", "/get_model_name", "/simulated/status", "/v1/completions")}
    with answering(OPENAI | known) as stub:
        facts = probe(stub.url)
    assert (facts.name, facts.model) == ("openai", "gpt")
    with answering({"GET /v1/models": (401, b"")}) as stub, pytest.raises(UnauthorizedError):
        probe(stub.url)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ((500, b"Internal Server Error"), "/v1/models answers 500"),
        ((404, {"detail": "Not Found"}), "/v1/models answers 404"),
        ((200, {"object": "list", "data": []}), "/v1/models lists no model"),
    ],
)
def test_without_a_list_of_models_a_name_is_enough(models: Answer, words: str) -> None:
    """Path and status are named; with --model the generic server is asked all the same."""
    with answering({"GET /v1/models": models}) as stub:
        with pytest.raises(WrongServerError, match=words) as caught:
            probe(stub.url, "openai")
        facts = probe(stub.url, "openai", model="mine")
    assert "--server openai --model NAME" in caught.value.hint
    assert (facts.name, facts.model) == ("openai", "mine")


@pytest.mark.parametrize("routes", [VLLM, TGI, LIGHTLLM_1_0, LIGHTLLM_1_2, OPENAI])
def test_a_model_that_is_not_listed_is_noted(routes: dict[str, Answer]) -> None:
    """It may be an alias, so it is requested all the same, and the facts say that it is not listed."""
    with answering(routes) as stub:
        model = probe(stub.url).model
        assert (probe(stub.url, model=model).model, probe(stub.url, model=model).listed) == (model, True)
        facts = probe(stub.url, model="nope")
    assert (facts.model, facts.listed) == ("nope", False)


def test_any_model_that_is_listed_may_be_asked() -> None:
    """Not only the first: adapters come behind it. A server that lists none takes any name."""
    listed = [{"id": name, "owned_by": "vllm"} for name in ("base", "adapter")]
    with answering({"GET /v1/models": (200, {"data": listed})}) as stub:
        facts = probe(stub.url, "vllm", model="adapter")
        assert (facts.model, facts.listed) == ("adapter", True)
    with answering(LIGHTLLM_0_0_1) as stub:
        assert probe(stub.url, "lightllm", model="any").model == "any"


@pytest.mark.parametrize(
    "listed",
    [
        [{"id": "gpt"}],
        {"models": [{"name": "gpt", "size": 1}]},
        {"data": [{"model": "gpt"}]},
        {"data": None, "models": [{"id": "gpt"}]},
    ],
)
def test_a_list_of_models_may_have_other_forms(listed: Any) -> None:
    """Hosted servers send the bare list; others call the list or the name of a model differently."""
    with answering({"GET /v1/models": (200, listed)}) as stub:
        assert probe(stub.url).model == "gpt"


def test_compressed_answers_are_read() -> None:
    """Some proxies compress what nobody asked them to."""
    listed = gzip.compress(json.dumps(OPENAI["GET /v1/models"][1]).encode())  # type: ignore[index]
    with answering({"GET /v1/models": (200, listed)}) as stub:
        assert probe(stub.url, "openai").model == "gpt"


@pytest.mark.parametrize("server", ["vllm", "openai"])
def test_unauthorized(server: str) -> None:
    """A server that wants an API key gets one hint about the variable, not a guess about its kind."""
    locked = VLLM | {"GET /v1/models": (401, b'{"error":"Unauthorized"}')}
    with answering(locked) as stub, pytest.raises(UnauthorizedError) as caught:
        probe(stub.url, server)
    assert "LOADGEN_API_KEY" in caught.value.hint


def test_key_is_sent() -> None:
    """The API key goes along as a bearer token, on every question."""
    with answering(VLLM) as stub:
        probe(stub.url, "vllm", access=Access(bearer_header("secret")))
    assert set(stub.keys) == {"Bearer secret"}


def test_nothing_listens(free_port: int) -> None:
    """A refused connection is an error that names the URL."""
    with pytest.raises(UnreachableError, match=f"nothing listens at http://127.0.0.1:{free_port}"):
        probe(f"http://127.0.0.1:{free_port}", "vllm")


def test_unknown_host() -> None:
    """A name without an address is told apart from a server that is down."""
    with pytest.raises(UnreachableError, match="no such host"):
        probe("http://no-such-host.invalid:8000", "vllm")


def test_not_http(talker: int) -> None:
    """Something that does not speak HTTP is an error, not a traceback."""
    with pytest.raises(UnreachableError, match="does not answer in HTTP"):
        probe(f"http://127.0.0.1:{talker}", "vllm")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"220 mail ESMTP\r\n\r\n", "does not answer in HTTP: 220 mail ESMTP$"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "did not complete its response"),
    ],
)
def test_a_response_that_breaks_off_is_one_line(answer: bytes, message: str) -> None:
    """The message has no line ends of the server, and says whether the response began in HTTP."""
    with raw_server.serving(lambda _path: raw_server.CLOSE + answer) as raw:
        with pytest.raises(UnreachableError, match=message) as caught:
            probe(raw.url, "vllm")
        assert caught.value.hint


def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts and says nothing runs into the time limit."""
    monkeypatch.setattr("loadgen.servers.json_client.TIMEOUT_S", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(UnreachableError, match=r"did not answer within 0\.05 s"),
    ):
        probe(f"http://127.0.0.1:{listener.getsockname()[1]}", "vllm")


def test_tls() -> None:
    """https works with the right authority; a certificate nobody vouches for names --ca-file; plain HTTP and a
    server that wants a client certificate say so."""
    authority = trustme.CA()
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server_side)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with answering(VLLM, tls=server_side) as stub:
        assert probe(stub.url, "vllm", access=Access(tls=trusting)).version == "0.32.0"
        with pytest.raises(UnreachableError) as caught:
            probe(stub.url, "vllm")
        assert "--ca-file" in caught.value.hint
    authority.configure_trust(server_side)
    server_side.verify_mode = ssl.CERT_REQUIRED
    refusal = pytest.raises(UnreachableError, match="the TLS connection")
    with answering(VLLM, tls=server_side) as stub, refusal as caught:
        probe(stub.url, "vllm", access=Access(tls=trusting))
    assert "client certificates" in caught.value.hint
    with answering(VLLM) as stub, pytest.raises(UnreachableError, match="does not speak TLS"):
        probe(stub.url.replace("http:", "https:"), "vllm", access=Access(tls=trusting))


@pytest.mark.parametrize(
    "text",
    [
        "<title>400 The plain HTTP request was sent to HTTPS port</title>",
        "Client sent an HTTP request to an HTTPS server.\n",
        "Reason: You're speaking plain HTTP to an SSL-enabled server port.<br />",
    ],
    ids=["nginx", "Go", "Apache"],
)
def test_plain_http_on_a_port_for_tls(text: str) -> None:
    """Servers that answer in plain HTTP are not taken for a wrong server: the hint is to use https."""
    body = text.encode()
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    with raw_server.serving(lambda _path: raw_server.CLOSE + head + body) as raw:
        with pytest.raises(UnreachableError, match="speaks TLS, not plain HTTP") as caught:
            probe(raw.url, "vllm")
        assert caught.value.hint == "use https:// instead of http://"


def test_certificates_for_another_name_or_time() -> None:
    """--ca-file does not help against a wrong name or an expired certificate, so the hints do not name the option."""
    authority = trustme.CA()
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    past = datetime(2001, 1, 1, tzinfo=UTC)
    cases = [
        (authority.issue_cert("192.0.2.1"), "use a host name of the certificate in --url"),
        (authority.issue_cert("chat.example"), "use a host name of the certificate in --url"),
        (authority.issue_cert("127.0.0.1", not_after=past, not_before=datetime(2000, 1, 1, tzinfo=UTC)), "renew"),
    ]
    for certificate, hint in cases:
        server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificate.configure_cert(server_side)
        with answering(VLLM, tls=server_side) as stub, pytest.raises(UnreachableError) as caught:
            probe(stub.url, "vllm", access=Access(tls=trusting))
        assert caught.value.hint.startswith(hint)
        assert "--insecure" in caught.value.hint


def vllm_on(port: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM's usual port be this one, or that of this URL."""
    port = int(str(port).rpartition(":")[2])
    monkeypatch.setitem(BACKENDS, "vllm", structs.replace(BACKENDS["vllm"], port=port))


def test_resolve_prefers_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """--url beats the environment, the environment beats the usual port."""
    with answering(VLLM) as first, answering(VLLM_0_2) as second, answering(VLLM | {"GET /version": NEWER}) as third:
        vllm_on(third.url, monkeypatch)
        environ = {"LOADGEN_VLLM_URL": second.url, "LOADGEN_TGI_URL": "http://elsewhere"}
        assert resolved_url(resolve("vllm", first.url, environ)) == first.url
        assert resolved_url(resolve("vllm", None, environ)) == second.url
        assert resolved_url(resolve("vllm", None, {})) == third.url


def test_resolve_insists_on_what_was_named() -> None:
    """A URL that was given must answer as the server named; it never falls back to the simulated one."""
    with answering(TGI) as stub, pytest.raises(WrongServerError):
        resolve("vllm", None, {"LOADGEN_VLLM_URL": stub.url})


def test_resolve_to_the_simulated(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, or another server, on the usual port means the simulated one; --real makes that an error."""
    vllm_on(free_port, monkeypatch)
    assert resolve("vllm", None, {}) is None
    with pytest.raises(UnreachableError, match=str(free_port)):
        resolve("vllm", None, {}, real=True)
    with answering(TGI) as stub:
        vllm_on(stub.url, monkeypatch)
        assert resolve("vllm", None, {}) is None
        with pytest.raises(WrongServerError, match="this is TGI"):
            resolve("vllm", None, {}, real=True)


def test_resolve_openai_needs_a_url() -> None:
    """The generic server has no usual port and no simulation."""
    with pytest.raises(UnreachableError, match="no default port") as caught:
        resolve("openai", None, {})
    assert "LOADGEN_OPENAI_URL" in caught.value.hint


def test_resolve_without_a_server_imports_no_client(free_port: int) -> None:
    """The common case, nothing on the usual port, does not pay for an HTTP client."""
    code = (
        "import sys; from msgspec.structs import replace\n"
        "from loadgen.servers.discovery import resolve; from loadgen.servers.backends import BACKENDS\n"
        f"BACKENDS['tgi'] = replace(BACKENDS['tgi'], port={free_port})\n"
        "assert resolve('tgi', None, {}) is None\n"
        "assert not {'http.client', 'ssl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


NEWER: Answer = (200, {"version": "0.33.0"})


def resolved_url(facts: ServerFacts | None) -> str | None:
    return facts and facts.url


@pytest.fixture
def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def talker() -> Iterator[int]:
    """The port of something that greets every caller, as a mail server does."""

    def greet(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.sendall(b"220 mail ready\r\n")
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=greet, args=(listener,), daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("routes", [VLLM, TGI, LIGHTLLM_1_2, OPENAI], ids=["vllm", "tgi", "lightllm", "openai"])
def test_a_server_that_is_far_away_is_asked_side_by_side(
    routes: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The facts are those of a near server. No page is requested twice."""
    monkeypatch.setattr("loadgen.servers.discovery.FAR_S", inf)
    with answering(routes) as near:
        expected = probe(near.url)
    monkeypatch.setattr("loadgen.servers.discovery.FAR_S", -1.0)
    with answering(routes) as far:
        facts = probe(far.url)
    assert structs.replace(facts, url=near.url) == expected
    pages = [name for name in far.heard if name.startswith("GET ")]
    assert len(pages) == len({*pages})
    assert {"GET /version", "GET /info", "GET /token_load"} <= {*pages}


def test_a_page_that_fails_side_by_side_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway may be busy because of the requests at the same time: only the last answer counts."""
    monkeypatch.setattr("loadgen.servers.discovery.FAR_S", -1.0)
    answers = iter([(503, {}), (200, {"version": "0.32.0"})])
    with answering(VLLM | {"GET /version": lambda _: next(answers)}) as stub:
        assert probe(stub.url).version == "0.32.0"
    assert stub.heard.count("GET /version") == 2
