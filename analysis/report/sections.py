"""The document of a run, or of several: what stands where, in short for the terminal and in full for the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from analysis.metrics import METRICS
from analysis.report import (
    Block,
    Cards,
    ChartRef,
    Code,
    Definitions,
    Disclosure,
    Document,
    Facts,
    Findings,
    Paragraph,
    RunLook,
    Scorecard,
    Section,
    Switch,
    findings,
    tables,
)
from analysis.report.charts import DASHES, PALETTE, Chart, ChartRun, shown_charts, spec
from analysis.report.format import asked, count, simulated, size, started, who
from analysis.summary import Summary
from loadgen.runfile import Run

TIMELINE_RUNS = 3
"""A page of more runs has no room for the instant of each token in the timelines."""
SHOWN = (
    *("started_at", "id", "arrivals", "n", "asked_s", "workload", "input_tokens", "output_tokens"),
    *("seed", "workers", "timeout_s"),
)


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """What a report needs of one Run: its Records are not among it."""

    run: Run
    summary: Summary
    data: Mapping[str, Mapping[str, Any]]
    """What each chart draws (charts.chart_data)."""


def brief(summary: Summary) -> Document:
    """One run for the terminal."""
    model = f"  {summary.server.model}" if summary.server.model else ""
    cards = tables.cards(summary)
    blocks: dict[str, list[Block]] = {
        "answer": [Cards([cards[name] for name in ("output", "total", "requests", "skew") if name in cards])],
        "latency": [tables.latency([summary], brief=True)],
        "turns": [tables.turns([summary], brief=True)] if summary.turns else [],
        "failures": [tables.failures(summary)] if summary.requests.errors else [],
        "findings": [Findings(findings.findings(summary))],
        "objectives": [tables.objectives([summary])] if summary.objectives else [],
    }
    return Document(
        "loadgen report",
        f"{who(summary)}{model}",
        [Section(name, "", each) for name, each in blocks.items() if each],
        subtitle=asked(summary),
        mark=simulated(summary),
        runs=[RunLook(who(summary), mark=simulated(summary))],
        version=summary.run.version,
    )


def full(runs: Sequence[ReportedRun], extra: Sequence[Section] = ()) -> Document:
    """One run or several for the page, with the sections of the caller right after its first screen."""
    summaries = [run.summary for run in runs]
    drawn = chart_runs(runs)
    looks = [RunLook(run.name, run.colour, simulated(each)) for run, each in zip(drawn, summaries, strict=True)]
    answer: list[Block] = [tables.overview(summaries)] if len(runs) > 1 else []
    answer += [_scorecard(place, run, look) for place, (run, look) in enumerate(zip(runs, looks, strict=True))]
    sections = [Section("answer", "", answer), *extra, *_results(summaries, drawn), *_checks(summaries, looks)]
    return Document(
        "loadgen report",
        asked(summaries[0]),
        _with_charts([*sections, _again(runs), DEFINITIONS], drawn, summaries),
        mark=next((look.mark for look in looks if look.mark), ""),
        runs=looks,
        scripts=list(dict.fromkeys(chart.script for chart in shown_charts(drawn) if chart.script)),
        data=_data(drawn, summaries),
        version=summaries[0].run.version,
    )


def names(summaries: Sequence[Summary]) -> list[str]:
    """A short name per run, different for each: server and version, with its repeat or place where these are equal."""
    chosen = [who(summary) for summary in summaries]
    repeats = [f"{name} (repeat {summary.run.repeat})" for name, summary in zip(chosen, summaries, strict=True)]
    if len({*repeats}) == len(repeats) > 1 and all(summary.run.repeats > 1 for summary in summaries):
        return repeats
    again = Counter(chosen)
    return [name if again[name] == 1 else f"{name} (run {place})" for place, name in enumerate(chosen, 1)]


def chart_runs(runs: Sequence[ReportedRun]) -> list[ChartRun]:
    """Each run with its name and look: a colour per server in the order in which they come, a dash per run of it."""
    servers = [run.summary.server.name for run in runs]
    order = list(dict.fromkeys(servers))
    found = []
    for place, (name, run) in enumerate(zip(names([run.summary for run in runs]), runs, strict=True)):
        colour = list(PALETTE)[order.index(servers[place]) % len(PALETTE)]
        dash = DASHES[servers[:place].count(servers[place]) % len(DASHES)]
        found.append(ChartRun(name, colour, dash, run.data))
    return found


def _scorecard(place: int, run: ReportedRun, look: RunLook) -> Scorecard:
    summary = run.summary
    found = findings.findings(summary)
    facts = (started(summary), summary.server.url, f"took {summary.run.duration_s:.1f} s")
    return Scorecard(
        place,
        look.name,
        summary.server.model or "",
        " · ".join(filter(None, facts)),
        list(tables.cards(summary).values()),
        findings.verdict(summary, found),
        [each for each in found if each.level != "note"],
        findings.objectives_met(summary),
    )


def _results(summaries: Sequence[Summary], drawn: Sequence[ChartRun]) -> list[Section]:
    """Goodput, turns and objectives where there are any; then what the charts show, which `_with_charts` puts in."""
    found = []
    if asked_for := next((summary.goodput for summary in summaries if summary.goodput), None):
        bounds = " and ".join(f"`{bound}`" for bound in asked_for.bounds)
        text = f"A request is good when it is complete and meets {bounds}; failures count as misses."
        found.append(Section("goodput", "Goodput", [Paragraph(text), tables.goodput(summaries)]))
    if any(summary.turns for summary in summaries):
        text = (
            "Each turn's prompt holds all that was said before it; a later turn has only the sessions that got so far."
        )
        found.append(Section("turns", "Turn by turn", [Paragraph(text), tables.turns(summaries)], "Turns"))
    if any(summary.objectives for summary in summaries):
        text = (
            "Each bound is held against the 95 % interval of its figure: a bound inside the interval is inconclusive."
        )
        found.append(Section("objectives", "Objectives", [Paragraph(text), tables.objectives(summaries)]))
    inside = "" if all(summary.window.whole for summary in summaries) else ", of those due inside the window"
    axis = Switch("axis", "Latency axis", (("linear", "linear"), ("log", "logarithmic")))
    text = f"Share of samples at or below each latency, of complete requests{inside}. The band holds the curve at 95 %."
    found.append(Section("latency", "Latency distribution", [Paragraph(text)], "Latency", [axis]))
    text = (
        "Each point is a complete request. A line that climbs with the order sent is a queue; with the prompt, prefill."
    )
    found.append(Section("waiting", "First tokens", [Paragraph(text)]))
    text = "Spikes at one token are stalls of every output; lone diamonds are stalls of single ones."
    gaps = [run.data["gaps"]["longest"] for run in drawn]
    found.append(
        Section("gaps", "Between tokens", [Paragraph(text), *([tables.longest_gaps(gaps)] if any(gaps) else [])])
    )
    found.append(Section("course", "Over time", []))
    pick = Switch("timeline-run", "Run", [(str(place), run.name) for place, run in enumerate(drawn)], "select")
    return [*found, Section("timeline", "Timeline of requests", [], "Timeline", [pick] if len(drawn) > 1 else [])]


def _checks(summaries: Sequence[Summary], looks: Sequence[RunLook]) -> list[Section]:
    """Every figure, and whether to rely on it."""
    several = len(summaries) > 1
    named = [look.name for look in looks]
    text = "Exact, from raw samples, with 95 % intervals. Those of too few samples are in summary.json only."
    notes = dict.fromkeys(summary.intervals.note for summary in summaries)
    percentiles: list[Block] = [Paragraph(text), *(Paragraph(note) for note in notes), tables.latency(summaries)]
    failed = any(summary.requests.errors for summary in summaries)
    percentiles += [tables.latency(summaries, adjusted=True)] if failed else []
    failures: list[Block] = [
        tables.failures(summary, place if several else None)
        if summary.requests.errors
        else Paragraph("None: every request sent was complete.", run=place)
        for place, summary in enumerate(summaries)
    ]
    counted = [
        f"Outputs{f' of {look.name}' if several else ''} counted by {counter}: {number:,}."
        for summary, look in zip(summaries, looks, strict=True)
        for counter, number in summary.tokens.counted_by.items()
    ]
    totals = " ".join(("Totals are of all requests sent, so they differ where requests failed.", *counted))
    said = [
        Paragraph(findings.client_said(each), "ok" if each.client.ok else "error", place)
        for place, each in enumerate(summaries)
    ]
    return [
        Section("percentiles", "Percentiles", percentiles),
        Section("failures", "Failures", failures),
        Section("sending", "Request dispatch", [tables.load(summaries, named)], "Dispatch"),
        Section(
            "lengths",
            "Requested and reported lengths",
            [tables.lengths(summaries), Paragraph(totals, "note")],
            "Lengths",
        ),
        Section("client", "The client", [*said, tables.client(summaries, named)]),
        *_machines(summaries),
    ]


def _machines(summaries: Sequence[Summary]) -> list[Section]:
    blocks: list[Block] = [
        Paragraph(text, run=place) for place, each in enumerate(summaries) for text in findings.memory(each)
    ]
    blocks += [each for each in (tables.memory(summaries), tables.counters(summaries)) if each.rows]
    for place, summary in enumerate(summaries):
        if found := summary.memory:
            missing = dict(found.not_measured)
            for source, reasons in found.gaps.items():
                missing[source] = "; ".join(
                    f"{count(number, 'reading')} failed: {why}" for why, number in reasons.items()
                )
            if missing:
                text = "; ".join(f"{what} ({why})" for what, why in missing.items())
                blocks.append(Paragraph(f"Not read: {text}.", "note", place))
    return [Section("machines", "Memory and server counters", blocks, "Memory")] if blocks else []


def _again(runs: Sequence[ReportedRun]) -> Section:
    """Everything needed to run it again."""
    blocks: list[Block] = []
    for place, each in enumerate(runs):
        run, server = each.summary.run, each.summary.server
        groups: dict[str, dict[str, Any]] = {
            "Run": {name: getattr(run, name) for name in SHOWN},
            "Server": {name: getattr(server, name) for name in server.__struct_fields__ if name != "limits"},
            "Server limits": server.limits,
            "Client host": each.run.header.host,
        }
        groups["Run"] |= {"prompts made exact by": run.prompts, "version": run.version}
        said = {title: _said(values) for title, values in groups.items()}
        facts = Facts({title: values for title, values in said.items() if values})
        blocks += [
            *([Paragraph("", run=place)] if len(runs) > 1 else []),
            Code(run.command, "Command", copy=True),
            facts,
        ]
    return Section("again", "Run it again", blocks)


def _said(values: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in values.items():
        if value not in (None, ""):
            text = ("no", "yes")[value] if isinstance(value, bool) else str(value)
            found[name.removesuffix("_bytes").replace("_", " ")] = size(value) if name.endswith("_bytes") else text
    return found


def _with_charts(sections: Sequence[Section], drawn: Sequence[ChartRun], summaries: Sequence[Summary]) -> list[Section]:
    """Each chart in its section, after its first paragraphs; new sections for those of another name."""
    placed: dict[str, list[ChartRef]] = {}
    for chart in shown_charts(drawn):
        placed.setdefault(chart.section, []).append(_chart(chart, drawn, summaries))
    found = []
    for section in sections:
        blocks = list(section.blocks)
        texts = next((place for place, each in enumerate(blocks) if not isinstance(each, Paragraph)), len(blocks))
        blocks[texts:texts] = placed.pop(section.id, [])
        found += [replace(section, blocks=blocks)] if blocks else []
    new = [Section(re.sub(r"[^a-z0-9]+", "-", title.lower()), title, charts) for title, charts in placed.items()]
    return [*found[:-2], *new, *found[-2:]]


def _chart(chart: Chart, drawn: Sequence[ChartRun], summaries: Sequence[Summary]) -> ChartRef:
    lines = []
    for run, summary in zip(drawn, summaries, strict=True):
        if chart.id in run.data and (text := chart.caption(run.data[chart.id], summary)):
            lines.append(f"{run.name}: {text}" if len(drawn) > 1 else text)
    return ChartRef(chart.id, chart.title, [*lines, *([chart.note] if chart.note else [])], chart.shape, chart.zoom)


def _data(drawn: Sequence[ChartRun], summaries: Sequence[Summary]) -> dict[str, Any]:
    """What the scripts draw."""
    runs = []
    for run, summary in zip(drawn, summaries, strict=True):
        data = dict(run.data)
        if len(drawn) > TIMELINE_RUNS:
            data["timeline"] = {**data["timeline"], "tokens": None}
        window = None if summary.window.whole else [summary.window.from_s, summary.window.to_s]
        runs.append({"name": run.name, "colour": run.colour, "dash": run.dash, "window": window, "data": data})
    return {"runs": runs, "charts": [spec(chart, drawn) for chart in shown_charts(drawn)]}


DEFINITIONS = Section(
    "definitions",
    "Definitions",
    [
        Paragraph(
            "Per request: t_due, when it was to be sent; t_sent, when its first byte was; t_1 to t_k, when the chunks "
            "arrived that hold at least one generated token; c_j, the tokens in chunk j; n, all tokens generated; "
            "t_end, the server's end marker."
        ),
        Disclosure(
            "What each figure means",
            [
                Definitions([(metric.title, metric.name, metric.definition) for metric in METRICS.values()]),
                Paragraph(
                    "Percentiles interpolate linearly between order statistics. Intervals are order statistics around "
                    "the percentile, by the binomial distribution; for samples of which a request has several they "
                    "allow for the likeness of those. The bands are those of Dvoretzky, Kiefer and Wolfowitz with "
                    "Massart's constant. A percentile means something from the number of samples on at which fewer "
                    "than two beyond it would be a chance below 1 % (MLPerf's rule: 64 for p90, 662 for p99). All of "
                    "it speaks of this run; what another would give, only another can tell."
                ),
            ],
        ),
    ],
)
