"""Reads the files of a matrix, and writes matrix.json, matrix.html and the frontier pages of its sweeps.

A frontier page belongs to one workload. It plots throughput against speed per user, with one point for each load of
every sweep.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.errors import OutputError
from loadgen.results import is_sweep, write_page, write_summary, write_text
from loadgen.studies.matrix import (
    MatrixPlan,
    Repeat,
    is_finished,
    newest_lines,
    plan_cells,
    plan_starts,
    read_lines,
    skipped_cells,
    sweep_options,
)
from loadgen.studies.sweep.result import read_sweep, write_sweeps

if TYPE_CHECKING:
    from loadgen.analysis.compare import ComparedRun
    from loadgen.analysis.matrix import CellRunData, CellSweep, MatrixSummary
    from loadgen.analysis.matrix.document import MatrixReport
    from loadgen.journal import JournalLine

RESULTS_ARE_SAFE = (
    "The measurements are safe in the run files. Free some disk space, and name the folder to write the report again."
)


def read_matrix(folder: Path) -> tuple[MatrixSummary, list[CellRunData]]:
    """Read the files of a matrix, and return its summary and the data of each run.

    Runs are read one at a time. Only the summary and a few samples of each run stay in memory. Raises OutputError if
    the matrix is missing or corrupted.
    """
    from loadgen.analysis.matrix import CellName, summarise_matrix
    from loadgen.servers.backends import BACKENDS

    lines = read_lines(folder)
    first = next((line for line in lines if line["type"] == "plan"), None)
    if first is None:
        raise OutputError(f"{folder} does not contain a matrix.", "Name a folder with a matrix.jsonl, or a plan file.")
    plan, hosts = _read_plan(folder, first)
    first["plan"] = plan.model_dump(mode="json", exclude={"hosts_file"}) | {"hosts_found": hosts}
    order = plan_cells(plan)
    repeats = [repeat for start in plan_starts(plan) for repeat in start.repeats]
    sweeps = [repeat for repeat in repeats if sweep_options(plan, repeat.cell.workload) is not None]
    sweeps.sort(key=lambda repeat: order.index(repeat.cell))
    done = [repeat for repeat in repeats if repeat not in sweeps and is_finished(folder, repeat)]
    done.sort(key=lambda repeat: (order.index(repeat.cell), repeat.number))
    begin_lines = newest_lines(lines, "begin")
    measured = [_read_cell_run(folder, repeat, begin_lines.get(repeat, {})) for repeat in done]
    failures = {
        repeat: line
        for repeat, line in newest_lines(lines, "begin", "failure").items()
        if line["type"] == "failure" and repeat in repeats and not is_finished(folder, repeat)
    }
    servers = {server.name for server in plan.servers}
    summary = summarise_matrix(
        first,
        measured,
        order=[CellName(*cell) for cell in order if sweep_options(plan, cell.workload) is None],
        sweeps=[_cell_sweep(folder, repeat, failed=repeat in failures) for repeat in sweeps],
        skipped=skipped_cells(plan),
        failed=list(failures.values()),
        starts=[line for line in lines if line["type"] == "up" and line["server"] in servers and line["host"] in hosts],
        titles={name: backend.title for name, backend in BACKENDS.items()},
    )
    return summary, measured


def write_matrix(folder: Path) -> tuple[MatrixReport, str]:
    """Write matrix.json, matrix.html and the frontier pages. Return the report and the content of matrix.json.

    Raises OutputError if the folder does not contain a matrix, or if a file cannot be written.
    """
    import msgspec

    from loadgen.analysis.matrix.document import MatrixReport
    from loadgen.analysis.report.page import render

    summary, measured = read_matrix(folder)
    _write_frontiers(folder, summary)
    report = MatrixReport(summary)
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n"
    write_text(folder / "matrix.json", text, RESULTS_ARE_SAFE)
    write_text(folder / "matrix.html", render(report.page_document(measured)), RESULTS_ARE_SAFE)
    return report, text


def summarise_repeat(folder: Path) -> str:
    """Return one line with the result of a finished run or sweep. For a run, also write its summary and report."""
    from loadgen.analysis.matrix.document import one_line_summary  # imports numpy, so not before the first run
    from loadgen.analysis.sweep.document import capacity_sentence

    if is_sweep(folder):
        return capacity_sentence(read_sweep(folder)).rstrip(".")
    return one_line_summary(_summarise_run(folder, rewrite=True).summary)


def _summarise_run(folder: Path, *, rewrite: bool) -> ComparedRun:
    """Read a run, and write its summary and report if they are missing or if `rewrite` is set."""
    from loadgen.analysis.compare import read_run
    from loadgen.analysis.report.run_document import prepare_run

    result = read_run(folder)
    if rewrite or not (folder / "summary.json").exists():  # missing if the matrix was killed after the run
        write_summary(folder, result.summary, RESULTS_ARE_SAFE)
    if rewrite or not (folder / "report.html").exists():
        write_page([prepare_run(result.run, result.frame, result.summary)], folder / "report.html", [])
    return result


def _write_frontiers(folder: Path, summary: MatrixSummary) -> None:
    """Write one frontier page for each workload with sweeps. The page compares these sweeps.

    Sweeps of simulated servers with different clock speeds cannot be compared. A page therefore contains only the first
    sweep of the workload and further sweeps with the same clock speed.
    """
    for page in dict.fromkeys(sweep.page for sweep in summary.sweeps):
        sweeps = {
            _sweep_name(summary, sweep): (folder / sweep.folder, sweep.result)
            for sweep in summary.sweeps
            if sweep.page == page and sweep.result and sweep.result.steps
        }
        if sweeps:
            speed = next(iter(sweeps.values()))[1].speed
            same_speed = {name: sweep for name, sweep in sweeps.items() if sweep[1].speed == speed}
            write_sweeps(same_speed, folder / page)


def _sweep_name(summary: MatrixSummary, cell: CellSweep) -> str:
    """Return the name of a sweep, which consists of the server, the host and the model.

    The host is left out if the matrix has only one host. The model is left out if the matrix has only one model.
    """
    counts = {"server": 2, "host": len(summary.hosts), "model": len(summary.models)}
    return ", ".join(getattr(cell, name) for name, count in counts.items() if count > 1)


def _read_plan(folder: Path, line: JournalLine) -> tuple[MatrixPlan, dict[str, dict[str, str]]]:
    """Read the plan of a matrix from a journal line. Return the plan, and a dict with the platform of each host.

    Raises OutputError if the line contains no valid plan.
    """
    from pydantic import ValidationError

    try:
        found_hosts = line["plan"].pop("hosts_found").items()
        hosts = {name: {"platform": str(host["platform"])} for name, host in found_hosts}
        plan = {name: value for name, value in line["plan"].items() if name != "seed_choice"}
        return MatrixPlan(**plan), hosts
    except (ValidationError, AttributeError, LookupError, TypeError) as error:
        raise OutputError(
            f"{folder}: the plan in matrix.jsonl is damaged: {error}", "Start again with another --out."
        ) from None


def _read_cell_run(folder: Path, repeat: Repeat, begin_line: JournalLine) -> CellRunData:
    """Return the data of a finished run of a matrix.

    `begin_line` is the journal line that was written when the run began.
    """
    from loadgen.analysis.matrix import CellName, build_cell_run

    result = _summarise_run(folder / repeat.folder, rewrite=False)
    return build_cell_run(
        CellName(*repeat.cell),
        repeat.number,
        str(repeat.folder),
        begin_line.get("start"),
        begin_line.get("place"),
        result.frame,
        result.summary,
    )


def _cell_sweep(folder: Path, repeat: Repeat, *, failed: bool) -> CellSweep:
    """Return the state of a sweep of a matrix, and its result so far.

    `failed` is true if the last attempt to measure the sweep failed.
    """
    from loadgen.analysis.matrix import CellSweep

    result = read_sweep(folder / repeat.folder) if is_sweep(folder / repeat.folder) else None
    state: Any = "not measured"
    if is_finished(folder, repeat):
        state = "measured"
    elif failed:
        state = "failed"
    elif result and result.steps:
        state = "partly measured"
    return CellSweep(
        **repeat.cell._asdict(),
        folder=str(repeat.folder),
        page=f"frontier-{repeat.cell.workload}.html",
        state=state,
        result=result,
    )
