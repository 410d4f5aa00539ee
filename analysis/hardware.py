"""What `loadgen limits` says of hardware: in plain lines, and as a page with two charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadgen.analysis.report import Document
    from loadgen.servers.hardware.inference import Deployment
    from loadgen.servers.hardware.roofline import Limits, LoadFigures

ROOFLINE = """FLOP/s that one GPU allows by how many FLOPs are made of each byte that is read. Left of the edge memory
is the limit, right of it computing; dots are the GEMMs of one layer and the output head."""
CURVE = """By the number of requests in flight: to the right more tokens per second, upwards longer waiting for each
next token. Dotted: what physics allows."""
MEANING = """`limit`: every FLOP, byte and message at the rate of the data sheet, all at once, and nothing else.
`expected`: kernels, links and the framework's overheads as they were measured elsewhere."""


def rows(found: Limits) -> list[tuple[str, str, str]]:
    """Name, limit, expected."""
    from loadgen.analysis.format import duration, significant

    def both(figure: str, shown: Any) -> tuple[str, str]:
        return shown(getattr(found.limit, figure)), shown(getattr(found.expected, figure))

    return [
        ("TTFT", *both("ttft_s", duration)),
        ("TPOT", *both("tpot_s", duration)),
        ("prefill of one prompt", *both("prompt_prefill_s", duration)),
        ("prefill of all in flight", *both("prefill_s", duration)),
        ("decode step", *both("decode_step_s", duration)),
        ("output tokens/s", *both("output_tokens_per_s", significant)),
        ("output tokens/s per GPU", *both("output_tokens_per_s_per_gpu", significant)),
        ("bound by", found.limit.bound, found.expected.bound),
    ]


def gemm_rows(found: Limits) -> list[tuple[str, ...]]:
    """Of each GEMM: phase, name, shape, FLOPs per byte, what binds, limit and expected."""
    from loadgen.analysis.format import duration, significant

    return [
        (
            *(gemm.phase, gemm.gemm, f"{gemm.m} x {gemm.n} x {gemm.k}", significant(gemm.flops_per_byte), gemm.bound),
            *(duration(gemm.limit_s), duration(gemm.expected_s)),
        )
        for gemm in found.gemms
    ]


GEMM_HEADS = ("phase", "GEMM", "m x n x k", "FLOP/byte", "bound by", "limit", "expected")


def headings(found: Limits) -> tuple[str, str]:
    """What was asked, in two lines."""
    tokens = f"{found.input_tokens:,} + {found.output_tokens:,} tokens, {found.in_flight:,} in flight"
    return f"{found.model} in {found.format} on {found.gpus} x {found.gpu}", f"{tokens}, {found.framework}"


def sentences(found: Limits) -> list[str]:
    """What binds first, and how much room the KV cache has."""
    parts = sorted(found.shares.items(), key=lambda part: -part[1])
    spent = ", ".join(f"{name} {100 * part:.0f} %" for name, part in parts if part > 0.005)
    each = found.input_tokens + found.output_tokens
    lines = [
        f"A decode step is expected to spend its time on: {spent}.",
        f"The KV cache holds {found.limit.kv_tokens:,} tokens: {found.limit.kv_tokens // each:,} requests of {each:,}.",
    ]
    if found.running < found.in_flight:
        lines.append(f"Of {found.in_flight:,} in flight {found.running:,} find room at a time; the others wait.")
    return lines


def format_limits(found: Limits) -> str:
    """All of it for a terminal, without what a library for terminals costs to start."""
    title, load = headings(found)
    curve = found.curve
    columns = [curve["in_flight"], curve["ttft_s"], curve["tpot_s"], curve["output_tokens_per_s"]]
    by_load = [
        (f"{number:,}", f"{1000 * ttft:,.1f} ms", f"{1000 * tpot:.2f} ms", f"{rate:,.0f}")
        for number, ttft, tpot, rate in zip(*columns, strict=True)
    ]
    blocks = [
        f"{title}\n{load}",
        align_columns([("", "limit", "expected"), *rows(found)]),
        "\n".join(sentences(found)),
        align_columns([GEMM_HEADS, *gemm_rows(found)]),
        align_columns([("in flight", "TTFT", "TPOT", "tokens/s"), *by_load]),
    ]
    return "\n\n".join(blocks)


def format_training(found: Mapping[str, Any]) -> str:
    """An iteration of training for a terminal."""
    held = found["memory_bytes"]
    spent = [(name.removesuffix("_s").replace("_", " "), f"{part:.3f} s") for name, part in found["seconds"].items()]
    sizes = [(name, f"{part / 2**30:.2f} GiB") for name, part in held.items() if name != "fits"]
    lines = [
        f"{found['model']} on {found['gpus']} x {found['gpu']}: {found['iteration_s']:.3f} s per iteration, "
        f"{found['tokens_per_s']:,.0f} tokens/s, MFU {100 * found['mfu']:.1f} %",
        align_columns(spent),
        align_columns(sizes),
    ]
    if not held["fits"]:
        lines.append("It does not fit: recompute, split (--tp, --pp, --zero, --sequence-parallel), or offload.")
    return "\n\n".join(lines)


def align_columns(table: Sequence[Sequence[str]]) -> str:
    """Columns of one width each: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        first, *others = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip())
    return "\n".join(lines)


def build_document(found: Limits, deployment: Deployment) -> Document:
    """The page."""
    from loadgen.analysis import report as doc
    from loadgen.analysis.report.tables import number_columns, table

    title, load = headings(found)
    heads: dict[str, doc.ColumnKind] = {"": "head", **number_columns("limit", "expected")}
    figures = table("Limit and expected", heads, rows(found), several=True)
    kinds: dict[str, doc.ColumnKind] = {"phase": "text", "GEMM": "head", "m x n x k": "text", "FLOP/byte": "number"}
    gemms = table(
        "GEMMs on one GPU",
        kinds | {"bound by": "text", **number_columns("limit", "expected")},
        gemm_rows(found),
        several=True,
    )
    cards = doc.Cards([_card("TPOT", found.expected, found.limit), _rate(found)])
    sections = [
        doc.Section("answer", title, [cards, *map(doc.Paragraph, sentences(found)), figures, doc.Paragraph(MEANING)]),
        doc.Section(
            "roofline", "Roofline", [doc.ChartRef("roofline", "What each GEMM reaches", [ROOFLINE], "wide"), gemms]
        ),
        doc.Section(
            "curve", "Latency against throughput", [doc.ChartRef("curve", "TPOT by throughput", [CURVE], "wide")]
        ),
    ]
    look = doc.RunStyle(title)
    data = {
        "runs": [_run(found, deployment, title)],
        "charts": [roofline_chart("data sheet", {"prefill": "prefill", "decode": "decode"}), _curve()],
    }
    return doc.Document("loadgen limits", title, sections, load, "", [look], [], data, version("llm-loadgen"))


def _card(label: str, expected: LoadFigures, limit: LoadFigures) -> Any:
    from loadgen.analysis.format import duration
    from loadgen.analysis.report import Card

    value, unit = duration(expected.tpot_s).split(" ")
    return Card(f"{label} expected", value, unit, f"limit {duration(limit.tpot_s)}, bound by {limit.bound}")


def _rate(found: Limits) -> Any:
    from loadgen.analysis.format import significant
    from loadgen.analysis.report import Card

    rate, maximum = found.expected.output_tokens_per_s, found.limit.output_tokens_per_s
    return Card(
        "Throughput expected", significant(rate), "tokens/s", f"{100 * rate / maximum:.0f} % of what physics allows"
    )


def _run(found: Limits, deployment: Deployment, title: str) -> dict[str, Any]:
    """What the two charts draw."""
    bandwidth = deployment.gpu.memory_bytes_per_s
    points = {
        phase: {
            "x": [gemm.flops_per_byte for gemm in found.gemms if gemm.phase == phase],
            "y": [2e-12 * gemm.m * gemm.n * gemm.k / gemm.expected_s for gemm in found.gemms if gemm.phase == phase],
            "name": [gemm.gemm for gemm in found.gemms if gemm.phase == phase],
        }
        for phase in ("prefill", "decode")
    }
    curve = {name: list(values) for name, values in found.curve.items()}
    for name in ("tpot", "limit_tpot"):
        curve[f"{name}_ms"] = [1000 * seconds for seconds in curve[f"{name}_s"]]
    roofline = {"roof": roofline_points(found.flops_per_byte * bandwidth, bandwidth), **points}
    data = {"roofline": roofline, "curve": curve}
    return {"name": title, "colour": "run-1", "dash": "solid", "window": None, "data": data}


def roofline_points(
    flops_per_s: float, bytes_per_s: float, unit: float = 1e12, least: float = 0.25
) -> dict[str, list[float]]:
    """The two lines of a roofline: bound by memory up to the edge, by computing behind it."""
    edge = flops_per_s / bytes_per_s
    places = [least, edge, max(4096.0, 4 * edge)]
    return {"x": places, "y": [min(flops_per_s, index * bytes_per_s) / unit for index in places]}


def roofline_chart(line: str, groups: Mapping[str, str], unit: str = "TFLOP/s") -> dict[str, Any]:
    """The chart of the roof, which `line` gave, and dots for each group: its key in the data, and what it is called."""

    def dots(group: str, colour: str) -> dict[str, Any]:
        where = {
            "x": f"${group}.x",
            "y": f"${group}.y",
            "text": f"${group}.name",
            "marker": {"color": colour, "size": 10},
        }
        hover = f"%{{text}}: %{{x:.3g}} FLOP/byte, %{{y:.3g}} {unit}<extra></extra>"
        return {"type": "scatter", "mode": "markers", "name": groups[group], "hovertemplate": hover, **where}

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
    def line(name: str, x: str, y: str, look: dict[str, Any]) -> dict[str, Any]:
        hover = f"%{{text}} in flight, {name}: %{{x:,.0f}} tokens/s, TPOT %{{y:.3g}} ms<extra></extra>"
        where = {"x": x, "y": y, "text": "$in_flight", "hovertemplate": hover, "line": look}
        return {"type": "scatter", "mode": "lines+markers", "name": name, **where}

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
