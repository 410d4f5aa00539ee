"""The parts of latency and the bounds of each request, on runs small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from loadgen.analysis.frame import Frame, build_frame
from loadgen.analysis.goodput import goodput
from loadgen.analysis.objectives import parse, parse_bounds
from loadgen.analysis.report.charts import CHARTS
from loadgen.analysis.report.gap_counts import count_gaps
from loadgen.analysis.report.request_parts import bounds_scatter, latency_bounds, latency_parts
from loadgen.analysis.run.record import Record
from loadgen.analysis.slo import judge
from loadgen.analysis.summary import Summary
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import complete, failed, part_of, run_of


def answer(number: int, ttft_ms: int, gaps_ms: list[int]) -> Record:
    """Return a request sent at 0 with this TTFT and these gaps, which ends with its last token."""
    instants = [ttft_ms * MS]
    for gap_ms in gaps_ms:
        instants.append(instants[-1] + gap_ms * MS)
    return complete(number, instants, end_ns=instants[-1])


def parts_of(frame: Frame, phases: Mapping[str, float]) -> dict[str, Any] | None:
    return latency_parts(frame, count_gaps(frame), phases)


def test_e2e_is_divided_into_the_wait_decode_and_stalls() -> None:
    """Of 200 requests the slowest two form a group; its one long gap is a stall, the other gaps are decode time."""
    records = [answer(n, 100, [10] * 10) for n in range(198)]
    records += [answer(198, 300, [10] * 9 + [510]), answer(199, 300, [10] * 9 + [710]), failed(200)]
    parts = parts_of(build_frame(records), {})
    assert parts
    assert parts["group"] == ["fastest 50%", "p50 to p90", "p90 to p99", "slowest 1%"]
    assert parts["n"] == [100, 80, 18, 2]
    slowest = {key: parts[key][-1] for key in ("ttft_s", "decode_s", "stalls_s", "e2e_s")}
    assert slowest == pytest.approx({"ttft_s": 0.3, "decode_s": 0.09, "stalls_s": 0.61, "e2e_s": 1.0})
    assert parts["stalls_s"][:3] == [0, 0, 0]
    assert parts["median_gap_s"] == pytest.approx(0.01, rel=0.01)
    assert parts["server"]["n"] == parts["server"]["queue"] == []


@pytest.mark.parametrize(
    ("phases", "shown"),
    [
        ({"queue": 2.0, "prefill": 0.5, "decode": 3.0, "requests": 9.0}, ["queue", "prefill", "decode"]),
        ({"queue": 2.0, "inference": 3.5, "requests": 9.0}, ["queue", "inference"]),
        ({"decode": 3.0, "requests": 9.0}, []),
    ],
)
def test_the_servers_own_means_are_a_bar_if_they_cover_a_request(phases: dict[str, float], shown: list[str]) -> None:
    """The server's bar needs the queue and what follows it; a part alone is not shown."""
    parts = parts_of(build_frame([answer(n, 100, [10] * 10) for n in range(20)]), phases)
    assert parts
    server = parts["server"]
    assert [part for part in ("queue", "prefill", "decode", "inference") if server[part]] == shown
    assert server["total"] == ([5.5] if shown else [])
    assert server["n"] == ([9] if shown else [])


@pytest.mark.parametrize(
    "records", [[], [answer(n, 100, [10]) for n in range(9)], [answer(n, 9, []) for n in range(20)]]
)
def test_few_requests_or_none_with_gaps_have_no_parts(records: list[Record]) -> None:
    """Fewer than ten requests, or responses of one chunk, make no chart."""
    assert parts_of(build_frame(records), {}) is None


@pytest.fixture
def judged(tmp_path: Any) -> Any:
    """Return a function that makes the summary and the frame of a run with these bounds and objectives."""

    def make(records: list[Record], bounds: tuple[str, ...], objectives: tuple[str, ...]) -> tuple[Any, Summary]:
        summary = part_of(run_of(tmp_path / f"run-{len(bounds)}", records)).summary
        frame = build_frame(records)
        if bounds:
            summary.goodput = goodput(frame, parse_bounds(bounds))
        summary.objectives = judge(parse(objectives), frame, summary)
        return frame, summary

    return make


MIXED = [
    *(answer(n, 100, [10] * 4) for n in range(6)),
    *(answer(10 + n, 900, [10] * 4) for n in range(2)),
    answer(20, 100, [90] * 4),
    answer(30, 900, [90] * 4),
    failed(40),
]


def test_each_request_is_on_its_side_of_both_bounds(judged: Any) -> None:
    """Six of ten requests meet both bounds, two miss TTFT, one misses TPOT, one misses both; the failed one is left
    out."""
    frame, summary = judged(MIXED, ("ttft < 500ms", "tpot < 50ms"), ("ttft.p99 < 1s",))
    drawn = bounds_scatter(frame, summary)
    assert drawn
    assert drawn["shares"] == pytest.approx({"both": 0.6, "ttft missed": 0.2, "tpot missed": 0.1, "both missed": 0.1})
    assert (drawn["ttft_bound"], drawn["ttft_unit"], drawn["tpot_bound"], drawn["tpot_unit"]) == (500, "ms", 50, "ms")
    missed = [request for request, tpot in zip(drawn["request"], drawn["tpot_missed"], strict=True) if tpot is not None]
    assert (len(drawn["request"]), missed) == (10, [10, 11, 20, 30])
    assert [tpot is None for tpot in drawn["tpot_met"]] == [tpot is not None for tpot in drawn["tpot_missed"]]
    layout = CHARTS["bounds"].layout
    assert callable(layout)
    texts = [label["text"] for label in layout([drawn])["annotations"]]
    assert texts[0] == "<b>60.0%</b><br>meet both bounds"
    assert len(layout([drawn])["shapes"]) == 2
    caption = CHARTS["bounds"].caption(drawn, summary)
    assert caption == "Shares of 10 complete requests."


def test_objectives_on_percentiles_are_bounds_if_there_is_no_goodput(judged: Any) -> None:
    """A lower bound, a mean and a bound on another latency are none; one bound alone gives two sides."""
    frame, summary = judged(MIXED, (), ("e2e.p99 < 9s", "ttft.mean < 1s", "tpot.p50 > 1ms", "tpot.p95 <= 50ms"))
    assert {key: bound.text for key, bound in latency_bounds(summary).items()} == {"tpot": "tpot.p95 <= 50ms"}
    drawn = bounds_scatter(frame, summary)
    assert drawn
    assert drawn["ttft_bound"] is None
    assert drawn["shares"] == pytest.approx({"both": 0.8, "ttft missed": 0, "tpot missed": 0.2, "both missed": 0})
    layout = CHARTS["bounds"].layout
    assert callable(layout)
    texts = [label["text"] for label in layout([drawn])["annotations"]]
    assert texts == ["<b>80.0%</b><br>meet the bound", "<b>20.0%</b><br>TPOT too long"]


def test_without_bounds_there_is_no_scatter(judged: Any) -> None:
    """A run without bounds on TTFT and TPOT has no such chart."""
    assert bounds_scatter(*judged(MIXED, (), ())) is None
    assert bounds_scatter(*judged(MIXED, ("e2e < 1s",), ("complete >= 50%",))) is None
