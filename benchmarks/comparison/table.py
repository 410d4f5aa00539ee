"""Formats the figures of several tools as one Markdown table, with the best value of each column in bold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its heading with the unit, its number of decimals, and which values are better."""

    title: str
    digits: int
    worse: Callable[[float], float] | None = None
    """Sort key: a value with a larger key is worse. None if no value of the column is better than another."""
    signed: bool = False


def smaller(value: float) -> float:
    """Sort key of a column in which smaller values are better."""
    return value


def larger(value: float) -> float:
    """Sort key of a column in which larger values are better."""
    return -value


Row = Mapping[str, float]
"""Values by column title. A column may be missing."""


def medians(rows: Sequence[Row]) -> Row:
    """Return the median of each figure over all rows that contain it."""
    titles = {title: None for row in rows for title in row}
    return {title: median(row[title] for row in rows if title in row) for title in titles}


def markdown(columns: Sequence[Column], rows: Mapping[str, Row | str], floor: str = "") -> str:
    """Return the table. The keys of `rows` are the names of the tools.

    A row may be a text that explains why there are no figures. No value of the row `floor` is shown as the best one.
    """
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
    """Return the best value of a column as it is displayed, so that equal displayed values are equally good."""
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
