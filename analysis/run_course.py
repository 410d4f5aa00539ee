"""Describes how a long run went: changes and drifts of its figures, and restarts of the server.

Only runs with a constant load are examined, because any other load changes the figures on purpose. A run must be long
enough for MIN_WINDOWS time windows. Small changes and drifts are omitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from loadgen.analysis.change_points import find_change_points
from loadgen.analysis.drift import MAX_WINDOWS as DRIFT_WINDOWS
from loadgen.analysis.drift import hours_between_ends, measure_drift
from loadgen.analysis.frame import NS_PER_S, Floats, Frame
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.summary import FigureChange, FigureDrift, RunCourse, ServerRestart
from loadgen.analysis.telemetry import Reading, number_in, readings
from loadgen.analysis.time_windows import WindowSeries, latency_windows, loaded_span_ns, rate_windows, window_count

MIN_WINDOWS, MAX_WINDOWS = 24, 120
"""Minimum and maximum number of time windows into which a run is divided, to find changes."""
MIN_WINDOW_S = 5.0
"""Minimum length of a time window. A server that pauses for a second has not changed."""
MIN_CHANGE = 0.1
"""Minimum change of a figure, as a share of its level."""
MAX_P_VALUE = 1e-4
"""Maximum p-value of a drift. One figure in ten thousand without a drift has a smaller one."""
WATCHED_LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
WATCHED_RATES = ("output_tokens_per_s", "requests_per_s")
RESTART_COUNTERS = ("requests_finished", "prompt_tokens", "output_tokens")
"""Counters of the server whose fall shows a restart, on a server that does not publish when its process started."""
START_TIME = "process_start_s"
START_TIME_TOLERANCE_S = 1.0
"""Maximum difference of two start times of one process. A page may round them."""


def describe_course(run: Run, frame: Frame) -> RunCourse | None:
    """Return the changes, drifts and restarts of a run, or None if there are none."""
    restarts = find_restarts(readings(run, "server"))
    changes = list[FigureChange]()
    drifts = list[FigureDrift]()
    if run.header.load.steady or run.header.load.clients:
        for figure, series in _watched_series(frame, closed=run.header.load.clients > 0):
            found = _changes(figure, series)
            changes += found
            if not found:
                drifts += _drift(figure, series)
    if not (changes or drifts or restarts):
        return None
    return RunCourse(changes=sorted(changes, key=lambda change: change.at_s), drifts=drifts, restarts=restarts)


def find_restarts(server_readings: Sequence[Reading]) -> list[ServerRestart]:
    """Return the restarts of the server between its readings.

    A process that started later than every process seen before is a restarted one, unless an earlier process answers
    again afterwards. Several replicas behind one URL answer in turn, so their start times return. If the server
    publishes no start time, a restart is visible because all of its counters fall.
    """
    valid = [reading for reading in server_readings if not reading.gap]
    known = [(reading.at_s, start_s) for reading in valid if (start_s := number_in(reading.values, START_TIME))]
    if known:
        return _later_starts(known)
    restarts = []
    for before, after in pairwise(valid):
        pairs = [(number_in(before.values, name), number_in(after.values, name)) for name in RESTART_COUNTERS]
        counted = [(old, new) for old, new in pairs if old is not None and new is not None]
        if any(new < old for old, new in counted) and all(new < old or old == 0 for old, new in counted):
            restarts.append(ServerRestart(from_s=round(before.at_s, 3), to_s=round(after.at_s, 3), evidence="counters"))
    return restarts


def _later_starts(starts: Sequence[tuple[float, float]]) -> list[ServerRestart]:
    """Return the restarts that the start times of the server's process show.

    `starts` has one pair per reading: the time of the reading in the run, and the start time of the process. Both are
    in seconds."""
    restarts = []
    latest_s = starts[0][1]
    for index, (at_s, start_s) in enumerate(starts):
        if start_s <= latest_s + START_TIME_TOLERANCE_S:
            continue
        latest_s = start_s
        returned = any(later_s < start_s - START_TIME_TOLERANCE_S for _, later_s in starts[index:])
        if not returned:
            from_s = starts[index - 1][0]
            restarts.append(ServerRestart(from_s=round(from_s, 3), to_s=round(at_s, 3), evidence="start_time"))
    return restarts


def _watched_series(frame: Frame, *, closed: bool) -> Iterator[tuple[str, WindowSeries]]:
    """Yield the name of each watched figure, such as `ttft.p50`, and its values in time windows.

    Throughput is only watched if `closed` is True (a closed loop). In an open loop, the arrivals of requests determine
    the throughput, and random arrivals make it vary.
    """
    span_ns = loaded_span_ns(frame)
    if span_ns is None:
        return
    longest = int((span_ns[1] - span_ns[0]) / NS_PER_S / MIN_WINDOW_S)
    count = window_count(frame, span_ns, min(MAX_WINDOWS, longest))
    if count < MIN_WINDOWS:
        return
    names = WATCHED_LATENCIES if frame.chunk_counts.any() else ("e2e_s",)
    for name in names:
        yield f"{METRICS[name].key}.p50", latency_windows(frame, METRICS[name], "p50", 0.5, count)
    if not closed:
        return
    name = WATCHED_RATES[0] if frame.chunk_counts.any() else WATCHED_RATES[1]
    yield METRICS[name].key, rate_windows(frame, name, count)


def _changes(figure: str, series: WindowSeries) -> list[FigureChange]:
    """Return the changes of one figure by at least MIN_CHANGE of its level."""
    known = np.flatnonzero(~np.isnan(series.values))
    values = series.values[known]
    points = find_change_points(values)
    result = []
    for first, point, last in zip([0, *points], points, [*points[1:], len(values)], strict=False):
        before, after = float(np.median(values[first:point])), float(np.median(values[point:last]))
        if abs(after - before) >= MIN_CHANGE * max(before, after):
            at_s = series.ends_s(int(known[point]))[0]
            result.append(
                FigureChange(
                    figure=figure,
                    at_s=round(at_s, 3),
                    window_s=round(series.window_s, 3),
                    before=_rounded(before),
                    after=_rounded(after),
                )
            )
    return result


def _drift(figure: str, series: WindowSeries) -> list[FigureDrift]:
    """Return a list with the drift of one figure, or an empty list if it is small or may be due to chance.

    The p-value of a drift must be at most MAX_P_VALUE, and the change over the whole run at least MIN_CHANGE of the
    level."""
    groups = max(1, math.ceil(len(series.values) / DRIFT_WINDOWS))
    parts = len(series.values) // groups
    medians = [_known_median(series.values[index * groups : (index + 1) * groups]) for index in range(parts)]
    grouped = WindowSeries(series.from_s, series.window_s * groups, np.array(medians))
    drift = measure_drift(grouped)
    if drift is None or drift.p_value > MAX_P_VALUE or abs(drift.per_hour) * hours_between_ends(grouped) < MIN_CHANGE:
        return []
    return [
        FigureDrift(
            figure=figure,
            per_hour=_rounded(drift.per_hour),
            ci95=(_rounded(drift.low), _rounded(drift.high)),
            level=_rounded(drift.level),
        )
    ]


def _known_median(values: Floats) -> float:
    """Return the median of the values that are not NaN, or NaN if there are none, as in an outage."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else math.nan


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
