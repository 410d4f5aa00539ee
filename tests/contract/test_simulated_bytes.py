"""The simulated vLLM's bytes against recordings of the real one: heads, bodies, events, in order and spelling."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from loadgen.servers import marks
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.simulated import Running, running

RECORDED = Path(__file__).parent / "transcripts/vllm-0.32.0"
LONG = list(range(300, 300 + 3000))
PROMPT = [424, 372, 432, 342]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USAGE = {"include_usage": True}

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion_stream.txt": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 8, "stream_options": USAGE}),
    "continuous_usage.txt": (
        COMPLETIONS,
        {"prompt": PROMPT, "max_tokens": 3, "stream_options": {**USAGE, "continuous_usage_stats": True}},
    ),
    "stream_nousage.txt": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 3}),
    "token_ids.txt": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 3, "return_token_ids": True}),
    "chat_stream.txt": (
        CHAT,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream_options": USAGE},
    ),
}
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "err_toolong.txt": (COMPLETIONS, {"model": "tiny", "prompt": LONG, "max_tokens": 4}),
    "err_type.txt": (COMPLETIONS, {"model": "tiny", "prompt": "x", "max_tokens": "many"}),
    "err_wrongmodel.txt": (COMPLETIONS, {"model": "nope", "prompt": "x"}),
    "err_404.txt": ("/v1/nothing", {}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """As the recorded server was started: model `tiny`, a context of 2048 tokens."""
    with running(SimulatedConfig(server="vllm", model="tiny", max_model_len=2048, ttft_s=0.01, itl_s=0.001)) as started:
        yield started


def exchange(server: Running, path: str, body: bytes | dict[str, Any], head: str = "", method: str = "POST") -> bytes:
    """Every byte that the server says to one request, up to the end of the connection."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    address = urlsplit(server.url)
    lines = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    lines += f"Content-Length: {len(data)}\r\n{head}\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(lines.encode() + data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def split(answer: bytes) -> tuple[list[str], bytes]:
    """Head lines without what changes with every recording, and the body without its transfer coding."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = [re.sub(r"^date: .*", "date: ", line) for line in head.decode().split("\r\n")]
    if "transfer-encoding: chunked" in lines and re.match(rb"[0-9a-f]+\r\n", body):
        body = unchunked(body)
    dropped = ("connection: close", ": ".join(marks.header(1)))  # the mark is no part of a real server's head
    return [line for line in lines if line not in dropped], body


def unchunked(body: bytes) -> bytes:
    """The body, where its chunks are well formed up to the last one (RFC 9112, section 7.1)."""
    found = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        chunk, end, body = body[:length], body[length : length + 2], body[length + 2 :]
        assert end == b"\r\n"
        if not length:
            assert not body
            return b"".join(found)
        assert chunk.endswith(b"\n\n"), "one event per chunk"
        found.append(chunk)


def shape(event: bytes) -> object:
    """An event with its words, ids and numbers replaced by their types; keys keep their order."""
    if not event.startswith(b"data: {"):
        return event
    return json.loads(
        event.removeprefix(b"data: "), object_pairs_hook=lambda pairs: [(k, typed(k, v)) for k, v in pairs]
    )


def typed(key: str, value: Any) -> tuple[str, Any]:
    """Finish reasons and object kinds are words of the protocol; lists of ids are one thing."""
    if key in ("finish_reason", "object", "role", "index"):
        return key, value
    if isinstance(value, list) and all(isinstance(token, int) for token in value) and value:
        return key, "ids"
    return key, value if isinstance(value, list) else type(value).__name__


@pytest.mark.parametrize("file", STREAMS)
def test_streams_have_the_recorded_shape(server: Running, file: str) -> None:
    """Head, number and order of events, their keys, and everything in them that is not a word, an id or a count."""
    path, body = STREAMS[file]
    ours = split(exchange(server, path, {"model": "tiny", "stream": True, **body}))
    theirs = split((RECORDED / file).read_bytes().rstrip(b"\n") + b"\n\n")
    assert ours[0] == theirs[0]
    assert [shape(event) for event in ours[1].split(b"\n\n")] == [shape(event) for event in theirs[1].split(b"\n\n")]


@pytest.mark.parametrize("file", ANSWERS)
def test_errors_are_the_recorded_bytes(server: Running, file: str) -> None:
    """Status, headers and body of a refusal are those of the real server, byte by byte."""
    path, body = ANSWERS[file]
    assert split(exchange(server, path, body)) == split((RECORDED / file).read_bytes().rstrip(b"\n"))


def test_a_wrong_method_is_the_recorded_bytes(server: Running) -> None:
    """405 names the method that would have been right."""
    ours = split(exchange(server, COMPLETIONS, b"", method="GET"))
    theirs = split((RECORDED / "err_405.txt").read_bytes())
    assert ours[1] == theirs[1]
    assert sorted(ours[0]) == sorted(theirs[0])


def test_broken_json_is_the_recorded_bytes(server: Running) -> None:
    """The message names the place at which Python's parser gave up."""
    assert split(exchange(server, COMPLETIONS, b'{"model":"tiny", }')) != split(b"")
    ours = split(exchange(server, COMPLETIONS, b'{"model":"tiny",'))
    assert ours == split((RECORDED / "err_badjson.txt").read_bytes().rstrip(b"\n"))


def test_a_missing_key_is_the_recorded_bytes() -> None:
    """Only /v1 is guarded, and the right key opens. The refusal alone lacks the `vary` that other answers have."""
    with running(SimulatedConfig(server="vllm", api_key="sesame", ttft_s=0)) as server:
        refused = split(exchange(server, COMPLETIONS, {"prompt": "x"}))
        assert split(exchange(server, "/health", b"", method="GET"))[0][0] == "HTTP/1.1 200 OK"
        opened = split(exchange(server, COMPLETIONS, {"prompt": "x"}, head="Authorization: Bearer sesame\r\n"))
        assert opened[0][0] == "HTTP/1.1 200 OK"
    theirs = split((RECORDED / "err_401.txt").read_bytes().rstrip(b"\n"))
    assert refused[1] == theirs[1]
    assert refused[0] == theirs[0]
