"""Measures a matrix: start after start, run after run. A cell that fails is recorded with its reason, and the matrix
goes on; what stops it is an interrupt, or a disk that takes no more."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.errors import LoadgenError, OutputError, PlanError
from loadgen.matrix import Cell, MatrixPlan, Repeat, Start, estimate, hosts_of, run_settings, starts
from loadgen.matrix.state import Journal, Line, finished, make_way
from loadgen.record import Record
from loadgen.runfile import scan

if TYPE_CHECKING:
    from loadgen.plan import Plan
    from loadgen.prepare import OnProgress
    from servers.launch import LaunchSpec, RunningServer
    from servers.launch.spec import Host

LOG_LINES = 40
"""Of a server that did not come up."""


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
        """All runs, in order."""
        return [repeat for start in self.starts for repeat in start.repeats]

    @property
    def resolved(self) -> dict[str, Any]:
        """What must not change between two sittings: the plan, with its hosts as the hosts file had them."""
        plan = self.plan.model_dump(mode="json", exclude={"hosts_file"})
        hosts = {}
        for name, host in self.hosts.items():
            values = ((each.name, getattr(host, each.name)) for each in fields(host))
            hosts[name] = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values}
        return plan | {"hosts_found": hosts}

    def done(self) -> list[Repeat]:
        """The runs that are finished."""
        return [repeat for repeat in self.repeats if finished(self.folder, repeat)]


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told what happens."""

    say: Callable[[str], None]
    progress: Callable[[int | None], AbstractContextManager[OnProgress]]
    """A display for one run of so many requests."""
    after_run: Callable[[Path], str]
    """Summarises a run that has ended; says in one line what came back."""


def matrix_of(plan: MatrixPlan, folder: Path, command: list[str]) -> Matrix:
    """The matrix of a plan. Raises PlanError or ServerError when a host is not known, or nothing is to be measured."""
    found = starts(plan)
    if not found:
        raise PlanError("every cell is skipped: nothing is left to measure", "Look at cases in the plan.")
    return Matrix(plan, hosts_of(plan), found, folder, command)


def run(matrix: Matrix, book: Journal, watcher: Watcher) -> bool:
    """Measure every run that is not finished; whether it was interrupted. Raises OutputError."""
    with _terminated_like_interrupted():
        try:
            take_down_left(matrix, book, watcher.say)
            for start in matrix.starts:
                left = [repeat for repeat in start.repeats if not finished(matrix.folder, repeat)]
                if left and Serving(matrix, book, watcher, start).serve(left):
                    break
            else:
                return False
        except KeyboardInterrupt:
            pass
    book.write("interrupted")
    return True


def equal_lengths(plan: MatrixPlan, folder: Path, cell: Cell) -> Path:
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
    lengths: list[int] = []

    def take(record: Record) -> None:
        if record.phase == "measured" and record.state == "complete" and record.output_tokens:
            lengths.append(record.output_tokens)

    for repeat in (Repeat(leader, number) for number in range(1, plan.repeats + 1)):
        if finished(folder, repeat):
            scan(folder / repeat.folder, take)
    if not lengths:
        raise EqualWorkError(
            f"equal work: {leader} has no complete answer to take output lengths from",
            "Mend that cell and go on with --resume, or leave out equal_work.",
        )
    file.parent.mkdir(exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_text("".join(f"{length}\n" for length in sorted(lengths)), encoding="ascii")
    return unfinished.rename(file)


def take_down_left(matrix: Matrix, book: Journal, say: Callable[[str], None]) -> None:
    """End a server that an earlier sitting was killed beside: it would be in the way, and no longer cold."""
    from servers.launch import compose, process

    left: Line | None = None
    for line in book.lines:
        left = line if line["type"] == "up" else None if line["type"] == "down" else left
    start = next((each for each in matrix.starts if left and each.number == left["start"]), None)
    if left is None or start is None:
        return
    kept = process.read_left(start.server.server)
    if start.launch == "process" and kept is not None and kept.pid == left["facts"].get("pid"):
        process.down(kept)
        say(f"{start} was left running: taken down")
    elif start.launch == "compose" and compose.is_there(spec := _spec(matrix, start)):
        compose.down(spec)
        say(f"{start} was left running: taken down")


def _spec(matrix: Matrix, start: Start) -> LaunchSpec:
    from servers.launch import LaunchSpec

    model = start.model.path or start.model.name
    return LaunchSpec(start.server.server, matrix.hosts[start.host.name], model, start.launch, start.options)


class Serving:
    """One start: its server up, its runs, its server down."""

    def __init__(self, matrix: Matrix, book: Journal, watcher: Watcher, start: Start) -> None:
        self._matrix, self._book, self._watcher, self._start = matrix, book, watcher, start
        self._say = watcher.say
        self._settled = set[Repeat]()  # finished or failed

    def serve(self, left: Sequence[Repeat]) -> bool:
        """Bring the server up and measure these runs; whether that was interrupted."""
        start = self._start
        self._say(f"[start {start.number}/{len(self._matrix.starts)}] {start} ({start.launch})")
        runs = {repeat: plan for repeat in left if (plan := self._planned(repeat)) is not None}
        if not runs:
            return False
        try:
            return self._served(runs)
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

    def _served(self, runs: dict[Repeat, Plan]) -> bool:
        from servers.launch import launched

        start = self._start
        began_s = time.monotonic()
        with launched(_spec(self._matrix, start), lambda line: self._say(f"    {line}")) as server:
            seconds = time.monotonic() - began_s
            named = {"server": start.server.name, "host": start.host.name, "model": start.model.name}
            self._book.write("up", start=start.number, **named, seconds=round(seconds, 3), facts=dict(server.facts))
            self._say(f"    up after {seconds:.1f} s")
            for place, (repeat, plan) in enumerate(runs.items()):
                if self._measure(repeat, plan, server, place):
                    return True
        self._book.write("down", start=start.number)
        return False

    def _planned(self, repeat: Repeat) -> Plan | None:
        """The plan of one run but for the server's URL; None, and a failure, where there can be none."""
        matrix, start = self._matrix, self._start
        owned: dict[str, Any] = {
            "server": start.server.server,
            "platform": matrix.hosts[start.host.name].platform,
            "seed": matrix.plan.seed + repeat.number - 1,
            "repeat": repeat.number,
            "repeats": matrix.plan.repeats,
        }
        optional = {"endpoint": start.server.endpoint, "dcgm_url": start.host.dcgm_url}
        owned |= {name: value for name, value in optional.items() if value}
        try:
            if matrix.plan.equal_work not in (None, start.server.name):
                owned["output_tokens"] = f"empirical:{equal_lengths(matrix.plan, matrix.folder, repeat.cell)}"
            return run_settings(matrix.plan, repeat.cell.workload, **owned)
        except LoadgenError as error:
            self._failed(repeat, error)
            self._say(f"    failed: {error}")
            return None

    def _measure(self, repeat: Repeat, plan: Plan, server: RunningServer, place: int) -> bool:
        """One run; whether it was interrupted."""
        from loadgen import prepare

        matrix, key = self._matrix, {"cell": repeat.cell._asdict(), "repeat": repeat.number}
        folder, name = matrix.folder / repeat.folder, f"{repeat.cell.workload}, repeat {repeat.number}"
        # The memory of these processes is read; not where the library for it is missing: nobody asked for it by name.
        pids = server.pids if find_spec("psutil") else ()
        make_way(matrix.folder, repeat)
        self._book.write("begin", **key, start=self._start.number, place=place)
        began_s = time.monotonic()
        try:
            with self._watcher.progress(None if plan.of_sessions else plan.n) as on_progress:
                footer = prepare.run(
                    plan.model_copy(update={"url": server.url, "server_pid": pids}),
                    folder,
                    command=matrix.command,
                    say=lambda _line: None,  # the matrix has lines of its own for what a run says
                    on_progress=on_progress,
                    launch=server.facts,
                )
            if footer.interrupted:
                return True
            said = self._watcher.after_run(folder)
        except OutputError:
            raise
        except Exception as error:
            self._failed(repeat, error)
            self._say(f"    {name}: failed: {error}")
            return False
        seconds = time.monotonic() - began_s
        self._settled.add(repeat)
        self._book.write("end", **key, seconds=round(seconds, 3))
        self._say(f"    {name}: {said}; {seconds:.0f} s{self._remaining()}")
        return False

    def _remaining(self) -> str:
        matrix = self._matrix
        done = matrix.done()
        left_s = estimate.total_s(matrix.plan, matrix.starts, self._book.lines, done)
        left = len(matrix.repeats) - len(done)
        return f"; {left} {'run' if left == 1 else 'runs'} left, {estimate.in_words(left_s)}" if left else ""

    def _failed(self, repeat: Repeat, error: Exception) -> None:
        self._settled.add(repeat)
        # Not one of ours: where it came from is all there is to go by.
        log = getattr(error, "log_tail", "") if hasattr(error, "hint") else "".join(traceback.format_exception(error))
        self._book.write(
            "failure",
            cell=repeat.cell._asdict(),
            repeat=repeat.number,
            start=self._start.number,
            kind=type(error).__name__,
            reason=str(error),
            hint=getattr(error, "hint", ""),
            log="\n".join(log.splitlines()[-LOG_LINES:]),
        )


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is gone, take the server down as Ctrl-C does.

    Within a run the coordinator counts the first two, so that what came until then is kept.
    """

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]  # nohup
    previous = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
