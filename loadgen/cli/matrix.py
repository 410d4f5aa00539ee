"""`loadgen matrix`: servers x hosts x models x workloads, each measured several times, one report for all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from loadgen.errors import PlanError

if TYPE_CHECKING:
    from loadgen.cli.output import Output
    from loadgen.matrix.plan import MatrixPlan
    from loadgen.matrix.run import Matrix
    from loadgen.prepare import OnProgress


def matrix(
    plan: Annotated[
        Path,
        Argument(
            help="A plan of a matrix (TOML); or the folder of one, whose report is then made again.",
            show_default=False,
        ),
    ],
    dry_run: Annotated[
        bool, Option("--dry-run", help="Start nothing: print the order of runs, and about how long they take.")
    ] = False,
    resume: Annotated[
        bool, Option("--resume", help="Go on where an interrupted matrix stopped; what failed is tried again.")
    ] = False,
    out: Annotated[Path | None, Option(help="Folder of the matrix. Default: runs/matrix-<name>.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print matrix.json and nothing else.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Start each server on each host with each model in turn, measure every workload, and compare.

    A cell that fails is recorded with its reason and the others go on. An interrupted matrix goes on with --resume; no
    finished run is repeated.
    Exit codes: 0 all complete, 1 requests failed or were truncated, 2 plan or usage, 3 a server did not come up, or a
    run could not be made, 5 the client was the limit, 130 interrupted.
    """
    from loadgen.cli.matrix_results import write_report
    from loadgen.cli.output import Output

    output = Output(as_json=as_json, quiet=quiet)
    if plan.is_dir():
        if dry_run or resume or out:
            raise PlanError(f"{plan} is a folder: its report is made again", "To measure, name the plan file.")
        raise Exit(write_report(plan, output))
    from loadgen.matrix.plan import read_matrix_plan
    from loadgen.matrix.run import matrix_of

    asked = read_matrix_plan(plan)
    folder = out or _default_folder(asked)
    wanted = matrix_of(asked, folder, ["loadgen", *sys.argv[1:]])
    if dry_run:
        _print_dry_run(wanted)
        return
    interrupted = _measure(wanted, output, resume=resume)
    code = write_report(folder, output, interrupted=interrupted)
    if interrupted:
        print(f"loadgen: interrupted; go on with: loadgen matrix {plan} --resume --out {folder}", file=sys.stderr)
    raise Exit(code)


def _default_folder(asked: MatrixPlan) -> Path:
    return Path("runs") / f"matrix-{asked.name}"


def _measure(wanted: Matrix, output: Output, *, resume: bool) -> bool:
    """Run what is left; whether it was interrupted."""
    from loadgen.cli.matrix_results import after_run
    from loadgen.matrix import estimate
    from loadgen.matrix.run import Watcher, run
    from loadgen.matrix.state import journal
    from loadgen.matrix.text import heading

    @contextmanager
    def progress(requests: int | None) -> Iterator[OnProgress]:
        with output.progress(requests, plain=False) as display:
            yield display.show

    with journal(wanted.folder, wanted.resolved, resume=resume) as book:
        done = wanted.done()
        left_s = estimate.total_s(wanted.plan, wanted.starts, book.lines, done)
        output.say(heading(wanted.plan, wanted.starts))
        over = f"{len(done)} runs are done; the others take" if done else "This takes"
        output.say(f"{over} {estimate.in_words(left_s)}. {wanted.folder}")
        return run(wanted, book, Watcher(output.say, progress, after_run))


def _print_dry_run(wanted: Matrix) -> None:
    import shutil

    from loadgen.matrix.state import read_lines
    from loadgen.matrix.text import dry_run

    width = max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 120
    print(dry_run(wanted.plan, wanted.starts, read_lines(wanted.folder), wanted.done(), width=width))
