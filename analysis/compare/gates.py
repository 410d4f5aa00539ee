"""Gates: conditions on a comparison (`loadgen compare --fail-if 'ttft.p99 worse by 5%'`), and their results.

A gate compares B with A. Its bound is the allowed difference (5% in the example). Positive differences mean that B is
worse. The verdict depends on the observed difference and on the lower confidence limit of the difference:

    observed difference   lower limit   verdict
    within the bound      (any)         pass, with the smallest difference that these runs could have detected
    beyond the bound      above 0       fail
    beyond the bound      0 or below    inconclusive, with the number of requests or runs that would decide

The limit has 95% confidence, so a server B that equals A fails with a probability of at most 5%. With k gates, the
confidence is `1 - 5% / k` (Bonferroni), and 5% is the probability that at least one gate fails falsely. Figures without
a gate do not change the confidence, because gates are chosen before the runs are seen. A verdict is marginal if the
bound lies between the lower and the upper confidence limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.analysis import stats
from loadgen.analysis.compare.figures import FALSE_ALARM_RATE, ComparedFigure, number_needed
from loadgen.analysis.figure_names import did_you_mean, suggest_figure
from loadgen.analysis.format import pluralise, significant, unit_of
from loadgen.analysis.objectives import LATENCIES, RATES, RESPONSE_SHARES, parse_each

SHARES_COMPARED = ("complete", *RESPONSE_SHARES)
"""Shares that mean the same in every run. The meaning of `attainment` depends on the bounds of the run."""
HINT = f"""A condition names a figure, and how much worse than A it may be in B: 'ttft.p99 worse by 5%'.
  figures      LATENCY.STATISTIC, {", ".join(SHARES_COMPARED)},
               {", ".join(RATES)}
  latencies    {", ".join(LATENCIES)}
  statistics   {", ".join(stats.WITH_INTERVAL)}
  bounds       a share of A's figure such as 5%; of {", ".join(SHARES_COMPARED)}
               a difference of shares; 'worse' alone is worse by 0%"""
_GATE = re.compile(rf"([a-z_0-9]+)(?:\.({'|'.join(stats.WITH_INTERVAL)}))? worse(?: by (\d+(?:\.\d+)?) ?(%)?)?")


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition of `--fail-if`, such as `ttft.p99 worse by 5%` or `output_tokens_per_s worse`."""

    text: str
    figure: str
    bound: float
    """Largest permitted difference: a share of A's figure, or a difference of shares."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """The result of a gate, which is a condition of --fail-if, such as `ttft.p99 worse by 5%`.

    Differences between A and B are positive if B is worse. A difference is relative to A: 0.05 is 5% of A's value. If
    the figure is itself a share, a difference is one share minus the other: 0.05 is the difference between 90% and 85%.
    """

    condition: str
    """The gate as the user wrote it."""
    verdict: Literal["pass", "fail", "inconclusive"]
    said: str
    """Text with the measured values, the limits of their difference, and what the runs could have shown."""
    marginal: bool = False
    """True if the bound lies between the limits, so that other runs may be judged differently."""
    bound: float = 0.0
    observed: float | None = None
    """Observed difference. None if a value is missing."""
    limits: tuple[float | None, float | None] | None = None
    """Lower and upper limit of the difference. An end is None if it is unbounded. The field is None if nothing can be
    tested."""
    confidence: float = 1 - FALSE_ALARM_RATE
    """Confidence of each limit."""
    smallest_shown: float | None = None
    """Smallest observed difference at which the runs would have shown that B is worse. None if the interval is
    unbounded."""
    needs_more: int | None = None
    """For an inconclusive or marginal gate: approximate number of additional requests or runs in each of A and B that
    would decide. None if no practical number would decide."""
    more_of: str = "requests"
    """What is counted by `needs_more`: `requests` or `runs`."""

    @property
    def sentence(self) -> str:
        mark = " (marginal)" if self.marginal and self.verdict != "inconclusive" else ""
        return f"{self.verdict}{mark}: {self.condition}: {self.said}"


def parse_gates(expressions: Iterable[str]) -> list[Gate]:
    """Parse the conditions of `--fail-if`. Raises an ObjectiveError whose message lists the mistakes of
    all conditions.
    """
    return parse_each(expressions, _parse_gate, "--fail-if", HINT)


def _parse_gate(text: str) -> Gate:
    match = _GATE.fullmatch(text)
    if not match or match[1] not in ((*SHARES_COMPARED, *RATES) if match[2] is None else LATENCIES):
        raise ValueError(f"is not a condition{did_you_mean(_similar_condition(text))}")
    if match[3] and not match[4]:
        raise ValueError(f"{match[3]} has no unit: write {match[3]}%")
    figure = match[1] if match[2] is None else f"{match[1]}.{match[2]}"
    return Gate(text, figure, float(match[3] or 0) / 100)


def _similar_condition(text: str) -> str | None:
    """Return the condition that the text probably means: `'ttft.p99 worse by 5%'` for `p99(ttft) slower by 5%`."""
    name, *rest = re.split(r"\b(?:worse|slower|higher|lower|by)\b|[<>+]", text, maxsplit=1)
    figure = suggest_figure(name)
    if figure is None or not _GATE.fullmatch(f"{figure} worse"):
        return None
    share = re.search(r"\d+(?:\.\d+)? ?%", "".join(rest))
    return f"'{figure} worse by {share[0]}'" if share else f"'{figure} worse'"


def judge_gates(gates: Sequence[Gate], rows: Sequence[ComparedFigure], invalid: str = "") -> list[GateResult]:
    """Return the results of all gates (conditions of --fail-if), in the same order as `gates`.

    If the runs are not a valid measurement, `invalid` is the reason, and all gates are inconclusive.
    """
    by_figure = {row.figure: row for row in rows}
    error_rate = FALSE_ALARM_RATE / max(1, len(gates))
    return [_judge_gate(gate, by_figure[gate.figure], error_rate, invalid) for gate in gates]


def _judge_gate(gate: Gate, row: ComparedFigure, error_rate: float, invalid: str) -> GateResult:
    sign = 1 if row.direction == "lower" else -1  # after multiplication, larger values are worse
    observed = None if row.a is None or row.b is None else sign * _relative(row, row.effect)
    if row.p_value is None or observed is None:
        return _untested(gate, row, observed, invalid)
    ends = row.interval(1 - 2 * error_rate)
    low, high = sorted(sign * _relative(row, end) for end in ends)
    verdict: Literal["pass", "fail", "inconclusive"] = "pass"
    if observed > gate.bound:
        verdict = "fail" if low > 0 else "inconclusive"
    return _result(gate, row, verdict, (observed, low, high), error_rate)


def _untested(gate: Gate, row: ComparedFigure, observed: float | None, invalid: str) -> GateResult:
    """Return the result of a gate (a condition of --fail-if) whose figure was not tested.

    `invalid` is the reason why the runs are not valid, or "" for valid runs. The gate passes if the runs are valid and
    the `observed` difference is within the bound. Otherwise the gate is inconclusive.
    """
    passed = observed is not None and observed <= gate.bound and not invalid
    text = (
        f"{_values_text(gate, row, observed)}; not tested, so no difference would have been shown: {invalid or row.why}"
    )
    return GateResult(
        gate.text, "pass" if passed else "inconclusive", text, marginal=True, bound=gate.bound, observed=observed
    )


def _result(
    gate: Gate,
    row: ComparedFigure,
    verdict: Literal["pass", "fail", "inconclusive"],
    worse_by: tuple[float, float, float],
    error_rate: float,
) -> GateResult:
    """Return the result of a gate (a condition of --fail-if), given its verdict.

    `row` is the compared figure. `worse_by` contains three differences: the observed one, and its lower and its upper
    confidence limit. The confidence of each limit is `1 - error_rate`.
    """
    observed, low, high = worse_by
    marginal = low <= gate.bound < high
    smallest = _smallest_shown(row, error_rate)
    # An inconclusive gate needs a difference from 0. A marginal one needs a difference from the bound.
    reference = 0.0 if verdict == "inconclusive" else _effect_of_bound(gate, row)
    aim = abs(row.effect - reference)
    more = number_needed(row, aim, 1 - error_rate) if aim and (marginal or verdict == "inconclusive") else None
    confidence = 1 - error_rate
    text = (
        f"{_values_text(gate, row, observed)}{' (+ is worse)' if abs(observed) <= 1 else ''}, "
        f"{100 * confidence:.4g}% limits {_percent(low)} and {_percent(high)}"
    )
    if verdict == "pass" and smallest is not None:
        text += f"; these runs would have shown {_percent(smallest)} or more"
    if more:
        text += f"; about {pluralise(more, f'more {row.more_of[:-1]}')} in each would decide it"
    elif verdict == "inconclusive":
        text += "; more repeats would decide it" if row.more_of == "requests" else "; too close for any number of runs"
    return GateResult(
        gate.text,
        verdict,
        text,
        marginal=marginal,
        bound=gate.bound,
        observed=observed,
        limits=(_finite(low), _finite(high)),
        confidence=confidence,
        smallest_shown=smallest,
        needs_more=more,
        more_of=row.more_of,
    )


def _values_text(gate: Gate, row: ComparedFigure, observed: float | None) -> str:
    factor, unit = (100.0, "%") if row.unit == "share" else unit_of(gate.figure, row.a)
    a, b = (significant(value and value * factor, 4) for value in (row.a, row.b))
    text = f"{a} to {b} {unit}"
    return text if observed is None else f"{text}, {_percent(observed)}"


def _relative(row: ComparedFigure, effect: float) -> float:
    """Convert a value of `ComparedFigure.effect` to a relative difference from A, such as 0.05.

    If the figure is a share, the result is the difference of the two shares.
    """
    if row.ratio is not None or row.unit == "share":
        return row.relative(effect)
    if effect == 0:
        return 0.0
    return effect / row.a if row.a else math.copysign(math.inf, effect)


def _effect_of_bound(gate: Gate, row: ComparedFigure) -> float:
    """Return the value of `ComparedFigure.effect` at which B would be worse than A by exactly the gate's bound."""
    sign = 1 if row.direction == "lower" else -1
    if row.ratio is not None or row.unit == "share":
        return row.effect_of(sign * gate.bound)
    return sign * gate.bound * (row.a or 0.0)


def _smallest_shown(row: ComparedFigure, error_rate: float) -> float | None:
    """Return the smallest difference between A and B at which these runs would have shown that B is worse than A.

    This difference is the margin of error: the distance from the observed difference to the confidence limit on its
    better side. The confidence of this limit is `1 - error_rate`. Return None if the confidence interval of `row` is
    unbounded.
    """
    sign = 1 if row.direction == "lower" else -1
    low, high = row.interval(1 - 2 * error_rate)
    reach = row.effect - low if sign > 0 else high - row.effect
    return _finite(sign * _relative(row, sign * reach))


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _percent(share: float) -> str:
    """Return a relative difference as text, such as `+5.1%`.

    A difference of more than 100% becomes a factor, such as `6.30x`. Return `unbounded` if the difference is not
    finite.
    """
    if not math.isfinite(share):
        return "unbounded"
    if abs(share) > 1:
        return f"{significant(1 + abs(share))}x{' better' if share < 0 else ''}"
    return f"{share * 100:+.1f}%"
