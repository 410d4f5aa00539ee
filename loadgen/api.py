"""The Python API: run a plan from a notebook or script, and read the figures, charts and report of a run.

    from loadgen import Plan, run
    result = run(Plan(server="vllm", n=1000))
    result.summary.latency.ttft.p99

A separate process (`python -m loadgen.api`) measures each run. The process is spawned, not forked, so that the caller's
threads, event loop and memory cannot delay a timestamp. If the caller is interrupted, the interrupt is forwarded to
this process. The process then ends the run and keeps the results so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.errors import LoadgenError, PlanError, install_hint

if TYPE_CHECKING:
    from loadgen.analysis.compare import Comparison
    from loadgen.analysis.report.run_document import ReportedRun
    from loadgen.analysis.run.runfile import Footer
    from loadgen.engine.prepare import OnProgress
    from loadgen.engine.resolve_server import Say
    from loadgen.plan import Plan


class Result:
    """The results of one run: figures, charts, tables and the report."""

    def __init__(self, path: Path, reported: ReportedRun) -> None:
        self.path = path
        """The run's folder or its run.jsonl, as passed in."""
        self.summary = reported.summary
        """All figures of summary.json, in seconds, bytes, tokens and fractions from 0 to 1. None means unknown."""
        self._reported = reported

    @property
    def figures(self) -> list[str]:
        """Names of the charts that `figure` can draw for this run."""
        from loadgen.analysis.report.charts import CHARTS

        return [name for name in self._reported.data if CHARTS[name].traces]

    def figure(self, name: str) -> Any:
        """Return a chart of the report as a plotly Figure.

        `name` is one of `figures`, such as `ttft_s`. The suffix `_s` may be omitted. Raises KeyError for any other
        name, and LoadgenError if plotly is not installed (extra `notebook`).
        """
        from loadgen.analysis.report.charts import plotly_figure
        from loadgen.analysis.report.run_document import chart_runs

        name = name if name in self.figures else f"{name}_s"  # accept the names of `summary.latency`, such as `ttft`
        if name not in self.figures:
            raise KeyError(f"{name.removesuffix('_s')!r}: choose {', '.join(self.figures)}")
        try:
            from plotly.graph_objects import Figure
        except ImportError:
            raise LoadgenError("figures need plotly", install_hint("notebook")) from None
        return Figure(plotly_figure(name, chart_runs([self._reported])))

    def text(self) -> str:
        """Return the summary that `loadgen run` prints after a run, 80 columns wide."""
        from loadgen.analysis.report.run_document import brief_document
        from loadgen.analysis.report.terminal import render

        return render(brief_document(self.summary))

    def frame(self) -> Any:
        """Return one row per request, including warm-up requests, as a pandas DataFrame.

        The columns are those of the table `requests` of `loadgen export`: times in nanoseconds from the run's start,
        latencies in seconds. If pandas (extra `notebook`) is not installed, the result is a dict of numpy arrays.
        Raises RunFileError if the run file no longer exists.
        """
        import numpy as np

        from loadgen.analysis.export import REQUESTS, request_rows
        from loadgen.analysis.run import runfile

        run = runfile.read(self.path)
        rows = list(request_rows(run.records, run.header.traffic))
        by_column = zip(*rows, strict=True) if rows else [()] * len(REQUESTS)
        columns = {column.name: list(values) for column, values in zip(REQUESTS, by_column, strict=True)}
        try:
            from pandas import DataFrame
        except ImportError:
            return {name: np.array(values) for name, values in columns.items()}
        return DataFrame(columns)

    def report(self, path: Path | str | None = None) -> Path:
        """Write the HTML report of the run and return its path. The default path is report.html in the run's folder.

        Raises OutputError if the file cannot be written.
        """
        from loadgen.results import folder_of, write_page

        page = Path(path) if path is not None else folder_of(self.path) / "report.html"
        write_page([self._reported], page, [])
        return page

    def __str__(self) -> str:
        return self.text().strip("\n")

    def __repr__(self) -> str:
        return f"Result({str(self.path)!r})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"


def run(
    plan: Plan,
    *,
    out: Path | str | None = None,
    progress: OnProgress | None = None,
    say: Say | None = None,
    objectives: Sequence[str] = (),
    confidence: float | str | None = None,
    goodput: Sequence[str] = (),
    alone: bool = False,
) -> Result:
    """Run a plan and return its results.

    `run` can be called in notebooks, scripts and threads. It blocks until the run has ended. Use `run_async` in an
    event loop.

    - `out`: the folder of the run, which must be empty or new. The default is runs/<time>-<server>-<label>.
    - `progress`: a function that is called ten times a second with the phase of the run and the current counts. The
      phases are `connecting`, `running`, `stopping` after an interrupt, `compressing` after the last request of a long
      run (`soak`), and `ended`.
    - `say`: a function that is called with a line of text for each step, such as the detection of the server.
    - `objectives`: expressions such as `ttft.p99 < 1s` (see `--assert`). They replace the objectives of the plan. They
      are stored in the run file, and `read` checks them again.
    - `confidence`: a confidence level such as `95%`. It replaces the level of the plan. With a level, an objective is
      met only if the whole confidence interval of its figure meets the bound. Without a level, the measured figure
      decides.
    - `goodput`: bounds for each request, such as `ttft < 500ms` (see `--goodput`). They replace the bounds of the plan.
    - `alone`: if True, each class of traffic is first run alone (see `--alone`). `summary.traffic` then shows how much
      the classes slow each other down. An interrupt of these first runs raises KeyboardInterrupt.

    summary.json is written next to the run file.

    An interrupt (Ctrl-C, or a notebook's stop button) ends the run. The Result covers the requests until the interrupt,
    and `summary.run.interrupted` is set. An interrupt before the first request raises KeyboardInterrupt.

    Raises LoadgenError (PlanError, OutputError, ...), loadgen.servers.errors.ServerError or
    loadgen.workloads.prompts.PromptError before any request is sent. Each of these errors has the attribute `hint`. A
    failed request does not raise an error.
    """
    plan = _with_objectives(plan, objectives, confidence, goodput)
    with contextlib.closing(_Measurement(plan, out, progress, say, alone=alone)) as measurement:
        return measurement.result()


async def run_async(
    plan: Plan,
    *,
    out: Path | str | None = None,
    progress: OnProgress | None = None,
    say: Say | None = None,
    objectives: Sequence[str] = (),
    confidence: float | str | None = None,
    goodput: Sequence[str] = (),
    alone: bool = False,
) -> Result:
    """Run a plan like `run`, without blocking the event loop. Callbacks are called in another thread.

    Cancelling the call ends the run. The results so far are kept in the run's folder, and `read` loads them. Raises the
    same errors as `run`.
    """
    plan = _with_objectives(plan, objectives, confidence, goodput)
    with contextlib.closing(_Measurement(plan, out, progress, say, alone=alone)) as measurement:
        done = asyncio.ensure_future(asyncio.to_thread(measurement.result))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            measurement.interrupt()
            with contextlib.suppress(Exception, KeyboardInterrupt):
                await done
            raise


def read(
    path: Path | str,
    *,
    objectives: Sequence[str] = (),
    confidence: float | str | None = None,
    goodput: Sequence[str] = (),
) -> Result:
    """Load a recorded run from its folder or its run.jsonl.

    Runs that were interrupted or killed, and run files with damaged lines, can be loaded too. `objectives`,
    `confidence` and `goodput` replace those stored in the run file. Raises RunFileError if there is no readable run,
    and PlanError for a malformed expression.
    """
    from loadgen.results import load_and_summarise, parse_expressions

    level = None if confidence is None else _confidence_level(confidence)
    return Result(Path(path), load_and_summarise(Path(path), *parse_expressions(objectives, goodput), confidence=level))


def compare(
    a: Result | Path | str | Sequence[Result | Path | str],
    b: Result | Path | str | Sequence[Result | Path | str],
    *,
    margin: float = 0.05,
    run_variation: float = 0.10,
    anyway: bool = False,
) -> Comparison:
    """Compare the runs `b` with the runs `a`. Each side is one run, several runs, or a folder of repeats.

    The verdict on each figure is better, worse, no difference larger than `margin` (a fraction), or inconclusive.
    `run_variation` (a fraction) is the largest difference to expect between two runs of the same server. Single runs
    must differ by more than this for the verdict better or worse.

    Raises PlanError if the two sides did unequal work, unless `anyway` is set. Raises RunFileError for a path without a
    run.
    """
    from loadgen.results import compare_paths

    hint = None if anyway else "Repeat one run with the other's plan, or pass anyway=True."
    return compare_paths(_paths(a), _paths(b), hint, margin=margin, run_variation=run_variation)[0]


def _paths(side: Result | Path | str | Sequence[Result | Path | str]) -> list[Path]:
    runs = [side] if isinstance(side, Result | Path | str) else side
    return [run.path if isinstance(run, Result) else Path(run) for run in runs]


def simulated(server: str, **options: Any) -> contextlib.AbstractContextManager[str]:
    """Start the built-in simulated server in a separate process.

    Return a context manager that yields the server's URL. The server stops when the context ends. The server runs no
    model. Options have the names of loadgen.servers.simulated.config.SimulatedConfig: `ttft_s`, `itl_s` (seconds),
    `speed`, `clock="batching"`, `gpu`, ... Raises SimulatedError if the server cannot start.
    """
    from loadgen.servers.simulated.config import SimulatedConfig
    from loadgen.servers.simulated.process import spawn

    return spawn(SimulatedConfig(server=server, **options))


def _with_objectives(
    plan: Plan, objectives: Sequence[str], confidence: float | str | None, goodput: Sequence[str]
) -> Plan:
    """Return the plan with these objectives, confidence level and goodput bounds.

    An empty or missing argument keeps the value of the plan.
    """
    level = plan.confidence if confidence is None else _confidence_level(confidence)
    return plan.replaced(
        objectives=tuple(objectives or plan.objectives), confidence=level, goodput=tuple(goodput or plan.goodput)
    )


def _confidence_level(confidence: float | str) -> float:
    """Parse a confidence level such as `95%` or 0.95 into a fraction. Raises PlanError for any other value."""
    from loadgen.workloads.spec_syntax import parse_confidence

    try:
        return parse_confidence(confidence)
    except ValueError as error:
        raise PlanError(f"confidence: {error}", "Write confidence='95%' or confidence=0.95.") from None


class _Measurement:
    """Starts and controls the process that measures one run. `close` ends the process and frees its resources."""

    def __init__(
        self,
        plan: Plan,
        out: Path | str | None,
        progress: OnProgress | None,
        say: Say | None,
        *,
        alone: bool = False,
    ) -> None:
        from loadgen.engine.alone_runs import check_alone
        from loadgen.engine.prepare import with_seed_of_run
        from loadgen.engine.resolve_server import with_detected_server
        from loadgen.folders import run_folder
        from loadgen.plan_fields import command_line
        from loadgen.results import parse_expressions
        from loadgen.servers.own_process import own_process

        if alone:
            check_alone(plan, "alone=True")
        plan = with_detected_server(plan, say)
        plan = with_seed_of_run(plan, say)
        if plan.repeats > 1:
            raise PlanError(
                "a plan with repeats has several results, but run returns one",
                "Run each repeat: [run(repeat) for repeat in plan.each_repeat()]",
            )
        self._expressions = parse_expressions(plan.objectives, plan.goodput)
        self._confidence = plan.confidence
        self._progress = progress
        self._say = say
        self._reserved = contextlib.ExitStack()
        """Reserves the default name of the run's folder."""
        named_folder = Path(out) if out is not None else None
        self._folder = self._reserved.enter_context(run_folder(named_folder, plan.server, plan.label))
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._began = False
        self._pipe, child_pipe = Pipe()
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            own_process("loadgen.api", str(child_pipe.fileno())),
            stdin=subprocess.DEVNULL,
            pass_fds=[child_pipe.fileno()],
            start_new_session=True,  # a terminal sends Ctrl-C to the caller only, which forwards it once
        )
        child_pipe.close()
        self._pipe.send((vars(plan), self._folder, command_line(plan), alone))
        # A separate thread receives the messages, so that an interrupt of the caller never cuts one in half.
        self._listener = threading.Thread(target=self._listen, name="loadgen", daemon=True)
        self._listener.start()

    def result(self) -> Result:
        """Pass messages to the callbacks until the measuring process has ended. Then return the results of the run.

        Raises the error that ended the process. An interrupt raises no error if the run has already begun: the results
        then cover the requests so far.
        """
        running = True
        while running:
            try:
                running = self._deliver_next()
            except KeyboardInterrupt:
                self.interrupt()
        if self._error is not None and not (self._began and isinstance(self._error, KeyboardInterrupt)):
            raise self._error
        if not self._began:
            raise LoadgenError(f"the measuring process ended with exit code {self._process.wait()}", "See its output.")
        from loadgen.results import load_and_summarise, write_summary

        reported = load_and_summarise(self._folder, *self._expressions, confidence=self._confidence)
        write_summary(self._folder, reported.summary)
        return Result(self._folder, reported)

    def interrupt(self) -> None:
        """End the run and keep its results so far. A second interrupt also ends the worker processes."""
        self._error = self._error or KeyboardInterrupt()  # raised only if no request was sent
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End the measuring process if it is still running, and free its resources."""
        if self._listener.is_alive():
            self.interrupt()
        self._listener.join()
        self._process.wait()
        self._pipe.close()
        self._reserved.close()

    def _listen(self) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._messages.put(self._pipe.recv())
        finally:
            self._messages.put(("",))

    def _deliver_next(self) -> bool:
        """Wait for the next message of the measuring process and pass it to its callback.

        Return False after the last message, True otherwise.
        """
        kind, *values = self._messages.get()
        if kind in ("progress", "progress alone"):
            self._began = kind == "progress"
            if self._progress:
                from loadgen.engine.client_health import LiveCounters

                phase, counts = values
                self._progress(phase, LiveCounters.from_buffer_copy(counts))
        elif kind == "say" and self._say:
            self._say(*values)
        elif kind == "error":  # restored without calling __init__, which may take other arguments
            error_class, args, attributes = values
            self._error = error_class.__new__(error_class, *args)
            self._error.__dict__.update(attributes)
        return bool(kind)


def _measure(pipe: Connection) -> None:
    """Run one plan in the measuring process. The plan arrives through `pipe`, and progress is sent back through it."""
    from loadgen.engine import prepare
    from loadgen.engine.alone_runs import run_alone
    from loadgen.plan import Plan

    def send(kind: str, *values: Any) -> None:
        try:
            pipe.send((kind, *values))
        except OSError:  # the caller is gone: end the run and keep its results so far
            signal.raise_signal(signal.SIGINT)

    settings, folder, command, alone = pipe.recv()

    def say(line: str) -> None:
        send("say", line)

    def run_class(plan: Plan, subfolder: Path) -> Footer:
        return prepare.run(
            plan,
            subfolder,
            command=command,
            say=say,
            on_progress=lambda phase, counts: send("progress alone", phase, bytes(counts)),
        )

    try:
        plan = Plan(**settings)
        folders = run_alone(plan, folder, run_class, say) if alone else {}
        if folders is None:
            raise KeyboardInterrupt
        prepare.run(
            plan,
            folder,
            command=command,
            say=say,
            on_progress=lambda phase, counts: send("progress", phase, bytes(counts)),
            alone=folders,
        )
    except BaseException as error:  # every error is raised in the caller
        error.add_note(getattr(error, "hint", None) or traceback.format_exc())
        send("error", type(error), error.args, vars(error))


if __name__ == "__main__":
    _measure(Connection(int(sys.argv[1])))
