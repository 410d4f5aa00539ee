"""Estimates how far a figure of one run may differ from that of another run of the same server.

The requests of a run are not independent: they wait in one queue and share the engine's steps. The estimate therefore
distinguishes three sources of chance and adds their variances:

    requests     Which requests happened to be sent, by a bootstrap of the quantile. In a burst, the plan fixes the
                 position of each request in the queue, so only the differences between neighbours are chance (strata).
                 In an open or closed loop, neighbours resemble each other. A sample then counts as many independent
                 ones as the means of contiguous batches show (batch means).
    server       Chance in the duration of a step moves every request of a burst that is in flight then, and resampling
                 requests does not show that. Both runs did the same work, so each is divided where equal shares of the
                 work were done. The variation of the relative lengths of these pieces estimates the error.
    stamps       The error bars of the timestamps of the two runs.

Differences between whole runs, such as another GPU, its temperature or a neighbour on the machine, are in none of the
three; only repeats show them. They are never zero, so no error is assumed to be below MIN_RUN_VARIATION.

A change of pace between two phases also makes pieces differ, but it is no chance: one server may have faster first
tokens and slower later ones than the other. `piece_error` counts it by default. With `shift`, it removes the one change
of pace that explains most of the differences.
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
"""Number of pieces of a run: enough to see how they vary, and few enough that each outlasts what lingers in a queue."""
LEVELS = (1, 2, 4)
"""Numbers of neighbouring pieces that are joined. Variation that lingers from piece to piece shows in joined pieces."""
DEGREES_OF_FREEDOM = PIECES // 2 - 1
"""Degrees of freedom of the server error: those of pieces joined in pairs."""
STEPS_MIN = 8 * PIECES
"""Minimum steps of a run. In shorter runs, chance that lingers for some steps would affect all pieces alike."""
STEPS_MIN_WITH_SHIFT = 2 * PIECES
"""Minimum steps of a run whose pieces must show only the variation from step to step."""
EXPLAINED = 0.8
"""Share of the variation between pieces that a change of pace must explain. Chance alone hardly reaches it."""
STRATUM = 16
"""Number of neighbours in a burst whose differences are attributed to chance."""
MAX_SIZE_FACTOR = 100
"""Maximum ratio of the effective size of a stratified sample to its number of samples."""
REPLICATES = 2000
PROGRESS_POINTS = 512
SHIFT_STEPS = 161
"""Number of shifts over which a p-value is averaged."""
SHIFT_MAX = 10.0
"""Largest of these shifts, in standard errors."""
MIN_RUN_VARIATION = 0.02
"""Minimum standard deviation of the logarithm of the ratio of two runs' times. It is an allowance, not a measurement:
without it, open loops whose runs vary by 2 % were called different in one pair of eight. It is a floor and not added,
because Student's t with DEGREES_OF_FREEDOM leaves enough room for a burst."""
ERROR_BAR_SIGMAS = 2.576
"""Half-width of an error bar in standard deviations. It holds 99 % of normally distributed errors."""
TOKENS_MAX = 4_000_000
"""Maximum tokens of a run of which all gaps are used. Of longer runs, the gaps of every k-th request are used. Gaps of
one step resemble each other, so little is lost."""


@dataclass(frozen=True)
class ComparedRun:
    """The data of a run that a comparison needs: the Run without its Records, their Frame, and the summary."""

    run: Run
    frame: Frame
    summary: Summary

    @property
    def name(self) -> str:
        return run_name(self.run)

    @property
    def one_burst(self) -> bool:
        """True if all requests were due at the same time, so that all of them waited in one queue."""
        return self.frame.window is None

    @property
    def span_s(self) -> float:
        """Length of the measurement window in seconds."""
        span = self.frame.span_ns
        return math.nan if span is None else (span[1] - span[0]) / 1e9

    @property
    def requests(self) -> int:
        """Number of complete requests that were due in the window."""
        return int(self.frame.sampled.sum())


def run_name(run: Run) -> str:
    """Return the folder name of a run. For a repeat, it includes the name of the parent folder."""
    folder = run.path.resolve().parent
    return f"{folder.parent.name}/{folder.name}" if folder.name.startswith("repeat-") else folder.name


class Samples(NamedTuple):
    """Samples of one latency in the order of time, divided into contiguous parts."""

    values: Floats
    offsets: Integers
    """Boundaries of the parts."""
    strata: bool
    """True if chance lies in the differences within the parts (a burst); False if it lies between the parts."""


def samples_of(run: ComparedRun, metric: Metric) -> Samples:
    """Return the samples of a latency.

    How long a request of a burst waits depends on its position in the order sent, so latencies of bursts are divided
    into strata of neighbours. All other samples are divided into batches. Seconds per token never depend on the
    position, because all requests that are in flight at the same time have the same pace.
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
    """Return the gaps between tokens by the time they ended. A chunk of c tokens has one gap and c - 1 zeros."""
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
    """Return the offsets of `parts` contiguous parts of `count` samples, with sizes as equal as possible."""
    return np.linspace(0, count, max(1, min(parts, count)) + 1).astype(np.int64)


def quantile(samples: Samples, share: float) -> float:
    """Return the quantile of the samples at this share."""
    return percentile(np.sort(samples.values), share)


def mean_variance(values: Floats, samples: Samples) -> float:
    """Return the variance of the mean of `values`, which has one value per sample.

    For strata it is the sum of the variances within them (Cochran, "Sampling Techniques", 3rd edition, 1977, section
    5.4). For batches of dependent samples it is the variance of the batch means (the ratio estimator of Cochran,
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
    """Return how many independent samples would determine the quantile at `share`, which is `value`, equally well."""
    variance = mean_variance((samples.values <= value).astype(np.float64), samples)
    maximum = len(samples.values) * (MAX_SIZE_FACTOR if samples.strata else 1)
    if variance <= 0:
        return maximum
    return float(min(maximum, max(1.0, share * (1 - share) / variance)))


def quantile_error(samples: Samples, share: float, random: np.random.Generator) -> float:
    """Return the bootstrap standard deviation of the logarithm of a quantile; NaN if it is 0 in some bootstrap samples.

    The k-th smallest of n values drawn with replacement is the quantile of the sample at a Beta(k, n - k + 1) share
    (David and Nagaraja, "Order Statistics", section 2.1). No bootstrap sample therefore needs to be drawn. Dependent
    samples count by their effective size.
    """
    ordered = np.sort(samples.values)
    size = effective_size(samples, share, percentile(ordered, share))
    shares = random.beta(share * (size - 1) + 1, (1 - share) * (size - 1) + 1, REPLICATES)
    quantiles = np.interp(shares * (len(ordered) - 1), np.arange(len(ordered)), ordered)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.std(np.log(quantiles)))


def piece_error(a: ComparedRun, b: ComparedRun, *, shift: bool = False) -> float:
    """Return the standard deviation of the logarithm of the ratio B / A of the times of one of PIECES pieces.

    The pieces contain equal shares of the work. With `shift`, one change of pace is removed first. NaN if a run has no
    tokens or too few steps.
    """
    steps_min = STEPS_MIN_WITH_SHIFT if shift else STEPS_MIN
    for run in (a, b):
        gap_s = run.summary.latency.icl.mean  # about one step of the engine
        if not gap_s or run.span_s / gap_s < steps_min:
            return math.nan
    progress_a, progress_b = _progress(a.frame), _progress(b.frame)
    if progress_a is None or progress_b is None:
        return math.nan
    # The edges are shares of the work between which equal parts of the average time of both runs pass.
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
    """Return the best fit of one step to the values, or their mean if no step explains enough of their variation."""
    fits = [np.repeat((values[:cut].mean(), values[cut:].mean()), (cut, len(values) - cut)) for cut in range(1, PIECES)]
    residuals = [float(np.square(values - fit).sum()) for fit in fits]
    mean = np.full(len(values), values.mean())
    explains_enough = min(residuals) <= (1 - EXPLAINED) * np.square(values - mean).sum()
    return fits[int(np.argmin(residuals))] if explains_enough else mean


def _progress(frame: Frame) -> Floats | None:
    """Return the times, in seconds from the start of the window, at which equal shares of the tokens had arrived."""
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
    """Return the standard deviation of the logarithm of the time of an interval that is this share of the run.

    Pieces vary independently, so the error of m pieces is 1 / sqrt(m) of that of one piece. An interval shorter than a
    piece varies at least as much as the piece.
    """
    return piece / math.sqrt(min(PIECES, max(1.0, residence * PIECES)))


def latency_error(metric: Metric, a: ComparedRun, b: ComparedRun, piece: float, values: tuple[float, float]) -> float:
    """Return the error of a latency of bursts from chance in the steps, which all requests of a burst share.

    It is 0 for other loads and for gaps between tokens, because there the batches of the sample contain that chance.
    """
    if not (a.one_burst and b.one_burst):
        return 0.0
    if metric.per != "request":
        return server_error(piece, 1.0)
    lengths_s = list(values)
    if metric.unit == "s/token":
        # Seconds per token depend on the time in which all tokens of a response were generated.
        lengths_s = []
        for run in (a, b):
            e2e_s, ttft_s = run.summary.latency.e2e.p50 or 0.0, run.summary.latency.ttft.p50 or 0.0
            lengths_s.append(max(0.0, e2e_s - (ttft_s if metric.stamps == "tpot" else 0.0)))
    return server_error(piece, min(length_s / run.span_s for length_s, run in zip(lengths_s, (a, b), strict=True)))


def stamp_error(metric: Metric, a: ComparedRun, b: ComparedRun, values: tuple[float, float]) -> float:
    """Return the error of the logarithm of the ratio of two durations in seconds, from the timestamp error bars."""
    errors = []
    for run, value_s in zip((a, b), values, strict=True):
        error_bar_s: float = getattr(run.summary.client, f"error_bar_{metric.stamps}_s") or 0.0
        errors.append(error_bar_s / ERROR_BAR_SIGMAS / value_s if value_s > 0 else 0.0)
    return math.hypot(*errors)


def probability_of_superiority(a: Samples, b: Samples, common_error: float) -> tuple[float, float, float]:
    """Return P(B > A) + P(B = A) / 2, its standard error, and the two-sided p-value of one half.

    This is the statistic of Mann and Whitney (1947) as a share of pairs, with the error of Brunner and Munzel ("The
    nonparametric Behrens-Fisher problem", 2000), which allows for ties and for different spreads. `common_error` is the
    standard error of the logarithm of a factor that chance applied to all of B. The p-value is its mean over the
    plausible factors (Student's t with DEGREES_OF_FREEDOM), and the returned error is the one that corresponds to this
    p-value.
    """
    ordered_a, ordered_b = np.sort(a.values), np.sort(b.values)
    placements_a, placements_b = _placements(a.values, ordered_b), _placements(b.values, ordered_a)
    share = float(placements_b.mean())
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
    """Return, for each value, the share of the sorted other sample below it. Equal values count one half."""
    below = np.searchsorted(ordered, values, "left")
    up_to = np.searchsorted(ordered, values, "right")
    return (below + up_to) / 2 / len(ordered)
