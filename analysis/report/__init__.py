"""A document: what there is to say of a run, a comparison or a matrix, before anybody decides how it looks.

Sections of typed blocks, as plain values: they are made once and rendered by `loadgen.analysis.report.page`; what has
only paragraphs, findings, tables and cards also by `loadgen.analysis.report.terminal`, and here as Markdown. Texts are
plain: a part between backticks is code, and each renderer escapes what its own medium would take for markup.

    Document
      Section  id, title, blocks
        Paragraph | Findings | Table | Cards | Scorecard | ChartRef | Facts | Code | Disclosure | Definitions
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

Level = Literal["ok", "note", "warning", "error"]
Shape = Literal["", "wide", "tall"]
Zoom = Literal["x", "both", "none"]
ColumnKind = Literal["head", "number", "text", "unit"]
"""Of a table's column: `head` names its row."""


class Finding(Struct, frozen=True):
    """One thing to know before using a figure."""

    id: str
    level: Level
    sentence: str
    anchor: str = ""
    """The section that has the figures of it."""


class RunStyle(Struct, frozen=True):
    """How a run is named and coloured wherever it appears."""

    name: str
    colour: str = "run-1"
    """A name of the palette in page.css."""
    mark: str = ""
    """SIMULATED, for a run that was."""


class Paragraph(Struct, frozen=True, tag=True):
    text: str
    level: Level | Literal[""] = ""
    run: int | None = None
    """Whose words these are, where a document is of several runs."""


class Findings(Struct, frozen=True, tag=True):
    findings: Sequence[Finding]


class TableColumn(Struct, frozen=True):
    title: str
    kind: ColumnKind = "number"
    key: str = ""


class TableCell(Struct, frozen=True):
    """What a cell says; `value` is what it is sorted by where the text is in a unit of its row, or is no number."""

    text: str
    value: float | str | None = None
    note: str = ""
    """In small print below, such as an interval."""
    level: Level | Literal[""] = ""
    thin: bool = False
    """Too few samples: `text` says how many it takes."""
    run: int | None = None
    code: bool = False
    link: str = ""
    """The path of a file to which the text leads, from the page."""
    lines: Sequence[str] = ()
    """Instead of `text`, where there are several things to say."""
    requests: Sequence[int] = ()
    """Of each line, the request to be shown in the timeline."""


class TableRow(Struct, frozen=True):
    cells: Sequence[TableCell]
    key: str = ""
    first: bool = False
    """Whether it begins a group of rows."""


class Table(Struct, frozen=True, tag=True):
    """`id` is a name for style and tests; `run` is whose mark it bears, where that is not the document's."""

    title: str
    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]
    id: str = ""
    notes: Sequence[str] = ()
    """What is to be known below it."""
    run: int | None = None


class Card(Struct, frozen=True):
    """A figure with its label, its unit and what to know about it."""

    label: str
    value: str
    unit: str = ""
    note: str = ""
    link: str = ""
    """Where its value leads."""


class Cards(Struct, frozen=True, tag=True):
    cards: Sequence[Card]


class Scorecard(Struct, frozen=True, tag=True):
    """The first screen of a run: how fast, and whether the figures are valid."""

    run: int
    subheading: str
    facts: str
    cards: Sequence[Card]
    verdict: Finding
    findings: Sequence[Finding]
    objectives: Finding | None = None


class ChartRef(Struct, frozen=True, tag=True):
    """A chart, drawn by a script of the page from its data; the caption says what there is to see."""

    id: str
    title: str
    caption: Sequence[str] = ()
    shape: Shape = ""
    zoom: Zoom = "x"
    help: str = ""
    """How to read it, behind a question mark."""


class Facts(Struct, frozen=True, tag=True):
    groups: Mapping[str, Mapping[str, str]]
    """Names and values, by heading."""


class Code(Struct, frozen=True, tag=True):
    text: str
    label: str
    copy: bool = False
    scroll: bool = False


class Definitions(Struct, frozen=True, tag=True):
    entries: Sequence[tuple[str, str, str]]
    """Term, its name in files, and what it means."""


class Switch(Struct, frozen=True):
    """A choice of the reader's, which the page's scripts follow: radio buttons, a list, or words to look for."""

    name: str
    label: str
    choices: Sequence[tuple[str, str]] = ()
    kind: Literal["radio", "select", "search"] = "radio"


class Disclosure(Struct, frozen=True, tag=True):
    summary: str
    blocks: Sequence[Block]
    """What is folded away on a page."""


Block = Paragraph | Findings | Table | Cards | Scorecard | ChartRef | Facts | Code | Definitions | Disclosure


class Section(Struct, frozen=True):
    id: str
    """Links lead to it: lower-case letters, digits and hyphens."""
    title: str
    blocks: Sequence[Block]
    short: str = ""
    """Its name in the navigation, where that is not its title."""
    switches: Sequence[Switch] = ()
    help: str = ""
    """How to read its figures, behind a question mark."""


class Document(Struct, frozen=True):
    kind: str
    """Which document of loadgen's it is: `loadgen report`."""
    title: str
    sections: Sequence[Section]
    subtitle: str = ""
    mark: str = ""
    """SIMULATED if any of the runs was: a chart or table with one such curve must say so."""
    runs: Sequence[RunStyle] = ()
    scripts: Sequence[str] = ()
    """Beside the page's own, those that draw its charts: files in analysis/report/."""
    data: Mapping[str, Any] = {}
    """What the scripts draw."""
    version: str = ""


def markdown(document: Document) -> str:
    """The document for an issue, a chat or the summary of a CI job; what only pages hold is left out."""
    mark = f"**{_escaped(document.mark)}** " if document.mark else ""
    lines = [f"## {mark}{_escaped(document.title)}", _escaped(document.subtitle)]
    for section in document.sections:
        lines += [f"### {_escaped(section.title)}"] if section.title else []
        for block in section.blocks:
            match block:
                case Paragraph(text):
                    lines.append(_escaped(text))
                case Findings(findings):
                    marks = {"ok": "", "note": "", "warning": "**Warning:** ", "error": "**Error:** "}
                    lines.append(
                        "\n".join(f"- {marks[finding.level]}{_escaped(finding.sentence)}" for finding in findings)
                    )
                case Table():
                    lines += [f"**{_escaped(block.title)}**", _table(block), *map(_escaped, block.notes)]
                case Cards(cards):
                    lines.append("\n".join(map(_card, cards)))
    return "\n\n".join(line for line in lines if line) + "\n"


def _table(table: Table) -> str:
    align = ["--:" if column.kind == "number" else ":--" for column in table.columns]
    texts = [[_noted("; ".join(cell.lines) or cell.text, cell.note) for cell in row.cells] for row in table.rows]
    rows = [[column.title for column in table.columns], *texts]
    lines = [" | ".join(map(_escaped, row)) for row in rows]
    return "\n".join(f"| {line} |" for line in (lines[0], " | ".join(align), *lines[1:]))


def _card(card: Card) -> str:
    value = _escaped(f"{card.value} {card.unit}".rstrip())
    return _noted(f"- {_escaped(card.label)}: **{value}**", _escaped(card.note))


def _noted(text: str, note: str) -> str:
    return f"{text} ({note})" if note else text


def _escaped(text: str) -> str:
    """On one line, without what Markdown or HTML would take for markup; backticks stay code."""
    line = re.sub(r"`[^`]*`|[\\*_\[\]<>#]", lambda found: found[0] if found[0][0] == "`" else f"\\{found[0]}", text)
    return " ".join(line.split()).replace("|", "\\|")
