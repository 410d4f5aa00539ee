"""The measurement window, on loads of which it is known when they are steady."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.analysis.frame import Window, build_frame
from loadgen.analysis.goodput import goodput
from loadgen.analysis.objectives import parse_bounds
from loadgen.analysis.report.findings import findings, verdict
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import load_facts
from loadgen.analysis.steady_window import choose_window, frame_of_run, in_flight
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import (
    complete,
    dropped,
    failed,
    footer,
    header,
    run_of,
    said,
    summarise,
    text_of,
    truncated,
    typed,
)

S = 1000 * MS


def asked_at(due_ms: Sequence[float], stay_ms: Sequence[float] | float) -> list[Record]:
    """Requests sent when due, each in flight for so long: first token half-way, two tokens."""
    stays = np.broadcast_to(stay_ms, len(due_ms)).tolist()
    return [
        complete(
            number,
            [round((due + stay / 2) * MS), round((due + stay) * MS)],
            due_ns=round(due * MS),
            sent_ns=round(due * MS),
            sent_end_ns=round(due * MS),
            end_ns=round((due + stay) * MS),
        )
        for number, (due, stay) in enumerate(zip(due_ms, stays, strict=True))
    ]


def evenly(number: int, gap_ms: float) -> list[float]:
    return [index * gap_ms for index in range(number)]


def window_of(records: Sequence[Record], arrivals: str, **plan: Any) -> Window | None:
    return choose_window(build_frame(records), load_facts(arrivals, ""), **plan)


def test_a_steady_load_is_measured_after_its_ramp() -> None:
    """100 per second that stay for 1 s: from the instant the first one leaves until the last is due."""
    window = window_of(asked_at(evenly(3000, 10), 1000), "constant:100")
    assert window == Window(1 * S, 29_990 * MS, "auto", "about 100 in flight", steady=True)


def test_a_server_that_fills_slowly_is_measured_once_it_is_full() -> None:
    """Where the first 200 are answered at once, the window begins when 80 of 100 are in flight."""
    window = window_of(asked_at(evenly(4000, 10), [1.0] * 200 + [1000.0] * 3800), "constant:100")
    assert window is not None
    assert window.from_ns == (2000 + 79 * 10) * MS


def test_rates_of_an_even_load_are_those_of_its_arrivals(tmp_path: Path) -> None:
    """Behind the ramp answers end as often as requests come, and tokens arrive as they are asked for."""
    plan = header(3000).plan | {"arrivals": "constant:100"}
    figures = summarise(run_of(tmp_path / "run", asked_at(evenly(3000, 10), 1000), plan=plan))["throughput"]
    assert figures["requests_per_s"] == pytest.approx(100, rel=0.002)
    assert figures["output_tokens_per_s"] == pytest.approx(200, rel=0.002)


def test_a_window_ends_with_the_last_request_due() -> None:
    """A server that answers its last tenth at once might be one that answers with fast errors. All of it counts."""
    records = asked_at(evenly(3000, 10), [1000.0] * 2700 + [1.0] * 300)
    window = window_of(records, "constant:100")
    assert window is not None
    assert window.to_ns >= 29_990 * MS


def test_a_poisson_load_is_measured_after_its_ramp() -> None:
    """200 per second that stay for 0.5 s: the window begins within the first second and ends with the arrivals."""
    random = np.random.default_rng(3)
    due_ms = np.cumsum(random.exponential(5, 4000)).tolist()
    window = window_of(asked_at(due_ms, random.gamma(4, 125, 4000).tolist()), "poisson:200")
    assert window is not None
    assert window.chosen == "auto"
    assert window.reason.endswith("in flight")
    assert 0.2 * S < window.from_ns < 1 * S
    assert window.to_ns == pytest.approx(due_ms[-1] * MS)


def rounds(clients: int, number: int, stay_ms: float, *, from_ms: float = 0) -> list[float]:
    """Due instants of a closed loop whose answers all take the same time."""
    return [from_ms + turn * stay_ms + client * 0.1 for turn in range(number) for client in range(clients)]


@pytest.mark.parametrize(("number", "steady"), [(50, True), (5, False)], ids=["long", "short"])
def test_a_closed_loop_is_measured_whole(number: int, *, steady: bool) -> None:
    """Its clients wait for answers, so every request counts. A long one is steady when its answers show no trend."""
    window = window_of(asked_at(rounds(8, number, 100), 99), "closed:8")
    assert window is not None
    assert (window.chosen, window.steady) == ("whole", steady)


def test_a_stall_at_the_start_of_a_closed_loop_is_in_the_figures(tmp_path: Path) -> None:
    """Eight of 48 requests wait 11.6 s: they are the largest E2E, and throughput is that of the same 48 requests."""
    records = asked_at([0.0] * 8 + rounds(8, 5, 500, from_ms=11_600), [11_600.0] * 8 + [500.0] * 40)
    summary = summarise(run_of(tmp_path / "run", records, plan=header(48).plan | {"arrivals": "closed:8"}))
    assert summary["window"]["chosen"] == "whole"
    assert "outside" not in summary["window"]
    assert summary["latency"]["e2e_s"]["n"] == 48
    assert summary["latency"]["e2e_s"]["max"] == 11.6
    assert summary["throughput"]["completed"] == 48
    assert summary["throughput"]["span_s"] == pytest.approx(11.6 + 5 * 0.5, abs=0.001)


@pytest.mark.parametrize(
    ("records", "why", "unsteady"),
    [
        (asked_at(evenly(100, 10), 5000), "requests take 5 s, and a window needs 20 times that", False),
        (asked_at(evenly(1000, 10), np.linspace(10, 8000, 1000).tolist()), "no steady state was reached", True),
        (
            asked_at(evenly(3000, 10), np.linspace(900, 1080, 3000).tolist()),
            "no test shows a steady number in flight",
            False,
        ),
        (
            asked_at(evenly(3000, 10), [1.0] * 290 + [1000.0] * 2710),
            "more than a tenth of the requests were due",
            False,
        ),
        (asked_at(evenly(20, 1000), 10), "no request was in flight most of the time", False),
    ],
    ids=["short", "overload", "trend", "slow to fill", "idle"],
)
def test_without_a_steady_state_the_whole_run_counts(records: list[Record], why: str, *, unsteady: bool) -> None:
    """The reason is kept, and only a load that clearly outgrew the server is called unsteady."""
    window = window_of(records, "constant:100")
    assert window is not None
    assert window.chosen == "whole"
    assert why in window.reason
    assert bool(window.unsteady) is unsteady
    assert window.overloaded is unsteady


def test_a_large_overload_is_found_by_its_ttft() -> None:
    """Requests arrive twice as fast as the server completes them, and each takes longer than the rest of the run."""
    records = [
        complete(
            number, [int((at + wait) * MS), int((at + wait + 20_000) * MS)], due_ns=int(at * MS), sent_ns=int(at * MS)
        )
        for number, at in enumerate(evenly(1000, 20))
        for wait in [at]
    ]
    window = window_of(records, "constant:50")
    assert window is not None
    assert window.overloaded
    assert window.unsteady == "TTFT was 2.49 s on average in the first quarter of the run, 17.5 s in the last"


def test_fewer_requests_in_flight_are_no_overload() -> None:
    """A server that becomes faster is not steady, but its queue does not grow."""
    window = window_of(asked_at(evenly(1000, 10), np.linspace(3000, 10, 1000).tolist()), "constant:100")
    assert window is not None
    assert window.unsteady
    assert not window.overloaded


def fails(records: Sequence[Record], first: int, last: int, **changes: Any) -> list[Record]:
    """The same requests, of which these fail as fast as a proxy answers for a server that is gone."""
    return [
        failed(each.id, due_ns=each.due_ns, sent_ns=each.sent_ns, end_ns=each.due_ns + MS, http_status=502, **changes)
        if first <= place < last
        else each
        for place, each in enumerate(records)
    ]


@pytest.mark.parametrize("first", [0, 400, 1000, 1900], ids=["start", "early", "middle", "end"])
@pytest.mark.parametrize("arrivals", ["constant:100", "closed:100"])
def test_an_outage_is_no_ramp(arrivals: str, first: int, tmp_path: Path) -> None:
    """Requests that fail fast empty the server as a ramp would. Each of them counts in goodput, wherever it lies."""
    records = fails(asked_at(evenly(2000, 10), 500), first, first + 90)
    run = run_of(tmp_path / "run", records, plan=header(2000).plan | {"arrivals": arrivals})
    frame = frame_of_run(run)
    found = goodput(frame, parse_bounds(["e2e < 1s"]))
    assert found.requests - found.good == 90
    assert found.attainment is not None
    assert found.attainment <= 1 - 90 / 2000
    assert "outside" not in summarise(run)["window"] or not summarise(run)["window"]["outside"]["incomplete"]


@pytest.mark.parametrize("state", ["failed", "rejected", "truncated", "dropped"])
def test_a_window_leaves_out_no_request_that_failed(state: str) -> None:
    """One request of the ramp that is not complete is enough to measure the whole run."""
    records = fails(asked_at(evenly(3000, 10), 1000), 50, 51, state=state)
    window = window_of(records, "constant:100")
    assert window is not None
    assert window.reason == "the whole run: requests failed while the server filled up"


def test_a_run_in_which_most_failed_has_the_latencies_of_the_rest(tmp_path: Path) -> None:
    """A closed loop on a server that fails after its first answers: the five that were answered make the table."""
    records = fails(asked_at([0.0] * 5 + evenly(25, 2), 400), 5, 30)
    run = run_of(tmp_path / "run", records, plan=header(30).plan | {"arrivals": "closed:5"})
    summary = summarise(run)
    assert summary["requests"]["complete"] == summary["latency"]["ttft_s"]["n"] == 5
    text = text_of(summary)
    assert "5 of 30 complete in 400.0 ms" in text
    assert "E2E ms 400.0" in " ".join(text.split())


@pytest.mark.parametrize("arrivals", ["ramp:1..9/10s", "steps:100@5s,10@5s", "trace:a.jsonl"])
def test_a_rate_that_changes_by_plan_is_measured_whole(arrivals: str) -> None:
    """Everything from the first byte sent to the last end counts."""
    window = window_of(asked_at(evenly(3000, 10), 500), arrivals)
    assert window is not None
    assert (window.chosen, window.reason) == ("whole", "the whole run: the rate changes by plan")


@pytest.mark.parametrize("arrivals", ["burst", "burst:10/1s"])
def test_a_burst_is_measured_as_a_whole(arrivals: str) -> None:
    """Also when bursts follow each other."""
    assert window_of(asked_at([0, 0, 1000, 1000], 100), arrivals) is None


def test_the_plan_may_set_the_window() -> None:
    """Seconds from the run's start, whatever the arrivals are."""
    for arrivals in ("burst", "poisson:3"):
        window = window_of(asked_at([0, 1], 100), arrivals, set_s=[1.5, 4])
        assert window == Window(1.5 * S, 4 * S, "set", "set by the plan")


def test_nothing_sent_has_no_window() -> None:
    """Nor has one request alone, nor requests that are all due at once."""
    assert window_of([], "poisson:3") is None
    assert window_of([dropped(1), failed(2, sent_ns=None, end_ns=None)], "poisson:3") is None
    assert window_of(asked_at([5], 10), "poisson:3") is None


def test_what_was_never_sent_does_not_stretch_the_window() -> None:
    """An interrupted run has records of requests that were due later; the window ends with what went out."""
    sent = asked_at(evenly(3000, 10), 1000)
    never = [failed(4000 + i, "cancelled", sent_ns=None, end_ns=None, due_ns=(40 + i) * S) for i in range(50)]
    window = window_of([*sent, *never], "constant:100")
    assert window is not None
    assert window.to_ns <= 31 * S


def test_warm_up_does_not_move_the_window() -> None:
    """Its requests are in flight before 0 and in no figure."""
    sent = asked_at(evenly(3000, 10), 1000)
    warmup = [complete(-1 - i, [-500 * MS], sent_ns=-900 * MS, due_ns=-900 * MS, phase="warmup") for i in range(500)]
    assert window_of([*warmup, *sent], "constant:100") == window_of(sent, "constant:100")


def test_latencies_are_of_what_is_due_inside_and_rates_of_what_arrives_inside(tmp_path: Path) -> None:
    """A window of 2 s over four requests of 1 s: worked out by hand.

    Due at 0, 1.5, 2.5 and 5 s; tokens at +0.5 and +1 s; the window is 1 to 3 s. Due inside: the second and the third.
    First tokens inside: the second's. Tokens inside: the first's last at 1.0, the second's two at 2.0 and 2.5, the
    third's first at 3.0. Ended inside: the first and the second.
    """
    records = asked_at([0, 1500, 2500, 5000], 1000)
    plan = header(4).plan | {"arrivals": "constant:1", "window_s": [1.0, 3.0]}
    summary = summarise(run_of(tmp_path / "run", records, plan=plan))
    assert summary["window"] == {
        "from_s": 1.0,
        "to_s": 3.0,
        "chosen": "set",
        "reason": "set by the plan",
        "requests": 2,
        "outside": {
            "requests": 2,
            "complete": 2,
            "incomplete": {},
            "slowest_s": 1.0,
            "slowest_inside_s": 1.0,
            "slowest_ttft_s": 0.5,
            "slowest_ttft_inside_s": 0.5,
        },
    }
    assert (summary["throughput"]["completed"], summary["throughput"]["span_s"]) == (2, 2.0)
    assert summary["throughput"]["output_tokens"] == 4
    assert summary["latency"]["e2e_s"]["n"] == 2
    assert summary["latency"]["itl_s"]["n"] == 2
    assert summary["throughput"]["requests_per_s"] == 1.0
    assert summary["throughput"]["output_tokens_per_s"] == 2.0
    assert summary["throughput"]["total_tokens_per_s"] == (4 + 2 * 512) / 2
    assert summary["throughput"]["tail_share"] is None
    assert summary["burst"]["skew_s"] is None


def test_a_servers_own_count_is_spread_over_its_chunks(tmp_path: Path) -> None:
    """Ten tokens reported for two chunks, one of them inside: five count."""
    record = complete(1, [500 * MS, 1500 * MS], output_tokens=10)
    plan = header(1).plan | {"window_s": [1.0, 2.0]}
    assert summarise(run_of(tmp_path / "run", [record], plan=plan))["throughput"]["output_tokens_per_s"] == 5.0


def test_the_whole_of_a_burst_is_named_so(tmp_path: Path) -> None:
    """Its ends are the first byte sent and the last end."""
    records = asked_at([0, 0], [400, 700])
    window = summarise(run_of(tmp_path / "run", records))["window"]
    assert (window["from_s"], window["to_s"], window["chosen"], window["requests"]) == (0.0, 0.7, "whole", 2)


def test_the_number_in_flight_is_a_step_function() -> None:
    """It rises with each begin and falls with each end; at one instant what begins comes first."""
    steps = in_flight(np.array([0.0, 2.0, np.nan]), np.array([2.0, 3.0, 9.0]))
    assert steps.instants.tolist() == [0, 2, 2, 3]
    assert steps.counts.tolist() == [1, 2, 1, 0]


def window_set(folder: Path, records: Sequence[Record], from_s: float, to_s: float) -> dict[str, Any]:
    """The summary of a closed loop whose plan sets the window."""
    plan = header(len(records)).plan | {"arrivals": "closed:8", "window_s": [from_s, to_s]}
    return summarise(run_of(folder, records, plan=plan))


def test_what_a_window_leaves_out_is_summarised(tmp_path: Path) -> None:
    """How many requests, how they ended, and the slowest; a warning where it was slower than every one inside."""
    records = asked_at([0.0] * 8 + rounds(8, 40, 500, from_ms=11_600), [11_600.0] * 8 + [500.0] * 320)
    slow = window_set(tmp_path / "slow", records, 11.6, 31.6)
    assert said(slow, "outside") == (
        "8 of 328 requests outside the window; the slowest took 11.6 s, longer than any inside (500 ms)."
    )
    assert level(slow, "outside") == "warning"
    quick = window_set(tmp_path / "quick", records[8:], 12.6, 31.6)
    assert said(quick, "outside") == "16 of 320 requests outside the window; the slowest took 500 ms."
    assert level(quick, "outside") == "ok"


def test_a_slightly_slower_request_outside_a_window_is_no_warning(tmp_path: Path) -> None:
    """Of 328 requests, the slowest is outside by chance in 8 of 328 runs without a fault."""
    records = asked_at([0.0] * 8 + rounds(8, 40, 500, from_ms=11_600), [560.0] * 8 + [500.0] * 320)
    summary = window_set(tmp_path / "run", records, 11.6, 31.6)
    assert said(summary, "outside") == "8 of 328 requests outside the window; the slowest took 560 ms."
    assert level(summary, "outside") == "ok"


def test_a_slow_first_token_outside_a_window_is_a_warning(tmp_path: Path) -> None:
    """Its request may have been no slower as a whole, because others were longer."""
    records = asked_at(rounds(8, 40, 500), 500)
    late = complete(0, [490 * MS, 495 * MS], due_ns=0, sent_ns=0, end_ns=495 * MS)
    summary = window_set(tmp_path / "run", [late, *records[1:]], 1.0, 20.0)
    assert said(summary, "outside") == (
        "16 of 320 requests outside the window; the slowest took 500 ms; the slowest first token took 490 ms, longer "
        "than any inside (250 ms)."
    )
    assert level(summary, "outside") == "warning"


def test_failures_outside_a_window_are_a_warning(tmp_path: Path) -> None:
    """By state, however fast they were."""
    records = fails(asked_at(rounds(8, 40, 500), 500), 0, 8)
    records[8] = truncated(8, [510 * MS], due_ns=500 * MS)
    summary = window_set(tmp_path / "run", records, 1.0, 20.0)
    assert said(summary, "outside") == (
        "16 of 320 requests outside the window; 8 failed, 1 truncated; the slowest took 500 ms."
    )
    assert level(summary, "outside") == "warning"


def test_warm_up_requests_that_failed_are_a_warning(tmp_path: Path) -> None:
    """They are in no figure, so nothing else would show them."""
    warmup = [failed(-1 - place, phase="warmup", sent_ns=-S, end_ns=-S + MS) for place in range(3)]
    run = run_of(tmp_path / "run", [*warmup, *asked_at([0.0] * 8, 500)], plan=header(8).plan)
    summary = summarise(run)
    assert said(summary, "warmup") == "3 of 3 warm-up requests did not complete."
    assert said(summary, "complete") == "All 8 requests complete."
    assert level(summary, "warmup") == "warning"


def test_a_window_without_a_complete_request_says_so(tmp_path: Path) -> None:
    """There is no table of dashes, and the verdict is that there is no result."""
    summary = window_set(tmp_path / "run", asked_at(rounds(8, 4, 500), 500), 5.0, 9.0)
    assert said(summary, "window") == (
        "No complete request was due in the window, 5.00 s to 9.00 s of the run: there are no latencies."
    )
    assert "Latency of complete requests" not in text_of(summary)
    found = typed(summary)
    assert verdict(found, findings(found)).sentence == "Invalid: no complete request was due in the window."


def test_a_load_that_outgrows_the_server_is_a_warning(tmp_path: Path) -> None:
    """The halves are named: such latencies say the length of the run."""
    records = asked_at(evenly(1000, 10), np.linspace(10, 8000, 1000).tolist())
    summary = summarise(run_of(tmp_path / "run", records, plan=header(1000).plan | {"arrivals": "constant:100"}))
    assert re.fullmatch(
        r"Server overloaded: \d+ requests were in flight in the first half, \d+ in the second\. Requests arrived "
        r"faster than they completed, so latencies depend on the length of the run\.",
        said(summary, "overloaded"),
    )
    assert level(summary, "overloaded") == "warning"


def level(summary: dict[str, Any], name: str) -> str:
    """The level of the finding of this name."""
    return next(each.level for each in findings(typed(summary)) if each.id == name)


def test_a_run_lasts_to_its_last_answer(tmp_path: Path) -> None:
    """The seconds that are printed are those that rates were divided by, and not the workers' time to finish."""
    records = asked_at([0.0] * 50, 577)
    run = run_of(tmp_path / "run", records)
    run.footer = footer(records, ended_ns=1570 * MS)
    summary = summarise(run)
    assert summary["run"]["duration_s"] == summary["throughput"]["span_s"] == 0.577
    assert summary["throughput"]["requests_per_s"] == pytest.approx(50 / 0.577)
    assert "86.66 /s 50 of 50 complete in 577.0 ms" in " ".join(text_of(summary).split())
    assert "1.57" not in text_of(summary)


@pytest.mark.parametrize("first", [0, 20, 39], ids=["start", "middle", "end"])
def test_a_stalled_closed_loop_has_no_absurd_interval(first: int, tmp_path: Path) -> None:
    """Parts of a run in which nothing ended tell little about the rest: no interval, or one that is about the rate."""
    stays = [500.0] * 320
    stays[8 * first : 8 * first + 8] = [11_600.0] * 8
    due_ms = [sum(stays[client : 8 * turn : 8]) for turn in range(40) for client in range(8)]
    run = run_of(tmp_path / "run", asked_at(due_ms, stays), plan=header(320).plan | {"arrivals": "closed:8"})
    throughput = summarise(run)["throughput"]
    low, high = throughput["ci95"].get("requests_per_s", (0, 0))
    assert low <= throughput["requests_per_s"]
    assert high < 10 * throughput["requests_per_s"]
