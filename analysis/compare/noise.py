"""How far a figure of one run may lie from that of another run of the same server, as far as one run can show it.

Requests of one run are not independent: they wait in one queue and share the engine's steps. Three sources of chance
are told apart, and their variances added:

    requests     which requests there happened to be. By a bootstrap of the quantile. Requests of a burst have their
                 place in the queue by plan, so that only the differences between neighbours are chance (strata). In an
                 open or closed loop neighbours resemble each other, and a sample counts for as many as contiguous
                 stretches of it show it to be worth (batch means).
    server       a burst is one stretch of work, so chance in the length of a step moves all requests that it touches
                 together, and no resampling of requests shows that. Both runs did the same work, so each is cut where
                 the same shares of it were done; how much the pieces' relative lengths vary says how much all may.
    stamps       the error bars of the two runs.

What differs between whole runs (another card, its temperature, a neighbour) is in none of them, and only repeats show
it. As it is never nothing, no error is taken to be below RUNS_DIFFER.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from analysis.compare.loaded import Loaded
from analysis.frame import Floats, Integers, sum_by_row
from analysis.stats import percentile, student_cdf, student_quantile

PIECES = 16
"""A run is cut into so many: enough to see how they vary, few enough that each outlasts what lingers in a queue."""
LEVELS = (1, 2, 4)
"""Pieces are also joined in twos and fours: what lingers from one to the next shows in how those vary."""
FREEDOM = PIECES // 2 - 1
"""Degrees of freedom that are claimed for it: those of pieces joined in twos."""
STEPS_LEAST = 8 * PIECES
"""A run of fewer steps is too short to be cut: chance that lingers for some steps would be in all pieces alike."""
STRATUM = 16
"""Neighbours in a burst of which the differences are taken for chance."""
WORTH_MOST = 100
"""However alike neighbours are, a sample is worth no more than so many times its number."""
REPLICATES = 2000
PROGRESS_POINTS = 512
FACTORS, FACTORS_WIDE = 161, 10.0
"""Over how many factors a p-value is averaged, and how many standard errors they reach."""
RUNS_DIFFER = 0.02
"""By how much the times of two runs differ (standard deviation of the logarithm of their ratio) even where chance
within them is less. An allowance and no measurement: without it open loops whose runs vary by 2 % were called different
in one pair of eight. It is a floor and not added: Student's t with FREEDOM leaves a burst room enough for it."""
ERROR_BARS = 2.576
"""An error bar holds 99 % of the stamps: so many standard deviations of a normal error."""

BARS = {"ttft": "ttft", "ttft_due": "ttft", "tpot": "tpot", "icl": "itl", "itl": "itl"}


class Samples(NamedTuple):
    """Samples of one latency in the order of time."""

    values: Floats
    offsets: Integers
    """They are cut into these contiguous parts."""
    strata: bool
    """Whether chance is in how samples of one part differ (a burst), or in how the parts do."""


def mean_variance(values: Floats, samples: Samples) -> float:
    """Variance of the mean of one value per sample.

    Of strata the sum over their own (Cochran, "Sampling Techniques", 3rd edition, 1977, section 5.4); of dependent
    stretches that of their means (batch means; the ratio estimator of Cochran, section 2.11).
    """
    offsets = samples.offsets
    counts, count = np.diff(offsets), len(values)
    sums = sum_by_row(values, offsets)
    if samples.strata:
        within = sum_by_row(np.square(values - np.repeat(sums / np.maximum(counts, 1), counts)), offsets)
        return float((within * counts / np.maximum(counts - 1, 1)).sum()) / count**2
    residuals = sums - values.mean() * counts
    return float(np.square(residuals).sum()) / count**2 * len(counts) / max(1, len(counts) - 1)


def worth(samples: Samples, share: float, at: float) -> float:
    """How many independent samples would place the `share`-quantile, which lies at `at`, as exactly."""
    variance = mean_variance((samples.values <= at).astype(np.float64), samples)
    most = len(samples.values) * (WORTH_MOST if samples.strata else 1)
    return most if variance <= 0 else float(min(most, max(1.0, share * (1 - share) / variance)))


def quantile_error(samples: Samples, share: float, random: np.random.Generator) -> float:
    """Standard deviation of the logarithm of a quantile over bootstrap samples; NaN where it is 0 in some.

    The k-th smallest of n values drawn with replacement is the sample's quantile at a Beta(k, n - k + 1) share (David
    and Nagaraja, "Order Statistics", section 2.1), so that no sample needs to be drawn. Dependent samples count for as
    many as they are worth.
    """
    ordered = np.sort(samples.values)
    size = worth(samples, share, percentile(ordered, share))
    shares = random.beta(share * (size - 1) + 1, (1 - share) * (size - 1) + 1, REPLICATES)
    drawn = np.interp(shares * (len(ordered) - 1), np.arange(len(ordered)), ordered)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.std(np.log(drawn)))


def parts(count: int, number: int) -> Integers:
    """Offsets of `number` contiguous parts of `count` samples, as equal as can be."""
    return np.linspace(0, count, max(1, min(number, count)) + 1).astype(np.int64)


def piece_error(a: Loaded, b: Loaded) -> float:
    """Standard deviation of the logarithm of the ratio of B's to A's time for one of PIECES pieces of the same work.

    NaN where a run has no tokens, or too few steps.
    """
    if min(_steps(a), _steps(b)) < STEPS_LEAST:
        return math.nan
    progress_a, progress_b = _progress(a), _progress(b)
    if progress_a is None or progress_b is None:
        return math.nan
    shares = np.linspace(0, 1, PROGRESS_POINTS)
    course = progress_a / progress_a[-1] + progress_b / progress_b[-1]
    edges = np.interp(np.linspace(0, 2, PIECES + 1), course, shares)
    lengths_a, lengths_b = (np.diff(np.interp(edges, shares, each)) for each in (progress_a, progress_b))
    return max(_level_error(lengths_a, lengths_b, level) for level in LEVELS)


def _level_error(lengths_a: Floats, lengths_b: Floats, level: int) -> float:
    """That of one piece, as pieces joined by `level` show it."""
    joined_a, joined_b = (each.reshape(-1, level).sum(axis=1) for each in (lengths_a, lengths_b))
    known = (joined_a > 0) & (joined_b > 0)
    if known.sum() < 2:
        return math.inf
    return float(np.std(np.log(joined_b[known] / joined_a[known]), ddof=1)) * math.sqrt(level)


def server_error(piece: float, stretch: float) -> float:
    """Standard deviation of the logarithm of the time of a stretch, a share of the run, that outlasts several pieces.

    Pieces vary independently, so that of m of them varies by 1 / sqrt(m) as much; a stretch within one piece by no less
    than the piece.
    """
    return piece / math.sqrt(min(PIECES, max(1.0, stretch * PIECES)))


def stamp_error(name: str, a: Loaded, b: Loaded, value_a: float, value_b: float) -> float:
    """Of the logarithm of the ratio of two durations in seconds, from the error bars of their runs. A duration that is
    none of TTFT, TPOT, ICL or ITL ends with an answer, as E2E does."""
    bar = f"error_bar_{BARS.get(name, 'e2e')}_s"
    return math.hypot(_stamped(a, bar, value_a), _stamped(b, bar, value_b))


def span_s(run: Loaded) -> float:
    """Length of the run's window."""
    span = run.frame.span_ns
    return math.nan if span is None else (span[1] - span[0]) / 1e9


def superiority(a: Samples, b: Samples, together: float) -> tuple[float, float, float]:
    """P(B > A) + P(B = A) / 2, its standard error, and the two-sided p-value of a half.

    The statistic of Mann and Whitney (1947) as a share of pairs, with the error of Brunner and Munzel ("The
    nonparametric Behrens-Fisher problem", 2000), which allows for ties and for another spread. `together` is the
    standard error of the logarithm of a factor that chance put on all of B: the p-value is the mean over the factors
    that it may have been (Student's t with FREEDOM), and the error that which gives this p-value.
    """
    ordered = np.sort(a.values)
    placed_b, placed_a = _placements(b.values, ordered), _placements(a.values, np.sort(b.values))
    share = float(placed_b.mean())
    own = math.sqrt(mean_variance(placed_a, a) + mean_variance(placed_b, b))
    beyond = 0.0
    for step, chance in _factors():
        moved = float(_placements(b.values * math.exp(step * together), ordered).mean()) if together else share
        beyond += chance * _normal_cdf((0.5 - moved) * (1 if share >= 0.5 else -1), own)
    p = min(1.0, 2 * beyond)
    return share, _error_of(p, share - 0.5, own), p


@cache
def _factors() -> list[tuple[float, float]]:
    """In standard errors how large a factor may be, and how likely it is to be about that large."""
    steps = np.linspace(-FACTORS_WIDE, FACTORS_WIDE, FACTORS).tolist()
    reached = [student_cdf(step, FREEDOM) for step in steps]
    return list(zip(steps, np.diff(reached, prepend=0.0).tolist(), strict=True))


def quantile(samples: Samples, share: float) -> float:
    """Of all samples, linearly interpolated."""
    return percentile(np.sort(samples.values), share)


def _progress(run: Loaded) -> Floats | None:
    """The instants, in seconds from the window's start, by which equally many further tokens had arrived."""
    span = run.frame.span_ns
    if span is None or len(run.frame.chunk_ns) == 0:
        return None
    inside = (run.frame.chunk_ns >= span[0]) & (run.frame.chunk_ns <= span[1])
    instants = run.frame.chunk_ns[inside]
    order = np.argsort(instants)
    tokens = np.cumsum(run.frame.chunk_tokens[inside][order], dtype=np.float64)
    if len(tokens) < 2 * PIECES:
        return None
    shares = np.concatenate(([0.0], tokens / tokens[-1]))
    times = np.concatenate(([0.0], (instants[order] - span[0]) / 1e9))
    return np.interp(np.linspace(0, 1, PROGRESS_POINTS), shares, times)


def _steps(run: Loaded) -> float:
    """About how many steps the engine took: how often the mean gap between chunks fits into the run."""
    gap_s = run.summary["latency"]["icl_s"]["mean"]
    return span_s(run) / gap_s if gap_s else 0.0


def _stamped(run: Loaded, name: str, value_s: float) -> float:
    bar = run.summary["client"][name] or 0.0
    return bar / ERROR_BARS / value_s if value_s > 0 else 0.0


def _normal_cdf(value: float, deviation: float) -> float:
    if deviation == 0:
        return 0.5 if value == 0 else float(value > 0)
    return NormalDist().cdf(value / deviation)


def _error_of(p: float, effect: float, least: float) -> float:
    """The standard error with which an effect has this two-sided p-value by Student's t with FREEDOM."""
    if effect == 0 or p >= 1 or p <= 0:
        return least
    return max(least, abs(effect) / student_quantile(1 - p / 2, FREEDOM))


def _placements(values: Floats, ordered: Floats) -> Floats:
    """For each value the share of the sorted others below it, those equal to it counted half."""
    below, upto = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (below + upto) / 2 / len(ordered)


def ordered_by(values: Floats, instants: Floats | Sequence[float]) -> Floats:
    """The values in the order of these instants."""
    return values[np.argsort(instants, kind="stable")]
