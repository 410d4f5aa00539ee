"""Builds the page of `loadgen twin`, which compares measured runs with a twin.

A twin is a simulated server that is fitted to a measured one. The page shows the figures and the latency distributions
of each run next to those of the twin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loadgen.analysis import report as doc
from loadgen.analysis.format import MINUS, figure_title, interval_text, pluralise, scale_of, significant, unit_of
from loadgen.analysis.report import (
    Block,
    Card,
    ChartRef,
    Chip,
    ColumnKind,
    Document,
    Paragraph,
    RunStyle,
    Section,
    TableCell,
)
from loadgen.analysis.report.tables import Cells, number_columns, table
from loadgen.studies.model_page import chart_definition, colour, model_document, run_data
from loadgen.studies.twin_fitting import Floats

POINTS = 201
"""Number of points of a distribution curve."""
LATENCIES = {"ttft": "Time to first token", "tpot": "Time per output token"}
OFF_CAPTION = (
    "A dot is the difference of a predicted figure from the measured one. A bar is its 95% interval, if there is one. "
    "A bar that crosses zero contains the measured figure."
)
CURVE_CAPTION = "Solid: measured. Dotted: the twin, for the same requests, sent at the same times."


class ReplayedRun(NamedTuple):
    """A run that is compared with a twin: the measured figures and latencies, and those that the twin predicts."""

    name: str
    measured: Mapping[str, float | None]
    """Measured figures, by the name that --assert uses."""
    predicted: Mapping[str, Sequence[float | None]]
    """The twin's figures, each as `(value,)` or `(value, low, high)`."""
    latencies: Mapping[str, tuple[Floats, Floats]]
    """Measured latencies and the twin's latencies in seconds, by name: `ttft`, `tpot`."""


class FigureError(NamedTuple):
    """The error of one predicted figure, as a share of the measured figure."""

    figure: str
    run: int
    """Index of the run."""
    error: float
    interval: tuple[float, float] | None
    """Ends of the 95% interval of the prediction, as differences from the measured figure. None for no interval."""


def twin_document(
    runs: Sequence[ReplayedRun], *, title: str, subtitle: str, facts: Sequence[Block], rates_note: str
) -> Document:
    """Return the page that compares a twin (a simulated server fitted to a measured one) with measured runs.

    `facts` are additional blocks about the twin, such as its constants. `rates_note` is a paragraph that explains which
    time span the rates cover.
    """
    errors = [error for index, run in enumerate(runs) for error in _errors(run, index)]
    styles = [RunStyle(run.name, colour(index), "") for index, run in enumerate(runs)]
    charts = [ChartRef("off", "Predicted minus measured", [OFF_CAPTION], "wide", "none")]
    curves = [ChartRef(name, title, [CURVE_CAPTION]) for name, title in LATENCIES.items()]
    blocks: list[Block] = [doc.Cards(_cards(errors, runs))] if errors else []
    sections = [
        Section("answer", "", [*blocks, Paragraph(rates_note, "note")]),
        Section("differences", "Differences", [*charts, _table(runs)]),
        Section("latency", "Latency distributions", curves, "Latency"),
    ]
    if facts:
        sections.append(Section("twin", "The twin", facts))
    data = [_run_data(run, index, [error for error in errors if error.run == index]) for index, run in enumerate(runs)]
    scales = {name: _scale(runs, name) for name in LATENCIES}
    specs = [_off_chart(), *(_curve_chart(name, unit) for name, (_, unit) in scales.items())]
    for entry, run in zip(data, runs, strict=True):
        for name, (factor, _) in scales.items():
            entry["data"][name] = _curve(run, name, factor)
    return model_document(
        "loadgen twin",
        (title, subtitle),
        sections,
        styles=styles,
        chips=[
            Chip("Simulated", f"predictions of a model, compared with {pluralise(len(runs), 'measured run')}", "note")
        ],
        data={"runs": data, "charts": specs},
    )


def _errors(run: ReplayedRun, index: int) -> list[FigureError]:
    """Return the relative error of each predicted figure of a run, with its interval.

    Only figures that were both measured and predicted are included. `index` is the index of the run on the page.
    """
    result = []
    for figure, (value, *ends) in run.predicted.items():
        true_value = run.measured.get(figure)
        if not true_value or not value:
            continue
        interval = None
        if ends and ends[0] is not None and ends[1] is not None:
            interval = (ends[0] / true_value - 1, ends[1] / true_value - 1)
        result.append(FigureError(figure, index, value / true_value - 1, interval))
    return result


def _cards(errors: Sequence[FigureError], runs: Sequence[ReplayedRun]) -> list[Card]:
    largest = max(errors, key=lambda error: abs(error.error))
    typical = float(np.median([abs(error.error) for error in errors]))
    where = f"{figure_title(largest.figure)} of {runs[largest.run].name}"
    cards = [
        Card("Typical difference", f"{100 * typical:.1f}%", note=f"median of {len(errors)} figures"),
        Card("Largest difference", _signed(largest.error), note=where),
    ]
    known = [error.interval for error in errors if error.interval]
    if known:
        inside = sum(low <= 0 <= high for low, high in known)
        cards.append(Card("Inside the interval", f"{inside} of {len(known)}", "figures", "95% intervals"))
    return cards


def _table(runs: Sequence[ReplayedRun]) -> doc.Table:
    """Return the table of the measured and the predicted figures of each run."""
    rows: list[Cells] = []
    for index, run in enumerate(runs):
        for error in _errors(run, index):
            true_value = run.measured[error.figure]
            value, *ends = run.predicted[error.figure]
            factor, unit = unit_of(error.figure, true_value)
            shown = [significant((number or 0) * factor) for number in (true_value, value)]
            interval = interval_text(*(significant((end or 0) * factor) for end in ends)) if ends else ""
            off = TableCell(_signed(error.error), error.error)
            name = TableCell("", run=index)
            rows.append(
                [name, TableCell(figure_title(error.figure)), TableCell(unit), *map(TableCell, shown), off, interval]
            )
    heads: dict[str, ColumnKind] = {"run": "text", "figure": "head", "unit": "unit"}
    heads |= number_columns("measured", "predicted", "off")
    if any(len(values) > 1 for run in runs for values in run.predicted.values()):
        heads["95% CI"] = "number"
    return table("Measured and predicted", heads, rows, several=len(runs) > 1, id="twin")


def _signed(share: float) -> str:
    """Return a share as a percentage with its sign, such as `+3.1%`. The minus sign is U+2212, not a hyphen."""
    text = f"{100 * share:+.1f}%".replace("-", MINUS)
    return "0.0%" if text in ("+0.0%", f"{MINUS}0.0%") else text


def _run_data(run: ReplayedRun, index: int, errors: Sequence[FigureError]) -> dict[str, Any]:
    """Return the chart data of a run: the errors of the figures that the twin predicted, in percent."""
    off = {
        "figure": [figure_title(error.figure) for error in errors],
        "error": [100 * error.error for error in errors],
        "above": [100 * (error.interval[1] - error.error) if error.interval else 0.0 for error in errors],
        "below": [100 * (error.error - error.interval[0]) if error.interval else 0.0 for error in errors],
    }
    return run_data(run.name, index, {"off": off})


def _scale(runs: Sequence[ReplayedRun], name: str) -> tuple[float, str]:
    """Return the factor and the unit with which the latency `name` of all runs is shown, such as 1000 and `ms`.

    The factor converts seconds to the unit.
    """
    values = np.concatenate([run.latencies[name][0] for run in runs])
    known = values[~np.isnan(values)]
    return scale_of(float(np.median(known)) if len(known) else None)


def _curve(run: ReplayedRun, name: str, factor: float) -> dict[str, list[float]]:
    """Return the measured and the predicted distribution of the latency `name`, multiplied by `factor`.

    Requests without a measured or without a predicted latency are left out.
    """
    measured, predicted = run.latencies[name]
    known = ~np.isnan(measured) & ~np.isnan(predicted)
    if not known.any():
        return {"share": [], "measured": [], "twin": []}
    shares = np.linspace(0, 1, POINTS)
    curves = {"measured": measured, "twin": predicted}
    return {"share": shares.round(4).tolist()} | {
        key: [float(f"{value:.5g}") for value in factor * np.quantile(values[known], shares)]
        for key, values in curves.items()
    }


def _off_chart() -> dict[str, Any]:
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": "@name",
        "x": "$error",
        "y": "$figure",
        "marker": {"color": "@run", "size": 9},
        "error_x": {"type": "data", "symmetric": False, "array": "$above", "arrayminus": "$below", "color": "@run"},
        "hovertemplate": "%{y}: %{x:+.1f}%<extra>@name</extra>",
    }
    zero = {
        "type": "line",
        "x0": 0,
        "x1": 0,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": "@quiet", "width": 1},
    }
    layout = {
        "xaxis": {"title": {"text": "difference, % of the measured figure"}, "ticksuffix": "%"},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
        "shapes": [zero],
    }
    columns = {"figure": "figure", "difference, %": "error"}
    return chart_definition("off", [trace], layout, columns)


def _curve_chart(name: str, unit: str) -> dict[str, Any]:
    """Return the chart with the measured and the predicted distribution of a latency."""

    def line(label: str, column: str, style: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "lines",
            "name": f"{label} @name",
            "x": f"${column}",
            "y": "$share",
            "line": {"color": "@run", "width": 2} | style,
            "hovertemplate": f"%{{y:.0%}} within %{{x:.4~g}} {unit}<extra>{label} @name</extra>",
        }

    traces = [line("measured", "measured", {}), line("twin", "twin", {"dash": "dot"})]
    layout = {
        "xaxis": {"title": {"text": f"{name.upper()}, {unit}"}, "rangemode": "tozero"},
        "yaxis": {"range": [0, 1.01], "tickformat": ".0%"},
        "showlegend": True,
    }
    columns = {"share": "share", f"measured, {unit}": "measured", f"twin, {unit}": "twin"}
    return chart_definition(name, traces, layout, columns)
