"""Builds the documents about a matrix for the terminal and for its HTML page.

The page compares the cells of the matrix and links to the report of each run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, product
from typing import Any, Literal

import msgspec
import numpy as np

from loadgen.analysis import report as doc
from loadgen.analysis.compare.figures import MARGIN
from loadgen.analysis.format import (
    FACTOR_MIN,
    UNKNOWN,
    byte_size,
    duration,
    figure_title,
    interval_text,
    percent,
    pluralise,
    relative_change,
    scale_of,
    significant,
    times_speed,
    typeset_minus,
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
from loadgen.analysis.matrix.sweeps import sweep_cards, sweep_chips, sweep_findings, sweep_rows
from loadgen.analysis.metrics import METRICS
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
from loadgen.analysis.report.chart_data import distribution, thin_points
from loadgen.analysis.report.charts import DASHES, PALETTE
from loadgen.analysis.report.tables import Cells, number_columns, table
from loadgen.analysis.summary import Summary

POINTS_OF_CELLS, POINTS_OF_RUNS = 3000, 5000
"""Maximum number of points of the distributions of one latency, over all cells and over all runs. They keep the page
below 1.3 MB."""
POINTS_PER_CELL, POINTS_PER_RUN = (100, 700), (30, 120)
"""Minimum and maximum number of points of the distribution of one cell, and of one run."""
SHOWN = ("output_tokens_per_s", "requests_per_s", "ttft.p50", "ttft.p99", "tpot.p50", "e2e.p50", "e2e.p99")
"""Figures with a column in the page's table of cells. matrix.json contains further figures."""
MAIN = "output_tokens_per_s"
NAMED_CELLS = 2
"""Maximum number of invalid cells that the status strip names."""
IN_CHIPS = ("measured", "complete")
"""Findings that the status strip of the page states."""
NO_WINNER, NO_RANKING = "no winner", "no ranking"
"""Names in place of the leading server, if no server leads and if the servers are not compared."""
BARS = "Bars are means over the repeats, dots are single repeats, and lines are the 95% interval of the mean."
CURVES = """Share of complete requests at or below each latency, over all repeats of a cell. Thin lines are single
repeats. If thin lines are far apart, runs differ more than requests do."""
RATIOS = f"""Ratio of the figures of two servers on one platform, or of one server on two platforms, with its 95%
interval. ▲ means better and ▼ worse, by the verdict of `loadgen compare` on the runs of both cells: the difference is
shown, and its interval does not lie within {percent(MARGIN)}. Of pairs of equal cells, at most one in twenty has a mark
by chance."""
MARKED = "▲ better than all other servers on the platform, ▼ worse than at least one of them."
MEANS = """Sorted by output throughput. Values are means over the valid repeats. Below each value is the 95% interval
of the mean, or the range of the runs if there is no useful interval. ▲ and ▼ are the verdicts of `loadgen compare` on
the runs of two servers."""
MEMORY = """Engines reserve most of a GPU's memory for their KV cache when they start, so the used share of the KV cache
says more than the memory in use. Values before and after the load are means over the repeats. Peaks are the largest of
all repeats."""
MARKS: Mapping[str | None, tuple[doc.Level | Literal[""], str]]
MARKS = {"better": ("ok", " ▲"), "worse": ("error", " ▼"), None: ("", "")}
ONE_START = """Each server was started once and its repeats followed one another, so the intervals do not include drift
over time or differences between starts. More starts (`starts` in the plan) would include them."""
ROUNDS = """The starts were made in rounds, each with every server once in random order. Drift over time therefore
affected all servers equally, and the intervals include differences between starts."""
SWEEP_TITLE = "Capacities, and figures at the largest measured load within the capacity"
SWEPT_ONCE = "Each server was started once per host and model, and its sweep used that start."
COLD = "The first run after a start is cold: before it, the server has handled only the warm-up requests."
PUBLISHED = "Not measured here: figures of other hardware and other versions, with settings that are not always known."


def one_line_summary(summary: Summary) -> str:
    """Return one line of text with the main figures of a run."""
    ttft, e2e = duration(summary.latency.ttft.p50), duration(summary.latency.e2e.p50)
    text = f"{significant(summary.throughput.output_tokens_per_s, 4)} tokens/s, TTFT {ttft}, E2E {e2e}"
    if not summary.requests.all_complete:
        text += f", {findings.outcome_sentence(summary).rstrip('.')}"
    return text if summary.client.ok else f"{text}, the client was the limit"


class MatrixReport:
    """Builds the documents on the results of a matrix. A server has the same name and colour in all documents."""

    def __init__(self, summary: MatrixSummary) -> None:
        self.summary = summary
        self.servers = {server["name"]: server["title"] for server in summary.servers}
        self.platforms = {host["name"]: host["title"] for host in summary.hosts}
        colours = dict(zip(dict.fromkeys(server["server"] for server in summary.servers), cycle(PALETTE)))
        self.colours = {server["name"]: colours[server["server"]] for server in summary.servers}
        self.cells = [cell for cell in summary.cells if cell.runs]
        self.groups = list(dict.fromkeys((cell.model, cell.workload) for cell in self.cells))
        """Pairs of model and workload with at least one measured cell. Each pair gets separate charts."""
        self.mark = _mark(summary)
        self.differences = {
            (difference.a, difference.b, difference.figure): difference for difference in summary.differences
        }

    def brief_document(self) -> Document:
        """Return the document for the terminal, with a table of figures, the sweeps, the ranking and the findings."""
        blocks: list[Block] = []
        if self.summary.cells:
            blocks.append(self._figures_table(COMPARED))
        blocks += self._sweeps()
        for lead, figures, _ in self._ranking():
            prefix = f"{lead.value.capitalize()}: " if lead.value in (NO_WINNER, NO_RANKING) else ""
            blocks.append(Paragraph(f"{lead.label}: {prefix}{lead.note} {figures}"))
        blocks.append(doc.Findings(self.findings()))
        return self._document([Section("answer", "", blocks)])

    def findings(self) -> list[Finding]:
        """Return the findings on failed runs and on the validity of the figures."""
        failures = [
            Finding(
                "failure", "error", f"failed: {self._name(failure.cell)}, repeat {failure.repeat}: {failure.reason}"
            )
            for failure in self.summary.failures
        ]
        return [*failures, *self._validity_findings()]

    def page_document(self, measured: Sequence[CellRunData]) -> Document:
        """Return the document for the HTML page. `measured` are the finished runs."""
        figures = doc.Switch("figure", "Figure", [(name, figure_title(name)) for name in SHOWN], "select")
        latency = doc.Switch("metric", "Latency", [(name, METRICS[name].short) for name in SAMPLED])
        axis = doc.Switch("axis", "Axis", (("linear", "linear"), ("log", "logarithmic")))
        leads = []
        for lead, _, others in self._ranking():
            note = typeset_minus(lead.note)
            if lead.value not in (NO_WINNER, NO_RANKING):
                note = f"{note} {others}"
            if lead.value == NO_RANKING:
                note = note[:1].upper() + note[1:]
            leads.append(msgspec.structs.replace(lead, note=note))
        problems = [
            finding
            for finding in self._validity_findings()
            if finding.level != "ok" and (finding.id not in IN_CHIPS or not self.summary.cells)
        ]
        answer: list[Block] = [doc.Cards(leads)]
        answer += [doc.Findings(problems)] if problems else []
        curves: list[Block] = []
        for index, group in enumerate(self.groups):
            caption = [] if index else [BARS]
            answer.append(ChartRef(f"bars-{index}", self._group_title(group), caption, "wide", "none"))
            curves += [ChartRef(chart["id"], chart["title"], folded=chart["text"]) for chart in self._charts(group)]
        memory = self._memory()
        if not self.groups:
            answer.append(Paragraph("Nothing was measured yet."))
        order = [
            Section("failures", "Failures", self._failures()),
            Section("order", "How it was measured", self._order(), "Order"),
        ]
        best = sweep_cards(self.summary.sweeps, self._sweep_name)
        if not self.summary.cells:
            blocks = [*best, *([doc.Findings(problems)] if problems else []), *self._sweeps()]
            return self._document([Section("sweeps", "Capacity of each server", blocks), *order], {"runs": []})
        swept = [Section("sweeps", "Sweeps", [*best, *self._sweeps()])] if self.summary.sweeps else []
        sections = [
            Section("answer", "Throughput of each server on each platform", answer, "Throughput", [figures]),
            *swept,
            Section(
                "figures",
                "Ranking",
                [Paragraph(MARKED), self._figures_table(SHOWN, page=True), *self._limits()],
                help=MEANS,
            ),
            Section("latency", "Latency distribution", curves, "Latency", [latency, axis], CURVES),
            Section("differences", "Differences", [doc.Disclosure("Ratios between cells", self._differences())]),
            *([Section("memory", "Memory", [doc.Disclosure("Memory of each cell", memory)])] if memory else []),
            Section("lengths", "Requested and reported output lengths", self._lengths(), "Lengths"),
            *order,
            *self._published(),
            Section("runs", "Runs", [doc.Disclosure("Runs, cell by cell", [self._runs()])]),
        ]
        return self._document(sections, self._script_data(measured))

    def _published(self) -> list[Section]:
        """Return a list with the section on the published figures that the plan quotes.

        The list is empty if the plan quotes no figures.
        """
        entries = [
            (reference["of"], "", f"{reference['says']} {reference['source']}") for reference in self.summary.references
        ]
        if not entries:
            return []
        blocks: list[Block] = [Paragraph(PUBLISHED), doc.Definitions(entries)]
        return [Section("published", "Published, for reference", blocks, "Published")]

    def _document(self, sections: Sequence[Section], data: dict[str, Any] | None = None) -> Document:
        summary = self.summary
        repeats = f", {pluralise(summary.repeats, 'repeat')} each" if summary.cells else ""
        title = (
            f"{summary.name}: {pluralise(len(summary.servers), 'server')} on "
            f"{pluralise(len(summary.hosts), 'platform')}, {pluralise(len(summary.models), 'model')}, "
            f"{pluralise(len(summary.workloads), 'workload')}{repeats}"
        )
        return Document(
            "loadgen matrix",
            title,
            sections,
            mark=self.mark,
            runs=[doc.RunStyle(title, self.colours[name], self.mark) for name, title in self.servers.items()],
            scripts=["matrix.js"] if data and summary.cells else [],
            data=data or {},
            version=summary.version,
            chips=self._chips(),
        )

    def _chips(self) -> list[doc.Chip]:
        """Return the chips of the status strip below the title of the page.

        The chips state how many cells and sweeps were measured, how many of them are valid, and how many requests are
        complete.
        """
        return [*self._cell_chips(), *sweep_chips(self.summary.sweeps)]

    def _cell_chips(self) -> list[doc.Chip]:
        cells = self.summary.cells
        if not cells:
            return []
        states = Counter(cell.state for cell in cells)
        missing = "".join(f"; {number} {state}" for state, number in states.items() if state != "measured")
        invalid = [cell for cell in cells if cell.runs and not cell.valid]
        names = ", ".join(
            f"{self.servers[cell.server]} on {self.platforms[cell.host]}" for cell in invalid[:NAMED_CELLS]
        )
        more = ", …" if len(invalid) > NAMED_CELLS else ""
        measured = sum(1 for cell in cells if cell.runs)
        validity = f"{measured - len(invalid):,} of {pluralise(measured, 'measured cell')} valid"
        if measured and all(cell.simulated for cell in cells if cell.runs):
            validity += " (simulated servers)"  # the client is real, so its measurement is valid or invalid
        # `sent` is not an outcome: each request that was sent is also counted by its outcome.
        ended = sum(count for cell in cells for state, count in cell.requests.items() if state != "sent")
        complete = sum(cell.requests.get("complete", 0) for cell in cells)
        errors = Counter[str]()
        for cell in cells:
            errors.update(cell.errors)
        mostly = ""
        if errors and complete < ended:
            kind = errors.most_common(1)[0][0]
            mostly = f", mostly {findings.INCOMPLETE.get(kind, kind)}"
        return [
            doc.Chip(
                "Cells",
                f"{states['measured']:,} of {len(cells):,} measured{missing}",
                "warning" if missing else "ok",
                "failures" if missing else "",
            ),
            doc.Chip(
                "Measurement",
                f"{validity}; invalid: {names}{more}" if invalid else validity,
                "error" if invalid or not measured else "ok",
            ),
            doc.Chip(
                "Requests",
                f"{complete:,} of {ended:,} complete{mostly}",
                "ok" if complete == ended else "error",
                "failures",
            ),
        ]

    def _cells_of(self, group: tuple[str, str]) -> list[CellSummary]:
        return [cell for cell in self.cells if (cell.model, cell.workload) == group]

    def _group_title(self, group: tuple[str, str]) -> str:
        return ", ".join(group) if len(self.summary.workloads) > 1 else group[0]

    def _name(self, cell: CellName) -> str:
        return f"{self.servers[cell.server]} on {self.platforms[cell.host]}, {cell.model}, {cell.workload}"

    def _sweep_name(self, cell: CellName) -> str:
        """Return the name under which a card of the report shows the sweep of `cell`, such as `vLLM on H100`.

        The name contains the server and the platform. It also contains the model if the matrix has several models, and
        the workload if the matrix has several workloads.
        """
        extra = [name for name in ("model", "workload") if len(getattr(self.summary, f"{name}s")) > 1]
        parts = [
            f"{self.servers[cell.server]} on {self.platforms[cell.host]}",
            *(getattr(cell, name) for name in extra),
        ]
        return ", ".join(parts)

    def _ranking(self) -> list[tuple[doc.Card, str, str]]:
        """Return one ranking of the servers for each host and each pair of model and workload.

        The servers are ranked by their throughput. A ranking has three parts:

        - a card that names the leading server. The label of the card names the platform of the host.
        - a text with the throughput of each server and its interval, in descending order.
        - a text with the throughputs of all servers except the leading one.
        """
        result = []
        for group, (host, platform) in product(self.groups, self.platforms.items()):
            cells = [cell for cell in self._ranked(group, host) if cell.figures[MAIN].mean is not None]
            if not cells:
                continue
            figures = [f"{self.servers[cell.server]} {_with_note(figure(cell, MAIN))}" for cell in cells]
            leader, lead = self._lead(cells) if len(cells) > 1 else (NO_RANKING, "only one server was measured.")
            label = f"{self._group_title(group)}, {platform}" if len(self.groups) > 1 else platform
            others = f"{', '.join(self._rates(cells[1:]))} {self._scale(MAIN)[1]}."
            result.append((self._tile(label, leader, lead, cells), f"{', '.join(figures)}.", others))
        return result

    def _tile(self, label: str, leader: str, lead: str, cells: Sequence[CellSummary]) -> doc.Card:
        """Return the card with the result of a ranking.

        `label` is the title of the card, and `lead` is its note. `leader` is the name of the leading server, or the
        text NO_WINNER or NO_RANKING. The card also shows the throughput of the leading server, or of all servers if
        none leads. `cells` must be in the order of `_ranked`.
        """
        if leader not in (NO_WINNER, NO_RANKING):
            return doc.Card(label, leader, figure(cells[0], MAIN).text, lead)
        return doc.Card(label, leader, f"{', '.join(self._rates(cells))} {self._scale(MAIN)[1]}", lead)

    def _rates(self, cells: Sequence[CellSummary]) -> list[str]:
        """Return one text per cell: the name of its server, and the throughput as a number without the unit."""
        scale = (1.0, self._scale(MAIN)[1])
        return [f"{self.servers[cell.server]} {figure(cell, MAIN, scale).text}" for cell in cells]

    def _ranked(self, group: tuple[str, str], host: str) -> list[CellSummary]:
        """Return the cells of a group (model and workload) on one host, sorted by descending throughput.

        Invalid cells come last.
        """
        cells = [cell for cell in self._cells_of(group) if cell.host == host]
        return sorted(cells, key=lambda cell: (not cell.valid, -(cell.figures[MAIN].mean or 0)))

    def _lead(self, cells: Sequence[CellSummary]) -> tuple[str, str]:
        """Return the name of the leading server, and a sentence on its lead over the second server.

        `cells` must be in the order of `_ranked`. The name is NO_WINNER or NO_RANKING if no server leads.
        """
        invalid = " and ".join(self.servers[cell.server] for cell in cells if not cell.valid)
        bottleneck = f"the client was the limit in every run of {invalid}." if invalid else ""
        first, second = cells[:2]
        if not second.valid:
            return NO_RANKING, bottleneck
        if first.clock != second.clock:
            return NO_RANKING, f"the cells ran{times_speed(first.clock, second.clock)}."
        difference = self._difference(first, second, MAIN)
        if difference is None or difference.ratio is None:
            return NO_RANKING, "the difference is unknown."
        ratios = [difference.ratio, *(difference.ci95 or ())]
        if difference.a != first.cell:
            ratios = [1 / ratios[0], *(1 / ratio for ratio in reversed(ratios[1:]))]
        leader, runner_up = self.servers[first.server], self.servers[second.server]
        won = _verdict(difference, first.cell) == "better"
        as_factor = ratios[0] >= FACTOR_MIN
        lead, *interval = (relative_change(ratio, as_factor=as_factor) for ratio in ratios)
        certainty = "too few runs for an interval"
        if interval:
            certainty = f"95% CI {interval_text(interval[0].rstrip('%'), interval[1])}"
        if won and as_factor:
            text = f"{leader} has {lead} the throughput of {runner_up} ({certainty})."
        elif won:
            text = f"{leader} leads {runner_up} by {lead} ({certainty})."
        else:
            text = f"{leader} {lead} compared with {runner_up} ({certainty}{_reason(difference)})."
        if invalid:
            text += f" Not ranked: {bottleneck}"
        if not difference.equal_work:
            text += " Their output lengths differ: unequal work."
        return leader if won else NO_WINNER, text

    def _difference(self, cell: CellSummary, other: CellSummary, name: str) -> CellDifference | None:
        """Return the difference between the cells `cell` and `other` in the figure `name`, or None if it is unknown.

        The field `a` of the result may be either of the two cells, and `b` is the other one.
        """
        forward, backward = (cell.cell, other.cell, name), (other.cell, cell.cell, name)
        return self.differences.get(forward) or self.differences.get(backward)

    def _validity_findings(self) -> list[Finding]:
        """Return findings on everything that limits the validity of the figures.

        The findings concern unfinished cells and sweeps, runs in which the client was the limit, wrong output lengths,
        different clock speeds, and an interruption of the matrix.
        """
        result = [*self._cell_findings(), *sweep_findings(self.summary.sweeps, self._name)]
        differing = dict.fromkeys(
            self.servers[cell.server]
            for cell in self.summary.cells
            if cell.lengths.differ and not self._sets_lengths(cell)
        )
        if differing:
            text = f"Output lengths of {', '.join(differing)} not as requested."
            result.append(Finding("lengths", "warning", text, "lengths"))
        speeds = {cell.clock for cell in self.cells}
        if len(speeds) > 1:
            text = f"Cells ran{times_speed(*speeds)}: those of different speeds are not compared."
            result.append(Finding("speed", "warning", text))
        if self.summary.interrupted:
            text = "The matrix was interrupted. Use --resume to continue it."
            result.append(Finding("interrupted", "warning", text))
        return result

    def _sets_lengths(self, cell: CellName) -> bool:
        """Return True if the responses of the other servers must be as long as those of the server of `cell`.

        This is the case if the plan's setting `equal_work` names the server of `cell`. The responses of this server may
        have any length, and the requests to the other servers then ask for the same lengths.
        """
        return self.summary.equal_work is not None and cell.server == self.summary.equal_work.server

    def _cell_findings(self) -> list[Finding]:
        """Return three findings about the cells of the matrix:

        - how many cells were measured.
        - how many requests were complete.
        - whether the client was the limit in any run.
        """
        cells = self.summary.cells
        if not cells:
            return []
        states = Counter(cell.state for cell in cells)
        requests = {state: sum(cell.requests[state] for cell in cells) for state in STATES}
        runs, planned = sum(len(cell.runs) for cell in cells), sum(cell.planned for cell in cells)
        missing = "".join(f"; {number} {state}" for state, number in states.items() if state != "measured")
        requested = requests["sent"] + requests["dropped"]
        ended = "".join(f"; {requests[state]:,} {state}" for state in STATES[2:] if requests[state])
        limited = sum(cell.verdicts.get("limited", 0) for cell in cells)
        client = f"Valid: the client was not the limit in any of {pluralise(runs, 'run')}."
        if limited:
            excluded = "" if limited == runs else "; excluded from the figures of cells that have valid runs"
            client = f"Invalid: the client was the limit in {limited} of {pluralise(runs, 'run')}{excluded}."
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

    def _table(
        self, title: str, heads: dict[str, ColumnKind], rows: Iterable[tuple[CellName, Cells]], id_: str = ""
    ) -> doc.Table:
        """Return a table with one row per matrix cell.

        `rows` contains the name and the table cells of each matrix cell, and `heads` the headings of these table cells.
        Each row starts with the platform, the model and workload if the matrix has several, and the server.
        """
        extra = [name for name in ("model", "workload") if len(getattr(self.summary, f"{name}s")) > 1]
        name_heads: dict[str, ColumnKind] = {"platform": "text", **dict.fromkeys(extra, "text"), "server": "head"}
        indices = {name: index for index, name in enumerate(self.servers)}
        table_rows = []
        for cell, cells in rows:
            server = TableCell("", run=indices[cell.server])
            table_rows.append((self.platforms[cell.host], *(getattr(cell, name) for name in extra), server, *cells))
        return table(title, name_heads | heads, table_rows, several=True, id=id_)

    def _scale(self, name: str) -> tuple[float, str]:
        """Return (factor, unit) for the figure `name`.

        All cells show the figure in this unit, multiplied by the factor.
        """
        means = [cell.figures[name].mean for cell in self.cells]
        return unit_of(name, max((mean for mean in means if mean is not None), default=None))

    def _figures_table(self, names: Sequence[str], *, page: bool = False) -> doc.Table:
        """Return the table of figures, with one row per cell. On the page, each column heading names the unit."""
        cells = [cell for host in self.platforms for group in self.groups for cell in self._ranked(group, host)]
        cells += [cell for cell in self.summary.cells if not cell.runs]
        rows = list[tuple[CellName, Cells]]()
        for cell in cells:
            figures = (self._marked(cell, name, self._scale(name) if page else None) for name in names)
            runs = TableCell(f"{len(cell.runs)}/{cell.planned}")
            if cell.runs and not cell.valid:
                runs = msgspec.structs.replace(runs, note="invalid", level="error")
            rows.append((cell, (runs, *figures, _number(cell.lengths.mean, 1))))
        titles = [f"{figure_title(name)}, {self._scale(name)[1]}" if page else figure_title(name) for name in names]
        heads = number_columns("runs", *titles, "tokens each")
        return self._table("Means over the repeats", heads, rows, "ranking")

    def _sweeps(self) -> list[Block]:
        heads, rows = sweep_rows(self.summary.sweeps)
        return [self._table(SWEEP_TITLE, heads, rows, "ranking")] if rows else []

    def _limits(self) -> list[Block]:
        """Return the table of hardware limits, or an empty list if no cell has a hardware limit."""
        rows = list[tuple[CellName, Cells]]()
        for cell in self.cells:
            limit = cell.limit
            if limit:
                row = (
                    f"{limit.gpus} x {limit.gpu}",
                    significant(limit.output_tokens_per_s),
                    percent(limit.throughput_share),
                    significant(limit.ttft_ratio, 2),
                    significant(limit.tpot_ratio, 2),
                    percent(limit.mbu),
                    percent(limit.mfu),
                    limit.bound,
                )
                rows.append((cell, row))
        if not rows:
            return []
        columns = number_columns("limit, tokens/s", "reached", "TTFT / limit", "TPOT / limit", "MBU", "MFU")
        heads: dict[str, ColumnKind] = {"hardware": "text", **columns, "bound by": "text"}
        limits = self._table("Hardware limits, from the first valid run of each cell", heads, rows)
        return [doc.Disclosure("Hardware limits", [limits])]

    def _marked(self, cell: CellSummary, name: str, scale: tuple[float, str] | None) -> TableCell:
        """Return the table cell for the figure `name` of a matrix cell, with a mark if the figure stands out.

        ▲ means significantly better than all other servers on the platform. ▼ means significantly worse than at least
        one of them. With `scale`, the cell uses the unit of its column and does not name the unit.
        """
        unmarked = figure(cell, name, scale)
        rivals = [
            rival
            for rival in self._cells_of((cell.model, cell.workload))
            if rival.host == cell.host and rival is not cell and rival.figures[name].mean is not None
        ]
        verdicts = {self._verdict_against(cell, rival, name) for rival in rivals}
        if cell.figures[name].mean is None:
            return unmarked
        if "worse" in verdicts:
            return msgspec.structs.replace(unmarked, text=f"{unmarked.text} ▼", level="error")
        if verdicts == {"better"}:
            return msgspec.structs.replace(unmarked, text=f"{unmarked.text} ▲", level="ok")
        return unmarked

    def _verdict_against(self, cell: CellSummary, other: CellSummary, name: str) -> Literal["better", "worse"] | None:
        """Return the verdict on `cell` compared with `other`, or None if the difference is not significant."""
        difference = self._difference(cell, other, name)
        return None if difference is None else _verdict(difference, cell.cell)

    def _differences(self) -> list[Block]:
        """Return the table of ratios between cells, with one row per pair of cells.

        Pairs that differ in the server come before pairs that differ in the host.
        """
        rows: dict[tuple[CellName, CellName], list[str | TableCell]] = {}
        for difference in sorted(self.summary.differences, key=lambda difference: difference.by, reverse=True):
            a, b = difference.a, difference.b
            if difference.by == "host":
                pair = f"{self.platforms[a.host]} / {self.platforms[b.host]}"
                common = self.servers[a.server]
            else:
                pair = f"{self.servers[a.server]} / {self.servers[b.server]}"
                common = self.platforms[a.host]
            work = "equal" if difference.equal_work else "unequal lengths"
            row = rows.setdefault((a, b), [pair, f"{common}, {a.model}, {a.workload}", work])
            interval = "too few runs"
            if difference.ci95:
                interval = interval_text(*(significant(end, 3) for end in difference.ci95))
            level, mark = MARKS[_verdict(difference, a)]
            note = "" if difference.ratio is None else interval
            row.append(TableCell(f"{significant(difference.ratio)}{mark}", difference.ratio, note, level))
        if not rows:
            return [Paragraph(RATIOS), Paragraph("There is no pair of measured cells.")]
        heads: dict[str, ColumnKind] = {"ratio of": "head", "common": "text", "work": "text"}
        heads |= number_columns(*map(figure_title, COMPARED))
        return [Paragraph(RATIOS), table("Ratios between cells", heads, rows.values(), several=True)]

    def _memory(self) -> list[Block]:
        rows: list[tuple[CellName, Cells]] = []
        for cell in self.summary.cells:
            cache, levels = cell.memory.kv_cache, cell.memory.levels
            cache_peak = _cache_peak(cache)
            for level in levels:
                sizes = (level.idle_bytes, level.peak_bytes, level.loaded_bytes, level.total_bytes)
                rows.append((cell, (level.of, *map(byte_size, sizes), cache_peak)))
                cache_peak = ""  # the KV cache is shared by the whole cell, so show it once
            if cache and not levels:
                rows.append((cell, ("server", UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, cache_peak)))
        if not rows:
            return []
        columns = number_columns("before", "peak", "after", "total", "KV cache, peak")
        heads: dict[str, ColumnKind] = {"memory of": "text", **columns}
        notes = dict.fromkeys(note for cell in self.summary.cells for note in cell.memory.notes)
        return [Paragraph(MEMORY), self._table("Memory of each cell", heads, rows), *map(Paragraph, notes)]

    def _equal_work(self) -> str:
        """Return a sentence on how the servers were given equal work.

        The sentence is empty if the plan has no `equal_work`.
        """
        if not self.summary.equal_work:
            return ""
        return (
            f"Equal work: {self.servers[self.summary.equal_work.server]} was measured first. The output lengths "
            "requested from the other servers were drawn from those of its complete responses, on the same host with "
            "the same model under the same workload."
        )

    def _lengths(self) -> list[Block]:
        text = self._equal_work() or "The same lengths were requested from every server."
        text += " A server that stops earlier does less work: compare throughputs only if the lengths agree."
        rows = []
        for cell in self.cells:
            requested = dict.fromkeys(str(run.output_tokens_asked) for run in cell.runs)
            lengths = cell.lengths
            quantiles = map(_number, (lengths.min, lengths.p50, lengths.p90, lengths.max))
            differ = UNKNOWN if self._sets_lengths(cell) else f"{lengths.differ:,}"
            rows.append((cell, (" or ".join(requested), _number(lengths.mean, 1), *quantiles, differ)))
        heads: dict[str, ColumnKind] = {"requested, each": "text"}
        heads |= number_columns("mean", "min", "median", "p90", "max", "not as requested")
        lengths_table = self._table("Tokens of complete responses, as counted by the server", heads, rows)
        return [Paragraph(text), doc.Disclosure("Output lengths of each cell", [lengths_table])]

    def _failures(self) -> list[Block]:
        blocks: list[Block] = [] if self.summary.failures else [Paragraph("No run failed to start.")]
        for failure in self.summary.failures:
            name = f"{self._name(failure.cell)}, repeat {failure.repeat}"
            blocks.append(Paragraph(f"{name}: `{failure.kind}`: {failure.reason} {failure.hint}", "error"))
            if failure.log:
                log = doc.Code(failure.log, "The end of the server's log", scroll=True)
                blocks.append(doc.Disclosure(f"The end of the server's log, {name}", [log]))
        blocks += [Paragraph(f"Not measured: {cell['cell']}: {cell['reason']}.") for cell in self.summary.skipped]
        heads: dict[str, ColumnKind] = {"cell": "text", **number_columns(*STATES), "reasons": "text"}
        rows = []
        for cell in self.summary.cells:
            reasons = ", ".join(f"{number:,} {kind}" for kind, number in cell.errors.items())
            rows.append((cell, (cell.state, *(f"{cell.requests[state]:,}" for state in STATES), reasons)))
        if not rows:
            return blocks
        outcomes = self._table("Outcomes of requests, over all repeats", heads, rows)
        return [*blocks, doc.Disclosure("Outcomes of requests", [outcomes])]

    def _order(self) -> list[Block]:
        """Return the blocks that state the order of the runs, the starts of the servers and the plan.

        The first block also explains how the order of the runs affects the confidence intervals.
        """
        summary = self.summary
        lines = [SWEPT_ONCE]
        if summary.cells:
            first = (
                f"Each server was started {pluralise(summary.starts, 'time')} per host and model, and its runs were "
                f"shuffled within a start. Repeat k of a workload has the same prompts in every cell (seed "
                f"{summary.seed} for the first)."
            )
            lines = [first, ROUNDS if summary.starts > 1 else ONE_START, COLD]
        if summary.equal_work:
            lines.append(f"For equal work, {self.servers[summary.equal_work.server]} came first in each round.")
        blocks: list[Block] = [doc.Disclosure("Order of starts and runs", [Paragraph(line) for line in lines])]
        if summary.server_starts:
            blocks.append(doc.Disclosure("Server starts", [self._starts_table()]))
        plan = doc.Code(json.dumps(summary.plan, indent=2), "The plan", scroll=True)
        return [*blocks, doc.Disclosure("The plan", [plan])]

    def _starts_table(self) -> doc.Table:
        rows = []
        for server_start in self.summary.server_starts:
            facts = server_start.facts
            build = [str(facts[name]) for name in ("version", "image", "image_digest") if facts.get(name)]
            rows.append(
                (
                    str(server_start.start),
                    self.servers[server_start.server],
                    self.platforms[server_start.host],
                    server_start.model,
                    duration(server_start.seconds, 2),
                    str(facts.get("launch", "")),
                    ", ".join(build),
                )
            )
        heads: dict[str, ColumnKind] = {"start": "number", "server": "head", "platform": "text", "model": "text"}
        heads |= {"ready after": "number", "launch": "text", "build": "text"}
        return table("Starts, in order", heads, rows, several=True)

    def _runs(self) -> doc.Table:
        heads: dict[str, ColumnKind] = {"repeat": "number", "started, UTC": "text", "start": "number", "state": "text"}
        heads |= {"seed": "number", "tokens/s": "number", "client": "text", "folder": "text"}
        rows = []
        for cell in self.cells:
            for run in cell.runs:
                started = run.started_at[:19].replace("T", " ")
                state = {True: "cold", False: "warm", None: UNKNOWN}[run.cold]
                rate = significant(run.output_tokens_per_s, 4)
                texts = (str(run.repeat), started, _number(run.start), state, str(run.seed), rate, run.verdict)
                rows.append((cell, (*texts, TableCell(run.folder, link=f"{run.folder}/report.html"))))
        return self._table("Runs, cell by cell", heads, rows)

    def _charts(self, group: tuple[str, str]) -> list[dict[str, Any]]:
        """Return the distribution charts of a group (model and workload).

        There is one chart per platform with all its servers, and one chart per server with all its platforms.
        """
        group_number = self.groups.index(group)
        suffix = f", {self._group_title(group)}" if len(self.groups) > 1 else ""
        result = []
        for number, (host, title) in enumerate(self.platforms.items()):
            cells = [cell for cell in self._cells_of(group) if cell.host == host]
            lines = [_e2e_line(self.servers[cell.server], cell) for cell in cells]
            chart: dict[str, Any] = {"id": f"host-{group_number}-{number}", "kind": "host", "text": lines}
            chart |= {"title": f"{title}: servers{suffix}", "cells": [self.cells.index(cell) for cell in cells]}
            result += [chart] if cells else []
        for number, (server, title) in enumerate(self.servers.items()):
            cells = [cell for cell in self._cells_of(group) if cell.server == server]
            lines = [_e2e_line(self.platforms[cell.host], cell) for cell in cells]
            chart = {"id": f"server-{group_number}-{number}", "kind": "server", "text": lines}
            chart |= {"title": f"{title}: platforms{suffix}", "cells": [self.cells.index(cell) for cell in cells]}
            result += [chart] if cells else []
        return result

    def _script_data(self, measured: Sequence[CellRunData]) -> dict[str, Any]:
        """Return the input of matrix.js.

        charts.js requires the key `runs`, whose list is empty because no chart shows a single run.
        """
        figures = []
        for name in SHOWN:
            factor, unit = self._scale(name)
            figures.append({"name": name, "title": figure_title(name), "unit": unit, "factor": factor})
        metrics = []
        for name in SAMPLED:
            medians = [float(np.median(run.samples[name])) for run in measured if len(run.samples[name])]
            factor, unit = scale_of(max(medians, default=None))
            metrics.append({"name": name, "short": METRICS[name].short, "factor": factor, "unit": unit})
        groups = []
        for index, group in enumerate(self.groups):
            cell_indices = [self.cells.index(cell) for cell in self._cells_of(group)]
            groups.append({"bars": f"bars-{index}", "cells": cell_indices, "charts": self._charts(group)})
        of_cell = _points_each(POINTS_OF_CELLS, len(self.cells), POINTS_PER_CELL)
        of_run = _points_each(POINTS_OF_RUNS, len(measured), POINTS_PER_RUN)
        cells = []
        for cell in self.cells:
            runs = [run for run in measured if run.cell == cell.cell]
            cells.append(self._cell_data(cell, runs, of_cell, of_run))
        return {"runs": [], "figures": figures, "metrics": metrics, "cells": cells, "groups": groups}

    def _cell_data(
        self, cell: CellSummary, runs: Sequence[CellRunData], points_of_cell: int, points_of_run: int
    ) -> dict[str, Any]:
        """Return the names, colours, figures and latency distributions of a cell for the charts.

        Each latency has one distribution over all repeats, with at most about `points_of_cell` points. If there are
        several repeats, it also has one distribution per repeat, each with at most about `points_of_run` points.
        """
        same_colour = [name for name, colour in self.colours.items() if colour == self.colours[cell.server]]
        curves = {}
        for name in SAMPLED:
            samples = [run.samples[name] for run in runs]
            pooled = np.sort(np.concatenate(samples))
            repeats = []
            if len(runs) > 1:
                repeats = [_thinned_distribution(sample, points_of_run) for sample in samples]
            whole = thin_points(distribution(pooled, len(pooled)), points_of_cell)
            curves[name] = {"pooled": whole, "runs": repeats}
        return {
            "server": self.servers[cell.server],
            "platform": self.platforms[cell.host],
            "colour": self.colours[cell.server],
            "server_dash": DASHES[same_colour.index(cell.server) % len(DASHES)],
            "host_dash": DASHES[list(self.platforms).index(cell.host) % len(DASHES)],
            "figures": msgspec.to_builtins(cell.figures),
            "curves": curves,
        }


def _mark(summary: MatrixSummary) -> str:
    """Return the mark of simulated servers, such as `SIMULATED at 5 times speed`. Return "" if all servers are real.

    For a matrix of sweeps, the result is the mark of the first sweep that has a mark.
    """
    if not summary.simulated:
        return ""
    if summary.cells:
        return f"SIMULATED{times_speed(*(cell.speed or 1.0 for cell in summary.cells if cell.simulated))}"
    return next((sweep.result.mark for sweep in summary.sweeps if sweep.result and sweep.result.mark), "")


def figure(cell: CellSummary, name: str, scale: tuple[float, str] | None = None) -> TableCell:
    """Return a table cell with the mean of the figure `name` over the repeats and the 95% interval of the mean.

    If there are too few runs for an interval, or if the interval includes 0, the cell shows the range of the runs
    instead of the interval. If the heading of the column names the unit, `scale` is the factor and the unit of the
    column. The cell then contains no unit.
    """
    result = cell.figures[name]
    if result.mean is None:
        return TableCell(UNKNOWN)
    factor, unit = scale or unit_of(name, result.mean)
    interval = [significant(end * factor, 4) for end in result.ci95 or () if end > 0]
    note = interval_text(*interval) if len(interval) == 2 else ""
    if not note:
        values = sorted(value for value in result.values if value is not None)
        if len(values) > 1:
            ends = (significant(values[index] * factor, 4) for index in (0, -1))
            note = f"runs: {interval_text(*ends)}"
    return TableCell(f"{significant(result.mean * factor, 4)}{'' if scale else f' {unit}'}", result.mean, note)


def _e2e_line(title: str, cell: CellSummary) -> str:
    """Return the line of a chart caption for one cell, with p50 and p99 of its E2E latency."""
    p50, p99 = figure(cell, "e2e.p50").text, figure(cell, "e2e.p99").text
    p99_text = "too few requests for p99" if p99 == UNKNOWN else f"p99 {p99}"
    return f"{title}: E2E p50 {p50}, {p99_text}."


def _cache_peak(cache: CellKvCache | None) -> str:
    """Return a text with the largest share of the KV cache that was in use at one time.

    A server with several engines has several caches. The text then also states the largest share in a single engine.
    """
    if cache is None:
        return UNKNOWN
    fullest = cache.peak_fullest_share
    return percent(cache.peak_share) + (f", fullest engine {percent(fullest)}" if fullest is not None else "")


def _with_note(cell: TableCell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _verdict(difference: CellDifference, cell: CellName) -> Literal["better", "worse"] | None:
    """Return the verdict on `cell`, which is one of the two cells of `difference`.

    Return None if the difference is not significant.
    """
    if difference.verdict not in ("better", "worse"):
        return None
    return "better" if (difference.verdict == "better") == (cell == difference.a) else "worse"


def _reason(difference: CellDifference) -> str:
    """Return why neither of two cells is better, or an empty string if there is no reason to state.

    `difference` compares the two cells. For example, their difference may be too small to matter, or more repeats may
    be needed. The text begins with a semicolon, because the caller appends it to the confidence interval.
    """
    if difference.verdict == "no difference":
        return f"; within {percent(MARGIN)}"
    if difference.needs_more:
        return f"; about {pluralise(difference.needs_more, 'more repeat')} of each would decide"
    return ""


def _points_each(total: int, count: int, limits: tuple[int, int]) -> int:
    """Return how many of `total` points each of `count` curves may have.

    The points are divided equally. `limits` contains the minimum and the maximum for a curve.
    """
    least, most = limits
    return min(most, max(least, total // max(1, count)))


def _thinned_distribution(samples: Floats, points_max: int) -> dict[str, list[float]]:
    """Return the empirical distribution of one run with at most `points_max` points, including the extremes."""
    ordered = np.sort(samples)
    ranks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), points_max)).astype(np.int64))
    return {"x": np.round(ordered[ranks], 7).tolist(), "y": np.round((ranks + 1) / max(1, len(ordered)), 6).tolist()}


def _number(value: float | None, decimals: int = 0) -> str:
    return UNKNOWN if value is None else f"{value:,.{decimals}f}"
