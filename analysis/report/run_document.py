"""Builds documents about one or several runs: a short document for the terminal, and a full one for the HTML page."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from loadgen.analysis import report as doc
from loadgen.analysis.chunk_columns import KnownSamples
from loadgen.analysis.format import (
    DIFFERENT_SPEEDS,
    byte_size,
    page_mark,
    pluralise,
    server_label,
    simulated,
    speed_of,
    start_time,
    workload_sentence,
)
from loadgen.analysis.frame import Frame
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.report import Block, Document, Paragraph, Section, findings, status, tables
from loadgen.analysis.report.chart_data import throughput_series
from loadgen.analysis.report.charts import (
    CHARTS,
    DASHES,
    DISTRIBUTIONS,
    PALETTE,
    Chart,
    ChartInput,
    ChartRun,
    FrameInput,
    build_chart_data,
    chart_spec,
    curves_of_gaps,
    data_without_summary,
    distribution_curves,
    visible_charts,
)
from loadgen.analysis.report.packing import packed
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.stats import PERCENTILES, samples_needed
from loadgen.analysis.summary import ServerInfo, Summary
from loadgen.analysis.telemetry import all_series, mean_phases

TIMELINE_RUNS = 3
"""Maximum number of runs on a page with token timestamps. With more runs, the timelines show no tokens."""
RUN_FACTS = (
    *("started_at", "id", "arrivals", "n", "asked_s", "workload", "batch_size", "audio_seconds"),
    *("input_tokens", "output_tokens", "seed", "workers", "timeout_s"),
)
TERMINAL_CARDS = ("inputs", "input", "audio", "audio_bytes", "output", "total", "requests", "skew")
"""Cards that the terminal shows, by short name."""
TITLES = {
    "prediction": ("Prediction", ""),
    "goodput": ("Goodput", ""),
    "traffic": ("Classes of traffic", "Traffic"),
    "models": ("Models", ""),
    "replicas": ("Replicas", ""),
    "sessions": ("Sessions", ""),
    "turns": ("Turn by turn", "Turns"),
    "objectives": ("Objectives", ""),
    "bounds": ("Requests and their bounds", "Bounds"),
    "latency": ("Latency distribution", "Latency"),
    "parts": ("Where the time goes", "Parts"),
    "server_timing": ("The server's own times", "Server times"),
    "waiting": ("First tokens", ""),
    "gaps": ("Between tokens", ""),
    "course": ("Over time", ""),
    "timeline": ("Timeline of requests", "Timeline"),
    "percentiles": ("Percentiles", ""),
    "failures": ("Incomplete requests", "Incomplete"),
    "canaries": ("Canaries", ""),
    "sending": ("Request dispatch", "Dispatch"),
    "lengths": ("Requested and reported lengths", "Lengths"),
    "client": ("The client", ""),
    "machines": ("Memory and server counters", "Memory"),
}
"""Title and short title of each section, in the order of the page. The navigation bar shows the short title; an empty
short title means that the full title is used."""
HELP = {
    "prediction": "The intervals combine the uncertainty of the twin's parameters, its error on the runs that it was "
    "fitted to, and the variation between runs of one server.",
    "goodput": "A request is good if it is complete and meets {bounds}. Failed requests count as misses.",
    "traffic": "Rates refer to the window of the whole run, so that the classes add up. A ratio above 1 means that the "
    "other classes slow this class down.",
    "turns": "The prompt of each turn contains the conversation so far. Later turns have fewer sessions, because not "
    "every session got that far.",
    "sessions": "A request is due when each request before it has ended or started, plus a delay. The table of delays "
    "covers the edges that decided when a request was due.",
    "objectives": "An objective judges a figure of the whole run; a bound of goodput judges each request. The measured "
    "figure decides, or with --confidence its whole interval. Marginal means that the bound lies inside the interval.",
    "canaries": "Each canary is a short request with a fixed prompt (--verify). Its answer under load is compared with "
    "its answer without load.",
    "latency": "Share of samples at or below each latency, of complete requests{inside}, with a 95% band. The scale "
    "“tails” gives 90%, 99% and 99.9% equal distances.",
    "server_timing": "Queue and prefill are durations that the server states in each response, by its own clock. The "
    "network is one round trip of the connection, as the kernel measures it. The remainder is the rest of the latency "
    "of each request: gateways, the HTTP server, the tokenizer and unknown parts. Percentiles do not add up.",
    "waiting": "Each point is a complete request. A line that rises with the order sent shows a queue. A line that "
    "rises with the prompt length shows prefill time.",
    "percentiles": "Exact values from raw samples, with 95% intervals. {independent}",
    "lengths": "Totals cover all requests sent, so they differ if requests failed or were rejected.",
}
"""Explanations of how to read a section, by section id. `_help_values` fills in the placeholders."""


FOLDED = ("waiting", "gaps", "sending")
"""Sections that the page hides until the reader clicks their headings, because few questions need their charts."""

TOKENS_ONLY = ("waiting", "gaps")
"""Sections that are left out if no run on the page generates tokens, because they would be empty."""


class ReportedRun(msgspec.Struct, frozen=True):
    """Data of one run for a report. The Records are not included, because they can take gigabytes."""

    run: Run
    summary: Summary
    data: Mapping[str, Mapping[str, Any]]
    """Data of each chart, by chart id."""


class EarlyCharts(NamedTuple):
    """The part of the charts of a run that does not need its summary."""

    data: Mapping[str, Mapping[str, Any] | None]
    """Data of each chart, by chart id. None: the chart does not apply."""
    curves: Mapping[str, dict[str, Any]]
    """Distributions, by name of the latency."""
    throughput: Mapping[str, Any] | None
    """Load and throughput over time."""


def prepare_run(
    run: Run,
    frame: Frame,
    summary: Summary,
    early: EarlyCharts | None = None,
    samples_of_gaps: Mapping[str, KnownSamples] | None = None,
) -> ReportedRun:
    """Compute the chart data of a run and return it with the run and its summary.

    - `early` is the result of `prepare_charts` for this run, if the caller has it.
    - `samples_of_gaps` contains the samples that the charts of gap metrics show, by name of the metric, if the caller
      has them.
    """
    early = early or EarlyCharts({}, {}, None)
    chart_input = ChartInput(
        frame=frame,
        summary=summary,
        series=all_series(run),
        phases=mean_phases(run),
        curves={**early.curves, **curves_of_gaps(frame, samples_of_gaps or {})},
        throughput=early.throughput,
    )
    return ReportedRun(run, summary, build_chart_data(chart_input, early.data))


def prepare_charts(run: Run, frame: Frame) -> EarlyCharts:
    """Compute the part of the charts that does not need the summary of the run."""
    data = data_without_summary(FrameInput(frame=frame, series=all_series(run), phases=mean_phases(run)))
    return EarlyCharts(data, distribution_curves(frame), throughput_series(frame))


def brief_document(summary: Summary) -> Document:
    """Return the brief document on one run, for the terminal."""
    cards = tables.cards(summary)
    shown = [cards[name] for name in TERMINAL_CARDS if name in cards]
    blocks: list[Block] = [doc.Cards(shown)]
    if summary.latencies["e2e_s"].n:
        blocks.append(tables.latency([summary], brief=True))
    if summary.prediction:
        blocks.append(tables.prediction([summary]))
    if summary.turns:
        blocks.append(tables.turns([summary], brief=True))
    if summary.sessions:
        blocks += [tables.session_edges([summary]), tables.session_roles([summary])]
    parts = (
        tables.traffic([summary], brief=True),
        tables.interference([summary], brief=True),
        tables.models([summary], brief=True),
        tables.replicas([summary], brief=True),
        tables.server_timing([summary]),
    )
    blocks += [table for table in parts if table.rows]
    if summary.requests.errors:
        blocks.append(tables.failures(summary))
    blocks.append(doc.Findings(findings.findings(summary)))
    if summary.objectives:
        blocks.append(tables.objectives([summary]))
    title = f"{server_label(summary)}  {summary.server.model}" if summary.server.model else server_label(summary)
    sections = [Section("", "", [block]) for block in blocks]
    return Document("loadgen report", title, sections, workload_sentence(summary), simulated(summary))


def page_document(runs: Sequence[ReportedRun], extra: Sequence[Section] = ()) -> Document:
    """Return the full document on one run or several runs, for the HTML page.

    The `extra` sections are placed after the overview at the top.
    """
    summaries = [run.summary for run in runs]
    drawn = chart_runs(runs)
    sections = [Section("answer", "", _first_screen(summaries)), *extra]
    switches = _switches(drawn)
    help_values = _help_values(summaries)
    charts = _charts_by_section(drawn)
    curve = charts.pop("goodput", [])
    telemetry = charts.pop("machines", [])
    details = _details_by_section(drawn, telemetry)
    if "goodput" in details:
        details["goodput"] += [_folded_chart(chart) for chart in curve]
    if not any(summary.generates for summary in summaries):
        for name in TOKENS_ONLY:
            charts.pop(name, None)
    for name, (title, short) in TITLES.items():
        blocks = [*charts.pop(name, []), *details.get(name, [])]
        if blocks:
            note = HELP.get(name, "").format(**help_values).strip()
            section = _with_one_heading(Section(name, title, blocks, short, switches.get(name, []), note))
            sections.append(replace(section, blocks=[_folded("", *section.blocks)]) if name in FOLDED else section)
    for title, blocks in charts.items():  # charts in sections that are not in TITLES
        sections.append(Section(re.sub(r"[^a-z0-9]+", "-", title.lower()), title, blocks))
    sections += [_reproduce(runs), DEFINITIONS]
    return Document(
        "loadgen report",
        workload_sentence(summaries[0]),
        sections,
        mark=page_mark(summaries),
        runs=drawn,
        scripts=list(dict.fromkeys(chart.script for chart in visible_charts(drawn) if chart.script)),
        data=_script_data(drawn),
        version=summaries[0].run.version,
        chips=status.run_chips(summaries),
    )


def _with_one_heading(section: Section) -> Section:
    """Return the section without the heading of its only chart, which would repeat the heading of the section.

    An explanation of the chart becomes the explanation of the section. The section is returned unchanged if it has
    several charts or no chart, or if both the section and its chart have an explanation.
    """
    charts = [block for block in section.blocks if isinstance(block, doc.ChartRef)]
    if len(charts) != 1 or (section.help and charts[0].help):
        return section
    blocks = [replace(block, help="", titled=False) if block is charts[0] else block for block in section.blocks]
    return replace(section, blocks=blocks, help=section.help or charts[0].help)


def _first_screen(summaries: Sequence[Summary]) -> list[Block]:
    several = len(summaries) > 1
    blocks: list[Block] = []
    if len({speed_of(summary) for summary in summaries}) > 1:
        blocks.append(Paragraph(DIFFERENT_SPEEDS, "warning"))
    if several:
        blocks.append(tables.overview(summaries))
    blocks += [_scorecard(index, summary) for index, summary in enumerate(summaries)]
    for index, summary in enumerate(summaries):
        if summary.limit and not summary.limit.exceeds_limit:
            blocks.append(findings.hardware_limit_bars(summary.limit, index if several else None))
            details = Paragraph(findings.hardware_limit_details(summary.limit), "note")
            blocks.append(_folded("Details", details))
    return blocks


def _help_values(summaries: Sequence[Summary]) -> dict[str, str]:
    """Return the values of the placeholders in HELP, which contains the explanations on the page."""
    bounds = next((summary.goodput.bounds for summary in summaries if summary.goodput), [])
    return {
        "bounds": " and ".join(f"`{bound}`" for bound in bounds),
        "inside": "" if all(summary.window.whole for summary in summaries) else " that were due inside the window",
        "independent": " ".join(dict.fromkeys(summary.intervals.note for summary in summaries)),
    }


def _switches(drawn: Sequence[ChartRun]) -> dict[str, list[doc.Switch]]:
    """Return the input controls of the page, by section id."""
    axis = doc.Switch("axis", "Latency", (("linear", "linear"), ("log", "log")))
    shares = doc.Switch("shares", "Percentiles", (("linear", "linear"), ("tails", "tails")))
    run = doc.Switch("timeline-run", "Run", [(str(index), run.name) for index, run in enumerate(drawn)], "select")
    return {"latency": [axis, shares], "timeline": [run] if len(drawn) > 1 else []}


def run_names(summaries: Sequence[Summary]) -> list[str]:
    """Return a short, unique name for each run: server and version, followed by a repeat or run number if needed.

    If all runs are repeats of one plan, the names are `repeat 1`, `repeat 2`, and so on.
    """
    labels = [server_label(summary) for summary in summaries]
    if are_repeats(summaries):
        return [f"repeat {summary.run.repeat}" for summary in summaries]
    repeats = [f"{label} (repeat {summary.run.repeat})" for label, summary in zip(labels, summaries, strict=True)]
    if len({*repeats}) == len(repeats) > 1 and all(summary.run.repeats > 1 for summary in summaries):
        return repeats
    counts = Counter(labels)
    return [label if counts[label] == 1 else f"{label} (run {number})" for number, label in enumerate(labels, 1)]


def are_repeats(summaries: Sequence[Summary]) -> bool:
    """Return True if the runs are different repeats of one plan on one server."""
    numbers = {summary.run.repeat for summary in summaries}
    plans = {(server_label(summary), workload_sentence(summary), summary.run.repeats) for summary in summaries}
    return len(numbers) == len(summaries) > 1 and 0 not in numbers and len(plans) == 1


def chart_runs(runs: Sequence[ReportedRun]) -> list[ChartRun]:
    """Return each run with its name, colour and line style.

    Normally each server has its own colour, and the runs of one server differ in their line styles. If all runs are
    repeats of one plan, each run has its own colour. If there are more runs than colours, colours are reused with
    another line style.
    """
    summaries = [run.summary for run in runs]
    servers = [summary.server.name for summary in summaries]
    if are_repeats(summaries):  # as if each repeat had a server, until the colours are used up
        servers = [str(index % len(PALETTE)) for index in range(len(runs))]
    order = list(dict.fromkeys(servers))
    result = []
    for index, (name, summary) in enumerate(zip(run_names(summaries), summaries, strict=True)):
        colour = list(PALETTE)[order.index(servers[index]) % len(PALETTE)]
        dash = DASHES[servers[:index].count(servers[index]) % len(DASHES)]
        result.append(ChartRun(name, colour, simulated(summary), dash=dash, summary=summary, data=runs[index].data))
    return result


def _scorecard(index: int, summary: Summary) -> doc.Scorecard:
    url = ", ".join(summary.server.replicas) or summary.server.url
    facts = " · ".join(filter(None, (start_time(summary), url, f"took {summary.run.duration_s:.1f} s")))
    known = findings.findings(summary)
    shown = [finding for finding in known if finding.level != "note" or finding.id in SHOWN_NOTES]
    shown.sort(key=lambda finding: ("error", "warning", "note", "ok").index(finding.level))
    return doc.Scorecard(
        run=index,
        subheading=summary.server.model or "",
        facts=facts,
        cards=list(tables.cards(summary).values()),
        verdict=findings.verdict(summary, known),
        findings=shown,
        objectives=findings.objectives_finding(summary),
        list_title=list_title([summary]),
    )


def list_title(summaries: Sequence[Summary]) -> str:
    """Return the heading of the list of findings on these runs: `Validity` or `Checks`.

    The heading is `Checks` if every run is a simulation in virtual time. Such runs measure nothing, so their findings
    are not about validity.
    """
    return "Checks" if all(summary.server.virtual for summary in summaries) else "Validity"


def _charts_by_section(drawn: Sequence[ChartRun]) -> dict[str, list[Block]]:
    sections: dict[str, list[Block]] = {}
    for chart in visible_charts(drawn):
        shown = [run for run in drawn if chart.id in run.data]
        captions = [(run.name, chart.caption(run.data[chart.id], run.summary)) for run in shown]
        details = [(run.name, chart.details(run.data[chart.id])) for run in shown]
        lines, folded = (
            [f"{name}: {text}" if len(drawn) > 1 else text for name, text in texts if text]
            for texts in (captions, details)
        )
        reference = doc.ChartRef(
            chart.id, _title(chart, drawn), lines, chart.shape, chart.zoom, _note(chart, drawn), folded
        )
        sections.setdefault(chart.section, []).append(reference)
    return sections


def _note(chart: Chart, drawn: Sequence[ChartRun]) -> str:
    """Return the help text of a chart.

    For the chart of a run over time, the text also explains the vertical lines that mark events, if the chart has such
    lines. A page of several runs draws no such lines.
    """
    if chart.id == "course" and len(drawn) == 1 and drawn[0].data["course"]["marks"]:
        return f"{chart.note} Dashed vertical lines mark events, which the table lists."
    return chart.note


def _title(chart: Chart, drawn: Sequence[ChartRun]) -> str:
    """Return the title of a chart on a page that shows the runs in `drawn`.

    Only the title of the goodput chart depends on the runs, because it contains the words `the bounds were`. They
    become `the bound was` if each run has one bound, or `both bounds were` if each run has two bounds.
    """
    numbers = {len(run.summary.goodput.bounds) for run in drawn if run.summary.goodput}
    words = {1: "the bound was", 2: "both bounds were"}.get(next(iter(numbers))) if len(numbers) == 1 else None
    return chart.title.replace("the bounds were", words) if words and chart.id == "goodput" else chart.title


def _details_by_section(drawn: Sequence[ChartRun], telemetry: Sequence[Block]) -> dict[str, list[Block]]:
    """Return the tables and paragraphs that are shown below the charts, by section id.

    `telemetry` contains the chart of telemetry readings, which is shown in the section on memory.
    """
    several = len(drawn) > 1
    summaries = [run.summary for run in drawn]
    names = [run.name for run in drawn]
    optional = {
        "goodput": tables.goodput(summaries),
        "models": tables.models(summaries),
        "replicas": tables.replicas(summaries),
        "server_timing": tables.server_timing(summaries),
        "turns": tables.turns(summaries),
        "course": tables.events(summaries),
        "objectives": replace(tables.objectives(summaries), title="Verdicts"),  # the section is called Objectives
        "prediction": tables.prediction(summaries),
        "canaries": tables.canaries(summaries),
    }
    traffic: list[Block] = []
    traffic += [table for table in (tables.traffic(summaries), tables.interference(summaries)) if table.rows]
    sessions: list[Block] = [tables.session_edges(summaries), tables.session_roles(summaries)]
    longest = tables.longest_gaps([run.data["gaps"]["longest"] for run in drawn])
    other = tables.latency(summaries, only=[name for name in METRICS if name not in tables.PAGE_LATENCIES])
    percentiles: list[Block] = [
        tables.latency(summaries, only=tables.PAGE_LATENCIES),
        _folded("Other latencies", replace(other, title="Other latencies of complete requests")),
    ]
    if any(summary.requests.errors for summary in summaries):
        percentiles.append(_folded("Incomplete requests as infinitely slow", tables.latency(summaries, adjusted=True)))
    failures: list[Block] = [  # on a page of one run, the chips say that every request is complete
        tables.failures(summary, index if several else None)
        if summary.requests.errors
        else Paragraph("None: every request sent was complete.", run=index)
        for index, summary in enumerate(summaries)
        if several or summary.requests.errors
    ]
    counted = [
        f"Outputs{f' of {run.name}' if several else ''} counted by {counter}: {number:,}."
        for run in drawn
        for counter, number in run.summary.tokens.counted_by.items()
    ]
    client: list[Block] = [  # on a page of one run, the first screen contains this sentence
        Paragraph(findings.client_sentence(summary), findings.client_level(summary), index)
        for index, summary in enumerate(summaries)
        if several
    ]
    for index, summary in enumerate(summaries):
        priority = findings.priority(summary.client)
        if priority:
            client.append(Paragraph(priority.sentence, priority.level, index))
    client_figures = tables.client(summaries, names)
    return {
        "latency": _few_samples(summaries),
        **{name: [table] for name, table in optional.items() if table.rows},
        **({"gaps": [_folded("Longest gaps", longest)]} if longest.rows else {}),
        **({"sessions": sessions} if any(summary.sessions for summary in summaries) else {}),
        **({"traffic": traffic} if traffic else {}),
        "percentiles": percentiles,
        "failures": failures,
        "sending": [_folded("Requested and actual load", tables.load(summaries, names))],
        "lengths": _lengths(summaries, counted),
        "client": [*client, _folded("Figures and limits", client_figures)]
        if several
        else [_folded("", *client, client_figures)],
        "machines": _machines(summaries, telemetry),
    }


def _few_samples(summaries: Sequence[Summary]) -> list[Block]:
    """Return a note that lists the percentiles with too few samples and the number of samples that each needs.

    The captions of the latency distributions mark these percentiles with an asterisk. Return an empty list if no
    percentile is marked.
    """
    thin = {
        percentile
        for summary in summaries
        for name in DISTRIBUTIONS
        for percentile in ("p50", "p99")
        if percentile in summary.latencies[name].thin and summary.latencies[name].n
    }
    needed = ", ".join(f"{name} needs {samples_needed(PERCENTILES[name]):,}" for name in sorted(thin))
    return [Paragraph(f"* too few samples: {needed}.", "note")] if thin else []


def _lengths(summaries: Sequence[Summary], counted: Sequence[str]) -> list[Block]:
    """Return the blocks of the page that compare the requested and the reported token counts.

    A folded block contains a table and the sentences in `counted`, which say how tokens were counted. A page of several
    runs also has one sentence per run, above this block.
    """
    several = len(summaries) > 1
    counts = (tables.lengths(summaries), Paragraph(" ".join(counted), "note"))
    if not several:  # the first screen contains the sentence
        return [_folded("", *counts)]
    blocks: list[Block] = [
        Paragraph(findings.lengths_sentence(summary), "", index) for index, summary in enumerate(summaries)
    ]
    return [*blocks, _folded("Requested and reported tokens", *counts)]


def _folded(title: str, *blocks: Block) -> Block:
    """Return a block that the page hides until the reader clicks `title`. Printouts always contain the block.

    If `title` is empty, the reader clicks the heading of the section instead. The block must then be the only block of
    its section.
    """
    return doc.Disclosure(title, blocks)


def _folded_chart(chart: Block) -> Block:
    """Return a chart that the page hides until the reader clicks its title."""
    assert isinstance(chart, doc.ChartRef)
    return _folded(chart.title, Paragraph(chart.help, "note"), replace(chart, help="", titled=False))


def _machines(summaries: Sequence[Summary], telemetry: Sequence[Block]) -> list[Block]:
    """Return the blocks of the report on memory, on the server's counters, and on other telemetry readings.

    The sentences on memory come first. Below them is a block that the page hides until the reader clicks its title.
    This block contains the tables, the reasons for missing readings, and the blocks in `telemetry`.
    """
    blocks: list[Block] = []
    for index, summary in enumerate(summaries):
        blocks += [Paragraph(text, run=index) for text in findings.memory_sentences(summary)]
    details = [table for table in (tables.memory(summaries), tables.counters(summaries)) if table.rows]
    unread: list[Block] = []
    for index, summary in enumerate(summaries):
        memory = summary.memory
        if not memory:
            continue
        missing = dict(memory.not_measured)
        for source, reasons in memory.gaps.items():
            missing[source] = "; ".join(
                f"{pluralise(count, 'reading')} failed: {reason}" for reason, count in reasons.items()
            )
        if missing:
            text = "; ".join(f"{source} ({reason})" for source, reason in missing.items())
            unread.append(Paragraph(f"Not read: {text}.", "note", index))
    if details or unread or telemetry:
        blocks.append(_folded("Memory, counts and other readings" if blocks else "", *details, *unread, *telemetry))
    return blocks


SHOWN_NOTES = ("client", "distribution", "capped")
"""Ids of the notes that the first screen of the page shows, with a grey dot. They say that a check or a target was not
possible. The finding `client` is a note if no client took part in the run."""
SERVER_FIELDS_LEFT_OUT = ("limits", "addresses", "addresses_unused", "replicas")
"""Server fields that the generic list of server facts omits, because the page shows them elsewhere."""


def _reproduce(runs: Sequence[ReportedRun]) -> Section:
    """Return the section with the commands, settings and versions that are needed to repeat the runs."""
    blocks: list[Block] = []
    for index, reported in enumerate(runs):
        run = reported.summary.run
        groups: dict[str, Mapping[str, Any]] = {
            "Run": {name: getattr(run, name) for name in RUN_FACTS}
            | {f"prompt lengths {'made exact' if run.prompts_exact else 'estimated'} by": run.prompts}
            | {"version": run.version},
            "Server": _server_facts(reported.summary.server),
            "Server limits": reported.summary.server.limits,
            "Client host": reported.run.header.host,
        }
        facts = {title: _fact_texts(values) for title, values in groups.items()}
        facts = {title: texts for title, texts in facts.items() if texts}
        if len(runs) > 1:
            blocks.append(Paragraph("", run=index))
        blocks.append(doc.Code(run.command, "Command", copy=True))
        blocks.append(_folded("Settings, versions, host", doc.Facts(facts)))
    return Section("again", "Run it again", [_folded("", *blocks)])


def _server_facts(server: ServerInfo) -> dict[str, Any]:
    names = [name for name in server.__struct_fields__ if name not in SERVER_FIELDS_LEFT_OUT]
    facts = {name: getattr(server, name) for name in names}
    facts["addresses"] = ", ".join(server.addresses)
    for address, reason in server.addresses_unused.items():
        facts[f"{address} unused"] = reason
    return facts


def _fact_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Convert facts about a run to names and values as the page shows them.

    For example, the fact `memory_bytes` becomes `memory` with the value `64 GiB`. Facts without a value are omitted.
    """
    result = {}
    for name, value in values.items():
        if value not in (None, ""):
            text = ("no", "yes")[value] if isinstance(value, bool) else str(value)
            # A damaged run file may hold a value of any type.
            is_size = name.endswith("_bytes") and type(value) is int and value < 2**63
            result[name.removesuffix("_bytes").replace("_", " ")] = byte_size(value) if is_size else text
    return result


def _script_data(drawn: Sequence[ChartRun]) -> dict[str, Any]:
    """Return the input of the page's scripts: the data of the runs and the chart definitions."""
    runs = []
    charts = visible_charts(drawn)
    needed = {chart.id for chart in charts} | {chart.id for chart in CHARTS.values() if not chart.section}
    for run in drawn:
        data = {name: values for name, values in run.data.items() if name in needed}
        window = run.summary.window
        data["timeline"] = _packed_timeline(data["timeline"], with_tokens=len(drawn) <= TIMELINE_RUNS)
        ends = None if window.whole else [window.from_s, window.to_s]
        runs.append({"name": run.name, "colour": run.colour, "dash": run.dash, "window": ends, "data": data})
    return {"runs": runs, "charts": [chart_spec(chart, drawn) for chart in charts]}


def _packed_timeline(timeline: Mapping[str, Any], *, with_tokens: bool) -> dict[str, Any]:
    """Return the data of the timeline with the times of its tokens in packed form.

    The times are most of the data of a page. The page unpacks them when the reader zooms in. If `with_tokens` is false,
    the result contains no times of tokens."""
    tokens: Sequence[Sequence[int]] = timeline["tokens"]
    content = packed(json.dumps(tokens, separators=(",", ":")).encode()) if with_tokens else None
    return {**timeline, "tokens": content, "chunks": [len(steps) for steps in tokens] if with_tokens else None}


TIMES = (
    "Times and counts of a request: t_due is the scheduled send time. t_sent is the time at which its first byte was "
    "sent. t_1 to t_k are the arrival times of the chunks that hold at least one generated token. c_j is the number of "
    "tokens in chunk j, m is the number of tokens in all chunks, and n is the number of tokens generated, which is "
    "larger than m if the server hides some. t_end is the time of the server's end marker."
)
STATISTICS = (
    "Percentiles interpolate linearly between order statistics. Their intervals are order statistics around the "
    "percentile, by the binomial distribution; if a request has several samples, they allow for the correlation of "
    "these. The bands are those of Dvoretzky, Kiefer and Wolfowitz with Massart's constant. A percentile needs enough "
    "samples that the probability of fewer than two beyond it is below 1% (MLPerf's rule: 64 for p90, 662 for p99). "
    "All intervals describe this run. Only further runs show how runs differ from each other."
)
METRIC_DEFINITIONS = doc.Definitions([(metric.title, metric.name, metric.definition) for metric in METRICS.values()])
DEFINITIONS = Section(
    "definitions",
    "Definitions",
    [doc.Disclosure("", [Paragraph(TIMES), METRIC_DEFINITIONS, Paragraph(STATISTICS)])],
)
