"""The course of a long run: changes, drifts and restarts are findings, marks and rows; clean runs have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.report.course_findings import _drift_finding, _restart_event, course_marks
from loadgen.analysis.report.findings import findings
from loadgen.analysis.report.page import render
from loadgen.analysis.report.run_document import page_document, prepare_run
from loadgen.analysis.run.runfile import Telemetry
from loadgen.analysis.run_course import find_restarts
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.summary import FigureDrift, Summary
from loadgen.analysis.telemetry import Reading
from tests.support.long_runs import S, constant, long_run, requests_over
from tests.support.runs import healthy

HOUR_S = 3600


def summary_of(tmp_path: Path, ttft_s: Callable[[float], float], telemetry: list[Telemetry] | None = None) -> Summary:
    return summarise(long_run(tmp_path, requests_over(HOUR_S, ttft_s), telemetry))


def sentences(summary: Summary, name: str) -> list[tuple[str, str]]:
    return [(finding.level, finding.sentence) for finding in findings(summary) if finding.id == name]


def test_a_slower_server_is_a_change(tmp_path: Path) -> None:
    """A server that becomes 50% slower after 20 minutes has one change: a warning, a mark and the instant."""
    summary = summary_of(tmp_path, lambda due_s: 0.1 if due_s < 1200 else 0.15)
    assert summary.course is not None
    change = next(change for change in summary.course.changes if change.figure == "ttft.p50")
    assert abs(change.at_s - 1200) <= 2 * change.window_s
    assert change.before == pytest.approx(0.1, rel=0.05)
    assert change.after == pytest.approx(0.15, rel=0.05)
    [(level, sentence)] = sentences(summary, "change")
    assert level == "warning"
    assert "TTFT p50 from 100 ms to 15" in sentence or "TTFT p50 from 99" in sentence or "TTFT p50 from 10" in sentence
    [mark] = course_marks(summary)
    assert mark["x"] == change.at_s
    assert not sentences(summary, "drift")


def test_a_faster_server_is_a_note(tmp_path: Path) -> None:
    """A server that becomes faster has changed too, but this is no warning."""
    [(level, _)] = sentences(summary_of(tmp_path, lambda due_s: 0.15 if due_s < 1200 else 0.1), "change")
    assert level == "note"


def test_a_drifting_server_is_no_change(tmp_path: Path) -> None:
    """A TTFT that grows evenly by 60% per hour is a drift, with the objective that would limit it."""
    summary = summary_of(tmp_path, lambda due_s: 0.1 * (1 + 0.6 * due_s / HOUR_S))
    assert not sentences(summary, "change")
    drifting = [sentence for level, sentence in sentences(summary, "drift") if level == "warning"]
    assert any("TTFT p50 drifts by +" in sentence and "ttft.p50 drift < 5%/h" in sentence for sentence in drifting)


def test_a_rate_that_rises_is_limited_downwards() -> None:
    """The objective for a throughput that rises by 20% per hour limits its fall, and the finding is a note."""
    drift = FigureDrift(figure="output_tokens_per_s", per_hour=0.2, ci95=(0.15, 0.25), level=100.0)
    finding = _drift_finding(drift)
    assert finding.level == "note"
    assert "--assert 'output_tokens_per_s drift > -5%/h'" in finding.sentence


@pytest.mark.filterwarnings("error")
def test_an_outage_prints_no_warning(tmp_path: Path) -> None:
    """Ten minutes without a complete request leave groups of time windows empty, which is no warning of NumPy."""
    records = [
        record
        for record in requests_over(HOUR_S, lambda due_s: 0.1 * (1 + 0.6 * due_s / HOUR_S))
        if not 1200 <= (record.due_ns or 0) / S < 1800
    ]
    summary = summarise(long_run(tmp_path, records))
    assert [drift.figure for drift in summary.course.drifts if summary.course] == ["ttft.p50", "e2e.p50"]


@pytest.mark.parametrize("seed", range(8))
def test_a_steady_server_has_no_course(tmp_path: Path, seed: int) -> None:
    """An hour without changes has neither changes nor drifts."""
    assert summarise(long_run(tmp_path, requests_over(HOUR_S, constant, seed=seed))).course is None


def test_a_short_run_is_not_examined(tmp_path: Path) -> None:
    """A run of one minute has too few time windows for changes."""
    records = requests_over(60, lambda due_s: 0.1 if due_s < 30 else 0.4, rate_per_s=20)
    assert summarise(long_run(tmp_path, records)).course is None


def reading(at_s: float, **values: float) -> Reading:
    return Reading(at_s, "run", values, "")


def test_a_later_start_time_is_a_restart() -> None:
    """The process that answers has started later than the one before: the server restarted between the readings."""
    [restart] = find_restarts(
        [
            reading(-1, process_start_s=1000.0),
            reading(10, process_start_s=1000.0),
            reading(12, process_start_s=5010.5),
            reading(13, process_start_s=5010.5),
        ]
    )
    assert (restart.from_s, restart.to_s, restart.evidence) == (10, 12, "start_time")


def test_replicas_that_answer_in_turn_are_no_restart() -> None:
    """Start times that return are those of replicas behind one URL, whatever their counters do."""
    starts = [1000.0, 2000.0, 1000.0, 2000.0, 1000.0]
    readings = [
        reading(at_s, process_start_s=start_s, requests_finished=start_s) for at_s, start_s in enumerate(starts)
    ]
    assert find_restarts(readings) == []


@pytest.mark.parametrize("starts", [[100.0, 200.0, 100.0, 200.0, 300.0], [100.0, 50.0, 300.0]])
def test_a_further_replica_is_no_restart(starts: list[float]) -> None:
    """After start times have returned to an earlier value, a later one may be that of a replica not seen before."""
    assert find_restarts([reading(at_s, process_start_s=start_s) for at_s, start_s in enumerate(starts)]) == []


def test_each_replica_is_followed_by_itself() -> None:
    """The older of two replicas restarts twice. Its URL is named, although the other one started later at first."""

    def both(at_s: float, first_s: float) -> Reading:
        replicas = [{"url": "http://a", "process_start_s": first_s}, {"url": "http://b", "process_start_s": 500.0}]
        return Reading(at_s, "run", {"replicas": replicas, "process_start_s": max(first_s, 500.0)}, "")

    restarts = find_restarts([both(1, 100.0), both(2, 400.0), both(3, 400.0), both(4, 900.0)])
    assert [(restart.url, restart.to_s) for restart in restarts] == [("http://a", 2), ("http://a", 4)]
    [first, _] = restarts
    assert _restart_event(first).sentence.startswith("The server at http://a restarted between 1")


@pytest.mark.parametrize(("tokens", "restarts"), [(3.0, 1), (900.0, 0)])
def test_counters_that_fall_together_are_a_restart(tokens: float, restarts: int) -> None:
    """Without a start time, all counters must fall. A single one that falls is an error of the server."""
    before = reading(10, requests_finished=50, output_tokens=800)
    after = reading(11, requests_finished=2, output_tokens=tokens)
    result = find_restarts([before, after])
    assert [restart.evidence for restart in result] == ["counters"] * restarts


def test_a_restart_is_a_warning_on_the_report(tmp_path: Path) -> None:
    """The finding names both readings, and the mark lies where the restarted server first answered."""

    def page(at_s: int, start_s: float) -> Telemetry:
        return Telemetry(source="server", at_ns=at_s * S, values={"moment": "run", "process_start_s": start_s})

    telemetry = [*healthy(), page(100, 50.0), page(900, 50.0), page(910, 8000.0)]
    summary = summary_of(tmp_path, constant, telemetry)
    [(level, sentence)] = sentences(summary, "restart")
    assert level == "warning"
    assert "between 15 min and 15 min 10 s" in sentence
    assert [mark["x"] for mark in course_marks(summary)] == [910]


def test_the_help_of_the_chart_names_the_lines_of_events_only_if_there_are_some(tmp_path: Path) -> None:
    """A run without events, and the page of several runs, have no such lines."""
    for name in ("steady", "slower"):
        (tmp_path / name).mkdir()
    steady = long_run(tmp_path / "steady", requests_over(HOUR_S, lambda _: 0.1))
    slower = long_run(tmp_path / "slower", requests_over(HOUR_S, lambda due_s: 0.1 if due_s < 1200 else 0.15))
    first, second = (prepare_run(run, frame_of_run(run), summarise(run)) for run in (steady, slower))
    pages = [render(page_document(runs)) for runs in ([first], [second], [first, second])]
    assert ["Dashed vertical lines mark events" in page for page in pages] == [False, True, False]
