"""What all simulated servers do with a request: routes, the key, faults, admission, and bytes on the connection.

aiohttp parses requests and keeps connections; answers are written here, byte by byte as the real server's, because the
head of a response, its order and its spelling are part of a protocol too.
"""

from __future__ import annotations

import hmac
import json
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.web_request import BaseRequest

from servers.simulated.exchange import Exchange, transport_of
from servers.simulated.ledger import Ledger
from servers.simulated.stream import Pump
from servers.simulated.wire import Refused, Reply, Site, Wire

STATUS_PATH = "/simulated/status"
"""The one page that no real server has: this is how our own probe knows."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Http:
    """Answers requests in the manner of one server."""

    def __init__(self, site: Site, wire: Wire, pump: Pump, ledger: Ledger) -> None:
        self._site = site
        self._wire = wire
        self._pump = pump
        self._ledger = ledger
        self._exchanges = 0
        self._keep, self._close = Written(keep_alive=True), Written(keep_alive=False)
        self._dated = (0, b"", b"")

    async def answer(self, request: BaseRequest) -> web.StreamResponse:
        """The handler of aiohttp's low-level server."""
        received_ns = time.monotonic_ns()
        makes_tokens = request.method == "POST" and request.path in self._wire.generate
        try:
            body = await self._body(request)
            asked = self._json(request, body) if request.method == "POST" and (body or makes_tokens) else None
            if not makes_tokens:
                return self.write(request, self._page(request, body))
            exchange = Exchange(self._site, self._wire, self._pump, self._ledger, request, received_ns, self.head)
            self._exchanges += 1
            ended = await exchange.run(self._exchanges - 1, asked if isinstance(asked, dict) else {})
            return self.write(request, ended) if isinstance(ended, Reply) else self.done(request, alive=ended)
        except Refused as refused:
            return self.write(request, refused.reply)

    def write(self, request: BaseRequest, reply: Reply) -> web.StreamResponse:
        """Writes a whole answer."""
        body = reply.body if request.method != "HEAD" else b""
        if reply.chunked:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        transport_of(request).write(self.head(request, reply, len(reply.body)) + body)
        return self.done(request, alive=True)

    def head(self, request: BaseRequest, reply: Reply, length: int) -> bytes:
        """Status line and headers, in the server's own order. A chunked answer has no length."""
        before, after = self._date_lines()
        lines = [b"HTTP/1.1 %d %b\r\n" % (reply.status, _phrase(reply.status)), before]
        measured = reply.chunked
        for name, value in reply.headers:
            if name == "content-type" and not measured:
                lines.append(b"content-length: %d\r\n" % length)
                measured = True
            lines.append(f"{name}: {value}\r\n".encode("latin-1"))
        if not measured:
            lines.append(b"content-length: %d\r\n" % length)
        lines.append(after)
        if reply.chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not request.keep_alive:
            lines.append(b"connection: close\r\n")
        return b"".join([*lines, b"\r\n"])

    def done(self, request: BaseRequest, *, alive: bool) -> web.StreamResponse:
        """What aiohttp gets when the answer is on its way already."""
        return self._keep if alive and request.keep_alive else self._close

    async def _body(self, request: BaseRequest) -> bytes:
        """The request's body, after all that is checked before reading it. Raises Refused."""
        wire = self._wire
        if self._site.config.api_key and wire.guarded(request.path) and not self._authorized(request):
            raise Refused(wire.unauthorized)
        if (request.content_length or 0) > wire.body_limit:
            raise Refused(wire.too_large)
        if request.headers.get("Expect", "").lower() == "100-continue":
            transport_of(request).write(_CONTINUE)
        pieces: list[bytes] = []
        while piece := await request.content.readany():
            pieces.append(piece)
            if sum(map(len, pieces)) > wire.body_limit:
                raise Refused(wire.too_large)
        return b"".join(pieces)

    def _authorized(self, request: BaseRequest) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._site.config.api_key.encode())

    def _json(self, request: BaseRequest, body: bytes) -> Any:
        bad_type = self._wire.bad_type
        if bad_type is not None and not request.content_type.endswith("json"):
            raise Refused(bad_type)
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise Refused(self._wire.bad_json(*_json_problem(body))) from None

    def _page(self, request: BaseRequest, body: bytes) -> Reply:
        method, path, pages = request.method, request.path, self._wire.pages
        self._ledger.settle()
        if (method, path) == ("GET", STATUS_PATH):
            return Reply(msgspec.json.encode(status(self._site, self._pump)))
        page = pages.get((method, path))
        if page is not None:
            return page(self._site, body)
        others = [known for known, known_path in pages if known_path == path]
        others += ["POST"] if path in self._wire.generate else []
        return self._wire.not_allowed(", ".join(sorted(set(others)))) if others else self._wire.not_found

    def _date_lines(self) -> tuple[bytes, bytes]:
        """The lines that every answer has, remade once a second."""
        now_s = int(time.time())
        if now_s != self._dated[0]:
            date = formatdate(now_s, usegmt=True)
            before, after = self._wire.before.format(date=date), self._wire.after.format(date=date)
            self._dated = (now_s, before.encode(), after.encode())
        return self._dated[1:]


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


def status(site: Site, pump: Pump) -> dict[str, Any]:
    """How the server is doing, for STATUS_PATH, the log's last line and the command line's last words."""
    late, config = pump.lateness, site.config
    return {
        "server": config.server,
        "model": config.model,
        "clock": config.clock,
        "speed": config.speed,
        "requests": site.metrics.requests,
        "active": len(site.streams),
        "events": late.events(),
        "late_ns": {"p50": late.percentile_ns(50), "p99": late.percentile_ns(99), "max": late.max_ns},
        "late_events": late.late_events(),
        "falling_behind": late.falling_behind(),
    }


def _json_problem(body: bytes) -> tuple[str, int]:
    """The words and the place that Python's own parser has for a broken body."""
    try:
        json.loads(body)
    except json.JSONDecodeError as problem:
        return problem.msg, problem.pos
    except ValueError as problem:
        return str(problem), 0
    return "not JSON", 0


def _phrase(status_code: int) -> bytes:
    return HTTPStatus(status_code).phrase.encode()
