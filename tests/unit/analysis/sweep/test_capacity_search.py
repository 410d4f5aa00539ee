"""The capacity of a server from a few runs: held against queues of which it is known."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.frame import Floats
from loadgen.analysis.objectives import ObjectiveError, parse, parse_bounds
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.sweep.capacity_search import (
    SHORT_RUN_FACTOR,
    LoadObservation,
    Search,
    autocorrelation_time,
    capacity_of_list,
    chance_of_share,
    chance_over,
    check_objectives,
)
from tests.support.runs import burst, complete, failed, rejected, run_of

SERVED_PER_S, BOUND_S, SHARE = 20.0, 1.0, 0.99
CAPACITY = SERVED_PER_S - math.log(1 / (1 - SHARE)) / BOUND_S
"""Of M/M/1: a request stays an exponential time of rate mu - lambda (Kleinrock, "Queueing Systems", 1975), so that at
this rate its 99th percentile is the bound."""


def stays(rate: float, seed: int, for_s: float = 120.0) -> Floats:
    """One run against a server that serves one request after the other, each for an exponential time."""
    random = np.random.default_rng(seed)
    due = np.cumsum(random.exponential(1 / rate, max(20, round(rate * for_s))))
    served = np.cumsum(random.exponential(1 / SERVED_PER_S, len(due)))
    begins = np.maximum.accumulate(due - np.concatenate(([0.0], served[:-1])))
    return np.asarray(served + begins - due)


def evidence_at(rate: float, seed: int) -> LoadObservation:
    if rate > 1.3 * SERVED_PER_S:  # ended early: it returns what it can
        return LoadObservation(rate, 1.0, SERVED_PER_S)
    found = stays(rate, seed)
    missed = np.where(found > BOUND_S, 1.0, 0.0)
    return LoadObservation(rate, chance_of_share(missed, np.ones(len(missed)), 1 - SHARE, found, BOUND_S))


def test_the_interval_holds_the_true_capacity() -> None:
    """In at least 95 of 100 sweeps of a queue whose capacity is known, at 95% confidence, in at most 8 runs each; and
    it says something: half of them are exact to a third or better."""
    held, widths = 0, []
    for seed in range(100):
        search, runs = Search(1 / 64, 65_536.0), list[LoadObservation]()
        while len(runs) < 8 and (rate := search.next_load(runs, 1.0)) is not None:
            runs.append(evidence_at(rate, 1000 * seed + len(runs)))
        found = search.capacity(runs)
        assert found.capacity is not None
        assert found.high is not None
        held += found.low <= CAPACITY <= found.high
        widths.append((found.high - found.low) / 2 / found.capacity)
    assert held >= 95
    assert np.median(widths) < 1 / 3


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.2])
def test_one_run_says_how_likely_it_is_over(factor: float) -> None:
    """Below the capacity rarely, above it mostly; at it hardly ever sure, though neighbours in a queue are alike."""
    chances = np.array([evidence_at(factor * CAPACITY, seed).over for seed in range(200)])
    if factor == 1.0:
        assert (chances < 0.025).mean() < 0.12
        assert (chances > 0.975).mean() < 0.12
    else:
        assert (np.mean(chances > 0.5) > 0.9) == (factor > 1)


def test_neighbours_that_are_alike_count_less() -> None:
    """Independent values count one each, but for the factor that short series need; those of a queue far less."""
    random = np.random.default_rng(1)
    independent = autocorrelation_time(random.random(4000))
    assert independent == pytest.approx(SHORT_RUN_FACTOR, rel=0.35)
    assert autocorrelation_time(stays(0.9 * SERVED_PER_S, 1)) > 10 * independent


def steps(search: Search, carries: float, start: float) -> list[LoadObservation]:
    """A server without noise."""
    found = list[LoadObservation]()
    while (load := search.next_load(found, start)) is not None and len(found) < 30:
        found.append(LoadObservation(load, float(load > carries)))
    return found


def test_without_noise_it_ends_within_the_precision() -> None:
    """A bracket by a factor, then halves: the interval holds the capacity, and is as narrow as asked."""
    for carries in (0.3, 7.7, 950.0):
        search = Search(1 / 64, 65_536.0, precision=0.05)
        runs = steps(search, carries, 1.0)
        state, capacity, low, high = search.capacity(runs)
        assert (state, capacity is not None, high is not None) == ("found", True, True)
        assert 0.99 * low <= carries <= 1.01 * (high or 0)
        assert ((high or 0) - low) / 2 <= 0.05 * (capacity or 0)
        assert len(runs) <= 14


def test_numbers_of_requests_are_whole() -> None:
    """A concurrency of 13 and one of 14 have nothing between them."""
    search = Search(1.0, 1024.0, whole=True, precision=0.001)
    runs = steps(search, 13.0, 1.0)
    assert all(each.load % 1 == 0 for each in runs)
    assert search.capacity(runs)[:4] == ("found", 13, 13, 14)


def test_nothing_holds_and_everything_holds() -> None:
    """Too slow when nobody else is there is a capacity of 0; what no load breaks is at least the most."""
    search = Search(1.0, 256.0)
    assert search.capacity(steps(search, 0.0, 16.0)) == ("below", 0.0, 0.0, 1.0)
    assert search.capacity(steps(search, 1e9, 16.0)) == ("at least", 256.0, 256.0, None)
    assert search.capacity([]) == ("open", None, 0.0, None)


def test_what_came_back_of_an_overload_says_where_to_look() -> None:
    """Far above its capacity a server returns about what it can: the next load is near that, not in the middle."""
    search = Search(1 / 64, 65_536.0)
    runs = [LoadObservation(1.0, 0.0), LoadObservation(64.0, 1.0, 10.0)]
    assert 4 <= (search.next_load(runs, 1.0) or 0) <= 12


def test_a_prediction_chooses_and_proves_nothing() -> None:
    """The first load is close to the predicted capacity; where that was wrong, the truth is found all the same."""
    search = Search(1 / 64, 65_536.0, predicted=40.0)
    assert 30 < (search.next_load([], 1.0) or 0) < 50
    runs = steps(search, 300.0, 1.0)
    low, high = search.capacity(runs)[2:]
    assert 0.99 * low <= 300.0 <= 1.01 * (high or 0)


def test_requests_that_are_not_complete_are_infinitely_slow(tmp_path: Path) -> None:
    """A run whose complete requests are fast breaks its objective if enough of the others never ended."""
    objectives = parse(["ttft.p90 < 1000s"])
    for lost, over in ((0, False), (40, True)):
        run = run_of(tmp_path / f"{lost}", [*burst(100, 4), *(failed(200 + place, "timeout") for place in range(lost))])
        frame = frame_of_run(run)
        assert (chance_over(objectives, (), frame, summarise(run, frame)) > 0.5) == over


def test_each_kind_of_objective_is_judged(tmp_path: Path) -> None:
    """Percentiles, means, extremes, gaps, states and attainment: clear ones are clear."""
    run = run_of(tmp_path / "run", burst(200, 8))
    frame = frame_of_run(run)
    summary = summarise(run, frame)
    bounds = parse_bounds(["ttft < 1000s"])
    for text in ("ttft.p99 < 1000s", "ttft.mean < 1000s", "e2e.max < 1000s", "itl.p99 < 1000s", "failed <= 5%"):
        assert chance_over(parse([text]), bounds, frame, summary) < 0.05, text
    for text in ("ttft.p99 < 1us", "ttft.mean < 1us", "e2e.max < 1us", "itl.p99 < 1us"):
        assert chance_over(parse([text]), bounds, frame, summary) > 0.95, text
    assert chance_over(parse(["attainment >= 90%"]), bounds, frame, summary) < 0.5
    hard = [replace(each, bound=1e-9) for each in bounds]
    assert chance_over(parse(["attainment >= 90%"]), hard, frame, summary) > 0.5


@pytest.mark.parametrize("text", ["output_tokens_per_s > 5", "ttft.p99 > 1s", "complete < 5%", "goodput > 3"])
def test_what_more_load_does_not_break_is_no_objective_of_a_sweep(text: str) -> None:
    """It is refused with what to name instead."""
    with pytest.raises(ObjectiveError, match="more load never makes it fail") as caught:
        check_objectives(parse([text]))
    assert "ttft.p99" in caught.value.hint


@pytest.mark.parametrize(
    ("objectives", "broken"),
    [
        (["ttft.p50 < 1000s"], True),
        (["ttft.p50 < 1000s", "rejected < 50%"], False),
        (["rejected < 50%"], False),
        (["rejected < 5%"], True),
        (["failed < 50%"], True),
        (["failed < 5%", "rejected < 50%"], False),
    ],
)
def test_rejected_requests_break_a_load_unless_an_objective_allows_them(
    objectives: list[str], broken: bool, tmp_path: Path
) -> None:
    """A fifth of the requests was rejected. Each objective counts the requests in its own state alone."""
    gap_ns = 10**7
    records = [
        rejected(place, due_ns=place * gap_ns, sent_ns=place * gap_ns)
        if place % 5 == 2
        else complete(place, [place * gap_ns + 10**6] * 2, due_ns=place * gap_ns, sent_ns=place * gap_ns)
        for place in range(500)
    ]
    run = run_of(tmp_path / "run", records)
    chance = chance_over(parse(objectives), [], frame_of_run(run), summarise(run))
    assert (chance > 0.95) == broken
    assert (chance < 0.05) == (not broken)


def test_a_list_of_loads_bounds_the_capacity_by_its_runs() -> None:
    """The interval ends at measured loads, also if the highest load is not met or has no clear result."""
    met = [LoadObservation(load, 0.0) for load in (1.0, 2.0, 4.0)]
    assert capacity_of_list([*met, LoadObservation(8.0, 0.9)])[1:] == (4.0, 4.0, 8.0)
    assert capacity_of_list([*met, LoadObservation(8.0, 0.6)])[1:] == (4.0, 4.0, 8.0)
    assert capacity_of_list(met) == ("at least", 4.0, 4.0, None)
    assert capacity_of_list([LoadObservation(1.0, 1.0), *met[1:]]) == ("below", 0.0, 0.0, 1.0)
