"""Terminal report and page of `loadgen limits`: the hardware's limits and the expected performance of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from textwrap import fill
from typing import TYPE_CHECKING, Any

from loadgen.servers.hardware import Change

if TYPE_CHECKING:
    from loadgen.analysis.report import Document
    from loadgen.servers.hardware.inference import Deployment
    from loadgen.servers.hardware.roofline import Limits

ROOFLINE = """Maximum FLOP/s of one GPU, by FLOPs per byte read. Left of the edge, memory is the limit. Right of the
edge, compute is the limit. Dots are the GEMMs of one layer and the output head."""
CURVE = """Throughput and time per output token (TPOT) at increasing numbers of requests in flight. The dotted line is
the limit of the hardware."""
STEP = """The dotted line is the shortest time that the hardware allows."""
MEANING = """`limit` assumes that compute, memory and network run at the rates of the data sheet, fully overlapped and
without overhead. `expected` uses measured efficiencies of kernels and links, and measured overheads of the
framework."""
LINE_WIDTH = 80
TRAINING_PARTS = {"tensor": "all-reduces in layers", "data": "gradients between replicas", "bubble": "pipeline bubble"}
"""Names of parts of a training iteration whose key would not explain them."""
NETWORK_BOUND = "`network`: the all-reduce after the GEMM takes longer than the GEMM, whose own limit is shown."
NO_SUCH_GPU = "A GPU like this does not exist, so nothing was compared with measurements."


def rows(result: Limits) -> list[tuple[str, str, str]]:
    """Return one table row per figure: its name, its limit and its expected value."""
    from loadgen.analysis.format import duration, significant

    def row(label: str, figure: str, format_value: Callable[[float], str]) -> tuple[str, str, str]:
        limit = getattr(result.limit, figure)
        expected = getattr(result.expected, figure)
        return label, format_value(limit), format_value(expected)

    return [
        row("TTFT", "ttft_s", duration),
        row("TPOT", "tpot_s", duration),
        row("prefill of one prompt", "prompt_prefill_s", duration),
        row("prefill of all in flight", "prefill_s", duration),
        row("decode step", "decode_step_s", duration),
        row("output tokens/s", "output_tokens_per_s", significant),
        row("output tokens/s per GPU", "output_tokens_per_s_per_gpu", significant),
        ("bound by", result.limit.bound, result.expected.bound),
    ]


def gemm_rows(result: Limits) -> list[tuple[str, ...]]:
    """Return one table row per GEMM. GEMM_HEADS contains the column names."""
    from loadgen.analysis.format import duration, significant

    return [
        (
            gemm.phase,
            gemm.gemm,
            f"{gemm.m}x{gemm.n}x{gemm.k}",
            significant(gemm.flops_per_byte),
            gemm.bound,
            duration(gemm.limit_s),
            duration(gemm.expected_s),
        )
        for gemm in result.gemms
    ]


GEMM_HEADS = ("phase", "GEMM", "m x n x k", "FLOP/byte", "bound by", "limit", "expected")


def headings(result: Limits) -> tuple[str, str]:
    """Return two heading lines: the model with its GPUs, and the load with the framework."""
    cached = f" ({100 * result.cache_hit_rate:.0f}% cached)" if result.cache_hit_rate else ""
    tokens = f"{result.input_tokens:,}{cached} + {result.output_tokens:,} tokens, {result.in_flight:,} in flight"
    title = f"{result.model} in {result.format} on {result.gpus} x {result.gpu}"
    if not result.replayed:
        return title, f"{tokens}, {result.framework}"
    spread = f" +- {100 * result.spread:.0f}%" if result.spread else ""
    rounds = f"{result.statistic} of {result.rounds} rounds" if result.rounds > 1 else f"{result.statistic} of 1 round"
    return title, f"{tokens}{spread}, {result.framework}, {rounds}"


def sentences(result: Limits) -> list[str]:
    """Return sentences about a predicted load.

    They state the parts of a decode step, the capacity of the KV cache, requests that must wait, and options without
    effect.
    """
    parts = sorted(result.shares.items(), key=lambda part: -part[1])
    spent = ", ".join(f"{name} {100 * share:.0f}%" for name, share in parts if share > 0.005)
    request_tokens = result.input_tokens + result.output_tokens
    kv_tokens = result.limit.kv_tokens
    lines = [
        f"A decode step is expected to spend its time on: {spent}.",
        f"The KV cache holds {kv_tokens:,} tokens: {kv_tokens // request_tokens:,} requests of {request_tokens:,} "
        "tokens.",
    ]
    if result.running < result.in_flight:
        lines.append(
            f"{result.running:,} of {result.in_flight:,} requests in flight run at a time; the others wait for free KV "
            "cache, or because of --max-running."
        )
    return [*lines, *result.notes]


def accuracy_sentence(result: Limits) -> str:
    """Return a sentence about the accuracy of the expected figures, based on published measurements.

    For a hypothetical GPU, a second sentence says that nothing was compared with measurements.
    """
    from loadgen.servers.hardware.validation import describe

    reason = f" {NO_SUCH_GPU}" if result.gpu_changes else ""
    return f"Accuracy of `expected` for {result.framework} on {result.gpu}: {describe(result.accuracy)}.{reason}"


def format_gpu_changes(changes: Sequence[Change]) -> str:
    """Return a text that lists the changes of a hypothetical GPU: each figure before and after its change, and the
    reason.
    """
    table = align_columns([(change.figure, change.before, change.after) for change in changes])
    lines = ["The GPU is hypothetical:"]
    for row, change in zip(table.split("\n"), changes, strict=True):
        lines += [fill(f"{row}  {change.reason}", LINE_WIDTH, subsequent_indent=" " * (len(row) + 2))]
    return "\n".join(lines)


def format_gemms(result: Limits) -> str:
    """Format the GEMMs as text: a table for each phase, with the name of the phase in its heading."""
    tables = []
    rows_of_gemms = gemm_rows(result)
    for phase in dict.fromkeys(row[0] for row in rows_of_gemms):
        heads = (f"{phase} GEMM", *GEMM_HEADS[2:])
        tables.append(align_columns([heads, *(row[1:] for row in rows_of_gemms if row[0] == phase)]))
    tables += [fill(note, LINE_WIDTH) for note in gemm_notes(result)]
    return "\n\n".join(tables)


def gemm_notes(result: Limits) -> list[str]:
    """Return a list with the sentence that explains the bound `network`, or an empty list if no GEMM has this bound."""
    return [NETWORK_BOUND] if any(gemm.bound == "network" for gemm in result.gemms) else []


def format_limits(result: Limits) -> str:
    """Format the result of `loadgen limits` as text for a terminal.

    Plain string formatting is used because importing a terminal library takes time.
    """
    title, load = headings(result)
    curve = result.curve
    columns = [curve["in_flight"], curve["ttft_s"], curve["tpot_s"], curve["output_tokens_per_s"]]
    by_load = [
        (f"{number:,}", f"{1000 * ttft:,.1f} ms", f"{1000 * tpot:.2f} ms", f"{rate:,.0f}")
        for number, ttft, tpot, rate in zip(*columns, strict=True)
    ]
    blocks = [
        f"{fill(title, LINE_WIDTH)}\n{fill(load, LINE_WIDTH)}",
        align_columns([("", "limit", "expected"), *rows(result)]),
        "\n".join(fill(text, LINE_WIDTH) for text in (*sentences(result), accuracy_sentence(result))),
        format_gemms(result),
        align_columns([("in flight", "TTFT", "TPOT", "tokens/s"), *by_load]),
    ]
    if result.gpu_changes:
        blocks.insert(1, format_gpu_changes(result.gpu_changes))
    return "\n\n".join(blocks)


def format_training(result: Mapping[str, Any]) -> str:
    """Format the predicted time and memory of a training iteration as text for a terminal."""
    memory = result["memory_bytes"]
    names = {key: key.removesuffix("_s").replace("_", " ") for key in result["seconds"]}
    times = [("time per iteration", "")]
    times += [
        (TRAINING_PARTS.get(names[key], names[key]), f"{value:.3f} s") for key, value in result["seconds"].items()
    ]
    sizes = [("memory per GPU", "")]
    sizes += [(name, f"{size / 2**30:.2f} GiB") for name, size in memory.items() if name != "fits"]
    lines = [
        fill(
            f"{result['model']} on {result['gpus']} x {result['gpu']}: {result['iteration_s']:.3f} s per iteration, "
            f"{result['tokens_per_s']:,.0f} tokens/s, MFU {100 * result['mfu']:.1f}%",
            LINE_WIDTH,
        ),
        align_columns(times),
        align_columns(sizes),
        fill(f"Accuracy of the iteration time on {result['gpu']}: {_accuracy_text(result['accuracy'])}.", LINE_WIDTH),
    ]
    if result["gpu_changes"]:
        lines.insert(1, format_gpu_changes([Change(**change) for change in result["gpu_changes"]]))
        lines.append(NO_SUCH_GPU)
    lines += [fill(note, LINE_WIDTH) for note in result["notes"]]
    if not memory["fits"]:
        from loadgen.servers.hardware.training import MEMORY_SHARE

        lines.append(
            fill(
                f"The training job does not fit into {MEMORY_SHARE:.0%} of the GPU memory: recompute activations, "
                "split the model (--tp, --pp, --zero, --sequence-parallel), or offload.",
                LINE_WIDTH,
                break_on_hyphens=False,
            )
        )
    return "\n\n".join(lines)


def _accuracy_text(values: Mapping[str, Any]) -> str:
    from loadgen.servers.hardware.validation import Accuracy

    return str(Accuracy(**values))


def align_columns(table: Sequence[Sequence[str]]) -> str:
    """Format a table as text. The first column is aligned to the left, and the other columns to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        first = row[0].ljust(widths[0])
        others = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def build_document(result: Limits, deployment: Deployment) -> Document:
    """Return the report page with the figures, the GEMMs, the roofline and the latency-throughput curve."""
    from loadgen.analysis import report as doc
    from loadgen.analysis.report.status import COMPUTED
    from loadgen.analysis.report.tables import number_columns, table

    title, load = headings(result)
    heads: dict[str, doc.ColumnKind] = {"figure": "head", **number_columns("limit", "expected")}
    figures = table("Limit and expected", heads, rows(result), several=True)
    kinds: dict[str, doc.ColumnKind] = {"phase": "text", "GEMM": "head", "m x n x k": "text", "FLOP/byte": "number"}
    gemms = table(
        "GEMMs on one GPU",
        kinds | {"bound by": "text", **number_columns("limit", "expected")},
        gemm_rows(result),
        several=True,
    )
    cards = doc.Cards([_ttft_card(result), _tpot_card(result), _throughput_card(result)])
    spent, *notes = [*sentences(result), accuracy_sentence(result)]
    charts = [
        doc.ChartRef("step", "Expected time of a decode step", [spent, STEP], zoom="none"),
        doc.ChartRef("curve", "TPOT by throughput", [CURVE]),
    ]
    roofline = doc.ChartRef("roofline", "What each GEMM reaches", [ROOFLINE], "wide")
    explained: list[doc.Block] = [figures, *map(doc.Paragraph, notes), doc.Paragraph(MEANING)]
    sections = [
        doc.Section("answer", "Expected performance", [cards, *charts]),
        doc.Section("expected", "Figures", explained),
        doc.Section("roofline", "Roofline", [roofline, gemms, *map(doc.Paragraph, gemm_notes(result))]),
    ]
    if result.gpu_changes:
        sections.append(doc.Section("hypothetical", "Hypothetical GPU", [_changes_table(result.gpu_changes)]))
    look = doc.RunStyle(title)
    data = {
        "runs": [_run(result, deployment, title)],
        "charts": [
            _step_chart(result),
            _curve(),
            roofline_chart("data sheet", {"prefill": "prefill", "decode": "decode"}),
        ],
    }
    chips = [COMPUTED]
    return doc.Document(
        "loadgen limits", title, sections, load, "", [look], [], data, version("llm-loadgen"), chips=chips
    )


def _changes_table(changes: Sequence[Change]) -> Any:
    """Return a table of the figures in which a hypothetical GPU differs from the original GPU.

    Each row contains the original value, the hypothetical value, and the reason for the change.
    """
    from loadgen.analysis.report import ColumnKind, TableCell
    from loadgen.analysis.report.tables import number_columns, table

    heads: dict[str, ColumnKind] = {"figure": "head", **number_columns("original", "hypothetical")}
    rows = [
        [TableCell(change.figure, note=change.reason), TableCell(change.before), TableCell(change.after)]
        for change in changes
    ]
    return table("Figures that differ from the original GPU", heads, rows, several=True)


def _ttft_card(result: Limits) -> Any:
    from loadgen.analysis.format import duration
    from loadgen.analysis.report import Card

    value, unit = duration(result.expected.ttft_s).split(" ")
    return Card("TTFT expected", value, unit, f"limit {duration(result.limit.ttft_s)}")


def _tpot_card(result: Limits) -> Any:
    from loadgen.analysis.format import duration
    from loadgen.analysis.report import Card

    value, unit = duration(result.expected.tpot_s).split(" ")
    note = f"limit {duration(result.limit.tpot_s)}, bound by {result.limit.bound}"
    return Card("TPOT expected", value, unit, note)


def _throughput_card(result: Limits) -> Any:
    from loadgen.analysis.format import significant
    from loadgen.analysis.report import Card

    rate = result.expected.output_tokens_per_s
    limit = result.limit.output_tokens_per_s
    return Card("Throughput expected", significant(rate), "tokens/s", f"{100 * rate / limit:.0f}% of the limit")


def _run(result: Limits, deployment: Deployment, title: str) -> dict[str, Any]:
    """Return the data of the three charts: the decode step, the roofline, and latency against throughput."""
    bandwidth = deployment.gpu.memory_bytes_per_s
    points = {phase: _roofline_points_of(result, phase) for phase in ("prefill", "decode")}
    curve = {name: list(values) for name, values in result.curve.items()}
    for name in ("tpot", "limit_tpot"):
        curve[f"{name}_ms"] = [1000 * seconds for seconds in curve[f"{name}_s"]]
    roofline = {"roof": roofline_points(result.flops_per_byte * bandwidth, bandwidth), **points}
    parts = _step_parts(result)
    step = {"name": list(parts), "ms": list(parts.values()), "share": [result.shares[name] for name in parts]}
    step |= {name: {"x": [milliseconds]} for name, milliseconds in parts.items()}
    step["limit"] = {"x": [1000 * result.limit.decode_step_s] * 2, "y": [-0.5, 0.5]}
    data = {"step": step, "roofline": roofline, "curve": curve}
    return {"name": title, "colour": "run-1", "dash": "solid", "window": None, "data": data}


def _step_parts(result: Limits) -> dict[str, float]:
    """Return the parts of an expected decode step in ms, by name, with the longest part first."""
    parts = sorted(result.shares.items(), key=lambda part: -part[1])
    return {name: 1000 * result.expected.decode_step_s * share for name, share in parts if share > 0.005}


def _step_chart(result: Limits) -> dict[str, Any]:
    """Return the chart of a decode step: one stacked bar of its parts, and a line at the limit of the hardware."""
    traces: list[dict[str, Any]] = []
    for index, (name, milliseconds) in enumerate(_step_parts(result).items()):
        text = f"{name}<br>{100 * result.shares[name]:.0f}%"
        bar: dict[str, Any] = {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": f"${name}.x",
            "y": [""],
            "text": [text],
        }
        bar |= {"marker": {"color": f"@run-{1 + index % 6}"}, "textposition": "inside", "insidetextanchor": "middle"}
        bar |= {"textangle": 0, "textfont": {"color": "@paper", "size": 14}}
        traces.append(bar | {"hovertemplate": f"{name}: {milliseconds:.3g} ms<extra></extra>"})
    limit: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "name": "hardware limit",
        "x": "$limit.x",
        "y": "$limit.y",
    }
    limit |= {"line": {"color": "@ink", "width": 2, "dash": "dot"}, "yaxis": "y2", "hoverinfo": "skip"}
    layout = {
        "barmode": "stack",
        "bargap": 0.3,
        "showlegend": True,
        "xaxis": {"title": {"text": "time of a decode step, ms"}, "rangemode": "tozero"},
        "yaxis": {"visible": False, "fixedrange": True},
        "yaxis2": {"visible": False, "overlaying": "y", "range": [-0.5, 0.5], "fixedrange": True},
    }
    table = {"part": "name", "ms": "ms", "share": "share"}
    return {"id": "step", "script": "", "traces": [*traces, limit], "layout": layout, "table": table, "scales": {}}


def _roofline_points_of(result: Limits, phase: str) -> dict[str, list[Any]]:
    """Return the roofline points of the GEMMs of one phase: FLOPs per byte, expected TFLOP/s and names."""
    gemms = [gemm for gemm in result.gemms if gemm.phase == phase]
    return {
        "x": [gemm.flops_per_byte for gemm in gemms],
        "y": [2e-12 * gemm.m * gemm.n * gemm.k / gemm.expected_s for gemm in gemms],
        "name": [gemm.gemm for gemm in gemms],
    }


def roofline_points(
    flops_per_s: float, bytes_per_s: float, unit: float = 1e12, left_end: float = 0.25
) -> dict[str, list[float]]:
    """Return three points of a roofline: FLOP per byte (`x`), and FLOP/s in multiples of `unit` (`y`).

    `flops_per_s` and `bytes_per_s` are the peak rates of compute and memory. Left of the second point, memory is the
    limit and the line rises. Right of the second point, compute is the limit and the line is flat. `left_end` is the
    first point's FLOP per byte.
    """
    edge = flops_per_s / bytes_per_s
    intensities = [left_end, edge, max(4096.0, 4 * edge)]
    return {"x": intensities, "y": [min(flops_per_s, intensity * bytes_per_s) / unit for intensity in intensities]}


def roofline_chart(line: str, groups: Mapping[str, str], unit: str = "TFLOP/s") -> dict[str, Any]:
    """Return a chart with a roofline and groups of dots.

    `line` is the legend text of the roofline, such as `data sheet`. `groups` maps the key of each group in the data to
    the legend text of the group.
    """

    def dots(group: str, colour: str) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "markers",
            "name": groups[group],
            "hovertemplate": f"%{{text}}: %{{x:.3g}} FLOP/byte, %{{y:.3g}} {unit}<extra></extra>",
            "x": f"${group}.x",
            "y": f"${group}.y",
            "text": f"${group}.name",
            "marker": {"color": colour, "size": 10},
        }

    roof_line = {"type": "scatter", "mode": "lines", "name": line, "x": "$roof.x", "y": "$roof.y"}
    layout = {
        "xaxis": {"title": {"text": "FLOP per byte"}, "type": "log"},
        "yaxis": {"title": {"text": unit}, "type": "log"},
        "showlegend": True,
    }
    traces = [roof_line | {"line": {"color": "@run", "width": 2}}]
    traces += [dots(group, f"@run-{2 + index % 5}") for index, group in enumerate(groups)]
    first, title = next(iter(groups.items()))
    table = {"operator": f"{first}.name", f"FLOP/byte, {title}": f"{first}.x", f"{unit}, {title}": f"{first}.y"}
    return {"id": "roofline", "script": "", "traces": traces, "layout": layout, "table": table, "scales": {}}


def _curve() -> dict[str, Any]:
    """Return the chart of TPOT against throughput: one line for the expected values and one for the limit."""

    def line(name: str, x: str, y: str, style: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": x,
            "y": y,
            "text": "$in_flight",
            "hovertemplate": f"%{{text}} in flight, {name}: %{{x:,.0f}} tokens/s, TPOT %{{y:.3g}} ms<extra></extra>",
            "line": style,
        }

    traces = [
        line("expected", "$output_tokens_per_s", "$tpot_ms", {"color": "@run", "width": 2}),
        line("limit", "$limit_output_tokens_per_s", "$limit_tpot_ms", {"color": "@quiet", "width": 1, "dash": "dot"}),
    ]
    layout = {
        "xaxis": {"title": {"text": "output tokens/s"}, "type": "log"},
        "yaxis": {"title": {"text": "TPOT, ms"}, "rangemode": "tozero"},
        "showlegend": True,
    }
    table = {"in flight": "in_flight", "tokens/s": "output_tokens_per_s", "TPOT, ms": "tpot_ms", "TTFT, s": "ttft_s"}
    return {"id": "curve", "script": "", "traces": traces, "layout": layout, "table": table, "scales": {}}
