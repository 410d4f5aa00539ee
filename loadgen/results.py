"""Results of recorded runs: load, summarise, judge, and write them as files.

The command line and the Python API use these functions, and print or return what they give.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadgen.analysis.run.errors import RunFileError
from loadgen.errors import OutputError, PlanError
from loadgen.workloads.input_files import read_input

if TYPE_CHECKING:
    from loadgen.analysis.compare import ComparedRun, Comparison
    from loadgen.analysis.compare.figures import Gate
    from loadgen.analysis.frame import Frame
    from loadgen.analysis.objectives import Objective
    from loadgen.analysis.repeats import IndexedRun, RepeatsSummary
    from loadgen.analysis.report.run_document import ReportedRun
    from loadgen.analysis.run.runfile import Header, Run
    from loadgen.analysis.summary import Summary

RESULTS_ARE_SAFE = "What was measured is safe in run.jsonl: make room and run `loadgen report` on it, or name --out."


SUMMARY_BYTES = 1 << 26
"""Maximum size of a summary.json that is read; a larger one is made again from its run."""


def parse_expressions(
    assertions: Sequence[str] | None,
    goodput: Sequence[str] | None = None,
    junit: Path | None = None,
    *,
    recorded: bool = False,
) -> tuple[Sequence[Objective], Sequence[Objective]]:
    """Parse the objectives of a run, and what makes a request good. Raises PlanError, which names every mistake, before
    anything is sent. Runs that are `recorded` already may bring objectives, so none need to be given for --junit."""
    if junit is not None and not assertions and not recorded:
        raise missing_objectives()
    if junit is not None and not junit.absolute().parent.is_dir():
        raise PlanError(f"--junit {junit}: there is no folder {junit.parent}", "Make it first.")
    if not assertions and not goodput:
        return (), ()
    from loadgen.analysis.objectives import ObjectiveError, parse, parse_bounds

    try:
        return parse(assertions or ()), parse_bounds(goodput or ())
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None


def missing_objectives() -> PlanError:
    return PlanError("--junit without --assert has nothing to write", "Name an objective: --assert 'ttft.p99 < 1s'")


def expressions_for(
    header: Header, objectives: Sequence[Objective], bounds: Sequence[Objective]
) -> tuple[Sequence[Objective], Sequence[Objective], list[str]]:
    """Return the objectives and the bounds on requests that a run is judged by, and notes on those that cannot be read.
    Objectives that are given replace those that the run was made with, and so do bounds."""
    own_objectives = () if objectives else header.objectives
    own_bounds = () if bounds else header.goodput
    if not own_objectives and not own_bounds:
        return objectives, bounds, []
    from loadgen.analysis.objectives import ObjectiveError, parse, parse_bounds

    notes = []

    def read(texts: Iterable[str], parsed: Callable[[Sequence[str]], list[Objective]]) -> Iterator[Objective]:
        for text in texts:
            try:
                yield from parsed([text])
            except ObjectiveError as error:
                notes.append(f"an objective of the run is not judged: {str(error).splitlines()[0]}")

    result = (objectives or [*read(own_objectives, parse)], bounds or [*read(own_bounds, parse_bounds)])
    return *result, notes


class RunGroup(NamedTuple):
    """One run, or the repeats in one folder."""

    folder: Path
    parts: list[ReportedRun]
    json: dict[str, Any]
    """summary.json of a run; of repeats what they say together, and all of theirs."""
    between: RepeatsSummary | None = None
    """What repeats say together; None for a run by itself."""


def folder_of(run: Path) -> Path:
    """The folder of a run that was named by itself or by its file."""
    return run if run.is_dir() else run.parent


def runs_in(path: Path) -> list[Path]:
    """The repeats in a folder of repeats, in their order; the path itself otherwise."""
    if not path.is_dir() or (path / "run.jsonl").exists():
        return [path]
    result = [each.parent for each in path.glob("repeat-*/run.jsonl") if each.parent.name[7:].isdecimal()]
    return sorted(result, key=lambda run: int(run.name[7:])) or [path]


def report_link(run: Path, page: Path) -> str:
    """From `page` to the report of a run; empty where there is none."""
    file = run / "report.html"
    return relpath(file, page.parent) if file.exists() else ""


def runs_below(folder: Path) -> list[Path]:
    """All runs in a folder that is neither a run nor one of repeats; nothing of another."""
    if not folder.is_dir() or runs_in(folder) != [folder] or (folder / "run.jsonl").exists():
        return []
    return sorted(file.parent for file in folder.rglob("run.jsonl"))


def index_runs(runs: Sequence[Path], folder: Path, page: Path) -> tuple[list[IndexedRun], list[str]]:
    """The runs of a folder from their summary.json, which is made again where it is older than the run; and a sentence
    for each that cannot be read."""
    from msgspec import MsgspecError

    from loadgen.analysis.repeats import IndexedRun
    from loadgen.analysis.summary import from_json

    result, unread = [], []
    for run in runs:
        file = run / "summary.json"
        try:
            try:
                if file.stat().st_mtime < (run / "run.jsonl").stat().st_mtime:
                    raise FileNotFoundError  # as if it were not there
                summary = from_json(read_input(file, SUMMARY_BYTES, pipes=False))
            except (OSError, MsgspecError):
                summary = load_and_summarise(run, (), (), drawn=False).summary
                write_summary(run, summary)
        except RunFileError as error:
            unread.append(f"Left out: {error}")
        else:
            name = str(run.relative_to(folder))
            result.append(IndexedRun(name, shlex.quote(str(run)), report_link(run, page), summary))
    return result, unread


def load_and_summarise(
    path: Path,
    objectives: Sequence[Objective],
    bounds: Sequence[Objective],
    *,
    drawn: bool = True,
    known: tuple[Run, Frame] | None = None,
) -> ReportedRun:
    """Summarise one run and judge it by these objectives, or else by those that the run was made with.

    Of its Records only the summary is kept and, if the run is to be `drawn`, the curves. `known` is the content of its
    file, where the caller has read it."""
    from loadgen.analysis.build_summary import summarise
    from loadgen.analysis.report.run_document import ReportedRun, prepare_run
    from loadgen.analysis.slo import goodput, judge
    from loadgen.analysis.steady_window import load_run

    run, frame = known or load_run(path)
    summary = summarise(run, frame)
    objectives, bounds, notes = expressions_for(run.header, objectives, bounds)
    summary.run.notes = [*summary.run.notes, *notes]
    if bounds:
        summary.goodput = goodput(frame, bounds, summary.requests.unrecorded)
    if objectives:
        summary.objectives = judge(objectives, frame, summary)
    return prepare_run(run, frame, summary) if drawn else ReportedRun(run, summary, {})


def write_summary(run: Path, summary: Summary, hint: str = RESULTS_ARE_SAFE) -> None:
    """summary.json in the run's folder. Raises OutputError with this hint."""
    from loadgen.analysis.summary import as_dict

    write_text(folder_of(run) / "summary.json", json.dumps(as_dict(summary), indent=2) + "\n", hint)


def write_page(parts: list[ReportedRun], page: Path, repeats: list[RunGroup]) -> None:
    from loadgen.analysis.repeats import section
    from loadgen.analysis.report.page import render
    from loadgen.analysis.report.run_document import page_document

    extras = []
    for index, group in enumerate(repeats, 1):
        assert group.between is not None
        name, of = f"between-runs-{index}" if index > 1 else "between-runs", f" of {group.folder.name}"
        extras.append(section(group.between, name, f"Between runs{of if len(repeats) > 1 else ''}"))
    write_text(page, render(page_document(parts, extras)))


def write_text(file: Path, text: str, hint: str = RESULTS_ARE_SAFE) -> None:
    """Write a file of results, whole or not at all. Commands that write the same file at once do not mix: the last one
    wins. Raises OutputError with this hint."""
    whole = file.resolve()
    is_device = file.exists() and not file.is_file()  # /dev/stdout
    fresh = file if is_device else whole.with_name(f"{whole.name}.{os.urandom(4).hex()}.part")
    try:
        fresh.write_text(text, encoding="utf-8")
        if fresh != file:
            fresh.replace(whole)
    except OSError as error:
        if fresh != file:
            with suppress(OSError):
                fresh.unlink()
        raise OutputError(f"cannot write {file}: {error.strerror}", hint) from error


def compare_paths(
    a: Sequence[Path],
    b: Sequence[Path],
    unequal_hint: str | None,
    *,
    margin: float,
    run_variation: float,
    gates: Sequence[Gate] = (),
) -> tuple[Comparison, list[ComparedRun], list[ComparedRun]]:
    """B against A, and the runs of each; a path may be a folder of repeats. Raises PlanError with this hint for runs of
    unequal work, unless it is None; RunFileError."""
    from loadgen.analysis.compare import compare, read_run

    group_a, group_b = ([read_run(run) for path in side for run in runs_in(path)] for side in (a, b))
    result = compare(group_a, group_b, margin=margin, gates=gates, run_variation=run_variation)
    if result.unequal and unequal_hint:
        lines = ["the two did not do equal work:", *(f"  {each.sentence}" for each in result.unequal)]
        raise PlanError("\n".join(lines), unequal_hint)
    return result, group_a, group_b
