"""Estimates the full throughput of a server from the pilot of a sweep: closed loops of growing concurrency.

A closed loop with N requests in flight completes `X(N)` requests per second, and each request takes `N / X(N)` seconds
(Little's law). `X` grows with N until the server is saturated. A level of the pilot is one closed loop with a fixed
concurrency.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

FIRST_CONCURRENCY = 4
MAX_PILOT_CONCURRENCY = 1024
STEEP = 1.5
"""The next level has four times the concurrency if the last such step raised throughput by more than this factor."""
SATURATED = 1.06
"""Maximum factor per doubling of the concurrency by which the throughput of a saturated server grows."""
NEARLY_SATURATED = 1.2
"""Maximum as for SATURATED, but for a server that needs longer than MAX_LEVEL_S for another level."""
MAX_LEVEL_S = 12.0
WAVES = 2
"""The first responses of a closed loop arrive in waves, because all clients start together. A level ends after this
number of waves, and its rate is that of the last one."""
REMAINING = 0.3
"""Estimated growth of the throughput beyond the last level, as a share of the last growth per doubling."""
FULL = 0.97
"""Share of the largest throughput from which on a closed loop counts as full."""
NEAR_FULL = 0.9
"""Share of the largest throughput at which the response time is estimated."""


class PilotLevel(NamedTuple):
    """One level of a pilot: a closed loop with a fixed concurrency, and the throughput that it reached."""

    concurrency: int
    rate: float
    """Completed requests per second."""


def growth_per_doubling(before: PilotLevel, level: PilotLevel) -> float:
    """Return the factor by which the throughput grew per doubling of the concurrency, from `before` to `level`."""
    doublings = log2(level.concurrency / before.concurrency)
    return float((level.rate / before.rate) ** (1 / doublings))


def is_saturated(levels: Sequence[PilotLevel]) -> bool:
    """Return True if the pilot can end after `levels`. It ends in three cases:

    - The last level has the maximum concurrency, MAX_PILOT_CONCURRENCY.
    - The last level hardly raised the throughput (SATURATED).
    - The last level raised the throughput only a little (NEARLY_SATURATED), and the next level would take longer than
      MAX_LEVEL_S.
    """
    if not levels:
        return False
    if levels[-1].concurrency >= MAX_PILOT_CONCURRENCY:
        return True
    if len(levels) < 2:
        return False
    growth = growth_per_doubling(*levels[-2:])
    level_s = WAVES * next_concurrency(levels) / levels[-1].rate
    return growth < SATURATED or (growth < NEARLY_SATURATED and level_s > MAX_LEVEL_S)


def next_concurrency(levels: Sequence[PilotLevel]) -> int:
    """Return the concurrency of the next level of the pilot.

    The concurrency is four times that of the last level, or twice if the throughput now grows slowly. It never exceeds
    MAX_PILOT_CONCURRENCY.
    """
    if not levels:
        return FIRST_CONCURRENCY
    last = levels[-1].concurrency
    steep = len(levels) < 2 or growth_per_doubling(*levels[-2:]) > STEEP**0.5
    return min(MAX_PILOT_CONCURRENCY, last * (4 if steep else 2))


def full_rate(levels: Sequence[PilotLevel]) -> float:
    """Return the largest throughput of the levels, in requests per second."""
    return max(level.rate for level in levels)


def estimate(levels: Sequence[PilotLevel]) -> float:
    """Estimate the capacity in requests per second: the throughput that unlimited concurrency would reach."""
    growth = growth_per_doubling(*levels[-2:]) - 1 if len(levels) > 1 else 0.0
    return full_rate(levels) * (1 + REMAINING * max(0.0, growth))


def full_concurrency(levels: Sequence[PilotLevel]) -> float:
    """Return the smallest concurrency at which the throughput was at least FULL times the largest throughput."""
    full = full_rate(levels)
    return min(level.concurrency for level in levels if level.rate >= FULL * full)


def response_s(levels: Sequence[PilotLevel]) -> float:
    """Estimate the response time in seconds at the rate X, which is NEAR_FULL times the full throughput.

    `levels` are the closed loops of the pilot, each with a fixed concurrency N. X lies between the throughputs of two
    neighbouring levels. Between these levels, the response time is assumed to be a linear function `A + B * N`.
    Little's law states `N = X * (response time)`, so the response time at the rate X is `A / (1 - B * X)`. If the first
    level already reaches the rate X, the result is the response time of this level.
    """
    target = NEAR_FULL * full_rate(levels)
    upper = next(index for index, level in enumerate(levels) if level.rate >= target)
    above = levels[upper]
    above_s = above.concurrency / above.rate
    if upper == 0:
        return above_s
    below = levels[upper - 1]
    below_s = below.concurrency / below.rate
    slope_s = (above_s - below_s) / (above.concurrency - below.concurrency)
    base_s = below_s - slope_s * below.concurrency
    return min(above_s, max(below_s, base_s / max(1e-9, 1 - slope_s * target)))
