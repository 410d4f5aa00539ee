"""From a difference and its error to one of four verdicts, the correction for asking many questions at once, and
`--fail-if`: what a difference must not be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from analysis.objectives import LATENCIES, RATES
from analysis.stats import student_cdf, student_quantile

Direction = Literal["lower", "higher"]
ERROR_MOST = 0.05
"""The chance that a comparison of a server with itself calls any figure better or worse."""
MARGIN = 0.05
"""By how much a figure may differ before it matters, as a share of A's."""
MORE_MOST = 1_000_000
RUNS_MOST = 1000
"""More requests, or runs, than these are no advice."""
STATISTICS = ("p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of A beside that of B. B is better or worse than A."""

    figure: str
    """As --assert names it, such as `ttft.p99`; `ttft.pairs` is the share of pairs in which B's request is slower."""
    unit: Literal["s", "per second", "share"]
    """What `a`, `b` and `difference` are in."""
    direction: Direction
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
    error_least: float = 0.0
    """Below which no number of requests would take it."""
    count: int = 0
    """Of what more would help, in the smaller group: requests, or runs."""
    more_of: str = "requests"
    verdict: Literal["better", "worse", "no difference", "cannot tell"] = "cannot tell"
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

    def relative(self, effect: float) -> float:
        """An effect as a share of A's, or as a difference of shares."""
        return math.expm1(effect) if self.ratio is not None else effect


def judged(rows: Sequence[ComparedFigure], margin: float = MARGIN) -> list[ComparedFigure]:
    """Every row with its verdict. `margin` is by how much a figure may differ before it matters.

    *No difference larger than X* when the 95 % interval lies within the margin; else *better* or *worse* when Holm's
    adjusted p-value is below 5 %; else *cannot tell*.
    """
    return [
        row if p is None else _judged(replace(row, adjusted_p=p), margin, p)
        for row, p in zip(rows, holm([row.p_value for row in rows]), strict=True)
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


def _judged(row: ComparedFigure, margin: float, adjusted_p: float) -> ComparedFigure:
    most = max(abs(row.relative(end)) for end in ends(row.effect, row.error, row.freedom))
    row = replace(row, no_larger_than=most)
    if most <= margin:
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
    found = [_number_for(row, aim, share) for aim, share in aims if aim > 0]
    return min((number for number in found if number is not None), default=None)


def _number_for(row: ComparedFigure, aim: float, share: float) -> int | None:
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


HINT = f"""A condition is a figure, and by how much B may not be worse than A: 'ttft.p99 worse by 5%'.
  figures      LATENCY.STATISTIC, complete, {", ".join(RATES)}
  latencies    {", ".join(LATENCIES)}
  statistics   {", ".join(STATISTICS)}
  bounds       a share of A's figure such as 5%; of `complete` a difference of shares; 'worse' alone is worse by 0%"""
_GATE = re.compile(r"([a-z_0-9]+)(?:\.([a-z0-9]+))? worse(?: by (\d+(?:\.\d+)?) ?%)?")


class GateError(Exception):
    """Expressions that are no gates: one line for each, and a hint of what is allowed."""

    hint = HINT


@dataclass(frozen=True, slots=True)
class Gate:
    """What B must not be (`--fail-if`): `ttft.p99 worse by 5%`, `output_tokens_per_s worse`.

    Like an objective, a gate speaks of the server, of which the runs are samples: it fails when the whole interval of
    the difference is worse by more than the bound, passes when the whole interval is not, and otherwise cannot be told.
    Each is a question asked before the runs were seen, so the figures of the table, which were not, do not count: with
    k gates each interval is one of 1 - 5 % / k (Bonferroni), so that the chance of any false failure is 2.5 %. Not by
    Holm's method as in the table, because then no interval would go with the verdict.
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
    verdict: Literal["pass", "fail", "cannot tell"]
    said: str

    @property
    def sentence(self) -> str:
        """All of it."""
        return f"{self.verdict}: {self.condition}: {self.said}"


def parse_gates(expressions: Iterable[str]) -> list[Gate]:
    """Read expressions. Raises GateError, which names every mistake in all of them."""
    gates, mistakes = [], []
    for expression in expressions:
        text = " ".join(expression.split())
        match = _GATE.fullmatch(text)
        if match is None or not _known(match[1], match[2]):
            mistakes.append(f"--fail-if {expression!r}: is no condition")
            continue
        figure = match[1] if match[2] is None else f"{match[1]}.{match[2]}"
        gates.append(Gate(text, figure, float(match[3] or 0) / 100))
    if mistakes:
        raise GateError("\n".join(mistakes))
    return gates


def _known(figure: str, statistic: str | None) -> bool:
    if statistic is None:
        return figure == "complete" or figure in RATES
    return figure in LATENCIES and statistic in STATISTICS


def judge_gates(gates: Sequence[Gate], rows: Sequence[ComparedFigure]) -> list[GateResult]:
    """Hold each against its row."""
    by_figure = {row.figure: row for row in rows}
    return [_gate_result(each, by_figure[each.figure], ERROR_MOST / len(gates)) for each in gates]


def _gate_result(gate: Gate, row: ComparedFigure, error: float) -> GateResult:
    if row.p_value is None:
        return GateResult(gate.text, "cannot tell", row.why)
    sign = 1 if row.direction == "lower" else -1  # so that more is worse
    low, high = sorted(sign * row.relative(end) for end in ends(row.effect, row.error, row.freedom, 1 - error))
    said = (
        f"{sign * row.relative(row.effect) * 100:+.1f} %, {100 * (1 - error):.4g} % interval {low * 100:+.1f} % to "
        f"{high * 100:+.1f} % (+ is worse)"
    )
    if low > gate.bound:
        return GateResult(gate.text, "fail", said)
    if high <= gate.bound:
        return GateResult(gate.text, "pass", said)
    if row.needs_more:
        said += f"; about {row.needs_more:,} more {row.more_of} in each would help to tell"
    return GateResult(gate.text, "cannot tell", said)
