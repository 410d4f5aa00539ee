"""The command `matrix`: measure servers x hosts x models x workloads, with repeats, and write one report."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from loadgen import errors
from loadgen.cli.output import Output, print_error
from loadgen.cli.streams import results_are_kept
from loadgen.cli.sweep import (
    StepRunner,
    SweepTargets,
    is_sweep,
    new_sweep,
    parse_targets,
    read_sweep,
    run_steps,
    write_sweeps,
)
from loadgen.cli.sweep import exit_code as sweep_exit_code
from loadgen.errors import OutputError, PlanError
from loadgen.results import write_page, write_summary, write_text

if TYPE_CHECKING:
    from loadgen.analysis.compare import ComparedRun
    from loadgen.analysis.matrix import CellRunData, CellSweep, MatrixSummary
    from loadgen.journal import JournalLine
    from loadgen.plan import Plan
    from loadgen.studies.matrix import MatrixPlan, Repeat, SweepOptions
    from loadgen.studies.matrix.run import Matrix
    from loadgen.studies.sweep import Measure

RESULTS_ARE_SAFE = (
    "The measurements are safe in the run files. Free some disk space, and name the folder to write the report again."
)


def matrix(
    plan: Annotated[
        Path,
        Argument(
            help="Matrix plan (TOML). Alternatively the folder of a matrix, to write its report again.",
            show_default=False,
        ),
    ],
    dry_run: Annotated[
        bool, Option("--dry-run", help="Start nothing; print the order of runs and their estimated duration.")
    ] = False,
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted matrix, and retry what failed.")] = False,
    out: Annotated[Path | None, Option(help="Folder of the matrix. Default: runs/matrix-<name>.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print matrix.json and nothing else.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print only failures.")] = False,
) -> None:
    """Measure several servers, hosts, models and workloads.

    The servers are started one after the other, and every workload is measured on each. If a cell fails, its reason is
    recorded and the matrix continues. --resume continues an interrupted matrix without repeating finished runs. A
    workload with `sweep` finds the capacity of each server. Exit codes: 0 all complete; 1 requests failed, were
    rejected or truncated; 2 mistake in the plan, or usage error; 3 a server did not start, or a run was not possible; 5
    the client was the limit; 130 interrupted; otherwise that of the first sweep that did not succeed.
    """
    output = Output(as_json=as_json, quiet=quiet)
    if plan.is_dir():
        if dry_run or resume or out:
            raise PlanError(
                f"{plan} is a folder, and its report is written again without --dry-run, --resume or --out",
                "To measure, name the plan file.",
            )
        raise Exit(write_report(plan, output))
    from loadgen.studies.matrix import read_lines, read_matrix_plan
    from loadgen.studies.matrix.run import build_matrix, dry_run_text

    matrix_plan = read_matrix_plan(plan)
    _check_sweeps(matrix_plan)
    folder = out or Path("runs") / f"matrix-{matrix_plan.name}"
    resolved = build_matrix(matrix_plan, folder, ["loadgen", *sys.argv[1:]])
    if dry_run:
        width = max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 120
        print(dry_run_text(resolved, read_lines(folder), resolved.done(), width=width))
        return
    interrupted = _measure(resolved, output, resume=resume)
    results_are_kept(folder, text_only=not as_json)
    code = write_report(folder, output, interrupted=interrupted)
    if interrupted:
        print(f"loadgen: interrupted; continue with: loadgen matrix {plan} --resume --out {folder}", file=sys.stderr)
    raise Exit(code)


def write_report(folder: Path, output: Output, *, interrupted: bool = False) -> int:
    """Write matrix.json and matrix.html from the files in `folder`, print them, and return the exit code.

    Raises OutputError if the folder does not contain a matrix, or if a file cannot be written.
    """
    import msgspec

    from loadgen.analysis.format import printable
    from loadgen.analysis.matrix.document import MatrixReport
    from loadgen.analysis.report import page, terminal

    result, measured = _read(folder)
    _write_frontiers(folder, result)
    report = MatrixReport(result)
    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
    write_text(folder / "matrix.json", text, RESULTS_ARE_SAFE)
    write_text(folder / "matrix.html", page.render(report.page_document(measured)), RESULTS_ARE_SAFE)
    colour = sys.stdout.isatty()
    width = min(140, shutil.get_terminal_size().columns) if colour else 120
    pages = [*sorted({sweep.page for sweep in result.sweeps if (folder / sweep.page).exists()}), "matrix.html"]
    files = "\n".join(printable(str(folder / page)) for page in pages)
    output.document(text, lambda: f"\n{terminal.render(report.brief_document(), width=width, colour=colour)}\n{files}")
    if output.quiet:
        for finding in report.findings():
            # The command itself prints how to continue an interrupted matrix.
            if finding.level in ("warning", "error") and finding.id != "interrupted":
                print_error(finding.sentence)
    return errors.EXIT_INTERRUPTED if interrupted else exit_code(result)


def exit_code(summary: MatrixSummary) -> int:
    """Return the exit code of a matrix. The first reason that applies wins:

    3 a run was not possible; 5 this machine could not send a request; 1 a request was not complete; 5 the client was
    the limit in another way; the code of the first sweep that did not succeed; 0 otherwise.
    """
    if summary.failures:
        return errors.EXIT_SERVER
    if any(cell.errors.get("client_limit") for cell in summary.cells):
        return errors.EXIT_CLIENT_LIMITED
    incomplete = ("truncated", "failed", "rejected", "dropped")
    if any(cell.requests[state] for cell in summary.cells for state in incomplete):
        return errors.EXIT_REQUESTS_FAILED
    if any("limited" in cell.verdicts for cell in summary.cells):
        return errors.EXIT_CLIENT_LIMITED
    codes = [sweep_exit_code(sweep.result) for sweep in summary.sweeps if sweep.result]
    return next((code for code in codes if code), errors.EXIT_OK)


def _measure(matrix: Matrix, output: Output, *, resume: bool) -> bool:
    """Make the remaining runs. Return whether the matrix was interrupted."""
    from loadgen.studies.matrix import journal
    from loadgen.studies.matrix.run import format_duration, heading, remaining_s, run

    def after_run(folder: Path) -> str:
        from loadgen.analysis.matrix.document import one_line_summary  # imports numpy, so not before the first run
        from loadgen.analysis.sweep.document import capacity_sentence

        if is_sweep(folder):
            return capacity_sentence(read_sweep(folder)).rstrip(".")
        return one_line_summary(_summarised(folder, rewrite=True).summary)

    def sweep(options: SweepOptions, plan: Plan, folder: Path, measure: Measure, price: dict[str, Any]) -> bool:
        targets = _sweep_targets(options)
        settings = {"precision": options.precision, "confidence": options.confidence, "start": options.start, **price}
        with output.progress(None, plain=False) as on_progress:
            reason = run_steps(
                StepRunner(
                    sweep=new_sweep(plan, folder, targets, None),
                    targets=targets,
                    search_settings=settings,
                    measure=measure,
                    say=partial(_say_indented, output),
                    on_progress=on_progress,
                    max_runs=options.max_runs,
                    max_time_s=options.max_time_s,
                    resume=is_sweep(folder),
                )
            )
        return reason == "interrupted"

    with journal(matrix.folder, matrix.journal_plan, resume=resume) as book:
        done = matrix.done()
        subject = f"{len(done)} runs are done; the others take" if done else "This takes"
        remaining = format_duration(remaining_s(matrix, book.lines, done))
        output.say(f"{heading(matrix)}\n{subject} {remaining}. {matrix.folder}")
        return run(matrix, book, output, after_run, sweep)


def _say_indented(output: Output, line: str) -> None:
    output.say(f"    {line}")


def _sweep_targets(options: SweepOptions) -> SweepTargets:
    return parse_targets(options.objectives, options.rates, options.concurrency, options.over)


def _check_sweeps(plan: MatrixPlan) -> None:
    """Check the objectives and loads of all sweeps before any server is started. Raises PlanError."""
    from loadgen.studies.matrix import sweep_options

    for workload in plan.workloads:
        name = str(workload["name"])
        options = sweep_options(plan, name)
        if options is None:
            continue
        try:
            _sweep_targets(options)
        except PlanError as error:
            raise PlanError(f"workload {name}: {error}", error.hint) from None


def _write_frontiers(folder: Path, summary: MatrixSummary) -> None:
    """Write a frontier page per workload with its sweeps. Sweeps at another speed than the first one are left out."""
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
    """Return the server of a sweep, with its host and model if the matrix has several of them."""
    counts = {"server": 2, "host": len(summary.hosts), "model": len(summary.models)}
    return ", ".join(getattr(cell, name) for name, count in counts.items() if count > 1)


def _summarised(folder: Path, *, rewrite: bool) -> ComparedRun:
    """Read a run, and write its summary and report if they are missing or if `rewrite` is set."""
    from loadgen.analysis.compare import read_run
    from loadgen.analysis.report.run_document import prepare_run

    result = read_run(folder)
    if rewrite or not (folder / "summary.json").exists():  # missing if the matrix was killed after the run
        write_summary(folder, result.summary, RESULTS_ARE_SAFE)
    if rewrite or not (folder / "report.html").exists():
        write_page([prepare_run(result.run, result.frame, result.summary)], folder / "report.html", [])
    return result


def _read(folder: Path) -> tuple[MatrixSummary, list[CellRunData]]:
    """Read the files of a matrix. Runs are read one at a time, and only their summary and a few samples are kept.

    Raises OutputError if the folder contains no matrix, or a damaged one.
    """
    from loadgen.analysis.matrix import CellName, summarise_matrix
    from loadgen.servers.backends import BACKENDS
    from loadgen.studies.matrix import (
        is_finished,
        newest_lines,
        plan_cells,
        plan_starts,
        read_lines,
        skipped_cells,
        sweep_options,
    )

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


def _read_plan(folder: Path, line: JournalLine) -> tuple[MatrixPlan, dict[str, dict[str, str]]]:
    """Return the plan of a matrix and the platform of each host from a journal line. Raises OutputError."""
    from pydantic import ValidationError

    from loadgen.studies.matrix import MatrixPlan

    try:
        found_hosts = line["plan"].pop("hosts_found").items()
        hosts = {name: {"platform": str(host["platform"])} for name, host in found_hosts}
        return MatrixPlan(**line["plan"]), hosts
    except (ValidationError, AttributeError, LookupError, TypeError) as error:
        raise OutputError(
            f"{folder}: the plan in matrix.jsonl is damaged: {error}", "Start again with another --out."
        ) from None


def _read_cell_run(folder: Path, repeat: Repeat, begin_line: JournalLine) -> CellRunData:
    """Read one finished run of a matrix."""
    from loadgen.analysis.matrix import CellName, build_cell_run

    result = _summarised(folder / repeat.folder, rewrite=False)
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
    """Return the state and the result so far of a sweep in the matrix."""
    from loadgen.analysis.matrix import CellSweep
    from loadgen.studies.matrix import is_finished

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
