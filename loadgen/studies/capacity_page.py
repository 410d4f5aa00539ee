"""Builds the page of `loadgen plan-capacity`: the candidates as a table, and their costs against the request rate.

A candidate is a GPU type, a number of GPUs per replica and a weight format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from loadgen.analysis import report as doc
from loadgen.analysis.format import UNKNOWN, duration, figure_title, interval_text, pluralise, significant
from loadgen.analysis.objectives import Objective
from loadgen.analysis.prices import currency_parts
from loadgen.analysis.report import (
    Block,
    Card,
    ChartRef,
    Chip,
    ColumnKind,
    Document,
    Paragraph,
    Section,
    TableCell,
    status,
)
from loadgen.analysis.report.tables import number_columns, table
from loadgen.studies.capacity import CapacityOption
from loadgen.studies.model_page import chart_definition, model_document, run_data

MAX_RATE_FACTOR = 2.0
"""The chart shows rates from 0 to this multiple of the requested rate."""
MAX_STEPS = 200
"""Maximum number of steps of a line. A longer line shows every k-th step only."""
CAPTION = (
    "The dashed vertical line is the requested rate. A line rises where one more replica is needed. Each GPU type is "
    "shown with the number of GPUs per replica that is cheapest at the requested rate."
)
HELP = (
    "A flat part is free capacity: the rate may grow to its right end without another GPU. A real replica carries "
    "a rate within the range in the table, so a step may come earlier or later."
)


def capacity_document(
    options: Sequence[CapacityOption],
    objectives: Sequence[Objective],
    *,
    rate_per_s: float,
    title: str,
    subtitle: str,
    reasons: Sequence[str],
    assumptions: str,
) -> Document:
    """Return the page of a capacity plan.

    `options` are the candidates that meet the objectives, the best first. `reasons` holds a sentence per candidate that
    cannot serve the load.
    """
    lines = _best_by_gpu(options)
    priced = any(option.cost_per_hour is not None for option in lines)
    blocks: list[Block] = [doc.Cards(_cards(options, rate_per_s))] if options else []
    if options:
        blocks.append(_table(options, objectives))
    if reasons:
        blocks.append(
            doc.Disclosure(f"Not possible: {pluralise(len(reasons), 'candidate')}", [*map(Paragraph, reasons)])
        )
    blocks.append(Paragraph(assumptions, "note"))
    sections = [Section("answer", "", blocks)]
    if lines:
        chart_title = "Cost against request rate" if priced else "GPUs against request rate"
        reference = ChartRef("cost", chart_title, [CAPTION], "wide", help=HELP)
        sections.append(Section("growth", "If the load grows", [reference]))
    runs = [_line(option, index, rate_per_s, priced=priced) for index, option in enumerate(lines)]
    currency = next((option.currency for option in lines if option.currency), "")
    cost_title = f"cost per hour, {currency}" if currency else "cost per hour"
    charts = [_chart(rate_per_s, cost_title if priced else "GPUs")]
    return model_document(
        "loadgen plan-capacity",
        (title, subtitle),
        sections,
        chips=[
            status.MODELLED,
            Chip(
                "Objectives",
                f"met by {len(options)} of {pluralise(len(options) + len(reasons), 'candidate')}",
                "ok" if options else "error",
            ),
        ],
        data={"runs": runs, "charts": charts if lines else []},
    )


def _cards(options: Sequence[CapacityOption], rate_per_s: float) -> list[Card]:
    """Return cards about the best candidate: its GPUs, its cost, its capacity per replica and its load."""
    best = options[0]
    replicas = (best.gpus or 0) // best.tensor_parallel
    low, high = significant(best.replica_per_s_low or 0), significant(best.replica_per_s_high or 0)
    used = rate_per_s / (replicas * (best.replica_per_s or math.inf))
    cards = [Card("Best option", f"{best.gpus} x {best.gpu}", note=_replicas_text(best))]
    if best.cost_per_hour is not None:
        cards.append(Card("Cost", _cost(best.cost_per_hour, best.currency), "per hour"))
        cards.append(Card("Cost of output", _cost(best.cost_per_million_tokens, best.currency), "per 1M tokens"))
    cards.append(Card("One replica carries", significant(best.replica_per_s), "requests/s", interval_text(low, high)))
    cards.append(Card("Load", f"{100 * used:.0f}%", "of capacity", "at the requested rate"))
    return cards


def _replicas_text(option: CapacityOption) -> str:
    replicas = pluralise((option.gpus or 0) // option.tensor_parallel, "replica")
    return f"{replicas} of {pluralise(option.tensor_parallel, 'GPU')}, {option.format}"


def _table(options: Sequence[CapacityOption], objectives: Sequence[Objective]) -> doc.Table:
    rows = []
    for option in options:
        low, high = (option.gpus_low, option.gpus_high)
        gpu_range = "" if low == high else interval_text(str(low), str(high or "∞"))
        rates = [significant(rate or 0) for rate in (option.replica_per_s_low, option.replica_per_s_high)]
        figures = [TableCell(duration(figure), figure) for figure in option.figures]
        rows.append(
            [
                TableCell(option.gpu, note=option.format),
                TableCell(str(option.tensor_parallel)),
                TableCell(str(option.gpus), note=gpu_range),
                TableCell(significant(option.replica_per_s), option.replica_per_s, note=interval_text(*rates)),
                TableCell(_cost(option.cost_per_hour, option.currency), option.cost_per_hour),
                TableCell(_cost(option.cost_per_million_tokens, option.currency), option.cost_per_million_tokens),
                *figures,
            ]
        )
    predicted = [figure_title(f"{objective.figure}.{objective.statistic}") for objective in objectives]
    heads: dict[str, ColumnKind] = {
        "type": "head",
        **number_columns("GPUs per replica", "GPUs", "requests/s each", "per hour", "per 1M tokens", *predicted),
    }
    return table("Options, the best first", heads, rows, several=True, id="capacity")


def _cost(cost: float | None, currency: str) -> str:
    before, after = currency_parts(currency)
    return UNKNOWN if cost is None else f"{before}{cost:,.2f}{after}"


def _best_by_gpu(options: Sequence[CapacityOption]) -> list[CapacityOption]:
    """Return the best candidate of each GPU type.

    If some candidates have a price, candidates without a price are left out.
    """
    priced = [option for option in options if option.cost_per_hour is not None]
    best: dict[str, CapacityOption] = {}
    for option in priced or options:
        best.setdefault(option.gpu, option)
    return list(best.values())


def _line(option: CapacityOption, index: int, rate_per_s: float, *, priced: bool) -> dict[str, Any]:
    """Return the chart line of a candidate (a step function): its cost by request rate.

    If no candidate has a price (`priced` is False), the line shows the number of GPUs instead. `index` determines the
    colour and the line style.
    """
    assert option.replica_per_s
    assert option.gpus
    hour_cost = (option.cost_per_hour or 0.0) / option.gpus
    end = MAX_RATE_FACTOR * rate_per_s
    replicas = math.ceil(end / option.replica_per_s)
    stride = math.ceil(replicas / MAX_STEPS)
    rates = [number * option.replica_per_s for number in range(0, replicas, stride)]
    gpus = [(number + 1) * option.tensor_parallel for number in range(0, replicas, stride)]
    heights = [number * hour_cost if priced else float(number) for number in gpus]
    data = {"x": [*rates, end], "y": [*heights, heights[-1]], "gpus": [*gpus, gpus[-1]]}
    name = f"{option.gpu}, {pluralise(option.tensor_parallel, 'GPU')} per replica"
    return run_data(name, index, {"cost": data})


def _chart(rate_per_s: float, y_title: str) -> dict[str, Any]:
    trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "@name",
        "x": "$x",
        "y": "$y",
        "customdata": "$gpus",
        "line": {"color": "@run", "dash": "@dash", "width": 2, "shape": "hv"},
        "hovertemplate": "from %{x:.3~g} requests/s: %{customdata} GPUs, %{y:,.2f}<extra>@name</extra>",
    }
    marker = {"type": "line", "x0": rate_per_s, "x1": rate_per_s, "y0": 0, "y1": 1, "yref": "paper"}
    layout = {
        "xaxis": {"title": {"text": "requests/s"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": y_title}, "rangemode": "tozero"},
        "shapes": [marker | {"line": {"color": "@quiet", "dash": "dash", "width": 1}}],
    }
    columns = {"from requests/s": "x", "GPUs": "gpus", y_title: "y"}
    return chart_definition("cost", [trace], layout, columns)
