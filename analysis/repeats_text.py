"""Repeats as text for the terminal: the figures with their interval between runs, which is the one that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis import words
from analysis.asked import asked
from analysis.report.document import Kind, Paragraph, Section, TableCell
from analysis.report.tables import table
from analysis.terminal import plain, printed

SHOWN = (
    *("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "complete", "goodput", "attainment"),
    *("ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "itl.p99", "e2e.p50", "e2e.p99", "normalised.mean"),
)
VALUES_MOST = 5
"""More runs than these have no room for each value in a line."""


def render(
    between: Mapping[str, Any], summaries: Sequence[words.Summary], *, width: int = 80, colour: bool = False
) -> str:
    """Lines of at most `width` characters; ANSI colours only if asked for."""
    return printed(_parts(between, summaries), width=width, colour=colour)


def rows(between: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per figure shown: its name, unit, mean, interval and each run's value, in words. Also the page's."""
    found = []
    for name in SHOWN:
        figure = between["figures"].get(name)
        if figure is None or figure["mean"] is None:
            continue
        factor, unit = words.unit_of(name, figure["mean"])
        cells = [words.significant(value * factor, 4) for value in figure["values"]]
        ends = figure["ci95"]
        interval = words.UNKNOWN if ends is None else " to ".join(words.significant(end * factor, 4) for end in ends)
        spread = None if figure["std"] is None or not figure["mean"] else figure["std"] / figure["mean"]
        found.append(
            {
                "name": name,
                "unit": unit,
                "mean": words.significant(figure["mean"] * factor, 4),
                "interval": interval,
                "spread": words.share(spread),
                "values": cells,
            }
        )
    return found


def section(between: Mapping[str, Any], place: int, of: str) -> Section:
    """What repeats say together, for the page. `place` counts its groups from 1; `of` names one of several."""
    text = (
        f"{between['runs']} runs of one plan, {between['order']}. {between['state_said']} The interval is of the mean "
        "over runs (Student's t): it is the one that counts, as the requests of one run share one server."
    )
    heads: dict[str, Kind] = {"figure": "head", "unit": "unit", "mean": "number", "95 % between runs": "number"}
    heads |= {"std / mean": "number", **{f"run {run}": "number" for run, _ in enumerate(between["seeds"], 1)}}
    cells = [
        (TableCell(row["name"], code=True), row["unit"], row["mean"], row["interval"], row["spread"], *row["values"])
        for row in rows(between)
    ]
    name = "between-runs" if place == 1 else f"between-runs-{place}"
    title = f"Between runs of {of}" if of else "Between runs"
    return Section(
        name, title, [Paragraph(text), table("Every figure, run by run", heads, cells, several=True, id="repeats")]
    )


def _parts(between: Mapping[str, Any], summaries: Sequence[words.Summary]) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    first = summaries[0]
    mark = words.simulated(first)
    title = Text(f"{mark}  ", style="bold yellow") if mark else Text()
    title.append(plain(words.who(first)), style="bold")
    title.append(plain(f"  {first['server']['model'] or ''}"))
    title.append(f"\n{asked(first)}, {between['runs']} times", style="dim")
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.title, table.title_justify, table.title_style = f"{mark}  between runs".strip(), "left", "dim"
    for head in ("", "unit", "mean", "95 % between runs"):
        table.add_column(head, justify="left" if head in ("", "unit") else "right", no_wrap=True)
    table.add_column("each run" if between["runs"] <= VALUES_MOST else "spread")
    for row in rows(between):
        last = ", ".join(row["values"]) if between["runs"] <= VALUES_MOST else row["spread"]
        table.add_row(row["name"], row["unit"], row["mean"], row["interval"], last)
    return [title, "", table, "", *_notes(between, summaries)]


def _notes(between: Mapping[str, Any], summaries: Sequence[words.Summary]) -> list[Any]:
    from rich.text import Text

    lines = [Text(f"The interval is of the mean over {words.count(between['runs'], 'run')} (Student's t).")]
    if between["runs"] == 1:
        lines = [Text("One run says nothing about the difference between runs.", style="yellow")]
    lines.append(Text(between["state_said"]))
    for place, summary in enumerate(summaries, 1):
        good = words.all_complete(summary) and summary["client"]["verdict"] == "ok"
        said = f"{words.endings(summary)} {words.believe(summary)}"
        lines.append(Text(plain(f"repeat {summary['run']['repeat'] or place}: {said}"), style="" if good else "red"))
        lines += [Text(plain(f"  {each}"), style="yellow") for each in words.warnings(summary)]
        for each in summary.get("objectives", ()):
            style = {"pass": "green", "fail": "bold red"}.get(each["verdict"], "yellow")
            lines.append(Text(plain(f"  {each['verdict']}: {words.objective(each)}"), style=style))
    return lines
