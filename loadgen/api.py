"""The Python API: a run, its figures, charts and report, from a notebook or a script. It joins the parts and computes
nothing; the command line writes and prints by the same functions.

    from loadgen import Plan, run
    result = run(Plan(server="vllm", n=1000))
    result.summary.latency.ttft.p99

A run is measured by a process of its own (`python -m loadgen.api`), started and not forked: the caller may be a
notebook with threads, a running event loop and gigabytes of tables, and none of it is in the way of a stamp. An
interrupt of the caller becomes that of the process, which ends the run and keeps what came.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import os
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

from loadgen.errors import LoadgenError, PlanError

if TYPE_CHECKING:
    from loadgen.analysis.compare import Comparison
    from loadgen.analysis.report.run_document import ReportedRun
    from loadgen.engine.prepare import OnProgress
    from loadgen.engine.resolve_server import Say
    from loadgen.plan import Plan


class Result:
    """What was measured in one run, and what it means."""

    def __init__(self, path: Path, reported: ReportedRun) -> None:
        self.path = path
        """The run's folder, or its file, as it was named."""
        self.summary = reported.summary
        """All figures: what summary.json holds, in seconds, bytes, tokens and shares from 0 to 1. None is unknown."""
        self._reported = reported

    @property
    def figures(self) -> list[str]:
        """The names that `figure` knows for this run."""
        from loadgen.analysis.report.charts import CHARTS

        return [name for name in self._reported.data if CHARTS[name].traces]

    def figure(self, name: str) -> Any:
        """A chart of the report as a plotly Figure. Raises LoadgenError without plotly (the extra `notebook`), and
        KeyError for a name that is not in `figures`."""
        from loadgen.analysis.report.charts import plotly_figure
        from loadgen.analysis.report.run_document import chart_runs

        name = name if name in self.figures else f"{name}_s"  # of a latency, as `summary.latency` takes it
        if name not in self.figures:
            raise KeyError(f"{name.removesuffix('_s')!r}: there are {', '.join(self.figures)}")
        try:
            from plotly.graph_objects import Figure
        except ImportError:
            raise LoadgenError("figures need plotly", "pip install 'llm-loadgen[notebook]'") from None
        return Figure(plotly_figure(name, chart_runs([self._reported])))

    def text(self) -> str:
        """What the command prints of a run, in 80 columns."""
        from loadgen.analysis.report.run_document import brief_document
        from loadgen.analysis.report.terminal import render

        return render(brief_document(self.summary))

    def frame(self) -> Any:
        """One row per request, warm-up included: the columns of `loadgen export`'s table `requests`, instants in
        nanoseconds from the run's start, latencies in seconds. A pandas DataFrame, or without pandas (the extra
        `notebook`) a dict of numpy arrays. Raises RunFileError when the run file has gone."""
        import numpy as np

        from loadgen.analysis.export import REQUESTS, request_rows
        from loadgen.analysis.run import runfile

        rows = list(request_rows(runfile.read(self.path).records))
        values = zip(*rows, strict=True) if rows else [()] * len(REQUESTS)
        columns = {column.name: list(each) for column, each in zip(REQUESTS, values, strict=True)}
        try:
            from pandas import DataFrame
        except ImportError:
            return {name: np.array(each) for name, each in columns.items()}
        return DataFrame(columns)

    def report(self, path: Path | str | None = None) -> Path:
        """Write the page, by default report.html in the run's folder; where it is. Raises OutputError."""
        from loadgen.results import folder_of, write_page

        page = Path(path) if path is not None else folder_of(self.path) / "report.html"
        write_page([self._reported], page, [])
        return page

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
    goodput: Sequence[str] = (),
) -> Result:
    """Measure a plan. Works in notebooks, threads and running event loops (where `run_async` does not block).

    `out` is the run's folder, which must be new; by default runs/<time>-<server>-<label>. `progress` gets a phase
    (`connecting`, `running`, `ended`) and the counts, ten times a second; `say` a line per step, such as which server
    was found. `objectives` are what the run must keep to, as for `--assert`, and `goodput` is what makes one request
    good; by default those of the plan. The run file keeps both, so that `read` judges the run by them again.
    summary.json is written beside the run file.

    An interrupt (Ctrl-C, or a notebook's stop) ends the run, and the Result is of what came: `summary.run.interrupted`.
    Before the first request is sent it raises KeyboardInterrupt.

    Raises LoadgenError (PlanError, OutputError, ...), loadgen.servers.errors.ServerError or
    loadgen.workloads.prompts.PromptError, each with a `hint`, before anything is sent. A request that fails raises
    nothing.
    """
    with contextlib.closing(_Measurement(plan, out, progress, say, objectives, goodput)) as measurement:
        return measurement.result()


async def run_async(
    plan: Plan,
    *,
    out: Path | str | None = None,
    progress: OnProgress | None = None,
    say: Say | None = None,
    objectives: Sequence[str] = (),
    goodput: Sequence[str] = (),
) -> Result:
    """`run` without blocking the event loop; callbacks are called in another thread. Who cancels it ends the run: what
    came is in `out`, and `read` makes a Result of it. Raises what `run` raises."""
    with contextlib.closing(_Measurement(plan, out, progress, say, objectives, goodput)) as measurement:
        done = asyncio.ensure_future(asyncio.to_thread(measurement.result))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            measurement.interrupt()
            with contextlib.suppress(Exception, KeyboardInterrupt):
                await done
            raise


def read(path: Path | str, *, objectives: Sequence[str] = (), goodput: Sequence[str] = ()) -> Result:
    """A run that was recorded: its folder, or its run.jsonl; also one that was interrupted, killed or damaged.
    `objectives` and `goodput` are as for `run`; by default the run is judged by those that it was made with. Raises
    RunFileError when it is no run or cannot be read, PlanError for an
    expression that is none."""
    from loadgen.results import load_and_summarise, parse_expressions

    return Result(Path(path), load_and_summarise(Path(path), *parse_expressions(objectives, goodput)))


def compare(
    a: Result | Path | str | Sequence[Result | Path | str],
    b: Result | Path | str | Sequence[Result | Path | str],
    *,
    margin: float = 0.05,
    run_variation: float = 0.10,
    anyway: bool = False,
) -> Comparison:
    """B held against A, each one run, several, or a folder of repeats: for every figure better, worse, no difference
    larger than `margin` (a share), or that it cannot be told; what lies beyond `run_variation`, by which two runs of
    one server may differ at most, is called. Raises PlanError for runs of unequal work unless `anyway`, RunFileError
    for what is no run."""
    from loadgen.results import compare_paths

    sides = ([side] if isinstance(side, Result | Path | str) else side for side in (a, b))
    paths_a, paths_b = ([run.path if isinstance(run, Result) else Path(run) for run in side] for side in sides)
    hint = None if anyway else "Make them alike, or give anyway=True."
    return compare_paths(paths_a, paths_b, hint, margin=margin, run_variation=run_variation)[0]


def simulated(server: str, **options: Any) -> contextlib.AbstractContextManager[str]:
    """The built-in server, without a model, in a process of its own; gives its URL and ends it afterwards. Options as
    those of `loadgen sim`, by the names of loadgen.servers.simulated.config.SimulatedConfig: `ttft_s`, `itl_s`
    (seconds), `speed`, `clock="batching"`, `gpu`, ... Raises SimulatedError when it cannot start."""
    from loadgen.servers.simulated.config import SimulatedConfig
    from loadgen.servers.simulated.process import spawn

    return spawn(SimulatedConfig(server=server, **options))


class _Measurement:
    """The process that measures, as its caller sees it. Nothing of it is left when it is closed."""

    def __init__(
        self,
        plan: Plan,
        out: Path | str | None,
        progress: OnProgress | None,
        say: Say | None,
        objectives: Sequence[str],
        goodput: Sequence[str],
    ) -> None:
        from loadgen.engine.resolve_server import with_detected_server
        from loadgen.folders import run_folder
        from loadgen.plan_fields import command_line
        from loadgen.results import parse_expressions

        plan = with_detected_server(plan)
        if plan.repeats > 1:
            raise PlanError("a Result is of one run", "[run(each) for each in plan.each_repeat()]")
        plan = plan.replaced(objectives=tuple(objectives or plan.objectives), goodput=tuple(goodput or plan.goodput))
        self._judged = parse_expressions(plan.objectives, plan.goodput)
        self._progress, self._say = progress, say
        self._reserved = contextlib.ExitStack()
        """Holds the default name of the run's folder."""
        named_folder = Path(out) if out is not None else None
        self._folder = self._reserved.enter_context(run_folder(named_folder, plan.server, plan.label))
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._began = False
        self._pipe, theirs = Pipe()
        root = str(Path(__file__).parents[1])
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-m", "loadgen.api", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a terminal's Ctrl-C is the caller's, who hands it on once
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
        )
        theirs.close()
        self._pipe.send((vars(plan), self._folder, command_line(plan)))
        # A thread of its own: an interrupt of the caller never falls into the middle of a message.
        self._listener = threading.Thread(target=self._listen, name="loadgen", daemon=True)
        self._listener.start()

    def result(self) -> Result:
        """Hand on what is said until the process has ended; what was measured. Raises what ended the process."""
        going_on = True
        while going_on:
            try:
                going_on = self._deliver_next()
            except KeyboardInterrupt:
                self.interrupt()
        if self._error is not None and not (self._began and isinstance(self._error, KeyboardInterrupt)):
            raise self._error
        if not self._began:
            raise LoadgenError(f"the measuring process ended with exit code {self._process.wait()}", "See its output.")
        from loadgen.results import load_and_summarise, write_summary

        results = load_and_summarise(self._folder, *self._judged)
        write_summary(self._folder, results.summary)
        return Result(self._folder, results)

    def interrupt(self) -> None:
        """Ends the run and keeps what came; a second time its workers are ended too."""
        self._error = self._error or KeyboardInterrupt()  # unless there is a run to speak of
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End the process if it has not ended."""
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
        """Wait for something to be said, and hand it on; False when the process has ended and said all."""
        kind, *said = self._messages.get()
        if kind == "progress":
            self._began = True
            if self._progress:
                from loadgen.engine.client_health import LiveCounters

                phase, counts = said
                self._progress(phase, LiveCounters.from_buffer_copy(counts))
        elif kind == "say" and self._say:
            self._say(*said)
        elif kind == "error":  # as it was there, whatever its class wants to be called with
            error, args, result = said
            self._error = error.__new__(error, *args)
            self._error.__dict__.update(result)
        return bool(kind)


def _measure(pipe: Connection) -> None:
    """What the measuring process does: one run, told over the pipe as it goes on."""
    from loadgen.engine import prepare
    from loadgen.plan import Plan

    def tell(kind: str, *said: Any) -> None:
        try:
            pipe.send((kind, *said))
        except OSError:  # nobody listens any more: end, and keep what came
            signal.raise_signal(signal.SIGINT)

    settings, folder, command = pipe.recv()
    try:
        prepare.run(
            Plan(**settings),
            folder,
            command=command,
            say=lambda line: tell("say", line),
            on_progress=lambda phase, counts: tell("progress", phase, bytes(counts)),
        )
    except BaseException as error:  # the caller's, whatever it is
        error.add_note(getattr(error, "hint", None) or traceback.format_exc())
        tell("error", type(error), error.args, vars(error))


if __name__ == "__main__":
    _measure(Connection(int(sys.argv[1])))
