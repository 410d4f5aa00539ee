"""Which differences between cells are larger than the noise between runs.

One figure per run, Welch's interval for the difference of two means ("The generalization of 'Student's' problem when
several different population variances are involved", 1947) on logarithms, so that it is an interval of the ratio. Only
differences between runs are in it, which is what chance there is when the matrix is measured again. `loadgen compare`
on the folders of two cells looks into the runs as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from analysis.stats import student_quantile

CONFIDENCE = 0.95
COMPARED = ("output_tokens_per_s", "ttft.p50", "tpot.p50", "e2e.p50", "e2e.p99")
LENGTHS_ALIKE = 0.01
"""Mean output lengths that differ by a larger share are unequal work."""
PARTS = ("server", "host", "model", "workload")

Cell = Mapping[str, Any]
"""As matrix.json has it."""


def differences(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Every pair of measured cells that differ in the server alone or in the host alone, figure by figure.

    `ratio` is that of `a` to `b`. `verdict`: `different` when its interval does not hold 1, else `no difference seen`;
    `cannot tell` where one of them was not measured twice, or its runs differ beyond all measure. `equal_work` is False
    where the answers' mean lengths differ.
    """
    found = []
    for a, b, by in _pairs([cell for cell in cells if cell["runs"]]):
        alike = _alike(a["lengths"]["mean"], b["lengths"]["mean"])
        for name in COMPARED:
            ratio, ends = ratio_of(a["figures"][name]["values"], b["figures"][name]["values"])
            found.append(
                {
                    "figure": name,
                    "by": by,
                    "a": {part: a[part] for part in PARTS},
                    "b": {part: b[part] for part in PARTS},
                    "ratio": None if ratio is None else round(ratio, 6),
                    "ci95": None if ends is None else [round(end, 6) for end in ends],
                    "verdict": _verdict(ends),
                    "equal_work": alike,
                }
            )
    return found


def ratio_of(a: Sequence[float | None], b: Sequence[float | None]) -> tuple[float | None, tuple[float, float] | None]:
    """The ratio of the geometric means of two figures over their runs, and its interval where both have two runs."""
    logs = [[math.log(value) for value in values if value is not None and value > 0] for values in (a, b)]
    if not all(logs) or any(len(kept) < len(values) for kept, values in zip(logs, (a, b), strict=True)):
        return None, None
    difference = _mean(logs[0]) - _mean(logs[1])
    ratio = math.exp(difference)
    if min(map(len, logs)) < 2:
        return ratio, None
    errors = [_variance(values) / len(values) for values in logs]
    total = sum(errors)
    if total == 0:
        return ratio, (ratio, ratio)
    freedom = total**2 / sum(error**2 / (len(values) - 1) for error, values in zip(errors, logs, strict=True))
    margin = student_quantile((1 + CONFIDENCE) / 2, freedom) * math.sqrt(total)
    if margin > MARGIN_MOST:
        return ratio, None
    return ratio, (math.exp(difference - margin), math.exp(difference + margin))


MARGIN_MOST = 500.0
"""Of a logarithm; beyond it the exponential is no float."""


def _pairs(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Cell, str]]:
    """Those that differ in one of server and host, and in nothing else."""
    for a, b in combinations(cells, 2):
        differing = [part for part in PARTS if a[part] != b[part]]
        if differing in (["server"], ["host"]):
            yield a, b, differing[0]


def _verdict(ends: tuple[float, float] | None) -> str:
    if ends is None:
        return "cannot tell"
    return "no difference seen" if ends[0] <= 1 <= ends[1] else "different"


def _alike(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and abs(a - b) <= LENGTHS_ALIKE * max(a, b)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
