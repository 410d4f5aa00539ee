"""A small HTTP server with a table of JSON responses, which replaces the routes of a real server except generation."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, str] | Callable[[Any], Any]
"""A response: (status, JSON value or bytes), optionally followed by a header line. A function may be given in place of
this tuple. It gets the JSON of the request, and returns such a tuple, or the JSON value of a response with status 200.
"""

NOT_FOUND = (404, {"detail": "Not Found"})
NOT_ALLOWED = (405, {"detail": "Method Not Allowed"})


@dataclass
class Stub:
    """The URL of the stub server, and the requests that it received."""

    url: str
    heard: list[str] = field(default_factory=list)
    """Method and path of each request in order, such as `GET /info`."""
    bodies: list[Any] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    """The Authorization header of each request, or None if it had none."""
    azure_keys: list[str | None] = field(default_factory=list)
    """The header `api-key` of each request, or None if it had none."""


@contextmanager
def answering(routes: dict[str, Answer], *, tls: ssl.SSLContext | None = None, hang_up: bool = False) -> Iterator[Stub]:
    """Run a server that answers requests from the table `routes`, whose keys are such as `GET /info`.

    A GET request to a path with only a POST route gets status 405. Any other unknown request gets status 404. If
    `hang_up` is True, the server closes each connection after one response, without the header `Connection: close`.
    """
    stub = Stub("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def reply(self, body: Any) -> None:
            asked = f"{self.command} {self.path}"
            stub.heard.append(asked)
            stub.bodies.append(body)
            stub.keys.append(self.headers["authorization"])
            stub.azure_keys.append(self.headers["api-key"])
            fallback = NOT_ALLOWED if f"POST {self.path}" in routes else NOT_FOUND
            answer = routes.get(asked, fallback)
            said = answer(body) if callable(answer) else answer
            status, content, *more = said if isinstance(said, tuple) else (200, said)
            more = [f"{line}\r\n" for line in more]
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            coding = "content-encoding: gzip\r\n" if data.startswith(b"\x1f\x8b") else ""
            length = f"content-length: {len(data)}\r\n"
            head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{coding}{''.join(more)}{length}\r\n"
            self.wfile.write(head.encode() + data)
            self.close_connection = hang_up

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # clients in these tests may close a connection at any time

    server = Server(("127.0.0.1", 0), Handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    stub.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Responses of the servers to the probe's requests. Those of vLLM 0.32.0 and LightLLM 0.0.1 were recorded.
VLLM: dict[str, Answer] = {
    "GET /version": (200, {"version": "0.32.0"}),
    "GET /v1/models": (
        200,
        b'{"object":"list","data":[{"id":"tiny","object":"model","created":1795245661,"owned_by":"vllm","root":'
        b'"model/tiny-llama","parent":null,"max_model_len":2048,"permission":[{"id":"modelperm-8cab5594905083d9",'
        b'"object":"model_permission","created":1795245661,"allow_create_engine":false,"allow_sampling":true,'
        b'"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,'
        b'"organization":"*","group":null,"is_blocking":false}]}]}',
    ),
    "POST /tokenize": (200, b'{"count":4,"max_model_len":2048,"tokens":[424,372,432,342],"token_strs":null}'),
}
VLLM_0_2: dict[str, Answer] = {
    "GET /v1/models": (200, {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]}),
}
TGI: dict[str, Answer] = {
    "GET /info": (
        200,
        {
            "model_id": "meta-llama/Llama-2-7b-chat-hf",
            "model_sha": "f5db02d",
            "max_concurrent_requests": 128,
            "max_best_of": 2,
            "max_stop_sequences": 4,
            "max_input_tokens": 3072,
            "max_total_tokens": 4096,
            "validation_workers": 2,
            "max_client_batch_size": 4,
            "router": "text-generation-router",
            "version": "3.3.6-dev0",
            "sha": "dfb3fbe7",
            "docker_label": "sha-dfb3fbe",
        },
    ),
    "GET /v1/models": (200, {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "m"}]}),
    "POST /tokenize": (200, []),
    "POST /chat_tokenize": (200, {"tokenize_response": [], "templated_text": ""}),
}
TGI_1_1: dict[str, Answer] = {
    "GET /info": (
        200,
        {
            "model_id": "bigscience/bloom-560m",
            "model_dtype": "torch.float16",
            "max_concurrent_requests": 128,
            "max_input_length": 1024,
            "max_total_tokens": 2048,
            "max_batch_total_tokens": 32000,
            "version": "1.1.1",
            "docker_label": None,
        },
    ),
}
LIGHTLLM_0_0_1: dict[str, Answer] = {
    "GET /health": (200, b'{"message":"Ok"}'),
    "GET /token_load": (200, b'{"current_load":0.0,"logical_max_load":0.0,"dynamic_max_load":0.0}'),
}
LIGHTLLM_1_0 = LIGHTLLM_0_0_1 | {
    "GET /get_model_name": (200, {"model_name": "llama"}),
    "POST /tokens": (200, {"ntokens": 1}),
}
LIGHTLLM_1_1 = LIGHTLLM_1_0 | {"POST /v1/completions": (422, {"detail": []})}
LIGHTLLM_1_2 = LIGHTLLM_1_1 | {
    "GET /get_model_name": (200, {"model_name": "default_model_name"}),
    "GET /get_server_info": (200, {"running_max_req_size": 256, "max_req_total_len": 4096, "tp": 1}),
    "GET /v1/models": (200, {"data": [{"id": "llama", "owned_by": "lightllm", "max_model_len": 4060}]}),
}
OPENAI: dict[str, Answer] = {
    "GET /v1/models": (200, {"object": "list", "data": [{"id": "gpt", "object": "model", "owned_by": "me"}]}),
}
