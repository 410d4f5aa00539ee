"""Small inference servers that share no code with the product: chat only, like llama.cpp, and like SGLang.

They stream one word per token over chunked HTTP/1.1, and answer any model name. `word_count` is their tokenizer.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from zlib import crc32

TOKEN_S = 0.001
"""Time between two tokens of a response, in seconds."""
CHAT_TEMPLATE_TOKENS = 5
"""Tokens that the chat template of these servers adds to a message."""
BOS_TOKENS = 1
"""Special tokens that these servers add to a plain prompt."""

Json = dict[str, Any]


@dataclass
class SmallServer:
    """A running server, and the requests that it has received."""

    url: str
    requests: list[tuple[str, Json | None]] = field(default_factory=list)
    """Each request as `GET /path` or `POST /path`, with its JSON body."""


def word_count(text: str) -> int:
    """Return the number of tokens of a text: one per word."""
    return len(text.split())


def prompt_tokens(body: Json) -> int:
    """Return the number of prompt tokens of a completion or chat request."""
    if "messages" in body:
        return CHAT_TEMPLATE_TOKENS + sum(word_count(message["content"]) for message in body["messages"])
    prompt = body["prompt"]
    return BOS_TOKENS + word_count(prompt) if isinstance(prompt, str) else len(prompt)


def chunk(*, chat: bool, text: str, finish: str | None = None) -> Json:
    """Return one event of a streamed response."""
    content: Json = {"delta": {"content": text} if text else {}} if chat else {"text": text}
    name = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "c", "object": name, "model": "m", "choices": [{"index": 0, **content, "finish_reason": finish}]}


def openai_events(body: Json, *, reports_usage: bool) -> Iterator[Json]:
    """Yield the events of a completion or chat response."""
    chat = "messages" in body
    tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    if chat:
        yield chunk(chat=True, text="") | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    for _ in range(tokens):
        yield chunk(chat=chat, text=" word")
    yield chunk(chat=chat, text="", finish="length")
    if reports_usage and body.get("stream_options", {}).get("include_usage"):
        yield {"id": "c", "model": "m", "choices": [], "usage": usage(body, tokens)}


def usage(body: Json, output_tokens: int) -> Json:
    """Return the token counts of a response."""
    prompt = prompt_tokens(body)
    return {"prompt_tokens": prompt, "completion_tokens": output_tokens, "total_tokens": prompt + output_tokens}


def models(owner: str, **card: Any) -> Json:
    """Return a list of one model."""
    return {"object": "list", "data": [{"id": "org/model", "object": "model", "owned_by": owner, **card}]}


Route = Callable[[Json], Any]
"""Function from the JSON body of a request to the JSON of the response, or to an iterator over streamed events."""


def generation(*, reports_usage: bool) -> Route:
    """Return the route of completions or chat."""

    def answer(body: Json) -> Any:
        if body.get("stream"):
            return openai_events(body, reports_usage=reports_usage)
        tokens = body.get("max_tokens", 16)
        counts = {"usage": usage(body, tokens)} if reports_usage else {}
        return {"id": "c", "choices": [{"index": 0, "finish_reason": "length"}], **counts}

    return answer


CHAT_ONLY: dict[str, Route] = {"POST /v1/chat/completions": generation(reports_usage=False)}
"""The least that an OpenAI-style server can be: one route and no token counts."""
LLAMA_CPP: dict[str, Route] = {
    "GET /v1/models": lambda _: models("llamacpp", meta={"n_ctx_train": 4096}),
    "GET /props": lambda _: {"default_generation_settings": {"n_ctx": 4096}, "total_slots": 4, "build_info": "b9000"},
    "POST /tokenize": lambda body: {
        "tokens": [7] * (word_count(body["content"]) + BOS_TOKENS * bool(body.get("add_special")))
    },
    "POST /apply-template": lambda body: {"prompt": "<user> " + body["messages"][0]["content"] + " <end>"},
    "POST /completion": lambda body: {"content": " word", "tokens_evaluated": word_count(body["prompt"])},
    "POST /v1/completions": generation(reports_usage=True),
    "POST /v1/chat/completions": generation(reports_usage=True),
}
"""A server like `llama-server` of llama.cpp."""


def _sglang_tokenize(body: Json) -> Json:
    if "messages" in body:
        tokens = [7] * prompt_tokens(body)
    else:
        bos = [1] * (BOS_TOKENS if body.get("add_special_tokens", True) else 0)
        tokens = bos + [crc32(word.encode()) % 30_000 for word in body["prompt"].split()]
    return {"tokens": tokens, "count": len(tokens), "max_model_len": 4096}


SGLANG: dict[str, Route] = {
    "GET /v1/models": lambda _: models("sglang", root="org/model", parent=None, max_model_len=4096),
    "GET /get_model_info": lambda _: {"model_path": "org/model", "is_generation": True},
    "GET /server_info": lambda _: {"model_path": "org/model", "version": "0.5.23", "max_running_requests": None},
    "POST /tokenize": _sglang_tokenize,
    "POST /generate": lambda _: {"text": " word", "meta_info": {"prompt_tokens": 4, "completion_tokens": 1}},
    "POST /v1/completions": generation(reports_usage=True),
    "POST /v1/chat/completions": generation(reports_usage=True),
}
"""A server like SGLang 0.5."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, routes: dict[str, Route]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.routes = routes
        self.running = SmallServer(f"http://127.0.0.1:{self.server_port}")

    def handle_error(self, *_: object) -> None:
        pass  # clients close connections that they no longer need


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.respond(None)

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def respond(self, body: Json | None) -> None:
        server = self.server
        assert isinstance(server, _Server)
        name = f"{self.command} {self.path}"
        server.running.requests.append((name, body))
        answer = server.routes.get(name, lambda _: None)(body or {})
        if answer is None and f"POST {self.path}" in server.routes:
            self.send_json(405, {"detail": "Method Not Allowed"})
        elif answer is None:
            self.send_json(404, {"detail": "Not Found"})
        elif isinstance(answer, dict):
            self.send_json(200, answer)
        else:
            self.stream(answer)

    def send_json(self, status: int, value: Json) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, events: Iterator[Json]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in [*map(json.dumps, events), "[DONE]"]:
            time.sleep(TOKEN_S)
            data = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def small_server(routes: dict[str, Route]) -> Iterator[SmallServer]:
    """Serve the routes until the block ends. A GET of a POST route is answered with 405, any other request with 404."""
    server = _Server(routes)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.running
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
