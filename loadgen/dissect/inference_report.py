"""Text and HTML page of `loadgen dissect inference`: times, rates and limits of modules and operators."""

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
    from loadgen.analysis.report import Document, Section
    from loadgen.dissect.results import DeviceLimits, InferenceResult, Operator, StepCase

Rows = list[tuple[str, ...]]
ORDER = (
    "Embedding",
    "RMSNorm",
    "QKV",
    "RoPE",
    "attention",
    "output",
    "all-reduce",
    "all-reduce wait",
    "residual",
    "gate",
    "up",
    "SiLU",
    "down",
    "LM head",
    "all-gather",
    "loss",
)
"""Modules in the order in which data flows through them."""
DIRECTIONS = ("forward", "backward")
MODULE_HEADS = ("module", "time", "±", "share", "GFLOP/s", "GB/s", "of bound", "bound by")
OPERATOR_HEADS = ("module", "operator", "shape", "calls", "time", "share", "bound", "by")
SHOWN_OPERATORS = 20
"""Number of operators that the terminal shows. The page and --json contain all operators."""
MAX_DEVIATION = 0.05
"""Maximum relative difference between a sum of parts and the whole. Larger differences get a warning."""
FLAME = """One step from left to right, in the order of the data flow. The upper row shows modules, summed over all
layers, and the lower row their operators. Click on the legend to hide a module."""
ROOFLINE = """Maximum FLOP/s of the device, by FLOPs per byte that is read or written. Each dot is an operator.
Operators other than GEMMs count as one FLOP per value. An operator above the line read its data from a cache."""


def headings(result: InferenceResult) -> tuple[str, str]:
    """Return two lines: the measured model, and the limits of the device."""
    devices = f" on {result.tensor_parallel} devices" if result.tensor_parallel > 1 else ""
    limits = result.bounds
    return (
        f"{result.model}, {result.layers} of {pluralise(result.model_layers, 'layer')}, {result.dtype}, "
        f"{result.phase} at {result.input_tokens:,} tokens{devices}",
        f"{limits.device}: {significant(limits.flops_per_s / 1e9)} GFLOP/s, "
        f"{significant(limits.bytes_per_s / 1e9)} GB/s ({limits.source})",
    )


def link_sentences(limits: DeviceLimits, processes: int) -> list[str]:
    """Return a list with one sentence about the links between processes. The list is empty for one process."""
    links = [
        f"{name} {duration(link.latency_s)} + {significant(link.bytes_per_s / 1e9)} GB/s"
        for name, link in limits.links.items()
    ]
    return [f"Between {processes} processes, latency and bus bandwidth: {', '.join(links)}."] if links else []


def mean_and_margin(seconds: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of `seconds`, and half the width of its 95% confidence interval.

    The half width is `t * s / sqrt(n)`. Here `n` is the number of values, `s` their standard deviation, and `t` the
    0.975 quantile of Student's t distribution with `n - 1` degrees of freedom. It is None for one value.
    """
    mean, deviation = mean_and_deviation(seconds)
    if deviation is None:
        return mean, None
    return mean, student_quantile(0.975, len(seconds) - 1) * deviation / math.sqrt(len(seconds))


def total_seconds(operators: Iterable[Operator]) -> list[float]:
    """Return the total seconds of these operators, one value per repeat."""
    by_repeat = zip(*(operator.seconds for operator in operators), strict=True)
    return [math.fsum(seconds) for seconds in by_repeat]


def layer_s(case: StepCase, result: InferenceResult) -> float:
    """Return the mean time of one decoder layer in s."""
    return mean_and_margin(case.parts_s["layers"])[0] / result.layers


def sum_ratios(case: StepCase) -> dict[str, float]:
    """Return ratios by name that show whether the measured times of a step are consistent. A ratio of 1 is ideal.

    Most ratios are the sum of the times of all parts, divided by the time of the whole. For example, the times of all
    operators of a layer are added and divided by the time of the layer.

    - The ratios of the forward pass come from its fastest repeat, which other programs disturbed least.
    - The ratio of the backward pass is the largest ratio of all repeats.
    - The ratio `operators of torch.profiler` compares two profilers. It is the time of all operators according to
      OpProfiler, divided by their time according to torch.profiler.
    """
    parts = case.parts_s
    fastest = min(range(len(parts["model"])), key=lambda repeat: parts["model"][repeat])
    layer_operators = [
        operator for operator in case.operators if operator.in_layers and operator.direction == "forward"
    ]
    pieces = sum(parts[name][fastest] for name in ("Embedding", "layers", "RMSNorm", "LM head"))
    ratios = {
        "operators of a layer": total_seconds(layer_operators)[fastest] / parts["layers"][fastest],
        "layers and the rest of the model": pieces / parts["model"][fastest],
        "operators of torch.profiler": case.least_s[0] / case.least_s[1],
    }
    backward_s = parts.get("step backward")
    if backward_s:
        operators = total_seconds(operator for operator in case.operators if operator.direction == "backward")
        ratios["operators of the backward pass"] = max(
            operators_s / step_s for operators_s, step_s in zip(operators, backward_s, strict=True)
        )
    return ratios


def sentences(case: StepCase, result: InferenceResult) -> list[str]:
    """Return the sentences of the report about one batch size.

    The sentences state the time of a step, the estimated time of the whole model, and the ratios that `sum_ratios`
    returns.
    """
    mean, margin = mean_and_margin(case.step_s)
    spread = f" ± {duration(margin, 2)}" if margin is not None else ""
    one_layer_s = layer_s(case, result)
    rest_s = mean_and_margin(case.parts_s["model"])[0] - result.layers * one_layer_s
    whole_s = rest_s + result.model_layers * one_layer_s
    lines = [
        f"Batch {case.batch}: a step takes {duration(mean)}{spread} ({pluralise(len(case.step_s), 'repeat')}), "
        f"{significant(case.tokens / mean)} tokens/s. The forward pass of one layer takes {duration(one_layer_s)}; "
        f"all {result.model_layers} layers and the rest would take about {duration(whole_s)}."
    ]
    ratios = sum_ratios(case)
    sums = ", ".join(f"{name} {100 * ratio:.1f}%" for name, ratio in ratios.items())
    lines.append(f"Sums of parts relative to the whole: {sums}.")
    if any(abs(1 - ratio) > MAX_DEVIATION for ratio in ratios.values()):
        lines.append(
            "A sum is more than 5% off: the machine was busy, or steps are short. Try more --repeats or a larger "
            "--input."
        )
    if case.beside_s:
        lines.append(_overlap_sentences(case, result))
    return lines


def _overlap_sentences(case: StepCase, result: InferenceResult) -> str:
    """Return sentences about the time of an all-reduce, and about how much of it the architecture hides.

    An all-reduce is hidden while the device computes at the same time. The sentences compare the measured hidden share
    with the share that `loadgen limits` expects.
    """
    fastest = {name: min(seconds) for name, seconds in case.beside_s.items()}
    attention, mlp = block_times_s(case, result, fastest["no-communication"])
    all_reduce_s = (fastest["standard"] - fastest["no-communication"]) / (2 * result.layers)
    steps = ", ".join(f"{name} {duration(seconds)}" for name, seconds in fastest.items())
    text = (
        f"Fastest of alternating steps: {steps}. Attention takes {duration(attention)}, an MLP {duration(mlp)}. "
        f"An all-reduce lengthens the standard step by {duration(all_reduce_s)}."
    )
    if result.architecture in ("standard", "no-communication") or all_reduce_s <= 0:
        return text
    exposed_s = exposed_all_reduce_s(result.architecture, result.layers, all_reduce_s, attention, mlp)
    expected = max(0.0, 1 - exposed_s / (2 * result.layers * all_reduce_s))
    measured = hidden_share(case.beside_s, result.architecture)
    return (
        f"{text} The architecture {result.architecture} hides {percent(measured)} of that; loadgen limits expects "
        f"{percent(expected)}."
    )


def block_times_s(case: StepCase, result: InferenceResult, step_s: float) -> tuple[float, float]:
    """Return the time of the attention block and the time of the MLP block, in seconds.

    Both times are for one layer, without communication. `step_s` is the time of a step without communication. It is
    divided among all operators in proportion to their measured times. A block gets the times of its operators. Norms
    and residual additions belong to both blocks, so each block gets half of their time.
    """
    computing = [
        operator for operator in case.operators if operator.bound != "network" and operator.direction == "forward"
    ]

    def spent(*modules: str) -> float:
        return sum(sum(operator.seconds) for operator in computing if operator.module in modules and operator.in_layers)

    norm_and_residual = spent("RMSNorm", "residual") / 2
    attention = spent("QKV", "RoPE", "attention", "output") + norm_and_residual
    mlp = spent("gate", "up", "SiLU", "down") + norm_and_residual
    all_operators = sum(sum(operator.seconds) for operator in computing)
    return step_s * attention / all_operators / result.layers, step_s * mlp / all_operators / result.layers


def hidden_share(steps_s: Mapping[str, Sequence[float]], architecture: str) -> float:
    """Return the share of the all-reduce time that `architecture` hides, compared with the standard architecture.

    `steps_s` contains several step times of each architecture. The shortest step time of each architecture is used:

        (standard - own) / (standard - no_communication)

    - `standard` is the time of the standard architecture.
    - `own` is the time of `architecture`.
    - `no_communication` is the time of a standard step without its all-reduces.

    The share is at most 1. It is negative if `architecture` is slower than the standard architecture. The share is 0 if
    the all-reduces take no time.
    """
    own = min(steps_s[architecture])
    standard = min(steps_s["standard"])
    without = min(steps_s["no-communication"])
    return min(1.0, (standard - own) / (standard - without)) if standard > without else 0.0


def module_rows(case: StepCase, direction: str) -> Rows:
    """Return the rows of a table of modules: one row for each module that has operators in `direction`.

    `direction` is `forward` or `backward`. MODULE_HEADS contains the titles of the columns.
    """
    all_operators_s = mean_and_margin(total_seconds(case.operators))[0]
    rows: Rows = []
    for module in _modules(case, direction):
        operators = [operator for operator in case.operators if _is_of(operator, module, direction)]
        mean, margin = mean_and_margin(total_seconds(operators))
        bound_s = sum(operator.bound_s for operator in operators)
        longest = max(operators, key=lambda operator: sum(operator.seconds))
        rows.append(
            (
                module,
                duration(mean),
                duration(margin, 2),
                percent(mean / all_operators_s),
                _rate(sum(operator.flops for operator in operators), mean),
                _rate(sum(operator.bytes for operator in operators), mean),
                percent(bound_s / mean) if bound_s else "",
                longest.bound,
            )
        )
    return rows


def operator_rows(case: StepCase, count: int | None = None) -> Rows:
    """Return one table row per operator, with the longest time first. OPERATOR_HEADS names the columns.

    `count` is the maximum number of rows. An arrow marks operators of the backward pass.
    """
    all_operators_s = mean_and_margin(total_seconds(case.operators))[0]
    rows: Rows = []
    for operator in sorted(case.operators, key=lambda operator: -sum(operator.seconds))[:count]:
        mean = mean_and_margin(operator.seconds)[0]
        rows.append(
            (
                operator.module + (" ←" if operator.direction == "backward" else ""),
                operator.operator,
                operator.shape.replace(" x ", "x"),
                str(operator.calls),
                duration(mean),
                percent(mean / all_operators_s),
                percent(operator.bound_s / mean) if operator.bound_s else "",
                operator.bound,
            )
        )
    return rows


def format_text(result: InferenceResult) -> str:
    """Return the report for a terminal of 80 columns."""
    blocks = [wrap_lines([*headings(result), *link_sentences(result.bounds, result.tensor_parallel)])]
    for case in result.cases:
        blocks.append(wrap_lines(sentences(case, result)))
        for direction in DIRECTIONS:
            rows = module_rows(case, direction)
            if rows:
                blocks.append(f"{direction}\n{align_columns([MODULE_HEADS, *rows])}")
        operators = [
            (module, _shorten(operator), _shorten(shape), *figures)
            for module, operator, shape, *figures in operator_rows(case, SHOWN_OPERATORS)
        ]
        blocks.append(_align_operators([OPERATOR_HEADS, *operators]))
    return "\n\n".join(blocks)


def build_document(result: InferenceResult) -> Document:
    """Return the HTML page: the flame chart, the roofline chart, and tables for each batch size."""
    from loadgen.analysis import report as doc

    title, limits = headings(result)
    batches = [_section(case, result) for case in result.cases]
    summary = sentences(result.cases[0], result)[0]
    flame = doc.ChartRef("flame", "One step", [FLAME], "wide")
    roofline = doc.ChartRef("roofline", "What each operator reaches", [ROOFLINE], "wide")
    charts = [
        doc.Section("flame", "Where a step goes", [flame, doc.Paragraph(summary)]),
        doc.Section("roofline", "Roofline", [roofline]),
    ]
    data = {"runs": [_run(result, title)], "charts": [_flame_chart(result.cases[0]), _dots_chart(result)]}
    return doc.Document(
        "loadgen dissect",
        title,
        [*charts, *batches],
        limits,
        "",
        [doc.RunStyle(title)],
        [],
        data,
        version("llm-loadgen"),
    )


def _section(case: StepCase, result: InferenceResult) -> Section:
    """Return the section of one batch size: its sentences, and the tables of modules and operators."""
    from loadgen.analysis import report as doc
    from loadgen.analysis.report.tables import number_columns, table

    name = f"batch {case.batch}"
    module_kinds: dict[str, doc.ColumnKind] = {"direction": "text", **dict.fromkeys(MODULE_HEADS, "number")}
    module_kinds |= {"module": "head", "bound by": "text"}
    rows = [(direction, *row) for direction in DIRECTIONS for row in module_rows(case, direction)]
    modules = table(f"Modules, {name}", module_kinds, rows, several=True, id="modules")
    operator_kinds: dict[str, doc.ColumnKind] = {"module": "head", "operator": "text", "shape": "text"}
    operator_kinds |= {**number_columns("calls", "time", "share", "bound"), "by": "text"}
    operators = table(f"Operators, {name}", operator_kinds, operator_rows(case), several=True, id="operators")
    lines = [*sentences(case, result), *link_sentences(result.bounds, result.tensor_parallel)]
    lines = lines[1:] if case is result.cases[0] else lines  # the first sentences are next to the flame chart
    paragraphs = [doc.Paragraph(line) for line in lines]
    return doc.Section(f"batch-{case.batch}", name.capitalize(), [*paragraphs, modules, operators])


def _run(result: InferenceResult, title: str) -> dict[str, Any]:
    """Return the data of the flame chart and the roofline chart."""
    limits = result.bounds
    groups: dict[str, dict[str, list[Any]]] = {}
    for index, (_, operators) in enumerate(_roofline_groups(result)):
        points = [(operator, sum(operator.seconds) / len(operator.seconds)) for operator in operators]
        groups[f"group{index}"] = {
            "x": [operator.flops / operator.bytes for operator, _ in points],
            "y": [operator.flops / seconds / 1e9 for operator, seconds in points],
            "name": [_operator_label(operator) for operator, _ in points],
        }
    intensities = [intensity for group in groups.values() for intensity in group["x"]]
    left_end = min(0.25, min(intensities, default=0.25) / 2)
    roofline = {"roof": roofline_points(limits.flops_per_s, limits.bytes_per_s, 1e9, left_end), **groups}
    data = {"roofline": roofline, "flame": _flame(result.cases[0])}
    return {"name": title, "colour": "run-1", "dash": "solid", "window": None, "data": data}


def _operator_label(operator: Operator) -> str:
    return f"{operator.module}, {operator.operator} {operator.shape}, {operator.direction}"


def _roofline_groups(result: InferenceResult) -> list[tuple[str, list[Operator]]]:
    """Return the operators that compute FLOPs, in one group per batch size and direction.

    The direction is the forward or the backward pass. A group is a pair: a title, such as `batch 8, backward`, and a
    list of operators. Groups without operators are left out.
    """
    groups = []
    for case in result.cases:
        for direction in DIRECTIONS:
            operators = [operator for operator in case.operators if operator.flops and operator.direction == direction]
            name = f"batch {case.batch}" if direction == "forward" else f"batch {case.batch}, {direction}"
            if operators:
                groups.append((name, operators))
    return groups


def _dots_chart(result: InferenceResult) -> dict[str, Any]:
    titles = {f"group{index}": name for index, (name, _) in enumerate(_roofline_groups(result))}
    return roofline_chart(result.bounds.source.partition(":")[0], titles, unit="GFLOP/s")


def _flame(case: StepCase) -> dict[str, Any]:
    """Return the bars of the flame chart by module.

    Each module has one bar in the upper row, and one bar for each of its operators in the lower row.
    """
    bars: dict[str, Any] = {}
    start = 0.0
    for direction in DIRECTIONS:
        for module in _modules(case, direction):
            operators = [operator for operator in case.operators if _is_of(operator, module, direction)]
            module_s = mean_and_margin(total_seconds(operators))[0]
            pieces = [(f"{module}, {direction}", "modules", start, module_s)]
            for operator in operators:
                seconds = mean_and_margin(operator.seconds)[0]
                name = f"{module}: {operator.operator} {operator.shape}, {direction}"
                pieces.append((name, "operators", start, seconds))
                start += seconds
            columns = bars.setdefault(module, {"start": [], "width": [], "row": [], "name": []})
            for name, row, begin, width in pieces:
                columns["name"].append(name)
                columns["row"].append(row)
                columns["start"].append(1e3 * begin)
                columns["width"].append(1e3 * width)
    return bars


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
    """Wrap each line at 80 columns."""
    return "\n".join(fill(line, 80, break_on_hyphens=False) for line in lines)


def _modules(case: StepCase, direction: str) -> list[str]:
    """Return the modules of `case` that have operators in the given direction (forward or backward).

    The modules are in the order of the data flow.
    """
    return sorted(
        {operator.module for operator in case.operators if operator.direction == direction}, key=_module_order
    )


def _is_of(operator: Operator, module: str, direction: str) -> bool:
    return operator.module == module and operator.direction == direction


def _module_order(module: str) -> int:
    return ORDER.index(module) if module in ORDER else len(ORDER)


def _rate(amount: float, seconds: float) -> str:
    """Return `amount / seconds` in units of 10^9 as text, or "" if the amount is 0."""
    return significant(amount / seconds / 1e9) if amount else ""


def _shorten(words: str, width: int = 17) -> str:
    return words if len(words) <= width else f"{words[: width - 3]}..."


def _align_operators(table: Sequence[Sequence[str]], left_columns: int = 3) -> str:
    """Return a text table. The first `left_columns` columns are aligned left, and later columns are aligned right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if index < left_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
