"""From a difference and its error to one of four verdicts, and the correction for asking many questions at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from analysis.stats import student_cdf, student_quantile

Direction = Literal["lower", "higher"]
Outcome = Literal["better", "worse", "no difference", "cannot tell"]
ERROR_MOST = 0.05
"""The chance that a comparison of a server with itself calls any figure better or worse."""
MARGIN = 0.05
"""By how much a figure may differ before it matters, as a share of A's."""
MORE_MOST = 1_000_000
RUNS_MOST = 1000
"""More requests, or runs, than these are no advice."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of A beside that of B. B is better or worse than A."""

    figure: str
    """As --assert names it, such as `ttft.p99`; `ttft.pairs` is the share of pairs in which B's request is slower."""
    unit: str
    """`s`, `per second` or `share`; what `a`, `b` and `difference` are in."""
    direction: Direction
    """Which is better."""
    a: float | None
    b: float | None
    difference: float | None
    difference_ci95: tuple[float, float] | None
    ratio: float | None
    """B / A; None where either is 0 or less, and for shares."""
    ratio_ci95: tuple[float, float] | None
    p_value: float | None
    """Two-sided, of no difference at all; None where nothing can be tested."""
    test: str
    error: float = math.nan
    """Standard error of the logarithm of the ratio, or of the difference for a share."""
    freedom: float = math.nan
    error_least: float = 0.0
    """Below which no number of requests would take it."""
    count: int = 0
    """Of what more would help, in the smaller group: requests, or runs."""
    more_of: str = "requests"
    verdict: Outcome = "cannot tell"
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
        if self.ratio is not None:
            return math.log(self.ratio)
        return 0.0 if self.difference is None else self.difference

    @property
    def worse(self) -> bool:
        """The side on which B lies."""
        return (self.effect > 0) == (self.direction == "lower") and self.effect != 0


def judged(rows: Sequence[Row], margin: float = MARGIN) -> list[Row]:
    """Every row with its verdict. `margin` is by how much a figure may differ before it matters.

    *No difference larger than X* when the 95 % interval lies within the margin; else *better* or *worse* when Holm's
    adjusted p-value is below 5 %; else *cannot tell*.
    """
    adjusted = holm([row.p_value for row in rows])
    return [
        row if p is None else _judged(replace(row, adjusted_p=p), margin, p)
        for row, p in zip(rows, adjusted, strict=True)
    ]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted p-values: whoever rejects those below 5 % errs anywhere with a chance of 5 %, however they depend on
    each other (Holm, "A simple sequentially rejective multiple test procedure", 1979). None stays None."""
    order = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    most = 0.0
    for rank, (p, place) in enumerate(order):
        most = max(most, min(1.0, (len(order) - rank) * p))
        adjusted[place] = most
    return adjusted


def p_value(effect: float, error: float, freedom: float) -> float:
    """Two-sided, by Student's t. Without any error only a difference of nothing is compatible with none."""
    if error == 0:
        return 1.0 if effect == 0 else 0.0
    return 2 * student_cdf(-abs(effect / error), freedom)


def ends(effect: float, error: float, freedom: float, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of an effect."""
    margin = student_quantile((1 + confidence) / 2, freedom) * error
    return effect - margin, effect + margin


def _judged(row: Row, margin: float, adjusted_p: float) -> Row:
    low, high = ends(row.effect, row.error, row.freedom)
    most = max(abs(_relative(row, low)), abs(_relative(row, high)))
    row = replace(row, no_larger_than=most)
    if most <= margin:
        return replace(row, verdict="no difference")
    if adjusted_p < ERROR_MOST:
        return replace(row, verdict="worse" if row.worse else "better")
    strictness = max(1.0, adjusted_p / row.p_value) if row.p_value else 1.0
    return replace(row, needs_more=_needs_more(row, margin, strictness))


def _relative(row: Row, effect: float) -> float:
    return math.expm1(effect) if row.ratio is not None else effect


def _needs_more(row: Row, margin: float, strictness: float) -> int | None:
    """About how many more would tell, if the effect stayed as it is and its error fell with the root of their number:
    so many that the interval lies within the margin, or that the p-value, which Holm's method multiplied by
    `strictness`, is below 5 %. None where no practical number would."""
    within = margin if row.ratio is None else math.log1p(margin)
    aims = ((within - abs(row.effect), 1 - ERROR_MOST / 2), (abs(row.effect), 1 - ERROR_MOST / 2 / strictness))
    found = [_number_for(row, aim, share) for aim, share in aims if aim > 0]
    return min((number for number in found if number is not None), default=None)


def _number_for(row: Row, aim: float, share: float) -> int | None:
    """How many more it takes until the error times Student's t of this share is no more than `aim`."""
    if row.more_of == "runs":
        for runs in range(row.count + 1, RUNS_MOST):
            error = row.error * math.sqrt(row.count / runs)
            if student_quantile(share, 2 * runs - 2) * error <= aim:
                return runs - row.count
        return None
    allowed = aim / student_quantile(share, row.freedom)
    if allowed < row.error_least:
        return None
    more = max(1, math.ceil(row.count * (row.error / allowed) ** 2) - row.count)
    return None if more > MORE_MOST else int(float(f"{more:.1e}"))
