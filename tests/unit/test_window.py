"""The measuring window, on loads whose plateau is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.frame import Window, frame_of
from analysis.window import choose, in_flight
from loadgen.record import Record
from loadgen.runfile import load_facts
from tests.runs import MILLISECOND_NS as MS
from tests.runs import complete, dropped, failed, header, run_of, summarise

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
    return choose(frame_of(records), load_facts(arrivals, ""), **plan)


def test_an_even_load_is_measured_on_its_plateau() -> None:
    """100 per second that stay for 1 s: from the instant the first one leaves until the last is due."""
    window = window_of(asked_at(evenly(1000, 10), 1000), "constant:100")
    assert window is not None
    assert (window.from_ns, window.to_ns) == (1 * S, 9990 * MS)
    assert (window.chosen, window.reason) == ("auto", "about 100 in flight")


def test_a_server_that_fills_slowly_is_measured_once_it_is_full() -> None:
    """Where the first tenth is answered at once, the window begins when 80 of 100 are in flight."""
    window = window_of(asked_at(evenly(2000, 10), [1.0] * 200 + [1000.0] * 1800), "constant:100")
    assert window is not None
    assert window.from_ns == (2000 + 79 * 10) * MS


def test_rates_of_an_even_load_are_those_of_its_arrivals(tmp_path: Path) -> None:
    """On the plateau answers end as often as requests come, and tokens arrive as they are asked for."""
    plan = header(1000).plan | {"arrivals": "constant:100"}
    figures = summarise(run_of(tmp_path / "run", asked_at(evenly(1000, 10), 1000), plan=plan))["throughput"]
    assert figures["requests_per_s"] == pytest.approx(100, rel=0.002)
    assert figures["output_tokens_per_s"] == pytest.approx(200, rel=0.002)


def test_a_server_that_empties_early_ends_the_window() -> None:
    """When the last tenth of the requests is answered at once, the window ends where the others are gone."""
    records = asked_at(evenly(1000, 10), [1000.0] * 900 + [1.0] * 100)
    window = window_of(records, "constant:100")
    assert window is not None
    assert window.to_ns == pytest.approx(9190 * MS, abs=21 * MS)


def test_a_poisson_load_is_measured_on_its_plateau() -> None:
    """200 per second that stay for 0.5 s: the window begins within the first second and ends with the arrivals."""
    random = np.random.default_rng(3)
    due_ms = np.cumsum(random.exponential(5, 4000)).tolist()
    window = window_of(asked_at(due_ms, random.gamma(4, 125, 4000).tolist()), "poisson:200")
    assert window is not None
    assert window.reason.endswith("in flight")
    assert 0.2 * S < window.from_ns < 1 * S
    assert window.to_ns > 0.97 * due_ms[-1] * MS


def test_a_closed_loop_is_measured_from_its_first_round() -> None:
    """Eight clients are all in flight from the start, so nothing but the last answers is left out."""
    due_ms = [round_ * 100 + client for round_ in range(50) for client in range(8)]
    window = window_of(asked_at(due_ms, 99), "closed:8")
    assert window is not None
    assert window.from_ns < 100 * MS
    assert window.to_ns > 4900 * MS


@pytest.mark.parametrize(
    ("records", "why"),
    [
        (asked_at(evenly(100, 10), 5000), "too short for requests that take 5 s"),
        (asked_at(evenly(1000, 10), np.linspace(10, 8000, 1000).tolist()), "in its second"),
    ],
    ids=["short", "overload"],
)
def test_without_a_plateau_everything_due_counts_and_it_is_said(records: list[Record], why: str) -> None:
    """A run too short, a queue that grows to the end: from the first due to the last, with the cause."""
    window = window_of(records, "constant:100")
    assert window is not None
    assert (window.from_ns, window.to_ns) == (records[0].due_ns, records[-1].due_ns)
    assert window.reason.startswith("no plateau")
    assert why in window.reason


def test_an_idle_server_is_measured_throughout() -> None:
    """Where nothing is in flight most of the time there is no ramp to leave out."""
    window = window_of(asked_at(evenly(20, 1000), 10), "constant:1")
    assert window is not None
    assert (window.from_ns, window.to_ns) == (0, 19 * S)
    assert window.reason == "most of the time nothing was in flight, so this is from the first due to the last"


@pytest.mark.parametrize("arrivals", ["ramp:1..9/10s", "steps:100@5s,10@5s", "trace:a.jsonl"])
def test_a_rate_that_changes_by_plan_has_no_plateau(arrivals: str) -> None:
    """Everything between the first and the last due instant counts."""
    window = window_of(asked_at(evenly(1000, 10), 500), arrivals)
    assert window == Window(0, 9990 * MS, "auto", "the rate changes by plan, so this is from the first due to the last")


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
    sent = asked_at(evenly(1000, 10), 1000)
    never = [failed(2000 + i, "cancelled", sent_ns=None, end_ns=None, due_ns=(20 + i) * S) for i in range(50)]
    assert window_of([*sent, *never], "constant:100") == window_of(sent, "constant:100")


def test_warm_up_does_not_move_the_window() -> None:
    """Its requests are in flight before 0 and in no figure."""
    sent = asked_at(evenly(1000, 10), 1000)
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
    }
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
    assert steps.levels.tolist() == [1, 2, 1, 0]
