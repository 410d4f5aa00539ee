"""A worker process: opens its connections, waits for the common start, runs its driver, and writes its part file.

The worker and the coordinator send each other messages through a pipe:

    worker                                        coordinator
    imports modules, encodes requests             reads the server's metrics for the first time
                 <── ("connect",) ──
    opens its connections, sends warm-up requests
                 ── ("ready", (stamps, scheduling)) ──>
                                                  waits until every worker is ready
                 <── ("start", start_ns) ──
    sends its share of the load
                 ── ("drained", None) ──>
                                                  waits until every worker has ended its load
                 <── ("go on",) ──
    sends the last canaries
                 ── ("done", rescue) ──>
    exits

The coordinator may also send `("stop",)` at any time. Canaries are prompts with a known answer (--verify). Only workers
that send canaries send `drained` and wait for `go on`.

- `stamps` is the name of the timestamp source in use, and `scheduling` contains facts about the worker's priority.
- `start_ns` is the common start time of the run.
- `rescue` is the path of the file that contains the lines that could not be written to the part file, or None.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice, repeat
from multiprocessing import parent_process
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from msgspec import structs
from msgspec.structs import replace

from loadgen.analysis.run.record import encoding_problem, shift_record
from loadgen.analysis.run.runfile import RunWriter
from loadgen.engine.balance import Dealer, InFlightTable, LeastBusy
from loadgen.engine.canaries import SERIALS, CanaryAsker, CanaryLog, CanaryTask, TextChecker
from loadgen.engine.client_health import LiveCounters
from loadgen.engine.closed_loop import ClosedLoop, GraphRequests, RequestQueue, SessionQueue, Turns
from loadgen.engine.priority import raised_priority
from loadgen.engine.request_queue import OpenLoop, Schedule, ScheduledRequest
from loadgen.engine.session_progress import SessionProgress
from loadgen.engine.signals import INTERRUPTS
from loadgen.servers.backends.dialect import Dialect, request_body
from loadgen.servers.backends.output_check import expected_output
from loadgen.servers.backends.raw_bodies import complete_body
from loadgen.servers.lifeline import close_inherited, end_with_parent
from loadgen.servers.session_identity import SessionIdentity
from loadgen.servers.target import Target
from loadgen.servers.wire.http1 import encode_post
from loadgen.servers.wire.packet_socket import set_packet_capability
from loadgen.servers.wire.timestamp_sources import open_source, preload_source
from loadgen.workloads.cancellation import Cancellation
from loadgen.workloads.model_mix import ModelMix
from loadgen.workloads.prompts import SharedSpan
from loadgen.workloads.request import Request, merged_headers, wire_id
from loadgen.workloads.session_graph import SessionGraph
from loadgen.workloads.sessions import Session
from loadgen.workloads.workload import Prompts

if TYPE_CHECKING:
    import asyncio

    from loadgen.engine.driver import Driver
    from loadgen.engine.record_buffer import RecordBuffer
    from loadgen.servers.wire.pool import ConnectionUse
    from loadgen.servers.wire.timestamps import Share, TimestampSource


class BuildDriver(Protocol):
    """A function that builds a driver for the warm-up, the load or the canaries of a worker process.

    `_driver_builder` explains the arguments.
    """

    def __call__(
        self,
        queue: RequestQueue,
        sink: RunWriter | RecordBuffer,
        counts: LiveCounters,
        spare: int,
        canary_log: CanaryLog | None = None,
    ) -> Driver: ...


CONNECT_LIMIT_S = 30.0
"""Maximum time in seconds to open a connection. A shorter request timeout also limits it."""


class WorkerTask(msgspec.Struct, frozen=True):
    """The task of one worker process: the requests that it sends, their schedule, and the part file it writes.

    If the plan has classes of traffic, each worker process sends requests of one class. The client therefore never
    delays requests of one class because it is busy with another class.
    """

    number: int
    """Number of the process in the run, from 0. Its Records contain the number."""
    worker: int
    """Index of the process among the `workers` processes that share the load of the run, or of one class of traffic."""
    workers: int
    first_id: int
    """Id of the first request of the class of traffic, whose ids lie far apart. 0 for a run without classes."""
    prompts: Prompts
    schedule: Schedule
    timeout_s: float
    targets: tuple[Target, ...]
    """Addresses of the server. There are several targets if the requests are balanced over several replicas."""
    replica_names: tuple[str, ...]
    """The name of each target in Records. Empty for a single target, whose addresses name the replicas."""
    dealer: Dealer | None
    """Chooses the replica of each request. None: the run has a single target."""
    least_busy: bool
    """True if requests go to the replica with the fewest requests in flight (`--balance least-busy`)."""
    dialect: Dialect
    model: str
    model_mix: ModelMix | None
    """Models over which the requests are split. None: all requests go to `model`."""
    headers: dict[str, str]
    id_prefix: str
    """Random prefix of the request ids that are sent to the server (loadgen.workloads.request.wire_id)."""
    dialects: Mapping[str, Dialect]
    """Dialects of requests that have their own path, by path. Such requests are rare: most use `dialect`."""
    identity: SessionIdentity
    """The headers that identify sessions."""
    replica_header: str
    """Response header that names the replica, in lower case. Empty: none."""
    server_timing: bool
    """True if Records get the times that the server states about each request."""
    connections: ConnectionUse
    cancellation: Cancellation | None
    """Which requests are abandoned, and when. None: no request."""
    stamps: str
    """The requested timestamp source: `auto`, or a key of loadgen.servers.wire.timestamp_sources.SOURCES."""
    client_priority: str
    """`auto`, `realtime` or `normal` (loadgen.engine.priority)."""
    part: Path
    rotate_bytes: int = 0
    """Size of the files of Records of a long run (--soak). 0: the worker writes a single file."""
    canaries: CanaryTask | None = None
    """The canaries that this worker asks. None: another worker asks them, or the run has none."""
    checks_texts: bool = False
    """True if the texts of some responses are checked (loadgen.engine.canaries.TextChecker)."""

    def requests(self) -> Iterator[Request]:
        """Yield this worker's Requests in order of id. Every call yields the same Requests.

        If the workload has sessions, every turn of each session is yielded.
        """
        if self.prompts.has_graphs:
            return chain.from_iterable(graph.outline() for graph in self.graphs())
        if self.prompts.has_sessions:
            return chain.from_iterable(
                (session.request(), *session.remaining_requests()) for session in self.conversations()
            )

        own = own_prompts(self.prompts, self.worker, self.workers, self.prompts.spec.batch_size)
        requests = islice(own.requests(), self.worker, None, self.workers)
        if not self.first_id:
            return requests
        return (replace(request, id=request.id + self.first_id) for request in requests)

    def planned(self, due: int) -> int:
        """Return the number of requests that this worker sends if the run is not interrupted.

        If the run ends after a fixed duration, this number is not known in advance. The result is then `due`, the
        number of requests that have become due.
        """
        if self.schedule.until_ns is not None:
            return due
        if self.prompts.has_graphs:
            return sum(len(graph.nodes) for graph in self.graphs())
        if self.schedule.due_ns is None or self.prompts.has_sessions:
            return sum(1 for _ in self.requests())
        return len(self.schedule.due_ns)

    def conversations(self) -> Iterator[Session]:
        """Yield this worker's sessions. Called only for a workload with sessions."""
        turns = getattr(self.prompts.spec.workload, "turns", None) or 1
        own = own_prompts(self.prompts, self.worker, self.workers, turns)
        sessions = islice(own.conversations(), self.worker, None, self.workers)
        return (session.shifted(self.first_id) for session in sessions) if self.first_id else sessions

    def graphs(self) -> Iterator[SessionGraph]:
        """Yield this worker's session graphs. Called only for a workload whose sessions are graphs."""
        graphs = islice(self.prompts.graphs(), self.worker, None, self.workers)
        return (graph.shifted(self.first_id) for graph in graphs) if self.first_id else graphs

    def warmup(self) -> Sequence[Request]:
        """Return this worker's warm-up requests. They are sent before the run, and their Records have the phase
        `warmup`."""
        requests = self.prompts.warmup()[self.worker :: self.workers]
        return [replace(request, id=request.id - self.first_id) for request in requests]

    def schedule_request(
        self, request: Request, due_ns: int, conversation: Session | None = None, canary: int | None = None
    ) -> ScheduledRequest:
        """Encode `request`, and return it with its due time `due_ns`.

        If the request belongs to a session, `conversation` is the state of this session. If it is a canary, `canary` is
        the number of the canary. If the request cannot be encoded, the result contains the reason, and the other
        requests of the worker are still sent.
        """
        dialect = self.dialects.get(request.path, self.dialect) if request.path else self.dialect
        if self.model_mix is not None:
            request = self.model_mix.with_model(self.prompts.spec.seed, request)
        replica = self.dealer.choose(request, canary) if self.dealer is not None else 0
        target = self.targets[replica or 0]
        payload, not_encoded = b"", ""
        expected = None
        try:
            if request.raw:
                body, dialect = complete_body(request.raw, dialect)
            else:
                body = request_body(request, dialect, self.model)
            headers = dialect.media_headers | {"X-Request-Id": wire_id(self.id_prefix, request.id)}
            headers |= self.identity.headers(request, self.id_prefix)
            headers = merged_headers(headers, self.headers, request.headers, target.proxy_headers)
            path = target.request_target(dialect.path)
            payload = encode_post(path, target.host_field, headers, body)
            expected = expected_output(body)
        except Exception as error:
            not_encoded = encoding_problem(error)
        # The payload has the prompt. A second copy of it would take too much memory.
        without_prompt = replace(request, prompt="", messages=(), images=(), batch=(), raw=b"", expected=expected)
        slot = ScheduledRequest(without_prompt, payload, due_ns, conversation=conversation, not_encoded=not_encoded)
        slot.replica = replica
        if dialect is not self.dialect:
            slot.dialect = dialect
        if self.cancellation and request.id >= 0 and self.cancellation.chooses(self.prompts.spec.seed, request.id):
            slot.cancellation = self.cancellation
        return slot

    def schedule_turn(self, conversation: Session, due_ns: int) -> ScheduledRequest:
        """Encode the current turn of the session `conversation`, and return the turn with its due time."""
        return self.schedule_request(conversation.request(), due_ns, conversation)

    def schedule_node(self, progress: SessionProgress, node: int, due_ns: int) -> ScheduledRequest:
        """Return the encoded request at the index `node` of a session, with its due time `due_ns`.

        The requests of the session form a graph. `progress` tracks which of them have been sent.
        """
        slot = self.schedule_request(progress.request(node), due_ns)
        slot.progress = progress
        slot.node = node
        slot.starts_others = progress.starts_others(node)
        return slot

    def request_queue(self, counts: LiveCounters) -> RequestQueue:
        """Return the queue of this worker's requests. The queue encodes each request shortly before it is due.

        `counts.prepared` is increased for each encoded request.
        """

        def counted(slots: Iterator[ScheduledRequest]) -> Iterator[ScheduledRequest]:
            for slot in slots:
                counts.prepared += 1
                yield slot

        schedule = self.schedule
        due_ns = schedule.due_ns if schedule.due_ns is not None else repeat(0)
        if self.prompts.has_graphs:
            starts = map(SessionProgress, self.graphs())
            slots = counted(map(self.schedule_node, starts, repeat(0), due_ns))
        elif self.prompts.has_sessions:
            slots = counted(map(self.schedule_turn, self.conversations(), due_ns))
        else:
            slots = counted(map(self.schedule_request, self.requests(), due_ns))
        queue: OpenLoop | ClosedLoop
        if schedule.due_ns is None:
            queue = ClosedLoop(slots, schedule.clients, schedule.think_ns, schedule.until_ns)
        else:
            queue = OpenLoop(slots)
        if self.prompts.has_graphs:
            return SessionQueue(queue, GraphRequests(self.schedule_node))
        return SessionQueue(queue, Turns(self.schedule_turn)) if self.prompts.has_sessions else queue

    def warmup_queue(self, requests: Sequence[Request]) -> RequestQueue:
        """Return a queue that contains these warm-up requests."""
        slots = (self.schedule_request(request, 0) for request in requests)
        return ClosedLoop(slots, self.schedule.clients) if self.schedule.due_ns is None else OpenLoop(slots)


def own_prompts(prompts: Prompts, worker: int, workers: int, group: int = 1) -> Prompts:
    """Return the prompts of a run for worker number `worker` of `workers`.

    Building prompts is slow, so a worker builds only the prompts that it sends. All other prompts are empty texts. The
    workers take turns: each one gets `group` consecutive prompts, then the next worker gets `group` prompts, and so on.
    A group is the turns of a session, or the inputs of a request.
    """

    def own_prompt(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str | tuple[int, ...]:
        if number // group % workers != worker:
            return ""
        return prompts.prompt(number, input_tokens, shared)

    return replace(prompts, prompt=own_prompt)


def preload(tasks: Sequence[WorkerTask]) -> None:
    """Import modules that the workers need, before the workers are forked. The workers then share these modules.

    With several workers, this process imports uvloop and the driver. A single worker imports these two itself, while
    the coordinator does other work. The modules of the timestamp source are always imported here.
    """
    preload_source(tasks[0].stamps)
    if len(tasks) > 1:
        import uvloop  # noqa: F401

        from loadgen.engine import driver  # noqa: F401


def work(
    task: WorkerTask,
    pipe: Pipe,
    counts: LiveCounters,
    inherited: Sequence[Pipe],
    share: Share = (0, 1),
    in_flight: InFlightTable | None = None,
) -> None:
    """Run the worker process.

    The fork has copied the coordinator's ends of the pipes into this process. `inherited` contains these copies, and
    this function closes them first. `share` is the index of this worker and the number of workers on this machine.
    `in_flight` counts the requests in flight per replica. Only a task with `least_busy` needs it.
    """
    for other in inherited:
        other.close()  # otherwise no worker would notice that the coordinator has ended
    close_inherited()
    for number in INTERRUPTS:  # terminals and service managers send them to all processes: the coordinator decides
        signal.signal(number, signal.SIG_IGN)
    with ThreadPoolExecutor(1) as executor:  # a packet ring takes 20 ms to open: import in the meantime
        opening = executor.submit(_open_stamps, task, share)
        set_packet_capability(effective=False)  # for this thread, and threads that it starts later
        parent = parent_process()
        end_with_parent(parent.pid if parent else None, pipe.fileno())
        import asyncio

        import uvloop

        from loadgen.engine import driver  # noqa: F401

        stamps = opening.result()
    part = RunWriter(task.part, task.number, task.rotate_bytes)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        least_busy = LeastBusy(in_flight, share[0]) if in_flight is not None and task.least_busy else None
        runner.run(_work(task, part, pipe, counts, stamps, least_busy))
    stamps.close()
    with contextlib.suppress(OSError):
        pipe.send(("done", part.close()))


def _open_stamps(task: WorkerTask, share: Share) -> TimestampSource:
    """Open the timestamp source of a worker process. `share` is the index of the worker and the number of workers.

    Some sources open packet sockets, which require a Linux capability. The kernel grants the capability per thread.
    This function therefore runs in a separate thread, so that no other code has the capability.
    """
    set_packet_capability(effective=True)
    return open_source(task.stamps, [address for target in task.targets for address in target.addresses], share)


async def _work(
    task: WorkerTask,
    part: RunWriter,
    pipe: Pipe,
    counts: LiveCounters,
    stamps: TimestampSource,
    least_busy: LeastBusy | None,
) -> None:
    """Send this worker's requests and write their Records to `part`."""
    import asyncio

    from loadgen.engine.record_buffer import RecordBuffer

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(partial(_crash, part))
    build_driver = _driver_builder(task, loop, stamps, least_busy)

    # Encode the first requests, then wait until the coordinator allows connections.
    driver = build_driver(task.request_queue(counts), part, counts, task.schedule.spare)
    drivers = [driver]
    orders = _Orders(allowed=loop.create_future(), started=loop.create_future(), goes_on=loop.create_future())
    loop.add_reader(pipe.fileno(), _on_order, pipe, drivers, orders)
    await orders.allowed

    # Send the warm-up requests. Their Records are kept in memory until the start time of the run is known.
    warmup = RecordBuffer()
    warmup_requests = task.warmup()
    warmup_start_ns = 0
    if warmup_requests:
        spare = len(warmup_requests) if task.schedule.due_ns is not None else task.schedule.clients
        drivers.append(build_driver(task.warmup_queue(warmup_requests), warmup, LiveCounters(), spare))
        await drivers[-1].open()
        warmup_start_ns = time.monotonic_ns()
        await drivers[-1].run(warmup_start_ns)

    # Ask the canaries without load. Their answers are kept in memory, too.
    asker: CanaryAsker | None = None
    if task.canaries is not None:
        asker = _canary_asker(task, task.canaries, build_driver, drivers, orders)
        await asker.ask_alone("before")

    # Open the connections, report that this worker is ready, and wait for the start.
    await driver.open()
    gc.collect()
    gc.freeze()
    gc.disable()  # a run makes hardly any reference cycles, and a collection would delay reads
    with raised_priority(task.client_priority, own_session=True) as scheduling:
        with contextlib.suppress(OSError):  # the coordinator has ended: `_on_order` notices it
            pipe.send(("ready", (stamps.active_source.name, scheduling)))
        start_ns = await orders.started
        for record in warmup.records:
            part.add(shift_record(structs.replace(record, phase="warmup"), warmup_start_ns - start_ns))
        if asker is None:
            await driver.run(start_ns)
        else:
            await _run_with_canaries(driver, asker, start_ns, pipe, orders.goes_on)
            for canary in asker.log.shifted(-start_ns):
                part.add(canary)
    loop.remove_reader(pipe.fileno())


def _driver_builder(
    task: WorkerTask, loop: asyncio.AbstractEventLoop, stamps: TimestampSource, least_busy: LeastBusy | None
) -> BuildDriver:
    """Return a function that builds drivers for a worker process. A driver sends the requests of a queue.

    The returned function has these parameters (see BuildDriver):

    - `queue`: the requests to send.
    - `sink`: receives the Records of these requests.
    - `counts`: the live counters that the driver updates.
    - `spare`: the number of connections that are opened in advance.
    - `canary_log`: receives the answers to canaries. None for other requests.
    """
    from loadgen.engine.clock import SystemClock
    from loadgen.engine.driver import Driver, Recorder
    from loadgen.engine.replica_pools import ReplicaPools
    from loadgen.servers.wire.addresses import Connector
    from loadgen.servers.wire.deferred_reads import RECEIVE_BUFFER_BYTES, SELDOM, ReadPacer
    from loadgen.servers.wire.disk_spill import DiskSpill
    from loadgen.servers.wire.poller import Poller
    from loadgen.servers.wire.pool import Pool
    from loadgen.servers.wire.transport import Exchange

    # Where packets are timestamped, reads may be deferred. A burst then needs larger receive buffers.
    pacer: ReadPacer | None = None
    disk_spill: DiskSpill | None = None
    receive_buffer = 0
    if not stamps.by_read:
        max_delay_s, busy = _read_policy(task)
        pacer = ReadPacer(
            max_delay_s, busy, rate_dropped=stamps.rate_dropped, by_read=lambda: stamps.active_source.by_read
        )
        disk_spill = DiskSpill(task.part.parent)
        receive_buffer = RECEIVE_BUFFER_BYTES if (max_delay_s, busy) == SELDOM else 0
    clock = SystemClock(loop)
    exchange = partial(Exchange, Poller(loop, pacer))

    def build(
        queue: RequestQueue,
        sink: RunWriter | RecordBuffer,
        counts: LiveCounters,
        spare: int,
        canary_log: CanaryLog | None = None,
    ) -> Driver:
        limit_s = min(task.timeout_s, CONNECT_LIMIT_S)
        pools = [
            Pool(
                Connector(target, limit_s, stamps, receive_buffer, first=task.number, name=name),
                spare=spare if task.dealer is None else task.dealer.spare(replica, spare),
                meanwhile=queue.draw,
                use=task.connections,
            )
            for replica, (target, name) in enumerate(zip(task.targets, task.replica_names, strict=True))
        ]
        pool = pools[0] if len(pools) == 1 else ReplicaPools(pools, task.targets, least_busy)
        max_read_delay_ns = pacer.widest_ns if pacer else int
        recorder = Recorder(task.dialect, sink, task.number, counts, stamps, max_read_delay_ns, disk_spill)
        recorder.replica_header = task.replica_header
        recorder.server_timing = task.server_timing
        recorder.on_head = task.identity.capture
        if canary_log is not None:
            recorder.on_response, recorder.samples_client = canary_log.take, False
        elif task.checks_texts:
            recorder.on_response = TextChecker(task.dialect).take
        in_flight_max = None if queue.closed else task.schedule.in_flight
        return Driver(
            queue,
            pool,
            exchange,
            recorder,
            clock=clock,
            timeout_s=task.timeout_s,
            in_flight_max=in_flight_max,
            queues=task.schedule.queues,
        )

    return build


def _canary_asker(
    task: WorkerTask, canaries: CanaryTask, build_driver: BuildDriver, drivers: list[Driver], orders: _Orders
) -> CanaryAsker:
    """Return the object that sends the `canaries` (prompts with a known answer) of a worker.

    The object calls `build_driver` to get drivers, which send its requests. Each driver is appended to the list
    `drivers`, so that an order to stop the worker also stops the driver. A driver that is built after such an order
    sends nothing.
    """
    from loadgen.engine.record_buffer import RecordBuffer

    log = CanaryLog(task.dialect, canaries.prompts[0].number * SERIALS)

    def build(queue: RequestQueue, clients: int) -> Driver:
        drivers.append(build_driver(queue, RecordBuffer(), LiveCounters(), clients, log))
        if orders.goes_on.done() and not orders.goes_on.result():
            drivers[-1].interrupt()
        return drivers[-1]

    def encode(request: Request, due_ns: int) -> ScheduledRequest:
        return task.schedule_request(request, due_ns, canary=log.number_of(request))

    return CanaryAsker(canaries, log, encode, build)


async def _run_with_canaries(
    driver: Driver, asker: CanaryAsker, start_ns: int, pipe: Pipe, goes_on: asyncio.Future[bool]
) -> None:
    """Send the load of this worker with `driver`, and canaries with `asker`.

    A canary is a prompt with a known answer. Canaries are sent until the load of this worker has ended. The worker then
    waits for `goes_on`, which gets its result when the loads of all workers have ended. If the result is True, the
    canaries are sent once more, one at a time. It is False if the run was stopped.
    """
    import asyncio

    during = asyncio.create_task(asker.ask_during(start_ns))
    await driver.run(start_ns)
    asker.stop()
    await during
    with contextlib.suppress(OSError):  # the coordinator has ended: `_on_order` notices it
        pipe.send(("drained", None))
    if await goes_on:
        await asker.ask_alone("after")


def _read_policy(task: WorkerTask) -> tuple[float, float]:
    """Return two settings of the ReadPacer of a worker, which delays reads from sockets to save CPU time.

    - The maximum delay of a read in seconds.
    - A share of a CPU core from 0 to 1. Reads are delayed only if the worker needs more CPU time than this share.

    If requests of `task` may wait for the end of a response, the maximum delay is short, because a late read would
    delay these requests too.
    """
    from loadgen.servers.wire.deferred_reads import MODERATE, OFTEN, SELDOM

    schedule = task.schedule
    ends_are_awaited = task.prompts.has_sessions or schedule.due_ns is None or schedule.in_flight < len(schedule.due_ns)
    if ends_are_awaited:
        return OFTEN
    if schedule.at_once == schedule.in_flight:  # a burst
        return SELDOM
    return MODERATE


class _Orders(NamedTuple):
    """Futures that are done when the coordinator has sent the corresponding order to this worker."""

    allowed: asyncio.Future[None]
    """Done when the worker may open its connections."""
    started: asyncio.Future[int]
    """The start time of the run in ns (CLOCK_MONOTONIC)."""
    goes_on: asyncio.Future[bool]
    """True if canaries are asked after the load. False if the run was stopped."""


def _on_order(pipe: Pipe, drivers: Sequence[Driver], orders: _Orders) -> None:
    """Read an order of the coordinator from `pipe` and carry it out: connect, start, stop, or go on.

    `orders` contains the futures that are waiting for orders. The order to go on comes after the load. It lets the
    worker send its last canaries (prompts with a known answer). If the coordinator has died, the worker stops.
    """
    try:
        order = pipe.recv()
    except (EOFError, OSError):  # the coordinator has ended, so no process would read the results
        orders.started.get_loop().remove_reader(pipe.fileno())
        order = ("stop",)
    if not orders.allowed.done():
        orders.allowed.set_result(None)
    if order[0] == "stop":
        for driver in drivers:
            driver.interrupt()
    if order[0] in ("stop", "go on") and not orders.goes_on.done():
        orders.goes_on.set_result(order[0] == "go on")
    if order[0] in ("stop", "start") and not orders.started.done():
        orders.started.set_result(order[1] if order[0] == "start" else time.monotonic_ns())


def _crash(part: RunWriter, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an exception in a callback of the event loop: end the worker process.

    Otherwise the run could wait forever for this worker. The Records that were written so far are kept.
    """
    error = context.get("exception")
    if error is not None:
        traceback.print_exception(error, file=sys.stderr)
        part.close()
        os._exit(70)
