"""Finds the capacity of a server: the largest load at which it meets its objectives, from a few runs.

The search is a probabilistic bisection (Horstein, "Sequential transmission using noiseless feedback", 1963; Waeber,
Frazier and Henderson, "Bisection search with noisy responses", 2013):

1. A run at load L gives the probability p that L exceeds the capacity C.
2. The search keeps a probability distribution of C over a logarithmic grid of loads. After each run, it multiplies the
   probability of each grid load below L by p, and that of every other grid load by 1 - p.
3. The next run has the load from which the search expects the most information (Kontsevich and Tyler, "Bayesian
   adaptive estimation of psychometric slope and threshold", 1999).

The search uses p and not the latencies themselves, because latency percentiles near the capacity vary strongly between
neighbouring loads. Whether a percentile meets its bound is a much more stable result.

The load exceeds the capacity if too large a share of requests misses a bound. The probability p is computed from the
number of requests that missed the bound and the number of all requests. It uses a Beta prior, similar to Jeffreys's
(Brown, Cai and DasGupta, "Interval estimation for a binomial proportion", 2001). Neighbouring requests wait in the same
queue and are therefore correlated, so n requests count as n / tau. Here tau is the autocorrelation time (Sokal, "Monte
Carlo methods in statistical mechanics", 1997, section 3). It is computed at several latency thresholds, and the largest
value is used. A threshold that few requests exceed shows no correlation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from loadgen.analysis import stats
from loadgen.analysis.frame import Booleans, Floats, Frame, Integers, sum_by_row
from loadgen.analysis.frame_parts import find_part
from loadgen.analysis.goodput import bound_scale
from loadgen.analysis.objectives import LATENCIES, Objective, ObjectiveError, parse_bounds
from loadgen.analysis.run.record import State as RequestState
from loadgen.analysis.summary import Summary

MIN_DOUBT = 0.01
"""Minimum distance of a probability from 0 and 1. Even after a clear result, the next run may differ."""
GRID_STEP = 0.005
"""Relative difference between neighbouring loads of the grid."""
GRID_THINNING = 4
"""Number of neighbouring grid loads that are combined into one when the next load is chosen."""
GROWTH = 4.0
"""Factor by which the load is raised or lowered until one run has met and one has violated the objectives."""
RUN_SPREAD = 0.05
"""Relative standard deviation, on a logarithmic scale, of the load at which runs begin to violate the objectives."""
NEAR = 0.2
"""Two loads are near each other if their logarithms differ by less than this. Their runs give the same information."""
MAX_CARRIED_FACTOR = 1.5
"""An overloaded server completes at least the capacity divided by this factor, even if it preempts requests."""
CARRIED_DOUBT = 0.01
"""Probability that an overloaded server completes less than the capacity divided by MAX_CARRIED_FACTOR."""
BELOW_FULL = 0.5
"""Typical distance of the capacity below the full throughput that a pilot measured, as a logarithm of the ratio."""
ABOVE_FULL = 0.07
"""Typical distance of the capacity above the full throughput that a pilot measured, as a logarithm of the ratio. The
capacity can be above it because the pilot is not exact."""
PILOT_DOUBT = 0.05
"""Probability that the pilot measured a wrong throughput. The capacity may then be far below or far above it."""
PILOT_START = 0.75
"""Load of the first run, relative to the full throughput that a pilot measured."""
PILOT_SHRINK = 2.0
"""Factor by which the load is lowered after a pilot until one run has met the objectives."""
PREDICTION_SPREAD = 0.2
"""Typical relative error of a predicted capacity: the standard deviation of its logarithm."""
MAX_INCOMPLETE = 0.01
"""Maximum share of incomplete requests. An objective on `complete` replaces this limit."""
QUANTILES = (0.5, 0.75, 0.9)
"""Quantiles of the latencies at which the autocorrelation is computed, in addition to the bound of the objective."""
SOKAL_WINDOW = 5
"""Sokal's window: the largest lag that is summed, in autocorrelation times."""
SHORT_RUN_FACTOR = 3.0
"""Factor by which the autocorrelation time is raised, because a run of a minute does not show the slow variations of a
queue. With a factor of 2, 92% of the 95% confidence intervals of `benchmarks.sweep` contained the capacity."""
TAIL = 0.75
"""Quantile above which latencies are assumed to have an exponential tail, as waiting times in queues do. The tail is
used if few samples miss the bound."""
MIN_MISSES = 5
"""Minimum effective number of misses. With fewer misses, their share is extrapolated from the tail."""
LIMITED_STATES: tuple[RequestState, ...] = ("truncated", "failed", "rejected", "dropped")
"""Request states that an objective may limit from above, such as `rejected < 1%`."""
HINT = "Use a figure that gets worse with load: ttft.p99 < 500ms, complete >= 99.9%, attainment >= 95%."
State = Literal["found", "open", "at least", "below"]


class LoadObservation(NamedTuple):
    """Result of one run of a capacity search."""

    load: float
    over: float
    """Probability that the server violates an objective at this load."""
    carried: float | None = None
    """Completed requests per second of an overloaded server, which is about its maximum. None if the server kept up."""


class Capacity(NamedTuple):
    """The capacity of a server: the largest load at which it meets all objectives, with a confidence interval.

    The state is one of:

    - `found`: the interval is as narrow as requested.
    - `open`: the interval is wider than requested.
    - `below`: the capacity is below the lowest load.
    - `at least`: the capacity is above the highest load."""

    state: State
    capacity: float | None
    low: float
    high: float | None


class Search:
    """Searches for the capacity of a server: the largest load at which the server meets its objectives.

    - `min_load` and `max_load`: the range of loads that are tried.
    - `confidence`: the level of the confidence interval of the capacity.
    - `precision`: the search ends when the interval is this narrow. For example, 0.1 means 10% of the capacity to each
      side.
    - `whole`: True if loads are whole numbers, such as numbers of clients.
    - `predicted`: a predicted capacity, or None. It affects the loads that are tried but not the result.
    - `full_rate`: the throughput of the fully loaded server in requests per second, or None. A pilot measures it before
      the search, with closed loops of growing concurrency. The search assumes that the capacity is not much larger.
    """

    def __init__(
        self,
        min_load: float,
        max_load: float,
        *,
        confidence: float = 0.95,
        precision: float = 0.1,
        whole: bool = False,
        predicted: float | None = None,
        full_rate: float | None = None,
    ) -> None:
        self._full_rate = full_rate
        self._min_load = min_load
        self._max_load = max_load
        self._whole = whole
        self._predicted = predicted
        self._tail = (1 - confidence) / 2
        self._precision = precision
        self._grid = np.geomspace(min_load, max_load, max(3, math.ceil(math.log(max_load / min_load) / GRID_STEP)))

    def capacity(self, runs: Sequence[LoadObservation]) -> Capacity:
        """Return the capacity and its confidence interval according to these runs."""
        met = [run.load for run in runs if run.over <= 0.5]
        violated = [run.load for run in runs if run.over > 0.5]
        if not met:
            if violated and min(violated) <= self._min_load:
                return Capacity("below", 0.0, 0.0, min(violated))
            return Capacity("open", None, 0.0, min(violated, default=None))
        if not violated and not self._full_rate:
            state: State = "at least" if max(met) >= self._max_load else "open"
            return Capacity(state, max(met), max(met), None)
        low, middle, high = self._quantiles(self._weights(runs), self._tail, 0.5, 1 - self._tail)
        if self._whole:
            low, high = math.floor(low), math.ceil(high)
            middle = math.floor(middle)
        precise = high - low <= max(2 * self._precision * middle, float(self._whole))
        return Capacity("found" if precise else "open", middle, low, high)

    def next_load(self, runs: Sequence[LoadObservation], start: float) -> float | None:
        """Return the load of the next run, or None if the search has ended. `runs` are the runs so far.

        `start` is the load of the first run. It is ignored if the search knows a better start: a predicted capacity, or
        the full throughput that a pilot has measured.
        """
        if runs and self.capacity(runs).state != "open":
            return None
        met = [run.load for run in runs if run.over <= 0.5]
        violated = [run for run in runs if run.over > 0.5]
        if self._full_rate and not runs:
            load = PILOT_START * self._full_rate
        elif self._full_rate and not met:
            load = max(self._min_load, min(run.load for run in violated) / PILOT_SHRINK)
        elif self._full_rate:
            load = self._informative_load(runs, bracketed=bool(violated))
        elif self._predicted is None and not violated:
            load = min(self._max_load, GROWTH * max(met)) if met else start
        elif self._predicted is None and not met and not any(run.carried for run in violated):
            load = max(self._min_load, min(run.load for run in violated) / GROWTH)
        else:
            load = self._informative_load(runs, bracketed=bool(met and violated))
        return float(max(1, round(load))) if self._whole else float(f"{load:.3g}")

    def _informative_load(self, runs: Sequence[LoadObservation], *, bracketed: bool) -> float:
        """Return the load whose run is expected to give the most information about the capacity.

        `runs` are the runs so far. `bracketed` is True if at least one of them met the objectives and at least one
        violated them.

        There is an exception if `bracketed` is True, but an end of the capacity's confidence interval is still more
        than a factor of 2 away from the median. The result is then a load between this end and the median, because a
        run at such a load clearly meets or violates the objectives. The exception is skipped if a run near this load
        was already made.
        """
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
        """Return, for each load of the grid, the probability that it is the capacity, given these runs."""
        # The prior is constant on the logarithmic grid up to the largest load so far, and falls as 1 / load above it.
        # With a constant prior, loads that were never tried would have the largest weight.
        weights = 1 / np.maximum(self._grid, max((run.load for run in runs), default=1.0))
        if self._full_rate:
            weights = self._pilot_prior(self._full_rate)
        for load, over, carried in runs:
            weights *= self._likelihood(load, over)
            if carried is not None:
                weights *= self._likelihood(MAX_CARRIED_FACTOR * carried, 1 - CARRIED_DOUBT)
        return np.asarray(weights / weights.sum())

    def _pilot_prior(self, full_rate: float) -> Floats:
        """Return, for each load of the grid, the probability that this load is the capacity, before the first run of
        the search.

        The capacity is assumed to be near `full_rate`, the full throughput that the pilot measured. The probability of
        a load falls exponentially with the distance of the load from `full_rate`: slowly for lower loads, and quickly
        for higher loads. A small part of the probability (PILOT_DOUBT) falls slowly in both directions, because the
        pilot may be wrong.
        """
        distance = np.log(self._grid / full_rate)
        near = np.where(distance < 0, np.exp(distance / BELOW_FULL), np.exp(-distance / ABOVE_FULL))
        wide = np.exp(-np.abs(distance) / BELOW_FULL)
        return np.asarray((1 - PILOT_DOUBT) * near / near.sum() + PILOT_DOUBT * wide / wide.sum())

    def _likelihood(self, load: float, over: float) -> Floats:
        """Return the likelihood of a run's result for each load on the grid, assuming that this grid load is the
        capacity.

        - `load` is the load of the run.
        - `over` is the probability that `load` exceeds the capacity, as judged from this run alone. It is first limited
          to the range from MIN_DOUBT to 1 - MIN_DOUBT.

        For each grid load below `load`, the likelihood is `over`, because `load` would exceed such a capacity. For all
        other grid loads, the likelihood is `1 - over`.

        The likelihood usually jumps at `load`. If a pilot (closed loops before the search) has measured the full
        throughput, the likelihood changes gradually instead, over the width RUN_SPREAD.
        """
        probability = min(1 - MIN_DOUBT, max(MIN_DOUBT, over))
        if self._full_rate:
            # The pilot makes the interval so narrow that the likelihood must not have a sharp step at the load.
            from scipy.special import ndtr

            below = ndtr(np.log(load / self._grid) / RUN_SPREAD)
            return np.asarray(probability * below + (1 - probability) * (1 - below))
        return np.where(self._grid < load * (1 - 1e-9), probability, 1 - probability)

    def _hints(self, runs: Sequence[LoadObservation]) -> Floats:
        """Return a weight for each load of the search grid. The weights only affect which load is tried next.

        Two groups of loads have low weights:

        - If `runs` have overloaded the server: loads below half of the lowest throughput in these runs.
        - If the capacity was predicted: loads far from the prediction.
        """
        hints = np.ones(len(self._grid))
        carried = [run.carried for run in runs if run.carried]
        if carried:
            hints[self._grid < min(carried) / 2] = CARRIED_DOUBT
        if self._predicted is not None:
            deviations = np.log(self._grid / self._predicted) / PREDICTION_SPREAD
            largest = max((run.load for run in runs), default=1.0)
            # The prediction replaces the prior, so multiply by the inverse of the prior in `_weights`.
            hints *= np.maximum(np.exp(-(deviations**2) / 2), MIN_DOUBT) * np.maximum(self._grid, largest)
        return hints

    def _quantiles(self, weights: Floats, *shares: float) -> list[float]:
        cumulative = np.cumsum(weights / weights.sum())
        indices = np.minimum(np.searchsorted(cumulative, shares), len(cumulative) - 1)
        return [float(load) for load in self._grid[indices]]

    def _most_informative(self, weights: Floats) -> float:
        """Return the load whose run is expected to reduce the uncertainty of the capacity most.

        `weights` is the distribution of the capacity over the grid of loads. The uncertainty is the entropy of this
        distribution.
        """
        from scipy.special import ndtr

        loads = np.array(self._quantiles(weights, *np.linspace(0.01, 0.99, 50)))
        firsts = np.arange(0, len(weights), GRID_THINNING)
        over = ndtr(np.log(loads[:, None] / self._grid[None, firsts]) / RUN_SPREAD)
        shares = np.add.reduceat(weights, firsts) / weights.sum()
        information = _entropy_bits(over @ shares) - _entropy_bits(over) @ shares
        return float(loads[int(np.argmax(information))])


def capacity_of_list(runs: Sequence[LoadObservation]) -> Capacity:
    """Return the capacity of the server, computed from `runs` at a fixed list of loads.

    A run is good if the server probably met all objectives. Otherwise it is bad. The capacity is the largest load of a
    good run that is smaller than the loads of all bad runs. The interval of the capacity has these ends:

    - Lower end: the capacity. If there is no such good run, it is 0.
    - Upper end: the smallest load of a bad run. If there is no bad run, it is None.
    """
    violated = [run.load for run in runs if run.over > 0.5]
    high = min(violated, default=None)
    met = [run.load for run in runs if run.over <= 0.5 and (high is None or run.load < high)]
    if high is None:
        return Capacity("at least", max(met), max(met), None) if met else Capacity("open", None, 0.0, None)
    return Capacity("open", max(met), max(met), high) if met else Capacity("below", 0.0, 0.0, high)


def check_objectives(objectives: Iterable[Objective]) -> None:
    """Raise ObjectiveError if an objective does not become harder to meet as the load grows."""
    for objective in objectives:
        upper_bound = objective.figure in LATENCIES or objective.figure in LIMITED_STATES
        gets_worse = ("<" if upper_bound else ">") in objective.comparison
        if not gets_worse or objective.figure not in {*LATENCIES, *LIMITED_STATES, "complete", "attainment"}:
            raise ObjectiveError(
                f"--objective {objective.text!r} cannot limit a sweep: more load never makes it fail", HINT
            )


def chance_over(objectives: Sequence[Objective], bounds: Sequence[Objective], frame: Frame, summary: Summary) -> float:
    """Return the probability that the server violates at least one of `objectives` at the load of a run.

    - `objectives` must have passed `check_objectives`. An objective on a class of traffic is applied only to the
      requests of this class.
    - `bounds` are the bounds of --goodput, which an objective on `attainment` needs.
    - `frame` and `summary` contain the results of the run.

    Incomplete requests count as infinitely slow. If more than the share MAX_INCOMPLETE of the planned requests is
    incomplete, in the run or in one of its classes, the result is 1. There are two exceptions:

    - If there is an objective on `complete`, this objective decides instead of MAX_INCOMPLETE.
    - If there is an objective such as `rejected < 20%`, this objective decides how many requests may be rejected.
      Rejected requests then do not count towards MAX_INCOMPLETE.
    """
    requests_of = {part.name: part.requests for part in summary.traffic} or {"": summary.requests}
    chance_met = 1.0
    for name, requests in requests_of.items():
        figures = {objective.figure for objective in objectives if objective.part in ("", name)}
        if "complete" not in figures:
            allowed = sum(getattr(requests, state) for state in LIMITED_STATES if state in figures)
            chance_met *= float(requests.complete + allowed >= (1 - MAX_INCOMPLETE) * requests.planned)
    bounds_of = {part.name: part.goodput.bounds for part in summary.traffic if part.goodput is not None}
    for objective in objectives:
        if objective.part:
            rows = find_part(frame, objective.part)
            class_bounds = parse_bounds(bounds_of.get(objective.part, ()))
            chance_met *= 0.0 if rows is None else 1 - _chance_violated(objective, class_bounds, rows)
        else:
            chance_met *= 1 - _chance_violated(objective, bounds, frame)
    return 1 - chance_met


def chance_of_share(missed: Floats, samples: Floats, max_share: float, values: Floats, bound: float) -> float:
    """Return the probability that in the long run more than `max_share` of all samples miss `bound`.

    The arrays have one element per request, in order of time:

    - `samples`: the number of samples of the request.
    - `missed`: the number of its samples that miss the bound.
    - `values`: the mean of all its samples.

    The long-run share of misses is not known exactly. Two numbers are computed from the requests: the observed share of
    misses `s = sum(missed) / sum(samples)`, and the effective number of requests `n = requests / autocorrelation time`.
    The long-run share then has the distribution `Beta(s * n + 0.5, (1 - s) * n + b)`. The constant `b` is chosen so
    that the prior distribution `Beta(0.5, b)` has the median `max_share`.

    With few misses (`s * n < MIN_MISSES`), the share is extrapolated. An exponential distribution is fitted to those
    elements of `values` that exceed a threshold, the quantile TAIL of `values`. The part of this distribution above
    `bound` is the extrapolated share. This method requires that the threshold is below `bound`, and that `max_share` is
    at most `(1 - TAIL) / 2`. Otherwise the Beta distribution is used.
    """
    from scipy.special import betaincc, btdtrib, gammainc

    share = float(missed.sum() / samples.sum())
    size = len(missed) / autocorrelation_time(values, bound)
    edge = float(np.quantile(values, TAIL, method="lower"))
    if share * size >= MIN_MISSES or max_share > (1 - TAIL) / 2 or edge >= bound:
        # The prior's median is `max_share`, so the probability without samples is 50%.
        return float(betaincc(share * size + 0.5, (1 - share) * size + btdtrib(0.5, 0.5, max_share), max_share))
    beyond = values[(values > edge) & np.isfinite(values)] - edge
    if not len(beyond):
        return float(share > max_share)
    depth = (bound - edge) / float(beyond.mean())
    needed_depth = math.log((1 - TAIL) / max_share)
    tail_size = (1 - TAIL) * size / (1 + TAIL / needed_depth**2)  # The share of the tail is as uncertain as its depth.
    return float(gammainc(tail_size, tail_size * needed_depth / depth))


def autocorrelation_time(values: Floats, *bounds: float) -> float:
    """Return the number of consecutive values that count as one independent value.

    The function compares `values` with several levels: the values in `bounds`, and the quantiles QUANTILES of `values`.
    Each level gives a series of True and False, `values > level`, whose integrated autocorrelation time is computed.
    The result is the largest of these times, multiplied by SHORT_RUN_FACTOR.
    """
    levels = [*bounds, *(np.quantile(values, QUANTILES, method="lower"))]
    return SHORT_RUN_FACTOR * max(_integrated_time(values > level) for level in levels)


def _integrated_time(above: Booleans) -> float:
    """Return the integrated autocorrelation time of a boolean series. It is at least 1.

    The time is `tau(M) = 1 + 2 * sum(rho(k) for k = 1..M)`, where `rho(k)` is the autocorrelation at lag `k`, and `M`
    is the smallest lag with `M >= SOKAL_WINDOW * tau(M)`."""
    centred = above - above.mean()
    spectrum = np.abs(np.fft.rfft(centred, 2 * len(above))) ** 2
    covariance = np.fft.irfft(spectrum)[: len(above)]
    if covariance[0] <= 0:
        return 1.0
    times = 2 * np.cumsum(covariance / covariance[0]) - 1
    enough = np.flatnonzero(np.arange(len(times)) >= SOKAL_WINDOW * times)
    return max(1.0, float(times[enough[0] if len(enough) else -1]))


def _chance_violated(objective: Objective, bounds: Sequence[Objective], frame: Frame) -> float:
    """Return the probability that the server violates `objective` at the load of the run in `frame`.

    The result is 1 if no request is complete. `bounds` are the bounds of --goodput. They are needed for an objective on
    `attainment`, which is the share of requests that meet these bounds.
    """
    rows = np.flatnonzero(frame.inside)
    rows = rows[np.argsort(frame.due_ns[rows], kind="stable")]
    if not frame.complete[rows].any():
        return 1.0
    if objective.figure in LATENCIES:
        return _chance_latency_violated(objective, frame, rows)
    # A value above 1 means that the request misses the objective.
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
    """Return the probability that the server violates the latency bound `objective` at the load of a run.

    - `frame` contains the requests of the run.
    - `rows` contains the indices of the requests to use. They must be in the order of their due times, because
      consecutive requests have correlated latencies.

    For a bound on the minimum or the maximum, the result only states whether the run violated the bound: 0 or 1.
    """
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
    """Return three arrays with one element per request: mean latency, number of violating samples, number of samples.

    The samples are those of the latency that `objective` limits. For example, a request has one TTFT but many gaps
    between tokens. A sample violates the objective if it exceeds the bound.

    A complete request without this latency has no samples. An incomplete request counts as infinitely slow: it gets the
    mean number of samples of the complete requests, all of which violate the objective.
    """
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
    """Return the binary entropy in bits, `-p log2(p) - (1 - p) log2(1 - p)`, of each probability p in `chance`."""
    clipped = np.clip(chance, 1e-12, 1 - 1e-12)
    return np.asarray(-(clipped * np.log2(clipped) + (1 - clipped) * np.log2(1 - clipped)))
