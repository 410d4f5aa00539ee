"""The output of `loadgen hardware bounds`, as text for a terminal and as a page.

The command shows what binds each kernel of a model on one or more GPUs: compute, memory or latency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any

from loadgen.analysis.format import UNKNOWN, duration, percent, significant
from loadgen.analysis.hardware import align_columns

if TYPE_CHECKING:
    from loadgen.analysis.report import Document
    from loadgen.servers.hardware.bounds import Bound, GpuBounds, KernelBound

WIDTH = 80
COLUMNS = 5
"""Number of GPUs that fit next to each other in a terminal."""
MEANING = """A kernel is bound by the longest of three times: to compute at the peak rate, to read memory at the data
sheet's bandwidth, and to start the kernel (latency). Its time is the expected one, of a single kernel."""
GRID = """Each cell is one kernel on one GPU: what binds it, and its expected time. The stronger the colour, the more
of the time at the data sheet's rates is due to what binds."""
DETAILS = "FLOP/byte of each kernel, and the size from which compute binds it"
SHARES = """Shares of the expected time of all kernels that are bound by compute, memory or latency."""
COLOURS: Mapping[Bound, str] = {"compute": "run-2", "memory": "run-1", "latency": "quiet"}
LOWEST_OPACITY, HIGHEST_OPACITY = 0.16, 0.5
"""Opacities of the cells of the grid. Black and white text stays readable on both."""
MEDIUM_ROWS, MANY_ROWS = 7, 9
"""Grids with more rows than these numbers are higher."""
LABEL_WIDTH = 12
MANY_COLUMNS = 4
"""Grids with more columns have smaller letters, so that the words fit on a phone."""
Labelled = Mapping[str, "GpuBounds"]
"""The bounds of each GPU, by the name under which the GPU is shown."""


def format_bounds(bounds: Labelled, titles: tuple[str, str], sizes: Mapping[str, str]) -> str:
    """Format the result of `loadgen hardware bounds` as text for a terminal.

    `titles` are two heading lines. For each kernel, the text states the input size from which on compute limits the
    kernel, for example 300. `sizes` contains the unit of this size for each phase, such as `tokens` for `prefill`.
    """
    blocks = ["\n".join(fill(title, WIDTH) for title in titles)]
    names = list(bounds)
    for start in range(0, len(names), COLUMNS):
        shown = {name: bounds[name] for name in names[start : start + COLUMNS]}
        blocks += [_phase_text(shown, phase, sizes[phase]) for phase in _phases(shown)]
    blocks.append(fill(" ".join([MEANING, *notes(sizes)]), WIDTH))
    blocks.append("\n".join(fill(line, WIDTH) for line in accuracy_lines(bounds)))
    return "\n\n".join(blocks)


def notes(sizes: Mapping[str, str]) -> list[str]:
    """Return a list with one note about the table column whose title is `compute from`.

    The column shows the smallest input for which a kernel needs more time to compute than to access memory. For
    example, 300 means 300 tokens. The note names the kernels for which the number has a different unit.

    `sizes` maps each phase, such as `prefill`, to the unit for most kernels, such as `tokens`.
    """
    if "prefill" in sizes:
        return [
            "For attention in prefill, `compute from` counts the tokens of one prompt, and for the output head prompts."
        ]
    return ["For attention, `compute from` counts the tokens of one sequence."]


def accuracy_lines(bounds: Labelled) -> list[str]:
    """Return one sentence per GPU that says how far predicted kernel durations are from measured durations.

    For training and for mixtures of experts, the only sentence says that their kernels are not validated.
    """
    from loadgen.servers.hardware.validation import describe

    if not any(item.accuracy for item in bounds.values()):
        kernels = "training" if "forward" in _phases(bounds) else "mixtures of experts"
        return [f"Accuracy: the kernels of {kernels} are not validated."]
    return [f"Accuracy on {name}: {describe(item.accuracy)}." for name, item in bounds.items()]


def _phases(bounds: Labelled) -> list[str]:
    first = next(iter(bounds.values()))
    return list(dict.fromkeys(kernel.phase for kernel in first.kernels))


def _kernels(bounds: Labelled, phase: str) -> list[list[KernelBound]]:
    """Return the kernels of one phase. Each entry contains the same kernel on every GPU."""
    by_gpu = [[kernel for kernel in item.kernels if kernel.phase == phase] for item in bounds.values()]
    return [list(kernels) for kernels in zip(*by_gpu, strict=True)]


def _phase_text(bounds: Labelled, phase: str, size: str) -> str:
    """Return the table of one phase as text, with one column per GPU.

    The table has a block of rows for each property of the kernels, such as their time. Each block has one row per
    kernel.
    """
    kernels = _kernels(bounds, phase)

    def block(heading: str, cell: Callable[[KernelBound], str]) -> list[tuple[str, ...]]:
        rows = [(f"  {same[0].kernel}", *map(cell, same)) for same in kernels]
        return [(heading, *[""] * len(bounds)), *rows]

    rows = [(phase.upper(), *bounds), *block("bound by", lambda kernel: kernel.bound)]
    rows += block("time of one kernel", lambda kernel: duration(kernel.expected_s))
    rows += block("FLOP/byte", lambda kernel: significant(kernel.flops_per_byte))
    rows += [(f"  {name}", *cells) for name, cells in ridges(bounds, phase).items()]
    if any(kernel.compute_from for same in kernels for kernel in same):
        rows += block(f"compute from, {size}", lambda kernel: _size_text(kernel.compute_from))
    rows.append(("share of kernel time", *[""] * len(bounds)))
    rows += [(f"  {bound}", *cells) for bound, cells in share_rows(bounds, phase).items()]
    return align_columns(rows)


def ridges(bounds: Labelled, phase: str) -> dict[str, list[str]]:
    """Return the table rows with the ridges of each GPU. The keys are the names of the rows.

    A ridge is the arithmetic intensity (FLOP/byte) from which compute limits a kernel. A GPU has a different ridge for
    each number format in which a kernel may compute. Kernels with equal ridges share one row. The first row is named
    `ridge`. The name of a further row contains the name of its first kernel.
    """
    by_name: dict[str, list[str]] = {}
    for same in _kernels(bounds, phase):
        cells = [significant(kernel.ridge) for kernel in same]
        if cells not in by_name.values():
            by_name[f"ridge, {same[0].kernel}" if by_name else "ridge"] = cells
    return by_name


def share_rows(bounds: Labelled, phase: str) -> dict[str, list[str]]:
    """Return the rows of the table of kernel time: for each resource, one cell per GPU.

    A resource is compute, memory or latency. The cell contains the share of the kernel time in which this resource is
    the limit.
    """
    first = next(iter(bounds.values())).shares[phase]
    return {name: [f"{100 * item.shares[phase][name]:.0f}%" for item in bounds.values()] for name in first}


def _size_text(size: int | None) -> str:
    return UNKNOWN if size is None else f"{size:,}"


def bounds_document(bounds: Labelled, titles: tuple[str, str], sizes: Mapping[str, str]) -> Document:
    """Return the page of `loadgen hardware bounds`, which shows what binds each kernel: compute, memory or latency.

    - Each phase, such as `prefill`, has a section. A grid has one cell per kernel and GPU, with what binds the kernel
      and its expected time. A table contains further figures of the kernels.
    - The section about the generations has a chart per phase. It shows, for each GPU, the share of the time in kernels
      that are bound by compute, by memory and by latency.
    - The last section explains the terms and the accuracy.

    `titles` contains the title and the subtitle of the page. `sizes` contains the unit of the input size for each
    phase, such as `tokens` for `prefill`.
    """
    from loadgen.analysis import report as doc
    from loadgen.analysis.report.status import COMPUTED

    phases = _phases(bounds)
    sections = []
    for phase in phases:
        rows = len(_kernels(bounds, phase))
        shape: doc.Shape = "wide"
        if rows > MANY_ROWS:
            shape = "high"
        elif rows > MEDIUM_ROWS:
            shape = "tall"
        grid = doc.ChartRef(f"grid-{phase}", f"What binds each kernel: {phase}", [GRID], shape, zoom="none")
        sections.append(
            doc.Section(
                phase, phase.capitalize(), [grid, doc.Disclosure(DETAILS, [_table(bounds, phase, sizes[phase])])]
            )
        )
    references = [
        doc.ChartRef(f"shares-{phase}", f"{phase.capitalize()}: time by what binds", [SHARES], zoom="none")
        for phase in phases
    ]
    sections.append(doc.Section("generations", "Over the generations", references))
    accuracy = [doc.Paragraph(line) for line in accuracy_lines(bounds)]
    explained = [doc.Paragraph(" ".join([*MEANING.split(), *notes(sizes)])), *accuracy]
    sections.append(doc.Section("meaning", "Meaning and accuracy", explained))
    charted = {f"grid-{phase}": _grid_data(bounds, phase) for phase in phases}
    charted |= {f"shares-{phase}": _shares_data(bounds, phase) for phase in phases}
    run = {"name": titles[0], "colour": "run-1", "dash": "solid", "window": None, "data": charted}
    charts = [_grid_chart(bounds, phase) for phase in phases] + [_shares_chart(bounds, phase) for phase in phases]
    data = {"runs": [run], "charts": charts}
    look = doc.RunStyle(titles[0])
    return doc.Document(
        "loadgen hardware bounds",
        *titles[:1],
        sections,
        titles[1],
        "",
        [look],
        [],
        data,
        version("llm-loadgen"),
        chips=[COMPUTED],
    )


def _table(bounds: Labelled, phase: str, size: str) -> Any:
    """Return the table of a phase, such as `prefill`: one row per kernel and one column per GPU.

    A cell shows the arithmetic intensity of the kernel (FLOPs per byte). Below, it shows the smallest size of the input
    at which compute limits the kernel, such as `from 300`. `size` is the unit of these sizes, such as `tokens`.
    """
    from loadgen.analysis.report import ColumnKind, TableCell
    from loadgen.analysis.report.tables import number_columns, table

    heads: dict[str, ColumnKind] = {"kernel": "head", **number_columns("per step", *bounds)}
    rows: list[Sequence[TableCell | str]] = []
    for same in _kernels(bounds, phase):
        cells = [
            TableCell(
                significant(kernel.flops_per_byte),
                kernel.flops_per_byte,
                note=f"from {kernel.compute_from:,}" if kernel.compute_from else "",
            )
            for kernel in same
        ]
        rows.append([same[0].kernel, f"{same[0].layers:,}", *cells])
    rows += [[name, "", *cells] for name, cells in ridges(bounds, phase).items()]
    note = f"In small print: the size from which compute binds, in {size}." if size else ""
    return table(f"FLOP/byte, {phase}", heads, rows, several=True, notes=[note] if note else [])


def _grid_data(bounds: Labelled, phase: str) -> dict[str, Any]:
    """Return the data of the grid for `phase`, which has one row per kernel and one column per GPU.

    The report shows the grid as a chart and as a table:

    - The entry `rows` is for the chart. It contains the bars of each kernel, one bar per GPU.
    - Every other entry is one column of the table. The table has one line for each pair of a kernel and a GPU.
    """
    kernels = _kernels(bounds, phase)
    rows = [
        {
            "x": list(bounds),
            "y": [0.94] * len(same),
            "base": [index + 0.03] * len(same),
            "text": [f"{kernel.bound}<br>{duration(kernel.expected_s)}" for kernel in same],
            "about": [
                f"{kernel.kernel}: {significant(kernel.flops_per_byte)} FLOP/byte, ridge {significant(kernel.ridge)}, "
                f"{percent(kernel.time_share)} of the time"
                for kernel in same
            ],
        }
        for index, same in enumerate(kernels)
    ]
    cells = [(name, kernel) for same in kernels for name, kernel in zip(bounds, same, strict=True)]
    return {
        "rows": rows,
        "kernel": [kernel.kernel for _, kernel in cells],
        "gpu": [name for name, _ in cells],
        "bound": [kernel.bound for _, kernel in cells],
        "intensity": [kernel.flops_per_byte for _, kernel in cells],
        "ridge": [kernel.ridge for _, kernel in cells],
        "us": [1e6 * kernel.expected_s for _, kernel in cells],
        "share": [kernel.time_share for _, kernel in cells],
        "compute": [kernel.compute_share for _, kernel in cells],
        "from": [kernel.compute_from for _, kernel in cells],
    }


def _grid_chart(bounds: Labelled, phase: str) -> dict[str, Any]:
    """Return a chart of the phase `phase`: a grid with one row per kernel and one column per GPU.

    Each cell of the grid is drawn as a bar.
    """
    kernels = _kernels(bounds, phase)
    traces = [
        {
            "type": "bar",
            "name": same[0].kernel,
            "x": f"$rows.{index}.x",
            "y": f"$rows.{index}.y",
            "base": f"$rows.{index}.base",
            "width": 0.96,
            "text": f"$rows.{index}.text",
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "constraintext": "none",
            "textfont": {"color": "@ink", "size": 10 if len(bounds) > MANY_COLUMNS else 11},
            "customdata": f"$rows.{index}.about",
            "marker": {"color": [_cell_colour(kernel) for kernel in same], "line": {"width": 0}},
            "hovertemplate": "%{x}, %{customdata}<extra></extra>",
        }
        for index, same in enumerate(kernels)
    ]
    layout = {
        "barmode": "overlay",
        "showlegend": False,
        "xaxis": {"type": "category", "side": "top", "fixedrange": True, "showgrid": False},
        "yaxis": {
            "range": [len(kernels), 0],
            "tickvals": [index + 0.5 for index in range(len(kernels))],
            "ticktext": [_wrapped(same[0].kernel) for same in kernels],
            "ticksuffix": "  ",
            "showgrid": False,
            "fixedrange": True,
        },
        "margin": {"l": 92, "r": 4, "t": 28, "b": 8},
    }
    table = {
        "kernel": "kernel",
        "GPU": "gpu",
        "bound by": "bound",
        "FLOP/byte": "intensity",
        "ridge": "ridge",
        "time, µs": "us",
        "share of time": "share",
        "compute share": "compute",
        "compute from": "from",
    }
    return {"id": f"grid-{phase}", "script": "", "traces": traces, "layout": layout, "table": table, "scales": {}}


def _cell_colour(kernel: KernelBound) -> str:
    """Return the colour of the grid cell of `kernel`, which shows the resource that limits the kernel.

    Compute, memory and latency have different colours. For compute and memory, the opacity shows how clearly the
    resource is the limit: it grows with the share of this resource in the sum of the compute time and the memory time.
    For latency, the opacity is always the lowest.
    """
    shares = {"compute": kernel.compute_share, "memory": 1 - kernel.compute_share, "latency": 0.5}
    opacity = LOWEST_OPACITY + (HIGHEST_OPACITY - LOWEST_OPACITY) * max(0.0, 2 * shares[kernel.bound] - 1)
    return f"@{COLOURS[kernel.bound]}:{round(255 * opacity):02x}"


def _wrapped(name: str) -> str:
    """Return the name of a kernel in lines of at most LABEL_WIDTH characters, as Plotly expects them."""
    return "<br>".join(wrap(name, LABEL_WIDTH))


def _shares_data(bounds: Labelled, phase: str) -> dict[str, Any]:
    by_bound: dict[str, Any] = {bound: [item.shares[phase][bound] for item in bounds.values()] for bound in COLOURS}
    return {"gpu": list(bounds), **by_bound}


def _shares_chart(bounds: Labelled, phase: str) -> dict[str, Any]:
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": bound,
            "x": f"${bound}",
            "y": "$gpu",
            "marker": {"color": f"@{colour}"},
            "hovertemplate": f"%{{y}}: {bound} %{{x:.0%}}<extra></extra>",
        }
        for bound, colour in COLOURS.items()
    ]
    layout = {
        "barmode": "stack",
        "showlegend": True,
        "xaxis": {"range": [0, 1], "tickformat": ".0%", "title": {"text": "share of kernel time"}},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [*bounds][::-1],
            "ticksuffix": "  ",
            "showgrid": False,
        },
        "margin": {"l": 84, "r": 16, "t": 36, "b": 44},
    }
    table = {"GPU": "gpu", "compute": "compute", "memory": "memory", "latency": "latency"}
    return {"id": f"shares-{phase}", "script": "", "traces": traces, "layout": layout, "table": table, "scales": {}}
