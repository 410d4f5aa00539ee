"""A sweep runs one plan at several loads to find the highest load that a server can handle.

A *step* is one run at one load. The files of the steps are in the folders `step-1`, `step-2`, and so on. Callbacks
choose the next load and judge each run. A search begins with a *pilot*, which measures the full throughput of the
server. The pilot consists of closed loops of growing concurrency. Their files are in the folders `pilot-1`, `pilot-2`,
and so on. The package consists of these modules:

    __init__  the sweep, its journal and the loop over its steps.
    pilot     measures the full throughput of the server.
    overload  ends a step early, as soon as it is clear whether the server keeps up.
    class_loads  scales the loads of the plan's classes of traffic.
    measure   parses objectives, chooses loads, judges steps, and predicts a sweep with a simulated server.
    result    reads the files of a sweep and writes its results.

The state of a sweep is stored in its files. The append-only file `sweep.jsonl` contains what the run files do not:

    {"type": "plan", "plan": {...}, ...}                            the first line.
    {"type": "pilot", "concurrency": 64, "rate": 28.8, "run_s": 4.4, "last": false}
    {"type": "begin", "step": 3, "load": 16.0}
    {"type": "end", "step": 3, "load": 16.0, "seconds": 61.2, "run_s": 60.1, "over": 0.02, "carried": null,
     "stopped": "", "client": "ok"}
    {"type": "resumed", ...}, {"type": "ended", "why": "..."}

Here `over` is the probability that the load exceeds the capacity. `carried` is the rate in requests per second that the
server sustained at a load above its capacity. `stopped` is "overload" if the step ended as an overload. `seconds`
includes the preparation and evaluation of a step, and `run_s` is the duration of its run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from loadgen.errors import PlanError
from loadgen.journal import JournalKind, JournalLine, move_aside, open_journal, read_journal
from loadgen.plan import Plan
from loadgen.servers.auth import redact
from loadgen.servers.errors import ServerError
from loadgen.studies.sweep.class_loads import with_total_load
from loadgen.studies.sweep.overload import DEFAULTS, OverloadDetector, StepSettings
from loadgen.traffic import sends_sessions
from loadgen.workloads.spec_syntax import WorkloadError, parse_rate

if TYPE_CHECKING:
    from loadgen.analysis.run.record import Record
    from loadgen.analysis.run.runfile import Footer
    from loadgen.engine.prepare import OnProgress

Over = Literal["rate", "concurrency"]
"""The quantity that a sweep varies."""
EndReason = Literal["done", "runs", "time", "client", "interrupted"]
"""Reason why a sweep ended:

- done: The capacity is known precisely enough, or every given load has been measured.
- runs, time: The maximum number of runs or the time limit was reached.
- client: The client was the limit.
- interrupted: The sweep was interrupted.
"""
ARRIVALS = {"rate": "poisson:{:g}", "concurrency": "closed:{:.0f}"}
"""Format strings for the arrivals of a step. The value to insert is the load."""
EVEN_ARRIVALS = "constant:{:g}"
"""Format string for the arrivals of a sweep without objectives. Whether a queue grows for ever depends only on the mean
rate. Arrivals at even intervals show the growth soonest."""
DEFAULT_DURATION_S = 60.0
"""Duration of a step in s if the plan has neither a duration nor a number of requests."""
MAX_LOADS = 100

_STEP_FIELDS = [("step", int), ("load", float)]
_JUDGED_FIELDS = [("over", float), ("stopped", str), ("client", str)]
SWEEP = JournalKind(
    "sweep",
    {
        "begin": _STEP_FIELDS,
        "end": [*_STEP_FIELDS, ("seconds", float), *_JUDGED_FIELDS],
        "pilot": [("concurrency", int), ("rate", float), ("run_s", float), ("last", bool)],
    },
)
journal = partial(open_journal, SWEEP)
read_lines = partial(read_journal, SWEEP)

Measure = Callable[[Plan, Path, "OnProgress"], "Footer"]
"""Executes the run of a plan and writes its files to a folder."""


class StepEnd(NamedTuple):
    """The findings of the overload detector at the end of a step of a sweep. The run file does not contain them."""

    overloaded: bool
    """True if the step was ended as an overload."""
    chance_over: float | None
    """Probability that the load is above the capacity, from the growth of the queue. None if objectives decide."""


Judge = Callable[[Path, float, StepEnd], dict[str, Any]]
"""Summarises the run of a step. The arguments are the folder of the run, the load, and the StepEnd. Returns the fields
of the step's `end` line in the journal."""
SettingsFor = Callable[[float], StepSettings]
"""Returns the settings of the step at a load."""


class Watch(NamedTuple):
    """Functions that a sweep calls to show its progress, to get the settings of a step, and to read the clock."""

    show: OnProgress
    """Shows the progress of a run."""
    settings_for: SettingsFor = lambda _load: DEFAULTS
    clock: Callable[[], float] = time.monotonic
    """Clock of the runs: time.monotonic, or the virtual time of a simulated sweep."""


class Book(Protocol):
    """The journal of a sweep, on disk or in memory."""

    @property
    def lines(self) -> list[JournalLine]:
        """All lines of the journal so far."""

    def write(self, kind: str, /, **values: Any) -> None:
        """Append one line to the journal. `kind` is the type of the line, and `values` are its other fields."""


class RefusedError(ServerError):
    """Raised if the server answered every request of the first run with an error."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Settings of a sweep, and the folder of its files."""

    plan: Plan
    """Plan of each step, except for its arrivals."""
    over: Over
    folder: Path
    loads: tuple[float, ...] = ()
    """Fixed loads to measure. If empty, the sweep searches for the capacity."""
    journal_extra: tuple[tuple[str, Any], ...] = ()
    """Additional values that must not change when the sweep is resumed: the objectives and the virtual model."""
    rejections_allowed: bool = False
    """True if an objective limits the rejected requests. If True, rejections alone do not count as an overload."""
    has_objectives: bool = True
    adaptive: bool = False
    """True if the sweep chooses how long its steps last. False if the plan sets the duration."""

    @property
    def seeks_stability(self) -> bool:
        """True if the sweep has neither objectives nor fixed loads.

        Such a sweep searches for the largest rate at which the server's queue does not grow.
        """
        return not self.has_objectives and not self.loads

    @property
    def journal_plan(self) -> dict[str, Any]:
        """The settings of the sweep, as the first line of the journal stores them.

        They must not change when the sweep is resumed.
        """
        plan = {name: value for name, value in self.plan.to_dict().items() if name != "arrivals"}
        if plan["seed_choice"] == "fixed":  # journals of older versions have no such field
            del plan["seed_choice"]
        settings = {"run": plan, "over": self.over, "loads": list(self.loads), **dict(self.journal_extra)}
        return dict(redact(settings))

    def step(self, number: int, load: float, duration_s: float | None = None) -> Plan:
        """Return the plan of the step with this number and load. `duration_s` replaces the duration of the plan.

        - Each step has a different seed and therefore different prompts, because the server may still have the prompts
          of earlier steps in its cache.
        - The load may exceed the limit that the server reports, because the sweep searches for the load at which the
          server begins to reject requests.
        - If there are fewer clients than workers, the number of workers is reduced.
        - If the plan has classes of traffic, `load` is the total load of the classes that the sweep scales.
        """
        duration = {} if duration_s is None else {"duration_s": duration_s}
        if self.plan.traffic:
            scaled = with_total_load(self.plan, self.over, load)
            return scaled.replaced(seed=self.plan.seed + number - 1, over_limit=True, **duration)
        arrivals = (EVEN_ARRIVALS if self.seeks_stability else ARRIVALS[self.over]).format(load)
        workers = self.plan.workers if self.over == "rate" else min(self.plan.workers, round(load))
        return self.plan.replaced(
            arrivals=arrivals, workers=workers, seed=self.plan.seed + number - 1, over_limit=True, **duration
        )


def parse_loads(text: str, option: str, *, whole: bool) -> tuple[float, ...]:
    """Parse a list of increasing loads such as `1,2,4,...,256` or `1,2,3,...,10`.

    `...` stands for the loads between the two numbers next to it. If the numbers before `...` grow by a constant
    factor, the missing loads grow by this factor. Otherwise they grow by the difference of the last two numbers before
    `...`.

    If `whole` is True, all loads must be whole numbers. Otherwise they are rates, such as `5` or `5/s`. `option` is the
    name of the option in messages. Raises PlanError for a malformed list.
    """
    loads: list[float] = []
    words = [word.strip() for word in text.split(",")]

    def load(word: str) -> float:
        return float(word) if whole else float(parse_rate(word))

    try:
        for index, word in enumerate(words):
            if word == "...":
                loads += _continue_list(loads, load(words[index + 1]))
            else:
                loads.append(load(word))
        increasing = all(before < after for before, after in zip([0.0, *loads], loads, strict=False))
        valid = increasing and len(loads) <= MAX_LOADS and not (whole and any(number % 1 for number in loads))
    except (ValueError, IndexError, ZeroDivisionError, WorkloadError):
        valid = False
    if not valid:
        numbers = "whole numbers" if whole else "numbers"
        raise PlanError(
            f"{option} {text}: not a list of increasing {numbers}",
            f"Write at most {MAX_LOADS} {numbers}, such as {option} 1,2,4,...,256",
        )
    return tuple(loads)


def _continue_list(loads: Sequence[float], end: float) -> list[float]:
    """Return the loads that `...` stands for: those between the last number in `loads` and `end`.

    Raises ValueError or ZeroDivisionError if the list cannot be continued.
    """
    if len(loads) < 2:
        raise ValueError
    before = loads[-2]
    last = loads[-1]
    factor = last / before
    difference = last - before
    geometric = len(loads) < 3 or abs(before / loads[-3] - factor) < 1e-9
    filled: list[float] = []
    following = last * factor if geometric else last + difference
    while following < end * (1 - 1e-9):
        filled.append(following)
        if difference <= 0 or len(loads) + len(filled) > MAX_LOADS:
            raise ValueError
        following = following * factor if geometric else following + difference
    return filled


def run(
    sweep: Sweep,
    book: Book,
    *,
    measure: Measure,
    judge: Judge,
    next_load: Callable[[Sequence[JournalLine]], float | None],
    watch: Watch,
    max_runs: int,
    max_time_s: float | None = None,
) -> EndReason:
    """Run the steps of a sweep until `next_load` returns None or a limit is reached. Return the reason for the end.

    A step is one run at the load that `next_load` returns. `book` is the journal of the sweep. `max_runs` limits the
    number of steps, including those that the journal already contains. `max_time_s` limits the duration of this call.
    Raises LoadgenError, or loadgen.servers.errors.ServerError.
    """
    deadline_s = None if max_time_s is None else time.monotonic() + max_time_s
    reason: EndReason = "done"
    try:
        while reason == "done":
            steps = measured_steps(book.lines)
            load = next_load(steps)
            if load is None:
                break
            last_step_s = steps[-1]["seconds"] if steps else 0.0
            if len(steps) >= max_runs:
                reason = "runs"
            elif deadline_s is not None and time.monotonic() + last_step_s > deadline_s:
                reason = "time"
            else:
                settings = watch.settings_for(load)
                detector = OverloadDetector(
                    watch.show,
                    watch_backlog=sweep.over == "rate" and not sends_sessions(sweep.plan),
                    deadline_s=deadline_s,
                    rejections_allowed=sweep.rejections_allowed,
                    settings=settings,
                    clock=watch.clock,
                )
                reason = _run_step(sweep, book, load, measure, judge, detector)
    except KeyboardInterrupt:
        reason = "interrupted"
    book.write("ended", why=reason)
    return reason


def _run_step(
    sweep: Sweep, book: Book, load: float, measure: Measure, judge: Judge, detector: OverloadDetector
) -> EndReason:
    """Run one step of a sweep at the given load, and record it in the journal `book`.

    Return "done" if further steps may follow, otherwise the reason why the sweep must end.
    """
    number = len(measured_steps(book.lines)) + 1
    folder = sweep.folder / step_folder(number)
    began_s = time.monotonic()
    move_aside(folder)
    book.write("begin", step=number, load=load)
    settings = detector.settings
    footer = measure(sweep.step(number, load, settings.duration_s), folder, detector)
    if detector.refused and not any(line.get("type") in ("end", "pilot") for line in book.lines):
        raise refusal(folder)
    overloaded = detector.overloaded or detector.refused
    if footer.interrupted and not (overloaded or detector.decided):
        return "time" if detector.late else "interrupted"
    chance_over = settings.growth.chance_over if settings.decides and settings.growth else None
    judged = judge(folder, load, StepEnd(overloaded, chance_over))
    stopped = "overload" if overloaded else ""
    seconds = round(time.monotonic() - began_s, 3)
    run_s = round(footer.ended_ns / 1e9, 3)
    book.write("end", step=number, load=load, seconds=seconds, run_s=run_s, stopped=stopped, **judged)
    # If the client was the limit, it is unknown whether the server or the client broke the objectives.
    return "client" if judged["client"] == "limited" and judged["over"] > 0.5 else "done"


def refusal(folder: Path) -> RefusedError:
    """Return the error for a run in which the server refused every request.

    The error message contains the server's most frequent error message.
    """
    from loadgen.analysis.run.runfile import scan

    answers: Counter[str] = Counter()

    def take(record: Record) -> None:
        if record.error_kind != "cancelled":
            answers[record.error_detail or record.error_kind] += 1

    scan(folder, take)
    (answer, count), *_ = answers.most_common(1) or [("no response", 0)]
    return RefusedError(
        f"the server refused all of the first {count:,} requests: {answer}",
        "Check the API key, --model and --endpoint; `loadgen burst --n 1` sends a single request.",
    )


def measured_steps(lines: Sequence[JournalLine]) -> list[JournalLine]:
    """Return the `end` lines of the journal in order. There is one line for each measured step."""
    return [line for line in lines if line["type"] == "end"]


def with_recorded_seed(plan: Plan, folder: Path) -> Plan:
    """Return the plan of a resumed sweep, with the random seed that was chosen when the sweep in `folder` began.

    The plan is returned unchanged if the user states a seed, or if the sweep has no random seed.
    """
    first = next((line for line in read_lines(folder) if line["type"] == "plan"), None)
    recorded = {} if first is None else first["plan"].get("run", {})
    if plan.seed_choice == "fixed" and recorded.get("seed_choice") == "random":
        return plan.replaced(seed=recorded["seed"], seed_choice="random")
    return plan


def is_finished(folder: Path) -> bool:
    """Return True if the sweep in a folder has ended without an interruption."""
    lines = read_lines(folder)
    return bool(lines) and lines[-1]["type"] == "ended" and lines[-1].get("why") != "interrupted"


def default_duration(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with the default duration of a step, as the plan setting `duration_s`.

    The dict is empty if `settings` already contains a duration or a number of requests.
    """
    return {} if settings.get("n") or settings.get("duration_s") else {"duration_s": DEFAULT_DURATION_S}


def step_folder(number: int) -> str:
    """Return the name of the folder of step number `number` within the folder of the sweep."""
    return f"step-{number}"
