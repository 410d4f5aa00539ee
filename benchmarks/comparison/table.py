"""Figures of several runs of several tools, as one Markdown table in which each column's best is bold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Column:
    """One figure: its heading with the unit, how many digits it is worth, and which of two is the better."""

    title: str
    digits: int
    worse: Callable[[float], float] | None = None
    """Larger is worse; None where no figure is better than another."""
    signed: bool = False


def smaller(value: float) -> float:
    """Less is better."""
    return value


def larger(value: float) -> float:
    """More is better."""
    return -value


Row = Mapping[str, float]
"""A figure per column's title; a column may be missing."""


def medians(rows: Sequence[Row]) -> Row:
    """Figure by figure, over the runs that have it."""
    titles = {title: None for row in rows for title in row}
    return {title: median(row[title] for row in rows if title in row) for title in titles}


def markdown(columns: Sequence[Column], rows: Mapping[str, Row | str], floor: str = "") -> str:
    """The table. A row that is a text says why there are no figures. The row `floor` does not compete."""
    competing = [row for name, row in rows.items() if name != floor and not isinstance(row, str)]
    best = {column.title: _best(column, competing) for column in columns}
    lines = [_line(["tool", *(column.title for column in columns)])]
    lines.append("| --- |" + " ---: |" * len(columns))
    for name, row in rows.items():
        if isinstance(row, str):
            lines.append(_line([name, row, *([""] * (len(columns) - 1))]))
        else:
            marks = best if name != floor else {}
            lines.append(_line([name, *(_cell(column, row, marks) for column in columns)]))
    return "\n".join(lines)


def _best(column: Column, rows: Sequence[Row]) -> str:
    """As it will be shown, so that equal figures are equally good."""
    values = [row[column.title] for row in rows if column.title in row]
    return _shown(column, min(values, key=column.worse)) if column.worse and len(values) > 1 else ""


def _cell(column: Column, row: Row, best: Mapping[str, str]) -> str:
    if column.title not in row:
        return ""
    shown = _shown(column, row[column.title])
    same = best.get(column.title) in (shown, shown.replace("+", "-"), shown.replace("-", "+"))
    return f"**{shown}**" if same else shown


def _shown(column: Column, value: float) -> str:
    return f"{value:{'+' if column.signed else ''},.{column.digits}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
