"""A sweep runs one plan at several loads, to find how much load a server can carry.

A *step* is one load and its run, in the folders `step-1`, `step-2`, ... It is not a repeat, because a repeat would have
the same load. Callbacks choose the next load and judge each run; this module runs the steps and keeps the journal.

    (here)    the sweep, its journal and the loop over its steps
    overload  ends the run of an overload early
    measure   what a complete sweep measures: parses its objectives, chooses loads, judges steps, predicts with a twin
    result    reads the files of a sweep and writes its results

The state of a sweep is its files. `sweep.jsonl` is append-only and holds what the run files do not:

    {"type": "plan", "plan": {...}, ...}                            the first line
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
"""Why a sweep ended: the capacity is known precisely enough, the maximum of runs or of time was reached, the client was
the limit, or the sweep was interrupted."""
ARRIVALS = {"rate": "poisson:{:g}", "concurrency": "closed:{:.0f}"}
"""Arrivals of a step, to be formatted with its load."""
DEFAULT_DURATION_S = 60.0
"""Duration of a step whose plan has neither a duration nor a number of requests."""
MAX_LOADS = 100

_STEP_FIELDS = [("step", int), ("load", float)]
_JUDGED_FIELDS = [("over", float), ("stopped", str), ("client", str)]
SWEEP = JournalKind("sweep", {"begin": _STEP_FIELDS, "end": [*_STEP_FIELDS, ("seconds", float), *_JUDGED_FIELDS]})
journal = partial(open_journal, SWEEP)
read_lines = partial(read_journal, SWEEP)

Measure = Callable[[Plan, Path, "OnProgress"], "Footer"]
"""Makes the run of a plan in a folder."""
Judge = Callable[[Path, float, bool], dict[str, Any]]
"""Summarises the run in a folder, with its load and whether it was stopped as an overload. Returns the fields of its
`end` line."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep: what is measured, and the folder of its files."""

    plan: Plan
    """Plan of each step, except for its arrivals."""
    over: Over
    folder: Path
    loads: tuple[float, ...] = ()
    """Fixed loads to measure. Without any, the sweep searches the capacity."""
    journal_extra: tuple[tuple[str, Any], ...] = ()
    """Further values that must not change when the sweep is resumed: its objectives and its virtual model."""
    rejections_allowed: bool = False
    """Whether an objective limits the rejected requests. Rejections alone are then no overload."""

    @property
    def journal_plan(self) -> dict[str, Any]:
        """Values that must not change when the sweep is resumed, as the first line of the journal stores them."""
        plan = {name: value for name, value in self.plan.to_dict().items() if name != "arrivals"}
        settings = {"run": plan, "over": self.over, "loads": list(self.loads), **dict(self.journal_extra)}
        return dict(redact(settings))

    def step(self, number: int, load: float) -> Plan:
        """Return the plan of one step. Its prompts differ from those of earlier steps, which the server may cache.

        A load above the limit that the server reports is sent too, because the sweep looks for the load at which the
        server begins to reject requests.
        """
        arrivals = ARRIVALS[self.over].format(load)
        return self.plan.replaced(arrivals=arrivals, seed=self.plan.seed + number - 1, over_limit=True)


def parse_loads(text: str, option: str, *, whole: bool) -> tuple[float, ...]:
    """Parse a list of increasing loads such as `1,2,4,...,256`. Raises PlanError.

    `...` continues the list by the same factor, or else by the same difference. `whole` requires whole numbers.
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
    """Return the loads that `...` stands for, between the last one and `end`.

    Raises ValueError or ZeroDivisionError.
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
    """Run steps until there is no next load, and return why the sweep ended.

    `max_runs` counts the steps of the whole sweep, `max_time_s` limits this call. Raises LoadgenError, or
    loadgen.servers.errors.ServerError.
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
    """Run one step. Return "done" if the sweep may continue, and otherwise why it must end."""
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
    """Return the journal lines of the steps that have been measured, in order."""
    return [line for line in lines if line["type"] == "end"]


def is_finished(folder: Path) -> bool:
    """Return whether a sweep has ended, other than by an interruption."""
    lines = read_lines(folder)
    return bool(lines) and lines[-1]["type"] == "ended" and lines[-1].get("why") != "interrupted"


def default_duration(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the duration setting of a step if `settings` name neither a duration nor a number of requests."""
    return {} if settings.get("n") or settings.get("duration_s") else {"duration_s": DEFAULT_DURATION_S}


def step_folder(number: int) -> str:
    """Return the name of a step's folder inside the folder of the sweep."""
    return f"step-{number}"
