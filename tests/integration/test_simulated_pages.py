"""The simulated servers' pages, and what they refuse, in the words and with the status of the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from loadgen.servers.backends import simulated_backends
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.dialects import STREAMING_BACKENDS
from tests.support.simulated import running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TWO = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, httpx.Client]]:
    """A simulated server of each kind, with a client."""
    with ExitStack() as stack:
        urls = {name: stack.enter_context(running(_config(name))).url for name in simulated_backends()}
        yield {name: stack.enter_context(httpx.Client(base_url=url)) for name, url in urls.items()}


def _config(server: str) -> SimulatedConfig:
    return SimulatedConfig(server=server, model="m", max_model_len=64, ttft_s=0, itl_s=0)


@pytest.mark.parametrize(
    ("server", "path", "expected"),
    [
        ("vllm", "/version", {"version": "0.32.0", "simulated_speed": 1.0}),
        ("vllm", "/load", {"server_load": 0}),
        ("lightllm", "/liveness", {"status": "ok"}),
        ("lightllm", "/readiness", {"status": "ok"}),
        ("lightllm", "/health", {"message": "Ok"}),
        ("lightllm", "/get_model_name", {"model_name": "m", "simulated_speed": 1.0}),
        ("lightllm", "/token_load", {"current_load": 0, "logical_max_load": 0, "dynamic_max_load": 0}),
    ],
)
def test_pages_that_say_one_thing(servers: dict[str, httpx.Client], server: str, path: str, expected: object) -> None:
    """The page is this, and nothing more."""
    assert servers[server].get(path).json() == expected


@pytest.mark.parametrize(("server", "path"), [("vllm", "/health"), ("vllm", "/ping"), ("tgi", "/health"), ("tgi", "/")])
def test_health_has_no_body(servers: dict[str, httpx.Client], server: str, path: str) -> None:
    """200 and nothing."""
    response = servers[server].get(path)
    assert (response.status_code, response.content, "content-type" in response.headers) == (200, b"", False)


def test_limits_can_be_asked_for(servers: dict[str, httpx.Client]) -> None:
    """Each server says its limits where the real one does."""
    assert servers["vllm"].get("/v1/models").json()["data"][0]["max_model_len"] == 64
    assert servers["lightllm"].get("/v1/models").json()["data"][0]["max_model_len"] == 64
    assert servers["lightllm"].get("/get_server_info").json()["running_max_req_size"] == 256
    info = servers["tgi"].get("/info").json()
    assert (info["max_total_tokens"], info["max_input_tokens"], info["max_concurrent_requests"]) == (64, 63, 128)
    assert servers["tgi"].get("/v1/models").json()["data"][0]["id"] == "m"


def test_counting_routes_agree_with_what_prompts_cost(servers: dict[str, httpx.Client]) -> None:
    """What each server's own tokenizer route says is what its answer reports as the prompt's length."""
    text = "The quick brown fox, über alles!"
    vllm, tgi, lightllm, sglang = (servers[name] for name in STREAMING_BACKENDS)
    counted = vllm.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    assert vllm.post("/detokenize", json={"tokens": counted["tokens"]}).json() == {"prompt": text}
    answer = vllm.post(COMPLETIONS, json={"prompt": text, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == counted["count"]
    ids = vllm.post(COMPLETIONS, json={"prompt": counted["tokens"], "max_tokens": 1}).json()
    assert ids["usage"]["prompt_tokens"] == counted["count"]

    listed = tgi.post("/tokenize", json={"inputs": text}).json()
    assert "".join(token["text"] for token in listed if token["text"].isascii()) == text.replace("ü", "")
    headers = tgi.post("/generate", json={"inputs": text, "parameters": {"max_new_tokens": 1}}).headers
    assert int(headers["x-prompt-tokens"]) == len(listed)

    tokens = lightllm.post("/tokens", json={"text": text, "parameters": {}}).json()["ntokens"]
    body = {"inputs": text, "parameters": {"max_new_tokens": 1, "return_details": True}}
    native = lightllm.post("/generate", json=body).json()
    assert native["prompt_tokens"] == native["tokens"][0]["prompt_tokens"] == tokens
    openai = lightllm.post(COMPLETIONS, json={"model": "m", "prompt": text, "max_tokens": 1}).json()
    assert openai["usage"]["prompt_tokens"] == tokens - 1

    counted = sglang.post("/tokenize", json={"prompt": text}).json()
    assert counted["count"] == len(counted["tokens"])
    answer = sglang.post(COMPLETIONS, json={"prompt": text, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == counted["count"]
    native = sglang.post("/generate", json={"text": text, "sampling_params": {"max_new_tokens": 1}}).json()
    assert native["meta_info"]["prompt_tokens"] == counted["count"]
    ids = {"input_ids": counted["tokens"], "sampling_params": {"max_new_tokens": 1}}
    assert sglang.post("/generate", json=ids).json()["meta_info"]["prompt_tokens"] == counted["count"]


def test_chat_prompts_cost_what_the_server_counts(servers: dict[str, httpx.Client]) -> None:
    """Content in parts is their text, and each message costs the same wherever it stands."""
    vllm, tgi = servers["vllm"], servers["tgi"]
    counted = vllm.post("/tokenize", json={"messages": TWO}).json()["count"]
    usage = vllm.post(CHAT, json={"messages": TWO, "max_completion_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == counted
    longer = vllm.post("/tokenize", json={"messages": [*TWO, *TWO]}).json()["count"]
    longest = vllm.post("/tokenize", json={"messages": [*TWO, *TWO, *TWO]}).json()["count"]
    assert longest - longer == longer - counted
    template = tgi.post("/chat_tokenize", json={"messages": TWO}).json()
    assert template["templated_text"] == "user:\na b\nassistant:\n"
    answer = tgi.post(CHAT, json={"messages": TWO, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(template["tokenize_response"])


def test_the_compatible_routes_let_the_body_choose(servers: dict[str, httpx.Client]) -> None:
    """TGI answers with a list of one or a stream; LightLLM with an object or a stream."""
    body: dict[str, Any] = {"inputs": "a", "parameters": {"max_new_tokens": 2, "return_full_text": True}}
    assert servers["tgi"].post("/", json=body).json()[0]["generated_text"].startswith("a ")
    assert servers["tgi"].post("/", json={**body, "stream": True}).text.startswith('data: {"index":1')
    assert servers["lightllm"].post("/", json=body).json()["count_output_tokens"] == 2
    assert servers["lightllm"].post("/", json={**body, "stream": True}).text.startswith('data:{"token"')


LONG = "word " * 100
REFUSED = [
    # server, path, body, status, words
    ("vllm", COMPLETIONS, {"prompt": ""}, 400, "must be provided and non-empty"),
    ("vllm", COMPLETIONS, {"prompt": [40_000]}, 400, "Token id 40000 is out of vocabulary"),
    ("vllm", COMPLETIONS, {"prompt": "x" * 600}, 400, "600 characters (more than 576 characters"),
    ("vllm", COMPLETIONS, {"prompt": LONG}, 400, "maximum context length is 64 tokens"),
    ("vllm", COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens must be at least 1, got 0."),
    ("vllm", COMPLETIONS, {"prompt": "x", "max_tokens": 65}, 400, "cannot be greater than max_model_len=64"),
    ("vllm", COMPLETIONS, {"prompt": "x", "temperature": -1.0}, 400, "temperature must be non-negative, got -1.0."),
    ("vllm", COMPLETIONS, {"prompt": "x", "logprobs": 100}, 400, "greater than max allowed: 20"),
    ("vllm", COMPLETIONS, {"prompt": "x", "n": 2, "temperature": 0}, 400, "n must be 1 when using greedy sampling"),
    ("vllm", COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "when `stream=True`"),
    ("vllm", CHAT, {"model": "m"}, 400, "body.messages"),
    ("vllm", "/tokenize", {}, 400, "body.prompt"),
    ("tgi", "/generate", {"parameters": {}}, 422, "missing field `inputs`"),
    ("tgi", "/generate", {"inputs": [1, 2]}, 422, "invalid type"),
    ("tgi", "/generate", {"inputs": ""}, 422, "`inputs` cannot be empty"),
    ("tgi", "/generate", {"inputs": "a", "parameters": {"temperature": 0}}, 422, "must be strictly positive"),
    ("tgi", "/generate", {"inputs": "a", "parameters": {"top_p": 1.0}}, 422, "`top_p` must be > 0.0 and < 1.0"),
    ("tgi", "/generate", {"inputs": "a", "parameters": {"stop": list("abcde")}}, 422, "up to 4 stop sequences"),
    ("tgi", "/generate", {"inputs": LONG}, 422, "tokens + `max_new_tokens` must be <= 64"),
    ("tgi", "/generate_stream", {"inputs": "a", "parameters": {"decoder_input_details": True}}, 200, "not supported"),
    ("tgi", CHAT, {"messages": TWO, "top_p": 1, "stream": True}, 200, '"http_status_code":422'),
    ("tgi", CHAT, {}, 422, "missing field `messages`"),
    ("tgi", CHAT, {"messages": TWO, "stream_options": None}, 422, "stream_options"),
    ("tgi", COMPLETIONS, {"prompt": "a", "suffix": "b"}, 422, "Suffix is not supported"),
    ("tgi", COMPLETIONS, {"prompt": [1]}, 422, "prompt"),
    ("tgi", COMPLETIONS, {"prompt": list("abcde")}, 422, "maximum allowed batch size of 4"),
    ("tgi", "/tokenize", {}, 422, "missing field `inputs`"),
    ("tgi", "/chat_tokenize", {}, 422, "missing field `messages`"),
    ("lightllm", "/generate", {"parameters": {}}, 417, "'inputs'"),
    ("lightllm", "/generate", {"inputs": "a"}, 417, "'parameters'"),
    ("lightllm", "/generate", {"inputs": "a", "parameters": 1}, 417, "must be an object"),
    (
        "lightllm",
        "/generate",
        {"inputs": "a", "parameters": {"temperature": -1}},
        400,
        "temperature must > 0.0, got -1",
    ),
    ("lightllm", "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 0}}, 400, "must be at least 1 , got 0."),
    ("lightllm", "/generate", {"inputs": LONG * 2, "parameters": {}}, 400, "character limit 512"),
    ("lightllm", "/generate", {"inputs": [40_000], "parameters": {}}, 400, "id > vocab_size"),
    ("lightllm", "/generate", {"inputs": [], "parameters": {}}, 400, "prompt_ids is empty"),
    ("lightllm", "/generate", {"inputs": {}, "parameters": {}}, 400, "prompt format error"),
    ("lightllm", COMPLETIONS, {"prompt": "a"}, 422, '"loc":["body","model"]'),
    ("lightllm", COMPLETIONS, {"model": "m", "prompt": "a", "suffix": "b"}, 400, "suffix"),
    ("lightllm", COMPLETIONS, {"model": "m", "prompt": ["a", "b"]}, 400, "one prompt per request"),
    ("lightllm", CHAT, {"model": "m"}, 422, '"loc":["body","messages"]'),
    ("lightllm", CHAT, {"model": "m", "messages": TWO, "top_k": 0}, 400, "top_k must be -1 (disable)"),
    ("lightllm", "/tokens", {}, 417, "error: 'text'"),
]


@pytest.mark.parametrize(("server", "path", "body", "status", "words"), REFUSED)
def test_refusals(
    servers: dict[str, httpx.Client], server: str, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    """The status of the real server, and its words."""
    response = servers[server].post(path, json=body)
    assert response.status_code == status
    assert words in response.text


@pytest.mark.parametrize(("server", "status"), [("vllm", 400), ("tgi", 415), ("lightllm", 200)])
def test_a_body_that_is_not_called_json(servers: dict[str, httpx.Client], server: str, status: int) -> None:
    """vLLM and TGI insist on the content type, each in its own way; LightLLM reads what comes."""
    body = b'{"inputs":"a","prompt":"a","parameters":{"max_new_tokens":1}}'
    path = COMPLETIONS if server == "vllm" else "/generate"
    assert servers[server].post(path, content=body).status_code == status


def repr_10(body: bytes) -> str:
    """The beginning of a body, for the name of a test."""
    return repr(body[:10])


@pytest.mark.parametrize(("server", "status"), [("vllm", 400), ("tgi", 400), ("lightllm", 400)])
@pytest.mark.parametrize("body", [b"{", b"\xff", b"", b'{"a" 2}', b'{"x":' + b"[" * 100_000], ids=repr_10)
def test_a_body_that_is_not_json(servers: dict[str, httpx.Client], server: str, status: int, body: bytes) -> None:
    """No body gets past the parser, and none gets a traceback."""
    path = COMPLETIONS if server == "vllm" else "/generate"
    response = servers[server].post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status


@pytest.mark.parametrize("server", ["vllm", "tgi", "lightllm"])
@pytest.mark.parametrize("depth", [*range(960, 985, 4), 1_000, 10_000])
def test_a_deeply_nested_body_is_refused(servers: dict[str, httpx.Client], server: str, depth: int) -> None:
    """A depth that can just be decoded, but not repeated in a message, gets a client error as any other depth does."""
    body = b'{"a":' * depth + b"1" + b"}" * depth
    for path in (COMPLETIONS, "/v1/chat/completions"):
        response = servers[server].post(path, content=body, headers={"Content-Type": "application/json"})
        assert 400 <= response.status_code < 500, response.text[:200]


def test_a_body_that_is_too_large(servers: dict[str, httpx.Client]) -> None:
    """TGI's limit is two million bytes, whether the length is announced or the body comes in chunks."""
    headers = {"Content-Type": "application/json"}
    large = b'{"inputs":"' + b"a" * 2_000_000 + b'"}'
    assert servers["tgi"].post("/generate", content=large, headers=headers).status_code == 413
    pieces = (large[start : start + 100_000] for start in range(0, len(large), 100_000))
    assert servers["tgi"].post("/generate", content=pieces, headers=headers).status_code == 413


def test_a_client_may_ask_before_it_sends(servers: dict[str, httpx.Client]) -> None:
    """`Expect: 100-continue` is answered, or clients like curl would wait for a second."""
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    assert servers["tgi"].post("/generate", json=body, headers={"Expect": "100-continue"}).status_code == 200


def test_head_has_no_body(servers: dict[str, httpx.Client]) -> None:
    """LightLLM's /health knows HEAD; the length is that of the body it does not send."""
    response = servers["lightllm"].head("/health")
    assert (response.content, response.headers["content-length"]) == (b"", "16")
