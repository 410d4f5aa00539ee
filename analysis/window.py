"""The measuring window: the stretch of an open or closed loop in which the server was under its steady load.

A burst has none, nor have users turned up and down by hand: their figures are of the whole run. Otherwise the plan's
`window_s` sets it, or it is found from the number of requests in flight, which rises while the first answers are still
being made, stays on a plateau, and falls when no more requests come:

    in flight   |      .--~~--~---~~-.            level: median over the middle half of the arrivals
                |    /|              |\\           from:  first instant with at least 80 % of the level
                |  /  |    window    |  \\         to:    last such instant before the last request is due
                +------------------------- time

The window begins one stay (the median time that a request is in flight) after the first request was due if that is
later: from then on answers end as often as requests come. The plateau is believed when the window holds two stays and
the mean number in flight of its halves differs by a quarter at most, or by no more than chance explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from analysis.frame import NS_PER_S, Booleans, Floats, Frame, Gathering, Integers, Window, frame_of
from loadgen.runfile import Header, Run, scan
from workloads.load import LoadFacts

PLATEAU_SHARE = 0.8
STAYS_MIN = 2
HALVES_SHARE = 0.75
HALVES_ERRORS = 3
"""The number in flight of Poisson arrivals is Poisson distributed: its standard error is the root of its mean."""
EVERYTHING = "so this is from the first due to the last"


class InFlight(NamedTuple):
    """The number in flight: `levels[i]` from `instants[i]` until the next; 0 before the first."""

    instants: Floats
    levels: Integers


def load(path: Path) -> tuple[Run, Frame]:
    """A Run without its Records, and the Frame of them with its measuring window. Raises RunFileError."""
    gathering = Gathering()
    run = scan(path, gathering.add)
    return run, windowed(gathering.frame(), run.header)


def frame_of_run(run: Run) -> Frame:
    """The Frame of a Run that holds its Records, with its measuring window."""
    return windowed(frame_of(run.records), run.header)


def windowed(frame: Frame, header: Header) -> Frame:
    """The Frame with the window that its plan sets or its load asks for."""
    return replace(frame, window=choose(frame, header.load, header.plan.get("window_s")))


def choose(frame: Frame, load: LoadFacts, set_s: Sequence[float] | None = None) -> Window | None:
    """The window of a run; None is the whole run, for a load that neither is steady nor changes by plan."""
    if set_s:
        return Window(set_s[0] * NS_PER_S, set_s[1] * NS_PER_S, "set", "set by the plan")
    asked = frame.sent & ~np.isnan(frame.end_ns)
    if not (load.steady or load.finite) or not asked.any():
        return None
    begins, ends = float(frame.due_ns[asked].min()), float(frame.due_ns[asked].max())
    if ends <= begins:
        return None
    if not load.steady:
        return Window(begins, ends, "auto", f"the rate changes by plan, {EVERYTHING}")
    return _plateau(frame, asked, begins, ends)


def in_flight(begins: Floats, ends: Floats) -> InFlight:
    """How many of these intervals are open, as a step function. NaN in either leaves an interval out."""
    known = ~np.isnan(begins) & ~np.isnan(ends)
    instants = np.concatenate((begins[known], ends[known]))
    changes = np.repeat((1, -1), int(known.sum()))
    order = np.lexsort((-changes, instants))  # at one instant, what begins comes before what ends
    return InFlight(instants[order], np.cumsum(changes[order]))


def _plateau(frame: Frame, asked: Booleans, begins: float, ends: float) -> Window:
    steps = in_flight(frame.sent_ns[asked], frame.end_ns[asked])
    length = ends - begins
    level = _median(_between(steps, begins + length / 4, ends - length / 4))
    stay = float(np.median((frame.end_ns - frame.sent_ns)[asked]))
    inside = _between(steps, begins, ends)
    enough = np.flatnonzero(inside.levels >= PLATEAU_SHARE * level)
    if len(enough) == 0 or level == 0:
        return Window(begins, ends, "auto", f"most of the time nothing was in flight, {EVERYTHING}")
    from_ns = max(float(inside.instants[enough[0]]), begins + stay)
    to_ns = ends if enough[-1] + 1 == len(inside.levels) else float(inside.instants[enough[-1] + 1])
    if why := _no_plateau(steps, from_ns, to_ns, stay):
        return Window(begins, ends, "auto", f"no plateau ({why}), {EVERYTHING}")
    return Window(from_ns, to_ns, "auto", f"about {level:g} in flight", plateau=True)


def _no_plateau(steps: InFlight, from_ns: float, to_ns: float, stay: float) -> str:
    """Why there is no plateau between these instants; nothing if there is one."""
    stays = (to_ns - from_ns) / max(1.0, stay)
    if stays >= 1:
        middle = (from_ns + to_ns) / 2
        early, late = _mean(_between(steps, from_ns, middle)), _mean(_between(steps, middle, to_ns))
        low, high = sorted((early, late))
        if low < HALVES_SHARE * high and high - low > HALVES_ERRORS * high**0.5:
            return f"{early:.3g} were in flight in its first half, {late:.3g} in its second"
    return f"too short for requests that take {stay / 1e9:.3g} s" if stays < STAYS_MIN else ""


def _between(steps: InFlight, begins: float, ends: float) -> InFlight:
    """The part between two instants, which become its first and its last, with the last level again."""
    first, last = np.searchsorted(steps.instants, (begins, ends), side="right")
    before = steps.levels[first - 1] if first else 0
    levels = np.concatenate(([before], steps.levels[first:last]))
    return InFlight(np.concatenate(([begins], steps.instants[first:last], [ends])), np.append(levels, levels[-1]))


def _mean(part: InFlight) -> float:
    """Over time."""
    lengths = np.diff(part.instants)
    return float((part.levels[:-1] * lengths).sum() / lengths.sum())


def _median(part: InFlight) -> float:
    """Over time: half of the time the level is at most this."""
    order = np.argsort(part.levels[:-1], kind="stable")
    elapsed = np.cumsum(np.diff(part.instants)[order])
    return float(part.levels[:-1][order][np.searchsorted(elapsed, elapsed[-1] / 2)])
