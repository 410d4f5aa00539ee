"""Tables in narrow terminals: names are shortened, columns move to another table, and no figure is cut off."""

from __future__ import annotations

import pytest

from loadgen.analysis.report import Document, Section, Table, TableCell, TableColumn, TableRow
from loadgen.analysis.report.narrow_tables import fit
from loadgen.analysis.report.terminal import render


def table_of(names: list[str], figures: int) -> Table:
    """Return a table with a column of names and columns of numbers of 10 characters each."""
    columns = [TableColumn("run", "head"), *(TableColumn(f"figure {number}") for number in range(figures))]
    rows = [
        TableRow([TableCell(name), *(TableCell(f"{number:,}.25 ms") for number in range(100, 100 + figures))])
        for name in names
    ]
    return Table("Figures", columns, rows)


def text_of(table: Table, width: int) -> str:
    """Return the table as the terminal shows it."""
    return render(Document("loadgen", "title", [Section("s", "", [table])]), width=width)


def test_a_table_that_fits_is_left_alone() -> None:
    """No copy, no shortened name."""
    table = table_of(["a", "b"], 4)
    assert fit(table, 80) == [table]


def test_long_names_are_shortened_at_their_beginning() -> None:
    """The end of a name tells the runs of one folder apart, and every figure stays whole."""
    names = [f"runs/matrix-of-all-servers-and-hosts/cells/{number}/repeat-{number}" for number in (1, 2)]
    (found,) = fit(table_of(names, 4), 80)
    texts = [row.cells[0].text for row in found.rows]
    assert [text[0] for text in texts] == ["…", "…"]
    assert texts[0].endswith("/1/repeat-1")
    text = text_of(table_of(names, 4), 80)
    assert text.count("103.25 ms") == 2
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
@pytest.mark.parametrize("figures", [5, 9, 14])
def test_columns_that_do_not_fit_move_to_another_table(width: int, figures: int) -> None:
    """Each table repeats the names; together they have every column once, and no line is too long or cut."""
    table = table_of(["first", "second"], figures)
    found = fit(table, width)
    assert all(part.columns[0].title == "run" for part in found)
    assert [column.title for part in found for column in part.columns[1:]] == [
        column.title for column in table.columns[1:]
    ]
    text = text_of(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert all(f"{100 + number}.25 ms" in text for number in range(figures))
    assert "…" not in text


def test_a_table_without_room_for_one_column_is_not_lost() -> None:
    """In ten columns of text something has to be cut, but every column still has its table."""
    assert len(fit(table_of(["first"], 3), 10)) == 3
