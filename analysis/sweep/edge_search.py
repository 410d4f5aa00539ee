"""Finds the largest request rate that a server keeps up with.

The search starts from a pilot, which has measured the full throughput of the server with closed loops. The capacity is
near this throughput. Runs slightly below and slightly above it confirm the estimate or correct it. Bayes' rule combines
the pilot and the runs into a distribution of the capacity over a logarithmic grid of rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.special import ndtr

from loadgen.analysis.frame import Floats
from loadgen.analysis.sweep.capacity_search import MIN_DOUBT, Capacity, LoadObservation

GRID_STEP = 0.0025
"""Relative difference between neighbouring loads of the grid."""
GRID_FACTOR = 64.0
"""The grid reaches from the pilot's throughput divided by this factor to the throughput multiplied by it."""
PILOT_SPREAD = 0.08
"""Typical relative error of the pilot's throughput as an estimate of the capacity."""
ROUGH_SPREAD = 0.4
"""Typical relative error of a pilot that went wrong."""
PILOT_DOUBT = 0.05
"""Probability that the pilot went wrong."""
EDGE_SPREAD = 0.025
"""Relative standard deviation of the load that a run judges, because a server fills slowly near its capacity."""
LOW_EDGE, HIGH_EDGE = 0.93, 1.1
"""Loads of the first two runs, relative to the pilot's throughput."""
EDGE = 1.08
"""Factor between the estimated capacity and the loads of later runs above and below it."""
NARROW_EDGE = 1.055
"""Factor between the estimate and the loads that narrow the interval, if there is time left."""
NARROW_ENOUGH = 0.075
"""Distance between the estimate and an end of the interval that is not narrowed, as a logarithm of the ratio."""
NEAR = 0.03
"""Relative difference between two loads below which their runs give the same information."""
CLEAR = 0.05
"""A run is clear if its probability is below this value, or above 1 minus this value."""


class EdgeSearch:
    """Searches for the largest request rate that a server keeps up with.

    `estimate` is a first estimate of this rate in requests per second. It comes from the pilot: short closed loops that
    run before the search.
    """

    def __init__(self, estimate: float, *, confidence: float = 0.95, precision: float = 0.1) -> None:
        self._estimate = estimate
        self._tail = (1 - confidence) / 2
        self._precision = precision
        points = int(2 * np.log(GRID_FACTOR) / GRID_STEP)
        self._grid = estimate * np.geomspace(1 / GRID_FACTOR, GRID_FACTOR, points)

    def capacity(self, runs: Sequence[LoadObservation]) -> Capacity:
        """Return the estimated capacity with its confidence interval, from the pilot's estimate and the results in
        `runs`.
        """
        low, middle, high = self._quantiles(runs)
        carried = any(run.over < CLEAR for run in runs)
        exceeded = any(run.over > 1 - CLEAR for run in runs)
        precise = (high - low) / 2 <= self._precision * middle
        return Capacity("found" if carried and exceeded and precise else "open", middle, low, high)

    def next_load(self, runs: Sequence[LoadObservation], *, time_left: bool = False) -> float | None:
        """Return the rate of the next run, or None if the search has ended.

        The search ends when the confidence interval is as narrow as requested. With `time_left`, it continues to narrow
        the interval.
        """
        low, middle, high = self._quantiles(runs)
        carried = max((run.load for run in runs if run.over < CLEAR), default=None)
        exceeded = min((run.load for run in runs if run.over > 1 - CLEAR), default=None)
        load: float | None
        if not runs:
            load = LOW_EDGE * self._estimate
        elif carried is not None and exceeded is not None:
            found = self.capacity(runs).state == "found"
            if found:
                load = self._narrowing_load(runs, low, middle, high) if time_left else None
            else:
                load = self._between(runs, carried, exceeded) or self._confirming_load(runs, carried, exceeded)
        elif exceeded is None:
            load = self._new_load(runs, HIGH_EDGE * self._estimate if len(runs) == 1 else EDGE * middle, EDGE)
        else:
            load = self._new_load(runs, middle / EDGE, 1 / EDGE)
        return None if load is None else float(f"{load:.3g}")

    def _between(self, runs: Sequence[LoadObservation], carried: float, exceeded: float) -> float | None:
        """Return the middle of the widest gap between the tested loads from `carried` to `exceeded`.

        `carried` is the largest load with which the server clearly kept up, and `exceeded` the smallest load with which
        it clearly did not. Return None if every gap is too narrow for another run to give new information.
        """
        inside = sorted({run.load for run in runs if min(carried, exceeded) <= run.load <= max(carried, exceeded)})
        ratio, lower = max((upper / lower, lower) for lower, upper in pairwise(inside))
        return lower * ratio**0.5 if ratio > 1 + NEAR else None

    def _confirming_load(self, runs: Sequence[LoadObservation], carried: float, exceeded: float) -> float | None:
        """Return a load whose measurement may narrow the capacity's confidence interval, or None if none is needed.

        `carried` is the largest load at which the server clearly kept up in `runs`, and `exceeded` is the smallest load
        at which it clearly did not. The confidence interval may still be much wider than the range between these two
        loads:

        - If the upper end of the interval is far above `exceeded`, the result is a load just above `exceeded`.
        - Otherwise, if the lower end of the interval is far below `carried`, the result is a load just below `carried`.
        """
        low, _, high = self._quantiles(runs)
        if high > exceeded * EDGE:
            return self._new_load(runs, exceeded * (1 + NEAR), 1 + NEAR)
        return self._new_load(runs, carried / (1 + NEAR), 1 / (1 + NEAR)) if low < carried / EDGE else None

    def _narrowing_load(self, runs: Sequence[LoadObservation], low: float, middle: float, high: float) -> float | None:
        """Return a load whose run may narrow the confidence interval of the capacity, or None if there is no such load.

        The interval extends from `low` to `high`, and `middle` is the estimated capacity. Two loads are possible:

        - `middle * NARROW_EDGE`, slightly above the estimate, unless `high` is already close to `middle`.
        - `middle / NARROW_EDGE`, slightly below the estimate, unless `low` is already close to `middle`.

        At these loads, a run usually still shows clearly whether the server is overloaded. A load near that of an
        earlier run in `runs` is not returned.
        """
        for end, load in ((high, middle * NARROW_EDGE), (low, middle / NARROW_EDGE)):
            untried = all(abs(np.log(run.load / load)) > NEAR / 2 for run in runs)
            if untried and abs(np.log(end / middle)) > NARROW_ENOUGH:
                return load
        return None

    def _new_load(self, runs: Sequence[LoadObservation], load: float, factor: float) -> float:
        """Return a load that no run in `runs` has, not even approximately.

        The function starts with `load`, and multiplies it by `factor` until the result differs clearly from the loads
        of all runs.
        """
        while any(abs(np.log(run.load / load)) < NEAR for run in runs):
            load *= factor
        return load

    def _quantiles(self, runs: Sequence[LoadObservation]) -> tuple[float, float, float]:
        cumulative = np.cumsum(self._weights(runs))
        low, middle, high = np.interp([self._tail, 0.5, 1 - self._tail], cumulative / cumulative[-1], self._grid)
        return float(low), float(middle), float(high)

    def _weights(self, runs: Sequence[LoadObservation]) -> Floats:
        """Return, for each load of the search grid, the probability that it is the capacity, given these runs."""
        distance = np.log(self._grid / self._estimate)
        near = np.exp(-((distance / PILOT_SPREAD) ** 2) / 2)
        rough = np.exp(-np.abs(distance) / ROUGH_SPREAD)
        weights = (1 - PILOT_DOUBT) * near / near.sum() + PILOT_DOUBT * rough / rough.sum()
        for run in runs:
            over = min(1 - MIN_DOUBT, max(MIN_DOUBT, run.over))
            below = ndtr(np.log(run.load / self._grid) / EDGE_SPREAD)  # capacities below the load
            weights = weights * (over * below + (1 - over) * (1 - below))
        return np.asarray(weights / weights.sum())
