"""What the page shows of single requests, and which ones it leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.gather import frame_of
from analysis.report import requests, said
from analysis.report.panels import PIECES, panels, thinned
from analysis.report.requests import first_tokens, timeline
from analysis.telemetry import Series
from loadgen.record import Record
from tests.runs import MILLISECOND_NS as MS
from tests.runs import burst, complete, dropped, failed, loop, truncated


def test_points_have_their_place_in_the_queue() -> None:
    """Places count every request that was sent, in the order sent; points are of complete ones."""
    records = [
        complete(9, [50 * MS], sent_ns=3 * MS, prompt_tokens=10),
        failed(7, sent_ns=2 * MS),
        complete(8, [40 * MS], sent_ns=1 * MS, prompt_tokens=99),
        dropped(1),
    ]
    drawn = first_tokens(frame_of(records))
    assert (drawn["request"], drawn["position"]) == ([8, 9], [1, 3])
    assert (drawn["prompt"], drawn["ttft_s"]) == ([99, 10], [0.039, 0.047])
    assert drawn["prompts"] == [10, 99]
    assert (drawn["n"], drawn["drawn"]) == (2, 2)


def test_lines_are_of_all_requests() -> None:
    """The medians along the queue are those of equally many requests each, none of fewer than 25."""
    records = burst(100, 2)
    drawn = first_tokens(frame_of(records))["by_position"]
    ttft_s = np.array([(record.chunk_ns[0] - (record.sent_ns or 0)) / 1e9 for record in records])
    assert len(drawn["x"]) == 4
    assert drawn["p50"][-1] == pytest.approx(np.median(ttft_s[75:]), rel=0.1)
    assert first_tokens(frame_of(burst(49, 2)))["by_position"]["x"] == []


def test_one_prompt_length_draws_no_line() -> None:
    """Nothing can be said about the length of prompts that all had the same, and the page says that."""
    drawn = first_tokens(frame_of(burst(60, 2)))
    assert drawn["by_prompt"]["x"] == []
    assert said.prompt(drawn).startswith("Every prompt had 512 tokens")


def test_the_timeline_has_every_instant_of_a_small_run() -> None:
    """Seconds from the run's start; null for what never happened; chunks as steps from sent on."""
    drawn = timeline(
        frame_of([complete(4, [50 * MS, 70 * MS], sent_ns=10 * MS), failed(2, sent_ns=20 * MS), dropped(3)])
    )
    assert drawn["request"] == [4, 2]
    assert drawn["sent_s"] == [0.01, 0.02]
    assert drawn["first_s"] == [0.05, None]
    assert drawn["end_s"] == [0.0701, 0.04]
    assert drawn["bad"] == [0, 1]
    assert [[step * drawn["tick_s"] for step in steps] for steps in drawn["tokens"]] == [
        pytest.approx([0.04, 0.02]),
        [],
    ]
    assert said.timeline(drawn) == "All 2 requests that were sent, first sent on top."


def test_of_many_requests_some_are_drawn_by_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly spaced in the order sent, the slowest, and those that failed; the sentence says so."""
    monkeypatch.setattr(requests, "ROWS_MAX", 300)
    records: list[Record] = [*loop(1000), *(failed(2000 + i, sent_ns=i * 9_000_000) for i in range(150))]
    records[500] = complete(500, [90_000 * MS], sent_ns=5_000 * MS)
    drawn = timeline(frame_of(records))
    assert drawn["n"] == 1150
    assert 200 < drawn["drawn"] == len(drawn["request"]) <= 300
    assert 500 in drawn["request"]
    assert 100 <= sum(drawn["bad"]) < 150
    assert drawn["position"] == sorted(drawn["position"])
    assert said.timeline(drawn).startswith(f"{drawn['drawn']} of 1,150 requests: every 12th in the order sent")


def test_tokens_that_do_not_fit_are_left_out_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a third of the chunks every third request has its own, whole."""
    monkeypatch.setattr(requests, "CHUNKS_MAX", 40)
    drawn = timeline(frame_of(burst(12, 10)))
    assert [len(steps) for steps in drawn["tokens"]] == [10, 0, 0] * 4


def test_sentences_for_runs_with_nothing_to_show() -> None:
    """No sample, no gap, nothing sent: each chart says so."""
    empty = frame_of([])
    assert said.position(first_tokens(empty)) == said.prompt(first_tokens(empty)) == "No sample."
    assert said.timeline(timeline(empty)) == "Nothing was sent."
    cut = frame_of([truncated(1, [5 * MS, 6 * MS])])
    assert said.position(first_tokens(cut)) == "No sample."
    assert said.timeline(timeline(cut)) == "All 1 requests that were sent, first sent on top."


def test_telemetry_is_drawn_in_units_that_read_well() -> None:
    """Bytes become GiB, shares percent; gaps stay gaps."""
    (drawn,) = panels([Series("gpu_memory_used", "GPU memory", "bytes", "GPU 0", [0, 1], [2.0**31, None])])
    assert (drawn["unit"], drawn["y"]) == ("GiB", [2, None])
    (share,) = panels([Series("kv_used", "KV cache in use", "share", "server", [0.0], [0.25])])
    assert (share["unit"], share["y"]) == ("%", [25])


def test_long_telemetry_keeps_its_extremes_and_gaps() -> None:
    """Of 100,000 readings about a thousand are drawn, the one peak, the one dip and the one gap among them."""
    values: list[float | None] = [50.0] * 100_000
    values[12_345], values[54_321], values[77_777] = 99.0, 1.0, None
    kept = thinned(values)
    assert {0, 12_345, 54_321, 77_777, 99_999} <= set(kept)
    assert len(kept) <= 4 * PIECES + 1
