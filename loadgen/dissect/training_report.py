"""Text and HTML page of `loadgen dissect training`: time and memory of a step, measured and predicted."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from loadgen.analysis.format import byte_size, duration, percent, pluralise, significant, typeset_minus
from loadgen.analysis.hardware import align_columns
from loadgen.dissect.inference_report import link_sentences, mean_and_margin, wrap_lines

if TYPE_CHECKING:
    from loadgen.analysis.report import Card, Document, TableRow
    from loadgen.dissect.results import TechniqueResult, TrainingResult

TIME_HEADS = ("technique", "step", "±", "forward", "backward", "optimiser", "collectives", "tokens/s", "predicted")
MEMORY_HEADS = ("technique", "weights", "gradients", "optimiser", "activations", "peak", "predicted", "off")
PARTS_HEADS = ("technique", "part", "measured", "predicted")
TIME_CHART = """Seconds of one step, from left to right: computation, then the time during which a collective ran.
The vertical line is the predicted total."""
MEMORY_CHART = """Memory of one process at its peak, by kind. The vertical line is the predicted total."""
COLLECTIVES = "collectives"
MIN_BARS = 4
"""A chart has space for at least this number of bars, so that a single bar does not fill its height."""
MEANING = """Collectives run during the forward and backward pass and count as part of them. Memory is that of one
process at its peak, as the allocator reports it. Activations include everything temporary, such as gathered weights and
buffers. Predictions (loadgen.servers.hardware) add up memory by tensor and time by operator, from the limits that each
process reached just before the measurement. Bus bandwidth counts each byte once on the busiest link, as in
nccl-tests."""


def headings(result: TrainingResult) -> tuple[str, str]:
    """Return two lines: the measured model, and the limits of the device."""
    limits = result.bounds
    return (
        f"{result.model}, {result.layers} of {pluralise(result.model_layers, 'layer')} "
        f"({significant(result.parameters / 1e6)} M parameters), {result.dtype}, {result.batch} x {result.sequence} "
        "tokens",
        f"{limits.device}: {significant(limits.flops_per_s / 1e9)} GFLOP/s, "
        f"{significant(limits.bytes_per_s / 1e9)} GB/s ({limits.source})",
    )


def step_times_s(technique: TechniqueResult) -> list[float]:
    """Return the duration of the whole training step in seconds, as one value per repeat."""
    return [sum(parts) for parts in zip(*technique.parts_s.values(), strict=True)]


def peak_error(technique: TechniqueResult) -> float:
    """Return the relative error of the predicted peak memory: `predicted / measured - 1`."""
    return sum(technique.predicted_bytes.values()) / sum(technique.memory_bytes.values()) - 1


def time_rows(result: TrainingResult) -> list[tuple[str, ...]]:
    """Return one table row per measured technique, with its times."""
    rows: list[tuple[str, ...]] = []
    for technique in _measured(result):
        mean, margin = mean_and_margin(step_times_s(technique))
        parts = [duration(mean_and_margin(seconds)[0]) for seconds in technique.parts_s.values()]
        collectives_s = sum(technique.communication_s.values())
        rows.append(
            (
                _label(technique),
                duration(mean),
                duration(margin, 2),
                *parts,
                duration(collectives_s) if technique.processes > 1 else "",
                significant(result.batch * result.sequence / mean),
                duration(sum(technique.predicted_s.values())),
            )
        )
    return rows


def memory_rows(result: TrainingResult) -> list[tuple[str, ...]]:
    """Return one table row per measured technique, with its memory at the peak and the error of the prediction."""
    return [
        (
            _label(technique),
            *(byte_size(size) for size in technique.memory_bytes.values()),
            byte_size(sum(technique.memory_bytes.values())),
            byte_size(sum(technique.predicted_bytes.values())),
            f"{100 * peak_error(technique):+.1f}%",
        )
        for technique in _measured(result)
    ]


def parts_rows(result: TrainingResult) -> list[tuple[str, ...]]:
    """Return table rows with measured and predicted values of each training technique.

    A technique has one row per phase and one row per kind of memory. If it runs on several processes, it also has one
    row for its collectives.
    """
    rows: list[tuple[str, ...]] = []
    for technique in _measured(result):
        name = technique.technique
        for part, seconds in technique.parts_s.items():
            rows.append((name, part, duration(mean_and_margin(seconds)[0]), duration(technique.predicted_s[part])))
        if technique.processes > 1:
            measured_s = sum(technique.communication_s.values())
            predicted_s = sum(technique.predicted_communication_s.values())
            rows.append((name, COLLECTIVES, duration(measured_s), duration(predicted_s)))
        for kind, size in technique.memory_bytes.items():
            rows.append((name, f"{kind}, bytes", byte_size(size), byte_size(technique.predicted_bytes[kind])))
    return rows


def sentences(result: TrainingResult) -> list[str]:
    """Return the sentences of the report about training techniques.

    The sentences state which techniques were not measured and why, how far the predicted peak memory is off, and how
    fast the links between processes are.
    """
    lines = [
        f"Not measured: {technique.technique}: {technique.cannot}."
        for technique in result.techniques
        if technique.cannot
    ]
    measured = _measured(result)
    worst = max(measured, key=lambda technique: abs(peak_error(technique)))
    error = percent(abs(peak_error(worst)))
    lines.append(f"The predicted peak memory is off by at most {error} ({worst.technique}).")
    for technique in measured:
        if technique.bounds and technique.bounds.links:
            return [*lines, *link_sentences(technique.bounds, technique.processes)]
    return lines


def format_text(result: TrainingResult) -> str:
    """Return the report for a terminal of 80 columns, with short column headings."""
    short_heads = {
        "optimiser": "optim.",
        "collectives": "coll.",
        "activations": "activ.",
        "gradients": "grads",
        "predicted": "model",
    }
    time_heads, *times = [(*row[:2], *row[3:]) for row in (TIME_HEADS, *time_rows(result))]  # without the margin
    blocks = [
        wrap_lines(headings(result)),
        align_columns([[short_heads.get(head, head) for head in time_heads], *times]),
        align_columns([[short_heads.get(head, head) for head in MEMORY_HEADS], *memory_rows(result)]),
        wrap_lines([*sentences(result), " ".join(MEANING.split())]),
    ]
    return "\n\n".join(blocks)


def build_document(result: TrainingResult) -> Document:
    """Return the HTML page, with tables and charts of measured and predicted values."""
    from msgspec.structs import replace

    from loadgen.analysis import report as doc
    from loadgen.analysis.report.tables import number_columns, table

    title, limits = headings(result)
    measured = _measured(result)
    head: dict[str, doc.ColumnKind] = {"technique": "head"}
    times = table(
        "Time of one step", head | number_columns(*TIME_HEADS[1:]), time_rows(result), several=True, id="time"
    )
    memory = table(
        "Memory at the peak", head | number_columns(*MEMORY_HEADS[1:]), memory_rows(result), several=True, id="memory"
    )
    parts = table(
        "Each part and kind",
        head | {"part": "text", **number_columns(*PARTS_HEADS[2:])},
        parts_rows(result),
        several=True,
    )
    memory = replace(memory, rows=[_with_true_minus(row) for row in memory.rows])
    size: Any = "tall" if len(measured) > MIN_BARS else "wide"
    time_chart = doc.ChartRef("time", "Where a step goes", [TIME_CHART], size)
    memory_chart = doc.ChartRef("memory", "What memory holds at its peak", [MEMORY_CHART], size)
    sections = [
        doc.Section(
            "answer",
            "A training step",
            [doc.Cards(_cards(result)), time_chart, *map(doc.Paragraph, sentences(result)), times],
        ),
        doc.Section("peak", "Memory", [memory_chart, memory, doc.Paragraph(MEANING)]),
        doc.Section("model", "Predicted and measured", [parts]),
    ]
    collectives = [COLLECTIVES] if any(technique.communication_s for technique in measured) else []
    charts = [
        _chart("time", "s of one step", "s", [*measured[0].parts_s, *collectives], len(measured)),
        _chart("memory", "GiB of one process", "GiB", [*measured[0].memory_bytes], len(measured)),
    ]
    data = {"runs": [_run(result, title)], "charts": charts}
    return doc.Document(
        "loadgen dissect",
        title,
        sections,
        limits,
        "",
        [doc.RunStyle(title)],
        [],
        data,
        version("llm-loadgen"),
    )


def _cards(result: TrainingResult) -> list[Card]:
    """Return the cards of the page.

    They show the fastest technique, the technique with the least memory, and the largest errors of the predictions.
    """
    from loadgen.analysis.report import Card

    measured = _measured(result)
    step_s = {_label(technique): mean_and_margin(step_times_s(technique))[0] for technique in measured}
    peaks = {_label(technique): sum(technique.memory_bytes.values()) for technique in measured}
    time_errors = {
        _label(technique): sum(technique.predicted_s.values()) / step_s[_label(technique)] - 1 for technique in measured
    }
    memory_errors = {_label(technique): peak_error(technique) for technique in measured}
    fastest, smallest = min(step_s, key=lambda name: step_s[name]), min(peaks, key=lambda name: peaks[name])
    step, _, step_unit = duration(step_s[fastest]).partition(" ")
    peak, _, peak_unit = byte_size(peaks[smallest]).partition(" ")
    tokens = significant(result.batch * result.sequence / step_s[fastest])
    several = len(measured) > 1
    cards = [
        Card("Shortest step" if several else "Step", step, step_unit, fastest),
        Card("Throughput", tokens, "tokens/s", fastest),
        Card("Lowest peak memory" if several else "Peak memory", peak, peak_unit, f"{smallest}, of one process"),
    ]
    for title, errors in (("Time", time_errors), ("Memory", memory_errors)):
        worst = max(errors, key=lambda name: abs(errors[name]))
        value = typeset_minus(f"{100 * errors[worst]:+.1f}%")
        largest = f"{worst}, the largest difference" if several else worst
        cards.append(Card(f"{title}, predicted", value, "compared with measured", largest))
    return cards


def _with_true_minus(row: TableRow) -> TableRow:
    """Return a copy of a table row for the page, in which negative numbers have a minus sign instead of a hyphen."""
    from msgspec.structs import replace

    return replace(row, cells=[replace(cell, text=typeset_minus(cell.text)) for cell in row.cells])


def _run(result: TrainingResult, title: str) -> dict[str, Any]:
    """Return the data of two charts of a training result: the time and the memory of each technique.

    In the time chart, the communication of all phases is one separate part. The times of the phases do not include it.
    """
    measured = _measured(result)
    names = {
        "technique": [_label(technique) for technique in measured],
        "label": [_two_words_per_line(_label(technique)) for technique in measured],
    }
    time: dict[str, list[Any]] = {name: [] for name in (*measured[0].parts_s, COLLECTIVES)}
    for technique in measured:
        collectives_s = 0.0
        for part, seconds in technique.parts_s.items():
            part_s = mean_and_margin(seconds)[0]
            communication_s = min(part_s, technique.communication_s.get(part, 0.0))
            collectives_s += communication_s
            time[part].append(part_s - communication_s)
        time[COLLECTIVES].append(collectives_s)
    time["predicted"] = [sum(technique.predicted_s.values()) for technique in measured]
    kinds = measured[0].memory_bytes
    memory = {kind: [technique.memory_bytes[kind] / 2**30 for technique in measured] for kind in kinds}
    memory["predicted"] = [sum(technique.predicted_bytes.values()) / 2**30 for technique in measured]
    data = {"time": names | time, "memory": names | memory}
    return {"name": title, "colour": "run-1", "dash": "solid", "window": None, "data": data}


def _chart(name: str, title: str, unit: str, parts: Sequence[str], bars: int) -> dict[str, Any]:
    """Return a chart with a stacked bar per technique. A line across each bar shows the predicted total.

    `parts` names the parts of a bar, and `bars` is the number of bars.
    """

    def hover_text(part: str) -> str:
        return f"%{{customdata}}, {part}: %{{x:.3g}} {unit}<extra></extra>"

    bar = {"y": "$label", "customdata": "$technique", "orientation": "h"}
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": part,
            "x": f"${part}",
            "width": 0.6,
            "hovertemplate": hover_text(part),
            "marker": {"color": f"@run-{index + 1}"},
            **bar,
        }
        for index, part in enumerate(parts)
    ]
    for colour, width in (("@paper", 7), ("@ink", 3)):  # a line with an edge, which stands out on any bar
        line = {
            "symbol": "line-ns",
            "size": 120 / max(bars, MIN_BARS) + 4,
            "line": {"width": width, "color": colour},
        }
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "predicted",
                "x": "$predicted",
                "marker": line,
                "hovertemplate": hover_text("predicted"),
                "showlegend": colour == "@ink",
                **bar,
            }
        )
    half = max(bars, MIN_BARS) / 2
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "automargin": True, "range": [(bars - 1) / 2 + half, (bars - 1) / 2 - half]},
        "showlegend": True,
    }
    table = {column: column for column in ("technique", *parts, "predicted")}
    return {"id": name, "script": "", "traces": traces, "layout": layout, "table": table, "scales": {}}


def _two_words_per_line(name: str) -> str:
    """Return `name` with a line break after every second technique, so that it fits into the narrow margin of a chart.

    `name` is a combination of techniques, joined with `+`. For example, `a+b+c` becomes `a+b+<br>c`.
    """
    words = name.split("+")
    return "+<br>".join("+".join(words[index : index + 2]) for index in range(0, len(words), 2))


def _measured(result: TrainingResult) -> list[TechniqueResult]:
    return [technique for technique in result.techniques if not technique.cannot]


def _label(technique: TechniqueResult) -> str:
    return f"{technique.technique} x {technique.processes}" if technique.processes > 1 else technique.technique
