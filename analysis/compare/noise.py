"""How far a figure of one run may lie from that of another run of the same server, as far as one run can show it.

Requests of one run are not independent: they wait in one queue and share the engine's steps. Three sources of chance
are told apart, and their variances added:

    requests     which requests there happened to be. By a bootstrap of the quantile. In an open or closed loop the
                 sample counts for as many as contiguous stretches of it show it to be worth (batch means).
    server       a burst is one stretch of work, so chance in the length of a step moves all requests that it touches
                 together, and no resampling of requests shows that. Both runs did the same work, so each is cut where
                 the same shares of it were done; how much the pieces' relative lengths vary says how much the whole may.
    stamps       the error bars of the two runs.

What differs between whole runs (another card, its temperature, a neighbour) is in none of them: only repeats show it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.compare.loaded import Loaded
from analysis.formulas import window_ns
from analysis.frame import Floats, Integers
from analysis.stats import effective_size, percentile

PIECES = 16
"""A run is cut into so many: enough to see how they vary, few enough that each outlasts what lingers in a queue."""
FREEDOM = PIECES - 1
REPLICATES = 2000
PROGRESS_POINTS = 512
ERROR_BARS = 2.576
"""An error bar holds 99 % of the stamps: so many standard deviations of a normal error."""


class Samples(NamedTuple):
    """Samples of one latency in the order of time."""

    values: Floats
    offsets: Integers | None
    """Contiguous stretches that are held to be independent of each other; None where each sample is."""


def quantile_error(samples: Samples, share: float, random: np.random.Generator) -> float:
    """Standard deviation of the logarithm of a quantile over bootstrap samples; NaN where it is 0 in some.

    The k-th smallest of n values drawn with replacement is the sample's quantile at a Beta(k, n - k + 1) share (David
    and Nagaraja, "Order Statistics", section 2.1), so that no sample needs to be drawn. Dependent samples count for as
    many as they are worth.
    """
    ordered = np.sort(samples.values)
    size = effective_size(samples.values, samples.offsets, share, ordered)
    shares = random.beta(share * (size - 1) + 1, (1 - share) * (size - 1) + 1, REPLICATES)
    drawn = np.interp(shares * (len(ordered) - 1), np.arange(len(ordered)), ordered)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.std(np.log(drawn)))


def stretches(count: int) -> Integers:
    """Offsets of PIECES contiguous stretches of `count` samples, as equal as can be."""
    return np.linspace(0, count, min(PIECES, count) + 1).astype(np.int64)


def piece_error(a: Loaded, b: Loaded) -> float:
    """Standard deviation of the logarithm of the ratio of B's to A's time for one of PIECES pieces of the same work.

    NaN where a run has no tokens.
    """
    progress_a, progress_b = _progress(a), _progress(b)
    if progress_a is None or progress_b is None:
        return math.nan
    shares = np.linspace(0, 1, PROGRESS_POINTS)
    course = progress_a / progress_a[-1] + progress_b / progress_b[-1]
    edges = np.interp(np.linspace(0, 2, PIECES + 1), course, shares)
    lengths_a, lengths_b = (np.diff(np.interp(edges, shares, each)) for each in (progress_a, progress_b))
    known = (lengths_a > 0) & (lengths_b > 0)
    if known.sum() < PIECES / 2:
        return math.nan
    return float(np.std(np.log(lengths_b[known] / lengths_a[known]), ddof=1))


def server_error(piece: float, stretch: float) -> float:
    """Standard deviation of the logarithm of the time of a stretch, a share of the run, that outlasts several pieces.

    Pieces vary independently, so that of m of them varies by 1 / sqrt(m) as much; a stretch within one piece by no less
    than the piece.
    """
    return piece / math.sqrt(min(PIECES, max(1.0, stretch * PIECES)))


def stamp_error(a: Loaded, b: Loaded, value_a: float, value_b: float) -> float:
    """Of the logarithm of the ratio of two durations in seconds, from the error bars of their runs."""
    return math.hypot(_stamped(a, value_a), _stamped(b, value_b))


def span_s(run: Loaded) -> float:
    """Length of the run's window."""
    span = window_ns(run.frame)
    return math.nan if span is None else (span[1] - span[0]) / 1e9


def superiority(a: Samples, b: Samples) -> tuple[float, float]:
    """P(B > A) + P(B = A) / 2 and its standard error: the statistic of Mann and Whitney (1947), as a share of pairs.

    The error is that of Brunner and Munzel ("The nonparametric Behrens-Fisher problem", 2000), which allows for ties
    and for another spread, with the number of samples in place of which each is worth.
    """
    ordered_a, ordered_b = np.sort(a.values), np.sort(b.values)
    placed_b, placed_a = _placements(b.values, ordered_a), _placements(a.values, ordered_b)
    share = float(placed_b.mean())
    variance = 0.0
    for samples, placed, ordered in ((a, placed_a, ordered_a), (b, placed_b, ordered_b)):
        size = effective_size(samples.values, samples.offsets, 0.5, ordered)
        variance += float(np.var(placed, ddof=1)) / size
    return share, math.sqrt(variance)


def shift_of(a: Samples, b: Samples, ratio_error: float) -> float:
    """By how much the share of pairs moves when all of B is slower by `ratio_error` of its logarithm."""
    if not math.isfinite(ratio_error) or ratio_error == 0:
        return 0.0
    ordered_a = np.sort(a.values)
    slower, faster = (
        float(_placements(b.values * math.exp(sign * ratio_error), ordered_a).mean()) for sign in (1, -1)
    )
    return (slower - faster) / 2


def quantile(samples: Samples, share: float) -> float:
    """Of all samples, linearly interpolated."""
    return percentile(np.sort(samples.values), share)


def _progress(run: Loaded) -> Floats | None:
    """The instants, in seconds from the window's start, by which equally many further tokens had arrived."""
    span = window_ns(run.frame)
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


def _stamped(run: Loaded, value_s: float) -> float:
    bar = run.summary["client"]["error_bar_s"] or 0.0
    return bar / ERROR_BARS / value_s if value_s > 0 else 0.0


def _placements(values: Floats, ordered: Floats) -> Floats:
    """For each value the share of the sorted others below it, those equal to it counted half."""
    below, upto = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (below + upto) / 2 / len(ordered)


def ordered_by(values: Floats, instants: Floats | Sequence[float]) -> Floats:
    """The values in the order of these instants."""
    return values[np.argsort(instants, kind="stable")]
