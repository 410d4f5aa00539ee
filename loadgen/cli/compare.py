"""`loadgen compare`: is B another than A, by how much, and can that be told?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from loadgen.cli import SEPARATOR
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
            help="Runs of A and of B: two of them, or A... -- B...; a folder may hold repeats. Options may stand "
            "before or after.",
            metavar="A... -- B...",
        ),
    ],
    fail_if: Annotated[
        list[str] | None,
        Option(
            metavar="EXPR",
            help="What B must not be, such as 'ttft.p99 worse by 5%'; repeatable. Exit code 4 when one holds, 6 when "
            "one is inconclusive.",
        ),
    ] = None,
    inconclusive: Inconclusive = None,
    margin: Annotated[
        float, Option(parser=fraction, metavar="SHARE", help="By how much a figure may differ before it matters.")
    ] = 0.05,
    run_variation: Annotated[
        float,
        Option(
            parser=fraction,
            metavar="SHARE",
            help="By how much two runs of one server may differ at most: what lies beyond is called better or worse.",
        ),
    ] = 0.10,
    anyway: Annotated[bool, Option("--anyway", help="Compare unequal work too, and say what differs.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the comparison as JSON and nothing else.")] = False,
    as_markdown: Annotated[bool, Option("--markdown", help="Print it as Markdown, for a pull request.")] = False,
    html: Annotated[
        Path | None, Option("--html", metavar="FILE", help="Also write it as a page, A and B overlaid.")
    ] = None,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but what failed.")] = False,
) -> None:
    """Compare B with A: both figures, their difference with its interval, and a verdict.

    Better, worse, no difference larger than X, or inconclusive. Groups of repeats are compared by how they vary between
    runs, single runs by what chance within a run can do. Unequal work is refused; a repeat whose client was the limit
    is left out. Exit codes: 0 compared, 2 not runs or unequal work, 4 a --fail-if failed, 6 one is inconclusive.
    """
    from loadgen.analysis.compare.figures import parse_gates
    from loadgen.analysis.objectives import ObjectiveError

    try:
        gates = parse_gates(fail_if or ())
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None
    hint = None if anyway else "Make them alike, or give --anyway and read the result with that in mind."
    result, *groups = compare_paths(*split_sides(runs), hint, margin=margin, gates=gates, run_variation=run_variation)
    if html is not None:
        from loadgen.analysis.compare import page_document
        from loadgen.analysis.report.page import render
        from loadgen.analysis.report.run_document import prepare_run

        a, b = ([prepare_run(each.run, each.frame, each.summary) for each in group] for group in groups)
        links = [report_link(each.run.path.parent, html) for each in (*a, *b)]
        write_text(html, render(page_document(result, a, b, links)))
    _print(result, inconclusive, as_json=as_json, as_markdown=as_markdown, quiet=quiet)
    raise Exit(verdicts_code({gate.verdict for gate in result.gates}, inconclusive))


def split_sides(runs: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The runs on either side of `--`; of two runs one each. Raises PlanError where it is not clear which is which."""
    paths = [Path(run) for run in runs if run != SEPARATOR]
    begin = list(runs).index(SEPARATOR) if SEPARATOR in runs else 1
    if len(paths) + 1 < len(runs):
        raise PlanError("there is more than one --", "Write: loadgen compare A... -- B...")
    if len(paths) == len(runs) != 2:
        raise PlanError(f"{len(paths)} runs, and nothing says where B begins", "Write: loadgen compare A... -- B...")
    if not 0 < begin < len(paths):
        raise PlanError("there are runs on one side of -- only", "Write: loadgen compare A... -- B...")
    return paths[:begin], paths[begin:]


def _print(found: Comparison, inconclusive: InconclusiveAs, *, as_json: bool, as_markdown: bool, quiet: bool) -> None:
    from loadgen.analysis.compare import document
    from loadgen.analysis.report import markdown

    if as_json:
        print(json.dumps(found.json(), indent=2))
    elif as_markdown:
        print(markdown(document(found, brief=False)), end="")
    elif not quiet:
        print_document(document(found, brief=True))
        return
    for gate in found.gates:
        if should_print(gate.verdict, inconclusive, quiet=quiet):
            print_error(gate.sentence)
