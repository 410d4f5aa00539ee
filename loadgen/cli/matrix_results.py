"""What a matrix leaves behind besides its runs: their summaries, matrix.json, matrix.html and the table."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.cli.output import write_text
from loadgen.errors import (
    EXIT_CLIENT_LIMITED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REQUESTS_FAILED,
    EXIT_SERVER,
    OutputError,
)

if TYPE_CHECKING:
    from analysis.matrix import Kept, Measured
    from loadgen.cli.output import Output
    from loadgen.matrix.cells import Cell, Repeat
    from loadgen.matrix.state import Line

Found = Mapping[str, Any]
SAFE = "What was measured is safe in the run files: make room, and name the folder to make the report again."


def after_run(folder: Path) -> str:
    """Write summary.json beside a run that has ended; what came back, in a few words."""
    from analysis.gather import load
    from analysis.matrix_text import in_a_line
    from analysis.metrics import summarise

    run, frame = load(folder)
    summary = summarise(run, frame)
    write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n", SAFE)
    return in_a_line(summary)


def write_report(folder: Path, output: Output, *, interrupted: bool = False) -> int:
    """Write matrix.json and matrix.html from the files in `folder`, print them as asked; the exit code they lead to.

    Raises OutputError when there is no matrix in the folder, or it cannot be written.
    """
    from analysis.matrix import matrix
    from analysis.report.matrix import render

    kept, measured = _read(folder)
    found = matrix(kept, measured)
    text = json.dumps(found, indent=2) + "\n"
    write_text(folder / "matrix.json", text, SAFE)
    write_text(folder / "matrix.html", render(found, measured), SAFE)
    output.document(text, lambda: f"\n{_as_text(found)}\n{folder / 'matrix.html'}")
    return EXIT_INTERRUPTED if interrupted else exit_code(found)


def exit_code(found: Found) -> int:
    """3 a run could not be made, 1 a request was not complete, 5 the client was the limit, 0 otherwise."""
    cells = found["cells"]
    reached = {
        EXIT_SERVER: bool(found["failures"]),
        EXIT_REQUESTS_FAILED: any(
            cell["requests"][state] for cell in cells for state in ("truncated", "failed", "dropped")
        ),
        EXIT_CLIENT_LIMITED: any("limited" in cell["verdicts"] for cell in cells),
    }
    return next((code for code, holds in reached.items() if holds), EXIT_OK)


def _read(folder: Path) -> tuple[Kept, list[Measured]]:
    """Everything that the files of a matrix say."""
    from analysis.matrix import Kept
    from loadgen.matrix.cells import cells, skipped, starts
    from loadgen.matrix.plan import MatrixPlan
    from loadgen.matrix.state import beginnings, finished, last_failures, read_lines

    lines = read_lines(folder)
    begun = next((line for line in lines if line["type"] == "plan"), None)
    if begun is None:
        raise OutputError(f"{folder} holds no matrix.", "Give a folder that holds matrix.jsonl, or a plan file.")
    plan = MatrixPlan(**{name: value for name, value in begun["plan"].items() if name != "hosts_found"})
    done = [repeat for start in starts(plan) for repeat in start.repeats if finished(folder, repeat)]
    order = {cell: place for place, cell in enumerate(cells(plan))}
    done.sort(key=lambda repeat: (order[repeat.cell], repeat.number))
    began = beginnings(lines)
    failures = [line for repeat, line in last_failures(lines).items() if repeat not in done]
    kept = Kept(
        plan=begun["plan"],
        cells=[_key(cell) for cell in order],
        skipped=skipped(plan),
        failures=failures,
        starts=[line for line in lines if line["type"] == "up"],
        started_at=str(begun["at"]),
        version=str(begun["version"]),
        interrupted=len(done) + len(failures) < len(order) * plan.repeats,
    )
    return kept, [_measured(folder, repeat, began.get(repeat)) for repeat in done]


def _measured(folder: Path, repeat: Repeat, began: Line | None) -> Measured:
    """One run at a time: what is left of its Records in the end is a summary and a few samples per request."""
    from analysis.gather import load
    from analysis.matrix import Measured, samples_of
    from analysis.metrics import summarise

    run, frame = load(folder / repeat.folder)
    samples, lengths = samples_of(frame)
    summary = summarise(run, frame)
    beside = folder / repeat.folder / "summary.json"
    if not beside.exists():  # killed between the run's end and its summary
        write_text(beside, json.dumps(summary, indent=2) + "\n", SAFE)
    return Measured(
        cell=_key(repeat.cell),
        repeat=repeat.number,
        folder=str(repeat.folder),
        start=None if began is None else int(began["start"]),
        place=None if began is None else int(began["place"]),
        summary=summary,
        samples=samples,
        lengths=lengths,
    )


def _key(cell: Cell) -> tuple[str, str, str, str]:
    return cell.server, cell.host, cell.model, cell.workload


def _as_text(found: Found) -> str:
    from analysis.matrix_text import render

    terminal = sys.stdout.isatty()
    width = min(140, shutil.get_terminal_size().columns) if terminal else 120
    return render(found, width=width, colour=terminal)
