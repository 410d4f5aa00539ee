"""`loadgen matrix`: servers x hosts x models x workloads, each measured several times, one report for all."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from loadgen.cli.output import Output, write_text
from loadgen.errors import (
    EXIT_CLIENT_LIMITED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REQUESTS_FAILED,
    EXIT_SERVER,
    OutputError,
    PlanError,
)

if TYPE_CHECKING:
    from analysis.matrix import Kept, Measured
    from loadgen.matrix import Repeat
    from loadgen.matrix.run import Matrix
    from loadgen.matrix.state import Line
    from loadgen.prepare import OnProgress

SAFE = "What was measured is safe in the run files: make room, and name the folder to make the report again."


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
    output = Output(as_json=as_json, quiet=quiet)
    if plan.is_dir():
        if dry_run or resume or out:
            raise PlanError(f"{plan} is a folder: its report is made again", "To measure, name the plan file.")
        raise Exit(write_report(plan, output))
    from loadgen.matrix.plan import read_matrix_plan
    from loadgen.matrix.run import matrix_of

    asked = read_matrix_plan(plan)
    folder = out or Path("runs") / f"matrix-{asked.name}"
    wanted = matrix_of(asked, folder, ["loadgen", *sys.argv[1:]])
    if dry_run:
        from loadgen.matrix.estimate import dry_run as text
        from loadgen.matrix.state import read_lines

        width = max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 120
        print(text(asked, wanted.starts, read_lines(folder), wanted.done(), width=width))
        return
    interrupted = _measure(wanted, output, resume=resume)
    code = write_report(folder, output, interrupted=interrupted)
    if interrupted:
        print(f"loadgen: interrupted; go on with: loadgen matrix {plan} --resume --out {folder}", file=sys.stderr)
    raise Exit(code)


def write_report(folder: Path, output: Output, *, interrupted: bool = False) -> int:
    """Write matrix.json and matrix.html from the files in `folder`, print them as asked; the exit code they lead to.

    Raises OutputError when there is no matrix in the folder, or it cannot be written.
    """
    from analysis.matrix import matrix
    from analysis.matrix_text import render as as_text
    from analysis.report.matrix import render

    kept, measured = _read(folder)
    found = matrix(kept, measured)
    text = json.dumps(found, indent=2) + "\n"
    write_text(folder / "matrix.json", text, SAFE)
    write_text(folder / "matrix.html", render(found, measured), SAFE)
    terminal = sys.stdout.isatty()
    width = min(140, shutil.get_terminal_size().columns) if terminal else 120
    page = folder / "matrix.html"
    output.document(text, lambda: f"\n{as_text(found, width=width, colour=terminal)}\n{page}")
    return EXIT_INTERRUPTED if interrupted else exit_code(found)


def exit_code(found: Mapping[str, Any]) -> int:
    """3 a run could not be made, 1 a request was not complete, 5 the client was the limit, 0 otherwise."""
    cells = found["cells"]
    if found["failures"]:
        return EXIT_SERVER
    if any(cell["requests"][state] for cell in cells for state in ("truncated", "failed", "dropped")):
        return EXIT_REQUESTS_FAILED
    return EXIT_CLIENT_LIMITED if any("limited" in cell["verdicts"] for cell in cells) else EXIT_OK


def _measure(wanted: Matrix, output: Output, *, resume: bool) -> bool:
    """Run what is left; whether it was interrupted."""
    from loadgen.matrix import estimate
    from loadgen.matrix.run import Watcher, run
    from loadgen.matrix.state import journal

    @contextmanager
    def progress(requests: int | None) -> Iterator[OnProgress]:
        with output.progress(requests, plain=False) as display:
            yield display.show

    with journal(wanted.folder, wanted.resolved, resume=resume) as book:
        done = wanted.done()
        left_s = estimate.total_s(wanted.plan, wanted.starts, book.lines, done)
        output.say(estimate.heading(wanted.plan, wanted.starts))
        over = f"{len(done)} runs are done; the others take" if done else "This takes"
        output.say(f"{over} {estimate.in_words(left_s)}. {wanted.folder}")
        return run(wanted, book, Watcher(output.say, progress, _after_run))


def _after_run(folder: Path) -> str:
    """Write summary.json beside a run that has ended; what came back, in a few words."""
    from analysis.gather import load
    from analysis.matrix_text import in_a_line
    from analysis.metrics import summarise

    run, frame = load(folder)
    summary = summarise(run, frame)
    write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n", SAFE)
    return in_a_line(summary)


def _read(folder: Path) -> tuple[Kept, list[Measured]]:
    """Everything that the files of a matrix say."""
    from analysis.matrix import Kept
    from loadgen.matrix import cells, skipped, starts
    from loadgen.matrix.plan import MatrixPlan
    from loadgen.matrix.state import beginnings, finished, last_failures, read_lines

    lines = read_lines(folder)
    begun = next((line for line in lines if line["type"] == "plan"), None)
    if begun is None:
        raise OutputError(f"{folder} holds no matrix.", "Give a folder that holds matrix.jsonl, or a plan file.")
    plan = MatrixPlan(**{name: value for name, value in begun["plan"].items() if name != "hosts_found"})
    order = cells(plan)
    done = [repeat for start in starts(plan) for repeat in start.repeats if finished(folder, repeat)]
    done.sort(key=lambda repeat: (order.index(repeat.cell), repeat.number))
    failures = [line for repeat, line in last_failures(lines).items() if repeat not in done]
    kept = Kept(
        plan=begun["plan"],
        cells=order,
        skipped=skipped(plan),
        failures=failures,
        starts=[line for line in lines if line["type"] == "up"],
        started_at=str(begun["at"]),
        version=str(begun["version"]),
        interrupted=len(done) + len(failures) < len(order) * plan.repeats,
    )
    began = beginnings(lines)
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
    start, place = (None, None) if began is None else (int(began["start"]), int(began["place"]))
    return Measured(repeat.cell, repeat.number, str(repeat.folder), start, place, summary, samples, lengths)
