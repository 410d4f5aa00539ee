"""Finds the capacity of a server: the largest load at which it meets its objectives, from a few runs.

A run at one load gives the probability that the server is over its capacity there. The search uses nothing else of a
run. Percentiles of a queue near its limit are far from smooth in the load, but the side of a bound on which they lie is
monotone. So the capacity has a distribution over a logarithmic grid. Each run multiplies it by its probability above
its load, and by the complement below (probabilistic bisection: Horstein, "Sequential transmission using noiseless
feedback", 1963; Waeber, Frazier and Henderson, "Bisection search with noisy responses", 2013). The next load is the one
with the largest expected information (Kontsevich and Tyler, "Bayesian adaptive estimation of psychometric slope and
threshold", 1999).

The probability is that of a share of requests, with Jeffreys's prior (Brown, Cai and DasGupta, "Interval estimation for
a binomial proportion", 2001). Neighbouring requests wait in one queue, so n of them count as n divided by their
autocorrelation time (Sokal, "Monte Carlo methods in statistical mechanics", 1997, section 3). The longest
autocorrelation time at several bounds is used, because a bound that few requests violate shows no correlation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from loadgen.analysis import stats
from loadgen.analysis.frame import Booleans, Floats, Frame, Integers, sum_by_row
from loadgen.analysis.objectives import LATENCIES, Objective, ObjectiveError
from loadgen.analysis.run.record import State as RequestState
from loadgen.analysis.slo import bound_scale
from loadgen.analysis.summary import Summary

MIN_DOUBT = 0.01
"""Minimum distance of a probability from 0 and 1: however clear a run is, the next one may differ."""
GRID_STEP = 0.005
"""Relative distance of neighbouring loads in the grid."""
GRID_THINNING = 4
"""Cells of the grid that are combined into one when the next load is chosen."""
GROWTH = 4.0
"""Factor on the load until a load is too large."""
RUN_SPREAD = 0.05
"""Relative distance from the capacity within which a run may be on the wrong side of it."""
NEAR = 0.2
"""Relative distance within which two runs give about the same information."""
MAX_CARRIED_FACTOR = 1.5
"""An overloaded server, even one that preempts requests, completes at least the capacity divided by this factor."""
CARRIED_DOUBT = 0.01
"""Probability that MAX_CARRIED_FACTOR is exceeded."""
PREDICTION_SPREAD = 0.2
"""Typical relative error of a predicted capacity."""
MAX_INCOMPLETE = 0.01
"""Maximum share of incomplete requests, if no objective limits them."""
QUANTILES = (0.5, 0.75, 0.9)
"""Quantiles of the latencies at which the autocorrelation is evaluated, in addition to the bound of the objective."""
SOKAL_WINDOW = 5
"""Sokal's window in autocorrelation times."""
SHORT_RUN_FACTOR = 3.0
"""Factor on the autocorrelation time, because runs of a minute do not show the rare long waves of a queue. With a
factor of 2, `benchmarks.sweep` found the capacity in 92 of 100 intervals that should contain it in 95."""
TAIL = 0.75
"""Values above this quantile are assumed to have an exponential tail, as waiting times in queues do. The tail is used
if few values miss a bound that lies far beyond the quantile."""
MIN_MISSES = 5
"""Effective number of misses from which on they are counted instead of extrapolated from the tail."""
LIMITED_STATES: tuple[RequestState, ...] = ("truncated", "failed", "rejected", "dropped")
"""States of which an objective allows few requests. Of complete requests it requires many."""
HINT = "Use a figure that gets worse with load: ttft.p99 < 500ms, complete >= 99.9%, attainment >= 95%."
State = Literal["found", "open", "at least", "below"]


class LoadObservation(NamedTuple):
    """The result of a run at one load."""

    load: float
    over: float
    """Probability that the server violates an objective at this load."""
    carried: float | None = None
    """Completed requests per second, if the server did not keep up with the load: about its maximum."""


class Capacity(NamedTuple):
    """The largest load at which all objectives hold.

    The state is `found`, `open` if the interval is wider than requested, `below` if the capacity is below the lowest
    load, and `at least` if it is above the highest."""

    state: State
    capacity: float | None
    low: float
    high: float | None


class Search:
    """Searches the capacity between two loads. A predicted capacity influences the choice of loads, not the result."""

    def __init__(
        self,
        min_load: float,
        max_load: float,
        *,
        confidence: float = 0.95,
        precision: float = 0.1,
        whole: bool = False,
        predicted: float | None = None,
    ) -> None:
        self._min_load = min_load
        self._max_load = max_load
        self._whole = whole
        self._predicted = predicted
        self._tail = (1 - confidence) / 2
        self._precision = precision
        self._grid = np.geomspace(min_load, max_load, max(3, math.ceil(math.log(max_load / min_load) / GRID_STEP)))

    def capacity(self, runs: Sequence[LoadObservation]) -> Capacity:
        """Return the capacity as known from these runs."""
        met = [run.load for run in runs if run.over <= 0.5]
        violated = [run.load for run in runs if run.over > 0.5]
        if not met:
            if violated and min(violated) <= self._min_load:
                return Capacity("below", 0.0, 0.0, min(violated))
            return Capacity("open", None, 0.0, min(violated, default=None))
        if not violated:
            state: State = "at least" if max(met) >= self._max_load else "open"
            return Capacity(state, max(met), max(met), None)
        low, middle, high = self._quantiles(self._weights(runs), self._tail, 0.5, 1 - self._tail)
        if self._whole:
            low, high = math.floor(low), math.ceil(high)
            middle = math.floor(middle)
        precise = high - low <= max(2 * self._precision * middle, float(self._whole))
        return Capacity("found" if precise else "open", middle, low, high)

    def next_load(self, runs: Sequence[LoadObservation], start: float) -> float | None:
        """Return the load to try next; None if the capacity is known well enough."""
        if runs and self.capacity(runs).state != "open":
            return None
        met = [run.load for run in runs if run.over <= 0.5]
        violated = [run for run in runs if run.over > 0.5]
        if self._predicted is None and not violated:
            load = min(self._max_load, GROWTH * max(met)) if met else start
        elif self._predicted is None and not met and not any(run.carried for run in violated):
            load = max(self._min_load, min(run.load for run in violated) / GROWTH)
        else:
            load = self._informative_load(runs, bracketed=bool(met and violated))
        return float(max(1, round(load))) if self._whole else float(f"{load:.3g}")

    def _informative_load(self, runs: Sequence[LoadObservation], *, bracketed: bool) -> float:
        """Return the load with the largest expected information.

        If the capacity is `bracketed` by runs on both sides, a distant end of its interval is tried first, because
        a run there has a clear result."""
        weights = self._weights(runs) * self._hints(runs)
        low, middle, high = self._quantiles(weights, self._tail, 0.5, 1 - self._tail)
        distant = None
        if bracketed and high > 2 * middle:
            distant = 1.5 * middle
        elif bracketed and low < middle / 2:
            distant = middle / 1.5
        # An earlier run near this load would have closed the interval if it could.
        if distant and not any(abs(math.log(run.load / distant)) < NEAR for run in runs):
            return distant
        return self._most_informative(weights)

    def _weights(self, runs: Sequence[LoadObservation]) -> Floats:
        """Return the distribution of the capacity over the grid."""
        # The prior is flat in the logarithm up to the largest load so far, and falls beyond. Otherwise, the loads that
        # were never tried would have the largest weight.
        weights = 1 / np.maximum(self._grid, max((run.load for run in runs), default=1.0))
        for load, over, carried in runs:
            weights *= self._likelihood(load, over)
            if carried is not None:
                weights *= self._likelihood(MAX_CARRIED_FACTOR * carried, 1 - CARRIED_DOUBT)
        return np.asarray(weights / weights.sum())

    def _likelihood(self, load: float, over: float) -> Floats:
        """Return the likelihood of each capacity, if a load is over the capacity with this probability."""
        probability = min(1 - MIN_DOUBT, max(MIN_DOUBT, over))
        return np.where(self._grid < load * (1 - 1e-9), probability, 1 - probability)

    def _hints(self, runs: Sequence[LoadObservation]) -> Floats:
        """Return weights that favour likely capacities without being evidence.

        The capacity is unlikely to be far below the throughput of an overload, or far from the prediction."""
        hints = np.ones(len(self._grid))
        carried = [run.carried for run in runs if run.carried]
        if carried:
            hints[self._grid < min(carried) / 2] = CARRIED_DOUBT
        if self._predicted is not None:
            deviations = np.log(self._grid / self._predicted) / PREDICTION_SPREAD
            largest = max((run.load for run in runs), default=1.0)
            # The prediction replaces the prior of `_weights`, so the prior is divided out.
            hints *= np.maximum(np.exp(-(deviations**2) / 2), MIN_DOUBT) * np.maximum(self._grid, largest)
        return hints

    def _quantiles(self, weights: Floats, *shares: float) -> list[float]:
        cumulative = np.cumsum(weights / weights.sum())
        indices = np.minimum(np.searchsorted(cumulative, shares), len(cumulative) - 1)
        return [float(load) for load in self._grid[indices]]

    def _most_informative(self, weights: Floats) -> float:
        """Return the load whose result is expected to give the most bits about the capacity."""
        from scipy.special import ndtr

        loads = np.array(self._quantiles(weights, *np.linspace(0.01, 0.99, 50)))
        firsts = np.arange(0, len(weights), GRID_THINNING)
        over = ndtr(np.log(loads[:, None] / self._grid[None, firsts]) / RUN_SPREAD)
        shares = np.add.reduceat(weights, firsts) / weights.sum()
        information = _entropy_bits(over @ shares) - _entropy_bits(over) @ shares
        return float(loads[int(np.argmax(information))])


def check_objectives(objectives: Iterable[Objective]) -> None:
    """Raise ObjectiveError for objectives that a larger load does not violate."""
    for objective in objectives:
        upper_bound = objective.figure in LATENCIES or objective.figure in LIMITED_STATES
        gets_worse = ("<" if upper_bound else ">") in objective.comparison
        if not gets_worse or objective.figure not in {*LATENCIES, *LIMITED_STATES, "complete", "attainment"}:
            raise ObjectiveError(f"--objective {objective.text!r}: a larger load does not violate it", HINT)


def chance_over(objectives: Sequence[Objective], bounds: Sequence[Objective], frame: Frame, summary: Summary) -> float:
    """Return the probability that the load of this run violates one of the objectives, which must be valid.

    An incomplete request is infinitely slow. More than MAX_INCOMPLETE incomplete requests violate any load, except
    those in states that an objective names: with `rejected < 20%` a fifth of the requests may be rejected.
    """
    requests, chance_met = summary.requests, 1.0
    figures = {objective.figure for objective in objectives}
    if "complete" not in figures:
        allowed = sum(getattr(requests, state) for state in LIMITED_STATES if state in figures)
        chance_met = float(requests.complete + allowed >= (1 - MAX_INCOMPLETE) * requests.planned)
    for objective in objectives:
        chance_met *= 1 - _chance_violated(objective, bounds, frame)
    return 1 - chance_met


def chance_of_share(missed: Floats, samples: Floats, max_share: float, values: Floats, bound: float) -> float:
    """Return the probability that in the long run more than `max_share` of all samples miss a bound.

    Each request has `samples` samples, of which `missed` miss the bound, and the mean value `values`. If hardly any
    sample misses the bound, the tail of the values decides."""
    from scipy.special import betaincc, btdtrib, gammainc

    share = float(missed.sum() / samples.sum())
    size = len(missed) / autocorrelation_time(values, bound)
    edge = float(np.quantile(values, TAIL, method="lower"))
    if share * size >= MIN_MISSES or max_share > (1 - TAIL) / 2 or edge >= bound:
        # The prior is Beta(0.5, b) with its median at `max_share`, so that without samples the probability is 50 %.
        return float(betaincc(share * size + 0.5, (1 - share) * size + btdtrib(0.5, 0.5, max_share), max_share))
    beyond = values[(values > edge) & np.isfinite(values)] - edge
    if not len(beyond):
        return float(share > max_share)
    depth = (bound - edge) / float(beyond.mean())
    needed_depth = math.log((1 - TAIL) / max_share)
    tail_size = (1 - TAIL) * size / (1 + TAIL / needed_depth**2)  # The share of the tail is as uncertain as its depth.
    return float(gammainc(tail_size, tail_size * needed_depth / depth))


def autocorrelation_time(values: Floats, *bounds: float) -> float:
    """Return how many consecutive values count as one independent value.

    This is the largest autocorrelation time of being above or below one of these bounds or of some quantiles."""
    levels = [*bounds, *(np.quantile(values, QUANTILES, method="lower"))]
    return SHORT_RUN_FACTOR * max(_integrated_time(values > level) for level in levels)


def _integrated_time(above: Booleans) -> float:
    """Return the integrated autocorrelation time, up to the first lag that is SOKAL_WINDOW times as large."""
    centred = above - above.mean()
    spectrum = np.abs(np.fft.rfft(centred, 2 * len(above))) ** 2
    covariance = np.fft.irfft(spectrum)[: len(above)]
    if covariance[0] <= 0:
        return 1.0
    times = 2 * np.cumsum(covariance / covariance[0]) - 1
    enough = np.flatnonzero(np.arange(len(times)) >= SOKAL_WINDOW * times)
    return max(1.0, float(times[enough[0] if len(enough) else -1]))


def _chance_violated(objective: Objective, bounds: Sequence[Objective], frame: Frame) -> float:
    """Return the probability that the server violates one objective at this load."""
    rows = np.flatnonzero(frame.inside)
    rows = rows[np.argsort(frame.due_ns[rows], kind="stable")]
    if not frame.complete[rows].any():
        return 1.0
    if objective.figure in LATENCIES:
        return _chance_latency_violated(objective, frame, rows)
    # A value above 1 marks a request that misses.
    values: Floats
    if objective.figure == "attainment":
        values = bound_scale(frame, bounds)[rows]
    elif objective.figure in LIMITED_STATES:
        values = np.where(frame.ended_as(objective.figure)[rows], 2.0, 0.0)
    else:
        values = np.where(frame.complete[rows], 0.0, 2.0)
    max_share = objective.bound if objective.unit == "share" else objective.bound / len(rows)
    if objective.figure not in LIMITED_STATES:
        max_share = 1 - max_share
    return chance_of_share(np.where(values > 1, 1.0, 0.0), np.ones(len(rows)), max_share, values, 1.0)


def _chance_latency_violated(objective: Objective, frame: Frame, rows: Integers) -> float:
    """Return the probability that an objective on a latency is violated. `rows` are in order of their due times."""
    all_values, all_missed, all_samples = _per_request(objective, frame)
    values = all_values[rows]
    missed, samples = all_missed[rows], all_samples[rows]
    share = objective.percentile
    if share is not None:
        return chance_of_share(missed, samples, 1 - share, values, objective.bound)
    known = np.isfinite(values) & (samples > 0)
    if objective.statistic == "min":
        return float(not objective.satisfied_by(float(values[known].min())))
    if objective.statistic == "max":
        return float(not objective.satisfied_by(float(values[known].max())))
    mean = float(np.average(values[known], weights=samples[known]))
    size = known.sum() / autocorrelation_time(values[known])
    error = float(values[known].std()) / math.sqrt(max(1.0, size - 1))
    if not error:
        return float(mean > objective.bound)
    return 1 - stats.student_cdf((objective.bound - mean) / error, max(1.0, size - 1))


def _per_request(objective: Objective, frame: Frame) -> tuple[Floats, Floats, Floats]:
    """Return per row: the mean latency, the number of samples that violate the objective, and the number of samples.

    An incomplete row has the mean number of samples, all infinitely slow. A row without the latency has no samples."""
    metric, sampled = LATENCIES[objective.figure], frame.sampled
    samples, offsets = metric.values(frame), metric.groups(frame)
    if offsets is None:
        offsets = np.concatenate(([0], np.cumsum(~np.isnan(metric.rows(frame)[sampled]))))
    counts = np.diff(offsets)
    too_slow = samples > objective.bound if objective.comparison == "<=" else samples >= objective.bound
    means = np.divide(sum_by_row(samples, offsets), counts, out=np.zeros(len(counts)), where=counts > 0)
    mean_count = float(counts.mean()) if len(counts) else 1.0
    value = np.full(len(frame), math.inf)
    missed = np.full(len(frame), mean_count)
    number = np.full(len(frame), mean_count)
    value[sampled] = means
    missed[sampled] = sum_by_row(too_slow, offsets)
    number[sampled] = counts
    return value, missed, number


def _entropy_bits(chance: Floats) -> Floats:
    """Return the entropy of an outcome with this probability, in bits."""
    clipped = np.clip(chance, 1e-12, 1 - 1e-12)
    return np.asarray(-(clipped * np.log2(clipped) + (1 - clipped) * np.log2(1 - clipped)))
