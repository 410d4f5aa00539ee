"""`loadgen report` and `loadgen export`: what is made of run files, also of runs that were killed: summary.json and
report.html again, or tables for pandas, polars, DuckDB or a spreadsheet."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from loadgen.cli.output import Assertions, Goodput, Inconclusive, Junit, Output, exit_code, print_document, print_error
from loadgen.cli.sweep import is_sweep, write_frontier
from loadgen.errors import LoadgenError, OutputError, PlanError
from loadgen.results import folder_of, index_runs, runs_below, runs_in, write_text

if TYPE_CHECKING:
    from loadgen.analysis.summary import Summary

Quiet = Annotated[bool, Option("--quiet", help="Print nothing but what failed.")]


def report(
    runs: Annotated[
        list[Path],
        Argument(
            help="Run folders, their run.jsonl, or folders of repeats; one folder of runs, for an index of them; or "
            "sweeps, for the frontier of all of them.",
            metavar="RUN...",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        Option(
            help="Where the page goes. Default: report.html in the run's folder, or here for several runs; index.html "
            "in a folder of runs, frontier.html of sweeps."
        ),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print summary.json (a list for several runs) and no more.")
    ] = False,
    quiet: Quiet = False,
    serve: Annotated[
        bool, Option("--serve", help="Then show the page on a free port of loopback, until Ctrl-C.")
    ] = False,
    assertions: Assertions = None,
    inconclusive: Inconclusive = None,
    goodput: Goodput = None,
    junit: Junit = None,
) -> None:
    """Rebuild summary.json and report.html from what a run recorded. Several runs share one page; a folder of runs gets
    an index: all of them, to filter, to compare, and over time.

    Works on a run that is going on, was interrupted or killed, and on a file with damaged lines, and says so in the
    report. A run is judged by the --assert and --goodput that it was made with, unless others are given here. Exit
    codes: 0 written, 2 not a run or not writable. With --assert or --junit as if the run had just ended: 4 an --assert
    failed, 1 requests failed and no --assert speaks of it, 5 the client was the limit, 6 an --assert is inconclusive,
    130 interrupted or going on.
    """
    sweeps, below = any(map(is_sweep, runs)), runs_below(runs[0]) if len(runs) == 1 else []
    name = "frontier.html" if sweeps else "index.html" if below else "report.html"
    page = out or (folder_of(runs[0]) if len(runs) == 1 else Path()) / name
    judged: dict[str, Any] = {"assertions": assertions, "inconclusive": inconclusive, "goodput": goodput}
    output = Output(as_json=as_json, quiet=quiet, junit=junit, recorded=True, **judged)
    if sweeps and (assertions or goodput or junit or not all(map(is_sweep, runs))):
        raise PlanError("sweeps have objectives of their own, and a page without other runs.", "Name sweeps alone.")
    if below and not sweeps and (assertions or goodput or junit):
        raise PlanError(f"{runs[0]} is a folder of runs: --assert and --goodput judge single ones.", "Name the runs.")
    summaries: list[Summary] = []
    if sweeps:
        write_frontier(runs, output, page)
    else:
        summaries = _index(runs[0], below, page, output) if below else output.results(runs, page)
    if serve:
        from loadgen.analysis.report.page import HOST, page_server

        with page_server(page.read_bytes()) as server, suppress(KeyboardInterrupt):
            print(f"http://{HOST}:{server.server_port}/ shows it until Ctrl-C.", file=sys.stderr, flush=True)
            server.serve_forever()
    if output.objectives or junit:
        raise Exit(exit_code(summaries, inconclusive))


def _index(folder: Path, below: Sequence[Path], page: Path, output: Output) -> list[Summary]:
    """Write the page of a folder of runs, and print the list of them as asked."""
    from loadgen.analysis.format import pluralise
    from loadgen.analysis.repeats import index_document, list_document
    from loadgen.analysis.report.page import render
    from loadgen.analysis.summary import as_dict

    runs, unread = index_runs(below, folder, page)
    for sentence in unread:
        print_error(sentence)
    if not runs:
        raise OutputError(f"no run in {folder} can be read.", "Name the folder of a run.")
    title = f"{pluralise(len(runs), 'run')} in {folder}"
    write_text(page, render(index_document(runs, title, unread)))
    if output.as_json:
        print(json.dumps([as_dict(run.summary) for run in runs], indent=2))
    elif not output.quiet:
        print_document(list_document(runs, title))
        print(page)
    return [run.summary for run in runs]


def export(
    run: Annotated[
        Path, Argument(help="Run folder, its run.jsonl, or a folder of repeats.", metavar="RUN", show_default=False)
    ],
    parquet: Annotated[
        Path | None, Option(help="Folder for Parquet files; needs pip install 'llm-loadgen[parquet]'.", metavar="DIR")
    ] = None,
    as_csv: Annotated[Path | None, Option("--csv", help="Folder for CSV files.", metavar="DIR")] = None,
    quiet: Quiet = False,
) -> None:
    """Write a run as tables: requests, chunks, telemetry and run, one file each.

    Repeats get a folder each, of their names. A folder that holds such files already gets new ones. Rows are written as
    the run file is read, so a large run does not have to fit into memory. Exit codes: 0 written, 2 not a run, not
    writable, or the libraries for Parquet are not installed.
    """
    wanted = [(folder, form) for folder, form in ((parquet, "parquet"), (as_csv, "csv")) if folder is not None]
    if not wanted:
        raise PlanError("nothing says where the tables go.", "Name a folder: --parquet DIR, --csv DIR, or both.")
    if parquet is not None and find_spec("pyarrow") is None:
        raise LoadgenError("Parquet needs pyarrow.", "pip install 'llm-loadgen[parquet]', or take --csv DIR.")
    from loadgen.analysis.export import export as written
    from loadgen.folders import FolderClaim

    for each in runs_in(run):
        for folder, form in wanted:
            tables = folder if each == run else folder / each.name
            try:
                with FolderClaim(tables, must_be_empty=False):
                    files = written(each, tables, form)
            except OSError as error:
                where = f"{error.filename or folder}: {error.strerror}"
                raise OutputError(where, "Name a folder that can be written.") from error
            if not quiet:
                print(*files, sep="\n")
