"""Compares two groups of runs: which figures are better, which worse, which the same, and which cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from analysis import words
from analysis.compare import groups, single, work
from analysis.compare.conditions import Condition, Judged, judge
from analysis.compare.loaded import Loaded
from analysis.compare.noise import RUNS_DIFFER
from analysis.compare.verdicts import MARGIN, Row, judged
from analysis.compare.work import Difference
from analysis.repeats import state

FIGURES = (
    *("output_tokens_per_s", "complete", "ttft.p50", "ttft.p99", "ttft.pairs", "tpot.p50", "tpot.p99"),
    *("itl.p99", "e2e.p50", "e2e.p99", "e2e.pairs"),
)
"""What is compared unless more is asked: few, because each question more makes every answer weaker."""
ONE_RUN_EACH = (
    f"One run each: the intervals hold chance within a run, and at least {RUNS_DIFFER * 100:g} % for what makes runs "
    "differ, such as the state of the card or a neighbour. How much that is, only repeats show (--repeats 5)."
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two groups of runs beside each other. B is judged against A."""

    name_a: str
    name_b: str
    runs_a: int
    runs_b: int
    mark: str
    """SIMULATED if any of the runs was."""
    method: str
    margin: float
    rows: list[Row]
    unequal: list[Difference]
    """What makes the work unequal; nothing of it may be left for a fair comparison."""
    notes: list[str]
    conditions: list[Judged]

    def json(self) -> dict[str, Any]:
        """As plain values; what cannot be tested is None."""
        found = asdict(self)
        found["rows"] = [
            {name: value for name, value in asdict(row).items() if name not in ("error", "error_least", "freedom")}
            for row in self.rows
        ]
        return found


def compare(
    a: Sequence[Loaded], b: Sequence[Loaded], *, margin: float = MARGIN, conditions: Sequence[Condition] = ()
) -> Comparison:
    """Compare B with A, runs or groups of repeats. `margin` is by how much a figure may differ before it matters.

    Work that was unequal is in `unequal`, and the figures are compared all the same: it is for the caller to refuse.
    """
    asked = dict.fromkeys((*FIGURES, *(condition.figure for condition in conditions)))
    alone = len(a) == len(b) == 1
    if alone:
        rows = list(single.rows(a[0], b[0], list(asked)))
    else:
        rows = list(groups.rows([run.summary for run in a], [run.summary for run in b], list(asked)))
    rows = judged(rows, margin)
    tested = sum(row.p_value is not None for row in rows)
    return Comparison(
        name_a=_name(a),
        name_b=_name(b),
        runs_a=len(a),
        runs_b=len(b),
        mark=next((mark for run in (*a, *b) if (mark := words.simulated(run.summary))), ""),
        method=_method(alone, tested),
        margin=margin,
        rows=rows,
        unequal=work.differences(a, b),
        notes=[*([ONE_RUN_EACH] if alone else _cold(a, b)), *work.notes(a, b)],
        conditions=judge(conditions, rows),
    )


def _method(alone: bool, tested: int) -> str:
    what = "raw samples of one run each" if alone else "one figure per run, Welch's t between runs"
    return (
        f"From {what}; intervals are 95 % each. Better and worse are said at 5 % for all {tested} figures together "
        "(Holm's correction)."
    )


def _name(group: Sequence[Loaded]) -> str:
    names = list(dict.fromkeys(run.name.partition("/")[0] for run in group))
    return ", ".join(names)


def _cold(a: Sequence[Loaded], b: Sequence[Loaded]) -> list[str]:
    """Repeats of which some met a cold server vary by that, and say so."""
    found = []
    for title, group in (("A", a), ("B", b)):
        states = state([run.summary for run in group])
        if len(set(states)) > 1:
            cold = [str(place) for place, each in enumerate(states, 1) if each == "cold"]
            found.append(f"Run {', '.join(cold)} of {title} met a cold server, the others a warm one.")
    return found
