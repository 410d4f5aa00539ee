"""Groups of repeats against each other: one figure per run, so that requests need not be independent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from analysis.compare.single import untold
from analysis.compare.verdicts import Direction, Row, ends, p_value
from analysis.repeats import figures as figures_of
from analysis.words import Summary

WELCH = "Welch's t between runs"
POOLED = "Student's t, with the other group's variation between runs"
HIGHER = ("complete", "output_tokens_per_s", "total_tokens_per_s", "requests_per_s")


def rows(a: Sequence[Summary], b: Sequence[Summary], figures: Sequence[str]) -> Iterator[Row]:
    """One Row per figure, without its verdict. At least one of the groups has two runs."""
    values_a, values_b = ([figures_of(summary) for summary in group] for group in (a, b))
    for figure in figures:
        if not figure.endswith(".pairs"):  # samples of several runs are not thrown together
            yield row(figure, [each.get(figure) for each in values_a], [each.get(figure) for each in values_b])


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
            error, freedom, few, "runs",
        )  # fmt: skip
    effect, error, freedom = welch([math.log(value) for value in known_a], [math.log(value) for value in known_b])
    low, high = (math.exp(end) for end in ends(effect, error, freedom))
    return Row(
        figure, unit, direction, mean_a, mean_b, mean_b - mean_a, ends(*plain), math.exp(effect), (low, high),
        p_value(effect, error, freedom), test, error, freedom, few, "runs",
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
