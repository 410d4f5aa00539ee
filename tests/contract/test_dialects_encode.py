"""The request bodies, byte for byte: what a server is asked must not change unnoticed."""

from __future__ import annotations

import json

import msgspec
import pytest

from loadgen.servers.backends import BACKENDS
from loadgen.workloads.request import Request
from tests.support.dialects import DIALECTS

ASK = Request(id=7, prompt="To be", input_tokens=3, output_tokens=16)
STREAM = b'"stream":true,"stream_options":{"include_usage":true}}'
CHAT = b'{"messages":[{"role":"user","content":"To be"}],'
RUNNING = b'{"include_usage":true,"continuous_usage_stats":true}'
RESPONSES = b'{"model":"m","input":"To be","max_output_tokens":16,"temperature":0.0,"store":false,'
MESSAGES = (
    b'{"model":"m","messages":[{"role":"user","content":"To be"}],"max_tokens":16,"temperature":0.0,"stream":true}'
)
EXACT = b'"min_tokens":16,"ignore_eos":true,"stream_options":%b}' % RUNNING

GREEDY = {
    ("vllm", "completions"): b'{"model":"m","prompt":"To be","max_tokens":16,"temperature":0.0,"stream":true,' + EXACT,
    ("vllm", "chat"): CHAT + b'"model":"m","max_tokens":16,"temperature":0.0,"stream":true,' + EXACT,
    ("vllm", "responses"): RESPONSES + b'"stream":true,"ignore_eos":true}',
    ("vllm", "messages"): MESSAGES,
    ("tgi", "generate"): b'{"inputs":"To be","parameters":{"max_new_tokens":16,"details":true,"do_sample":false}}',
    ("tgi", "completions"): b'{"model":"tgi","prompt":"To be","max_tokens":16,"temperature":0.0,"stream":true}',
    ("tgi", "chat"): CHAT + b'"model":"tgi","max_tokens":16,"temperature":0.0,' + STREAM,
    ("lightllm", "generate"): (
        b'{"inputs":"To be","parameters":{"max_new_tokens":16,"ignore_eos":true,"do_sample":false}}'
    ),
    ("lightllm", "completions"): (
        b'{"model":"m","prompt":"To be","max_tokens":16,"temperature":0.0,"stream":true,'
        b'"ignore_eos":true,"do_sample":false}'
    ),
    ("lightllm", "chat"): (
        CHAT + b'"model":"m","max_tokens":16,"temperature":0.0,"stream":true,"ignore_eos":true,"do_sample":false}'
    ),
    ("sglang", "completions"): (
        b'{"model":"m","prompt":"To be","max_tokens":16,"temperature":0.0,"stream":true,'
        b'"ignore_eos":true,"stream_options":%b}' % RUNNING
    ),
    ("sglang", "chat"): CHAT
    + b'"model":"m","max_tokens":16,"temperature":0.0,"stream":true,"ignore_eos":true,"stream_options":%b}' % RUNNING,
    ("sglang", "generate"): (
        b'{"text":"To be","sampling_params":{"max_new_tokens":16,"temperature":0.0,"ignore_eos":true},"stream":true}'
    ),
    ("openai", "completions"): (
        b'{"model":"m","prompt":"To be","max_tokens":16,"temperature":0.0,"stream":true,"stream_options":%b}' % RUNNING
    ),
    ("openai", "chat"): CHAT
    + b'"model":"m","max_tokens":16,"temperature":0.0,"stream":true,"stream_options":%b}' % RUNNING,
    ("openai", "responses"): RESPONSES + b'"stream":true}',
    ("openai", "messages"): MESSAGES,
}
PARAMETERS = {("tgi", "generate"): "parameters", ("lightllm", "generate"): "parameters"} | {
    ("sglang", "generate"): "sampling_params"
}
"""Field of a request that contains the sampling parameters, for the dialects that have such a field."""
every_dialect = pytest.mark.parametrize("key", DIALECTS, ids="-".join)


@every_dialect
def test_a_greedy_request_is_these_bytes(key: tuple[str, str]) -> None:
    """One request has one encoding, with every field the dialect needs and none that its servers refuse."""
    assert DIALECTS[key].encode(ASK, "m") == GREEDY[key]


@every_dialect
def test_an_answer_that_may_end_is_not_held_to_its_length(key: tuple[str, str]) -> None:
    """The limit is sent, and nothing that keeps the model from ending before it."""
    body = DIALECTS[key].encode(Request(id=7, prompt="To be", input_tokens=3, output_tokens=16, ignore_eos=False), "m")
    assert b'"ignore_eos":true' not in body
    assert b"min_tokens" not in body
    assert b'tokens":16' in body


@every_dialect
def test_sampling_sends_its_temperature(key: tuple[str, str]) -> None:
    """A temperature above 0 reaches the server where it reads it, together with the switch that some want for it."""
    warm = Request(id=7, prompt="To be", input_tokens=3, output_tokens=16, body={"temperature": 0.7})
    body = DIALECTS[key].encode(warm, "m")
    read = json.loads(body)
    assert read.get(PARAMETERS.get(key, ""), read)["temperature"] == 0.7
    assert b'"do_sample":false' not in body
    assert (b'"do_sample":true' in body) == (b"do_sample" in GREEDY[key])


@pytest.mark.parametrize("key", [key for key, dialect in DIALECTS.items() if dialect.token_ids], ids="-".join)
def test_token_ids_are_sent_as_they_are(key: tuple[str, str]) -> None:
    """Where the API takes token ids, the prompt is the list of them."""
    asked = Request(id=7, prompt=(5, 6, 7), input_tokens=3, output_tokens=16)
    field = b'"input_ids"' if key == ("sglang", "generate") else b'"prompt"'
    assert field + b":[5,6,7]" in DIALECTS[key].encode(asked, "m")


@every_dialect
def test_fields_of_the_user_are_merged(key: tuple[str, str]) -> None:
    """They win over the dialect's own, objects field by field, and null takes one out (RFC 7396). On native endpoints
    they are sampling parameters, wherever they were written."""
    nested = {"stream_options": {"continuous": True}}
    fields = {"top_p": 0.9, "stream": None, **nested, "made_up": [1, {"deep": None}]}
    asked = Request(id=7, prompt="To be", input_tokens=3, output_tokens=16, body=fields)
    plain, sent = json.loads(GREEDY[key]), json.loads(DIALECTS[key].encode(asked, "m"))
    plain.pop("stream", None)
    options = plain.get("stream_options", {}) | nested["stream_options"]
    mine = {"top_p": 0.9, "stream_options": options, "made_up": [1, {"deep": None}]}
    parameters = PARAMETERS.get(key)
    assert sent == plain | ({parameters: plain[parameters] | mine} if parameters else mine)


@pytest.mark.parametrize("server", ["tgi", "lightllm"])
def test_parameters_written_as_such_are_as_good(server: str) -> None:
    """Both ways of writing say the same, and the greedy temperature that TGI refuses is not sent."""
    encode, plain = DIALECTS[server, "generate"].encode, GREEDY[server, "generate"]
    sent = [
        encode(Request(id=7, prompt="To be", input_tokens=3, output_tokens=16, body=body), "m")
        for body in ({"temperature": 0.7, "do_sample": None}, {"parameters": {"temperature": 0.7, "do_sample": None}})
    ]
    assert sent == [plain.replace(b'"do_sample":false', b'"temperature":0.7')] * 2
    cold = Request(id=7, prompt="To be", input_tokens=3, output_tokens=16, body={"temperature": 0})
    assert encode(cold, "m") == plain


def test_fields_beside_the_sampling_parameters_stay_there() -> None:
    """SGLang ignores an unknown field at the top level and refuses one in `sampling_params`, so only known fields are
    sent at the top level."""
    body = {"return_logprob": True, "min_new_tokens": 3, "sampling_params": {"top_p": 0.9, "temperature": None}}
    asked = Request(id=7, prompt="To be", input_tokens=3, output_tokens=16, body=body)
    assert json.loads(DIALECTS["sglang", "generate"].encode(asked, "m")) == {
        "text": "To be",
        "sampling_params": {"max_new_tokens": 16, "ignore_eos": True, "min_new_tokens": 3, "top_p": 0.9},
        "stream": True,
        "return_logprob": True,
    }


@every_dialect
def test_an_answer_may_end_by_itself(key: tuple[str, str]) -> None:
    """Then nothing that would force its length is sent, and the rest is as it was."""
    asked = Request(id=7, prompt="To be", input_tokens=3, output_tokens=16, ignore_eos=False)
    body = DIALECTS[key].encode(asked, "m")
    forced = (b'_eos":true', b'_eos":false')
    if key[0] == "vllm":
        forced = (b',"ignore_eos":true', b"") if key[1] == "responses" else (b'"min_tokens":16,"ignore_eos":true,', b"")
    assert body == GREEDY[key].replace(*forced)


IMAGE = "data:image/png;base64,iVBORw0KGgo="
CHAT_HISTORY = (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", "To be"))


def test_a_chat_of_the_responses_api_is_its_input() -> None:
    """Every message keeps its role, and images are parts of the last message."""
    request = msgspec.structs.replace(ASK, messages=CHAT_HISTORY, images=(IMAGE,))
    parts = [{"type": "input_text", "text": "To be"}, {"type": "input_image", "image_url": IMAGE}]
    assert json.loads(DIALECTS["openai", "responses"].encode(request, "m"))["input"] == [
        *({"role": role, "content": content} for role, content in CHAT_HISTORY[:-1]),
        {"role": "user", "content": parts},
    ]


def test_a_chat_of_the_messages_api_has_its_system_message_apart() -> None:
    """System messages are a field of the request. An image is its bytes, or the URL at which the server finds it."""
    request = msgspec.structs.replace(ASK, messages=CHAT_HISTORY, images=(IMAGE, "http://127.0.0.1/cat.png"))
    sent = json.loads(DIALECTS["openai", "messages"].encode(request, "m"))
    assert sent["system"] == "Be brief."
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    assert [part.get("source") for part in sent["messages"][-1]["content"]] == [
        None,
        {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
        {"type": "url", "url": "http://127.0.0.1/cat.png"},
    ]


def test_the_messages_api_has_its_own_headers() -> None:
    """Anthropic's server takes the key as x-api-key. vLLM takes it as a bearer token. Both get the version."""
    version = {"anthropic-version": "2023-06-01"}
    assert DIALECTS["openai", "messages"].headers("k") == version | {"x-api-key": "k"}
    assert DIALECTS["vllm", "messages"].headers("k") == version | {"Authorization": "Bearer k"}
    assert DIALECTS["openai", "messages"].headers(None) == DIALECTS["vllm", "messages"].headers("") == version


def test_a_test_request_has_the_prompt_length_in_its_usage() -> None:
    """Prompt tokens from the cache are part of the prompt, although the Messages API counts them apart."""
    responses = DIALECTS["openai", "responses"].count_by_running
    assert responses.body("To be", "m")["max_output_tokens"] == 1
    assert responses.read({"usage": {"input_tokens": 7}}) == 7
    messages = DIALECTS["openai", "messages"].count_by_running
    usage = {"input_tokens": 3, "cache_read_input_tokens": 12, "cache_creation_input_tokens": 4}
    assert messages.read({"usage": usage}) == 19
    assert messages.read({"usage": {"input_tokens": 3, "cache_read_input_tokens": None}}) == 3


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
def test_a_refused_field_is_left_out(endpoint: str) -> None:
    """A server may refuse a temperature, for example OpenAI's for reasoning models."""
    dialect = DIALECTS["openai", endpoint]
    assert "temperature" in dialect.refusable_fields
    changed = dialect.without(("temperature",), 16)
    assert b"temperature" not in changed.encode(ASK, "m")
    assert b'tokens":16' in msgspec.json.encode(changed.count_by_running.body("To be", "m"))


@pytest.mark.parametrize("key", DIALECTS, ids="-".join)
def test_a_dialect_is_filed_under_its_own_name(key: tuple[str, str]) -> None:
    """The registry and the dialects agree, and paths are absolute."""
    dialect = DIALECTS[key]
    assert (dialect.server, dialect.endpoint) == key
    assert dialect.path.startswith("/")


def test_every_server_has_a_native_endpoint() -> None:
    """Each server that has a dialect is measured on one that exists, unless asked otherwise."""
    assert all(kind.native in kind.dialects for kind in BACKENDS.values())
