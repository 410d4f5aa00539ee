"""`loadgen export`: a run as tables, for pandas, polars, DuckDB or a spreadsheet."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from loadgen.errors import LoadgenError, OutputError, PlanError


def export(
    run: Annotated[Path, Argument(help="Run folder, or its run.jsonl.", metavar="RUN", show_default=False)],
    parquet: Annotated[
        Path | None, Option(help="Folder for Parquet files; needs pip install 'llm-loadgen[parquet]'.", metavar="DIR")
    ] = None,
    as_csv: Annotated[Path | None, Option("--csv", help="Folder for CSV files.", metavar="DIR")] = None,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Write a run as tables: requests, chunks, telemetry and run, one file each.

    A folder that holds such files already gets new ones. Rows are written as the run file is read, so a large run does
    not have to fit into memory. Exit codes: 0 written, 2 not a run, not writable, or the libraries for Parquet are not
    installed.
    """
    wanted = [(folder, form) for folder, form in ((parquet, "parquet"), (as_csv, "csv")) if folder is not None]
    if not wanted:
        raise PlanError("nothing says where the tables go.", "Name a folder: --parquet DIR, --csv DIR, or both.")
    if parquet is not None and find_spec("pyarrow") is None:
        raise LoadgenError("Parquet needs pyarrow.", "pip install 'llm-loadgen[parquet]', or take --csv DIR.")
    from analysis.export import export as written

    for folder, form in wanted:
        try:
            files = written(run, folder, form)
        except OSError as error:
            raise OutputError(
                f"{error.filename or folder}: {error.strerror}", "Name a folder that can be written."
            ) from error
        if not quiet:
            print(*files, sep="\n")
