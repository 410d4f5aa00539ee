"""All statistics: exact percentiles from raw samples and how far to trust them, tests, intervals of figures, and
whether the load that went out is the one that was asked for.

Percentiles interpolate linearly between order statistics (type 7 of Hyndman and Fan, "Sample quantiles in statistical
packages", 1996; numpy's default). Their intervals are order statistics too (David and Nagaraja, "Order Statistics",
2003, section 7.1): the number of samples below the true p-quantile is binomial(n, p) whatever the distribution is.

How exactly the rates of a window are known shows in how they vary within it. It is cut into equal batches, each longer
than a request's residence time, and the rate of each is one value: what lingers within a batch moves that one alone
(batch means: Law and Carson, "A sequential procedure for determining the length of a steady-state simulation", 1979).
Their mean is the figure. Its interval is that of the studentised bootstrap (Efron and Tibshirani, "An Introduction to
the Bootstrap", 1993, section 12.5), seeded, so that a run always gives the same. A burst is one piece of work and has
no such batches: only repeats show how another would differ.

scipy.special is imported where it is needed: it takes 0.4 s, and the summary of a burst needs none of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np

from loadgen.analysis.chunk_columns import OrderStatistics
from loadgen.analysis.frame import NS_PER_S, Booleans, Floats, Frame, Integers, sum_by_row
from loadgen.analysis.objectives import AdjustedDistribution, Distribution
from loadgen.analysis.summary import Delivery, GapTest, GapTests, SendLateness, TargetDueSent
from loadgen.workloads.arrival_facts import LoadFacts

PERCENTILES: Mapping[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
WITH_INTERVAL = ("p50", "p90", "p95", "p99")
CONFIDENCE = 0.95
BLOCK = 1 << 20
DECIMALS = 9
"""Seconds are rounded to the nanosecond, which is how they were measured."""
MIN_DEGREES_OF_FREEDOM = 3
"""Of a mean's interval: fewer independent samples tell nothing of it."""
MAX_USEFUL_SAMPLES = 10_000_000
"""A sample larger than this is no advice."""
RESOLUTION_MAX = 0.1
"""Gaps known no better than to this share of their mean fit any name, so that nothing would be checked."""
CV_SMALLEST = 1e-3
GAPS_FOR_CHECK = 8
"""Fewer gaps than this say nothing about a distribution."""
MAX_BATCHES, MIN_BATCHES = 30, 10
RESIDENCE_TIMES_PER_BATCH = 2
"""A batch lasts at least so many times as long as a request stays in the median, or neighbours share requests."""
REPLICATES = 4000
SEED = 19_930_601
NO_BATCHES = "a run that is one stretch of work has no parts to tell it: how another would differ only repeats show"
UNSTEADY = "no test showed a steady state, so the parts of the run may not be alike"
SHORT = f"it is shorter than {MIN_BATCHES * RESIDENCE_TIMES_PER_BATCH} times as long as a request takes"
ROUNDING = 1e-9
"""Share of the mean below which a standard deviation of equal values is nothing but the rounding of their sum."""
TREND_ERRORS = 2.576
"""Standard errors beyond which a trend is no chance: 1 % of a normal distribution."""
ALIKE = "all parts of the window are alike"

Instants = Sequence[int] | Sequence[int | None] | Floats
BUCKETS_PER_OCTAVE = 4
"""Of lateness (engine.health)."""


def describe(samples: Floats, offsets: Integers | None = None) -> Distribution:
    """The figures of these samples, and which of its percentiles are `thin`. `offsets` says which samples belong to one
    request (as in Frame), when there may be several per request: such samples resemble each other, and the intervals
    widen accordingly."""
    count = len(samples)
    if count == 0:
        nothing = dict.fromkeys(("mean", "std", "min", "max", *WITH_INTERVAL))
        return Distribution(n=0, **nothing, ci95={}, thin=[])
    ordered, mean = np.sort(samples), samples.mean()
    # Standard deviation of the population that they are a sample of, without a second array of their size.
    parts = (samples[first : first + BLOCK] - mean for first in range(0, count, BLOCK))
    sizes = {name: effective_size(samples, offsets, share, ordered) for name, share in PERCENTILES.items()}
    return describe_sorted(ordered, float(mean), math.fsum(float(part @ part) for part in parts), sizes)


def describe_sorted(
    ordered: Floats | OrderStatistics, mean: float, squares: float, sizes: Mapping[str, int]
) -> Distribution:
    """Of sorted samples, with the sum of the squares of what they differ by from their mean."""
    count = len(ordered)
    thin = [name for name, share in PERCENTILES.items() if sizes[name] < samples_needed(share)]
    shown = [name for name in PERCENTILES if name in WITH_INTERVAL or name not in thin]
    return Distribution(
        n=count,
        mean=round_to_ns(float(mean)),
        std=round_to_ns(math.sqrt(squares / (count - 1))) if count > 1 else None,
        min=round_to_ns(float(ordered[0])),
        max=round_to_ns(float(ordered[-1])),
        **{name: round_to_ns(percentile(ordered, PERCENTILES[name])) for name in shown},
        ci95={name: interval(ordered, PERCENTILES[name], sizes[name]) for name in WITH_INTERVAL},
        thin=[name for name in thin if name in shown],
    )


def describe_adjusted(samples: Floats, failures: int) -> AdjustedDistribution:
    """Percentiles when each of `failures` counts as infinitely slow."""
    ordered = np.sort(np.concatenate((samples, np.full(failures, np.inf))))
    values = {name: percentile(ordered, PERCENTILES[name]) for name in WITH_INTERVAL}
    finite = {name: round_to_ns(value) if math.isfinite(value) else None for name, value in values.items()}
    thin = [name for name in WITH_INTERVAL if len(ordered) < samples_needed(PERCENTILES[name])]
    return AdjustedDistribution(n=len(ordered), failures=failures, **finite, thin=thin)


def percentile(ordered: Floats | OrderStatistics, share: float) -> float:
    """The `share`-quantile of sorted samples by linear interpolation; NaN of none, and inf next to an inf."""
    if len(ordered) == 0:
        return math.nan
    position = share * (len(ordered) - 1)
    below = int(position)
    low, fraction = float(ordered[below]), position - below
    if fraction == 0 or below + 1 == len(ordered):
        return low
    high = float(ordered[below + 1])
    return high if math.isinf(high) else low + fraction * (high - low)


def percentiles(samples: Floats, *shares: float) -> list[float]:
    """Of samples in any order. numpy's own would import masked arrays: 20 ms."""
    ordered = np.sort(samples)
    return [percentile(ordered, share) for share in shares]


@cache
def samples_needed(share: float) -> int:
    """Samples from which on the `share`-quantile means something: 11, 64, 130, 662 and 6636 for p50 to p99.9. MLPerf's
    rule (mlcommons/inference, early stopping, at 99 % confidence): the smallest n for which the chance that fewer than
    two samples lie beyond the quantile is at most 1 %. That chance is q**n + n (1-q) q**(n-1)."""
    count = 2
    while share**count + count * (1 - share) * share ** (count - 1) > 0.01:
        count += 1
    return count


def interval_ranks(count: int, share: float, confidence: float = CONFIDENCE) -> tuple[int | None, int | None]:
    """Ranks (from 0) of the two order statistics that enclose the `share`-quantile; None where there is none. With B
    binomial(count, share), the lower rank is the largest l with P(B < l) <= alpha / 2 (counted from 1) and the upper
    one the smallest u with P(B >= u) <= alpha / 2: each side misses with at most half of the error allowed."""
    first, chances = _binomial(count, share)
    below = np.cumsum(chances)  # P(B <= first + i)
    tail = (1 - confidence) / 2
    lower = first + int(np.searchsorted(below, tail, side="right"))  # P(B < lower) <= tail
    upper = first + int(np.searchsorted(below, 1 - tail, side="left")) + 1  # P(B >= upper) <= tail
    return (lower - 1 if lower >= 1 else None, upper - 1 if upper <= count else None)


def interval(ordered: Floats | OrderStatistics, share: float, size: int) -> tuple[float | None, float | None]:
    """The order statistics around the quantile, widened to hold the interpolated figure where that lies outside."""
    (lower, upper), figure = interval_indices(len(ordered), share, size), percentile(ordered, share)
    low = None if lower is None else round_to_ns(min(figure, float(ordered[lower])))
    return low, None if upper is None else round_to_ns(max(figure, float(ordered[upper])))


def interval_indices(count: int, share: float, size: int) -> tuple[int | None, int | None]:
    """Which of `count` ordered samples that are worth `size` are the ends of the interval."""
    lower, upper = interval_ranks(size, share)
    scale = count / size
    above = None if upper is None else min(count, math.ceil((upper + 1) * scale)) - 1
    return None if lower is None else int(lower * scale), above


def share_interval(successes: int, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Interval of a share of which `successes` of `count` were seen: exact, so never narrower than it promises. Clopper
    and Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial" (1934): all shares
    under which neither this many successes nor this few are rarer than alpha / 2. (0, 1) of none."""
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(betaincinv(successes, count - successes + 1, tail))
    high = 1.0 if successes == count else float(betaincinv(successes + 1, count - successes, 1 - tail))
    return low, high


def ratio_variance(values: Floats | Booleans, offsets: Integers, mean: float) -> float:
    """Variance of the mean of values in contiguous groups, which may depend on each other within a group. The mean is a
    ratio of two totals, of the values and of their number; its variance is that of the groups' residuals (Cochran,
    "Sampling Techniques", 3rd edition, 1977, section 2.11). Groups of one value give the usual s**2 / n."""
    return ratio_variance_from_sums(sum_by_row(values, offsets), np.diff(offsets), mean)


def ratio_variance_from_sums(sums: Floats, counts: Integers, mean: float) -> float:
    """Likewise of groups of so many values with these sums."""
    groups = int(np.count_nonzero(counts))
    residuals = sums - mean * counts
    return float(np.square(residuals).sum()) / int(counts.sum()) ** 2 * groups / max(1, groups - 1)


def mean_interval(samples: Floats, offsets: Integers | None = None) -> tuple[float, float]:
    """Interval of the mean by Student's t; infinite for fewer than four independent samples."""
    ends = np.arange(len(samples) + 1) if offsets is None else offsets
    groups = int(np.count_nonzero(np.diff(ends)))
    if groups <= MIN_DEGREES_OF_FREEDOM:
        return -math.inf, math.inf
    mean = float(samples.mean())
    margin = student_quantile((1 + CONFIDENCE) / 2, groups - 1) * math.sqrt(ratio_variance(samples, ends, mean))
    return mean - margin, mean + margin


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Of one value per run; no standard deviation of a single one."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None


def student_cdf(t: float, freedom: float) -> float:
    """P(T <= t) for Student's t, of any positive number of degrees of freedom, whole or not."""
    from scipy.special import stdtr

    return float(stdtr(freedom, t))


def student_quantile(share: float, freedom: float) -> float:
    """The t that `share` of Student's t lies below."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, share))


def kolmogorov_smirnov(below: Floats, above: Floats) -> tuple[float, float]:
    """Statistic and p-value of the one-sample test. `below` and `above` are the named distribution function at the
    least and at the most that each value of the sample can have been, in ascending order; the same array twice is the
    ordinary test. The statistic is the largest distance of the sample's steps from that band. The p-value is asymptotic
    with Stephens's correction (JRSS B 32, 1970, 115-122): within 0.025 of the exact one from 8 values on, within 0.005
    at 1000."""
    from scipy.special import kolmogorov

    n = len(below)
    steps = np.arange(n + 1) / n
    statistic = max(0.0, float(np.max(steps[1:] - above)), float(np.max(below - steps[:-1])))
    root = math.sqrt(n)
    return statistic, float(kolmogorov(statistic * (root + 0.12 + 0.11 / root)))


def gamma_cdf(x: Floats, shape: float) -> Floats:
    """Distribution function of a gamma variate of scale 1."""
    if shape == 1:  # exponential gaps, which most loads have: a hundredth of the time
        return -np.expm1(-x)
    from scipy.special import gammainc

    return np.asarray(gammainc(shape, x), np.float64)


def samples_to_decide(reached: float, share: float, more_than: int) -> int | None:
    """About how many independent samples it would take to tell on which side of `share` the true share lies, if
    `reached` of them went on to be successes; None where they are too close for any practical number. The same tails as
    in `interval_ranks`, by doubling and halving. With large numbers this is
    z**2 share (1 - share) / (reached - share)**2 (Cochran, section 4.4); near 0 and 1, where that misleads, it stays
    exact."""
    minimum, maximum = more_than, more_than + 1
    while _told(maximum, share, round(reached * maximum)) is None:
        minimum, maximum = maximum, 2 * maximum
        if maximum > MAX_USEFUL_SAMPLES:
            return None
    while maximum - minimum > 1:
        middle = (minimum + maximum) // 2
        if _told(middle, share, round(reached * middle)) is None:
            minimum = middle
        else:
            maximum = middle
    return maximum


def effective_size(samples: Floats, offsets: Integers | None, share: float, ordered: Floats) -> int:
    """How many independent samples these are worth for the `share`-quantile. For samples in groups the variance of F(q)
    is that of a ratio between groups (Woodruff, "Confidence intervals for medians and other position measures", 1952);
    F (1 - F) over that variance is the size of a sample of independent values that would be as exact. Without groups it
    is their number."""
    if offsets is None:
        return len(samples)
    within = samples <= percentile(ordered, share)
    return effective_group_size(sum_by_row(within, offsets), np.diff(offsets))


def effective_group_size(within: Floats, counts: Integers) -> int:
    """Likewise of groups of so many samples, so many of which are at most the quantile."""
    total = int(counts.sum())
    reached = float(within.sum()) / total
    variance = ratio_variance_from_sums(within, counts, reached)
    if variance <= 0:
        return int(np.count_nonzero(counts))
    return max(1, min(total, int(reached * (1 - reached) / variance)))


def dkw_margin(count: int, confidence: float = CONFIDENCE) -> float:
    """Half-width of the band that holds the whole true distribution function around the empirical one:
    sqrt(ln(2 / alpha) / (2 n)), Dvoretzky, Kiefer and Wolfowitz (1956) with the constant of Massart (1990)."""
    return min(1.0, math.sqrt(math.log(2 / (1 - confidence)) / (2 * count))) if count else 1.0


def _told(count: int, share: float, successes: int, confidence: float = CONFIDENCE) -> bool | None:
    """Whether this many successes are too many for `share` (True), too few for it (False), or neither."""
    lower, upper = interval_ranks(count, share, confidence)
    if upper is not None and upper < successes:
        return True
    return False if lower is not None and lower >= successes else None


def _binomial(count: int, share: float) -> tuple[int, Floats]:
    """Chances of binomial(count, share) around its mean: the first value covered, and the chances from there on. From
    ratios of neighbours, in logarithms, then scaled to sum 1; what is cut off lies beyond 12 standard deviations."""
    spread = 12 * math.sqrt(count * share * (1 - share)) + 40
    first = max(0, int(count * share - spread))
    last = min(count, int(count * share + spread))
    values = np.arange(first, last, dtype=np.float64)
    steps = np.log((count - values) / (values + 1)) + math.log(share / (1 - share))
    logarithms = np.concatenate(([0.0], np.cumsum(steps)))
    chances = np.exp(logarithms - logarithms.max())
    return first, chances / chances.sum()


def round_to_ns(value: float) -> float:
    """To the nanosecond, if it is seconds."""
    return round(value, DECIMALS)


def has_trend(values: Floats) -> bool:
    """Whether a series rises or falls by more than chance explains, at a level of 1 % (Mann, "Nonparametric tests
    against trend", 1945; Kendall, "Rank correlation methods", 1975, with the variance for ties)."""
    count = len(values)
    signs = np.sign(values[None, :] - values[:, None])
    score = float(np.triu(signs, 1).sum())
    ties = sum(number * (number - 1) * (2 * number + 5) for number in Counter(values.tolist()).values())
    variance = (count * (count - 1) * (2 * count + 5) - ties) / 18
    return variance > 0 and (abs(score) - 1) / math.sqrt(variance) > TREND_ERRORS


def difference_of_means(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Difference of the means of b and a, its standard error and degrees of freedom, by Welch ("The
    generalization of Student's problem", 1947; Satterthwaite); infinitely many where nothing varies. Where one group is
    a single value, its values are taken to vary as those of the other do (the pooled t test)."""
    (mean_a, deviation_a), (mean_b, deviation_b) = mean_and_deviation(a), mean_and_deviation(b)
    if deviation_a is None or deviation_b is None:
        more, deviation = (a, deviation_a) if len(a) > 1 else (b, deviation_b)
        return mean_b - mean_a, (deviation or 0.0) * math.sqrt(1 / len(a) + 1 / len(b)), len(more) - 1
    variances = [deviation_a**2 / len(a), deviation_b**2 / len(b)]
    spread = math.fsum(variance**2 / (len(of) - 1) for variance, of in zip(variances, (a, b), strict=True) if variance)
    freedom = math.fsum(variances) ** 2 / spread if spread else math.inf
    return mean_b - mean_a, math.sqrt(math.fsum(variances)), freedom


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Interval of a share (Wilson, "Probable inference, the law of succession, and statistical inference", 1927)."""
    z, share = 1.959963984540054, successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return centre - half, centre + half


def share_difference_interval(
    a: tuple[int, int], b: tuple[int, int], difference: float, of_one: Callable[[int, int], tuple[float, float]]
) -> tuple[float, float]:
    """Interval around a difference of shares, b minus a, of (successes, count) each: how far each may be off by its own
    interval, squared and added (Newcombe, "Interval estimation for the difference between independent proportions",
    1998, method 10, by Wilson's intervals; by exact ones it is never too narrow)."""
    (low_a, high_a), (low_b, high_b) = of_one(*a), of_one(*b)
    share_a, share_b = a[0] / a[1], b[0] / b[1]
    below, above = math.hypot(share_b - low_b, high_a - share_a), math.hypot(high_b - share_b, share_a - low_a)
    return difference - below, difference + above


def fisher_exact(a: tuple[int, int], b: tuple[int, int]) -> float:
    """Two-sided p-value of two shares, (successes, count) each: all tables with these margins that are no likelier than
    this one (Fisher, "Statistical Methods for Research Workers", 1934, section 21.02)."""
    successes, total = a[0] + b[0], a[1] + b[1]

    def choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    first, last = max(0, successes - b[1]), min(successes, a[1])
    logs = [choose(a[1], k) + choose(b[1], successes - k) - choose(total, successes) for k in range(first, last + 1)]
    limit = logs[a[0] - first] + 1e-7
    return min(1.0, math.fsum(math.exp(log) for log in logs if log <= limit))


def check_delivery(due_ns: Instants, sent_ns: Instants, arrivals: str, load: LoadFacts) -> Delivery:
    """Compare what was asked for with what went out, in whole nanoseconds from the run's start, one pair per request;
    `sent_ns` is None or NaN where nothing was sent. The test takes each gap as known to within `resolution_s`: due
    instants are whole nanoseconds, and send instants are late by what `late_s` says (its p99 is taken). Without it,
    clumps of requests that are due within the same microsecond, of which gamma arrivals are full, would look like
    another distribution. Where that is more than a tenth of the mean gap there is no test: it would pass whatever was
    sent."""
    due_at, sent_at = np.asarray(due_ns, np.float64), np.asarray(sent_ns, np.float64)
    sent = ~np.isnan(sent_at)
    # Exact: the instants are whole nanoseconds below 2**53.
    due_gaps = np.diff(np.sort(due_at if load.open_loop else due_at[:0])) / NS_PER_S
    sent_gaps = np.diff(np.sort(sent_at[sent])) / NS_PER_S
    late_s = None
    if load.open_loop and sent.any():
        late = percentiles((sent_at - due_at)[sent], 0.5, 0.9, 0.99, 1.0)
        p50, p90, p99, maximum = (round_to_ns(each / NS_PER_S) for each in late)
        late_s = SendLateness(p50=p50, p90=p90, p99=p99, max=maximum)
    return Delivery(
        arrivals=arrivals,
        asked=len(due_at),
        sent=int(sent.sum()),
        not_sent=int((~sent).sum()),
        rate_per_s=TargetDueSent(named=load.rate_per_s, due=_rate_per_s(due_gaps), sent=_rate_per_s(sent_gaps)),
        cv=TargetDueSent(named=load.cv, due=_cv(due_gaps), sent=_cv(sent_gaps)),
        ks=GapTests(
            due=_check(due_gaps, load, 1 / NS_PER_S),
            sent=_check(sent_gaps, load, max(late_s.p99, 1 / NS_PER_S)) if late_s else None,
        ),
        late_s=late_s,
    )


def _check(gaps_s: Floats, load: LoadFacts, resolution_s: float) -> GapTest | None:
    rate_per_s, cv = load.rate_per_s, load.cv
    if load.law != "gamma" or not rate_per_s or not cv or len(gaps_s) < GAPS_FOR_CHECK:
        return None
    if cv < CV_SMALLEST:  # only a damaged file says so: arrivals take 0.01 and more
        return None
    if resolution_s * rate_per_s > RESOLUTION_MAX:
        return None
    minimum, maximum = np.maximum(np.sort(gaps_s) - resolution_s, 0), np.sort(gaps_s) + resolution_s
    below, above = (gamma_cdf(gaps * (rate_per_s / cv**2), 1 / cv**2) for gaps in (minimum, maximum))
    statistic, p_value = kolmogorov_smirnov(below, above)
    return GapTest(statistic=statistic, p_value=p_value, gaps=len(gaps_s), resolution_s=resolution_s)


def _rate_per_s(gaps_s: Floats) -> float | None:
    return round_to_ns(float(1 / gaps_s.mean())) if len(gaps_s) and gaps_s.any() else None


def _cv(gaps_s: Floats) -> float | None:
    """Needs two gaps, and requests that did not all come at once."""
    return round_to_ns(float(gaps_s.std(ddof=1) / gaps_s.mean())) if len(gaps_s) > 1 and gaps_s.any() else None


def late_percentile_s(counts: Counter[int], share: float) -> float | None:
    """Upper end of the lateness bucket that holds the `share`-quantile: at most 19 % more than the truth."""
    bucket = _bucket(counts, share)
    return None if bucket is None else round_to_ns(math.exp2((bucket + 1) / BUCKETS_PER_OCTAVE) * 1e-6)


def ring_difference_s(counts: Counter[int], share: float) -> float | None:
    """Likewise of how far ring and socket stamps are apart: a bucket holds what has so many bits in nanoseconds."""
    bits = _bucket(counts, share)
    return None if bits is None else round_to_ns(math.exp2(bits) * 1e-9)


def _bucket(counts: Counter[int], share: float) -> int | None:
    wanted, seen = share * counts.total(), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return bucket
    return None


# Rates of a window.


def rate_intervals(frame: Frame) -> tuple[dict[str, tuple[float, float]], str | None]:
    """Of each rate of the window; and why there are none, or None where there are."""
    span = frame.span_ns
    if frame.window is None or span is None:
        return {}, NO_BATCHES
    ended = frame.sampled
    stay_ns = percentiles((frame.end_ns - frame.sent_ns)[ended], 0.5)[0] if ended.any() else math.inf
    number = min(MAX_BATCHES, int((span[1] - span[0]) / max(1.0, RESIDENCE_TIMES_PER_BATCH * stay_ns)))
    if number < MIN_BATCHES:
        return {}, SHORT
    if frame.window.chosen != "set" and not frame.window.steady:
        return {}, UNSTEADY
    requests, tokens, prompts = _amounts(frame, number)
    rates = {"requests_per_s": requests, "output_tokens_per_s": tokens, "total_tokens_per_s": tokens + prompts}
    rates["input_tokens_per_s"] = prompts
    result = {name: ends for name, values in rates.items() if (ends := rate_interval(values)) is not None}
    return result, None if result else ALIKE


def rate_interval(rates: Floats) -> tuple[float, float] | None:
    """Of the mean of the rates of equal batches, in their unit; None where they cannot show how they vary. Bootstrap t:
    the quantiles of (mean* - mean) / error* over samples drawn with replacement stand for those of Student's t, so that
    lopsided rates get a lopsided interval."""
    count, mean = len(rates), float(rates.mean())
    error = float(rates.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    if error == 0 or math.isnan(error):  # NaN where nobody said how long a prompt was
        return None
    drawn = rates[np.random.default_rng(SEED).integers(0, count, (REPLICATES, count))]
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(count)
    known = errors > ROUNDING * mean
    if known.mean() < (1 + CONFIDENCE) / 2:  # nearly all batches are equal: most samples show no spread
        return None
    turned = (drawn.mean(axis=1) - mean)[known] / errors[known]
    turns = percentiles(turned, (1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2)
    low, high = (mean - turn * error for turn in turns)
    return round_to_ns(max(0.0, low)), round_to_ns(high)


def _amounts(frame: Frame, number: int) -> tuple[Floats, Floats, Floats]:
    """Per second of each batch: requests that ended, tokens that arrived, prompt tokens of those that began; each as
    in the figure of loadgen.analysis.metrics."""
    ended, begun = frame.measured & frame.complete, frame.sent & ~np.isnan(frame.prefill_end_ns)
    requests = _counted(frame, number, frame.end_ns[ended], np.ones(int(ended.sum())))
    prompts = _counted(frame, number, frame.prefill_end_ns[begun], frame.prompt_tokens[begun])
    each = np.where(frame.sent, frame.output_tokens, 0.0) / np.maximum(frame.arrived_tokens, 1)
    tokens, counts = np.zeros(number), frame.chunk_counts
    for rows, chunks in frame.blocks():
        amounts = np.repeat(each[rows], counts[rows]) * frame.chunk_tokens[chunks]
        tokens += _counted(frame, number, frame.chunk_ns[chunks], amounts)
    return requests, tokens, prompts


def _counted(frame: Frame, number: int, instants: Floats, amounts: Floats) -> Floats:
    begins, ends = frame.span_ns or (0.0, 1.0)
    inside = (instants >= begins) & (instants <= ends)
    places = np.minimum(number - 1, (instants[inside] - begins) / (ends - begins) * number).astype(np.int64)
    summed = np.bincount(places, amounts[inside], minlength=number)
    return np.asarray(summed * (number / (ends - begins) * NS_PER_S), dtype=np.float64)
