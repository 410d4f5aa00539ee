"""`--fail-if`: what a difference must not be, as people write it: `ttft.p99 worse by 5%`, `output_tokens_per_s worse`.

Like an objective, a condition speaks of the server, of which the runs are samples: it fails when the whole interval of
the difference is worse by more than the bound, passes when the whole interval is not, and otherwise cannot be told.
Each is a question asked before the runs were seen, so the figures of the table, which were not, do not count: with k
conditions each interval is one of 1 - 5 % / k (Bonferroni), so that the chance of any false failure is 2.5 %. Not by
Holm's method as in the table, because then no interval would go with the verdict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from analysis.compare.verdicts import ERROR_MOST, Row, ends
from analysis.objectives import LATENCIES, RATES

Outcome = Literal["pass", "fail", "cannot tell"]
STATISTICS = ("p50", "p90", "p95", "p99")
HINT = f"""A condition is a figure, and by how much B may not be worse than A: 'ttft.p99 worse by 5%'.
  figures      LATENCY.STATISTIC, complete, {", ".join(RATES)}
  latencies    {", ".join(LATENCIES)}
  statistics   {", ".join(STATISTICS)}
  bounds       a share of A's figure such as 5%; of `complete` a difference of shares; 'worse' alone is worse by 0%"""
_CONDITION = re.compile(r"([a-z_0-9]+)(?:\.([a-z0-9]+))? worse(?: by (\d+(?:\.\d+)?) ?%)?")


class ConditionError(Exception):
    """Expressions that are no conditions: one line for each, and a hint of what is allowed."""

    hint = HINT


@dataclass(frozen=True, slots=True)
class Condition:
    """What B must not be."""

    text: str
    figure: str
    bound: float
    """A share of A's figure, or a difference of shares."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of one condition."""

    condition: str
    verdict: Outcome
    said: str


def parse(expressions: Iterable[str]) -> list[Condition]:
    """Read expressions. Raises ConditionError, which names every mistake in all of them."""
    conditions, mistakes = [], []
    for expression in expressions:
        text = " ".join(expression.split())
        match = _CONDITION.fullmatch(text)
        if match is None or not _known(match[1], match[2]):
            mistakes.append(f"--fail-if {expression!r}: is no condition")
            continue
        figure = match[1] if match[2] is None else f"{match[1]}.{match[2]}"
        conditions.append(Condition(text, figure, float(match[3] or 0) / 100))
    if mistakes:
        raise ConditionError("\n".join(mistakes))
    return conditions


def judge(conditions: Sequence[Condition], rows: Sequence[Row]) -> list[Judged]:
    """Hold each against its row."""
    by_figure = {row.figure: row for row in rows}
    return [_judged(each, by_figure[each.figure], ERROR_MOST / len(conditions)) for each in conditions]


def _known(figure: str, statistic: str | None) -> bool:
    if statistic is None:
        return figure == "complete" or figure in RATES
    return figure in LATENCIES and statistic in STATISTICS


def _judged(condition: Condition, row: Row, error: float) -> Judged:
    if row.p_value is None:
        return Judged(condition.text, "cannot tell", row.why)
    low, high = (_worse_by(row, end) for end in ends(row.effect, row.error, row.freedom, 1 - error))
    low, high = min(low, high), max(low, high)
    verdict: Outcome = "fail" if low > condition.bound else "pass" if high <= condition.bound else "cannot tell"
    here = _worse_by(row, row.effect)
    said = f"{_signed(here)}, {100 * (1 - error):.4g} % interval {_signed(low)} to {_signed(high)} (+ is worse)"
    if verdict == "cannot tell" and row.needs_more:
        said += f"; about {row.needs_more:,} more {row.more_of} in each would help to tell"
    return Judged(condition.text, verdict, said)


def _worse_by(row: Row, effect: float) -> float:
    """By what share of A's, or by what difference of shares, B is worse; negative where it is better."""
    change = math.expm1(effect) if row.ratio is not None else effect
    return change if row.direction == "lower" else -change


def _signed(share: float) -> str:
    return f"{share * 100:+.1f} %"
