"""The command `matrix`: measure several servers, hosts, models and workloads, with repeats, and write one report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from loadgen import errors
from loadgen.cli.output import Output, print_error, screen_size
from loadgen.cli.streams import results_are_kept
from loadgen.cli.sweep import exit_code as sweep_exit_code
from loadgen.errors import PlanError

if TYPE_CHECKING:
    from loadgen.analysis.matrix import MatrixSummary


MAX_TABLE_WIDTH = 140
"""Maximum width of the tables of a matrix, in characters."""


def matrix(
    plan: Annotated[
        Path,
        Argument(
            help="Matrix plan (TOML), or the folder of a matrix, to write its report again.",
            show_default=False,
        ),
    ],
    dry_run: Annotated[
        bool, Option("--dry-run", help="Start nothing; print the order of runs and their estimated duration.")
    ] = False,
    resume: Annotated[
        bool, Option("--resume", help="Continue an interrupted matrix, and retry runs that failed.")
    ] = False,
    out: Annotated[Path | None, Option(help="Folder of the matrix. Default: runs/matrix-<name>.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print matrix.json and nothing else.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print only failures.")] = False,
) -> None:
    """Measure several servers, hosts, models and workloads.

    The servers are started one after the other, and every workload is measured on each. If a cell fails, its reason is
    recorded and the matrix continues. --resume continues an interrupted matrix without repeating finished runs. A
    workload with `sweep` finds the capacity of each server. Exit codes: 0 all complete; 1 some requests failed or were
    rejected or truncated; 2 mistake in the plan, or usage error; 3 a server did not start, or a run was not possible; 5
    the client was the limit; 130 interrupted. If none of these apply, the exit code is that of the first sweep that did
    not succeed.
    """
    output = Output(as_json=as_json, quiet=quiet)
    if plan.is_dir():
        if dry_run or resume or out:
            raise PlanError(
                f"{plan} is a folder, but --dry-run, --resume and --out need a plan file",
                "Name the plan file to measure, or leave these options out to write the report again.",
            )
        raise Exit(write_report(plan, output))
    from loadgen.studies.matrix import build_matrix, read_lines, read_matrix_plan
    from loadgen.studies.matrix.estimate import dry_run_text
    from loadgen.studies.matrix.run import check_sweeps, measure_matrix

    matrix_plan = read_matrix_plan(plan)
    check_sweeps(matrix_plan)
    folder = out or Path("runs") / f"matrix-{matrix_plan.name}"
    resolved = build_matrix(matrix_plan, folder, ["loadgen", *sys.argv[1:]])
    if dry_run:
        width, _ = screen_size(sys.stdout, most=MAX_TABLE_WIDTH, default=120)
        print(dry_run_text(resolved, read_lines(folder), resolved.done(), width=width))
        return
    interrupted = measure_matrix(resolved, output, resume=resume)
    results_are_kept(folder, text_only=not as_json)
    code = write_report(folder, output, interrupted=interrupted)
    if interrupted:
        print(f"loadgen: interrupted; continue with: loadgen matrix {plan} --resume --out {folder}", file=sys.stderr)
    raise Exit(code)


def write_report(folder: Path, output: Output, *, interrupted: bool = False) -> int:
    """Write and print matrix.json and matrix.html for the results in `folder`. Return the exit code.

    With `interrupted`, the exit code is that of an interrupted command. Raises OutputError if the folder does not
    contain a matrix, or if a file cannot be written.
    """
    from loadgen.analysis.format import printable
    from loadgen.analysis.report import terminal
    from loadgen.studies.matrix.result import write_matrix

    report, text = write_matrix(folder)
    summary = report.summary
    width, colour = screen_size(sys.stdout, most=MAX_TABLE_WIDTH, default=120)
    pages = [*sorted({sweep.page for sweep in summary.sweeps if (folder / sweep.page).exists()}), "matrix.html"]
    files = "\n".join(printable(str(folder / page)) for page in pages)
    output.document(text, lambda: f"\n{terminal.render(report.brief_document(), width=width, colour=colour)}\n{files}")
    if output.quiet:
        for finding in report.findings():
            # The command itself prints how to continue an interrupted matrix.
            if finding.level in ("warning", "error") and finding.id != "interrupted":
                print_error(finding.sentence)
    return errors.EXIT_INTERRUPTED if interrupted else exit_code(summary)


def exit_code(summary: MatrixSummary) -> int:
    """Return the exit code of a matrix.

    The first reason that applies decides:

    - 3: a run was not possible.
    - 5: this machine could not send a request.
    - 1: a request was not complete.
    - 5: the client was the limit for another reason.
    - The exit code of the first sweep that did not succeed.
    - 0: none of these reasons applies.
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
