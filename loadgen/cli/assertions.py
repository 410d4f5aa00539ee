"""The options `--assert` and `--junit`, which several commands share, and the exit code they lead to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from loadgen.errors import (
    EXIT_ASSERTION,
    EXIT_CLIENT_LIMITED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REQUESTS_FAILED,
    PlanError,
)

if TYPE_CHECKING:
    from analysis.objectives import Bound, Objective

Assertions = Annotated[
    list[str] | None,
    Option(
        "--assert",
        metavar="EXPR",
        help="What the run has to keep to, such as 'ttft.p99 < 500ms' or 'complete >= 99.9%'; repeatable. "
        "Exit code 4 when one fails.",
        rich_help_panel="Output",
    ),
]
Goodput = Annotated[
    list[str] | None,
    Option(
        "--goodput",
        metavar="EXPR",
        help="What makes a single request good, such as 'ttft < 500ms'; repeatable: it has to keep all.",
        rich_help_panel="Output",
    ),
]
Junit = Annotated[
    Path | None,
    Option(help="Also write what became of each --assert to this file, as JUnit XML.", rich_help_panel="Output"),
]

PRECEDENCE = (EXIT_INTERRUPTED, EXIT_ASSERTION, EXIT_REQUESTS_FAILED, EXIT_CLIENT_LIMITED, EXIT_OK)


def objectives_of(expressions: Sequence[str] | None, junit: Path | None) -> Sequence[Objective]:
    """The objectives asked for. Raises PlanError, which names every mistake, so that nothing is sent in vain."""
    if junit is not None and not expressions:
        raise PlanError("--junit without --assert has nothing to write", "Name an objective: --assert 'ttft.p99 < 1s'")
    if junit is not None and not junit.absolute().parent.is_dir():
        raise PlanError(f"--junit {junit}: there is no folder {junit.parent}", "Make it first.")
    if not expressions:
        return ()
    from analysis.objectives import ObjectiveError, parse

    try:
        return parse(expressions)
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None


def bounds_of(expressions: Sequence[str] | None) -> Sequence[Bound]:
    """What makes a request good. Raises PlanError, which names every mistake."""
    if not expressions:
        return ()
    from analysis.objectives import ObjectiveError, parse_bounds

    try:
        return parse_bounds(expressions)
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None


def exit_code(summaries: Sequence[Mapping[str, Any]]) -> int:
    """The first in PRECEDENCE to which one of these runs leads: 130 interrupted, 4 an objective failed, 1 a request
    was not complete and no objective speaks of that, 5 the client was the limit, 0 otherwise."""
    reached = [code for summary in summaries for code in _codes(summary)]
    return min(reached, key=PRECEDENCE.index, default=EXIT_OK)


def _codes(summary: Mapping[str, Any]) -> list[int]:
    objectives = summary.get("objectives", ())
    reasons = {
        EXIT_INTERRUPTED: summary["run"]["interrupted"],
        EXIT_ASSERTION: any(each["verdict"] == "fail" for each in objectives),
        EXIT_REQUESTS_FAILED: _unspoken(summary["requests"], {each["figure"] for each in objectives}),
        EXIT_CLIENT_LIMITED: summary["client"]["verdict"] == "limited",
    }
    return [code for code, holds in reasons.items() if holds]


def _unspoken(requests: Mapping[str, Any], figures: set[str]) -> bool:
    """Whether requests ended in a way that no objective speaks of: `complete` speaks of all of them."""
    return "complete" not in figures and any(
        requests[state] for state in ("truncated", "failed", "dropped") if state not in figures
    )
