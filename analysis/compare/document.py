"""What there is to say of a comparison: one section for a page, and one document for the terminal and for Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from analysis.compare import Comparison
from analysis.compare.figures import ComparedFigure
from analysis.report import (
    Block,
    ChartRef,
    Document,
    Finding,
    Findings,
    Kind,
    Level,
    Paragraph,
    Section,
    Table,
    TableCell,
)
from analysis.report.format import UNKNOWN, count, share, significant, unit_of
from analysis.report.sections import ReportedRun, full
from analysis.report.tables import LEVELS as GATE_LEVELS
from analysis.report.tables import Cells, table

LEVELS: dict[str, Level] = {"better": "ok", "worse": "error", "no difference": "note", "cannot tell": "warning"}
CAPTION = (
    "A point is B's figure by A's, the line its 95 % interval. Where the line lies within the shaded margin of "
    "{:g} %, there is no difference that matters; where it crosses 100 %, chance alone may have made one."
)


def document(found: Comparison, *, brief: bool) -> Document:
    """`brief` is for the terminal: fewer columns and words."""
    title = f"{found.name_b} (B) against {found.name_a} (A)"
    return Document("loadgen compare", title, [replace(section(found, brief=brief), title="")], mark=found.mark)


def page(found: Comparison, runs: Sequence[ReportedRun]) -> Document:
    """The comparison above what a page of these runs holds."""
    whole = full(runs, [section(found)])
    drawn = [
        {"figure": row.figure, "ratio": row.ratio, "low": ends[0], "high": ends[1], "outcome": row.verdict}
        for row in found.rows
        if row.ratio is not None and (ends := row.ratio_ci95)
    ]
    data = {**whole.data, "comparison": {"rows": drawn, "margin": found.margin}}
    title, scripts = f"{found.name_b} (B) against {found.name_a} (A)", [*whole.scripts, "compare.js"]
    return replace(whole, kind="loadgen compare", title=title, subtitle=whole.title, scripts=scripts, data=data)


def section(found: Comparison, *, brief: bool = False) -> Section:
    """Verdicts, figures and what to know of them; a chart where there is room for one."""
    runs = f"A: {found.name_a} ({count(found.runs_a, 'run')}). B: {found.name_b} ({count(found.runs_b, 'run')})."
    verdicts = Counter(row.verdict for row in found.rows)
    headline = (
        f"Of {count(len(found.rows), 'figure')} of B: {verdicts['better']} better, {verdicts['worse']} worse, "
        f"{verdicts['no difference']} without a difference larger than {share(found.margin)}, "
        f"{verdicts['cannot tell']} inconclusive."
    )
    blocks: list[Block] = [Paragraph(headline), Paragraph(runs)]
    if found.unequal:
        text = "The work was not equal. What differs may be the reason for a difference below:"
        unequal = Findings([Finding(each.what, "error", each.sentence) for each in found.unequal])
        blocks += [Paragraph(text, "error"), unequal]
    if not brief:
        caption = CAPTION.format(found.margin * 100)
        blocks.append(ChartRef("comparison", "B as a share of A, with its interval", [caption], zoom="none"))
    blocks += [figures_table(found, brief=brief), Paragraph(found.method, "note")]
    blocks += [Paragraph(note, "warning") for note in found.notes]
    if found.gates:
        gates = [Finding(each.condition, GATE_LEVELS[each.verdict], each.sentence) for each in found.gates]
        blocks.append(Findings(gates))
    return Section("comparison", "B against A", blocks)


def figures_table(found: Comparison, *, brief: bool) -> Table:
    """One row per figure. Briefly, those that could not be tested stand below it."""
    heads: dict[str, Kind] = {"figure": "head", "A": "number", "B": "number", "unit": "unit"}
    heads |= dict.fromkeys(("B / A", "95 %") if brief else ("B / A", "95 %", "difference", "p (Holm)"), "number")
    rows: list[Cells] = []
    notes = []
    for row in found.rows:
        if brief and row.why:
            notes.append(f"{row.figure}: {sentence(row)}")
            continue
        verdict = TableCell(_verdict(row, brief=brief), row.verdict, "" if brief else _more(row), LEVELS[row.verdict])
        rows.append((TableCell(row.figure, code=True), *_texts(row)[: -2 if brief else None], verdict))
    if brief and any(row.needs_more for row in found.rows):
        notes.append("inconclusive, N more: about so many more in each of A and B would tell.")
    return table("Figures compared", heads | {"B is": "text"}, rows, several=True, id="compared", notes=notes)


def sentence(row: ComparedFigure) -> str:
    """A verdict with what goes with it."""
    return f"{_verdict(row)} ({more})" if (more := _more(row)) else _verdict(row)


def _verdict(row: ComparedFigure, *, brief: bool = False) -> str:
    text = "inconclusive" if row.verdict == "cannot tell" else row.verdict
    if brief and row.verdict == "no difference":
        return f"{text} > {share(row.no_larger_than or 0)}"
    return f"{text}, {row.needs_more:,} more" if brief and row.needs_more else text


def _more(row: ComparedFigure) -> str:
    """What goes with a verdict: how large a difference there may be, or what would help to tell."""
    if row.verdict == "no difference":
        points = " points" if row.ratio is None and row.unit == "share" else ""
        return f"at most {share(row.no_larger_than or 0)}{points}"
    if row.verdict != "cannot tell" or row.why:
        return row.why
    if row.needs_more is None:
        other = "" if row.more_of == "runs" else ", repeats may"
        return f"no practical number of {row.more_of} would help{other}"
    return f"needs about {count(row.needs_more, f'more {row.more_of[:-1]}')} in each"


def _texts(row: ComparedFigure) -> list[str]:
    """A, B, unit, ratio, its interval, difference and p-value; of a share its difference stands for the ratio."""
    if row.a is None or row.b is None:
        return [UNKNOWN, UNKNOWN, "", *[UNKNOWN] * 4]
    factor, unit = (100.0, "%") if row.unit == "share" else unit_of(row.figure, row.a)
    ratio = interval = UNKNOWN
    if row.ratio is not None and row.ratio_ci95:
        ratio, interval = f"{row.ratio:.3f}", " to ".join(f"{end:.3f}" for end in row.ratio_ci95)
    elif row.difference is not None and row.difference_ci95:
        ratio = f"{row.difference * factor:+.3g}"
        interval = " to ".join(f"{end * factor:+.3g}" for end in row.difference_ci95)
    p = row.adjusted_p
    p_text = UNKNOWN if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
    difference = f"{(row.difference or 0) * factor:+.4g} {unit}"
    return [significant(row.a * factor, 4), significant(row.b * factor, 4), unit, ratio, interval, difference, p_text]
