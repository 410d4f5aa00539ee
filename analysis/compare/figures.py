"""Compares each figure of A with that of B and derives one of four verdicts; also evaluates `--fail-if` conditions.

A single run is compared with a single run from raw samples, with the sources of chance that a run itself shows
(loadgen.analysis.compare.run_variance). Groups of repeats are compared by one figure per run, so requests need not be
independent. In both cases an interval is never wider than the plausible variation between runs (RUN_VARIATION), so any
larger difference is called. The table and `--fail-if` use the same intervals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from loadgen.analysis import stats
from loadgen.analysis.compare import run_variance
from loadgen.analysis.compare.run_variance import ComparedRun, samples_of
from loadgen.analysis.format import pluralise, significant, unit_of
from loadgen.analysis.metrics import Metric, metric_by_key
from loadgen.analysis.objectives import LATENCIES, RATES, parse_each
from loadgen.analysis.repeats import complete_and_planned
from loadgen.analysis.stats import student_cdf, student_quantile
from loadgen.analysis.summary import Summary

SEED = 20_030_711
"""Seed of the bootstrap, so that the same runs always give the same figures."""
FALSE_ALARM_RATE = 0.05
"""Probability that the comparison of a server with itself calls any figure better or worse."""
MARGIN = 0.05
"""Default difference, as a share of A, below which a difference does not matter."""
RUN_VARIATION = 0.10
"""Default maximum difference between two runs of one server, as a share. Runs that vary more raise it."""
VARIATION_CONFIDENCE = 0.995
"""Share of Student's t by which the bound exceeds the variation that the runs show: 3.5 standard errors."""
VARIATION_FACTOR_MAX = 2.0
"""Maximum factor by which the runs can raise the assumed bound. More than that is a change in what is compared, such as
phases of a run that changed in different directions."""
SPREAD_FACTOR = 2.0
"""The bound of groups is this multiple of the largest difference within one of the groups."""
MORE_REQUESTS_MAX = 1_000_000
RUNS_MAX = 1000
"""Larger numbers of requests or runs are not suggested."""
NOTHING_SENT = "nothing was sent in one of the runs"
MISSING_IN_SOME_RUNS = "not every run has this figure"
SHORT = "the run is too short for a rate"
ZERO_VALUE = "one of the values is 0, so there is no ratio"
ZERO_SAMPLES = "some samples are 0, so there is no ratio"
LOGARITHM_MAX = 500.0
"""Above this logarithm the exponential overflows. Runs that differ this much have no interval of a ratio."""
SINGLE = "bootstrap of the quantile, steps, stamps, and never narrower than runs differ"
BOUNDED = "bootstrap of the quantile, stamps, and all that runs may differ by"
ONE_AGAINST_MANY = "Student's t, with the other group's variation between runs"
BETWEEN_RUNS = "Welch's t between runs"
EXACT_DEGREES_OF_FREEDOM = 1e6
"""Degrees of freedom of an exact interval, whose error is known and not estimated."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of A and of B, with the test of their difference and the verdict on B."""

    figure: str
    """Name as in --assert, such as `ttft.p99`. `ttft.pairs` is the share of pairs in which B's request is slower."""
    unit: Literal["s", "per second", "share"]
    """Unit of `a`, `b` and `difference`."""
    direction: Literal["lower", "higher"]
    """Which direction is better."""
    a: float | None = None
    b: float | None = None
    difference: float | None = None
    difference_ci95: tuple[float, float] | None = None
    ratio: float | None = None
    """B / A. None for shares, and if either value is 0 or less."""
    ratio_ci95: tuple[float, float] | None = None
    p_value: float | None = None
    """Two-sided p-value of no difference. None if nothing can be tested."""
    test: str = ""
    error: float = math.nan
    """Standard error of the effect: of the logarithm of the ratio, or for a share of the difference."""
    degrees_of_freedom: float = math.nan
    sampling_error: float = 0.0
    """The part of `error` that is not variation between runs: chance in requests, and timestamps."""
    variation_bound: float = math.inf
    """Maximum plausible variation between runs, as a logarithm. Infinite if it is unknown."""
    error_floor: float = 0.0
    """Error that remains however many requests are sent."""
    count: int = 0
    """Number of requests or runs in the smaller group."""
    more_of: str = "requests"
    """What must increase to reduce the error: `requests` or `runs`."""
    verdict: Literal["better", "worse", "no difference", "inconclusive"] = "inconclusive"
    adjusted_p: float | None = None
    """p-value adjusted by Holm's method over all figures of the comparison that can be tested."""
    no_larger_than: float | None = None
    """Maximum difference by the interval: a share of A, or a difference of shares."""
    needs_more: int | None = None
    """Approximate number of further requests or runs in each of A and B that would decide it. None if impractical."""
    why: str = ""
    """Reason why nothing was tested."""

    @property
    def effect(self) -> float:
        """The tested effect: the logarithm of the ratio, or the difference of a share."""
        return math.log(self.ratio) if self.ratio is not None else self.difference or 0.0

    @property
    def worse(self) -> bool:
        """True if B lies on the worse side of A."""
        return (self.effect > 0) == (self.direction == "lower") and self.effect != 0

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return the interval of the effect, by its error or by the variation bound, whichever is narrower."""
        low, high = confidence_interval(self.effect, self.error, self.degrees_of_freedom, confidence)
        reach = self.variation_bound
        if self.sampling_error:
            reach += confidence_interval(0, self.sampling_error, self.degrees_of_freedom, confidence)[1]
        return max(low, self.effect - reach), min(high, self.effect + reach)

    def relative(self, effect: float) -> float:
        """Convert an effect to a share of A, or to a difference of shares."""
        return math.expm1(effect) if self.ratio is not None else effect

    def effect_of(self, relative: float) -> float:
        """Convert a share of A, or a difference of shares, to an effect."""
        if self.ratio is None:
            return relative
        return math.log1p(relative) if relative > -1 else -math.inf


def compare_single_runs(
    a: ComparedRun, b: ComparedRun, figures: Sequence[str], run_variation: float = RUN_VARIATION
) -> Iterator[ComparedFigure]:
    """Yield one row per figure from the raw samples of one run each."""
    variation = Variation(
        run_variance.piece_error(a, b), run_variance.piece_error(a, b, shift=True), math.log1p(run_variation)
    )
    for figure in figures:
        name, _, statistic = figure.partition(".")
        if figure == "complete":
            yield compare_run_shares(complete_and_planned(a.summary), complete_and_planned(b.summary))
        elif statistic == "pairs":
            yield _compare_pairs(figure, metric_by_key(name), a, b, variation)
        elif statistic:
            yield _compare_quantile(metric_by_key(name), statistic, a, b, variation)
        else:
            yield _compare_rate(metric_by_key(name), a, b, variation)


def compare_groups(
    a: Sequence[Summary], b: Sequence[Summary], figures: Sequence[str], run_variation: float = RUN_VARIATION
) -> Iterator[ComparedFigure]:
    """Yield one row per figure from one value per run. At least one group must have two runs.

    Samples of several runs are not pooled, so there are no rows for pairs.
    """
    for figure in figures:
        if figure == "complete":
            shares_a = [complete_and_planned(summary) for summary in a]
            shares_b = [complete_and_planned(summary) for summary in b]
            yield compare_group_shares(shares_a, shares_b)
        elif not figure.endswith(".pairs"):
            values_a = [_figure_value(figure, summary) for summary in a]
            values_b = [_figure_value(figure, summary) for summary in b]
            yield compare_values(figure, values_a, values_b, run_variation)


def _figure_value(figure: str, summary: Summary) -> float | None:
    """Return a figure of one run. It may rest on few samples, because the groups show how it varies between runs."""
    name, _, statistic = figure.partition(".")
    if not statistic:
        return getattr(summary.throughput, name)  # type: ignore[no-any-return]
    return getattr(getattr(summary.latency, name), statistic)  # type: ignore[no-any-return]


def _empty_row(figure: str) -> ComparedFigure:
    """Return a row without values."""
    name, _, statistic = figure.partition(".")
    if figure == "complete" or statistic == "pairs":
        return ComparedFigure(figure, "share", "higher" if figure == "complete" else "lower")
    metric = metric_by_key(name)
    return ComparedFigure(figure, "per second" if metric.unit.endswith("/s") else "s", metric.direction)


def _untested(figure: str, a: float, b: float, *, why: str) -> ComparedFigure:
    """Return a row of values that cannot be tested, with the reason. NaN stands for a missing value."""
    row = replace(_empty_row(figure), a=None if math.isnan(a) else a, b=None if math.isnan(b) else b, why=why)
    if row.a is None or row.b is None:
        return row
    return replace(row, difference=b - a, ratio=b / a if row.unit != "share" and min(a, b) > 0 else None)


class Variation(NamedTuple):
    """Variation between two runs, as logarithms."""

    piece_error: float
    """Error of a piece of the run."""
    steady_piece_error: float
    """Error of a piece of the run after removing one change of pace."""
    assumed: float
    """Assumed maximum variation between runs."""

    def bound(self, server_error: float) -> float:
        """Return the variation bound of a figure: the assumed one, or more if the runs show more variation."""
        shown = student_quantile(VARIATION_CONFIDENCE, run_variance.DEGREES_OF_FREEDOM) * server_error
        if not math.isfinite(shown):
            return self.assumed
        return min(max(self.assumed, shown), VARIATION_FACTOR_MAX * self.assumed)


class EffectErrors(NamedTuple):
    """Errors of the logarithm of a ratio, from single runs."""

    sampling: float
    server: float
    """Error from chance in the server's steps. NaN or infinite if the runs are too short to show it."""
    bound: float
    """Maximum plausible variation between runs."""


def _compare_ratio(figure: str, values: tuple[float, float], count: int, errors: EffectErrors) -> ComparedFigure:
    """Return the row of a ratio of single runs. For runs too short to show the server error, only the bound holds."""
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
    """Return the row of a ratio with its interval and p-value. An effect beyond the bound lowers the p-value."""
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
    # One stall widens a gap of every response, so thousands of gaps may come from a few independent events.
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
    """Compare a rate. It is work divided by time, so it varies as the time does."""
    values = metric.formula(a.frame) or 0.0, metric.formula(b.frame) or 0.0
    if min(values) <= 0:
        return _untested(metric.key, *values, why=SHORT)
    server = run_variance.server_error(variation.piece_error, 1.0)
    steady = run_variance.server_error(variation.steady_piece_error, 1.0)
    sampling = run_variance.stamp_error(metric, a, b, (a.span_s, b.span_s))
    errors = EffectErrors(sampling, server, variation.bound(steady))
    return _compare_ratio(metric.key, values, min(a.requests, b.requests), errors)


def _compare_pairs(figure: str, metric: Metric, a: ComparedRun, b: ComparedRun, variation: Variation) -> ComparedFigure:
    """Compare the share of pairs of requests in which B's request is slower with one half."""
    samples_a, samples_b = samples_of(a, metric), samples_of(b, metric)
    count = min(len(samples_a.values), len(samples_b.values))
    needed = stats.samples_needed(0.5)
    if count < needed:
        share = run_variance.probability_of_superiority(samples_a, samples_b, 0.0)[0] if count else math.nan
        return _untested(figure, 0.5, share, why=f"too few samples: {needed} are needed, there are {count}")
    medians = run_variance.quantile(samples_a, 0.5), run_variance.quantile(samples_b, 0.5)
    server = run_variance.latency_error(metric, a, b, variation.piece_error, medians)
    if not math.isfinite(server):
        # The runs are too short to show the error. Take the one whose 95 % interval is the variation bound.
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


def compare_run_shares(a: tuple[int, int], b: tuple[int, int]) -> ComparedFigure:
    """Compare the shares of complete requests of single runs, each given as (complete, all).

    The p-value is that of Fisher's exact test, and the interval is Newcombe's.
    """
    (complete_a, all_a), (complete_b, all_b) = a, b
    if not all_a or not all_b:
        share_a = complete_a / all_a if all_a else math.nan
        share_b = complete_b / all_b if all_b else math.nan
        return _untested("complete", share_a, share_b, why=NOTHING_SENT)
    share_a, share_b = complete_a / all_a, complete_b / all_b
    low, high = stats.share_difference_interval(a, b, share_b - share_a, stats.wilson_interval)
    low, high = max(-1.0, low), min(1.0, high)
    return replace(
        _empty_row("complete"),
        a=share_a,
        b=share_b,
        difference=share_b - share_a,
        difference_ci95=(low, high),
        p_value=stats.fisher_exact(a, b),
        test="Fisher's exact test",
        error=(high - low) / 2 / 1.96,  # lets sample sizes be estimated as for the other figures
        degrees_of_freedom=EXACT_DEGREES_OF_FREEDOM,
        count=min(all_a, all_b),
    )


def compare_group_shares(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> ComparedFigure:
    """Compare the shares of complete requests of groups, given as (complete, all) of each run.

    The larger of two errors counts: that between runs, as for any figure, and that of all requests of a group taken
    together (Fisher's exact test, and the exact interval of each share). The second one is needed because runs in which
    every request is complete do not vary, although further runs might.
    """
    if not all(total for _, total in (*a, *b)):
        return _untested("complete", math.nan, math.nan, why=NOTHING_SENT)
    total_a = sum(complete for complete, _ in a), sum(total for _, total in a)
    total_b = sum(complete for complete, _ in b), sum(total for _, total in b)
    result = compare_values(
        "complete", [complete / total for complete, total in a], [complete / total for complete, total in b]
    )
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
    figure: str, a: Sequence[float | None], b: Sequence[float | None], run_variation: float = math.inf
) -> ComparedFigure:
    """Compare two groups of values of one figure, with one value per run.

    Positive figures are compared by their logarithms, which gives an interval of the ratio. Shares are compared
    directly.
    """
    known_a = [value for value in a if value is not None]
    known_b = [value for value in b if value is not None]
    if len(known_a) < len(a) or len(known_b) < len(b):
        return _untested(figure, math.nan, math.nan, why=MISSING_IN_SOME_RUNS)
    mean_a, mean_b = math.fsum(known_a) / len(known_a), math.fsum(known_b) / len(known_b)
    count = min(len(known_a), len(known_b))
    effect, error, degrees = stats.difference_of_means(known_a, known_b)
    result = replace(
        _empty_row(figure),
        a=mean_a,
        b=mean_b,
        difference=mean_b - mean_a,
        difference_ci95=confidence_interval(effect, error, degrees),
        p_value=p_value(effect, error, degrees),
        test=BETWEEN_RUNS if count > 1 else ONE_AGAINST_MANY,
        error=error,
        degrees_of_freedom=degrees,
        count=count,
        more_of="runs",
    )
    if result.unit == "share" or min(*known_a, *known_b) <= 0:
        return result
    logs_a, logs_b = [math.log(value) for value in known_a], [math.log(value) for value in known_b]
    effect, error, degrees = stats.difference_of_means(logs_a, logs_b)
    spread = max(math.log(max(group) / min(group)) for group in (known_a, known_b))
    bound = max(math.log1p(run_variation), SPREAD_FACTOR * spread)
    result = replace(result, error=error, degrees_of_freedom=degrees, ratio=math.exp(effect), variation_bound=bound)
    return _with_interval(result, p_value(effect, error, degrees))


def judge_figures(
    rows: Sequence[ComparedFigure], margin: float = MARGIN, gates: Sequence[Gate] = ()
) -> list[ComparedFigure]:
    """Return every row with its verdict.

    `margin` is the largest difference that does not matter. The verdict is "no difference" if the 95 % interval lies
    within the margin. Otherwise it is "better" or "worse" if the adjusted p-value is below 5 %, or "inconclusive" if
    not. The user chose the figures of gates before seeing the runs, so the other figures do not count for them. The
    p-values of gates are adjusted by Bonferroni's method, and those of the other figures by Holm's.
    """
    gated = {gate.figure for gate in gates}
    adjusted = holm([None if row.figure in gated else row.p_value for row in rows])
    for index, row in enumerate(rows):
        if row.figure in gated and row.p_value is not None:
            adjusted[index] = min(1.0, row.p_value * len(gates))
    return [row if p is None else _judge(row, margin, p) for row, p in zip(rows, adjusted, strict=True)]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted by Holm's method. None stays None.

    If every hypothesis with an adjusted p-value below 5 % is rejected, the probability of any error is at most 5 %,
    however the tests depend on each other (Holm, "A simple sequentially rejective multiple test procedure", 1979).
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    maximum = 0.0
    for rank, (p, index) in enumerate(order):
        maximum = max(maximum, min(1.0, (len(order) - rank) * p))
        adjusted[index] = maximum
    return adjusted


def p_value(effect: float, error: float, degrees_of_freedom: float) -> float:
    """Return the two-sided p-value by Student's t. Without any error it is 1 for an effect of 0, and otherwise 0."""
    if error == 0:
        return float(effect == 0)
    return 2 * student_cdf(-abs(effect / error), degrees_of_freedom)


def confidence_interval(
    effect: float, error: float, degrees_of_freedom: float, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the confidence interval of an effect by Student's t."""
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
    """Return about how many more requests or runs would decide an inconclusive row; None if impractical.

    The estimate assumes that the effect stays the same and that its error falls with the square root of the number. The
    row is decided if its interval lies within the margin, or if its p-value, which the adjustment multiplied by
    `strictness`, is below 5 %.
    """
    effect_margin = margin if row.ratio is None else math.log1p(margin)
    aims = (
        (effect_margin - abs(row.effect), 1 - FALSE_ALARM_RATE / 2),
        (abs(row.effect), 1 - FALSE_ALARM_RATE / 2 / strictness),
    )
    numbers = [_number_needed(row, aim, share) for aim, share in aims if aim > 0]
    return min((number for number in numbers if number is not None), default=None)


def _number_needed(row: ComparedFigure, aim: float, share: float) -> int | None:
    """Return how many more it takes until the error times Student's t of `share` is at most `aim`."""
    if not math.isfinite(row.error):
        return None
    if row.more_of == "runs":
        for runs in range(row.count + 1, RUNS_MAX):
            error = row.error * math.sqrt(row.count / runs)
            if student_quantile(share, 2 * runs - 2) * error <= aim:
                return runs - row.count
        return None
    allowed = aim / student_quantile(share, row.degrees_of_freedom)
    if allowed < row.error_floor:
        return None
    more = max(1, math.ceil(row.count * (row.error / allowed) ** 2) - row.count)
    return None if more > MORE_REQUESTS_MAX else int(float(f"{more:.1e}"))


HINT = f"""A condition names a figure, and how much worse than A it may be in B: 'ttft.p99 worse by 5%'.
  figures      LATENCY.STATISTIC, complete, {", ".join(RATES)}
  latencies    {", ".join(LATENCIES)}
  statistics   {", ".join(stats.WITH_INTERVAL)}
  bounds       a share of A's figure such as 5%; of `complete` a difference of shares; 'worse' alone is worse by 0%"""
_GATE = re.compile(rf"([a-z_0-9]+)(?:\.({'|'.join(stats.WITH_INTERVAL)}))? worse(?: by (\d+(?:\.\d+)?) ?(%)?)?")


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition that fails a comparison (`--fail-if`): `ttft.p99 worse by 5%`, `output_tokens_per_s worse`.

    Like an objective, a gate describes the server, and the runs are samples of it. The gate fails if the whole interval
    of the difference is worse by more than the bound, and passes if no part of the interval is. Otherwise it is
    inconclusive. Gates are chosen before the runs are seen, so the other figures of the table do not count. With k
    gates, each interval has the confidence 1 - 5 % / k (Bonferroni), and the probability of any false failure is 2.5 %.
    The table uses the same interval for a gate's figure, so the two never contradict each other.
    """

    text: str
    figure: str
    bound: float
    """A share of A's figure, or a difference of shares."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """The outcome of a gate."""

    condition: str
    """The gate as the user wrote it."""
    verdict: Literal["pass", "fail", "inconclusive"]
    said: str
    """The measured values and their interval."""

    @property
    def sentence(self) -> str:
        return f"{self.verdict}: {self.condition}: {self.said}"


def parse_gates(expressions: Iterable[str]) -> list[Gate]:
    """Parse the conditions of `--fail-if`. Raises ObjectiveError, which names every mistake in all of them."""
    return parse_each(expressions, _parse_gate, "--fail-if", HINT)


def _parse_gate(text: str) -> Gate:
    match = _GATE.fullmatch(text)
    if not match or match[1] not in (("complete", *RATES) if match[2] is None else LATENCIES):
        raise ValueError("is not a condition")
    if match[3] and not match[4]:
        raise ValueError(f"{match[3]} has no unit: write {match[3]}%")
    figure = match[1] if match[2] is None else f"{match[1]}.{match[2]}"
    return Gate(text, figure, float(match[3] or 0) / 100)


def judge_gates(gates: Sequence[Gate], rows: Sequence[ComparedFigure]) -> list[GateResult]:
    """Return the result of every gate."""
    by_figure = {row.figure: row for row in rows}
    error_rate = FALSE_ALARM_RATE / len(gates) if gates else FALSE_ALARM_RATE
    return [_judge_gate(gate, by_figure[gate.figure], error_rate) for gate in gates]


def _judge_gate(gate: Gate, row: ComparedFigure, error_rate: float) -> GateResult:
    factor, unit = unit_of(gate.figure, row.a)
    a, b = (significant(value and value * factor, 4) for value in (row.a, row.b))
    if row.p_value is None:
        return GateResult(gate.text, "inconclusive", f"{a} to {b} {unit}; {row.why}")
    sign = 1 if row.direction == "lower" else -1  # makes larger values worse
    low, high = sorted(sign * row.relative(end) for end in row.interval(1 - error_rate))
    text = (
        f"{a} to {b} {unit}, {sign * row.relative(row.effect) * 100:+.1f} %, {100 * (1 - error_rate):.4g} % interval "
        f"{low * 100:+.1f} % to {high * 100:+.1f} % (+ is worse)"
    )
    if low > gate.bound:
        return GateResult(gate.text, "fail", text)
    if high <= gate.bound:
        return GateResult(gate.text, "pass", text)
    aim = abs(row.effect - row.effect_of(sign * gate.bound))
    more = _number_needed(row, aim, 1 - error_rate / 2) if aim else None
    if more:
        text += f"; about {pluralise(more, f'more {row.more_of[:-1]}')} in each would decide it"
    return GateResult(gate.text, "inconclusive", text)
