"""Document model: the content of a report on a run, a comparison or a matrix, independent of its output format.

A document consists of sections, and a section consists of typed blocks. There are three renderers:

- `loadgen.analysis.report.page` renders every block as HTML.
- `loadgen.analysis.report.terminal` renders paragraphs, findings, tables and cards for a terminal.
- `markdown` in this module renders paragraphs, findings, tables and cards as Markdown.

Texts are plain text in which backticks mark code. Each renderer escapes the markup characters of its output format.

    Document
      Section  id, title, blocks
        Paragraph | Findings | Table | Cards | Scorecard | ChartRef | Facts | Bullets | Code | Disclosure | Definitions
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

Level = Literal["ok", "note", "warning", "error"]
Shape = Literal["", "wide", "tall", "high"]
"""Height of a chart. `high` is for a grid with many rows."""
Zoom = Literal["x", "both", "none"]
ColumnKind = Literal["head", "number", "text", "unit"]
"""Kind of a table column. A `head` column contains the names of the rows."""


class Finding(Struct, frozen=True):
    """A fact that readers of a report must know before they use its figures, such as a failed check."""

    id: str
    level: Level
    sentence: str
    anchor: str = ""
    """Id of the section that shows the figures on which the sentence is based."""


class Chip(Struct, frozen=True):
    """One part of the status strip below the title of a page, such as "Measurement: valid"."""

    label: str
    text: str
    level: Level
    anchor: str = ""
    """Id of the section with the details."""


class RunStyle(Struct, frozen=True):
    """Name and colour of a run, which are the same in the whole document."""

    name: str
    colour: str = "run-1"
    """Name of a colour in the palette of charts.py."""
    mark: str = ""
    """`SIMULATED` if the run used a simulated server, else empty."""


class Paragraph(Struct, frozen=True, tag=True):
    text: str
    level: Level | Literal[""] = ""
    run: int | None = None
    """Index of the run that the paragraph describes. None if the paragraph is not about one of several runs."""


class Findings(Struct, frozen=True, tag=True):
    findings: Sequence[Finding]


class TableColumn(Struct, frozen=True):
    title: str
    kind: ColumnKind = "number"
    key: str = ""


class TableCell(Struct, frozen=True):
    """A table cell.

    `value` is the sort key of the cell. A cell needs a sort key if its text is not a number or if its column has
    several units.
    """

    text: str
    value: float | str | None = None
    note: str = ""
    """Small print below the text, such as a confidence interval."""
    level: Level | Literal[""] = ""
    thin: bool = False
    """True if the figure is based on too few samples. The cell is then dimmed."""
    run: int | None = None
    """Index of the run whose name is shown instead of `text`."""
    code: bool = False
    link: str = ""
    """Target of the link on the text: a path relative to the page. Empty for no link."""
    lines: Sequence[str] = ()
    """Lines that are shown instead of `text`."""
    mark: str = ""
    """Badge next to the text, such as `SIMULATED`. Empty for no badge."""
    full_text: str = ""
    """The unabridged text, if `text` is abridged. The page shows it while the mouse is over the text."""
    requests: Sequence[int] = ()
    """Request ids, one per line of `lines`. Each line links to its request in the timeline."""


class TableRow(Struct, frozen=True):
    cells: Sequence[TableCell]
    key: str = ""
    first: bool = False
    """True if the row starts a new group of rows."""
    parent: str = ""
    """Key of the row that summarises this row. Empty for a row without such a row."""


class Table(Struct, frozen=True, tag=True):
    """A table with a title. `id` becomes the CSS class of the HTML table."""

    title: str
    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]
    id: str = ""
    notes: Sequence[str] = ()
    """Sentences below the table."""
    run: int | None = None
    """Index of the run that the table describes. Its title then shows SIMULATED if only some runs were simulated."""


class DotStrip(Struct, frozen=True):
    """A small picture of one figure over several runs: a dot per run, the mean, and its confidence interval.

    Positions are percentages of the width of the picture."""

    dots: Sequence[float]
    mean: float
    interval: tuple[float, float] | None
    ends: tuple[str, str]
    """The smallest and the largest value of the runs, with the positions of their dots as the axis of the picture."""
    text: str
    """The picture in words, for screen readers."""


class Card(Struct, frozen=True):
    """A prominently displayed figure with a label, a unit and a note."""

    label: str
    value: str
    unit: str = ""
    note: str = ""
    link: str = ""
    """Target of the link on the value: a path relative to the page. Empty for no link."""
    strip: DotStrip | None = None
    """Picture of the figure over several runs. None for a single run."""
    failed: Sequence[str] = ()
    """Objectives on this metric that the run fails, such as "`ttft.p99` 653 > 200 ms"."""
    second: tuple[str, str] | None = None
    """A second figure with the same unit, and its meaning: ("6,219", "before the drain"). The page shows this figure in
    larger type than the note. None if the card has no second figure."""


class Cards(Struct, frozen=True, tag=True):
    cards: Sequence[Card]


class Scorecard(Struct, frozen=True, tag=True):
    """The overview of a run at the top of a report: its main figures, and whether these figures are valid."""

    run: int
    subheading: str
    facts: str
    cards: Sequence[Card]
    verdict: Finding
    findings: Sequence[Finding]
    objectives: Finding | None = None
    heading: str = ""
    """Heading of the overview, if it differs from the name of the run."""
    list_title: str = "Validity"
    """Heading of the list of findings. A simulation in virtual time has no client, so nothing there can be valid."""


class ChartRef(Struct, frozen=True, tag=True):
    """A reference to a chart, which a script draws on the page. `caption` describes the chart in words."""

    id: str
    title: str
    caption: Sequence[str] = ()
    shape: Shape = ""
    zoom: Zoom = "x"
    help: str = ""
    """Explanation of how to read the chart. The page shows it on a click on the question mark."""
    folded: Sequence[str] = ()
    """Additional sentences on the chart, which the page hides until the reader opens the data of the chart."""
    titled: bool = True
    """False if the heading of the section serves as the heading of the chart."""


class Facts(Struct, frozen=True, tag=True):
    groups: Mapping[str, Mapping[str, str]]
    """Names and values, grouped by heading."""


class Bullet(Struct, frozen=True):
    """A horizontal bar that shows a figure as a share of its limit."""

    label: str
    share: float
    """The figure as a share of its limit. The bar is full at 1."""
    text: str
    """The figure and its limit in words."""


class Bullets(Struct, frozen=True, tag=True):
    """A group of horizontal bars below one title. Each bar shows a figure as a share of its limit."""

    title: str
    bullets: Sequence[Bullet]
    run: int | None = None
    """Index of the run that the bars describe. None if they are not about one of several runs."""


class Code(Struct, frozen=True, tag=True):
    text: str
    label: str
    copy: bool = False
    scroll: bool = False


class Definitions(Struct, frozen=True, tag=True):
    entries: Sequence[tuple[str, str, str]]
    """Triples: the term, its name in files, and its meaning."""


class Switch(Struct, frozen=True):
    """An input control that the page's scripts read: radio buttons, check boxes, a drop-down list or a search field."""

    name: str
    label: str
    choices: Sequence[tuple[str, str]] = ()
    kind: Literal["radio", "checkbox", "select", "search"] = "radio"
    unchecked: Sequence[str] = ()
    """Values of the check boxes that are not checked at first."""


class Disclosure(Struct, frozen=True, tag=True):
    summary: str
    """The text that opens the blocks. Empty if the heading of the section opens them."""
    blocks: Sequence[Block]
    """The blocks that the page hides until the reader clicks the summary."""


Block = Paragraph | Findings | Table | Cards | Scorecard | ChartRef | Facts | Bullets | Code | Definitions | Disclosure


class Section(Struct, frozen=True):
    id: str
    """Link target of the section. It consists of lower-case letters, digits and hyphens."""
    title: str
    blocks: Sequence[Block]
    short: str = ""
    """Name in the navigation bar, if it differs from the title."""
    switches: Sequence[Switch] = ()
    help: str = ""
    """Explanation of how to read the figures. The page shows it on a click on the question mark."""


class Document(Struct, frozen=True):
    kind: str
    """The command that creates the document, such as `loadgen report`."""
    title: str
    sections: Sequence[Section]
    subtitle: str = ""
    mark: str = ""
    """`SIMULATED` if any run used a simulated server, because every chart and table may then show simulated figures."""
    runs: Sequence[RunStyle] = ()
    scripts: Sequence[str] = ()
    """Additional scripts that draw the charts: names of files in analysis/report/."""
    data: Mapping[str, Any] = {}
    """Input of the page's scripts. It must be serialisable as JSON."""
    version: str = ""
    servers: str = ""
    """Names of the tested servers, for the title of the browser tab. If it is empty, the title contains the names of
    the runs."""
    chips: Sequence[Chip] = ()
    """The status strip of the page, below its title. Other renderers omit the strip."""
    names: Mapping[str, str] = {}
    """Meanings of the letters on the page, such as `A`. The page shows them below the title. Other renderers omit them.
    """


def markdown(document: Document) -> str:
    """Return the document as Markdown, for example for the summary of a CI job.

    Paragraphs, findings, tables and cards are included. Charts and all other blocks are left out.
    """
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
    heading = " | ".join(_escaped(column.title) for column in table.columns)
    alignment = " | ".join("--:" if column.kind == "number" else ":--" for column in table.columns)
    lines = [heading, alignment]
    for row in table.rows:
        texts = [_noted("; ".join(cell.lines) or cell.text, cell.note) for cell in row.cells]
        lines.append(" | ".join(map(_escaped, texts)))
    return "\n".join(f"| {line} |" for line in lines)


def card_note(card: Card) -> str:
    """Return the note of a card. If the card has a second figure, the text begins with this figure."""
    return "; ".join(filter(None, (" ".join(card.second) if card.second else "", card.note)))


def _card(card: Card) -> str:
    value = _escaped(f"{card.value} {card.unit}".rstrip())
    return _noted(f"- {_escaped(card.label)}: **{value}**", _escaped(card_note(card)))


def _noted(text: str, note: str) -> str:
    return f"{text} ({note})" if note else text


def _escaped(text: str) -> str:
    """Return the text on one line, with Markdown and HTML markup escaped. Code between backticks is not escaped."""

    def escape(match: re.Match[str]) -> str:
        is_code = match[0].startswith("`")
        return match[0] if is_code else f"\\{match[0]}"

    line = re.sub(r"`[^`]*`|[\\*_\[\]<>#]", escape, text)
    return " ".join(line.split()).replace("|", "\\|")
