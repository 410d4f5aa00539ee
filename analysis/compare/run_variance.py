"""How far a figure of one run may lie from that of another run of the same server, as far as one run can show it.

Requests of one run are not independent: they wait in one queue and share the engine's steps. Three sources of chance
are told apart, and their variances added:

    requests     which requests there happened to be. By a bootstrap of the quantile. Requests of a burst have their
                 place in the queue by plan, so that only the differences between neighbours are chance (strata). In an
                 open or closed loop neighbours resemble each other, and a sample counts for as many as contiguous
                 batches of it show it to be worth (batch means).
    server       a burst is one stretch of work, so chance in the length of a step moves all requests that it touches
                 together, and no resampling of requests shows that. Both runs did the same work, so each is cut where
                 the same shares of it were done; how much the pieces' relative lengths vary says how much all may.
    stamps       the error bars of the two runs.

What differs between whole runs (another card, its temperature, a neighbour) is in none of them, and only repeats show
it. As it is never nothing, no error is taken to be below RUNS_DIFFER.

A change of pace from one phase to the next (first tokens as fast, the others slower) makes pieces differ too and is no
chance. `piece_error` without a `shift` counts it; with one it takes out the one step that explains most.
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
"""A run is cut into so many: enough to see how they vary, few enough that each outlasts what lingers in a queue."""
LEVELS = (1, 2, 4)
"""Pieces are also joined in twos and fours: what lingers from one to the next shows in how those vary."""
DEGREES_OF_FREEDOM = PIECES // 2 - 1
"""Degrees of freedom that are claimed for it: those of pieces joined in twos."""
STEPS_LEAST = 8 * PIECES
"""A run of fewer steps is too short to be cut: chance that lingers for some steps would be in all pieces alike."""
STEPS_SEEN = 2 * PIECES
"""From so many on its pieces show at least what varies from step to step."""
EXPLAINED = 0.8
"""Of the differences between pieces, what a change of pace explains: chance alone hardly does."""
STRATUM = 16
"""Neighbours in a burst of which the differences are taken for chance."""
WORTH_MOST = 100
"""However alike neighbours are, a sample is worth no more than so many times its number."""
REPLICATES = 2000
PROGRESS_POINTS = 512
FACTORS, FACTORS_WIDE = 161, 10.0
"""Over how many factors a p-value is averaged, and how many standard errors they reach."""
MIN_RUN_VARIATION = 0.02
"""By how much the times of two runs differ (standard deviation of the logarithm of their ratio) even where chance
within them is less. An allowance and no measurement: without it open loops whose runs vary by 2 % were called different
in one pair of eight. It is a floor and not added: Student's t with FREEDOM leaves a burst room enough for it."""
ERROR_BARS = 2.576
"""An error bar holds 99 % of the stamps: so many standard deviations of a normal error."""
TOKENS_MOST = 4_000_000
"""Of a run with more, the gaps of every k-th request: those of one step are alike, so that little is lost."""


@dataclass(frozen=True)
class ComparedRun:
    """What a comparison needs of a run: a Run without its Records, their Frame and its summary."""

    run: Run
    frame: Frame
    summary: Summary

    @property
    def name(self) -> str:
        return run_name(self.run)

    @property
    def one_burst(self) -> bool:
        """Whether all requests were due at one instant, so that all waited in one queue."""
        return self.frame.window is None

    @property
    def span_s(self) -> float:
        span = self.frame.span_ns
        return math.nan if span is None else (span[1] - span[0]) / 1e9

    @property
    def requests(self) -> int:
        """Complete ones that were due in the window."""
        return int(self.frame.sampled.sum())


def run_name(run: Run) -> str:
    """Its folder; of a repeat with that of all."""
    folder = run.path.resolve().parent
    return f"{folder.parent.name}/{folder.name}" if folder.name.startswith("repeat-") else folder.name


class Samples(NamedTuple):
    """Samples of one latency in the order of time, which is what shows how they depend on each other."""

    values: Floats
    offsets: Integers
    """They are cut into these contiguous parts."""
    strata: bool
    """Whether chance is in how samples of one part differ (a burst), or in how the parts do."""


def samples_of(run: ComparedRun, metric: Metric) -> Samples:
    """The samples of a latency. How long a request of a burst waits follows from its place in the order of sending, so
    such samples are cut into strata of neighbours; all others into batches. A pace (seconds per token) is never due to
    the place: whoever ran at the same time had the same."""
    frame = run.frame
    if metric.per != "request":
        return _gaps(frame)
    rows = metric.rows(frame)
    retained = frame.sampled & ~np.isnan(rows)
    instants = (frame.sent_ns if run.one_burst else frame.due_ns)[retained]
    values = rows[retained][np.argsort(instants, kind="stable")]
    by_plan = run.one_burst and metric.unit == "s"
    return Samples(values, split_offsets(len(values), len(values) // STRATUM if by_plan else PIECES), by_plan)


def _gaps(frame: Frame) -> Samples:
    """Gaps between tokens in the order in which they ended: a chunk of c tokens gives one gap and c - 1 zeros."""
    sampled = frame.sampled
    every = max(1, round(float(frame.arrived_tokens[sampled].sum()) / TOKENS_MOST))
    kept_rows = np.zeros(len(sampled), np.bool_)
    kept_rows[np.flatnonzero(sampled)[::every]] = True
    gaps, ends = [np.empty(0)], [np.empty(0)]
    for rows, chunks in frame.blocks():
        counts = np.diff(frame.offsets[rows.start : rows.stop + 1])
        retained = np.repeat(kept_rows[rows], counts)
        instants, more = frame.chunk_ns[chunks], frame.chunk_tokens[chunks].astype(np.int64) - 1
        more[~retained | (more < 0)] = 0  # a damaged record may name a chunk without tokens
        retained[frame.offsets[rows][counts > 0] - chunks.start] = False  # a request's first chunk ends no gap
        gaps += [(np.diff(instants, prepend=0.0) / 1e9)[retained], np.zeros(int(more.sum()))]
        ends += [instants[retained], np.repeat(instants, more)]
    values = np.concatenate(gaps)[np.argsort(np.concatenate(ends), kind="stable")]
    return Samples(values, split_offsets(len(values), PIECES), strata=False)


def split_offsets(count: int, number: int) -> Integers:
    """Offsets of `number` contiguous parts of `count` samples, as equal as can be."""
    return np.linspace(0, count, max(1, min(number, count)) + 1).astype(np.int64)


def quantile(samples: Samples, share: float) -> float:
    return percentile(np.sort(samples.values), share)


def mean_variance(values: Floats, samples: Samples) -> float:
    """Variance of the mean of one value per sample. Of strata the sum over their own (Cochran, "Sampling Techniques",
    3rd edition, 1977, section 5.4); of dependent batches that of their means (batch means; the ratio estimator of
    Cochran, section 2.11)."""
    offsets = samples.offsets
    if not samples.strata:
        return ratio_variance(values, offsets, float(values.mean()))
    counts = np.diff(offsets)
    means = sum_by_row(values, offsets) / np.maximum(counts, 1)
    within = sum_by_row(np.square(values - np.repeat(means, counts)), offsets)
    return float((within * counts / np.maximum(counts - 1, 1)).sum()) / len(values) ** 2


def effective_size(samples: Samples, share: float, at: float) -> float:
    """How many independent samples would place the `share`-quantile, which lies at `at`, as exactly."""
    variance = mean_variance((samples.values <= at).astype(np.float64), samples)
    maximum = len(samples.values) * (WORTH_MOST if samples.strata else 1)
    return maximum if variance <= 0 else float(min(maximum, max(1.0, share * (1 - share) / variance)))


def quantile_error(samples: Samples, share: float, random: np.random.Generator) -> float:
    """Standard deviation of the logarithm of a quantile over bootstrap samples; NaN where it is 0 in some. The k-th
    smallest of n values drawn with replacement is the sample's quantile at a Beta(k, n - k + 1) share (David and
    Nagaraja, "Order Statistics", section 2.1), so that no sample needs to be drawn. Dependent samples count for as many
    as they are worth."""
    ordered = np.sort(samples.values)
    size = effective_size(samples, share, percentile(ordered, share))
    shares = random.beta(share * (size - 1) + 1, (1 - share) * (size - 1) + 1, REPLICATES)
    drawn = np.interp(shares * (len(ordered) - 1), np.arange(len(ordered)), ordered)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.std(np.log(drawn)))


def piece_error(a: ComparedRun, b: ComparedRun, *, shift: bool = False) -> float:
    """Standard deviation of the logarithm of the ratio of B's to A's time for one of PIECES pieces of the same work,
    which may be allowed one `shift` of pace. NaN where a run has no tokens, or too few steps."""
    for run in (a, b):
        gap_s = run.summary.latency.icl.mean  # about one step of the engine
        if not gap_s or run.span_s / gap_s < (STEPS_SEEN if shift else STEPS_LEAST):
            return math.nan
    progress_a, progress_b = _progress(a.frame), _progress(b.frame)
    if progress_a is None or progress_b is None:
        return math.nan
    shares = np.linspace(0, 1, PROGRESS_POINTS)
    course = progress_a / progress_a[-1] + progress_b / progress_b[-1]
    edges = np.interp(np.linspace(0, 2, PIECES + 1), course, shares)
    lengths = [np.diff(np.interp(edges, shares, each)) for each in (progress_a, progress_b)]
    if shift and min(map(np.min, lengths)) > 0:
        lengths[1] = lengths[1] / np.exp(_one_step(np.log(lengths[1] / lengths[0])))
    errors = []
    for level in LEVELS:
        joined_a, joined_b = (length.reshape(-1, level).sum(axis=1) for length in lengths)
        known = (joined_a > 0) & (joined_b > 0)
        if known.sum() < 2:
            return math.inf
        errors.append(float(np.std(np.log(joined_b[known] / joined_a[known]), ddof=1)) * math.sqrt(level))
    return max(errors)


def _one_step(values: Floats) -> Floats:
    """The means before and after the place that parts the values best, where that explains most of how they differ;
    their mean elsewhere."""
    fits = [np.repeat((values[:cut].mean(), values[cut:].mean()), (cut, len(values) - cut)) for cut in range(1, PIECES)]
    left = [float(np.square(values - fit).sum()) for fit in fits]
    whole = np.full(len(values), values.mean())
    return fits[int(np.argmin(left))] if min(left) <= (1 - EXPLAINED) * np.square(values - whole).sum() else whole


def _progress(frame: Frame) -> Floats | None:
    """The instants, in seconds from the window's start, by which equally many further tokens had arrived."""
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
    """Standard deviation of the logarithm of the time of a stretch of the run, which is this share of it. Pieces vary
    independently, so that of m of them varies by 1 / sqrt(m) as much; a stretch within one piece by no less than the
    piece."""
    return piece / math.sqrt(min(PIECES, max(1.0, residence * PIECES)))


def latency_error(metric: Metric, a: ComparedRun, b: ComparedRun, piece: float, values: tuple[float, float]) -> float:
    """What chance in the steps does to a latency of one burst, in which all share them. Elsewhere it is in how the
    batches of the sample differ, as it is for gaps between tokens."""
    if not (a.one_burst and b.one_burst):
        return 0.0
    if metric.per != "request":
        return server_error(piece, 1.0)
    lengths = [*values]
    if metric.unit == "s/token":  # the residence time of a whole answer, in place of that by its tokens
        lengths = []
        for run in (a, b):
            e2e, ttft = run.summary.latency.e2e.p50 or 0.0, run.summary.latency.ttft.p50 or 0.0
            lengths.append(max(0.0, e2e - (ttft if metric.stamps == "tpot" else 0.0)))  # TPOT: after its first token
    return server_error(piece, min(length / run.span_s for length, run in zip(lengths, (a, b), strict=True)))


def stamp_error(metric: Metric, a: ComparedRun, b: ComparedRun, values: tuple[float, float]) -> float:
    """Of the logarithm of the ratio of two durations in seconds, from the error bars of their runs."""
    errors = []
    for run, value_s in zip((a, b), values, strict=True):
        bar: float = getattr(run.summary.client, f"error_bar_{metric.stamps}_s") or 0.0
        errors.append(bar / ERROR_BARS / value_s if value_s > 0 else 0.0)
    return math.hypot(*errors)


def probability_of_superiority(a: Samples, b: Samples, together: float) -> tuple[float, float, float]:
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
    beyond, reached = 0.0, 0.0
    for step in np.linspace(-FACTORS_WIDE, FACTORS_WIDE, FACTORS).tolist():
        below = student_cdf(step, DEGREES_OF_FREEDOM)
        chance, reached = below - reached, below
        moved = float(_placements(b.values * math.exp(step * together), ordered).mean()) if together else share
        away = (0.5 - moved) * (1 if share >= 0.5 else -1)
        certain = 0.5 if away == 0 else float(away > 0)
        beyond += chance * (NormalDist().cdf(away / own) if own else certain)
    p, effect = min(1.0, 2 * beyond), share - 0.5
    if effect == 0 or p in (0.0, 1.0):
        return share, own, p
    return share, max(own, abs(effect) / student_quantile(1 - p / 2, DEGREES_OF_FREEDOM)), p


def _placements(values: Floats, ordered: Floats) -> Floats:
    """For each value the share of the sorted others below it, those equal to it counted half."""
    below, upto = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (below + upto) / 2 / len(ordered)
