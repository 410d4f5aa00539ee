"""Builds the findings, status chips and cards on the sweeps of a matrix, and the table of their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from loadgen.analysis.format import UNKNOWN, pluralise, times_speed
from loadgen.analysis.matrix import CellName, CellSweep
from loadgen.analysis.report import Block, Chip, ColumnKind, Finding, TableCell
from loadgen.analysis.report.tables import Cells, number_columns
from loadgen.analysis.sweep import SweepResult, best_step, throughput_field
from loadgen.analysis.sweep.document import (
    COMPARED,
    UNITS,
    best_cards,
    capacity_texts,
    ended_sentence,
    format_load,
    step_text,
    throughput_title,
)


def sweep_findings(sweeps: Sequence[CellSweep], name: Callable[[CellName], str]) -> list[Finding]:
    """Return the findings on the sweeps of a matrix.

    The findings report how many sweeps were measured, and which sweeps ended because the client was the limit. A
    warning reports simulated servers with different clock speeds.

    `name` is a function that returns the displayed name of a cell.
    """
    if not sweeps:
        return []
    states = Counter(sweep.state for sweep in sweeps)
    missing = "".join(f"; {number} {state}" for state, number in states.items() if state != "measured")
    measured = f"{states['measured']} of {pluralise(len(sweeps), 'sweep')} measured{missing}."
    result = [Finding("sweeps", "warning" if missing else "ok", measured, "sweeps")]
    speeds = {sweep.result.speed for sweep in sweeps if sweep.result and sweep.result.steps}
    if len(speeds) > 1:
        text = f"Sweeps ran{times_speed(*speeds)}: their figures cannot be compared, and a frontier shows one speed."
        result.append(Finding("speed", "warning", text, "sweeps"))
    limited = [sweep for sweep in sweeps if sweep.result and sweep.result.ended == "client"]
    texts = [f"{name(sweep)}: {ended_sentence(sweep.result)}" for sweep in limited if sweep.result]
    return [*result, *(Finding("client", "error", text) for text in texts)]


def sweep_chips(sweeps: Sequence[CellSweep]) -> list[Chip]:
    """Return the status chips on the sweeps of a matrix: how many of them were measured, and how many are valid."""
    if not sweeps:
        return []
    measured = [sweep for sweep in sweeps if sweep.state == "measured"]
    steps = [step for sweep in sweeps if sweep.result for step in sweep.result.steps]
    valid = sum(step.client == "ok" for step in steps)
    every = len(measured) == len(sweeps)
    return [
        Chip("Sweeps", f"{len(measured):,} of {len(sweeps):,} measured", "ok" if every else "warning"),
        Chip("Sweep runs", f"{valid:,} of {len(steps):,} valid", "ok" if valid == len(steps) > 0 else "error"),
    ]


def sweep_cards(sweeps: Sequence[CellSweep], name: Callable[[CellName], str]) -> list[Block]:
    """Return cards with the best results among the sweeps of each model and workload.

    There are no cards for a model and workload with only one sweep, or with sweeps at different clock speeds. `name` is
    a function that returns the displayed name of a cell.
    """
    groups: dict[tuple[str, str], list[CellSweep]] = {}
    for sweep in sweeps:
        groups.setdefault((sweep.model, sweep.workload), []).append(sweep)
    blocks = []
    for group in groups.values():
        known = {name(sweep.cell): sweep.result for sweep in group if sweep.result and sweep.result.steps}
        folders = {id(sweep.result): sweep.folder for sweep in group}
        blocks += best_cards(known, partial(_link, folders))
    return blocks


def _link(folders: Mapping[int, str], result: SweepResult, step: str) -> str:
    """Return the link to the report of a step. `folders` maps the id of each sweep's result to the sweep's folder."""
    return f"{folders[id(result)]}/{step}/report.html"


def sweep_rows(sweeps: Sequence[CellSweep]) -> tuple[dict[str, ColumnKind], list[tuple[CellName, Cells]]]:
    """Return the headings and rows of the table of sweeps, with one row per sweep.

    A row contains these cells:

    - The state of the sweep.
    - The capacity, with a link to the page that shows the frontier of all sweeps of the workload.
    - The largest load that met the objectives, and the figures at this load. They link to the report of the run at this
      load.
    """
    known = [sweep.result for sweep in sweeps if sweep.result and sweep.result.steps]
    rows = list[tuple[CellName, Cells]]()
    for sweep in sweeps:
        result, step = sweep.result, best_step(sweep.result) if sweep.result else None
        capacity = TableCell(UNKNOWN)
        if result and result.capacity is not None:
            text, note = capacity_texts(result)
            capacity = TableCell(f"{text} {UNITS[result.over]}", result.capacity, note, link=sweep.page)
        report = f"{sweep.folder}/{step.folder}/report.html" if step else ""
        load = TableCell(UNKNOWN)
        if result and step:
            load = TableCell(format_load(result.over, step.load), step.load, link=report)
        cells = [load]
        for field in (throughput_field(known), *COMPARED):
            value = getattr(step, field) if step else None
            text = step_text(step, result, field) if result and step else UNKNOWN
            cells.append(TableCell(text, value, link=report if value else ""))
        rows.append((sweep.cell, (sweep.state, capacity, *cells)))
    heads: dict[str, ColumnKind] = {
        "state": "text",
        **number_columns("capacity", "at", throughput_title(*known), "tokens/s per user"),
    }
    return heads | number_columns("cost per M tokens", "J per token"), rows
