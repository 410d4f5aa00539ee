"""Finds the instants at which the level of a time series changes.

The method is optimal partitioning (Jackson and others, "An algorithm for optimal partitioning of data on an interval",
2005). The series is divided into segments, and the level of a segment is the mean of its values. The cost of a division
is the sum of all squared deviations from these means, plus a penalty for each change of level. The method always finds
the division with the smallest cost. Three rules prevent changes that are only chance:

- Deviations are divided by the noise of the series, which is estimated from the differences between nearby values.
- A single value that is far from its neighbours does not count as a change. Such a value is moved closer to the median
  of its neighbours, to a distance of OUTLIER_NOISES times the noise (Fearnhead and Rigaill, "Changepoint detection in
  the presence of outliers", 2019, explain why).
- A series has no changes if a straight line describes the series at least as well. Such a series drifts.
"""

from __future__ import annotations

import math

import numpy as np

from loadgen.analysis.frame import Floats

MIN_SEGMENT = 5
"""Minimum number of values between two changes."""
PENALTY = 9.0
"""Penalty of a change, in units of `noise**2 * log(number of values)`. The Bayesian information criterion uses 2; the
values of time windows are not quite independent, so the penalty is larger."""
OUTLIER_NOISES = 3.0
OUTLIER_REACH = 2
"""Number of neighbours on each side of a value that decide whether it is an outlier."""
MIN_NOISE = 0.01
"""Minimum noise, as a share of the median. It keeps tiny changes of a very even series out of the result."""
MAX_LAG = 5
MAX_CORRELATION = 0.9
"""Maximum correlation of neighbouring values for which `noise_of` corrects the noise."""
MEDIAN_TO_DEVIATION = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation."""


def find_change_points(values: Floats) -> list[int]:
    """Return the index of the first value of each new level, in ascending order.

    `values` must not contain NaN. The result is empty for a short series, for a constant one, and for one that drifts
    evenly.
    """
    count = len(values)
    if count < 2 * MIN_SEGMENT:
        return []
    noise = noise_of(values)
    scaled = _without_outliers(values, noise) / noise
    penalty = PENALTY * math.log(count)
    changes, cost = _best_partition(scaled, penalty)
    return changes if cost < _line_cost(scaled) + penalty else []


def noise_of(values: Floats) -> float:
    """Return the noise of a series: how far its values deviate from its level, corrected for correlated neighbours.

    The noise is estimated in two steps:

    - The standard deviation is estimated from the differences between values that are up to MAX_LAG positions apart.
      The level rarely changes between two values that are so close together, so it hardly affects the estimate.
    - If neighbouring values are correlated, the mean of a segment is less certain than the mean of independent values.
      To account for this, the standard deviation is multiplied by `sqrt((1 + r) / (1 - r))`, where `r` is the
      correlation of neighbouring values. This is the factor for a first-order autoregressive process.
    """
    by_lag = [_median_difference(values, lag) for lag in range(1, min(MAX_LAG, len(values) // 4) + 1)]
    deviation = max(by_lag, default=0.0)
    floor = max(MIN_NOISE * abs(float(np.median(values))), float(np.finfo(np.float64).tiny))
    if deviation <= floor:
        return floor
    correlation = min(MAX_CORRELATION, 1 - (by_lag[0] / deviation) ** 2)
    return deviation * math.sqrt((1 + correlation) / (1 - correlation))


def _median_difference(values: Floats, lag: int) -> float:
    """Estimate the standard deviation of the noise in `values` from differences between values.

    The estimate is based on the median of the absolute differences between values that are `lag` positions apart.
    """
    return MEDIAN_TO_DEVIATION * float(np.median(np.abs(values[lag:] - values[:-lag]))) / math.sqrt(2)


def _without_outliers(values: Floats, noise: float) -> Floats:
    """Return a copy of `values` in which outliers are moved closer to their neighbours.

    The distance of a value from the median of its neighbours may be at most OUTLIER_NOISES times `noise`. A value with
    a larger distance is an outlier, and is moved until it has this distance.
    """
    result = np.empty(len(values))
    for index in range(len(values)):
        neighbours = values[max(0, index - OUTLIER_REACH) : index + OUTLIER_REACH + 1]
        median = float(np.median(neighbours))
        result[index] = min(max(values[index], median - OUTLIER_NOISES * noise), median + OUTLIER_NOISES * noise)
    return result


def _best_partition(values: Floats, penalty: float) -> tuple[list[int], float]:
    """Divide the values into consecutive segments with the smallest cost.

    The cost is the sum of squared deviations from the mean of each segment, plus `penalty` for each change from one
    segment to the next. Return the index at which each segment after the first one begins, and the cost.

    The loop computes `best[end]`, the smallest cost of the first `end` values. For each `end`, it tries every possible
    start of the last segment.
    """
    count = len(values)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    squares = np.concatenate(([0.0], np.cumsum(values**2)))
    best = np.full(count + 1, np.inf)
    best[0] = -penalty  # the first segment needs no change
    starts = np.zeros(count + 1, np.int64)
    for end in range(MIN_SEGMENT, count + 1):
        candidates = np.arange(end - MIN_SEGMENT + 1)
        total = sums[end] - sums[candidates]
        costs = best[candidates] + squares[end] - squares[candidates] - total**2 / (end - candidates) + penalty
        starts[end] = candidates[costs.argmin()]
        best[end] = costs.min()
    changes = []
    end = int(starts[count])
    while end:
        changes.append(end)
        end = int(starts[end])
    return changes[::-1], float(best[count])


def _line_cost(values: Floats) -> float:
    """Return the sum of the squared deviations from the straight line that fits best."""
    instants = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float((instants * values).sum() / (instants**2).sum())
    return float(((values - values.mean() - slope * instants) ** 2).sum())
