"""What the charts draw, on runs small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loadgen.analysis.frame
from loadgen.analysis.format import nice_step
from loadgen.analysis.frame import Frame, build_frame
from loadgen.analysis.report import chart_data
from loadgen.analysis.report.chart_data import (
    PIECES,
    distribution,
    first_tokens,
    gaps_by_token,
    plotted_indices,
    send_times,
    telemetry_panels,
    throughput_series,
    timeline,
)
from loadgen.analysis.report.charts import CHARTS
from loadgen.analysis.report.gap_counts import BUCKET_WIDTH, count_gaps
from loadgen.analysis.run.record import Record
from loadgen.analysis.telemetry import Series
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import burst, complete, dropped, failed, loop, part_of, rejected, run_of, truncated

RECORDS = [
    complete(1, [100 * MS, 200 * MS], tokens=[1, 3], end_ns=200 * MS),
    complete(2, [150 * MS, 900 * MS], sent_ns=50 * MS, end_ns=1600 * MS),
    dropped(3),
]


def drawn_gaps(frame: Frame) -> dict[str, Any]:
    return gaps_by_token(frame, count_gaps(frame))


def test_the_course_counts_tokens_and_streams_in_each_piece() -> None:
    """1.6 s in 160 pieces of 10 ms: tokens over the piece's length, and the most streams open at once."""
    drawn = throughput_series(build_frame(RECORDS))
    assert drawn["bin_s"] == 0.01
    assert len(drawn["start_s"]) == 160
    assert {i: rate for i, rate in enumerate(drawn["tokens_per_s"]) if rate} == {10: 100, 15: 100, 20: 300, 90: 100}
    assert [drawn["in_flight"][i] for i in (0, 4, 5, 19, 20, 21, 159)] == [1, 1, 2, 2, 2, 1, 1]
    assert {i: rate for i, rate in enumerate(drawn["sent_per_s"]) if rate} == {0: 100, 5: 100}
    assert [drawn["receiving"][i] for i in (9, 10, 15, 20, 21, 90, 91)] == [0, 1, 2, 2, 1, 1, 0]


def test_a_short_dip_does_not_hide_the_most_streams() -> None:
    """Streams that end and begin within one piece count together only while both are open."""
    records = [
        complete(1, [1 * MS], end_ns=105 * MS),
        complete(2, [107 * MS], sent_ns=106 * MS, end_ns=160_000 * MS),
    ]
    assert max(throughput_series(build_frame(records))["in_flight"]) == 1


def drawn_of(folder: Path, records: Sequence[Record]) -> dict[str, Any]:
    """What every chart draws of a run."""
    return dict(part_of(run_of(folder / "run", records)).data)


def test_warm_up_is_drawn_before_zero_and_not_counted_as_sent(tmp_path: Path) -> None:
    """The course begins at the first warm-up request, at its negative instant; the sends are those that count."""
    drawn = drawn_of(tmp_path, loop(100, warmup=2))
    assert drawn["course"]["course"]["start_s"][0] == pytest.approx(-1.02 + 20e-6)
    assert drawn["course"]["course"]["in_flight"][0] == 1
    assert drawn["sends"]["n"] == drawn["ttft_s"]["n"] == 100


@pytest.mark.parametrize("records", [[], [dropped(1)], [failed(1, sent_ns=None, sent_end_ns=None, end_ns=None)]])
def test_nothing_sent_draws_nothing(tmp_path: Path, records: list[Record]) -> None:
    """Every curve of such a run is empty, and none raises."""
    drawn = drawn_of(tmp_path, records)
    assert drawn["course"]["course"]["start_s"] == drawn["sends"]["x"] == []
    assert all(drawn[name]["x"] == [] for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"))


def test_the_burst_counts_from_its_first_request() -> None:
    """When each request left after the first one, in order; one never sent is not drawn."""
    drawn = send_times(build_frame([*RECORDS, complete(4, [9 * MS], sent_ns=20 * MS)]))
    assert drawn["x"] == [0.0, 0.02, 0.05]
    assert drawn["y"] == [1, 2, 3]


def test_a_thinned_curve_says_so() -> None:
    """Of 5,000 samples about 700 are drawn; both numbers are there, and the extremes among what is drawn."""
    samples = np.sort(np.random.default_rng(1).gamma(2, 1, 5000))
    drawn = distribution(samples, 1000)
    assert drawn["n"] == 5000
    assert drawn["drawn"] == len(drawn["x"]) <= 700
    assert (drawn["x"][0], drawn["x"][-1]) == (round(samples.min(), 7), round(samples.max(), 7))


def test_the_band_counts_requests_not_gaps(tmp_path: Path) -> None:
    """ITL has many samples per request; its band is as wide as that of one sample each."""
    drawn = drawn_of(tmp_path, burst(50, 20))
    assert drawn["itl_s"]["n"] == 50 * 19
    assert drawn["itl_s"]["margin"] == drawn["ttft_s"]["margin"]


@pytest.mark.parametrize(("least", "step"), [(1.0, 1), (1.1, 2), (2.5, 5), (7.0, 10), (0.03, 0.05), (2e9, 2e9)])
def test_pieces_have_round_lengths(least: float, step: float) -> None:
    """1, 2 or 5 times a power of ten, the next one up."""
    assert nice_step(least) == pytest.approx(step)


def test_a_gap_belongs_to_the_token_that_ends_it() -> None:
    """A chunk of several tokens counts once, before its first; the longest gaps have their place."""
    drawn = drawn_gaps(
        build_frame(
            [
                complete(5, [10 * MS, 20 * MS, 320 * MS], tokens=[1, 2, 1]),
                complete(6, [10 * MS, 11 * MS]),
                truncated(7, [10 * MS, 9000 * MS]),
            ]
        )
    )
    assert (drawn["token"], drawn["n"], drawn["max"]) == ([2, 4], [2, 1], [0.01, 0.3])
    assert drawn["longest"] == [
        {"request": 5, "token": 4, "from_s": 0.02, "gap_s": 0.3},
        {"request": 5, "token": 2, "from_s": 0.01, "gap_s": 0.01},
        {"request": 6, "token": 2, "from_s": 0.01, "gap_s": 0.001},
    ]


def test_percentiles_are_within_one_bucket_and_absent_where_thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 700 answers each percentile per token is that of the samples to 1%; of 40 there is a median alone. It makes
    no difference in how many blocks the chunks are walked through."""
    records = burst(700, 5)
    gaps = np.diff([record.chunk_ns for record in records], axis=1) / 1e9
    drawn = drawn_gaps(build_frame(records))
    monkeypatch.setattr(loadgen.analysis.frame, "ENTRIES_PER_BLOCK", 64)
    assert drawn_gaps(build_frame(records)) == drawn
    assert drawn["token"] == [2, 3, 4, 5]
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        exact = np.quantile(gaps, share, axis=0, method="inverted_cdf")
        assert np.array(drawn[name]) == pytest.approx(exact, rel=BUCKET_WIDTH)
    assert drawn["max"] == pytest.approx(gaps.max(axis=0), abs=1e-7)
    few = drawn_gaps(build_frame(burst(40, 5)))
    assert None not in few["p50"]
    assert few["p90"] == few["p99"] == [None] * 4


@pytest.mark.parametrize("entries", [7, 64, 1 << 20])
def test_of_equal_gaps_the_last_are_named(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    """However the chunks are walked through: a stall of all answers at once is as long in each of them."""
    monkeypatch.setattr(loadgen.analysis.frame, "ENTRIES_PER_BLOCK", entries)
    stalled = [complete(number, [10 * MS, 11 * MS, 41 * MS, 42 * MS], end_ns=42 * MS) for number in range(50)]
    longer = complete(50, [10 * MS, 50 * MS], end_ns=50 * MS)
    found = drawn_gaps(build_frame([*stalled[:5], longer, *stalled[5:]]))["longest"]
    assert [(each["request"], each["token"]) for each in found] == [(50, 2), *((n, 3) for n in range(49, 30, -1))]
    assert {(each["from_s"], each["gap_s"]) for each in found[1:]} == {(0.011, 0.03)}


def test_long_answers_are_drawn_in_groups_of_tokens() -> None:
    """1,000 tokens make groups of 10; the first token of a group names it, token 0 does not exist."""
    drawn = drawn_gaps(build_frame(burst(12, 1000)))
    assert drawn["width"] == 10
    assert drawn["token"][:3] == [1, 10, 20]
    assert sum(drawn["n"]) == 12 * 999


@pytest.mark.parametrize("records", [[], [dropped(1)], [failed(1)], [complete(1, [])], [complete(1, [5 * MS])]])
def test_without_a_gap_there_is_nothing(records: list[Record]) -> None:
    """No request, none complete, no chunk, one chunk: empty, and nothing raises."""
    drawn = drawn_gaps(build_frame(records))
    assert drawn["token"] == drawn["p50"] == drawn["longest"] == []


def test_points_have_their_place_in_the_queue() -> None:
    """Places count every request that was sent, in the order sent; points are of complete ones."""
    records = [
        complete(9, [50 * MS], sent_ns=3 * MS, prompt_tokens=10),
        failed(7, sent_ns=2 * MS),
        complete(8, [40 * MS], sent_ns=1 * MS, prompt_tokens=99),
        dropped(1),
    ]
    drawn = first_tokens(build_frame(records))
    assert (drawn["request"], drawn["position"]) == ([8, 9], [1, 3])
    assert (drawn["prompt"], drawn["ttft_s"]) == ([99, 10], [0.039, 0.047])
    assert drawn["prompts"] == [10, 99]
    assert (drawn["n"], drawn["drawn"]) == (2, 2)


def test_a_prompt_of_unknown_length_has_no_place_among_the_lengths() -> None:
    """Where nobody counted some or all prompts, the others are drawn by length, and all by position."""
    records = burst(60, 2)
    for number, record in enumerate(records):
        record.prompt_tokens_asked, record.prompt_tokens = 0, number or None
    drawn = first_tokens(build_frame(records))
    assert (drawn["n"], drawn["prompts"]) == (60, [1, 59])
    assert drawn["prompt"].count(None) == 1
    for record in records:
        record.prompt_tokens = None
    drawn = first_tokens(build_frame(records))
    assert (drawn["prompts"], drawn["by_prompt"]["x"]) == ([], [])
    assert len(drawn["by_position"]["x"]) > 1


def test_lines_are_of_all_requests() -> None:
    """The medians along the queue are those of equally many requests each, none of fewer than 25."""
    records = burst(100, 2)
    drawn = first_tokens(build_frame(records))["by_position"]
    ttft_s = np.array([(record.chunk_ns[0] - (record.sent_ns or 0)) / 1e9 for record in records])
    assert len(drawn["x"]) == 4
    assert drawn["p50"][-1] == pytest.approx(np.median(ttft_s[75:]), rel=0.1)
    assert first_tokens(build_frame(burst(49, 2)))["by_position"]["x"] == []


def test_one_prompt_length_draws_no_line(tmp_path: Path) -> None:
    """Nothing can be said about the length of prompts that all had the same: there is no such chart."""
    part = part_of(run_of(tmp_path / "run", burst(60, 2)))
    assert "prompt" not in part.data
    assert CHARTS["position"].caption(part.data["position"], part.summary).startswith("Median TTFT changes from ")


def test_the_timeline_has_every_instant_of_a_small_run() -> None:
    """Seconds from the run's start; null for what never happened; chunks as steps from sent on."""
    drawn = timeline(
        build_frame([complete(4, [50 * MS, 70 * MS], sent_ns=10 * MS), failed(2, sent_ns=20 * MS), dropped(3)])
    )
    assert drawn["request"] == [4, 2]
    assert drawn["sent_s"] == [0.01, 0.02]
    assert drawn["first_s"] == [0.05, None]
    assert drawn["end_s"] == [0.0701, 0.04]
    assert [bool(reason) for reason in drawn["bad"]] == [False, True]
    assert drawn["bad"][1].startswith("http_status: ")
    assert [[step * drawn["tick_s"] for step in steps] for steps in drawn["tokens"]] == [
        pytest.approx([0.04, 0.02]),
        [],
    ]


def test_of_many_requests_some_are_drawn_by_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly spaced in the order sent, the slowest, and those that failed; the sentence says so."""
    monkeypatch.setattr(chart_data, "ROWS_MAX", 300)
    records: list[Record] = [*loop(1000), *(failed(2000 + i, sent_ns=i * 9_000_000) for i in range(150))]
    records[500] = complete(500, [90_000 * MS], sent_ns=5_000 * MS)
    drawn = timeline(build_frame(records))
    assert drawn["n"] == 1150
    assert 200 < drawn["drawn"] == len(drawn["request"]) <= 300
    assert 500 in drawn["request"]
    assert 100 <= sum(map(bool, drawn["bad"])) < 150
    assert drawn["position"] == sorted(drawn["position"])
    assert drawn["every"] == 12


def test_tokens_that_do_not_fit_are_left_out_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a third of the chunks every third request has its own, whole."""
    monkeypatch.setattr(chart_data, "CHUNKS_MAX", 40)
    drawn = timeline(build_frame(burst(12, 10)))
    assert [len(steps) for steps in drawn["tokens"]] == [10, 0, 0] * 4


def test_captions_of_runs_with_nothing_to_show(tmp_path: Path) -> None:
    """No sample, no gap, nothing sent: each chart says so."""

    def captions(name: str, records: list[Record]) -> dict[str, str]:
        part = part_of(run_of(tmp_path / name, records))
        return {key: CHARTS[key].caption(data, part.summary) for key, data in part.data.items()}

    empty = captions("empty", [])
    assert (empty["position"], empty["timeline"]) == ("No sample.", "Nothing was sent.")
    assert (empty["gaps"], empty["ttft_s"]) == ("No response had two chunks, so there are no gaps.", "No sample.")
    cut = captions("cut", [truncated(1, [5 * MS, 6 * MS])])
    assert (cut["position"], cut["timeline"]) == ("No sample.", "")


def test_telemetry_is_drawn_in_units_that_read_well() -> None:
    """Bytes become GiB, shares percent; gaps stay gaps."""
    (drawn,) = telemetry_panels([Series("gpu_memory_used", "GPU memory", "bytes", "GPU 0", [0, 1], [2.0**31, None])])
    assert (drawn["unit"], drawn["y"]) == ("GiB", [2, None])
    (share,) = telemetry_panels([Series("kv_used", "KV cache in use", "share", "server", [0.0], [0.25])])
    assert (share["unit"], share["y"]) == ("%", [25])


def test_long_telemetry_keeps_its_extremes_and_gaps() -> None:
    """Of 100,000 readings about a thousand are drawn, the one peak, the one dip and the one gap among them."""
    values: list[float | None] = [50.0] * 100_000
    values[12_345], values[54_321], values[77_777] = 99.0, 1.0, None
    kept = plotted_indices(values)
    assert {0, 12_345, 54_321, 77_777, 99_999} <= set(kept)
    assert len(kept) <= 4 * PIECES + 1


def test_latencies_over_time_hold_every_request_once() -> None:
    """Each first token and each answer is in one interval, failures and rejections are counted apart where they ended,
    and an interval without any has a gap."""
    records = [
        complete(each, [each * 10**9 + 200 * MS, each * 10**9 + 300 * MS], sent_ns=each * 10**9) for each in range(90)
    ]
    records.append(failed(95, "timeout", "", sent_ns=40 * 10**9, end_ns=45 * 10**9))
    records += [rejected(96 + each, sent_ns=50 * 10**9, end_ns=50 * 10**9 + MS) for each in range(3)]
    drawn = chart_data.latency_series(build_frame(records))
    assert drawn
    assert sum(drawn["ttft_n"]) == sum(drawn["tpot_n"]) == sum(drawn["e2e_n"]) == 90
    assert {*drawn["ttft_p50"]} == {0.2}
    assert {*drawn["e2e_p99"]} == {0.3001}
    assert drawn["incomplete_s"] == [45.0, 50.001, 50.001, 50.001]
    assert sum(drawn["failed_per_s"]) * drawn["bin_s"] == pytest.approx(1)
    assert sum(drawn["rejected_per_s"]) * drawn["bin_s"] == pytest.approx(3)


def test_a_long_run_has_a_heat_map() -> None:
    """Every first token is in one cell, within the TTFT that the cell says; a short run has none."""
    records = [complete(each, [each * 10**9 + (100 + each) * MS], sent_ns=each * 10**9) for each in range(90)]
    drawn = chart_data.ttft_heat_map(build_frame(records))
    assert drawn
    assert sum(drawn["n"]) == 90
    assert drawn["low"][0] == pytest.approx(0.1)
    assert max(drawn["high"]) == pytest.approx(0.189, rel=0.01)
    assert drawn["opacity"][drawn["n"].index(max(drawn["n"]))] == 1
    assert (drawn["scale_n"][-1], drawn["scale_opacity"][-1]) == (max(drawn["n"]), 1)
    assert chart_data.ttft_heat_map(build_frame(records[:50])) is None


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.03, 3.2, [0.05, 0.1, 0.2, 0.5, 1, 2]), (0.045, 0.125, [0.06, 0.08, 0.1, 0.12]), (0.2, 0.20002, None)],
)
def test_ticks_of_the_heat_map_are_round(low: float, high: float, ticks: list[float] | None) -> None:
    """Ticks are 1, 2 or 5 times a power of ten, or evenly spaced where the range is narrow, at their places in rows."""
    values, positions = chart_data.heat_map_ticks(low, high)
    if ticks:
        assert values == pytest.approx(ticks)
    assert len(values) >= 3
    assert positions == sorted(positions)
    assert positions[0] >= 0
    assert positions[-1] <= chart_data.HEAT_MAP_ROWS


def test_marks_of_many_failures_are_thinned() -> None:
    """Of 1,000 failures 200 are marked, the first and the last among them."""
    records = [failed(n, sent_ns=n * 10 * MS, end_ns=n * 10 * MS + MS) for n in range(1000)]
    marked = chart_data.latency_series(build_frame(records))
    assert marked
    assert len(marked["incomplete_s"]) == chart_data.FAILURE_MARKS_MAX
    assert (marked["incomplete_s"][0], marked["incomplete_s"][-1]) == (0.001, 9.991)
