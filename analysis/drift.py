"""Measures how fast a figure of a run rises or falls: its drift, as a share of its level per hour.

The level is the median of the figure in the time windows of the run (loadgen.analysis.time_windows). The drift is
usually the slope of Theil and Sen: the median of the slopes between all pairs of windows, which single bad windows
hardly move. Its confidence interval is that of Sen, from Kendall's test of a trend, with a correction for correlated
neighbouring windows. Sources:

- Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
- Yue and Wang, "The Mann-Kendall test modified by effective sample size to detect trend in serially correlated
  hydrological series", 2004.

A figure whose level changes in steps (loadgen.analysis.change_points) has no single slope. Its drift is the difference
between its last and its first level, divided by the time between the middles of its first and its last window. A figure
that returns to its first level does not drift.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec
import numpy as np

from loadgen.analysis.change_points import find_change_points, noise_of
from loadgen.analysis.format import HOUR_S
from loadgen.analysis.frame import Floats, Frame
from loadgen.analysis.metrics import metric_by_key
from loadgen.analysis.objectives import LATENCIES, Objective
from loadgen.analysis.stats import CONFIDENCE
from loadgen.analysis.time_windows import (
    WindowSeries,
    latency_windows,
    loaded_span_ns,
    rate_windows,
    samples_for,
    window_count,
)

MIN_WINDOWS = 10
MAX_WINDOWS = 40
"""Minimum and maximum number of windows from which a drift is computed."""
FIRST_WINDOWS = 3
"""Number of windows at the beginning whose median is the level before a drift."""
NOISES_BEYOND = 1.0
"""Minimum excess of a window over the allowed value for the window to count, in units of the noise of a window."""
LASTING_WINDOWS = 3
"""Minimum number of windows in a row that must miss a bound, so that a single bad window does not count."""
MEDIAN_ERROR = 1.2533
"""Ratio of the standard error of a median to that of a mean, for a normal distribution: the root of pi / 2."""
MAX_CORRELATION = 0.95
"""Maximum correlation of neighbouring windows for which the interval is corrected."""


class Drift(msgspec.Struct, frozen=True):
    """The drift of a figure as a share of its level per hour. For example, 0.05 means that it grows by 5% per hour."""

    per_hour: float
    low: float
    """Lower end of the confidence interval of `per_hour`."""
    high: float
    level: float
    """Median of the figure over the time windows, in the unit of the figure."""
    p_value: float
    """Probability that a figure without drift shows a trend at least this clear by chance."""


def drift_windows(objective: Objective, frame: Frame) -> WindowSeries | str:
    """Return the values of the figure that `objective` limits, one for each time window of the run.

    If the run is too short to measure a drift, return a text with the reason instead.
    """
    span_ns = loaded_span_ns(frame)
    is_latency = objective.figure in LATENCIES
    needed = samples_for(objective.percentile) if is_latency else 0
    count = 0 if span_ns is None else window_count(frame, span_ns, MAX_WINDOWS, needed)
    if count < MIN_WINDOWS:
        return (
            f"a drift needs {MIN_WINDOWS} time windows, and the run has {count}: a window lasts at least twice as long "
            f"as a request and has at least {max(needed, samples_for(None)):,} complete requests"
        )
    if is_latency:
        metric = metric_by_key(objective.figure)
        return latency_windows(frame, metric, objective.statistic, objective.percentile, count)
    return rate_windows(frame, objective.figure, count)


def measure_drift(series: WindowSeries, confidence: float = CONFIDENCE) -> Drift | None:
    """Return the drift of a figure: how fast the figure rises or falls, as a share of its median per hour.

    Return None if fewer than MIN_WINDOWS windows of `series` have a value, or if the median of these values is 0.
    """
    values, hours = _known_windows(series)
    level = float(np.median(values)) if len(values) else 0.0
    if len(values) < MIN_WINDOWS or level <= 0:
        return None
    changes = find_change_points(values)
    if changes:
        return _drift_of_steps(values, float(hours[-1] - hours[0]), changes, level, confidence)
    first, second = np.triu_indices(len(values), 1)
    slopes = np.sort((values[second] - values[first]) / (hours[second] - hours[first]))
    slope = float(np.median(slopes))
    deviation = math.sqrt(_score_variance(values, values - slope * hours))
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * deviation
    low = slopes[max(0, math.floor((len(slopes) - reach) / 2))]
    high = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))]
    score = abs(float(np.sign(values[second] - values[first]).sum()))
    z = (score - 1) / deviation if deviation and score else 0.0
    p_value = math.erfc(max(0.0, z) / math.sqrt(2))
    return Drift(slope / level, float(low) / level, float(high) / level, level, p_value)


def reason_without_drift(series: WindowSeries) -> str:
    """Return the reason why `measure_drift` returns None for this figure."""
    values, _ = _known_windows(series)
    if len(values) < MIN_WINDOWS:
        return (
            f"a drift needs {MIN_WINDOWS} time windows with a value, "
            f"and the figure is known in {len(values)} of {len(series.values)}"
        )
    return "the median of the figure over the run is 0, and a drift is a share of this median"


def hours_between_ends(series: WindowSeries) -> float:
    """Return the time in hours from the middle of the first window that has a value to the middle of the last such
    window.

    Return 0 if no window has a value.
    """
    _, hours = _known_windows(series)
    return float(hours[-1] - hours[0]) if len(hours) else 0.0


def _known_windows(series: WindowSeries) -> tuple[Floats, Floats]:
    """Return two arrays for the windows that have a value: the values, and the middles of these windows in hours."""
    known = ~np.isnan(series.values)
    return series.values[known], series.middles_s[known] / HOUR_S


def _drift_of_steps(values: Floats, hours: float, changes: list[int], level: float, confidence: float) -> Drift:
    """Return the drift of a figure whose level changes in steps.

    The drift is the change from the first level to the last level per hour, as a share of `level`.

    - `values` contains the figure in successive time windows.
    - `hours` is the time between the middles of the first and the last window.
    - `changes` contains the index of the first value of each new level.
    - `level` is the median of all values.
    - `confidence` is the confidence of the drift's interval.
    """
    first, last = values[: changes[0]], values[changes[-1] :]
    change = float(np.median(last) - np.median(first))
    error = MEDIAN_ERROR * noise_of(values) * math.sqrt(1 / len(first) + 1 / len(last))
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * error
    per_hour, low, high = (value / hours / level for value in (change, change - reach, change + reach))
    return Drift(per_hour, low, high, level, math.erfc(abs(change) / error / math.sqrt(2)))


def first_beyond(series: WindowSeries, objective: Objective, drift: Drift) -> tuple[float, float] | None:
    """Return the first time window in which a figure has changed more than `objective` allows, or None.

    The result is the start and the end of this window, in seconds. `series` contains the values of the figure, and
    `drift` is the measured drift. The figure must be beyond its limit in LASTING_WINDOWS windows in a row. The limit is
    computed from three values:

    - The median of the figure over the first FIRST_WINDOWS windows.
    - The allowed change over the duration of the run. The objective states it per hour, as a share of `drift.level`.
    - A margin for noise.

    The result may be None even if `drift` is too large, because the figure may never have been beyond the limit for so
    long.
    """
    values, _ = _known_windows(series)
    allowed = float(np.median(values[:FIRST_WINDOWS])) + objective.bound * drift.level * hours_between_ends(series)
    margin = NOISES_BEYOND * noise_of(values)
    falls = objective.comparison.startswith(">")
    return _first_lasting(series, series.values < allowed - margin if falls else series.values > allowed + margin)


def first_missed(series: WindowSeries, objective: Objective) -> tuple[float, float] | None:
    """Return the time window in which a figure first began to miss its bound for several windows in a row.

    The result is the start and the end of this window, in seconds. The window is the first of LASTING_WINDOWS windows
    in a row that miss the bound. The result is None if there are no such windows, or if the first window of the run
    already misses the bound.
    """
    missed = np.array([not math.isnan(value) and not objective.satisfied_by(value) for value in series.values])
    return None if missed[:1].any() else _first_lasting(series, missed)


def _first_lasting(series: WindowSeries, bad: np.ndarray) -> tuple[float, float] | None:
    for index in range(len(bad) - LASTING_WINDOWS + 1):
        if bad[index : index + LASTING_WINDOWS].all():
            return series.ends_s(index)
    return None


def _score_variance(values: Floats, detrended: Floats) -> float:
    """Return the variance that Kendall's score of `values` has if the series has no trend.

    The function first computes the variance for independent values. Neighbouring values may be correlated. n correlated
    values contain only as much information as a smaller number m of independent values, so the function multiplies the
    variance by n / m. This factor is computed for a first-order autoregressive process.

    The factor depends on the correlation of neighbouring values, which is estimated from the ranks of `detrended`, the
    values without their trend. The estimate is too low for a short series, so the function corrects it (Kendall, "Note
    on bias in the estimation of autocorrelation", 1954). A negative correlation counts as 0, because it would narrow
    the interval.
    """
    count = len(values)
    _, ties = np.unique(values, return_counts=True)
    variance = (count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    ranks = np.argsort(np.argsort(detrended, kind="stable"), kind="stable") - (count - 1) / 2
    estimate = float((ranks[1:] * ranks[:-1]).sum() / (ranks**2).sum())
    correlation = min(MAX_CORRELATION, max(0.0, (count * estimate + 2) / (count - 4)))
    lags = np.arange(1, count)
    return variance * (1 + 2 * float(((1 - lags / count) * correlation**lags).sum()))
