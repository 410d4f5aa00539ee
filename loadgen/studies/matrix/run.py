"""Measures a matrix: start after start, run after run. A cell that fails is recorded with its reason, and the matrix
goes on; what stops it is an interrupt, or a disk that takes no more.

How long that takes is known from its own finished runs where there are any, else from a model of each server.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec import to_builtins

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import scan
from loadgen.engine import prepare
from loadgen.engine.signals import handle_signals
from loadgen.errors import LoadgenError, OutputError, PlanError
from loadgen.journal import Journal, JournalLine, move_aside
from loadgen.plan import Plan
from loadgen.servers.auth import redact
from loadgen.servers.launch import LaunchSpec, RunningServer, compose, launched_server, process
from loadgen.servers.launch.spec import Host
from loadgen.servers.simulated.scheduler_presets import ENGINES
from loadgen.studies import matrix as planned
from loadgen.studies.matrix import Cell, MatrixPlan, Repeat, Start, is_finished, run_settings
from loadgen.workloads import arrivals, lengths

if TYPE_CHECKING:
    from loadgen.analysis.run.runfile import Footer
    from loadgen.cli.output import Output
    from loadgen.engine.prepare import OnProgress
    from loadgen.studies.sweep import Measure

AfterRun = Callable[[Path], str]
"""Summarises a run or a sweep that has ended; says in one line what it measured."""
RunSweep = Callable[["planned.SweepOptions", Plan, Path, "Measure", dict[str, Any]], bool]
"""Makes a sweep in a folder, or goes on with it: how its load grows, the plan of its steps, what makes a run, and what
its GPUs are and cost. Whether it was interrupted."""
LOG_LINES = 40
"""Of a server that did not come up."""
STARTUP_S: Mapping[str, float] = {"compose": 180.0, "process": 60.0, "simulated": 1.0, "running": 0.0}
"""Until a server answers: loading the weights is most of it."""
TOKENS_PER_S = 1_000.0
"""Output tokens per second of a server about which nothing is known."""
OVERHEAD_S = 2.0
"""A run beside its load: prompts, connections, the run file, its summary."""
MAX_MODELLED_REQUESTS = 500
"""Of a larger burst so many are modelled, and the rest taken to go on as fast."""
DEFAULT_OUTPUT_TOKENS = 256
"""Tokens of an answer whose length is not known without reading a file."""
ESTIMATE_SOURCES = {
    "measured": "the mean of what this matrix has measured so far",
    "modelled": f"what the simulated server makes of this server, card and model, and {OVERHEAD_S:g} s; a run of a "
    "given duration takes that",
    "guessed": f"until a server is up {', '.join(f'{value:g} s ({launch})' for launch, value in STARTUP_S.items())}; "
    f"a run at {TOKENS_PER_S:,.0f} output tokens/s",
}


class EqualWorkError(LoadgenError):
    """The server that says how much work there is has no finished run yet."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A plan with everything that is known before the first start."""

    plan: MatrixPlan
    hosts: dict[str, Host]
    starts: Sequence[Start]
    folder: Path
    command: list[str]

    @property
    def repeats(self) -> list[Repeat]:
        return [repeat for start in self.starts for repeat in start.repeats]

    @property
    def journal_plan(self) -> dict[str, Any]:
        """What must not change between two sittings: the plan, with its hosts as the hosts file had them."""
        plan = self.plan.model_dump(mode="json", exclude={"hosts_file"})
        return dict(redact(plan | {"hosts_found": to_builtins(self.hosts)}))

    def done(self) -> list[Repeat]:
        return [repeat for repeat in self.repeats if is_finished(self.folder, repeat)]


def build_matrix(plan: MatrixPlan, folder: Path, command: list[str]) -> Matrix:
    """The matrix of a plan. Raises PlanError or ServerError when a host is not known, or nothing is to be measured."""
    result = planned.plan_starts(plan)
    if not result:
        raise PlanError("every cell is skipped: nothing is left to measure", "Look at cases in the plan.")
    return Matrix(plan, planned.resolve_hosts(plan), result, folder, command)


def run(matrix: Matrix, book: Journal, output: Output, after_run: AfterRun, sweeps: RunSweep) -> bool:
    """Measure every run that is not finished; whether it was interrupted. Raises OutputError."""
    with _terminated_like_interrupted():
        try:
            stop_leftover_server(matrix, book, output.say)
            interrupted = any(
                StartRunner(matrix, book, start, output, after_run, sweeps).serve() for start in matrix.starts
            )
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        book.write("interrupted")
    return interrupted


def equal_work_lengths(plan: MatrixPlan, folder: Path, cell: Cell) -> Path:
    """Equal work: the file with one output length per complete answer of the leading server's runs so far, for the
    cells beside `cell`.

    TGI stops where the model stops: nothing on HTTP fixes its output length (docs/reference/dialects.md). So that the
    others do the same work, they are asked for lengths drawn from those that TGI's answers had, on the same host with
    the same model under the same workload. Written once, when it is first asked for: all later runs draw from the same
    lengths. Raises EqualWorkError.
    """
    file = folder / "equal-work" / f"{cell.host}-{cell.model}-{cell.workload}.txt"
    if file.exists():
        return file
    leader = cell._replace(server=str(plan.equal_work))
    result: list[int] = []

    def take(record: Record) -> None:
        if record.phase == "measured" and record.state == "complete" and record.output_tokens:
            result.append(record.output_tokens)

    for number in range(1, plan.repeats + 1):
        if is_finished(folder, repeat := Repeat(leader, number)):
            scan(folder / repeat.folder, take)
    if not result:
        raise EqualWorkError(
            f"equal work: {leader} has no complete answer to take output lengths from",
            "Mend that cell and go on with --resume, or leave out equal_work.",
        )
    file.parent.mkdir(exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_text("".join(f"{length}\n" for length in sorted(result)), encoding="ascii")
    return unfinished.rename(file)


def stop_leftover_server(matrix: Matrix, book: Journal, say: Callable[[str], None]) -> None:
    """End a server that an earlier sitting was killed beside: it would be in the way, and no longer cold."""
    left: JournalLine | None = None
    for line in book.lines:
        left = line if line["type"] == "up" else None if line["type"] == "down" else left
    start = next((start for start in matrix.starts if left and start.number == left["start"]), None)
    if left is None or start is None:
        return
    retained = process.read_background_server(start.server.server)
    if start.launch == "process" and retained is not None and retained.pid == left["facts"].get("pid"):
        process.down(retained)
    elif start.launch == "compose" and compose.has_container(spec := _spec(matrix, start)):
        compose.down(spec)
    else:
        return
    say(f"{start} was left running: taken down")


def _spec(matrix: Matrix, start: Start) -> LaunchSpec:
    model = start.model.path or start.model.name
    return LaunchSpec(start.server.server, matrix.hosts[start.host.name], model, start.launch, start.options)


class StartRunner:
    """One start: its server up, its runs, its server down."""

    def __init__(
        self, matrix: Matrix, book: Journal, start: Start, output: Output, after_run: AfterRun, sweeps: RunSweep
    ) -> None:
        self._matrix, self._book, self._start = matrix, book, start
        self._after_run, self._sweeps = after_run, sweeps
        self._say, self._progress = output.say, output.progress
        self._settled = set[Repeat]()  # finished or failed

    def serve(self) -> bool:
        """Bring the server up and measure the runs that are not finished; whether that was interrupted."""
        start = self._start
        left = [repeat for repeat in start.repeats if not is_finished(self._matrix.folder, repeat)]
        if not left:
            return False
        self._say(f"[start {start.number}/{len(self._matrix.starts)}] {start} ({start.launch})")
        runs = {repeat: plan for repeat in left if (plan := self._planned(repeat)) is not None}
        if not runs:
            return False
        began_s = time.monotonic()
        try:
            with launched_server(_spec(self._matrix, start), lambda line: self._say(f"    {line}")) as server:
                seconds = time.monotonic() - began_s
                named = {"server": start.server.name, "host": start.host.name, "model": start.model.name}
                self._book.write("up", start=start.number, **named, seconds=round(seconds, 3), facts=dict(server.facts))
                self._say(f"    up after {seconds:.1f} s")
                for index, (repeat, plan) in enumerate(runs.items()):
                    if self._measure(repeat, plan, server, index):
                        return True
            self._book.write("down", start=start.number)
        except OutputError:
            raise
        except Exception as error:
            unsettled = [repeat for repeat in runs if repeat not in self._settled]
            for repeat in unsettled:
                self._failed(repeat, error)
            if not unsettled:
                self._book.write("down", start=start.number, trouble=f"{type(error).__name__}: {error}")
            self._say(f"    failed: {error}")
        return False

    def _planned(self, repeat: Repeat) -> Plan | None:
        """The plan of one run but for the server's URL; None, and a failure, where there can be none."""
        matrix, start = self._matrix, self._start
        owned: dict[str, Any] = {"server": start.server.server, "platform": matrix.hosts[start.host.name].platform}
        owned |= {"repeat": repeat.number, "repeats": matrix.plan.repeats}
        owned["seed"] = matrix.plan.seed + repeat.number - 1
        optional = {
            "endpoint": start.server.endpoint,
            "dcgm_url": start.host.dcgm_url,
            "gpu_model": gpus_of_start(start),
        }
        owned |= {name: value for name, value in optional.items() if value}
        try:
            if matrix.plan.equal_work not in (None, start.server.name):
                owned["output_tokens"] = f"empirical:{equal_work_lengths(matrix.plan, matrix.folder, repeat.cell)}"
            return run_settings(matrix.plan, repeat.cell.workload, **owned)
        except LoadgenError as error:
            self._failed(repeat, error)
            self._say(f"    failed: {error}")
            return None

    def _measure(self, repeat: Repeat, plan: Plan, server: RunningServer, place: int) -> bool:
        """One run; whether it was interrupted."""
        matrix, name = self._matrix, f"{repeat.cell.workload}, repeat {repeat.number}"
        # The memory of these processes is read; not where the library for it is missing: nobody asked for it by name.
        pids = server.pids if find_spec("psutil") else ()

        def run(asked: Plan, into: Path, show: OnProgress) -> Footer:
            return prepare.run(
                asked.replaced(url=server.url, server_pid=pids),
                into,
                command=matrix.command,
                say=lambda _line: None,  # the matrix has lines of its own for what a run says
                on_progress=show,
                launch=server.facts,
            )

        folder, swept = matrix.folder / repeat.folder, planned.sweep_options(matrix.plan, repeat.cell.workload)
        if swept is None:
            move_aside(folder)
        self._book.write("begin", **repeat.key, start=self._start.number, place=place)
        began_s = time.monotonic()
        try:
            if swept is not None:
                price = {"hour": self._start.host.gpu_hour_cost, "gpus": _cards(self._start)[0] or None}
                interrupted = self._sweeps(swept, plan, folder, run, price)
            else:
                with self._progress(plan, plain=False) as on_progress:
                    interrupted = run(plan, folder, on_progress).interrupted
            if interrupted:
                return True
            said = self._after_run(folder)
        except OutputError:
            raise
        except Exception as error:
            self._failed(repeat, error)
            self._say(f"    {name}: failed: {error}")
            return False
        seconds = time.monotonic() - began_s
        self._settled.add(repeat)
        self._book.write("end", **repeat.key, seconds=round(seconds, 3))
        done = matrix.done()
        left = len(matrix.repeats) - len(done)
        to_go = (
            f"; {_count(left, 'run')} left, {format_duration(remaining_s(matrix, self._book.lines, done))}"
            if left
            else ""
        )
        self._say(f"    {name}: {said}; {seconds:.0f} s{to_go}")
        return False

    def _failed(self, repeat: Repeat, error: Exception) -> None:
        self._settled.add(repeat)
        # Not one of ours: where it came from is all there is to go by.
        log = getattr(error, "log_tail", "") if hasattr(error, "hint") else "".join(traceback.format_exception(error))
        said = {"kind": type(error).__name__, "reason": str(error), "hint": getattr(error, "hint", "")}
        end = "\n".join(log.splitlines()[-LOG_LINES:])
        self._book.write("failure", **repeat.key, start=self._start.number, **said, log=end)


def _terminated_like_interrupted() -> AbstractContextManager[None]:
    """SIGTERM, and SIGHUP of a terminal that is gone, take the server down as Ctrl-C does. Within a run the coordinator
    counts the first two, so that what came until then is kept."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    return handle_signals((signal.SIGTERM, signal.SIGHUP), stop)


class Estimate(NamedTuple):
    """How long one start or one run takes, and how that is known."""

    seconds: float
    source: Literal["measured", "modelled", "guessed"]


def estimate_start(start: Start, lines: Sequence[JournalLine]) -> Estimate:
    """Until its server answers: the mean of the starts of the same server and model so far."""
    same = (start.server.name, start.model.name)
    ups = (line for line in lines if line["type"] == "up")
    seen = [float(line["seconds"]) for line in ups if (line["server"], line["model"]) == same]
    return Estimate(fmean(seen), "measured") if seen else Estimate(STARTUP_S[start.launch], "guessed")


def estimate_runs(matrix: Matrix, lines: Sequence[JournalLine]) -> dict[Cell, Estimate]:
    """One run of each cell: the mean of its own runs so far, else of the model of its server, else a guess."""
    seen: dict[Cell, list[float]] = {}
    for repeat, line in planned.newest_lines(lines, "end").items():
        seen.setdefault(repeat.cell, []).append(float(line["seconds"]))
    servers = {repeat.cell: start for start in reversed(matrix.starts) for repeat in start.repeats}
    known = {cell: Estimate(fmean(each), "measured") for cell, each in seen.items()}
    return {cell: known.get(cell) or _foreseen(matrix.plan, start, cell) for cell, start in servers.items()}


def remaining_s(matrix: Matrix, lines: Sequence[JournalLine], done: Sequence[Repeat]) -> float:
    """Every start that still has a run to serve, and those runs."""
    runs, seconds = estimate_runs(matrix, lines), 0.0
    for start in matrix.starts:
        if left := [repeat for repeat in start.repeats if repeat not in done]:
            seconds += estimate_start(start, lines).seconds + sum(runs[repeat.cell].seconds for repeat in left)
    return seconds


def format_duration(seconds: float) -> str:
    """`about 40 s`, `about 12 min`, `about 7 h 30 min`."""
    if seconds < 90:
        return f"about {max(5, round(seconds / 5) * 5)} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60 // 10 * 10} min"


def heading(matrix: Matrix) -> str:
    """How much there is to do, in one line."""
    plan = matrix.plan
    items = (_count(len(getattr(plan, f"{noun}s")), noun) for noun in ("server", "host", "model", "workload"))
    return (
        f"{plan.name}: {' x '.join(items)}: "
        f"{_count(len(planned.plan_cells(plan)), 'cell')}, {_count(plan.repeats, 'repeat')} each: "
        f"{_runs(matrix)} in {_count(len(matrix.starts), 'start')}"
    )


def _runs(matrix: Matrix) -> str:
    """`8 runs and 2 sweeps`."""
    sweeps = sum(planned.sweep_options(matrix.plan, repeat.cell.workload) is not None for repeat in matrix.repeats)
    runs = len(matrix.repeats) - sweeps
    return " and ".join(_count(number, noun) for number, noun in ((runs, "run"), (sweeps, "sweep")) if number)


def dry_run_text(matrix: Matrix, lines: Sequence[JournalLine], done: Sequence[Repeat], *, width: int = 100) -> str:
    """The starts in order, what each serves, how long it takes, and how that is known."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for name in ("start", "server", "host", "model", "runs", "up after", "runs take"):
        justify: Any = "right" if name in ("start", "up after", "runs take") else "left"
        table.add_column(name, justify=justify, no_wrap=name != "runs")
    runs, ups = estimate_runs(matrix, lines), [estimate_start(start, lines) for start in matrix.starts]
    for start, up in zip(matrix.starts, ups, strict=True):
        result = [runs[repeat.cell] for repeat in start.repeats if repeat not in done]
        hows = "/".join(dict.fromkeys(each.source for each in result))
        order = (
            f"{repeat.cell.workload}#{repeat.number}{' done' if repeat in done else ''}" for repeat in start.repeats
        )
        takes = ("", "done")
        if result:
            takes = f"{up.seconds:,.0f} s {up.source}", f"{sum(each.seconds for each in result):,.0f} s {hows}"
        names = f"{start.server.name} ({start.launch})", start.host.name, start.model.name
        table.add_row(str(start.number), *names, "  ".join(order), *takes)
    not_measured = [f"Not measured: {cell}: {reason}." for cell, reason in planned.skipped_cells(matrix.plan).items()]
    left, are_done = len(matrix.repeats) - len(done), f", {len(done)} are done" if done else ""
    to_go = f"{_count(left, 'run')} to go{are_done}: {format_duration(remaining_s(matrix, lines, done))}."
    used = {each.source for each in (*runs.values(), *ups)}
    hows_said = [f"  {how}: {meaning}." for how, meaning in ESTIMATE_SOURCES.items() if how in used]
    output = StringIO()
    console = Console(file=output, width=width, highlight=False)
    for part in (heading(matrix), "", table, *not_measured, "", to_go, *hows_said):
        console.print(part, markup=False)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _foreseen(plan: MatrixPlan, start: Start, cell: Cell) -> Estimate:
    run, swept = (
        run_settings(plan, cell.workload, server=start.server.server),
        planned.sweep_options(plan, cell.workload),
    )
    times = 1 if swept is None else swept.max_steps
    if run.duration_s is not None and not arrivals.parse(run.arrivals).facts.burst:
        return Estimate(times * (run.duration_s + OVERHEAD_S), "modelled")
    due_ns, modelled_s = prepare.build_schedule(run).due_ns, _modelled_s(start, run)
    guessed_s = (run.n or 1) * _mean_length(run.output_tokens) / TOKENS_PER_S
    takes_s = max(due_ns[-1] / 1e9 if due_ns else 0.0, guessed_s if modelled_s is None else modelled_s)
    return Estimate(times * (takes_s + OVERHEAD_S), "guessed" if modelled_s is None else "modelled")


def gpus_of_start(start: Start) -> str:
    """The GPUs of a real server, where the plan names ones that are known; a simulated one says so itself."""
    number, name = _cards(start)
    return f"{number} x {name}" if name and start.launch != "simulated" else ""


def _cards(start: Start) -> tuple[int, str]:
    """How many GPUs, and which; 0 where the plan does not say."""
    from loadgen.servers.hardware import HardwareError, parse_gpus

    try:
        number, name = parse_gpus(start.host.gpu) if start.host.gpu else (0, "")
    except HardwareError:
        return 0, ""
    return (max(number, int(start.options.get("tensor_parallel") or 1)), name) if name else (0, "")


def _modelled_s(start: Start, run: Plan) -> float | None:
    """The load in virtual time on a model of this server and card."""
    from loadgen.studies import simulate

    options: Mapping[str, Any] = start.options
    gpu, shape = start.host.gpu or options.get("gpu"), start.model.shape or options.get("model_shape")
    if not gpu or not shape or start.server.server not in ENGINES:
        return None
    jobs, tensor = min(run.n or 1, MAX_MODELLED_REQUESTS), int(options.get("tensor_parallel", 1))
    try:
        modelled = simulate.ServerModel(str(gpu), str(shape), tensor)
        footer = simulate.run_in_memory(run.replaced(n=jobs, metrics_every_s=0.0), modelled).footer
    except (LoadgenError, ValueError):
        return None
    speed = float(options.get("speed", 1.0)) if start.launch == "simulated" else 1.0
    return footer.ended_ns / 1e9 * (run.n or 1) / jobs / speed if footer else None


def _mean_length(tokens: int | str) -> int:
    """About how long, where that is known without reading a file."""
    match lengths.parse_outputs(str(tokens)).lengths:
        case lengths.Fixed(length):
            return length
        case lengths.Uniform(low, high):
            return (low + high) // 2
        case lengths.Lognormal(mean) | lengths.Exponential(mean):
            return max(1, round(float(mean)))
    return DEFAULT_OUTPUT_TOKENS


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
