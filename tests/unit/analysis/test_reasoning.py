"""Figures of the reasoning and of the answer: tokens, time per token, objectives, goodput, comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.analysis import goodput, objectives, slo
from loadgen.analysis.build_summary import summarise
from loadgen.analysis.compare import compare, read_run
from loadgen.analysis.frame import build_frame
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.report.findings import findings
from loadgen.analysis.run.record import Record
from loadgen.analysis.steady_window import load_run
from tests.support.runs import complete, run_of

MS = 1_000_000
INSTANTS = [100 * MS, 110 * MS, 120 * MS, 200 * MS, 230 * MS]


def reasoning(number: int = 0, *, chunks: int = 3, tokens: list[int] | None = None, **changes: Any) -> Record:
    """Return the record of a response whose first `chunks` of five chunks are reasoning."""
    record = complete(number, INSTANTS, tokens=tokens, **changes)
    record.marks = {"reasoning_chunks": chunks}
    if chunks < len(INSTANTS):
        record.marks["first_answer_ns"] = INSTANTS[chunks]
    return record


def figures(*records: Record) -> dict[str, list[float]]:
    """Return the value of each metric of reasoning, in ms per request or tokens."""
    frame = build_frame(records)
    names = ("ttfa_s", "think_s", "tpot_reasoning_s", "tpot_answer_s")
    values = {name: np.round(METRICS[name].rows(frame) * 1e3, 6).tolist() for name in names}
    return values | {"reasoning_tokens": METRICS["reasoning_tokens"].rows(frame).tolist()}


def test_each_phase_has_its_own_time_per_token() -> None:
    """Three reasoning tokens 10 ms apart, then two tokens of the answer 30 ms apart."""
    assert figures(reasoning()) == {
        "ttfa_s": [200],
        "think_s": [100],
        "tpot_reasoning_s": [10],
        "tpot_answer_s": [30],
        "reasoning_tokens": [3],
    }


def test_chunks_of_several_tokens_count_with_their_tokens() -> None:
    """The tokens of the first chunk of a phase came before the phase's time."""
    found = figures(reasoning(tokens=[4, 2, 2, 5, 3]))
    assert (found["tpot_reasoning_s"], found["tpot_answer_s"]) == ([5], [10])
    assert found["reasoning_tokens"] == [8]


def test_the_number_that_the_server_reports_takes_precedence() -> None:
    """It includes tokens without text, such as the tags."""
    record = reasoning()
    record.marks["reasoning_tokens"] = 5
    assert figures(record)["reasoning_tokens"] == [5]


@pytest.mark.parametrize(("reported", "expected"), [(12, (2.5, 30 / 4)), (None, (20 / 8, 30 / 4))])
def test_a_total_is_spread_over_the_chunks_of_each_phase(reported: int | None, expected: tuple[float, float]) -> None:
    """The server states only totals: 20 tokens in 5 chunks. With 12 reasoning tokens, the reasoning has 4 per chunk."""
    record = reasoning(output_tokens=20, output_tokens_asked=20, chunk_counts="chunk", text_bytes=200, phrase_chunks=5)
    if reported:
        record.marks["reasoning_tokens"] = reported
    found = figures(record)
    assert (found["tpot_reasoning_s"][0], found["tpot_answer_s"][0]) == pytest.approx(expected)


def test_a_response_without_an_answer_has_only_the_reasoning() -> None:
    """And a response without reasoning has none of these figures."""
    found = figures(reasoning(chunks=5), complete(1, INSTANTS))
    assert found["tpot_reasoning_s"][0] == 32.5
    assert np.isnan([found["ttfa_s"][0], found["think_s"][0], found["tpot_answer_s"][0]]).all()
    assert np.isnan([values[1] for values in found.values()]).all()


def test_hidden_reasoning_has_a_number_of_tokens_only() -> None:
    """No instant of the reasoning is known."""
    record = complete(0, INSTANTS, output_tokens=69, output_tokens_asked=69, hidden_tokens=64)
    record.marks = {"reasoning_tokens": 64}
    found = figures(record)
    assert found["reasoning_tokens"] == [64]
    assert np.isnan(found["think_s"]).all()


def test_objectives_and_goodput_take_a_number_of_tokens(tmp_path: Path) -> None:
    """Like any other figure per request, but without a unit of time."""
    path = run_of(tmp_path / "run", [reasoning(number) for number in range(100)]).path.parent
    run, frame = load_run(path)
    parsed = objectives.parse(["reasoning_tokens.p50 <= 3", "reasoning_tokens.max < 3", "tpot_answer.p50 < 31ms"])
    verdicts = slo.judge(parsed, frame, summarise(run, frame))
    assert [verdict.verdict for verdict in verdicts] == ["pass", "fail", "pass"]
    assert verdicts[1].said == "3 tokens"
    result = goodput.goodput(frame, objectives.parse_bounds(["reasoning_tokens < 2", "think < 1s"]))
    assert (result.good, result.each) == (0, {"reasoning_tokens < 2": 0, "think < 1s": 1})
    with pytest.raises(objectives.ObjectiveError, match="'ms' is not a unit of reasoning_tokens; use no unit"):
        objectives.parse(["reasoning_tokens.p50 < 3ms"])


def test_runs_with_reasoning_are_compared_by_it(tmp_path: Path) -> None:
    """Other comparisons do not have these figures, because each further test weakens all tests."""
    runs = [run_of(tmp_path / name, [reasoning(number) for number in range(200)]).path.parent for name in "ab"]
    plain = run_of(tmp_path / "c", [complete(number, INSTANTS) for number in range(200)]).path.parent
    a, b, c = map(read_run, (*runs, plain))
    rows = {row.figure: row for row in compare([a], [b]).rows}
    assert (rows["ttfa.p50"].a, rows["think.p50"].unit) == (0.2, "s")
    assert (rows["reasoning_tokens.p50"].a, rows["reasoning_tokens.p50"].unit) == (3, "tokens")
    assert (rows["answered"].a, rows["answered"].verdict) == (1, "no difference")
    assert "ttfa.p50" not in {row.figure for row in compare([a], [c]).rows}


@pytest.mark.parametrize(("unanswered", "level"), [(0, "note"), (4, "warning")])
def test_the_report_warns_of_responses_without_an_answer(tmp_path: Path, unanswered: int, level: str) -> None:
    """Their number of output tokens is too small for reasoning and answer."""
    records = [reasoning(number, chunks=5 if number < unanswered else 3) for number in range(10)]
    found = next(each for each in findings(summarise(run_of(tmp_path / "run", records))) if each.id == "reasoning")
    assert found.level == level
    assert found.sentence.startswith(f"{30 + 2 * unanswered} output tokens are reasoning, in 10 of 10 responses.")
    expected = (
        "4 of 10 responses never reached an answer (40%, 95% CI 12.2\u201373.8%). They ended during the reasoning"
    )
    assert (expected in found.sentence) == bool(unanswered)


def test_responses_without_an_answer_miss_a_bound_on_the_answer(tmp_path: Path) -> None:
    """TTFA describes only responses with an answer, so goodput and the share `answered` count those without."""
    records = [reasoning(number, chunks=5 if number < 4 else 3) for number in range(10)]
    run, frame = load_run(run_of(tmp_path / "run", records).path.parent)
    summary = summarise(run, frame)
    assert summary.answered is not None
    assert (summary.answered.answered, summary.answered.responses, summary.answered.share) == (6, 10, 0.6)
    result = goodput.goodput(frame, objectives.parse_bounds(["ttfa < 9s", "ttft < 9s"]))
    assert (result.good, result.each) == (6, {"ttfa < 9s": 0.6, "ttft < 9s": 1})
    verdicts = slo.judge(objectives.parse(["answered >= 50%", "answered >= 99%"]), frame, summary)
    assert [verdict.verdict for verdict in verdicts] == ["pass", "fail"]
    assert verdicts[1].said.startswith("60%, 95% CI 26.24\u201387.84%")


def test_answered_is_a_figure_of_runs_with_reasoning_only(tmp_path: Path) -> None:
    """A run whose responses begin with the answer does not have it."""
    run, frame = load_run(run_of(tmp_path / "run", [complete(0, INSTANTS)]).path.parent)
    (verdict,) = slo.judge(objectives.parse(["answered >= 1%"]), frame, summarise(run, frame))
    assert (verdict.verdict, verdict.said) == ("fail", "the run does not have this figure")
