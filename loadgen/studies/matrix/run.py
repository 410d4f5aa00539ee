"""Measures a matrix: starts each server in turn, executes its runs and stops it.

If a run fails, the journal records the reason, and the matrix continues. Only an interruption or an output error, such
as a full disk, ends the matrix early.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from loadgen.analysis.prices import parse_price
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import scan
from loadgen.engine import prepare
from loadgen.engine.signals import handle_signals
from loadgen.errors import LoadgenError, OutputError, PlanError
from loadgen.journal import Journal, JournalLine, move_aside
from loadgen.plan import Plan
from loadgen.results import is_sweep
from loadgen.servers.launch import LaunchSpec, RunningServer, compose, launched_server, process
from loadgen.studies.matrix import (
    Cell,
    Matrix,
    MatrixPlan,
    Repeat,
    Start,
    SweepOptions,
    is_finished,
    journal,
    run_settings,
    sweep_options,
)
from loadgen.studies.matrix.estimate import (
    count_gpus,
    format_duration,
    gpus_of_start,
    heading,
    pluralise,
    remaining_s,
)
from loadgen.studies.matrix.result import summarise_repeat
from loadgen.studies.sweep.measure import StepRunner, SweepTargets, new_sweep, parse_targets

if TYPE_CHECKING:
    from loadgen.analysis.run.runfile import Footer
    from loadgen.engine.prepare import OnProgress
    from loadgen.studies.sweep import Measure

LOG_LINES = 40
"""Maximum number of log lines that the journal stores for a failure."""


class MatrixOutput(Protocol):
    """Interface for the terminal output of `loadgen matrix`."""

    def say(self, line: str) -> None:
        """Print one line of text."""

    def progress(self, plan: Plan | None, *, plain: bool = True) -> AbstractContextManager[OnProgress]:
        """Return a context manager that shows the progress of a run.

        If `plain` is True, progress is also shown when the output is not a terminal.
        """


class EqualWorkError(LoadgenError):
    """Raised if the server that the setting `equal_work` names has no complete response.

    The other servers of the matrix must generate responses of the same lengths as this server. Without a complete
    response, these lengths are unknown.
    """


def measure_matrix(matrix: Matrix, output: MatrixOutput, *, resume: bool) -> bool:
    """Execute the remaining runs of a matrix, and return True if the matrix was interrupted.

    `resume` must be True if the folder already contains a matrix. Raises OutputError if the folder is in use or cannot
    be written. Raises PlanError if the matrix in the folder was started with a different plan.
    """
    with journal(matrix.folder, matrix.journal_plan, resume=resume) as book:
        done = matrix.done()
        finished = "1 run is done" if len(done) == 1 else f"{len(done)} runs are done"
        subject = f"{finished}; the others take" if done else "This takes"
        remaining = format_duration(remaining_s(matrix, book.lines, done))
        output.say(f"{heading(matrix)}\n{subject} {remaining}. {matrix.folder}")
        interrupted = _run_starts(matrix, book, output)
        if interrupted:
            book.write("interrupted")
        return interrupted


def _run_starts(matrix: Matrix, book: Journal, output: MatrixOutput) -> bool:
    """Execute every start of the matrix that has unfinished runs. A start is one launch of a server.

    Return True if the matrix was interrupted.
    """
    with _handle_termination():
        try:
            stop_leftover_server(matrix, book, output.say)
            return any(StartRunner(matrix, book, start, output).serve() for start in matrix.starts)
        except KeyboardInterrupt:
            return True


def check_sweeps(plan: MatrixPlan) -> None:
    """Check the objectives and loads of all sweeps before any server is started. Raises PlanError for a mistake."""
    for workload in plan.workloads:
        name = str(workload["name"])
        options = sweep_options(plan, name)
        if options is None:
            continue
        try:
            _sweep_targets(options)
        except PlanError as error:
            raise PlanError(f"workload {name}: {error}", error.hint) from None


def _sweep_targets(options: SweepOptions) -> SweepTargets:
    return parse_targets(options.objectives, options.rates, options.concurrency, options.over)


def equal_work_lengths(plan: MatrixPlan, folder: Path, cell: Cell) -> Path:
    """Return the path of a file with output lengths, so that all servers of a matrix do equal work.

    The setting `equal_work` names the server whose responses determine the lengths. It is typically TGI, whose HTTP API
    cannot fix the output length (docs/reference/dialects.md). The file contains the length of each complete response of
    this server. Requests to the other servers ask for these lengths.

    `cell` is the cell of another server. The lengths come from runs on the same host, with the same model and the same
    workload. An existing file is not changed, so that all runs use the same lengths. Raises EqualWorkError if there is
    no complete response.
    """
    file = folder / "equal-work" / f"{cell.host}-{cell.model}-{cell.workload}.txt"
    if file.exists():
        return file
    leader = cell._replace(server=str(plan.equal_work))
    output_lengths: list[int] = []

    def take(record: Record) -> None:
        if record.phase == "measured" and record.state == "complete" and record.output_tokens:
            output_lengths.append(record.output_tokens)

    for number in range(1, plan.repeats + 1):
        repeat = Repeat(leader, number)
        if is_finished(folder, repeat):
            scan(folder / repeat.folder, take)
    if not output_lengths:
        raise EqualWorkError(
            f"equal work: {leader} has no complete response to take output lengths from",
            "Fix that cell and continue with --resume, or remove equal_work from the plan.",
        )
    file.parent.mkdir(exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_text("".join(f"{length}\n" for length in sorted(output_lengths)), encoding="ascii")
    return unfinished.rename(file)


def stop_leftover_server(matrix: Matrix, book: Journal, say: Callable[[str], None]) -> None:
    """Stop a server that is still running because an earlier process of this matrix was killed.

    Otherwise the old server would occupy the port and the GPU, and its caches would be warm.
    """
    up_line = _leftover_line(book.lines)
    start = next((start for start in matrix.starts if up_line and start.number == up_line["start"]), None)
    if up_line is None or start is None:
        return
    if start.launch == "process":
        background = process.read_background_server(start.server.server)
        if background is None or background.pid != up_line["facts"].get("pid"):
            return
        process.down(background)
    elif start.launch == "compose":
        spec = _launch_spec(matrix, start)
        if not compose.has_container(spec):
            return
        compose.down(spec)
    else:
        return
    say(f"{start} was left running and has been stopped")


def _leftover_line(lines: Sequence[JournalLine]) -> JournalLine | None:
    """Return the journal line about the last start of a server, or None if no server was started or the last one was
    stopped.
    """
    for line in reversed(lines):
        if line["type"] in ("up", "down"):
            return line if line["type"] == "up" else None
    return None


def _launch_spec(matrix: Matrix, start: Start) -> LaunchSpec:
    model = start.model.path or start.model.name
    return LaunchSpec(start.server.server, matrix.hosts[start.host.name], model, start.launch, start.options)


class StartRunner:
    """Starts a server, executes its runs and stops the server."""

    def __init__(self, matrix: Matrix, book: Journal, start: Start, output: MatrixOutput) -> None:
        self._matrix = matrix
        self._book = book
        self._start = start
        self._output = output
        self._settled = set[Repeat]()
        """Repeats that have finished or failed."""

    def serve(self) -> bool:
        """Execute the remaining runs of this server start. Return True if the runs were interrupted."""
        start = self._start
        remaining = [repeat for repeat in start.repeats if not is_finished(self._matrix.folder, repeat)]
        if not remaining:
            return False
        self._output.say(f"[start {start.number}/{len(self._matrix.starts)}] {start} ({start.launch})")
        plans: dict[Repeat, Plan] = {}
        for repeat in remaining:
            plan = self._run_plan(repeat)
            if plan is not None:
                plans[repeat] = plan
        if not plans:
            return False
        try:
            return self._serve_runs(plans)
        except OutputError:
            raise
        except Exception as error:
            unsettled = [repeat for repeat in plans if repeat not in self._settled]
            for repeat in unsettled:
                self._record_failure(repeat, error)
            if not unsettled:
                self._book.write("down", start=start.number, trouble=f"{type(error).__name__}: {error}")
            self._say_indented(f"failed: {error}")
            return False

    def _serve_runs(self, plans: dict[Repeat, Plan]) -> bool:
        """Start the server, execute the given runs and stop the server. Return True if a run was interrupted."""
        start = self._start
        began_s = time.monotonic()
        with launched_server(_launch_spec(self._matrix, start), self._say_indented) as server:
            seconds = time.monotonic() - began_s
            self._book.write(
                "up",
                start=start.number,
                server=start.server.name,
                host=start.host.name,
                model=start.model.name,
                seconds=round(seconds, 3),
                facts=dict(server.facts),
            )
            self._say_indented(f"up after {seconds:.1f} s")
            for position, (repeat, plan) in enumerate(plans.items()):
                if self._measure(repeat, plan, server, position):
                    return True
        self._book.write("down", start=start.number)
        return False

    def _run_plan(self, repeat: Repeat) -> Plan | None:
        """Return the plan of the run `repeat`. The plan does not contain the URL of the server yet.

        If no valid plan can be made, record a failure and return None.
        """
        matrix = self._matrix
        start = self._start
        settings: dict[str, Any] = {
            "server": start.server.server,
            "platform": matrix.hosts[start.host.name].platform,
            "repeat": repeat.number,
            "repeats": matrix.plan.repeats,
            **matrix.seed_settings(repeat),
        }
        optional = {
            "endpoint": start.server.endpoint,
            "dcgm_url": start.host.dcgm_url,
            "gpu_model": gpus_of_start(start),
        }
        settings |= {name: value for name, value in optional.items() if value}
        try:
            if matrix.plan.equal_work not in (None, start.server.name):
                lengths_file = equal_work_lengths(matrix.plan, matrix.folder, repeat.cell)
                settings["output_tokens"] = f"empirical:{lengths_file}"
            return run_settings(matrix.plan, repeat.cell.workload, **settings)
        except LoadgenError as error:
            self._record_failure(repeat, error)
            self._say_indented(f"failed: {error}")
            return None

    def _measure(self, repeat: Repeat, plan: Plan, server: RunningServer, position: int) -> bool:
        """Execute one run or one sweep. Return True if the run or sweep was interrupted.

        `position` is 0 for the first run or sweep after the server was started, 1 for the second, and so on.
        """
        name = f"{repeat.cell.workload}, repeat {repeat.number}"
        folder = self._matrix.folder / repeat.folder
        options = sweep_options(self._matrix.plan, repeat.cell.workload)
        if options is None:
            move_aside(folder)
        self._book.write("begin", **repeat.key, start=self._start.number, place=position)
        began_s = time.monotonic()
        measure = self._measure_function(server)
        try:
            if options is None:
                interrupted = self._run(plan, folder, measure)
            else:
                interrupted = self._sweep(options, plan, folder, measure)
            if interrupted:
                return True
            result = summarise_repeat(folder)
        except OutputError:
            raise
        except Exception as error:
            self._record_failure(repeat, error)
            self._say_indented(f"{name}: failed: {error}")
            return False
        seconds = time.monotonic() - began_s
        self._settled.add(repeat)
        self._book.write("end", **repeat.key, seconds=round(seconds, 3))
        self._say_indented(f"{name}: {result}; {seconds:.0f} s{self._remaining_text()}")
        return False

    def _measure_function(self, server: RunningServer) -> Measure:
        """Return the function that executes a run on the given server."""
        matrix = self._matrix

        def measure(plan: Plan, folder: Path, on_progress: OnProgress) -> Footer:
            return prepare.run(
                plan.replaced(url=server.url, server_pid=server.pids),
                folder,
                command=matrix.command,
                say=lambda _line: None,  # the matrix prints its own line for each run
                on_progress=on_progress,
                launch=server.facts,
            )

        return measure

    def _run(self, plan: Plan, folder: Path, measure: Measure) -> bool:
        """Execute one run. Return True if the run was interrupted."""
        with self._output.progress(plan, plain=False) as on_progress:
            return measure(plan, folder, on_progress).interrupted

    def _sweep(self, options: SweepOptions, plan: Plan, folder: Path, measure: Measure) -> bool:
        """Execute the remaining steps of a sweep in `folder`. Return True if the sweep was interrupted.

        `options` are the sweep options of the workload. `measure` executes one run.
        """
        targets = _sweep_targets(options)
        stated = self._start.host.gpu_hour_cost
        hour_cost = None if stated is None else parse_price(stated)
        search_settings = {
            "precision": options.precision,
            "confidence": options.confidence,
            "start": options.start,
            "hour": hour_cost and hour_cost.amount,
            "currency": hour_cost and hour_cost.currency,
            "gpus": count_gpus(self._start)[0] or None,
        }
        with self._output.progress(None, plain=False) as on_progress:
            reason = StepRunner(
                sweep=new_sweep(plan, folder, targets, None),
                targets=targets,
                search_settings=search_settings,
                measure=measure,
                say=self._say_indented,
                on_progress=on_progress,
                max_runs=options.max_runs,
                max_time_s=options.max_time_s,
                resume=is_sweep(folder),
            ).run()
        return reason == "interrupted"

    def _remaining_text(self) -> str:
        """Return text with the number of remaining runs and their estimated time, or "" if no run remains."""
        matrix = self._matrix
        done = matrix.done()
        remaining = len(matrix.repeats) - len(done)
        if not remaining:
            return ""
        return f"; {pluralise(remaining, 'run')} left, {format_duration(remaining_s(matrix, self._book.lines, done))}"

    def _say_indented(self, line: str) -> None:
        self._output.say(f"    {line}")

    def _record_failure(self, repeat: Repeat, error: Exception) -> None:
        """Write the failure of a repeat to the journal."""
        self._settled.add(repeat)
        expected = hasattr(error, "hint")  # only a traceback can explain an unexpected error
        log = getattr(error, "log_tail", "") if expected else "".join(traceback.format_exception(error))
        self._book.write(
            "failure",
            **repeat.key,
            start=self._start.number,
            kind=type(error).__name__,
            reason=str(error),
            hint=getattr(error, "hint", ""),
            log="\n".join(log.splitlines()[-LOG_LINES:]),
        )


def _handle_termination() -> AbstractContextManager[None]:
    """Return a context manager that handles SIGTERM and SIGHUP like Ctrl-C, so that the server is stopped.

    A closed terminal sends SIGHUP. During a run, the coordinator handles these signals instead, so that the records of
    the run are kept.
    """

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    return handle_signals((signal.SIGTERM, signal.SIGHUP), stop)
