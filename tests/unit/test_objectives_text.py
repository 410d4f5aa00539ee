"""Objectives in the terminal: a line each, plain, and a word on what was left open."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.gather import frame_of_run
from analysis.judging import judge
from analysis.metrics import summarise
from analysis.objectives import parse
from analysis.text import render
from tests.runs import burst, failed, run_of


@pytest.mark.parametrize("simulated", [False, True])
def test_every_objective_has_its_line(tmp_path: Path, simulated: bool) -> None:
    """Verdict, expression, what was measured and what that leaves out, within the width, under a marked title."""
    run = run_of(tmp_path / "run", [*burst(59, 4), failed(59)], simulated=simulated)
    summary = summarise(run)
    asked = parse(["ttft.p99 < 1us", "failed <= 1", "complete >= 95%"])
    summary["objectives"] = judge(asked, frame_of_run(run), summary)
    lines = render(summary, width=80).splitlines()
    start = lines.index("SIMULATED at 5 times speed  objectives" if simulated else "objectives")
    text = " ".join(" ".join(lines[start + 1 :]).split())
    assert text.startswith("fail ttft.p99 < 1us: ")
    assert "; 1 request not complete and left out pass failed <= 1: 1 request cannot tell complete >= 95%: " in text
    assert text.endswith("1 objective cannot be told from this run. That is neither a pass nor a fail.")
    assert max(map(len, lines)) <= 80


def test_nothing_is_said_where_nothing_was_asked(tmp_path: Path) -> None:
    """No heading and no warning."""
    assert "objective" not in render(summarise(run_of(tmp_path / "run", burst(5, 4))))
