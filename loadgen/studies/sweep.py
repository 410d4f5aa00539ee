"""A sweep: one plan at several loads, to find how much load a server carries. A *step* is one load and its run, in
`step-1`, `step-2`, ...: a repeat would have the same load. Which load comes next, and what a run says of it, others
tell: here runs are made, and no longer than needed.

The state of a sweep is its files. `sweep.jsonl`, append-only, holds what no run file does:

    {"type": "plan", "plan": {...}, ...}                            the first line
    {"type": "begin", "step": 3, "load": 16.0}
    {"type": "end", "step": 3, "load": 16.0, "seconds": 61.2, "over": 0.02, "carried": null,
     "stopped": "", "client": "ok"}
    {"type": "resumed", ...}, {"type": "ended", "why": "..."}
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loadgen.errors import PlanError
from loadgen.journal import Journal, JournalKind, JournalLine, move_aside, open_journal, read_journal
from loadgen.plan import Plan
from loadgen.servers.auth import redact

if TYPE_CHECKING:
    from loadgen.analysis.run.runfile import Footer
    from loadgen.engine.client_health import LiveCounters
    from loadgen.engine.prepare import OnProgress

Over = Literal["rate", "concurrency"]
EndReason = Literal["done", "runs", "time", "client", "interrupted"]
"""Why a sweep ended: known well enough, its most runs or time, its client was the limit, or somebody."""
ARRIVALS = {"rate": "poisson:{:g}", "concurrency": "closed:{:.0f}"}
_STEP = [("step", int), ("load", float)]
_TOLD = [("over", float), ("stopped", str), ("client", str)]
SWEEP = JournalKind("sweep", {"begin": _STEP, "end": [*_STEP, ("seconds", float), *_TOLD]})
journal, read_lines = partial(open_journal, SWEEP), partial(read_journal, SWEEP)
DEFAULT_DURATION_S = 60.0
"""Of a step, where nothing is said."""
MAX_LOADS = 100
MIN_BACKLOG = 50
"""Fewer requests than this tell of no backlog, and fewer rejections of no overload."""
REJECTED_SHARE = 0.1
"""A larger share of rejected requests is an overload. It is far above the 1 % that breaks a load at its end."""
OVERLOAD_S = 10.0
"""No overload is shorter: servers and clients stall for a while."""
SETTLED, CLEAR = (10, 0.7), (3, 0.2)
"""A server does not keep up if less than such a share of what is sent comes back, for half of the time, after so many
times as long as its first answer took: until then it may level off."""

Measure = Callable[[Plan, Path, "OnProgress"], "Footer"]
Judge = Callable[[Path, float, bool], dict[str, Any]]
"""Summarises the run of a load, which was stopped as an overload or not; what its `end` line says of it."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is measured, and where."""

    plan: Plan
    """Of each step, but for its arrivals."""
    over: Over
    folder: Path
    loads: tuple[float, ...] = ()
    """A list that is fixed beforehand."""
    about: tuple[tuple[str, Any], ...] = ()
    """What else must not change when it goes on: objectives, the modelled hardware."""
    rejections_allowed: bool = False
    """Whether an objective says how many requests may be rejected, so that rejections alone are no overload."""

    @property
    def journal_plan(self) -> dict[str, Any]:
        """What must not change between two sittings."""
        plan = {name: value for name, value in self.plan.to_dict().items() if name != "arrivals"}
        return dict(redact({"run": plan, "over": self.over, "loads": list(self.loads), **dict(self.about)}))

    def step(self, number: int, load: float) -> Plan:
        """Return the plan of one step, with other prompts than those before it, which the server may have kept.

        A load above the limit that the server states is sent too: where it begins to reject is what a sweep looks for.
        """
        arrivals = ARRIVALS[self.over].format(load)
        return self.plan.replaced(arrivals=arrivals, seed=self.plan.seed + number - 1, over_limit=True)


def parse_loads(text: str, option: str, *, whole: bool) -> tuple[float, ...]:
    """`1,2,4,...,256`: numbers that grow; `...` goes on by the same factor, or else the same difference. Raises
    PlanError."""
    hint = f"Write numbers that grow: {option} 1,2,4,...,256"
    result: list[float] = []
    words = text.split(",")
    try:
        for index, word in enumerate(words):
            if word.strip() != "...":
                result.append(float(word))
                continue
            before, last, end = *result[-2:], float(words[index + 1])
            factor, step = last / before, last - before
            geometric = len(result) < 3 or abs(result[-2] / result[-3] - factor) < 1e-9
            while (following := last * factor if geometric else last + step) < end * (1 - 1e-9):
                result.append(last := following)
                if len(result) > MAX_LOADS or step <= 0:
                    raise ValueError
    except (ValueError, IndexError, ZeroDivisionError):
        raise PlanError(f"{option} {text}: is no list of loads", hint) from None
    growing = all(a < b for a, b in zip([0.0, *result], result, strict=False))
    if not growing or len(result) > MAX_LOADS or (whole and any(each % 1 for each in result)):
        raise PlanError(f"{option} {text}: is no list of loads that grow", hint)
    return tuple(result)


class OverloadDetector:
    """Ends a step early once the server clearly cannot keep up, or rejects a large share of the requests.

    A backlog is only looked for at a given rate (`watched`), as a closed loop has none.
    """

    def __init__(
        self,
        show: OnProgress,
        *,
        watched: bool,
        deadline_s: float | None = None,
        rejections_allowed: bool = False,
    ) -> None:
        self._show = show
        self._watched = watched
        self._deadline_s = deadline_s
        self._rejections_allowed = rejections_allowed
        self._seen: deque[tuple[float, int, int]] = deque()
        self._first_s = self._began_s = self._sent_s = 0.0
        self._sent = 0
        self.overloaded = self.late = False

    def __call__(self, phase: str, counts: LiveCounters) -> str | None:
        """Return why the run must end now; None while it may go on."""
        self._show(phase, counts)
        now_s = time.monotonic()
        ended = counts.complete + counts.truncated + counts.failed + counts.rejected
        if phase == "running" and self._watched and counts.sent and self._behind(now_s, counts.sent, ended):
            self.overloaded = True
            return "stopped early: the server did not keep up with this load"
        if phase == "running" and not self._rejections_allowed and self._rejects(now_s, counts):
            self.overloaded = True
            return f"stopped early: the server rejected {counts.rejected:,} of {counts.sent:,} requests"
        if phase == "running" and self._deadline_s is not None and now_s > self._deadline_s:
            self.late = True
            return "stopped: --max-time was over"
        return None

    def _rejects(self, now_s: float, counts: LiveCounters) -> bool:
        """Return whether the server has rejected enough requests, and for long enough, to call the load too much."""
        self._began_s = self._began_s or now_s
        enough = counts.rejected >= MIN_BACKLOG and counts.rejected > REJECTED_SHARE * counts.sent
        return enough and now_s - self._began_s >= OVERLOAD_S

    def _behind(self, now_s: float, sent: int, ended: int) -> bool:
        self._began_s = self._began_s or now_s
        self._first_s = self._first_s or (now_s if ended else 0.0)
        self._seen.append((now_s, sent, ended))
        if sent > self._sent:
            self._sent, self._sent_s = sent, now_s
        half_s = (self._began_s + now_s) / 2
        while len(self._seen) > 1 and self._seen[1][0] <= half_s:
            self._seen.popleft()
        stays = (now_s - self._began_s) / (self._first_s - self._began_s) if self._first_s > self._began_s else 0.0
        more, back = sent - self._seen[0][1], ended - self._seen[0][2]
        if now_s - self._began_s < OVERLOAD_S:
            return False
        if half_s > self._sent_s:  # nothing more is sent, for as long as all of it took
            return stays > CLEAR[0] and sent - ended >= MIN_BACKLOG
        share = next((share for minimum, share in (SETTLED, CLEAR) if stays > minimum), 0.0)
        return more >= MIN_BACKLOG and back < share * more - 3 * (share * more) ** 0.5


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
    """Measure step after step until there is no next load; why it ended. Raises LoadgenError, or
    loadgen.servers.errors.ServerError."""
    deadline_s = None if max_time_s is None else time.monotonic() + max_time_s
    why: EndReason = "done"
    try:
        while why == "done" and (load := next_load(measured_steps(book.lines))) is not None:
            done = measured_steps(book.lines)
            if len(done) >= max_runs:
                why = "runs"
            elif deadline_s is not None and time.monotonic() + (done[-1]["seconds"] if done else 0.0) > deadline_s:
                why = "time"
            else:
                watched = sweep.over == "rate" and not sweep.plan.uses_sessions
                allowed = sweep.rejections_allowed
                backlog = OverloadDetector(show, watched=watched, deadline_s=deadline_s, rejections_allowed=allowed)
                why = _step(sweep, book, load, measure, judge, backlog)
    except KeyboardInterrupt:
        why = "interrupted"
    book.write("ended", why=why)
    return why


def measured_steps(lines: Sequence[JournalLine]) -> list[JournalLine]:
    """The steps that have been measured, in order."""
    return [line for line in lines if line["type"] == "end"]


def is_finished(folder: Path) -> bool:
    """Whether it has ended for good, and not because somebody interrupted it."""
    last = next(reversed(read_lines(folder)), None)
    return last is not None and last["type"] == "ended" and last.get("why") != "interrupted"


def default_duration(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How long each step is, where the settings of its run do not say."""
    return {} if settings.get("n") or settings.get("duration_s") else {"duration_s": DEFAULT_DURATION_S}


def step_folder(number: int) -> str:
    """Below the sweep's own."""
    return f"step-{number}"


def _step(
    sweep: Sweep, book: Journal, load: float, measure: Measure, judge: Judge, backlog: OverloadDetector
) -> EndReason:
    number = len(measured_steps(book.lines)) + 1
    folder, began_s = sweep.folder / step_folder(number), time.monotonic()
    move_aside(folder)
    book.write("begin", step=number, load=load)
    footer = measure(sweep.step(number, load), folder, backlog)
    if footer.interrupted and not backlog.overloaded:
        return "time" if backlog.late else "interrupted"
    told = judge(folder, load, backlog.overloaded)
    stopped = "overload" if backlog.overloaded else ""
    book.write("end", step=number, load=load, seconds=round(time.monotonic() - began_s, 3), stopped=stopped, **told)
    return "client" if told["client"] == "limited" and told["over"] > 0.5 else "done"  # whose fault that was is unknown
