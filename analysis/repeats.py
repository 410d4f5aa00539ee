"""Runs beside each other: how much the figures of one plan differ from run to run, and the index of a folder of runs.

Requests of one run share one server and one stretch of time, so an interval made from them says nothing about another
run. The interval here is over runs: Student's t on one figure per run (Student, "The probable error of a mean", 1908).
It is the one that counts when runs are compared, and it needs RUNS_LEAST.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from loadgen.analysis.format import (
    DIFFERENT_SPEEDS,
    UNKNOWN,
    figure_title,
    page_mark,
    percent,
    pluralise,
    scale_of,
    server_label,
    significant,
    simulated,
    speed_of,
    start_time,
    times_speed,
    unit_of,
    workload_sentence,
)
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.report import (
    Block,
    ChartRef,
    Code,
    ColumnKind,
    Document,
    Finding,
    Findings,
    Paragraph,
    Section,
    Switch,
    TableCell,
    findings,
)
from loadgen.analysis.report.tables import Cells, number_columns, objectives, overview, statistic_cell, table
from loadgen.analysis.stats import (
    CONFIDENCE,
    DECIMALS,
    PERCENTILES,
    mean_and_deviation,
    samples_needed,
    share_interval,
    student_quantile,
)
from loadgen.analysis.summary import Summary

STATISTICS = ("mean", "p50", "p90", "p95", "p99")
RATES = ("output_tokens_per_s", "steady_output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "tail_share")
SHARES = ("complete", "attainment", "tail_share")
ORDER = "one after the other, as they are numbered: all have one plan, so there is no order to draw"
SHOWN = (
    *("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "complete", "goodput", "attainment"),
    *("ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "itl.p99", "e2e.p50", "e2e.p99", "normalised.mean"),
)
RUNS_LEAST = 3
"""Of fewer runs an interval says nothing: of two it is 13 times as wide as they differ."""
VALUES_MOST = 5
"""More runs than these have no room for each value in a line."""


MAX_INDEXED = 150
"""Runs on the page of a folder: it stays below 1.5 MB."""
INDEXED = (
    *("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99"),
    *("itl.p99", "e2e.p50", "e2e.p99"),
)
PICKED = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
POINTS = ("p50", "p90", "p95", "p99", "p99_9", "max")
CAN = "Pick runs in the table. Intervals and a verdict are from `loadgen compare`, which reads the runs themselves:"


class IndexedRun(NamedTuple):
    """A run of a folder; `path` is as a command line takes it, `link` leads from the page to its report."""

    name: str
    path: str
    link: str
    summary: Summary


class FigureOverRuns(msgspec.Struct, frozen=True):
    """One figure over runs, and the interval of its mean."""

    n: int
    mean: float | None
    """None where a run does not have the figure."""
    std: float | None
    """None for fewer than two runs."""
    ci95: tuple[float, float] | None
    """None for fewer than three runs."""
    values: list[float | None]
    """Of each run, in order."""
    thin: bool = False
    """A percentile that some run has too few samples for."""


class RepeatsSummary(msgspec.Struct, frozen=True):
    """What repeats of one plan say together: `repeats` of their summary.json."""

    runs: int
    order: str
    state: list[str]
    """`cold` or `warm`, of each run."""
    state_said: str
    seeds: list[int | None]
    confidence: float
    figures: dict[str, FigureOverRuns]
    """By the name that --assert uses: `ttft.p99`, `output_tokens_per_s`."""


def summarise_repeats(summaries: Sequence[Summary]) -> RepeatsSummary:
    """From their summaries in the order in which they ran."""
    states, values = start_states(summaries), [figures_of(summary, thin=True) for summary in summaries]
    cold = [str(position) for position, each in enumerate(states, 1) if each == "cold"]
    if not cold:
        said = "All runs started warm: requests had been sent to the server before each."
    elif len(cold) == len(states):
        said = "All runs started cold."
    else:
        which = f"Repeat {cold[0]} was" if len(cold) == 1 else f"Repeats {', '.join(cold)} were"
        said = f"{which} cold, the others warm; --warmup N makes all alike."
    return RepeatsSummary(
        len(summaries),
        ORDER,
        states,
        said,
        [summary.run.seed for summary in summaries],
        CONFIDENCE,
        {
            name: _bounded(name, describe_over_runs([value.get(name) for value in values]), summaries)
            for name in values[0]
        },
    )


def figures_of(summary: Summary, *, thin: bool = False) -> dict[str, float | None]:
    """The figures of one run by which runs are told apart; None where it has none, or too few samples, unless
    `thin` ones are wanted too."""
    complete, total = complete_and_planned(summary)
    result: dict[str, float | None] = {name: getattr(summary.throughput, name) for name in RATES}
    result["complete"] = complete / total if total else None
    if good := summary.goodput:
        result |= {"goodput": good.per_s, "attainment": good.attainment}
    for latency, described in summary.latency.items():
        for kind in STATISTICS:
            known = thin or kind not in described.thin
            result[f"{latency.removesuffix('_s')}.{kind}"] = described.of(kind) if known else None
    return result | {"skew": summary.burst.skew_s}


def complete_and_planned(summary: Summary) -> tuple[int, int]:
    """How many requests were complete, of all that were planned."""
    return summary.requests.complete, summary.requests.planned


def describe_over_runs(values: Sequence[float | None]) -> FigureOverRuns:
    """Mean, standard deviation and interval of one figure per run."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return FigureOverRuns(len(known), None, None, None, list(values))
    mean, deviation = mean_and_deviation(known)
    if deviation is None:
        return FigureOverRuns(1, mean, None, None, [*known])
    if len(known) < RUNS_LEAST:
        return FigureOverRuns(len(known), round(mean, DECIMALS), round(deviation, DECIMALS), None, [*known])
    margin = student_quantile((1 + CONFIDENCE) / 2, len(known) - 1) * deviation / math.sqrt(len(known))
    ends = round(mean - margin, DECIMALS), round(mean + margin, DECIMALS)
    return FigureOverRuns(len(known), round(mean, DECIMALS), round(deviation, DECIMALS), ends, [*known])


def _bounded(name: str, figure: FigureOverRuns, summaries: Sequence[Summary]) -> FigureOverRuns:
    """A share is at most 1, and so is its interval's end; of requests it is no better known than by counting them all
    (Clopper and Pearson), however alike the runs are. A percentile of too few samples is marked as such."""
    if any(_thin(summary, name) for summary in summaries):
        return msgspec.structs.replace(figure, thin=True)
    if name not in SHARES or figure.ci95 is None:
        return figure
    low, high = figure.ci95
    counts = {
        "complete": [complete_and_planned(summary) for summary in summaries],
        "attainment": [(good.good, good.requests) for summary in summaries if (good := summary.goodput)],
    }.get(name)
    if counts:
        exact_low, exact_high = share_interval(sum(good for good, _ in counts), sum(total for _, total in counts))
        low, high = min(low, round(exact_low, DECIMALS)), max(high, round(exact_high, DECIMALS))
    return msgspec.structs.replace(figure, ci95=(max(0.0, low), min(1.0, high)))


def _thin(summary: Summary, name: str) -> bool:
    """Whether a figure is a percentile of too few samples."""
    latency, _, kind = name.partition(".")
    result = summary.latencies.get(f"{latency}_s")
    return result is not None and kind in result.thin


def start_states(summaries: Sequence[Summary]) -> list[str]:
    """`warm` for a run with warm-up requests, or one after another run at the same address; else `cold`."""
    before = [None, *summaries[:-1]]
    return [
        "warm" if summary.requests.warmup or (last and last.server.url == summary.server.url) else "cold"
        for summary, last in zip(summaries, before, strict=True)
    ]


def section(found: RepeatsSummary, name: str = "between-runs", title: str = "Between runs") -> Section:
    """What repeats say together: the figures shown, with their interval between runs and each run's value."""
    few = found.runs <= VALUES_MOST
    heads: dict[str, ColumnKind] = {"": "head", "unit": "unit", "mean": "number", "95 % between runs": "number"}
    rows, needed = [], dict[str, str]()
    for figure_name in SHOWN:
        figure = found.figures.get(figure_name)
        if figure is None or figure.mean is None:
            continue
        factor, unit = unit_of(figure_name, figure.mean)
        ends = UNKNOWN if figure.ci95 is None else " to ".join(significant(end * factor, 4) for end in figure.ci95)
        each = ", ".join(significant(value and value * factor, 4) for value in figure.values)
        last = each if few else percent(None if figure.std is None or not figure.mean else figure.std / figure.mean)
        mark = "*" if figure.thin else ""
        rows.append((figure_title(figure_name), unit, significant(figure.mean * factor, 4) + mark, ends, last))
        if figure.thin:
            kind = figure_name.partition(".")[2]
            needed[kind] = f"{kind} {samples_needed(PERCENTILES[kind]):,}"
    notes = [f"* too few independent samples: {', '.join(needed.values())} needed."] if needed else []
    shown = table(
        title or "between runs",
        heads | {"each run" if few else "spread": "text"},
        rows,
        several=True,
        id="repeats",
        notes=notes,
    )
    text = Paragraph(f"The interval is of the mean over {pluralise(found.runs, 'run')} (Student's t).")
    if found.runs < RUNS_LEAST:
        text = Paragraph(f"{pluralise(found.runs, 'run')}: an interval between runs takes {RUNS_LEAST}.", "warning")
    return Section(name, title, [shown, text, Paragraph(found.state_said)])


def document(found: RepeatsSummary, summaries: Sequence[Summary]) -> Document:
    """For the terminal: what repeats say together, and what is to be known of each."""
    first = summaries[0]
    blocks: list[Block] = []
    for position, summary in enumerate(summaries, 1):
        known = findings.findings(summary)
        said = " ".join(each.sentence for each in known if each.id in ("complete", "client"))
        good = summary.requests.all_complete and summary.client.ok
        blocks.append(Paragraph(f"repeat {summary.run.repeat or position}: {said}", "ok" if good else "error"))
        blocks.append(Findings([each for each in known if each.level == "warning"]))
        blocks += [objectives([summary])] if summary.objectives else []
    title, subtitle = (
        f"{server_label(first)}  {first.server.model or ''}",
        f"{workload_sentence(first)}, {found.runs} times",
    )
    sections = [section(found, title=""), Section("repeats", "", blocks)]
    return Document("loadgen report", title, sections, subtitle, simulated(first))


def index_document(runs: Sequence[IndexedRun], title: str, unread: Sequence[str]) -> Document:
    """The page of a folder, newest first: all runs, those picked beside each other, and one figure over time."""
    shown = sorted(runs, key=lambda run: run.summary.run.started_at, reverse=True)[:MAX_INDEXED]
    heads: dict[str, ColumnKind] = {
        "run": "head",
        "began, UTC": "text",
        "label": "text",
        "server": "text",
        "load": "text",
    }
    named = list[Cells]()
    for name, _, link, summary in shown:
        run = summary.run
        load = f"{pluralise(run.n or summary.requests.sent, 'request')}, {run.input_tokens} in, {run.output_tokens} out"
        cells = [TableCell(_server(summary), note=summary.server.model or ""), TableCell(run.load.text, note=load)]
        began = start_time(summary).removesuffix(" UTC")
        named.append((TableCell(name, link=link), began, run.label, *cells))
    more = f"The newest {MAX_INDEXED} of {len(runs):,} runs: name a folder within for those in it."
    warnings = [*([more] if len(runs) > len(shown) else []), *unread]
    if len({speed_of(run.summary) for run in shown}) > 1:
        warnings.append(DIFFERENT_SPEEDS)
    blocks: list[Block] = [Findings([Finding("runs", "warning", text) for text in warnings])] if warnings else []
    blocks.append(overview([run.summary for run in shown], heads, named))
    labels = [label for label, _ in Counter(run.summary.run.label for run in shown).most_common()]
    trend = [
        Switch("label", "Label", [(label, label or "none") for label in labels], "select"),
        Switch("figure", "Figure", [(name, figure_title(name)) for name in INDEXED], "select"),
    ]
    picked: list[Block] = [ChartRef("picked", "Percentiles", [], "wide", "none"), Paragraph(CAN)]
    picked.append(Code("", "Command", copy=True))
    over = ChartRef("trend", "One figure over runs of one label", ["Hollow: not valid."], "wide", "none")
    latency = Switch("metric", "Latency", [(name, METRICS[name].short) for name in PICKED])
    sections = [
        Section("answer", "Runs", blocks, switches=[Switch("filter", "Filter", kind="search")]),
        Section("compare", "Compare", picked, switches=[latency]),
        Section("over", "Trend", [over], switches=trend),
    ]
    mark = page_mark(run.summary for run in shown)
    data = {"runs": [], "index": _indexed(shown)}
    return Document("loadgen report", title, sections, "", mark, (), ["index.js"], data, shown[0].summary.run.version)


def _server(summary: Summary) -> str:
    """Return the server's name, with the speed of a simulated one that is not real time: only one speed is compared."""
    return f"{server_label(summary)}{times_speed(speed_of(summary))}"


def _indexed(runs: Sequence[IndexedRun]) -> dict[str, Any]:
    """What the page's script draws."""
    own = [figures_of(run.summary, thin=True) for run in runs]
    figures, latencies = [], []
    for name in INDEXED:
        factor, unit = unit_of(name, max((value for each in own if (value := each[name])), default=None))
        figures.append({"name": name, "title": figure_title(name), "factor": factor, "unit": unit})
    for name in PICKED:
        factor, unit = scale_of(max((run.summary.latencies[name].p50 or 0 for run in runs), default=None))
        latencies.append({"name": name, "title": METRICS[name].short, "factor": factor, "unit": unit})
    result = []
    for (name, path, _, summary), values in zip(runs, own, strict=True):
        of = {each: summary.latencies[each] for each in PICKED}
        cells = {
            each: [statistic_cell(described, point, 1, bare=True) for point in POINTS] for each, described in of.items()
        }
        result.append(
            {
                **{"name": name, "path": path, "label": summary.run.label, "server": _server(summary)},
                **{"group": f"{_server(summary)}, {summary.run.label}", "at": summary.run.started_at},
                "valid": not findings.verdict(summary, findings.findings(summary)).id.startswith("invalid"),
                "thin": [each for each in INDEXED if _thin(summary, each)],
                "figures": {each: values[each] and float(f"{values[each]:.6g}") for each in INDEXED},
                "percentiles": {
                    each: [None if cell.value is None else float(f"{cell.value:.5g}") for cell in line]
                    for each, line in cells.items()
                },
            }
        )
    points = [name.replace("_", ".") for name in POINTS]
    return {"runs": result, "figures": figures, "latencies": latencies, "points": points}


def list_document(runs: Sequence[IndexedRun], title: str) -> Document:
    """The same for the terminal."""
    rows = []
    for run in sorted(runs, key=lambda run: run.summary.run.started_at, reverse=True):
        summary = run.summary
        rate, ttft = significant(summary.throughput.output_tokens_per_s, 4), summary.latency.ttft.p50
        valid = findings.verdict(summary, findings.findings(summary))
        figures = (rate, significant(ttft, 4), TableCell(valid.id, level=valid.level))
        rows.append((run.name, *figures))
    heads: dict[str, ColumnKind] = {"run": "head", **number_columns("tokens/s", "TTFT p50, s")}
    return Document(
        "loadgen report", title, [Section("", "", [table("Runs", heads | {"validity": "text"}, rows, several=True)])]
    )
