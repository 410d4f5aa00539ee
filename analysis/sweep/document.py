"""What there is to say of sweeps: how much each carries, and the frontier of all of them. Every figure of a step leads
to the report of its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

from loadgen.analysis import report as doc
from loadgen.analysis.format import UNKNOWN, duration, percent, pluralise, significant, times_speed
from loadgen.analysis.report import (
    Block,
    Card,
    Cards,
    ChartRef,
    ColumnKind,
    Document,
    Finding,
    Paragraph,
    RunStyle,
    Section,
    TableCell,
)
from loadgen.analysis.report.charts import DASHES, PALETTE
from loadgen.analysis.report.tables import Cells, number_columns, table
from loadgen.analysis.sweep import RATE, SweepResult, SweepStep, best_step, pareto_front, throughput_field

UNITS = {"rate": "requests/s", "concurrency": "at a time"}
LOADS = {"rate": "request rate, requests/s", "concurrency": "concurrency, requests at a time"}
FRONTIER = """Each point is the run at one load; the line joins those that no other beats in both. Right and up is
better. Dotted: what the hardware allows with as many requests in flight; dashed: predicted. A star is the knee. Click a
point for its run."""
FIRST = "To the left and up is better: sooner a first token, and more tokens for the same GPUs."
WHOLE_SERVERS = "Tokens per second are those of whole servers: how many GPUs there are is not known; --gpus N says it."
BY_LOAD = """Requests per second that met the objectives, each by itself; without objectives, all that were complete.
Thin: the rate that was sent; dashed: complete, as predicted."""
LATENCIES = "TTFT and TPOT at the percentiles p50 and p99 are in the table below."
VERDICTS = {"overload": "overload, ended early"}
ENDED = {
    "runs": "The most runs allowed (--max-runs) were made; --resume with more narrows it.",
    "time": "--max-time was over; --resume goes on.",
    "client": "The load generator was the limit: the server carries at least as much. Use more --workers or machines.",
    "interrupted": "The sweep was interrupted; --resume goes on with it.",
}
MEANINGS = (
    ("tokens/s per user", "1 / TPOT", "How fast an answer appears to its reader: the median over requests."),
    ("tokens/s", "", "Output tokens per second of the measuring window; per GPU shared among them."),
    ("knee", "", "The load with the most requests/s for its median E2E latency (Kleinrock, 1979)."),
    (
        "capacity",
        "",
        "The largest load at which all objectives hold, with the interval that holds it by the chance named.",
    ),
    ("P(over)", "", "The probability, by this run alone, that an objective fails at this load in the long run."),
)
Links = Callable[[SweepResult, str], str]
"""From the page to the report of a step's folder."""


def capacity_sentence(found: SweepResult) -> str:
    """How much it carries, in one sentence."""
    unit, holds = UNITS[found.over], " and ".join(found.objectives)
    low, high = (significant(each) for each in (found.capacity_low, found.capacity_high))
    chance = f"{found.confidence:.0%}".replace("%", " %")
    if found.state is None:
        return f"{pluralise(len(found.steps), 'load')} measured; no objective says which is too much."
    if found.state == "below":
        return f"{holds}: not even at the lowest load, {high} {unit}."
    if found.capacity is None:
        return f"{holds}: not known yet; the capacity is below {high} {unit}."
    if found.capacity_high is None:
        return f"Capacity: at least {low} {unit} with {holds}; no load broke that."
    rough = "" if _sure(found) else " This is less exact than asked."
    return f"Capacity: {significant(found.capacity)} {unit} ({chance}: {low} to {high}) with {holds}.{rough}"


def format_chance(over: float) -> str:
    """In whole percent, never quite sure."""
    return "< 1 %" if over < 0.01 else "> 99 %" if over > 0.99 else f"{100 * over:.0f} %"


def findings(found: SweepResult) -> list[Finding]:
    """The verdict first, then what limits it."""
    sure = _sure(found)
    listed = [Finding("capacity", "ok" if sure else "warning", capacity_sentence(found), "steps")]
    if found.ended in ENDED:
        level: doc.Level = "error" if found.ended == "client" else "note" if sure else "warning"
        listed.append(Finding("ended", level, ENDED[found.ended]))
    if found.speed != 1:
        text = f"No energy or cost: the figures are those of a server{times_speed(found.speed)}; --speed 1 has them."
        listed.append(Finding("speed", "note", text))
    return listed


def _verdict(step: SweepStep) -> str:
    """Return what became of the objectives at a step, and how many of its requests were rejected."""
    rejections = f"; {step.rejected:,} rejected" if step.rejected else ""
    return VERDICTS.get(step.verdict, step.verdict) + rejections


def _sure(found: SweepResult) -> bool:
    """Whether what was asked for is known: of a list of loads, when all were measured."""
    return found.state in ("found", None) or (found.state == "open" and found.ended == "done")


def terminal_document(found: SweepResult) -> Document:
    """For the terminal."""
    heads: dict[str, ColumnKind] = {
        "step": "head",
        **number_columns("load", throughput_title(found), "per user", "TTFT p99", "TPOT p99"),
    }
    rows: list[Cells] = [
        (
            f"{step.step}",
            *map(significant, (step.load, getattr(step, throughput_field([found])), step.tokens_per_s_per_user)),
            *(duration(each) for each in (step.ttft_p99_s, step.tpot_p99_s)),
            _verdict(step) + ", knee" * (step.step == found.knee),
        )
        for step in found.steps
    ]
    steps = table("Steps, by load", heads | {"objectives": "text"}, rows, several=True)
    blocks = [doc.Findings(findings(found)), *_cards(found, lambda _found, _folder: ""), steps]
    section = Section("answer", "", blocks)
    return Document("loadgen sweep", found.name, [section], found.model or "", found.mark, [RunStyle(found.name)])


def frontier_document(sweeps: Mapping[str, SweepResult], link: Links) -> Document:
    """The page of one sweep, or of several by their names."""
    result, several = list(sweeps.values()), len(sweeps) > 1
    looks = [RunStyle(name, colour, each.mark) for (name, each), colour in zip(sweeps.items(), cycle(PALETTE))]
    answers: list[Block] = []
    for index, each in enumerate(result):
        answers += [Paragraph("", run=index)] if several else []
        answers += [doc.Findings(findings(each)), *_cards(each, link)]
    if several:
        answers.append(_compared(sweeps, link))
    if mixed := len({each.over for each in result}) > 1:
        answers.append(Paragraph("Rates and numbers of requests at a time are different loads: compare tokens."))
    per = " per GPU" if throughput_field(result) == RATE else ""
    if not per:
        answers.append(Paragraph(WHOLE_SERVERS))
    drawn = [
        ChartRef("frontier", f"Throughput{per} against speed per user", [FRONTIER], "wide", "none"),
        ChartRef("first", f"Throughput{per} against TTFT", [FIRST], "wide", "none"),
    ]
    steps: list[Block] = []
    for index, each in enumerate(result):
        steps += [Paragraph("", run=index)] if several else []
        steps.append(_steps(each, throughput_field(result), link))
    title = f"{pluralise(len(sweeps), 'sweep')}" if several else next(iter(sweeps))
    unit = "load" if mixed else LOADS[result[0].over]
    sections = [
        Section("answer", "Capacity", answers),
        Section("frontier", "Frontier", drawn),
        Section("load", "Goodput by load", [ChartRef("goodput", "Goodput by load", [BY_LOAD], "wide", "none")]),
        Section("steps", "Steps", steps),
        Section("words", "What the words mean", [doc.Definitions(MEANINGS)], "Words"),
    ]
    mark = next((each.mark for each in result if each.mark), "")
    data = {"runs": _drawn(sweeps, link), "charts": _charts(unit, per)}
    subtitle = "" if several else result[0].model or ""
    return Document("loadgen sweep", title, sections, subtitle, mark, looks, ["frontier.js"], data, result[0].version)


def _cards(found: SweepResult, link: Links) -> list[Block]:
    step = best_step(found)
    if step is None:
        return []
    cards, leads = list[Card](), link(found, step.folder)
    if found.capacity and found.state is not None:
        ends = " to ".join(significant(end) for end in (found.capacity_low, found.capacity_high) if end is not None)
        cards.append(Card("Capacity", significant(found.capacity), UNITS[found.over], ends, leads))
    at = f"at {significant(step.load)} {UNITS[found.over]}"
    priced = f"{at}, {significant(found.gpu_hour_cost)} per {'GPU hour' if found.gpus else 'hour of the server'}"
    figures = (
        ("Per GPU" if found.gpus else "Throughput", getattr(step, throughput_field([found])), "tokens/s", at),
        ("Per user", step.tokens_per_s_per_user, "tokens/s", at),
        ("Cost", step.cost_per_million_tokens, "per million tokens", priced),
        ("Energy", step.joules_per_token, "J per token", f"{at}, power {found.power}"),
    )
    cards += [
        Card(name, significant(each), unit, said, leads) for name, each, unit, said in figures if each is not None
    ]
    return [Cards(cards)]


def throughput_title(*sweeps: SweepResult) -> str:
    """What throughput is called."""
    return "tokens/s per GPU" if throughput_field(sweeps) == RATE else "tokens/s"


def _steps(found: SweepResult, rate: str, link: Links) -> doc.Table:
    heads: dict[str, ColumnKind] = {
        "step": "head",
        **number_columns("load"),
        "objectives": "text",
        **number_columns("P(over)", "complete", "rejected"),
        **number_columns("requests/s", "goodput/s", f"tokens/s{' per GPU' * (rate == RATE)}"),
    }
    heads |= number_columns("tokens/s per user", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
    extra = [
        (title, name)
        for title, name in (("cost per M", "cost_per_million_tokens"), ("J/token", "joules_per_token"))
        if any(getattr(step, name) is not None for step in found.steps)
    ]
    heads |= number_columns(*(title for title, _ in extra))
    rows = list[Cells]()
    for step in found.steps:
        leads = link(found, step.folder)

        def cell(text: str, value: float | None = None, leads: str = leads) -> TableCell:
            return TableCell(text, value, link=leads if text != UNKNOWN else "")

        plain = (step.requests_per_s, step.goodput_per_s, getattr(step, rate), step.tokens_per_s_per_user)
        times = (step.ttft_p50_s, step.ttft_p99_s, step.tpot_p50_s, step.tpot_p99_s)
        rows.append(
            (
                cell(str(step.step) + ", knee" * (step.step == found.knee), step.step),
                cell(significant(step.load), step.load),
                VERDICTS.get(step.verdict, step.verdict),
                cell(format_chance(step.over), step.over),
                cell(percent(step.complete / step.planned) if step.planned else UNKNOWN),
                cell(percent(step.rejected / step.planned) if step.planned else UNKNOWN, step.rejected),
                *(cell(significant(each), each) for each in plain),
                *(cell(duration(time), time) for time in times),
                *(cell(significant(getattr(step, name)), getattr(step, name)) for _, name in extra),
            )
        )
    return table("Steps, by load", heads, rows, several=True)


def _compared(sweeps: Mapping[str, SweepResult], link: Links) -> doc.Table:
    """What each gives at the largest load that it carries."""
    rate = throughput_field(sweeps.values())
    heads: dict[str, ColumnKind] = {
        "server": "head",
        **number_columns("capacity", throughput_title(*sweeps.values()), "tokens/s per user"),
    }
    heads |= number_columns("cost per M tokens", "J per token")
    rows = []
    for index, each in enumerate(sweeps.values()):
        step = best_step(each)
        leads = "" if step is None else link(each, step.folder)
        values = [None if step is None else getattr(step, name) for name in (rate, *COMPARED)]
        carried = f"{significant(each.capacity)} {UNITS[each.over]}" if each.capacity is not None else UNKNOWN
        first = TableCell(carried, each.capacity, link=leads if each.capacity else "")
        cells = (TableCell(significant(value), value, link=leads if value else "") for value in values)
        rows.append((TableCell("", run=index), first, *cells))
    return table("At the largest load that met the objectives", heads, rows, several=True)


COMPARED = ("tokens_per_s_per_user", "cost_per_million_tokens", "joules_per_token")


def _drawn(sweeps: Mapping[str, SweepResult], link: Links) -> list[dict[str, Any]]:
    """The data of each sweep; the frontier over all of them stands with the first."""
    everything = [step for sweep in sweeps.values() for step in sweep.steps if step.verdict != "overload"]
    rate, runs = throughput_field(sweeps.values()), []
    for index, ((name, each), colour) in enumerate(zip(sweeps.items(), cycle(PALETTE))):
        steps = [step for step in each.steps if step.verdict != "overload"]
        frontier, first = ({}, {}) if index else (pareto_front(everything, x, rate, less=x in TIMES) for x in AXES)
        by_load = _columns(each.steps, "load", "requests_per_s", each, link)
        good = [step.goodput_per_s if step.goodput_per_s is not None else step.requests_per_s for step in each.steps]
        requested = each.over == "rate"
        by_load |= {"predicted_x": [point["load"] for point in each.predicted if "requests_per_s" in point]}
        by_load |= {"predicted_y": [point["requests_per_s"] for point in each.predicted if "requests_per_s" in point]}
        by_load |= {
            "y": good,
            "asked_x": by_load["x"] if requested else [],
            "asked_y": by_load["x"] if requested else [],
        }
        data, of = {"goodput": by_load}, 1 if rate == RATE else each.gpus or 1
        for chart, x, best_steps in (("frontier", AXES[0], frontier), ("first", AXES[1], first)):
            result = _columns([step for step in steps if getattr(step, x)], x, rate, each, link)
            knee = _columns(
                [step for step in steps if step.step == each.knee and getattr(step, x)], x, rate, each, link
            )
            joined = _columns(list(best_steps), x, rate, each, link)
            limits = [step for step in steps if step.limit_tokens_per_s_per_user] if chart == "frontier" else []
            limits.sort(key=lambda step: step.limit_tokens_per_s_per_user or 0)
            predicted = [point for point in each.predicted if x in point and rate in point]
            data[chart] = result | {
                **{f"knee_{axis}": knee[axis] for axis in "xy"},
                **{f"best_{axis}": joined[axis] for axis in "xy"},
                "limit_x": [step.limit_tokens_per_s_per_user for step in limits],
                "limit_y": [(step.limit_tokens_per_s_per_gpu or 0) * of for step in limits],
                "predicted_x": [point[x] for point in predicted],
                "predicted_y": [point[rate] for point in predicted],
            }
        dash = DASHES[index // len(PALETTE) % len(DASHES)]
        runs.append({"name": name, "colour": colour, "dash": dash, "window": None, "data": data})
    return runs


AXES = ("tokens_per_s_per_user", "ttft_p50_s")
TIMES = ("ttft_p50_s",)


def _columns(steps: Sequence[SweepStep], x: str, y: str, found: SweepResult, link: Links) -> dict[str, Any]:
    unit = UNITS[found.over]
    return {
        "x": [getattr(step, x) for step in steps],
        "y": [getattr(step, y) for step in steps],
        "load": [step.load for step in steps],
        "text": [f"{significant(step.load)} {unit}" for step in steps],
        "report": [link(found, step.folder) for step in steps],
    }


def _charts(load: str, per: str) -> list[dict[str, Any]]:
    def points(hover: str, mode: str = "markers") -> dict[str, Any]:
        look = {"color": "@run", "size": 9}
        where = {"x": "$x", "y": "$y", "text": "$text", "customdata": "$report", "marker": look}
        lines = {"line": {"color": "@run:60", "width": 1}} if "lines" in mode else {}
        return {"type": "scatter", "mode": mode, "name": "@name", "hovertemplate": hover, **where, **lines}

    def line(name: str, of: str, dash: str, colour: str) -> dict[str, Any]:
        where = {"x": f"${of}_x", "y": f"${of}_y", "line": {"color": colour, "width": 1.5, "dash": dash}}
        look = {"type": "scatter", "mode": "lines", "name": name, "showlegend": False, "hoverinfo": "skip"}
        return look | where

    star: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "name": "knee",
        "showlegend": False,
        "x": "$knee_x",
        "y": "$knee_y",
        "hoverinfo": "skip",
    }
    star["marker"] = {"symbol": "star", "size": 15, "color": "@run"}
    rate = {"title": {"text": f"output tokens/s{per}"}, "rangemode": "tozero"}
    hover = f"%{{text}}: %{{y:,.4~g}} tokens/s{per}, %{{x:.4~g}} "
    charts = []
    for id_, title, said in (
        ("frontier", "tokens/s per user", "tokens/s per user"),
        ("first", "TTFT (median), s", "s to the first token"),
    ):
        traces = [
            line("hardware limit", "limit", "dot", "@run:90"),
            line("predicted", "predicted", "dash", "@run"),
            line("frontier", "best", "solid", "@quiet"),
            points(f"{hover}{said}<extra></extra>"),
            star,
        ]
        axis = {
            "title": {"text": title},
            **({"type": "log", "dtick": "D2"} if id_ == "first" else {"rangemode": "tozero"}),
        }
        layout = {"xaxis": axis, "yaxis": rate}
        names = {"load": "load", title: "x", f"output tokens/s{per}": "y", "report": "report"}
        charts.append({"id": id_, "script": "", "traces": traces, "layout": layout, "table": names, "scales": {}})
    layout = {"xaxis": {"title": {"text": load}, "rangemode": "tozero"}}
    layout["yaxis"] = {"title": {"text": "good requests/s"}, "rangemode": "tozero"}
    requested = line("asked for", "asked", "solid", "@grid") | {"mode": "lines"}
    predicted = line("predicted", "predicted", "dash", "@run")
    traces = [requested, predicted, points("%{text}: %{y:.4~g} good requests/s<extra></extra>", "lines+markers")]
    names = {"load": "load", "good requests/s": "y", "report": "report"}
    charts.append({"id": "goodput", "script": "", "traces": traces, "layout": layout, "table": names, "scales": {}})
    return charts
