"""Estimates by how much a figure varies between two runs of the same server, A and B.

The requests of a run are not independent, because they wait in one queue and share the engine's steps. Three sources of
chance are therefore estimated separately, and their variances are added:

- Requests: a run contains only a sample of all possible requests. For a quantile, a bootstrap estimates the resulting
  error. It uses an effective number of independent samples, which is derived from groups of neighbouring requests. In a
  burst, the latency of a request mostly depends on its position in the queue, which is the same in every run. Only the
  differences within a group (a stratum) are due to chance. In an open or closed loop, neighbouring requests are
  correlated, so the differences between the means of the groups (batches) are used.
- Server: a slow step of the engine delays all requests of a burst that are in flight. A bootstrap of requests does not
  show this error. Both runs do the same work, so each of them is divided into pieces with equal shares of the work. For
  each piece, the duration in B is divided by the duration in A. The variation of these ratios shows the error.
- Timestamps: the timestamps of both runs have error bars.

Differences between whole runs, such as a different GPU, its temperature or another process on the machine, are not
visible within a run. Only repeats show them. The error is therefore at least MIN_RUN_VARIATION.

The ratios of the durations also vary if the pace changes in one run only. For example, B may have faster first tokens
and slower later tokens than A. Such a change is not chance, but by default the function `piece_error` counts it as an
error. With the argument `shift`, the function first removes one change of pace, if this change explains most of the
variation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from loadgen.analysis.frame import Floats, Frame, Integers, sum_by_row
from loadgen.analysis.metrics import Metric
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.stats import percentile, ratio_variance, student_cdf, student_quantile
from loadgen.analysis.summary import Summary

PIECES = 16
"""Number of pieces of a run. More pieces show their variation better, but a piece must be longer than the correlation
time of a queue."""
LEVELS = (1, 2, 4)
"""Numbers of neighbouring pieces that are joined. Variation that is longer than a piece is visible in joined pieces."""
DEGREES_OF_FREEDOM = PIECES // 2 - 1
"""Degrees of freedom of the server error, which are those of pieces joined in pairs."""
STEPS_MIN = 8 * PIECES
"""Minimum number of engine steps of a run. In a shorter run, a disturbance of several steps would affect all pieces
alike."""
STEPS_MIN_WITH_SHIFT = 2 * PIECES
"""Minimum number of engine steps of a run if one change of pace is removed."""
EXPLAINED = 0.8
"""Minimum share of the variance between pieces that a change of pace must explain. Chance alone rarely explains as
much."""
STRATUM = 16
"""Number of neighbouring requests in a stratum of a burst. Differences within a stratum are attributed to chance."""
MAX_SIZE_FACTOR = 100
"""Maximum ratio of the effective size of a stratified sample to its number of samples."""
REPLICATES = 2000
PROGRESS_POINTS = 512
SHIFT_STEPS = 161
"""Number of shifts over which a p-value is averaged."""
SHIFT_MAX = 10.0
"""Largest shift over which a p-value is averaged, in standard errors."""
MIN_RUN_VARIATION = 0.02
"""Assumed minimum standard deviation of `log(time B / time A)` of two runs of one server. Without this minimum, open
loops whose runs vary by 2% were reported as different in one of eight pairs. It is a minimum and is not added to the
error, because Student's t with DEGREES_OF_FREEDOM gives wide enough intervals for bursts."""
ERROR_BAR_SIGMAS = 2.576
"""Half-width of an error bar in standard deviations. 99% of normally distributed errors are within an error bar."""
TOKENS_MAX = 4_000_000
"""Maximum number of tokens of a run whose gaps are all used. For runs with more tokens, the gaps of every k-th request
are used. This loses little information, because the gaps of one engine step are similar."""


@dataclass(frozen=True)
class ComparedRun:
    """The data of a run that a comparison needs.

    These are the Run without its Records, the Frame with the data of the Records, and the Summary."""

    run: Run
    frame: Frame
    summary: Summary

    @property
    def name(self) -> str:
        return run_name(self.run)

    @property
    def one_burst(self) -> bool:
        """True for a burst, whose requests were all due at one time and waited in one queue.

        Also true for a run of interactive users, which has no measurement window.
        """
        return self.frame.window is None

    @property
    def span_s(self) -> float:
        """Length of the measurement window in seconds; NaN if the window is empty."""
        span = self.frame.span_ns
        return math.nan if span is None else (span[1] - span[0]) / 1e9

    @property
    def requests(self) -> int:
        """Number of complete requests that were due in the window."""
        return int(self.frame.sampled.sum())


def run_name(run: Run) -> str:
    """Return the name of a run's folder. For a repeat, include the parent folder, as in `baseline/repeat-2`."""
    folder = run.path.resolve().parent
    return f"{folder.parent.name}/{folder.name}" if folder.name.startswith("repeat-") else folder.name


class Samples(NamedTuple):
    """The samples of one latency of a run, divided into groups of neighbouring samples."""

    values: Floats
    offsets: Integers
    """Boundaries of the groups. Group i has the samples `values[offsets[i]:offsets[i + 1]]`."""
    strata: bool
    """True if the groups are strata, as in a burst: the differences between samples of one group are due to chance.
    False if the groups are batches, as for other loads: the differences between groups are due to chance."""


def samples_of(run: ComparedRun, metric: Metric) -> Samples:
    """Return the samples of the latency `metric` of a run in order of time, divided into groups of neighbouring
    samples.

    The groups serve to estimate how much the latency varies by chance. There are two types of groups:

    - Strata are used for latencies of whole requests in a burst, such as TTFT and E2E. Such a latency depends on the
      position of the request in the burst. The differences between groups are therefore not due to chance, but the
      differences within a group are.
    - Batches are used for all other latencies: for the times per token in a burst, and for every latency in a run that
      is not a burst. The differences between groups are then due to chance.
    """
    frame = run.frame
    if metric.per != "request":
        return _gap_samples(frame)
    rows = metric.rows(frame)
    retained = frame.sampled & ~np.isnan(rows)
    instants = (frame.sent_ns if run.one_burst else frame.due_ns)[retained]
    values = rows[retained][np.argsort(instants, kind="stable")]
    strata = run.one_burst and metric.unit == "s"
    return Samples(values, split_offsets(len(values), len(values) // STRATUM if strata else PIECES), strata)


def _gap_samples(frame: Frame) -> Samples:
    """Return the gaps between the tokens of all responses, in order of the times at which the gaps end.

    A gap is the time between two consecutive tokens of a response, which is 0 for tokens of the same chunk. A chunk of
    c tokens therefore contributes the gap before the chunk, and c - 1 gaps of 0. If a run has many more tokens than
    TOKENS_MAX, only every k-th request is used, so that about TOKENS_MAX tokens remain.
    """
    sampled = frame.sampled
    every = max(1, round(float(frame.arrived_tokens[sampled].sum()) / TOKENS_MAX))
    used_rows = np.zeros(len(sampled), np.bool_)
    used_rows[np.flatnonzero(sampled)[::every]] = True
    gaps, end_times = [np.empty(0)], [np.empty(0)]
    for rows, chunks in frame.blocks():
        counts = np.diff(frame.offsets[rows.start : rows.stop + 1])
        retained = np.repeat(used_rows[rows], counts)
        instants = frame.chunk_ns[chunks]
        zeros = frame.chunk_tokens[chunks].astype(np.int64) - 1
        zeros[~retained | (zeros < 0)] = 0  # a damaged record may contain a chunk without tokens
        retained[frame.offsets[rows][counts > 0] - chunks.start] = False  # no gap precedes the first chunk of a request
        gaps += [(np.diff(instants, prepend=0.0) / 1e9)[retained], np.zeros(int(zeros.sum()))]
        end_times += [instants[retained], np.repeat(instants, zeros)]
    values = np.concatenate(gaps)[np.argsort(np.concatenate(end_times), kind="stable")]
    return Samples(values, split_offsets(len(values), PIECES), strata=False)


def split_offsets(count: int, parts: int) -> Integers:
    """Return the boundaries that divide `count` samples into `parts` contiguous groups of nearly equal size."""
    return np.linspace(0, count, max(1, min(parts, count)) + 1).astype(np.int64)


def quantile(samples: Samples, share: float) -> float:
    """Return the `share`-quantile of the samples."""
    return percentile(np.sort(samples.values), share)


def mean_variance(values: Floats, samples: Samples) -> float:
    """Return the variance of the mean of `values`, which has one value per sample.

    The samples are divided into groups, which are either strata or batches (see `samples_of`).

    - Strata: let stratum h have n_h values with the variance s_h**2, and let n be the number of all values. The result
      is the sum of `n_h * s_h**2` over all strata, divided by `n**2` (Cochran, "Sampling Techniques", 3rd edition,
      1977, section 5.4).
    - Batches: the result is estimated from the differences between the batch means (the ratio estimator of Cochran,
      section 2.11).
    """
    offsets = samples.offsets
    if not samples.strata:
        return ratio_variance(values, offsets, float(values.mean()))
    counts = np.diff(offsets)
    means = sum_by_row(values, offsets) / np.maximum(counts, 1)
    within = sum_by_row(np.square(values - np.repeat(means, counts)), offsets)
    return float((within * counts / np.maximum(counts - 1, 1)).sum()) / len(values) ** 2


def effective_size(samples: Samples, share: float, value: float) -> float:
    """Return the effective sample size for the `share`-quantile. `value` is the value of this quantile.

    The effective size is the number of independent samples that would give the quantile the same variance:

        share * (1 - share) / (variance of the share of samples at or below value)
    """
    variance = mean_variance((samples.values <= value).astype(np.float64), samples)
    maximum = len(samples.values) * (MAX_SIZE_FACTOR if samples.strata else 1)
    if variance <= 0:
        return maximum
    return float(min(maximum, max(1.0, share * (1 - share) / variance)))


def quantile_error(samples: Samples, share: float, random: np.random.Generator) -> float:
    """Return the standard error of the logarithm of a quantile of the samples, estimated by bootstrap.

    `share` is the share of samples below the quantile, such as 0.99 for p99. The result is NaN if a bootstrap quantile
    is 0.

    A bootstrap sample has n values, which are drawn from the samples with replacement. Its quantile is its k-th
    smallest value. This value equals a quantile of the original samples at a random share, which has the distribution
    `Beta(k, n - k + 1)` (David and Nagaraja, "Order Statistics", section 2.1). The function therefore draws random
    shares with `random`, instead of whole bootstrap samples. For dependent samples, n is the effective size.
    """
    ordered = np.sort(samples.values)
    size = effective_size(samples, share, percentile(ordered, share))
    shares = random.beta(share * (size - 1) + 1, (1 - share) * (size - 1) + 1, REPLICATES)
    quantiles = np.interp(shares * (len(ordered) - 1), np.arange(len(ordered)), ordered)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.std(np.log(quantiles)))


def piece_error(a: ComparedRun, b: ComparedRun, *, shift: bool = False) -> float:
    """Return by how much the speed of the server varies between the runs A and B, as a standard deviation.

    Both runs are divided into PIECES pieces. A piece is the same share of the work in both runs, and takes the time t_A
    in run A and t_B in run B. The result is the standard deviation of `log(t_B / t_A)` over the pieces.

    - The standard deviation is computed for single pieces, and for groups of 2 and 4 neighbouring pieces (LEVELS). The
      values for groups are converted to single pieces. The largest value is returned.
    - If `shift` is True, one change of pace is removed first (see `_change_of_pace`).
    - The result is NaN if a run has too few chunks or engine steps. The result is infinity if too few pieces have a
      positive duration in both runs.
    """
    steps_min = STEPS_MIN_WITH_SHIFT if shift else STEPS_MIN
    for run in (a, b):
        gap_s = run.summary.latency.icl.mean  # about one step of the engine
        if not gap_s or run.span_s / gap_s < steps_min:
            return math.nan
    progress_a, progress_b = _progress(a.frame), _progress(b.frame)
    if progress_a is None or progress_b is None:
        return math.nan
    # The edges are shares of the work. They are chosen so that each piece takes the same time, averaged over the runs.
    shares = np.linspace(0, 1, PROGRESS_POINTS)
    total_progress = progress_a / progress_a[-1] + progress_b / progress_b[-1]
    edges = np.interp(np.linspace(0, 2, PIECES + 1), total_progress, shares)
    lengths_a = np.diff(np.interp(edges, shares, progress_a))
    lengths_b = np.diff(np.interp(edges, shares, progress_b))
    if shift and min(lengths_a.min(), lengths_b.min()) > 0:
        lengths_b = lengths_b / np.exp(_change_of_pace(np.log(lengths_b / lengths_a)))
    errors = []
    for level in LEVELS:
        joined_a = lengths_a.reshape(-1, level).sum(axis=1)
        joined_b = lengths_b.reshape(-1, level).sum(axis=1)
        known = (joined_a > 0) & (joined_b > 0)
        if known.sum() < 2:
            return math.inf
        errors.append(float(np.std(np.log(joined_b[known] / joined_a[known]), ddof=1)) * math.sqrt(level))
    return max(errors)


def _change_of_pace(values: Floats) -> Floats:
    """Return the step function that fits `values` best, as an array: one mean before the step, another one after it.

    If the step explains less than the share EXPLAINED of the variance of `values`, there is no change of pace. All
    elements of the result are then the mean of `values`.
    """
    fits = [np.repeat((values[:cut].mean(), values[cut:].mean()), (cut, len(values) - cut)) for cut in range(1, PIECES)]
    residuals = [float(np.square(values - fit).sum()) for fit in fits]
    mean = np.full(len(values), values.mean())
    explains_enough = min(residuals) <= (1 - EXPLAINED) * np.square(values - mean).sum()
    return fits[int(np.argmin(residuals))] if explains_enough else mean


def _progress(frame: Frame) -> Floats | None:
    """Return the progress of a run: the times at which equal shares of its tokens had arrived.

    The array has PROGRESS_POINTS times in seconds from the start of the window. No token has arrived at the first time,
    and all tokens have arrived at the last time. Return None if the run has too few chunks.
    """
    span = frame.span_ns
    if span is None or len(frame.chunk_ns) == 0:
        return None
    instants = frame.chunk_ns[:]
    inside = (instants >= span[0]) & (instants <= span[1])
    instants = instants[inside]
    order = np.argsort(instants)
    tokens = np.cumsum(frame.chunk_tokens[inside][order], dtype=np.float64)
    if len(tokens) < 2 * PIECES:
        return None
    shares = np.concatenate(([0.0], tokens / tokens[-1]))
    times = np.concatenate(([0.0], (instants[order] - span[0]) / 1e9))
    return np.interp(np.linspace(0, 1, PROGRESS_POINTS), shares, times)


def server_error(piece: float, residence: float) -> float:
    """Return the standard error of `log(B / A)` for a duration that is A in one run and B in another run.

    The server's speed changes at random, so a latency may differ although the servers are the same. To estimate this
    error, each run is divided into PIECES pieces (see `piece_error`). `piece` is the error of a duration that is as
    long as one piece. `residence` is the share of the run that the duration takes, from 0 to 1.

    A duration that takes the share `residence` covers m = `residence * PIECES` pieces. Pieces vary independently, so
    its error is `piece / sqrt(m)`. If it is shorter than one piece, its error is `piece`.
    """
    return piece / math.sqrt(min(PIECES, max(1.0, residence * PIECES)))


def latency_error(metric: Metric, a: ComparedRun, b: ComparedRun, piece: float, values: tuple[float, float]) -> float:
    """Return the standard error of `log(B / A)` that is due to random changes of the engine's speed.

    A and B are the values of the latency `metric` in the runs `a` and `b`, and `values` is the pair of A and B. `piece`
    is the result of `piece_error`: by how much the time of one piece of the work varies.

    The result is 0 in two cases:

    - At least one of the runs is not a burst. Its sampling error already includes these changes, because it is
      estimated from groups of consecutive samples.
    - The metric is a token count, which does not depend on the speed of the engine.
    """
    if metric.unit == "tokens" or not (a.one_burst and b.one_burst):
        return 0.0
    if metric.per != "request":
        return server_error(piece, 1.0)
    lengths_s = _times_behind(metric, a, b, values)
    if metric.unit == "s/token":
        # Seconds per token depend on the time in which all tokens of a response were generated.
        lengths_s = []
        for run in (a, b):
            e2e_s, ttft_s = run.summary.latency.e2e.p50 or 0.0, run.summary.latency.ttft.p50 or 0.0
            lengths_s.append(max(0.0, e2e_s - (ttft_s if metric.stamps == "tpot" else 0.0)))
    return server_error(piece, min(length_s / run.span_s for length_s, run in zip(lengths_s, (a, b), strict=True)))


def _times_behind(metric: Metric, a: ComparedRun, b: ComparedRun, values: tuple[float, float]) -> list[float]:
    """Return the times from which a metric was computed, for run A and for run B.

    `values` contains the values of the metric in both runs. If the metric is itself a time, the result is `values`. A
    real-time factor is not a time, but a latency divided by the length of the audio. The result then contains the
    median E2E latencies of the two runs in seconds.
    """
    if metric.unit == "ratio":
        return [run.summary.latency.e2e.p50 or 0.0 for run in (a, b)]
    return list(values)


def stamp_error(metric: Metric, a: ComparedRun, b: ComparedRun, values: tuple[float, float]) -> float:
    """Return the standard error of `log(B / A)` that is caused by errors of the timestamps in both runs.

    `values` contains A and B, which are the values of `metric` in the runs `a` and `b`. The result is 0 for a number of
    tokens, which does not depend on timestamps.
    """
    if metric.unit == "tokens":
        return 0.0
    errors = []
    for run, value_s in zip((a, b), _times_behind(metric, a, b, values), strict=True):
        error_bar_s: float = getattr(run.summary.client, f"error_bar_{metric.stamps}_s") or 0.0
        errors.append(error_bar_s / ERROR_BAR_SIGMAS / value_s if value_s > 0 else 0.0)
    return math.hypot(*errors)


def probability_of_superiority(a: Samples, b: Samples, common_error: float) -> tuple[float, float, float]:
    """Return the probability that a sample of B is larger than a sample of A, its standard error, and a p-value.

    - Probability: Ties count one half, so it is `P(B > A) + P(B = A) / 2` (Mann and Whitney, 1947).
    - Standard error: It allows ties and different variances (Brunner and Munzel, "The nonparametric Behrens-Fisher
      problem", 2000).
    - p-value: It is two-sided, and tests the hypothesis that the probability is one half.

    By chance, the server may have been slower or faster during the whole run B. All samples of B then contain a common
    random factor. `common_error` is the standard error of the logarithm of this factor. The function computes a p-value
    for many values of the factor, and returns the mean of these p-values. Each p-value is weighted with the probability
    of its factor (Student's t with DEGREES_OF_FREEDOM).

    A t-test with the standard error of Brunner and Munzel may give a smaller p-value than the returned one, because
    this error ignores the common factor. In that case, a larger standard error is returned, with which the t-test gives
    exactly the returned p-value.
    """
    ordered_a, ordered_b = np.sort(a.values), np.sort(b.values)
    placements_a, placements_b = _placements(a.values, ordered_b), _placements(b.values, ordered_a)
    # Equal samples have a share of exactly one half. The mean would have a rounding error.
    share = 0.5 if np.array_equal(ordered_a, ordered_b) else float(placements_b.mean())
    own_error = math.sqrt(mean_variance(placements_a, a) + mean_variance(placements_b, b))
    one_sided_p = 0.0
    previous_cdf = 0.0
    for step in np.linspace(-SHIFT_MAX, SHIFT_MAX, SHIFT_STEPS).tolist():
        cdf = student_cdf(step, DEGREES_OF_FREEDOM)
        weight = cdf - previous_cdf
        previous_cdf = cdf
        shifted_share = share
        if common_error:
            shifted_share = float(_placements(b.values * math.exp(step * common_error), ordered_a).mean())
        opposite = (0.5 - shifted_share) * (1 if share >= 0.5 else -1)
        if own_error:
            one_sided_p += weight * NormalDist().cdf(opposite / own_error)
        elif opposite == 0:
            one_sided_p += weight * 0.5
        else:
            one_sided_p += weight * float(opposite > 0)
    p = min(1.0, 2 * one_sided_p)
    effect = share - 0.5
    if effect == 0 or p in (0.0, 1.0):
        return share, own_error, p
    return share, max(own_error, abs(effect) / student_quantile(1 - p / 2, DEGREES_OF_FREEDOM)), p


def _placements(values: Floats, ordered: Floats) -> Floats:
    """Return the rank of each value among the samples in `ordered`, as a number from 0 to 1.

    The rank is the share of the samples that are smaller than the value. A sample that is equal to the value counts as
    0.5. `ordered` must be in ascending order.
    """
    below = np.searchsorted(ordered, values, "left")
    up_to = np.searchsorted(ordered, values, "right")
    return (below + up_to) / 2 / len(ordered)
