"""The options `--assert` and `--junit`: what is refused before anything is sent, and the exit code in the end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.cli.output import exit_code
from loadgen.errors import PlanError
from loadgen.results import parse_expressions


def ended(
    *verdicts: tuple[str, str], interrupted: bool = False, limited: bool = False, client_limit: int = 0, **states: int
) -> Any:
    """What decides on the exit code: how requests ended, the client's verdict, and objectives as (figure, verdict)."""
    return SimpleNamespace(
        run=SimpleNamespace(interrupted=interrupted),
        requests=SimpleNamespace(**(dict.fromkeys(("truncated", "failed", "rejected", "dropped"), 0) | states)),
        client=SimpleNamespace(verdict="limited" if limited or client_limit else "ok", client_limit=client_limit),
        objectives=[SimpleNamespace(figure=figure, verdict=verdict) for figure, verdict in verdicts],
    )


@pytest.mark.parametrize(
    ("summary", "code"),
    [
        (ended(), 0),
        (ended(limited=True), 5),
        (ended(failed=1), 1),
        (ended(truncated=1, limited=True), 1),
        (ended(dropped=1), 1),
        (ended(client_limit=2, failed=2), 5),
        (ended(client_limit=2, failed=3), 5),
        (ended(("complete", "fail"), client_limit=2, failed=2), 5),
        (ended(interrupted=True, client_limit=1, failed=1), 130),
        (ended(interrupted=True, failed=1), 130),
        (ended(("ttft", "pass")), 0),
        (ended(("ttft", "inconclusive")), 6),
        (ended(("ttft", "inconclusive"), failed=1), 1),
        (ended(("ttft", "inconclusive"), limited=True), 5),
        (ended(("ttft", "pass"), ("tpot", "fail")), 4),
        (ended(("ttft", "fail"), failed=1, limited=True), 4),
        (ended(("complete", "fail"), failed=1), 4),
        (ended(("ttft", "fail"), interrupted=True), 130),
        (ended(("ttft", "pass"), failed=1), 1),
        (ended(("complete", "pass"), failed=1, truncated=1, dropped=1), 0),
        (ended(("complete", "inconclusive"), failed=1), 6),
        (ended(("ttft", "inconclusive"), ("tpot", "fail")), 4),
        (ended(("complete", "pass"), failed=1, limited=True), 5),
        (ended(("failed", "pass"), failed=1), 0),
        (ended(("failed", "pass"), failed=1, truncated=1), 1),
        (ended(("failed", "pass"), ("truncated", "pass"), failed=1, truncated=1), 0),
        (ended(("dropped", "pass"), dropped=1), 0),
        (ended(rejected=1), 1),
        (ended(("failed", "pass"), rejected=1), 1),
        (ended(("rejected", "pass"), rejected=1), 0),
        (ended(("rejected", "fail"), rejected=1), 4),
        (ended(("complete", "pass"), rejected=1), 0),
    ],
)
def test_a_run_leads_to_one_exit_code(summary: Any, code: int) -> None:
    """130 before 4 before 1 before 5 before 6 before 0, and 1 only for endings that no objective speaks of."""
    assert exit_code([summary]) == code


def test_what_is_inconclusive_counts_as_asked() -> None:
    """As a pass or as a failure."""
    untold = ended(("ttft", "inconclusive"))
    assert (exit_code([untold], "pass"), exit_code([untold], "fail")) == (0, 4)


def test_of_several_runs_the_worst_counts() -> None:
    """The first in the order of precedence; of no run, 0."""
    assert exit_code([ended(), ended(limited=True), ended(("ttft", "fail")), ended(failed=1)]) == 4
    assert exit_code([]) == 0


def test_mistakes_become_one_error_of_the_plan() -> None:
    """All of them, and the hint with all that is allowed."""
    with pytest.raises(PlanError) as error:
        parse_expressions(["ttft < 1s", "complete >= 99%", "nonsense"])
    assert len(str(error.value).splitlines()) == 2
    assert "output_tokens_per_s" in error.value.hint


def test_junit_needs_something_to_write_and_a_place(tmp_path: Path) -> None:
    """Without an objective, or where there is no folder, it is refused before the run and not after it."""
    with pytest.raises(PlanError, match="without --assert"):
        parse_expressions(None, None, tmp_path / "junit.xml")
    with pytest.raises(PlanError, match="no folder"):
        parse_expressions(["skew < 1s"], None, tmp_path / "missing" / "junit.xml")
    assert [each.text for each in parse_expressions(["skew < 1s"], None, tmp_path / "junit.xml")[0]] == ["skew < 1s"]
    assert parse_expressions(None) == ((), ())
