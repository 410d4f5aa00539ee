"""Exact percentiles from raw samples, how far to trust them, and nothing that assumes a distribution.

Percentiles interpolate linearly between order statistics (type 7 of Hyndman and Fan, "Sample quantiles in statistical
packages", 1996; numpy's default). Their intervals are order statistics too (David and Nagaraja, "Order Statistics",
2003, section 7.1): the number of samples below the true p-quantile is binomial(n, p) whatever the distribution is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.frame import Floats, Integers, sum_by_row

PERCENTILES: Mapping[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
WITH_INTERVAL = ("p50", "p90", "p95", "p99")
CONFIDENCE = 0.95
BLOCK = 1 << 20
DECIMALS = 9
"""Seconds are rounded to the nanosecond, which is how they were measured."""


def describe(samples: Floats, offsets: Integers | None = None) -> dict[str, Any]:
    """n, mean, std, min, max, percentiles, their 95 % intervals, and which percentiles are `thin`.

    `offsets` says which samples belong to one request (as in Frame), when there may be several per request: such
    samples resemble each other, and the intervals widen accordingly. Values are None where there is no sample; an
    interval's end is None where the sample has no order statistic far enough out to bound it.
    """
    count = len(samples)
    if count == 0:
        return {"n": 0, **dict.fromkeys(("mean", "std", "min", "max", *WITH_INTERVAL)), "ci95": {}, "thin": []}
    ordered = np.sort(samples)
    sizes = {name: effective_size(samples, offsets, share, ordered) for name, share in PERCENTILES.items()}
    thin = [name for name, share in PERCENTILES.items() if sizes[name] < samples_needed(share)]
    shown = [name for name in PERCENTILES if name in WITH_INTERVAL or name not in thin]
    return {
        "n": count,
        "mean": _rounded(float(samples.mean())),
        "std": _rounded(_deviation(samples)) if count > 1 else None,
        "min": _rounded(float(ordered[0])),
        "max": _rounded(float(ordered[-1])),
        **{name: _rounded(percentile(ordered, PERCENTILES[name])) for name in shown},
        "ci95": {name: _interval(ordered, PERCENTILES[name], sizes[name]) for name in WITH_INTERVAL},
        "thin": [name for name in thin if name in shown],
    }


def describe_adjusted(samples: Floats, failures: int) -> dict[str, Any]:
    """Percentiles when each of `failures` counts as infinitely slow; None stands for infinity, which JSON lacks."""
    ordered = np.sort(np.concatenate((samples, np.full(failures, np.inf))))
    values = {name: percentile(ordered, PERCENTILES[name]) for name in WITH_INTERVAL}
    finite = {name: _rounded(value) if math.isfinite(value) else None for name, value in values.items()}
    thin = [name for name in WITH_INTERVAL if len(ordered) < samples_needed(PERCENTILES[name])]
    return {"n": len(ordered), "failures": failures, **finite, "thin": thin}


def percentile(ordered: Floats, share: float) -> float:
    """The `share`-quantile of sorted samples by linear interpolation; NaN of none, and inf next to an inf."""
    if len(ordered) == 0:
        return math.nan
    position = share * (len(ordered) - 1)
    below = int(position)
    low, fraction = float(ordered[below]), position - below
    if fraction == 0 or below + 1 == len(ordered):
        return low
    high = float(ordered[below + 1])
    return high if math.isinf(high) else low + fraction * (high - low)


def samples_needed(share: float) -> int:
    """Samples from which on the `share`-quantile means something: 11, 64, 130, 662 and 6636 for p50 to p99.9.

    MLPerf's rule (mlcommons/inference, early stopping, at 99 % confidence): the smallest n for which the chance that
    fewer than two samples lie beyond the quantile is at most 1 %. That chance is q**n + n (1-q) q**(n-1).
    """
    count = 2
    while share**count + count * (1 - share) * share ** (count - 1) > 0.01:
        count += 1
    return count


def interval_ranks(count: int, share: float, confidence: float = CONFIDENCE) -> tuple[int | None, int | None]:
    """Ranks (from 0) of the two order statistics that enclose the `share`-quantile; None where there is none.

    With B binomial(count, share), the lower rank is the largest l with P(B < l) <= alpha / 2 (counted from 1) and the
    upper one the smallest u with P(B >= u) <= alpha / 2: each side misses with at most half of the error allowed.
    """
    first, chances = _binomial(count, share)
    below = np.cumsum(chances)  # P(B <= first + i)
    tail = (1 - confidence) / 2
    lower = first + int(np.searchsorted(below, tail, side="right"))  # P(B < lower) <= tail
    upper = first + int(np.searchsorted(below, 1 - tail, side="left")) + 1  # P(B >= upper) <= tail
    return (lower - 1 if lower >= 1 else None, upper - 1 if upper <= count else None)


def effective_size(samples: Floats, offsets: Integers | None, share: float, ordered: Floats) -> int:
    """How many independent samples these are worth for the `share`-quantile.

    For samples in groups the variance of F(q) is that of a ratio between groups (Woodruff, "Confidence intervals for
    medians and other position measures", 1952); F (1 - F) over that variance is the size of a sample of independent
    values that would be as exact. Without groups it is their number.
    """
    if offsets is None:
        return len(samples)
    groups = int(np.count_nonzero(np.diff(offsets)))
    within = samples <= percentile(ordered, share)
    reached = float(within.mean())
    residuals = sum_by_row(within, offsets) - reached * np.diff(offsets)
    variance = float(np.square(residuals).sum()) / len(samples) ** 2 * groups / max(1, groups - 1)
    if variance <= 0:
        return groups
    return max(1, min(len(samples), int(reached * (1 - reached) / variance)))


def dkw_margin(count: int, confidence: float = CONFIDENCE) -> float:
    """Half-width of the band that holds the whole true distribution function around the empirical one.

    sqrt(ln(2 / alpha) / (2 n)): Dvoretzky, Kiefer and Wolfowitz (1956) with the constant of Massart (1990).
    """
    return min(1.0, math.sqrt(math.log(2 / (1 - confidence)) / (2 * count))) if count else 1.0


def _deviation(samples: Floats) -> float:
    """Standard deviation of the population that they are a sample of, without a second array of their size."""
    mean = samples.mean()
    parts = (samples[first : first + BLOCK] - mean for first in range(0, len(samples), BLOCK))
    return math.sqrt(math.fsum(float(part @ part) for part in parts) / (len(samples) - 1))


def _interval(ordered: Floats, share: float, size: int) -> list[float | None]:
    """The order statistics around the quantile, widened to hold the interpolated figure where that lies outside."""
    lower, upper = interval_ranks(size, share)
    scale, figure = len(ordered) / size, percentile(ordered, share)
    low = None if lower is None else _rounded(min(figure, float(ordered[int(lower * scale)])))
    if upper is None:
        return [low, None]
    return [low, _rounded(max(figure, float(ordered[min(len(ordered), math.ceil((upper + 1) * scale)) - 1])))]


def _binomial(count: int, share: float) -> tuple[int, Floats]:
    """Chances of binomial(count, share) around its mean: the first value covered, and the chances from there on.

    From ratios of neighbours, in logarithms, then scaled to sum 1; what is cut off lies beyond 12 standard deviations.
    """
    spread = 12 * math.sqrt(count * share * (1 - share)) + 40
    first = max(0, int(count * share - spread))
    last = min(count, int(count * share + spread))
    values = np.arange(first, last, dtype=np.float64)
    steps = np.log((count - values) / (values + 1)) + math.log(share / (1 - share))
    logarithms = np.concatenate(([0.0], np.cumsum(steps)))
    chances = np.exp(logarithms - logarithms.max())
    return first, chances / chances.sum()


def _rounded(value: float) -> float:
    return round(value, DECIMALS)
