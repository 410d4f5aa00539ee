"""Builds the findings on the sweeps of a matrix, and the table of their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from loadgen.analysis.format import UNKNOWN, interval_text, pluralise, significant, times_speed
from loadgen.analysis.matrix import CellName, CellSweep
from loadgen.analysis.report import ColumnKind, Finding, TableCell
from loadgen.analysis.report.tables import Cells, number_columns
from loadgen.analysis.sweep import best_step, throughput_field
from loadgen.analysis.sweep.document import COMPARED, UNITS, ended_sentence, throughput_title


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


def sweep_rows(sweeps: Sequence[CellSweep]) -> tuple[dict[str, ColumnKind], list[tuple[CellName, Cells]]]:
    """Return the headings and rows of the table of sweeps.

    A row starts with the state and the capacity of the sweep. The capacity links to the page with the frontier of all
    sweeps of the workload. The other figures are measured at the largest load that met the objectives, and link to the
    report of the run at that load.
    """
    known = [sweep.result for sweep in sweeps if sweep.result and sweep.result.steps]
    rows = list[tuple[CellName, Cells]]()
    for sweep in sweeps:
        result, step = sweep.result, best_step(sweep.result) if sweep.result else None
        capacity = TableCell(UNKNOWN)
        if result and result.capacity is not None:
            known_ends = [end for end in (result.capacity_low, result.capacity_high) if end is not None]
            interval = ""
            if known_ends:
                interval = interval_text(*(significant(end) for end in (known_ends[0], known_ends[-1])))
            text = f"{significant(result.capacity)} {UNITS[result.over]}"
            capacity = TableCell(text, result.capacity, interval, link=sweep.page)
        report = f"{sweep.folder}/{step.folder}/report.html" if step else ""
        values = [None if step is None else getattr(step, name) for name in (throughput_field(known), *COMPARED)]
        cells = (TableCell(significant(value), value, link=report if value else "") for value in values)
        rows.append((sweep.cell, (sweep.state, capacity, *cells)))
    heads: dict[str, ColumnKind] = {
        "state": "text",
        **number_columns("capacity", throughput_title(*known), "tokens/s per user"),
    }
    return heads | number_columns("cost per M tokens", "J per token"), rows
