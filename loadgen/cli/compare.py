"""The command `compare`: compare runs B with runs A. Each figure gets an interval and a verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from loadgen.analysis.fast_sorting import import_numpy
from loadgen.cli.command_help import SEPARATOR
from loadgen.cli.options import fraction
from loadgen.cli.output import Inconclusive, InconclusiveAs, print_document, print_error, should_print, verdicts_code
from loadgen.errors import PlanError
from loadgen.results import compare_paths, report_link, write_text

if TYPE_CHECKING:
    from loadgen.analysis.compare import Comparison


def compare(
    runs: Annotated[
        list[str],
        Argument(
            help="The runs to compare: two runs A and B, or several runs A... -- B... A folder may contain repeats. "
            "Options may be written before or after the runs.",
            metavar="A... -- B...",
        ),
    ],
    fail_if: Annotated[
        list[str] | None,
        Option(
            metavar="EXPR",
            help="Condition on which the command fails, such as 'ttft.p99 worse by 5%'. Repeatable. Exit code 4 if the "
            "difference exceeds the bound and chance does not explain it; 6 if it exceeds the bound but may be chance.",
        ),
    ] = None,
    inconclusive: Inconclusive = None,
    margin: Annotated[
        float, Option(parser=fraction, metavar="FRACTION", help="Smallest relative difference that matters.")
    ] = 0.05,
    run_variation: Annotated[
        float,
        Option(
            parser=fraction,
            metavar="FRACTION",
            help="Largest difference to expect between two runs of the same server. Only larger differences count as "
            "better or worse.",
        ),
    ] = 0.10,
    anyway: Annotated[
        bool, Option("--anyway", help="Also compare runs of unequal work, and report what differs.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the comparison as JSON and nothing else.")] = False,
    as_markdown: Annotated[
        bool, Option("--markdown", help="Print the comparison as Markdown, for a pull request.")
    ] = False,
    html: Annotated[
        Path | None, Option("--html", metavar="FILE", help="Also write a page with overlaid charts of A and B.")
    ] = None,
    quiet: Annotated[bool, Option("--quiet", help="Print only failures.")] = False,
) -> None:
    """Compare runs B with runs A, with a verdict per figure.

    The verdict is better, worse, no difference larger than --margin, or inconclusive. Repeats are compared by their
    variation between runs, single runs by the random variation within each run. Runs of unequal work are refused.
    Repeats in which the client was the limit are left out. Exit codes: 0 compared, and no --fail-if condition is met;
    2 not a run, or unequal work; 4 a --fail-if condition is met; 6 the runs do not show whether a --fail-if condition
    is met.
    """
    import_numpy()
    from loadgen.analysis.compare.gates import parse_gates
    from loadgen.analysis.objectives import ObjectiveError

    try:
        gates = parse_gates(fail_if or ())
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None
    hint = None if anyway else "Repeat one run with the other's plan, or add --anyway to compare them regardless."
    paths_a, paths_b = split_sides(runs)
    result, runs_a, runs_b = compare_paths(
        paths_a, paths_b, hint, margin=margin, gates=gates, run_variation=run_variation
    )
    if html is not None:
        from loadgen.analysis.compare import page_document
        from loadgen.analysis.report.page import render
        from loadgen.analysis.report.run_document import prepare_run

        a = [prepare_run(run.run, run.frame, run.summary) for run in runs_a]
        b = [prepare_run(run.run, run.frame, run.summary) for run in runs_b]
        links = [report_link(reported.run.path.parent, html) for reported in (*a, *b)]
        write_text(html, render(page_document(result, a, b, links)))
    _print(result, inconclusive, as_json=as_json, as_markdown=as_markdown, quiet=quiet)
    raise Exit(verdicts_code({gate.verdict for gate in result.gates}, inconclusive))


def split_sides(runs: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return the runs A before `--` and the runs B after it.

    Without `--` there must be exactly two runs: A and B. Raises PlanError if the runs cannot be split.
    """
    hint = "Write: loadgen compare A... -- B..."
    paths = [Path(run) for run in runs if run != SEPARATOR]
    begin = list(runs).index(SEPARATOR) if SEPARATOR in runs else 1
    if len(paths) + 1 < len(runs):
        raise PlanError("there is more than one --", hint)
    if len(paths) == len(runs) < 2:
        raise PlanError("compare needs at least two runs", hint)
    if len(paths) == len(runs) != 2:
        raise PlanError(f"{len(paths)} runs, but no -- between the runs A and the runs B", hint)
    if not 0 < begin < len(paths):
        raise PlanError("all runs are on one side of --", hint)
    return paths[:begin], paths[begin:]


def _print(
    comparison: Comparison, inconclusive: InconclusiveAs, *, as_json: bool, as_markdown: bool, quiet: bool
) -> None:
    """Print the comparison in the requested format.

    The text for the terminal contains the conditions of --fail-if. With JSON, Markdown or --quiet, failed and
    inconclusive conditions are printed to stderr.
    """
    from loadgen.analysis.compare import document
    from loadgen.analysis.report import markdown

    if as_json:
        print(json.dumps(comparison.json(), indent=2))
    elif as_markdown:
        print(markdown(document(comparison)), end="")
    elif not quiet:
        print_document(document(comparison))
        return
    for gate in comparison.gates:
        if should_print(gate.verdict, inconclusive, quiet=quiet):
            print_error(gate.sentence)
