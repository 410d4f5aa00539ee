"""The index page of a folder of runs, and the list of these runs for the terminal.

Runs that belong together are a group: the repeats of a plan, the steps of a sweep, or the runs of a matrix. A group has
one row, which the reader can expand to the rows of its runs. Only repeats have joint figures, because all of them have
the same server and the same load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from loadgen.analysis.format import (
    DIFFERENT_SPEEDS,
    UNKNOWN,
    figure_title,
    page_mark,
    pluralise,
    scale_of,
    server_label,
    significant,
    simulated,
    speed_of,
    start_time,
    times_speed,
    unit_of,
)
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.repeats import describe_over_runs, figures_of, is_thin
from loadgen.analysis.report import (
    Block,
    ChartRef,
    Code,
    ColumnKind,
    Document,
    Finding,
    Findings,
    Level,
    Paragraph,
    Section,
    Switch,
    Table,
    TableCell,
    TableColumn,
    TableRow,
    findings,
    status,
)
from loadgen.analysis.report.tables import (
    OVERVIEW,
    OVERVIEW_FACTORS,
    number_columns,
    output_rate_cell,
    overview_cells,
    overview_columns,
    statistic_cell,
    table,
    validity_cell,
)
from loadgen.analysis.summary import Summary

MAX_INDEXED = 150
"""Maximum number of runs on the page, which keeps the page below 1.5 MB."""
INDEX_FIGURES = (
    *("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99"),
    *("itl.p99", "e2e.p50", "e2e.p99"),
)
INDEX_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
INDEX_STATISTICS = ("p50", "p90", "p95", "p99", "p99_9", "max")
COMPARE_HINT = "Select runs in the table. For intervals and a verdict, use `loadgen compare`, which reads the runs:"
POOLED_FACTORS = (1.0, 1.0, *(OVERVIEW_FACTORS[unit] for _, _, unit in OVERVIEW))
"""Factors from the values of the first overview cells (rates and latencies) to the shown numbers."""
TEXT_LENGTH = 44
"""Maximum length of a load in the table. Longer texts are abridged in the middle."""
GROUP_NOUNS = {"repeats": "repeat", "steps": "step", "cells": "run"}


class RunFolder(NamedTuple):
    """A folder of runs that belong together: a matrix, a sweep or repeats."""

    name: str
    path: str
    """Path for command lines."""
    link: str
    """Link from the index page to the page of the folder. Empty if there is no page."""
    kind: Literal["repeats", "steps", "cells"]
    """What the runs are: repeats of a plan, steps of a sweep, or runs in the cells of a matrix."""


class IndexedRun(NamedTuple):
    """A run on the index page of a folder.

    `path` is the path of the run as a user would write it on the command line. `link` is the link to the run's report.
    """

    name: str
    path: str
    link: str
    summary: Summary
    group: RunFolder | None = None
    """The folder of runs that belong together with this run. None for a single run."""


class IndexEntry(NamedTuple):
    """A top-level row of the index: a single run, or a group of runs. The runs of a group are sorted newest first."""

    runs: list[IndexedRun]
    group: RunFolder | None


def index_document(runs: Sequence[IndexedRun], title: str, unread: Sequence[str]) -> Document:
    """Return the index page of a folder. It lists all runs, compares selected runs, and shows one figure over time.

    Runs are listed newest first. `unread` contains warnings about runs that could not be read.
    """
    entries = _newest(_entries(runs))
    shown = [run for entry in entries for run in entry.runs]
    warnings = list(unread)
    if len(runs) > len(shown):
        warnings.insert(
            0, f"Only the newest {len(shown)} of {len(runs):,} runs are shown. Pass a subfolder to see other runs."
        )
    if len({speed_of(run.summary) for run in shown}) > 1:
        warnings.append(DIFFERENT_SPEEDS)
    blocks: list[Block] = [Findings([Finding("runs", "warning", text) for text in warnings])] if warnings else []
    selectable = _selectable(entries)
    blocks.append(_table(entries, {item.key: index for index, item in enumerate(selectable)}))
    labels = [label for label, _ in Counter(run.summary.run.label for run in shown).most_common()]
    trend = [
        Switch("label", "Label", [(label, label or "none") for label in labels], "select"),
        Switch("figure", "Figure", [(name, figure_title(name)) for name in INDEX_FIGURES], "select"),
    ]
    selected: list[Block] = [
        ChartRef("picked", "Percentiles", [], "wide", "none"),
        Paragraph(COMPARE_HINT),
        Code("", "Command", copy=True),
    ]
    caption = "Hollow points are invalid runs. A point of repeats is their mean."
    over_time = ChartRef("trend", "One figure over runs of one label", [caption], "wide", "none")
    latency = Switch("metric", "Latency", [(name, METRICS[name].short) for name in INDEX_LATENCIES])
    sections = [
        Section("answer", "Runs", blocks, switches=[Switch("filter", "Filter", kind="search")]),
        Section("compare", "Compare", selected, switches=[latency]),
        Section("over", "Trend", [over_time], switches=trend),
    ]
    mark = page_mark(run.summary for run in shown)
    data = {"runs": [], "index": _index_data(selectable)}
    return Document(
        "loadgen report",
        title,
        sections,
        mark=mark,
        scripts=["index.js"],
        data=data,
        version=shown[0].summary.run.version,
        chips=status.run_chips([run.summary for run in shown]),
    )


def list_document(runs: Sequence[IndexedRun], title: str) -> Document:
    """Return the list of runs as a document for the terminal, newest first."""
    rows = []
    marks_differ = len({simulated(run.summary) for run in runs}) > 1
    for run in sorted(runs, key=_started_at, reverse=True):
        summary = run.summary
        rate, ttft = output_rate_cell(summary), summary.latency.ttft.p50
        name = TableCell(run.name, note=simulated(summary) if marks_differ else "")
        rows.append((name, rate, significant(ttft, 4), validity_cell(summary)))
    heads: dict[str, ColumnKind] = {"run": "head", **number_columns("tokens/s", "TTFT p50, s")}
    return Document(
        "loadgen report", title, [Section("", "", [table("Runs", heads | {"validity": "text"}, rows, several=True)])]
    )


def _started_at(run: IndexedRun) -> str:
    return run.summary.run.started_at


def _entries(runs: Sequence[IndexedRun]) -> list[IndexEntry]:
    """Return the single runs and the groups of runs, newest first.

    If the runs of a folder of repeats differ in their servers or loads, they do not form a group. They are returned as
    single runs.
    """
    result: list[IndexEntry] = []
    groups: dict[str, IndexEntry] = {}
    mixed = _mixed_folders(runs)
    for run in sorted(runs, key=_started_at, reverse=True):
        if run.group is None or run.group.path in mixed:
            result.append(IndexEntry([run._replace(group=None)], None))
        elif run.group.path in groups:
            groups[run.group.path].runs.append(run)
        else:
            groups[run.group.path] = IndexEntry([run], run.group)
            result.append(groups[run.group.path])
    return result


def _mixed_folders(runs: Sequence[IndexedRun]) -> set[str]:
    """Return the paths of the folders of repeats whose runs differ in server, model, speed, load or label."""
    experiments: dict[str, set[tuple[object, ...]]] = {}
    for run in runs:
        if run.group is not None and run.group.kind == "repeats":
            summary = run.summary
            plan = (summary.run.load.text, summary.run.n, summary.run.asked_s, summary.run.workload, summary.run.label)
            lengths = (summary.run.input_tokens, summary.run.output_tokens)
            server = (_server(summary), summary.server.model, simulated(summary))
            experiments.setdefault(run.group.path, set()).add((*plan, *lengths, *server))
    return {path for path, different in experiments.items() if len(different) > 1}


def _newest(entries: Sequence[IndexEntry]) -> list[IndexEntry]:
    """Return the newest entries, with at most MAX_INDEXED runs.

    The newest entry is always included. If this entry has more than MAX_INDEXED runs, its oldest runs are left out."""
    result: list[IndexEntry] = []
    number = 0
    for entry in entries:
        number += len(entry.runs)
        if result and number > MAX_INDEXED:
            break
        result.append(IndexEntry(entry.runs[:MAX_INDEXED], entry.group))
    return result


def _table(entries: Sequence[IndexEntry], selectable: dict[str, int]) -> Table:
    """Return the table of all runs, in which some rows can be selected for comparison.

    `selectable` maps the path of each selectable row to an index in the data of the page. The key of such a row, for
    example `entry-3`, contains this index, so that the page's script finds the data of the row.
    """
    texts: dict[str, ColumnKind] = {"objectives": "text", "server": "text", "load": "text", "label": "text"}
    texts["began, UTC"] = "text"
    heads: dict[str, ColumnKind] = {"run": "head", **overview_columns(), **texts}
    marks_differ = len({simulated(run.summary) for entry in entries for run in entry.runs}) > 1
    rows: list[TableRow] = []

    def add(path: str, parent: str, cells: Iterable[TableCell]) -> str:
        key = f"{'entry' if path in selectable else 'group'}-{selectable.get(path, len(rows))}"
        rows.append(TableRow(list(cells), key, parent=parent))
        return key

    for entry in entries:
        parent = ""
        if entry.group is not None:
            parent = add(entry.group.path, "", _group_cells(entry.runs, entry.group, marks_differ=marks_differ))
        for run in entry.runs:
            add(run.path, parent, _run_cells(run, marks_differ=marks_differ))
    columns = [TableColumn(title, kind) for title, kind in heads.items()]
    has_thin = any(cell.thin for row in rows for cell in row.cells)
    notes = ["* too few independent samples for this percentile, in at least one run."] if has_thin else []
    return Table("All runs", columns, rows, "overview index", notes)


def _run_cells(run: IndexedRun, *, marks_differ: bool) -> list[TableCell]:
    summary = run.summary
    mark = simulated(summary) if marks_differ else ""
    name = run.name
    if run.group is not None:
        name = name.removeprefix(f"{run.group.name}/")
    began = TableCell(start_time(summary).removesuffix(" UTC"))
    texts = [
        _objectives_cell([summary]),
        _server_cell(summary),
        _load_cell(summary),
        TableCell(summary.run.label),
        began,
    ]
    return [TableCell(name, link=run.link, mark=mark), *overview_cells(summary), *texts]


def _group_cells(runs: Sequence[IndexedRun], group: RunFolder, *, marks_differ: bool) -> list[TableCell]:
    """Return the cells of the table row for a group of runs, such as the repeats of a plan.

    The figures of repeats are the means over the runs. In other groups, the runs have different loads or servers, so
    the cells of the figures are empty. With `marks_differ`, the first cell contains the mark of the runs, such as
    SIMULATED.
    """
    summaries = [run.summary for run in runs]
    by_run = [overview_cells(summary) for summary in summaries]
    figures = []
    for index, factor in enumerate(POOLED_FACTORS):
        values = [cells[index].value for cells in by_run]
        known = [value for value in values if isinstance(value, float | int)]
        thin = any(cells[index].thin for cells in by_run)
        figures.append(_mean_cell(known, factor, thin=thin) if group.kind == "repeats" else TableCell(""))
    complete = sum(summary.requests.complete for summary in summaries)
    planned = sum(summary.requests.planned for summary in summaries)
    verdicts = [(cells[-1].text, cells[-1].level) for cells in by_run]
    note = pluralise(len(runs), GROUP_NOUNS[group.kind])
    if group.kind == "cells":
        note = f"matrix, {note}"
    mark = page_mark(summaries) if marks_differ else ""
    labels = {summary.run.label for summary in summaries}
    return [
        TableCell(group.name, link=group.link, mark=mark, note=note),
        *figures,
        TableCell(f"{complete:,} of {planned:,}", complete),
        _worst_verdict(verdicts),
        _objectives_cell(summaries),
        _common_cell([_server_cell(summary) for summary in summaries], "servers"),
        _common_cell([_load_cell(summary) for summary in summaries], "loads"),
        TableCell(labels.pop() if len(labels) == 1 else ""),
        TableCell(start_time(summaries[0]).removesuffix(" UTC")),
    ]


def _mean_cell(values: Sequence[float], factor: float, *, thin: bool) -> TableCell:
    """Return the table cell with the mean of a figure over repeats, multiplied by `factor`.

    `thin` is true if the figure is a percentile with too few samples. The cell is then marked with an asterisk.
    """
    if not values:
        return TableCell(UNKNOWN)
    average = sum(values) / len(values)
    return TableCell(significant(average * factor, 4) + ("*" if thin else ""), average, thin=thin)


def _objectives_cell(summaries: Sequence[Summary]) -> TableCell:
    """Return the cell that says how many objectives of these runs are met, and which one is missed by the largest
    factor. The text is empty if the runs have no objectives."""
    judged = [objective for summary in summaries for objective in summary.objectives]
    if not judged:
        return TableCell("")
    met = sum(objective.verdict == "pass" for objective in judged)
    failed = status.failed_objectives(judged)
    unclear = any(objective.verdict == "inconclusive" for objective in judged)
    level: Level = "error" if failed else "warning" if unclear else "ok"
    note = status.failure_text(failed[0]).replace("`", "") if failed else ""
    return TableCell(f"{met:,} of {len(judged):,} met", met / len(judged), note, level)


def _worst_verdict(verdicts: Sequence[tuple[str, Level | Literal[""]]]) -> TableCell:
    """Return the cell with the worst verdict of a group of runs.

    `verdicts` contains the text and the level of each run's verdict. If only some of the runs have the worst verdict,
    the cell also states their number.
    """
    text, level = max(verdicts, key=lambda verdict: ("ok", "note", "warning", "error").index(verdict[1] or "ok"))
    number = sum(other == text for other, _ in verdicts)
    note = "" if number == len(verdicts) else f"{number} of {len(verdicts)} runs"
    return TableCell(text, level=level, note=note)


def _common_cell(cells: Sequence[TableCell], noun: str) -> TableCell:
    """Return one cell for a group of runs. `cells` contains the cell of each run.

    If all these cells are equal, return the first one. Otherwise return a cell that states how many different cells
    there are, such as `3 loads` if `noun` is `loads`.
    """
    different = {(cell.full_text or cell.text, cell.note) for cell in cells}
    return cells[0] if len(different) == 1 else TableCell(f"{len(different)} {noun}")


def _server_cell(summary: Summary) -> TableCell:
    return TableCell(_server(summary), note=summary.server.model or "")


def _load_cell(summary: Summary) -> TableCell:
    """Return the cell with the load of a run. Long texts, such as paths, are abridged in the middle."""
    run = summary.run
    requests = pluralise(run.n or summary.requests.sent, "request")
    note = f"{requests}, {run.input_tokens} in, {run.output_tokens} out"
    short, short_note = _abridged(run.load.text), _abridged(note)
    full_text = "" if (short, short_note) == (run.load.text, note) else f"{run.load.text}: {note}"
    return TableCell(short, note=short_note, full_text=full_text)


def _abridged(text: str) -> str:
    if len(text) <= TEXT_LENGTH:
        return text
    half = (TEXT_LENGTH - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _server(summary: Summary) -> str:
    """Return the server's label, followed by the clock speed of a simulated server."""
    return f"{server_label(summary)}{times_speed(speed_of(summary))}"


class SelectableRow(NamedTuple):
    """A row that the reader can select and compare: a run, or all repeats of a plan together."""

    key: str
    """Path for command lines, which is different for every row."""
    name: str
    summaries: Sequence[Summary]
    """The run, or the repeats, newest first."""
    top: bool
    """True for a row without a parent. The trend shows other rows only if their parent cannot be selected."""


def _selectable(entries: Sequence[IndexEntry]) -> list[SelectableRow]:
    """Return the rows that can be selected, in the order of the page."""
    result = []
    for entry in entries:
        are_repeats = entry.group is not None and entry.group.kind == "repeats"
        if entry.group is not None and are_repeats:
            summaries = [run.summary for run in entry.runs]
            result.append(SelectableRow(entry.group.path, entry.group.name, summaries, top=True))
        result += [SelectableRow(run.path, run.name, [run.summary], top=not are_repeats) for run in entry.runs]
    return result


def _index_data(rows: Sequence[SelectableRow]) -> dict[str, Any]:
    """Return the input of the index page's script: the runs, and the figures and latencies that it can draw."""
    figures, latencies = [], []
    figures_of_rows = [_mean_figures(row.summaries) for row in rows]
    for name in INDEX_FIGURES:
        known = [values[name] for values in figures_of_rows]
        factor, unit = unit_of(name, max((value for value in known if value), default=None))
        figures.append({"name": name, "title": figure_title(name), "factor": factor, "unit": unit})
    for name in INDEX_LATENCIES:
        medians = [summary.latencies[name].p50 or 0 for row in rows for summary in row.summaries]
        factor, unit = scale_of(max(medians, default=None))
        latencies.append({"name": name, "title": METRICS[name].short, "factor": factor, "unit": unit})
    points = [name.replace("_", ".") for name in INDEX_STATISTICS]
    entries = [_index_entry(row, values) for row, values in zip(rows, figures_of_rows, strict=True)]
    return {"runs": entries, "figures": figures, "latencies": latencies, "points": points}


def _mean_figures(summaries: Sequence[Summary]) -> dict[str, float | None]:
    """Return the mean of each figure over the runs. A figure is None if a run does not have it."""
    figures = [figures_of(summary, thin=True) for summary in summaries]
    return {name: describe_over_runs([values[name] for values in figures]).mean for name in INDEX_FIGURES}


def _index_entry(row: SelectableRow, values: dict[str, float | None]) -> dict[str, Any]:
    """Return the data of one selectable row, as the script of the index page needs it.

    `values` contains the mean of each figure over the runs of the row.
    """
    first = row.summaries[0]
    percentiles = {}
    for latency in INDEX_LATENCIES:
        means = []
        for name in INDEX_STATISTICS:
            cells = [statistic_cell(summary.latencies[latency], name, 1, bare=True) for summary in row.summaries]
            known = [cell.value for cell in cells if isinstance(cell.value, float | int)]
            means.append(describe_over_runs(known).mean if len(known) == len(cells) else None)
        percentiles[latency] = _rounded(means, 5)
    verdicts = [findings.verdict(summary, findings.findings(summary)).id for summary in row.summaries]
    return {
        "name": row.name,
        "path": row.key,
        "label": first.run.label,
        "server": _server(first),
        "group": f"{_server(first)}, {first.run.label}",
        "at": first.run.started_at,
        "top": row.top,
        "valid": not any(verdict.startswith("invalid") for verdict in verdicts),
        "thin": [name for name in INDEX_FIGURES if any(is_thin(summary, name) for summary in row.summaries)],
        "figures": dict(zip(values, _rounded(values.values(), 6), strict=True)),
        "percentiles": percentiles,
    }


def _rounded(values: Iterable[float | None], digits: int) -> list[float | None]:
    """Round the values to `digits` significant digits, which keeps the page small. None stays None."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]
