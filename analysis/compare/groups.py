"""Groups of repeats against each other: one figure per run, so that requests need not be independent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from analysis.compare.single import fisher, untold
from analysis.compare.verdicts import Direction, Row, ends, p_value
from analysis.repeats import ended
from analysis.repeats import figures as figures_of
from analysis.stats import share_interval, student_quantile
from analysis.words import Summary

WELCH = "Welch's t between runs"
POOLED = "Student's t, with the other group's variation between runs"
EXACT_FREEDOM = 1e6
"""An exact interval needs no allowance for an error that was itself estimated."""
HIGHER = ("complete", "output_tokens_per_s", "total_tokens_per_s", "requests_per_s")


def rows(a: Sequence[Summary], b: Sequence[Summary], figures: Sequence[str]) -> Iterator[Row]:
    """One Row per figure, without its verdict. At least one of the groups has two runs."""
    values_a, values_b = ([figures_of(summary) for summary in group] for group in (a, b))
    for figure in figures:
        if figure == "complete":
            yield shares([ended(summary) for summary in a], [ended(summary) for summary in b])
        elif not figure.endswith(".pairs"):  # samples of several runs are not thrown together
            yield row(figure, [each.get(figure) for each in values_a], [each.get(figure) for each in values_b])


def shares(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> Row:
    """Compare shares of requests, given as (complete, all) of each run, with the larger of two errors.

    Between runs as for any figure; and as if all requests of a group were of one run, by Fisher's exact test and the
    exact interval of each share. Runs that are complete to the last request do not vary, and yet more of them might.
    """
    if not all(total for _, total in (*a, *b)):
        return untold("complete", "share", "higher", "in a run nothing was sent")
    (good_a, all_a), (good_b, all_b) = (tuple(map(sum, zip(*group, strict=True))) for group in (a, b))
    found = row("complete", [good / total for good, total in a], [good / total for good, total in b])
    low, high = exact((good_a, all_a), (good_b, all_b), found.difference or 0.0)
    between_low, between_high = found.difference_ci95 or (low, high)
    low, high = min(low, between_low), max(high, between_high)
    error = max(found.effect - low, high - found.effect) / student_quantile(0.975, EXACT_FREEDOM)
    p = max(found.p_value or 0.0, fisher((good_a, all_a), (good_b, all_b)))
    return replace(
        found, difference_ci95=(max(-1.0, low), min(1.0, high)), p_value=p, test=f"{found.test}; Fisher's exact test",
        error=error, freedom=EXACT_FREEDOM,
    )  # fmt: skip


def exact(a: tuple[int, int], b: tuple[int, int], difference: float) -> tuple[float, float]:
    """Interval around a difference of shares, b minus a: how far each may be off, squared and added (Newcombe's method
    10) from the exact interval of each in place of Wilson's, which is never too narrow."""
    ends_a, ends_b = share_interval(*a), share_interval(*b)
    share_a, share_b = a[0] / a[1], b[0] / b[1]
    low = math.hypot(share_b - ends_b[0], ends_a[1] - share_a)
    high = math.hypot(ends_b[1] - share_b, share_a - ends_a[0])
    return difference - low, difference + high


def row(figure: str, a: Sequence[float | None], b: Sequence[float | None]) -> Row:
    """Compare two groups of values of one figure. Of a figure above 0 the logarithms are compared, so that the interval
    is one of the ratio; of a share the values themselves."""
    unit = "share" if figure == "complete" else "per second" if figure.endswith("_per_s") else "s"
    direction: Direction = "higher" if figure in HIGHER else "lower"
    known_a, known_b = ([value for value in group if value is not None] for group in (a, b))
    if len(known_a) < len(a) or len(known_b) < len(b):
        return untold(figure, unit, direction, "not every run has it, or has samples enough for it")
    plain = welch(known_a, known_b)
    mean_a, mean_b = math.fsum(known_a) / len(known_a), math.fsum(known_b) / len(known_b)
    test = WELCH if min(len(known_a), len(known_b)) > 1 else POOLED
    few = min(len(known_a), len(known_b))
    if unit == "share" or min(*known_a, *known_b) <= 0:
        effect, error, freedom = plain
        return Row(
            figure, unit, direction, mean_a, mean_b, effect, ends(*plain), None, None, p_value(*plain), test,
            error, freedom, 0.0, few, "runs",
        )  # fmt: skip
    effect, error, freedom = welch([math.log(value) for value in known_a], [math.log(value) for value in known_b])
    low, high = (math.exp(end) for end in ends(effect, error, freedom))
    return Row(
        figure, unit, direction, mean_a, mean_b, mean_b - mean_a, ends(*plain), math.exp(effect), (low, high),
        p_value(effect, error, freedom), test, error, freedom, 0.0, few, "runs",
    )  # fmt: skip


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Difference of the means of b and a, its standard error and degrees of freedom.

    Welch, "The generalization of Student's problem when several different population variances are involved" (1947).
    Where one group is a single run, its runs are taken to vary as those of the other do.
    """
    difference = math.fsum(b) / len(b) - math.fsum(a) / len(a)
    if min(len(a), len(b)) == 1:
        more = a if len(a) > 1 else b
        return difference, math.sqrt(variance(more) * (1 / len(a) + 1 / len(b))), len(more) - 1
    part_a, part_b = variance(a) / len(a), variance(b) / len(b)
    total = part_a + part_b
    if total == 0:
        return difference, 0.0, len(a) + len(b) - 2
    freedom = total**2 / (part_a**2 / (len(a) - 1) + part_b**2 / (len(b) - 1))
    return difference, math.sqrt(total), freedom


def variance(values: Sequence[float]) -> float:
    """Of the population that these are a sample of."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
