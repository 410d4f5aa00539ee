"""A simulated server as a whole: its side of HTTP, and how one is started, here or in a process of its own.

aiohttp parses requests and keeps connections; answers are written here, byte by byte as the real server's, because the
head of a response, its order and its spelling are part of a protocol too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import importlib
import signal
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from itertools import count
from typing import Any, cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.web_request import BaseRequest

from loadgen.servers import marks
from loadgen.servers.backends import BACKENDS
from loadgen.servers.hardware import HardwareError
from loadgen.servers.lifeline import end_with_parent
from loadgen.servers.simulated import ConfigError, SimulatedError
from loadgen.servers.simulated.config import SimulatedConfig, fault_for, parse_fault
from loadgen.servers.simulated.process import READY
from loadgen.servers.simulated.protocol import TEXT_TYPE, CompletionRequest, Encoding, ErrorReply, Reply, ok
from loadgen.servers.simulated.scheduler import Job
from loadgen.servers.simulated.state import ServerProtocol, ServerState, realtime_offset_ns
from loadgen.servers.simulated.stream_sender import FAULTS, WHOLE, Ending, LogLine, Stream, StreamSender, reset
from loadgen.servers.simulated.token_clock import BatchingClock, ScriptClock, TokenClock
from loadgen.servers.wire.timestamps import PLAIN, RETRY_S

STATUS_PATH = "/simulated/status"  # the one page that no real server has: this is how our own probe knows

_FIRST_WAIT_S, _WAIT_GROWS, _LONGEST_WAIT_S = 0.1, 1.1, 1.0  # LightLLM polls for a free slot (httpserver/manager.py)
_HEAD_PIECES, _SLOW_HEAD_MS = 20, 1000
_LIE_BYTES = 1 << 20  # so many bytes more than come are promised by the fault `content-length`
_BACKLOG = 4096
_LEAVE_LIMIT_S = 0.05  # for answers on their way when the server stops (zero would mean for ever, to aiohttp)
_YOUNG_ONLY = (10_000, 1_000, 1_000)  # collections by themselves take below a millisecond; state.py has the full ones


def find_protocol(server: str, version: str = "") -> ServerProtocol:
    """What makes a simulated server this kind and version: the value that its kind names, imported when needed."""
    kind = BACKENDS[server]
    module, _, name = (kind.simulated_versions[version] if version else kind.simulated).partition(":")
    protocol: ServerProtocol = getattr(importlib.import_module(module), name)
    return protocol


async def serve(config: SimulatedConfig, *, ready: Callable[[str], None], stop: asyncio.Event) -> dict[str, Any]:
    """Serves until `stop` is set; returns the last status. `ready` takes the URL once connections are accepted. Raises
    OSError when the port is taken, ConfigError for a card or model that is not known."""
    protocol, loop = find_protocol(config.server, config.server_version), asyncio.get_running_loop()
    limit = config.max_concurrent_requests or protocol.default_limit
    clock, longest = _clock(config, protocol, limit)
    config = replace(config, max_concurrent_requests=limit, max_model_len=longest)
    pump, state = StreamSender(clock, loop), ServerState(config, protocol.buckets, clock.gauges)
    http, kept_s = HttpServer(state, protocol, pump), protocol.keep_alive_s
    handler = web.Server(http.answer, handler_cancellation=True)
    connection = partial(ClientConnection, http, handler, loop=loop, keepalive_timeout=kept_s, access_log=None)
    try:
        listening = await loop.create_server(connection, config.host, config.port, backlog=_BACKLOG)
        try:
            if config.log and config.clock == "script":  # an engine takes a request when it has read it
                from loadgen.servers.simulated.arrivals import open_arrivals  # and with it NumPy, 0.1 s

                http.stamps = open_arrivals(listening.sockets[0])
            host, port = listening.sockets[0].getsockname()[:2]
            ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            await stop.wait()
        finally:
            listening.close()
            await handler.shutdown(_LEAVE_LIMIT_S)
    finally:
        pump.timer.close()
        http.stamps.close()
        summary = http.status()
        state.close(summary)
    return summary


def run(config: SimulatedConfig, *, until_stdin_closes: bool = False) -> dict[str, Any]:
    """Serves in this process until SIGTERM or Ctrl-C, and says so on standard output; returns the last status."""
    import uvloop

    def ready(url: str) -> None:
        gc.set_threshold(*_YOUNG_ONLY)
        gc.collect()
        gc.freeze()  # what exists now lives as long as the server: no collection need look at it again
        sys.stdout.write(f"{READY}{url}\n")
        sys.stdout.flush()

    with contextlib.closing(uvloop.new_event_loop()) as loop:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        if until_stdin_closes:
            loop.add_reader(sys.stdin.fileno(), stop.set)
        return loop.run_until_complete(serve(config, ready=ready, stop=stop))


def child() -> None:
    """Serve in a child process. Its standard input has the config, in one line, and ends when the parent ends."""
    end_with_parent(pipe=sys.stdin.fileno())
    line = sys.stdin.buffer.readline()
    try:
        run(SimulatedConfig.from_json(line), until_stdin_closes=True)
    except (SimulatedError, OSError) as problem:
        sys.exit(f"loadgen: {problem}")


def _clock(config: SimulatedConfig, protocol: ServerProtocol, limit: int | None) -> tuple[TokenClock, int]:
    """The clock, and the longest prompt plus output that it can hold. Raises ConfigError."""
    if config.clock == "script":
        times_s = (config.ttft_s, config.itl_s, config.jitter_s)
        ttft_ns, itl_ns, jitter_ns = (round(time_s * 1e9 / config.speed) for time_s in times_s)
        return ScriptClock(ttft_ns, itl_ns, jitter_ns, config.tokens_per_event, config.seed), config.max_model_len
    from loadgen.servers.simulated.scheduler_presets import find_engine  # and with it NumPy, which a script needs not

    tensor = config.tensor_parallel
    try:
        engine = find_engine(config.server, config.vintage)
        deployment = engine.deployment(config.gpu, config.model_shape, tensor=tensor, file=config.hardware)
        kv_tokens = config.kv_tokens or engine.kv_tokens(deployment)
    except HardwareError as problem:
        raise ConfigError(str(problem)) from None
    policy = engine.policy_for(kv_tokens, limit if protocol.limits_batch else None)
    longest = min(config.max_model_len, policy.longest(kv_tokens))
    return BatchingClock(policy, kv_tokens, engine.step_time(deployment), config.speed), longest


class ClientConnection(web.RequestHandler):
    """Counts what comes: for a source of stamps (loadgen.servers.wire.timestamps) the request that was read is a
    Received."""

    def __init__(self, http: HttpServer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._http, self._came, self.begins, self.watched = http, 0, 0, None
        self.sizes, self.user, self.kernel, self.read_ends = array("q", [0]), array("q"), bytearray(), list[int]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.watched = self._http.stamps.watch(transport.get_extra_info("socket"))
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._came += len(data)
        self._http.stamps.collect()
        super().data_received(data)

    def read(self, received_ns: int) -> None:
        """A request has been read, whose head this process had at that instant."""
        self.begins, self.sizes, self.user = self.sizes[0], array("q", [self._came]), array("q", [received_ns])
        if self.watched is not None:
            self.watched.discard_before(self.begins)

    def offsets(self, places: Sequence[int]) -> list[int]:
        """These places, which are counted from the connection's first byte."""
        return [*places]


class HttpServer:
    """Answers requests in the manner of one server."""

    def __init__(self, state: ServerState, protocol: ServerProtocol, pump: StreamSender) -> None:
        self.state, self.protocol, self.pump = state, protocol, pump
        self.stamps = PLAIN  # of when requests came
        until_due_s = (state.config.ttft_s - state.config.jitter_s) / state.config.speed  # of a first token
        self.patience_ns = round((until_due_s - RETRY_S) * 1e9)
        self.numbers = count()  # of the requests for tokens
        self.began_ns = time.monotonic_ns()
        self._keep, self._close = Written(keep_alive=True), Written(keep_alive=False)
        self._dated_s = 0
        self._before = self._after = b""
        self._mark = ": ".join(marks.header(state.config.speed))

    async def answer(self, request: BaseRequest) -> web.StreamResponse:
        """The handler of aiohttp's low-level server."""
        received_ns = time.monotonic_ns()
        makes_tokens = request.method == "POST" and request.path in self.protocol.generate
        try:
            body = await self._body(request)
            cast(ClientConnection, request.protocol).read(received_ns)
            fields = self._fields(request, body, strict=request.method == "POST" and bool(body or makes_tokens))
            if makes_tokens:
                ended = await CompletionHandler(self, request, received_ns).run(fields)
            else:
                ended = self._page(request, fields)
        except ErrorReply as refused:
            ended = refused.reply
        if isinstance(ended, Reply):
            data = ended.body if request.method != "HEAD" else b""
            if ended.chunked:
                data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
            if ended.cut:
                transport_of(request).write(self.head(request, ended, 0))
                transport_of(request).close()
                return self._close
            transport_of(request).write(self.head(request, ended, len(ended.body)) + data)
        return self._keep if ended and request.keep_alive else self._close

    def head(self, request: BaseRequest, reply: Reply, length: int) -> bytes:
        """Status line and headers, in the server's own order. A chunked answer has no length."""
        if (now_s := int(time.time())) != self._dated_s:  # the lines that every answer has are remade once a second
            date, self._dated_s = formatdate(now_s, usegmt=True), now_s
            self._before = self.protocol.before.format(date=date).encode()
            self._after = f"{self.protocol.after.format(date=date)}{self._mark}\r\n".encode()
        headers = [f"{name}: {value}\r\n".encode("latin-1") for name, value in reply.headers]
        phrase = self.protocol.phrases.get(reply.status) or HTTPStatus(reply.status).phrase
        first = b"HTTP/1.1 %d %b\r\n" % (reply.status, phrase.encode())
        size = b"transfer-encoding: chunked\r\n" if reply.chunked else b"content-length: %d\r\n" % length
        closing = b"" if request.keep_alive else b"connection: close\r\n"
        after = b"" if reply.outermost else self._after
        if self.protocol.hyper:  # axum states the length of a body that it knows, hyper all else, behind the rest
            if reply.chunked:
                return b"".join([first, *headers, after, closing, size, self._before, b"\r\n"])
            if not length:
                return b"".join([first, after, *headers, closing, size, self._before, b"\r\n"])
            return b"".join([first, *headers, after, size, closing, self._before, b"\r\n"])
        if reply.chunked:
            return b"".join([first, self._before, *headers, after, size, closing, b"\r\n"])
        names = [name for name, _ in reply.headers]
        index = names.index("content-type") if "content-type" in names else len(names)
        headers.insert(index, size)  # ahead of the content type, where there is one
        return b"".join([first, self._before, *headers, after, closing, b"\r\n"])

    async def _body(self, request: BaseRequest) -> bytearray:
        """The request's body, after all that is checked before reading it. Raises ErrorReply."""
        protocol, key = self.protocol, self.state.config.api_key
        if key and protocol.guarded(request.path):
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode()):
                raise ErrorReply(protocol.unauthorized)
        if (request.content_length or 0) > protocol.body_limit:
            raise ErrorReply(protocol.too_large)
        if request.headers.get("Expect", "").lower() == "100-continue":
            transport_of(request).write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        while piece := await request.content.readany():
            body += piece
            if len(body) > protocol.body_limit:
                raise ErrorReply(protocol.too_large)
        return body

    def _fields(self, request: BaseRequest, body: bytearray, *, strict: bool) -> Mapping[str, Any]:
        """The JSON object in a body; empty where it is something else. `strict`: a broken body raises ErrorReply."""
        bad_type = self.protocol.bad_type
        if strict and bad_type is not None and not request.content_type.endswith("json"):
            raise ErrorReply(bad_type)
        try:
            return self.protocol.read_body(request.path, body)
        except ErrorReply:
            if strict:
                raise
            return {}

    def _page(self, request: BaseRequest, fields: Mapping[str, Any]) -> Reply:
        method, path, pages = request.method, request.path, self.protocol.pages
        self.state.settle()
        if (method, path) == ("GET", STATUS_PATH):
            return ok(self.status())
        page = pages.get((method, path))
        if page and request.headers.get("X-Simulated-Fault") == "503":
            return self.protocol.unhealthy
        if page:
            return page if isinstance(page, Reply) else page(self.state, fields)
        others = {known for known, known_path in pages if known_path == path}
        others |= {"POST"} if path in self.protocol.generate else set()
        return self.protocol.not_allowed(", ".join(sorted(others))) if others else self.protocol.not_found

    def status(self) -> dict[str, Any]:
        """How the server is doing, for STATUS_PATH, the log's last line and the command line's last words."""
        told = {name: getattr(self.state.config, name) for name in ("server", "model", "clock", "speed")}
        counts = {"stamps": self.stamps.name, "requests": self.state.requests, "active": len(self.state.streams)}
        config = self.state.config
        if config.clock == "batching" and not config.hardware:  # else nobody else knows the card
            card = {"gpu": config.gpu, "model": config.model_shape, "tensor_parallel": config.tensor_parallel}
            told |= {"hardware": card}
        return told | counts | self.pump.lateness.figures()


class CompletionHandler:
    """One request for tokens, from its body, which has been read, to the line in the log."""

    def __init__(self, server: HttpServer, request: BaseRequest, received_ns: int) -> None:
        self._server, self._request = server, request
        self._state, self._protocol = server.state, server.protocol
        self._index = next(server.numbers)
        self._transport = transport_of(request)
        request_id = request.headers.get("X-Request-Id", "").encode("utf-8", "replace").decode()
        self._line = LogLine(request_id, received_ns)
        self._at: int | None = None  # K of the fault

    async def run(self, fields: Mapping[str, Any]) -> Reply | bool:
        """The whole exchange. Returns an answer that is still to be written, or whether the connection can go on."""
        wish, config = self._request.headers.get("X-Simulated-Fault"), self._state.config
        try:
            rule = parse_fault(wish) if wish is not None else fault_for(config.faults, config.seed, self._index)
        except ConfigError as problem:
            raise ErrorReply(Reply(str(problem).encode(), 400, TEXT_TYPE)) from None
        if rule is not None:
            self._line.fault, self._at = rule.name, rule.at
        fault = self._line.fault
        if fault == "refuse":
            self._refuse("refused")
            reset(self._transport)
            return False
        if fault.isdigit():
            self._refuse("failed")
            return self._protocol.failure(int(fault))
        encoding = self._encoding(fields)
        stream = Stream(encoding, self._transport, self._line, await self._admission(encoding))
        if fault and (detour := FAULTS[fault].detour):
            stream.detour = partial(detour, stream.total // 2 if self._at is None else self._at)
        return await self._answer(stream)

    def _encoding(self, fields: Mapping[str, Any]) -> Encoding:
        """Raises ErrorReply with the server's own words when the request is not one it would take."""
        make, fault = self._protocol.generate[self._request.path], self._line.fault
        request = CompletionRequest(self._index, self._request.path, fields, int(time.time()))
        try:
            encoding = make(self._state, request)
        except ErrorReply:
            self._refuse("validation")
            raise
        if fault == "early-stop":
            at = self._at or max(1, encoding.completion.requested_tokens // 2)
            return make(self._state, replace(request, stop_after=at))
        if fault == "role-first":
            return replace(encoding, opening=(), role_only=encoding.role_only or encoding.opening)
        return encoding

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
        state, streamed, lies = self._state, stream.completion.streamed, self._line.fault == "content-length"
        state.requests += 1
        state.streams.add(stream)
        try:
            if streamed:
                await self._begin_stream(stream, lies)
            await self._count_from_arrival(stream.job)
            self._server.pump.submit(stream)
            ending = await stream.finished
            if not streamed:
                return await self._whole(stream, ending)
            if lies:
                self._transport.close()
            return not lies and ending in WHOLE
        except OSError:  # the client has gone before its answer began
            return False
        finally:
            state.streams.discard(stream)
            self._server.pump.cancel(stream)
            state.end(self._line, stream)

    async def _begin_stream(self, stream: Stream, lies: bool) -> None:
        """Prepare the head of a streamed response. The head leaves together with the first event.

        A head that leaves earlier reaches a Go proxy before the proxy has finished with the request body. The proxy
        then cuts one or two streams in a hundred.
        """
        stream.chunked = not lies
        headers = self._protocol.stream_headers + stream.encoding.head
        head = self._server.head(self._request, Reply(headers=headers, chunked=stream.chunked), _LIE_BYTES)
        if self._line.fault == "slow-headers":
            await self._trickle(stream, head)
            return
        stream.head = head
        if self._line.fault == "role-first" and stream.encoding.role_only:
            stream.send(stream.with_head(stream.framed(list(stream.encoding.role_only))))

    async def _count_from_arrival(self, job: Job) -> None:
        """Not from when this process has read it, where the kernel says when it came before a token is due."""
        line, stamps, received = self._line, self._server.stamps, cast(ClientConnection, self._request.protocol)
        latest_ns = line.received_ns + self._server.patience_ns
        while not stamps.ready(received) and time.monotonic_ns() < latest_ns:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(RETRY_S)
        (came_ns,), by = stamps.instants(received, [received.sizes[0]], to_monotonic)
        if came_ns < self._server.began_ns:  # this process has another time than the kernel
            came_ns, by = line.received_ns, PLAIN
        if job.arrived_ns == line.received_ns:  # else it counts from when it was admitted
            job.arrived_ns = came_ns
        line.received_ns, line.stamps = came_ns, by.name

    async def _trickle(self, stream: Stream, head: bytes) -> None:
        """Send a head in small pieces. The tokens of the response count from its last piece."""
        whole_ms = _SLOW_HEAD_MS if self._at is None else self._at
        step = -(-len(head) // _HEAD_PIECES)
        for start in range(0, len(head), step):
            stream.send(head[start : start + step])
            await asyncio.sleep(whole_ms / 1e3 / _HEAD_PIECES)
        stream.job.arrived_ns = time.monotonic_ns()

    async def _whole(self, stream: Stream, ending: Ending) -> Reply | bool:
        """The answer of a request that is not streamed, once its last token is due."""
        if ending == "failed":
            return self._protocol.gives_up or self._protocol.failure(500)
        if ending not in WHOLE:
            return False
        reply = stream.encoding.answer((time.monotonic_ns() - self._line.received_ns) / 1e9)
        length, body = len(reply.body), reply.body
        if self._line.fault == "malformed":
            length, body = length // 2, body[: length // 2]
        elif self._line.fault == "content-length":
            length += _LIE_BYTES
        elif ending == "truncated":
            body = body[: length // 2]
        head = self._server.head(self._request, reply, length)
        if self._line.fault == "slow-headers":
            await self._trickle(stream, head)
            head = b""
        self._server.pump.send(stream, head + body, stream.count, stream.held_due_ns)
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


def to_monotonic(stamps: Sequence[int]) -> list[int]:
    """CLOCK_REALTIME ns of what came just now to CLOCK_MONOTONIC, and no later than now."""
    offset_ns, now_ns = realtime_offset_ns(), time.monotonic_ns()
    return [min(stamp - offset_ns, now_ns) for stamp in stamps]


def transport_of(request: BaseRequest) -> asyncio.Transport:
    """The request's connection. Raises ConnectionResetError when it is gone."""
    if request.transport is None:
        raise ConnectionResetError
    return request.transport
