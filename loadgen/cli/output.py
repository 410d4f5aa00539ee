"""What a command prints and writes. People read stdout; with --json stdout holds the summary and nothing else."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

from msgspec import to_builtins
from typer import Option

from loadgen import errors
from loadgen.cli.options import ADVANCED, OUTPUT
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
    "Objective of the run, such as 'ttft.p99 < 500ms' or 'complete >= 99.9%'; repeatable. "
    "Exit code 4 when one fails, 6 when one is inconclusive."
)
INCONCLUSIVE = "What an inconclusive one counts as, pass or fail: exit code 0 or 4 in place of 6."
GOODPUT = "Objective of each request, such as 'ttft < 500ms'; repeatable: a good one meets all."
Report = Annotated[bool, Option("--report/--no-report", help="Write report.html.", **ADVANCED)]
AsJson = Annotated[bool, Option("--json", help="Print summary.json and nothing else.", **OUTPUT)]
Quiet = Annotated[bool, Option("--quiet", help="Print only failures.", **OUTPUT)]
Assertions = Annotated[list[str] | None, Option("--assert", metavar="EXPR", help=ASSERT, **OUTPUT)]
Goodput = Annotated[list[str] | None, Option("--goodput", metavar="EXPR", help=GOODPUT, **OUTPUT)]
InconclusiveAs = Literal["pass", "fail"] | None
Inconclusive = Annotated[InconclusiveAs, Option("--inconclusive", metavar="pass|fail", help=INCONCLUSIVE, **ADVANCED)]
Junit = Annotated[
    Path | None, Option(help="Also write what became of each --assert to this file, as JUnit XML.", **ADVANCED)
]

PLAIN_LINE_INTERVAL_S = 5.0
BAR_LEAST, BAR_MOST = 6, 24


def write_results(output: Output, folder: Path, *, report: bool) -> int:
    """Write and print the results of a run that has ended; return its exit code."""
    results_are_kept(folder, text_only=not output.as_json)
    return exit_code(output.results([folder], folder / "report.html" if report else None), output.inconclusive)


def exit_code(summaries: Sequence[Summary], inconclusive: InconclusiveAs = None) -> int:
    """Return the first of these to which one run leads: 130 interrupted, 5 this machine could not send a request, 4 an
    objective failed, 1 a request was not complete and no objective speaks of that, 5 the client was the limit in
    another way, 6 an objective is inconclusive, 0 otherwise.

    Where this machine could not send requests, objectives that failed and requests that are missing say nothing about
    the server, so its code comes first."""
    told = verdicts_code({objective.verdict for summary in summaries for objective in summary.objectives}, inconclusive)
    reasons = [
        (errors.EXIT_INTERRUPTED, any(summary.run.interrupted for summary in summaries)),
        (errors.EXIT_CLIENT_LIMITED, any(summary.client.client_limit for summary in summaries)),
        (errors.EXIT_ASSERTION, told == errors.EXIT_ASSERTION),
        (errors.EXIT_REQUESTS_FAILED, any(map(has_unanswered, summaries))),
        (errors.EXIT_CLIENT_LIMITED, any(summary.client.verdict == "limited" for summary in summaries)),
    ]
    return next((code for code, holds in reasons if holds), told)


def verdicts_code(verdicts: Collection[str], inconclusive: InconclusiveAs) -> int:
    """What objectives or conditions lead to: 4 one failed, 6 one is inconclusive and nothing says what that counts as,
    0 otherwise."""
    codes = {"pass": errors.EXIT_OK, "fail": errors.EXIT_ASSERTION, None: errors.EXIT_INCONCLUSIVE}
    untold = codes[inconclusive] if "inconclusive" in verdicts else errors.EXIT_OK
    return errors.EXIT_ASSERTION if "fail" in verdicts else untold


def has_unanswered(summary: Summary) -> bool:
    """Return whether requests were left unanswered in a way that no objective speaks of.

    Rejected requests count: a run whose server refused a part of the load has not answered that part, and a CI job
    that says nothing about it must not pass. `--assert 'rejected < 5%'` states how many are acceptable. An objective
    on `complete` speaks of every state.
    """
    named = {objective.figure for objective in summary.objectives}
    unnamed = () if "complete" in named else {"truncated", "failed", "rejected", "dropped"} - named
    return any(getattr(summary.requests, state) for state in unnamed)


def print_error(sentence: str) -> None:
    """For people who asked for no text."""
    print(f"loadgen: {sentence}", file=sys.stderr)


@dataclass(kw_only=True)
class Output:
    """One command's output, as it was asked for."""

    as_json: bool
    quiet: bool
    assertions: Sequence[str] | None = None
    goodput: Sequence[str] | None = None
    junit: Path | None = None
    inconclusive: InconclusiveAs = None
    recorded: bool = False
    """Whether the runs are recorded already, and may bring objectives."""

    def __post_init__(self) -> None:
        self.objectives, self._bounds = parse_expressions(
            self.assertions, self.goodput, self.junit, recorded=self.recorded
        )
        self._stream = sys.stderr if self.as_json else sys.stdout
        self._known: dict[Path, ReportedRun] = {}

    def say(self, line: str) -> None:
        """One line for people."""
        if not self.quiet:
            print(line, file=self._stream, flush=True)

    @contextmanager
    def progress(self, plan: Plan | None, *, plain: bool = True) -> Iterator[OnProgress]:
        """Shows the run's progress, on stderr; `plain`: also where that is no terminal."""
        requests, duration_s = (None, None) if plan is None or plan.uses_sessions else (plan.n, plan.duration_s)
        if self.quiet or not (plain or sys.stderr.isatty()):
            yield lambda _phase, _counts: None
        else:
            with show_progress(requests, duration_s, sys.stderr) as show:
                yield show

    def document(self, as_json: str, as_text: Callable[[], str]) -> None:
        """A result in the form that was asked for."""
        if self.as_json:
            print(as_json, end="")
        elif not self.quiet:
            print(as_text(), file=raw_stream(sys.stdout))

    def loaded(self, path: Path, run: Run, frame: Frame, *, drawn: bool) -> None:
        """What the file of this run says, so that `results` need not read it."""
        self._known[path] = load_and_summarise(path, self.objectives, self._bounds, drawn=drawn, known=(run, frame))

    def results(self, paths: Sequence[Path], page: Path | None) -> list[Summary]:
        """Write summary.json into the folder of each run and `page` for all of them, and print the figures as
        requested. A path may be a folder of repeats, which are reported together. Returns every run's summary. Raises
        OutputError for a file that cannot be written, after the figures have been printed."""
        problems: list[OutputError] = []
        groups = [self._group(path, problems, drawn=page is not None) for path in paths]
        parts = [part for group in groups for part in group.parts]
        summaries = [part.summary for part in parts]
        if page is not None:
            with _collect_errors(problems):
                write_page(parts, page, [group for group in groups if group.between])
        if self.junit is not None:
            from loadgen.analysis.slo import junit

            if not any(summary.objectives for summary in summaries):
                raise missing_objectives()

            with _collect_errors(problems):
                write_text(self.junit, junit(summaries))
        if self.as_json:
            result = [group.json for group in groups]
            print(json.dumps(result[0] if len(result) == 1 else result, indent=2))
        elif not self.quiet:
            from loadgen.analysis import repeats
            from loadgen.analysis.report.run_document import brief_document

            for group in groups:
                own = [part.summary for part in group.parts]
                document = repeats.document(group.between, own) if group.between else brief_document(own[0])
                print()
                print_document(document)
                print()
            if not problems:
                print(page or groups[0].folder / "summary.json")
        if self.as_json or self.quiet:
            self._print_failures(summaries)
        if problems:
            raise OutputError("\n".join(map(str, problems)), problems[0].hint)
        return summaries

    def _group(self, path: Path, problems: list[OutputError], *, drawn: bool) -> RunGroup:
        from loadgen.analysis.repeats import summarise_repeats
        from loadgen.analysis.summary import as_dict

        parts = []
        for run in runs_in(path):
            known = self._known.pop(run, None)
            parts.append(known or load_and_summarise(run, self.objectives, self._bounds, drawn=drawn))
            with _collect_errors(problems):
                write_summary(run, parts[-1].summary)
        summaries = [as_dict(part.summary) for part in parts]
        if runs_in(path) == [path]:
            return RunGroup(folder_of(path), parts, summaries[0])
        together = summarise_repeats([part.summary for part in parts])
        result = {"repeats": to_builtins(together), "runs": summaries}
        named = result | {"runs": [part.run.path.parent.name for part in parts]}
        with _collect_errors(problems):
            write_text(path / "summary.json", json.dumps(named, indent=2) + "\n")
        return RunGroup(path, parts, result, together)

    def _print_failures(self, summaries: list[Summary]) -> None:
        """What failed, for people who asked for no text: what leads to an exit code, and with --json what does not."""
        from loadgen.analysis.report.findings import findings, measured_text
        from loadgen.analysis.report.tables import failures

        for summary in summaries:
            of = f"{summary.run.id}: " if len(summaries) > 1 else ""
            failed = {"interrupted", "client", *(["complete"] if has_unanswered(summary) else [])}
            for finding in findings(summary):
                if finding.id in failed and finding.level != "ok":
                    print_error(of + finding.sentence)
            for row in failures(summary).rows if has_unanswered(summary) else ():
                print_error(f"{of}{row.key}: {'; '.join(row.cells[-1].lines)}")
            for stated in summary.objectives:
                if should_print(stated.verdict, self.inconclusive, quiet=self.quiet):
                    print_error(f"{of}{stated.verdict}: {stated.objective}: {measured_text(stated)}")


@contextmanager
def _collect_errors(problems: list[OutputError]) -> Iterator[None]:
    """Collect the error of a file that cannot be written, so that the results are printed first."""
    try:
        yield
    except OutputError as error:
        problems.append(error)


def should_print(verdict: str, inconclusive: InconclusiveAs, *, quiet: bool) -> bool:
    """Whether a verdict is to be said where no text was asked for."""
    return verdict == "fail" or (verdict == "inconclusive" and not (quiet and inconclusive == "pass"))


@contextmanager
def show_progress(requests: int | None, duration_s: float | None, stream: TextIO) -> Iterator[OnProgress]:
    """Shows what it gets at its own pace: one live line in a terminal, a plain line every few seconds elsewhere."""
    look = _ProgressLine(requests, duration_s)
    shown_s = 0.0

    def show_plain(phase: str, counts: LiveCounters) -> None:
        nonlocal shown_s
        look.take(phase, counts)
        if look.now_s - shown_s >= PLAIN_LINE_INTERVAL_S or phase == "ended":
            shown_s = look.now_s
            print(look.plain(phase, counts), file=stream, flush=True)

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
            look.take(phase, counts)
            live.update(Text(look.live(phase, counts, console.width, bar), no_wrap=True), refresh=True)

        yield show_live


class _ProgressLine:
    """What is said of a run that goes on: how far it is, TTFT so far, tokens of the last second, what went wrong."""

    def __init__(self, requests: int | None, duration_s: float | None) -> None:
        self._requests, self._duration_s = requests, duration_s
        self._began_s = self.now_s = time.monotonic()
        self._running_s: float | None = None
        self._tokens = deque([(self.now_s, 0)])

    def take(self, phase: str, counts: LiveCounters) -> None:
        """These are the counts now. The oldest one kept is as close to a second ago as there is."""
        self.now_s = time.monotonic()
        if phase != "connecting":
            self._running_s = self._running_s or self.now_s
        self._tokens.append((self.now_s, counts.tokens))
        while len(self._tokens) > 2 and self._tokens[1][0] <= self.now_s - 1:
            self._tokens.popleft()

    def plain(self, phase: str, counts: LiveCounters) -> str:
        """Every count."""
        of = "" if self._requests is None else f"/{self._requests}"
        return (
            f"{self.now_s - self._began_s:6.1f} s  {phase}: {counts.sent}{of} sent, "
            f"{counts.streaming} streaming, {counts.complete} complete, {counts.truncated} truncated, "
            f"{counts.failed} failed, {counts.rejected} rejected, {counts.dropped} dropped, "
            f"{', '.join(self._figures(counts))}"
        )

    def live(self, phase: str, counts: LiveCounters, width: int, bar: str) -> str:
        """One line of fewer than `width` characters; where that is too few, its end is left out, and first the bar."""
        done, left = self._remaining(counts)
        wrong = {state: n for state in ("failed", "truncated", "rejected", "dropped") if (n := getattr(counts, state))}
        parts = [phase] if phase == "connecting" else [left, *self._figures(counts)]
        parts += [f"{sum(wrong.values()):,} {'incomplete' if len(wrong) > 1 else next(iter(wrong))}"] if wrong else []
        elapsed, said = f"{self.now_s - self._began_s:6.1f} s  ", "  ".join(parts)
        room = min(BAR_MOST, width - 3 - len(elapsed) - len(said))
        if done is not None and room >= BAR_LEAST:
            full = round(min(1.0, done) * room)
            said = f"{bar[0] * full}{bar[1] * (room - full)}  {said}"
        return f"{elapsed}{said}"[: width - 1]

    def _remaining(self, counts: LiveCounters) -> tuple[float | None, str]:
        """Which share is done, of the time or of the requests, and what is left of it."""
        ended = counts.complete + counts.truncated + counts.failed + counts.rejected + counts.dropped
        passed_s = self.now_s - (self._running_s or self.now_s)
        if self._duration_s is not None and passed_s < self._duration_s:
            minutes, seconds = divmod(math.ceil(self._duration_s - passed_s), 60)
            return passed_s / self._duration_s, f"{minutes}:{seconds:02} left"
        if self._requests is None or self._duration_s is not None:
            return None, f"{max(0, counts.sent + counts.dropped - ended):,} in flight"
        return ended / self._requests, f"{self._requests - ended:,} left"

    def _figures(self, counts: LiveCounters) -> list[str]:
        from loadgen.analysis.format import duration

        (began_s, before), (ended_s, after) = self._tokens[0], self._tokens[-1]
        rate = max(0.0, (after - before) / max(ended_s - began_s, 1e-9))
        ttft = [f"mean TTFT {duration(counts.ttft_ns / counts.answered / 1e9)}"] if counts.answered else []
        return [*ttft, f"{rate:,.0f} tokens/s"]


def print_document(document: Document) -> None:
    """Print it, with colours in a terminal."""
    from loadgen.analysis.report.terminal import render

    width, colour = screen_size(sys.stdout)
    print(render(document, width=width, colour=colour), end="", file=raw_stream(sys.stdout))


def screen_size(stream: TextIO) -> tuple[int, bool]:
    """Width and whether to use colours: plain where it is not a terminal."""
    terminal = stream.isatty()
    return min(100, shutil.get_terminal_size().columns) if terminal else 80, terminal
