"""Renders a document for the terminal, with a maximum line width and optional ANSI colours."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO

from msgspec.structs import replace
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from loadgen.analysis.format import printable
from loadgen.analysis.report import Block, Cards, Document, Findings, Paragraph, Table, TableCell, card_note
from loadgen.analysis.report.narrow_tables import MANY_COLUMNS, MIN_NUMBER_WIDTH, column_gap, fit

STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "error": "red", "": ""}
LINE_MAX = 400
"""Maximum number of characters of a line in a cell. Messages of the server have at most 300 characters, so the end of
a message is never cut off."""


def render(document: Document, *, width: int = 80, colour: bool = False) -> str:
    """Return the document as text for a terminal, in lines of at most `width` characters.

    `colour` adds ANSI colour codes. Blocks that only the HTML page shows are omitted."""
    output = StringIO()
    console = Console(
        file=output,
        width=width,
        highlight=False,
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
    )
    mark = f"{document.mark}  " if document.mark else ""
    console.print(Text.assemble((mark, "bold yellow"), (printable(document.title), "bold")))
    if document.subtitle:
        console.print(_text(document.subtitle, "note"))
    for section in document.sections:
        console.print()
        if section.title:
            console.print(_text(section.title, "note"))
        for block in section.blocks:
            for part in _parts(block, document, width):
                console.print(part)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def _parts(block: Block, document: Document, width: int) -> Iterator[RenderableType]:
    match block:
        case Paragraph(text, level):
            yield _text(text, level)
        case Findings(findings):
            for finding in findings:
                yield _text(finding.sentence, "" if finding.level == "note" else finding.level)
        case Table():
            yield _text(f"{document.mark}  {block.title}" if document.mark else block.title, "note")
            yield from map(_table, fit(_printable(block, document), width))
            yield from (_text(note, "note") for note in block.notes)
        case Cards(cards):
            table = RichTable(box=None, show_header=False, padding=(0, 2, 0, 0))
            table.add_column(style="dim")
            table.add_column(justify="right", style="bold", no_wrap=True)
            for card in cards:
                row = card.label, f"{card.value} {card.unit}".rstrip(), card_note(card)
                table.add_row(*(Text(printable(text)) for text in row))
            yield table


def _text(text: str, level: str) -> Text:
    return Text(printable(text), style=STYLES[level])


def _printable(block: Table, document: Document) -> Table:
    """Return the table `block` without characters that a terminal cannot show.

    A cell without text may refer to a run of `document`. Such a cell gets the name of the run as its text.
    """
    rows = []
    for row in block.rows:
        cells = []
        for cell in row.cells:
            name = document.runs[cell.run].name if cell.run is not None and not cell.text else cell.text
            lines = [printable(line)[:LINE_MAX] for line in cell.lines]
            cells.append(replace(cell, text=printable(name)[:LINE_MAX], lines=lines))
        rows.append(replace(row, cells=cells))
    columns = [replace(column, title=printable(column.title)) for column in block.columns]
    return replace(block, columns=columns, rows=rows)


def _table(block: Table) -> RichTable:
    headed = any(column.title for column in block.columns)
    padding = (0, column_gap(len(block.columns)), 0, 0)
    table = RichTable(box=None, padding=padding, pad_edge=False, header_style="dim", show_header=headed)
    for column in block.columns:
        number = column.kind == "number"
        table.add_column(
            Text(column.title),
            justify="right" if number else "left",
            no_wrap=column.kind != "text",
            min_width=MIN_NUMBER_WIDTH if number and len(block.columns) > MANY_COLUMNS else None,
            style="dim" if column.kind == "unit" else "",
        )
    for row in block.rows:
        table.add_row(*map(_cell, row.cells))
    return table


def _cell(cell: TableCell) -> Text:
    return Text("\n".join(cell.lines or (cell.text,)), style="dim" if cell.thin else STYLES[cell.level])
