"""Output of commands: results on stdout, progress on stderr, and the exit code.

With --json, stdout contains the JSON result and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

from msgspec import to_builtins
from typer import Option

from loadgen import errors
from loadgen.cli.options import ADVANCED, OUTPUT, confidence_level
from loadgen.cli.streams import raw_stream, results_are_kept
from loadgen.errors import OutputError
from loadgen.results import (
    RunGroup,
    folder_of,
    load_and_summarise,
    missing_objectives,
    parse_expressions,
    runs_in,
    write_page,
    write_summary,
    write_text,
)

if TYPE_CHECKING:
    from loadgen.analysis.frame import Frame
    from loadgen.analysis.report import Document
    from loadgen.analysis.report.run_document import ReportedRun
    from loadgen.analysis.run.runfile import Run
    from loadgen.analysis.summary import Summary
    from loadgen.engine.prepare import OnProgress
    from loadgen.live.snapshot import PlannedEnd
    from loadgen.plan import Plan

ASSERT = (
    "Objective of the run: 'ttft.p99 < 500ms'. Another example: 'complete >= 99.9%'. Repeatable. Exit code 4 if the "
    "run violates an objective."
)
CONFIDENCE = (
    "Confidence with which each --assert must be met, such as 95%: the whole interval must meet the bound. Exit code 6 "
    "if the bound lies inside the interval. Default: the measured figure decides."
)
INCONCLUSIVE = "How to count an inconclusive result: pass (exit code 0) or fail (4) instead of exit code 6."
GOODPUT = (
    "Objective of each request: 'ttft < 500ms'. Repeatable. A request is good if it meets all of these objectives."
)
Report = Annotated[bool, Option("--report/--no-report", help="Write report.html.", **ADVANCED)]
AsJson = Annotated[bool, Option("--json", help="Print summary.json and nothing else.", **OUTPUT)]
Quiet = Annotated[bool, Option("--quiet", help="Print only failures.", **OUTPUT)]
Assertions = Annotated[list[str] | None, Option("--assert", metavar="EXPR", help=ASSERT, **OUTPUT)]
Goodput = Annotated[list[str] | None, Option("--goodput", metavar="EXPR", help=GOODPUT, **OUTPUT)]
Confidence = Annotated[
    float | None,
    Option("--confidence", parser=confidence_level, metavar="LEVEL", help=CONFIDENCE, **ADVANCED),
]
InconclusiveAs = Literal["pass", "fail"] | None
Inconclusive = Annotated[InconclusiveAs, Option("--inconclusive", metavar="pass|fail", help=INCONCLUSIVE, **ADVANCED)]
Junit = Annotated[
    Path | None, Option(help="Also write the result of each --assert to this file, as JUnit XML.", **ADVANCED)
]


def objective_settings(
    settings: Mapping[str, Any],
    assertions: Sequence[str] | None,
    confidence: float | None,
    goodput: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the fields `objectives`, `confidence` and `goodput` of a Plan.

    Values from the command line override those in `settings`, which come from a plan file.
    """
    return {
        "objectives": assertions or settings.get("objectives"),
        "confidence": confidence or settings.get("confidence"),
        "goodput": goodput or settings.get("goodput"),
    }


def write_results(output: Output, folder: Path, *, report: bool) -> int:
    """Write and print the results of the finished run in `folder`. Return the exit code of the command.

    With `report`, the HTML report is written too.
    """
    results_are_kept(folder, text_only=not output.as_json)
    return exit_code(output.results([folder], folder / "report.html" if report else None), output.inconclusive)


def exit_code(summaries: Sequence[Summary], inconclusive: InconclusiveAs = None) -> int:
    """Return the exit code of a command from the summaries of its runs.

    The code is that of the first reason in this list that applies to any of the runs:

    - 130: The run was interrupted.
    - 5: This machine could not send a request.
    - 4: An objective failed.
    - 1: A request is not complete, and no objective covers its outcome.
    - 5: The client limited the run in another way.
    - 6: An objective is inconclusive.
    - 0: None of these reasons applies.

    If this machine could not send a request, failed objectives and incomplete requests say nothing about the server.
    This reason therefore comes before the codes 4 and 1. If `inconclusive` is `pass` or `fail`, inconclusive objectives
    count as passed or failed.
    """
    verdicts = {objective.verdict for summary in summaries for objective in summary.objectives}
    objectives_code = verdicts_code(verdicts, inconclusive)
    reasons = [
        (errors.EXIT_INTERRUPTED, any(summary.run.interrupted for summary in summaries)),
        (errors.EXIT_CLIENT_LIMITED, any(summary.client.client_limit for summary in summaries)),
        (errors.EXIT_ASSERTION, objectives_code == errors.EXIT_ASSERTION),
        (errors.EXIT_REQUESTS_FAILED, any(map(has_unanswered, summaries))),
        (errors.EXIT_CLIENT_LIMITED, any(summary.client.verdict == "limited" for summary in summaries)),
    ]
    return next((code for code, applies in reasons if applies), objectives_code)


def verdicts_code(verdicts: Collection[str], inconclusive: InconclusiveAs) -> int:
    """Return the exit code for the verdicts on objectives.

    - 4: an objective failed.
    - 6: no objective failed, and an objective is inconclusive.
    - 0: otherwise.

    If `inconclusive` is `pass` or `fail`, inconclusive objectives count as passed or failed instead.
    """
    if "fail" in verdicts:
        return errors.EXIT_ASSERTION
    if "inconclusive" in verdicts:
        codes = {"pass": errors.EXIT_OK, "fail": errors.EXIT_ASSERTION, None: errors.EXIT_INCONCLUSIVE}
        return codes[inconclusive]
    return errors.EXIT_OK


def has_unanswered(summary: Summary) -> bool:
    """Return True if a request is not complete, and no objective says how many such requests are acceptable.

    For example, `--assert 'rejected < 5%'` says this for rejected requests, and an objective on `complete` says it for
    all requests. Without such an objective, a CI job must not pass if the server rejected a part of the load.
    """
    covered = {objective.figure for objective in summary.objectives}
    uncovered = () if "complete" in covered else {"truncated", "failed", "rejected", "dropped"} - covered
    return any(getattr(summary.requests, state) for state in uncovered)


def print_error(sentence: str) -> None:
    """Print a message to stderr, even with --quiet or --json."""
    print(f"loadgen: {sentence}", file=sys.stderr)


@dataclass(kw_only=True)
class Output:
    """The output of one command. Options such as `--json`, `--quiet` and `--junit` determine its form."""

    as_json: bool
    quiet: bool
    assertions: Sequence[str] | None = None
    confidence: float | None = None
    goodput: Sequence[str] | None = None
    junit: Path | None = None
    inconclusive: InconclusiveAs = None
    recorded: bool = False
    """True for recorded runs, which may contain objectives. False for new runs."""

    def __post_init__(self) -> None:
        self.objectives, self._bounds = parse_expressions(
            self.assertions, self.goodput, self.junit, confidence=self.confidence, recorded=self.recorded
        )
        self._stream = sys.stderr if self.as_json else sys.stdout
        self._known: dict[Path, ReportedRun] = {}

    def say(self, line: str) -> None:
        """Print one line of text to stdout, or to stderr with --json. With --quiet nothing is printed."""
        if not self.quiet:
            print(line, file=self._stream, flush=True)

    @contextmanager
    def progress(self, plan: Plan | None, *, plain: bool = True) -> Iterator[OnProgress]:
        """Show the progress of a run on stderr in a `with` block. Yield the function that updates the display.

        With --quiet, no progress is shown. If stderr is not a terminal, progress is shown only if `plain` is True.
        """
        from loadgen.live.terminal import show_progress

        end = planned_end(plan)
        if self.quiet or not (plain or sys.stderr.isatty()):
            yield lambda _phase, _counts: None
        else:
            with show_progress(end, sys.stderr, raw=raw_stream(sys.stderr)) as show:
                yield show

    def document(self, as_json: str, as_text: Callable[[], str]) -> None:
        """Print a result as JSON or as text, depending on the options."""
        if self.as_json:
            print(as_json, end="")
        elif not self.quiet:
            print(as_text(), file=raw_stream(sys.stdout))

    def loaded(self, path: Path, run: Run, frame: Frame, *, drawn: bool) -> None:
        """Summarise a run whose content, `run` and `frame`, is already in memory.

        Call this method before `results`, which then uses the summary instead of reading the run file at `path`.
        `drawn` is True if `results` will write an HTML page. The summary then also contains the data of the charts.
        """
        self._known[path] = self._summarised(path, drawn=drawn, known=(run, frame))

    def _summarised(self, path: Path, *, drawn: bool, known: tuple[Run, Frame] | None = None) -> ReportedRun:
        return load_and_summarise(
            path, self.objectives, self._bounds, confidence=self.confidence, drawn=drawn, known=known
        )

    def results(self, paths: Sequence[Path], page: Path | None) -> list[Summary]:
        """Write summary.json for each run and one `page` for all runs, print the figures, and return the summaries.

        A path may be a folder of repeats, which are reported together. If a file cannot be written, OutputError is
        raised after the figures have been printed.
        """
        problems: list[OutputError] = []
        groups = [self._group(path, problems, drawn=page is not None) for path in paths]
        parts = [part for group in groups for part in group.parts]
        summaries = [part.summary for part in parts]
        if page is not None:
            with _collect_errors(problems):
                write_page(parts, page, [group for group in groups if group.between])
        if self.junit is not None:
            self._write_junit(self.junit, summaries, problems)
        if self.as_json:
            results = [group.json for group in groups]
            print(json.dumps(results[0] if len(results) == 1 else results, indent=2))
        elif not self.quiet:
            self._print_groups(groups)
            if not problems:
                print(page or groups[0].folder / "summary.json")
        if self.as_json or self.quiet:
            self._print_failures(summaries)
        if problems:
            raise OutputError("\n".join(map(str, problems)), problems[0].hint)
        return summaries

    def _write_junit(self, file: Path, summaries: list[Summary], problems: list[OutputError]) -> None:
        from loadgen.analysis.slo import junit

        if not any(summary.objectives for summary in summaries):
            raise missing_objectives()
        with _collect_errors(problems):
            write_text(file, junit(summaries))

    def _print_groups(self, groups: list[RunGroup]) -> None:
        """Print the figures of each group. A group is one run, or all repeats in one folder."""
        from loadgen.analysis import repeats
        from loadgen.analysis.report.run_document import brief_document

        for group in groups:
            summaries = [part.summary for part in group.parts]
            document = repeats.document(group.between, summaries) if group.between else brief_document(summaries[0])
            print()
            print_document(document)
            print()

    def _group(self, path: Path, problems: list[OutputError], *, drawn: bool) -> RunGroup:
        """Load the run at `path`, or all repeats in the folder `path`, and write a summary.json for each run.

        A folder of repeats also gets a summary.json about all repeats together. If a summary.json cannot be written,
        the error is appended to `problems`, and no exception is raised. `drawn` is True if an HTML page will be
        written. The result then also contains the data of the charts.
        """
        from loadgen.analysis.repeats import summarise_repeats
        from loadgen.analysis.summary import as_dict

        parts = []
        for run in runs_in(path):
            known = self._known.pop(run, None)
            parts.append(known or self._summarised(run, drawn=drawn))
            with _collect_errors(problems):
                write_summary(run, parts[-1].summary)
        summaries = [as_dict(part.summary) for part in parts]
        if runs_in(path) == [path]:
            return RunGroup(folder_of(path), parts, summaries[0])
        together = summarise_repeats([part.summary for part in parts])
        joint = to_builtins(together)
        run_names = [part.run.path.parent.name for part in parts]
        with _collect_errors(problems):
            write_text(path / "summary.json", json.dumps({"repeats": joint, "runs": run_names}, indent=2) + "\n")
        return RunGroup(path, parts, {"repeats": joint, "runs": summaries}, together)

    def _print_failures(self, summaries: list[Summary]) -> None:
        """Print to stderr everything in `summaries` that affects the exit code, such as failed objectives.

        This method is used with --json and --quiet, which suppress the text of the results. Inconclusive objectives are
        printed too, except with both --quiet and `--inconclusive pass`.
        """
        from loadgen.analysis.report.findings import findings, measured_text
        from loadgen.analysis.report.tables import failures

        for summary in summaries:
            prefix = f"{summary.run.id}: " if len(summaries) > 1 else ""
            unanswered = has_unanswered(summary)
            finding_ids = {"interrupted", "client"} | ({"complete"} if unanswered else set())
            for finding in findings(summary):
                if finding.id in finding_ids and finding.level in ("warning", "error"):
                    print_error(prefix + finding.sentence)
            for row in failures(summary).rows if unanswered else ():
                print_error(f"{prefix}{row.key}: {'; '.join(row.cells[-1].lines)}")
            for objective in summary.objectives:
                if should_print(objective.verdict, self.inconclusive, quiet=self.quiet):
                    print_error(f"{prefix}{objective.verdict}: {objective.objective}: {measured_text(objective)}")


@contextmanager
def _collect_errors(problems: list[OutputError]) -> Iterator[None]:
    """Append an OutputError that is raised in the `with` block to `problems` instead of raising it.

    The caller can print the results first, and raise the error afterwards.
    """
    try:
        yield
    except OutputError as error:
        problems.append(error)


def should_print(verdict: str, inconclusive: InconclusiveAs, *, quiet: bool) -> bool:
    """Return True if the verdict on an objective or on a condition of --fail-if must be printed to stderr.

    The function is called only if the results are not printed as text, for example because of --json or --quiet. Every
    failure is printed. An inconclusive verdict is printed too, except with both --quiet and `--inconclusive pass`.
    """
    return verdict == "fail" or (verdict == "inconclusive" and not (quiet and inconclusive == "pass"))


def planned_end(plan: Plan | None) -> PlannedEnd:
    """Return the limits at which the run of a plan ends: a number of requests, a duration and a number of tokens.

    All three limits are None if there is no plan, or if the plan uses sessions.
    """
    from loadgen.live.snapshot import PlannedEnd
    from loadgen.workloads.lengths import Fixed

    if plan is None or plan.uses_sessions:
        return PlannedEnd()
    output_tokens = plan.output_lengths.lengths
    tokens = None
    if isinstance(output_tokens, Fixed) and plan.n and not plan.may_stop_early:
        tokens = plan.n * output_tokens.length
    return PlannedEnd(plan.n, plan.duration_s, tokens)


def print_document(document: Document) -> None:
    """Print a document to stdout, with colours if it is a terminal."""
    from loadgen.analysis.report.terminal import render

    width, colour = screen_size(sys.stdout)
    print(render(document, width=width, colour=colour), end="", file=raw_stream(sys.stdout))


def screen_size(stream: TextIO, *, most: int = 100, default: int = 80) -> tuple[int, bool]:
    """Return the width of the screen in characters (at most `most`), and True if the screen shows colours.

    If `stream` is not a terminal, it has no colours. Its width is then the value of the variable COLUMNS, or `default`
    if the variable is not set.
    """
    terminal = stream.isatty()
    if not terminal and not os.environ.get("COLUMNS", "").isdecimal():
        return default, False
    return min(most, shutil.get_terminal_size().columns), terminal
