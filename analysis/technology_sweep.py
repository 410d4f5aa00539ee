"""The terminal report and the HTML page of `loadgen hardware sweep`.

They show the times of a model on hypothetical GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from math import ceil, floor, log10
from textwrap import fill
from typing import TYPE_CHECKING, Any

from loadgen.analysis.format import duration, scale_of, significant
from loadgen.analysis.hardware import align_columns
from loadgen.servers.hardware.resource_shares import LATENCY, RESOURCES
from loadgen.servers.hardware.technology_sweep import SweepPoint, TechnologySweep

if TYPE_CHECKING:
    from loadgen.analysis import report as doc

PARTS = (*RESOURCES, LATENCY)
LETTERS = {"compute": "C", "memory": "M", "network": "N", "latency": "L"}
"""Letter of each part in the terminal's table."""
LINE_WIDTH = 80
PROJECTED_MARK = "*"
"""Mark of a technology node that is not in production."""
COLUMN_WIDTH = 14
"""Width of a memory's column in the terminal."""
UNKNOWN_CELL = "too large"
LEGEND = "The letter is the largest part of the time: C compute, M memory, N network, L latency."
LATENCY_MEANING = """Latency is the time that a faster chip, memory or network does not shorten: launches, the start of
transfers, waits, and the engine's own work."""
MEANING = """Area, power, number of memory stacks and architecture are those of the original GPU. SMs grow with the
logic density; if the chip would then draw more power, its clock falls. Memory has the same shares of its standard's
rate and capacity as in the original. Compute includes the caches of the chip."""
NO_EFFECT = "has no effect on these times: nothing is sent over it. See --tp and --pp."
SHARES = "The share of a resource is what would be saved if this resource were infinitely fast."
SYMBOLS = {"compute": "circle", "memory": "square", "network": "diamond", "latency": "triangle-up"}
"""Symbol of each part in the chart of times."""
LINES = (
    "The symbols show the largest part of the time: circle compute, square memory, diamond network, triangle latency."
)
LOGARITHMIC_FROM = 5.0
"""Ratio of the longest and the shortest time from which the chart of times has a logarithmic axis."""
PARTS_CHARTS = 4
"""Maximum number of memories of which the page draws the parts of the time."""


def not_validated(sweep: TechnologySweep) -> str:
    """Return the sentence that says why the figures of the sweep are not validated."""
    return (
        f"Not validated: GPUs derived from {sweep.gpu} do not exist, so no figure was compared with a measurement. "
        "The scaling comes from foundries' statements and from standards, which are best cases."
    )


def title_of(sweep: TechnologySweep) -> str:
    """Return the title of the page, such as `Serving llama-3.1-8b in fp8 on 1 x H100 of other technologies`."""
    purpose = "Training" if sweep.purpose == "training" else "Serving"
    return f"{purpose} {sweep.model} in {sweep.format} on {sweep.gpus} x {sweep.gpu} of other technologies"


def format_sweep(sweep: TechnologySweep) -> str:
    """Format the result of `loadgen hardware sweep` as text for a terminal of 80 columns."""
    blocks = [fill(title_of(sweep), LINE_WIDTH) + f"\n{sweep.load}"]
    for figure in sweep.figures:
        for network in sweep.networks:
            blocks += _time_tables(sweep, figure, network)
    blocks.append(LEGEND.replace(": C", ":\nC"))
    for memory in dict.fromkeys((sweep.memories[0], sweep.memories[-1])):
        if any(sweep.point(node, memory, sweep.networks[0]).times for node in sweep.technologies):
            blocks.append(_share_table(sweep, sweep.figures[0], memory))
    blocks += [_chip_table(sweep), *_notes(sweep)]
    return "\n\n".join(blocks)


def _time_tables(sweep: TechnologySweep, figure: str, network: str) -> Iterable[str]:
    """Yield tables of the time `figure`, such as `time per output token`, by technology node and memory.

    All GPUs in these tables have the network `network`. A table has one row per technology node and one column per
    memory. It is at most 80 characters wide, so many memories need several tables.
    """
    columns = (LINE_WIDTH - 8) // COLUMN_WIDTH
    where = f" with {network}" if network else ""
    for first in range(0, len(sweep.memories), columns):
        memories = sweep.memories[first : first + columns]
        rows = [("node", *(f"{memory}  " for memory in memories))]
        for node in sweep.technologies:
            points = [sweep.point(node, memory, network) for memory in memories]
            rows.append((_node(points[0]), *(_time_cell(point, figure) for point in points)))
        yield f"{_capitalised(figure)}{where}\n{align_columns(rows)}"


def _time_cell(point: SweepPoint, figure: str) -> str:
    time = point.times.get(figure)
    return f"{duration(time.total_s)} {LETTERS[time.bound]}" if time else f"{UNKNOWN_CELL}  "


def _share_table(sweep: TechnologySweep, figure: str, memory: str) -> str:
    rows: list[tuple[str, ...]] = [("node", *PARTS)]
    for node in sweep.technologies:
        point = sweep.point(node, memory, sweep.networks[0])
        time = point.times.get(figure)
        if time:
            rows.append((_node(point), *(f"{100 * time.shares[part]:.0f}%" for part in PARTS)))
    return f"Parts of the {figure} with {_memory_and_network(memory, sweep.networks[0])}\n{align_columns(rows)}"


def _chip_table(sweep: TechnologySweep) -> str:
    rows = [("node", "SMs", "clock", "bf16 peak", "limited by")]
    for point in _one_per_node(sweep):
        peak = f"{significant(point.flops_per_s / 1e12)} TFLOP/s"
        rows.append(
            (_node(point), f"{point.sms:,}", f"{point.clock_hz / 1e9:.2f} GHz", peak, point.limited_by or "original")
        )
    return f"The chip\n{align_columns(rows)}"


def _notes(sweep: TechnologySweep) -> Iterable[str]:
    yield fill(" ".join(MEANING.split()), LINE_WIDTH)
    yield fill(" ".join(LATENCY_MEANING.split()), LINE_WIDTH)
    if any(point.projected for point in sweep.points):
        yield f"{PROJECTED_MARK} A projection: this node is not in production."
    for text in _problems(sweep):
        yield fill(text, LINE_WIDTH)
    yield fill(not_validated(sweep), LINE_WIDTH)


def _problems(sweep: TechnologySweep) -> list[str]:
    """Return sentences about the problems of the sweep. The list is empty if there are none.

    There is a sentence for each of these problems:

    - A network has no effect on the times (one sentence per network).
    - The model does not fit into the memory of some GPUs.
    - The smallest memory holds fewer concurrent requests than the other memories.
    """
    sentences = []
    if sweep.unused_networks:
        sentences += [f"{name} {NO_EFFECT}" for name in sweep.unused_networks]
    problems = [point for point in sweep.points if point.problem]
    if problems:
        sentences.append(
            f"{_capitalised(UNKNOWN_CELL)}: {problems[0].problem.partition(':')[0]} with {problems[0].memory}."
        )
    counts = {point.memory: point.running for point in sweep.points if point.times and point.running}
    smallest = min(counts, key=lambda memory: counts[memory], default="")
    if smallest and counts[smallest] < max(counts.values()):
        sentences.append(f"With {smallest}, only {counts[smallest]:,} requests fit into memory at the same time.")
    return sentences


def _one_per_node(sweep: TechnologySweep) -> list[SweepPoint]:
    return [sweep.point(node, sweep.memories[0], sweep.networks[0]) for node in sweep.technologies]


def _node(point: SweepPoint) -> str:
    return f"{point.technology}{PROJECTED_MARK if point.projected else ''}"


def _memory_and_network(memory: str, network: str) -> str:
    return f"{memory} and {network}" if network else memory


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def build_document(sweep: TechnologySweep) -> doc.Document:
    """Return the page of `loadgen hardware sweep`.

    The page shows the times of the model by technology node and memory, the parts of each time, and the properties of
    the GPU at each technology node.
    """
    from loadgen.analysis import report as doc
    from loadgen.analysis.report.charts import PALETTE
    from loadgen.analysis.report.status import COMPUTED

    lines = [(memory, network) for network in sweep.networks for memory in sweep.memories][: len(PALETTE)]
    sections = [doc.Section("answer", "", [doc.Cards(_cards(sweep))])]
    charts = []
    for number, figure in enumerate(sweep.figures):
        time_name = f"time-{number}"
        blocks: list[doc.Block] = [
            doc.ChartRef(time_name, "Time by technology node", [LINES], "wide", zoom="none"),
        ]
        charts.append(_time_chart(time_name, figure, sweep))
        for index, line in enumerate(lines[:PARTS_CHARTS]):
            name = f"parts-{number}-{index}"
            heading = f"Parts of the time: {_memory_and_network(*line)}"
            blocks.append(doc.ChartRef(name, heading, [SHARES] if index == 0 else [], zoom="none"))
            charts.append(_parts_chart(name))
        blocks += [_page_table(sweep, figure, network) for network in sweep.networks]
        sections.append(doc.Section(f"figure-{number}", _capitalised(figure), blocks))
    explained: list[doc.Block] = [doc.Paragraph(text) for text in (MEANING, LATENCY_MEANING, *_problems(sweep))]
    projections = _projections(sweep)
    if projections:
        explained.append(doc.Disclosure("Sources of the projections", [*map(doc.Paragraph, projections)]))
    last = [_page_chips(sweep), *explained, doc.Paragraph(not_validated(sweep), "note")]
    sections.append(doc.Section("chips", "The GPUs", last))
    runs = [_run(sweep, index, *line) for index, line in enumerate(lines)]
    styles = [doc.RunStyle(run["name"], run["colour"]) for run in runs]
    data = {"runs": runs, "charts": charts}
    return doc.Document(
        "loadgen hardware sweep",
        title_of(sweep),
        sections,
        sweep.load,
        "",
        styles,
        [],
        data,
        version("llm-loadgen"),
        chips=[COMPUTED, doc.Chip("Accuracy", "not validated: these GPUs do not exist", "note")],
    )


def _cards(sweep: TechnologySweep) -> list[doc.Card]:
    """Return the cards at the top of the page, which compare the first GPU of the sweep with the last GPU.

    The first GPU combines the first technology node, memory and network of the sweep, and the last GPU combines the
    last ones. There are two groups of cards:

    - For each predicted time, a card shows the time on the last GPU, and how many times as fast this GPU is.
    - For each of the two GPUs, a card shows what limits its first predicted time: compute, memory, network or latency.
    """
    from loadgen.analysis.report import Card

    cards = []
    first = sweep.point(sweep.technologies[0], sweep.memories[0], sweep.networks[0])
    last = sweep.point(sweep.technologies[-1], sweep.memories[-1], sweep.networks[-1])
    for figure in sweep.figures:
        if figure in first.times and figure in last.times:
            before, after = first.times[figure], last.times[figure]
            value, unit = duration(after.total_s).split(" ")
            note = f"{_name_of(last)}, {significant(before.total_s / after.total_s)} times as fast as {_name_of(first)}"
            cards.append(Card(_capitalised(figure), value, unit, note))
    for point in (first, last):
        time = point.times.get(sweep.figures[0])
        if time:
            share = f"{100 * time.shares[time.bound]:.0f}%"
            cards.append(Card(f"Bound with {_name_of(point)}", time.bound, "", f"{share} of the {sweep.figures[0]}"))
    return cards


def _name_of(point: SweepPoint) -> str:
    return f"{point.technology}, {_memory_and_network(point.memory, point.network)}"


def _page_table(sweep: TechnologySweep, figure: str, network: str) -> doc.Table:
    from loadgen.analysis.report import ColumnKind, TableCell
    from loadgen.analysis.report.tables import number_columns, table

    rows = []
    for node in sweep.technologies:
        points = [sweep.point(node, memory, network) for memory in sweep.memories]
        cells = [TableCell(_node(points[0]), sweep.technologies.index(node))]
        for point in points:
            time = point.times.get(figure)
            cells.append(
                TableCell(duration(time.total_s), time.total_s, time.bound) if time else TableCell(UNKNOWN_CELL)
            )
        rows.append(cells)
    heads: dict[str, ColumnKind] = {"node": "head", **number_columns(*sweep.memories)}
    title = f"{_capitalised(figure)} and its largest part{f' with {network}' if network else ''}"
    return table(title, heads, rows, several=True)


def _page_chips(sweep: TechnologySweep) -> doc.Table:
    from loadgen.analysis.report import ColumnKind, TableCell
    from loadgen.analysis.report.tables import number_columns, table

    rows = [
        [
            TableCell(_node(point), sweep.technologies.index(point.technology)),
            TableCell(f"{point.sms:,}"),
            TableCell(f"{point.clock_hz / 1e9:.2f}"),
            TableCell(significant(point.flops_per_s / 1e12)),
            TableCell(point.limited_by or "original"),
        ]
        for point in _one_per_node(sweep)
    ]
    heads: dict[str, ColumnKind] = {
        "node": "head",
        **number_columns("SMs", "GHz", "TFLOP/s"),
        "limited by": "text",
    }
    return table("Chip of each node, with its peak in bf16", heads, rows, several=True)


def _run(sweep: TechnologySweep, index: int, memory: str, network: str) -> dict[str, Any]:
    """Return the data of one line in the charts: the predicted times on a series of GPUs.

    The GPUs differ in their technology node. All of them have the memory `memory` and the network `network`. `index` is
    the number of the line, which determines its colour. For the first PARTS_CHARTS lines, the data also contains the
    parts of each time.
    """
    from loadgen.analysis.report.charts import PALETTE

    points = [sweep.point(node, memory, network) for node in sweep.technologies]
    data: dict[str, Any] = {}
    for number, figure in enumerate(sweep.figures):
        known = [(point, point.times[figure]) for point in points if figure in point.times]
        factor, _ = _unit(sweep, figure)
        nodes = [_node(point).replace("nm", "") for point, _ in known]
        data[f"time-{number}"] = {
            "node": nodes,
            "time": [factor * time.total_s for _, time in known],
            "symbol": [SYMBOLS[time.bound] for _, time in known],
            "bound": [time.bound for _, time in known],
        }
        if index < PARTS_CHARTS:
            shares = {part: [time.shares[part] for _, time in known] for part in PARTS}
            data[f"parts-{number}-{index}"] = {"node": nodes, **shares}
    colour = list(PALETTE)[index % len(PALETTE)]
    return {
        "name": _memory_and_network(memory, network),
        "colour": colour,
        "dash": "solid",
        "window": None,
        "data": data,
    }


def _unit(sweep: TechnologySweep, figure: str) -> tuple[float, str]:
    """Return the factor and the unit in which the chart shows the times of `figure`, such as `(1e3, "ms")`."""
    times = [point.times[figure].total_s for point in sweep.points if figure in point.times]
    return scale_of(min(times, default=1.0))


def _time_axis(sweep: TechnologySweep, figure: str) -> dict[str, Any]:
    """Return the settings of the axis of times: logarithmic if the times differ much, otherwise from 0."""
    factor, _ = _unit(sweep, figure)
    times = [factor * point.times[figure].total_s for point in sweep.points if figure in point.times]
    low, high = min(times, default=1.0), max(times, default=1.0)
    if high / low < LOGARITHMIC_FROM:
        return {"rangemode": "tozero"}
    ticks = [digit * 10**power for power in range(floor(log10(low)), ceil(log10(high)) + 1) for digit in (1, 2, 5)]
    labels = [f"{tick:,g}" for tick in ticks]
    return {"type": "log", "tickvals": ticks, "ticktext": labels, "range": [log10(low / 1.2), log10(high * 1.2)]}


def _time_chart(name: str, figure: str, sweep: TechnologySweep) -> dict[str, Any]:
    _, unit = _unit(sweep, figure)
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "@name",
        "x": "$node",
        "y": "$time",
        "customdata": "$bound",
        "line": {"color": "@run", "width": 2},
        "marker": {"color": "@run", "size": 10, "symbol": "$symbol"},
        "hovertemplate": f"%{{x}} nm: %{{y:.4~g}} {unit}, %{{customdata}}<extra>@name</extra>",
    }
    layout = {
        "showlegend": True,
        "xaxis": {"type": "category", "title": {"text": "technology node, nm"}},
        "yaxis": {"title": {"text": f"{figure}, {unit}"}} | _time_axis(sweep, figure),
    }
    columns = {"node, nm": "node", unit: "time", "largest part": "bound"}
    return {"id": name, "script": "", "traces": [trace], "layout": layout, "table": columns, "scales": {}}


def _parts_chart(name: str) -> dict[str, Any]:
    """Return the definition of a chart with one stacked bar per technology node. `name` is the id of the chart.

    A bar shows which shares of a predicted time are due to compute, memory, network and latency.
    """
    traces = [
        {
            "type": "bar",
            "name": part,
            "x": "$node",
            "y": f"${part}",
            "marker": {"color": f"@run-{index}"},
            "hovertemplate": f"%{{x}} nm: {part} %{{y:.0%}}<extra></extra>",
        }
        for index, part in enumerate(PARTS, 1)
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.15,
        "showlegend": True,
        "xaxis": {"type": "category", "title": {"text": "technology node, nm"}},
        "yaxis": {"title": {"text": "share of the time"}, "tickformat": ".0%", "range": [0, 1]},
    }
    columns = {"node, nm": "node", **{part: part for part in PARTS}}
    return {"id": name, "script": "", "traces": traces, "layout": layout, "table": columns, "scales": {}}


def _projections(sweep: TechnologySweep) -> list[str]:
    """Return a sentence for each technology node of the sweep that is only a projection.

    The sentence names the source of the projection.
    """
    from loadgen.servers.hardware.technology import technology

    nodes = [technology(point.technology) for point in _one_per_node(sweep) if point.projected]
    return [f"{PROJECTED_MARK} {node.name} is a projection. Source: {node.source}." for node in nodes]
