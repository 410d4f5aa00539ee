"""The coordinator: forks the workers, gives the common start, watches them, and gathers their parts into the Run."""

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

START_LEAD_NS, LOOKED_AT_NS = 20_000_000, 5_000
"""From the order to start to the start: enough for every worker to have read it, to have looked at each of its
connections once more, and to be watching the clock."""
POLL_S = 0.1
BUSY_LIMIT_S = 5.0
"""Time that a worker has to answer an interrupt before the start. A worker that still draws prompts is then killed,
because it has measured nothing."""


class Worker(msgspec.Struct):
    """One worker as the coordinator sees it."""

    task: WorkerTask
    process: ForkProcess
    pipe: Pipe
    counts: LiveCounters
    stamps: str = ""
    """The source of its stamps, once its connections are open."""
    scheduling: SchedulingFacts = SchedulingFacts()
    """The priority at which it sends and reads."""
    done: bool = False
    rescued: Path | None = None


def run(
    tasks: Sequence[WorkerTask],
    header: Header,
    folder: Path,
    on_progress: Callable[[str, LiveCounters], str | None],
    sampler: Callable[[], Sampler],
) -> Footer:
    """Drive all tasks and write `folder/run.jsonl`. `on_progress` gets a phase and the counts, ten times a second;
    where it says why, the run ends as if interrupted. What `sampler` makes reads the server, the GPUs and the host
    meanwhile. The first interrupt ends the run and keeps what came; the second kills the workers too. Raises
    OutputError when the run file cannot be written."""
    readings = Sampler({})
    ended_ns: int | None = None
    beside: Sequence[Path] = ()
    notes: list[str] = []

    def look() -> None:
        nonlocal readings
        readings = sampler()
        readings.idle()

    def begin(stamps: str, workers: Sequence[Worker]) -> int:
        readings.start()
        header.telemetry = readings.facts
        header.client["scheduling"] = least_raised(worker.scheduling for worker in workers)
        start_ns = time.monotonic_ns() + START_LEAD_NS + LOOKED_AT_NS * max(task.schedule.spare for task in tasks)
        open_run(folder, header, stamps, start_ns, ClockPairs().to_realtime(start_ns))
        readings.begin(header.start_ns, folder, lambda: sum_counters(worker.counts for worker in workers))
        return header.start_ns

    def show(phase: str, workers: Sequence[Worker]) -> None:
        why = on_progress(phase, sum_counters(worker.counts for worker in workers))
        if why and not interrupts.count:
            interrupts.count += 1
            notes.append(why)

    def end() -> None:
        nonlocal ended_ns, beside
        ended_ns = time.monotonic_ns()
        beside = readings.end(patient=not interrupts.count)

    interrupts = Interrupts()
    with interrupts.counting():
        try:
            outcomes = run_workers(tasks, begin, interrupts, show, end, look)
        finally:
            readings.stop()
        main, interrupted = folder / "run.jsonl", interrupts.count > 0
        return merge_parts(
            outcomes, header, main, interrupted=interrupted, ended_ns=ended_ns, beside=beside, notes=notes
        )


def run_workers(
    tasks: Sequence[WorkerTask],
    begin: Callable[[str, Sequence[Worker]], int | None],
    interrupts: Interrupts,
    on_progress: Callable[[str, Sequence[Worker]], None],
    end: Callable[[], None],
    before: Callable[[], None] = lambda: None,
) -> list[WorkerExit]:
    """Fork a worker per task, let them connect, start them together, and wait for their ends. What is to happen
    `before` they connect does while they prepare what they will send. `begin` gets the kind of
    stamps once every connection is open, and returns the start instant on CLOCK_MONOTONIC, or None when there is to be
    no start. `end` is called as soon as every worker is done."""
    context = multiprocessing.get_context("fork")  # nothing to pickle, and the prompts are shared memory
    workers: list[Worker] = []
    preload(tasks)
    gc.freeze()  # nothing that the workers look through, and so copy, when they collect
    try:
        for task in tasks:
            (ours, theirs), counts = (
                context.Pipe(),
                LiveCounters.from_buffer(mmap(-1, sizeof(LiveCounters))),
            )  # on no disk
            pipes, share = [ours, *(worker.pipe for worker in workers)], (len(workers), len(tasks))
            process = context.Process(
                target=work, args=(task, theirs, counts, pipes, share), name=f"loadgen-worker-{task.worker}"
            )
            process.start()
            theirs.close()
            workers.append(Worker(task, process, ours, counts))
        before()
        _order(workers, ("connect",))
        _until(
            workers,
            lambda worker: bool(worker.stamps),
            interrupts,
            lambda: on_progress("connecting", workers),
            patience_s=BUSY_LIMIT_S,
        )
        start_ns = begin(least_exact_source(worker.stamps for worker in workers), workers)
        _order(workers, ("stop",) if interrupts.count or start_ns is None else ("start", start_ns))
        _until(workers, lambda worker: worker.done, interrupts, lambda: on_progress("running", workers))
        end()
    finally:
        for worker in workers:
            worker.process.join(1 if worker.done else 0)
            worker.process.kill()
            worker.process.join()
    on_progress("ended", workers)
    outcomes = []
    for worker in workers:
        code = worker.process.exitcode or 0
        words = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        due = worker.counts.due if interrupts.count or not code else worker.task.planned(worker.counts.due)
        outcomes.append(WorkerExit(worker.task, due, words, worker.rescued))
    return outcomes


def _until(
    workers: Sequence[Worker],
    reached: Callable[[Worker], bool],
    interrupts: Interrupts,
    show: Callable[[], None],
    *,
    patience_s: float = math.inf,
) -> None:
    """Wait until every worker has reached a point or has ended. The first interrupt stops the workers; the second, or
    `patience_s` after the first, kills those that have not answered."""
    told = 0
    limit_s = math.inf
    while pending := [worker for worker in workers if not (reached(worker) or worker.done)]:
        ready = wait([worker.pipe for worker in pending], POLL_S)
        for worker in (each for each in pending if each.pipe in ready):
            try:
                word, value = worker.pipe.recv()
            except (EOFError, OSError):
                word, value = "done", None
            if word == "ready":
                worker.stamps, worker.scheduling = value
            else:
                worker.done, worker.rescued = True, value
        if interrupts.count > told:
            told = interrupts.count
            if told == 1:
                _order(pending, ("stop",))
                limit_s = time.monotonic() + patience_s
        if told > 1 or time.monotonic() > limit_s:
            for worker in pending:
                worker.process.kill()
        show()


def _order(workers: Sequence[Worker], order: tuple[object, ...]) -> None:
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.pipe.send(order)
