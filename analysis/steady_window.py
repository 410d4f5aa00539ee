"""Chooses the measurement window of a run: the time interval from which the figures of the run are computed.

For most runs, this is the whole run, from the first byte sent to the end of the last request. This applies to bursts,
closed loops, interactive users, loads whose rate changes as planned, and short runs.

A plan can set a window with `window_s`. Otherwise, a shorter window is chosen only for an open loop with a constant
rate that reached a steady state. The window excludes only the start-up phase, in which the number of requests in flight
still grows:

    in flight   |      .--~~--~---~~-.            typical number: median over the middle half of the arrivals
                |    /|              |\\           window begins:  first time with at least 80% of this number
                |  /  |    window    |  \\         window ends:    the last request is due
                +------------------------- time

The window begins no earlier than one residence time after the first request was due. The residence time is the median
time that a request is in flight. After one residence time, responses end as often as requests arrive.

The window always lasts until the last request is due, even if the number in flight falls earlier. For example, this
number falls if the server begins to respond with fast errors, and these errors must be part of the window.

The window is used if all of these conditions hold. Otherwise the whole run is measured.

- The window lasts at least MIN_RESIDENCE_TIMES residence times, so that a start-up phase of one residence time is a
  small part of the run.
- A test shows that the number in flight is steady (see `_is_steady`).
- The window excludes at most the share MAX_EXCLUDED of the requests, and every excluded request is complete.
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

from loadgen.analysis.frame import NS_PER_S, Floats, Frame, Integers, Window, build_frame
from loadgen.analysis.frame_parts import label_rows
from loadgen.analysis.parallel_scan import read_columns
from loadgen.analysis.run.runfile import Header, Run
from loadgen.analysis.stats import MAX_BATCHES, MIN_BATCHES, RESIDENCE_TIMES_PER_BATCH, has_trend, round_to_ns
from loadgen.analysis.summary import OutsideWindow
from loadgen.workloads.arrival_facts import LoadFacts

FILLED_SHARE = 0.8
MIN_RESIDENCE_TIMES = MIN_BATCHES * RESIDENCE_TIMES_PER_BATCH
MAX_EXCLUDED = 0.1
"""Maximum share of the requests that a chosen window may exclude."""
TREND_SHARE = 0.05
"""Two halves are equal if they differ by less than this share of the larger one, even if a test finds a trend."""
UNSTEADY_SHARE = 0.25
"""Two halves are not steady if they differ by more than this share of the larger one. The report then shows a warning,
unless chance may explain the difference."""
HALVES_ERRORS = 3
"""Maximum difference of the halves, in standard errors, that chance may explain. With Poisson arrivals the number in
flight is Poisson distributed, so its standard error is the square root of its mean."""
LASTING = 0.5
"""Minimum growth in the last quarter of an interval, relative to that in the quarter before it, if a queue grows. The
growth of a server that only fills with requests falls faster."""
QUEUE_SHARE = 0.1
"""Minimum TTFT at the end of an overload, as a share of the time in which requests are due. It is the wait in a queue
that grows at this share of the rate at which the server completes requests."""
QUARTER_MIN = 10
"""Minimum number of requests per quarter of a run for a test of its TTFT."""
WHOLE_RUN = "the whole run, from the first byte sent to the last end"


class InFlight(NamedTuple):
    """The number of requests in flight over time, as a step function.

    The number is `counts[i]` from `instants[i]` until the next instant. The number is 0 before the first instant.
    """

    instants: Floats
    counts: Integers


def load_run(path: Path) -> tuple[Run, Frame]:
    """Read a run file. Return the Run without its Records, and the Frame with its measurement window.

    Raises RunFileError if there is no readable run.
    """
    run, frame = read_columns(path)
    return run, with_window(frame, run.header)


def frame_of_run(run: Run) -> Frame:
    """Return a Frame with the Records of a run and with the measurement window of the run."""
    return with_window(build_frame(run.records), run.header)


def with_window(frame: Frame, header: Header) -> Frame:
    """Return the Frame with its measurement window, and with the class of traffic and the model of each row.

    If the plan sets no window, the window is chosen automatically.
    """
    frame = label_rows(frame, header)
    return replace(frame, window=choose_window(frame, header.load, header.plan.get("window_s")))


def choose_window(frame: Frame, load: LoadFacts, set_s: Sequence[float] | None = None) -> Window | None:
    """Return the measurement window of a run, or None if the run has no window and is measured as a whole.

    If the plan sets a window, `set_s` contains its start and its end in seconds, and the result is this window.
    Otherwise the result depends on the load. Bursts and interactive users have no window.
    """
    if set_s:
        return Window(set_s[0] * NS_PER_S, set_s[1] * NS_PER_S, "set", "set by the plan")
    answered = frame.sent & ~np.isnan(frame.end_ns)
    if not (load.steady or load.finite) or not answered.any():
        return None
    begins, ends = float(frame.due_ns[answered].min()), float(frame.due_ns[answered].max())
    if ends <= begins:
        return None
    if not load.steady:
        why = "classes of traffic have different loads" if load.kind == "traffic" else "the rate changes by plan"
        return _whole(frame, f"the whole run: {why}")
    residence_ns = float(np.median((frame.end_ns - frame.sent_ns)[answered]))
    if not load.open_loop:
        steady = _is_steady(_completions(frame, begins, ends, residence_ns))
        return _whole(frame, "the whole run: clients wait for responses", steady=steady)
    steps = in_flight(frame.sent_ns[answered], frame.end_ns[answered])
    return _constant_rate_window(frame, steps, begins, ends, residence_ns)


def outside_window(frame: Frame) -> OutsideWindow | None:
    """Return facts about the measured requests that were due outside the window.

    Return None if there are no such requests.
    """
    outside = frame.measured & ~frame.inside
    if not outside.any():
        return None
    state_of_outcome = [outcome.state for outcome in frame.outcomes]
    states = Counter(state_of_outcome[index] for index in frame.outcome_index[outside & ~frame.complete].tolist())
    complete = outside & frame.complete
    e2e_s = (frame.last_ns - frame.sent_ns) / NS_PER_S
    ttft_s = (frame.first_ns - frame.sent_ns) / NS_PER_S
    return OutsideWindow(
        requests=int(outside.sum()),
        complete=int(complete.sum()),
        incomplete=dict(states.most_common()),
        slowest_s=_largest(e2e_s[complete]),
        slowest_inside_s=_largest(e2e_s[frame.sampled]),
        slowest_ttft_s=_largest(ttft_s[complete]),
        slowest_ttft_inside_s=_largest(ttft_s[frame.sampled]),
    )


def in_flight(begins: Floats, ends: Floats) -> InFlight:
    """Return the number of overlapping intervals over time, as a step function.

    Interval i lasts from `begins[i]` to `ends[i]`. Intervals with a NaN start or end are ignored.
    """
    known = ~np.isnan(begins) & ~np.isnan(ends)
    instants = np.concatenate((np.sort(begins[known]), np.sort(ends[known])))
    order = np.argsort(instants, kind="stable")  # merges the halves; at equal instants, beginnings come before ends
    changes = np.repeat(np.array((1, -1), np.int8), int(known.sum()))
    return InFlight(instants[order], np.cumsum(changes[order], dtype=np.int64))


def _whole(frame: Frame, reason: str, *, steady: bool = False, unsteady: str = "") -> Window:
    """Return a Window which says that the whole run is measured.

    `reason`, `steady` and `unsteady` become fields of the Window. The Window lasts from the first send of a request to
    the last end of a request. These two times are only displayed: the figures are computed over `Frame.span_ns`.
    """
    answered = frame.sent & ~np.isnan(frame.end_ns)
    ends = float(frame.sent_ns[answered].min()), float(frame.end_ns[answered].max())
    return Window(*ends, "whole", reason, steady=steady, unsteady=unsteady)


def _constant_rate_window(frame: Frame, steps: InFlight, begins: float, ends: float, residence_ns: float) -> Window:
    """Return the measurement window of an open loop with a constant rate.

    The window begins after the start-up phase, in which the number of requests in flight grows, and ends when the last
    request is due. If this part does not represent the run, the window is the whole run.

    - `steps` is the number of requests in flight over time.
    - `begins` and `ends` are the first and the last due time in ns.
    - `residence_ns` is the median time that a request is in flight.
    """
    length = ends - begins
    typical = _median(_between(steps, begins + length / 4, ends - length / 4))
    if typical == 0:
        return _whole(frame, "the whole run: no request was in flight most of the time")
    arriving = _between(steps, begins, ends)
    filled = np.flatnonzero(arriving.counts >= FILLED_SHARE * typical)
    from_ns = max(float(arriving.instants[filled[0]]), begins + residence_ns)
    unsteady = _trend_description(steps, from_ns, ends, residence_ns)
    if unsteady:
        whole = _whole(frame, "the whole run: no steady state was reached", unsteady=unsteady)
        return replace(whole, overloaded=_is_growing(steps, from_ns, ends))
    waiting = _growing_wait(frame, begins, ends)
    if waiting:
        return replace(_whole(frame, "the whole run: no steady state was reached", unsteady=waiting), overloaded=True)
    window = Window(from_ns, ends, "auto", f"about {typical:g} in flight", steady=True)
    objection = _objection(frame, window, steps, residence_ns)
    return _whole(frame, f"the whole run: {objection}") if objection else window


def _objection(frame: Frame, window: Window, steps: InFlight, residence_ns: float) -> str:
    """Return the reason why a window cannot represent the run, or an empty string if the window can represent it.

    `residence_ns` is the median time that a request is in flight.
    """
    if window.to_ns - window.from_ns < MIN_RESIDENCE_TIMES * max(1.0, residence_ns):
        return f"requests take {residence_ns / NS_PER_S:.3g} s, and a window needs {MIN_RESIDENCE_TIMES} times that"
    if not _is_steady(_batches(steps, window.from_ns, window.to_ns, residence_ns)):
        return "no test shows a steady number in flight"
    outside = frame.measured & ~replace(frame, window=window).inside
    if (outside & ~frame.complete).any():
        return "requests failed while the server filled up"
    if outside.sum() > MAX_EXCLUDED * frame.measured.sum():
        return "more than a tenth of the requests were due while the server filled up"
    return ""


def _trend_description(steps: InFlight, from_ns: float, to_ns: float, residence_ns: float) -> str:
    """Return a sentence that compares the mean number of requests in flight in the two halves of a time interval.

    The interval lasts from `from_ns` to `to_ns`. `steps` is the number of requests in flight over time. The result is
    an empty string in two cases:

    - The two means do not differ clearly.
    - The interval is shorter than `residence_ns`, the median time that a request is in flight.
    """
    if to_ns - from_ns < max(1.0, residence_ns):
        return ""
    middle = (from_ns + to_ns) / 2
    early, late = _mean(_between(steps, from_ns, middle)), _mean(_between(steps, middle, to_ns))
    low, high = sorted((early, late))
    if high - low <= UNSTEADY_SHARE * high or high - low <= HALVES_ERRORS * math.sqrt(high):
        return ""
    return f"{early:.3g} requests were in flight in the first half, {late:.3g} in the second"


def _is_growing(steps: InFlight, from_ns: float, to_ns: float) -> bool:
    """Return True if the requests in flight grow like a queue between `from_ns` and `to_ns`.

    The time interval is divided into quarters. The mean number of requests in flight must rise from each quarter to the
    next, and the last rise must be at least LASTING times the rise before it. The number also rises while a server
    fills with requests at the beginning of a load, but then each rise is much smaller than the one before it.
    """
    edges = np.linspace(from_ns, to_ns, 5).tolist()
    first, second, third, last = (_mean(_between(steps, *ends)) for ends in pairwise(edges))
    return first < second < third < last and last - third >= LASTING * (third - second)


def _growing_wait(frame: Frame, begins: float, ends: float) -> str:
    """Return a sentence on the growth of TTFT if a queue is growing in the server, otherwise an empty string.

    Requests are due from `begins` to `ends`, in ns. This time is divided into quarters. A queue is growing if two
    conditions hold:

    - The mean TTFT rises from each quarter to the next, and does not level off in the last quarter.
    - The mean TTFT of the last quarter is more than QUEUE_SHARE times the time from `begins` to `ends`.

    This function finds large overloads, which a test on the number of requests in flight can miss. Such a test leaves
    out the beginning of the run, for as long as a request is in flight. In a large overload, requests are in flight for
    so long that only a small part of the run remains for the test.
    """
    answered = frame.measured & frame.complete & ~np.isnan(frame.first_ns)
    ttft_ns, due_ns = (frame.first_ns - frame.sent_ns)[answered], frame.due_ns[answered]
    quarters = np.minimum(((due_ns - begins) / (ends - begins) * 4).astype(np.int64), 3)
    groups = [ttft_ns[quarters == quarter] for quarter in range(4)]
    if min(map(len, groups)) < QUARTER_MIN:
        return ""
    first, second, third, last = (float(group.mean()) for group in groups)
    rises = first < second < third < last and last - third >= LASTING * (third - second)
    if not rises or last <= QUEUE_SHARE * (ends - begins):
        return ""
    texts = [f"{mean_ns / NS_PER_S:.3g} s" for mean_ns in (first, last)]
    return f"TTFT was {texts[0]} on average in the first quarter of the run, {texts[1]} in the last"


def _is_steady(values: Floats) -> bool:
    """Return True if the values of equal batches show a steady state.

    `values` contains one value per batch, such as the mean number of requests in flight. Fewer than MIN_BATCHES batches
    never show a steady state. Otherwise, the means of the two halves of `values` are compared. The result depends on
    their difference as a share of the larger mean:

    - At most TREND_SHARE: steady. No trend test is used, because with regular arrivals the test finds even the smallest
      trend.
    - At most UNSTEADY_SHARE: steady if the trend test finds no trend.
    - More than UNSTEADY_SHARE: not steady.

    A batch is longer than a request, so batches are nearly independent, as the trend test requires.
    """
    if len(values) < MIN_BATCHES:
        return False
    half = len(values) // 2
    low, high = sorted((float(values[:half].mean()), float(values[-half:].mean())))
    if high - low <= TREND_SHARE * high:
        return True
    return high - low <= UNSTEADY_SHARE * high and not has_trend(values)


def _batch_edges(from_ns: float, to_ns: float, residence_ns: float) -> Floats:
    """Return the edges of the equal batches into which the time from `from_ns` to `to_ns` is divided.

    `residence_ns` is the residence time: the median time that a request is in flight. There are at most MAX_BATCHES
    batches. Each lasts at least RESIDENCE_TIMES_PER_BATCH residence times, unless there is only one batch.
    """
    batches = min(MAX_BATCHES, int((to_ns - from_ns) / (RESIDENCE_TIMES_PER_BATCH * max(1.0, residence_ns))))
    return np.linspace(from_ns, to_ns, max(1, batches) + 1)


def _batches(steps: InFlight, from_ns: float, to_ns: float, residence_ns: float) -> Floats:
    """Return the mean number of requests in flight in each batch from `from_ns` to `to_ns` (see `_batch_edges`)."""
    edges = _batch_edges(from_ns, to_ns, residence_ns).tolist()
    return np.array([_mean(_between(steps, *ends)) for ends in pairwise(edges)])


def _completions(frame: Frame, from_ns: float, to_ns: float, residence_ns: float) -> Floats:
    """Return the number of requests that completed in each batch from `from_ns` to `to_ns` (see `_batch_edges`).

    `residence_ns` is the median time that a request is in flight. The function is for closed loops. Their number of
    requests in flight is constant whatever the server does, so only completions can show a steady state.
    """
    ended_ns = frame.end_ns[frame.measured & frame.complete]
    return np.histogram(ended_ns, _batch_edges(from_ns, to_ns, residence_ns))[0].astype(np.float64)


def _between(steps: InFlight, begins: float, ends: float) -> InFlight:
    """Return the part of the step function `steps` from the time `begins` to the time `ends`.

    The first instant of the result is `begins`, and the last instant is `ends`. The last instant needs a count too, so
    the last count appears twice.
    """
    first, last = np.searchsorted(steps.instants, (begins, ends), side="right")
    before = steps.counts[first - 1] if first else 0
    counts = np.concatenate(([before], steps.counts[first:last]))
    return InFlight(np.concatenate(([begins], steps.instants[first:last], [ends])), np.append(counts, counts[-1]))


def _mean(part: InFlight) -> float:
    """Return the mean number of requests in flight in a part of the run, weighted by time."""
    lengths = np.diff(part.instants)
    return float((part.counts[:-1] * lengths).sum() / lengths.sum())


def _median(part: InFlight) -> float:
    """Return the median number of requests in flight, weighted by time.

    For half of the time, the number is at most the median.
    """
    order = np.argsort(part.counts[:-1], kind="stable")
    elapsed = np.cumsum(np.diff(part.instants)[order])
    return float(part.counts[:-1][order][np.searchsorted(elapsed, elapsed[-1] / 2)])


def _largest(values: Floats) -> float | None:
    """Return the largest of `values` (times in seconds), rounded to the nanosecond.

    NaN is ignored. Return None if all values are NaN.
    """
    known = values[~np.isnan(values)]
    return round_to_ns(float(known.max())) if len(known) else None
