"""What a command prints, and where: people read stdout; with --json stdout holds the summary and nothing else."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.errors import EXIT_CLIENT_LIMITED, EXIT_OK, EXIT_REQUESTS_FAILED

if TYPE_CHECKING:
    from loadgen.progress import Display

Summary = dict[str, Any]


def exit_code(summary: Summary) -> int:
    """1 when a request failed or was truncated, 5 when the client was the limit, else 0."""
    requests = summary["requests"]
    if requests["complete"] < requests["sent"] + requests["dropped"]:
        return EXIT_REQUESTS_FAILED
    return EXIT_CLIENT_LIMITED if summary["client"]["verdict"] == "limited" else EXIT_OK


class Output:
    """One command's output."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._as_json = as_json
        self._quiet = quiet
        self._stream = sys.stderr if as_json else sys.stdout

    def say(self, line: str) -> None:
        """One line for people."""
        if not self._quiet:
            print(line, file=self._stream, flush=True)

    def progress(self, requests: int) -> Display:
        """A display of the run's progress, on stderr."""
        from loadgen.progress import Display

        return Display(requests, quiet=self._quiet)

    def results(self, folder: Path, *, report: bool) -> Summary:
        """Compute and write summary.json and report.html of a run folder, and print them as asked."""
        from analysis.metrics import summarise
        from loadgen.runfile import read

        run = read(folder)
        summary = summarise(run)
        text = json.dumps(summary, indent=2)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
        if report:
            from analysis.report.page import write

            write(run, summary, folder / "report.html")
        if self._as_json:
            print(text)
        elif not self._quiet:
            self._print(summary, folder, report=report)
        return summary

    def _print(self, summary: Summary, folder: Path, *, report: bool) -> None:
        from analysis.text import render

        width = min(100, shutil.get_terminal_size((80, 24)).columns)
        print()
        print(render(summary, width=width, colour=self._stream.isatty()), end="")
        print(f"\n{folder / ('report.html' if report else 'summary.json')}")
