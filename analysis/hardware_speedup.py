"""Formats the result of `loadgen hardware compare` as text for a terminal and as a page.

The command predicts how much faster each GPU is than the GPU before it. The speed-up is divided into factors, such as
compute rate and memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import version
from textwrap import fill
from typing import TYPE_CHECKING, Any

from loadgen.analysis.format import significant
from loadgen.analysis.hardware import align_columns

if TYPE_CHECKING:
    from loadgen.analysis.report import Document
    from loadgen.servers.hardware.dissection import ComparedGpu, Dissection, SpeedFactor

WIDTH = 80
FACTOR_HEADS = ("factor", "from and to", "grew", "gain", "together", "any order")
MEANING = """`grew` is the growth of the property itself, by the data sheets. `gain` is what the speed gains when the
property changes after those above it; the product of the gains is the speed-up. `any order` is the geometric mean of
the gain over all orders, and its product is the same speed-up."""
WATERFALL = """Each bar is one factor, applied after those above it. A bar begins at the speed without the factor and
ends at the speed with it. The scale is logarithmic, so equal lengths are equal gains."""
SPENT_NAMES = {"tensor": "all-reduces", "data": "gradients"}
"""Words for parts of the time whose names are short in the code."""


def speedup_title(dissections: Sequence[Dissection]) -> str:
    """Return a title with the first and last GPU and the speed-up between them, such as `From A100 to H100: 2.10x`."""
    first, last = dissections[0].before, dissections[-1].after
    return f"From {first.gpu} to {last.gpu}: {times(last.tokens_per_s / first.tokens_per_s)}"


def times(ratio: float) -> str:
    """Format a ratio of two speeds, such as `5.42x`."""
    return f"{significant(ratio)}x"


def format_speedup(dissections: Sequence[Dissection], load: str) -> str:
    """Format the result of `loadgen hardware compare` as text for a terminal. `load` describes what is computed."""
    blocks = [f"{speedup_title(dissections)}\n{fill(load, WIDTH)}", align_columns(_gpu_rows(dissections))]
    for dissection in dissections:
        title = f"{dissection.before.gpu} to {dissection.after.gpu}: {times(dissection.speed_up)}"
        table = align_columns([FACTOR_HEADS, *map(_factor_row, dissection.factors)])
        lines = [title, table] if len(dissections) > 1 else [table]
        blocks.append("\n".join([*lines, "", *(fill(line, WIDTH) for line in sentences(dissection))]))
    if len(dissections) > 1:
        blocks.append("\n".join(["Gains of all steps", align_columns(overview_rows(dissections))]))
    blocks.append(fill(MEANING, WIDTH))
    return "\n\n".join(blocks)


def sentences(dissection: Dissection) -> list[str]:
    """Return three sentences about the speed-up from one GPU to another GPU.

    They state the growth of the peak FLOP/s, the parts of the second GPU's time, and the accuracy of the prediction.
    """
    before, after = dissection.before, dissection.after
    return [
        f"The peak FLOP/s alone grew {times(dissection.peak_growth)}, including the number format.",
        f"{after.gpu} spends its time on: {_spent(after)}.",
        f"Accuracy: {before.gpu}: {before.accuracy}; {after.gpu}: {after.accuracy}; the speed-up: "
        f"{_speed_up_text(dissection.accuracy)}.",
    ]


def _speed_up_text(accuracy: str) -> str:
    """Return a text on the accuracy of a predicted speed-up.

    `accuracy` is the formatted accuracy, or `not validated`. It was measured for ratios of TPOT, but the speed-up is a
    ratio of throughputs. The text therefore says that the accuracy is that of TPOT ratios.
    """
    return accuracy if accuracy == "not validated" else f"TPOT ratio at the same TP and load {accuracy}"


def _spent(compared: ComparedGpu) -> str:
    parts = sorted(compared.spent.items(), key=lambda part: -part[1])
    return ", ".join(f"{SPENT_NAMES.get(name, name)} {100 * share:.0f}%" for name, share in parts if share > 0.005)


def _gpu_rows(dissections: Sequence[Dissection]) -> list[tuple[str, ...]]:
    """Return the rows of the table of the compared GPUs. The table has one column per GPU.

    The rows contain the number of GPUs, the number format, the other settings, and the speed.
    """
    compared = [dissections[0].before, *(dissection.after for dissection in dissections)]
    return [
        ("", *(item.gpu for item in compared)),
        ("GPUs", *(f"{item.gpus:,}" for item in compared)),
        ("number format", *(item.format for item in compared)),
        *((name, *(item.use[name] for item in compared)) for name in compared[0].use),
        ("tokens/s", *(significant(item.tokens_per_s) for item in compared)),
        ("tokens/s per GPU", *(significant(item.tokens_per_s_per_gpu) for item in compared)),
    ]


def _factor_row(factor: SpeedFactor) -> tuple[str, ...]:
    grew = "" if factor.grew is None else times(factor.grew)
    change = f"{factor.before} to {factor.after}"
    return factor.name, change, grew, times(factor.gain), times(factor.total), times(factor.share)


def overview_rows(dissections: Sequence[Dissection]) -> list[tuple[str, ...]]:
    """Return a table that shows by how much each kind of factor, such as number formats, increases the speed.

    - Rows: one row per kind of factor. The last row contains the speed-up by all factors together.
    - Columns: one column per step from one GPU to the next. The last column contains the product of all steps.

    Each cell is a ratio: the speed with these factors changed, divided by the speed without these changes. This ratio
    depends on the order in which all factors are changed. The cell therefore contains the geometric mean over all
    orders.
    """
    longest_first = sorted(dissections, key=lambda dissection: -len(dissection.factors))
    kinds = dict.fromkeys(factor.kind for dissection in longest_first for factor in dissection.factors)
    rows = [("any order", *(dissection.after.gpu for dissection in dissections), "all")]
    for kind in kinds:
        gains = [_kind_gain(dissection, kind) for dissection in dissections]
        rows.append((kind, *map(times, gains), times(math.prod(gains))))
    gains = [dissection.speed_up for dissection in dissections]
    return [*rows, ("speed-up", *map(times, gains), times(math.prod(gains)))]


def _kind_gain(dissection: Dissection, kind: str) -> float:
    """Return the factor by which all changes of one kind together increase the speed.

    `kind` is, for example, `number format`. `dissection` divides the speed-up between two GPUs into such changes. The
    gain of a change depends on the order of the changes, so its geometric mean over all orders is used. The result is
    the product of these means.
    """
    return math.prod(factor.share for factor in dissection.factors if factor.kind == kind)


def speedup_document(dissections: Sequence[Dissection], load: str) -> Document:
    """Return the page of `loadgen hardware compare`. `load` is a text that describes the load.

    The page compares two or more GPUs. It explains the speed-up from each GPU to the next by a chart and a table of
    factors. It also has cards, and a table of all compared GPUs.
    """
    from loadgen.analysis import report as doc
    from loadgen.analysis.report.status import COMPUTED
    from loadgen.analysis.report.tables import number_columns, table

    title = speedup_title(dissections)
    sections = [doc.Section("answer", "Speed-up", [doc.Cards(_cards(dissections))])]
    heads: dict[str, doc.ColumnKind] = {"factor": "head", "from and to": "text", **number_columns(*FACTOR_HEADS[2:])}
    for index, dissection in enumerate(dissections):
        step = f"{dissection.before.gpu} to {dissection.after.gpu}"
        rows = [_factor_row(factor) for factor in dissection.factors]
        blocks: list[doc.Block] = [
            doc.ChartRef(f"factors-{index}", "Factors, one after the other", [WATERFALL], "wide", zoom="none"),
            table(
                f"{step}: {times(dissection.speed_up)}", heads, rows, several=True, notes=[" ".join(MEANING.split())]
            ),
            *map(doc.Paragraph, sentences(dissection)),
        ]
        sections.append(doc.Section(f"step-{index}", step, blocks))
    if len(dissections) > 1:
        first, *body = overview_rows(dissections)
        columns: dict[str, doc.ColumnKind] = {"factor": "head", **number_columns(*first[1:])}
        sections.append(doc.Section("all", "All steps", [table("Gains in any order", columns, body, several=True)]))
    first, *body = _gpu_rows(dissections)
    columns = {"setting": "head", **number_columns(*first[1:])}
    sections.append(doc.Section("gpus", "The compared GPUs", [table("Use and speed", columns, body, several=True)]))
    charted = {f"factors-{index}": _chart_data(dissection) for index, dissection in enumerate(dissections)}
    run = {"name": title, "colour": "run-1", "dash": "solid", "window": None, "data": charted}
    data = {"runs": [run], "charts": [_chart(f"factors-{index}", item) for index, item in enumerate(dissections)]}
    look = doc.RunStyle(title)
    return doc.Document(
        "loadgen hardware compare",
        title,
        sections,
        load,
        "",
        [look],
        [],
        data,
        version("llm-loadgen"),
        chips=[COMPUTED],
    )


def _cards(dissections: Sequence[Dissection]) -> list[Any]:
    from loadgen.analysis.report import Card

    first, last = dissections[0].before, dissections[-1].after
    speed_up = last.tokens_per_s / first.tokens_per_s
    kinds = {factor.kind for dissection in dissections for factor in dissection.factors}
    gains = {kind: math.prod(_kind_gain(dissection, kind) for dissection in dissections) for kind in kinds}
    largest = max(gains, key=lambda kind: gains[kind])
    peaks = math.prod(dissection.peak_growth for dissection in dissections)
    return [
        Card("Speed-up", times(speed_up), "", f"{last.gpus} x {last.gpu} against {first.gpus} x {first.gpu}"),
        Card(last.gpu, significant(last.tokens_per_s), "tokens/s", f"{first.gpu}: {significant(first.tokens_per_s)}"),
        Card("Largest factor", times(gains[largest]), "", f"{largest}, in any order"),
        Card("Peak FLOP/s", times(peaks), "", "growth with the number format"),
    ]


def _chart_data(dissection: Dissection) -> dict[str, Any]:
    """Return the values of the chart that shows the effect of each factor as a bar.

    A bar extends from the speed without the factor to the speed with it. `up` contains the bars of factors with a gain
    of 1 or more, and `down` contains the other bars. In both, `x` contains three entries per bar: its two ends, and
    None, which separates it from the next bar. `end` contains the larger end of each bar.
    """
    factors = dissection.factors
    up: dict[str, list[Any]] = {"x": [], "y": []}
    down: dict[str, list[Any]] = {"x": [], "y": []}
    for factor in factors:
        group = up if factor.gain >= 1 else down
        group["x"] += [factor.total / factor.gain, factor.total, None]
        group["y"] += [factor.name] * 3
    ends = [max(factor.total, factor.total / factor.gain) for factor in factors]
    return {
        "up": up,
        "down": down,
        "end": ends,
        "name": [factor.name for factor in factors],
        "text": [f" {times(factor.gain)}" for factor in factors],
        "grew": [factor.grew for factor in factors],
        "gain": [factor.gain for factor in factors],
        "total": [factor.total for factor in factors],
        "share": [factor.share for factor in factors],
    }


def _chart(name: str, dissection: Dissection) -> dict[str, Any]:
    def bars(group: str, colour: str) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "lines",
            "x": f"${group}.x",
            "y": f"${group}.y",
            "line": {"color": colour, "width": 16},
            "hovertemplate": "%{y}: %{x:.3g} times the speed<extra></extra>",
        }

    labels = {
        "type": "scatter",
        "mode": "text",
        "x": "$end",
        "y": "$name",
        "text": "$text",
        "textposition": "middle right",
        "hoverinfo": "skip",
        "cliponaxis": False,
    }
    names = [factor.name for factor in dissection.factors]
    highest = max(factor.total for factor in dissection.factors)
    lowest = min(1.0, *(factor.total for factor in dissection.factors))
    layout = {
        "xaxis": {
            "title": {"text": "relative speed"},
            "type": "log",
            "range": [math.log10(lowest) - 0.02, math.log10(highest) + 0.1 * math.log10(max(2.0, highest / lowest))],
        },
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": names[::-1], "ticksuffix": "  "},
        "showlegend": False,
        "margin": {"l": 156, "r": 48, "t": 10, "b": 44},
    }
    table = {"factor": "name", "grew": "grew", "gain": "gain", "together": "total", "any order": "share"}
    traces = [bars("up", "@run"), bars("down", "@bad"), labels]
    return {"id": name, "script": "", "traces": traces, "layout": layout, "table": table, "scales": {}}
