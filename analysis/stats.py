"""Statistics: confidence intervals of percentiles and rates, statistical tests, and a check of the delivered load.

Percentiles interpolate linearly between order statistics (type 7 of Hyndman and Fan, "Sample quantiles in statistical
packages", 1996; numpy's default). The ends of their intervals are order statistics (David and Nagaraja, "Order
Statistics", 2003, section 7.1). These intervals hold for any distribution, because the number of samples below the true
p-quantile is always binomial(n, p).

The interval of a rate is based on the variation of the rate within the measurement window:

1. The window is cut into equal batches, each of which gives one rate. A batch is longer than a request's residence
   time, so that a slow request affects a single batch. The source of this method is Law and Carson, "A sequential
   procedure for determining the length of a steady-state simulation", 1979.
2. The mean over batches is the reported rate. Its interval is that of the studentised bootstrap (Efron and Tibshirani,
   "An Introduction to the Bootstrap", 1993, section 12.5). The seed is fixed, so a run always gives the same interval.

A burst cannot be cut into such batches. Only repeats show how another burst would differ.

scipy.special is imported inside functions: the import takes 0.4 s, and the summaries of most runs do not need it.
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
from loadgen.analysis.summary import Delivery, GapTest, GapTests, QueueWait, SendLateness, TargetDueSent
from loadgen.workloads.arrival_facts import LoadFacts

PERCENTILES: Mapping[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
WITH_INTERVAL = ("p50", "p90", "p95", "p99")
CONFIDENCE = 0.95
BLOCK = 1 << 20
DECIMALS = 9
"""Decimal places of seconds, which are rounded to the nanosecond: the resolution of the timestamps."""
MIN_DEGREES_OF_FREEDOM = 3
"""Minimum degrees of freedom (independent samples minus one) for a useful interval of a mean."""
MAX_USEFUL_SAMPLES = 10_000_000
"""Maximum number of samples that a report suggests. A larger number is not practical, so none is suggested."""
MAX_RELATIVE_RESOLUTION = 0.1
"""Maximum resolution of tested gaps, as a share of the mean gap. With a coarser resolution, the gaps would fit any
distribution."""
MIN_CV = 1e-3
MIN_TESTED_GAPS = 8
"""Minimum number of gaps for a test of their distribution."""
MAX_BATCHES = 30
MIN_BATCHES = 10
RESIDENCE_TIMES_PER_BATCH = 2
"""Minimum length of a batch in median residence times. If batches were shorter, neighbouring batches would share
requests."""
REPLICATES = 4000
SEED = 19_930_601
NO_BATCHES = "the run cannot be split into comparable parts; use repeats to see how runs differ"
UNSTEADY = "no test showed a steady state, so parts of the run may not be comparable"
SHORT = f"the window is shorter than {MIN_BATCHES * RESIDENCE_TIMES_PER_BATCH} times the time that a request takes"
ROUNDING = 1e-9
"""Standard deviation, as a share of the mean, below which values are equal except for rounding errors."""
TREND_ERRORS = 2.576
"""Number of standard errors beyond which a trend is significant at the 1% level (normal distribution, two-sided)."""
EQUAL_BATCHES = "all parts of the window have the same rate"

Instants = Sequence[int] | Sequence[int | None] | Floats
POINTS_MAX = 700
"""Maximum number of points of a distribution."""
EXTREMES = 50
"""Number of smallest samples, and of largest samples, that a thinned distribution always contains."""
BUCKETS_PER_OCTAVE = 4
"""Number of read-delay buckets per factor of two (loadgen.engine.client_health)."""


def describe(samples: Floats, offsets: Integers | None = None, ordered: Floats | None = None) -> Distribution:
    """Return the mean, the standard deviation, the extremes and the percentiles of `samples`.

    The field `thin` of the result lists percentiles from too few samples. `ordered` contains the samples in ascending
    order, if the caller has already sorted them.

    If a request may have several samples, `offsets` delimits the samples of each request (as in Frame). Samples of one
    request resemble each other, so the confidence intervals are wider than those of independent samples.
    """
    count = len(samples)
    if count == 0:
        nothing = dict.fromkeys(("mean", "std", "min", "max", *WITH_INTERVAL))
        return Distribution(n=0, **nothing, ci95={}, thin=[])
    ordered = np.sort(samples) if ordered is None else ordered
    mean = samples.mean()
    # Sum the squared deviations block by block, to avoid a second array of the size of the samples.
    deviations = (samples[first : first + BLOCK] - mean for first in range(0, count, BLOCK))
    squares = math.fsum(map(sum_of_squares, deviations))
    sizes = {name: effective_size(samples, offsets, share, ordered) for name, share in PERCENTILES.items()}
    return describe_sorted(ordered, float(mean), squares, sizes)


def sum_of_squares(values: Floats) -> float:
    """Return the sum of the squares of the values.

    `values @ values` would start threads, which take more than ten times the processor time.
    """
    return float(np.square(values).sum())


def plotted_ranks(count: int) -> Integers:
    """Return the ranks (from 0) to draw out of `count` sorted samples.

    All ranks are drawn if `count <= POINTS_MAX`. Otherwise, these ranks are drawn: the lowest EXTREMES ranks, the
    highest EXTREMES ranks, and evenly spaced ranks.
    """
    if count <= POINTS_MAX:
        return np.arange(count)
    even = np.linspace(0, count - 1, POINTS_MAX - 2 * EXTREMES).astype(np.int64)
    return np.unique(np.concatenate((np.arange(EXTREMES), even, np.arange(count - EXTREMES, count))))


def describe_sorted(
    ordered: Floats | OrderStatistics, mean: float, squares: float, sizes: Mapping[str, int]
) -> Distribution:
    """Return the mean, the standard deviation, the extremes and the percentiles of sorted samples.

    `squares` is the sum of squared deviations from the mean. `sizes` contains the effective sample size of each
    percentile.
    """
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
    """Return the percentiles of a latency in which each failure counts as infinitely slow.

    `samples` are the latencies of complete requests, and `failures` is the number of other requests.
    """
    ordered = np.sort(np.concatenate((samples, np.full(failures, np.inf))))
    values = {name: percentile(ordered, PERCENTILES[name]) for name in WITH_INTERVAL}
    finite = {name: round_to_ns(value) if math.isfinite(value) else None for name, value in values.items()}
    thin = [name for name in WITH_INTERVAL if len(ordered) < samples_needed(PERCENTILES[name])]
    return AdjustedDistribution(n=len(ordered), failures=failures, **finite, thin=thin)


def percentile(ordered: Floats | OrderStatistics, share: float) -> float:
    """Return the `share`-quantile of sorted samples by linear interpolation.

    The result is NaN if there are no samples, and infinite if the interpolation uses an infinite sample.
    """
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
    """Return the quantiles of unsorted samples at the given shares.

    This function does not use np.percentile, which would import masked arrays and thus take 20 ms.
    """
    ordered = np.sort(samples)
    return [percentile(ordered, share) for share in shares]


@cache
def samples_needed(share: float) -> int:
    """Return the minimum sample size for the `share`-quantile.

    The minimum is 11 for p50, 64 for p90, 130 for p95, 662 for p99 and 6636 for p99.9. The rule is that of MLPerf
    (mlcommons/inference, early stopping, at 99% confidence): at least two samples should lie beyond the quantile. The
    result is the smallest sample size n for which the probability of fewer than two such samples is at most 1%. With q
    = share, this probability is

        q**n + n * (1 - q) * q**(n - 1)
    """
    count = 2
    while share**count + count * (1 - share) * share ** (count - 1) > 0.01:
        count += 1
    return count


def interval_ranks(count: int, share: float, confidence: float = CONFIDENCE) -> tuple[int | None, int | None]:
    """Return the ranks (from 0) of the two order statistics that enclose the `share`-quantile.

    Let B be binomial(count, share) and alpha = 1 - confidence. Counted from 1, the lower rank is the largest l with
    `P(B < l) <= alpha / 2`. The upper rank is the smallest u with `P(B >= u) <= alpha / 2`. A rank is None if there is
    no such order statistic.
    """
    first, chances = _binomial(count, share)
    below = np.cumsum(chances)  # P(B <= first + i)
    tail = (1 - confidence) / 2
    lower = first + int(np.searchsorted(below, tail, side="right"))  # P(B < lower) <= tail
    upper = first + int(np.searchsorted(below, 1 - tail, side="left")) + 1  # P(B >= upper) <= tail
    return (lower - 1 if lower >= 1 else None, upper - 1 if upper <= count else None)


def interval(
    ordered: Floats | OrderStatistics, share: float, size: int, confidence: float = CONFIDENCE
) -> tuple[float | None, float | None]:
    """Return the confidence interval of the `share`-quantile of sorted samples. `size` is the effective sample size.

    Each end is one of the samples, or None if no sample bounds the quantile on that side. If the interpolated quantile
    lies outside these ends, the interval is extended to it.
    """
    lower, upper = interval_indices(len(ordered), share, size, confidence)
    quantile = percentile(ordered, share)
    low = None if lower is None else round_to_ns(min(quantile, float(ordered[lower])))
    high = None if upper is None else round_to_ns(max(quantile, float(ordered[upper])))
    return low, high


def interval_indices(
    count: int, share: float, size: int, confidence: float = CONFIDENCE
) -> tuple[int | None, int | None]:
    """Return the indices of the two samples at the ends of the interval that `interval` returns.

    `count` is the number of sorted samples, and `size` is the effective sample size.
    """
    lower, upper = interval_ranks(size, share, confidence)
    scale = count / size
    high = None if upper is None else min(count, math.ceil((upper + 1) * scale)) - 1
    return None if lower is None else int(lower * scale), high


def share_interval(successes: int, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the exact confidence interval of a share, given `successes` out of `count` samples.

    Let B be binomial(count, p) and alpha = 1 - confidence. The interval contains every share p for which both
    `P(B >= successes)` and `P(B <= successes)` are at least alpha / 2. The interval is never narrower than the
    confidence requires. Without samples the interval is (0, 1). The source is Clopper and Pearson, "The use of
    confidence or fiducial limits illustrated in the case of the binomial", 1934.
    """
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(betaincinv(successes, count - successes + 1, tail))
    high = 1.0 if successes == count else float(betaincinv(successes + 1, count - successes, 1 - tail))
    return low, high


def ratio_variance(values: Floats | Booleans, offsets: Integers, mean: float) -> float:
    """Return the variance of the mean of values that come in contiguous groups.

    The values of a group may depend on each other. The mean is the ratio of two totals: the sum of the values and their
    number (Cochran, "Sampling Techniques", 3rd edition, 1977, section 2.11). Let S_i be the sum and n_i the number of
    values in group i. With g groups and n values in total:

        variance = g / (g - 1) * sum((S_i - mean * n_i)**2) / n**2.

    For groups of one value this is s**2 / n.
    """
    return ratio_variance_from_sums(sum_by_row(values, offsets), np.diff(offsets), mean)


def ratio_variance_from_sums(sums: Floats, counts: Integers, mean: float) -> float:
    """Return the variance that `ratio_variance` computes, given the sum and the number of values of each group."""
    groups = int(np.count_nonzero(counts))
    residuals = sums - mean * counts
    return float(np.square(residuals).sum()) / int(counts.sum()) ** 2 * groups / max(1, groups - 1)


def mean_interval(
    samples: Floats, offsets: Integers | None = None, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Return the confidence interval of the mean by Student's t. `offsets` delimits groups of dependent samples.

    The interval is infinite if there are fewer than four groups.
    """
    ends = np.arange(len(samples) + 1) if offsets is None else offsets
    groups = int(np.count_nonzero(np.diff(ends)))
    if groups <= MIN_DEGREES_OF_FREEDOM:
        return -math.inf, math.inf
    mean = float(samples.mean())
    margin = student_quantile((1 + confidence) / 2, groups - 1) * math.sqrt(ratio_variance(samples, ends, mean))
    return mean - margin, mean + margin


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the standard deviation of the values. The standard deviation of a single value is None."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None


def student_cdf(t: float, degrees_of_freedom: float) -> float:
    """Return P(T <= t) for Student's t distribution. The degrees of freedom are positive and may be fractional."""
    from scipy.special import stdtr

    return float(stdtr(degrees_of_freedom, t))


def student_quantile(share: float, degrees_of_freedom: float) -> float:
    """Return the `share`-quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, share))


def kolmogorov_smirnov(below: Floats, above: Floats) -> tuple[float, float]:
    """Return the statistic and the p-value of a one-sample Kolmogorov-Smirnov test of values with limited resolution.

    Each value of the sample is only known to lie in a range. The test compares the sample with a reference
    distribution. `below` contains the distribution function of the reference at the lower ends of these ranges, and
    `above` contains it at the upper ends, both in ascending order. If both arrays are equal, this is the ordinary test.
    For n sorted values with the indices i = 1 to n, the statistic is

        max(0, max(i / n - above_i), max(below_i - (i - 1) / n)).

    The p-value is asymptotic with Stephens's correction (JRSS B 32, 1970, 115-122). Its error is at most 0.025 for 8 or
    more values, and at most 0.005 for 1000 or more values.
    """
    n = len(below)
    steps = np.arange(n + 1) / n
    statistic = max(0.0, float(np.max(steps[1:] - above)), float(np.max(below - steps[:-1])))
    root = math.sqrt(n)
    return statistic, kolmogorov_tail(statistic * (root + 0.12 + 0.11 / root))


def kolmogorov_tail(x: float) -> float:
    """Return P(K > x) for Kolmogorov's distribution.

    Kolmogorov's series 2 * sum((-1)**(k - 1) * exp(-2 * k**2 * x**2)) converges fast for large x. For small x, the
    equivalent series of theta functions is used (Smirnov, Annals of Mathematical Statistics 19, 1948, 279-281).
    `scipy.special.kolmogorov` has the same values, but the summary of a run with Poisson arrivals needs nothing else
    from SciPy.
    """
    if x <= 0.05:  # The result differs from 1 by less than 1e-200.
        return 1.0
    if x < 1:
        terms = math.fsum(math.exp(-(((2 * k - 1) * math.pi / x) ** 2) / 8) for k in range(1, 5))
        return 1 - math.sqrt(2 * math.pi) / x * terms
    return 2 * math.fsum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 6))


def gamma_cdf(x: Floats, shape: float) -> Floats:
    """Return the distribution function of the gamma distribution with this shape and with scale 1, at each `x`."""
    if shape == 1:  # Most loads have exponential gaps, for which this formula takes a hundredth of the time.
        return -np.expm1(-x)
    from scipy.special import gammainc

    return np.asarray(gammainc(shape, x), np.float64)


def samples_to_decide(success_share: float, share: float, current: int, confidence: float = CONFIDENCE) -> int | None:
    """Estimate how many independent samples would show whether the true share lies above or below `share`.

    `current` samples have been taken, and further samples are assumed to succeed with probability `success_share`.
    Return None if no practical number of samples would decide.

    The number is found by doubling and bisection, with the tail probabilities of `interval_ranks`. A large number is
    close to `z**2 * share * (1 - share) / (success_share - share)**2` (Cochran, section 4.4). Unlike this formula, the
    result is also exact for shares near 0 and 1.
    """
    too_few, enough = current, current + 1
    while _exceeds_share(enough, share, round(success_share * enough), confidence) is None:
        too_few, enough = enough, 2 * enough
        if enough > MAX_USEFUL_SAMPLES:
            return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _exceeds_share(middle, share, round(success_share * middle), confidence) is None:
            too_few = middle
        else:
            enough = middle
    return enough


def effective_size(samples: Floats, offsets: Integers | None, share: float, ordered: Floats) -> int:
    """Return how many independent samples would determine a quantile of `samples` as exactly as `samples` do.

    `share` selects the quantile: for example, 0.5 is the median. `ordered` contains the samples in ascending order. If
    `offsets` is None, the samples are independent, and the result is their number.

    Otherwise, `offsets` divides the samples into groups. Samples of a group may depend on each other. The result is
    then `F * (1 - F) / variance`:

    - `F`: the share of samples that are at most the quantile.
    - `variance`: the variance of `F`, estimated from the differences between groups (`ratio_variance`).

    The source is Woodruff, "Confidence intervals for medians and other position measures", 1952.
    """
    if offsets is None:
        return len(samples)
    within = samples <= percentile(ordered, share)
    return effective_group_size(sum_by_row(within, offsets), np.diff(offsets))


def effective_group_size(within: Floats, counts: Integers) -> int:
    """Return the number of independent samples that would determine a quantile as exactly as the given samples, which
    form groups.

    The samples of a group may depend on each other, so the result is usually less than the number of given samples.

    - `within` contains, for each group, the number of samples that are at most the quantile.
    - `counts` contains, for each group, the number of all samples.

    `effective_size` explains the formula.
    """
    total = int(counts.sum())
    share_within = float(within.sum()) / total
    variance = ratio_variance_from_sums(within, counts, share_within)
    if variance <= 0:
        return int(np.count_nonzero(counts))
    return max(1, min(total, int(share_within * (1 - share_within) / variance)))


def dkw_margin(count: int, confidence: float = CONFIDENCE) -> float:
    """Return the half-width of the confidence band around an empirical distribution function of `count` samples.

    With alpha = 1 - confidence, the half-width is `sqrt(ln(2 / alpha) / (2 * count))`. With this confidence, the band
    contains the whole true distribution function (Dvoretzky, Kiefer and Wolfowitz, 1956, with the constant of Massart,
    1990).
    """
    return min(1.0, math.sqrt(math.log(2 / (1 - confidence)) / (2 * count))) if count else 1.0


def _exceeds_share(count: int, share: float, successes: int, confidence: float = CONFIDENCE) -> bool | None:
    """Compare the number of `successes` out of `count` samples with the number that the probability `share` predicts.

    Return True if there are significantly more successes, False if there are significantly fewer, and None otherwise.
    """
    lower, upper = interval_ranks(count, share, confidence)
    if upper is not None and upper < successes:
        return True
    return False if lower is not None and lower >= successes else None


def _binomial(count: int, share: float) -> tuple[int, Floats]:
    """Return the probabilities of a binomial distribution with `count` trials that succeed with the probability
    `share`.

    The result is a number and an array. The number is the first value of the distribution that the array covers, and
    entry i of the array is the probability of `first value + i`. The array leaves out values that are more than 12
    standard deviations from the mean. To avoid underflow, the probabilities are computed as logarithms, from the ratios
    of neighbouring values. They are then scaled so that their sum is 1.
    """
    spread = 12 * math.sqrt(count * share * (1 - share)) + 40
    first = max(0, int(count * share - spread))
    last = min(count, int(count * share + spread))
    values = np.arange(first, last, dtype=np.float64)
    steps = np.log((count - values) / (values + 1)) + math.log(share / (1 - share))
    logarithms = np.concatenate(([0.0], np.cumsum(steps)))
    chances = np.exp(logarithms - logarithms.max())
    return first, chances / chances.sum()


def round_to_ns(value: float) -> float:
    """Round a time in seconds to the nanosecond."""
    return round(value, DECIMALS)


def has_trend(values: Floats) -> bool:
    """Return True if a series rises or falls significantly, at the 1% level (Mann-Kendall test).

    Sources: Mann, "Nonparametric tests against trend", 1945; Kendall, "Rank correlation methods", 1975, with the
    variance for ties.
    """
    count = len(values)
    signs = np.sign(values[None, :] - values[:, None])
    score = float(np.triu(signs, 1).sum())
    ties = sum(number * (number - 1) * (2 * number + 5) for number in Counter(values.tolist()).values())
    variance = (count * (count - 1) * (2 * count + 5) - ties) / 18
    return variance > 0 and (abs(score) - 1) / math.sqrt(variance) > TREND_ERRORS


def difference_of_means(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Return mean(b) - mean(a), the standard error of this difference, and its degrees of freedom.

    The method is that of Welch ("The generalization of Student's problem", 1947) and Satterthwaite ("An approximate
    distribution of estimates of variance components", 1946). If no value differs from the mean of its group, the
    degrees of freedom are infinite.

    If one group has a single value, this group is assumed to vary as much as the other group (pooled t test).
    """
    mean_a, deviation_a = mean_and_deviation(a)
    mean_b, deviation_b = mean_and_deviation(b)
    if deviation_a is None or deviation_b is None:
        larger, deviation = (a, deviation_a) if len(a) > 1 else (b, deviation_b)
        return mean_b - mean_a, (deviation or 0.0) * math.sqrt(1 / len(a) + 1 / len(b)), len(larger) - 1
    variances = [deviation_a**2 / len(a), deviation_b**2 / len(b)]
    spread = math.fsum(
        variance**2 / (len(group) - 1) for variance, group in zip(variances, (a, b), strict=True) if variance
    )
    degrees_of_freedom = math.fsum(variances) ** 2 / spread if spread else math.inf
    return mean_b - mean_a, math.sqrt(math.fsum(variances)), degrees_of_freedom


def mean_of_differences(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Return mean(b - a) over pairs, its standard error and its degrees of freedom, by Student's paired test.

    `a[i]` and `b[i]` form a pair. There must be at least two pairs.
    """
    mean, deviation = mean_and_deviation([y - x for x, y in zip(a, b, strict=True)])
    return mean, (deviation or 0.0) / math.sqrt(len(a)), len(a) - 1


def wilson_interval(successes: float, count: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a share by Wilson's method.

    The source is Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    z, share = 1.959963984540054, successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return centre - half, centre + half


def share_difference_interval(
    a: tuple[int, int],
    b: tuple[int, int],
    difference: float,
    single_interval: Callable[[int, int], tuple[float, float]],
) -> tuple[float, float]:
    """Return the confidence interval of the difference of two shares, b - a. Each share is given as (successes, count).

    `single_interval` computes the intervals (l_a, u_a) and (l_b, u_b) of the shares p_a and p_b. The result is

        difference - sqrt((p_b - l_b)**2 + (u_a - p_a)**2)  to  difference + sqrt((u_b - p_b)**2 + (p_a - l_a)**2).

    The source is Newcombe, "Interval estimation for the difference between independent proportions", 1998, method 10,
    which uses Wilson's intervals. If `single_interval` returns exact intervals, the result is never too narrow.
    """
    low_a, high_a = single_interval(*a)
    low_b, high_b = single_interval(*b)
    share_a, share_b = a[0] / a[1], b[0] / b[1]
    below = math.hypot(share_b - low_b, high_a - share_a)
    above = math.hypot(high_b - share_b, share_a - low_a)
    return difference - below, difference + above


def fisher_exact(a: tuple[int, int], b: tuple[int, int]) -> float:
    """Return the two-sided p-value of Fisher's exact test for the equality of two shares.

    Each share is a pair (successes, count). The p-value is the total probability of all 2 x 2 tables that have the same
    margins and are at most as likely as the observed table. The source is Fisher, "Statistical Methods for Research
    Workers", 1934, section 21.02.
    """
    successes, total = a[0] + b[0], a[1] + b[1]

    def log_choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    first, last = max(0, successes - b[1]), min(successes, a[1])
    all_tables = log_choose(total, successes)
    logs = [log_choose(a[1], k) + log_choose(b[1], successes - k) - all_tables for k in range(first, last + 1)]
    limit = logs[a[0] - first] + 1e-7
    return min(1.0, math.fsum(math.exp(log) for log in logs if log <= limit))


def check_delivery(
    due_ns: Instants, sent_ns: Instants, arrivals: str, load: LoadFacts, *, released_ns: Instants | None = None
) -> Delivery:
    """Compare the load that was sent with the load that was requested.

    - `due_ns`: time at which each request was due, in ns from the run's start.
    - `sent_ns`: time at which each request was sent, in ns from the run's start. None or NaN for a request that was not
      sent.
    - `arrivals`: the arrival process as text, such as `poisson:20`.
    - `load`: properties of the arrival process.
    - `released_ns`: for a request that waited because of `--concurrency`, the time at which it could be sent. NaN for
      any other request. The argument is None if no request waited.

    Two tests check whether the gaps between consecutive requests have the distribution of the arrival process. The
    first test uses the gaps between due times, and the second test uses the gaps between send times. If requests
    waited, there is no second test, because waits change the distribution.

    Each gap has an error: 1 ns for due times, and the p99 of the send delays for send times. The tests allow for this
    error. If it exceeds a tenth of the mean gap, there is no test, because any load would pass.
    """
    due_at, sent_at = np.asarray(due_ns, np.float64), np.asarray(sent_ns, np.float64)
    released_at = np.full_like(due_at, np.nan) if released_ns is None else np.asarray(released_ns, np.float64)
    waits_s = (released_at - due_at)[~np.isnan(released_at)] / NS_PER_S
    sent = ~np.isnan(sent_at)
    # The differences are exact: the instants are whole nanoseconds below 2**53.
    due_gaps = np.diff(np.sort(due_at if load.open_loop else due_at[:0])) / NS_PER_S
    sent_gaps = np.diff(np.sort(sent_at[sent])) / NS_PER_S
    late_s = None
    if load.open_loop and sent.any():
        late_ns = percentiles((sent_at - np.fmax(due_at, released_at))[sent], 0.5, 0.9, 0.99, 1.0)
        p50, p90, p99, maximum = (round_to_ns(value / NS_PER_S) for value in late_ns)
        late_s = SendLateness(p50=p50, p90=p90, p99=p99, max=maximum)
    return Delivery(
        arrivals=arrivals,
        asked=len(due_at),
        sent=int(sent.sum()),
        not_sent=int((~sent).sum()),
        rate_per_s=TargetDueSent(named=load.rate_per_s, due=_rate_per_s(due_gaps), sent=_rate_per_s(sent_gaps)),
        cv=TargetDueSent(named=load.cv, due=_cv(due_gaps), sent=_cv(sent_gaps)),
        ks=GapTests(
            due=_gap_test(due_gaps, load, 1 / NS_PER_S),
            sent=_gap_test(sent_gaps, load, max(late_s.p99, 1 / NS_PER_S)) if late_s and not len(waits_s) else None,
        ),
        late_s=late_s,
        queue_wait=_queue_wait(waits_s),
    )


def _queue_wait(waits_s: Floats) -> QueueWait | None:
    if not len(waits_s):
        return None
    p50, p99, maximum = (round_to_ns(wait_s) for wait_s in percentiles(waits_s, 0.5, 0.99, 1.0))
    return QueueWait(requests=len(waits_s), p50=p50, p99=p99, max=maximum)


def _gap_test(gaps_s: Floats, load: LoadFacts, resolution_s: float) -> GapTest | None:
    """Test whether the gaps between requests have the gamma distribution that `load` states for the arrival process.

    `resolution_s` is the maximum error of each gap in seconds. Return None if `load` states no gamma distribution, if
    there are too few gaps, or if this error is too large for a test.
    """
    rate_per_s, cv = load.rate_per_s, load.cv
    if load.law != "gamma" or not rate_per_s or not cv or len(gaps_s) < MIN_TESTED_GAPS:
        return None
    if cv < MIN_CV:  # Arrival processes accept a cv of 0.01 or more, so only a damaged file has less.
        return None
    if resolution_s * rate_per_s > MAX_RELATIVE_RESOLUTION:
        return None
    ordered = np.sort(gaps_s)
    low, high = np.maximum(ordered - resolution_s, 0), ordered + resolution_s
    below, above = (gamma_cdf(gaps * (rate_per_s / cv**2), 1 / cv**2) for gaps in (low, high))
    statistic, p_value = kolmogorov_smirnov(below, above)
    return GapTest(statistic=statistic, p_value=p_value, gaps=len(gaps_s), resolution_s=resolution_s)


def _rate_per_s(gaps_s: Floats) -> float | None:
    return round_to_ns(float(1 / gaps_s.mean())) if len(gaps_s) and gaps_s.any() else None


def _cv(gaps_s: Floats) -> float | None:
    """Return the coefficient of variation of the gaps between requests.

    The result is None if there are fewer than two gaps or if all gaps are 0.
    """
    return round_to_ns(float(gaps_s.std(ddof=1) / gaps_s.mean())) if len(gaps_s) > 1 and gaps_s.any() else None


def late_percentile_s(counts: Counter[int], share: float) -> float | None:
    """Return a quantile of the read delays in seconds, or None if `counts` is empty.

    A read delay is the time from the arrival of bytes until the client reads them. `share` selects the quantile, for
    example 0.99 for p99. `counts` is a histogram of the delays, with four buckets per factor of two. The result is the
    upper boundary of a bucket, so it may be up to 19% too large.
    """
    bucket = _quantile_bucket(counts, share)
    return None if bucket is None else round_to_ns(math.exp2((bucket + 1) / BUCKETS_PER_OCTAVE) * 1e-6)


def ring_difference_s(counts: Counter[int], share: float) -> float | None:
    """Return a quantile of the differences between packet ring timestamps and socket timestamps, in seconds.

    `share` is the quantile, such as 0.99. `counts` is a histogram whose keys are the bit lengths of the differences in
    ns, so each key stands for a range of differences. The result is the upper end of the range that contains the
    quantile, or None if `counts` is empty.
    """
    bits = _quantile_bucket(counts, share)
    return None if bits is None else round_to_ns(math.exp2(bits) * 1e-9)


def _quantile_bucket(counts: Counter[int], share: float) -> int | None:
    needed, seen = share * counts.total(), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= needed:
            return bucket
    return None


# Rates of a window.


def rate_intervals(frame: Frame) -> tuple[dict[str, tuple[float, float]], str | None]:
    """Return the confidence intervals of the rates in the measurement window, by the name of the rate.

    If there are no intervals, the second value of the result is the reason. Otherwise it is None.
    """
    span = frame.span_ns
    if frame.window is None or span is None:
        return {}, NO_BATCHES
    ended = frame.sampled
    residence_ns = percentiles((frame.end_ns - frame.sent_ns)[ended], 0.5)[0] if ended.any() else math.inf
    batches = min(MAX_BATCHES, int((span[1] - span[0]) / max(1.0, RESIDENCE_TIMES_PER_BATCH * residence_ns)))
    if batches < MIN_BATCHES:
        return {}, SHORT
    if frame.window.chosen != "set" and not frame.window.steady:
        return {}, UNSTEADY
    intervals = {name: rate_interval(values) for name, values in batch_rates(frame, batches).items()}
    known = {name: ends for name, ends in intervals.items() if ends is not None}
    return known, None if known else EQUAL_BATCHES


def batch_rates(frame: Frame, batches: int) -> dict[str, Floats]:
    """Return rates per second in each of `batches` equal parts of the measurement window, by the name of the rate.

    The rates of inputs and of audio are included only if the requests have inputs or audio.
    """
    requests, tokens, prompts = _batch_rates(frame, batches)
    rates = {
        "requests_per_s": requests,
        "output_tokens_per_s": tokens,
        "total_tokens_per_s": tokens + prompts,
        "input_tokens_per_s": prompts,
    }
    amounts = {}
    if frame.inputs_inside:
        amounts["inputs_per_s"] = np.nan_to_num(frame.mark("inputs"))
    if "audio_us" in frame.marks:
        amounts["audio_seconds_per_s"] = frame.audio_s
    if "audio_bytes" in frame.marks:
        amounts["audio_bytes_per_s"] = frame.mark("audio_bytes")
    ended = frame.measured & frame.complete
    for name, amount in amounts.items():
        rates[name] = _sum_per_batch(frame, batches, frame.end_ns[ended], amount[ended])
    return rates


def rate_interval(rates: Floats) -> tuple[float, float] | None:
    """Return the confidence interval of the mean of `rates`, which are the rates in batches of equal length.

    Return None if a rate is unknown, or if all or nearly all rates are equal.

    The method is the bootstrap t. It replaces the quantiles of Student's t by those of `(mean* - mean) / error*`, where
    mean* is the mean of a sample of batches drawn with replacement, and error* is the standard error of mean*. The
    interval of skewed rates is therefore not symmetric.
    """
    count, mean = len(rates), float(rates.mean())
    error = float(rates.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    if error == 0 or math.isnan(error):  # The error is NaN if the length of a prompt is unknown.
        return None
    resampled = rates[np.random.default_rng(SEED).integers(0, count, (REPLICATES, count))]
    errors = resampled.std(axis=1, ddof=1) / math.sqrt(count)
    known = errors > ROUNDING * mean
    if known.mean() < (1 + CONFIDENCE) / 2:  # Nearly all batches are equal, so most resamples show no variation.
        return None
    t_values = (resampled.mean(axis=1) - mean)[known] / errors[known]
    t_high, t_low = percentiles(t_values, (1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2)
    return round_to_ns(max(0.0, mean - t_high * error)), round_to_ns(mean - t_low * error)


def _batch_rates(frame: Frame, batches: int) -> tuple[Floats, Floats, Floats]:
    """Return three rates per second for each batch: completed requests, arrived output tokens, and prompt tokens.

    The batches are `batches` equal parts of the measurement window. The prompt tokens of a request count when its
    response begins. The definitions are those of the rates in loadgen.analysis.metrics.
    """
    ended, begun = frame.measured & frame.complete, frame.sent & ~np.isnan(frame.prefill_end_ns)
    requests = _sum_per_batch(frame, batches, frame.end_ns[ended], np.ones(int(ended.sum())))
    prompts = _sum_per_batch(frame, batches, frame.prefill_end_ns[begun], frame.prompt_tokens[begun])
    # If the server's count differs from the sum over the chunks, the server's count is spread over the chunks.
    scale = np.where(frame.sent, frame.output_tokens, 0.0) / np.maximum(frame.arrived_tokens, 1)
    # All chunks of most requests belong to one batch, so only the chunks of the other requests are examined.
    has_chunks = frame.chunk_counts > 0
    in_one_batch = has_chunks.copy()
    in_one_batch[has_chunks] = _batch_of(frame, batches, frame.first_ns[has_chunks]) == _batch_of(
        frame, batches, frame.last_ns[has_chunks]
    )
    all_tokens = (scale * frame.arrived_tokens)[in_one_batch]
    tokens = _sum_per_batch(frame, batches, frame.first_ns[in_one_batch], all_tokens)
    for rows, counts, instants, chunk_tokens in frame.chunk_blocks(has_chunks & ~in_one_batch):
        tokens += _sum_per_batch(frame, batches, instants, np.repeat(scale[rows], counts) * chunk_tokens)
    return requests, tokens, prompts


def _sum_per_batch(frame: Frame, batches: int, instants: Floats, amounts: Floats) -> Floats:
    """Return the sum of `amounts` in each batch, divided by the length of a batch in seconds.

    The batches are `batches` equal parts of the measurement window. `amounts[i]` belongs to the batch that contains the
    time `instants[i]` in ns.
    """
    begins, ends = frame.span_ns or (0.0, 1.0)
    indices = _batch_of(frame, batches, instants)
    inside = (indices >= 0) & (indices < batches)
    summed = np.bincount(indices[inside], amounts[inside], minlength=batches)
    return np.asarray(summed * (batches / (ends - begins) * NS_PER_S), dtype=np.float64)


def _batch_of(frame: Frame, batches: int, instants: Floats) -> Integers:
    """Return the index of the batch that contains each time in `instants` (ns).

    The batches are `batches` equal parts of the measurement window. A time before the window has the index -1, and a
    time after it has the index `batches`.
    """
    begins, ends = frame.span_ns or (0.0, 1.0)
    indices = np.minimum(batches - 1, (instants - begins) / (ends - begins) * batches).astype(np.int64)
    indices[instants < begins] = -1
    indices[instants > ends] = batches
    return indices
