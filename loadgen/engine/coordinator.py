"""The coordinator: forks the workers, starts them together, watches them, and merges their part files into the Run."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from ctypes import sizeof
from mmap import mmap
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import msgspec

from loadgen.analysis.run.runfile import Footer, Header, SchedulingFacts, open_run
from loadgen.engine.client_health import LiveCounters, sum_counters
from loadgen.engine.clock import ClockPairs
from loadgen.engine.merge_parts import WorkerExit, merge_parts
from loadgen.engine.priority import least_raised
from loadgen.engine.signals import Interrupts
from loadgen.engine.telemetry_sampler import Sampler
from loadgen.engine.worker import WorkerTask, preload, work
from loadgen.servers.wire.timestamp_sources import least_exact_source

START_LEAD_NS = 20_000_000
CONNECTION_CHECK_NS = 5_000
"""The run starts START_LEAD_NS after the order to start, and CONNECTION_CHECK_NS per connection. In this time every
worker reads the order, checks each of its connections once more, and begins to watch the clock."""
POLL_S = 0.1
BUSY_LIMIT_S = 5.0
"""Time that a worker has to follow an interrupt before the start. A worker that still builds prompts is killed then,
because it has measured nothing."""


class Worker(msgspec.Struct):
    """One worker as the coordinator sees it."""

    task: WorkerTask
    process: ForkProcess
    pipe: Pipe
    counts: LiveCounters
    stamps: str = ""
    """The name of its timestamp source, once its connections are open."""
    scheduling: SchedulingFacts = SchedulingFacts()
    """The scheduling priority at which it sends and reads."""
    done: bool = False
    rescued: Path | None = None
    """The file with the lines that the run's disk refused."""


def run(
    tasks: Sequence[WorkerTask],
    header: Header,
    folder: Path,
    on_progress: Callable[[str, LiveCounters], str | None],
    sampler: Callable[[], Sampler],
) -> Footer:
    """Run all tasks and write `folder/run.jsonl`. Raises OutputError if the run file cannot be written.

    `on_progress` gets a phase and the live counters ten times a second. If it returns a reason, the run ends as if it
    was interrupted. The Sampler that `sampler` opens reads the server, the GPUs and the host during the run. The first
    interrupt ends the run and keeps what was received; the second one also kills the workers.
    """
    telemetry = Sampler({})
    ended_ns: int | None = None
    telemetry_parts: Sequence[Path] = ()
    notes: list[str] = []

    def sample_idle() -> None:
        nonlocal telemetry
        telemetry = sampler()
        telemetry.idle()

    def begin(stamps: str, workers: Sequence[Worker]) -> int:
        telemetry.start()
        header.telemetry = telemetry.facts
        header.client["scheduling"] = least_raised(worker.scheduling for worker in workers)
        max_connections = max(task.schedule.spare for task in tasks)
        start_ns = time.monotonic_ns() + START_LEAD_NS + CONNECTION_CHECK_NS * max_connections
        open_run(folder, header, stamps, start_ns, ClockPairs().to_realtime(start_ns))
        telemetry.begin(header.start_ns, folder, lambda: sum_counters(worker.counts for worker in workers))
        return header.start_ns

    def show(phase: str, workers: Sequence[Worker]) -> None:
        reason = on_progress(phase, sum_counters(worker.counts for worker in workers))
        if reason and not interrupts.count:
            interrupts.count += 1
            notes.append(reason)

    def end() -> None:
        nonlocal ended_ns, telemetry_parts
        ended_ns = time.monotonic_ns()
        telemetry_parts = telemetry.end(patient=not interrupts.count)

    interrupts = Interrupts()
    with interrupts.counting():
        try:
            exits = run_workers(tasks, begin, interrupts, show, end, sample_idle)
        finally:
            telemetry.stop()
        return merge_parts(
            exits,
            header,
            folder / "run.jsonl",
            interrupted=interrupts.count > 0,
            ended_ns=ended_ns,
            telemetry_parts=telemetry_parts,
            notes=notes,
        )


def run_workers(
    tasks: Sequence[WorkerTask],
    begin: Callable[[str, Sequence[Worker]], int | None],
    interrupts: Interrupts,
    on_progress: Callable[[str, Sequence[Worker]], None],
    end: Callable[[], None],
    before_connect: Callable[[], None] = lambda: None,
) -> list[WorkerExit]:
    """Fork a worker per task, let them connect, start them together, and wait until they have ended.

    `before_connect` is called while the workers encode their requests. `begin` gets the name of the least exact
    timestamp source once every connection is open. It returns the start instant on CLOCK_MONOTONIC, or None if the run
    must not start. `end` is called as soon as every worker is done.
    """
    workers: list[Worker] = []
    preload(tasks)
    gc.freeze()  # else a garbage collection in a worker would touch, and so copy, every object of this process
    try:
        for task in tasks:
            workers.append(_fork(task, workers, (len(workers), len(tasks))))
        before_connect()
        _order(workers, ("connect",))
        _wait_until(
            workers,
            lambda worker: bool(worker.stamps),
            interrupts,
            lambda: on_progress("connecting", workers),
            patience_s=BUSY_LIMIT_S,
        )
        start_ns = begin(least_exact_source(worker.stamps for worker in workers), workers)
        _order(workers, ("stop",) if interrupts.count or start_ns is None else ("start", start_ns))
        _wait_until(workers, lambda worker: worker.done, interrupts, lambda: on_progress("running", workers))
        end()
    finally:
        for worker in workers:
            worker.process.join(1 if worker.done else 0)
            worker.process.kill()
            worker.process.join()
    on_progress("ended", workers)
    exits = []
    for worker in workers:
        code = worker.process.exitcode or 0
        description = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        due = worker.counts.due if interrupts.count or not code else worker.task.planned(worker.counts.due)
        exits.append(WorkerExit(worker.task, due, description, worker.rescued))
    return exits


def _fork(task: WorkerTask, earlier: Sequence[Worker], share: tuple[int, int]) -> Worker:
    """Fork the worker process of a task. `earlier` are the workers whose pipes it inherits."""
    context = multiprocessing.get_context("fork")  # nothing is pickled, and the prompts are shared memory
    ours, theirs = context.Pipe()
    counts = LiveCounters.from_buffer(mmap(-1, sizeof(LiveCounters)))  # anonymous shared memory
    inherited = [ours, *(worker.pipe for worker in earlier)]
    process = context.Process(
        target=work, args=(task, theirs, counts, inherited, share), name=f"loadgen-worker-{task.worker}"
    )
    process.start()
    theirs.close()
    return Worker(task, process, ours, counts)


def _wait_until(
    workers: Sequence[Worker],
    reached: Callable[[Worker], bool],
    interrupts: Interrupts,
    show: Callable[[], None],
    *,
    patience_s: float = math.inf,
) -> None:
    """Wait until every worker has reached a point or has ended. The first interrupt stops the workers. The second one
    kills those that have not followed it, and so does a wait of `patience_s` after the first."""
    handled_interrupts = 0
    limit_s = math.inf
    while pending := [worker for worker in workers if not (reached(worker) or worker.done)]:
        ready = wait([worker.pipe for worker in pending], POLL_S)
        for worker in pending:
            if worker.pipe in ready:
                _receive(worker)
        if interrupts.count > handled_interrupts:
            handled_interrupts = interrupts.count
            if handled_interrupts == 1:
                _order(pending, ("stop",))
                limit_s = time.monotonic() + patience_s
        if handled_interrupts > 1 or time.monotonic() > limit_s:
            for worker in pending:
                worker.process.kill()
        show()


def _receive(worker: Worker) -> None:
    """Receive a message from a worker: it is ready, or done. A worker whose pipe is closed is done."""
    try:
        word, value = worker.pipe.recv()
    except (EOFError, OSError):
        word, value = "done", None
    if word == "ready":
        worker.stamps, worker.scheduling = value
    else:
        worker.done = True
        worker.rescued = value


def _order(workers: Sequence[Worker], order: tuple[object, ...]) -> None:
    """Send an order to these workers, if they still live."""
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.pipe.send(order)
