"""A sweep runs one plan at several loads to find the highest load that a server can handle.

A *step* is one run at one load. Its files are in the folder `step-1`, `step-2`, ... Callbacks choose the next load and
judge each run. The package consists of these modules:

    __init__  the sweep, its journal and the loop over its steps.
    overload  ends a step early if the server cannot keep up.
    measure   parses objectives, chooses loads, judges steps, and predicts a sweep with a simulated server.
    result    reads the files of a sweep and writes its results.

The state of a sweep is stored in its files. The append-only file `sweep.jsonl` contains what the run files do not:

    {"type": "plan", "plan": {...}, ...}                            the first line.
    {"type": "begin", "step": 3, "load": 16.0}
    {"type": "end", "step": 3, "load": 16.0, "seconds": 61.2, "over": 0.02, "carried": null,
     "stopped": "", "client": "ok"}
    {"type": "resumed", ...}, {"type": "ended", "why": "..."}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loadgen.errors import PlanError
from loadgen.journal import Journal, JournalKind, JournalLine, move_aside, open_journal, read_journal
from loadgen.plan import Plan
from loadgen.servers.auth import redact
from loadgen.studies.sweep.overload import OverloadDetector

if TYPE_CHECKING:
    from loadgen.analysis.run.runfile import Footer
    from loadgen.engine.prepare import OnProgress

Over = Literal["rate", "concurrency"]
"""The quantity that a sweep varies."""
EndReason = Literal["done", "runs", "time", "client", "interrupted"]
"""Reason why a sweep ended:

- done: The capacity is known precisely enough, or every given load has been measured.
- runs, time: The maximum number of runs or the time limit was reached.
- client: The client was the bottleneck.
- interrupted: The sweep was interrupted.
"""
ARRIVALS = {"rate": "poisson:{:g}", "concurrency": "closed:{:.0f}"}
"""Format strings for the arrivals of a step. The value to insert is the load."""
DEFAULT_DURATION_S = 60.0
"""Duration of a step in s if the plan has neither a duration nor a number of requests."""
MAX_LOADS = 100

_STEP_FIELDS = [("step", int), ("load", float)]
_JUDGED_FIELDS = [("over", float), ("stopped", str), ("client", str)]
SWEEP = JournalKind("sweep", {"begin": _STEP_FIELDS, "end": [*_STEP_FIELDS, ("seconds", float), *_JUDGED_FIELDS]})
journal = partial(open_journal, SWEEP)
read_lines = partial(read_journal, SWEEP)

Measure = Callable[[Plan, Path, "OnProgress"], "Footer"]
"""Executes the run of a plan and writes its files to a folder."""
Judge = Callable[[Path, float, bool], dict[str, Any]]
"""Summarises a run. The arguments are its folder, its load, and True if it was stopped as an overload. Returns the
fields of the step's `end` line in the journal."""


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
    """True if an objective limits the rejected requests. Rejections alone then do not count as an overload."""

    @property
    def journal_plan(self) -> dict[str, Any]:
        """Values that must not change when the sweep is resumed, as the first line of the journal stores them."""
        plan = {name: value for name, value in self.plan.to_dict().items() if name != "arrivals"}
        settings = {"run": plan, "over": self.over, "loads": list(self.loads), **dict(self.journal_extra)}
        return dict(redact(settings))

    def step(self, number: int, load: float) -> Plan:
        """Return the plan of the step with this number and load.

        The seed depends on the number, so that the prompts of steps differ. A server may have cached the prompts of
        earlier steps. The load may exceed the limit that the server reports, because the sweep looks for the load at
        which the server begins to reject requests.
        """
        arrivals = ARRIVALS[self.over].format(load)
        return self.plan.replaced(arrivals=arrivals, seed=self.plan.seed + number - 1, over_limit=True)


def parse_loads(text: str, option: str, *, whole: bool) -> tuple[float, ...]:
    """Parse a list of increasing loads such as `1,2,4,...,256` or `1,2,3,...,10`.

    `...` continues the list by the factor of the last loads. If the factor is not constant, `...` continues the list by
    their difference. `whole` requires whole numbers. `option` is the name of the option in messages. Raises PlanError.
    """
    loads: list[float] = []
    words = text.split(",")
    try:
        for index, word in enumerate(words):
            if word.strip() == "...":
                loads += _continue_list(loads, float(words[index + 1]))
            else:
                loads.append(float(word))
        increasing = all(before < after for before, after in zip([0.0, *loads], loads, strict=False))
        valid = increasing and len(loads) <= MAX_LOADS and not (whole and any(load % 1 for load in loads))
    except (ValueError, IndexError, ZeroDivisionError):
        valid = False
    if not valid:
        numbers = "whole numbers" if whole else "numbers"
        raise PlanError(
            f"{option} {text}: not a list of increasing {numbers}",
            f"Write at most {MAX_LOADS} {numbers}, such as {option} 1,2,4,...,256",
        )
    return tuple(loads)


def _continue_list(loads: Sequence[float], end: float) -> list[float]:
    """Return the loads that `...` stands for, which are those between the last load and `end`.

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
    book: Journal,
    *,
    measure: Measure,
    judge: Judge,
    next_load: Callable[[Sequence[JournalLine]], float | None],
    show: OnProgress,
    max_runs: int,
    max_time_s: float | None = None,
) -> EndReason:
    """Run steps until there is no next load, and return the reason why the sweep ended.

    `max_runs` limits the steps of the whole sweep, including those of earlier calls. `max_time_s` limits the duration
    of this call. Raises LoadgenError, or loadgen.servers.errors.ServerError.
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
                detector = OverloadDetector(
                    show,
                    watch_backlog=sweep.over == "rate" and not sweep.plan.uses_sessions,
                    deadline_s=deadline_s,
                    rejections_allowed=sweep.rejections_allowed,
                )
                reason = _run_step(sweep, book, load, measure, judge, detector)
    except KeyboardInterrupt:
        reason = "interrupted"
    book.write("ended", why=reason)
    return reason


def _run_step(
    sweep: Sweep, book: Journal, load: float, measure: Measure, judge: Judge, detector: OverloadDetector
) -> EndReason:
    """Run one step. Return "done" if the sweep may continue, otherwise the reason why it must end."""
    number = len(measured_steps(book.lines)) + 1
    folder = sweep.folder / step_folder(number)
    began_s = time.monotonic()
    move_aside(folder)
    book.write("begin", step=number, load=load)
    footer = measure(sweep.step(number, load), folder, detector)
    if footer.interrupted and not detector.overloaded:
        return "time" if detector.late else "interrupted"
    judged = judge(folder, load, detector.overloaded)
    stopped = "overload" if detector.overloaded else ""
    seconds = round(time.monotonic() - began_s, 3)
    book.write("end", step=number, load=load, seconds=seconds, stopped=stopped, **judged)
    # If the client was the limit, it is unknown whether the server or the client broke the objectives.
    return "client" if judged["client"] == "limited" and judged["over"] > 0.5 else "done"


def measured_steps(lines: Sequence[JournalLine]) -> list[JournalLine]:
    """Return the `end` lines of the journal in order. There is one line for each measured step."""
    return [line for line in lines if line["type"] == "end"]


def is_finished(folder: Path) -> bool:
    """Return True if the sweep in a folder has ended without an interruption."""
    lines = read_lines(folder)
    return bool(lines) and lines[-1]["type"] == "ended" and lines[-1].get("why") != "interrupted"


def default_duration(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default duration of a step, as a setting of its plan.

    Return an empty dictionary if `settings` already contain a duration or a number of requests.
    """
    return {} if settings.get("n") or settings.get("duration_s") else {"duration_s": DEFAULT_DURATION_S}


def step_folder(number: int) -> str:
    """Return the name of a step's folder within the folder of the sweep."""
    return f"step-{number}"
