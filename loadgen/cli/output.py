"""What a command prints and writes. People read stdout; with --json stdout holds the summary and nothing else."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from loadgen.cli.assertions import exit_code
from loadgen.errors import OutputError

if TYPE_CHECKING:
    from analysis.frame import Frame
    from analysis.objectives import Objective
    from analysis.report.page import Part
    from loadgen.progress import Display

Summary = dict[str, Any]


def finish(output: Output, folder: Path, *, report: bool) -> int:
    """Write and print the results of a run that has ended; its exit code."""
    return exit_code(output.results([folder], folder / "report.html" if report else None))


class Output:
    """One command's output."""

    def __init__(
        self, *, as_json: bool, quiet: bool, objectives: Sequence[Objective] = (), junit: Path | None = None
    ) -> None:
        self._objectives = objectives
        self._junit = junit
        self._as_json = as_json
        self._quiet = quiet
        self._stream = sys.stderr if as_json else sys.stdout

    def say(self, line: str) -> None:
        """One line for people."""
        if not self._quiet:
            print(line, file=self._stream, flush=True)

    def progress(self, requests: int | None, *, plain: bool = True) -> Display:
        """A display of the run's progress, on stderr; `plain`: also where that is no terminal."""
        from loadgen.progress import Display

        return Display(requests, quiet=self._quiet or not (plain or sys.stderr.isatty()))

    def document(self, as_json: str, as_text: Callable[[], str]) -> None:
        """A result in the form that was asked for."""
        if self._as_json:
            print(as_json, end="")
        elif not self._quiet:
            print(as_text())

    def results(self, paths: Sequence[Path], page: Path | None) -> list[Summary]:
        """Write summary.json beside each run and `page` for all of them, and print the figures as asked."""
        parts = [_summarised(path, self._objectives) for path in paths]
        if page is not None:
            _write_page(parts, page)
        summaries = [dict(part.summary) for part in parts]
        if self._junit is not None:
            _write_junit(summaries, self._junit)
        if self._as_json:
            print(json.dumps(summaries[0] if len(summaries) == 1 else summaries, indent=2))
        elif not self._quiet:
            for summary in summaries:
                print(f"\n{_as_text(summary, self._stream)}")
            print(page or folder_of(paths[0]) / "summary.json")
        if self._as_json or self._quiet:
            self._complain(summaries)
        return summaries

    def _complain(self, summaries: list[Summary]) -> None:
        """What did not pass, for people who asked for no text; with --quiet only what failed."""
        from analysis.words import objective

        for each in (each for summary in summaries for each in summary.get("objectives", ())):
            if each["verdict"] == "fail" or (each["verdict"] == "cannot tell" and not self._quiet):
                print(f"loadgen: {each['verdict']}: {objective(each)}", file=sys.stderr)


def folder_of(run: Path) -> Path:
    """The folder of a run that was named by itself or by its file."""
    return run if run.is_dir() else run.parent


def _summarised(path: Path, objectives: Sequence[Objective]) -> Part:
    """One run at a time: what is left of its Records in the end is a summary and curves."""
    from analysis.gather import load
    from analysis.metrics import summarise
    from analysis.report.curves import curves
    from analysis.report.page import Part
    from loadgen.runfile import RunFileError

    try:
        run, frame = load(path)
    except OSError as error:
        raise RunFileError(f"cannot read {path}: {error.strerror}") from error
    summary = summarise(run, frame)
    if objectives:
        summary["objectives"] = _judged(frame, summary, objectives)
    _write(folder_of(path) / "summary.json", json.dumps(summary, indent=2) + "\n")
    return Part(run, summary, curves(frame))


def _judged(frame: Frame, summary: Summary, objectives: Sequence[Objective]) -> list[Summary]:
    from analysis.judging import judge

    return judge(objectives, frame, summary)


def _write_junit(summaries: list[Summary], file: Path) -> None:
    from analysis.junit import render

    _write(file, render(summaries))


def _write_page(parts: list[Part], page: Path) -> None:
    from analysis.report.page import render

    _write(page, render(parts))


def _as_text(summary: Summary, stream: TextIO) -> str:
    """The summary for this terminal, or plain where it is not one."""
    from analysis.text import render

    terminal = stream.isatty()
    width = min(100, shutil.get_terminal_size().columns) if terminal else 80
    return render(summary, width=width, colour=terminal)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        hint = "What was measured is safe in run.jsonl: make room and run `loadgen report` on it, or name --out."
        raise OutputError(f"cannot write {file}: {error.strerror}", hint) from error
