"""How much load a server carries while it keeps to objectives, from a few runs at different loads.

A run at one load says with some chance that the server is over its capacity there. That chance is all that is taken
from it: percentiles of a queue near its limit are far from smooth in the load, but on which side of a bound they lie is
monotone. So the capacity has a distribution over a logarithmic grid, which each run multiplies by its chance above its
load and by the rest below (probabilistic bisection: Horstein, "Sequential transmission using noiseless feedback", 1963;
Waeber, Frazier and Henderson, "Bisection search with noisy responses", 2013). The next load is the one that is expected
to tell most (Kontsevich and Tyler, "Bayesian adaptive estimation of psychometric slope and threshold", 1999).

The chance is that of a share of requests, with Jeffreys's prior (Brown, Cai and DasGupta, "Interval estimation for a
binomial proportion", 2001). Neighbours wait in one queue, so n of them are worth fewer: n over their autocorrelation
time (Sokal, "Monte Carlo methods in statistical mechanics", 1997, section 3), the longest of it at several bounds, as
one that few requests break shows none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from loadgen.analysis import stats
from loadgen.analysis.frame import Booleans, Floats, Frame, sum_by_row
from loadgen.analysis.objectives import LATENCIES, Objective, ObjectiveError
from loadgen.analysis.run.record import State as RequestState
from loadgen.analysis.slo import bound_scale
from loadgen.analysis.summary import Summary

DOUBT = 0.01
"""However clear a run is, the next may differ: no chance is nearer to 0 or 1."""
STEP = 0.005
"""Of the grid, as a share."""
THINNED = 4
"""So many cells of it are one where the next load is chosen."""
GROWTH = 4.0
"""Of the load, until one is too much."""
SPREAD = 0.05
"""About how near to the capacity, as a share, a run may take it for the other side."""
NEAR = 0.2
"""As a share: a run so near to another tells much the same."""
CARRIED_MOST, CARRIED_DOUBT = 1.5, 0.01
"""What comes back under too much load, engines that preempt included, is hardly less than the capacity by more."""
TRUSTED = 0.2
"""About how far off, as a share, a predicted capacity may be."""
INCOMPLETE_MOST = 0.01
"""Of the requests, where no objective speaks of complete ones."""
QUANTILES = (0.5, 0.75, 0.9)
"""Bounds at which the autocorrelation of latencies is looked at, beside the objective's own."""
WINDOWS, SHORT = 5, 3.0
"""Sokal's window; and by how much more than they show runs of a minute are alike, of a queue that has rare long waves:
with 2, `benchmarks.sweep` found the capacity in 92 of 100 intervals that should hold it in 95."""
TAIL, MISSES_LEAST = 0.75, 5
"""Values above this quantile are taken for an exponential tail, as waiting times in queues have, where fewer than so
many miss a bound that is far beyond it."""
FEW: tuple[RequestState, ...] = ("truncated", "failed", "rejected", "dropped")
"""States of which an objective allows some; of complete requests it wants many."""
HINT = "Name what gets worse with load: ttft.p99 < 500ms, tpot.p50 < 50ms, complete >= 99.9%, attainment >= 95%."
State = Literal["found", "open", "at least", "below"]


class LoadObservation(NamedTuple):
    """What one run says of its load."""

    load: float
    over: float
    """The chance that the server breaks an objective at this load."""
    carried: float | None = None
    """Of a load that it did not keep up with, how much came back: about what it can."""


class Capacity(NamedTuple):
    """The largest load at which all objectives hold; `open` where it is less exact than asked, `below` the lowest load,
    `at least` the highest."""

    state: State
    capacity: float | None
    low: float
    high: float | None


class Search:
    """The capacity between two loads. A predicted one chooses what is tried, and is no evidence."""

    def __init__(
        self,
        least: float,
        most: float,
        *,
        confidence: float = 0.95,
        precision: float = 0.1,
        whole: bool = False,
        predicted: float | None = None,
    ) -> None:
        self._least, self._most, self._whole, self._predicted = least, most, whole, predicted
        self._tail, self._precision = (1 - confidence) / 2, precision
        self._grid = np.geomspace(least, most, max(3, math.ceil(math.log(most / least) / STEP)))

    def capacity(self, evidence: Sequence[LoadObservation]) -> Capacity:
        """What is known after these runs."""
        retained = [each.load for each in evidence if each.over <= 0.5]
        broken = [each.load for each in evidence if each.over > 0.5]
        if not retained:
            below = bool(broken) and min(broken) <= self._least
            return Capacity("below" if below else "open", 0.0 if below else None, 0.0, min(broken, default=None))
        if not broken:
            state: State = "at least" if max(retained) >= self._most else "open"
            return Capacity(state, max(retained), max(retained), None)
        low, middle, high = self._quantiles(self._weights(evidence), self._tail, 0.5, 1 - self._tail)
        if self._whole:
            low, middle, high = math.floor(low), math.floor(middle), math.ceil(high)
        exact = high - low <= max(2 * self._precision * middle, float(self._whole))
        return Capacity("found" if exact else "open", middle, low, high)

    def next_load(self, evidence: Sequence[LoadObservation], start: float) -> float | None:
        """The load to try next; None when the capacity is known well enough."""
        if evidence and self.capacity(evidence).state != "open":
            return None
        retained = [each.load for each in evidence if each.over <= 0.5]
        broken = [each for each in evidence if each.over > 0.5]
        if self._predicted is None and not broken:
            load = min(self._most, GROWTH * max(retained)) if retained else start
        elif self._predicted is None and not retained and not any(each.carried for each in broken):
            load = max(self._least, min(each.load for each in broken) / GROWTH)
        else:
            weights = self._weights(evidence) * self._hints(evidence)
            low, middle, high = self._quantiles(weights, self._tail, 0.5, 1 - self._tail)
            load, far = self._most_telling(weights), 0.0
            if retained and broken and high > 2 * middle:  # an end that is far off is closed first: such a run is clear
                far = 1.5 * middle
            elif retained and broken and low < middle / 2:
                far = middle / 1.5
            if far and not any(abs(math.log(each.load / far)) < NEAR for each in evidence):  # or it would have been
                load = far
        return float(max(1, round(load))) if self._whole else float(f"{load:.3g}")

    def _weights(self, evidence: Sequence[LoadObservation]) -> Floats:
        # Flat in the logarithm up to the largest load tried; beyond, all that was never tried would weigh most.
        weights = 1 / np.maximum(self._grid, max((each.load for each in evidence), default=1.0))
        for load, over, carried in evidence:
            told = [(load, over)] if carried is None else [(load, over), (CARRIED_MOST * carried, 1 - CARRIED_DOUBT)]
            for where, chance in told:
                likely = min(1 - DOUBT, max(DOUBT, chance))
                weights *= np.where(self._grid < where * (1 - 1e-9), likely, 1 - likely)
        return np.asarray(weights / weights.sum())

    def _hints(self, evidence: Sequence[LoadObservation]) -> Floats:
        """Where the capacity is likely, by what is no evidence: not far below the throughput of an overload, and
        about where it was predicted."""
        hints = np.ones(len(self._grid))
        if carried := [each.carried for each in evidence if each.carried]:
            hints[self._grid < min(carried) / 2] = CARRIED_DOUBT
        if self._predicted is not None:
            off = np.log(self._grid / self._predicted) / TRUSTED
            largest = max((each.load for each in evidence), default=1.0)  # in place of what was likely before
            hints *= np.maximum(np.exp(-(off**2) / 2), DOUBT) * np.maximum(self._grid, largest)
        return hints

    def _quantiles(self, weights: Floats, *shares: float) -> list[float]:
        reached = np.cumsum(weights / weights.sum())
        places = np.minimum(np.searchsorted(reached, shares), len(reached) - 1)
        return [float(each) for each in self._grid[places]]

    def _most_telling(self, weights: Floats) -> float:
        """The load of which the outcome is expected to narrow the capacity most, in bits."""
        from scipy.special import ndtr

        loads = np.array(self._quantiles(weights, *np.linspace(0.01, 0.99, 50)))
        firsts = np.arange(0, len(weights), THINNED)
        over = ndtr(np.log(loads[:, None] / self._grid[None, firsts]) / SPREAD)
        shares = np.add.reduceat(weights, firsts) / weights.sum()
        told = _bits(over @ shares) - _bits(over) @ shares
        return float(loads[int(np.argmax(told))])


def check_objectives(objectives: Iterable[Objective]) -> None:
    """Raises ObjectiveError for objectives that more load does not break."""
    for objective in objectives:
        worse = (
            "<" in objective.comparison
            if objective.figure in LATENCIES or objective.figure in FEW
            else ">" in objective.comparison
        )
        if not worse or objective.figure not in {*LATENCIES, *FEW, "complete", "attainment"}:
            raise ObjectiveError(f"--objective {objective.text!r}: more load does not break it", HINT)


def chance_over(objectives: Sequence[Objective], bounds: Sequence[Objective], frame: Frame, summary: Summary) -> float:
    """Return the chance that the load of this run breaks one of the objectives, which are usable.

    A request that is not complete is infinitely slow. More than INCOMPLETE_MOST of them break every load, except those
    in states that an objective names itself: with `rejected < 20%` a fifth of the requests may be rejected.
    """
    requests, retained = summary.requests, 1.0
    named = {objective.figure for objective in objectives}
    if "complete" not in named:
        allowed = sum(getattr(requests, state) for state in FEW if state in named)
        retained = float(requests.complete + allowed >= (1 - INCOMPLETE_MOST) * requests.planned)
    for objective in objectives:
        retained *= 1 - _broken(objective, bounds, frame)
    return 1 - retained


def chance_of_share(missed: Floats, of: Floats, most: float, values: Floats, bound: float) -> float:
    """The chance that more than the share `most` of all samples miss a bound in the long run, where request after
    request had `missed` of so many, and `values` on average. Where hardly any missed it, the tail tells by how much."""
    from scipy.special import betaincc, btdtrib, gammainc

    share, size = float(missed.sum() / of.sum()), len(missed) / autocorrelation_time(values, bound)
    edge = float(np.quantile(values, TAIL, method="lower"))
    if share * size >= MISSES_LEAST or most > (1 - TAIL) / 2 or edge >= bound:
        return float(betaincc(share * size + 0.5, (1 - share) * size + btdtrib(0.5, 0.5, most), most))
    beyond = values[(values > edge) & np.isfinite(values)] - edge
    if not len(beyond):
        return float(share > most)
    depth, needed = (bound - edge) / float(beyond.mean()), math.log((1 - TAIL) / most)
    tail = (1 - TAIL) * size / (1 + TAIL / needed**2)  # its share of all is as uncertain as its depth
    return float(gammainc(tail, tail * needed / depth))


def autocorrelation_time(values: Floats, *bounds: float) -> float:
    """How many neighbours are worth one independent value: the most of it above and below these bounds and quantiles of
    the values themselves."""
    levels = [*bounds, *(np.quantile(values, QUANTILES, method="lower"))]
    return SHORT * max(map(_correlated, (values > level for level in levels)))


def _correlated(high: Booleans) -> float:
    """Sokal's window: so many lags that they are five times the sum over them."""
    centred = high - high.mean()
    spectrum = np.abs(np.fft.rfft(centred, 2 * len(high))) ** 2
    covariance = np.fft.irfft(spectrum)[: len(high)]
    if covariance[0] <= 0:
        return 1.0
    times = 2 * np.cumsum(covariance / covariance[0]) - 1
    enough = np.flatnonzero(np.arange(len(times)) >= WINDOWS * times)
    return max(1.0, float(times[enough[0] if len(enough) else -1]))


def _broken(objective: Objective, bounds: Sequence[Objective], frame: Frame) -> float:
    """The chance that the server breaks one objective at this load."""
    rows = np.flatnonzero(frame.inside)
    rows = rows[np.argsort(frame.due_ns[rows], kind="stable")]
    if not frame.complete[rows].any():
        return 1.0
    if objective.figure not in LATENCIES:
        values: Floats
        if objective.figure == "attainment":
            values = bound_scale(frame, bounds)[rows]
        elif objective.figure in FEW:
            values = np.where(frame.ended_as(objective.figure)[rows], 2.0, 0.0)
        else:
            values = np.where(frame.complete[rows], 0.0, 2.0)
        maximum = objective.bound if objective.unit == "share" else objective.bound / len(rows)
        maximum = maximum if objective.figure in FEW else 1 - maximum
        return chance_of_share(np.where(values > 1, 1.0, 0.0), np.ones(len(rows)), maximum, values, 1.0)
    value, late, of = (each[rows] for each in _per_request(objective, frame))
    if (share := objective.percentile) is not None:
        return chance_of_share(late, of, 1 - share, value, objective.bound)
    known = np.isfinite(value) & (of > 0)
    if objective.statistic != "mean":
        return float(
            not objective.satisfied_by(
                float((value[known].min if objective.statistic == "min" else value[known].max)())
            )
        )
    mean, size = float(np.average(value[known], weights=of[known])), known.sum() / autocorrelation_time(value[known])
    error = float(value[known].std()) / math.sqrt(max(1.0, size - 1))
    return (
        1 - stats.student_cdf((objective.bound - mean) / error, max(1.0, size - 1))
        if error
        else float(mean > objective.bound)
    )


def _per_request(objective: Objective, frame: Frame) -> tuple[Floats, Floats, Floats]:
    """Of each row: its latency, on average; how many samples of it break the objective; and of how many. A row that is
    not complete has as many as others, infinitely slow; one without the latency has none."""
    metric, sampled = LATENCIES[objective.figure], frame.sampled
    samples, offsets = metric.values(frame), metric.groups(frame)
    if offsets is None:
        offsets = np.concatenate(([0], np.cumsum(~np.isnan(metric.rows(frame)[sampled]))))
    counts = np.diff(offsets)
    late = sum_by_row(
        samples > objective.bound if objective.comparison == "<=" else samples >= objective.bound, offsets
    )
    means = np.divide(sum_by_row(samples, offsets), counts, out=np.zeros(len(counts)), where=counts > 0)
    each = float(counts.mean()) if len(counts) else 1.0
    value, missed, of = np.full(len(frame), math.inf), np.full(len(frame), each), np.full(len(frame), each)
    value[sampled], missed[sampled], of[sampled] = means, late, counts
    return value, missed, of


def _bits(chance: Floats) -> Floats:
    """Entropy of an outcome."""
    sure = np.clip(chance, 1e-12, 1 - 1e-12)
    return np.asarray(-(sure * np.log2(sure) + (1 - sure) * np.log2(1 - sure)))
