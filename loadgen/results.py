"""Results of recorded runs: load them, summarise them, check their objectives and write files.

The command line and the Python API share these functions.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from loadgen.analysis.run.errors import RunFileError
from loadgen.errors import OutputError, PlanError
from loadgen.workloads.input_files import read_input

if TYPE_CHECKING:
    from loadgen.analysis.compare import ComparedRun, Comparison
    from loadgen.analysis.compare.gates import Gate
    from loadgen.analysis.frame import Frame
    from loadgen.analysis.index_page import IndexedRun, RunFolder
    from loadgen.analysis.objectives import Objective
    from loadgen.analysis.repeats import RepeatsSummary
    from loadgen.analysis.report.run_document import ReportedRun
    from loadgen.analysis.run.runfile import Header, Run
    from loadgen.analysis.summary import Summary

RESULTS_ARE_SAFE = (
    "The measurements are safe in run.jsonl. Free some disk space and run `loadgen report`, or name --out."
)
RESULT_FILE = re.compile(r"(?:summary|sweep|matrix)\.json|(?:report|index|matrix|frontier.*)\.html")
"""Matches the names under which commands write results into the folder of a run, sweep or matrix."""
MIN_CHUNKS = 4_000_000
"""Minimum number of chunks of a run whose charts are computed in a second process."""
SUMMARY_BYTES = 1 << 26
"""Maximum size of a summary.json that is read, in bytes. A larger file is ignored and written again from its run file.
"""


def parse_expressions(
    assertions: Sequence[str] | None,
    goodput: Sequence[str] | None = None,
    junit: Path | None = None,
    *,
    confidence: float | None = None,
    recorded: bool = False,
) -> tuple[Sequence[Objective], Sequence[Objective]]:
    """Return the objectives in `assertions` (--assert), and the bounds for requests in `goodput` (--goodput).

    An objective such as `ttft.p99 < 1s` applies to the whole run. A bound such as `ttft < 500ms` applies to each
    request. Raises PlanError in these cases:

    - An expression is invalid.
    - The folder of the file `junit` does not exist.
    - `junit` or `confidence` is set without `assertions`. This is allowed if `recorded` is True, because the header of
      a recorded run may contain objectives.
    """
    if confidence is not None and not assertions and not recorded:
        raise PlanError(
            "--confidence has nothing to judge without --assert", "Add an objective: --assert 'ttft.p99 < 1s'"
        )
    if junit is not None and not assertions and not recorded:
        raise missing_objectives()
    if junit is not None and not junit.absolute().parent.is_dir():
        raise PlanError(f"--junit {junit}: there is no folder {junit.parent}", "Create the folder first.")
    if not assertions and not goodput:
        return (), ()
    from loadgen.analysis.objectives import ObjectiveError, parse, parse_bounds

    try:
        return parse(assertions or ()), parse_bounds(goodput or ())
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None


def missing_objectives() -> PlanError:
    return PlanError("--junit has nothing to write without --assert", "Add an objective: --assert 'ttft.p99 < 1s'")


def expressions_for(
    header: Header, objectives: Sequence[Objective], bounds: Sequence[Objective]
) -> tuple[Sequence[Objective], Sequence[Objective], list[str]]:
    """Return the objectives to check for a run, the bounds for its requests, and a list of notes.

    `objectives` and `bounds` are the expressions that the caller requests. If one of them is empty, the run's `header`
    supplies it. Each note names an expression of the header that cannot be parsed.
    """
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

    objectives = objectives or list(read(own_objectives, parse))
    bounds = bounds or list(read(own_bounds, parse_bounds))
    return objectives, bounds, notes


class RunGroup(NamedTuple):
    """The reported data of one run, or of all repeats in one folder."""

    folder: Path
    parts: list[ReportedRun]
    json: dict[str, Any]
    """Content of summary.json. For repeats, this is their joint summary and the summary of each repeat."""
    between: RepeatsSummary | None = None
    """Joint summary of the repeats. None for a single run."""


def folder_of(run: Path) -> Path:
    """Return the folder of a run, given the folder itself or its run.jsonl."""
    return run if run.is_dir() else run.parent


def runs_in(path: Path) -> list[Path]:
    """Return the run folders in a folder of repeats, in the order of their numbers. For any other path, return only
    that path."""
    if not path.is_dir() or (path / "run.jsonl").exists():
        return [path]
    folders = [file.parent for file in path.glob("repeat-*/run.jsonl")]
    repeats = {folder: folder.name.removeprefix("repeat-") for folder in folders}
    numbered = [folder for folder, number in repeats.items() if number.isdecimal()]
    return sorted(numbered, key=lambda folder: int(repeats[folder])) or [path]


PAGES = ("report.html", "matrix.html", "frontier.html")
"""Pages that commands write into the folder of a run, of repeats, of a matrix or of a sweep."""


def report_link(run: Path, page: Path) -> str:
    """Return the relative link from `page` to the report of a run, or an empty string if there is no report."""
    file = run / "report.html"
    return relpath(file, page.parent) if file.exists() else ""


def page_link(folder: Path, page: Path) -> str:
    """Return the relative link from `page` to the HTML page in `folder`, such as report.html.

    `folder` is the folder of a run, of repeats, of a matrix or of a sweep. Return an empty string if it has no page.
    """
    return next((relpath(folder / name, page.parent) for name in PAGES if (folder / name).exists()), "")


def runs_below(folder: Path) -> list[Path]:
    """Return the folders of all runs below a folder. For a single run or a folder of repeats, return an empty list."""
    if not folder.is_dir() or runs_in(folder) != [folder] or (folder / "run.jsonl").exists():
        return []
    return sorted(file.parent for file in folder.rglob("run.jsonl"))


def index_runs(runs: Sequence[Path], folder: Path, page: Path) -> tuple[list[IndexedRun], list[str]]:
    """Return the entries of an index page, and a message for each run that cannot be read."""
    from loadgen.analysis.index_page import IndexedRun

    entries = []
    unreadable = []
    for run in runs:
        try:
            summary = _current_summary(run)
        except RunFileError as error:
            unreadable.append(f"Left out: {error}")
        else:
            group = _group_of(run, folder, page)
            link = report_link(run, page) or (group.link if group else "")
            name = str(run.relative_to(folder))
            entries.append(IndexedRun(name, shlex.quote(str(run)), link, summary, group))
    return entries, unreadable


def is_sweep(path: Path) -> bool:
    """Return True if a folder contains a sweep."""
    return (path / "sweep.jsonl").is_file()  # the journal of `loadgen sweep`


def _group_of(run: Path, folder: Path, page: Path) -> RunFolder | None:
    """Return the outermost group that contains the run folder `run`, or None if the run belongs to no group.

    A group is a folder of several runs: a matrix, a sweep or a folder of repeats. A group can contain smaller groups.
    For example, a matrix can contain folders of repeats. Only groups inside `folder` are considered.

    The result contains a link to the group, relative to `page`, the file of the index page.
    """
    from loadgen.analysis.index_page import RunFolder

    for parent in reversed(run.parents[: run.parents.index(folder)]):
        kind: Literal["repeats", "steps", "cells"]
        if (parent / "matrix.jsonl").is_file():  # the journal of `loadgen matrix`
            kind = "cells"
        elif is_sweep(parent):
            kind = "steps"
        elif runs_in(parent) != [parent]:
            kind = "repeats"
        else:
            continue
        return RunFolder(str(parent.relative_to(folder)), shlex.quote(str(parent)), page_link(parent, page), kind)
    return None


def _current_summary(run: Path) -> Summary:
    """Return the summary of a run from its summary.json.

    If that file is missing, unreadable or older than the run file, summarise the run and write summary.json again.
    Raises RunFileError if the run cannot be read.
    """
    from msgspec import MsgspecError

    from loadgen.analysis.summary import from_json

    file = run / "summary.json"
    try:
        if file.stat().st_mtime >= (run / "run.jsonl").stat().st_mtime:
            return from_json(read_input(file, SUMMARY_BYTES, pipes=False))
    except (OSError, MsgspecError):
        pass
    summary = load_and_summarise(run, (), (), drawn=False).summary
    write_summary(run, summary)
    return summary


def load_and_summarise(
    path: Path,
    objectives: Sequence[Objective],
    bounds: Sequence[Objective],
    *,
    confidence: float | None = None,
    drawn: bool = True,
    known: tuple[Run, Frame] | None = None,
) -> ReportedRun:
    """Return the summary of the run at `path`, with the verdicts on its objectives. The result holds no Records.

    - `objectives` and `bounds` replace those in the header of the run, unless they are empty. `bounds` are the
      objectives of single requests (--goodput).
    - `confidence` is the confidence level with which the objectives must be met (--confidence). With None, objectives
      from the header are judged with the level in the header, and objectives of the caller are judged by the measured
      figures alone.
    - `drawn` is True if the result must also hold the data of the charts.
    - `known` is the content of the run file, if the caller has already read it.
    """
    from loadgen.analysis.build_summary import latency_metrics, summarise
    from loadgen.analysis.goodput import add_part_goodput, goodput
    from loadgen.analysis.itl_distribution import start_gap_figures
    from loadgen.analysis.recovery import describe_commands
    from loadgen.analysis.report.run_document import ReportedRun, prepare_run
    from loadgen.analysis.steady_window import load_run

    run, frame = known or load_run(path)
    with (
        _charts_meanwhile(run, frame, drawn=drawn) as charts,
        start_gap_figures(latency_metrics(), frame) as gap_figures,
    ):
        summary = summarise(run, frame, gap_figures)
        if not objectives:
            confidence = confidence or run.header.confidence
        objectives, bounds, notes = expressions_for(run.header, objectives, bounds)
        summary.run.notes = [*summary.run.notes, *notes]
        if bounds:
            summary.goodput = goodput(frame, bounds, summary.requests.unrecorded)
        add_part_goodput(run, frame, summary, bounds)
        if summary.traffic:
            from loadgen.analysis.interference import add_interference

            add_interference(run, frame, summary)
        summary.commands = describe_commands(run, frame, bounds)
        if objectives:
            from loadgen.analysis.slo import judge

            summary.objectives = judge(objectives, frame, summary, confidence)
        if not drawn:
            return ReportedRun(run, summary, {})
        return prepare_run(run, frame, summary, charts(), gap_figures().samples)


@contextmanager
def _charts_meanwhile(run: Run, frame: Frame, *, drawn: bool) -> Iterator[Callable[[], Any]]:
    """Compute the charts of a large run in a second process, while the block of a `with` statement runs.

    The `with` statement gives the block a function that waits for the charts and returns them. This function returns
    None if there is no second process, for example because the run is small or `drawn` is False.
    """
    from loadgen.analysis.child_process import ChildProcess, can_fork
    from loadgen.analysis.report.run_document import prepare_charts

    if not drawn or len(frame.chunk_ns) < MIN_CHUNKS or not can_fork():
        yield lambda: None
        return
    with ChildProcess(partial(prepare_charts, run, frame)) as child:
        yield child.result


def write_summary(run: Path, summary: Summary, hint: str = RESULTS_ARE_SAFE) -> None:
    """Write summary.json into the run's folder. Raises OutputError with `hint` if the file cannot be written."""
    from loadgen.analysis.summary import as_dict

    write_text(folder_of(run) / "summary.json", json.dumps(as_dict(summary), indent=2) + "\n", hint)


def write_page(parts: list[ReportedRun], page: Path, repeats: list[RunGroup]) -> None:
    """Write the HTML page on several runs. `repeats` contains the groups of repeats among the runs."""
    from loadgen.analysis.repeats import section
    from loadgen.analysis.repeats_page import repeats_document
    from loadgen.analysis.report.page import render
    from loadgen.analysis.report.run_document import page_document

    if len(repeats) == 1 and repeats[0].between is not None and len(repeats[0].parts) == len(parts) > 1:
        write_text(page, render(repeats_document(parts, repeats[0].between)))
        return
    extras = []
    for index, group in enumerate(repeats, 1):
        assert group.between is not None
        name = f"between-runs-{index}" if index > 1 else "between-runs"
        title = f"Between runs of {group.folder.name}" if len(repeats) > 1 else "Between runs"
        extras.append(section(group.between, name, title))
    write_text(page, render(page_document(parts, extras)))


def write_text(file: Path, text: str, hint: str = RESULTS_ARE_SAFE) -> None:
    """Write `text` to a file of results. If several commands write the same file, the last command wins.

    The file is replaced atomically, so a reader never sees half of it. A device such as /dev/stdout is written
    directly. Raises OutputError with `hint` if the file cannot be written.

    If the file is a symbolic link, its name decides what happens:

    - A name that matches RESULT_FILE: the link is replaced by the file. In a folder from another person, such a link
      might point to a file that must not be overwritten.
    - Any other name: the link is followed, because the user has chosen this name.
    """
    is_ours = RESULT_FILE.fullmatch(file.name) is not None
    target = file.parent.resolve() / file.name if is_ours else file.resolve()
    is_device = not is_ours and file.exists() and not file.is_file()  # such as /dev/stdout
    temporary = file if is_device else target.with_name(f"{target.name}.{os.urandom(4).hex()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        if temporary != file:
            temporary.replace(target)
    except OSError as error:
        if temporary != file:
            with suppress(OSError):
                temporary.unlink()
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
    """Compare two groups of runs, A and B. Return the comparison, the runs of A and the runs of B.

    - `a` and `b`: the paths of the runs in each group. A path is the folder of one run, or a folder of repeats.
    - `unequal_hint`: advice for the user if the two groups did unequal work. PlanError is then raised with this advice.
      If `unequal_hint` is None, groups with unequal work are compared too.
    - `margin`: the largest relative difference that does not matter.
    - `run_variation`: the largest relative difference to expect between two runs of the same server.
    - `gates`: the conditions of --fail-if.

    Raises RunFileError for a path without a run.
    """
    from loadgen.analysis.compare import compare, read_run

    group_a, group_b = ([read_run(run) for path in side for run in runs_in(path)] for side in (a, b))
    result = compare(group_a, group_b, margin=margin, gates=gates, run_variation=run_variation)
    if result.unequal and unequal_hint:
        lines = [f"  {difference.sentence}" for difference in result.unequal]
        raise PlanError("\n".join(["the two sides did not do equal work:", *lines]), unequal_hint)
    return result, group_a, group_b
