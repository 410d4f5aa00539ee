"""Measures how long a server takes to recover after a command of --at, such as a command that kills a replica.

The run is divided into short time windows. The windows before the first command show the normal range of each figure,
for example of a latency.

- A figure is disturbed if it leaves its normal range after a command.
- A disturbed figure has recovered when it stays in the normal range for CALM_WINDOWS windows in a row. The first of
  these windows is the time of the recovery.
- For the next command, the windows after the recovery count as normal too.
- A command is judged until the next command starts, or until the last request is due.

The normal range ends at a prediction limit. A figure without a disturbance exceeds this limit by chance with a
probability of at most FALSE_ALARMS per command. The limit is farther from the mean of the normal windows if there are
more windows after the command, and nearer if there are more normal windows. Sources: Hahn, "Factors for calculating
two-sided prediction intervals for samples from a normal distribution", 1969, and the bound of Bonferroni for several
windows.

These sources assume values with a normal distribution. Figures are therefore transformed first: the logarithm of a
latency, the square root of a rate, and the arcsine of the square root of a share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from loadgen.analysis.frame import NS_PER_S, Booleans, Floats, Frame, Integers
from loadgen.analysis.goodput import bound_scale
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.objectives import Objective
from loadgen.analysis.run.command_record import CommandRecord
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.stats import percentile, student_quantile
from loadgen.analysis.summary import CommandEffect, RecoveredFigure
from loadgen.analysis.time_windows import MIN_REQUESTS, WindowSeries, loaded_span_ns, rate_windows, window_index

MIN_WINDOW_S = 1.0
MAX_WINDOWS = 2_000
MIN_NORMAL = 10
"""Minimum number of whole time windows with a normal value. Without them, the normal range of a figure is unknown."""
MIN_KNOWN = 10
"""Minimum number of requests in a window from which a latency or a share is computed."""
REQUESTS_FOR_P99 = 200
"""Minimum mean number of requests per window from which p99 is judged. Smaller windows are judged by p90, because p99
of few requests is nearly their maximum."""
CALM_WINDOWS = 3
"""Number of windows in a row inside the range after which a figure has recovered."""
DISTURBED_WINDOWS = 2
"""Number of windows in a row outside the range that show a disturbance."""
FALSE_ALARMS = 0.01
"""Maximum probability that a figure without a disturbance leaves its range after a command."""
PAIR_EXPONENT = 2 / 3
"""Two windows in a row exceed a limit by chance with a probability between that of one window and its square, because
both are compared with the same estimated limit. This exponent gives the probability of one window."""
MARGIN = 0.1
"""Minimum distance between the limit and the worst normal window, as a share of the median of the normal windows."""
OUTPUT_SHOWN = 500
"""Maximum number of characters of a command's output in the summary. The run file contains more."""
Direction = Literal["lower", "higher"]
Scale = Literal["latency", "rate", "share"]
TO_NORMAL: dict[Scale, Callable[[Floats], Floats]] = {
    "latency": lambda values: np.log(np.maximum(values, np.finfo(np.float64).tiny)),
    "rate": np.sqrt,
    "share": lambda values: np.arcsin(np.sqrt(values)),
}
"""Functions that give a figure about a normal distribution over undisturbed windows, by the scale of the figure."""
FROM_NORMAL: dict[Scale, Callable[[float], float]] = {
    "latency": math.exp,
    "rate": lambda value: max(0.0, value) ** 2,
    "share": lambda value: math.sin(max(0.0, value)) ** 2,
}


class _Figure(msgspec.Struct, frozen=True):
    """A figure that shows whether the server has recovered, with its value in each time window of a run."""

    name: str
    direction: Direction
    scale: Scale
    series: WindowSeries
    min_deviation: float = 0.0
    """Minimum standard deviation of an undisturbed window, on the normal scale. That of a share is binomial."""
    windows_needed: int = DISTURBED_WINDOWS
    """Number of windows in a row outside the range that show a disturbance."""


def describe_commands(run: Run, frame: Frame, bounds: Sequence[Objective]) -> list[CommandEffect]:
    """Return one CommandEffect for each command that ran during `run` (--at), in order of time.

    The CommandEffect states how each figure of the run recovered after its command. `frame` contains the requests of
    the run, and `bounds` are the bounds of --goodput.
    """
    records = sorted(run.commands, key=lambda record: record.at_ns)
    if not records:
        return []
    started = [record for record in records if _started(record)]
    figures = list(_figures(frame, bounds))
    by_figure = [_recoveries(figure, started) for figure in figures]
    effects = []
    for record in records:
        recovered: list[RecoveredFigure] = []
        reason = "the command did not start"
        if _started(record):
            index = started.index(record)
            recovered = [recovery for recoveries in by_figure if (recovery := recoveries[index]) is not None]
            reason = _reason_unknown(figures, started, index)
        effects.append(_effect(record, recovered, reason))
    return effects


def _reason_unknown(figures: Sequence[_Figure], started: Sequence[CommandRecord], index: int) -> str:
    """Return the reason why the effect of the command `started[index]` is unknown.

    `started` contains the commands whose shell could be started. The effect of a command is unknown if no figure could
    be judged after the command. `figures` are the figures of the run, or empty if the run is too short for time
    windows.
    """
    if not figures:
        return f"the load has at most {MIN_NORMAL} time windows of {MIN_WINDOW_S:g} s and {MIN_REQUESTS} requests"
    if not _windows_after(figures[0].series, started, index):
        next_event = "the next command started" if index + 1 < len(started) else "the load ended"
        return f"{next_event} within the same time window"
    return f"fewer than {MIN_NORMAL} undisturbed time windows lie before it"


def _effect(record: CommandRecord, recoveries: list[RecoveredFigure], reason: str) -> CommandEffect:
    return CommandEffect(
        command=record.command,
        at_s=round(record.at_ns / NS_PER_S, 3),
        took_s=None if record.end_ns is None else round((record.end_ns - record.at_ns) / NS_PER_S, 3),
        exit_code=record.exit_code,
        ended_with_run=record.ended_with_run,
        output=record.output.strip()[-OUTPUT_SHOWN:],
        figures=recoveries,
        effect_unknown=None if recoveries else reason,
    )


def _started(record: CommandRecord) -> bool:
    """Return True if the shell of a command could be started."""
    return record.exit_code is not None or record.ended_with_run


def _figures(frame: Frame, bounds: Sequence[Objective]) -> Iterator[_Figure]:
    """Yield the figures that show whether the server has recovered after a command, such as p99 of TTFT.

    Each figure has one value per time window. `bounds` are the bounds of --goodput. If there are bounds, the share of
    requests that meet them is one of the figures. A run that is too short for enough time windows yields no figures.
    """
    span_ns = loaded_span_ns(frame)
    if span_ns is None:
        return
    rows = np.flatnonzero(frame.inside & frame.sent)
    length_s = (span_ns[1] - span_ns[0]) / NS_PER_S
    count = int(min(MAX_WINDOWS, length_s / MIN_WINDOW_S, len(rows) / MIN_REQUESTS))
    if count <= MIN_NORMAL:
        return
    from_s, window_s = span_ns[0] / NS_PER_S, length_s / count
    due_windows = window_index(frame.due_ns[rows], span_ns, count)
    has_tokens = bool(frame.chunk_counts.any())
    latency = METRICS["ttft_s" if has_tokens else "e2e_s"]
    percent = 99 if len(rows) / count >= REQUESTS_FOR_P99 else 90
    complete = frame.complete[rows]
    values = _percentiles(latency.rows(frame)[rows][complete], due_windows[complete], count, percent / 100)
    yield _Figure(f"{latency.key}.p{percent}", "lower", "latency", WindowSeries(from_s, window_s, values))
    rate = METRICS["output_tokens_per_s" if has_tokens else "requests_per_s"].key
    yield _Figure(rate, "higher", "rate", rate_windows(frame, rate, count))
    deviation = 0.5 / math.sqrt(len(rows) / count)
    # Requests in flight often fail together at the instant of a command, so their end decides, and one window suffices.
    ended = ~np.isnan(frame.end_ns[rows]) & (frame.end_ns[rows] <= span_ns[1])
    end_windows = window_index(frame.end_ns[rows][ended], span_ns, count)
    shares = _shares(complete[ended], end_windows, count)
    yield _Figure("complete", "higher", "share", WindowSeries(from_s, window_s, shares), deviation, 1)
    if bounds:
        shares = _shares(bound_scale(frame, bounds)[rows] <= 1, due_windows, count)
        yield _Figure("attainment", "higher", "share", WindowSeries(from_s, window_s, shares), deviation)


def _percentiles(samples: Floats, windows: Integers, count: int, share: float) -> Floats:
    """Return a percentile of the samples in each window, or NaN for a window with fewer than MIN_KNOWN samples.

    `windows` contains the index of the window of each sample. Samples that are NaN do not count.
    """
    known = ~np.isnan(samples)
    samples, windows = samples[known], windows[known]
    order = np.argsort(windows, kind="stable")
    groups = np.split(samples[order], np.cumsum(np.bincount(windows, minlength=count))[:-1])
    return np.array([percentile(np.sort(group), share) if len(group) >= MIN_KNOWN else math.nan for group in groups])


def _shares(good: Booleans, windows: Integers, count: int) -> Floats:
    """Return the share of requests that are `good`, in each window. A window with fewer than MIN_KNOWN requests gets
    NaN.
    """
    requests = np.bincount(windows, minlength=count)
    shares = np.bincount(windows, good, count) / np.maximum(requests, 1)
    return np.where(requests >= MIN_KNOWN, shares, math.nan)


def _windows_after(series: WindowSeries, started: Sequence[CommandRecord], index: int) -> range:
    """Return the indices of the time windows that show the effect of the command `started[index]`.

    The first of them is the window in which the command started. The last one is the window before the next command
    started, or the last window of the series.
    """
    count = len(series.values)
    last = min(count, _window_of(series, started[index + 1])) if index + 1 < len(started) else count
    return range(min(count, _window_of(series, started[index])), last)


def _window_of(series: WindowSeries, record: CommandRecord) -> int:
    """Return the index of the time window in which a command started.

    The index may be larger than that of the last window.
    """
    return max(0, math.floor((record.at_ns / NS_PER_S - series.from_s) / series.window_s))


def _recoveries(figure: _Figure, started: Sequence[CommandRecord]) -> list[RecoveredFigure | None]:
    """Return how the values of `figure` recovered after each command in `started`: one element per command.

    An element is None if the recovery cannot be judged. A figure has recovered when its values are normal again. Two
    groups of values count as normal:

    - All values before the first command.
    - After a recovery: all values from the recovery until the next command.

    Time windows in which the figure has no value are ignored.
    """
    values = figure.series.values
    known = ~np.isnan(values)
    normal = known.copy()
    normal[_window_of(figure.series, started[0]) if started else 0 :] = False
    result: list[RecoveredFigure | None] = []
    recovered = True
    for index, record in enumerate(started):
        windows = _windows_after(figure.series, started, index)
        judged = np.flatnonzero(known[windows.start : windows.stop]) + windows.start
        limit = _limit(figure, values[normal], len(judged)) if len(judged) and normal.sum() >= MIN_NORMAL else 0.0
        if limit <= 0:
            result.append(None)
            continue
        recovery, normal_from = _recovery(figure, record.at_ns / NS_PER_S, judged, limit)
        if recovery.disturbed and not recovered:
            recovery = replace(recovery, already_disturbed=True)
        result.append(recovery)
        recovered = normal_from is not None
        if normal_from is not None:
            normal[judged[judged >= normal_from]] = True
    return result


def _recovery(figure: _Figure, at_s: float, windows: Integers, limit: float) -> tuple[RecoveredFigure, int | None]:
    """Return how `figure` recovered after a command, and the index of the time window from which it was normal again.

    - `at_s` is the time of the command in seconds.
    - `windows` contains the indices of the time windows after the command in which the figure has a value.
    - `limit` is the worst value that is still normal.

    If the figure did not recover, the returned index is None. If the command did not disturb the figure, it is the
    first index in `windows`.
    """
    values = figure.series.values[windows]
    outside = values > limit if figure.direction == "lower" else values < limit
    start = _first_run(outside, figure.windows_needed)
    if start is None:
        return RecoveredFigure(figure=figure.name, limit=limit, disturbed=False), int(windows[0])
    calm = _first_run(~outside[start:], CALM_WINDOWS)
    bad = values[start:] if calm is None else values[start : start + calm]
    normal_from = None if calm is None else int(windows[start + calm])
    recovered_s = None
    if normal_from is not None:
        recovered_s = round(max(0.0, figure.series.ends_s(normal_from)[0] - at_s), 3)
    recovery = RecoveredFigure(
        figure=figure.name,
        limit=limit,
        disturbed=True,
        worst=float(bad.max() if figure.direction == "lower" else bad.min()),
        recovered_s=recovered_s,
        window_s=round(figure.series.window_s, 3),
    )
    return recovery, normal_from


def _limit(figure: _Figure, normal: Floats, windows_after: int) -> float:
    """Return the limit of the normal range of `figure`. Beyond this limit, the figure is disturbed.

    The limit is a maximum if lower values of the figure are better, as for latencies. Otherwise it is a minimum.

    - `normal` contains the values of the figure in time windows without a disturbance.
    - `windows_after` is the number of time windows that are compared with the limit, after a command such as one that
      kills a replica.

    Two candidates for the limit are computed:

    - The prediction limit, which the docstring of this module explains.
    - A limit slightly beyond the worst value in `normal`. Its distance from this value is MARGIN times the median of
      `normal`.

    The result is the candidate that is farther from the normal values. A minimum of 0 or less is possible. The figure
    is then never disturbed, because its values are not negative.
    """
    sign = 1 if figure.direction == "lower" else -1
    confidence = 1 - (FALSE_ALARMS / windows_after) ** (1.0 if figure.windows_needed == 1 else PAIR_EXPONENT)
    transformed = TO_NORMAL[figure.scale](normal)
    distance = max(
        student_quantile(confidence, len(normal) - 1) * float(transformed.std(ddof=1)),
        NormalDist().inv_cdf(confidence) * figure.min_deviation,
    ) * math.sqrt(1 + 1 / len(normal))
    predicted = FROM_NORMAL[figure.scale](float(transformed.mean()) + sign * distance)
    worst = float(normal.max() if figure.direction == "lower" else normal.min())
    beyond_worst = worst + sign * MARGIN * float(np.median(normal))
    return max(predicted, beyond_worst) if figure.direction == "lower" else min(predicted, beyond_worst)


def _first_run(mask: Booleans, length: int) -> int | None:
    """Return the index at which a run of `length` consecutive true values begins in `mask`, or None if
    there is none.
    """
    for index in range(len(mask) - length + 1):
        if mask[index : index + length].all():
            return index
    return None
