"""Starting and stopping a simulated server: in this event loop, in this process, or in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import IO, Any

from aiohttp import web

from servers.hardware import HardwareError, roofline
from servers.kinds import KINDS
from servers.simulated import ConfigError, SimulatedError, StartError
from servers.simulated.config import SimulatedConfig
from servers.simulated.http import HttpServer, ServerProtocol, status
from servers.simulated.state import ServerState
from servers.simulated.stream import Pump
from servers.simulated.timing import BatchingClock, ScriptClock, TokenClock

READY = "ready "
"""First line of a child's standard output, followed by its URL."""

_BACKLOG = 4096
_LEAVE_LIMIT_S = 0.05
"""Answers still on their way when the server stops are given so long. (Zero would mean for ever, to aiohttp.)"""
_YOUNG_ONLY = (10_000, 1_000, 1_000)
"""Collections by themselves are of young objects, below a millisecond; state.py has the full ones."""
_START_LIMIT_S = 30
_STOP_LIMIT_S = 5
CHILD = "from servers.simulated.server import child; child()"
"""The program of a server in a process of its own; its standard input begins with the config, as `to_json`."""

Ready = Callable[[str], None]
"""Takes the URL once connections are accepted."""


def protocol_of(server: str) -> ServerProtocol:
    """What makes a simulated server this kind: the value that its kind names, imported when it is needed."""
    module, _, name = KINDS[server].simulated.partition(":")
    protocol: ServerProtocol = getattr(importlib.import_module(module), name)
    return protocol


async def serve(config: SimulatedConfig, *, ready: Ready, stop: asyncio.Event) -> dict[str, Any]:
    """Serves until `stop` is set; returns the last status.

    Raises OSError when the port is taken, ConfigError for a card or model that is not known.
    """
    protocol = protocol_of(config.server)
    limit = config.max_concurrent_requests or protocol.default_limit
    clock, longest = _clock(config, protocol, limit)
    config = replace(config, max_concurrent_requests=limit, max_model_len=longest)
    pump = Pump(clock, asyncio.get_running_loop())
    state = ServerState(config, protocol.buckets, clock.gauges)
    try:
        await _accept(HttpServer(state, protocol, pump), ready, stop)
    finally:
        pump.close()
        summary = status(state, pump)
        state.close(summary)
    return summary


def run(config: SimulatedConfig, *, until_stdin_closes: bool = False) -> dict[str, Any]:
    """Serves in this process until SIGTERM or Ctrl-C, and says so on standard output; returns the last status."""
    import uvloop  # here, because whoever only spawns may run gevent

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
    """A process whose standard input says which config, on one line, and which ends when its parent does."""
    line = sys.stdin.buffer.readline()
    try:
        run(SimulatedConfig.from_json(line), until_stdin_closes=True)
    except (SimulatedError, OSError) as problem:
        sys.exit(f"loadgen: {problem}")


@contextlib.contextmanager
def spawn(config: SimulatedConfig) -> Iterator[str]:
    """As `spawn_process`; yields the URL alone."""
    with spawn_process(config) as (url, _):
        yield url


@contextlib.contextmanager
def spawn_process(config: SimulatedConfig) -> Iterator[tuple[str, int]]:
    """A simulated server in a process of its own; yields its URL and its process id.

    It is in a session of its own, so Ctrl-C does not reach it, and ends when its standard input does, which is when
    this process dies, of whatever. Raises StartError when it does not come up.
    """
    command, pipe = [sys.executable, "-c", CHILD], subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+b") as complaints,
        subprocess.Popen(  # noqa: S603 - our own interpreter and our own words
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=complaints, start_new_session=True
        ) as process,
    ):
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
                process.stdin.write(config.to_json())
            yield _url_of(process, complaints), process.pid
        finally:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


async def _accept(http: HttpServer, ready: Ready, stop: asyncio.Event) -> None:
    """Takes connections from `ready` to `stop`."""
    config, kept_s = http.state.config, http.protocol.keep_alive_s
    handler = web.Server(http.answer, handler_cancellation=True, keepalive_timeout=kept_s, access_log=None)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(handler, config.host, config.port, backlog=_BACKLOG)
    try:
        host, port = listening.sockets[0].getsockname()[:2]
        ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        await stop.wait()
    finally:
        listening.close()
        await handler.shutdown(_LEAVE_LIMIT_S)


def _clock(config: SimulatedConfig, protocol: ServerProtocol, limit: int | None) -> tuple[TokenClock, int]:
    """The clock, and the longest prompt plus output that it can hold. Raises ConfigError."""
    if config.clock == "script":
        times_s = (config.ttft_s, config.itl_s, config.jitter_s)
        ttft_ns, itl_ns, jitter_ns = (round(time_s * 1e9 / config.speed) for time_s in times_s)
        script = ScriptClock(ttft_ns, itl_ns, jitter_ns, config.tokens_per_event, config.seed)
        return script, config.max_model_len
    policy = protocol.policy
    if protocol.limits_batch and limit is not None:
        policy = replace(policy, running_limit=limit)
    try:
        hardware = roofline(config.gpu, config.model_shape, config.tensor_parallel, config.hardware)
        kv_tokens = hardware.kv_tokens(policy.memory_fraction)
    except HardwareError as problem:
        raise ConfigError(str(problem)) from None
    longest = min(config.max_model_len, kv_tokens - policy.block_tokens)
    return BatchingClock(policy, kv_tokens, hardware.step_ns, config.speed), longest


def _url_of(process: subprocess.Popen[bytes], complaints: IO[bytes]) -> str:
    """Waits for the child's first line."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _START_LIMIT_S)
    line = process.stdout.readline().decode() if ready else ""
    if line.startswith(READY):
        return line.removeprefix(READY).strip()
    process.kill()
    process.wait()  # its last words are written by then
    complaints.seek(0)
    said = complaints.read()[-1000:].decode(errors="replace").strip()
    raise StartError(f"the simulated server did not start: {said or 'no answer'}")
