"""One worker process: opens its share of the connections, waits for the common start, drives, and writes its part.

worker                          coordinator
imports, encodes                reads the server for the first time
            <── ("connect",) ──
connect ... ── ("ready", (stamps, scheduling)) ──>
            <── ("start", start_ns) ──      or ("stop",) at any time
drive   ... ── ("done", rescue) ──>         and exit
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice, repeat
from multiprocessing import parent_process
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs
from msgspec.structs import replace

from loadgen.analysis.run.record import encoding_problem, shift_record
from loadgen.analysis.run.runfile import RunWriter
from loadgen.engine.client_health import LiveCounters
from loadgen.engine.closed_loop import ClosedLoop, RequestQueue, Sessions
from loadgen.engine.priority import raised_priority
from loadgen.engine.request_queue import OpenLoop, Schedule, ScheduledRequest
from loadgen.engine.signals import INTERRUPTS
from loadgen.servers.auth import Target
from loadgen.servers.backends.dialect import Dialect
from loadgen.servers.lifeline import close_inherited, end_with_parent
from loadgen.servers.wire.http1 import encode_post
from loadgen.servers.wire.packet_socket import set_packet_capability
from loadgen.servers.wire.timestamp_sources import open_source, preload_source
from loadgen.workloads.prompts import SharedSpan
from loadgen.workloads.request import Request
from loadgen.workloads.sessions import Conversation
from loadgen.workloads.workload import Prompts

if TYPE_CHECKING:
    import asyncio

    from loadgen.engine.driver import Driver
    from loadgen.engine.record_buffer import RecordBuffer
    from loadgen.servers.wire.timestamps import Share, TimestampSource

CONNECT_LIMIT_S = 30.0
"""A connection that takes longer than this, or than the request's own time limit, is given up."""


class WorkerTask(msgspec.Struct, frozen=True):
    """What one worker process is given: its part of the prompts, of the schedule and of the Run."""

    worker: int
    workers: int
    prompts: Prompts
    schedule: Schedule
    timeout_s: float
    target: Target
    dialect: Dialect
    model: str
    headers: dict[str, str]
    stamps: str
    """The source of arrival instants that is wanted, a key of loadgen.servers.wire.timestamp_sources.SOURCES."""
    client_priority: str
    """`auto`, `realtime` or `normal` (loadgen.engine.priority)."""
    part: Path

    def requests(self) -> Iterator[Request]:
        """Draws this worker's Requests, the same ones each time, in order of id; of sessions, all turns of each."""
        if self.prompts.has_sessions:
            return chain.from_iterable(
                (session.request(), *session.remaining_requests()) for session in self.conversations()
            )

        def own(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str | tuple[int, ...]:
            """Of the others nobody looks at the prompts, and to draw them takes long."""
            return self.prompts.prompt(number, input_tokens, shared) if number % self.workers == self.worker else ""

        return islice(replace(self.prompts, prompt=own).requests(), self.worker, None, self.workers)

    def planned(self, due: int) -> int:
        """How many requests it would have sent in the end; `due` of them where only the clock was to end it."""
        if self.schedule.until_ns is not None:
            return due
        if self.schedule.due_ns is None or self.prompts.has_sessions:
            return sum(1 for _ in self.requests())
        return len(self.schedule.due_ns)

    def conversations(self) -> Iterator[Conversation]:
        """Draws this worker's sessions, where the workload is of sessions."""
        return islice(self.prompts.conversations(), self.worker, None, self.workers)

    def warmup(self) -> Sequence[Request]:
        """What it sends before the clock starts; their Records are marked."""
        return self.prompts.warmup()[self.worker :: self.workers]

    def slot(self, request: Request, due_ns: int, conversation: Conversation | None = None) -> ScheduledRequest:
        """Return the slot of a request with every byte that will be sent. A request that cannot be encoded gets a slot
        that says why, so that it fails alone and the other requests of the worker go on."""
        headers = {**self.headers, "X-Request-Id": str(request.id)}
        payload, not_encoded = b"", ""
        try:
            body = self.dialect.encode(request, self.model)
            payload = encode_post(self.target.path + self.dialect.path, self.target.host_field, headers, body)
        except Exception as error:
            not_encoded = encoding_problem(error)
        said = replace(request, prompt="", messages=(), images=())  # in the payload, and twice is too much room
        return ScheduledRequest(said, payload, due_ns, conversation=conversation, not_encoded=not_encoded)

    def turn(self, conversation: Conversation, due_ns: int) -> ScheduledRequest:
        """The present turn of a session."""
        return self.slot(conversation.request(), due_ns, conversation)

    def feed(self) -> RequestQueue:
        """This worker's slots, encoded as they are drawn."""
        schedule, sessions = self.schedule, self.prompts.has_sessions
        due_ns = schedule.due_ns if schedule.due_ns is not None else repeat(0)
        slots = map(self.turn, self.conversations(), due_ns) if sessions else map(self.slot, self.requests(), due_ns)
        feed: OpenLoop | ClosedLoop = (
            ClosedLoop(slots, schedule.clients, schedule.think_ns, schedule.until_ns)
            if schedule.due_ns is None
            else OpenLoop(slots)
        )
        return Sessions(feed, self.turn) if sessions else feed


def preload(tasks: Sequence[WorkerTask]) -> None:
    """Import what several workers need once for all; of one alone, what its coordinator needs too in the end."""
    preload_source(tasks[0].stamps)
    if len(tasks) > 1:
        import uvloop  # noqa: F401

        from loadgen.engine import driver  # noqa: F401


def work(task: WorkerTask, pipe: Pipe, counts: LiveCounters, inherited: Sequence[Pipe], share: Share = (0, 1)) -> None:
    """The worker process's main function. `inherited` are the coordinator's pipe ends, which a fork copies; `share`
    says which of this machine's workers it is."""
    for other in inherited:
        other.close()  # Otherwise no worker would notice the coordinator's death
    close_inherited()
    for number in INTERRUPTS:  # a terminal or a service manager sends them to all: the coordinator decides
        signal.signal(number, signal.SIG_IGN)
    with ThreadPoolExecutor(1) as beside:  # the kernel takes 20 ms to open a packet ring, and imports as long
        opening = beside.submit(_open_stamps, task, share)
        set_packet_capability(effective=False)  # of this thread alone, and of those that it starts
        end_with_parent(parent.pid if (parent := parent_process()) else None, pipe.fileno())
        import asyncio

        import uvloop

        from loadgen.engine import driver  # noqa: F401

        stamps = opening.result()
    part = RunWriter(task.part)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(task, part, pipe, counts, stamps))
    stamps.close()
    with contextlib.suppress(OSError):
        pipe.send(("done", part.close()))


def _open_stamps(task: WorkerTask, share: Share) -> TimestampSource:
    """In a thread of its own, whose rights end with it."""
    set_packet_capability(effective=True)
    return open_source(task.stamps, task.target.addresses, share)


async def _work(task: WorkerTask, part: RunWriter, pipe: Pipe, counts: LiveCounters, stamps: TimestampSource) -> None:
    import asyncio

    from loadgen.engine.clock import SystemClock
    from loadgen.engine.driver import Driver, Recorder
    from loadgen.engine.record_buffer import RecordBuffer
    from loadgen.servers.wire.addresses import Connector
    from loadgen.servers.wire.deferred_reads import MODERATE, OFTEN, RECEIVE_BUFFER_BYTES, SELDOM, ReadPacer
    from loadgen.servers.wire.disk_spill import DiskSpill
    from loadgen.servers.wire.poller import Poller
    from loadgen.servers.wire.pool import Pool
    from loadgen.servers.wire.transport import Exchange

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(partial(_crash, part))
    allowed: asyncio.Future[None] = loop.create_future()
    started: asyncio.Future[int] = loop.create_future()
    due_ns, maximum = task.schedule.due_ns, task.schedule.in_flight
    waited_for = task.prompts.has_sessions or due_ns is None or maximum < len(due_ns)
    apart = OFTEN if waited_for else SELDOM if task.schedule.at_once == maximum else MODERATE
    sweeps = (
        None
        if stamps.by_read
        else ReadPacer(*apart, rate_dropped=stamps.rate_dropped, by_read=lambda: stamps.active_source.by_read)
    )
    room = RECEIVE_BUFFER_BYTES if sweeps is not None and apart is SELDOM else 0
    aside = None if sweeps is None else DiskSpill(task.part.parent)
    clock, exchange = SystemClock(loop), partial(Exchange, Poller(loop, sweeps))

    def driver_of(feed: RequestQueue, sink: RunWriter | RecordBuffer, counts: LiveCounters, spare: int) -> Driver:
        limit_s = min(task.timeout_s, CONNECT_LIMIT_S)
        connecting = Connector(task.target, limit_s, stamps, room, first=task.worker)
        pool = Pool(connecting, spare=spare, meanwhile=feed.draw)
        recorder = Recorder(task.dialect, sink, task.worker, counts, stamps, sweeps.widest_ns if sweeps else int, aside)
        in_flight_max = None if feed.closed else task.schedule.in_flight
        return Driver(
            feed, pool, exchange, recorder, clock=clock, timeout_s=task.timeout_s, in_flight_max=in_flight_max
        )

    driver = driver_of(task.feed(), part, counts, task.schedule.spare)
    drivers = [driver]
    loop.add_reader(pipe.fileno(), _obey, pipe, drivers, allowed, started)
    await allowed
    held, warmup, warm_ns = RecordBuffer(), task.warmup(), 0
    if warmup:
        slots, clients = (task.slot(request, 0) for request in warmup), task.schedule.clients
        feed = ClosedLoop(slots, clients) if due_ns is None else OpenLoop(slots)
        drivers.append(driver_of(feed, held, LiveCounters(), len(warmup) if due_ns is not None else clients))
        await drivers[-1].open()
        warm_ns = time.monotonic_ns()
        await drivers[-1].run(warm_ns)
    await driver.open()
    gc.collect()
    gc.freeze()
    gc.disable()  # what the run makes has no cycles worth finding, and a collection would delay reads
    with raised_priority(task.client_priority, own_session=True) as scheduling:
        with contextlib.suppress(OSError):  # the coordinator is gone: `_obey` hears of it
            pipe.send(("ready", (stamps.active_source.name, scheduling)))
        start_ns = await started
        for record in held.records:
            part.add(shift_record(structs.replace(record, phase="warmup"), warm_ns - start_ns))
        await driver.run(start_ns)
    loop.remove_reader(pipe.fileno())


def _obey(pipe: Pipe, drivers: Sequence[Driver], allowed: asyncio.Future[None], started: asyncio.Future[int]) -> None:
    try:
        order = pipe.recv()
    except (EOFError, OSError):  # the coordinator is gone: nobody waits for this run any more
        started.get_loop().remove_reader(pipe.fileno())
        order = ("stop",)
    if not allowed.done():
        allowed.set_result(None)
    if order[0] == "connect":
        return
    if order[0] == "stop":
        for driver in drivers:
            driver.interrupt()
    if not started.done():
        started.set_result(order[1] if order[0] == "start" else time.monotonic_ns())


def _crash(part: RunWriter, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A bug of ours in a callback must not leave a run waiting for ever, nor lose what was recorded."""
    if (error := context.get("exception")) is not None:
        traceback.print_exception(error, file=sys.stderr)
        part.close()
        os._exit(70)
