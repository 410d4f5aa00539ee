"""`loadgen report`: rebuilds summary.json and report.html from run files, also of runs that were killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

if TYPE_CHECKING:
    from loadgen.runfile import Run


def report(
    runs: Annotated[
        list[Path], Argument(help="Run folders, or their run.jsonl.", metavar="RUN...", show_default=False)
    ],
    out: Annotated[
        Path | None,
        Option(help="Where the page goes. Default: report.html in the run's folder, or here for several runs."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print summary.json, as a list for several runs.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Rebuild summary.json and report.html from what a run recorded. Several runs share one page.

    Works on a run that was interrupted or killed and on a file with damaged lines, and says so in the report.
    Exit codes: 0 written, 2 not a run or not writable.
    """
    page = out or (folder_of(runs[0]) if len(runs) == 1 else Path()) / "report.html"
    pairs = [summarised(run) for run in runs]
    write_page(pairs, page)
    if as_json:
        summaries = [summary for _, summary in pairs]
        print(json.dumps(summaries[0] if len(summaries) == 1 else summaries, indent=2))
    elif not quiet:
        for _, summary in pairs:
            print(as_text(summary))
        print(page)


def summarised(path: Path) -> tuple[Run, dict[str, Any]]:
    """Read a run, write its summary.json beside it, and return both."""
    from analysis.metrics import summarise
    from loadgen.errors import PlanError
    from loadgen.runfile import RunFileError, read

    try:
        run = read(path)
    except RunFileError as error:
        raise PlanError(str(error)) from None
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from None
    summary = summarise(run)
    _write(
        folder_of(path) / "summary.json", lambda file: file.write_text(json.dumps(summary, indent=2) + "\n", "utf-8")
    )
    return run, summary


def write_page(pairs: list[tuple[Run, dict[str, Any]]], page: Path) -> None:
    """Write one report of these runs."""
    from analysis.report import write

    _write(page, lambda file: write(pairs, file))


def as_text(summary: dict[str, Any]) -> str:
    """The summary for this terminal, or plain where it is not one."""
    import shutil

    from analysis.text import render

    terminal = sys.stdout.isatty()
    width = min(100, shutil.get_terminal_size().columns) if terminal else 80
    return render(summary, width=width, colour=terminal)


def folder_of(run: Path) -> Path:
    """The folder of a run that was named by itself or by its file."""
    return run if run.is_dir() else run.parent


def _write(file: Path, write: Callable[[Path], object]) -> None:
    from loadgen.errors import OutputError

    try:
        write(file)
    except OSError as error:
        hint = "Name another place with --out, or make room there."
        raise OutputError(f"cannot write {file}: {error.strerror}", hint) from error
