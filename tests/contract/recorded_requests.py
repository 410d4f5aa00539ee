"""The requests behind the recorded answers of real servers, and how to compare an answer with its recording.

The answers were recorded without their requests. These requests are made so that a server like the recorded one gives
the recorded answer: where an error names a column, the body is written as it must have been.
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from urllib.parse import urlsplit

from loadgen.servers import marks
from loadgen.servers.backends.audio import BOUNDARY, multipart
from loadgen.workloads.recordings import SyntheticRecording
from tests.contract.recorded import TRANSCRIPTS

NATIVE, STREAM = "/generate", "/generate_stream"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
OPENAI_EMBEDDINGS = "/v1/embeddings"
TEXT = "ba de fi go"
LONG_TEXT = "ba " * 3000
DROPPED_HEADERS = ("connection", marks.HEADER)
PER_RUN_HEADERS = re.compile(r"date|content-length|x-.*-time|x-time-per-token|x-prompt-tokens|x-compute-tokens")
"""Headers whose values are those of one run, or of one model."""
# Words of the protocol. Everything else is a number or a text, and only its type is compared.
WORDS = ("finish_reason", "stop_reason", "object", "role", "index", "type", "error_type", "special", "finished")


@dataclass(frozen=True)
class Recorded:
    """One request, and the file that has the real server's answer to it."""

    file: str
    path: str
    body: dict[str, Any] | str | bytes = field(default_factory=dict)
    """A text and bytes stand for themselves; of an object the usual JSON is sent."""
    method: str = "POST"
    head: str = ""
    """More lines of the request's head."""
    server: str = "idle"
    """`busy`: the server has no place left. `fresh`: it had no request before, so its words are known."""
    free_headers: tuple[str, ...] = ()
    """Headers whose values depend on the model's words or on its chat template."""

    def payload(self) -> bytes:
        """The body as bytes."""
        if isinstance(self.body, str | bytes):
            return self.body.encode() if isinstance(self.body, str) else self.body
        return json.dumps(self.body, separators=(",", ":")).encode() if self.body else b""


def exchange(url: str, request: Recorded) -> bytes:
    """Every byte that the server at `url` says to one request, up to the end of the connection."""
    data, address = request.payload(), urlsplit(url)
    lines = [f"{request.method} {request.path} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"Content-Length: {len(data)}"] if data or request.method == "POST" else []
    lines += [] if "content-type" in request.head.lower() else ["Content-Type: application/json"]
    head = "\r\n".join(lines) + f"\r\n{request.head}\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(head.encode() + data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def recording(request: Recorded) -> bytes:
    """The real server's answer."""
    return (TRANSCRIPTS / request.file).read_bytes()


@dataclass(frozen=True)
class Shape:
    """An answer without what changes from run to run and from model to model."""

    status: str
    headers: list[tuple[str, str]]
    body: Any


def shape_of(answer: bytes, request: Recorded) -> Shape:
    """Status, headers in their order, and the shape of the body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    pairs = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]
    if ("transfer-encoding", "chunked") in pairs and re.match(rb"[0-9a-fA-F]+\r\n", body):
        body = unchunked(body)
    headers = [
        (name, "" if PER_RUN_HEADERS.fullmatch(name) or name in request.free_headers else value)
        for name, value in pairs
        if name not in DROPPED_HEADERS
    ]
    return Shape(status, headers, _body_shape(dict(pairs).get("content-type", ""), body.strip(b"\n")))


def unchunked(body: bytes) -> bytes:
    """A body without its transfer coding, up to where the coding breaks off."""
    found = b""
    while head := re.match(rb"([0-9a-fA-F]+)\r\n", body):
        size = int(head[1], 16)
        found, body = found + body[head.end() : head.end() + size], body[head.end() + size + 2 :]
    return found


def _body_shape(kind: str, body: bytes) -> Any:
    if kind.startswith("text/event-stream"):
        events = [_event_shape(event.decode()) for event in re.split(rb"\n\n+", body) if event]
        return [event for event, _ in groupby(events)]
    try:
        return shape(json.loads(body))
    except ValueError:
        return _words(body.decode())


def _event_shape(event: str) -> Any:
    name, colon, data = event.partition("data:")
    if data.strip() == "[DONE]":
        return [name + colon, data]
    return [name + colon + data[: len(data) - len(data.lstrip())], shape(json.loads(data))]


def shape(value: Any, key: str = "") -> Any:
    """A JSON value with its words, ids and numbers replaced by their types. Errors keep every word."""
    if isinstance(value, dict):
        is_error = "error" in value or "detail" in value or value.get("object") == "error"
        if is_error or set(value) == {"message"}:
            return json.loads(_words(json.dumps(value)))
        known = {name: shape(each, name) for name, each in value.items() if name != marks.FIELD}
        known |= {"docker_label": "text or null"} if "docker_label" in known else {}
        known |= {"cached_tokens_details": "counts or null"} if "cached_tokens_details" in known else {}
        return known | {"index": "number"} if "token" in known and "index" in known else known
    if isinstance(value, list):
        return [each for each, _ in groupby([shape(each, key) for each in value])]
    if value is None or isinstance(value, bool) or (key in WORDS and isinstance(value, str | int)):
        return value
    return "text" if isinstance(value, str) else "number"


def _words(text: str) -> str:
    """Words of an error, without the tokens that another tokenizer counts and without the cause of a failure."""
    text = re.sub(r"Given: \d+ `inputs` tokens", "Given: N `inputs` tokens", text)
    text = re.sub(r"\d+ tokens", "N tokens", text)
    return re.sub(r'(Server error: ).*?(?="|$)', r"\1cause", text)


def _generate(file: str, path: str, more: dict[str, Any] | None = None, text: str = TEXT, **others: Any) -> Recorded:
    parameters = {"max_new_tokens": 8, **(more or {})}
    return Recorded(f"tgi-3.3.7/{file}.txt", path, {"inputs": text, "parameters": parameters}, **others)


def _chat(file: str, body: dict[str, Any], *, text: str = TEXT, free: str = "", **others: Any) -> Recorded:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **body}
    kept = {name: value for name, value in asked.items() if value is not None}
    return Recorded(f"tgi-3.3.7/{file}.txt", CHAT, kept, free_headers=("x-compute-characters", free), **others)


def _complete(file: str, body: dict[str, Any] | None = None, **others: Any) -> Recorded:
    asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 8, **(body or {})}
    return Recorded(f"tgi-3.3.7/{file}.txt", COMPLETIONS, asked, **others)


def _page(file: str, path: str, **others: Any) -> Recorded:
    return Recorded(f"tgi-3.3.7/{file}.txt", path, method="GET", **others)


def _fault(fault: str) -> str:
    return f"X-Simulated-Fault: {fault}\r\n"


_STREAMED = {"stream": True}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_TOOLS = {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 100}
_SCHEMA = {"type": "json_object", "value": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}
_STOP = {"stop": ["e"], "max_new_tokens": 64}  # nearly every third word of the simulated servers ends in an e
_KILLED = {"max_new_tokens": 100}

TGI = (
    _generate("best_of", NATIVE, {"best_of": 2, "do_sample": True, "details": True}),
    _generate("generate", NATIVE),
    _generate("generate_details", NATIVE, {"details": True, "decoder_input_details": True, "top_n_tokens": 2}),
    _generate("generate_full_text", NATIVE, {"return_full_text": True}),
    _generate("generate_stream", STREAM),
    _generate("generate_stream_details", STREAM, {"details": True}),
    _generate("generate_stream_sampled", STREAM, {"details": True, "do_sample": True, "temperature": 0.5, "seed": 3}),
    _generate("generate_stream_stop", STREAM, {"details": True, **_STOP}, server="fresh"),
    _generate("generate_stream_top_n", STREAM, {"details": True, "top_n_tokens": 2}),
    _generate("generate_stream_truncate", STREAM, {"details": True, "truncate": 3}),
    _generate(
        "generate_grammar_stream",
        STREAM,
        {"details": True, "grammar": {"type": "regex", "value": "[ab]{3}"}},
        text="ba",
    ),
    Recorded("tgi-3.3.7/root.txt", "/", {"inputs": TEXT, "parameters": {"max_new_tokens": 4}}),
    Recorded("tgi-3.3.7/root_stream.txt", "/", {"inputs": TEXT, "parameters": {"max_new_tokens": 4}, "stream": True}),
    _generate("err_unknown_param", STREAM, {"frobnicate": 1}),
    _chat("chat", {}),
    _chat("chat_json_stream", {**_STREAMED, "response_format": _SCHEMA, "max_tokens": 64}),
    _chat("chat_max_completion_tokens", {"max_tokens": None, "max_completion_tokens": 4}),
    _chat("chat_no_max_tokens", {"max_tokens": None}, free="x-generated-tokens"),
    _chat("chat_stream", _STREAMED),
    _chat("chat_stream_logprobs", {**_STREAMED, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}),
    _chat("chat_stream_stop", {**_USAGE, "stop": ["e"], "max_tokens": 64}, server="fresh"),
    _chat("chat_stream_usage", _USAGE),
    _chat("chat_tool", _TOOLS, free="x-generated-tokens"),
    _chat("chat_tool_stream", {**_USAGE, **_TOOLS}),
    _chat("chat_unknown_fields", {**_STREAMED, "model": "other", "max_tokens": 4, "ignore_eos": True, "min_tokens": 4}),
    _complete("completions"),
    _complete("completions_stream", _STREAMED),
    _complete("completions_stream_usage", _USAGE),
    _complete("completions_token_ids", {"prompt": [424, 371, 356, 426]}),
    _complete("completions_two_prompts_stream", {**_STREAMED, "prompt": [TEXT, TEXT]}, head=_fault("error@1")),
    Recorded("tgi-3.3.7/tokenize.txt", "/tokenize", {"inputs": TEXT}),
    Recorded("tgi-3.3.7/tokenize_nospecial.txt", "/tokenize", {"inputs": TEXT, "add_special_tokens": False}),
    Recorded("tgi-3.3.7/chat_tokenize.txt", "/chat_tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
    _page("health", "/health"),
    _page("info", "/info"),
    _page("models", "/v1/models"),
    _page("metrics", "/metrics"),
    _page("err_404", "/v1/nothing"),
    _page("err_405", NATIVE),
    Recorded("tgi-3.3.7/err_badjson.txt", NATIVE, '{"inputs": '),
    Recorded("tgi-3.3.7/err_badjson_chat.txt", CHAT, '{"messages": '),
    Recorded("tgi-3.3.7/err_ctype.txt", NATIVE, {"inputs": TEXT}, head="Content-Type: text/plain\r\n"),
    Recorded("tgi-3.3.7/err_nomessages.txt", CHAT, {"model": "tiny"}),
    Recorded("tgi-3.3.7/err_noprompt.txt", COMPLETIONS, {"model": "tiny"}),
    Recorded("tgi-3.3.7/err_type.txt", NATIVE, f'{{"inputs": "{TEXT}", "parameters": {{"max_new_tokens": "8"}}}}'),
    _generate("err_toolarge", NATIVE, text="ba " * 700_000),
    _generate("err_toolong", NATIVE, text=LONG_TEXT),
    _generate("err_toolong_stream", STREAM, text=LONG_TEXT),
    _chat("err_toolong_chat_stream", _STREAMED, text=LONG_TEXT),
    _generate("err_best_of_stream", STREAM, {"best_of": 2, "do_sample": True}),
    _generate("err_empty", STREAM, text=""),
    _generate("err_max0", STREAM, {"max_new_tokens": 0}),
    _generate("err_stop_many", STREAM, {"stop": [*"abcdefgh"]}),
    _generate("err_temperature", STREAM, {"temperature": 0}),
    _generate("err_overloaded", NATIVE, server="busy"),
    _generate("err_overloaded_stream", STREAM, text="ba de", server="busy"),
    _chat("err_overloaded_chat_stream", _STREAMED, server="busy"),
    _complete("err_overloaded_completions_stream", {**_STREAMED, "prompt": "ba"}, server="busy"),
    _generate("generate_oom", NATIVE, head=_fault("error@4")),
    _generate("generate_shard_killed", NATIVE, head=_fault("error@4")),
    _generate("err_after_kill", NATIVE, head=_fault("error@0")),
    _generate("err_after_kill_stream", STREAM, text="ba", head=_fault("error@0")),
    _generate("generate_stream_oom", STREAM, _KILLED, text="ba de", head=_fault("error@58")),
    _generate("generate_stream_shard_killed", STREAM, _KILLED, text="ba de", head=_fault("error@54")),
    _generate("generate_stream_router_killed", STREAM, _KILLED, text="ba de", head=_fault("cut@19")),
    _chat("chat_stream_oom", {**_STREAMED, "max_tokens": 100}, head=_fault("error@58")),
    _chat("chat_stream_shard_killed", {**_STREAMED, "max_tokens": 100}, head=_fault("error@53")),
    _chat("chat_stream_router_killed", {**_STREAMED, "max_tokens": 100}, head=_fault("cut@17")),
    _complete("completions_stream_oom", {**_STREAMED, "prompt": "ba", "max_tokens": 100}, head=_fault("error@60")),
    _complete(
        "completions_stream_shard_killed", {**_STREAMED, "prompt": "ba", "max_tokens": 100}, head=_fault("error@51")
    ),
    _complete(
        "completions_stream_router_killed", {**_STREAMED, "prompt": "ba", "max_tokens": 100}, head=_fault("cut@17")
    ),
    _page("health_after_kill", "/health", head=_fault("503")),
)


def _vllm(file: str, path: str, body: dict[str, Any] | str | None = None, **others: Any) -> Recorded:
    return Recorded(f"vllm-0.32.0/{file}.txt", path, {} if body is None else body, **others)


def _vllm_page(file: str, path: str, **others: Any) -> Recorded:
    return Recorded(f"vllm-0.32.0/{file}.txt", path, method="GET", **others)


def _completion(file: str, body: dict[str, Any], **others: Any) -> Recorded:
    return _vllm(file, COMPLETIONS, {"model": "tiny", **body}, **others)


def _transcription(
    file: str, fields: dict[str, Any] | None = None, *, seconds: int = 3, content: bytes | None = None
) -> Recorded:
    """An upload of a recording, as multipart/form-data. Empty content: no file."""
    recording = SyntheticRecording(seconds, "a").content() if content is None else content
    body = multipart({"model": "tiny-whisper", **(fields or {})}, "a.wav", recording)
    if content == b"":
        body = body[: body.rindex(b"--" + BOUNDARY.encode(), 0, -40)] + f"--{BOUNDARY}--\r\n".encode()
    head = f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
    return Recorded(f"vllm-0.32.0-whisper/{file}.txt", TRANSCRIPTIONS, body, head=head)


def _responses(file: str, body: dict[str, Any]) -> Recorded:
    defaults = {"model": "tiny", "input": "mitela nidu", "max_output_tokens": 8, "stream": True}
    return _vllm(f"responses_{file}", RESPONSES, {**defaults, **body})


def _messages(file: str, body: dict[str, Any]) -> Recorded:
    question = [{"role": "user", "content": "mitela nidu"}]
    defaults = {"model": "tiny", "messages": question, "max_tokens": 8, "stream": True}
    return _vllm(f"messages_{file}", MESSAGES, {**defaults, **body})


_IDS = [424, 372, 432, 342]
_STREAMED_USAGE = {"stream_include_usage": True, "stream_continuous_usage_stats": True}
_TOO_LONG = {"prompt": [*range(300, 3300)], "max_tokens": 4}
_HI = [{"role": "user", "content": "hi"}]

WHISPER = (
    _transcription("transcription_nonstream", {"max_completion_tokens": 8}),
    _transcription("transcription_stream", {"stream": True, "max_completion_tokens": 4, **_STREAMED_USAGE}),
    _transcription("transcription_stream_nousage", {"stream": True, "max_completion_tokens": 2}),
    _transcription("err_audio", {"stream": True}, content=b"no audio"),
    _transcription("err_model", {"model": "nope", "stream": True}),
    _transcription("err_no_file", content=b""),
    Recorded("vllm-0.32.0-whisper/err_json.txt", TRANSCRIPTIONS, "{}"),
    _transcription("err_format", {"response_format": "srt"}),
    _transcription("err_verbose_stream", {"response_format": "verbose_json", "stream": True}),
    _transcription("err_stream_option", {"stream_include_usage": True}),
)
"""Uploads to vLLM with a Whisper model. The recordings of two more responses have pieces of 30 s and segments with
timestamps, which the simulated server does not make."""
VLLM = (
    _vllm("chat_nonstream", CHAT, {"model": "tiny", "messages": _HI, "max_tokens": 4}),
    _vllm("chat_stream", CHAT, {"model": "tiny", "messages": _HI, "max_tokens": 5, **_USAGE}),
    _completion("completion_stream", {"prompt": _IDS, "max_tokens": 8, **_USAGE}),
    _completion(
        "continuous_usage",
        {
            "prompt": _IDS,
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    _completion("stream_nousage", {"prompt": _IDS, "max_tokens": 3, "stream": True}),
    _completion("token_ids", {"prompt": _IDS, "max_tokens": 3, "stream": True, "return_token_ids": True}),
    _completion("nonstream", {"prompt": _IDS, "max_tokens": 4}),
    _completion("unknown_field", {"prompt": [5], "max_tokens": 2, "frobnicate": 1}),
    _completion("err_input_plus_output", {"prompt": [7] * 2000, "max_tokens": 100}),
    _completion("err_toolong", _TOO_LONG),
    _completion("err_toolong_stream", {**_TOO_LONG, "stream": True}),
    _completion("err_toolong_text", {"prompt": "x" * 30_000, "max_tokens": 4}),
    # Of 18 characters of the simulated servers' chat template, which are 25 in the recorded one.
    _vllm(
        "err_toolong_chat",
        CHAT,
        {"model": "tiny", "messages": [{"role": "user", "content": "x" * 30_007}], "max_tokens": 4},
    ),
    _completion("err_badtoken", {"prompt": [999_999], "max_tokens": 4}),
    _completion("err_emptyprompt", {"prompt": "", "max_tokens": 4}),
    _completion("err_noprompt", {"max_tokens": 4}),
    _completion("err_logprobs", {"prompt": "x", "logprobs": 100}),
    _completion("err_max0", {"prompt": "x", "max_tokens": 0}),
    _completion("err_temp", {"prompt": "x", "temperature": -1.0}),
    _completion("err_type", {"prompt": "x", "max_tokens": "many"}),
    _completion("err_streamopt_nostream", {"prompt": "x", "stream_options": {"include_usage": True}}),
    _vllm("err_nomessages", CHAT, {"model": "tiny"}),
    _vllm("err_wrongmodel", COMPLETIONS, {"model": "nope", "prompt": "x"}),
    _vllm("err_wrongmodel_chat_stream", CHAT, {"model": "nope", "messages": _HI, "stream": True}),
    _vllm("err_badjson", COMPLETIONS, '{"model":"tiny",'),
    _completion("err_ctype", {"prompt": "x"}, head="Content-Type: text/plain\r\n"),
    _vllm("err_401", COMPLETIONS, {"model": "tiny", "prompt": "x"}, server="guarded"),
    _vllm_page("err_401_health", "/health", server="guarded"),
    _vllm_page("err_404", "/v1/nothing"),
    _vllm_page("err_405", COMPLETIONS),
    _completion("completion_after_kill", {"prompt": "x"}, head=_fault("500")),
    _vllm_page("health_after_kill", "/health", head=_fault("503")),
    _vllm_page("health", "/health"),
    _vllm_page("ping", "/ping"),
    _vllm_page("load", "/load"),
    _vllm_page("version", "/version"),
    _vllm_page("models", "/v1/models"),
    _vllm_page("metrics", "/metrics"),
    _vllm("tokenize", "/tokenize", {"model": "tiny", "prompt": "ba de fi"}),
    _responses("stream", {"temperature": 0}),
    _responses("nonstream", {"temperature": 0, "stream": False}),
    _responses(
        "ignore_eos",
        {"input": [{"role": "user", "content": "mitela nidu"}], "max_output_tokens": 16, "ignore_eos": True},
    ),
    _responses("toolong", {"max_output_tokens": 4000}),
    _responses("wrongmodel", {"model": "other"}),
    _responses("type", {"input": 5}),
    _vllm("responses_badjson", RESPONSES, '{"model":'),
    _messages("stream", {"temperature": 0}),
    _messages("nonstream", {"stream": False}),
    _messages("system", {"system": "sola", "max_tokens": 16, "ignore_eos": True}),
    _messages("toolong", {"max_tokens": 4000}),
    _messages("wrongmodel", {"model": "other"}),
    _messages("type", {"messages": 5}),
    _vllm(
        "messages_nomax",
        MESSAGES,
        {"model": "tiny", "messages": [{"role": "user", "content": "mitela nidu"}], "stream": True},
    ),
    _vllm(
        "messages_count",
        "/v1/messages/count_tokens",
        {"model": "tiny", "messages": [{"role": "user", "content": "mitela nidu"}]},
    ),
)


def _lightllm(file: str, path: str, body: dict[str, Any] | str, **others: Any) -> Recorded:
    return Recorded(f"lightllm-0.0.1/{file}.txt", path, body, **others)


def _lightllm_page(file: str, path: str, **others: Any) -> Recorded:
    return Recorded(f"lightllm-0.0.1/{file}.txt", path, method="GET", **others)


def _inputs(parameters: dict[str, Any], text: str = "ba de fi go") -> dict[str, Any]:
    return {"inputs": text, "parameters": parameters}


LIGHTLLM = (
    _lightllm("generate", NATIVE, _inputs({"max_new_tokens": 3, "return_details": True})),
    _lightllm("stream", STREAM, _inputs({"max_new_tokens": 3})),
    _lightllm("tgi_generate", NATIVE, _inputs({"max_new_tokens": 3, "details": True, "seed": 1}), server="tgi_api"),
    _lightllm("tgi_stream", STREAM, _inputs({"max_new_tokens": 3}), server="tgi_api"),
    _lightllm("chat", CHAT, {"model": "tiny", "messages": _HI}),
    _lightllm("err_badjson", NATIVE, '{"inputs":'),
    _lightllm("err_noparams", NATIVE, {"inputs": "x"}),
    _lightllm("err_param", NATIVE, _inputs({"do_sample": True, "temperature": -1})),
    # 12,001 tokens of either tokenizer.
    _lightllm("err_toolong_nostream", NATIVE, _inputs({"max_new_tokens": 4}, "ba" + " ba" * 11_999)),
    _lightllm("err_total", NATIVE, _inputs({"max_new_tokens": 3000})),
    _lightllm("err_unknown_param", NATIVE, _inputs({"frobnicate": 1})),
    _lightllm_page("err_404", "/v1/models"),
    _lightllm_page("health", "/health"),
    _lightllm_page("token_load", "/token_load"),
    _lightllm_page("metrics", "/metrics"),
)


def _sglang(file: str, path: str, body: dict[str, Any] | str | None = None, **others: Any) -> Recorded:
    return Recorded(f"sglang-0.5.23/{file}.txt", path, {} if body is None else body, **others)


def _sglang_completion(file: str, body: dict[str, Any] | None = None, **others: Any) -> Recorded:
    return _sglang(file, COMPLETIONS, {"model": "tiny", "prompt": TEXT, "max_tokens": 8, **(body or {})}, **others)


def _sglang_chat(file: str, body: dict[str, Any] | None = None, *, text: str = TEXT) -> Recorded:
    messages = [{"role": "user", "content": text}]
    return _sglang(file, CHAT, {"model": "tiny", "messages": messages, "max_tokens": 8, **(body or {})})


def _sglang_generate(
    file: str, parameters: dict[str, Any] | None = None, *, stream: bool = False, **prompt: Any
) -> Recorded:
    body = {**(prompt or {"text": TEXT}), "sampling_params": {"max_new_tokens": 8, **(parameters or {})}}
    return _sglang(file, NATIVE, {**body, "stream": True} if stream else body)


_RUNNING = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_COLD = {"temperature": -1.0}
_LONGER_TEXT = "ba " * 5000  # longer than the context of 4096 tokens
_LONG_OUTPUT = {"max_tokens": 100_000}

SGLANG = (
    _sglang_completion("completions"),
    _sglang_completion("completions_ids", {"prompt": [424, 371, 356, 426], **_USAGE}),
    _sglang_completion("completions_max1", {"max_tokens": 1, **_USAGE}),
    _sglang_completion("completions_stop_stream", {"stop": ["w"], "max_tokens": 64, **_USAGE}, server="fresh"),
    _sglang_completion("completions_stream", _STREAMED),
    _sglang_completion("completions_stream_cont", _RUNNING),
    _sglang_completion("completions_stream_usage", _USAGE),
    _sglang_chat("chat"),
    _sglang_chat("chat_max1", {"max_tokens": 1, **_USAGE}),
    _sglang_chat("chat_stream", _STREAMED),
    _sglang_chat("chat_stream_cont", _RUNNING),
    _sglang_chat("chat_stream_usage", _USAGE),
    _sglang_generate("generate"),
    _sglang_generate("generate_ids", stream=True, input_ids=[424, 371, 356, 426]),
    _sglang_generate("generate_stream", stream=True),
    _sglang("models", "/v1/models", method="GET"),
    _sglang("health", "/health", method="GET"),
    _sglang("metrics", "/metrics", method="GET"),
    _sglang("embeddings", OPENAI_EMBEDDINGS, {"model": "tiny", "input": TEXT}),
    _sglang("flush_cache", "/flush_cache"),
    _sglang("flush_cache_get", "/flush_cache", method="GET"),
    _sglang("tokenize", "/tokenize", {"model": "tiny", "prompt": TEXT}),
    _sglang("tokenize_list", "/tokenize", {"prompt": [TEXT, "x"]}),
    _sglang("tokenize_messages", "/tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
    _sglang("tokenize_nospecial", "/tokenize", {"prompt": TEXT, "add_special_tokens": False}),
    _sglang("detokenize", "/detokenize", {"tokens": [300, 301]}),
    _sglang_completion("err_401_none", server="guarded"),
    _sglang_completion("err_401_stream", _STREAMED, server="guarded"),
    _sglang("err_404", "/v1/nothing"),
    _sglang("err_405", COMPLETIONS, method="GET"),
    _sglang("err_405_gen", NATIVE, method="GET"),
    _sglang("err_badjson", COMPLETIONS, '{"prompt": '),
    _sglang("err_badjson_chat", CHAT, '{"messages": '),
    _sglang("err_badjson_gen", NATIVE, '{"text": '),
    _sglang_completion("err_ctype", head="Content-Type: text/plain\r\n"),
    _sglang_completion("err_emptyids", {"prompt": []}),
    _sglang_completion("err_emptyprompt", {"prompt": ""}),
    _sglang_chat("err_emptymessages", {"messages": []}),
    _sglang("err_gen_empty", NATIVE, {"sampling_params": {}}),
    _sglang_generate("err_gen_unknown_param", {"min_tokens": 8}),
    _sglang_completion("err_long", {"prompt": _LONGER_TEXT}),
    _sglang_completion("err_long_stream", {"prompt": _LONGER_TEXT, **_STREAMED}),
    _sglang_chat("err_long_chat", text=_LONGER_TEXT),
    _sglang_chat("err_long_chat_stream", _STREAMED, text=_LONGER_TEXT),
    _sglang_generate("err_long_gen", text=_LONGER_TEXT),
    _sglang_generate("err_long_gen_stream", stream=True, text=_LONGER_TEXT),
    _sglang_completion("err_max0", {"max_tokens": 0}),
    _sglang_generate("err_maxneg_gen", {"max_new_tokens": -1}, stream=True),
    _sglang_completion("err_mintokens", {"max_tokens": 3, "min_tokens": 9}),
    _sglang_completion("err_model", {"model": "nothing"}),
    _sglang_chat("err_model_chat_stream", {"model": "nothing", **_USAGE}),
    _sglang_completion("err_model_colon", {"model": "tiny:lora"}),
    _sglang("err_nomessages", CHAT, {"model": "tiny"}),
    _sglang("err_nomodel", CHAT, {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}),
    _sglang("err_noprompt", COMPLETIONS, {"model": "tiny"}),
    _sglang_completion("err_temp", _COLD),
    _sglang_completion("err_temp_stream", {**_COLD, **_STREAMED}),
    _sglang_chat("err_temp_chat_stream", {**_COLD, **_STREAMED}),
    _sglang_generate("err_temp_gen", _COLD),
    _sglang_generate("err_temp_gen_stream", _COLD, stream=True),
    _sglang_completion("err_total", _LONG_OUTPUT),
    _sglang_completion("err_total_stream", {**_LONG_OUTPUT, **_STREAMED}),
    _sglang_chat("err_total_chat_stream", {**_LONG_OUTPUT, **_STREAMED}),
    _sglang_generate("err_total_gen", {"max_new_tokens": 100_000}),
    _sglang_completion("err_type", {"max_tokens": "eight"}),
    _sglang_chat("err_type_chat", {"max_tokens": "eight"}),
    _sglang_generate("err_type_gen", {"max_new_tokens": "eight"}),
)
"""Requests for the recorded responses that the simulated SGLang imitates. It has no tools, no log probabilities, no
constrained output, one answer per request, and no routes of other APIs."""


def _tei(file: str, path: str, body: dict[str, Any] | str | None = None, **others: Any) -> Recorded:
    return Recorded(f"tei-1.9.3/{file}.txt", path, {} if body is None else body, **others)


def _tei_page(file: str, path: str, **others: Any) -> Recorded:
    return _tei(file, path, method="GET", **others)


_FORTY = ["ba"] * 40
_LONG_INPUT = "ba " * 1400
_BEARER = "Authorization: Bearer {}\r\n"

TEI = (
    _tei("embed/embed", "/embed", {"inputs": TEXT}),
    _tei("embed/embed_batch", "/embed", {"inputs": [TEXT, "ba"]}),
    _tei("embed/embed_ids", "/embed", {"inputs": [424, 371, 356]}),
    _tei("embed/embed_options", "/embed", {"inputs": "ba", "dimensions": 16, "normalize": False}),
    _tei("embed/embed_truncate", "/embed", {"inputs": _LONG_INPUT, "truncate": True}),
    _tei("embed/root", "/", {"inputs": "ba"}),
    _tei("embed/openai_embeddings", OPENAI_EMBEDDINGS, {"input": TEXT, "model": "tiny-bert"}),
    _tei("embed/openai_embeddings_batch", OPENAI_EMBEDDINGS, {"input": ["ba de", "fi"]}),
    _tei("embed/openai_embeddings_ids", OPENAI_EMBEDDINGS, {"input": [424, 371]}),
    _tei("embed/openai_embeddings_base64", OPENAI_EMBEDDINGS, {"input": "ba", "encoding_format": "base64"}),
    _tei("embed/tokenize", "/tokenize", {"inputs": TEXT, "add_special_tokens": False}),
    _tei_page("embed/info", "/info"),
    _tei_page("embed/health", "/health"),
    _tei_page("embed/metrics", "/metrics"),
    _tei_page("embed/models", "/v1/models"),
    _tei("embed/chat", CHAT, {"messages": []}),
    _tei("embed/err_404", "/nothing", {"inputs": "ba"}),
    _tei_page("embed/err_405", "/embed"),
    _tei("embed/err_badjson", "/embed", '{"inputs": '),
    _tei("embed/err_batch", "/embed", {"inputs": _FORTY}),
    _tei("embed/err_batch_openai", OPENAI_EMBEDDINGS, {"input": _FORTY}),
    _tei("embed/err_empty", "/embed", {"inputs": ""}),
    _tei("embed/err_empty_list", "/embed", {"inputs": []}),
    _tei("embed/err_missing", "/embed", '{"a": 1}'),
    _tei("embed/err_type", "/embed", '{"inputs": 7}'),
    _tei("embed/err_toolong", "/embed", {"inputs": _LONG_INPUT}),
    _tei("embed/err_toolong_openai", OPENAI_EMBEDDINGS, {"input": _LONG_INPUT}),
    _tei("embed/embed_all", "/embed_all", {"inputs": "ba"}),
    _tei("embed/embed_sparse", "/embed_sparse", {"inputs": "ba"}),
    _tei("embed/predict_unsupported", "/predict", {"inputs": "ba"}),
    _tei("embed/rerank_unsupported", "/rerank", {"query": "ba", "texts": ["de"]}),
    _tei("rerank/rerank", "/rerank", {"query": "ba de", "texts": ["fi", "go", "ba de"]}, server="rerank"),
    _tei("rerank/rerank_one", "/rerank", {"query": "ba", "texts": ["de"]}, server="rerank"),
    _tei(
        "rerank/rerank_options",
        "/rerank",
        {"query": "ba", "texts": ["fi", "go"], "return_text": True, "raw_scores": True},
        server="rerank",
    ),
    _tei("rerank/predict", "/predict", {"inputs": [["ba", "de"], ["fi", "go"]]}, server="rerank"),
    _tei_page("rerank/info", "/info", server="rerank"),
    _tei_page("rerank/metrics", "/metrics", server="rerank"),
    _tei("rerank/err_batch", "/rerank", {"query": "ba", "texts": _FORTY}, server="rerank"),
    _tei("rerank/err_empty", "/rerank", {"query": "ba", "texts": []}, server="rerank"),
    _tei("rerank/err_embed", "/embed", {"inputs": "ba"}, server="rerank"),
    _tei("rerank/err_toolong", "/rerank", {"query": "ba", "texts": [_LONG_INPUT]}, server="rerank"),
    _tei("rerank/v1_rerank", "/v1/rerank", {"query": "ba", "documents": ["de"]}, server="rerank"),
    _tei("classify/predict", "/predict", {"inputs": "ba de"}, server="classify"),
    _tei("classify/predict_batch", "/predict", {"inputs": [["ba de"], ["fi"]]}, server="classify"),
    _tei("classify/predict_raw", "/predict", {"inputs": "ba", "raw_scores": True}, server="classify"),
    _tei_page("classify/info", "/info", server="classify"),
    _tei("key/embed_key", "/embed", {"inputs": "ba"}, head=_BEARER.format("sesame"), server="guarded"),
    _tei("key/err_401", "/embed", {"inputs": "ba"}, server="guarded"),
    _tei("key/err_401_wrong", "/embed", {"inputs": "ba"}, head=_BEARER.format("wrong"), server="guarded"),
    _tei_page("key/info_401", "/info", server="guarded"),
    _tei_page("key/health_401", "/health", server="guarded"),
)
"""Requests for the recorded responses that the simulated TEI imitates. It has neither `/decode` nor `/similarity`, and
always truncates long inputs unless a request forbids that."""
