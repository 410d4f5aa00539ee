"""The commands `report` and `export`.

`report` rebuilds summary.json and report.html from run files. `export` writes run files as tables for pandas, polars,
DuckDB or a spreadsheet. Both commands also accept the files of runs that were killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from loadgen.analysis.fast_sorting import import_numpy
from loadgen.cli.output import (
    Assertions,
    Confidence,
    Goodput,
    Inconclusive,
    Junit,
    Output,
    exit_code,
    print_document,
    print_error,
)
from loadgen.cli.sweep import write_frontier
from loadgen.errors import LoadgenError, OutputError, PlanError, install_hint
from loadgen.results import folder_of, index_runs, is_sweep, runs_below, runs_in, write_text

if TYPE_CHECKING:
    from loadgen.analysis.summary import Summary

Quiet = Annotated[bool, Option("--quiet", help="Print only failures.")]


def report(
    runs: Annotated[
        list[Path],
        Argument(
            help="Run folders, run.jsonl files or folders of repeats. Alternatively one folder of runs, for an index "
            "page, or several sweeps, for a joint frontier page.",
            metavar="RUN...",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        Option(
            help="File for the page. Default: report.html in the run's folder, or in the current folder for several "
            "runs; index.html for a folder of runs; frontier.html for sweeps."
        ),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print summary.json (a list for several runs) and nothing else.")
    ] = False,
    quiet: Quiet = False,
    serve: Annotated[bool, Option("--serve", help="Serve the page on a free loopback port until Ctrl-C.")] = False,
    assertions: Assertions = None,
    confidence: Confidence = None,
    inconclusive: Inconclusive = None,
    goodput: Goodput = None,
    junit: Junit = None,
) -> None:
    """Rebuild summary.json and report.html from recorded runs.

    Several runs are shown on one page. A folder of runs gets an index page, on which runs can be filtered and compared
    over time. Runs may be in progress, interrupted or killed, and files may have malformed lines. The report names such
    problems. The objectives are those of the original run, unless --assert or --goodput is given. Exit codes: 0
    written; 2 not a run, or the report cannot be written. With --assert, --confidence or --junit, the exit codes of a
    run apply too: 1 some requests failed, and no --assert judges failures; 4 an --assert failed; 5 the client was the
    limit; 6 an --assert with --confidence is inconclusive; 130 interrupted or in progress.
    """
    import_numpy()
    are_sweeps = any(map(is_sweep, runs))
    indexed = runs_below(runs[0]) if len(runs) == 1 and not are_sweeps else []
    page = out or _default_page(runs, are_sweeps=are_sweeps, is_index=bool(indexed))
    output = Output(
        as_json=as_json,
        quiet=quiet,
        assertions=assertions,
        confidence=confidence,
        goodput=goodput,
        inconclusive=inconclusive,
        junit=junit,
        recorded=True,
    )
    if are_sweeps and (assertions or confidence or goodput or junit or not all(map(is_sweep, runs))):
        raise PlanError(
            "sweeps have their own objectives and cannot be combined with other runs or with --assert, --confidence, "
            "--goodput or --junit.",
            "Name only sweeps, and leave these options out.",
        )
    if indexed and (assertions or confidence or goodput or junit):
        raise PlanError(
            f"{runs[0]} is a folder of runs, but --assert, --confidence, --goodput and --junit need single runs.",
            "Name one or more runs instead of their folder.",
        )
    summaries: list[Summary] = []
    if are_sweeps:
        write_frontier(runs, output, page)
    elif indexed:
        summaries = _write_index(runs[0], indexed, page, output)
    else:
        summaries = output.results(runs, page)
    if serve:
        _serve(page)
    if output.objectives or confidence or junit:
        raise Exit(exit_code(summaries, inconclusive))


def _default_page(runs: Sequence[Path], *, are_sweeps: bool, is_index: bool) -> Path:
    """Return the file to which the page is written if --out is not given.

    The file is in the run's folder, or in the current folder for several runs.
    """
    folder = folder_of(runs[0]) if len(runs) == 1 else Path()
    if are_sweeps:
        return folder / "frontier.html"
    return folder / ("index.html" if is_index else "report.html")


def _serve(page: Path) -> None:
    """Serve a page on loopback until Ctrl-C."""
    from loadgen.analysis.report.page import HOST, page_server

    with page_server(page.read_bytes()) as server, suppress(KeyboardInterrupt):
        url = f"http://{HOST}:{server.server_port}/"
        print(f"Serving the page at {url} until Ctrl-C.", file=sys.stderr, flush=True)
        server.serve_forever()


def _write_index(folder: Path, below: Sequence[Path], page: Path, output: Output) -> list[Summary]:
    """Write the index page of a folder of runs, and print the list of runs. Return the summaries of the runs.

    `below` holds the paths of the runs.
    """
    from loadgen.analysis.format import pluralise
    from loadgen.analysis.index_page import index_document, list_document
    from loadgen.analysis.report.page import render
    from loadgen.analysis.summary import as_dict

    runs, unreadable = index_runs(below, folder, page)
    for sentence in unreadable:
        print_error(sentence)
    if not runs:
        raise OutputError(f"no run in {folder} can be read.", "Name the folder of a run.")
    title = f"{folder if folder.name else folder.resolve()}: {pluralise(len(runs), 'run')}"
    write_text(page, render(index_document(runs, title, unreadable)))
    if output.as_json:
        print(json.dumps([as_dict(run.summary) for run in runs], indent=2))
    elif not output.quiet:
        print_document(list_document(runs, title))
        print(page)
    return [run.summary for run in runs]


def export(
    run: Annotated[
        Path, Argument(help="Run folder, run.jsonl file or folder of repeats.", metavar="RUN", show_default=False)
    ],
    parquet: Annotated[
        Path | None,
        Option(help="Folder for Parquet files. Needs the extra `parquet` (pyarrow).", metavar="DIR"),
    ] = None,
    as_csv: Annotated[Path | None, Option("--csv", help="Folder for CSV files.", metavar="DIR")] = None,
    quiet: Quiet = False,
) -> None:
    """Write a run as Parquet or CSV tables.

    There is one file each for requests, chunks, telemetry and the run. Each repeat gets a subfolder with its name.
    Existing files are replaced. Rows are written while the run file is read, so that large runs need not fit into
    memory. Exit codes: 0 written; 2 not a run, not writable, or pyarrow (for Parquet) is not installed.
    """
    folders = {form: folder for form, folder in (("parquet", parquet), ("csv", as_csv)) if folder is not None}
    if not folders:
        raise PlanError("no folder for the tables.", "Name a folder: --parquet DIR, --csv DIR, or both.")
    if parquet is not None and find_spec("pyarrow") is None:
        raise LoadgenError("Parquet needs pyarrow.", f"{install_hint('parquet')}, or use --csv DIR.")
    from loadgen.analysis.export import export as write_tables
    from loadgen.folders import FolderClaim

    for single_run in runs_in(run):
        for form, folder in folders.items():
            tables = folder if single_run == run else folder / single_run.name
            try:
                with FolderClaim(tables, must_be_empty=False):
                    files = write_tables(single_run, tables, form)
            except OSError as error:
                message = f"{error.filename or folder}: {error.strerror}"
                raise OutputError(message, "Name a writable folder.") from error
            if not quiet:
                print(*files, sep="\n")
