"""What all simulated servers do with a request: routes, the key, faults, admission, and bytes on the connection.

aiohttp parses requests and keeps connections; answers are written here, byte by byte as the real server's, because the
head of a response, its order and its spelling are part of a protocol too.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.web_request import BaseRequest

from servers.simulated import ConfigError
from servers.simulated.faults import FAULTS, HEADER, NONE, fault_of, parse_fault
from servers.simulated.protocol import (
    JSON_TYPE,
    TEXT_TYPE,
    CompletionRequest,
    Encoding,
    ErrorReply,
    Headers,
    Reply,
    ok,
)
from servers.simulated.state import ServerState
from servers.simulated.stream import Ending, LogLine, Pump, Stream, reset
from servers.simulated.timing import Policy

STATUS_PATH = "/simulated/status"
"""The one page that no real server has: this is how our own probe knows."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_WAIT_S, _WAIT_GROWS, _LONGEST_WAIT_S = 0.1, 1.1, 1.0
"""How LightLLM polls for a free slot (httpserver/manager.py)."""
_HEAD_PIECES = 20
_SLOW_HEAD_MS = 1000
_LIE_BYTES = 1 << 20
"""So many bytes more than come are promised by the fault `content-length`."""

Generate = Callable[[ServerState, CompletionRequest], Encoding]
"""Raises ErrorReply."""
Page = Callable[[ServerState, Mapping[str, Any]], Reply]
"""From the fields of the body; they are empty where it is no JSON object. Raises ErrorReply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProtocol:
    """One server kind's side of HTTP, and how its engine batches: all that makes a simulated server that kind."""

    before: str
    """Head lines of every answer, ahead of its own headers; `{date}` is filled in."""
    after: str
    """The same, behind them."""
    stream_headers: Headers
    keep_alive_s: float
    body_limit: int
    """In bytes; a larger body gets `too_large`."""
    generate: Mapping[str, Generate]
    """POST routes that make tokens."""
    pages: Mapping[tuple[str, str], Page]
    """(method, path) to everything else."""
    bad_type: Reply | None
    """Answer to a POST whose content type is not JSON; None: the server does not mind."""
    bad_json: Callable[[str, int], Reply]
    """(message, position) of what Python's json module says about a body."""
    too_large: Reply
    failure: Callable[[int], Reply]
    """An answer with status 429, 500 or 503 in the server's own words."""
    overloaded: Callable[[Encoding], Reply] | None
    """Refusal past the limit on concurrent requests; None: the server lets them wait."""
    guarded: Callable[[str], bool]
    """Paths that want the API key."""
    unauthorized: Reply
    default_limit: int | None
    """Of concurrent requests."""
    not_found: Reply = field(default_factory=lambda: Reply(b'{"detail":"Not Found"}', 404))
    """As FastAPI says it, and the next likewise."""
    not_allowed: Callable[[str], Reply] = lambda methods: Reply(
        b'{"detail":"Method Not Allowed"}', 405, (("allow", methods), *JSON_TYPE)
    )
    """The methods that the path has, to an answer for one that it has not."""
    limits_batch: bool = False
    """That limit is the engine's running limit too: one option of the real server is both."""
    policy: Policy
    buckets: Callable[[int], Mapping[str, Any]]
    """The longest prompt plus output to the bucket bounds of every histogram on the metrics page."""


def fixed(reply: Reply) -> Page:
    """A page that always says the same."""
    return lambda _state, _fields: reply


class HttpServer:
    """Answers requests in the manner of one server."""

    def __init__(self, state: ServerState, protocol: ServerProtocol, pump: Pump) -> None:
        self.state = state
        self.protocol = protocol
        self.pump = pump
        self._exchanges = 0
        self._keep, self._close = Written(keep_alive=True), Written(keep_alive=False)
        self._dated_s = 0
        self._before = self._after = b""

    async def answer(self, request: BaseRequest) -> web.StreamResponse:
        """The handler of aiohttp's low-level server."""
        received_ns = time.monotonic_ns()
        makes_tokens = request.method == "POST" and request.path in self.protocol.generate
        try:
            body = await self._body(request)
            fields = self._fields(request, body, strict=request.method == "POST" and bool(body or makes_tokens))
            if not makes_tokens:
                return self._write(request, self._page(request, fields))
            self._exchanges += 1
            ended = await CompletionHandler(self, request, received_ns, self._exchanges - 1).run(fields)
            if isinstance(ended, Reply):
                return self._write(request, ended)
            return self._keep if ended and request.keep_alive else self._close
        except ErrorReply as refused:
            return self._write(request, refused.reply)

    def head(self, request: BaseRequest, reply: Reply, length: int) -> bytes:
        """Status line and headers, in the server's own order. A chunked answer has no length."""
        if (now_s := int(time.time())) != self._dated_s:  # the lines that every answer has are remade once a second
            date, self._dated_s = formatdate(now_s, usegmt=True), now_s
            self._before = self.protocol.before.format(date=date).encode()
            self._after = self.protocol.after.format(date=date).encode()
        phrase = HTTPStatus(reply.status).phrase.encode()
        lines = [b"HTTP/1.1 %d %b\r\n" % (reply.status, phrase), self._before]
        measured = reply.chunked
        for name, value in reply.headers:
            if name == "content-type" and not measured:
                lines.append(b"content-length: %d\r\n" % length)
                measured = True
            lines.append(f"{name}: {value}\r\n".encode("latin-1"))
        if not measured:
            lines.append(b"content-length: %d\r\n" % length)
        lines.append(self._after)
        if reply.chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not request.keep_alive:
            lines.append(b"connection: close\r\n")
        return b"".join([*lines, b"\r\n"])

    def _write(self, request: BaseRequest, reply: Reply) -> web.StreamResponse:
        body = reply.body if request.method != "HEAD" else b""
        if reply.chunked:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        transport_of(request).write(self.head(request, reply, len(reply.body)) + body)
        return self._keep if request.keep_alive else self._close

    async def _body(self, request: BaseRequest) -> bytes:
        """The request's body, after all that is checked before reading it. Raises ErrorReply."""
        protocol, key = self.protocol, self.state.config.api_key
        if key and protocol.guarded(request.path):
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode()):
                raise ErrorReply(protocol.unauthorized)
        if (request.content_length or 0) > protocol.body_limit:
            raise ErrorReply(protocol.too_large)
        if request.headers.get("Expect", "").lower() == "100-continue":
            transport_of(request).write(_CONTINUE)
        pieces: list[bytes] = []
        while piece := await request.content.readany():
            pieces.append(piece)
            if sum(map(len, pieces)) > protocol.body_limit:
                raise ErrorReply(protocol.too_large)
        return b"".join(pieces)

    def _fields(self, request: BaseRequest, body: bytes, *, strict: bool) -> Mapping[str, Any]:
        """The JSON object in a body; empty where it is something else.

        With `strict` raises ErrorReply, with the words and the place that Python's own parser has for a broken body.
        """
        bad_type = self.protocol.bad_type
        if strict and bad_type is not None and not request.content_type.endswith("json"):
            raise ErrorReply(bad_type)
        try:
            found = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            if strict:
                raise ErrorReply(self.protocol.bad_json(*_what_is_wrong(body))) from None
            return {}
        return found if isinstance(found, dict) else {}

    def _page(self, request: BaseRequest, fields: Mapping[str, Any]) -> Reply:
        method, path, pages = request.method, request.path, self.protocol.pages
        self.state.settle()
        if (method, path) == ("GET", STATUS_PATH):
            return ok(status(self.state, self.pump))
        if page := pages.get((method, path)):
            return page(self.state, fields)
        others = {known for known, known_path in pages if known_path == path}
        others |= {"POST"} if path in self.protocol.generate else set()
        return self.protocol.not_allowed(", ".join(sorted(others))) if others else self.protocol.not_found


class CompletionHandler:
    """One request for tokens, from its body, which has been read, to the line in the log."""

    def __init__(self, server: HttpServer, request: BaseRequest, received_ns: int, index: int) -> None:
        self._server = server
        self._state, self._protocol = server.state, server.protocol
        self._request = request
        self._transport = transport_of(request)
        self._index = index
        request_id = request.headers.get("X-Request-Id", "").encode("utf-8", "replace").decode()
        self._line = LogLine(request_id, received_ns)
        self._behaviour = NONE
        self._at: int | None = None
        """K of the fault."""

    async def run(self, fields: Mapping[str, Any]) -> Reply | bool:
        """The whole exchange. Returns an answer that is still to be written, or whether the connection can go on."""
        self._choose_fault()
        behaviour = self._behaviour
        if behaviour.refuses:
            self._refuse("refused")
            reset(self._transport)
            return False
        if behaviour.status is not None:
            self._refuse("failed")
            return self._protocol.failure(behaviour.status)
        encoding = self._encoding(fields)
        stream = Stream(encoding, self._transport, self._line, await self._admission(encoding))
        if behaviour.detour is not None:
            stream.detour = partial(behaviour.detour, stream.total // 2 if self._at is None else self._at)
        return await self._answer(stream)

    def _choose_fault(self) -> None:
        """The client's own wish, or what the rules say."""
        wish, config = self._request.headers.get(HEADER), self._state.config
        try:
            fault = parse_fault(wish) if wish is not None else fault_of(config.faults, config.seed, self._index)
        except ConfigError as problem:
            raise ErrorReply(Reply(str(problem).encode(), 400, TEXT_TYPE)) from None
        if fault is not None:
            self._line.fault, self._behaviour, self._at = fault.name, FAULTS[fault.name], fault.at

    def _encoding(self, fields: Mapping[str, Any]) -> Encoding:
        """Raises ErrorReply with the server's own words when the request is not one it would take."""
        make = self._protocol.generate[self._request.path]
        request = CompletionRequest(self._index, fields, int(time.time()), stop_after=None)
        try:
            encoding = make(self._state, request)
        except ErrorReply:
            self._refuse("validation")
            raise
        if self._behaviour.stops_early:
            at = self._at or max(1, encoding.completion.asked_tokens // 2)
            return make(self._state, replace(request, stop_after=at))
        return replace(encoding, opening=()) if self._behaviour.role_first else encoding

    async def _admission(self, encoding: Encoding) -> int:
        """Waits for a place or raises ErrorReply, as the server does. Returns the instant from which tokens count."""
        limit = self._state.config.max_concurrent_requests
        arrived_ns, wait_s = self._line.received_ns, _FIRST_WAIT_S
        while limit is not None and len(self._state.streams) >= limit:
            if self._protocol.overloaded is not None:
                self._refuse("overloaded")
                raise ErrorReply(self._protocol.overloaded(encoding))
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * _WAIT_GROWS, _LONGEST_WAIT_S)
            arrived_ns = time.monotonic_ns()
        return arrived_ns

    async def _answer(self, stream: Stream) -> Reply | bool:
        state, streamed = self._state, stream.completion.streamed
        state.requests += 1
        state.streams.add(stream)
        try:
            if streamed:  # real servers send the head at once, long before the first token
                stream.chunked = not self._behaviour.lying_length
                headers = self._protocol.stream_headers + stream.encoding.head
                await self._send_head(stream, Reply(headers=headers, chunked=stream.chunked), _LIE_BYTES)
                if self._behaviour.role_first and stream.encoding.role_only:
                    stream.send(stream.framed(list(stream.encoding.role_only)))
            self._server.pump.submit(stream)
            ending = await stream.finished
            if not streamed:
                return await self._whole(stream, ending)
            if self._behaviour.lying_length:
                self._transport.close()
            return not self._behaviour.lying_length and ending in ("complete", "truncated", "failed")
        except OSError:  # the client has gone before its answer began
            return False
        finally:
            state.streams.discard(stream)
            self._server.pump.cancel(stream)
            state.end(self._line, stream)

    async def _send_head(self, stream: Stream, reply: Reply, length: int) -> None:
        head = self._server.head(self._request, reply, length)
        if not self._behaviour.slow_head:
            stream.send(head)
            return
        whole_ms = _SLOW_HEAD_MS if self._at is None else self._at
        step = -(-len(head) // _HEAD_PIECES)
        for start in range(0, len(head), step):
            stream.send(head[start : start + step])
            await asyncio.sleep(whole_ms / 1e3 / _HEAD_PIECES)
        stream.job.arrived_ns = time.monotonic_ns()

    async def _whole(self, stream: Stream, ending: Ending) -> Reply | bool:
        """The answer of a request that is not streamed, once its last token is due."""
        if ending in ("reset", "cut", "stall"):
            return False
        if ending == "failed":
            return self._protocol.failure(500)
        reply = stream.encoding.answer((time.monotonic_ns() - self._line.received_ns) / 1e9)
        length, body = len(reply.body), reply.body
        if self._behaviour.breaks_json:
            length, body = length // 2, body[: length // 2]
        elif self._behaviour.lying_length:
            length += _LIE_BYTES
        elif ending == "truncated":
            body = body[: length // 2]
        await self._send_head(stream, reply, length)
        self._server.pump.send(stream, body, stream.count, stream.held_due_ns)
        if len(body) < length:
            self._transport.close()
            return False
        return True

    def _refuse(self, kind: str) -> None:
        self._state.requests += 1
        self._state.refused[kind] += 1
        self._state.end(self._line)


class Written(web.StreamResponse):
    """Tells aiohttp that the answer has been written, and whether the connection can take another request."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._alive = keep_alive

    @property
    def keep_alive(self) -> bool:
        return self._alive

    async def prepare(self, request: BaseRequest) -> AbstractStreamWriter | None:  # noqa: ARG002 - the base class's shape
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        pass


def status(state: ServerState, pump: Pump) -> dict[str, Any]:
    """How the server is doing, for STATUS_PATH, the log's last line and the command line's last words."""
    told = {name: getattr(state.config, name) for name in ("server", "model", "clock", "speed")}
    return told | {"requests": state.requests, "active": len(state.streams)} | pump.lateness.figures()


def _what_is_wrong(body: bytes) -> tuple[str, int]:
    """Python's own words for a body that is not JSON, and the place."""
    try:
        json.loads(body)
    except json.JSONDecodeError as problem:
        return problem.msg, problem.pos
    except ValueError as problem:
        return str(problem), 0
    return "not JSON", 0


def transport_of(request: BaseRequest) -> asyncio.Transport:
    """The request's connection. Raises ConnectionResetError when it is gone."""
    if request.transport is None:
        raise ConnectionResetError
    return request.transport
