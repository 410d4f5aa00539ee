"""Every fault of the simulated servers, as it looks on the wire."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
from loadgen.servers.simulated.stream_sender import FAULTS, LogLine
from tests.support.dialects import STREAMING_BACKENDS
from tests.support.simulated import Running, running

TOKENS = 8
TERMINATOR = b"0\r\n\r\n"
ASK: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("/v1/completions", {"prompt": [5, 6], "max_tokens": TOKENS, "stream": True}),
    "tgi": ("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": TOKENS, "details": True}}),
    "lightllm": ("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": TOKENS}}),
    "sglang": ("/v1/completions", {"prompt": [5, 6], "max_tokens": TOKENS, "stream": True}),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("/v1/completions", {"prompt": [5, 6], "max_tokens": TOKENS}),
    "tgi": ("/generate", ASK["tgi"][1]),
    "lightllm": ("/generate", ASK["lightllm"][1]),
    "sglang": ("/v1/completions", {"prompt": [5, 6], "max_tokens": TOKENS}),
}
IDS = itertools.count()
DONE = b"data: [DONE]"
END_MARKER = {"vllm": DONE, "tgi": b'"generated_text":" ', "lightllm": b'"finished":true', "sglang": DONE}
TOKEN = {"vllm": b'"text":" ', "tgi": b'"token":{', "lightllm": b'"token":{', "sglang": b'"text":" '}


@pytest.fixture(scope="module", params=STREAMING_BACKENDS)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A fast simulated server of each kind."""
    with running(SimulatedConfig(server=request.param, ttft_s=0.002, itl_s=0.0002)) as started:
        yield started


@pytest.fixture
def name(server: Running, request: pytest.FixtureRequest) -> str:
    """The kind of the server."""
    return str(request.node.callspec.params["server"])


def ask(server: Running, what: tuple[str, dict[str, Any]], fault: str = "", *, wait_s: float = 10) -> tuple[bytes, str]:
    """All bytes of one answer, and how it ended: `end` of HTTP, `closed`, `reset`, or `silence`."""
    path, body = what
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    head += f"X-Request-Id: {next(IDS)}\r\n" + (f"X-Simulated-Fault: {fault}\r\n\r\n" if fault else "\r\n")
    address = urlsplit(server.url)
    answer = b""
    with socket.create_connection((address.hostname, address.port), timeout=wait_s) as connection:
        connection.sendall(head.encode() + data)
        try:
            while not answer.endswith(TERMINATOR):
                got = connection.recv(65536)
                if not got:
                    return answer, "closed"
                answer += got
                if whole(answer):
                    break
        except ConnectionResetError:
            return answer, "reset"
        except TimeoutError:
            return answer, "silence"
    return answer, "end"


def logged(server: Running) -> LogLine:
    """The line of the last request. It is written after the answer's last byte has left."""
    last = str(next(IDS) - 1)
    for _ in range(2000):
        for line in server.log:
            if line.request_id == last:
                return line
        time.sleep(0.005)
    raise AssertionError(f"request {last} was never logged")


def whole(answer: bytes) -> bool:
    """A body with a content length is complete."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    lengths = [line.split(b": ")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: ")]
    return bool(blank and lengths) and len(body) >= int(lengths[0])


def test_without_a_fault_the_answer_is_complete(server: Running, name: str) -> None:
    """The baseline of all other tests here: every token, the end marker, the end of the body."""
    answer, ended = ask(server, ASK[name])
    assert (answer.count(TOKEN[name]), END_MARKER[name] in answer, ended) == (TOKENS, True, "end")


@pytest.mark.parametrize(
    ("fault", "tokens", "ends"),
    [
        ("reset@3", 3, "reset"),
        ("reset", TOKENS // 2, "reset"),
        ("reset@0", 0, "reset"),
        ("cut@3", 3, "closed"),
        ("truncate@3", 3, "end"),
        ("error@3", 3, "end"),
        ("stall@3", 3, "silence"),
    ],
)
def test_a_stream_can_end_early(server: Running, name: str, fault: str, tokens: int, ends: str) -> None:
    """Exactly K tokens come, then the connection or the body ends in the fault's way, without the end marker."""
    answer, ended = ask(server, ASK[name], fault, wait_s=0.3 if ends == "silence" else 10)
    assert answer.count(TOKEN[name]) == tokens
    assert ended == ends
    assert (b"error" in answer) == fault.startswith("error")
    if name not in ("vllm", "sglang") or ends != "end":
        assert END_MARKER[name] not in answer
    line = logged(server)
    assert (line.fault, line.output_tokens) == (fault.partition("@")[0], tokens)


@pytest.mark.parametrize("kind", STREAMING_BACKENDS)
@pytest.mark.parametrize("fault", ["truncate@3", "error@3"])
def test_a_body_ends_once(kind: str, fault: str) -> None:
    """Tokens that are due together with the one that ends the answer send nothing more, not even the last chunk."""
    with running(SimulatedConfig(server=kind, ttft_s=0.002, itl_s=0)) as server:
        ask(server, ASK[kind], fault)
        assert logged(server).tokens == [1, 1, 1]


@pytest.mark.parametrize("status", ["429", "500", "503"])
def test_a_status_comes_with_the_servers_own_body(server: Running, name: str, status: str) -> None:
    """The body is JSON and has the server's shape."""
    answer, _ = ask(server, ASK[name], status)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == status.encode()
    value = json.loads(body)
    error = value if name == "sglang" else value["error"]
    assert error if name == "tgi" else error["code"] == int(status)


def test_refuse_answers_nothing(server: Running, name: str) -> None:
    """The connection is reset before any byte."""
    assert ask(server, ASK[name], "refuse") == (b"", "reset")


def test_malformed_breaks_one_event(server: Running, name: str) -> None:
    """Exactly the event with token K is not JSON; the stream goes on."""
    answer, ended = ask(server, ASK[name], "malformed@3")
    events = [line.split(b":", 1)[1].strip() for line in answer.split(b"\n") if line.startswith(b"data:")]
    broken = [place for place, event in enumerate(events) if event != b"[DONE]" and not _is_json(event)]
    assert (broken, ended) == ([2], "end")


def test_content_length_promises_too_much(server: Running, name: str) -> None:
    """The whole stream comes unchunked, then the connection ends short of the length in the head."""
    answer, ended = ask(server, ASK[name], "content-length")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: " in head
    assert b"chunked" not in head
    assert (body.count(TOKEN[name]), ended) == (TOKENS, "closed")


def test_slow_headers_come_in_pieces(server: Running, name: str) -> None:
    """The head trickles in; the answer behind it is complete, and its tokens count from the head's end."""
    answer, ended = ask(server, ASK[name], "slow-headers@40")
    assert (answer.count(TOKEN[name]), ended) == (TOKENS, "end")
    line = logged(server)
    assert line.due_ns[0] - line.received_ns >= 40_000_000


def test_merged_tokens_share_events_where_the_protocol_can(server: Running, name: str) -> None:
    """vLLM and SGLang put K tokens into an event; the others keep an event per token and send K at once."""
    answer, _ = ask(server, ASK[name], "merged@3")
    assert answer.count(TOKEN[name]) == (3 if name in ("vllm", "sglang") else TOKENS)
    assert logged(server).tokens == [3, 3, 2]


def test_coalesced_events_leave_together(server: Running, name: str) -> None:
    """Every token keeps its event, and K events leave in one send."""
    answer, _ = ask(server, ASK[name], "coalesced@3")
    assert answer.count(TOKEN[name]) == TOKENS
    assert logged(server).tokens == [3, 3, 2]


def test_early_stop_is_the_models_own_end(server: Running, name: str) -> None:
    """A complete answer of K tokens, with the server's word for it."""
    answer, ended = ask(server, ASK[name], "early-stop@3")
    assert (answer.count(TOKEN[name]), END_MARKER[name] in answer, ended) == (3, True, "end")
    assert (b'"eos_token"' if name == "tgi" else b'"stop"') in answer


def test_role_first_comes_before_any_token(server: Running) -> None:
    """Chat: the role-only event is there while no token is due yet."""
    body = {"model": server_model(), "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "stream": True}
    answer, _ = ask(server, ("/v1/chat/completions", body), "role-first")
    events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert [bool(delta.get("content")) for delta in deltas[:5]] == [False, True, True, True, True]
    assert len(logged(server).sent_ns) == 4


def server_model() -> str:
    """The default name of the model."""
    return SimulatedConfig(server="tgi").model


@pytest.mark.parametrize(
    ("fault", "ends"), [("reset", "reset"), ("cut", "closed"), ("truncate", "closed"), ("content-length", "closed")]
)
def test_answers_that_are_not_streamed_break_too(server: Running, name: str, fault: str, ends: str) -> None:
    """Nothing that arrives is a complete body."""
    answer, ended = ask(server, WHOLE[name], fault)
    assert ended == ends
    assert not whole(answer)


def test_an_answer_that_is_not_streamed_fails_with_a_status(server: Running, name: str) -> None:
    """An engine error before the body has begun is a 500, in TGI a 424; half of the JSON is still HTTP."""
    status = b"424" if name == "tgi" else b"500"
    assert ask(server, WHOLE[name], "error")[0].split()[1] == status
    answer, ended = ask(server, WHOLE[name], "malformed")
    assert ended == "end"
    assert not _is_json(answer.partition(b"\r\n\r\n")[2])


def test_an_unknown_fault_is_said_so(server: Running, name: str) -> None:
    """A client that misspells a fault must not believe that it had it."""
    answer, _ = ask(server, ASK[name], "explode")
    assert answer.split()[1] == b"400"
    assert b"unknown fault 'explode'" in answer


def test_rules_pick_requests_by_number() -> None:
    """The third request of a server started with `429:2` is refused, and no other."""
    with running(SimulatedConfig(server="tgi", ttft_s=0, faults=(parse_rule("429:2"),))) as server:
        statuses = [ask(server, WHOLE["tgi"])[0].split()[1] for _ in range(4)]
    assert statuses == [b"200", b"200", b"429", b"200"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("fault", "parses", "fits"), [("", True, True), ("invalid-json", False, False), ("wrong-json", True, False)]
)
def test_json_of_a_structured_response_may_be_wrong(kind: str, fault: str, parses: bool, fits: bool) -> None:
    """It is cut, or it does not fit the schema of the request."""
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 99, "response_format": format_}
    config = SimulatedConfig(server=kind, ttft_s=0.002, itl_s=0.0002, structured=True)
    with running(config) as server:
        answer, _ = ask(server, ("/v1/chat/completions", body), fault)
    text = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"].encode()
    assert _is_json(text) == parses
    assert (parses and isinstance(json.loads(text).get("days"), int)) == fits


@pytest.mark.parametrize(("fault", "same"), [("", True), ("wrong-answer", False), ("wrong-answer@1", True)])
def test_a_wrong_answer_is_that_to_another_prompt(fault: str, same: bool) -> None:
    """Equal prompts get equal answers. With the fault, a prompt gets the answer to the prompt before it."""
    bodies = [{"prompt": prompt, "max_tokens": 8} for prompt in ("one", "two", "one")]
    with running(SimulatedConfig(server="vllm", ttft_s=0)) as server:
        answers = [
            ask(server, ("/v1/completions", body), header)[0]
            for body, header in zip(bodies, ("", "", fault), strict=True)
        ]
    texts = [json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for answer in answers]
    assert texts[0] != texts[1]
    assert (texts[2] == texts[0]) == same
    assert (texts[2] == texts[1]) == (not same)


def test_every_fault_is_tried_here() -> None:
    """A fault that is added to the registry is added to these tests."""
    text = Path(__file__).read_text("utf-8")
    assert [fault for fault in FAULTS if f'"{fault}' not in text] == []


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
