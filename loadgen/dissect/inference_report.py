"""What `loadgen dissect inference` says of modules and operators: in plain lines, and as a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from textwrap import fill
from typing import TYPE_CHECKING, Any

from loadgen.analysis.format import duration, percent, pluralise, significant
from loadgen.analysis.hardware import align_columns, roofline_chart, roofline_points
from loadgen.analysis.stats import mean_and_deviation, student_quantile
from loadgen.servers.hardware.inference import exposed_all_reduce_s

if TYPE_CHECKING:
    from loadgen.analysis.report import Document
    from loadgen.dissect.results import DeviceLimits, InferenceResult, Operator, StepCase

Rows = list[tuple[str, ...]]
ORDER = (
    *("Embedding", "RMSNorm", "QKV", "RoPE", "attention", "output", "all-reduce", "all-reduce wait", "residual"),
    *("gate", "up", "SiLU", "down", "LM head", "all-gather", "loss"),
)
"""Modules as data flows through them."""
MODULE_HEADS = ("module", "time", "±", "share", "GFLOP/s", "GB/s", "of bound", "bound by")
OPERATOR_HEADS = ("module", "operator", "shape", "calls", "time", "share", "bound", "by")
SHOWN = 20
"""Operators in the terminal; the page and --json have all."""
AGREE = 0.05
FLAME = """One step from left to right, in the order in which data flows: its modules, those of all layers together, and
below them their operators. A click on the legend hides a module."""
ROOFLINE = """FLOP/s that the device allows by how many FLOPs are made of each byte that is read or written. Each dot
is an operator that computes, one FLOP per number where it is no GEMM; one above the line found its data in a cache."""


def headings(found: InferenceResult) -> tuple[str, str]:
    """What was measured, and the bounds."""
    shared = f" on {found.tensor_parallel} devices" if found.tensor_parallel > 1 else ""
    allowed = found.bounds
    return (
        f"{found.model}, {found.layers} of {pluralise(found.model_layers, 'layer')}, {found.dtype}, {found.phase} at "
        f"{found.input_tokens:,} tokens{shared}",
        f"{allowed.device}: {significant(allowed.flops_per_s / 1e9)} GFLOP/s, "
        f"{significant(allowed.bytes_per_s / 1e9)} GB/s ({allowed.source})",
    )


def link_sentences(allowed: DeviceLimits, processes: int) -> list[str]:
    """What collectives between these take; nothing where there is one process."""
    told = [
        f"{name} {duration(each.latency_s)} + {significant(each.bytes_per_s / 1e9)} GB/s"
        for name, each in allowed.links.items()
    ]
    return [f"Between {processes} processes, latency and bus bandwidth: {', '.join(told)}."] if told else []


def mean_and_margin(seconds: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and half of its 95 % interval by Student's t."""
    mean, deviation = mean_and_deviation(seconds)
    if deviation is None:
        return mean, None
    return mean, student_quantile(0.975, len(seconds) - 1) * deviation / math.sqrt(len(seconds))


def total_seconds(operators: Iterable[Operator]) -> list[float]:
    """Seconds of all of them together, in each repeat."""
    return [math.fsum(each) for each in zip(*(operator.seconds for operator in operators), strict=True)]


def layer_s(case: StepCase, found: InferenceResult) -> float:
    """One layer, by the clock."""
    return mean_and_margin(case.parts_s["layers"])[0] / found.layers


def sum_ratios(case: StepCase) -> dict[str, float]:
    """How much of a whole its parts come to: 1 where they agree. Of the repeat that was disturbed least."""
    parts = case.parts_s
    best = min(range(len(parts["model"])), key=lambda each: parts["model"][each])
    in_layers = total_seconds(
        operator for operator in case.operators if operator.in_layers and operator.direction == "forward"
    )
    pieces = sum(parts[name][best] for name in ("Embedding", "layers", "RMSNorm", "LM head"))
    result = {
        "operators of a layer": in_layers[best] / parts["layers"][best],
        "layers and the rest of the model": pieces / parts["model"][best],
        "operators of torch.profiler": case.least_s[0] / case.least_s[1],
    }
    if backward := parts.get("step backward"):
        own = total_seconds(operator for operator in case.operators if operator.direction == "backward")
        result["operators of the backward pass"] = max(own[each] / took for each, took in enumerate(backward))
    return result


def sentences(case: StepCase, found: InferenceResult) -> list[str]:
    """How long a step took, what the whole model would take, and whether the parts add up."""
    mean, margin = mean_and_margin(case.step_s)
    spread = f" ± {duration(margin, 2)}" if margin is not None else ""
    rest = mean_and_margin(case.parts_s["model"])[0] - found.layers * layer_s(case, found)
    whole = rest + found.model_layers * layer_s(case, found)
    lines = [
        f"Batch {case.batch}: a step takes {duration(mean)}{spread} ({pluralise(len(case.step_s), 'repeat')}), "
        f"{significant(case.tokens / mean)} tokens/s; forward one layer {duration(layer_s(case, found))}, "
        f"all {found.model_layers} layers and the rest about {duration(whole)}."
    ]
    told = sum_ratios(case)
    sums = ", ".join(f"{name} {100 * value:.1f} %" for name, value in told.items())
    lines.append(f"Sums of parts, of the whole: {sums}.")
    if any(abs(1 - value) > AGREE for value in told.values()):
        lines.append(
            "More than 5 % off: the machine was busy, or steps are short. Try more --repeats or a larger --input."
        )
    if case.beside_s:
        lines.append(_overlap(case, found))
    return lines


def _overlap(case: StepCase, found: InferenceResult) -> str:
    """What all-reduces cost, and how much of that is hidden, and would be by the model of `loadgen limits`."""
    minimum = {name: min(seconds) for name, seconds in case.beside_s.items()}
    attention, mlp = block_times_s(case, found, minimum["no-communication"])
    costs = (minimum["standard"] - minimum["no-communication"]) / (2 * found.layers)
    steps = ", ".join(f"{name} {duration(seconds)}" for name, seconds in minimum.items())
    told = (
        f"By turns, the fastest step of each: {steps}. Attention takes {duration(attention)}, an MLP {duration(mlp)}; "
        f"an all-reduce lengthens the standard step by {duration(costs)}"
    )
    if found.architecture in ("standard", "no-communication") or costs <= 0:
        return f"{told}."
    shown = exposed_all_reduce_s(found.architecture, found.layers, costs, attention, mlp)
    expected = max(0.0, 1 - shown / (2 * found.layers * costs))
    return (
        f"{told}; {found.architecture} hides {percent(hidden_share(case.beside_s, found.architecture))} of that, where "
        f"loadgen limits would expect {percent(expected)}."
    )


def block_times_s(case: StepCase, found: InferenceResult, step_s: float) -> tuple[float, float]:
    """Attention and MLP of one layer in a step that waits for nothing: by the shares that their operators have of it.
    Each has one of the norms and of the sums behind them."""
    own = [operator for operator in case.operators if operator.bound != "network" and operator.direction == "forward"]

    def spent(*modules: str) -> float:
        return sum(sum(each.seconds) for each in own if each.module in modules and each.in_layers)

    halved, everything = spent("RMSNorm", "residual") / 2, sum(sum(each.seconds) for each in own)
    both = (spent("QKV", "RoPE", "attention", "output") + halved, spent("gate", "up", "SiLU", "down") + halved)
    attention, mlp = (step_s * each / everything / found.layers for each in both)
    return attention, mlp


def hidden_share(steps_s: Mapping[str, Sequence[float]], architecture: str) -> float:
    """Of what all-reduces cost the standard model, the share that this one does not wait for, by the fastest steps."""
    own, standard, bare = (min(steps_s[name]) for name in (architecture, "standard", "no-communication"))
    return min(1.0, (standard - own) / (standard - bare)) if standard > bare else 0.0


def module_rows(case: StepCase, direction: str) -> Rows:
    """Of each module: time, half of its interval, share of all operators, rates, and what of the bound is reached."""
    mine = [operator for operator in case.operators if operator.direction == direction]
    everything = mean_and_margin(total_seconds(case.operators))[0]
    rows: Rows = []
    for module in sorted({each.module for each in mine}, key=_module_order):
        own = [each for each in mine if each.module == module]
        mean, margin = mean_and_margin(total_seconds(own))
        minimum = sum(each.bound_s for each in own)
        rows.append(
            (
                *(module, duration(mean), duration(margin, 2), percent(mean / everything)),
                *(_rate(sum(each.flops for each in own), mean), _rate(sum(each.bytes for each in own), mean)),
                *(percent(minimum / mean) if minimum else "", max(own, key=lambda each: sum(each.seconds)).bound),
            )
        )
    return rows


def operator_rows(case: StepCase, shown: int | None = None) -> Rows:
    """The longest first; those of the backward pass are marked."""
    everything = mean_and_margin(total_seconds(case.operators))[0]
    rows: Rows = []
    for operator in sorted(case.operators, key=lambda each: -sum(each.seconds))[:shown]:
        mean = mean_and_margin(operator.seconds)[0]
        rows.append(
            (
                operator.module + (" ←" if operator.direction == "backward" else ""),
                *(operator.operator, operator.shape.replace(" x ", "x"), str(operator.calls), duration(mean)),
                *(
                    percent(mean / everything),
                    percent(operator.bound_s / mean) if operator.bound_s else "",
                    operator.bound,
                ),
            )
        )
    return rows


def format_text(found: InferenceResult) -> str:
    """All of it for a terminal of 80 columns."""
    blocks = [wrap_lines([*headings(found), *link_sentences(found.bounds, found.tensor_parallel)])]
    for case in found.cases:
        blocks.append(wrap_lines(sentences(case, found)))
        tables = {direction: module_rows(case, direction) for direction in ("forward", "backward")}
        blocks += [f"{name}\n{align_columns([MODULE_HEADS, *rows])}" for name, rows in tables.items() if rows]
        operators = [(*row[:1], *(_short(cell) for cell in row[1:3]), *row[3:]) for row in operator_rows(case, SHOWN)]
        blocks.append(_left([OPERATOR_HEADS, *operators]))
    return "\n\n".join(blocks)


def build_document(found: InferenceResult) -> Document:
    """The page: for each batch size the bar, the roofline and both tables."""
    from loadgen.analysis import report as doc
    from loadgen.analysis.report.tables import number_columns, table

    title, bounds = headings(found)
    sections, runs = [], []
    for case in found.cases:
        name = f"batch {case.batch}"
        heads: dict[str, doc.ColumnKind] = {"direction": "text", **dict.fromkeys(MODULE_HEADS, "number")}
        rows = [(way, *row) for way in ("forward", "backward") for row in module_rows(case, way)]
        modules = table(
            f"Modules, {name}", heads | {"module": "head", "bound by": "text"}, rows, several=True, id="modules"
        )
        kinds: dict[str, doc.ColumnKind] = {"module": "head", "operator": "text", "shape": "text"}
        kinds |= {**number_columns("calls", "time", "share", "bound"), "by": "text"}
        operators = table(f"Operators, {name}", kinds, operator_rows(case), several=True, id="operators")
        said = [*sentences(case, found), *link_sentences(found.bounds, found.tensor_parallel)]
        paragraphs = [doc.Paragraph(each) for each in said]
        sections.append(doc.Section(f"batch-{case.batch}", name.capitalize(), [*paragraphs, modules, operators]))
        runs.append(name)
    charts = [
        doc.Section("flame", "Where a step goes", [doc.ChartRef("flame", "One step", [FLAME], "wide")]),
        doc.Section(
            "roofline", "Roofline", [doc.ChartRef("roofline", "What each operator reaches", [ROOFLINE], "wide")]
        ),
    ]
    data = {"runs": [_run(found, title)], "charts": [_flame_chart(found.cases[0]), _dots_chart(found)]}
    return doc.Document(
        "loadgen dissect",
        title,
        [sections[0], *charts, *sections[1:]],
        bounds,
        "",
        [doc.RunStyle(title)],
        [],
        data,
        version("llm-loadgen"),
    )


def _run(found: InferenceResult, title: str) -> dict[str, Any]:
    allowed = found.bounds
    groups: dict[str, dict[str, list[Any]]] = {}
    for index, (_, operators) in enumerate(_groups(found)):
        points = [(operator, sum(operator.seconds) / len(operator.seconds)) for operator in operators]
        groups[f"group{index}"] = {
            "x": [each.flops / each.bytes for each, _ in points],
            "y": [each.flops / seconds / 1e9 for each, seconds in points],
            "name": [f"{each.module}, {each.operator} {each.shape}, {each.direction}" for each, _ in points],
        }
    minimum = min((index for group in groups.values() for index in group["x"]), default=0.25) / 2
    roofline = {"roof": roofline_points(allowed.flops_per_s, allowed.bytes_per_s, 1e9, min(0.25, minimum)), **groups}
    data = {"roofline": roofline, "flame": _flame(found.cases[0])}
    return {"name": title, "colour": "run-1", "dash": "solid", "window": None, "data": data}


def _groups(found: InferenceResult) -> list[tuple[str, list[Operator]]]:
    """Operators that compute, by batch size and direction."""
    made = [
        (
            f"batch {case.batch}, {way}",
            [operator for operator in case.operators if operator.flops and operator.direction == way],
        )
        for case in found.cases
        for way in ("forward", "backward")
    ]
    return [(name.replace(", forward", ""), operators) for name, operators in made if operators]


def _dots_chart(found: InferenceResult) -> dict[str, Any]:
    titles = {f"group{index}": name for index, (name, _) in enumerate(_groups(found))}
    return roofline_chart(found.bounds.source.partition(":")[0], titles, unit="GFLOP/s")


def _flame(case: StepCase) -> dict[str, Any]:
    """Three rows of pieces, each of which lies above its parts."""
    result: dict[str, Any] = {}
    at = 0.0
    for way in ("forward", "backward"):
        for module in sorted(
            {operator.module for operator in case.operators if operator.direction == way}, key=_module_order
        ):
            own = [operator for operator in case.operators if (operator.module, operator.direction) == (module, way)]
            pieces = [(f"{module}, {way}", "modules", at, mean_and_margin(total_seconds(own))[0])]
            for each in own:
                seconds = mean_and_margin(each.seconds)[0]
                pieces.append((f"{module}: {each.operator} {each.shape}, {way}", "operators", at, seconds))
                at += seconds
            held = result.setdefault(module, {"start": [], "width": [], "row": [], "name": []})
            for name, row, start, width in pieces:
                held["name"].append(name)
                held["row"].append(row)
                held["start"].append(1e3 * start)
                held["width"].append(1e3 * width)
    return result


def _flame_chart(case: StepCase) -> dict[str, Any]:
    modules = sorted({operator.module for operator in case.operators}, key=_module_order)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": module,
            "x": f"${module}.width",
            "base": f"${module}.start",
            "y": f"${module}.row",
            "text": f"${module}.name",
            "textposition": "inside",
            "insidetextanchor": "middle",
            "hovertemplate": "%{text}: %{x:.3g} ms<extra></extra>",
            "marker": {"color": f"@run-{index % 6 + 1}", "line": {"width": 0.5, "color": "@idle"}},
        }
        for index, module in enumerate(modules)
    ]
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": "ms of one step"}},
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": ["operators", "modules"],
            "type": "category",
            "automargin": True,
        },
        "showlegend": True,
        "hovermode": "closest",
    }
    table = {"what": f"{modules[0]}.name", "ms": f"{modules[0]}.width"}
    return {"id": "flame", "script": "", "traces": traces, "layout": layout, "table": table, "scales": {}}


def wrap_lines(lines: Iterable[str]) -> str:
    """For 80 columns."""
    return "\n".join(fill(line, 80, break_on_hyphens=False) for line in lines)


def _module_order(module: str) -> int:
    return ORDER.index(module) if module in ORDER else len(ORDER)


def _rate(amount: float, seconds: float) -> str:
    return significant(amount / seconds / 1e9) if amount else ""


def _short(words: str, width: int = 17) -> str:
    return words if len(words) <= width else f"{words[: width - 3]}..."


def _left(table: Sequence[Sequence[str]], left: int = 3) -> str:
    """As `align_columns`, with the first three columns to the left."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )
