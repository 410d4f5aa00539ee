"""Finds out what happened during a long run: changes and drifts of its figures, and restarts of the server.

Restarts are searched for in every run. Changes and drifts are only searched for in runs with a constant load, because
any other load changes the figures on purpose. Such a run must be long enough for MIN_WINDOWS time windows. Small
changes and drifts are omitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

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
    """Return the restarts of the server that its readings show, in order of time.

    If the readings contain the values of several replicas, the restarts of each replica are found separately. Each
    restart then contains the URL of the replica.
    """
    valid = [reading for reading in server_readings if not reading.gap]
    urls = dict.fromkeys(replica.get("url", "") for reading in valid for replica in reading.values.get("replicas", ()))
    if not urls:
        return _restarts_of([(reading.at_s, reading.values) for reading in valid], "")
    restarts = []
    for url in urls:
        values = [
            (reading.at_s, replica)
            for reading in valid
            for replica in reading.values.get("replicas", ())
            if replica.get("url", "") == url
        ]
        restarts += _restarts_of(values, url)
    return sorted(restarts, key=lambda restart: restart.to_s)


def _restarts_of(values: Sequence[tuple[float, Mapping[str, Any]]], url: str) -> list[ServerRestart]:
    """Return the restarts of one server or replica. `url` is the URL of a replica, and empty for a single server.

    `values` contains the time of each reading in seconds, and the metrics that were read. One of these metrics is the
    start time of the server process. If a reading has a later start time than the readings before it, the server has
    restarted. Some servers do not publish their start time. For such a server, a restart is recognised when all
    counters that were greater than 0 fall.
    """
    known = [(at_s, start_s) for at_s, reading in values if (start_s := number_in(reading, START_TIME))]
    if known:
        return _later_starts(known, url)
    restarts = []
    for (from_s, before), (to_s, after) in pairwise(values):
        pairs = [(number_in(before, name), number_in(after, name)) for name in RESTART_COUNTERS]
        counted = [(old, new) for old, new in pairs if old is not None and new is not None]
        if any(new < old for old, new in counted) and all(new < old or old == 0 for old, new in counted):
            restarts.append(_restart(from_s, to_s, "counters", url))
    return restarts


def _later_starts(starts: Sequence[tuple[float, float]], url: str) -> list[ServerRestart]:
    """Return the restarts of the server at `url`. A restart is recognised by a later start time of the server's
    process.

    `starts` has one entry for each reading of the server: the time of the reading in the run, and the start time of the
    process. Both times are in seconds.

    If a start time is earlier than that of the previous reading, several replicas must answer at this URL. A later
    start time may then come from another replica, so the function returns no restarts.
    """
    if any(later_s < start_s - START_TIME_TOLERANCE_S for (_, start_s), (_, later_s) in pairwise(starts)):
        return []
    return [
        _restart(from_s, to_s, "start_time", url)
        for (from_s, start_s), (to_s, later_s) in pairwise(starts)
        if later_s > start_s + START_TIME_TOLERANCE_S
    ]


def _restart(from_s: float, to_s: float, evidence: Literal["start_time", "counters"], url: str) -> ServerRestart:
    return ServerRestart(from_s=round(from_s, 3), to_s=round(to_s, 3), evidence=evidence, url=url)


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
    """Return the changes of the level of one figure during the run.

    `figure` is the name of the figure, and `series` contains its values over time. Small changes are left out: the
    levels before and after a change must differ by at least the share MIN_CHANGE of the higher level.
    """
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
    """Return a list with the drift of one figure, or an empty list if the drift is small or may be due to chance.

    The p-value must be at most MAX_P_VALUE. The change over the whole run must be at least MIN_CHANGE, as a share of
    the figure's median.
    """
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
