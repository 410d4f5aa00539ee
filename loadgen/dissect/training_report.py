"""What `loadgen dissect training` says of a step: measured beside predicted, in plain lines and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from loadgen.analysis.format import byte_size, duration, percent, pluralise, significant
from loadgen.analysis.hardware import align_columns
from loadgen.dissect.inference_report import link_sentences, mean_and_margin, wrap_lines

if TYPE_CHECKING:
    from loadgen.analysis.report import Document
    from loadgen.dissect.results import TechniqueResult, TrainingResult

TIME_HEADS = ("technique", "step", "±", "forward", "backward", "optimiser", "collectives", "tokens/s", "predicted")
MEMORY_HEADS = ("technique", "weights", "gradients", "optimiser", "activations", "peak", "predicted", "off")
PARTS_HEADS = ("technique", "part", "measured", "predicted")
TIME_CHART = """Seconds of one step, from left to right: computing, and the time in which a collective was under way.
The upright line is what the model predicts for all of it."""
MEMORY_CHART = (
    """Bytes of one process at the peak, by kind. The upright line is what the model predicts for all of it."""
)
COLLECTIVES = "collectives"
FEWEST = 4
"""Bars that a chart has room for at least, so that one alone is not as high as the page."""
MEANING = """Collectives run beside forward and backward and are part of them. Memory is that of one process at the
instant at which it is most, by the allocator's account; activations are all that passes: gathered weights and buffers
too. Predictions (loadgen.servers.hardware) add up memory tensor by tensor and time operator by operator,
from what each process reached just before. A bus bandwidth counts each byte once on the busiest link, as nccl-tests
do."""


def headings(found: TrainingResult) -> tuple[str, str]:
    """What was measured, and the bounds."""
    allowed = found.bounds
    return (
        f"{found.model}, {found.layers} of {pluralise(found.model_layers, 'layer')} "
        f"({significant(found.parameters / 1e6)} M parameters), {found.dtype}, {found.batch} x {found.sequence} tokens",
        f"{allowed.device}: {significant(allowed.flops_per_s / 1e9)} GFLOP/s, "
        f"{significant(allowed.bytes_per_s / 1e9)} GB/s ({allowed.source})",
    )


def step_times_s(each: TechniqueResult) -> list[float]:
    """Whole steps, one per repeat."""
    return [sum(parts) for parts in zip(*each.parts_s.values(), strict=True)]


def peak_error(each: TechniqueResult) -> float:
    """By how much the predicted peak is off the measured one, as a share."""
    return sum(each.predicted_bytes.values()) / sum(each.memory_bytes.values()) - 1


def time_rows(found: TrainingResult) -> list[tuple[str, ...]]:
    """Of each technique that was measured."""
    rows: list[tuple[str, ...]] = []
    for each in _measured(found):
        mean, margin = mean_and_margin(step_times_s(each))
        parts = [duration(mean_and_margin(seconds)[0]) for seconds in each.parts_s.values()]
        rows.append(
            (
                *(_label(each), duration(mean), duration(margin, 2), *parts),
                duration(sum(each.communication_s.values())) if each.processes > 1 else "",
                *(significant(found.batch * found.sequence / mean), duration(sum(each.predicted_s.values()))),
            )
        )
    return rows


def memory_rows(found: TrainingResult) -> list[tuple[str, ...]]:
    """At the peak, by kind; by how much the predicted peak is off."""
    return [
        (
            *(_label(each), *(byte_size(held) for held in each.memory_bytes.values())),
            *(byte_size(sum(each.memory_bytes.values())), byte_size(sum(each.predicted_bytes.values()))),
            f"{100 * peak_error(each):+.1f} %",
        )
        for each in _measured(found)
    ]


def parts_rows(found: TrainingResult) -> list[tuple[str, ...]]:
    """Every part of time and kind of memory, measured and predicted."""
    rows: list[tuple[str, ...]] = []
    for each in _measured(found):
        for part, seconds in each.parts_s.items():
            rows.append((each.technique, part, duration(mean_and_margin(seconds)[0]), duration(each.predicted_s[part])))
        if each.processes > 1:
            talk = [sum(took.values()) for took in (each.communication_s, each.predicted_communication_s)]
            rows.append((each.technique, COLLECTIVES, *map(duration, talk)))
        for kind, held in each.memory_bytes.items():
            rows.append((each.technique, f"{kind}, bytes", byte_size(held), byte_size(each.predicted_bytes[kind])))
    return rows


def sentences(found: TrainingResult) -> list[str]:
    """What could not be measured, and why; how far the predictions are off."""
    lines = [
        f"Not here: {technique.technique}: {technique.cannot}." for technique in found.techniques if technique.cannot
    ]
    worst = max(_measured(found), key=lambda each: abs(peak_error(each)))
    lines.append(
        f"The predicted peak of memory is off by at most {percent(abs(peak_error(worst)))} ({worst.technique})."
    )
    linked = next((each for each in _measured(found) if each.bounds and each.bounds.links), None)
    return [*lines, *(link_sentences(linked.bounds, linked.processes) if linked and linked.bounds else [])]


def format_text(found: TrainingResult) -> str:
    """All of it for a terminal of 80 columns."""
    times = [(*row[:2], *row[3:]) for row in (TIME_HEADS, *time_rows(found))]  # the margin is in JSON and on the page
    short = {
        "optimiser": "optim.",
        "collectives": "coll.",
        "activations": "activ.",
        "gradients": "grads",
        "predicted": "model",
    }
    heads = [tuple(short.get(cell, cell) for cell in row) for row in (times[0], MEMORY_HEADS)]
    blocks = [
        wrap_lines(headings(found)),
        align_columns([heads[0], *times[1:]]),
        align_columns([heads[1], *memory_rows(found)]),
        wrap_lines([*sentences(found), " ".join(MEANING.split())]),
    ]
    return "\n\n".join(blocks)


def build_document(found: TrainingResult) -> Document:
    """The page: the tables, and everything measured beside everything predicted."""
    from loadgen.analysis import report as doc
    from loadgen.analysis.report.tables import number_columns, table

    title, bounds = headings(found)
    measured = _measured(found)
    head: dict[str, doc.ColumnKind] = {"technique": "head"}
    tables = [
        table("Time of one step", head | number_columns(*TIME_HEADS[1:]), time_rows(found), several=True, id="time"),
        table(
            "Memory at the peak",
            head | number_columns(*MEMORY_HEADS[1:]),
            memory_rows(found),
            several=True,
            id="memory",
        ),
    ]
    both = table(
        "Each part and kind",
        head | {"part": "text", **number_columns(*PARTS_HEADS[2:])},
        parts_rows(found),
        several=True,
    )
    shape: Any = "tall" if len(measured) > FEWEST else "wide"
    drawn = [
        doc.ChartRef("time", "Where a step goes", [TIME_CHART], shape),
        doc.ChartRef("memory", "What memory holds at its peak", [MEMORY_CHART], shape),
    ]
    times, held = tables
    sections = [
        doc.Section("answer", "A training step", [*map(doc.Paragraph, sentences(found)), drawn[0], times]),
        doc.Section("held", "Memory", [drawn[1], held, doc.Paragraph(MEANING)]),
        doc.Section("model", "Model against measurement", [both]),
    ]
    talks = [COLLECTIVES] if any(each.communication_s for each in measured) else []
    charts = [
        _chart("time", "s of one step", "s", [*measured[0].parts_s, *talks], len(measured)),
        _chart("memory", "GiB of one process", "GiB", [*measured[0].memory_bytes], len(measured)),
    ]
    data = {"runs": [_run(found, title)], "charts": charts}
    look = [doc.RunStyle(title)]
    return doc.Document("loadgen dissect", title, sections, bounds, "", look, [], data, version("llm-loadgen"))


def _run(found: TrainingResult, title: str) -> dict[str, Any]:
    """What the charts draw: of each technique the parts of a step that are not communication, and that; memory."""
    measured = _measured(found)
    names = {"technique": [_label(each) for each in measured], "label": [_broken(_label(each)) for each in measured]}
    time: dict[str, list[Any]] = {name: [] for name in (*measured[0].parts_s, COLLECTIVES)}
    for each in measured:
        parts = {part: mean_and_margin(seconds)[0] for part, seconds in each.parts_s.items()}
        talking = {part: min(took, each.communication_s.get(part, 0.0)) for part, took in parts.items()}
        for part, took in parts.items():
            time[part].append(took - talking[part])
        time[COLLECTIVES].append(sum(talking.values()))
    time["predicted"] = [sum(each.predicted_s.values()) for each in measured]
    memory = {kind: [each.memory_bytes[kind] / 2**30 for each in measured] for kind in measured[0].memory_bytes}
    memory["predicted"] = [sum(each.predicted_bytes.values()) / 2**30 for each in measured]
    data = {"time": names | time, "memory": names | memory}
    return {"name": title, "colour": "run-1", "dash": "solid", "window": None, "data": data}


def _chart(name: str, title: str, unit: str, parts: Sequence[str], bars: int) -> dict[str, Any]:
    """Of each technique one bar of its parts, and a line across it at what was predicted."""

    def told(of: str) -> str:
        return f"%{{customdata}}, {of}: %{{x:.3g}} {unit}<extra></extra>"

    where = {"y": "$label", "customdata": "$technique", "orientation": "h"}
    traces: list[dict[str, Any]] = [
        {"type": "bar", "name": part, "x": f"${part}", "width": 0.6, "hovertemplate": told(part)}
        | where
        | {"marker": {"color": f"@run-{index + 1}"}}
        for index, part in enumerate(parts)
    ]
    for colour, width in (("@paper", 7), ("@ink", 3)):  # a line with an edge, which stands out on any bar
        line = {"symbol": "line-ns", "size": 120 / max(bars, FEWEST) + 4, "line": {"width": width, "color": colour}}
        traces.append(
            {"type": "scatter", "mode": "markers", "name": "predicted", "x": "$predicted", "marker": line}
            | where
            | {"hovertemplate": told("predicted"), "showlegend": colour == "@ink"}
        )
    half = max(bars, FEWEST) / 2
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "automargin": True, "range": [(bars - 1) / 2 + half, (bars - 1) / 2 - half]},
        "showlegend": True,
    }
    table = {each: each for each in ("technique", *parts, "predicted")}
    return {"id": name, "script": "", "traces": traces, "layout": layout, "table": table, "scales": {}}


def _broken(name: str) -> str:
    """Two words of it on each line, for the narrow side of a chart."""
    words = name.split("+")
    return "+<br>".join("+".join(words[at : at + 2]) for at in range(0, len(words), 2))


def _measured(found: TrainingResult) -> list[TechniqueResult]:
    return [technique for technique in found.techniques if not technique.cannot]


def _label(each: TechniqueResult) -> str:
    return f"{each.technique} x {each.processes}" if each.processes > 1 else each.technique
