"""A document for the terminal: lines of at most so many characters, with ANSI colours only where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from analysis.report.document import (
    Block,
    Card,
    Cards,
    Code,
    Definitions,
    Disclosure,
    Document,
    Facts,
    Findings,
    Paragraph,
    Scorecard,
    Table,
    TableCell,
)
from analysis.report.format import plain

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "error": "red", "": ""}
LINE_MAX = 160
"""Of a cell's longest line: a server's words may be pages."""


def render(document: Document, *, width: int = 80, colour: bool = False) -> str:
    """The document as lines of at most `width` characters."""
    from rich.console import Console
    from rich.text import Text

    output = StringIO()
    console = Console(
        file=output,
        width=width,
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    title = Text()
    if document.mark:
        title.append(f"{document.mark}  ", style="bold yellow")
    title.append(plain(document.title), style="bold")
    console.print(title)
    if document.subtitle:
        console.print(Text(plain(document.subtitle), style="dim"))
    for section in document.sections:
        console.print()
        if section.title:
            console.print(Text(plain(section.title), style="dim"))
        for block in section.blocks:
            for part in _parts(block, document):
                console.print(part)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def _parts(block: Block, document: Document) -> Iterator[Any]:  # noqa: C901 - one case per kind of block
    match block:
        case Paragraph():
            whose = f"{document.runs[block.run].name}: " if block.run is not None and len(document.runs) > 1 else ""
            yield _text(f"{whose}{block.text}", block.level)
        case Findings(findings):
            yield from (_text(each.sentence, each.level if each.level != "note" else "") for each in findings)
        case Table():
            mark = document.mark if block.run is None else document.runs[block.run].mark
            yield _text(f"{mark}  {block.title}" if mark else block.title, "note")
            yield _table(block, document)
            yield from (_text(note, "note") for note in block.notes)
        case Cards(cards):
            yield _cards(cards)
        case Scorecard():
            yield _cards(block.cards)
            yield _text(block.verdict.sentence, block.verdict.level)
            yield from _parts(Findings(block.findings), document)
        case Facts(groups):
            yield _cards([Card(name, value) for group in groups.values() for name, value in group.items()])
        case Code(text):
            yield from (_text(line, "note") for line in text.splitlines())
        case Definitions(entries):
            yield from (_text(f"{term}: {meaning}", "") for term, _, meaning in entries)
        case Disclosure(_, blocks):
            for each in blocks:
                yield from _parts(each, document)


def _text(words: str, level: str) -> Text:
    from rich.text import Text

    return Text(plain(words), style=STYLES[level])


def _cards(cards: Sequence[Card]) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column()
    for card in cards:
        table.add_row(*(Text(plain(text)) for text in (card.label, f"{card.value} {card.unit}".rstrip(), card.note)))
    return table


def _table(block: Table, document: Document) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(
        box=None,
        padding=(0, 2 if len(block.columns) < 5 else 1, 0, 0),
        header_style="dim",
        show_header=any(column.title for column in block.columns),
    )
    for column in block.columns:
        number = column.kind == "number"
        table.add_column(
            Text(column.title),
            justify="right" if number else "left",
            no_wrap=column.kind != "text",
            min_width=8 if number and len(block.columns) > 7 else None,
            style="dim" if column.kind == "unit" else "",
        )
    for row in block.rows:
        table.add_row(*(_cell(cell, document) for cell in row.cells))
    return table


def _cell(cell: TableCell, document: Document) -> Text:
    from rich.text import Text

    name = document.runs[cell.run].name if cell.run is not None and not cell.text else cell.text
    lines = [plain(line)[:LINE_MAX] for line in cell.lines or (name,)]
    return Text("\n".join(lines), style="dim" if cell.thin else STYLES[cell.level])
