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
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import uvloop
from msgspec import structs

from loadgen.engine.clock import SystemClock
from loadgen.engine.counts import Counts
from loadgen.engine.driver import Driver, Limits, Wire
from loadgen.engine.feed import ClosedLoop, Feed, OpenLoop, Sessions, Slot
from loadgen.engine.part import Held, Part, PartFile
from loadgen.record import Record, shifted
from servers.kinds.base import Dialect
from servers.wire.connection import Target
from servers.wire.http1 import post
from servers.wire.poller import Poller
from servers.wire.pool import Pool
from servers.wire.stamps import hold_stamps
from servers.wire.transport import Exchange
from workloads.request import Request
from workloads.sessions import Conversation

CONNECT_LIMIT_S = 30.0
"""A connection that takes longer than this, or than the request's own time limit, is given up."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker is given."""

    worker: int
    requests: Callable[[], Iterator[Request]]
    """Draws this worker's Requests, the same ones each time, in order of id; of sessions, all turns of each."""
    conversations: Callable[[], Iterator[Conversation]] | None
    """Draws this worker's sessions, where the workload is of sessions."""
    due_ns: Sequence[int] | None
    """Open loop: the due offsets of these requests or sessions. None: a closed loop."""
    clients: int
    think_ns: int
    until_ns: int | None
    """Closed loop: clients, their think time, and the offset from which on nothing more is due."""
    warmup: Sequence[Request]
    """Sent before the clock starts; their Records are marked."""
    spare: int
    """Connections to open before they are needed."""
    limits: Limits
    target: Target
    dialect: Dialect
    model: str
    headers: dict[str, str]
    kernel_stamps: bool
    part: Path


def work(share: Share, pipe: Pipe, counts: Counts, inherited: Sequence[Pipe]) -> None:
    """The worker process's main function. `inherited` are the coordinator's pipe ends, which a fork copies."""
    for other in inherited:
        other.close()  # or nobody would notice the coordinator's death
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stamps = hold_stamps() if share.kernel_stamps else None
    part = PartFile(share.part)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(share, part, pipe, counts, "kernel" if stamps else "user"))
    with contextlib.suppress(BrokenPipeError):
        pipe.send(("done", _closed(part, share.part)))


def _closed(part: PartFile, path: Path) -> Path | None:
    """Close the part. Where the rest of it is, when its own disk did not take all of it."""
    rescue = Path(tempfile.gettempdir()) / f"loadgen-{os.getpid()}-{path.name}"
    try:
        return part.close(rescue)
    except OSError as error:
        sys.stderr.write(f"loadgen: neither {path} nor {rescue} could take everything: {error.strerror}\n")
        return rescue


def slots_of(share: Share) -> Iterator[Slot]:
    """This worker's slots, encoded as they are drawn: every byte that will be sent."""
    due_ns = share.due_ns if share.due_ns is not None else repeat(0)
    if share.conversations is not None:
        return map(partial(_turn, share), share.conversations(), due_ns)
    return map(partial(_slot, share), share.requests(), due_ns)


def _turn(share: Share, conversation: Conversation, due_ns: int) -> Slot:
    slot = _slot(share, conversation.request(), due_ns)
    slot.conversation = conversation
    return slot


def _slot(share: Share, request: Request, due_ns: int) -> Slot:
    target, dialect = share.target, share.dialect
    headers = {**share.headers, "X-Request-Id": str(request.id)}
    body = dialect.encode(request, share.model)
    return Slot(request, post(target.path + dialect.path, target.host_field, headers, body), due_ns)


async def _work(share: Share, part: PartFile, pipe: Pipe, counts: Counts, stamps: str) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_crash)
    clock = SystemClock(loop)
    started: asyncio.Future[int] = loop.create_future()
    net = Poller(loop), clock
    driver = _driver(share, _feed(share), part, net, counts, share.spare)
    drivers = [driver]
    loop.add_reader(pipe.fileno(), _obey, pipe, drivers, started)
    warmed = await _warm_up(share, net, drivers)
    await driver.open()
    gc.collect()
    gc.freeze()
    gc.disable()  # what the run makes has no cycles worth finding, and a collection would delay reads
    pipe.send(("ready", stamps))
    start_ns = await started
    for record in warmed:
        part.add(shifted(record, -start_ns))
    await driver.run(start_ns)
    loop.remove_reader(pipe.fileno())


def _feed(share: Share) -> Feed:
    feed: OpenLoop | ClosedLoop = (
        ClosedLoop(slots_of(share), share.clients, share.think_ns, share.until_ns)
        if share.due_ns is None
        else OpenLoop(slots_of(share))
    )
    return feed if share.conversations is None else Sessions(feed, partial(_turn, share))


def _driver(
    share: Share, feed: Feed, part: Part, net: tuple[Poller, SystemClock], counts: Counts, spare: int
) -> Driver:
    poller, clock = net
    pool = Pool(
        share.target, spare=spare, timeout_s=min(share.limits.timeout_s, CONNECT_LIMIT_S), stamped=share.kernel_stamps
    )
    return Driver(
        feed,
        Wire(pool, partial(Exchange, poller)),
        share.dialect,
        part,
        clock=clock,
        limits=share.limits,
        worker=share.worker,
        counts=counts,
    )


async def _warm_up(share: Share, net: tuple[Poller, SystemClock], drivers: list[Driver]) -> list[Record]:
    """Send the warm-up requests and wait for their ends. Their Records, on the monotonic clock itself."""
    if not share.warmup:
        return []
    held = Held()
    feed = OpenLoop(_slot(share, request, 0) for request in share.warmup)
    driver = _driver(share, feed, held, net, Counts(), len(share.warmup))
    drivers.append(driver)
    await driver.open()
    now_ns = time.monotonic_ns()
    await driver.run(now_ns)
    return [shifted(structs.replace(record, phase="warmup"), now_ns) for record in held.records]


def _obey(pipe: Pipe, drivers: Sequence[Driver], started: asyncio.Future[int]) -> None:
    try:
        order = pipe.recv()
    except (EOFError, OSError):  # the coordinator is gone: nobody waits for this run any more
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        order = ("stop",)
    if order[0] == "stop":
        for driver in drivers:
            driver.interrupt()
    if not started.done():
        started.set_result(order[1] if order[0] == "start" else time.monotonic_ns())


def _crash(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A bug of ours in a callback must not leave a run waiting for ever."""
    error = context.get("exception")
    if error is None:
        return
    traceback.print_exception(error, file=sys.stderr)
    os._exit(70)
