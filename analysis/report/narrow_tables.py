"""Fits tables into narrow terminals, so that no number and no column title is cut off.

Row names are shortened at their beginning, because their ends differ. If that is not enough, the columns are divided
into several tables, each of which repeats the row names.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from loadgen.analysis.report import Table, TableCell, TableRow

ELLIPSIS = "…"
MIN_NAME_WIDTH = 24
"""Minimum width of a shortened row name, in characters. If this is not enough, columns are moved to another table."""
MANY_COLUMNS = 7
MIN_NUMBER_WIDTH = 8
"""Minimum width of a column of numbers in a table with more than MANY_COLUMNS columns."""
MAX_TEXT_WIDTH = 20
"""Maximum width that is reserved for a column of wrapped text, even if the column contains a longer word."""


def column_gap(columns: int) -> int:
    """Return the number of spaces between two columns of a table that has `columns` columns."""
    return 2 if columns < 5 else 1


def fit(table: Table, width: int) -> list[Table]:
    """Fit a table into `width` characters. Return one table, or several tables that together contain all columns.

    - If the table fits, it is returned unchanged.
    - If shorter row names are enough, the row names are shortened.
    - Otherwise the columns are divided among several tables. Each table repeats the row names, followed by at least one
      other column. Such a table may still be wider than `width`.

    Cells that name a run must already contain the name as text.
    """
    widths = _min_widths(table)
    if _total(widths) <= width:
        return [table]
    names = _name_columns(table)
    head = names - 1
    free = width - _total([*widths[:head], *widths[names:]]) - column_gap(len(widths))
    if table.columns[head].kind == "head" and free >= min(MIN_NAME_WIDTH, widths[head]):
        return [_with_short_names(table, head, free)]
    return _split(table, widths, names, width)


def _name_columns(table: Table) -> int:
    """Return how many columns at the left of `table` contain the names of the rows.

    These are all columns up to the first column of kind `head`, including this column. If there is no column of this
    kind, only the first column contains the name.
    """
    kinds = [column.kind for column in table.columns]
    return kinds.index("head") + 1 if "head" in kinds else 1


def _min_widths(table: Table) -> list[int]:
    """Return the minimum width of each column, in characters."""
    widths = []
    for index, column in enumerate(table.columns):
        texts = [column.title]
        for row in table.rows:
            texts += row.cells[index].lines or (row.cells[index].text,)
        if column.kind == "text":
            words = [word for text in texts for word in text.split()]
            widths.append(min(MAX_TEXT_WIDTH, max(map(len, words), default=0)))
        else:
            widths.append(max(map(len, texts)))
        if column.kind == "number" and len(table.columns) > MANY_COLUMNS:
            widths[-1] = max(widths[-1], MIN_NUMBER_WIDTH)
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + column_gap(len(widths)) * (len(widths) - 1)


def _with_short_names(table: Table, column: int, length: int) -> Table:
    """Return the table with the texts of one column shortened to `length` characters.

    A long text loses its beginning and keeps its end, because the ends of row names differ.
    """
    rows = []
    for row in table.rows:
        cell = row.cells[column]
        if len(cell.text) > length:
            cell = replace(cell, text=ELLIPSIS + cell.text[len(cell.text) - length + 1 :])
        rows.append(replace(row, cells=[*row.cells[:column], cell, *row.cells[column + 1 :]]))
    return replace(table, rows=rows)


def _split(table: Table, widths: Sequence[int], names: int, width: int) -> list[Table]:
    """Divide the table into as few tables as possible that are at most `width` characters wide.

    The first `names` columns name the rows, so every table repeats them. The order of the other columns stays the same.
    """
    groups: list[list[int]] = [[]]
    for index in range(names, len(widths)):
        columns = [*range(names), *groups[-1], index]
        if groups[-1] and _total([widths[column] for column in columns]) > width:
            groups.append([])
        groups[-1].append(index)
    tables = []
    for group in groups:
        columns = [*range(names), *group]
        rows: list[TableRow] = []
        for row in table.rows:
            cells: list[TableCell] = [row.cells[column] for column in columns]
            rows.append(replace(row, cells=cells))
        tables.append(replace(table, columns=[table.columns[column] for column in columns], rows=rows))
    return tables
