"""Each figure of A against that of B, without its verdict. One run against one run: from raw samples, with the sources
of chance that a run shows (analysis.compare.noise). Groups of repeats: one figure per run, so that requests need not be
independent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from analysis import stats
from analysis.compare import noise
from analysis.compare.noise import ComparedRun, samples_of
from analysis.compare.verdicts import ComparedFigure, Direction, ends, p_value
from analysis.metrics import METRICS, Metric
from analysis.repeats import completed, figures_of
from analysis.summary import Summary

SEED = 20_030_711
"""Of the bootstrap: the same runs give the same figures."""
SINGLE = "bootstrap of the quantile, steps, stamps, and never narrower than runs differ"
SHORT = "the run is too short to show how the server varies; repeats would"
WELCH = "Welch's t between runs"
POOLED = "Student's t, with the other group's variation between runs"
EXACT_FREEDOM = 1e6
"""An exact interval needs no allowance for an error that was itself estimated."""
BY_KEY = {metric.key: metric for metric in METRICS.values()}


def of_single_runs(a: ComparedRun, b: ComparedRun, figures: Sequence[str]) -> Iterator[ComparedFigure]:
    """One row per figure."""
    piece = noise.piece_error(a, b)
    for figure in figures:
        name, _, statistic = figure.partition(".")
        if figure == "complete":
            yield shares_of_runs(completed(a.summary), completed(b.summary))
        elif statistic == "pairs":
            yield _pairs(figure, BY_KEY[name], a, b, piece)
        elif statistic:
            yield _quantile(figure, BY_KEY[name], statistic, a, b, piece)
        else:
            yield _rate(figure, BY_KEY[name], a, b, piece)


def of_groups(a: Sequence[Summary], b: Sequence[Summary], figures: Sequence[str]) -> Iterator[ComparedFigure]:
    """One row per figure; samples of several runs are not thrown together, so there are no pairs. At least one of the
    groups has two runs."""
    values_a, values_b = ([figures_of(summary) for summary in group] for group in (a, b))
    for figure in figures:
        if figure == "complete":
            yield shares_of_groups(*([completed(summary) for summary in group] for group in (a, b)))
        elif not figure.endswith(".pairs"):
            yield of_values(figure, [each.get(figure) for each in values_a], [each.get(figure) for each in values_b])


def _blank(figure: str, why: str = "") -> ComparedFigure:
    """A row that says what its figure is, and why there is nothing else to say."""
    name, _, statistic = figure.partition(".")
    if figure == "complete" or statistic == "pairs":
        direction: Direction = "higher" if figure == "complete" else "lower"
        return ComparedFigure(figure, "share", direction, why=why)
    metric = BY_KEY[name]
    return ComparedFigure(figure, "per second" if metric.unit.endswith("/s") else "s", metric.direction, why=why)


def _by_noise(figure: str, a: float, b: float, within: float, count: int) -> ComparedFigure:
    """A ratio with this error of its logarithm, as single runs show it."""
    effect, error = math.log(b / a), max(within, noise.RUNS_DIFFER)
    low, high = (math.exp(end) for end in ends(effect, error, noise.FREEDOM))
    return replace(
        _blank(figure), a=a, b=b, difference=b - a, difference_ci95=(a * (low - 1), a * (high - 1)), ratio=b / a,
        ratio_ci95=(low, high), p_value=p_value(effect, error, noise.FREEDOM), test=SINGLE, error=error,
        freedom=noise.FREEDOM, error_least=noise.RUNS_DIFFER, count=count,
    )  # fmt: skip


def _quantile(
    figure: str, metric: Metric, statistic: str, a: ComparedRun, b: ComparedRun, piece: float
) -> ComparedFigure:
    share = float(statistic.removeprefix("p")) / 100
    samples = samples_of(a, metric), samples_of(b, metric)
    few = min(len(each.values) for each in samples)
    if few < (needed := stats.samples_needed(share)):
        return _blank(figure, f"too few samples: {statistic} needs {needed:,}, there are {few:,}")
    values = noise.quantile(samples[0], share), noise.quantile(samples[1], share)
    worth = min(noise.worth(each, share, value) for each, value in zip(samples, values, strict=True))
    if worth < needed:  # a stall is in the gaps of all requests: thousands of gaps may be a few events
        return _blank(figure, f"the samples are worth {worth:,.0f} independent ones: {statistic} needs {needed:,}")
    if min(values) <= 0:
        return _blank(figure, "one of them is 0, which no ratio can be taken of")
    random = np.random.default_rng(SEED)
    within = math.sqrt(
        noise.quantile_error(samples[0], share, random) ** 2
        + noise.quantile_error(samples[1], share, random) ** 2
        + noise.latency_error(metric, a, b, piece, values) ** 2
        + noise.stamp_error(metric, a, b, values) ** 2
    )
    return (
        _by_noise(figure, *values, within, min(a.requests, b.requests))
        if math.isfinite(within)
        else _blank(figure, SHORT)
    )


def _rate(figure: str, metric: Metric, a: ComparedRun, b: ComparedRun, piece: float) -> ComparedFigure:
    """A rate is what was done by the time it took, so it varies as that time does."""
    value_a, value_b = metric.figure(a.frame) or 0.0, metric.figure(b.frame) or 0.0
    if min(value_a, value_b) <= 0 or not math.isfinite(piece):
        return _blank(figure, SHORT)
    within = math.hypot(noise.server_error(piece, 1.0), noise.stamp_error(metric, a, b, (a.span_s, b.span_s)))
    return _by_noise(figure, value_a, value_b, within, min(a.requests, b.requests))


def _pairs(figure: str, metric: Metric, a: ComparedRun, b: ComparedRun, piece: float) -> ComparedFigure:
    samples = samples_of(a, metric), samples_of(b, metric)
    if min(len(each.values) for each in samples) < (needed := stats.samples_needed(0.5)):
        return _blank(figure, f"too few samples: {needed} are needed")
    medians = noise.quantile(samples[0], 0.5), noise.quantile(samples[1], 0.5)
    seen = noise.latency_error(metric, a, b, piece, medians), noise.stamp_error(metric, a, b, medians)
    together = max(math.hypot(*seen), noise.RUNS_DIFFER)
    if not math.isfinite(together):
        return _blank(figure, SHORT)
    share, error, p = noise.superiority(*samples, together)
    low, high = (max(-0.5, min(0.5, end)) for end in ends(share - 0.5, error, noise.FREEDOM))
    return replace(
        _blank(figure), a=0.5, b=share, difference=share - 0.5, difference_ci95=(low, high), p_value=p,
        test="Mann-Whitney", error=error, freedom=noise.FREEDOM, error_least=error * noise.RUNS_DIFFER / together,
        count=min(a.requests, b.requests),
    )  # fmt: skip


def shares_of_runs(a: tuple[int, int], b: tuple[int, int]) -> ComparedFigure:
    """Shares of requests that were complete, of (complete, all): Fisher's exact test, and Newcombe's interval."""
    if not a[1] or not b[1]:
        return _blank("complete", "nothing was sent")
    share_a, share_b = a[0] / a[1], b[0] / b[1]
    low, high = stats.shares_interval(a, b, share_b - share_a, stats.wilson_interval)
    low, high = max(-1.0, low), min(1.0, high)
    # Half its width as so many standard errors, so that sizes can be worked out as for the others.
    return replace(
        _blank("complete"), a=share_a, b=share_b, difference=share_b - share_a, difference_ci95=(low, high),
        p_value=stats.fisher_exact(a, b), test="Fisher's exact test", error=(high - low) / 2 / 1.96,
        freedom=EXACT_FREEDOM, count=min(a[1], b[1]),
    )  # fmt: skip


def shares_of_groups(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> ComparedFigure:
    """Compare shares of requests, given as (complete, all) of each run, with the larger of two errors.

    Between runs as for any figure; and as if all requests of a group were of one run, by Fisher's exact test and the
    exact interval of each share. Runs that are complete to the last request do not vary, and yet more of them might.
    """
    if not all(total for _, total in (*a, *b)):
        return _blank("complete", "in a run nothing was sent")
    (good_a, all_a), (good_b, all_b) = (tuple(map(sum, zip(*group, strict=True))) for group in (a, b))
    found = of_values("complete", [good / total for good, total in a], [good / total for good, total in b])
    low, high = stats.shares_interval((good_a, all_a), (good_b, all_b), found.difference or 0.0, stats.share_interval)
    between = found.difference_ci95 or (low, high)
    low, high = min(low, between[0]), max(high, between[1])
    error = max(found.effect - low, high - found.effect) / stats.student_quantile(0.975, EXACT_FREEDOM)
    p = max(found.p_value or 0.0, stats.fisher_exact((good_a, all_a), (good_b, all_b)))
    return replace(
        found, difference_ci95=(max(-1.0, low), min(1.0, high)), p_value=p, test=f"{found.test}; Fisher's exact test",
        error=error, freedom=EXACT_FREEDOM,
    )  # fmt: skip


def of_values(figure: str, a: Sequence[float | None], b: Sequence[float | None]) -> ComparedFigure:
    """Compare two groups of values of one figure. Of a figure above 0 the logarithms are compared, so that the interval
    is one of the ratio; of a share the values themselves."""
    known_a, known_b = ([value for value in group if value is not None] for group in (a, b))
    if len(known_a) < len(a) or len(known_b) < len(b):
        return _blank(figure, "not every run has it, or has samples enough for it")
    mean_a, mean_b = math.fsum(known_a) / len(known_a), math.fsum(known_b) / len(known_b)
    plain, few = stats.difference_of_means(known_a, known_b), min(len(known_a), len(known_b))
    found = replace(
        _blank(figure), a=mean_a, b=mean_b, difference=mean_b - mean_a, difference_ci95=ends(*plain),
        p_value=p_value(*plain), test=WELCH if few > 1 else POOLED, error=plain[1], freedom=plain[2], count=few,
        more_of="runs",
    )  # fmt: skip
    if found.unit == "share" or min(*known_a, *known_b) <= 0:
        return found
    effect, error, freedom = stats.difference_of_means(
        [math.log(value) for value in known_a], [math.log(value) for value in known_b]
    )
    low, high = (math.exp(end) for end in ends(effect, error, freedom))
    return replace(
        found, ratio=math.exp(effect), ratio_ci95=(low, high), p_value=p_value(effect, error, freedom), error=error,
        freedom=freedom,
    )  # fmt: skip
