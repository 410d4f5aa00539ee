"""A comparison as text for the terminal and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis import words
from analysis.compare.comparison import Comparison
from analysis.compare.verdicts import Row
from analysis.terminal import plain, printed

STYLES = {"better": "green", "worse": "bold red", "no difference": "", "cannot tell": "yellow"}
OUTCOMES = {"pass": "green", "fail": "bold red", "cannot tell": "yellow"}
HEADS = ("figure", "A", "B", "unit", "B / A", "95 %", "B is")


def render(found: Comparison, *, width: int = 80, colour: bool = False) -> str:
    """Lines of at most `width` characters; ANSI colours only if asked for."""
    return printed(_parts(found), width=width, colour=colour)


def markdown(found: Comparison) -> str:
    """The same as Markdown; text that came from outside cannot leave its place."""
    mark = f"**{found.mark}** " if found.mark else ""
    lines = [f"### {mark}{_cell(found.name_b)} (B) against {_cell(found.name_a)} (A)", "", headline(found), ""]
    if found.unequal:
        lines += ["**The work was not equal:**", ""]
        lines += [f"- {_cell(each.what)}: {_cell(each.a)} in A, {_cell(each.b)} in B" for each in found.unequal]
        lines.append("")
    lines += [f"| {' | '.join(HEADS)} |", "| --- | ---: | ---: | --- | ---: | ---: | --- |"]
    for row in table(found.rows):
        verdict = f"**{row['verdict']}**" if row["outcome"] == "worse" else row["verdict"]
        cells = (f"`{row['figure']}`", row["a"], row["b"], row["unit"], row["ratio"], row["interval"], verdict)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {each.verdict}: `{each.condition}`: {each.said}" for each in found.conditions)]
    return "\n".join([*lines, "", *(f"{_cell(note)}  " for note in (found.method, *found.notes))]) + "\n"


def headline(found: Comparison) -> str:
    """How many figures are better, worse, the same and open, in one sentence."""
    counts = {outcome: sum(row.verdict == outcome for row in found.rows) for outcome in STYLES}
    parts = [
        f"{counts['better']} better",
        f"{counts['worse']} worse",
        f"{counts['no difference']} without a difference larger than {_percent(found.margin)}",
        f"{counts['cannot tell']} that cannot be told",
    ]
    return f"Of {words.count(len(found.rows), 'figure')} of B: {', '.join(parts)}."


def table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """One row of cells per figure; also the page's."""
    return [
        {"figure": row.figure, "outcome": row.verdict, "verdict": said, "p": _p(row)}
        | {"more": said.removeprefix(row.verdict).strip(" ()")}
        | _cells(row)
        for row, said in ((row, verdict_said(row)) for row in rows)
    ]


def verdict_said(row: Row) -> str:
    """The verdict in words, with what would help to tell."""
    if row.verdict == "no difference":
        return f"no difference larger than {_percent(row.no_larger_than or 0)}{_points(row)}"
    if row.verdict != "cannot tell":
        return row.verdict
    if row.why:
        return f"cannot tell ({row.why})"
    if row.needs_more is None:
        other = "" if row.more_of == "runs" else ", repeats may"
        return f"cannot tell (no practical number of {row.more_of} would{other})"
    return f"cannot tell (needs about {words.count(row.needs_more, f'more {row.more_of[:-1]}')} in each)"


def _short(row: Row) -> str:
    """The verdict in as few words as a table has room for."""
    if row.verdict == "no difference":
        return f"no difference > {_percent(row.no_larger_than or 0)}"
    if row.verdict != "cannot tell" or row.needs_more is None:
        return row.verdict
    return f"cannot tell, {row.needs_more:,} more"


def _cells(row: Row) -> dict[str, str]:
    if row.a is None or row.b is None:
        return dict.fromkeys(("a", "b", "ratio", "interval", "difference"), words.UNKNOWN) | {"unit": ""}
    factor, unit = (100.0, "%") if row.unit == "share" else words.unit_of(row.figure, row.a)
    interval, shown = row.ratio_ci95, words.UNKNOWN if row.ratio is None else f"{row.ratio:.3f}"
    ends = words.UNKNOWN if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
    if row.ratio is None and row.difference is not None and row.difference_ci95:
        shown = f"{row.difference * factor:+.3g}"
        ends = " to ".join(f"{end * factor:+.3g}" for end in row.difference_ci95)
    return {
        "a": words.significant(row.a * factor, 4),
        "b": words.significant(row.b * factor, 4),
        "unit": unit,
        "ratio": shown,
        "interval": ends,
        "difference": f"{(row.difference or 0) * factor:+.4g} {unit}",
    }


def _parts(found: Comparison) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    first = Text(plain(f"A: {found.name_a} ({words.count(found.runs_a, 'run')})"), style="bold")
    title = [Text(found.mark, style="bold yellow"), first] if found.mark else [first]
    second = Text(plain(f"B: {found.name_b} ({words.count(found.runs_b, 'run')})"), style="bold")
    table_ = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for head in HEADS:
        right = head in ("A", "B", "B / A", "95 %")
        table_.add_column(head, justify="right" if right else "left", no_wrap=head != "B is", overflow="fold")
    tested = [row for row in found.rows if row.p_value is not None]
    for row, cells in zip(tested, table(tested), strict=True):
        said = Text(_short(row), style=STYLES[row.verdict])
        table_.add_row(*(cells[name] for name in ("figure", "a", "b", "unit", "ratio", "interval")), said)
    untested = [Text(plain(f"{row.figure}: {verdict_said(row)}"), style="dim") for row in found.rows if row.why]
    lines: list[Any] = [
        *title,
        second,
        "",
        *_unequal(found),
        table_,
        *untested,
        "",
        Text(headline(found), style="bold"),
    ]
    if any(row.needs_more for row in found.rows):
        lines.append(Text("cannot tell, N more: about so many more in each of A and B would tell.", style="dim"))
    lines += [Text(found.method, style="dim"), *(Text(plain(note), style="yellow") for note in found.notes)]
    for each in found.conditions:
        lines.append(Text(plain(f"{each.verdict}: {each.condition}: {each.said}"), style=OUTCOMES[each.verdict]))
    return lines


def _unequal(found: Comparison) -> list[Any]:
    from rich.text import Text

    if not found.unequal:
        return []
    lines = [Text("The work was not equal:", style="bold red")]
    said = (f"  {each.what}: {each.a} in A, {each.b} in B ({each.why})" for each in found.unequal)
    return [*lines, *(Text(plain(line), style="red") for line in said), ""]


def _points(row: Row) -> str:
    """A difference of shares is one of percentage points."""
    return " points" if row.ratio is None and row.unit == "share" else ""


def _percent(share: float) -> str:
    return f"{words.significant(share * 100, 2)} %"


def _p(row: Row) -> str:
    if row.adjusted_p is None:
        return words.UNKNOWN
    return "< 0.001" if row.adjusted_p < 0.001 else f"{row.adjusted_p:.3f}"


def _cell(text: str) -> str:
    """Without what Markdown or HTML would take for its own."""
    return "".join(f"\\{each}" if each in "\\|*_`[]<>#" else each for each in plain(text))
