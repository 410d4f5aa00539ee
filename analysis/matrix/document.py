"""What there is to say of a matrix, for the terminal and for a page of its own: a matrix has dozens of runs, and what a
run's page says of each is in that run's own report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, product
from typing import Any, Literal

import msgspec
import numpy as np

from loadgen.analysis import report as doc
from loadgen.analysis.format import (
    UNKNOWN,
    byte_size,
    duration,
    figure_title,
    percent,
    pluralise,
    scale_of,
    significant,
    times_speed,
    unit_of,
)
from loadgen.analysis.frame import Floats
from loadgen.analysis.matrix import (
    COMPARED,
    SAMPLED,
    STATES,
    CellDifference,
    CellKvCache,
    CellName,
    CellRunData,
    CellSummary,
    MatrixSummary,
)
from loadgen.analysis.matrix.sweeps import sweep_findings, sweep_rows
from loadgen.analysis.metrics import METRICS, metric_by_key
from loadgen.analysis.report import (
    Block,
    ChartRef,
    ColumnKind,
    Document,
    Finding,
    Paragraph,
    Section,
    TableCell,
    findings,
)
from loadgen.analysis.report.chart_data import distribution
from loadgen.analysis.report.charts import DASHES, PALETTE
from loadgen.analysis.report.tables import Cells, number_columns, table
from loadgen.analysis.summary import Summary

POINTS_OF_A_RUN = 120
SHOWN = ("output_tokens_per_s", "requests_per_s", "ttft.p50", "ttft.p99", "tpot.p50", "e2e.p50", "e2e.p99")
"""Figures that the page's table of cells has columns for; matrix.json has all."""
MAIN = "output_tokens_per_s"
BARS = "Bars are means over the repeats, dots the repeats themselves, lines the 95 % interval of the mean."
CURVES = """Share of complete requests at or below each latency, all repeats of a cell together; thin lines are single
repeats. Where they lie apart, runs differ more than requests do."""
RATIOS = """Two servers on one platform, or one server on two: the ratio of their figures and its 95 % interval (Welch's
t; runs of one server are taken to differ by at most 10 %). ▲ better or ▼ worse where the interval does not hold 1; of
twenty comparisons of equals about one would by chance."""
MEANS = """Best output throughput first. Means over the valid repeats; below each the 95 % interval of the mean, or all
values where it would say nothing. ▲ better than all others on
its platform, ▼ worse than one of them, by more than chance."""
MEMORY = """Engines take most of a card's memory for their KV cache as they start: the share of the KV cache in use says
more. Before and after the load: means over the repeats; peaks: the largest of them."""
MARKS: Mapping[str | None, tuple[doc.Level | Literal[""], str]]
MARKS = {"better": ("ok", " ▲"), "worse": ("error", " ▼"), None: ("", "")}
ONE_START = """One start per server: its repeats followed one another, so a drift over time, or what differs from start
to start, is not in the intervals. More starts (starts in the plan) would show it."""
ROUNDS = """The starts went in rounds, each with every server once in random order, so whatever drifted over time fell
on all of them alike, and what differs from start to start is in the intervals."""
SWEPT_ONCE = "Each server was started once per host and model, and swept on that start."
COLD = "The first run after a start is cold: the server has served nothing but the warm-up requests."
PUBLISHED = "Not measured here: other hardware, other versions, and not always known settings."


def one_line_summary(summary: Summary) -> str:
    """What one run gave, in a few words."""
    ttft, e2e = duration(summary.latency.ttft.p50), duration(summary.latency.e2e.p50)
    text = f"{significant(summary.throughput.output_tokens_per_s, 4)} tokens/s, TTFT {ttft}, E2E {e2e}"
    if not summary.requests.all_complete:
        text += f", {findings.outcome_sentence(summary).rstrip('.')}"
    return text if summary.client.ok else f"{text}, possible client bottleneck"


class MatrixReport:
    """A matrix with the names and colours under which it is shown."""

    def __init__(self, found: MatrixSummary) -> None:
        self.found = found
        self.servers = {server["name"]: server["title"] for server in found.servers}
        self.platforms = {host["name"]: host["title"] for host in found.hosts}
        colours = dict(zip(dict.fromkeys(server["server"] for server in found.servers), cycle(PALETTE)))
        self.colours = {server["name"]: colours[server["server"]] for server in found.servers}
        self.cells = [cell for cell in found.cells if cell.runs]
        self.groups = list(dict.fromkeys((cell.model, cell.workload) for cell in self.cells))
        """Every model and workload of which a cell was measured: what is drawn together."""
        at = times_speed(*(cell.speed or 1.0 for cell in found.cells if cell.simulated))
        swept = next((sweep.result.mark for sweep in found.sweeps if sweep.result and sweep.result.mark), "")
        self.mark = (f"SIMULATED{at}" if found.cells else swept) if found.simulated else ""
        self.between = {(difference.a, difference.b, difference.figure): difference for difference in found.differences}

    def brief_document(self) -> Document:
        """For the terminal: one table, what leads, what failed, and whether it is valid."""
        ranking = [Paragraph(f"{lead.label}: {lead.note} {figures}") for lead, figures in self._ranking()]
        figures = [self._figures(COMPARED)] if self.found.cells else []
        blocks: list[Block] = [*figures, *self._sweeps(), *ranking, doc.Findings(self.findings())]
        return self._document([Section("answer", "", blocks)])

    def findings(self) -> list[Finding]:
        """What failed, and whether the figures are valid."""
        failures = [
            Finding(
                "failure", "error", f"failed: {self._name(failure.cell)}, repeat {failure.repeat}: {failure.reason}"
            )
            for failure in self.found.failures
        ]
        return [*failures, *self._findings()]

    def page_document(self, measured: Sequence[CellRunData]) -> Document:
        """For the page; `measured` are the finished runs."""
        figures = doc.Switch("figure", "Figure", [(name, figure_title(name)) for name in SHOWN], "select")
        latency = doc.Switch("metric", "Latency", [(name, METRICS[name].short) for name in SAMPLED])
        axis = doc.Switch("axis", "Axis", (("linear", "linear"), ("log", "logarithmic")))
        leads = [lead for lead, _ in self._ranking()]
        answer: list[Block] = [
            doc.Cards(leads),
            doc.Findings(self._findings()),
            Paragraph(f"{self._equal_work()} {BARS}".strip()),
        ]
        curves: list[Block] = [Paragraph(CURVES)]
        for index, group in enumerate(self.groups):
            answer.append(ChartRef(f"bars-{index}", self._group_title(group), [], "wide", "none"))
            curves += [ChartRef(chart["id"], chart["title"], chart["text"]) for chart in self._charts(group)]
        if not self.groups:
            answer.append(Paragraph("Nothing was measured yet."))
        order = [
            Section("failures", "Failures", self._failures()),
            Section("order", "How it was measured", self._order(), "Order"),
        ]
        swept = [Section("sweeps", "Sweeps", self._sweeps(), "Sweeps")] if self.found.sweeps else []
        if not self.found.cells:
            answer_alone = Section("answer", "Answer", [doc.Findings(self._findings())])
            return self._document([answer_alone, *swept, *order], {"runs": []})
        quoted = [
            (reference["of"], "", f"{reference['says']} {reference['source']}") for reference in self.found.references
        ]
        published: list[Block] = [Paragraph(PUBLISHED), doc.Definitions(quoted)]
        sections = [
            Section("answer", "Throughput of each server on each platform", answer, "Throughput", [figures]),
            *swept,
            Section("figures", "Ranking", [Paragraph(MEANS), self._figures(SHOWN), *self._limits()]),
            Section("latency", "Latency distribution", curves, "Latency", [latency, axis]),
            Section("differences", "Differences", self._differences()),
            Section("memory", "Memory", self._memory()),
            Section("lengths", "Requested and reported output lengths", self._lengths(), "Lengths"),
            *order,
            *([Section("published", "Published, for reference", published, "Published")] if quoted else []),
            Section("runs", "Runs", [self._runs()]),
        ]
        return self._document(sections, self._data(measured))

    def _document(self, sections: Sequence[Section], data: dict[str, Any] | None = None) -> Document:
        result = self.found
        groups = (
            (result.servers, "server"),
            (result.hosts, "platform"),
            (result.models, "model"),
            (result.workloads, "workload"),
        )
        servers, platforms, *rest = (pluralise(len(each), noun) for each, noun in groups)
        title = (
            f"{result.name}: {servers} on {platforms}, {', '.join(rest)}, {pluralise(result.repeats, 'repeat')} each"
        )
        looks = [doc.RunStyle(title, self.colours[name], self.mark) for name, title in self.servers.items()]
        scripts = ["matrix.js"] if data and result.cells else []
        return Document("loadgen matrix", title, sections, "", self.mark, looks, scripts, data or {}, result.version)

    def _of(self, group: tuple[str, str]) -> list[CellSummary]:
        return [cell for cell in self.cells if (cell.model, cell.workload) == group]

    def _group_title(self, group: tuple[str, str]) -> str:
        return ", ".join(group) if len(self.found.workloads) > 1 else group[0]

    def _name(self, cell: CellName) -> str:
        return f"{self.servers[cell.server]} on {self.platforms[cell.host]}, {cell.model}, {cell.workload}"

    def _ranking(self) -> list[tuple[doc.Card, str]]:
        """For each platform of each group: what leads, by how much, and whether that is more than chance; and the
        servers' output throughputs, the best first."""
        result = []
        for group, (host, platform) in product(self.groups, self.platforms.items()):
            cells = [cell for cell in self._ranked(group, host) if cell.figures[MAIN].mean is not None]
            said = ", ".join(f"{self.servers[cell.server]} {_with_ends(figure(cell, MAIN))}" for cell in cells)
            leader, lead = self._lead(cells) if cells[1:] else ("no ranking", "Only one server was measured.")
            of = f"{self._group_title(group)}, " * (len(self.groups) > 1) + platform
            result += [(doc.Card(of, leader, "", lead), f"{said}.")] if cells else []
        return result

    def _ranked(self, group: tuple[str, str], host: str) -> list[CellSummary]:
        """The best first; those without a valid run last."""
        cells = [cell for cell in self._of(group) if cell.host == host]
        return sorted(cells, key=lambda cell: (not cell.valid, -(cell.figures[MAIN].mean or 0)))

    def _lead(self, cells: Sequence[CellSummary]) -> tuple[str, str]:
        """Who leads, and by how much; of cells in their order, the invalid ones last."""
        invalid = " and ".join(self.servers[cell.server] for cell in cells if not cell.valid)
        bottleneck = f"possible client bottleneck in every run of {invalid}." if invalid else ""
        first, second = cells[:2]
        if not second.valid:
            return "no ranking", f"No ranking, {bottleneck}"
        if first.clock != second.clock:
            return "no ranking", f"No ranking: the cells ran{times_speed(first.clock, second.clock)}."
        leader, next_one = self.servers[first.server], self.servers[second.server]
        told = self.between.get((first.cell, second.cell, MAIN)) or self.between[second.cell, first.cell, MAIN]
        if told.ratio is None:
            return "no ranking", "No ranking."
        ratios = [told.ratio, *(told.ci95 or ())]
        if told.a != first.cell:
            ratios = [1 / ratios[0], *(1 / ratio for ratio in reversed(ratios[1:]))]
        by, *ends = (f"{(ratio - 1) * 100:+.1f}" for ratio in ratios)
        by = f"{by} % (95 %: {' to '.join(ends)} %)" if ends else f"{by} % (too few runs for an interval)"
        won = told.verdict == "different"
        text = f"{leader} leads {next_one} by {by}." if won else f"No winner: {leader} {by} on {next_one}."
        text += f" Not ranked: {bottleneck}" if invalid else ""
        text += "" if told.equal_work else " Their output lengths differ: unequal work."
        return leader if won else "no winner", text

    def _findings(self) -> list[Finding]:
        """Whether the figures are valid."""
        cells = self.found.cells
        result = [*self._cells_findings(), *sweep_findings(self.found.sweeps, self._name)]
        if differ := dict.fromkeys(self.servers[cell.server] for cell in cells if cell.lengths.differ):
            text = f"Output lengths of {', '.join(differ)} not as requested."
            result.append(Finding("lengths", "warning", text, "lengths"))
        if len(speeds := {cell.clock for cell in self.cells}) > 1:
            text = f"Cells ran{times_speed(*speeds)}: those of different speeds are not compared."
            result.append(Finding("speed", "warning", text))
        if self.found.interrupted:
            result.append(Finding("interrupted", "warning", "The matrix was interrupted; --resume goes on with it."))
        return result

    def _cells_findings(self) -> list[Finding]:
        """Whether runs were complete and valid."""
        cells = self.found.cells
        if not cells:
            return []
        states = Counter(cell.state for cell in cells)
        requests = {state: sum(cell.requests[state] for cell in cells) for state in STATES}
        runs, planned = sum(len(cell.runs) for cell in cells), sum(cell.planned for cell in cells)
        missing = "".join(f"; {number} {state}" for state, number in states.items() if state != "measured")
        requested = requests["sent"] + requests["dropped"]
        ended = "".join(f"; {requests[state]:,} {state}" for state in STATES[2:] if requests[state])
        limited = sum(cell.verdicts.get("limited", 0) for cell in cells)
        client = f"Valid: the load generator was not a bottleneck in any of {pluralise(runs, 'run')}."
        if limited:
            left = "" if limited == runs else "; left out of the figures where a cell has valid ones"
            client = f"Invalid: possible client bottleneck in {limited} of {pluralise(runs, 'run')}{left}."
        measured = (
            f"{states['measured']} of {pluralise(len(cells), 'cell')} measured, {runs} of {planned} runs{missing}."
        )
        complete = f"{requests['complete']:,} of {requested:,} requests complete{ended}."
        all_complete = runs > 0 and requests["complete"] == requested
        return [
            Finding("measured", "warning" if missing else "ok", measured, "failures"),
            Finding("complete", "ok" if all_complete else "warning", complete, "failures"),
            Finding("client", "error" if limited else "ok", client, "runs"),
        ]

    def _table(self, title: str, heads: dict[str, ColumnKind], rows: Iterable[tuple[CellName, Cells]]) -> doc.Table:
        """A row per cell, or several: it is told by the names of which there are more than one."""
        wanted = [name for name in ("model", "workload") if len(getattr(self.found, f"{name}s")) > 1]
        who: dict[str, ColumnKind] = {"platform": "text", **dict.fromkeys(wanted, "text"), "server": "head"}
        index = {name: position for position, name in enumerate(self.servers)}
        made = []
        for cell, cells in rows:
            server = TableCell("", run=index[cell.server])
            made.append((self.platforms[cell.host], *(getattr(cell, name) for name in wanted), server, *cells))
        return table(title, who | heads, made, several=True)

    def _figures(self, names: Sequence[str]) -> doc.Table:
        cells = [cell for host in self.platforms for group in self.groups for cell in self._ranked(group, host)]
        rows = list[tuple[CellName, Cells]]()
        for cell in [*cells, *(cell for cell in self.found.cells if not cell.runs)]:
            figures = (self._marked(cell, name) for name in names)
            valid = cell.valid or not cell.runs
            runs = TableCell(
                f"{len(cell.runs)}/{cell.planned}", None, "" if valid else "invalid", "" if valid else "error"
            )
            rows.append((cell, (runs, *figures, _number(cell.lengths.mean, 1))))
        return self._table(
            "Means over the repeats", number_columns("runs", *map(figure_title, names), "tokens each"), rows
        )

    def _sweeps(self) -> list[Block]:
        heads, rows = sweep_rows(self.found.sweeps)
        return [self._table("Largest load that met the objectives", heads, rows)] if rows else []

    def _limits(self) -> list[Block]:
        """What the hardware allows for each cell's load, where it is known."""
        rows = list[tuple[CellName, Cells]]()
        for cell, each in ((cell, cell.limit) for cell in self.cells if cell.limit):
            ratios = (significant(ratio, 2) for ratio in (each.ttft_ratio, each.tpot_ratio))
            of = percent(each.throughput_share), *ratios, percent(each.mbu), percent(each.mfu)
            rows.append((cell, (f"{each.gpus} x {each.gpu}", significant(each.output_tokens_per_s), *of, each.bound)))
        heads: dict[str, ColumnKind] = {
            "hardware": "text",
            **number_columns("at most, tokens/s", "reached", "TTFT / limit"),
        }
        heads |= {**number_columns("TPOT / limit", "MBU", "MFU"), "bound by": "text"}
        return [self._table("What the hardware allows, first valid run of each", heads, rows)] if rows else []

    def _marked(self, cell: CellSummary, name: str) -> TableCell:
        """A figure, marked where it is the best of its platform, or worse than that, by more than chance."""
        made, mine = figure(cell, name), cell.figures[name].mean
        rivals = [each for each in self._of((cell.model, cell.workload)) if each.host == cell.host and each is not cell]
        verdicts = {self._better(cell, other, name) for other in rivals if other.figures[name].mean is not None}
        level: doc.Level | Literal[""] = "error" if "worse" in verdicts else "ok" if verdicts == {"better"} else ""
        if mine is None or not level:
            return made
        return msgspec.structs.replace(made, text=f"{made.text} {'▲' if level == 'ok' else '▼'}", level=level)

    def _better(self, cell: CellSummary, other: CellSummary, name: str) -> Literal["better", "worse"] | None:
        """Than the other, by more than chance."""
        pair = (cell.cell, other.cell, name), (other.cell, cell.cell, name)
        told = self.between.get(pair[0]) or self.between.get(pair[1])
        return None if told is None else _verdict(told, cell.cell)

    def _differences(self) -> list[Block]:
        """One row per pair of cells, with a ratio and its interval for each figure that is compared."""
        rows: dict[tuple[CellName, CellName], list[str | TableCell]] = {}
        for difference in sorted(self.found.differences, key=lambda each: each.by, reverse=True):  # servers first
            pair, where = (
                f"{self.servers[difference.a.server]} / {self.servers[difference.b.server]}",
                self.platforms[difference.a.host],
            )
            if difference.by == "host":
                pair, where = f"{where} / {self.platforms[difference.b.host]}", self.servers[difference.a.server]
            work = "equal" if difference.equal_work else "unequal lengths"
            row = rows.setdefault(
                (difference.a, difference.b),
                [pair, ", ".join((where, difference.a.model, difference.a.workload)), work],
            )
            ends = " to ".join(significant(end, 3) for end in difference.ci95 or ()) or "too few runs"
            level, mark = MARKS[_verdict(difference, difference.a)]
            cell_text = f"{significant(difference.ratio)}{mark}"
            row.append(TableCell(cell_text, difference.ratio, "" if difference.ratio is None else ends, level))
        if not rows:
            return [Paragraph(RATIOS), Paragraph("There is no pair of measured cells.")]
        heads: dict[str, ColumnKind] = {"ratio of": "head", "on, or of": "text", "work": "text"}
        heads |= number_columns(*map(figure_title, COMPARED))
        return [Paragraph(RATIOS), table("Ratios between cells", heads, rows.values(), several=True)]

    def _memory(self) -> list[Block]:
        rows: list[tuple[CellName, Cells]] = []
        for cell in self.found.cells:
            cache, levels = cell.memory.kv_cache, cell.memory.levels
            peaks = [_cache_peak(cache)]  # of the cell, beside the first of its levels
            for level in levels:
                sizes = (level.idle_bytes, level.peak_bytes, level.loaded_bytes, level.total_bytes)
                rows.append((cell, (level.of, *map(byte_size, sizes), peaks.pop() if peaks else "")))
            if cache and not levels:
                rows.append((cell, ("server", *[UNKNOWN] * 4, *peaks)))
        if not rows:
            return [Paragraph("No run has a reading of memory.")]
        heads: dict[str, ColumnKind] = {
            "of": "text",
            **number_columns("before", "peak", "after", "total", "KV cache, peak"),
        }
        notes = dict.fromkeys(note for cell in self.found.cells for note in cell.memory.notes)
        return [Paragraph(MEMORY), self._table("Memory of each cell", heads, rows), *map(Paragraph, notes)]

    def _equal_work(self) -> str:
        """That the others were given one server's output lengths; empty where they were not."""
        if not self.found.equal_work:
            return ""
        return (
            f"Equal work: {self.servers[self.found.equal_work.server]} was measured first, and the other servers were "
            "asked for output lengths drawn from those of its complete answers, on the same host with the same model "
            "under the same workload."
        )

    def _lengths(self) -> list[Block]:
        text = self._equal_work() or "Every server was asked for the same lengths."
        text += " A server that stops earlier does less work: compare throughputs only where the lengths agree."
        rows = []
        for cell in self.cells:
            requested, of = dict.fromkeys(str(run.output_tokens_asked) for run in cell.runs), cell.lengths
            ends = map(_number, (of.min, of.p50, of.p90, of.max))
            rows.append((cell, (" or ".join(requested), _number(of.mean, 1), *ends, f"{of.differ:,}")))
        heads: dict[str, ColumnKind] = {"requested, each": "text"}
        heads |= number_columns("mean", "min", "median", "p90", "max", "not as requested")
        return [Paragraph(text), self._table("Tokens of complete answers, as counted by the server", heads, rows)]

    def _failures(self) -> list[Block]:
        blocks: list[Block] = [] if self.found.failures else [Paragraph("Every run that was begun could be made.")]
        for failure in self.found.failures:
            name = f"{self._name(failure.cell)}, repeat {failure.repeat}"
            blocks.append(Paragraph(f"{name}: `{failure.kind}`: {failure.reason} {failure.hint}", "error"))
            if failure.log:
                log = doc.Code(failure.log, "The end of the server's log", scroll=True)
                blocks.append(doc.Disclosure(f"The end of the server's log, {name}", [log]))
        blocks += [Paragraph(f"Not measured: {each['cell']}: {each['reason']}.") for each in self.found.skipped]
        heads: dict[str, ColumnKind] = {"cell": "text", **number_columns(*STATES), "why": "text"}
        rows = []
        for cell in self.found.cells:
            why = ", ".join(f"{number:,} {kind}" for kind, number in cell.errors.items())
            rows.append((cell, (cell.state, *(f"{cell.requests[state]:,}" for state in STATES), why)))
        if not rows:
            return blocks
        return [*blocks, self._table("How requests ended, over all repeats", heads, rows)]

    def _order(self) -> list[Block]:
        """How the runs were spread over time, and what that is good for."""
        result = self.found
        first = (
            f"Each server was started {pluralise(result.starts, 'time')} per host and model, and its runs were "
            f"shuffled within a start (seed {result.seed}); repeat k of every cell has the same prompts."
        )
        lines = [first, ROUNDS if result.starts > 1 else ONE_START, COLD] if result.cells else [SWEPT_ONCE]
        if result.equal_work:
            lines.append(f"Because of equal work, {self.servers[result.equal_work.server]} came first in each round.")
        rows = []
        for server_start in result.server_starts:
            build = (
                str(server_start.facts[name])
                for name in ("version", "image", "image_digest")
                if server_start.facts.get(name)
            )
            names = (
                str(server_start.start),
                self.servers[server_start.server],
                self.platforms[server_start.host],
                server_start.model,
            )
            rows.append(
                (*names, duration(server_start.seconds, 2), str(server_start.facts.get("launch", "")), ", ".join(build))
            )
        heads: dict[str, ColumnKind] = {"start": "number", "server": "head", "platform": "text", "model": "text"}
        heads |= {"up after": "number", "launch": "text", "build": "text"}
        starts = doc.Disclosure("Each start of a server", [table("Starts, in order", heads, rows, several=True)])
        plan = doc.Disclosure("The plan", [doc.Code(json.dumps(result.plan, indent=2), "The plan", scroll=True)])
        return [*map(Paragraph, lines), *([starts] if rows else []), plan]

    def _runs(self) -> doc.Table:
        heads: dict[str, ColumnKind] = {"repeat": "number", "began, UTC": "text", "start": "number", "started": "text"}
        heads |= {"seed": "number", "tokens/s": "number", "client": "text", "folder": "text"}
        rows = []
        for cell, run in [(owner, run) for owner in self.cells for run in owner.runs]:
            cold = {True: "cold", False: "warm", None: UNKNOWN}[run.cold]
            began, rate = run.started_at[:19].replace("T", " "), significant(run.output_tokens_per_s, 4)
            texts = (str(run.repeat), began, _number(run.start), cold, str(run.seed), rate, run.verdict)
            rows.append((cell, (*texts, TableCell(run.folder, link=f"{run.folder}/report.html"))))
        return self._table("Runs, cell by cell", heads, rows)

    def _charts(self, group: tuple[str, str]) -> list[dict[str, Any]]:
        """The distributions of a model and workload: per platform those of its servers, per server its platforms."""
        result = []
        many = f", {self._group_title(group)}" if len(self.groups) > 1 else ""
        by_host = ("host", "server", "servers", self.platforms, self.servers)
        by_server = ("server", "host", "platforms", self.servers, self.platforms)
        for kind, other, noun, titles, others in (by_host, by_server):
            for index, (name, title) in enumerate(titles.items()):
                cells = [cell for cell in self._of(group) if getattr(cell, kind) == name]
                text = []
                for cell in cells:
                    p50, p99 = (figure(cell, each).text for each in ("e2e.p50", "e2e.p99"))
                    far = "too few requests for p99" if p99 == UNKNOWN else f"p99 {p99}"
                    text.append(f"{others[getattr(cell, other)]}: E2E p50 {p50}, {far}.")
                id_, drawn = f"{kind}-{self.groups.index(group)}-{index}", [self.cells.index(cell) for cell in cells]
                chart = {"id": id_, "kind": kind, "text": text, "title": f"{title}: the {noun}{many}", "cells": drawn}
                result += [chart] if cells else []
        return result

    def _data(self, measured: Sequence[CellRunData]) -> dict[str, Any]:
        """What the script draws. `runs` is what charts.js asks for, and empty: no chart here is of a single run."""
        figures, metrics, groups = [], [], []
        for name in SHOWN:
            means = [mean for cell in self.cells if (mean := cell.figures[name].mean) is not None]
            factor, unit = unit_of(name, max(means, default=None))
            figures.append({"name": name, "title": figure_title(name), "unit": unit, "factor": factor})
        for name in SAMPLED:
            medians = [float(np.median(run.samples[name])) for run in measured if len(run.samples[name])]
            factor, unit = scale_of(max(medians, default=None))
            metrics.append({"name": name, "short": METRICS[name].short, "factor": factor, "unit": unit})
        for index, group in enumerate(self.groups):
            cells = [self.cells.index(cell) for cell in self._of(group)]
            groups.append({"bars": f"bars-{index}", "cells": cells, "charts": self._charts(group)})
        drawn = [self._drawn(cell, [run for run in measured if run.cell == cell.cell]) for cell in self.cells]
        return {"runs": [], "figures": figures, "metrics": metrics, "cells": drawn, "groups": groups}

    def _drawn(self, cell: CellSummary, runs: Sequence[CellRunData]) -> dict[str, Any]:
        """One cell: its names and colour, its figures, and its curves, pooled and of each repeat."""
        alike = [name for name, colour in self.colours.items() if colour == self.colours[cell.server]]
        curves = {}
        for name in SAMPLED:
            samples = [run.samples[name] for run in runs]
            pooled = np.concatenate(samples)
            repeats = [_thin(sample) for sample in samples] if len(runs) > 1 else []
            curves[name] = {"pooled": distribution(pooled, len(pooled)), "runs": repeats}
        return {
            "server": self.servers[cell.server],
            "platform": self.platforms[cell.host],
            "colour": self.colours[cell.server],
            "server_dash": DASHES[alike.index(cell.server) % len(DASHES)],
            "host_dash": DASHES[list(self.platforms).index(cell.host) % len(DASHES)],
            "figures": msgspec.to_builtins(cell.figures),
            "curves": curves,
        }


def figure(cell: CellSummary, name: str) -> TableCell:
    """A figure over the repeats: its mean, and the interval of the mean where there is one."""
    each = cell.figures[name]
    if each.mean is None:
        return TableCell(UNKNOWN)
    factor, unit = unit_of(name, each.mean)
    shown = [significant(value * factor, 4) for value in each.ci95 or () if value > 0]
    if len(shown) < 2:  # too few runs, or they differ so much that the interval would hold nothing at all
        values = sorted(value for value in each.values if value is not None)
        shown = [significant(value * factor, 4) for value in (values[:1] + values[-1:] if values[1:] else [])]
        return TableCell(
            f"{significant(each.mean * factor, 4)} {unit}", each.mean, f"runs: {' to '.join(shown)}" * bool(shown)
        )
    return TableCell(f"{significant(each.mean * factor, 4)} {unit}", each.mean, " to ".join(shown))


def _cache_peak(cache: CellKvCache | None) -> str:
    """Return the peak of the KV cache in use, and that of the fullest engine where there are several."""
    if cache is None:
        return UNKNOWN
    fullest = cache.peak_fullest_share
    return percent(cache.peak_share) + (f", fullest engine {percent(fullest)}" if fullest is not None else "")


def _with_ends(cell: TableCell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _verdict(told: CellDifference, cell: CellName) -> Literal["better", "worse"] | None:
    """Of this cell of the two; None where chance may explain the difference."""
    if told.verdict != "different" or told.ratio is None:
        return None
    higher = metric_by_key(told.figure.partition(".")[0]).direction == "higher"
    return "better" if ((told.ratio > 1) == higher) == (cell == told.a) else "worse"


def _thin(samples: Floats) -> dict[str, list[float]]:
    """One run's distribution through few of its samples, the extremes among them."""
    ordered = np.sort(samples)
    ranks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), POINTS_OF_A_RUN)).astype(np.int64))
    return {"x": np.round(ordered[ranks], 7).tolist(), "y": np.round((ranks + 1) / max(1, len(ordered)), 6).tolist()}


def _number(value: float | None, decimals: int = 0) -> str:
    return UNKNOWN if value is None else f"{value:,.{decimals}f}"
