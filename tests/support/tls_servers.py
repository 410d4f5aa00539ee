"""Runs the TLS servers uvicorn, nginx and haproxy in front of a test application with known token send times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn

from loadgen.workloads.request import number_of_wire_id
from tests.support.tls import HOST

SentNs = dict[int, list[int]]
"""By request id, CLOCK_REALTIME in ns immediately before each token was sent."""

NGINX = """
daemon off; worker_processes 1; user root; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen {host}:{port} ssl; ssl_protocols {version};
        ssl_certificate {certificate}; ssl_certificate_key {certificate};
        location / {{ proxy_pass http://{backend}; proxy_http_version 1.1; proxy_buffering off; }}
    }}
}}
"""
HAPROXY = """
defaults
    mode http
    option http-no-delay
    timeout connect 5s
    timeout client 50s
    timeout server 50s
frontend tls
    bind fd@{descriptor} ssl crt {certificate} ssl-min-ver {version} ssl-max-ver {version}
    default_backend simulated
backend simulated
    server simulated {backend}
"""

HTTP2_HAPROXY = """
defaults
    mode http
    option http-no-delay
    timeout connect 5s
    timeout client 50s
    timeout server 50s
global
    tune.h2.max-concurrent-streams {streams}
frontend only-http2
    bind fd@{descriptor} {tls}
    {refusal}
    default_backend simulated
backend simulated
    server simulated {backend}
"""


class Completions:
    """An ASGI application with the OpenAI completions route. It records the send time of every token in `sent_ns`."""

    def __init__(self, ttft_s: float, itl_s: float) -> None:
        self._ttft_s, self._itl_s = ttft_s, itl_s
        self.sent_ns: SentNs = {}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":  # startup and shutdown
            return
        began_s = time.monotonic()
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        if scope["path"] != "/v1/completions":
            models = {"object": "list", "data": [{"id": "m", "object": "model"}]}
            await self._whole(send, 200 if scope["path"] == "/v1/models" else 404, models)
            return
        tokens = json.loads(body)["max_tokens"]
        request_id = dict(scope["headers"]).get(b"x-request-id")
        sent_ns = list[int]()
        if request_id:
            self.sent_ns[number_of_wire_id(request_id.decode())] = sent_ns
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for number in range(tokens):
            await asyncio.sleep(began_s + self._ttft_s + number * self._itl_s - time.monotonic())
            reason = "length" if number == tokens - 1 else None
            choice = {"index": 0, "text": " a", "finish_reason": reason}
            event = json.dumps({"id": "1", "object": "text_completion", "choices": [choice]})
            sent_ns.append(time.time_ns())
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": tokens + 5}
        event = json.dumps({"id": "1", "object": "text_completion", "choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": f"data: {event}\n\ndata: [DONE]\n\n".encode()})

    async def _whole(self, send: Any, status: int, answer: dict[str, Any]) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


@contextlib.contextmanager
def serving_uvicorn(app: Completions, loop: str, certificate: Path) -> Iterator[str]:
    """Serve the application with uvicorn and TLS in a thread, and yield its URL.

    `loop` is the event loop implementation: `asyncio` or `uvloop`.
    """
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        loop=loop,  # type: ignore[arg-type]
        http="h11",
        ws="none",
        lifespan="off",
        log_level="error",
        ssl_certfile=str(certificate),
    )
    server = uvicorn.Server(config)
    with socket.create_server((HOST, 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"https://{HOST}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def nginx(folder: Path, certificate: Path, backend_url: str, version: str) -> Iterator[str]:
    """Run nginx with TLS in front of a server, and yield its URL. `version` is the TLS version, such as `1.3`.

    nginx inherits a listening socket from this process, so no other process can take the port meanwhile.
    """
    with socket.create_server((HOST, 0), backlog=512) as listening:
        port = listening.getsockname()[1]
        facts = {"folder": folder, "host": HOST, "port": port, "version": f"TLSv{version}"}
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(**facts, certificate=certificate, backend=urlsplit(backend_url).netloc))
        environment = os.environ | {"NGINX": f"{listening.fileno()};"}
        with running_proxy(["nginx", "-p", str(folder), "-c", str(config)], listening, environment):
            yield f"https://{HOST}:{port}"


@contextlib.contextmanager
def haproxy(folder: Path, certificate: Path, backend_url: str, version: str) -> Iterator[str]:
    """Run haproxy with TLS in front of a server, and yield its URL. `version` is the TLS version, such as `1.3`."""
    with socket.create_server((HOST, 0), backlog=512) as listening:
        facts = {"descriptor": listening.fileno(), "version": f"TLSv{version}", "certificate": certificate}
        config = folder / "haproxy.cfg"
        config.write_text(HAPROXY.format(**facts, backend=urlsplit(backend_url).netloc))
        with running_proxy(["haproxy", "-db", "-f", str(config)], listening, {**os.environ}):
            yield f"https://{HOST}:{listening.getsockname()[1]}"


@contextlib.contextmanager
def only_http2(
    folder: Path, backend_url: str, certificate: Path | None = None, streams: int = 100, status: int | None = None
) -> Iterator[str]:
    """Run haproxy in front of a server so that it accepts only HTTP/2, and yield its URL.

    With a `certificate`, it uses TLS. `streams` is the maximum number of streams per connection. Requests in HTTP/1.1
    are answered with `status`. If it is None, their connections are closed.
    """
    with socket.create_server((HOST, 0), backlog=512) as listening:
        tls = f"ssl crt {certificate} alpn h2" if certificate else ""
        tls += "" if status else " proto h2"
        refusal = f"http-request return status {status} if {{ req.ver 1.1 }}" if status else ""
        facts = {"descriptor": listening.fileno(), "tls": tls, "streams": streams, "refusal": refusal}
        config = folder / "haproxy-http2.cfg"
        config.write_text(HTTP2_HAPROXY.format(**facts, backend=urlsplit(backend_url).netloc))
        with running_proxy(["haproxy", "-db", "-f", str(config)], listening, {**os.environ}):
            yield f"{'https' if certificate else 'http'}://{HOST}:{listening.getsockname()[1]}"


@contextlib.contextmanager
def running_proxy(command: list[str], listening: socket.socket, environment: dict[str, str]) -> Iterator[None]:
    """Run a proxy until the `with` block ends. The proxy inherits the socket `listening` from this process.

    Raises AssertionError if the proxy is not installed or has ended too early.
    """
    program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, f"{command[0]} is missing: `make test-system` installs it"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [program, *command[1:]], pass_fds=[listening.fileno()], env=environment, stdout=pipe, stderr=subprocess.STDOUT
    )
    try:
        yield
        assert process.poll() is None, process.communicate()[0]
    finally:
        process.terminate()
        process.communicate()
