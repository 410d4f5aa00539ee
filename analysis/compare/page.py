"""A comparison on the report's page: its own section, above the charts in which both are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from analysis.compare.comparison import Comparison
from analysis.compare.text import headline, table
from analysis.report.document import Block, ChartRef, Document, Kind, Level, Paragraph, Section, TableCell
from analysis.report.format import count
from analysis.report.sections import ReportedRun, full
from analysis.report.tables import Cells
from analysis.report.tables import table as table_of

LEVELS: Mapping[str, Level] = {
    "worse": "error",
    "better": "ok",
    "cannot tell": "warning",
    "fail": "error",
    "pass": "ok",
}


def document(found: Comparison, runs: Sequence[ReportedRun]) -> Document:
    """The page of a comparison: its section, then what a page of these runs holds."""
    page = full(runs, [_section(found)])
    drawn = [
        {
            "figure": row.figure,
            "ratio": row.ratio,
            "low": row.ratio_ci95[0],
            "high": row.ratio_ci95[1],
            "outcome": row.verdict,
        }
        for row in found.rows
        if row.ratio is not None and row.ratio_ci95 is not None
    ]
    data = {**page.data, "comparison": {"rows": drawn, "margin": found.margin}}
    return replace(page, scripts=[*page.scripts, "compare.js"], data=data)


def _section(found: Comparison) -> Section:
    said = f"A is {found.name_a} ({count(found.runs_a, 'run')}), B is {found.name_b} ({count(found.runs_b, 'run')})."
    blocks: list[Block] = [Paragraph(headline(found)), Paragraph(f"{said} {found.method}")]
    if found.unequal:
        blocks.append(Paragraph("The work was not equal, which may be the reason for a difference below.", "warning"))
        heads: dict[str, Kind] = {"what": "head", "A": "text", "B": "text", "why it matters": "text"}
        unequal = [(each.what, each.a, each.b, each.why) for each in found.unequal]
        blocks.append(table_of("What was not equal", heads, unequal, several=True))
    blocks += [Paragraph(note) for note in found.notes]
    caption = (
        f"A point is B's figure by A's, the line its 95 % interval. Within the margin of {found.margin * 100:g} % "
        "there is no difference that matters; where the line crosses 100 %, chance alone may have made one."
    )
    blocks.append(ChartRef("comparison", "B as a share of A, with its interval", [caption]))
    heads = {"figure": "head", "B is": "text", "A": "number", "B": "number", "unit": "unit", "B / A": "number"}
    heads |= {"95 %": "number", "difference": "number", "p (Holm)": "number"}
    rows: list[Cells] = []
    for row in table(found.rows):
        outcome = TableCell(row["outcome"], note=row["more"], level=LEVELS.get(row["outcome"], "note"))
        figures = (row[name] for name in ("a", "b", "unit", "ratio", "interval", "difference", "p"))
        rows.append((TableCell(row["figure"], code=True), outcome, *figures))
    blocks.append(table_of("Every figure that was compared", heads, rows, several=True, id="compared"))
    if found.conditions:
        heads = {"condition": "head", "verdict": "text", "measured": "text"}
        judged = [
            (
                TableCell(each.condition, code=True),
                TableCell(each.verdict, level=LEVELS.get(each.verdict, "warning")),
                each.said,
            )
            for each in found.conditions
        ]
        blocks.append(table_of("What B must not be", heads, judged, several=True, id="conditions"))
    return Section("comparison", "B against A", blocks)
