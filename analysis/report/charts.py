"""Every chart: what it is called, what it draws, and what it shows in words.

To add one: an entry in CHARTS, whose `traces` and `layout` are Plotly's own, with references where a run's data,
colours or units belong. The page's charts.js draws them, and `plotly_figure` resolves the same for notebooks. A chart
that needs more (panels that follow a width, marks that appear close up) names a script, which draws with
`Report.chart`.

    "$x"                  a column of the run's data ("$by_position.p50": of its parts)
    "@run" "@quiet" "@run:2e"   a colour of the palette, the run's own, faded
    "@dash"               the run's dash
    @name @xunit @yunit   within a text: the run's name where there are several, the units of the axes

"alone": True belongs to pages of one run, "alone": False to those of several.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import msgspec

from loadgen.analysis.format import duration, pluralise, scale_of, significant
from loadgen.analysis.frame import Frame
from loadgen.analysis.itl_distribution import metric_samples
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.report import RunStyle, Shape, Zoom, chart_data
from loadgen.analysis.stats import PERCENTILES, samples_needed
from loadgen.analysis.summary import Summary
from loadgen.analysis.telemetry import Series

Data = Mapping[str, Any]

PALETTE = {
    "run-1": ("#0068a8", "#5cb8f2"),
    "run-2": ("#b84e00", "#f2a04a"),
    "run-3": ("#00755a", "#33c9a0"),
    "run-4": ("#97407f", "#e295c8"),
    "run-5": ("#7a6a00", "#dccb5c"),
    "run-6": ("#5a4fb0", "#b3a9f7"),
}
"""Colours of runs, in light and in dark: one per server, in the order in which they come."""
SHADES = {"ink": "#16191d", "quiet": "#58616b", "bad": "#a8320a", "idle": "#b4bcc6"}
"""Those of page.css that traces name, for figures outside of a page."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
STEPS = {"shape": "hv"}
INTERVAL = {"type": "data", "symmetric": False, "array": "$above", "arrayminus": "$below"}
SHARES = {"range": [0, 1.01], "tickvals": [0, 0.25, 0.5, 0.75, 0.9, 1], "tickformat": ".0%"}


class ChartInput(msgspec.Struct, frozen=True):
    """What a chart's data is made from."""

    frame: Frame
    summary: Summary
    series: Sequence[Series] = ()


class Chart(msgspec.Struct, frozen=True):
    """`data` gives None where a run has nothing of it; a page without any such run does not show the chart."""

    id: str
    section: str
    """Of the page: one that is there already, or a new one of this title."""
    title: str
    data: Callable[[ChartInput], Data | None]
    caption: Callable[[Data, Summary], str] = lambda _, __: ""
    traces: Sequence[Data] = ()
    layout: Data | Callable[[Sequence[Data]], Data] = {}
    """Or what makes it of all runs' data."""
    table: Mapping[str, str] = {}
    """The chart's data as rows: heads, and the column of each."""
    typical: Mapping[str, Callable[[Data], float | None]] = {}
    """Of an axis in seconds (`x`, `y`) a value that is to read well; without one it stays in seconds."""
    note: str = ""
    script: str = ""
    """A file in analysis/report/ that draws it instead of the traces."""
    shape: Shape = ""
    zoom: Zoom = "x"


class ChartRun(RunStyle, frozen=True, kw_only=True):
    """One run as the charts draw it."""

    dash: str
    summary: Summary
    data: Mapping[str, Data]
    """By chart."""


def build_chart_data(given: ChartInput) -> dict[str, Data]:
    """What each chart draws of a run."""
    return {chart.id: data for chart in CHARTS.values() if (data := chart.data(given)) is not None}


def visible_charts(runs: Sequence[ChartRun]) -> list[Chart]:
    """The charts of which one of these runs has something, in the order of the page; of several runs not those that
    draw one alone."""
    several = len(runs) > 1
    return [
        chart
        for chart in CHARTS.values()
        if any(chart.id in run.data for run in runs)
        and (chart.script or any(trace.get("alone", not several) is not several for trace in chart.traces))
    ]


def chart_spec(chart: Chart, runs: Sequence[ChartRun]) -> dict[str, Any]:
    """A chart as the page's charts.js draws it: traces and layout with their references, and the scale of each axis."""
    data = [run.data[chart.id] for run in runs if chart.id in run.data]
    scales = {}
    for axis, typical in chart.typical.items():
        factor, unit = scale_of(max((value for each in data if (value := typical(each)) is not None), default=None))
        scales[axis] = {"factor": factor, "unit": unit}
    layout = chart.layout(data) if callable(chart.layout) else chart.layout
    drawn = {"traces": chart.traces, "layout": layout, "table": chart.table, "scales": scales}
    return {"id": chart.id, "script": chart.script, **drawn}


def plotly_figure(name: str, runs: Sequence[ChartRun]) -> dict[str, Any]:
    """A chart's traces and layout for `plotly.graph_objects.Figure`, in the colours of a page on paper. Raises KeyError
    for a name that is not in CHARTS."""
    chart = CHARTS[name]
    drawn = chart_spec(chart, runs)
    several = len(runs) > 1
    traces = []
    for run in (run for run in runs if name in run.data):
        for trace in chart.traces:
            if trace.get("alone", not several) is not several:
                result = _resolved({key: each for key, each in trace.items() if key != "alone"}, run, drawn, several)
                for axis, scale in drawn["scales"].items():
                    result[axis] = [None if value is None else value * scale["factor"] for value in result[axis]]
                traces.append(result)
    layout = _resolved({"title": {"text": chart.title}, "showlegend": several, **drawn["layout"]}, None, drawn, several)
    return {"data": traces, "layout": layout}


def _resolved(value: Any, run: ChartRun | None, drawn: Data, several: bool) -> Any:
    """The same with every reference replaced."""
    if isinstance(value, Mapping):
        return {name: _resolved(each, run, drawn, several) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(each, run, drawn, several) for each in value]
    return _text(value, run, drawn, several) if isinstance(value, str) else value


def _text(value: str, run: ChartRun | None, drawn: Data, several: bool) -> Any:
    if value.startswith("$") and run:
        data: Any = run.data[drawn["id"]]
        columns = [reduce(getitem, path.split("."), data) for path in value[1:].split(",")]
        return columns[0] if len(columns) == 1 else [list(row) for row in zip(*columns, strict=True)]
    if value == "@dash":
        return run.dash if run else "solid"
    colour, _, faded = value[1:].partition(":")
    known = {**SHADES, **{name: light for name, (light, _) in PALETTE.items()}}
    if value.startswith("@") and (colour == "run" or colour in known):
        found = known[run.colour if run and colour == "run" else colour]
        red, green, blue = bytes.fromhex(found[1:])
        return f"rgba({red}, {green}, {blue}, {int(faded, 16) / 255:.2f})" if faded else found
    words = {f"{axis}unit": scale["unit"] for axis, scale in drawn["scales"].items()}
    words["name"] = run.name if run and several else ""
    return re.sub(r"@(name|xunit|yunit)\b", lambda found: words.get(found[1], "s"), value)


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "rangemode": "tozero", **more}


def _line(x: str, y: str, hover: str, **more: Any) -> dict[str, Any]:
    look = {"color": "@run", "dash": "@dash", "width": 2} | more.pop("line", {})
    base = {"type": "scatter", "mode": "lines", "name": "@name", "x": x, "y": y, "line": look}
    return base | {"hovertemplate": f"{hover}<extra>@name</extra>"} | more


def _cdf(name: str) -> Chart:
    metric = METRICS[name]

    def data(given: ChartInput) -> Data:
        curve = chart_data.distribution(metric_samples(metric, given.frame), int(given.frame.sampled.sum()))
        return curve | chart_data.confidence_band(curve) | chart_data.percentile_marks(given.summary.latency[name])

    def caption(curve: Data, summary: Summary) -> str:
        if not curve["n"]:
            return "No sample."
        described = summary.latency[name]
        thin = [each for each in ("p50", "p99") if each in described.thin]
        said = (f"{each} {duration(described.of(each), 4)}{'*' * (each in thin)}" for each in ("p50", "p99"))
        needed = f" (* {samples_needed(PERCENTILES[thin[0]]):,} needed)" if thin else ""
        return f"{', '.join(said)}; {pluralise(curve['n'], 'sample')}{needed}."

    edge = {"type": "scatter", "mode": "lines", "x": "$x", "hoverinfo": "skip", "showlegend": False}
    edge |= {"line": {"width": 0, "shape": "hv"}}
    traces = (
        edge | {"y": "$low"},
        edge | {"y": "$high", "fill": "tonexty", "fillcolor": "@run:2e"},
        _line("$x", "$y", "%{y:.2%} within %{x:.4~g} @xunit", line=STEPS),
        {
            "type": "scatter",
            "mode": "markers+text",
            "x": "$mark_x",
            "y": "$mark_y",
            "text": "$mark",
            "hoverinfo": "skip",
        }
        | {"textposition": "bottom right", "marker": {"color": "@ink", "size": 6}, "cliponaxis": False, "alone": True},
    )
    log = name == "itl_s"  # tokens that came together, and stalls: four powers of ten
    x = _axis(f"{metric.short}, @xunit{' (log)' if log else ''}", rangemode="normal", type="log" if log else "linear")
    layout = {"xaxis": x, "yaxis": SHARES, "margin": {"l": 60, "r": 36, "t": 10, "b": 44}}
    table = {name: "x", "share": "y"}
    middle = {"x": lambda curve: curve["x"][len(curve["x"]) // 2] if curve["x"] else None}
    return Chart(name, "latency", metric.title, data, caption, traces, layout, table, middle)


def _over_time(name: str, unit: str, axis: str) -> list[Data]:
    """p50 and p99 of a latency, each with the samples that it rests on."""
    hover = f"{name.upper()} @figure %{{y:.4~g}} {unit} of %{{customdata:,}} from %{{x}} s"
    more = {"yaxis": axis, "customdata": f"${name}_n", "connectgaps": False, "showlegend": name == "ttft"}
    more |= {"mode": "lines+markers", "marker": {"size": 3}}
    return [
        _line("$x", f"${name}_{figure}", hover.replace("@figure", figure), line=look, **more, name=f"@name {figure}")
        for figure, look in (("p50", {}), ("p99", {"width": 1.3, "dash": "dot"}))
    ]


def _first_tokens(of: str, title: str, x_title: str, caption: Callable[[Data, Summary], str]) -> Chart:
    hover = "request %{customdata[0]}, %{customdata[1]:,}. sent, %{customdata[2]:,} prompt tokens<br>TTFT %{y:.4~g} s"
    points = {"type": "scatter", "mode": "markers", "x": f"${of}", "y": "$ttft_s", "showlegend": False}
    points |= {"marker": {"color": "@run:66", "size": 5, "line": {"width": 0}}}
    points["hovertemplate"] = f"{hover}<extra>@name</extra>"
    points["customdata"] = "$request,position,prompt"

    def data(given: ChartInput) -> Data | None:
        first = chart_data.first_tokens(given.frame)
        told = first["prompts"] and first["prompts"][0] != first["prompts"][1]
        return first if told or of == "position" else None

    def line(figure: str, **more: Any) -> dict[str, Any]:
        title = {"p50": "median"}.get(figure, figure)
        return _line(f"$by_{of}.x", f"$by_{of}.{figure}", f"{title} here %{{y:.4~g}} s", **more)

    ink, dots = {"color": "@ink"}, {"color": "@ink", "width": 1.2, "dash": "dot"}
    alone = (line("p50", alone=True, name="median", line=ink), line("p90", alone=True, name="p90", line=dots))
    x = _axis(x_title, rangemode="normal" if of == "prompt" else "tozero")
    layout = {"showlegend": True, "xaxis": x, "yaxis": _axis("TTFT, s")}
    table = {"request": "request", "position": "position", "prompt_tokens": "prompt", "ttft_s": "ttft_s"}
    return Chart(of, "waiting", title, data, caption, (points, line("p50", alone=False), *alone), layout, table)


def _position(first: Data, _: Summary) -> str:
    trend = first["by_position"]
    if not first["n"]:
        return "No sample."
    if not trend["x"]:
        return f"{pluralise(first['n'], 'request')}: too few for a trend."
    told = set(first["prompts"])
    text = f"{_rise(trend)}."
    text += f" Every prompt had {pluralise(told.pop(), 'token')}." if len(told) == 1 else ""
    return f"{text} {first['drawn']:,} of {first['n']:,} points drawn." if first["drawn"] < first["n"] else text


def _prompt(first: Data, _: Summary) -> str:
    minimum, maximum = first["prompts"]  # of which there are several, or there is no such chart
    trend = f" {_rise(first['by_prompt'])} from the shortest to the longest." if first["by_prompt"]["x"] else ""
    return f"Prompts of {minimum:,} to {maximum:,} tokens.{trend}"


def _rise(trend: Data) -> str:
    begins, ends = (duration(trend["p50"][index]) for index in (0, -1))
    return f"Median TTFT from {begins} to {ends}"


def _gaps(lifetime: Data, _: Summary) -> str:
    if not lifetime["token"]:
        return "No output had two chunks, so there is no gap."
    known = [(token, gap) for token, gap in zip(lifetime["token"], lifetime["p50"], strict=True) if gap is not None]
    wide = f" (tokens in groups of {lifetime['width']:,})" if lifetime["width"] > 1 else ""
    longest = lifetime["longest"][0]
    where = f"token {longest['token']:,} of request {longest['request']}."
    maximum = f"Longest {duration(longest['gap_s'])}, {where}"
    if not known:
        return maximum
    (_, begins), (last, ends) = known[0], known[-1]
    return f"Median {duration(begins)} at first, {duration(ends)} at token {last:,}{wide}. {maximum}"


def _course(data: Data, summary: Summary) -> str:
    course = data["course"]
    if not course["start_s"]:
        return "Nothing was received."
    warmup, window = summary.requests.warmup, summary.window
    text = f"Peak {max(course['tokens_per_s']):,.0f} tokens/s in any {course['bin_s']:g} s, "
    text += f"{max(course['in_flight']):,} streams in flight, {max(course['receiving']):,} receiving."
    text += f" {warmup:,} warm-up requests came before 0 and are in no figure." if warmup else ""
    ends = f"{significant(window.from_s)} s to {significant(window.to_s)} s"
    return text if window.whole else f"{text} Measured from {ends}."


def _latencies(found: Data, _: Summary) -> str:
    worst = {state: max(found[f"{state}_per_s"]) for state in ("failed", "rejected")}
    parts = [f"at most {significant(rate)} {state}/s" for state, rate in worst.items() if rate]
    return f"Per {found['bin_s']:g} s; {', '.join(parts) or 'no failure'}."


def _heat_layout(data: Sequence[Data]) -> Data:
    edges = data[0]["edges"]
    ticks = {"tickvals": list(range(0, len(edges), 4)), "ticktext": [duration(edge, 3) for edge in edges[::4]]}
    return {"xaxis": _axis("time, s"), "yaxis": _axis("", **ticks), "bargap": 0}


def _timeline(drawn: Data, _: Summary) -> str:
    if drawn["drawn"] == drawn["n"]:
        return f"All {drawn['n']:,} requests sent." if drawn["n"] else "Nothing was sent."
    some = f"{drawn['drawn']:,} of {drawn['n']:,} requests: 1 in {drawn['every']:,} in the order sent"
    return f"{some}, the 100 slowest, and up to 100 that were not complete."


def _gap_line(figure: str, title: str, line: Data, **more: Any) -> dict[str, Any]:
    hover = f"{title} before token %{{x}}: %{{y:.4~g}} @yunit"
    return _line("$token", f"${figure}", hover, connectgaps=False, line=line, **more)


def _longest_gaps(colour: str, **more: Any) -> dict[str, Any]:
    hover = "%{y:.4~g} @yunit before token %{x}<br>of request %{customdata}<extra>@name</extra>"
    points = {"type": "scatter", "mode": "markers", "x": "$longest_token", "y": "$longest_gap", "name": "longest"}
    look = {"symbol": "diamond-open", "size": 8, "color": colour, "line": {"width": 1.5}}
    return points | {"customdata": "$longest_of", "hovertemplate": hover} | more | {"marker": look}


def _gap_layout(data: Sequence[Data]) -> Data:
    """A few gaps are far longer than the rest: the axis becomes logarithmic."""
    gaps = [gap for each in data for name in (*chart_data.SHOWN, "max") for gap in each[name] if gap]
    log = bool(gaps) and max(gaps) > 20 * min(gaps)
    look = {"type": "log", "dtick": 1} if log else {"rangemode": "tozero"}
    y = {"title": {"text": f"gap before it, @yunit{' (log)' if log else ''}"}, **look}
    return {"showlegend": True, "xaxis": _axis("output token"), "yaxis": y}


def _instants(name: str, column: str, colour: str) -> dict[str, Any]:
    points = {"type": "scatter", "mode": "markers", "name": name, "x": f"${column}", "y": "$position"}
    return points | {"marker": {"color": colour, "size": 3}}


HEAT = {
    **{"type": "bar", "alone": True, "x": "$x", "base": "$base", "y": "$height", "width": "$width", "name": ""},
    "marker": {"color": "$heat", "colorscale": [[0, "@run:20"], [1, "@run"]], "line": {"width": 0}},
    "customdata": "$n,low,high",
    "hovertemplate": "%{customdata[0]:,} of %{customdata[1]} s to %{customdata[2]} s at %{x:.4~g} s<extra></extra>",
}
AS_REQUESTED = {
    **{"type": "line", "xref": "x", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1},
    "line": {"color": "@quiet", "width": 1, "dash": "dot"},
}
CHARTS: dict[str, Chart] = {
    chart.id: chart
    for chart in (
        Chart(
            "goodput",
            "goodput",
            "Attainment over the scale of the bounds",
            lambda given: chart_data.goodput_curve(given.summary),
            traces=(_line("$x", "$y", "%{y:.2%} with bounds x%{x:.4~g}", line=STEPS),),
            layout={"xaxis": _axis("scale of the bounds"), "yaxis": SHARES, "shapes": [AS_REQUESTED]},
            table={"scale": "x", "attainment": "y"},
            note="All bounds scaled together by the factor below: at 1 they are as requested.",
        ),
        Chart(
            "turns",
            "turns",
            "Time to first token over the turns",
            lambda given: chart_data.ttft_by_turn(given.summary),
            traces=(_line("$turn", "$p50", "%{y:,.4~g} ms in turn %{x}", mode="lines+markers", error_y=INTERVAL),),
            layout=lambda data: {
                "xaxis": _axis(
                    "turn", tickformat="d", dtick=1 if max(len(each["turn"]) for each in data) < 21 else None
                ),
                "yaxis": _axis("TTFT p50, ms"),
            },
            table={"turn": "turn", "TTFT p50, ms": "p50", "from": "low", "to": "high"},
            note="The median and its 95 % interval, over the complete requests of each turn.",
        ),
        *(_cdf(name) for name in ("e2e_s", "ttft_s", "tpot_s", "itl_s")),
        _first_tokens("position", "TTFT by place in the queue", "place in the order sent", _position),
        _first_tokens("prompt", "TTFT by prompt length", "prompt tokens", _prompt),
        Chart(
            "gaps",
            "gaps",
            "Time before each token",
            lambda given: chart_data.gaps_by_token(given.frame),
            _gaps,
            traces=(
                _gap_line("p50", "median", {"width": 2.2}, alone=True, name="median"),
                _gap_line("p90", "p90", {"width": 1.3, "dash": "dash"}, alone=True, name="p90"),
                _gap_line("p99", "p99", {"width": 1.3, "dash": "dot"}, alone=True, name="p99"),
                _gap_line("max", "largest", {"width": 1, "color": "@quiet"}, alone=True, name="largest"),
                _gap_line("p50", "median", {"width": 2.2}, alone=False, name="@name, median"),
                _gap_line("p99", "p99", {"width": 1.3, "dash": "dot"}, alone=False, name="@name, p99"),
                _longest_gaps("@bad", alone=True),
                _longest_gaps("@run", alone=False, showlegend=False),
            ),
            layout=_gap_layout,
            table={name: name for name in ("token", "n", *chart_data.SHOWN, "max")},
            typical={"y": lambda found: next((gap for gap in found["p50"] + found["max"] if gap), None)},
            note="Spikes at one token are stalls of every output; lone diamonds are stalls of single ones. A chunk of "
            "several tokens counts once, before its first. Percentiles are within 1 %, the largest exact.",
            shape="wide",
        ),
        Chart(
            "course",
            "course",
            "Tokens and streams",
            lambda given: {
                "course": chart_data.throughput_series(given.frame),
                "series": chart_data.telemetry_panels(given.series),
            },
            _course,
            traces=(
                _line("$course.start_s", "$course.tokens_per_s", "%{y:,.0f} tokens/s from %{x:.4~g} s", line=STEPS),
            ),
            layout={"xaxis": _axis("time, s"), "yaxis": _axis("output tokens/s")},
            note="Streams: the most in each interval. Below, readings of server, GPUs and host; a break in a line is a "
            "reading that failed.",
            script="throughput.js",
            shape="tall",
        ),
        Chart(
            "latencies",
            "course",
            "Latency, failures and rejections",
            lambda given: chart_data.latency_series(given.frame),
            _latencies,
            traces=(
                *(*_over_time("ttft", "s", "y"), *_over_time("tpot", "ms", "y2")),
                _line(
                    "$x", "$failed_per_s", "%{y:.4~g} failed/s from %{x} s", line=STEPS, yaxis="y3", showlegend=False
                ),
                _line(
                    "$x",
                    "$rejected_per_s",
                    "%{y:.4~g} rejected/s from %{x} s",
                    line=STEPS | {"dash": "dot"},
                    yaxis="y3",
                    showlegend=False,
                ),
            ),
            layout={
                "showlegend": True,
                "xaxis": _axis("time, s", anchor="y3"),
                **{
                    f"yaxis{place}": _axis(title, domain=domain, nticks=4, **look)
                    for place, title, domain, look in (
                        ("", "TTFT", [0.68, 1], {"tickformat": "~s", "ticksuffix": "s"}),
                        ("2", "TPOT, ms", [0.32, 0.64], {}),
                        ("3", "incomplete/s", [0, 0.24], {}),
                    )
                },
            },
            table={"from_s": "x"}
            | {f"ttft_{each}": f"ttft_{each}" for each in ("n", "p50", "p99")}
            | {f"tpot_{each}": f"tpot_{each}" for each in ("n", "p50", "p99")}
            | {"failed_per_s": "failed_per_s", "rejected_per_s": "rejected_per_s"},
            note="TTFT of the first tokens of each interval, TPOT of the answers that ended in it. Point at a line for "
            "its samples: p99 of few is near their largest. Below, failed requests are a solid line, and requests that "
            "the server rejected a dotted one.",
            shape="tall",
        ),
        Chart(
            "heat",
            "course",
            "Heat map of TTFT",
            lambda given: chart_data.ttft_heat_map(given.frame),
            traces=(HEAT,),
            layout=_heat_layout,
            table={"at_s": "x", "from_ttft_s": "low", "to_ttft_s": "high", "requests": "n"},
            note="First tokens by when they came and by their TTFT: the darker, the more.",
            shape="wide",
        ),
        Chart(
            "timeline",
            "timeline",
            "From sent to last token",
            lambda given: chart_data.timeline(given.frame),
            _timeline,
            traces=(
                _instants("sent", "sent_s", "@idle"),
                _instants("first token", "first_s", "@run"),
                _instants("last token", "last_s", "@ink"),
            ),
            layout={"xaxis": _axis("time, s"), "yaxis": {"title": {"text": "order sent"}, "autorange": "reversed"}},
            note="Drag over a part to zoom in, double-click to reset; with the keyboard +, −, 0 and the arrows.",  # noqa: RUF001
            script="timeline.js",
            shape="tall",
            zoom="both",
        ),
        Chart(
            "sends",
            "sending",
            "When requests were sent",
            lambda given: chart_data.send_times(given.frame),
            traces=(_line("$x", "$y", "%{y:,} sent within %{x:.4~g} @xunit", line=STEPS),),
            layout={"xaxis": _axis("after the first request, @xunit"), "yaxis": _axis("requests sent")},
            table={"sent_after_s": "x", "requests": "y"},
            typical={"x": lambda sent: sent["x"][-1] if sent["x"] else None},
            shape="wide",
        ),
    )
}
"""In the order of the page."""
