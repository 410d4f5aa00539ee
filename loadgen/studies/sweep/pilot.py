"""The pilot of a sweep: closed loops of growing concurrency that measure the full throughput of the server.

A *level* of the pilot is one run, a closed loop with a fixed concurrency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.analysis.sweep.saturation import WAVES
from loadgen.journal import JournalLine, move_aside
from loadgen.studies.sweep import Book, EndReason, Measure, Sweep, Watch, refusal
from loadgen.studies.sweep.overload import MIN_BACKLOG, REJECTED_FRACTION, OverloadDetector

if TYPE_CHECKING:
    from loadgen.analysis.sweep.saturation import PilotLevel
    from loadgen.engine.client_health import LiveCounters
    from loadgen.plan import Plan

MIN_FLOWING = 8
"""Minimum number of responses before a level whose responses arrive evenly is judged."""
EVEN_SHARE = 0.15
"""Responses arrive evenly, not in waves, if each quarter of the time has at least this share of them."""
SATURATED_FACTOR = 1.1
"""A level whose responses arrive evenly ends early if its rate is at most this factor times the previous level's
rate."""
FILE_LEVEL_S = 120.0
"""Maximum duration of a level in s, if the prompts come from a file."""
SEED_OFFSET = 1000
"""Difference between the seeds of the pilot and those of the steps, so that their prompts differ."""

ReadEnds = Callable[[Path], list[float]]
"""Returns the times in s at which the complete requests of a run ended, in increasing order."""


class LevelWatch:
    """A progress callback that ends a level of the pilot as soon as the level's throughput is known.

    A level is one closed loop with a fixed concurrency.
    """

    def __init__(self, watch: Watch, concurrency: int, previous_rate: float, deadline_s: float | None = None) -> None:
        self._detector = OverloadDetector(watch.show, watch_backlog=False, deadline_s=deadline_s, clock=watch.clock)
        self._clock = watch.clock
        self._concurrency = concurrency
        self._previous_rate = previous_rate
        self._samples: list[tuple[float, int]] = []
        """Pairs of a time in s and the number of requests that were complete at that time."""
        self.flows = False
        """True if the level was ended because its additional clients do not increase the throughput."""
        self.enough = False
        """True if the level was ended because its rate is known."""

    @property
    def refused(self) -> bool:
        """Return True if the server refused every request."""
        return self._detector.refused

    @property
    def late(self) -> bool:
        """Return True if this level was ended because the time limit of the sweep was reached."""
        return self._detector.late

    @property
    def overloaded(self) -> bool:
        """Return True if the server rejected many requests."""
        return self._detector.overloaded

    def __call__(self, phase: str, counts: LiveCounters) -> str | None:
        """Return the reason why the current level must end now, or None if it may continue.

        The coordinator calls this method regularly with the phase of the run and the live counters.
        """
        reason = self._detector(phase, counts)
        if reason is not None or phase != "running" or self.enough:
            return reason
        self._samples.append((self._clock(), counts.complete))
        self.flows = self._flows_without_growth()
        self.enough = self.flows or counts.complete >= WAVES * self._concurrency
        return "stopped early: the throughput is known" if self.enough else None

    def _flows_without_growth(self) -> bool:
        """Return True if the throughput of this level is steady, and at most a tenth higher than that of the previous
        level.

        The throughput is steady if enough responses are complete, and they arrive evenly over the level.
        """
        began_s, _ = self._samples[0]
        now_s, complete = self._samples[-1]
        if not self._previous_rate or complete < MIN_FLOWING:
            return False
        quarter_s = (now_s - began_s) / 4
        ends_s = [began_s + quarter * quarter_s for quarter in range(5)]
        counts = [max(count for at_s, count in self._samples if at_s <= end_s + 1e-9) for end_s in ends_s]
        evenly = all(after - before >= EVEN_SHARE * complete for before, after in pairwise(counts))
        return evenly and complete <= SATURATED_FACTOR * self._previous_rate * (now_s - began_s)


def levels_of(lines: Sequence[JournalLine]) -> list[PilotLevel]:
    """Return the measured levels of the pilot, given the lines of the sweep's journal."""
    from loadgen.analysis.sweep.saturation import PilotLevel

    return [PilotLevel(line["concurrency"], line["rate"]) for line in lines if line["type"] == "pilot" and line["rate"]]


def is_complete(lines: Sequence[JournalLine]) -> bool:
    """Return True if the lines of the sweep's journal contain the last level of the pilot."""
    return any(line["type"] == "pilot" and line["last"] for line in lines)


def run_pilot(
    sweep: Sweep,
    book: Book,
    *,
    measure: Measure,
    read_ends: ReadEnds,
    watch: Watch,
    say: Callable[[str], None],
    deadline_s: float | None = None,
) -> EndReason:
    """Run the remaining levels of the pilot. Return "done", or the reason why the pilot ended early.

    - `book` is the journal of the sweep. It contains the levels that have been measured, and gets a line for each new
      level.
    - `measure` executes the run of a level, and `read_ends` reads the times at which its requests ended.
    - `watch` shows the progress of a run, and `say` receives one line of text for each level.
    - `deadline_s` is the time at which the pilot must end (time.monotonic).

    Raises LoadgenError, loadgen.servers.errors.ServerError, or RefusedError if the server refuses every request.
    """
    from loadgen.analysis.sweep import saturation

    while not is_complete(book.lines):
        levels = levels_of(book.lines)
        concurrency = saturation.next_concurrency(levels)
        number = len(levels) + 1
        folder = sweep.folder / f"pilot-{number}"
        move_aside(folder)
        level_watch = LevelWatch(watch, concurrency, levels[-1].rate if levels else 0.0, deadline_s)
        footer = measure(_level_plan(sweep, number, concurrency), folder, level_watch)
        if level_watch.refused and not levels:
            raise refusal(folder)
        rejections = footer.rejected or 0
        rejected = rejections >= MIN_BACKLOG and rejections > REJECTED_FRACTION * (footer.sent or 0)
        if footer.interrupted and not (level_watch.enough or level_watch.overloaded or level_watch.refused):
            return "time" if level_watch.late else "interrupted"
        ends_s = read_ends(folder)
        rate = len(ends_s) / ends_s[-1] if level_watch.flows else _rate(ends_s, concurrency)
        if not rate and not levels:
            raise refusal(folder)
        level = saturation.PilotLevel(concurrency, rate)
        last = rejected or level_watch.refused or not rate or saturation.is_saturated([*levels, level])
        book.write("pilot", concurrency=concurrency, rate=rate, run_s=round(footer.ended_ns / 1e9, 3), last=last)
        say(f"  pilot, {concurrency} at a time: {rate:.3g} requests/s")
    return "done"


def _level_plan(sweep: Sweep, number: int, concurrency: int) -> Plan:
    """Return the plan of one level of the pilot: a closed loop with `concurrency` clients.

    `number` is the index of the level. Each client sends WAVES + 1 requests on average. If the prompts come from a
    file, the loop lasts at most FILE_LEVEL_S seconds instead. LevelWatch ends the level earlier if the throughput is
    already known.
    """
    length: dict[str, Any] = {"n": (WAVES + 1) * concurrency, "duration_s": None}
    if sweep.plan.uses_file:
        length = {"n": None, "duration_s": FILE_LEVEL_S}
    seed = sweep.plan.seed + SEED_OFFSET + number
    workers = min(sweep.plan.workers, concurrency)
    arrivals = f"closed:{concurrency}"
    return sweep.plan.replaced(arrivals=arrivals, workers=workers, seed=seed, over_limit=True, warmup=0, **length)


def _rate(ends_s: Sequence[float], concurrency: int) -> float:
    """Return the rate of completions in requests per second, or 0 if fewer than two requests are complete.

    `ends_s` contains the end time of each complete request, in increasing order. All clients start together, so the
    first `concurrency` completions are skipped. The rate of the next `concurrency` completions is measured. If there
    are fewer than 2 * `concurrency` completions, the rate of the second half of all completions is measured.
    """
    count = min(len(ends_s), WAVES * concurrency)
    if count < 2:
        return 0.0
    first = concurrency if count == WAVES * concurrency else count // 2
    elapsed_s = ends_s[count - 1] - ends_s[first - 1]
    if elapsed_s <= 0:
        return count / ends_s[count - 1]
    return (count - first) / elapsed_s
