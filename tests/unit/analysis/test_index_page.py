"""The index of a folder of runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.index_page import MAX_INDEXED, IndexedRun, RunFolder, index_document
from loadgen.analysis.objectives import parse
from loadgen.analysis.report import Table, TableCell
from loadgen.analysis.report.page import render
from loadgen.cli.output import Output
from loadgen.cli.report import report
from loadgen.errors import PlanError
from loadgen.results import index_runs, load_and_summarise, runs_below
from tests.support.runs import burst, run_of


def test_a_folder_of_runs_is_told_from_a_run_and_from_repeats(tmp_path: Path) -> None:
    """Runs at any depth below it are listed; a run and its repeats are reported as before."""
    for name in ("a", "b/repeat-1", "b/repeat-2", "c/d/e"):
        run_of(tmp_path / name, burst(2, 2))
    assert runs_below(tmp_path) == [tmp_path / name for name in ("a", "b/repeat-1", "b/repeat-2", "c/d/e")]
    assert runs_below(tmp_path / "a") == runs_below(tmp_path / "b") == []
    assert runs_below(tmp_path / "a" / "run.jsonl") == []


def test_summaries_are_made_again_only_where_they_are_old(tmp_path: Path) -> None:
    """One beside the run is taken as it is, one that is older than the run or no summary is not; what is no run is
    named and left out."""
    for name in ("fresh", "old", "none"):
        run_of(tmp_path / name, burst(4, 4))
        Output(as_json=False, quiet=True).results([tmp_path / name], None)
    changed = json.loads((tmp_path / "fresh/summary.json").read_text("utf-8"))
    changed["run"]["label"] = "kept"
    for name in ("fresh", "old"):
        (tmp_path / name / "summary.json").write_text(json.dumps(changed), "utf-8")
    os.utime(tmp_path / "old/summary.json", (1, 1))
    (tmp_path / "none/summary.json").write_text("{}", "utf-8")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/run.jsonl").write_text("nonsense\n", "utf-8")
    found, unread = index_runs(runs_below(tmp_path), tmp_path, tmp_path / "index.html")
    assert {run.name: run.summary.run.label for run in found} == {"fresh": "kept", "old": "burst", "none": "burst"}
    assert len(unread) == 1
    assert "broken" in unread[0]


def test_a_page_of_many_runs_stays_small(tmp_path: Path) -> None:
    """At most 1.5 MB: the newest runs, and the sentence that says so."""
    summary = summarise(run_of(tmp_path / "run", burst(1000, 8)))
    runs = []
    for place in range(MAX_INDEXED + 10):
        at = f"2026-01-01T00:{place // 60:02d}:{place % 60:02d}Z"
        own = replace(summary, run=replace(summary.run, started_at=at))
        name = f"20260101T{place:06d}Z-vllm-nightly-of-the-main-branch"
        runs.append(IndexedRun(name, f"runs/{name}", f"{name}/report.html", own))
    page = render(index_document(runs, "runs", []))
    assert len(page.encode()) < 1_500_000
    assert f"the newest {MAX_INDEXED} of {len(runs)} runs" in page
    assert runs[-1].name in page
    assert runs[0].name not in page


def indexed(folder: Path, name: str, group: RunFolder | None = None, **plan: object) -> IndexedRun:
    """Return a run of the index whose plan has these values."""
    run = run_of(folder / name, burst(20, 4))
    run.header.plan.update(plan)
    return IndexedRun(name, name, "", summarise(run), group)


def rows_of(runs: Sequence[IndexedRun]) -> dict[str, dict[str, TableCell]]:
    """Return the cells of the index by the name of the run or group, and by the title of the column."""
    (table,) = (block for block in index_document(runs, "runs", []).sections[0].blocks if isinstance(block, Table))
    titles = [column.title for column in table.columns]
    return {row.cells[0].text: dict(zip(titles, row.cells, strict=True)) for row in table.rows}


def test_only_repeats_of_one_experiment_have_joint_figures(tmp_path: Path) -> None:
    """Runs in a folder of repeats with different loads are single runs. The steps of a sweep are a group without
    joint figures, because each has another load."""
    again = RunFolder("again", "again", "", "repeats")
    same = [indexed(tmp_path, f"again/repeat-{number}", again, seed=number) for number in (1, 2)]
    assert rows_of(same)["again"]["output, tokens/s"].text == rows_of(same)["repeat-1"]["output, tokens/s"].text
    mixed = [*same, indexed(tmp_path, "again/repeat-3", again, input_tokens=99)]
    assert set(rows_of(mixed)) == {"again/repeat-1", "again/repeat-2", "again/repeat-3"}
    sweep = RunFolder("sweep", "sweep", "", "steps")
    rows = rows_of([indexed(tmp_path, f"sweep/step-{number}", sweep, n=number) for number in (1, 2)])
    assert rows["sweep"]["output, tokens/s"].text == ""
    assert rows["sweep"]["complete"].text == "40 of 40"
    assert rows["step-1"]["output, tokens/s"].text != ""


def test_a_row_counts_the_objectives_that_are_met(tmp_path: Path) -> None:
    """The cell names the objective that is missed most. Without objectives it is empty."""
    again = RunFolder("again", "again", "", "repeats")
    runs = []
    for number, bound in ((1, "< 1us"), (2, "< 1000s")):
        run = indexed(tmp_path, f"again/repeat-{number}", again)
        objectives = parse([f"e2e.p50 {bound}", "complete >= 50%"])
        judged = load_and_summarise(tmp_path / run.name, objectives, (), drawn=False).summary
        runs.append(run._replace(summary=judged))
    rows = rows_of([*runs, indexed(tmp_path, "single")])
    assert (rows["again"]["objectives"].text, rows["again"]["objectives"].level) == ("3 of 4 met", "error")
    assert rows["again"]["objectives"].note.startswith("e2e.p50 ")
    assert (rows["repeat-2"]["objectives"].text, rows["repeat-2"]["objectives"].level) == ("2 of 2 met", "ok")
    assert rows["single"]["objectives"].text == ""


def test_a_folder_of_runs_is_not_judged(tmp_path: Path) -> None:
    """--assert speaks of single runs."""
    run_of(tmp_path / "a", burst(2, 2))
    with pytest.raises(PlanError, match="folder of runs"):
        report([tmp_path], assertions=["complete >= 99%"])
