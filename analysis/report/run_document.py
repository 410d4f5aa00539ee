"""The document of a run, or of several: what stands where, in short for the terminal and in full for the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from loadgen.analysis import report as doc
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
from loadgen.analysis.report import Block, Document, Paragraph, Section, findings, tables
from loadgen.analysis.report.charts import (
    DASHES,
    PALETTE,
    ChartInput,
    ChartRun,
    build_chart_data,
    chart_spec,
    visible_charts,
)
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.summary import Summary
from loadgen.analysis.telemetry import all_series

TIMELINE_RUNS = 3
"""A page of more runs has no room for the instant of each token in the timelines."""
RUN_FACTS = (
    *("started_at", "id", "arrivals", "n", "asked_s", "workload", "input_tokens", "output_tokens"),
    *("seed", "workers", "timeout_s"),
)
TITLES = {
    "prediction": ("Prediction", ""),
    "goodput": ("Goodput", ""),
    "turns": ("Turn by turn", "Turns"),
    "objectives": ("Objectives", ""),
    "latency": ("Latency distribution", "Latency"),
    "waiting": ("First tokens", ""),
    "gaps": ("Between tokens", ""),
    "course": ("Over time", ""),
    "timeline": ("Timeline of requests", "Timeline"),
    "percentiles": ("Percentiles", ""),
    "failures": ("Incomplete requests", "Incomplete"),
    "sending": ("Request dispatch", "Dispatch"),
    "lengths": ("Requested and reported lengths", "Lengths"),
    "client": ("The client", ""),
    "machines": ("Memory and server counters", "Memory"),
}
"""Of each section, in the order of the page, with its name in the navigation where that is another one."""
HELP = {
    "prediction": "Intervals: from other draws of the twin's constants, how far it missed what it was fitted to, and "
    "how much runs of one server differ.",
    "goodput": "A request is good when it is complete and meets {bounds}; failures count as misses.",
    "turns": "Each turn's prompt holds all that was said before it; a later turn has only the sessions that got so "
    "far.",
    "objectives": "Each bound is held against the 95 % interval of its figure: a bound inside the interval is "
    "inconclusive.",
    "latency": "Share of samples at or below each latency, of complete requests{inside}, with its 95 % band. Tails: "
    "each further nine of a percentile has the same height.",
    "waiting": "Each point is a complete request. A line that climbs with the order sent is a queue; with the prompt, "
    "prefill.",
    "percentiles": "Exact, from raw samples, with 95 % intervals. {independent}",
    "lengths": "Totals are of all requests sent, so they differ where requests failed or were rejected.",
}
"""How to read a section."""


class ReportedRun(msgspec.Struct, frozen=True):
    """What a report needs of one Run: its Records are not among it."""

    run: Run
    summary: Summary
    data: Mapping[str, Mapping[str, Any]]
    """What each chart draws (charts.chart_data)."""


def prepare_run(run: Run, frame: Frame, summary: Summary) -> ReportedRun:
    """Of a run with its columns and its figures, what a report needs."""
    return ReportedRun(run, summary, build_chart_data(ChartInput(frame, summary, all_series(run))))


def brief_document(summary: Summary) -> Document:
    """One run for the terminal."""
    cards = tables.cards(summary)
    blocks: list[Block] = [
        doc.Cards([cards[name] for name in ("input", "output", "total", "requests", "skew") if name in cards]),
        *([tables.latency([summary], brief=True)] if summary.latencies["e2e_s"].n else []),
        *([tables.prediction([summary])] if summary.prediction else []),
        *([tables.turns([summary], brief=True)] if summary.turns else []),
        *([tables.failures(summary)] if summary.requests.errors else []),
        doc.Findings(findings.findings(summary)),
        *([tables.objectives([summary])] if summary.objectives else []),
    ]
    title = f"{server_label(summary)}  {summary.server.model}" if summary.server.model else server_label(summary)
    sections = [Section("", "", [block]) for block in blocks]
    return Document("loadgen report", title, sections, workload_sentence(summary), simulated(summary))


def page_document(runs: Sequence[ReportedRun], extra: Sequence[Section] = ()) -> Document:
    """One run or several for the page, with the sections of the caller right after its first screen."""
    summaries, drawn = [run.summary for run in runs], chart_runs(runs)
    speeds = sorted({speed_of(summary) for summary in summaries})
    answer: list[Block] = [Paragraph(DIFFERENT_SPEEDS, "warning")] if len(speeds) > 1 else []
    answer += [tables.overview(summaries)] if len(runs) > 1 else []
    answer += map(_scorecard, range(len(runs)), summaries)
    limits = [(each.limit, index if len(runs) > 1 else None) for index, each in enumerate(summaries) if each.limit]
    answer += [
        Paragraph(findings.hardware_limit_sentence(result), "note", index)
        for result, index in limits
        if not result.exceeds_limit
    ]
    bounds = next((summary.goodput.bounds for summary in summaries if summary.goodput), [])
    words = {
        "bounds": " and ".join(f"`{bound}`" for bound in bounds),
        "inside": "" if all(summary.window.whole for summary in summaries) else ", of those due inside the window",
        "independent": " ".join(dict.fromkeys(summary.intervals.note for summary in summaries)),
    }
    pick = doc.Switch("timeline-run", "Run", [(str(index), run.name) for index, run in enumerate(drawn)], "select")
    axis = doc.Switch("axis", "Latency", (("linear", "linear"), ("log", "log")))
    shares = doc.Switch("shares", "Percentiles", (("linear", "linear"), ("tails", "tails")))
    switches = {"latency": [axis, shares], "timeline": [pick] if len(runs) > 1 else []}
    sections = [Section("answer", "", answer), *extra]
    charts, held = _charts(drawn), _held(drawn)
    for name, (title, short) in TITLES.items():
        if blocks := [*charts.pop(name, []), *held.get(name, [])]:
            note = HELP.get(name, "").format(**words).strip()
            sections.append(Section(name, title, blocks, short, switches.get(name, []), note))
    sections += [Section(re.sub(r"[^a-z0-9]+", "-", title.lower()), title, new) for title, new in charts.items()]
    sections += [_again(runs), DEFINITIONS]
    title, version = workload_sentence(summaries[0]), summaries[0].run.version
    mark = page_mark(summaries)
    scripts = list(dict.fromkeys(chart.script for chart in visible_charts(drawn) if chart.script))
    return Document("loadgen report", title, sections, "", mark, drawn, scripts, _data(drawn), version)


def run_names(summaries: Sequence[Summary]) -> list[str]:
    """A short name per run, different for each: server and version, with its repeat or place where these are equal."""
    chosen = [server_label(summary) for summary in summaries]
    repeats = [f"{name} (repeat {summary.run.repeat})" for name, summary in zip(chosen, summaries, strict=True)]
    if len({*repeats}) == len(repeats) > 1 and all(summary.run.repeats > 1 for summary in summaries):
        return repeats
    again = Counter(chosen)
    return [name if again[name] == 1 else f"{name} (run {index})" for index, name in enumerate(chosen, 1)]


def chart_runs(runs: Sequence[ReportedRun]) -> list[ChartRun]:
    """Each run with its name and look: a colour per server in the order in which they come, a dash per run of it."""
    summaries = [run.summary for run in runs]
    servers = [summary.server.name for summary in summaries]
    order = list(dict.fromkeys(servers))
    result = []
    for index, (name, summary) in enumerate(zip(run_names(summaries), summaries, strict=True)):
        colour = list(PALETTE)[order.index(servers[index]) % len(PALETTE)]
        dash = DASHES[servers[:index].count(servers[index]) % len(DASHES)]
        result.append(ChartRun(name, colour, simulated(summary), dash=dash, summary=summary, data=runs[index].data))
    return result


def _scorecard(place: int, summary: Summary) -> doc.Scorecard:
    facts = " · ".join(filter(None, (start_time(summary), summary.server.url, f"took {summary.run.duration_s:.1f} s")))
    cards, result = list(tables.cards(summary).values()), findings.findings(summary)
    verdict, met = findings.verdict(summary, result), findings.objectives_finding(summary)
    shown = [*findings.top_failure(summary), *(each for each in result if each.level != "note")]
    shown.sort(key=lambda each: ("error", "warning", "ok").index(each.level))
    return doc.Scorecard(place, summary.server.model or "", facts, cards, verdict, shown, met)


def _charts(drawn: Sequence[ChartRun]) -> dict[str, list[Block]]:
    """By section."""
    placed: dict[str, list[Block]] = {}
    for chart in visible_charts(drawn):
        held = [(run.name, chart.caption(run.data[chart.id], run.summary)) for run in drawn if chart.id in run.data]
        lines = [f"{name}: {text}" if len(drawn) > 1 else text for name, text in held if text]
        shown = doc.ChartRef(chart.id, chart.title, lines, chart.shape, chart.zoom, chart.note)
        placed.setdefault(chart.section, []).append(shown)
    return placed


def _held(drawn: Sequence[ChartRun]) -> dict[str, list[Block]]:
    """By section, what stands below its charts: every figure, and whether to rely on it."""
    several = len(drawn) > 1
    summaries, named = [run.summary for run in drawn], [run.name for run in drawn]
    gaps = [run.data["gaps"]["longest"] for run in drawn]
    optional = {"goodput": tables.goodput(summaries), "turns": tables.turns(summaries)}
    optional |= {"objectives": tables.objectives(summaries), "prediction": tables.prediction(summaries)}
    longest = tables.longest_gaps(gaps)
    others = tables.latency(summaries, only=[name for name in METRICS if name not in tables.BRIEF_LATENCIES])
    percentiles: list[Block] = [
        tables.latency(summaries, only=tables.BRIEF_LATENCIES),
        _folded("Other latencies", replace(others, title="Other latencies of complete requests")),
    ]
    if any(summary.requests.errors for summary in summaries):
        percentiles.append(_folded("Incomplete requests as infinitely slow", tables.latency(summaries, adjusted=True)))
    failures: list[Block] = [
        tables.failures(summary, index if several else None)
        if summary.requests.errors
        else Paragraph("None: every request sent was complete.", run=index)
        for index, summary in enumerate(summaries)
    ]
    counted = [
        f"Outputs{f' of {run.name}' if several else ''} counted by {counter}: {number:,}."
        for run in drawn
        for counter, number in run.summary.tokens.counted_by.items()
    ]
    client: list[Block] = [
        Paragraph(findings.client_sentence(each), findings.client_level(each.client), index)
        for index, each in enumerate(summaries)
    ]
    client += [
        Paragraph(finding.sentence, finding.level, place)
        for place, each in enumerate(summaries)
        if (finding := findings.priority(each.client)) is not None
    ]
    return {
        **{name: [table] for name, table in optional.items() if table.rows},
        **({"gaps": [_folded("Longest gaps", longest)]} if longest.rows else {}),
        "percentiles": percentiles,
        "failures": failures,
        "sending": [_folded("Requested and actual load", tables.load(summaries, named))],
        "lengths": [tables.lengths(summaries), Paragraph(" ".join(counted), "note")],
        "client": [*client, _folded("Figures and limits", tables.client(summaries, named))],
        "machines": _machines(summaries),
    }


def _folded(title: str, *blocks: Block) -> Block:
    """What few readers need, a click away, and printed."""
    return doc.Disclosure(title, blocks)


def _machines(summaries: Sequence[Summary]) -> list[Block]:
    blocks: list[Block] = [
        Paragraph(text, run=index) for index, each in enumerate(summaries) for text in findings.memory_sentences(each)
    ]
    if held := [each for each in (tables.memory(summaries), tables.counters(summaries)) if each.rows]:
        blocks.append(_folded("Memory and counts", *held))
    for index, result in ((index, each.memory) for index, each in enumerate(summaries) if each.memory):
        missing = dict(result.not_measured)
        for source, reasons in result.gaps.items():
            failed = (f"{pluralise(number, 'reading')} failed: {why}" for why, number in reasons.items())
            missing[source] = "; ".join(failed)
        if missing:
            text = "; ".join(f"{what} ({why})" for what, why in missing.items())
            blocks.append(Paragraph(f"Not read: {text}.", "note", index))
    return blocks


NOT_FACTS = ("limits", "addresses", "addresses_unused")
"""Fields of a server that the table of its facts does not show as they are."""


def _again(runs: Sequence[ReportedRun]) -> Section:
    """Everything needed to run it again."""
    blocks: list[Block] = []
    for index, each in enumerate(runs):
        run, server = each.summary.run, each.summary.server
        groups: dict[str, Mapping[str, Any]] = {
            "Run": {name: getattr(run, name) for name in RUN_FACTS}
            | {"prompts made exact by": run.prompts, "version": run.version},
            "Server": {name: getattr(server, name) for name in server.__struct_fields__ if name not in NOT_FACTS}
            | {"addresses": ", ".join(server.addresses)}
            | {f"{address} unused": reason for address, reason in server.addresses_unused.items()},
            "Server limits": server.limits,
            "Client host": each.run.header.host,
        }
        facts = {title: result for title, values in groups.items() if (result := _said(values))}
        blocks += [Paragraph("", run=index)] if len(runs) > 1 else []
        blocks += [doc.Code(run.command, "Command", copy=True), _folded("Settings, versions, host", doc.Facts(facts))]
    return Section("again", "Run it again", blocks)


def _said(values: Mapping[str, Any]) -> dict[str, str]:
    result = {}
    for name, value in values.items():
        if value not in (None, ""):
            text = ("no", "yes")[value] if isinstance(value, bool) else str(value)
            known = name.endswith("_bytes") and type(value) is int and value < 2**63  # damaged files hold anything
            result[name.removesuffix("_bytes").replace("_", " ")] = byte_size(value) if known else text
    return result


def _data(drawn: Sequence[ChartRun]) -> dict[str, Any]:
    """What the scripts draw."""
    runs = []
    for run in drawn:
        data, window = dict(run.data), run.summary.window
        if len(drawn) > TIMELINE_RUNS:
            data["timeline"] = {**data["timeline"], "tokens": None}
        ends = None if window.whole else [window.from_s, window.to_s]
        runs.append({"name": run.name, "colour": run.colour, "dash": run.dash, "window": ends, "data": data})
    return {"runs": runs, "charts": [chart_spec(chart, drawn) for chart in visible_charts(drawn)]}


TIMES = (
    "Per request: t_due, when it was to be sent; t_sent, when its first byte was; t_1 to t_k, when the chunks arrived "
    "that hold at least one generated token; c_j, the tokens in chunk j; m, the tokens in all chunks; n, all tokens "
    "generated, which are more where the server hides some; t_end, the server's end marker."
)
STATISTICS = (
    "Percentiles interpolate linearly between order statistics. Intervals are order statistics around the percentile, "
    "by the binomial distribution; for samples of which a request has several they allow for the likeness of those. "
    "The bands are those of Dvoretzky, Kiefer and Wolfowitz with Massart's constant. A percentile means something from "
    "the number of samples on at which fewer than two beyond it would be a chance below 1 % (MLPerf's rule: 64 for "
    "p90, 662 for p99). All of it speaks of this run; what another would give, only another can tell."
)
MEANINGS = doc.Definitions([(metric.title, metric.name, metric.definition) for metric in METRICS.values()])
MEANT = doc.Disclosure("What each figure means", [Paragraph(TIMES), MEANINGS, Paragraph(STATISTICS)])
DEFINITIONS = Section("definitions", "Definitions", [MEANT])
