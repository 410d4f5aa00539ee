"""Measures how long a server takes to recover after a command of --at, such as one that kills a replica.

The run is divided into short time windows. The windows before a command give the range of each figure without a
disturbance. A figure is disturbed if it leaves this range after the command, and has recovered at the first of
CALM_WINDOWS windows in a row that lie in the range again. A command is judged until the next command starts, or until
the last request is due.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from loadgen.analysis.frame import NS_PER_S, Floats, Frame
from loadgen.analysis.goodput import bound_scale
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.objectives import Objective
from loadgen.analysis.run.command_record import CommandRecord
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.stats import percentile
from loadgen.analysis.summary import CommandEffect, RecoveredFigure
from loadgen.analysis.time_windows import MIN_REQUESTS, WindowSeries, loaded_span_ns, rate_windows, window_index

MIN_WINDOW_S = 1.0
MAX_WINDOWS = 2_000
MIN_BEFORE = 5
"""Minimum number of whole time windows before a command. Without them, the normal range of a figure is unknown."""
CALM_WINDOWS = 3
"""Number of windows in a row inside the range after which a figure has recovered."""
DISTURBED_WINDOWS = 2
"""Number of windows in a row outside the range that show a disturbance. One is enough if requests failed in it."""
MARGIN = 0.1
"""Margin of the normal range beyond the worst window before a command, as a share of the median of these windows."""
OUTPUT_SHOWN = 500
"""Maximum number of characters of a command's output in the summary. The run file contains more."""
Direction = Literal["lower", "higher"]


def describe_commands(run: Run, frame: Frame, bounds: Sequence[Objective]) -> list[CommandEffect]:
    """Return the commands of a run in order of time, and how the server recovered after each.

    `bounds` are the bounds of --goodput.
    """
    records = sorted(run.commands, key=lambda record: record.at_ns)
    if not records:
        return []
    figures = list(_figures(frame, bounds))
    effects = []
    for index, record in enumerate(records):
        next_s = records[index + 1].at_ns / NS_PER_S if index + 1 < len(records) else math.inf
        recoveries = [
            recovery
            for name, direction, series in figures
            if (recovery := _recovery(name, direction, series, record.at_ns / NS_PER_S, next_s)) is not None
        ]
        effects.append(_effect(record, recoveries))
    return effects


def _effect(record: CommandRecord, recoveries: list[RecoveredFigure]) -> CommandEffect:
    return CommandEffect(
        command=record.command,
        at_s=round(record.at_ns / NS_PER_S, 3),
        took_s=None if record.end_ns is None else round((record.end_ns - record.at_ns) / NS_PER_S, 3),
        exit_code=record.exit_code,
        ended_with_run=record.ended_with_run,
        output=record.output.strip()[-OUTPUT_SHOWN:],
        figures=recoveries,
    )


def _figures(frame: Frame, bounds: Sequence[Objective]) -> Iterator[tuple[str, Direction, WindowSeries]]:
    """Yield the name, the good direction and the time windows of each figure by which a recovery is judged."""
    span_ns = loaded_span_ns(frame)
    if span_ns is None:
        return
    requests = int((frame.inside & frame.sent).sum())
    length_s = (span_ns[1] - span_ns[0]) / NS_PER_S
    count = int(min(MAX_WINDOWS, length_s / MIN_WINDOW_S, requests / MIN_REQUESTS))
    if count <= MIN_BEFORE:
        return
    has_tokens = bool(frame.chunk_counts.any())
    latency = METRICS["ttft_s" if has_tokens else "e2e_s"]
    rows = frame.inside & frame.sent
    index = window_index(frame.due_ns[rows], span_ns, count)
    latencies_s = np.where(frame.complete[rows], latency.rows(frame)[rows], math.inf)
    order = np.argsort(index, kind="stable")
    groups = np.split(latencies_s[order], np.cumsum(np.bincount(index, minlength=count))[:-1])
    p99 = [percentile(np.sort(group[~np.isnan(group)]), 0.99) for group in groups]
    from_s, window_s = span_ns[0] / NS_PER_S, length_s / count
    yield f"{latency.key}.p99", "lower", WindowSeries(from_s, window_s, np.array(p99))
    rate = METRICS["output_tokens_per_s" if has_tokens else "requests_per_s"].key
    yield rate, "higher", rate_windows(frame, rate, count)
    if bounds:
        good = bound_scale(frame, bounds)[rows] <= 1
        requests_in = np.bincount(index, minlength=count)
        shares = np.where(requests_in > 0, np.bincount(index, good, count) / np.maximum(requests_in, 1), math.nan)
        yield "attainment", "higher", WindowSeries(from_s, window_s, shares)


def _recovery(
    name: str, direction: Direction, series: WindowSeries, at_s: float, next_s: float
) -> RecoveredFigure | None:
    """Return how one figure recovered after a command, or None if there are too few windows before or after it."""
    first = max(0, math.floor((at_s - series.from_s) / series.window_s))
    last = None if next_s == math.inf else math.floor((next_s - series.from_s) / series.window_s)
    before = series.values[:first]
    before = before[np.isfinite(before)]
    after = series.values[first:last]
    if len(before) < MIN_BEFORE or not len(after):
        return None
    limit = _limit(before, direction)
    outside = _outside(after, limit, direction)
    start = _first_run(outside, DISTURBED_WINDOWS)
    failed = np.flatnonzero(np.isinf(after))
    if len(failed):
        start = int(failed[0]) if start is None else min(start, int(failed[0]))
    figure = RecoveredFigure(figure=name, limit=limit, disturbed=start is not None)
    if start is None:
        return figure
    calm = _first_run(~outside[start:], CALM_WINDOWS)
    worst = after[start:] if calm is None else after[start : start + calm]
    extreme = float(np.nanmax(worst) if direction == "lower" else np.nanmin(worst))
    recovered_s = None
    if calm is not None:
        recovered_s = round(max(0.0, series.ends_s(first + start + calm)[0] - at_s), 3)
    return RecoveredFigure(
        figure=name,
        limit=limit,
        disturbed=True,
        worst=extreme if math.isfinite(extreme) else None,
        recovered_s=recovered_s,
        window_s=round(series.window_s, 3),
    )


def _limit(before: Floats, direction: Direction) -> float:
    """Return the limit of the normal range of a figure: its worst window before a command, plus or minus a margin."""
    margin = MARGIN * abs(float(np.median(before)))
    return float(before.max() + margin) if direction == "lower" else float(max(0.0, before.min() - margin))


def _outside(values: Floats, limit: float, direction: Direction) -> np.ndarray:
    """Return a mask of the windows outside the range. A window without requests is inside."""
    return values > limit if direction == "lower" else values < limit


def _first_run(mask: np.ndarray, length: int) -> int | None:
    """Return the index of the first of `length` true values in a row, or None if there are none."""
    for index in range(len(mask) - length + 1):
        if mask[index : index + length].all():
            return index
    return None
