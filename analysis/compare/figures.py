"""Each figure of A against that of B, from its difference and error to one of four verdicts, and `--fail-if`.

One run against one run: from raw samples, with the sources of chance that a run shows
(loadgen.analysis.compare.run_variance). Groups of repeats: one figure per run, so that requests need not be
independent. In both an interval is never wider than what makes whole runs differ may plausibly do (RUN_VARIATION), so
that what lies beyond that is called. Table and `--fail-if` judge by the same interval.
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
"""Of the bootstrap: the same runs give the same figures."""
ERROR_MOST = 0.05
"""The chance that a comparison of a server with itself calls any figure better or worse."""
MARGIN = 0.05
"""By how much a figure may differ before it matters, as a share of A's."""
RUN_VARIATION = 0.10
"""By how much two runs of one server are taken to differ at most, unless they show more themselves."""
SHOWN_MORE = 0.995
"""Runs show that they vary by so many of their own standard errors: Student's t of this share, which is 3.5."""
SHOWN_MOST = 2.0
"""So many times the bound stated: what looks like more is in what is compared, such as phases that changed unalike."""
SPREAD_MORE = 2.0
"""Groups vary by so many times the largest difference within one of them."""
MORE_MOST = 1_000_000
RUNS_MOST = 1000
"""More requests, or runs, than these are no advice."""
NOTHING = "in a run nothing was sent"
SOME_LACK = "not every run has it"
LOGARITHM_MOST = 500.0
"""Beyond it the exponential is no float: runs that differ so much have no interval of a ratio."""
SINGLE = "bootstrap of the quantile, steps, stamps, and never narrower than runs differ"
BOUNDED = "bootstrap of the quantile, stamps, and all that runs may differ by"
SHORT = "the run is too short for a rate"
BETWEEN = ("Student's t, with the other group's variation between runs", "Welch's t between runs")
EXACT_FREEDOM = 1e6
"""An exact interval needs no allowance for an error that was itself estimated."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of A beside that of B. B is better or worse than A."""

    figure: str
    """As --assert names it, such as `ttft.p99`; `ttft.pairs` is the share of pairs in which B's request is slower."""
    unit: Literal["s", "per second", "share"]
    """What `a`, `b` and `difference` are in."""
    direction: Literal["lower", "higher"]
    """Which is better."""
    a: float | None = None
    b: float | None = None
    difference: float | None = None
    difference_ci95: tuple[float, float] | None = None
    ratio: float | None = None
    """B / A; None where either is 0 or less, and for shares."""
    ratio_ci95: tuple[float, float] | None = None
    p_value: float | None = None
    """Two-sided, of no difference at all; None where nothing can be tested."""
    test: str = ""
    error: float = math.nan
    """Standard error of the logarithm of the ratio, or of the difference for a share."""
    freedom: float = math.nan
    sampling: float = 0.0
    """Of `error`, what is in no run-to-run variation: chance in requests, and stamps."""
    bound: float = math.inf
    """The most that run-to-run variation may plausibly be, as `error` a logarithm; infinite where nobody can say."""
    error_floor: float = 0.0
    """Below which no number of requests would take it."""
    count: int = 0
    """Of what more would help, in the smaller group: requests, or runs."""
    more_of: str = "requests"
    verdict: Literal["better", "worse", "no difference", "inconclusive"] = "inconclusive"
    adjusted_p: float | None = None
    """By Holm's method over all figures of the comparison that can be tested."""
    no_larger_than: float | None = None
    """The most that B may differ, by the interval: a share of A's, or a difference of shares."""
    needs_more: int | None = None
    """About how many more requests or runs in each of A and B it would take to tell; None: no practical number."""
    why: str = ""
    """Why nothing was tested."""

    @property
    def effect(self) -> float:
        """What was tested: the logarithm of the ratio, or the difference of a share."""
        return math.log(self.ratio) if self.ratio is not None else self.difference or 0.0

    @property
    def worse(self) -> bool:
        """The side on which B lies."""
        return (self.effect > 0) == (self.direction == "lower") and self.effect != 0

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Of the effect: by its error, or by the bound, whichever is narrower."""
        low, high = confidence_interval(self.effect, self.error, self.freedom, confidence)
        maximum = (
            confidence_interval(0, self.sampling, self.freedom, confidence)[1] if self.sampling else 0.0
        ) + self.bound
        return max(low, self.effect - maximum), min(high, self.effect + maximum)

    def relative(self, effect: float) -> float:
        """An effect as a share of A's, or as a difference of shares."""
        return math.expm1(effect) if self.ratio is not None else effect

    def effect_of(self, relative: float) -> float:
        """The effect that is this share of A's, or this difference of shares."""
        return relative if self.ratio is None else math.log1p(relative) if relative > -1 else -math.inf


def compare_single_runs(
    a: ComparedRun, b: ComparedRun, figures: Sequence[str], run_variation: float = RUN_VARIATION
) -> Iterator[ComparedFigure]:
    """One row per figure."""
    vary = Variation(
        run_variance.piece_error(a, b), run_variance.piece_error(a, b, shift=True), math.log1p(run_variation)
    )
    for figure in figures:
        name, _, statistic = figure.partition(".")
        if figure == "complete":
            yield compare_run_shares(complete_and_planned(a.summary), complete_and_planned(b.summary))
        elif statistic == "pairs":
            yield _pairs(figure, metric_by_key(name), a, b, vary)
        elif statistic:
            yield _quantile(metric_by_key(name), statistic, a, b, vary)
        else:
            yield _rate(metric_by_key(name), a, b, vary)


def compare_groups(
    a: Sequence[Summary], b: Sequence[Summary], figures: Sequence[str], run_variation: float = RUN_VARIATION
) -> Iterator[ComparedFigure]:
    """One row per figure; samples of several runs are not thrown together, so there are no pairs. At least one of the
    groups has two runs."""
    for figure in figures:
        if figure == "complete":
            yield compare_group_shares(*([complete_and_planned(summary) for summary in group] for group in (a, b)))
        elif not figure.endswith(".pairs"):
            values_a, values_b = ([_value(figure, each) for each in group] for group in (a, b))
            yield compare_values(figure, values_a, values_b, run_variation)


def _value(figure: str, summary: Summary) -> float | None:
    """Of one run, of however few samples: how it varies between runs is seen."""
    name, _, statistic = figure.partition(".")
    if not statistic:
        return getattr(summary.throughput, name)  # type: ignore[no-any-return]
    return getattr(getattr(summary.latency, name), statistic)  # type: ignore[no-any-return]


def _blank(figure: str) -> ComparedFigure:
    """A row that says what its figure is."""
    name, _, statistic = figure.partition(".")
    if figure == "complete" or statistic == "pairs":
        return ComparedFigure(figure, "share", "higher" if figure == "complete" else "lower")
    metric = metric_by_key(name)
    return ComparedFigure(figure, "per second" if metric.unit.endswith("/s") else "s", metric.direction)


def _untold(figure: str, a: float, b: float, *, why: str) -> ComparedFigure:
    """A row of what was measured, and why nothing can be told from it; NaN is what nothing was measured of."""
    row = replace(_blank(figure), a=None if math.isnan(a) else a, b=None if math.isnan(b) else b, why=why)
    if row.a is None or row.b is None:
        return row
    return replace(row, difference=b - a, ratio=b / a if row.unit != "share" and min(a, b) > 0 else None)


class Variation(NamedTuple):
    """How runs vary, as logarithms: a piece of two runs, as it is and without a change of pace; the bound stated."""

    piece: float
    without_shift: float
    stated: float

    def bound(self, server_error: float) -> float:
        """The bound for a figure: the one stated, or as far as the runs themselves show that such figures vary."""
        shown = student_quantile(SHOWN_MORE, run_variance.DEGREES_OF_FREEDOM) * server_error
        return min(max(self.stated, shown), SHOWN_MOST * self.stated) if math.isfinite(shown) else self.stated


def _by_noise(
    figure: str, values: tuple[float, float], count: int, *, sampling: float, server: float, bound: float
) -> ComparedFigure:
    """A ratio with these errors of its logarithm, as single runs show them. Of runs too short to show how the server
    varies (`server` is NaN) nothing but the bound is known."""
    (a, b), effect, short = values, math.log(values[1] / values[0]), not math.isfinite(server)
    error = math.inf if short else max(math.hypot(sampling, server), run_variance.MIN_RUN_VARIATION)
    row = replace(
        _blank(figure), a=a, b=b, difference=b - a, ratio=b / a, test=BOUNDED if short else SINGLE, error=error,
        freedom=run_variance.DEGREES_OF_FREEDOM, sampling=sampling, bound=bound,
        error_floor=run_variance.MIN_RUN_VARIATION, count=count,
    )  # fmt: skip
    return _with_interval(row, 1.0 if short else p_value(effect, error, run_variance.DEGREES_OF_FREEDOM))


def _with_interval(row: ComparedFigure, p: float) -> ComparedFigure:
    """A ratio with its interval, and its p-value where what lies beyond the bound makes it smaller."""
    if (beyond := abs(row.effect) - row.bound) > 0:
        p = min(p, p_value(beyond, row.sampling, row.freedom))
    result = row.interval()
    if result[1] > LOGARITHM_MOST:
        return replace(row, p_value=p)
    difference = row.difference_ci95
    if difference is None or result != confidence_interval(row.effect, row.error, row.freedom):
        difference = (row.a or 0.0) * math.expm1(result[0]), (row.a or 0.0) * math.expm1(result[1])
    ratio = math.exp(result[0]), math.exp(result[1])
    return replace(row, p_value=p, ratio_ci95=ratio, difference_ci95=difference)


def _quantile(metric: Metric, statistic: str, a: ComparedRun, b: ComparedRun, vary: Variation) -> ComparedFigure:
    figure, share = f"{metric.key}.{statistic}", float(statistic.removeprefix("p")) / 100
    samples = samples_of(a, metric), samples_of(b, metric)
    values = run_variance.quantile(samples[0], share), run_variance.quantile(samples[1], share)
    few = min(len(sample.values) for sample in samples)
    if few < (needed := stats.samples_needed(share)):
        return _untold(figure, *values, why=f"too few samples: {statistic} needs {needed:,}, there are {few:,}")
    worth = min(run_variance.effective_size(each, share, value) for each, value in zip(samples, values, strict=True))
    if worth < needed:  # a stall is in the gaps of all requests: thousands of gaps may be a few events
        why = f"the samples are worth {worth:,.0f} independent ones: {statistic} needs {needed:,}"
        return _untold(figure, *values, why=why)
    if min(values) <= 0:
        return _untold(figure, *values, why="one of them is 0, which no ratio can be taken of")
    random = np.random.default_rng(SEED)
    sampling = math.sqrt(
        run_variance.quantile_error(samples[0], share, random) ** 2
        + run_variance.quantile_error(samples[1], share, random) ** 2
        + run_variance.stamp_error(metric, a, b, values) ** 2
    )
    if not math.isfinite(sampling):
        return _untold(figure, *values, why="some of its samples are 0")
    server, steady = (run_variance.latency_error(metric, a, b, piece, values) for piece in vary[:2])
    errors = {"sampling": sampling, "server": server, "bound": vary.bound(steady)}
    return _by_noise(figure, values, min(a.requests, b.requests), **errors)


def _rate(metric: Metric, a: ComparedRun, b: ComparedRun, vary: Variation) -> ComparedFigure:
    """A rate is what was done by the time it took, so it varies as that time does."""
    values = metric.formula(a.frame) or 0.0, metric.formula(b.frame) or 0.0
    if min(values) <= 0:
        return _untold(metric.key, *values, why=SHORT)
    server, steady = (run_variance.server_error(piece, 1.0) for piece in vary[:2])
    sampling = run_variance.stamp_error(metric, a, b, (a.span_s, b.span_s))
    errors = {"sampling": sampling, "server": server, "bound": vary.bound(steady)}
    return _by_noise(metric.key, values, min(a.requests, b.requests), **errors)


def _pairs(figure: str, metric: Metric, a: ComparedRun, b: ComparedRun, vary: Variation) -> ComparedFigure:
    samples = samples_of(a, metric), samples_of(b, metric)
    few = min(len(sample.values) for sample in samples)
    if few < (needed := stats.samples_needed(0.5)):
        share = run_variance.probability_of_superiority(*samples, 0.0)[0] if few else math.nan
        return _untold(figure, 0.5, share, why=f"too few samples: {needed} are needed, there are {few}")
    medians = run_variance.quantile(samples[0], 0.5), run_variance.quantile(samples[1], 0.5)
    server = run_variance.latency_error(metric, a, b, vary.piece, medians)
    if not math.isfinite(server):  # too short to show it: as much as makes the bound an interval of 95 %
        steady = run_variance.latency_error(metric, a, b, vary.without_shift, medians)
        server = vary.bound(steady) / student_quantile(0.975, run_variance.DEGREES_OF_FREEDOM)
    together = max(math.hypot(server, run_variance.stamp_error(metric, a, b, medians)), run_variance.MIN_RUN_VARIATION)
    share, error, p = run_variance.probability_of_superiority(*samples, together)
    low, high = (
        max(-0.5, min(0.5, end)) for end in confidence_interval(share - 0.5, error, run_variance.DEGREES_OF_FREEDOM)
    )
    return replace(
        _blank(figure), a=0.5, b=share, difference=share - 0.5, difference_ci95=(low, high), p_value=p,
        test="Mann-Whitney", error=error, freedom=run_variance.DEGREES_OF_FREEDOM,
        error_floor=error * run_variance.MIN_RUN_VARIATION / together,
        count=min(a.requests, b.requests),
    )  # fmt: skip


def compare_run_shares(a: tuple[int, int], b: tuple[int, int]) -> ComparedFigure:
    """Shares of requests that were complete, of (complete, all): Fisher's exact test, and Newcombe's interval."""
    if not a[1] or not b[1]:
        return _untold("complete", *(good / total if total else math.nan for good, total in (a, b)), why=NOTHING)
    share_a, share_b = a[0] / a[1], b[0] / b[1]
    low, high = stats.share_difference_interval(a, b, share_b - share_a, stats.wilson_interval)
    low, high = max(-1.0, low), min(1.0, high)
    # Half its width as so many standard errors, so that sizes can be worked out as for the others.
    return replace(
        _blank("complete"), a=share_a, b=share_b, difference=share_b - share_a, difference_ci95=(low, high),
        p_value=stats.fisher_exact(a, b), test="Fisher's exact test", error=(high - low) / 2 / 1.96,
        freedom=EXACT_FREEDOM, count=min(a[1], b[1]),
    )  # fmt: skip


def compare_group_shares(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> ComparedFigure:
    """Compare shares of requests, given as (complete, all) of each run, with the larger of two errors. Between runs as
    for any figure; and as if all requests of a group were of one run, by Fisher's exact test and the exact interval of
    each share. Runs that are complete to the last request do not vary, and yet more of them might."""
    if not all(total for _, total in (*a, *b)):
        return _untold("complete", math.nan, math.nan, why=NOTHING)
    (good_a, all_a), (good_b, all_b) = (tuple(map(sum, zip(*group, strict=True))) for group in (a, b))
    result = compare_values("complete", [good / total for good, total in a], [good / total for good, total in b])
    low, high = stats.share_difference_interval(
        (good_a, all_a), (good_b, all_b), result.difference or 0.0, stats.share_interval
    )
    between = result.difference_ci95 or (low, high)
    low, high = min(low, between[0]), max(high, between[1])
    error = max(result.effect - low, high - result.effect) / stats.student_quantile(0.975, EXACT_FREEDOM)
    p = max(result.p_value or 0.0, stats.fisher_exact((good_a, all_a), (good_b, all_b)))
    return replace(
        result, difference_ci95=(max(-1.0, low), min(1.0, high)), p_value=p, test=f"{result.test}; Fisher's exact test",
        error=error, freedom=EXACT_FREEDOM,
    )  # fmt: skip


def compare_values(
    figure: str, a: Sequence[float | None], b: Sequence[float | None], run_variation: float = math.inf
) -> ComparedFigure:
    """Compare two groups of values of one figure. Of a figure above 0 the logarithms are compared, so that the interval
    is one of the ratio; of a share the values themselves."""
    known_a, known_b = known = [[value for value in group if value is not None] for group in (a, b)]
    if len(known_a) < len(a) or len(known_b) < len(b):
        return _untold(figure, math.nan, math.nan, why=SOME_LACK)
    mean_a, mean_b = math.fsum(known_a) / len(known_a), math.fsum(known_b) / len(known_b)
    plain, few = stats.difference_of_means(known_a, known_b), min(len(known_a), len(known_b))
    result = replace(
        _blank(figure), a=mean_a, b=mean_b, difference=mean_b - mean_a, difference_ci95=confidence_interval(*plain),
        p_value=p_value(*plain), test=BETWEEN[few > 1], error=plain[1], freedom=plain[2], count=few,
        more_of="runs",
    )  # fmt: skip
    if result.unit == "share" or min(*known_a, *known_b) <= 0:
        return result
    effect, error, freedom = tested = stats.difference_of_means(*([math.log(x) for x in group] for group in known))
    spread = max(math.log(max(group) / min(group)) for group in known)
    bound = max(math.log1p(run_variation), SPREAD_MORE * spread)
    result = replace(result, error=error, freedom=freedom, ratio=math.exp(effect), bound=bound)
    return _with_interval(result, p_value(*tested))


def judge_figures(
    rows: Sequence[ComparedFigure], margin: float = MARGIN, gates: Sequence[Gate] = ()
) -> list[ComparedFigure]:
    """Every row with its verdict. `margin` is by how much a figure may differ before it matters. *No difference larger
    than X* when the 95 % interval lies within the margin; else *better* or *worse* when the adjusted p-value is below
    5 %; else *inconclusive*. Figures of gates were asked for before the runs were seen, so the others do not count for
    them: they are adjusted by Bonferroni's method, the others by Holm's."""
    requested = {gate.figure for gate in gates}
    adjusted = holm([None if row.figure in requested else row.p_value for row in rows])
    for index, row in enumerate(rows):
        if row.figure in requested and row.p_value is not None:
            adjusted[index] = min(1.0, row.p_value * len(gates))
    return [row if p is None else _judged(row, margin, p) for row, p in zip(rows, adjusted, strict=True)]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted p-values: whoever rejects those below 5 % errs anywhere with a chance of 5 %, however they depend on
    each other (Holm, "A simple sequentially rejective multiple test procedure", 1979). None stays None."""
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    maximum = 0.0
    for rank, (p, index) in enumerate(order):
        maximum = max(maximum, min(1.0, (len(order) - rank) * p))
        adjusted[index] = maximum
    return adjusted


def p_value(effect: float, error: float, freedom: float) -> float:
    """Two-sided, by Student's t. Without any error only a difference of nothing is compatible with none."""
    if error == 0:
        return float(effect == 0)
    return 2 * student_cdf(-abs(effect / error), freedom)


def confidence_interval(effect: float, error: float, freedom: float, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of an effect."""
    margin = student_quantile((1 + confidence) / 2, freedom) * error
    return effect - margin, effect + margin


def _judged(row: ComparedFigure, margin: float, adjusted_p: float) -> ComparedFigure:
    maximum = max(abs(row.relative(end)) for end in row.interval())
    row = replace(row, adjusted_p=adjusted_p, no_larger_than=maximum)
    if maximum <= margin:
        return replace(row, verdict="no difference")
    if adjusted_p < ERROR_MOST:
        return replace(row, verdict="worse" if row.worse else "better")
    strictness = max(1.0, adjusted_p / row.p_value) if row.p_value else 1.0
    return replace(row, needs_more=_needs_more(row, margin, strictness))


def _needs_more(row: ComparedFigure, margin: float, strictness: float) -> int | None:
    """About how many more would tell, if the effect stayed as it is and its error fell with the root of their number:
    so many that the interval lies within the margin, or that the p-value, which Holm's method multiplied by
    `strictness`, is below 5 %. None where no practical number would."""
    within = margin if row.ratio is None else math.log1p(margin)
    aims = ((within - abs(row.effect), 1 - ERROR_MOST / 2), (abs(row.effect), 1 - ERROR_MOST / 2 / strictness))
    result = (_number_for(row, aim, share) for aim, share in aims if aim > 0)
    return min((number for number in result if number is not None), default=None)


def _number_for(row: ComparedFigure, aim: float, share: float) -> int | None:
    """How many more it takes until the error times Student's t of this share is no more than `aim`."""
    if not math.isfinite(row.error):
        return None
    if row.more_of == "runs":
        for runs in range(row.count + 1, RUNS_MOST):
            error = row.error * math.sqrt(row.count / runs)
            if student_quantile(share, 2 * runs - 2) * error <= aim:
                return runs - row.count
        return None
    allowed = aim / student_quantile(share, row.freedom)
    if allowed < row.error_floor:
        return None
    more = max(1, math.ceil(row.count * (row.error / allowed) ** 2) - row.count)
    return None if more > MORE_MOST else int(float(f"{more:.1e}"))


HINT = f"""A condition is a figure, and by how much B may not be worse than A: 'ttft.p99 worse by 5%'.
  figures      LATENCY.STATISTIC, complete, {", ".join(RATES)}
  latencies    {", ".join(LATENCIES)}
  statistics   {", ".join(stats.WITH_INTERVAL)}
  bounds       a share of A's figure such as 5%; of `complete` a difference of shares; 'worse' alone is worse by 0%"""
_GATE = re.compile(rf"([a-z_0-9]+)(?:\.({'|'.join(stats.WITH_INTERVAL)}))? worse(?: by (\d+(?:\.\d+)?) ?(%)?)?")


@dataclass(frozen=True, slots=True)
class Gate:
    """What B must not be (`--fail-if`): `ttft.p99 worse by 5%`, `output_tokens_per_s worse`.

    Like an objective, a gate speaks of the server, of which the runs are samples: it fails when the whole interval of
    the difference is worse by more than the bound, passes when the whole interval is not, and otherwise cannot be told.
    Each is a question asked before the runs were seen, so the figures of the table, which were not, do not count: with
    k gates each interval is one of 1 - 5 % / k (Bonferroni), so that the chance of any false failure is 2.5 %. The
    table judges its figure by the same interval, so that both say the same.
    """

    text: str
    figure: str
    bound: float
    """A share of A's figure, or a difference of shares."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """What became of one gate."""

    condition: str
    """The gate as it was written."""
    verdict: Literal["pass", "fail", "inconclusive"]
    said: str

    @property
    def sentence(self) -> str:
        return f"{self.verdict}: {self.condition}: {self.said}"


def parse_gates(expressions: Iterable[str]) -> list[Gate]:
    """Read expressions. Raises ObjectiveError, which names every mistake in all of them."""
    return parse_each(expressions, _gate, "--fail-if", HINT)


def _gate(text: str) -> Gate:
    match = _GATE.fullmatch(text)
    if not match or match[1] not in (("complete", *RATES) if match[2] is None else LATENCIES):
        raise ValueError("is no condition")
    if match[3] and not match[4]:
        raise ValueError(f"{match[3]} has no unit: write {match[3]}%")
    figure = match[1] if match[2] is None else f"{match[1]}.{match[2]}"
    return Gate(text, figure, float(match[3] or 0) / 100)


def judge_gates(gates: Sequence[Gate], rows: Sequence[ComparedFigure]) -> list[GateResult]:
    """Hold each against its row."""
    by_figure = {row.figure: row for row in rows}
    result = []
    for gate in gates:
        row, error = by_figure[gate.figure], ERROR_MOST / len(gates)
        factor, unit = unit_of(gate.figure, row.a)
        a, b = (significant(each and each * factor, 4) for each in (row.a, row.b))
        if row.p_value is None:
            result.append(GateResult(gate.text, "inconclusive", f"{a} to {b} {unit}; {row.why}"))
            continue
        sign = 1 if row.direction == "lower" else -1  # so that more is worse
        low, high = sorted(sign * row.relative(end) for end in row.interval(1 - error))
        said = (
            f"{a} to {b} {unit}, {sign * row.relative(row.effect) * 100:+.1f} %, {100 * (1 - error):.4g} % interval "
            f"{low * 100:+.1f} % to {high * 100:+.1f} % (+ is worse)"
        )
        told = low > gate.bound or high <= gate.bound
        if not told:
            aim = abs(row.effect - row.effect_of(sign * gate.bound))
            more = _number_for(row, aim, 1 - error / 2) if aim else None
            said += f"; about {pluralise(more, f'more {row.more_of[:-1]}')} in each would tell" if more else ""
        result.append(GateResult(gate.text, ("fail" if low > gate.bound else "pass") if told else "inconclusive", said))
    return result
