"""Registry of the charts: the title, data, traces and caption of each chart.

To add a chart, add an entry to CHARTS. The `traces` and the `layout` of a chart are a Plotly figure in which references
replace the values that depend on the run. charts.js resolves the references on the page, and `plotly_figure` resolves
them for notebooks. Some charts cannot be defined by traces, for example because they have a variable number of panels.
Such a chart names a script, which draws the chart with `Report.chart`.

    "$x"                  a column of the run's data; "$by_position.p50" is a nested column.
    "@run" "@quiet"       the colour of the run, or a colour of the palette.
    "@run:2e"             the colour of the run with an opacity (two hexadecimal digits).
    "@dash"               the line style of the run.
    @name @xunit @yunit   inside a text: the name of the run (if there are several), and the units of the axes.

Traces with `"single_run": True` are only drawn on pages of one run. Traces with `"single_run": False` are only drawn on
pages of several runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, reduce
from operator import getitem
from typing import Any, cast

import msgspec

from loadgen.analysis.chunk_columns import KnownSamples
from loadgen.analysis.format import duration, percent, pluralise, scale_of, significant
from loadgen.analysis.frame import Frame
from loadgen.analysis.itl_distribution import sorted_samples
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.report import RunStyle, Shape, Zoom, chart_data, request_parts
from loadgen.analysis.report.course_findings import course_marks
from loadgen.analysis.report.gap_counts import GapCounts, count_gaps
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
"""Colours of runs, for the light and the dark colour scheme. Servers get colours in the order of their first run."""
SHADES = {
    "paper": "#ffffff",
    "ink": "#16191d",
    "quiet": "#58616b",
    "bad": "#a8320a",
    "idle": "#b4bcc6",
    "other-2": "#7a6a00",
}
"""Other colours that traces refer to, as page.css defines them. Figures in notebooks need the values."""
NOTEBOOK_MARGIN = {"t": 84, "l": 76}
"""Margins in pixels of figures in notebooks. The title and below it the legend need space that a page does not need."""
_NOTEBOOK_AXIS = {
    **{"color": SHADES["quiet"], "gridcolor": "#e6e9ed", "linecolor": "#d9dde2", "zeroline": False},
    **{"separatethousands": True, "exponentformat": "SI", "minexponent": 3, "title": {"standoff": 8}},
}
NOTEBOOK_THEME = {
    "font": {
        "family": "system-ui, Segoe UI, Roboto, Liberation Sans, sans-serif",
        "size": 12.5,
        "color": SHADES["ink"],
    },
    "title": {"x": 0.01, "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 14}},
    **{"paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff", "xaxis": _NOTEBOOK_AXIS, "yaxis": _NOTEBOOK_AXIS},
    "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    "hoverlabel": {"bgcolor": "#f5f6f8", "bordercolor": "#d9dde2", "font": {"color": SHADES["ink"]}, "align": "left"},
    "margin": {"r": 24, "b": 52},
}
"""Layout of every figure in notebooks. It has the look of the page in its light scheme (page.css and charts.js)."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
STEPS = {"shape": "hv"}
INTERVAL = {"type": "data", "symmetric": False, "array": "$above", "arrayminus": "$below"}
SHARES = {"range": [0, 1.01], "tickvals": [0, 0.5, 0.9, 1], "tickformat": ".0%"}


class FrameInput(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The part of a ChartInput that is known before the run is summarised."""

    frame: Frame
    series: Sequence[Series] = ()
    phases: Mapping[str, float] = {}
    """Mean duration in s of each phase of a request, by the server's metrics (telemetry.mean_phases)."""

    @cached_property
    def gaps(self) -> GapCounts:
        return count_gaps(self.frame)

    @cached_property
    def first_tokens(self) -> dict[str, Any]:
        return chart_data.first_tokens(self.frame)


class ChartInput(FrameInput, frozen=True, kw_only=True, dict=True):
    """Input of the functions that compute chart data for one run."""

    summary: Summary
    curves: Mapping[str, dict[str, Any]] = {}
    """Distributions that have already been computed, by name of the latency."""
    throughput: Mapping[str, Any] | None = None
    """Load and throughput over time (`chart_data.throughput_series`), if they have already been computed."""


class Chart(msgspec.Struct, frozen=True):
    """Definition of a chart.

    `data` computes the chart data of a run, or returns None if the chart does not apply to the run. A page omits charts
    that have no data."""

    id: str
    section: str
    """Id of a section of the page, or the title of a new section. Empty for a chart that no page shows by itself."""
    title: str
    data: Callable[[ChartInput], Data | None]
    caption: Callable[[Data, Summary], str] = lambda _, __: ""
    traces: Sequence[Data] = ()
    layout: Data | Callable[[Sequence[Data]], Data] = {}
    """The Plotly layout, or a function that computes the layout from the data of all runs."""
    table: Mapping[str, str] = {}
    """Columns of the table below the chart: maps a heading to a data column."""
    typical: Mapping[str, Callable[[Data], float | None]] = {}
    """Functions that return a typical value of an axis (`x` or `y`) in seconds, which determines the axis unit. Axes
    without such a function are in seconds."""
    note: str = ""
    """Explanation of how to read the chart, for the page."""
    script: str = ""
    """Name of a script in analysis/report/ that draws the chart. Empty if `traces` define the chart."""
    shape: Shape = ""
    zoom: Zoom = "x"
    details: Callable[[Data], str] = lambda _: ""
    """Sentences that the page shows only when the reader opens the data of the chart."""
    needs_summary: bool = True
    """False if `data` does not use the summary, so that the data can be computed while the run is summarised."""


class ChartRun(RunStyle, frozen=True, kw_only=True):
    """A run with its style and the data of its charts."""

    dash: str
    """Line style of the run: one of DASHES."""
    summary: Summary
    data: Mapping[str, Data]
    """Data of each chart, by chart id."""


def build_chart_data(chart_input: ChartInput, known: Mapping[str, Data | None] | None = None) -> dict[str, Data]:
    """Return the data of each chart of a run, by chart id. Charts that do not apply to the run are left out.

    `known` contains data that the caller has already computed with `data_without_summary`.
    """
    known = known or {}
    result = {}
    for chart in CHARTS.values():
        data = known[chart.id] if chart.id in known else chart.data(chart_input)
        if data is not None:
            result[chart.id] = data
    return result


def distribution_curves(frame: Frame) -> dict[str, dict[str, Any]]:
    """Return the curve of each latency whose distribution has a chart, by name of the latency.

    Latencies with too many samples to sort are left out.
    """
    sorted_names = [name for name in DISTRIBUTIONS if METRICS[name].zero_counts(frame) is None]
    return {name: _distribution_curve(name, frame) for name in sorted_names}


def curves_of_gaps(frame: Frame, samples: Mapping[str, KnownSamples]) -> dict[str, dict[str, Any]]:
    """Return the curves of the latencies whose `samples` are known, by name of the latency."""
    requests = int(frame.sampled.sum())
    return {name: chart_data.distribution(samples[name], requests) for name in DISTRIBUTIONS if name in samples}


def _distribution_curve(name: str, frame: Frame) -> dict[str, Any]:
    return chart_data.distribution(sorted_samples(METRICS[name], frame), int(frame.sampled.sum()))


def data_without_summary(frame_input: FrameInput) -> dict[str, Data | None]:
    """Return the data of the charts that do not use the summary, by chart id.

    The data of a chart is None if the chart does not apply to the run.
    """
    charts = [chart for chart in CHARTS.values() if not chart.needs_summary]
    return {chart.id: chart.data(cast("ChartInput", frame_input)) for chart in charts}


def visible_charts(runs: Sequence[ChartRun]) -> list[Chart]:
    """Return the charts of a page with these runs, in the order of the page.

    A chart is included if all of these conditions hold:

    - The chart belongs to a section.
    - At least one run has data for the chart.
    - A script draws the chart, or at least one of its traces is drawn on this page. Some traces are only drawn on a
      page of one run, or only on a page of several runs.
    """
    several = len(runs) > 1
    return [
        chart
        for chart in CHARTS.values()
        if chart.section
        and any(chart.id in run.data for run in runs)
        and (chart.script or any(_is_drawn(trace, several) for trace in chart.traces))
    ]


def _is_drawn(trace: Data, several: bool) -> bool:
    """Return True if the page draws this trace. `several` is true for a page of several runs."""
    return bool(trace.get("single_run", not several)) is not several


def chart_spec(chart: Chart, runs: Sequence[ChartRun]) -> dict[str, Any]:
    """Return the definition of a chart in the form that charts.js expects: traces, layout, table columns, axis scales.

    The traces and the layout still contain references such as `$x` and `@run`. charts.js resolves these references.
    """
    data = [run.data[chart.id] for run in runs if chart.id in run.data]
    scales = {}
    for axis, typical in chart.typical.items():
        values = [value for run_data in data if (value := typical(run_data)) is not None]
        factor, unit = scale_of(max(values, default=None))
        scales[axis] = {"factor": factor, "unit": unit}
    layout = chart.layout(data) if callable(chart.layout) else chart.layout
    drawn = {"traces": chart.traces, "layout": layout, "table": chart.table, "scales": scales}
    return {"id": chart.id, "script": chart.script, **drawn}


def plotly_figure(name: str, runs: Sequence[ChartRun]) -> dict[str, Any]:
    """Return the chart `name` of the runs as a dict for `plotly.graph_objects.Figure`.

    The chart has the light colours of the report page. If a run is simulated, the title begins with a mark such as
    SIMULATED. Raises KeyError if CHARTS has no chart with this name.
    """
    chart = CHARTS[name]
    drawn = chart_spec(chart, runs)
    several = len(runs) > 1
    traces = []
    for run in (run for run in runs if name in run.data):
        for trace in chart.traces:
            if _is_drawn(trace, several):
                plotly_trace = {key: value for key, value in trace.items() if key != "single_run"}
                result = _resolved(plotly_trace, run, drawn, several)
                for axis, scale in drawn["scales"].items():
                    result[axis] = [None if value is None else value * scale["factor"] for value in result[axis]]
                if len(result["x"]):
                    traces.append(result)
    marks = dict.fromkeys(run.mark for run in runs if run.mark)
    title = "  ".join((*marks, chart.title))
    layout = {"title": {"text": title}, "showlegend": several, "template": {"layout": NOTEBOOK_THEME}} | drawn["layout"]
    layout["margin"] = layout.get("margin", {}) | NOTEBOOK_MARGIN
    return {"data": traces, "layout": _resolved(layout, None, drawn, several)}


def _resolved(value: Any, run: ChartRun | None, drawn: Data, several: bool) -> Any:
    """Return a copy of `value` with every placeholder replaced by its value. Placeholders are texts such as `$x` and
    `@run`.

    `value` is a part of the definition of a chart, for example a trace or the layout. Nested lists and mappings are
    searched too. `_resolved_text` replaces a single placeholder, and documents the other arguments.
    """
    if isinstance(value, Mapping):
        return {name: _resolved(part, run, drawn, several) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(part, run, drawn, several) for part in value]
    return _resolved_text(value, run, drawn, several) if isinstance(value, str) else value


def _resolved_text(value: str, run: ChartRun | None, drawn: Data, several: bool) -> Any:
    """Return the value that the placeholder `value` in the definition of a chart stands for.

    - `$x` stands for the column `x` of the chart's data for the run. `$x,y` stands for rows of two columns.
    - `@run` stands for the colour of the run. The name of a colour stands for this colour of the palette, for example
      `@quiet`. A hexadecimal number after a colon is the opacity, as in `@run:2e`.
    - `@dash` stands for the line style of the run.
    - Any other text is returned after two replacements. `@xunit` and `@yunit` become the units of the axes. `@name`
      becomes the name of the run, or is removed if the chart shows a single run (`several` is False).

    `drawn` contains the id of the chart and the scales of the axes.
    """
    if value.startswith("$") and run:
        data: Any = run.data[drawn["id"]]
        columns = [reduce(getitem, path.split("."), data) for path in value[1:].split(",")]
        return columns[0] if len(columns) == 1 else [list(row) for row in zip(*columns, strict=True)]
    if value == "@dash":
        return run.dash if run else "solid"
    colour, _, faded = value[1:].partition(":")
    known = {**SHADES, **{name: light for name, (light, _) in PALETTE.items()}}
    if value.startswith("@") and (colour == "run" or colour in known):
        hex_colour = known[run.colour if run and colour == "run" else colour]
        red, green, blue = bytes.fromhex(hex_colour[1:])
        return f"rgba({red}, {green}, {blue}, {int(faded, 16) / 255:.2f})" if faded else hex_colour
    words = {f"{axis}unit": scale["unit"] for axis, scale in drawn["scales"].items()}
    words["name"] = run.name if run and several else ""
    return re.sub(r"@(name|xunit|yunit)\b", lambda match: words.get(match[1], "s"), value)


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "rangemode": "tozero", **more}


def _line(x: str, y: str, hover: str, **more: Any) -> dict[str, Any]:
    look = {"color": "@run", "dash": "@dash", "width": 2} | more.pop("line", {})
    base = {"type": "scatter", "mode": "lines", "name": "@name", "x": x, "y": y, "line": look}
    return base | {"hovertemplate": f"{hover}<extra>@name</extra>"} | more


def _single_bound(number: int) -> dict[str, Any]:
    """Return the chart curve for one of several goodput bounds: the share of requests that meet this bound.

    `number` is the number of the bound, from 1. A request that meets this bound counts even if it misses another bound.
    The curve is only drawn if the chart shows a single run.
    """
    look = STEPS | {"color": f"@run-{number + 1}", "width": 1.5, "dash": DASHES[number]}
    bound = f"$bound_{number}"
    hover = "%{y:.2%} meet this bound x%{x:.4~g}"
    return _line(f"{bound}.x", f"{bound}.y", hover, line=look, name=f"{bound}.name", single_run=True)


DISTRIBUTIONS = ("e2e_s", "first_audio_s", "ttft_s", "tpot_s", "itl_s")
"""Latencies whose distribution has a chart."""


def _distribution_chart(name: str) -> Chart:
    """Return the chart of the cumulative distribution of the latency `name`.

    If no request has this latency, the chart is normally shown without a curve. The page omits the chart in two cases:
    the latency is optional, or the run generates no tokens.
    """
    metric = METRICS[name]

    def data(chart_input: ChartInput) -> Data | None:
        frame, summary = chart_input.frame, chart_input.summary
        if not summary.latency[name].n and (metric.optional or not summary.generates):
            return None
        curve = chart_input.curves[name] if name in chart_input.curves else _distribution_curve(name, frame)
        marks = chart_data.percentile_marks(chart_input.summary.latency[name])
        return curve | chart_data.confidence_band(curve) | marks

    def caption(curve: Data, summary: Summary) -> str:
        if not curve["n"]:
            return "No sample."
        described = summary.latency[name]
        thin = [percentile for percentile in ("p50", "p99") if percentile in described.thin]
        texts = []
        for percentile in ("p50", "p99"):
            mark = "*" if percentile in thin else ""
            texts.append(f"{percentile} {duration(described.of(percentile), 4)}{mark}")
        return f"{', '.join(texts)}."

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
            "textposition": "bottom right",
            "marker": {"color": "@ink", "size": 6},
            "cliponaxis": False,
            "single_run": True,
        },
    )
    log = name == "itl_s"  # from tokens that arrive together to stalls, ITL spans four powers of ten
    x = _axis(f"{metric.short}, @xunit{' (log)' if log else ''}", rangemode="normal", type="log" if log else "linear")
    layout = {"xaxis": x, "yaxis": SHARES, "margin": {"l": 60, "r": 36, "t": 10, "b": 44}}
    table = {name: "x", "share": "y"}
    middle = {"x": lambda curve: curve["x"][len(curve["x"]) // 2] if curve["x"] else None}
    return Chart(name, "latency", metric.title, data, caption, traces, layout, table, middle)


def _latency_lines(name: str, unit: str, axis: str) -> list[Data]:
    """Return the traces of the p50 and the p99 of the latency `name` over the course of the run.

    `unit` is the unit of the values, and `axis` is the name of the y-axis. The hover text contains the number of
    samples.
    """
    hover = f"{name.upper()} @figure %{{y:.4~g}} {unit} of %{{customdata:,}} from %{{x}} s"
    more = {"yaxis": axis, "customdata": f"${name}_n", "connectgaps": False, "showlegend": name == "ttft"}
    more |= {"mode": "lines+markers", "marker": {"size": 3}}
    return [
        _line("$x", f"${name}_{figure}", hover.replace("@figure", figure), line=look, **more, name=f"@name {figure}")
        for figure, look in (("p50", {}), ("p99", {"width": 1.3, "dash": "dot"}))
    ]


def _ttft_scatter(by: str, title: str, x_title: str, caption: Callable[[Data, Summary], str]) -> Chart:
    """Return a scatter chart of TTFT by request.

    `by` is the quantity on the x-axis: `position` (the request's place in the order sent) or `prompt` (prompt length).
    """
    hover = "request %{customdata[0]} (sent as number %{customdata[1]:,}), %{customdata[2]:,} prompt tokens"
    hover += "<br>TTFT %{y:.4~g} s"
    points = {"type": "scatter", "mode": "markers", "x": f"${by}", "y": "$ttft_s", "showlegend": False}
    points |= {"marker": {"color": "@run:66", "size": 5, "line": {"width": 0}}}
    points["hovertemplate"] = f"{hover}<extra>@name</extra>"
    points["customdata"] = "$request,position,prompt"

    def data(chart_input: ChartInput) -> Data | None:
        first = chart_input.first_tokens
        lengths_differ = first["prompts"] and first["prompts"][0] != first["prompts"][1]
        return first if lengths_differ or by == "position" else None

    def line(figure: str, **more: Any) -> dict[str, Any]:
        title = {"p50": "median"}.get(figure, figure)
        return _line(f"$by_{by}.x", f"$by_{by}.{figure}", f"{title} here %{{y:.4~g}} s", **more)

    traces = (
        points,
        line("p50", single_run=False),
        line("p50", single_run=True, name="median", line={"color": "@ink"}),
        line("p90", single_run=True, name="p90", line={"color": "@ink", "width": 1.2, "dash": "dot"}),
    )
    x = _axis(x_title, rangemode="normal" if by == "prompt" else "tozero")
    layout = {"showlegend": True, "xaxis": x, "yaxis": _axis("TTFT, s")}
    table = {"request": "request", "position": "position", "prompt_tokens": "prompt", "ttft_s": "ttft_s"}
    return Chart(by, "waiting", title, data, caption, traces, layout, table, needs_summary=False)


def _position_caption(first: Data, _: Summary) -> str:
    trend = first["by_position"]
    if not first["n"]:
        return "No sample."
    if not trend["x"]:
        return f"{pluralise(first['n'], 'request')}: too few for a trend."
    text = f"{_change_of_median(trend)}."
    if first["drawn"] < first["n"]:
        text += f" {first['drawn']:,} of {first['n']:,} points drawn."
    return text


def _prompt_caption(first: Data, _: Summary) -> str:
    minimum, maximum = first["prompts"]  # the chart only exists if prompt lengths differ
    trend = ""
    if first["by_prompt"]["x"]:
        trend = f" {_change_of_median(first['by_prompt'])} between the shortest and the longest."
    return f"Prompts of {minimum:,} to {maximum:,} tokens.{trend}"


def _change_of_median(trend: Data) -> str:
    first, last = (duration(trend["p50"][index]) for index in (0, -1))
    return f"Median TTFT stays at {first}" if first == last else f"Median TTFT changes from {first} to {last}"


def _gaps_caption(gaps: Data, _: Summary) -> str:
    if not gaps["token"]:
        return "No response had two chunks, so there are no gaps."
    known = [(token, gap) for token, gap in zip(gaps["token"], gaps["p50"], strict=True) if gap is not None]
    grouped = f" (tokens in groups of {gaps['width']:,})" if gaps["width"] > 1 else ""
    longest = gaps["longest"][0]
    position = f"before token {longest['token']:,} of request {longest['request']}"
    maximum = f"Longest {duration(longest['gap_s'])}, {position}."
    if not known:
        return maximum
    _, first_gap = known[0]
    last_token, last_gap = known[-1]
    return f"Median {duration(first_gap)} at first, {duration(last_gap)} at token {last_token:,}{grouped}. {maximum}"


def _over_time_layout(data: Sequence[Data]) -> Data:
    """Return the layout of the chart of load over time, as notebooks and comparisons draw it.

    A notebook shows one run in three panels. A comparison shows several runs and only their output tokens.
    """
    if len(data) > 1:
        return {"xaxis": _axis("time, s"), "yaxis": _axis("output tokens/s")}
    panels = (("", "output tokens/s", [0.72, 1]), ("2", "requests sent/s", [0.36, 0.64]), ("3", "in flight", [0, 0.28]))
    axes = {f"yaxis{number}": _axis(title, domain=domain, nticks=4) for number, title, domain in panels}
    line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1}
    shapes = [
        line
        | {"x0": mark["x"], "x1": mark["x"], "line": {"color": "@bad" if mark["bad"] else "@quiet", "dash": "dash"}}
        for mark in data[0].get("marks", ())
    ]
    return {"height": 560, "xaxis": _axis("time, s", anchor="y3"), "shapes": shapes, **axes}


def _over_time_caption(data: Data, summary: Summary) -> str:
    series = data["course"]
    if not series["start_s"]:
        return "Nothing was received."
    warmup, window = summary.requests.warmup, summary.window
    in_flight = f"{max(series['in_flight']):,} requests in flight."
    text = f"Peak {in_flight}"
    if summary.generates:
        text = f"Peak {max(series['tokens_per_s']):,.0f} tokens/s over {duration(series['bin_s'], 1)}, {in_flight}"
    if warmup:
        text += f" {pluralise(warmup, 'warm-up request')} before time 0, excluded from all figures."
    if not window.whole:
        text += f" Measured from {significant(window.from_s)} s to {significant(window.to_s)} s."
    return text


def _has_other_panels(series: Sequence[Series]) -> bool:
    """Return True if the report needs the chart of other readings, in addition to the chart of the run over time.

    The chart of the run over time shows the panels in MAIN_PANELS. The chart of other readings is needed if a curve of
    any other panel has a value other than 0. `series` contains the telemetry curves.
    """
    panels = chart_data.telemetry_panels(series)
    return any(any(panel["y"]) and panel["panel"] not in chart_data.MAIN_PANELS for panel in panels)


def _over_time_details(data: Data) -> str:
    zero = dict.fromkeys(curve["title"] for curve in data["series"] if not any(curve["y"]))
    if not zero:
        return ""
    return f"Always 0, so not drawn: {', '.join(title[0].lower() + title[1:] for title in zero)}."


def _heat_layout(data: Sequence[Data]) -> Data:
    values, positions = chart_data.heat_map_ticks(*data[0]["range_s"])
    scales = [scale_of(value) for value in values]
    texts = [f"{value * factor:,.4g} {unit}" for value, (factor, unit) in zip(values, scales, strict=True)]
    y = _axis("TTFT", tickvals=positions, ticktext=texts, range=[0, chart_data.HEAT_MAP_ROWS], rangemode="normal")
    x = _axis("time, s", range=data[0]["time_range_s"])
    margin = {"l": 76, "r": 84, "t": 10, "b": 44}
    return {"showlegend": False, "xaxis": x, "yaxis": y, "bargap": 0, "margin": margin}


def _bar_trace(name: str, x: str, y: str, colour: str, **more: Any) -> dict[str, Any]:
    """Return the Plotly trace of one part of a latency, such as the decode time, in stacked horizontal bars."""
    bar = {"type": "bar", "orientation": "h", "name": name, "x": x, "y": y, "single_run": True, "width": 0.62}
    hover = f"%{{y}}: {name} %{{x:.4~g}} @xunit on average<extra></extra>"
    return bar | {"marker": {"color": colour, "line": {"width": 0}}, "hovertemplate": hover} | more


def _part_totals(x: str, y: str) -> dict[str, Any]:
    """Return the Plotly trace of the labels at the ends of stacked horizontal bars."""
    label = {"type": "scatter", "mode": "text", "x": x, "y": y, "texttemplate": " %{x:.3~g} @xunit", "single_run": True}
    return label | {"textposition": "middle right", "hoverinfo": "skip", "showlegend": False, "cliponaxis": False}


PARTS = (
    _bar_trace("TTFT", "$ttft_s", "$group", "@idle"),
    _bar_trace("decode", "$decode_s", "$group", "@run"),
    _bar_trace("stalls", "$stalls_s", "$group", "@bad"),
    _bar_trace("queue", "$server.queue", "$server.queue_group", "@quiet"),
    _bar_trace("prefill", "$server.prefill", "$server.prefill_group", "@other-2"),
    _bar_trace("prefill and decode", "$server.inference", "$server.inference_group", "@other-2"),
    _bar_trace("decode", "$server.decode", "$server.decode_group", "@run", showlegend=False),
    _part_totals("$e2e_s", "$group"),
    _part_totals("$server.total", "$server.total_group"),
)


def _parts_layout(data: Sequence[Data]) -> Data:
    groups = [*data[0]["group"], *data[0]["server"]["total_group"]]
    y = {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": groups[::-1],
        "ticksuffix": "  ",
        "showgrid": False,
    }
    x = _axis("mean time, @xunit")
    return {
        "barmode": "stack",
        "showlegend": True,
        "xaxis": x,
        "yaxis": y,
        "margin": {"l": 104, "r": 76, "t": 44, "b": 44},
    }


def _parts_caption(parts: Data, _: Summary) -> str:
    total = parts["e2e_s"][-1] or 1.0
    shares = [f"{parts[key][-1] / total:.0%} {name}" for key, name in PART_NAMES.items()]
    return f"{parts['group'][-1].capitalize()}: {', '.join(shares)}."


def _parts_details(parts: Data) -> str:
    server = parts["server"]
    stall = f"Gaps over {duration(parts['median_gap_s'] * request_parts.STALL_FACTOR)} are stalls."
    if not server["n"]:
        return f"{stall} The server publishes no times of its queue."
    phases = {"queue": "in the queue", "prefill": "in prefill", "decode": "in decode"}
    phases["inference"] = "in prefill and decode"
    means = [f"{duration(server[key][0])} {name}" for key, name in phases.items() if server[key]]
    return f"{stall} The server's mean of {server['n'][0]:,} requests: {', '.join(means)}."


PART_NAMES = {"ttft_s": "TTFT", "decode_s": "decode", "stalls_s": "stalls"}


def _bounds_layout(data: Sequence[Data]) -> Data:
    """Return the layout of the scatter chart with bounds: a line per bound, and a label in each corner."""
    run = data[0]
    line = {"type": "line", "line": {"color": "@ink", "width": 1.2, "dash": "dash"}}
    shapes = []
    if run["ttft_bound"] is not None:
        shapes.append(
            line | {"xref": "x", "yref": "paper", "x0": run["ttft_bound"], "x1": run["ttft_bound"], "y0": 0, "y1": 1}
        )
    if run["tpot_bound"] is not None:
        shapes.append(
            line | {"xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": run["tpot_bound"], "y1": run["tpot_bound"]}
        )
    corners = {
        "both": ("left", "bottom", "meet both bounds" if len(shapes) == 2 else "meet the bound"),
        "ttft missed": ("right", "bottom", "TTFT too long"),
        "tpot missed": ("left", "top", "TPOT too long"),
        "both missed": ("right", "top", "both too long"),
    }
    known = {"ttft missed": run["ttft_bound"] is not None, "tpot missed": run["tpot_bound"] is not None, "both": True}
    known["both missed"] = len(shapes) == 2
    labels = []
    for corner, (x, y, text) in corners.items():
        if known[corner]:
            place = {"xref": "paper", "yref": "paper", "x": float(x == "right"), "y": float(y == "top"), "xanchor": x}
            look = {"yanchor": y, "showarrow": False, "bgcolor": "@paper:d0", "font": {"color": "@ink", "size": 12.5}}
            labels.append(place | look | {"text": f"<b>{run['shares'][corner]:.1%}</b><br>{text}", "align": x})
    axes = {f"{axis}axis": _bounded_axis(run, key) for axis, key in (("x", "ttft"), ("y", "tpot"))}
    return {
        "showlegend": False,
        "shapes": shapes,
        "annotations": labels,
        "margin": {"l": 60, "r": 16, "t": 14, "b": 44},
    } | axes


def _bounded_axis(run: Data, key: str) -> Data:
    """Return the axis of the scatter chart for the latency `key`, which is `ttft` or `tpot`.

    `run` is the chart data of the run. The axis starts at 0, and includes all values of the latency and its bound. It
    ends well above the largest of these, to leave room for the labels in the corners of the chart.
    """
    columns = ("ttft",) if key == "ttft" else ("tpot_met", "tpot_missed")
    known = [value for column in columns for value in run[column] if value is not None]
    maximum = max(*known, run[f"{key}_bound"] or 0.0)
    return _axis(f"{key.upper()}, {run[f'{key}_unit']}", range=[0, maximum * 1.2])


def _bounds_caption(scatter: Data, _: Summary) -> str:
    text = f"Shares of {pluralise(scatter['n'], 'complete request')}."
    if scatter["drawn"] < scatter["n"]:
        text += f" {scatter['drawn']:,} of {scatter['n']:,} points drawn."
    return text


def _bounded_points(prefix: str, colour: str) -> dict[str, Any]:
    points = {"type": "scatter", "mode": "markers", "single_run": True, "x": "$ttft", "y": f"$tpot_{prefix}"}
    points |= {"marker": {"color": colour, "size": 5, "line": {"width": 0}}, "customdata": "$request"}
    return points | {"hovertemplate": "request %{customdata}: TTFT %{x:.4~g}, TPOT %{y:.4~g}<extra></extra>"}


def _timeline_caption(drawn: Data, _: Summary) -> str:
    if drawn["drawn"] == drawn["n"]:
        return "" if drawn["n"] else "Nothing was sent."
    subset = f"{drawn['drawn']:,} of {drawn['n']:,} requests: 1 in {drawn['every']:,}"
    return f"{subset}, the 100 slowest, and up to 100 incomplete ones."


def _gap_line(figure: str, title: str, line: Data, **more: Any) -> dict[str, Any]:
    hover = f"{title} before token %{{x}}: %{{y:.4~g}} @yunit"
    return _line("$token", f"${figure}", hover, connectgaps=False, line=line, **more)


def _longest_gaps(colour: str, **more: Any) -> dict[str, Any]:
    hover = "%{y:.4~g} @yunit before token %{x}<br>in request %{customdata}<extra>@name</extra>"
    points = {"type": "scatter", "mode": "markers", "x": "$longest_token", "y": "$longest_gap", "name": "longest"}
    look = {"symbol": "diamond-open", "size": 8, "color": colour, "line": {"width": 1.5}}
    return points | {"customdata": "$longest_of", "hovertemplate": hover} | more | {"marker": look}


def _gap_layout(data: Sequence[Data]) -> Data:
    """Return the layout of the chart of gaps between tokens.

    The y-axis is logarithmic if the largest gap is more than 20 times the smallest gap.
    """
    names = (*chart_data.GAP_PERCENTILES, "max")
    gaps = [gap for run_data in data for name in names for gap in run_data[name] if gap]
    log = bool(gaps) and max(gaps) > 20 * min(gaps)
    look = {"type": "log", "dtick": 1} if log else {"rangemode": "tozero"}
    y = {"title": {"text": f"gap before the token, @yunit{' (log)' if log else ''}"}, **look}
    return {"showlegend": True, "xaxis": _axis("output token"), "yaxis": y}


def _tokens_per_event_caption(_data: Data, summary: Summary) -> str:
    result, speculation = summary.tokens_per_event, summary.speculation
    text = "" if result is None else f"{result.mean:.3g} tokens per event on average."
    if speculation is None or speculation.acceptance_length is None:
        return text
    rate = "" if speculation.acceptance_rate is None else f", {percent(speculation.acceptance_rate)} of drafts accepted"
    return f"{text} {speculation.acceptance_length:.3g} tokens per decode step{rate}."


def _instants(name: str, column: str, colour: str) -> dict[str, Any]:
    points = {"type": "scatter", "mode": "markers", "name": name, "x": f"${column}", "y": "$position"}
    return points | {"marker": {"color": colour, "size": 3}}


HEAT = {
    **{"type": "bar", "single_run": True, "x": "$x", "base": "$base", "y": "$height", "width": "$width", "name": ""},
    "marker": {"color": "@run", "opacity": "$opacity", "line": {"width": 0}},
    "customdata": "$n,low,high",
    "hovertemplate": "%{customdata[0]:,} of %{customdata[1]} s to %{customdata[2]} s at %{x:.4~g} s<extra></extra>",
}
HEAT_SCALE = {
    **{"type": "scatter", "mode": "markers", "single_run": True, "x": "$scale_x", "y": "$scale_y", "hoverinfo": "skip"},
    "marker": {
        **{"color": [0], "cmin": 0, "cmax": 1, "colorscale": [[0, "@run:00"], [1, "@run"]], "showscale": True},
        "colorbar": {
            **{"tickvals": "$scale_opacity", "ticktext": "$scale_n", "thickness": 12, "outlinewidth": 0, "xpad": 14},
            **{"title": {"text": "requests", "side": "right"}, "tickcolor": "@quiet", "tickfont": {"color": "@quiet"}},
        },
    },
}
"""A trace without a visible point, which adds the colour scale. The cells of the heat map have opacities in place of
numbers as colours, because Plotly writes a warning for each bar whose colour is a number."""
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
            "Good requests if the bounds were k times as wide",
            lambda chart_input: chart_data.goodput_curve(chart_input.frame, chart_input.summary),
            traces=(
                _line(
                    "$x", "$y", "%{y:.2%} meet all bounds x%{x:.4~g}", line=STEPS, name="all bounds", single_run=True
                ),
                _line("$x", "$y", "%{y:.2%} with bounds x%{x:.4~g}", line=STEPS, single_run=False),
                *(_single_bound(number) for number in range(1, chart_data.BOUNDS_DRAWN + 1)),
            ),
            layout={
                "showlegend": True,
                "xaxis": _axis("k, factor of the bounds"),
                "yaxis": SHARES | {"title": {"text": "good requests"}},
                "shapes": [AS_REQUESTED],
            },
            table={"scale": "x", "attainment": "y"},
            note="All latency bounds are multiplied by k, the factor on the x-axis. At 1 they are as requested. The "
            "line of a single bound shows the requests that meet this bound, whatever the others are.",
        ),
        Chart(
            "sessions",
            "sessions",
            "Sessions in flight",
            lambda chart_input: chart_data.sessions_in_flight(chart_input.frame),
            traces=(_line("$x", "$y", "%{y:,.4~g} sessions at %{x:.4~g} s"),),
            layout={"xaxis": _axis("s since the start of the run"), "yaxis": _axis("sessions in flight")},
            table={"s": "x", "sessions": "y"},
            note="A session is in flight from the due time of its first request to the end of its last response.",
            needs_summary=False,
        ),
        Chart(
            "turns",
            "turns",
            "Time to first token by turn",
            lambda chart_input: chart_data.ttft_by_turn(chart_input.summary),
            traces=(_line("$turn", "$p50", "%{y:,.4~g} ms in turn %{x}", mode="lines+markers", error_y=INTERVAL),),
            layout=lambda data: {
                "xaxis": _axis(
                    "turn",
                    tickformat="d",
                    dtick=1 if max(len(run_data["turn"]) for run_data in data) < 21 else None,
                    rangemode="normal",  # there is no turn 0
                ),
                "yaxis": _axis("TTFT p50, ms"),
            },
            table={"turn": "turn", "TTFT p50, ms": "p50", "from": "low", "to": "high"},
            note="The median and its 95% interval of the complete requests of each turn.",
        ),
        Chart(
            "bounds",
            "bounds",
            "TTFT and TPOT of each request",
            lambda chart_input: request_parts.bounds_scatter(chart_input.frame, chart_input.summary),
            _bounds_caption,
            traces=(_bounded_points("met", "@run:88"), _bounded_points("missed", "@bad:aa")),
            layout=_bounds_layout,
            table={"request": "request", "ttft": "ttft", "tpot_met": "tpot_met", "tpot_missed": "tpot_missed"},
            note="Each point is a complete request. The dashed lines are the bounds of --goodput, or of --assert on "
            "percentiles. Points to the right waited too long for the first token: look at the queue and at prefill. "
            "Points above decoded too slowly: look at the batch size and at memory bandwidth.",
            shape="wide",
        ),
        *(_distribution_chart(name) for name in DISTRIBUTIONS),
        Chart(
            "parts",
            "parts",
            "Where the time goes",
            lambda chart_input: request_parts.latency_parts(chart_input.frame, chart_input.gaps, chart_input.phases),
            _parts_caption,
            traces=PARTS,
            layout=_parts_layout,
            table={name: name for name in ("group", "n", "ttft_s", "decode_s", "stalls_s", "e2e_s")},
            typical={"x": lambda parts: max(parts["e2e_s"])},
            note="Complete requests are ordered by E2E and divided into groups; each bar is the mean of a group. "
            f"A stall is a gap of more than {request_parts.STALL_FACTOR} times the median. "
            "TTFT contains the queue, prefill and the network. The last bar is the mean of all "
            "requests that the server itself reports; it knows the queue and prefill, but not which request waited.",
            shape="wide",
            zoom="none",
            details=_parts_details,
            needs_summary=False,
        ),
        _ttft_scatter("position", "TTFT by queue position", "position in the order sent", _position_caption),
        _ttft_scatter("prompt", "TTFT by prompt length", "prompt tokens", _prompt_caption),
        Chart(
            "gaps",
            "gaps",
            "Gap before each token",
            lambda chart_input: chart_data.gaps_by_token(chart_input.frame, chart_input.gaps),
            _gaps_caption,
            traces=(
                _gap_line("p50", "median", {"width": 2.2}, single_run=True, name="median"),
                _gap_line("p90", "p90", {"width": 1.3, "dash": "dash"}, single_run=True, name="p90"),
                _gap_line("p99", "p99", {"width": 1.3, "dash": "dot"}, single_run=True, name="p99"),
                _gap_line("max", "largest", {"width": 1, "color": "@quiet"}, single_run=True, name="largest"),
                _gap_line("p50", "median", {"width": 2.2}, single_run=False, name="@name, median"),
                _gap_line("p99", "p99", {"width": 1.3, "dash": "dot"}, single_run=False, name="@name, p99"),
                _longest_gaps("@bad", single_run=True),
                _longest_gaps("@run", single_run=False, showlegend=False),
            ),
            layout=_gap_layout,
            table={name: name for name in ("token", "n", *chart_data.GAP_PERCENTILES, "max")},
            typical={"y": lambda gaps: next((gap for gap in gaps["p50"] + gaps["max"] if gap), None)},
            note="A spike at one token is a stall of every response. A single diamond is a stall of one response. A "
            "chunk of several tokens counts once, before its first token. Percentiles are accurate to 1%, and the "
            "largest gap is exact.",
            shape="wide",
            needs_summary=False,
        ),
        Chart(
            "tokens_per_event",
            "gaps",
            "Tokens per event",
            lambda chart_input: chart_data.tokens_per_event(chart_input.summary),
            _tokens_per_event_caption,
            traces=(
                {
                    **{"type": "bar", "x": "$size", "y": "$share", "customdata": "$events", "name": "@name"},
                    "marker": {"color": "@run"},
                    "hovertemplate": "%{y:.2%} of the events have %{x} tokens (%{customdata:,})<extra>@name</extra>",
                },
            ),
            layout={
                "xaxis": _axis("tokens in the event", type="category"),
                "yaxis": {"title": {"text": "events"}, "tickformat": ".0%", "rangemode": "tozero"},
            },
            table={"tokens in the event": "size", "events": "events", "share": "share"},
            note="Events contain several tokens with speculative decoding, with a stream interval of the server, or if "
            "the server falls behind.",
            zoom="none",
        ),
        Chart(
            "course",
            "course",
            "Load, queue and latency over time",
            lambda chart_input: {
                "course": chart_input.throughput or chart_data.throughput_series(chart_input.frame),
                "series": chart_data.telemetry_panels(chart_input.series),
                "marks": course_marks(chart_input.summary),
                "generates": chart_input.summary.generates,
            },
            _over_time_caption,
            traces=(
                _line("$course.start_s", "$course.tokens_per_s", "%{y:,.0f} tokens/s from %{x:.4~g} s", line=STEPS),
                *(
                    _line("$course.start_s", f"$course.{column}", hover, line=STEPS, yaxis=axis, single_run=True)
                    for column, axis, hover in (
                        ("sent_per_s", "y2", "%{y:.4~g} requests/s sent from %{x:.4~g} s"),
                        ("in_flight", "y3", "%{y:,} in flight from %{x:.4~g} s"),
                    )
                ),
            ),
            layout=_over_time_layout,
            note="All panels share the time axis. Hover to read every panel at one time. Requests in flight are the "
            "maximum in each interval. TTFT belongs to first tokens that arrived in an interval, TPOT and E2E to "
            "responses that ended in it; the p99 of few requests is close to their maximum. Marks on the baselines "
            "show when requests ended that did not complete. Shaded time is excluded from all figures. A break in a "
            "line of telemetry is a reading that failed.",
            script="throughput.js",
            shape="tall",
            details=_over_time_details,
        ),
        Chart(
            "latencies",
            "",  # part of the chart above; notebooks draw it by itself
            "Latency and incomplete requests over time",
            lambda chart_input: chart_data.latency_series(chart_input.frame),
            traces=(
                *_latency_lines("ttft", "s", "y"),
                *_latency_lines("tpot", "ms", "y2"),
                *_latency_lines("e2e", "s", "y3"),
                *(
                    _line(
                        "$x",
                        f"${state}_per_s",
                        f"%{{y:.4~g}} {state}/s from %{{x}} s",
                        line=STEPS | {"color": "@bad", "dash": dash},
                        yaxis="y4",
                        name=state,
                    )
                    for state, dash in (("failed", "solid"), ("rejected", "dot"))
                ),
            ),
            layout={
                "showlegend": True,
                "height": 700,
                "xaxis": _axis("time, s", anchor="y4"),
                **{
                    f"yaxis{number}": _axis(title, domain=domain, nticks=4)
                    for number, title, domain in (
                        ("", "TTFT, s", [0.79, 1]),
                        ("2", "TPOT, ms", [0.53, 0.74]),
                        ("3", "E2E, s", [0.27, 0.48]),
                        ("4", "not complete/s", [0, 0.21]),
                    )
                },
            },
            needs_summary=False,
        ),
        Chart(
            "heat",
            "course",
            "Heat map of TTFT",
            lambda chart_input: chart_data.ttft_heat_map(chart_input.frame),
            traces=(HEAT, HEAT_SCALE),
            layout=_heat_layout,
            table={"at_s": "x", "from_ttft_s": "low", "to_ttft_s": "high", "requests": "n"},
            note="Number of first tokens by arrival time and TTFT. Stronger colour means more of them; TTFT is on a "
            "logarithmic scale.",
            shape="wide",
            needs_summary=False,
        ),
        Chart(
            "timeline",
            "timeline",
            "Requests from send to last token",
            lambda chart_input: chart_data.timeline(chart_input.frame),
            _timeline_caption,
            traces=(
                _instants("sent", "sent_s", "@idle"),
                _instants("first token", "first_s", "@run"),
                _instants("last token", "last_s", "@ink"),
            ),
            layout={"xaxis": _axis("time, s"), "yaxis": {"title": {"text": "order sent"}, "autorange": "reversed"}},
            note="Drag to zoom in, double-click to reset. The keys +, −, 0 and the arrows do the same.",  # noqa: RUF001
            script="timeline.js",
            shape="tall",
            zoom="both",
            needs_summary=False,
        ),
        Chart(
            "telemetry",
            "machines",
            "Other readings over time",
            lambda chart_input: {"n": len(chart_input.series)} if _has_other_panels(chart_input.series) else None,
            note="Readings of the server, the GPUs and the hosts that the section “Over time” does not show.",
            script="throughput.js",
            shape="tall",
        ),
        Chart(
            "sends",
            "sending",
            "Requests sent over time",
            lambda chart_input: chart_data.send_times(chart_input.frame),
            traces=(_line("$x", "$y", "%{y:,} sent within %{x:.4~g} @xunit", line=STEPS),),
            layout={"xaxis": _axis("time after the first request, @xunit"), "yaxis": _axis("requests sent")},
            table={"sent_after_s": "x", "requests": "y"},
            typical={"x": lambda sent: sent["x"][-1] if sent["x"] else None},
            shape="wide",
            needs_summary=False,
        ),
    )
}
"""All charts by id, in the order in which the page shows them."""
