"""Builds the terminal summary of a sweep, and the HTML page that shows the frontier of one or several sweeps.

A step of a sweep is the run at one load. On the page, every figure of a step links to the report of this run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

from loadgen.analysis import report as doc
from loadgen.analysis.format import UNKNOWN, duration, interval_text, percent, pluralise, significant, times_speed
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
from loadgen.analysis.sweep import (
    RATE,
    SweepResult,
    SweepStep,
    best_step,
    pareto_front,
    throughput_field,
    verdict_of,
)

UNITS = {"rate": "requests/s", "concurrency": "at a time"}
LOADS = {"rate": "request rate, requests/s", "concurrency": "concurrency, requests at a time"}
FRONTIER = """Each point is the run at one load. The line joins the points that no other point beats in both figures.
Right and up is better. Dotted: hardware limit with the same number of requests in flight; dashed: predicted. A star is
the knee. Click a point to open its run."""
FIRST = "Left and up is better: an earlier first token, and more tokens from the same GPUs."
WHOLE_SERVERS = "Tokens per second are those of whole servers: the number of GPUs is unknown. Set it with --gpus N."
BY_LOAD = """Requests per second that individually met the objectives; without objectives, all complete requests.
Thin: the rate that was sent; dashed: predicted complete requests."""
VERDICTS = {"overload": "overload, ended early"}
STABILITY_VERDICTS = {
    "met": "keeps up",
    "inconclusive": "unclear",
    "not met": "queue grows",
    "overload": "queue grows, ended early",
}
"""Verdicts of a search without objectives."""
ENDED = {
    "runs": "The maximum number of runs (--max-runs) was reached; use --resume with a larger one to narrow the "
    "interval.",
    "time": "--max-time was reached; use --resume to continue.",
    "client": "The client was the limit, so the capacity may be higher.",
    "interrupted": "The sweep was interrupted; use --resume to continue.",
}
MEANINGS = (
    ("tokens/s per user", "1 / TPOT", "The speed at which a user sees a response: the median over requests."),
    ("tokens/s", "", "Output tokens per second in the measurement window; per GPU if the number of GPUs is known."),
    ("knee", "", "The load with the largest ratio of requests/s and median E2E latency (Kleinrock, 1979)."),
    (
        "capacity",
        "",
        "The largest load at which all objectives hold, with its interval at the stated confidence. Without "
        "objectives: the largest rate at which no queue grows.",
    ),
    ("P(over)", "", "The probability, from this run alone, that an objective fails at this load in the long run."),
)
COMPARED = ("tokens_per_s_per_user", "cost_per_million_tokens", "joules_per_token")
AXES = ("tokens_per_s_per_user", "ttft_p50_s")
LOWER_IS_BETTER = ("ttft_p50_s",)
Links = Callable[[SweepResult, str], str]
"""Function that returns the link from the page to the report of a step. It takes the sweep and the step's folder."""


def format_load(over: str, load: float | None) -> str:
    """Format a load. A concurrency becomes a whole number, and a request rate gets three significant digits."""
    return f"{load:,.0f}" if over == "concurrency" and load is not None else significant(load)


def capacity_sentence(sweep: SweepResult) -> str:
    """Return a sentence that states the capacity and its confidence interval."""
    unit = UNITS[sweep.over]
    low, high = format_load(sweep.over, sweep.capacity_low), format_load(sweep.over, sweep.capacity_high)
    condition = f" with {' and '.join(sweep.objectives)}" if sweep.objectives else ""
    if sweep.state is None and sweep.fixed_loads:
        return f"{pluralise(len(sweep.steps), 'load')} measured, without objectives."
    if sweep.state == "below":
        return f"{' and '.join(sweep.objectives)}: not met even at the lowest load, {high} {unit}."
    if sweep.capacity is None:
        subject = f"{' and '.join(sweep.objectives)}: t" if sweep.objectives else "T"
        limit = "" if sweep.capacity_high is None else f"; it is below {high} {unit}"
        return f"{subject}he capacity is not known yet{limit}."
    if sweep.capacity_high is None:
        return f"Capacity: at least {low} {unit}{condition}; no load violated that."
    rough = "" if _is_settled(sweep) else " This is less exact than requested."
    between = _measured_bracket(sweep)
    if sweep.fixed_loads:
        return f"Capacity: {between} {unit}{condition}."
    meaning = "" if sweep.objectives else ": the largest rate that the server keeps up with"
    confidence = f"{sweep.confidence:.0%}"
    measured = f", {between}" if between and sweep.over == "concurrency" else ""
    capacity = format_load(sweep.over, sweep.capacity)
    interval = f"{confidence} CI {interval_text(low, high)}"
    return f"Capacity: {capacity} {unit} ({interval}){measured}{condition}{meaning}.{rough}"


def _measured_bracket(sweep: SweepResult) -> str:
    """Return the measured loads below and above the capacity with their verdicts: `between 32 (met) and 64 (not met)`.

    Return an empty string if no load below the capacity was measured, or no load above it."""
    above = next((step for step in sweep.steps if step.over > 0.5), None)
    below = [step for step in sweep.steps if step.over <= 0.5 and (above is None or step.load < above.load)]
    if above is None or not below:
        return ""
    ends = [f"{format_load(sweep.over, step.load)} ({_bracket_word(step)})" for step in (below[-1], above)]
    return f"between {' and '.join(ends)}"


def _bracket_word(step: SweepStep) -> str:
    """Return the verdict on a step (the run at one load) for `_measured_bracket`."""
    return "not met" if step.verdict == "overload" else step.verdict


def verdict_text(chance: float, *, overloaded: bool, objectives: bool) -> str:
    """Return the verdict on a step (the run at one load), for the line that is printed when the step ends."""
    if not objectives:
        return STABILITY_VERDICTS[verdict_of(chance)]
    return "overload, stopped early" if overloaded else f"P(over capacity) {format_chance(chance)}"


def format_chance(over: float) -> str:
    """Format a probability as a whole percentage, or as `< 1%` or `> 99%` near 0 and 1."""
    if over < 0.01:
        return "< 1%"
    return "> 99%" if over > 0.99 else f"{100 * over:.0f}%"


def findings(sweep: SweepResult) -> list[Finding]:
    """Return the findings on a sweep. The first finding states the capacity, and the others state limitations."""
    settled = _is_settled(sweep)
    results = [Finding("capacity", "ok" if settled else "warning", capacity_sentence(sweep), "steps")]
    if sweep.ended in ENDED:
        level: doc.Level = "note" if settled else "warning"
        if sweep.ended == "client":
            level = "error"
        results.append(Finding("ended", level, ended_sentence(sweep)))
    if sweep.speed != 1:
        text = f"No energy or cost: the server ran{times_speed(sweep.speed)}. Use --speed 1 to get them."
        results.append(Finding("speed", "note", text))
    return results


def ended_sentence(sweep: SweepResult) -> str:
    """Return a sentence that explains why a sweep ended early.

    If the client was the limit, the sentence also says what limited the client.
    """
    if sweep.ended != "client":
        return ENDED[sweep.ended]
    limited = next((step for step in reversed(sweep.steps) if step.client == "limited" and step.client_reasons), None)
    cause = "" if limited is None else f" At {format_load(sweep.over, limited.load)} {UNITS[sweep.over]}: "
    return ENDED["client"] + (f"{cause}{'; '.join(limited.client_reasons)}." if limited else "")


def _verdict(step: SweepStep, sweep: SweepResult) -> str:
    """Return the verdict on a step (the run at one load) in words.

    The result is empty for a sweep over a fixed list of loads without objectives.
    """
    if sweep.state is not None and not sweep.objectives:
        return STABILITY_VERDICTS[step.verdict]
    return VERDICTS.get(step.verdict, step.verdict)


def _remarks(step: SweepStep, sweep: SweepResult) -> str:
    """Return a table cell about a step: its verdict, its number of rejected requests, and `knee` if it is the knee."""
    rejections = f"{step.rejected:,} rejected" if step.rejected else ""
    remarks = "; ".join(filter(None, [_verdict(step, sweep), rejections]))
    return ", ".join(filter(None, [remarks, "knee" if step.step == sweep.knee else ""]))


def _is_settled(sweep: SweepResult) -> bool:
    """Return True if the sweep reached its goal, else False.

    The goal of a capacity search is an interval as narrow as requested. A search without a useful next load has also
    reached its goal. The goal of a fixed list of loads is a capacity between two of these loads, or only the
    measurements if there are no objectives."""
    if sweep.state is None:
        return sweep.fixed_loads
    return sweep.state == "found" or (sweep.state == "open" and sweep.ended == "done")


def terminal_document(sweep: SweepResult) -> Document:
    """Return the terminal summary of a sweep."""
    heads: dict[str, ColumnKind] = {
        "step": "head",
        **number_columns("load", throughput_title(sweep), "per user", "TTFT p99", "TPOT p99"),
        _verdict_title(sweep): "text",
    }
    field = throughput_field([sweep])
    rows: list[Cells] = [
        (
            f"{step.step}",
            format_load(sweep.over, step.load),
            significant(getattr(step, field)),
            significant(step.tokens_per_s_per_user),
            duration(step.ttft_p99_s),
            duration(step.tpot_p99_s),
            _remarks(step, sweep),
        )
        for step in sweep.steps
    ]
    steps = table("Steps, by load", heads, rows, several=True)
    blocks = [doc.Findings(findings(sweep)), *_cards(sweep, lambda _sweep, _folder: ""), steps]
    section = Section("answer", "", blocks)
    return Document("loadgen sweep", sweep.name, [section], sweep.model or "", sweep.mark, [RunStyle(sweep.name)])


def _verdict_title(sweep: SweepResult) -> str:
    """Return the heading of the verdict column. It is `remarks` for a fixed list of loads without objectives."""
    if sweep.objectives:
        return "objectives"
    return "remarks" if sweep.state is None else "the server"


def frontier_document(sweeps: Mapping[str, SweepResult], link: Links) -> Document:
    """Return the frontier page of one or several sweeps. The keys of `sweeps` are the names that the page shows."""
    results, several = list(sweeps.values()), len(sweeps) > 1
    styles = [RunStyle(name, colour, sweep.mark) for (name, sweep), colour in zip(sweeps.items(), cycle(PALETTE))]
    answers: list[Block] = []
    for index, sweep in enumerate(results):
        answers += [Paragraph("", run=index)] if several else []
        answers += [doc.Findings(findings(sweep)), *_cards(sweep, link)]
    if several:
        answers.append(_comparison(sweeps, link))
    mixed = len({sweep.over for sweep in results}) > 1
    if mixed:
        answers.append(
            Paragraph("Request rates and concurrencies are different kinds of load; compare tokens instead.")
        )
    per = " per GPU" if throughput_field(results) == RATE else ""
    if not per:
        answers.append(Paragraph(WHOLE_SERVERS))
    charts = [
        ChartRef("frontier", f"Throughput{per} against speed per user", [FRONTIER], "wide", "none"),
        ChartRef("first", f"Throughput{per} against TTFT", [FIRST], "wide", "none"),
    ]
    steps: list[Block] = []
    for index, sweep in enumerate(results):
        steps += [Paragraph("", run=index)] if several else []
        steps.append(_steps(sweep, throughput_field(results), link))
    title = f"{pluralise(len(sweeps), 'sweep')}" if several else next(iter(sweeps))
    unit = "load" if mixed else LOADS[results[0].over]
    sections = [
        Section("answer", "Capacity", answers),
        Section("frontier", "Frontier", charts),
        Section("load", "Goodput by load", [ChartRef("goodput", "Goodput by load", [BY_LOAD], "wide", "none")]),
        Section("steps", "Steps", steps),
        Section("words", "What the terms mean", [doc.Definitions(MEANINGS)], "Terms"),
    ]
    mark = next((sweep.mark for sweep in results if sweep.mark), "")
    data = {"runs": _chart_data(sweeps, link), "charts": _charts(unit, per)}
    subtitle = "" if several else results[0].model or ""
    return Document("loadgen sweep", title, sections, subtitle, mark, styles, ["frontier.js"], data, results[0].version)


def _cards(sweep: SweepResult, link: Links) -> list[Block]:
    """Return cards that show the capacity and the main figures at the largest load that met the objectives."""
    step = best_step(sweep)
    if step is None:
        return []
    cards, report = list[Card](), link(sweep, step.folder)
    if sweep.capacity and sweep.state is not None:
        known_ends = [end for end in (sweep.capacity_low, sweep.capacity_high) if end is not None]
        ends = ""
        if known_ends:
            ends = interval_text(*(format_load(sweep.over, end) for end in (known_ends[0], known_ends[-1])))
        cards.append(Card("Capacity", format_load(sweep.over, sweep.capacity), UNITS[sweep.over], ends, report))
    at_load = f"at {format_load(sweep.over, step.load)} {UNITS[sweep.over]}"
    price = f"{significant(sweep.gpu_hour_cost)} per {'GPU hour' if sweep.gpus else 'server hour'}"
    figures = (
        ("Per GPU" if sweep.gpus else "Throughput", getattr(step, throughput_field([sweep])), "tokens/s", at_load),
        ("Per user", step.tokens_per_s_per_user, "tokens/s", at_load),
        ("Cost", step.cost_per_million_tokens, "per million tokens", f"{at_load}, {price}"),
        ("Energy", step.joules_per_token, "J per token", f"{at_load}, power {sweep.power}"),
    )
    cards += [
        Card(name, significant(value), unit, note, report) for name, value, unit, note in figures if value is not None
    ]
    return [Cards(cards)]


def throughput_title(*sweeps: SweepResult) -> str:
    """Return the title of the throughput column that compares these sweeps, such as `tokens/s per GPU`."""
    return "tokens/s per GPU" if throughput_field(sweeps) == RATE else "tokens/s"


def _steps(sweep: SweepResult, rate: str, link: Links) -> doc.Table:
    """Return the table of all steps of a sweep. `rate` is the name of the SweepStep field that holds the throughput."""
    heads: dict[str, ColumnKind] = {
        "step": "head",
        **number_columns("load"),
        _verdict_title(sweep): "text",
        **number_columns("P(over)", "complete", "rejected"),
        **number_columns("requests/s", "goodput/s", f"tokens/s{' per GPU' * (rate == RATE)}"),
    }
    heads |= number_columns("tokens/s per user", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
    extra = [
        (title, name)
        for title, name in (("cost per M", "cost_per_million_tokens"), ("J/token", "joules_per_token"))
        if any(getattr(step, name) is not None for step in sweep.steps)
    ]
    heads |= number_columns(*(title for title, _ in extra))
    rows = list[Cells]()
    for step in sweep.steps:
        report = link(sweep, step.folder)

        def cell(text: str, value: float | None = None, report: str = report) -> TableCell:
            return TableCell(text, value, link=report if text != UNKNOWN else "")

        rates = (step.requests_per_s, step.goodput_per_s, getattr(step, rate), step.tokens_per_s_per_user)
        times = (step.ttft_p50_s, step.ttft_p99_s, step.tpot_p50_s, step.tpot_p99_s)
        rows.append(
            (
                cell(str(step.step) + ", knee" * (step.step == sweep.knee), step.step),
                cell(format_load(sweep.over, step.load), step.load),
                _verdict(step, sweep),
                cell(UNKNOWN if sweep.state is None else format_chance(step.over), step.over),
                cell(percent(step.complete / step.planned) if step.planned else UNKNOWN),
                cell(percent(step.rejected / step.planned) if step.planned else UNKNOWN, step.rejected),
                *(cell(significant(value), value) for value in rates),
                *(cell(duration(time), time) for time in times),
                *(cell(significant(getattr(step, name)), getattr(step, name)) for _, name in extra),
            )
        )
    return table("Steps, by load", heads, rows, several=True)


def _comparison(sweeps: Mapping[str, SweepResult], link: Links) -> doc.Table:
    """Return a table that compares sweeps, each at the largest load that met its objectives."""
    rate = throughput_field(sweeps.values())
    heads: dict[str, ColumnKind] = {
        "server": "head",
        **number_columns("capacity", throughput_title(*sweeps.values()), "tokens/s per user"),
    }
    heads |= number_columns("cost per M tokens", "J per token")
    rows = []
    for index, sweep in enumerate(sweeps.values()):
        step = best_step(sweep)
        report = "" if step is None else link(sweep, step.folder)
        values = [None if step is None else getattr(step, name) for name in (rate, *COMPARED)]
        capacity = UNKNOWN
        if sweep.capacity is not None:
            capacity = f"{format_load(sweep.over, sweep.capacity)} {UNITS[sweep.over]}"
        first = TableCell(capacity, sweep.capacity, link=report if sweep.capacity else "")
        cells = (TableCell(significant(value), value, link=report if value else "") for value in values)
        rows.append((TableCell("", run=index), first, *cells))
    return table("At the largest load that met the objectives", heads, rows, several=True)


def _chart_data(sweeps: Mapping[str, SweepResult], link: Links) -> list[dict[str, Any]]:
    """Return the chart data of each sweep. The first sweep's data also contains the joint frontier of all sweeps."""
    all_steps = [step for sweep in sweeps.values() for step in sweep.steps if step.verdict != "overload"]
    rate, runs = throughput_field(sweeps.values()), []
    for index, ((name, sweep), colour) in enumerate(zip(sweeps.items(), cycle(PALETTE))):
        data = {"goodput": _goodput_data(sweep, link)}
        for chart, x in zip(("frontier", "first"), AXES, strict=True):
            front = [] if index else pareto_front(all_steps, x, rate, less=x in LOWER_IS_BETTER)
            best = _columns(front, x, rate, sweep, link)
            data[chart] = _frontier_data(sweep, x, rate, link) | {"best_x": best["x"], "best_y": best["y"]}
        dash = DASHES[index // len(PALETTE) % len(DASHES)]
        runs.append({"name": name, "colour": colour, "dash": dash, "window": None, "data": data})
    return runs


def _goodput_data(sweep: SweepResult, link: Links) -> dict[str, Any]:
    """Return the data of one sweep for the chart of goodput by load."""
    data = _columns(sweep.steps, "load", "requests_per_s", sweep, link)
    requested = data["x"] if sweep.over == "rate" else []
    predicted = [point for point in sweep.predicted if "requests_per_s" in point]
    return data | {
        "y": [step.requests_per_s if step.goodput_per_s is None else step.goodput_per_s for step in sweep.steps],
        "asked_x": requested,
        "asked_y": requested,
        "predicted_x": [point["load"] for point in predicted],
        "predicted_y": [point["requests_per_s"] for point in predicted],
    }


def _frontier_data(sweep: SweepResult, x: str, rate: str, link: Links) -> dict[str, Any]:
    """Return the data of one sweep for a chart of throughput against the SweepStep field `x`.

    The data contains the steps, the knee, the hardware limits and the predictions."""
    steps = [step for step in sweep.steps if step.verdict != "overload"]
    known = [step for step in steps if getattr(step, x)]
    knee = _columns([step for step in known if step.step == sweep.knee], x, rate, sweep, link)
    limits = [step for step in steps if step.limit_tokens_per_s_per_user] if x == AXES[0] else []
    limits.sort(key=lambda step: step.limit_tokens_per_s_per_user or 0)
    gpus = 1 if rate == RATE else sweep.gpus or 1
    predicted = [point for point in sweep.predicted if x in point and rate in point]
    return _columns(known, x, rate, sweep, link) | {
        "knee_x": knee["x"],
        "knee_y": knee["y"],
        "limit_x": [step.limit_tokens_per_s_per_user for step in limits],
        "limit_y": [(step.limit_tokens_per_s_per_gpu or 0) * gpus for step in limits],
        "predicted_x": [point[x] for point in predicted],
        "predicted_y": [point[rate] for point in predicted],
    }


def _columns(steps: Sequence[SweepStep], x: str, y: str, sweep: SweepResult, link: Links) -> dict[str, Any]:
    """Return chart columns with the coordinates, labels and report links of these steps."""
    unit = UNITS[sweep.over]
    return {
        "x": [getattr(step, x) for step in steps],
        "y": [getattr(step, y) for step in steps],
        "load": [step.load for step in steps],
        "text": [f"{format_load(sweep.over, step.load)} {unit}" for step in steps],
        "report": [link(sweep, step.folder) for step in steps],
    }


def _charts(load: str, per: str) -> list[dict[str, Any]]:
    """Return the chart definitions of the page.

    `load` is the title of the load axis. `per` is ` per GPU` if throughput is shown per GPU, or empty if it is that of
    whole servers."""

    def points(hover: str, mode: str = "markers") -> dict[str, Any]:
        style = {"color": "@run", "size": 9}
        data = {"x": "$x", "y": "$y", "text": "$text", "customdata": "$report", "marker": style}
        lines = {"line": {"color": "@run:60", "width": 1}} if "lines" in mode else {}
        return {"type": "scatter", "mode": mode, "name": "@name", "hovertemplate": hover, **data, **lines}

    def line(name: str, prefix: str, dash: str, colour: str) -> dict[str, Any]:
        data = {"x": f"${prefix}_x", "y": f"${prefix}_y", "line": {"color": colour, "width": 1.5, "dash": dash}}
        style = {"type": "scatter", "mode": "lines", "name": name, "showlegend": False, "hoverinfo": "skip"}
        return style | data

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
    for id_, title, unit in (
        ("frontier", "tokens/s per user", "tokens/s per user"),
        ("first", "TTFT (median), s", "s to the first token"),
    ):
        traces = [
            line("hardware limit", "limit", "dot", "@run:90"),
            line("predicted", "predicted", "dash", "@run"),
            line("frontier", "best", "solid", "@quiet"),
            points(f"{hover}{unit}<extra></extra>"),
            star,
        ]
        scale = {"type": "log", "dtick": "D2"} if id_ == "first" else {"rangemode": "tozero"}
        axis = {"title": {"text": title}, **scale}
        layout = {"xaxis": axis, "yaxis": rate}
        names = {"load": "load", title: "x", f"output tokens/s{per}": "y", "report": "report"}
        charts.append({"id": id_, "script": "", "traces": traces, "layout": layout, "table": names, "scales": {}})
    layout = {"xaxis": {"title": {"text": load}, "rangemode": "tozero"}}
    layout["yaxis"] = {"title": {"text": "good requests/s"}, "rangemode": "tozero"}
    requested = line("requested", "asked", "solid", "@grid") | {"mode": "lines"}
    predicted = line("predicted", "predicted", "dash", "@run")
    traces = [requested, predicted, points("%{text}: %{y:.4~g} good requests/s<extra></extra>", "lines+markers")]
    names = {"load": "load", "good requests/s": "y", "report": "report"}
    charts.append({"id": "goodput", "script": "", "traces": traces, "layout": layout, "table": names, "scales": {}})
    return charts
