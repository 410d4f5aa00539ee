"""The HTTP server of a simulated backend, and functions that run it in this process or in a child process.

aiohttp accepts connections and parses requests. This module writes the responses byte by byte, because the order and
the spelling of the headers must be those of the real server.
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
from loadgen.servers.simulated.protocol import TEXT_TYPE, CompletionRequest, Encoding, ErrorReply, Reply, json_reply
from loadgen.servers.simulated.scheduler import Job
from loadgen.servers.simulated.state import ServerProtocol, ServerState, realtime_offset_ns
from loadgen.servers.simulated.stream_sender import (
    COMPLETE_BODY,
    FAULTS,
    SESSION_HEADERS,
    Ending,
    LogLine,
    Stream,
    StreamSender,
    reset_connection,
    send_at_intervals,
)
from loadgen.servers.simulated.token_clock import BatchingClock, Drafting, ScriptClock, Slowdown, TokenClock
from loadgen.servers.wire.timestamps import PLAIN, RETRY_S

STATUS_PATH = "/simulated/status"
"""Path of the status page, which no real server has. A client can recognise a simulated server by this page."""
DEEP_BODY = b"[" * 100_000
"""A body that is nested too deeply for every decoder."""

# LightLLM polls for a free slot with these waits (httpserver/manager.py).
_FIRST_WAIT_S = 0.1
_WAIT_FACTOR = 1.1
_MAX_WAIT_S = 1.0

# The fault `slow-headers` sends the head in this many pieces, by default over this time.
_HEAD_PIECES = 20
_SLOW_HEAD_MS = 1000

_EXCESS_BYTES = 1 << 20  # the fault `content-length` announces this much more than the body
_BACKLOG = 4096
_SHUTDOWN_LIMIT_S = 0.05  # for responses that are still being sent; aiohttp would take zero as no limit
_YOUNG_ONLY = (10_000, 1_000, 1_000)
"""Garbage collection thresholds that keep automatic collections below 1 ms. state.py runs the full collections."""


def find_protocol(server: str, version: str = "") -> ServerProtocol:
    """Import and return the protocol of the simulated backend `server`.

    `version` is a simulated version of the backend. An empty text selects the default version.
    """
    backend = BACKENDS[server]
    target = backend.simulated_versions[version] if version else backend.simulated
    module, _, name = target.partition(":")
    protocol: ServerProtocol = getattr(importlib.import_module(module), name)
    return protocol


async def serve(config: SimulatedConfig, *, ready: Callable[[str], None], stop: asyncio.Event) -> dict[str, Any]:
    """Run a simulated server until `stop` is set, and return its final status (see `HttpServer.status`).

    `ready` is called with the URL when the server accepts connections. Raises OSError if the port is in use, and
    ConfigError if the GPU or the model is unknown.
    """
    protocol = find_protocol(config.server, config.server_version)
    loop = asyncio.get_running_loop()
    limit = config.max_concurrent_requests or protocol.default_limit
    clock, max_model_len = _clock(config, protocol, limit)
    config = replace(config, max_concurrent_requests=limit, max_model_len=max_model_len)
    sender = StreamSender(clock, loop)
    state = ServerState(config, protocol.buckets, clock.gauges, clock.flush_cache)
    http = HttpServer(state, protocol, sender)
    handler = web.Server(http.answer, handler_cancellation=True)
    connection = partial(
        ClientConnection, http, handler, loop=loop, keepalive_timeout=protocol.keep_alive_s, access_log=None
    )
    try:
        listening = await loop.create_server(connection, config.host, config.port, backlog=_BACKLOG)
        try:
            if config.log and config.clock == "script":  # with batching, token times count from the read
                from loadgen.servers.simulated.arrivals import open_arrivals  # imports NumPy, which takes 0.1 s

                http.stamps = open_arrivals(listening.sockets[0])
            host, port = listening.sockets[0].getsockname()[:2]
            ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            await stop.wait()
        finally:
            listening.close()
            await handler.shutdown(_SHUTDOWN_LIMIT_S)
    finally:
        sender.timer.close()
        http.stamps.close()
        summary = http.status()
        state.close(summary)
    return summary


def run(config: SimulatedConfig, *, until_stdin_closes: bool = False) -> dict[str, Any]:
    """Run a simulated server in this process until SIGTERM or Ctrl-C, and return its final status.

    When the server accepts connections, READY and the URL are printed to standard output. With `until_stdin_closes`,
    the server also stops when its standard input closes.
    """
    import uvloop

    def ready(url: str) -> None:
        gc.set_threshold(*_YOUNG_ONLY)
        gc.collect()
        gc.freeze()  # everything that exists now is needed until the server ends, so collections can skip it
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
    """Run a simulated server in a child process.

    The first line of standard input contains the configuration. The server stops when standard input closes, which
    happens when the parent process ends.
    """
    end_with_parent(pipe=sys.stdin.fileno())
    line = sys.stdin.buffer.readline()
    try:
        run(SimulatedConfig.from_json(line), until_stdin_closes=True)
    except (SimulatedError, OSError) as problem:
        sys.exit(f"loadgen: {problem}")


def _slowdown(config: SimulatedConfig) -> Slowdown:
    """Return how the time to the first token grows during a run, as `config` states.

    The times in `config` are times on the clock of the server, which may run faster than real time (`speed`). The times
    in the result are real times.
    """
    after_ns = None if config.slow_after_s is None else round(config.slow_after_s * 1e9 / config.speed)
    return Slowdown(config.slower_per_hour * config.speed, after_ns, config.slow_factor)


def _clock(config: SimulatedConfig, protocol: ServerProtocol, limit: int | None) -> tuple[TokenClock, int]:
    """Return the token clock of a server, and the maximum length of prompt plus output in tokens.

    `limit` is the configured maximum, or None. Raises ConfigError if the clock cannot model the configured engine, GPU
    or model.
    """
    if config.clock == "script":
        clock = ScriptClock(
            round(config.ttft_s * 1e9 / config.speed),
            round(config.itl_s * 1e9 / config.speed),
            round(config.jitter_s * 1e9 / config.speed),
            config.tokens_per_event,
            config.seed,
            Drafting(config.draft_tokens, config.acceptance),
            _slowdown(config),
        )
        return clock, config.max_model_len
    from loadgen.servers.simulated.scheduler_presets import find_engine  # imports NumPy; the script clock needs none

    try:
        engine = find_engine(config.server, config.vintage)
        deployment = engine.deployment(
            config.gpu, config.model_shape, tensor=config.tensor_parallel, file=config.hardware
        )
        kv_tokens = config.kv_tokens or engine.kv_tokens(deployment)
    except HardwareError as problem:
        raise ConfigError(str(problem)) from None
    policy = engine.policy_for(kv_tokens, limit if protocol.limit_is_batch_size else None)
    max_model_len = min(config.max_model_len, policy.max_sequence_tokens(kv_tokens))
    return BatchingClock(policy, kv_tokens, engine.step_time(deployment), config.speed), max_model_len


class ClientConnection(web.RequestHandler):
    """A connection of a simulated server to a client.

    The connection has the attributes that a timestamp source needs (loadgen.servers.wire.timestamps.Received). In the
    load generator, these attributes describe the last response that was received on a connection. Here they describe
    the last request instead, so a timestamp source can return the arrival time of this request.
    """

    def __init__(self, http: HttpServer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._http = http
        self._received_bytes = 0
        self.stream_start = 0
        self.tcp_stream = None
        self.sizes = array("q", [0])
        self.user_ns = array("q")
        self.kernel_timespecs = bytearray()
        self.read_ends = list[int]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.tcp_stream = self._http.stamps.watch(transport.get_extra_info("socket"))
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        self._http.stamps.collect()
        super().data_received(data)

    def on_request_read(self, received_ns: int) -> None:
        """Record that a whole request has been read.

        `received_ns` is the time in ns at which this process had read the head of the request.
        """
        self.stream_start = self.sizes[0]
        self.sizes = array("q", [self._received_bytes])
        self.user_ns = array("q", [received_ns])
        if self.tcp_stream is not None:
            self.tcp_stream.discard_before(self.stream_start)

    def offsets(self, raw_offsets: Sequence[int]) -> list[int]:
        """Return the byte offsets unchanged, because they already count from the first byte of the connection."""
        return [*raw_offsets]


class HttpServer:
    """Handles HTTP requests with the protocol of one backend."""

    def __init__(self, state: ServerState, protocol: ServerProtocol, sender: StreamSender) -> None:
        self.state = state
        self.protocol = protocol
        self.sender = sender
        self.stamps = PLAIN  # timestamp source for the arrival of requests
        first_token_s = (state.config.ttft_s - state.config.jitter_s) / state.config.speed
        self.stamp_wait_ns = round((first_token_s - RETRY_S) * 1e9)
        self.request_numbers = count()  # of the requests for tokens
        self.started_ns = time.monotonic_ns()
        self._keep_alive = WrittenResponse(keep_alive=True)
        self._close = WrittenResponse(keep_alive=False)
        self._dated_s = 0
        self._head_prefix = b""
        self._head_suffix = b""
        self._mark = ": ".join(marks.header(state.config.speed))

    async def answer(self, request: BaseRequest) -> web.StreamResponse:
        """Handle one HTTP request. aiohttp's low-level server calls this method for every request."""
        received_ns = time.monotonic_ns()
        generates = request.method == "POST" and request.path in self.protocol.generate
        try:
            body = await self._body(request)
            cast(ClientConnection, request.protocol).on_request_read(received_ns)
            fields = self._fields(request, body, strict=request.method == "POST" and bool(body or generates))
            if generates:
                result = await CompletionHandler(self, request, received_ns).run(fields)
            else:
                result = self._page(request, fields)
        except ErrorReply as error:
            result = error.reply
        except RecursionError:  # a body that could just be decoded is too deep to be repeated in an error message
            result = self._too_deep(request.path)
        if isinstance(result, Reply):
            data = result.body if request.method != "HEAD" else b""
            if result.chunked:
                data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
            if result.cut:
                transport_of(request).write(self.head(request, result, 0))
                transport_of(request).close()
                return self._close
            transport_of(request).write(self.head(request, result, len(result.body)) + data)
        return self._keep_alive if result and request.keep_alive else self._close

    def _too_deep(self, path: str) -> Reply:
        """Return the server's error response to a JSON body that is nested too deeply."""
        try:
            self.protocol.read_body(path, DEEP_BODY)
        except ErrorReply as error:
            return error.reply
        raise AssertionError("a body of 100,000 open brackets was accepted")

    def head(self, request: BaseRequest, reply: Reply, length: int) -> bytes:
        """Return the response head: the status line and the headers, in the order of the real server.

        `length` is the content length in bytes. A chunked response has no content length and ignores this argument.
        """
        self._update_common_headers()
        headers = [f"{name}: {value}\r\n".encode("latin-1") for name, value in reply.headers]
        phrase = self.protocol.reason_phrases.get(reply.status) or HTTPStatus(reply.status).phrase
        status_line = b"HTTP/1.1 %d %b\r\n" % (reply.status, phrase.encode())
        size = b"transfer-encoding: chunked\r\n" if reply.chunked else b"content-length: %d\r\n" % length
        closing = b"" if request.keep_alive else b"connection: close\r\n"
        prefix = self._head_prefix
        suffix = b"" if reply.outermost else self._head_suffix
        if self.protocol.hyper_order:  # axum writes the length of a known body, and hyper adds other headers at the end
            if reply.chunked:
                return b"".join([status_line, *headers, suffix, closing, size, prefix, b"\r\n"])
            if not length:
                return b"".join([status_line, suffix, *headers, closing, size, prefix, b"\r\n"])
            return b"".join([status_line, *headers, suffix, size, closing, prefix, b"\r\n"])
        if reply.chunked:
            return b"".join([status_line, prefix, *headers, suffix, size, closing, b"\r\n"])
        names = [name for name, _ in reply.headers]
        index = names.index("content-type") if "content-type" in names else len(names)
        headers.insert(index, size)  # before the content type, if there is one
        return b"".join([status_line, prefix, *headers, suffix, closing, b"\r\n"])

    def _update_common_headers(self) -> None:
        """Render the header lines that all responses share.

        The lines contain the date, so they are rendered again once per second.
        """
        now_s = int(time.time())
        if now_s == self._dated_s:
            return
        date = formatdate(now_s, usegmt=True)
        self._dated_s = now_s
        self._head_prefix = self.protocol.head_prefix.format(date=date).encode()
        self._head_suffix = f"{self.protocol.head_suffix.format(date=date)}{self._mark}\r\n".encode()

    async def _body(self, request: BaseRequest) -> bytearray:
        """Read and return the request body.

        Like the real server, this method first checks the API key and the announced length of the body. Raises
        ErrorReply if the key is wrong or the body is too long.
        """
        protocol = self.protocol
        api_key = self.state.config.api_key
        if api_key and protocol.needs_api_key(request.path):
            token = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), api_key.encode()):
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
        """Return the fields of the JSON object in a request body.

        For an invalid body, the result is an empty mapping. If `strict` is True, ErrorReply is raised instead.
        """
        bad_type = self.protocol.wrong_content_type
        is_upload = request.path in self.protocol.uploads
        if strict and bad_type is not None and not is_upload and not request.content_type.endswith("json"):
            raise ErrorReply(bad_type)
        try:
            return self.protocol.read_body(request.path, body)
        except ErrorReply:
            if strict:
                raise
            return {}

    def _page(self, request: BaseRequest, fields: Mapping[str, Any]) -> Reply:
        """Return the response to a request that generates no tokens, such as GET /metrics."""
        method, path = request.method, request.path
        pages = self.protocol.pages
        self.state.finalise()
        if (method, path) == ("GET", STATUS_PATH):
            return json_reply(self.status())
        page = pages.get((method, path))
        if page and request.headers.get("X-Simulated-Fault") == "503":
            return self.protocol.unhealthy
        if page:
            return page if isinstance(page, Reply) else page(self.state, fields)
        methods = {page_method for page_method, page_path in pages if page_path == path}
        if path in self.protocol.generate:
            methods.add("POST")
        return self.protocol.not_allowed(", ".join(sorted(methods))) if methods else self.protocol.not_found

    def status(self) -> dict[str, Any]:
        """Return the configuration, the request counts and the send delays of the server.

        The server shows this status on the page at STATUS_PATH, in the last line of the log and in the last line on the
        terminal.
        """
        config = self.state.config
        status: dict[str, Any] = {name: getattr(config, name) for name in ("server", "model", "clock", "speed")}
        if config.clock == "batching" and not config.hardware:  # clients do not know the GPUs of a user's file
            status["hardware"] = {
                "gpu": config.gpu,
                "model": config.model_shape,
                "tensor_parallel": config.tensor_parallel,
            }
        status |= {
            "stamps": self.stamps.name,
            "requests": self.state.requests,
            "active": len(self.state.streams),
        }
        return status | self.sender.lateness.figures()


def _header(request: BaseRequest, *names: str) -> str:
    """Return the value of the first header in `names` that the request has, or an empty string."""
    value = next((request.headers[name] for name in names if name in request.headers), "")
    return value.encode("utf-8", "replace").decode()


class CompletionHandler:
    """Handles one request that generates tokens: sends the response and writes the log line.

    The caller must have read the request body.
    """

    def __init__(self, server: HttpServer, request: BaseRequest, received_ns: int) -> None:
        self._server = server
        self._request = request
        self._state = server.state
        self._protocol = server.protocol
        self._index = next(server.request_numbers)
        self._transport = transport_of(request)
        self._line = LogLine(
            _header(request, "X-Request-Id"),
            received_ns,
            session=_header(request, *SESSION_HEADERS),
            parent_session=_header(request, "X-Dynamo-Parent-Session-ID"),
        )
        self._fault_k: int | None = None

    async def run(self, fields: Mapping[str, Any]) -> Reply | bool:
        """Handle the request.

        Return a Reply if the caller must send the response. If this method has sent the response itself, return True if
        the connection can take another request, and False if it cannot.
        """
        model = fields.get("model")
        self._line.model = model if isinstance(model, str) else ""
        header = self._request.headers.get("X-Simulated-Fault")
        config = self._state.config
        try:
            rule = parse_fault(header) if header is not None else fault_for(config.faults, config.seed, self._index)
        except ConfigError as problem:
            raise ErrorReply(Reply(str(problem).encode(), 400, TEXT_TYPE)) from None
        if rule is not None:
            self._line.fault = rule.name
            self._fault_k = rule.at
        fault = self._line.fault
        if fault == "refuse":
            self._refuse("refused")
            reset_connection(self._transport)
            return False
        if fault == "wrong-answer" and len(self._state.streams) + 1 <= (self._fault_k or 0):
            self._line.fault = ""  # there are too few requests for the fault
        if fault.isdigit():
            self._refuse("failed")
            return self._protocol.failure(int(fault))
        encoding = self._encoding(fields)
        stream = Stream(encoding, self._transport, self._line, await self._admission(encoding))
        hook = FAULTS[fault].hook if fault else None
        if hook is not None:
            stream.fault_hook = partial(hook, stream.total_tokens // 2 if self._fault_k is None else self._fault_k)
        elif config.stream_interval > 1 and encoding.completion.streamed:
            stream.fault_hook = partial(send_at_intervals, config.stream_interval)
        return await self._answer(stream)

    def _encoding(self, fields: Mapping[str, Any]) -> Encoding:
        """Return the encoded response. Raises ErrorReply if the real server would refuse the request."""
        generate = self._protocol.generate[self._request.path]
        fault = self._line.fault
        request = CompletionRequest(self._index, self._request.path, fields, int(time.time()), fault=fault)
        try:
            encoding = generate(self._state, request)
        except ErrorReply:
            self._refuse("validation")
            raise
        if fault == "early-stop":
            stop_after = self._fault_k or max(1, encoding.completion.requested_tokens // 2)
            return generate(self._state, replace(request, stop_after=stop_after))
        if fault == "role-first":
            return replace(encoding, opening=(), role_only=encoding.role_only or encoding.opening)
        return encoding

    async def _admission(self, encoding: Encoding) -> int:
        """Return the time in ns at which the server begins to process the request.

        If the server has reached its limit on concurrent requests, this method waits until the request can be
        processed. Some backends reject such a request instead of queueing it. The method then raises ErrorReply.
        `encoding` is the response to the request.
        """
        limit = self._state.config.max_concurrent_requests
        arrived_ns = self._line.received_ns
        wait_s = _FIRST_WAIT_S
        while limit is not None and not self._has_room(encoding, limit):
            if self._protocol.overloaded is not None:
                self._refuse("overloaded")
                raise ErrorReply(self._protocol.overloaded(encoding))
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * _WAIT_FACTOR, _MAX_WAIT_S)
            arrived_ns = time.monotonic_ns()
        return arrived_ns

    def _has_room(self, encoding: Encoding, limit: int) -> bool:
        """Return True if the server can accept one more request without exceeding `limit`.

        For most backends, `limit` is the maximum number of concurrent requests. If the protocol has
        `limit_counts_inputs`, `limit` is the maximum number of inputs in all concurrent requests together. `encoding`
        is the response to the new request, and contains the number of inputs of this request.
        """
        streams = self._state.streams
        if not self._protocol.limit_counts_inputs:
            return len(streams) < limit
        return sum(stream.completion.inputs for stream in streams) + encoding.completion.inputs <= limit

    async def _answer(self, stream: Stream) -> Reply | bool:
        """Send the response of an admitted request.

        Return a Reply if the caller must send the response instead. Otherwise return True if the connection can take
        another request, and False if it cannot.
        """
        state = self._state
        streamed = stream.completion.streamed
        wrong_length = self._line.fault == "content-length"
        state.requests += 1
        state.streams.add(stream)
        try:
            if streamed:
                await self._begin_stream(stream, wrong_length)
            await self._count_from_arrival(stream.job)
            self._server.sender.submit(stream)
            ending = await stream.finished
            if not streamed:
                return await self._answer_whole(stream, ending)
            if wrong_length:
                self._transport.close()
            return not wrong_length and ending in COMPLETE_BODY
        except OSError:  # the client has disconnected before its response began
            return False
        finally:
            state.streams.discard(stream)
            self._server.sender.cancel(stream)
            state.on_request_end(self._line, stream)

    async def _begin_stream(self, stream: Stream, wrong_length: bool) -> None:
        """Prepare the head of a streamed response. Usually, the head is sent later, together with the first event.

        A Go proxy in front of the server aborts 1 or 2% of the streams if it receives the head while it is still
        sending the request body. Only the faults `slow-headers` and `role-first` therefore send the head at once. If
        `wrong_length` is True, another fault is simulated: the head states a content length that is larger than the
        body.
        """
        stream.chunked = not wrong_length
        headers = (stream.encoding.media or self._protocol.stream_headers) + stream.encoding.head
        head = self._server.head(self._request, Reply(headers=headers, chunked=stream.chunked), _EXCESS_BYTES)
        if self._line.fault == "slow-headers":
            await self._trickle(stream, head)
            return
        stream.head = head
        if self._line.fault == "role-first" and stream.encoding.role_only:
            stream.send(stream.with_head(stream.to_body(list(stream.encoding.role_only))))

    async def _count_from_arrival(self, job: Job) -> None:
        """Set `job.arrived_ns`, from which the token times count, to the time when the request arrived.

        Normally this is the kernel's timestamp of the request. If no such timestamp is available before the first token
        is due, it is the time when this process read the request.

        If the request had to wait for its admission, or if its response began slowly, `job.arrived_ns` is already later
        than this read. It is then left unchanged. The log line gets the arrival time in any case.
        """
        line = self._line
        stamps = self._server.stamps
        received = cast(ClientConnection, self._request.protocol)
        latest_ns = line.received_ns + self._server.stamp_wait_ns
        while not stamps.ready(received) and time.monotonic_ns() < latest_ns:  # noqa: ASYNC110 - no event exists
            await asyncio.sleep(RETRY_S)
        (arrived_ns,), source = stamps.instants(received, [received.sizes[0]], to_monotonic)
        if arrived_ns < self._server.started_ns:  # this process and the kernel have different clocks (time namespace)
            arrived_ns, source = line.received_ns, PLAIN
        if job.arrived_ns == line.received_ns:  # otherwise the job counts from its admission
            job.arrived_ns = arrived_ns
        line.received_ns = arrived_ns
        line.stamps = source.name

    async def _trickle(self, stream: Stream, head: bytes) -> None:
        """Send the response head in small pieces, with a pause after each piece.

        The token times of the stream are then counted from the end of the last pause, unless tokens have already been
        generated.
        """
        duration_ms = _SLOW_HEAD_MS if self._fault_k is None else self._fault_k
        step = -(-len(head) // _HEAD_PIECES)
        for start in range(0, len(head), step):
            stream.send(head[start : start + step])
            await asyncio.sleep(duration_ms / 1e3 / _HEAD_PIECES)
        stream.job.arrived_ns = time.monotonic_ns()

    async def _answer_whole(self, stream: Stream, ending: Ending) -> Reply | bool:
        """Send a response without streaming. It is sent as a whole when its last token is due.

        `ending` states how the response ends. If the generation has failed, return a Reply that the caller must send
        instead. Otherwise return True if the connection can take another request, and False if it cannot.
        """
        if ending == "failed":
            return self._protocol.generation_failure or self._protocol.failure(500)
        if ending not in COMPLETE_BODY:
            return False
        reply = stream.encoding.answer((time.monotonic_ns() - self._line.received_ns) / 1e9)
        body = reply.body
        length = len(body)
        if self._line.fault == "malformed":
            length //= 2
            body = body[:length]
        elif self._line.fault == "content-length":
            length += _EXCESS_BYTES
        elif ending == "truncated":
            body = body[: length // 2]
        head = self._server.head(self._request, reply, length)
        if self._line.fault == "slow-headers":
            await self._trickle(stream, head)
            head = b""
        self._server.sender.send(stream, head + body, stream.token_count, stream.withheld_due_ns)
        if len(body) < length:
            self._transport.close()
            return False
        return True

    def _refuse(self, reason: str) -> None:
        """Count and log a refused request. `reason` is the key in `ServerState.refused_by_reason`."""
        self._state.requests += 1
        self._state.refused_by_reason[reason] += 1
        self._state.on_request_end(self._line)


class WrittenResponse(web.StreamResponse):
    """A response that aiohttp must not send, because this module has already sent it.

    `keep_alive` is True if the connection can take another request.
    """

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._connection_usable = keep_alive

    @property
    def keep_alive(self) -> bool:
        return self._connection_usable

    async def prepare(self, request: BaseRequest) -> AbstractStreamWriter | None:  # noqa: ARG002 - as the base class
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        pass


def to_monotonic(stamps: Sequence[int]) -> list[int]:
    """Convert recent timestamps in ns from CLOCK_REALTIME to CLOCK_MONOTONIC.

    If a converted timestamp is later than the current time, the current time replaces it.
    """
    offset_ns = realtime_offset_ns()
    now_ns = time.monotonic_ns()
    return [min(stamp - offset_ns, now_ns) for stamp in stamps]


def transport_of(request: BaseRequest) -> asyncio.Transport:
    """Return the transport of a request's connection. Raises ConnectionResetError if the connection is closed."""
    if request.transport is None:
        raise ConnectionResetError
    return request.transport
