"""Starting and stopping a simulated server: in this event loop, in a thread, or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Any

from aiohttp import web

from servers.hardware import HardwareError
from servers.hardware.roofline import roofline
from servers.simulated import lightllm, tgi, vllm
from servers.simulated.batching import BatchingClock
from servers.simulated.config import SimulatedConfig
from servers.simulated.errors import ConfigError, StartError
from servers.simulated.faults import written
from servers.simulated.http import Http, status
from servers.simulated.ledger import Ledger
from servers.simulated.log import Log, LogLine
from servers.simulated.metrics import Metrics
from servers.simulated.metrics_pages import bounds
from servers.simulated.policies import POLICIES
from servers.simulated.stream import Pump
from servers.simulated.timing import ScriptClock, TokenClock
from servers.simulated.tokenizer import Babble
from servers.simulated.wire import Site, Wire

WIRES: dict[str, Wire] = {"vllm": vllm.WIRE, "tgi": tgi.WIRE, "lightllm": lightllm.WIRE}

READY = "ready "
"""First line of a child's standard output, followed by its URL."""

_BACKLOG = 4096
_LEAVE_LIMIT_S = 0.05
"""Answers still on their way when the server stops are given so long. (Zero would mean for ever, to aiohttp.)"""
_YOUNG_ONLY = (10_000, 1_000, 1_000)
"""Collections by themselves are of young objects, below a millisecond; ledger.py has the full ones."""
_START_LIMIT_S = 30
_STOP_LIMIT_S = 5
_KEY_NAME = "LOADGEN_SIMULATED_API_KEY"
"""Environment variable by which a child learns its API key: command lines are public."""


async def serve(
    config: SimulatedConfig,
    *,
    ready: Callable[[str], None],
    stop: asyncio.Event,
    keep: Callable[[LogLine], None] | None = None,
) -> dict[str, Any]:
    """Serves until `stop` is set. Calls `ready` with the URL once connections are accepted; returns the last status.

    Raises OSError when the port is taken, ConfigError for a card or model that is not known.
    """
    wire = WIRES[config.server]
    clock, longest = _clock(config, config.max_concurrent_requests or wire.default_limit)
    config = replace(config, max_model_len=longest)
    pump = Pump(clock, asyncio.get_running_loop())
    babble = Babble(config.seed, longest)
    metrics = Metrics(bounds(config.server, longest))
    site = Site(config, babble, metrics, started_s=int(time.time()), gauges=clock.gauges)
    ledger = Ledger(site, log := Log(config.log, keep))
    try:
        await _accept(config, Http(site, wire, pump, ledger), wire, ready, stop)
    finally:
        pump.close()
        ledger.settle()
        summary = status(site, pump)
        log.close(summary)
    return summary


@dataclass(slots=True)
class Running:
    """A simulated server in a thread of this process."""

    url: str = ""
    log: list[LogLine] = field(default_factory=list)
    """What it has logged so far."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Its last status, once it has stopped."""


@contextlib.contextmanager
def running(config: SimulatedConfig) -> Iterator[Running]:
    """A simulated server in a thread, for tests: it shares the interpreter with its client, so its times are not exact.

    Raises what `serve` raises.
    """
    server = Running()
    started = threading.Event()
    problems: list[BaseException] = []
    loop = new_loop()
    stop = asyncio.Event()

    def ready(url: str) -> None:
        server.url = url
        started.set()

    def run() -> None:
        try:
            server.summary = loop.run_until_complete(serve(config, ready=ready, stop=stop, keep=server.log.append))
        except BaseException as problem:  # handed to the thread that waits
            problems.append(problem)
        finally:
            loop.close()
            started.set()

    thread = threading.Thread(target=run, name="simulated", daemon=True)
    thread.start()
    started.wait()
    try:
        if not problems:
            yield server
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended by itself
            loop.call_soon_threadsafe(stop.set)
        thread.join()
    if problems:
        raise problems[0]


@contextlib.contextmanager
def spawn(config: SimulatedConfig) -> Iterator[str]:
    """A simulated server in a process of its own, as `spawn_process`; yields its URL."""
    with spawn_process(config) as (url, _):
        yield url


@contextlib.contextmanager
def spawn_process(config: SimulatedConfig) -> Iterator[tuple[str, int]]:
    """A simulated server in a process of its own; yields its URL and its process id.

    It is in a session of its own, so Ctrl-C does not reach it, and ends when its standard input does, which is when
    this process dies, of whatever. Raises StartError when it does not come up.
    """
    with tempfile.TemporaryFile("w+") as complaints:
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and our own arguments
            [sys.executable, "-m", "loadgen", *arguments(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=os.environ | ({_KEY_NAME: config.api_key} if config.api_key else {}),
            start_new_session=True,
            text=True,
        )
        try:
            yield _url_of(child, complaints), child.pid
        finally:
            _end(child)


def arguments(config: SimulatedConfig) -> list[str]:
    """The command line, after the program's name, of a server with this config that somebody else will end."""
    values = {
        "server": config.server,
        "host": config.host,
        "port": config.port,
        "model": config.model,
        "clock": config.clock,
        "ttft": config.ttft_s,
        "itl": config.itl_s,
        "jitter": config.jitter_s,
        "tokens-per-event": config.tokens_per_event,
        "speed": config.speed,
        "gpu": config.gpu,
        "model-shape": config.model_shape,
        "tensor-parallel": config.tensor_parallel,
        "max-concurrent-requests": config.max_concurrent_requests,
        "max-model-len": config.max_model_len,
        "eos-mean-tokens": config.eos_mean_tokens,
        "api-key-env": _KEY_NAME if config.api_key else None,
        "seed": config.seed,
        "log": config.log,
    }
    options = [text for name, value in values.items() if value is not None for text in (f"--{name}", str(value))]
    faults = [text for rule in config.faults for text in ("--fault", written(rule))]
    return ["sim", *options, *faults, "--until-stdin-closes"]


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where there is one: a quarter of the cost per wake-up."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _accept(
    config: SimulatedConfig, http: Http, wire: Wire, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Takes connections from `ready` to `stop`."""
    handler = web.Server(http.answer, handler_cancellation=True, keepalive_timeout=wire.keep_alive_s, access_log=None)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(handler, config.host, config.port, backlog=_BACKLOG)
    thresholds = gc.get_threshold()
    gc.set_threshold(*_YOUNG_ONLY)
    gc.collect()
    gc.freeze()  # what exists now lives as long as the server: no collection need look at it again
    try:
        ready(_url(listening.sockets[0]))
        await stop.wait()
    finally:
        listening.close()
        await handler.shutdown(_LEAVE_LIMIT_S)
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def _clock(config: SimulatedConfig, limit: int | None) -> tuple[TokenClock, int]:
    """The clock, and the longest prompt plus output that it can hold. Raises ConfigError."""
    if config.clock == "script":
        times_s = (config.ttft_s, config.itl_s, config.jitter_s)
        ttft_ns, itl_ns, jitter_ns = (round(time_s * 1e9 / config.speed) for time_s in times_s)
        script = ScriptClock(ttft_ns, itl_ns, jitter_ns, config.tokens_per_event, config.seed)
        return script, config.max_model_len
    policy = POLICIES[config.server]
    if config.server == "lightllm" and limit is not None:
        policy = replace(policy, running_limit=limit)  # one option, `--running_max_req_size`, is both limits there
    try:
        hardware = roofline(config.gpu, config.model_shape, config.tensor_parallel)
        kv_tokens = hardware.kv_tokens(policy.memory_fraction)
    except HardwareError as problem:
        raise ConfigError(str(problem)) from None
    longest = min(config.max_model_len, kv_tokens - policy.block_tokens)
    return BatchingClock(policy, kv_tokens, hardware.step_ns, config.speed), longest


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _url_of(child: subprocess.Popen[str], complaints: IO[str]) -> str:
    """Waits for the child's first line."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], _START_LIMIT_S)
    line = child.stdout.readline() if ready else ""
    if line.startswith(READY):
        return line.removeprefix(READY).strip()
    child.kill()
    child.wait()
    complaints.seek(0)
    raise StartError(f"the simulated server did not start: {complaints.read()[-1000:].strip() or 'no answer'}")


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
