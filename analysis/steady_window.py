"""The measuring window: which part of a run the figures are of.

Most runs are measured whole, from the first byte sent to the last end: bursts, closed loops, interactive users, rates
that change by plan, and runs that are too short for anything else. Nothing can be hidden that way.

`window_s` of the plan sets a window. Otherwise one is chosen only for an open loop of one rate that reached a steady
state. It leaves out the ramp, while the server still fills up, and nothing else:

    in flight   |      .--~~--~---~~-.            level: median over the middle half of the arrivals
                |    /|              |\\           from:  first instant with at least 80 % of the level
                |  /  |    window    |  \\         to:    the last request is due
                +------------------------- time

The window begins one stay (the median time that a request is in flight) after the first request was due if that is
later: from then on answers end as often as requests come. It never ends early. A server that answers nothing but fast
errors looks like one that runs empty, so a falling number in flight must not end a window.

The window is used when all of these hold, and otherwise the whole run is:

- It lasts at least STAYS_MIN stays. A ramp of one stay is then a small part of the run.
- A test shows that the number in flight is steady in it: see `_steady`.
- The requests that it leaves out are at most EXCLUDED_MAX of all, and each of them is complete.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from loadgen.analysis.frame import NS_PER_S, Floats, Frame, FrameBuilder, Integers, Window, build_frame
from loadgen.analysis.run.runfile import Header, Run, scan
from loadgen.analysis.stats import MAX_BATCHES, MIN_BATCHES, RESIDENCE_TIMES_PER_BATCH, has_trend, round_to_ns
from loadgen.analysis.summary import OutsideWindow
from loadgen.workloads.arrival_facts import LoadFacts

LEVEL_SHARE = 0.8
STAYS_MIN = MIN_BATCHES * RESIDENCE_TIMES_PER_BATCH
EXCLUDED_MAX = 0.1
"""Largest share of the requests that a window may leave out when the plan does not set it."""
TREND_SHARE = 0.05
"""Halves that differ by less than this share of the larger one are alike, even if the difference is no chance."""
UNSTEADY_SHARE = 0.25
"""Halves that differ by more than this share of the larger one are not steady. A warning says so unless chance may
explain it."""
HALVES_ERRORS = 3
"""The number in flight of Poisson arrivals is Poisson distributed: its standard error is the root of its mean."""
WHOLE_RUN = "the whole run, from the first byte sent to the last end"


class InFlight(NamedTuple):
    """The number in flight: `levels[i]` from `instants[i]` until the next; 0 before the first."""

    instants: Floats
    levels: Integers


def load_run(path: Path) -> tuple[Run, Frame]:
    """A Run without its Records, and the Frame of them with its measuring window. Raises RunFileError."""
    gathering = FrameBuilder()
    run = scan(path, gathering.add)
    return run, with_window(gathering.frame(), run.header)


def frame_of_run(run: Run) -> Frame:
    """The Frame of a Run that holds its Records, with its measuring window."""
    return with_window(build_frame(run.records), run.header)


def with_window(frame: Frame, header: Header) -> Frame:
    """The Frame with the window that its plan sets or its load asks for."""
    return replace(frame, window=choose_window(frame, header.load, header.plan.get("window_s")))


def choose_window(frame: Frame, load: LoadFacts, set_s: Sequence[float] | None = None) -> Window | None:
    """Return the measuring window of a run. None is the whole run of a burst or of interactive users."""
    if set_s:
        return Window(set_s[0] * NS_PER_S, set_s[1] * NS_PER_S, "set", "set by the plan")
    answered = frame.sent & ~np.isnan(frame.end_ns)
    if not (load.steady or load.finite) or not answered.any():
        return None
    begins, ends = float(frame.due_ns[answered].min()), float(frame.due_ns[answered].max())
    if ends <= begins:
        return None
    if not load.steady:
        return _whole(frame, "the whole run: the rate changes by plan")
    stay = float(np.median((frame.end_ns - frame.sent_ns)[answered]))
    if not load.open_loop:
        steady = _steady(_completions(frame, begins, ends, stay))
        return _whole(frame, "the whole run: clients wait for answers", steady=steady)
    return _of_one_rate(frame, in_flight(frame.sent_ns[answered], frame.end_ns[answered]), begins, ends, stay)


def outside_window(frame: Frame) -> OutsideWindow | None:
    """Describe the requests due outside the window; None where there are none."""
    left_out = frame.measured & ~frame.inside
    if not left_out.any():
        return None
    names = [ending.state for ending in frame.outcomes]
    states = Counter(names[index] for index in frame.outcome_index[left_out & ~frame.complete].tolist())
    complete = left_out & frame.complete
    e2e_s = (frame.last_ns - frame.sent_ns) / NS_PER_S
    ttft_s = (frame.first_ns - frame.sent_ns) / NS_PER_S
    return OutsideWindow(
        requests=int(left_out.sum()),
        complete=int(complete.sum()),
        incomplete=dict(states.most_common()),
        slowest_s=_largest(e2e_s[complete]),
        slowest_inside_s=_largest(e2e_s[frame.sampled]),
        slowest_ttft_s=_largest(ttft_s[complete]),
        slowest_ttft_inside_s=_largest(ttft_s[frame.sampled]),
    )


def in_flight(begins: Floats, ends: Floats) -> InFlight:
    """How many of these intervals are open, as a step function. NaN in either leaves an interval out."""
    known = ~np.isnan(begins) & ~np.isnan(ends)
    instants = np.concatenate((begins[known], ends[known]))
    changes = np.repeat((1, -1), int(known.sum()))
    order = np.lexsort((-changes, instants))  # at one instant, what begins comes before what ends
    return InFlight(instants[order], np.cumsum(changes[order]))


def _whole(frame: Frame, reason: str, *, steady: bool = False, unsteady: str = "") -> Window:
    """The whole run as a window. Its ends are those of `Frame.span_ns`, which reads only `chosen`."""
    answered = frame.sent & ~np.isnan(frame.end_ns)
    ends = float(frame.sent_ns[answered].min()), float(frame.end_ns[answered].max())
    return Window(*ends, "whole", reason, steady=steady, unsteady=unsteady)


def _of_one_rate(frame: Frame, steps: InFlight, begins: float, ends: float, stay: float) -> Window:
    """The window of an open loop of one rate: what lies behind the ramp, or else the whole run."""
    length = ends - begins
    level = _median(_between(steps, begins + length / 4, ends - length / 4))
    if level == 0:
        return _whole(frame, "the whole run: most of the time nothing was in flight")
    arriving = _between(steps, begins, ends)
    filled = np.flatnonzero(arriving.levels >= LEVEL_SHARE * level)
    from_ns = max(float(arriving.instants[filled[0]]), begins + stay)
    if unsteady := _unsteady(steps, from_ns, ends, stay):
        return _whole(frame, "the whole run: no steady state was reached", unsteady=unsteady)
    window = Window(from_ns, ends, "auto", f"about {level:g} in flight", steady=True)
    objection = _objection(frame, window, steps, stay)
    return _whole(frame, f"the whole run: {objection}") if objection else window


def _objection(frame: Frame, window: Window, steps: InFlight, stay: float) -> str:
    """Say why a window must not stand for the whole run; nothing if it may."""
    if window.to_ns - window.from_ns < STAYS_MIN * max(1.0, stay):
        return f"requests take {stay / NS_PER_S:.3g} s, and a window takes {STAYS_MIN} times that"
    if not _steady(_batches(steps, window.from_ns, window.to_ns, stay)):
        return "no test shows a steady number in flight"
    left_out = frame.measured & ~replace(frame, window=window).inside
    if (left_out & ~frame.complete).any():
        return "requests failed while the server filled up"
    if left_out.sum() > EXCLUDED_MAX * frame.measured.sum():
        return "the server took more than a tenth of it to fill up"
    return ""


def _unsteady(steps: InFlight, from_ns: float, to_ns: float, stay: float) -> str:
    """Say how the halves of an interval clearly differ; nothing if they do not or if it is too short to tell."""
    if to_ns - from_ns < max(1.0, stay):
        return ""
    middle = (from_ns + to_ns) / 2
    early, late = _mean(_between(steps, from_ns, middle)), _mean(_between(steps, middle, to_ns))
    low, high = sorted((early, late))
    if high - low <= UNSTEADY_SHARE * high or high - low <= HALVES_ERRORS * math.sqrt(high):
        return ""
    return f"{early:.3g} requests were in flight in the first half, {late:.3g} in the second"


def _steady(values: Floats) -> bool:
    """Whether a series of equal batches shows a steady state. False where it is too short to tell.

    The halves must be alike. If they differ by more than TREND_SHARE, no trend may be found; with arrivals as regular
    as a clock even the smallest difference is a trend. If they differ by more than UNSTEADY_SHARE, the series is not
    steady, even if it is too short for the test. A batch is longer than a request stays, so batches are nearly
    independent, as the test needs them to be."""
    if len(values) < MIN_BATCHES:
        return False
    half = len(values) // 2
    low, high = sorted((float(values[:half].mean()), float(values[-half:].mean())))
    if high - low <= TREND_SHARE * high:
        return True
    return high - low <= UNSTEADY_SHARE * high and not has_trend(values)


def _edges(from_ns: float, to_ns: float, stay: float) -> Floats:
    """The edges of equal batches of STAYS_PER_BATCH stays or more, at most BATCHES_MOST of them."""
    number = min(MAX_BATCHES, int((to_ns - from_ns) / (RESIDENCE_TIMES_PER_BATCH * max(1.0, stay))))
    return np.linspace(from_ns, to_ns, max(1, number) + 1)


def _batches(steps: InFlight, from_ns: float, to_ns: float, stay: float) -> Floats:
    """The mean number in flight in each batch of an interval."""
    edges = _edges(from_ns, to_ns, stay).tolist()
    return np.array([_mean(_between(steps, *ends)) for ends in pairwise(edges)])


def _completions(frame: Frame, from_ns: float, to_ns: float, stay: float) -> Floats:
    """How many requests completed in each batch of an interval. Clients keep the number in flight of a closed loop the
    same whatever the server does, so it cannot show whether the server was steady; the answers can."""
    ended_ns = frame.end_ns[frame.measured & frame.complete]
    return np.histogram(ended_ns, _edges(from_ns, to_ns, stay))[0].astype(np.float64)


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


def _largest(values: Floats) -> float | None:
    """The largest known value in seconds; None where none is known."""
    known = values[~np.isnan(values)]
    return round_to_ns(float(known.max())) if len(known) else None
