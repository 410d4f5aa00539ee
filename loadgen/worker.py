"""One worker process: opens its share of the connections, waits for the common start, drives, and writes its part.

worker                          coordinator
connect ... ── ("ready", failed) ──>
            <── ("start", start_ns) ──      or ("stop",) at any time
drive   ... ── ("done", rescue) ──>         and exit
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from ctypes import Array, c_int64
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import uvloop

from loadgen.clock import monotonic_ns
from loadgen.driver import Driver, Progress, Slot
from loadgen.recorder import PartFile
from servers.connection import Target
from servers.dialects.base import Dialect
from servers.http1 import post
from servers.stamps import hold_stamps
from workloads.request import Request

COUNTERS = [field.name for field in fields(Progress)]
"""What a worker's shared counters hold, in this order."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker is given."""

    worker: int
    requests: Sequence[Request]
    due_ns: Sequence[int]
    target: Target
    dialect: Dialect
    model: str
    headers: dict[str, str]
    timeout_s: float
    kernel_stamps: bool
    part: Path


def work(share: Share, pipe: Pipe, counters: Array[c_int64], inherited: Sequence[Pipe]) -> None:
    """The worker process's main function. `inherited` are the coordinator's pipe ends, which a fork copies."""
    for other in inherited:
        other.close()  # or nobody would notice the coordinator's death
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stamps = hold_stamps() if share.kernel_stamps else None
    part = PartFile(share.part)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(share, part, pipe, counters, "kernel" if stamps else "user"))
    rescue = Path(tempfile.gettempdir()) / f"loadgen-{os.getpid()}-{share.part.name}"
    with contextlib.suppress(BrokenPipeError):
        pipe.send(("done", part.close(rescue)))


async def _work(share: Share, part: PartFile, pipe: Pipe, counters: Array[c_int64], stamps: str) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_crash)

    def report(progress: Progress) -> None:
        counters[:] = [getattr(progress, name) for name in COUNTERS]

    driver = Driver(
        slots_of(share),
        share.target,
        share.dialect,
        part,
        timeout_s=share.timeout_s,
        kernel_stamps=share.kernel_stamps,
        worker=share.worker,
        report=report,
    )
    started: asyncio.Future[int] = loop.create_future()
    loop.add_reader(pipe.fileno(), _obey, pipe, driver, started)
    await driver.open()
    gc.collect()
    gc.freeze()
    gc.disable()  # what the run makes has no cycles worth finding, and a collection would delay reads
    pipe.send(("ready", stamps))
    await driver.run(await started)
    loop.remove_reader(pipe.fileno())


def slots_of(share: Share) -> list[Slot]:
    """Encode the share: every byte that will be sent, before a connection is opened."""
    target, dialect = share.target, share.dialect
    path, host = target.path + dialect.path, target.host_field
    return [
        Slot(
            request,
            post(path, host, {**share.headers, "X-Request-Id": str(request.id)}, dialect.encode(request, share.model)),
            due_ns,
        )
        for request, due_ns in zip(share.requests, share.due_ns, strict=True)
    ]


def _obey(pipe: Pipe, driver: Driver, started: asyncio.Future[int]) -> None:
    try:
        order = pipe.recv()
    except (EOFError, OSError):  # the coordinator is gone: nobody waits for this run any more
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        order = ("stop",)
    if order[0] == "stop":
        driver.interrupt()
    if not started.done():
        started.set_result(order[1] if order[0] == "start" else monotonic_ns())


def _crash(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A bug of ours in a callback must not leave a run waiting for ever."""
    error = context.get("exception")
    if error is None:
        return
    traceback.print_exception(error, file=sys.stderr)
    os._exit(70)
