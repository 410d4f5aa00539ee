"""Output of commands: results on stdout, progress on stderr, and the exit code.

With --json, stdout contains the JSON result and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
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
    from loadgen.engine.client_health import LiveCounters
    from loadgen.engine.prepare import OnProgress
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

PLAIN_LINE_INTERVAL_S = 5.0
"""Time between two progress lines if stderr is not a terminal."""
PREPARING = ("building prompts", "connecting")
"""Phases of a run before its first request is sent."""
MANY_PROMPTS = 1_000
"""The progress of building prompts is shown from this number of prompts on. Building fewer prompts takes no time."""
FIGURES_INTERVAL_S = 0.25
"""Minimum time between two computations of the figures in a progress line."""
MIN_BAR_CHARACTERS = 6
MAX_BAR_CHARACTERS = 24
"""Minimum and maximum width of the progress bar. A terminal with less space shows no bar."""


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
    """Write and print the results of a finished run. Return the exit code of the command."""
    results_are_kept(folder, text_only=not output.as_json)
    return exit_code(output.results([folder], folder / "report.html" if report else None), output.inconclusive)


def exit_code(summaries: Sequence[Summary], inconclusive: InconclusiveAs = None) -> int:
    """Return the exit code of a command that made these runs.

    The first reason that applies to any of the runs decides:

    - 130: the run was interrupted.
    - 5: this machine could not send a request.
    - 4: an objective failed.
    - 1: a request was not complete, and no objective covers its outcome.
    - 5: the client was the limit in another way.
    - 6: an objective is inconclusive.
    - 0: none of these reasons applies.

    If this machine could not send requests, failed objectives and incomplete requests say nothing about the server.
    Therefore the reason "could not send a request" is checked before codes 4 and 1.
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

    - 4 if an objective failed.
    - 6 if an objective is inconclusive. If `inconclusive` is `pass` or `fail`, the code is 0 or 4 instead.
    - 0 otherwise.
    """
    if "fail" in verdicts:
        return errors.EXIT_ASSERTION
    if "inconclusive" in verdicts:
        codes = {"pass": errors.EXIT_OK, "fail": errors.EXIT_ASSERTION, None: errors.EXIT_INCONCLUSIVE}
        return codes[inconclusive]
    return errors.EXIT_OK


def has_unanswered(summary: Summary) -> bool:
    """Return True if at least one request is not complete, and no objective covers its outcome.

    For example, `--assert 'rejected < 5%'` covers rejected requests, and an objective on `complete` covers every
    outcome. Without such an objective, a CI job must not pass if the server rejected a part of the load.
    """
    covered = {objective.figure for objective in summary.objectives}
    uncovered = () if "complete" in covered else {"truncated", "failed", "rejected", "dropped"} - covered
    return any(getattr(summary.requests, state) for state in uncovered)


def print_error(sentence: str) -> None:
    """Print a message to stderr, even with --quiet or --json."""
    print(f"loadgen: {sentence}", file=sys.stderr)


@dataclass(kw_only=True)
class Output:
    """Writes and prints the results of one command, as the output options of the command require."""

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
        """Show the progress of a run on stderr while this context is open.

        If stderr is not a terminal, progress is shown only with `plain`.
        """
        requests, duration_s = (None, None) if plan is None or plan.uses_sessions else (plan.n, plan.duration_s)
        if self.quiet or not (plain or sys.stderr.isatty()):
            yield lambda _phase, _counts: None
        else:
            with show_progress(requests, duration_s, sys.stderr) as show:
                yield show

    def document(self, as_json: str, as_text: Callable[[], str]) -> None:
        """Print a result as JSON or as text, depending on the options."""
        if self.as_json:
            print(as_json, end="")
        elif not self.quiet:
            print(as_text(), file=raw_stream(sys.stdout))

    def loaded(self, path: Path, run: Run, frame: Frame, *, drawn: bool) -> None:
        """Store the content of a run that is in memory, so that `results` does not have to read its file.

        `drawn` is True if `results` will write an HTML page, which needs the data of the charts.
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
        """Print the figures of each run, or of all repeats in a folder together."""
        from loadgen.analysis import repeats
        from loadgen.analysis.report.run_document import brief_document

        for group in groups:
            summaries = [part.summary for part in group.parts]
            document = repeats.document(group.between, summaries) if group.between else brief_document(summaries[0])
            print()
            print_document(document)
            print()

    def _group(self, path: Path, problems: list[OutputError], *, drawn: bool) -> RunGroup:
        """Load the run or the repeats at `path`, and write their summary.json files.

        A folder of repeats also gets a joint summary.json. If a file cannot be written, the error is appended to
        `problems`.
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
        """Print to stderr everything that affects the exit code. Used if --json or --quiet suppresses the text of the
        results.

        With --json, an inconclusive objective is printed even if it counts as a pass.
        """
        from loadgen.analysis.report.findings import findings, measured_text
        from loadgen.analysis.report.tables import failures

        for summary in summaries:
            prefix = f"{summary.run.id}: " if len(summaries) > 1 else ""
            unanswered = has_unanswered(summary)
            finding_ids = {"interrupted", "client"} | ({"complete"} if unanswered else set())
            for finding in findings(summary):
                if finding.id in finding_ids and finding.level != "ok":
                    print_error(prefix + finding.sentence)
            for row in failures(summary).rows if unanswered else ():
                print_error(f"{prefix}{row.key}: {'; '.join(row.cells[-1].lines)}")
            for objective in summary.objectives:
                if should_print(objective.verdict, self.inconclusive, quiet=self.quiet):
                    print_error(f"{prefix}{objective.verdict}: {objective.objective}: {measured_text(objective)}")


@contextmanager
def _collect_errors(problems: list[OutputError]) -> Iterator[None]:
    """Append an OutputError raised in this context to `problems`, so that the results can be printed first."""
    try:
        yield
    except OutputError as error:
        problems.append(error)


def should_print(verdict: str, inconclusive: InconclusiveAs, *, quiet: bool) -> bool:
    """Return True if the verdict on an objective must be printed to stderr when the results are not printed as text.

    Every failure is printed. An inconclusive verdict is also printed, except with both --quiet and `--inconclusive
    pass`.
    """
    return verdict == "fail" or (verdict == "inconclusive" and not (quiet and inconclusive == "pass"))


@contextmanager
def show_progress(requests: int | None, duration_s: float | None, stream: TextIO) -> Iterator[OnProgress]:
    """Yield a callback that shows progress on `stream`.

    A terminal shows one live line. Other streams get a plain line every few seconds.
    """
    progress = _ProgressLine(requests, duration_s)
    shown_s = 0.0

    def show_plain(phase: str, counts: LiveCounters) -> None:
        nonlocal shown_s
        progress.update(phase, counts)
        if progress.now_s - shown_s >= PLAIN_LINE_INTERVAL_S or phase == "ended":
            shown_s = progress.now_s
            print(progress.plain(phase, counts), file=stream, flush=True)

    if not stream.isatty():
        yield show_plain
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=raw_stream(stream), highlight=False)
    bar = "━╌" if console.encoding.startswith("utf") else "#-"
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show_live(phase: str, counts: LiveCounters) -> None:
            progress.update(phase, counts)
            live.update(Text(progress.live(phase, counts, console.width, bar), no_wrap=True), refresh=True)

        yield show_live


class _ProgressLine:
    """Formats the progress of a run: remaining work, TTFT, TPOT, tokens per second and incomplete requests.

    Latencies cover the whole run so far. The token rate covers the last seconds, and at the end the whole run.
    """

    def __init__(self, requests: int | None, duration_s: float | None) -> None:
        self._requests = requests
        self._duration_s = duration_s
        self._started_s = self.now_s = time.monotonic()
        self._running_s: float | None = None
        self._figures: dict[str, str] = {}
        """Text of each figure by its name."""
        self._figured_s = 0.0
        self._prepared = 0, 0
        """Number of prompts that had been built at the update before the last one, and at the last one."""

    def update(self, phase: str, counts: LiveCounters) -> None:
        """Store the phase and the current counters of the run.

        The figures in the progress line are computed from the counters a few times per second, and at the end of the
        run.
        """
        self.now_s = time.monotonic()
        if phase not in PREPARING:
            self._running_s = self._running_s or self.now_s
        self._prepared = self._prepared[1], counts.prepared
        if phase == "ended" or self.now_s - self._figured_s >= FIGURES_INTERVAL_S:
            self._figured_s = self.now_s
            self._figures = _live_figures(phase, counts)

    def plain(self, phase: str, counts: LiveCounters) -> str:
        """Return a progress line with all counters, for a stream that is not a terminal."""
        if phase in PREPARING:
            return f"{self.now_s - self._started_s:6.1f} s  {self._preparing(phase, counts)}"
        total = "" if self._requests is None else f"/{self._requests}"
        return (
            f"{self.now_s - self._started_s:6.1f} s  {phase}: {counts.sent}{total} sent, "
            f"{counts.streaming} streaming, {counts.complete} complete, {counts.truncated} truncated, "
            f"{counts.failed} failed, {counts.rejected} rejected, {counts.dropped} dropped, "
            f"{', '.join(self._figures.values())}"
        )

    def live(self, phase: str, counts: LiveCounters, width: int, bar: str) -> str:
        """Return a progress line for a terminal, shorter than `width` characters.

        In a narrow terminal the line has no TPOT and no progress bar, and is cut off at the end. `bar` holds two
        characters: one for completed work and one for remaining work.
        """
        done, remaining = self._remaining(counts)
        incomplete = {state: getattr(counts, state) for state in ("failed", "truncated", "rejected", "dropped")}
        states = [state for state, count in incomplete.items() if count]
        wrong = [f"{sum(incomplete.values()):,} {'incomplete' if len(states) > 1 else states[0]}"] if states else []
        elapsed = f"{self.now_s - self._started_s:6.1f} s  "
        room = width - 3 - len(elapsed)
        figures = self._figures
        if phase in PREPARING:
            figures = {}
            remaining = self._preparing(phase, counts)
        text = "  ".join([remaining, *figures.values(), *wrong])
        if len(text) + MIN_BAR_CHARACTERS > room and "TPOT" in figures:
            text = "  ".join([remaining, *(text for name, text in figures.items() if name != "TPOT"), *wrong])
        bar_width = min(MAX_BAR_CHARACTERS, room - len(text))
        if done is not None and bar_width >= MIN_BAR_CHARACTERS:
            full = round(min(1.0, done) * bar_width)
            text = f"{bar[0] * full}{bar[1] * (bar_width - full)}  {text}"
        return f"{elapsed}{text}"[: width - 1]

    def _preparing(self, phase: str, counts: LiveCounters) -> str:
        """Return the progress before the first request: the number of prompts that have been built, or the phase."""
        if self._prepared[0] == self._prepared[1] or counts.prepared < MANY_PROMPTS:
            return phase
        total = "" if self._requests is None else f" of {self._requests:,}"
        return f"building prompts: {counts.prepared:,}{total}"

    def _remaining(self, counts: LiveCounters) -> tuple[float | None, str]:
        """Return the completed fraction of the run, and its remaining work as text.

        The fraction is None if the total is unknown.
        """
        ended = counts.complete + counts.truncated + counts.failed + counts.rejected + counts.dropped
        elapsed_s = self.now_s - (self._running_s or self.now_s)
        if self._duration_s is not None and elapsed_s < self._duration_s:
            minutes, seconds = divmod(math.ceil(self._duration_s - elapsed_s), 60)
            return elapsed_s / self._duration_s, f"{minutes}:{seconds:02} left"
        if self._requests is None or self._duration_s is not None:
            return None, f"{max(0, counts.sent + counts.dropped - ended):,} in flight"
        return ended / self._requests, f"{self._requests - ended:,} left"


def _live_figures(phase: str, counts: LiveCounters) -> dict[str, str]:
    """Return the current TTFT, TPOT and token rate of a run as text. The figures are defined as in the report."""
    from loadgen.analysis.format import duration

    figures = {}
    for name, histogram in (("TTFT", counts.ttft), ("TPOT", counts.tpot)):
        percentiles = histogram.percentiles_s(0.5, 0.99)
        if percentiles:
            p50, p99 = map(duration, percentiles)
            figures[name] = f"{name} p50 {p50} p99 {p99}"
    rate = counts.mean_tokens_per_s if phase == "ended" else counts.tokens_per_s
    return {**figures, "rate": f"{rate:,.0f} tokens/s"}


def print_document(document: Document) -> None:
    """Print a document to stdout, with colours if it is a terminal."""
    from loadgen.analysis.report.terminal import render

    width, colour = screen_size(sys.stdout)
    print(render(document, width=width, colour=colour), end="", file=raw_stream(sys.stdout))


def screen_size(stream: TextIO, *, most: int = 100, default: int = 80) -> tuple[int, bool]:
    """Return the width of the screen in characters (at most `most`), and True if the screen shows colours.

    A stream that is not a terminal has no colours. Its width is that of the variable COLUMNS, or `default` if COLUMNS
    is not set.
    """
    terminal = stream.isatty()
    if not terminal and not os.environ.get("COLUMNS", "").isdecimal():
        return default, False
    return min(most, shutil.get_terminal_size().columns), terminal
