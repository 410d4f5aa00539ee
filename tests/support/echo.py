"""A hostile imitation of vLLM, which repeats the API key of a request in every part of its responses.

Tests use it to check that loadgen never writes the key to a file or to the terminal.
"""

from __future__ import annotations

import html
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

SECRET = 'sk-Live/42"&+<x>-aBcDeFgHiJkLmNoP'
"""An API key with the characters that JSON, URLs or HTML escape."""
STREAM = (
    'data: {"choices":[{"index":0,"text":"a","finish_reason":"length","token_ids":[5]}]}\n\n',
    'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":1}}\n\n',
    "data: [DONE]\n\n",
)
SPELLINGS = (
    SECRET,
    json.dumps(SECRET)[1:-1],
    quote(SECRET, safe=""),
    html.escape(SECRET),
    SECRET.lower(),
    SECRET[:16],
    SECRET[-16:],
)
"""Texts that must not appear in any file or on the terminal. The last two are the parts of a truncated key."""
ESCAPE = "\x1b]0;owned\x07\x1b[31m\r\u202e\x9b2J"
"""Control characters that must not reach a terminal: OSC, BEL, CSI, a carriage return, a bidi override, C1."""


@dataclass
class Echo:
    """The URL of the hostile server, and a record of its responses.

    For each POST request other than /tokenize, `generated` contains the name of the response in ANSWERS.
    """

    url: str
    generated: list[str] = field(default_factory=list)
    heard: int = 0
    """Number of requests to any route."""


def _reply(status: str, body: bytes, *more: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *more])
    return head.encode("utf-8", "replace") + b"\r\n\r\n" + body


def _stream(*events: str, status: str = "200 OK", more: tuple[str, ...] = ()) -> bytes:
    return _reply(status, "".join(events).encode(), "content-type: text/event-stream", *more)


def _json(said: object) -> str:
    return f"data: {json.dumps(said)}\n\n"


ANSWERS: dict[str, Callable[[str, str], bytes]] = {
    "message": lambda said, _: _reply("500 X", json.dumps({"error": {"message": f"no {said}", "type": said}}).encode()),
    "text": lambda said, _: _reply(f"502 {said}", f"who is {said}?".encode()),
    "page": lambda said, _: _reply("503 X", f"<html><title>{html.escape(said)}</title>{quote(said)}</html>".encode()),
    "cut": lambda said, body: _reply("400 X", (f"{'x' * 190}{said}{'y' * 400}{body}" + said).encode()),
    "headers": lambda said, _: _stream(_json({}), more=(f"content-encoding: {said}", f"x-echo: {said}")),
    "in-band": lambda said, body: _stream(f": {said}\n\n", _json({"error": {"message": said + body, "code": 500}})),
    "no event": lambda said, _: _stream(f"data: {said} is no JSON\n\n"),
    "no stream": lambda said, _: _stream(f"sorry, {said}"),
    "no HTTP": lambda said, _: f"{said} HTTP/1.1 200 OK\r\n\r\n".encode(),
    "reason": lambda said, _: _stream(*(each.replace("length", json.dumps(said)[1:-1]) for each in STREAM)),
    "halved": lambda said, _: _reply("500 X", f"key {said[:20]}".encode()),
    "complete": lambda said, _: _stream(f": {said}\n\n", *STREAM, more=(f"x-echo: {said}",)),
}


@contextmanager
def echoing(words: str = "") -> Iterator[Echo]:
    """Run the hostile server. Its responses contain the API key of the request, followed by `words`."""
    echo = Echo("")
    kinds = iter([*ANSWERS, *(["complete"] * 1000)])

    class Handler(BaseHTTPRequestHandler):
        def said(self) -> str:
            echo.heard += 1
            return self.headers["authorization"].removeprefix("Bearer ") + words

        def answer(self, bytes_: bytes) -> None:
            self.wfile.write(bytes_)
            self.close_connection = True

        def do_GET(self) -> None:
            said = self.said()
            card = {"id": f"tiny {said}", "owned_by": "vllm", "root": said, "max_model_len": 2048}
            pages = {"/version": {"version": f"0.32.0 {said}"}, "/v1/models": {"object": "list", "data": [card]}}
            if self.path == "/metrics":
                gauge = f'vllm:num_requests_running{{model_name="{said}"}} {said}\n'
                self.answer(_reply("200 OK", ("# TYPE vllm:num_requests_running gauge\n" + gauge).encode()))
            else:
                status = "200 OK" if self.path in pages else f"{405 if self.path == '/tokenize' else 404} {said}"
                self.answer(_reply(status, json.dumps(pages.get(self.path, said)).encode()))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            if self.path == "/tokenize":
                said = {"count": 4, "max_model_len": 2048, "tokens": [1, 2, 3, 4], "token_strs": [self.said()]}
                self.answer(_reply("200 OK", json.dumps(said).encode()))
            else:
                echo.generated.append(next(kinds))
                self.answer(ANSWERS[echo.generated[-1]](self.said(), body))

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    echo.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield echo
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def leaks(folder: Path, *texts: str) -> list[str]:
    """Return where the secret appears, in any of SPELLINGS: in files below `folder`, and in `texts`.

    An entry of the result names the file or the text, and the spelling.
    """
    places = {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    places |= {f"text {number}": text.encode() for number, text in enumerate(texts)}
    return [f"{place}: {each}" for place, content in places.items() for each in SPELLINGS if each.encode() in content]
