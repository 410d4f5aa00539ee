"""Sessions in the report: latency by turn, turns that were never sent, and what counts sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.report import tables
from loadgen.analysis.report.page import render
from loadgen.analysis.report.run_document import page_document
from loadgen.analysis.report.tables import TURNS_BRIEF
from loadgen.analysis.run.record import Record
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import complete, dropped, failed, header, part_of, run_of, said, summarise, text_of, typed

TURNS = 3
PLAN = header().plan | {"workload": f"multi-turn:turns={TURNS}", "arrivals": "burst", "n": 20}


def sessions(number: int = 20, turns: int = TURNS) -> list[Record]:
    """Turn k of session s waits (k + 1) x 100 ms + s for its first token and 200 ms for the others, after 500 tokens
    more of prompt each time."""
    records = []
    for session in range(number):
        for turn in range(turns):
            sent_ns = (session * 100 + turn * 1_000) * MS
            first_ns = sent_ns + ((turn + 1) * 100 + session) * MS
            place: dict[str, Any] = {"session": session * turns, "turn": turn, "due_ns": sent_ns, "sent_ns": sent_ns}
            asked = {"prompt_tokens_asked": 0 if turn else 500, "prompt_tokens": 500 * (turn + 1)}
            instants = [first_ns, first_ns + 200 * MS]
            records.append(complete(session * turns + turn, instants, **place, **asked))
    return records


def summary_of(folder: Path, records: list[Record], **plan: Any) -> dict[str, Any]:
    return summarise(run_of(folder / "run", records, plan=PLAN | {"n": len(records) // TURNS} | plan))


def test_the_cost_of_a_growing_history_stands_turn_by_turn(tmp_path: Path) -> None:
    """TTFT, E2E and the prompts' mean length of each turn are those of its own requests."""
    found = summary_of(tmp_path, sessions())["turns"]
    assert [(turn["turn"], turn["n"], turn["prompt_tokens_mean"]) for turn in found] == [
        (1, 20, 500),
        (2, 20, 1000),
        (3, 20, 1500),
    ]
    assert [turn["ttft_s"]["p50"] for turn in found] == pytest.approx([0.1095, 0.2095, 0.3095])
    assert [turn["e2e_s"]["p50"] for turn in found] == pytest.approx([0.3095, 0.4095, 0.5095])


def test_only_complete_turns_count(tmp_path: Path) -> None:
    """A turn that failed has no latency, a complete one without a token neither, and warm-up is in no turn."""
    records = sessions(4)
    records[4] = failed(4, session=3, turn=1)
    records[5] = Record(id=5, state="dropped", error_kind="session_ended", session=3, turn=2)
    records[8] = complete(8, [], session=6, turn=2)
    records += [complete(-1, [5 * MS], phase="warmup")]
    found = summary_of(tmp_path, records)["turns"]
    assert [(turn["n"], turn["ttft_s"]["n"]) for turn in found] == [(4, 4), (3, 3), (3, 2)]


def test_a_run_without_sessions_has_no_turns(tmp_path: Path) -> None:
    """Neither in summary.json nor on the page nor in the terminal."""
    run = run_of(tmp_path / "run", [complete(each, [500 * MS]) for each in range(20)])
    summary = summarise(run)
    assert "turns" not in summary
    assert 'id="turns"' not in render(page_document([part_of(run)]))
    assert "by turn" not in text_of(summary)


@pytest.mark.parametrize(("number", "notes"), [(70, []), (20, ["* too few independent samples: p90 64 needed."])])
def test_a_note_explains_the_marks_of_thin_percentiles(tmp_path: Path, number: int, notes: list[str]) -> None:
    """p90 of a turn needs 64 complete requests."""
    part = part_of(run_of(tmp_path / "run", sessions(number), plan=PLAN | {"n": number}))
    assert tables.turns([part.summary]).notes == notes


def test_the_terminal_shows_the_first_turns_and_says_how_many_it_left_out(tmp_path: Path) -> None:
    """One line per turn, up to ten; too few samples for a percentile are said to be."""
    text = text_of(summary_of(tmp_path, sessions(2, 13), workload="multi-turn:turns=13"), width=80)
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if "Latency by turn" in line)
    shown = [line.split() for line in lines[start + 2 : start + 2 + TURNS_BRIEF]]
    assert [cells[0] for cells in shown] == [str(turn + 1) for turn in range(TURNS_BRIEF)]
    assert shown[0][3] == "100.5*"
    assert "3 later turns in summary.json and on the page." in text
    assert max(map(len, lines)) <= 80


def test_the_page_has_a_row_per_turn_and_run(tmp_path: Path) -> None:
    """Runs with sessions are in the table and the chart, a run without is not; too few samples leave no point."""
    many = part_of(run_of(tmp_path / "many", sessions(), plan=PLAN))
    few = part_of(run_of(tmp_path / "few", sessions(2), plan=PLAN | {"n": 2}))
    other = part_of(run_of(tmp_path / "other", [complete(each, [500 * MS, 600 * MS]) for each in range(20)]))
    parts = [many, other, few]
    table = tables.turns([part.summary for part in parts])
    assert [row.cells[0].run for row in table.rows] == [0, 0, 0, 2, 2, 2]
    assert "turns" not in other.data
    assert (many.data["turns"]["turn"], few.data["turns"]["turn"]) == ([1, 2, 3], [])
    assert many.data["turns"]["p50"] == pytest.approx([109.5, 209.5, 309.5])
    assert many.data["turns"]["low"][0] < 109.5 < many.data["turns"]["high"][0]
    assert 'id="chart-turns"' in render(page_document(parts))


def test_turns_never_sent_are_not_the_clients_doing(tmp_path: Path) -> None:
    """A session that a failed turn ended: the sentence says why the others were not sent, and the verdict is ok."""
    records = sessions()
    records[3:6] = [
        failed(3, "in_band_error", session=3, turn=0, sent_ns=100 * MS, sent_end_ns=100 * MS, due_ns=100 * MS),
        *(Record(id=each, state="dropped", error_kind="session_ended", session=3, turn=each - 3) for each in (4, 5)),
    ]
    summary = summary_of(tmp_path, records)
    assert said(summary, "complete") == (
        "3 of 60 requests not complete (5.0%): 2 never sent after the end of their session, 1 with an error inside "
        "the stream."
    )
    assert summary["client"]["verdict"] == "ok"
    assert summary["requests"]["dropped"] == 2
    both = summary_of(tmp_path / "both", [*records[:5], dropped(5), *records[6:]])
    assert said(both, "complete").endswith("1 never sent after the end of their session, 1 dropped.")
    assert both["client"]["verdict"] == "limited"


def test_delivery_is_of_sessions(tmp_path: Path) -> None:
    """What the arrivals time are first turns: 20 sessions, not 60 requests; on the page too."""
    summary = summary_of(tmp_path, sessions(), arrivals="constant:10")
    assert said(summary, "delivery").startswith("20 of 20 sessions begun, 10.00 /s (target 10.00)")
    assert _first_row([summary]) == ["Sessions due", "20"]
    other = summarise(run_of(tmp_path / "other", [complete(1, [500 * MS])]))
    assert said(other, "delivery").startswith("1 of 1 request sent")
    assert _first_row([summary, other]) == ["Requests due", "20", "1"]


def _first_row(summaries: list[Any]) -> list[str]:
    table = tables.load([typed(each) for each in summaries], [str(place) for place, _ in enumerate(summaries)])
    return [cell.text for cell in table.rows[0].cells]
