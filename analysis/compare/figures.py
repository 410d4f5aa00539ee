"""Compares the figures of two runs or groups of runs, A and B, for `loadgen compare` and `loadgen matrix`.

The verdict on each figure is better, worse, no difference or inconclusive. There are two methods:

- Two single runs are compared by their raw samples. The error of each figure is estimated within the runs
  (loadgen.analysis.compare.run_variance).
- Groups of repeats are compared by one value per run, so the requests of a run need not be independent.

Two runs of one server always differ a little by chance. A latency or a throughput is reported as better or worse only
if this variation between runs cannot explain the difference between A and B. The variation is assumed to be at most
RUN_VARIATION, or more if the runs themselves show more. The confidence intervals allow for this variation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from loadgen.analysis import stats
from loadgen.analysis.compare import run_variance
from loadgen.analysis.compare.run_variance import ComparedRun, samples_of
from loadgen.analysis.metrics import Metric, metric_by_key
from loadgen.analysis.shares import SHARES, counts_of
from loadgen.analysis.stats import student_cdf, student_quantile
from loadgen.analysis.summary import Summary

if TYPE_CHECKING:
    from loadgen.analysis.compare.gates import Gate

SEED = 20_030_711
"""Seed of the bootstrap, so that the same runs always give the same figures."""
FALSE_ALARM_RATE = 0.05
"""Probability that a comparison of a server with itself reports any figure as better or worse."""
MARGIN = 0.05
"""Default for the largest difference that does not matter, as a share of A."""
RUN_VARIATION = 0.10
"""Default for the assumed maximum difference between two runs of one server, as a share. The bound is raised if the
runs show more variation."""
VARIATION_CONFIDENCE = 0.995
"""Confidence of the variation bound that is estimated from the runs themselves. With Student's t, the bound is 3.5
standard errors."""
VARIATION_FACTOR_MAX = 2.0
"""Maximum factor by which the variation that runs show can raise the assumed bound. Larger variation indicates a real
difference, such as a faster first phase and a slower second phase."""
SPREAD_FACTOR = 2.0
"""Ratio of the variation bound of groups to the largest difference within a group."""
MORE_REQUESTS_MAX = 1_000_000
RUNS_MAX = 1000
"""Maximum numbers of requests and runs that a comparison suggests. Larger numbers count as impractical."""
WITHOUT_SHARE = {
    "complete": "nothing was sent in one of the runs",
    "attainment": "one of the runs has no --goodput",
    "valid_output": "no output was checked, or not every output could be checked, in one of the runs",
    "answered": "no response begins with reasoning in one of the runs",
}
"""Reason why a share is not compared, by its name."""
MISSING_IN_SOME_RUNS = "not every run has this figure"
SHORT = "the run is too short for a rate"
ZERO_VALUE = "one of the values is 0, so there is no ratio"
ZERO_SAMPLES = "some samples are 0, so there is no ratio"
LOGARITHM_MAX = 500.0
"""Maximum logarithm of a ratio that has an interval. The exponential of larger logarithms may overflow."""
SINGLE = "bootstrap of the quantile, steps, timestamps; at least the minimum variation between runs"
BOUNDED = "bootstrap of the quantile, timestamps, and the maximum variation between runs"
ONE_AGAINST_MANY = "Student's t, with the other group's variation between runs"
BETWEEN_RUNS = "Welch's t between runs"
PAIRED_RUNS = "paired t between runs with equal seeds"
MIN_PAIRS = 3
"""Minimum number of pairs of runs for the paired test. Two pairs would leave a single degree of freedom."""
EXACT_DEGREES_OF_FREEDOM = 1e6
"""Degrees of freedom of an exact interval. It is large because the error is known and not estimated."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of both sides of a comparison (A and B), with the test of the difference and the verdict on B."""

    figure: str
    """Name of the figure as in --assert, such as `ttft.p99`. `ttft.pairs` is the share of pairs of one request from A
    and one from B in which the request from B is slower."""
    unit: Literal["s", "tokens", "ratio", "per second", "share"]
    """Unit of `a`, `b` and `difference`."""
    direction: Literal["lower", "higher"]
    """`lower` if lower values are better, else `higher`."""
    a: float | None = None
    b: float | None = None
    difference: float | None = None
    difference_ci95: tuple[float, float] | None = None
    ratio: float | None = None
    """B / A. None for shares, and if either value is 0 or less."""
    ratio_ci95: tuple[float, float] | None = None
    p_value: float | None = None
    """Two-sided p-value of the hypothesis that A and B do not differ. None if the figure cannot be tested."""
    test: str = ""
    error: float = math.nan
    """Standard error of `effect`."""
    degrees_of_freedom: float = math.nan
    sampling_error: float = 0.0
    """Part of `error` that comes from the sample of requests and from timestamps, not from variation between runs."""
    variation_bound: float = math.inf
    """Maximum plausible variation between runs: the absolute value of the logarithm of a ratio. Infinite if unknown."""
    error_floor: float = 0.0
    """Minimum of `error`, which more requests cannot reduce."""
    count: int = 0
    """Number of requests or runs in the smaller group."""
    more_of: str = "requests"
    """What reduces the error: more `requests` or more `runs`."""
    paired: bool = False
    """True if each run of A is compared with the run of B that has the same seed."""
    verdict: Literal["better", "worse", "no difference", "inconclusive"] = "inconclusive"
    adjusted_p: float | None = None
    """p-value adjusted for the number of tests in the comparison (see `judge_figures`)."""
    no_larger_than: float | None = None
    """Largest absolute difference inside the interval: a share of A, or a difference of shares."""
    needs_more: int | None = None
    """Approximate number of additional requests or runs, in each of A and B, for a conclusive verdict. None if the
    number is impractical or the verdict is conclusive."""
    why: str = ""
    """Reason why the figure was not tested; empty if it was tested."""

    @property
    def effect(self) -> float:
        """The difference between A and B that is tested: `log(B / A)`, or `B - A` for figures without a ratio."""
        return math.log(self.ratio) if self.ratio is not None else self.difference or 0.0

    @property
    def worse(self) -> bool:
        """True if B is worse than A, regardless of significance."""
        return (self.effect > 0) == (self.direction == "lower") and self.effect != 0

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return the confidence interval of `effect` (the difference between A and B).

        Half of its width is `min(t * error, variation_bound + t * sampling_error)`, where `t` is the quantile of
        Student's t for this confidence. `variation_bound` is the maximum plausible variation between runs.
        """
        low, high = confidence_interval(self.effect, self.error, self.degrees_of_freedom, confidence)
        reach = self.variation_bound
        if self.sampling_error:
            reach += confidence_interval(0, self.sampling_error, self.degrees_of_freedom, confidence)[1]
        return max(low, self.effect - reach), min(high, self.effect + reach)

    def relative(self, effect: float) -> float:
        """Convert a value of `effect`, which is usually a logarithm, to a relative difference of B from A.

        The result is `exp(effect) - 1`. If the figure has no ratio (for example, a share), the result is `effect`
        itself.
        """
        return math.expm1(effect) if self.ratio is not None else effect

    def effect_of(self, relative: float) -> float:
        """Convert a relative difference to the scale of `effect`, on which the difference between A and B is tested.

        The argument `relative` is, for example, 0.05 if B is 5% larger than A. The result is `log(1 + relative)`, which
        is the logarithm of B / A. For a figure without a ratio, such as a share, the argument is returned unchanged.
        """
        if self.ratio is None:
            return relative
        return math.log1p(relative) if relative > -1 else -math.inf


def compare_single_runs(
    a: ComparedRun, b: ComparedRun, figures: Sequence[str], run_variation: float = RUN_VARIATION
) -> Iterator[ComparedFigure]:
    """Compare two single runs by their raw samples, and yield one row per figure."""
    variation = Variation(
        run_variance.piece_error(a, b), run_variance.piece_error(a, b, shift=True), math.log1p(run_variation)
    )
    for figure in figures:
        name, _, statistic = figure.partition(".")
        if figure in SHARES:
            yield compare_run_shares(figure, counts_of(figure, a.summary), counts_of(figure, b.summary))
        elif statistic == "pairs":
            yield _compare_pairs(figure, metric_by_key(name), a, b, variation)
        elif statistic:
            yield _compare_quantile(metric_by_key(name), statistic, a, b, variation)
        else:
            yield _compare_rate(metric_by_key(name), a, b, variation)


def compare_groups(
    a: Sequence[Summary], b: Sequence[Summary], figures: Sequence[str], run_variation: float = RUN_VARIATION
) -> Iterator[ComparedFigure]:
    """Compare two groups of runs by one value per run, and yield one row per figure.

    At least one group must have two or more runs. Figures that compare pairs of requests, such as `ttft.pairs`, are
    skipped, because samples of several runs are not pooled. If the seeds determine the load, each run of A is compared
    with the run of B that has the same seed.
    """
    paired = have_equal_random_loads(a, b)
    if paired:
        a, b = (sorted(group, key=lambda summary: summary.run.seed or 0) for group in (a, b))
    for figure in figures:
        if figure in SHARES:
            shares_a = [counts_of(figure, summary) for summary in a]
            shares_b = [counts_of(figure, summary) for summary in b]
            yield compare_group_shares(figure, shares_a, shares_b)
        elif not figure.endswith(".pairs"):
            values_a = [_figure_value(figure, summary) for summary in a]
            values_b = [_figure_value(figure, summary) for summary in b]
            yield compare_values(figure, values_a, values_b, run_variation, paired=paired)


def name_of_test(a: Sequence[Summary], b: Sequence[Summary]) -> str:
    """Return the name of the test that compares these groups."""
    return PAIRED_RUNS if have_equal_random_loads(a, b) else BETWEEN_RUNS


def have_equal_random_loads(a: Sequence[Summary], b: Sequence[Summary]) -> bool:
    """Return True if the runs of A and B can be compared in pairs with equal seeds, and thus equal random loads.

    This requires that both groups have random loads and the same seeds, and at least MIN_PAIRS different seeds. Repeats
    with random loads differ mostly in their loads, so pairing removes most of the variation.

    If the loads are not random, only chance in the server makes repeats differ. Pairing would then remove no variation,
    but would reduce the degrees of freedom.
    """
    seeds_a, seeds_b = (sorted(summary.run.seed or 0 for summary in group) for group in (a, b))
    unique = len(set(seeds_a)) == len(seeds_a)
    return len(a) >= MIN_PAIRS and seeds_a == seeds_b and unique and all(map(_has_random_load, (*a, *b)))


def _has_random_load(summary: Summary) -> bool:
    """Return True if the arrivals or the requests of a run are random, so that they depend on the seed.

    Every workload other than `synthetic` counts as random.
    """
    run = summary.run
    fixed_lengths = all(str(tokens).isdecimal() for tokens in (run.input_tokens, run.output_tokens))
    return bool(run.load.law) or not fixed_lengths or run.workload not in (None, "synthetic")


def _figure_value(figure: str, summary: Summary) -> float | None:
    """Return the value of a figure for one run, or None if the run has no such value.

    A value that is based on few samples is returned too, because its error is estimated from the variation between
    runs.
    """
    name, _, statistic = figure.partition(".")
    if not statistic:
        return getattr(summary.throughput, name)  # type: ignore[no-any-return]
    return getattr(getattr(summary.latency, name), statistic)  # type: ignore[no-any-return]


def _empty_row(figure: str) -> ComparedFigure:
    """Return a row for a figure without values. The row has the unit, and says whether higher or lower values are
    better.
    """
    name, _, statistic = figure.partition(".")
    if figure in SHARES or statistic == "pairs":
        return ComparedFigure(figure, "share", "higher" if figure in SHARES else "lower")
    metric = metric_by_key(name)
    if metric.unit in ("tokens", "ratio"):
        return ComparedFigure(figure, "tokens" if metric.unit == "tokens" else "ratio", metric.direction)
    return ComparedFigure(figure, "per second" if metric.unit.endswith("/s") else "s", metric.direction)


def _untested(figure: str, a: float, b: float, *, why: str) -> ComparedFigure:
    """Return a row for values that cannot be tested. `why` is the reason. NaN means that a value is missing."""
    row = replace(_empty_row(figure), a=None if math.isnan(a) else a, b=None if math.isnan(b) else b, why=why)
    if row.a is None or row.b is None:
        return row
    return replace(row, difference=b - a, ratio=b / a if row.unit != "share" and min(a, b) > 0 else None)


class Variation(NamedTuple):
    """Random variation between two runs of one server, A and B.

    All values refer to the logarithm of the ratio B / A, where A and B are the values of a figure in these runs."""

    piece_error: float
    """Standard error of the time of one piece of a run (`run_variance.piece_error`)."""
    steady_piece_error: float
    """Standard error of the time of one piece of a run after one change of pace is removed."""
    assumed: float
    """Assumed maximum variation between runs (--run-variation)."""

    def bound(self, server_error: float) -> float:
        """Return the largest difference in a figure that variation between runs can explain.

        `server_error` is the part of the figure's standard error that comes from variations in the speed of the server.
        The bound is `t * server_error`, where `t` is a quantile of Student's t. It is limited to the range from
        `assumed` to `VARIATION_FACTOR_MAX * assumed`. If `server_error` is unknown, the bound is `assumed`.
        """
        shown = student_quantile(VARIATION_CONFIDENCE, run_variance.DEGREES_OF_FREEDOM) * server_error
        if not math.isfinite(shown):
            return self.assumed
        return min(max(self.assumed, shown), VARIATION_FACTOR_MAX * self.assumed)


class EffectErrors(NamedTuple):
    """Three causes of the uncertainty of a ratio B / A, where A and B are the values of one figure in two single runs.

    Each field is an error of the logarithm of this ratio.
    """

    sampling: float
    """Standard error because a run contains only a sample of all possible requests, and because timestamps are inexact.
    """
    server: float
    """Standard error because the server's steps vary at random. NaN or infinite if the runs are too short to show it.
    """
    bound: float
    """Largest difference that the variation between two runs of one server can plausibly explain."""


def _compare_ratio(figure: str, values: tuple[float, float], count: int, errors: EffectErrors) -> ComparedFigure:
    """Return the row of the comparison for one figure of two single runs, A and B. The row tests the ratio B / A.

    `values` are the values of the figure in A and B, and `count` is the number of requests. `errors` contains the
    uncertainty of `log(B / A)`. The standard error of the row follows from two of its fields, `sampling` and `server`:

        max(sqrt(sampling**2 + server**2), MIN_RUN_VARIATION)

    If the runs are too short for an estimate of `server`, this field is NaN or infinite. The standard error of the row
    is then infinite, but the confidence interval is still finite. Its width follows from `sampling` and from `bound`,
    which is the maximum plausible variation between runs.
    """
    a, b = values
    effect = math.log(b / a)
    too_short = not math.isfinite(errors.server)
    error = math.inf
    if not too_short:
        error = max(math.hypot(errors.sampling, errors.server), run_variance.MIN_RUN_VARIATION)
    row = replace(
        _empty_row(figure),
        a=a,
        b=b,
        difference=b - a,
        ratio=b / a,
        test=BOUNDED if too_short else SINGLE,
        error=error,
        degrees_of_freedom=run_variance.DEGREES_OF_FREEDOM,
        sampling_error=errors.sampling,
        variation_bound=errors.bound,
        error_floor=run_variance.MIN_RUN_VARIATION,
        count=count,
    )
    return _with_interval(row, 1.0 if too_short else p_value(effect, error, run_variance.DEGREES_OF_FREEDOM))


def _with_interval(row: ComparedFigure, p: float) -> ComparedFigure:
    """Return `row` with its confidence interval and its p-value. The row must have a ratio.

    `p` is the p-value of the whole difference between A and B. Variation between runs can explain a difference of up to
    `row.variation_bound`. If the difference is larger, the part beyond this bound is also tested on its own, with the
    sampling error as its only error. The row gets the smaller of the two p-values.

    If the ratio is too large for an interval (LOGARITHM_MAX), the row gets only the p-value.
    """
    beyond = abs(row.effect) - row.variation_bound
    if beyond > 0:
        p = min(p, p_value(beyond, row.sampling_error, row.degrees_of_freedom))
    low, high = row.interval()
    if high > LOGARITHM_MAX:
        return replace(row, p_value=p)
    difference = row.difference_ci95
    if difference is None or (low, high) != confidence_interval(row.effect, row.error, row.degrees_of_freedom):
        base = row.a or 0.0
        difference = (base * math.expm1(low), base * math.expm1(high))
    return replace(row, p_value=p, ratio_ci95=(math.exp(low), math.exp(high)), difference_ci95=difference)


def _compare_quantile(
    metric: Metric, statistic: str, a: ComparedRun, b: ComparedRun, variation: Variation
) -> ComparedFigure:
    figure = f"{metric.key}.{statistic}"
    share = float(statistic.removeprefix("p")) / 100
    samples_a, samples_b = samples_of(a, metric), samples_of(b, metric)
    values = run_variance.quantile(samples_a, share), run_variance.quantile(samples_b, share)
    count = min(len(samples_a.values), len(samples_b.values))
    needed = stats.samples_needed(share)
    if count < needed:
        return _untested(figure, *values, why=f"too few samples: {statistic} needs {needed:,}, there are {count:,}")
    # A stall lengthens a gap of every response, so thousands of long gaps may have a few independent causes.
    effective_size = min(
        run_variance.effective_size(samples_a, share, values[0]),
        run_variance.effective_size(samples_b, share, values[1]),
    )
    if effective_size < needed:
        why = f"the samples count as {effective_size:,.0f} independent ones: {statistic} needs {needed:,}"
        return _untested(figure, *values, why=why)
    if min(values) <= 0:
        return _untested(figure, *values, why=ZERO_VALUE)
    random = np.random.default_rng(SEED)
    sampling = math.sqrt(
        run_variance.quantile_error(samples_a, share, random) ** 2
        + run_variance.quantile_error(samples_b, share, random) ** 2
        + run_variance.stamp_error(metric, a, b, values) ** 2
    )
    if not math.isfinite(sampling):
        return _untested(figure, *values, why=ZERO_SAMPLES)
    server = run_variance.latency_error(metric, a, b, variation.piece_error, values)
    steady = run_variance.latency_error(metric, a, b, variation.steady_piece_error, values)
    errors = EffectErrors(sampling, server, variation.bound(steady))
    return _compare_ratio(figure, values, min(a.requests, b.requests), errors)


def _compare_rate(metric: Metric, a: ComparedRun, b: ComparedRun, variation: Variation) -> ComparedFigure:
    """Compare the throughput `metric` of two single runs.

    A throughput is work divided by time. Both runs do the same work, so the relative error of a throughput equals the
    relative error of the run's duration. `variation` describes how much the server's speed varies.
    """
    values = metric.formula(a.frame) or 0.0, metric.formula(b.frame) or 0.0
    if min(values) <= 0:
        return _untested(metric.key, *values, why=SHORT)
    server = run_variance.server_error(variation.piece_error, 1.0)
    steady = run_variance.server_error(variation.steady_piece_error, 1.0)
    sampling = run_variance.stamp_error(metric, a, b, (a.span_s, b.span_s))
    errors = EffectErrors(sampling, server, variation.bound(steady))
    return _compare_ratio(metric.key, values, min(a.requests, b.requests), errors)


def _compare_pairs(figure: str, metric: Metric, a: ComparedRun, b: ComparedRun, variation: Variation) -> ComparedFigure:
    """Compare a latency of two single runs by comparing every request of run A with every request of run B.

    The tested value is the share of pairs in which the request from B is slower. The share is one half if A and B do
    not differ.
    """
    samples_a, samples_b = samples_of(a, metric), samples_of(b, metric)
    count = min(len(samples_a.values), len(samples_b.values))
    needed = stats.samples_needed(0.5)
    if count < needed:
        share = run_variance.probability_of_superiority(samples_a, samples_b, 0.0)[0] if count else math.nan
        return _untested(figure, 0.5, share, why=f"too few samples: {needed} are needed, there are {count}")
    medians = run_variance.quantile(samples_a, 0.5), run_variance.quantile(samples_b, 0.5)
    server = run_variance.latency_error(metric, a, b, variation.piece_error, medians)
    if not math.isfinite(server):
        # The runs are too short for an estimate. Use the error whose 95% interval equals the variation bound.
        steady = run_variance.latency_error(metric, a, b, variation.steady_piece_error, medians)
        server = variation.bound(steady) / student_quantile(0.975, run_variance.DEGREES_OF_FREEDOM)
    common_error = max(
        math.hypot(server, run_variance.stamp_error(metric, a, b, medians)), run_variance.MIN_RUN_VARIATION
    )
    share, error, p = run_variance.probability_of_superiority(samples_a, samples_b, common_error)
    low, high = confidence_interval(share - 0.5, error, run_variance.DEGREES_OF_FREEDOM)
    return replace(
        _empty_row(figure),
        a=0.5,
        b=share,
        difference=share - 0.5,
        difference_ci95=(max(-0.5, min(0.5, low)), max(-0.5, min(0.5, high))),
        p_value=p,
        test="Mann-Whitney",
        error=error,
        degrees_of_freedom=run_variance.DEGREES_OF_FREEDOM,
        error_floor=error * run_variance.MIN_RUN_VARIATION / common_error,
        count=min(a.requests, b.requests),
    )


def compare_run_shares(figure: str, a: tuple[int, int], b: tuple[int, int]) -> ComparedFigure:
    """Compare a share of two single runs, such as the share of complete requests.

    `a` and `b` contain the numerator and the denominator of the share in each run, such as the number of complete
    requests and the number of planned requests. The p-value is that of Fisher's exact test, and the interval is
    Newcombe's.
    """
    (part_a, all_a), (part_b, all_b) = a, b
    if not all_a or not all_b:
        share_a = part_a / all_a if all_a else math.nan
        share_b = part_b / all_b if all_b else math.nan
        return _untested(figure, share_a, share_b, why=WITHOUT_SHARE[figure])
    share_a, share_b = part_a / all_a, part_b / all_b
    low, high = stats.share_difference_interval(a, b, share_b - share_a, stats.wilson_interval)
    low, high = max(-1.0, low), min(1.0, high)
    return replace(
        _empty_row(figure),
        a=share_a,
        b=share_b,
        difference=share_b - share_a,
        difference_ci95=(low, high),
        p_value=stats.fisher_exact(a, b),
        test="Fisher's exact test",
        error=(high - low) / 2 / 1.96,  # for the estimate of `needs_more`
        degrees_of_freedom=EXACT_DEGREES_OF_FREEDOM,
        count=min(all_a, all_b),
    )


def compare_group_shares(figure: str, a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> ComparedFigure:
    """Compare a share of two groups of runs, such as the share of complete requests.

    `a` and `b` have one pair per run: the numerator and the denominator of the share, such as the number of complete
    requests and the number of planned requests. The shares are tested in two ways. The result has the larger p-value
    and the wider interval of the two tests.

    - The test between runs is the same as for any other figure.
    - The test over all requests of a group is Fisher's exact test, with the exact interval of each share. This test is
      needed, for example, for runs in which every request is complete. Such runs show no variation, but further runs
      might contain incomplete requests.
    """
    if not all(total for _, total in (*a, *b)):
        return _untested(figure, math.nan, math.nan, why=WITHOUT_SHARE[figure])
    total_a = sum(part for part, _ in a), sum(total for _, total in a)
    total_b = sum(part for part, _ in b), sum(total for _, total in b)
    result = compare_values(figure, [part / total for part, total in a], [part / total for part, total in b])
    difference = result.difference or 0.0
    low, high = stats.share_difference_interval(total_a, total_b, difference, stats.share_interval)
    between_low, between_high = result.difference_ci95 or (low, high)
    low, high = min(low, between_low), max(high, between_high)
    half_width = max(result.effect - low, high - result.effect)
    return replace(
        result,
        difference_ci95=(max(-1.0, low), min(1.0, high)),
        p_value=max(result.p_value or 0.0, stats.fisher_exact(total_a, total_b)),
        test=f"{result.test}; Fisher's exact test",
        error=half_width / stats.student_quantile(0.975, EXACT_DEGREES_OF_FREEDOM),
        degrees_of_freedom=EXACT_DEGREES_OF_FREEDOM,
    )


def compare_values(
    figure: str,
    a: Sequence[float | None],
    b: Sequence[float | None],
    run_variation: float = math.inf,
    *,
    paired: bool = False,
) -> ComparedFigure:
    """Compare two groups of runs, A and B, by one figure. `a` and `b` contain the values of the figure, one per run.

    If `paired` is True, `a[i]` and `b[i]` belong to runs with the same load, and a paired t test compares the groups.
    Otherwise, Welch's t test compares them.

    For positive values, the logarithms are compared, which gives an interval of the ratio B / A. Shares, and groups
    with a value of 0 or less, are compared directly.

    With few runs, the interval of the ratio can be very wide. Its width is therefore limited by the largest plausible
    variation between runs. This is `run_variation` (such as 0.05 for 5%), or twice the spread of the values in a group
    if that is larger. If `paired` is True, the spread is that of the differences between paired runs. By default, there
    is no limit.
    """
    known_a = [value for value in a if value is not None]
    known_b = [value for value in b if value is not None]
    if len(known_a) < len(a) or len(known_b) < len(b):
        return _untested(figure, math.nan, math.nan, why=MISSING_IN_SOME_RUNS)
    mean_a, mean_b = math.fsum(known_a) / len(known_a), math.fsum(known_b) / len(known_b)
    count = min(len(known_a), len(known_b))
    difference_of_means = stats.mean_of_differences if paired else stats.difference_of_means
    effect, error, degrees = difference_of_means(known_a, known_b)
    test = BETWEEN_RUNS if count > 1 else ONE_AGAINST_MANY
    result = replace(
        _empty_row(figure),
        a=mean_a,
        b=mean_b,
        difference=mean_b - mean_a,
        difference_ci95=confidence_interval(effect, error, degrees),
        p_value=p_value(effect, error, degrees),
        test=PAIRED_RUNS if paired else test,
        error=error,
        degrees_of_freedom=degrees,
        count=count,
        more_of="runs",
        paired=paired,
    )
    if result.unit == "share" or min(*known_a, *known_b) <= 0:
        return result
    logs_a, logs_b = [math.log(value) for value in known_a], [math.log(value) for value in known_b]
    effect, error, degrees = difference_of_means(logs_a, logs_b)
    varying = [[y - x for x, y in zip(logs_a, logs_b, strict=True)]] if paired else [logs_a, logs_b]
    spread = max(max(group) - min(group) for group in varying)
    bound = max(math.log1p(run_variation), SPREAD_FACTOR * spread)
    result = replace(result, error=error, degrees_of_freedom=degrees, ratio=math.exp(effect), variation_bound=bound)
    return _with_interval(result, p_value(effect, error, degrees))


def judge_figures(
    rows: Sequence[ComparedFigure], margin: float = MARGIN, gates: Sequence[Gate] = (), failed: Collection[str] = ()
) -> list[ComparedFigure]:
    """Return the rows with their verdicts and adjusted p-values.

    - "no difference": the 95% interval is within `margin`, the largest difference that does not matter.
    - "better" or "worse": the interval is not within `margin`, and the adjusted p-value is below 5%.
    - "inconclusive": neither of these conditions holds.

    The user chooses figures with a gate (`--fail-if`) before seeing the runs. The p-values of these figures are
    therefore adjusted only for the number of gates (Bonferroni's method). The p-values of all other figures are
    adjusted by Holm's method. `failed` contains the figures whose gate failed. Their verdict is always "worse".
    """
    gated = {gate.figure for gate in gates}
    adjusted = holm([None if row.figure in gated else row.p_value for row in rows])
    for index, row in enumerate(rows):
        if row.figure in gated and row.p_value is not None:
            adjusted[index] = min(1.0, row.p_value * len(gates))
    judged = [row if p is None else _judge(row, margin, p) for row, p in zip(rows, adjusted, strict=True)]
    return [replace(row, verdict="worse", needs_more=None) if row.figure in failed else row for row in judged]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the p-values adjusted by Holm's method. None values stay None.

    If every hypothesis with an adjusted p-value below 5% is rejected, the probability of one or more false rejections
    is at most 5%. The tests need not be independent (Holm, "A simple sequentially rejective multiple test procedure",
    1979).
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    maximum = 0.0
    for rank, (p, index) in enumerate(order):
        maximum = max(maximum, min(1.0, (len(order) - rank) * p))
        adjusted[index] = maximum
    return adjusted


def p_value(effect: float, error: float, degrees_of_freedom: float) -> float:
    """Return the two-sided p-value of an effect by Student's t.

    If `error` is 0, return 1 for an effect of 0, and 0 for any other effect.
    """
    if error == 0:
        return float(effect == 0)
    return 2 * student_cdf(-abs(effect / error), degrees_of_freedom)


def confidence_interval(
    effect: float, error: float, degrees_of_freedom: float, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the confidence interval of an effect by Student's t: `effect - t * error` to `effect + t * error`."""
    margin = student_quantile((1 + confidence) / 2, degrees_of_freedom) * error
    return effect - margin, effect + margin


def _judge(row: ComparedFigure, margin: float, adjusted_p: float) -> ComparedFigure:
    maximum = max(abs(row.relative(end)) for end in row.interval())
    row = replace(row, adjusted_p=adjusted_p, no_larger_than=maximum)
    if maximum <= margin:
        return replace(row, verdict="no difference")
    if adjusted_p < FALSE_ALARM_RATE:
        return replace(row, verdict="worse" if row.worse else "better")
    strictness = max(1.0, adjusted_p / row.p_value) if row.p_value else 1.0
    return replace(row, needs_more=_needs_more(row, margin, strictness))


def _needs_more(row: ComparedFigure, margin: float, strictness: float) -> int | None:
    """Return the approximate number of additional requests or runs for a conclusive verdict.

    A verdict is conclusive if the interval is within `margin`, or if the adjusted p-value is below 5%. `strictness` is
    the adjusted p-value divided by the unadjusted one. The estimate assumes that the effect stays the same, and that
    its error is proportional to `1 / sqrt(number)`. Return None if the number is impractically large.
    """
    effect_margin = margin if row.ratio is None else math.log1p(margin)
    aims = (
        (effect_margin - abs(row.effect), 1 - FALSE_ALARM_RATE / 2),
        (abs(row.effect), 1 - FALSE_ALARM_RATE / 2 / strictness),
    )
    numbers = [number_needed(row, aim, share) for aim, share in aims if aim > 0]
    return min((number for number in numbers if number is not None), default=None)


def number_needed(row: ComparedFigure, aim: float, share: float) -> int | None:
    """Return how many more requests or runs are needed to make the half-width of an interval at most `aim`.

    The half-width is `t * error`, where `t` is the `share`-quantile of Student's t distribution. `error` is the
    standard error of `row`. It is proportional to `1 / sqrt(number)`, where `number` is the number of requests or runs.
    Return None if the result would be impractically large.
    """
    if not math.isfinite(row.error):
        return None
    if row.more_of == "runs":
        for runs in range(row.count + 1, RUNS_MAX):
            error = row.error * math.sqrt(row.count / runs)
            degrees_of_freedom = runs - 1 if row.paired else 2 * runs - 2
            if student_quantile(share, degrees_of_freedom) * error <= aim:
                return runs - row.count
        return None
    allowed = aim / student_quantile(share, row.degrees_of_freedom)
    if allowed < row.error_floor:
        return None
    more = max(1, math.ceil(row.count * (row.error / allowed) ** 2) - row.count)
    return None if more > MORE_REQUESTS_MAX else int(float(f"{more:.1e}"))
