"""Runs a simulated server in a thread of the test process, and compares a run with the server's log."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from loadgen.analysis.calibration import read_log
from loadgen.analysis.run.runfile import Run
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.server import serve
from loadgen.servers.simulated.stream_sender import LogLine


@dataclass(slots=True)
class Running:
    """The URL and the log of a simulated server, which may have stopped."""

    log_path: Path
    url: str = ""
    last_log: tuple[LogLine, ...] = ()
    """The log lines of the server when it stopped."""

    @property
    def log(self) -> list[LogLine]:
        """The log lines of the requests that have ended so far.

        The server writes them when it becomes idle and when it answers a GET request, so the latest may be missing.
        """
        return list(self.last_log) or self.read()

    def read(self) -> list[LogLine]:
        """Read and return the complete lines of the log file, without the summary line."""
        whole, _, _ = (self.log_path.read_bytes() if self.log_path.exists() else b"").rpartition(b"\n")
        return [
            msgspec.json.decode(line, type=LogLine) for line in whole.splitlines() if not line.startswith(b'{"summary"')
        ]


@contextlib.contextmanager
def running(config: SimulatedConfig) -> Iterator[Running]:
    """Run a simulated server in a thread.

    Its token times are not exact, because the server shares the Python interpreter with its client. Raises the errors
    of `loadgen.servers.simulated.server.serve`.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(uvloop.new_event_loop()) as loop:
        log_path = config.log or Path(folder, "sim.jsonl")
        server, started, stop = Running(log_path), threading.Event(), asyncio.Event()

        def ready(url: str) -> None:
            server.url = url
            started.set()

        with ThreadPoolExecutor(1, "simulated") as pool:
            serving = serve(replace(config, log=log_path), ready=ready, stop=stop)
            ended = pool.submit(loop.run_until_complete, serving)
            ended.add_done_callback(lambda _: started.set())
            started.wait()
            try:
                if not ended.done():
                    yield server
            finally:
                loop.call_soon_threadsafe(stop.set)
                ended.result()
                server.last_log = tuple(server.read())


def check_timestamps(measured: Run, log: Path) -> None:
    """Check that no token arrives before the server sent it."""
    sent_ns = {number: line.sent_ns for number, line in read_log(log).items()}
    late_s = [
        [
            (measured.header.start_realtime_ns + at - sent) / 1e9
            for at, sent in zip(record.chunk_ns, sent_ns[record.id], strict=True)
        ]
        for record in measured.records
    ]
    assert min(map(min, late_s)) >= 0


@contextlib.contextmanager
def replicas(*configs: SimulatedConfig) -> Iterator[list[Running]]:
    """Run a simulated server for each of these configurations."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running(config)) for config in configs]


def equal(count: int, **settings: Any) -> list[SimulatedConfig]:
    """Return equal configurations of simulated servers, which are fast unless `settings` say otherwise."""
    return [SimulatedConfig(server="vllm", **({"ttft_s": 0.02, "itl_s": 0.002} | settings))] * count


def urls_of(servers: list[Running]) -> tuple[str, ...]:
    """Return the options that name these servers."""
    return tuple(word for server in servers for word in ("--url", server.url))
