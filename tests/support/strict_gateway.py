"""A gateway that forwards only requests to the OpenAI routes (/v1/...), and only the response headers in KEPT."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

KEPT = (b"content-type", b"content-length", b"transfer-encoding")
LIMIT = 1 << 24


@dataclass(kw_only=True)
class Gateway:
    """The configuration of a gateway, and the requests that it has received."""

    backend: str
    """URL of the server behind the gateway."""
    alias: str = ""
    """Name of the model for clients, listed at /v1/models. Requests to the server contain the name `model` instead."""
    model: str = ""
    native: bool = False
    """Whether the gateway also forwards the server's native routes (/generate..., /tokenize..., /info...)."""
    pages: int | None = None
    """Maximum number of GET requests (None: no limit). Further ones get status 429."""
    hides_ids: bool = False
    """Whether the gateway replaces ids and fingerprints in responses."""
    url: str = ""
    asked: list[str] = field(default_factory=list)


@contextlib.contextmanager
def running_gateway(gateway: Gateway) -> Iterator[Gateway]:
    """Run the gateway in a separate thread, and set its `url`."""
    loop, stop = asyncio.new_event_loop(), threading.Event()
    writers = set[asyncio.StreamWriter]()

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Coroutine[Any, Any, None]:
        writers.add(writer)
        return _serve(gateway, reader, writer)

    async def serve() -> None:
        server = await asyncio.start_server(on_connection, "127.0.0.1", 0, limit=LIMIT)
        gateway.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        async with server:
            while not stop.is_set():
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.02)  # the tasks of the last accepted connections exist after this pause
        open_connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in open_connections:
            task.cancel()
        await asyncio.gather(*open_connections, return_exceptions=True)
        for writer in writers:
            writer.close()  # a task that was cancelled before it began has not closed its connection
        await asyncio.sleep(0.02)  # transports close in the next turns of the loop

    started = threading.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield gateway
    finally:
        stop.set()
        thread.join()
        loop.close()


async def _serve(gateway: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests on one client connection until the connection ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, _ = head.split(b" ", 2)
            size = re.search(rb"(?im)^content-length: *(\d+)", head)
            body = await reader.readexactly(int(size[1])) if size else b""
            await _answer(gateway, writer, method.decode(), path.decode(), body)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        writer.close()
        await writer.wait_closed()


async def _answer(gateway: Gateway, writer: asyncio.StreamWriter, method: str, path: str, body: bytes) -> None:
    gateway.asked.append(f"{method} {path}")
    if method == "GET":
        if gateway.pages is not None and _pages(gateway) > gateway.pages:
            writer.write(_whole(429, b"too many requests", b"text/plain"))
            return
        if path == "/v1/models" and gateway.alias:
            card = {"id": gateway.alias, "object": "model", "created": 0, "owned_by": "gateway"}
            writer.write(_whole(200, json.dumps({"object": "list", "data": [card]}).encode()))
            return
    if not path.startswith("/v1/") and not (gateway.native and path.startswith(("/generate", "/tokenize", "/info"))):
        writer.write(_whole(404, b"not found", b"text/html"))
        return
    if gateway.alias:
        body = body.replace(json.dumps(gateway.alias).encode(), json.dumps(gateway.model).encode())
    await _forward(gateway, writer, method, path, body)


def _pages(gateway: Gateway) -> int:
    return sum(asked.startswith("GET ") for asked in gateway.asked)


async def _forward(gateway: Gateway, writer: asyncio.StreamWriter, method: str, path: str, body: bytes) -> None:
    """Send a request to the server with new headers, and send its response to the client.

    Only the response headers in KEPT are forwarded.
    """
    address = urlsplit(gateway.backend)
    back_reader, back_writer = await asyncio.open_connection(address.hostname, address.port, limit=LIMIT)
    try:
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\n{length}Connection: close\r\n"
        back_writer.write(head.encode() + b"\r\n" + body)
        status, *lines = (await back_reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n").split(b"\r\n")
        kept = [line for line in lines if line.lower().partition(b":")[0] in KEPT]
        if not any(line.lower().startswith((b"content-length", b"transfer-encoding")) for line in kept):
            kept.append(b"content-length: 0")
        if gateway.hides_ids:  # this changes the length of the body
            whole = await back_reader.read()
            writer.write(_rewritten(status, kept, whole))
            return
        writer.write(b"\r\n".join((status, *kept, b"\r\n")))
        while piece := await back_reader.read(65536):
            writer.write(piece)
            await writer.drain()
    finally:
        back_writer.close()


def _rewritten(status: bytes, kept: list[bytes], body: bytes) -> bytes:
    """Return a response that is not chunked, in which ids and fingerprints are replaced by `gw-1`."""
    if any(line.lower().startswith(b"transfer-encoding") for line in kept):
        body = b"".join(re.findall(rb"(data: .*?\n\n)", body, re.DOTALL))
    body = re.sub(rb'"(id|system_fingerprint)":"[^"]*"', rb'"\1":"gw-1"', body)
    body = re.sub(rb',"simulated_speed":[0-9.]+', b"", body)
    others = [line for line in kept if line.lower().startswith(b"content-type")]
    return b"\r\n".join((status, *others, b"content-length: %d" % len(body), b"\r\n")) + body


def _whole(status: int, body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)
