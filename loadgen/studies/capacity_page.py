"""Builds the HTML page of `loadgen plan-capacity`: options, Pareto set, commands, and costs by request rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.analysis import report as doc
from loadgen.analysis.format import UNKNOWN, duration, figure_title, interval_text, pluralise, significant
from loadgen.analysis.report import (
    Block,
    Card,
    ChartRef,
    Chip,
    Code,
    ColumnKind,
    Disclosure,
    Document,
    Paragraph,
    Section,
    TableCell,
    status,
)
from loadgen.analysis.report.tables import number_columns, table
from loadgen.studies.capacity import CapacityOption
from loadgen.studies.capacity_report import CapacityReport, format_cost, gpus_text
from loadgen.studies.capacity_search import ParetoPoint
from loadgen.studies.model_page import chart_definition, colour, model_document, run_data

MAX_RATE_FACTOR = 2.0
"""The chart shows rates from 0 to this multiple of the requested rate."""
MAX_STEPS = 200
"""Maximum number of steps of a line. A longer line shows every k-th step only."""
MAX_COMMANDS = 5
"""Maximum number of options whose commands the page shows."""
CAPTION = (
    "The dashed vertical line is the requested rate. A line rises where one more replica is needed. Each GPU type is "
    "shown with the number of GPUs per replica that is cheapest at the requested rate."
)
HELP = (
    "A flat part is free capacity: the rate may grow to its right end without another GPU. A real replica carries "
    "a rate within the range in the table, so a step may come earlier or later."
)
PARETO_CAPTION = (
    "Each point is a simulated configuration at one load, and no other point is both faster for a user and {better}. "
    "Click a point for its commands."
)
PARETO_HELP = (
    "The load of each point is always the same, so no GPU is ever idle. The options above carry the requested rate, "
    "and may have free capacity. Points whose TTFT misses an objective by formula were left out."
)


def capacity_document(report: CapacityReport) -> Document:
    """Return the page of a capacity plan."""
    options, points = report.options, report.result.pareto
    lines = _best_by_gpu(options)
    priced = any(option.cost_per_hour is not None for option in options)
    blocks: list[Block] = [doc.Cards(_cards(report))] if options else []
    if options:
        blocks.append(_table(report))
    reasons = report.reasons()
    if reasons:
        blocks.append(Disclosure(f"Not possible: {pluralise(len(reasons), 'reason')}", [*map(Paragraph, reasons)]))
    first, *others = report.notes()
    blocks.append(Paragraph(first.replace("in parentheses", "in small print"), "note"))
    sections = [Section("answer", "", blocks)]
    colours = {gpu: colour(index) for index, gpu in enumerate(_gpu_order(options, points))}
    if points:
        sections.append(_pareto_section(report))
    if lines:
        chart_title = "Cost against request rate" if priced else "GPUs against request rate"
        reference = ChartRef("cost", chart_title, [CAPTION], "wide", help=HELP)
        sections.append(Section("growth", "If the load grows", [reference]))
    commands = _commands(report)
    if commands:
        sections.append(Section("commands", "Commands", commands))
    notes: list[Block] = [Paragraph(text.replace("in parentheses", "in small print")) for text in others]
    sections.append(Section("trust", "How far to trust it", notes, "Trust"))
    rate = report.result.rate_per_s
    runs = [_line(option, rate, priced=priced) | {"colour": colours[option.gpu]} for option in lines]
    currency = next((option.currency for option in lines if option.currency), "")
    cost_title = f"cost per hour, {currency}" if currency else "cost per hour"
    charts = [_chart(rate, cost_title if priced else "GPUs", f"{report.arrivals}/s")]
    search = report.result.search
    return model_document(
        "loadgen plan-capacity",
        (
            f"GPUs for {report.load}",
            ". ".join(filter(None, [f"{report.model} on {report.engines}: {report.goals}", report.assumptions])),
        ),
        sections,
        chips=[
            status.MODELLED,
            Chip(
                "Search", f"{search.simulated:,} of {pluralise(search.considered, 'configuration')} simulated", "note"
            ),
            Chip(
                "Objectives",
                f"met by {pluralise(len(options), 'option')}" if options else "met by no configuration",
                "ok" if options else "error",
            ),
        ],
        data={
            "runs": runs,
            "charts": charts if lines else [],
            "pareto": _pareto_data(report, colours) if points else None,
        },
        scripts=["capacity.js"] if points else [],
    )


def _gpu_order(options: Sequence[CapacityOption], points: Sequence[ParetoPoint]) -> list[str]:
    """Return the names of the GPU types in `options`, followed by the further GPU types in `points`."""
    return list(dict.fromkeys([option.gpu for option in options] + [point.option.gpu for point in points]))


def _cards(report: CapacityReport) -> list[Card]:
    """Return cards about the best option: its GPUs, its cost, the capacity of a replica, and the load."""
    best = report.options[0]
    cards = [Card("Best option", f"{best.gpus} x {best.gpu}", note=_replicas_text(best, report))]
    if best.cost_per_hour is not None:
        note = " ".join(filter(None, ["spot" if best.spot else "", best.region]))
        if best.spare_gpus:
            note += f", with {pluralise(best.spare_gpus, 'spare GPU')}"
        cards.append(Card("Cost", format_cost(best.cost_per_hour, best), "per hour", note))
        cost = format_cost(best.cost_per_million_tokens, best)
        cards.append(Card("Cost of output", cost, "per 1M tokens"))
    if best.prefill_workers is None and best.replica_per_s:
        replicas = (best.gpus or 0) // best.replica_gpus
        used = report.result.rate_per_s / (replicas * best.replica_per_s)
        low, high = significant(best.replica_per_s_low or 0), significant(best.replica_per_s_high or 0)
        interval = "" if best.replica_per_s_low is None else interval_text(low, high)
        cards.append(Card("One replica carries", significant(best.replica_per_s), f"{report.arrivals}/s", interval))
        cards.append(Card("Load", f"{100 * used:.0f}%", "of capacity", "at the requested rate"))
    else:
        for objective, figure in zip(report.objectives, best.figures, strict=False):
            title = figure_title(f"{objective.figure}.{objective.statistic}")
            cards.append(Card(title, duration(figure), "", f"objective {objective.text}"))
    return cards


def _replicas_text(option: CapacityOption, report: CapacityReport) -> str:
    engine = f", {option.engine}" if len(report.space.engines) > 1 else ""
    gpus = f"{pluralise(option.replica_gpus, 'GPU')}, {option.format}{engine}"
    if option.prefill_workers is not None:
        prefill = pluralise(option.prefill_workers, "prefill worker")
        return f"{prefill} and {pluralise(option.decode_workers or 0, 'decode worker')} of {gpus}"
    return f"{pluralise((option.gpus or 0) // option.replica_gpus, 'replica')} of {gpus}"


def _table(report: CapacityReport) -> doc.Table:
    rows = []
    for option in report.options:
        low, high = option.gpus_low, option.gpus_high
        gpu_range = "no range"
        if low is not None:
            gpu_range = "" if low == high else interval_text(str(low), str(high or "∞"))
        rates = [significant(rate or 0) for rate in (option.replica_per_s_low, option.replica_per_s_high)]
        rate = TableCell(UNKNOWN)
        if option.prefill_workers is None:
            rates_text = "" if option.replica_per_s_low is None else interval_text(*rates)
            rate = TableCell(significant(option.replica_per_s), option.replica_per_s, note=rates_text)
        figures = [TableCell(duration(figure), figure) for figure in option.figures]
        note = ", ".join([option.format, *([option.engine] if len(report.space.engines) > 1 else [])])
        spot = ", ".join(filter(None, ["spot" if option.spot else "", option.region]))
        rows.append(
            [
                TableCell(option.gpu, note=note),
                TableCell(option.layout),
                TableCell(gpus_text(option).partition(" ")[0], float(option.gpus or 0), note=gpu_range),
                rate,
                TableCell(_cost(option.cost_per_hour, option), option.cost_per_hour, note=spot),
                TableCell(_cost(option.cost_per_million_tokens, option), option.cost_per_million_tokens),
                *figures,
            ]
        )
    predicted = [figure_title(f"{objective.figure}.{objective.statistic}") for objective in report.objectives]
    heads: dict[str, ColumnKind] = {
        "type": "head",
        "layout": "text",
        **number_columns("GPUs", f"{report.arrivals}/s each", "per hour", "per 1M tokens", *predicted),
    }
    return table("Options, the best first", heads, rows, several=True, id="capacity")


def _cost(cost: float | None, option: CapacityOption) -> str:
    return UNKNOWN if cost is None else format_cost(cost, option)


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def _is_priced(points: Sequence[ParetoPoint]) -> bool:
    return all(point.cost_per_million_tokens is not None for point in points)


def _pareto_section(report: CapacityReport) -> Section:
    """Return the section about the Pareto set, with a chart and a table."""
    points = report.result.pareto
    priced = _is_priced(points)
    title = "Cost against speed per user" if priced else "Throughput per GPU against speed per user"
    caption = PARETO_CAPTION.format(better="cheaper" if priced else "faster per GPU")
    rows = []
    for index, point in enumerate(points):
        cost = TableCell(_cost(point.cost_per_million_tokens, point.option), point.cost_per_million_tokens)
        rows.append(
            [
                TableCell(f"{_letter(index)}: {report.full_name(point.option)}"),
                TableCell(f"{point.option.gpus}", float(point.option.gpus or 0)),
                TableCell(significant(point.tokens_per_s_per_user), point.tokens_per_s_per_user),
                TableCell(significant(point.tokens_per_s_per_gpu), point.tokens_per_s_per_gpu),
                *([cost] if priced else []),
                TableCell(duration(point.ttft_p99_s), point.ttft_p99_s),
                TableCell(duration(point.tpot_p99_s), point.tpot_p99_s),
                TableCell("met" if point.meets else "missed", level="" if point.meets else "warning"),
            ]
        )
    costs = ["per 1M tokens"] if priced else []
    heads: dict[str, ColumnKind] = {
        "configuration": "head",
        **number_columns("GPUs", "tokens/s per user", "tokens/s per GPU", *costs, "TTFT p99", "TPOT p99"),
        "objectives": "text",
    }
    blocks: list[Block] = [
        ChartRef("pareto", title, [caption], "tall", "none", help=PARETO_HELP),
        table("The Pareto set, the fastest first", heads, rows, several=True, id="pareto"),
    ]
    return Section("pareto", "Pareto set", blocks)


def _pareto_data(report: CapacityReport, colours: Mapping[str, str]) -> dict[str, Any]:
    """Return the data from which capacity.js draws the Pareto set."""
    points = report.result.pareto
    priced = _is_priced(points)
    currency = points[0].option.currency
    unit = f", {currency}" if currency else ""
    entries = []
    for index, point in enumerate(points):
        name = report.full_name(point.option)
        cost = f"{_cost(point.cost_per_million_tokens, point.option)} per million tokens"
        entries.append(
            {
                "letter": _letter(index),
                "name": name,
                "group": point.option.gpu,
                "colour": colours[point.option.gpu],
                "speed": point.tokens_per_s_per_user,
                "height": point.cost_per_million_tokens if priced else point.tokens_per_s_per_gpu,
                "ttft": point.ttft_p99_s,
                "meets": point.meets,
                "hover": [
                    f"{_letter(index)}: {name}",
                    f"{significant(point.tokens_per_s_per_user)} tokens/s per user",
                    f"{significant(point.tokens_per_s_per_gpu)} tokens/s per GPU",
                    *([cost] if priced else []),
                    f"TTFT p99 {duration(point.ttft_p99_s)}, TPOT p99 {duration(point.tpot_p99_s)}",
                    "Click for the commands",
                ],
            }
        )
    title = f"cost per 1M output tokens{unit}" if priced else "output tokens/s per GPU"
    return {"points": entries, "is_cost": priced, "y_title": title}


def _commands(report: CapacityReport) -> list[Block]:
    """Return a foldable block for each configuration. It contains the commands of the configuration, and notes on them.

    The configurations are the first MAX_COMMANDS options and all points of the Pareto set. Configurations without
    commands are left out.
    """
    entries = [(f"{option.gpus} x {report.full_name(option)}", option) for option in report.options[:MAX_COMMANDS]]
    entries += [
        (f"{_letter(index)}: {report.full_name(point.option)}", point.option)
        for index, point in enumerate(report.result.pareto)
    ]
    return [
        Disclosure(
            title,
            [
                *(Code(command, name, copy=True) for name, command in option.commands.items()),
                Paragraph(" ".join(option.notes)),
            ],
        )
        for title, option in entries
        if option.commands
    ]


def _best_by_gpu(options: Sequence[CapacityOption]) -> list[CapacityOption]:
    """Return the best option for each GPU type. `options` begins with the best one.

    Options with separate workers for prefill are left out. If some options have a price, options without a price are
    left out too.
    """
    replicas = [option for option in options if option.prefill_workers is None]
    priced = [option for option in replicas if option.cost_per_hour is not None]
    best: dict[str, CapacityOption] = {}
    for option in priced or replicas:
        best.setdefault(option.gpu, option)
    return list(best.values())


def _line(option: CapacityOption, rate_per_s: float, *, priced: bool) -> dict[str, Any]:
    """Return the data of a chart line for `option`: its cost per hour at each request rate.

    If `priced` is False, the line shows the number of GPUs instead. The line has steps, because only whole replicas can
    be added. `rate_per_s` is the request rate of the load. The line ends at MAX_RATE_FACTOR times this rate.
    """
    assert option.replica_per_s
    assert option.gpus
    hour_cost = (option.cost_per_hour or 0.0) / option.gpus  # with a share of the spare replicas
    end = MAX_RATE_FACTOR * rate_per_s
    replicas = math.ceil(end / option.replica_per_s)
    stride = math.ceil(replicas / MAX_STEPS)
    rates = [number * option.replica_per_s for number in range(0, replicas, stride)]
    gpus = [(number + 1) * option.replica_gpus for number in range(0, replicas, stride)]
    heights = [number * hour_cost if priced else float(number) for number in gpus]
    data = {"x": [*rates, end], "y": [*heights, heights[-1]], "gpus": [*gpus, gpus[-1]]}
    return run_data(f"{option.gpu} {option.layout}", 0, {"cost": data})


def _chart(rate_per_s: float, y_title: str, unit: str) -> dict[str, Any]:
    trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "@name",
        "x": "$x",
        "y": "$y",
        "customdata": "$gpus",
        "line": {"color": "@run", "dash": "@dash", "width": 2, "shape": "hv"},
        "hovertemplate": f"from %{{x:.3~g}} {unit}: %{{customdata}} GPUs, %{{y:,.2f}}<extra>@name</extra>",
    }
    marker = {"type": "line", "x0": rate_per_s, "x1": rate_per_s, "y0": 0, "y1": 1, "yref": "paper"}
    layout = {
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": y_title}, "rangemode": "tozero"},
        "shapes": [marker | {"line": {"color": "@quiet", "dash": "dash", "width": 1}}],
    }
    columns = {f"from {unit}": "x", "GPUs": "gpus", y_title: "y"}
    return chart_definition("cost", [trace], layout, columns)
