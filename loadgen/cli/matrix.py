"""`loadgen matrix`: servers x hosts x models x workloads, each measured several times, one report for all."""

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
from loadgen.cli.sweep import exit_code as sweep_code
from loadgen.cli.sweep import is_sweep, new_sweep, read_sweep, run_steps, write_sweeps
from loadgen.cli.sweep import parse_targets as grown
from loadgen.errors import OutputError, PlanError
from loadgen.results import write_page, write_summary, write_text

if TYPE_CHECKING:
    from loadgen.analysis.compare import ComparedRun
    from loadgen.analysis.matrix import CellRunData, CellSweep, MatrixSummary
    from loadgen.analysis.objectives import Objective
    from loadgen.plan import Plan
    from loadgen.studies.matrix import MatrixPlan, Repeat, SweepOptions
    from loadgen.studies.matrix.run import Matrix
    from loadgen.studies.sweep import Measure, Over

RESULTS_ARE_SAFE = (
    "What was measured is safe in the run files: make room, and name the folder to make the report again."
)


def matrix(
    plan: Annotated[
        Path,
        Argument(
            help="A plan of a matrix (TOML); or the folder of one, whose report is then made again.", show_default=False
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
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but what failed.")] = False,
) -> None:
    """Start each server on each host with each model in turn, measure every workload, and compare.

    A cell that fails is recorded with its reason and the others go on. An interrupted matrix goes on with --resume; no
    finished run is repeated. A workload with `sweep` finds each server's capacity.
    Exit codes: 0 all complete, 1 requests failed, were rejected or truncated, 2 plan or usage, 3 a server did not come
    up, or a run could not be made, 5 the client was the limit, 130 interrupted; else that of the first sweep that has
    one.
    """
    output = Output(as_json=as_json, quiet=quiet)
    if plan.is_dir():
        if dry_run or resume or out:
            raise PlanError(f"{plan} is a folder: its report is made again", "To measure, name the plan file.")
        raise Exit(write_report(plan, output))
    from loadgen.studies.matrix import read_lines, read_matrix_plan
    from loadgen.studies.matrix.run import build_matrix, dry_run_text

    requested = read_matrix_plan(plan)
    _check_sweeps(requested)
    folder = out or Path("runs") / f"matrix-{requested.name}"
    wanted = build_matrix(requested, folder, ["loadgen", *sys.argv[1:]])
    if dry_run:
        width = max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 120
        print(dry_run_text(wanted, read_lines(folder), wanted.done(), width=width))
        return
    interrupted = _measure(wanted, output, resume=resume)
    results_are_kept(folder, text_only=not as_json)
    code = write_report(folder, output, interrupted=interrupted)
    if interrupted:
        print(f"loadgen: interrupted; go on with: loadgen matrix {plan} --resume --out {folder}", file=sys.stderr)
    raise Exit(code)


def write_report(folder: Path, output: Output, *, interrupted: bool = False) -> int:
    """Write matrix.json and matrix.html from the files in `folder`, print them as asked; the exit code they lead to.

    Raises OutputError when there is no matrix in the folder, or it cannot be written.
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
    where = "\n".join(printable(str(folder / page)) for page in pages)
    output.document(text, lambda: f"\n{terminal.render(report.brief_document(), width=width, colour=colour)}\n{where}")
    if output.quiet:
        for finding in report.findings():
            if (
                finding.level in ("warning", "error") and finding.id != "interrupted"
            ):  # of which there is a line with the hint
                print_error(finding.sentence)
    return errors.EXIT_INTERRUPTED if interrupted else exit_code(result)


def exit_code(found: MatrixSummary) -> int:
    """Return 3 if a run could not be made, 5 if this machine could not send a request, 1 if a request was not complete,
    5 if the client was the limit in another way, 0 otherwise."""
    if found.failures:
        return errors.EXIT_SERVER
    if any(cell.errors.get("client_limit") for cell in found.cells):
        return errors.EXIT_CLIENT_LIMITED
    if any(cell.requests[state] for cell in found.cells for state in ("truncated", "failed", "rejected", "dropped")):
        return errors.EXIT_REQUESTS_FAILED
    if any("limited" in cell.verdicts for cell in found.cells):
        return errors.EXIT_CLIENT_LIMITED
    codes = [sweep_code(sweep.result) for sweep in found.sweeps if sweep.result]
    return next((code for code in codes if code), errors.EXIT_OK)


def _measure(wanted: Matrix, output: Output, *, resume: bool) -> bool:
    """Run what is left; whether it was interrupted."""
    from loadgen.studies.matrix import journal
    from loadgen.studies.matrix.run import format_duration, heading, remaining_s, run

    def after_run(folder: Path) -> str:
        from loadgen.analysis.matrix.document import one_line_summary  # numpy, which is not loaded before the first run
        from loadgen.analysis.sweep.document import capacity_sentence

        return (
            capacity_sentence(read_sweep(folder)).rstrip(".")
            if is_sweep(folder)
            else one_line_summary(_summarised(folder, anew=True).summary)
        )

    def sweep(swept: SweepOptions, plan: Plan, folder: Path, serve: Measure, price: dict[str, Any]) -> bool:
        judged, loads, over = _sweep_targets(swept)
        settled = {"precision": swept.precision, "confidence": swept.confidence, "start": swept.start, **price}
        wanted = new_sweep(plan, over, folder, loads, judged, None)
        with output.progress(None, plain=False) as show:
            maximum = swept.max_runs, swept.max_time_s
            say = partial(_say_indented, output)
            why = run_steps(wanted, judged, settled, serve, say, show, resume=is_sweep(folder), most=maximum)
        return why == "interrupted"

    with journal(wanted.folder, wanted.journal_plan, resume=resume) as book:
        done = wanted.done()
        over = f"{len(done)} runs are done; the others take" if done else "This takes"
        takes = format_duration(remaining_s(wanted, book.lines, done))
        output.say(f"{heading(wanted)}\n{over} {takes}. {wanted.folder}")
        return run(wanted, book, output, after_run, sweep)


def _say_indented(output: Output, line: str) -> None:
    output.say(f"    {line}")


def _sweep_targets(swept: SweepOptions) -> tuple[list[Objective], tuple[float, ...], Over]:
    return grown(swept.objectives, swept.rates, swept.concurrency, swept.over)


def _check_sweeps(plan: MatrixPlan) -> None:
    """What they ask for, before anything is started. Raises PlanError."""
    from loadgen.studies.matrix import sweep_options

    for name in (str(workload["name"]) for workload in plan.workloads):
        if (swept := sweep_options(plan, name)) is not None:
            try:
                _sweep_targets(swept)
            except PlanError as error:
                raise PlanError(f"workload {name}: {error}", error.hint) from None


def _write_frontiers(folder: Path, found: MatrixSummary) -> None:
    """Write one page for all sweeps of a workload, or for those at the speed of the first one."""
    for page in dict.fromkeys(sweep.page for sweep in found.sweeps):
        of = [sweep for sweep in found.sweeps if sweep.page == page and sweep.result and sweep.result.steps]
        named = {_sweep_name(found, each): (folder / each.folder, each.result) for each in of if each.result}
        if named:
            speed = next(iter(named.values()))[1].speed
            write_sweeps({name: each for name, each in named.items() if each[1].speed == speed}, folder / page)


def _sweep_name(found: MatrixSummary, cell: CellSweep) -> str:
    """Told by the names of which there are several."""
    many = {"server": 2, "host": len(found.hosts), "model": len(found.models)}
    return ", ".join(getattr(cell, name) for name, number in many.items() if number > 1)


def _summarised(folder: Path, *, anew: bool) -> ComparedRun:
    """A run, whose summary and page are written beside it; where they are there already, only `anew`."""
    from loadgen.analysis.compare import read_run
    from loadgen.analysis.report.run_document import prepare_run

    result = read_run(folder)
    if anew or not (folder / "summary.json").exists():  # killed between the run's end and its summary
        write_summary(folder, result.summary, RESULTS_ARE_SAFE)
    if anew or not (folder / "report.html").exists():
        write_page([prepare_run(result.run, result.frame, result.summary)], folder / "report.html", [])
    return result


def _read(folder: Path) -> tuple[MatrixSummary, list[CellRunData]]:
    """Everything that the files of a matrix say; one run at a time, of which a summary and a few samples are left."""
    from pydantic import ValidationError

    from loadgen.analysis.matrix import CellName, build_cell_run, summarise_matrix
    from loadgen.servers.backends import BACKENDS
    from loadgen.studies.matrix import (
        MatrixPlan,
        is_finished,
        newest_lines,
        plan_cells,
        plan_starts,
        read_lines,
        skipped_cells,
        sweep_options,
    )

    lines = read_lines(folder)
    begun = next((line for line in lines if line["type"] == "plan"), None)
    if begun is None:
        raise OutputError(f"{folder} holds no matrix.", "Give a folder that holds matrix.jsonl, or a plan file.")
    try:
        result = begun["plan"].pop("hosts_found").items()
        hosts = {name: {"platform": str(host["platform"])} for name, host in result}
        plan = MatrixPlan(**begun["plan"])
    except (ValidationError, AttributeError, LookupError, TypeError) as error:
        raise OutputError(f"{folder}: the plan in matrix.jsonl is damaged: {error}", "Begin anew with --out.") from None
    begun["plan"] = plan.model_dump(mode="json", exclude={"hosts_file"}) | {"hosts_found": hosts}
    order = plan_cells(plan)
    repeats = [repeat for start in plan_starts(plan) for repeat in start.repeats]
    swept = [repeat for repeat in repeats if sweep_options(plan, repeat.cell.workload) is not None]
    done = [repeat for repeat in repeats if repeat not in swept and is_finished(folder, repeat)]
    done.sort(key=lambda repeat: (order.index(repeat.cell), repeat.number))
    began, measured = newest_lines(lines, "begin"), []
    for repeat in done:
        start, index = (began.get(repeat, {}).get(name) for name in ("start", "place"))
        result = _summarised(folder / repeat.folder, anew=False)
        where = CellName(*repeat.cell), repeat.number, str(repeat.folder), start, index
        measured.append(build_cell_run(*where, result.frame, result.summary))
    latest = {
        repeat: line
        for repeat, line in newest_lines(lines, "begin", "failure").items()
        if line["type"] == "failure" and repeat in repeats and not is_finished(folder, repeat)
    }
    servers = {server.name for server in plan.servers}
    swept.sort(key=lambda repeat: order.index(repeat.cell))
    summary = summarise_matrix(
        begun,
        measured,
        order=[CellName(*cell) for cell in order if sweep_options(plan, cell.workload) is None],
        sweeps=[_cell_sweep(folder, repeat, failed=repeat in latest) for repeat in swept],
        skipped=skipped_cells(plan),
        failed=list(latest.values()),
        starts=[line for line in lines if line["type"] == "up" and line["server"] in servers and line["host"] in hosts],
        titles={name: kind.title for name, kind in BACKENDS.items()},
    )
    return summary, measured


def _cell_sweep(folder: Path, repeat: Repeat, *, failed: bool) -> CellSweep:
    """What its files say by now."""
    from loadgen.analysis.matrix import CellSweep
    from loadgen.studies.matrix import is_finished

    begun = is_sweep(folder / repeat.folder)
    result = read_sweep(folder / repeat.folder) if begun else None
    state: Any = "failed" if failed else "partly measured" if result and result.steps else "not measured"
    return CellSweep(
        **repeat.cell._asdict(),
        folder=str(repeat.folder),
        page=f"frontier-{repeat.cell.workload}.html",
        state="measured" if is_finished(folder, repeat) else state,
        result=result,
    )
