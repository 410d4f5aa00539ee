"""The coordinator of a run.

It forks the workers, starts them together, watches them, and merges their part files into the run file.
"""

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
from loadgen.engine.balance import InFlightTable
from loadgen.engine.client_health import LiveCounters, sum_counters
from loadgen.engine.clock import ClockPairs
from loadgen.engine.command_runner import CommandRunner
from loadgen.engine.merge_parts import WorkerExit, merge_parts
from loadgen.engine.priority import least_raised
from loadgen.engine.record_keeper import RecordKeeper
from loadgen.engine.signals import Interrupts
from loadgen.engine.telemetry_sampler import Sampler
from loadgen.engine.worker import WorkerTask, preload, work
from loadgen.servers.wire.timestamp_sources import least_exact_source

START_LEAD_NS = 20_000_000
CONNECTION_CHECK_NS = 5_000
"""The run starts `START_LEAD_NS + CONNECTION_CHECK_NS * connections` after the order to start.

In this time every worker reads the order, checks each of its connections once more, and begins to watch the clock.
"""
POLL_S = 0.1
MAX_UNWRITTEN_BYTES = 256 << 20
"""Maximum size in bytes of the Records that wait in memory because they could not be written to disk, in all workers. A
run with more of them ends, because Records in memory would be lost if a worker ran out of memory."""
BUSY_LIMIT_S = 5.0
"""Maximum time in seconds for a worker to follow an interrupt before the start.

A worker that still builds prompts after this time is killed. No measurement is lost.
"""


class Worker(msgspec.Struct):
    """One worker process, as the coordinator sees it."""

    task: WorkerTask
    process: ForkProcess
    pipe: Pipe
    counts: LiveCounters
    stamps: str = ""
    """Name of the worker's timestamp source. Empty until its connections are open."""
    scheduling: SchedulingFacts = SchedulingFacts()
    """Scheduling priority of the worker while it sends requests and reads responses."""
    drained: bool = False
    """True if the worker has ended its load and waits for the order to ask canaries again."""
    done: bool = False
    rescued: Path | None = None
    """File with the lines that could not be written to the run's disk, if there are any."""


def run(
    tasks: Sequence[WorkerTask],
    header: Header,
    folder: Path,
    on_progress: Callable[[str, LiveCounters], str | None],
    sampler: Callable[[], Sampler],
    timed_commands: Sequence[str] = (),
    keep_records_s: float | None = None,
) -> Footer:
    """Run all tasks, one per worker, and write `folder/run.jsonl`. Raises OutputError if this file cannot be written.

    - `on_progress` is called ten times a second with a phase and the live counters. The phases are `connecting`,
      `running`, `stopping` after an interrupt, `compressing` after the last request of a --soak run, and `ended`. If
      `on_progress` returns a reason, the run ends as if it had been interrupted.
    - `sampler` opens the Sampler that reads the server, the GPUs and the host during the run.
    - `timed_commands` are the commands of --at as the user wrote them, which may contain secrets. They are not taken
      from the plan in `header`, because that plan contains no secrets.
    - `keep_records_s` is how long the Records of a --soak run are kept, in seconds. None: until the end.

    The first interrupt ends the run and keeps the results so far. The second interrupt also kills the workers.
    """
    telemetry = Sampler({})
    commands = CommandRunner(timed_commands)
    keeper = RecordKeeper()
    ended_ns: int | None = None
    telemetry_parts: Sequence[Path] = ()
    notes: list[str] = []
    final_counts = LiveCounters()

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
        commands.begin(header.start_ns, folder)
        if tasks[0].rotate_bytes:
            keeper.begin(folder, keep_records_s)
        return header.start_ns

    def show(phase: str, workers: Sequence[Worker]) -> None:
        nonlocal final_counts
        counts = sum_counters(worker.counts for worker in workers)
        counts.set_server_gauges(telemetry.latest.get("server", {}))
        if phase == "ended":
            final_counts = counts
            return
        keeper.watch()
        reason = on_progress("stopping" if phase == "running" and interrupts.count else phase, counts)
        if counts.unwritten_bytes > MAX_UNWRITTEN_BYTES:
            reason = f"the disk of {folder} took no more Records, so the run was ended"
        if reason and not interrupts.count:
            interrupts.count += 1
            notes.append(reason)

    def end() -> None:
        nonlocal ended_ns, telemetry_parts
        ended_ns = time.monotonic_ns()
        telemetry_parts = [*telemetry.end(patient=not interrupts.count), *commands.end()]
        notes.extend(commands.notes)

    interrupts = Interrupts()
    with interrupts.counting():
        try:
            exits = run_workers(tasks, begin, interrupts, show, end, sample_idle)
        finally:
            telemetry.stop()
            commands.end()
            removed_parts = keeper.end(notes, interrupts, lambda: on_progress("compressing", final_counts))
        on_progress("ended", final_counts)
        return merge_parts(
            exits,
            header,
            folder / "run.jsonl",
            interrupted=interrupts.count > 0,
            ended_ns=ended_ns,
            telemetry_parts=telemetry_parts,
            removed_parts=removed_parts,
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
    """Fork one worker per task, let the workers connect, start them together, and wait until they have ended.

    - `before_connect` is called while the workers encode their requests.
    - `begin` is called once every connection is open. Its arguments are the name of the least exact timestamp source of
      any worker, and the workers. It returns the start time in ns (CLOCK_MONOTONIC), or None if the run must not start.
    - `on_progress` is called ten times a second with a phase and the workers.
    - `end` is called as soon as every worker is done.
    """
    workers: list[Worker] = []
    preload(tasks)
    gc.freeze()  # otherwise a garbage collection in a worker would copy the memory of every object of this process
    in_flight = InFlightTable(len(tasks), len(tasks[0].targets)) if tasks[0].least_busy else None
    try:
        for task in tasks:
            workers.append(_fork(task, workers, (len(workers), len(tasks)), in_flight))
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

        # One worker may ask canaries again after the load, which has to end on every worker first.
        _wait_until(workers, lambda worker: worker.drained, interrupts, lambda: on_progress("running", workers))
        end()
        _order(workers, ("stop",) if interrupts.count else ("go on",))
        _wait_until(workers, lambda worker: worker.done, interrupts, lambda: on_progress("running", workers))
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


def _fork(
    task: WorkerTask, earlier: Sequence[Worker], share: tuple[int, int], in_flight: InFlightTable | None
) -> Worker:
    """Fork the worker process of a task, and return the worker.

    - `earlier` are the workers that were forked before. The new process inherits their pipes, and closes them.
    - `share` contains the index of the new worker and the number of workers.
    - `in_flight` counts the requests in flight per replica, in memory that all workers share.
    """
    context = multiprocessing.get_context("fork")  # nothing is pickled, and the prompts are shared memory
    ours, theirs = context.Pipe()
    counts = LiveCounters.from_buffer(mmap(-1, sizeof(LiveCounters)))  # anonymous shared memory
    inherited = [ours, *(worker.pipe for worker in earlier)]
    process = context.Process(
        target=work, args=(task, theirs, counts, inherited, share, in_flight), name=f"loadgen-worker-{task.number}"
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
    """Wait until each worker has ended, or has reached the state for which `reached` returns True.

    `show` is called repeatedly during the wait. At the first interrupt, the workers that have not reached the state
    receive the order to stop. Workers that still have not reached it are killed at the second interrupt, or
    `patience_s` seconds after the first one.
    """
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
    """Receive one message from a worker, and store the reported state in `worker`: ready, drained or done.

    A worker that has closed its pipe is done.
    """
    try:
        word, value = worker.pipe.recv()
    except (EOFError, OSError):
        word, value = "done", None
    if word == "ready":
        worker.stamps, worker.scheduling = value
    elif word == "drained":
        worker.drained = True
    else:
        worker.done = True
        worker.rescued = value


def _order(workers: Sequence[Worker], order: tuple[object, ...]) -> None:
    """Send an order to each of these workers. Workers that have already ended are skipped."""
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.pipe.send(order)
