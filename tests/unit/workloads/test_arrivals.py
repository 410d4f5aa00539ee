"""Arrivals as tables: what each text means, how it is printed, what is refused, and exact instants."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest

from loadgen.workloads.arrival_facts import Arrivals
from loadgen.workloads.arrival_processes import ClosedLoopArrivals, Constant, Gamma, Poisson, Ramp, Steps, Trace
from loadgen.workloads.arrivals import Burst, due_instants, parse
from loadgen.workloads.spec_syntax import WorkloadError

S = 1_000_000_000

TEXTS: list[tuple[str, Arrivals, str]] = [
    ("burst", Burst(), "burst"),
    ("burst:100/5s", Burst(100, 5 * S), "burst:100/5s"),
    ("burst:1/250ms", Burst(1, S // 4), "burst:1/0.25s"),
    ("constant:20", Constant(Fraction(20)), "constant:20"),
    ("constant:0.1/s", Constant(Fraction(1, 10)), "constant:0.1"),
    ("poisson:1000000", Poisson(Fraction(10**6)), "poisson:1000000"),
    (" poisson:2.50/s ", Poisson(Fraction(5, 2)), "poisson:2.5"),
    ("gamma:20,cv=2", Gamma(Fraction(20), Fraction(2)), "gamma:20,cv=2"),
    ("gamma:0.5/s,cv=0.25", Gamma(Fraction(1, 2), Fraction(1, 4)), "gamma:0.5,cv=0.25"),
    ("ramp:1..50/60s", Ramp(Fraction(1), Fraction(50), 60 * S), "ramp:1..50/60s"),
    ("ramp:0/s..5/s/2m", Ramp(Fraction(0), Fraction(5), 120 * S), "ramp:0..5/120s"),
    ("steps:5@30s", Steps(((Fraction(5), 30 * S),)), "steps:5@30s"),
    ("steps:5@1m,0@1,2.5/s@1h", Steps(((Fraction(5), 60 * S), (Fraction(0), S), (Fraction(5, 2), 3600 * S))),
     "steps:5@60s,0@1s,2.5@3600s"),
    ("closed:64", ClosedLoopArrivals(64), "closed:64"),
    ("closed:64,think=1.5", ClosedLoopArrivals(64, 3 * S // 2), "closed:64,think=1.5s"),
    ("closed:64,think=0s", ClosedLoopArrivals(64), "closed:64"),
    ("trace:a.csv", Trace(Path("a.csv")), "trace:a.csv"),
    ("trace:a,b=1.csv,speed=2.5,limit=7,start=1m", Trace(Path("a,b=1.csv"), Fraction(5, 2), 60 * S, 7),
     "trace:a,b=1.csv,speed=2.5,start=60s,limit=7"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "arrivals", "canonical"), TEXTS, ids=[text for text, _, _ in TEXTS])
def test_text_and_value_stand_for_each_other(text: str, arrivals: Arrivals, canonical: str) -> None:
    """Each form is read as its value, printed in one canonical form, and read back unchanged."""
    assert parse(text) == arrivals
    assert str(arrivals) == canonical
    assert parse(canonical) == arrivals


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("", "unknown process ''", "choose burst, constant"),
        ("uniform:3", "unknown process 'uniform'", "choose burst, constant"),
        ("burst:", "no value follows 'burst'", "burst:N/T"),
        ("burst:5", "the time between bursts is missing", "burst:100/5s"),
        ("burst:0/5s", "burst size 0 is outside 1 to 1000000", "burst:N/T"),
        ("burst:2.5/5s", "burst size '2.5' is not a whole number", "burst:N/T"),
        ("burst:5/0s", "time between bursts 0s is outside", "burst:N/T"),
        ("constant", "no value follows 'constant'", "constant:R"),
        ("constant:-3", "rate '-3' is not a plain decimal number", "constant:R"),
        ("constant:1e3", "rate '1e3' is not a plain decimal number", "constant:R"),
        ("constant:nan", "rate 'nan' is not", "constant:R"),
        ("poisson:0", "a rate of 0 sends no requests", "poisson:R"),
        ("poisson:1000001", "rate 1000001 is outside 0 to 1000000", "poisson:R"),
        ("poisson:0.0000000001", "rate '0.0000000001' is not", "poisson:R"),
        ("gamma:20", "cv= (the coefficient of variation) is missing", "gamma:R,cv=C"),
        ("gamma:20,cv=0", "cv 0 is outside 0.01 to 100", "gamma:R,cv=C"),
        ("gamma:20,sd=3", "'sd=3' is not one of cv=...", "gamma:R,cv=C"),
        ("gamma:20,cv=1,cv=2", "cv= is given twice", "gamma:R,cv=C"),
        ("ramp:1..50", "a duration after /", "ramp:A..B/T"),
        ("ramp:5/60s", "two rates with .. between them", "ramp:A..B/T"),
        ("ramp:0..0/60s", "both rates are 0", "ramp:A..B/T"),
        ("ramp:1..2/721h", "duration 721h is outside 1ns to 720h", "ramp:A..B/T"),
        ("steps:5", "step '5' has no @", "steps:R1@T1"),
        ("steps:0@5s,0@1s", "every rate is 0", "steps:R1@T1"),
        ("steps:5@5q", "duration '5q' is not a duration", "steps:R1@T1"),
        ("steps:" + ",".join(["1@1s"] * 1001), "1001 steps are more than 1000", "steps:R1@T1"),
        ("closed:0", "number of clients 0 is outside 1 to 100000", "closed:N"),
        ("closed:5,think=0.1ns", "think 0.1ns is finer than a nanosecond", "closed:N"),
        ("trace:", "no value follows 'trace'", "trace:FILE"),
        ("trace:,speed=2", "the file's name is missing", "trace:FILE"),
        ("trace:a,speed=0", "speed 0 is outside", "trace:FILE"),
        ("trace:a,limit=0", "limit 0 is outside", "trace:FILE"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_put_right(text: str, problem: str, hint: str) -> None:
    """The message quotes the text and names its bad part; the hint is the syntax of that kind."""
    with pytest.raises(WorkloadError) as caught:
        parse(text)
    assert problem in str(caught.value)
    assert repr(text) in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "due_ns"),
    [
        ("burst", [0, 0, 0]),
        ("burst:2/5s", [0, 0, 5 * S, 5 * S, 10 * S]),
        ("constant:3", [0, 333_333_333, 666_666_667, S, 1_333_333_333]),
        ("constant:0.25", [0, 4 * S, 8 * S]),
        ("ramp:2..2/2s", [0, S // 2, S, 3 * S // 2]),
        ("ramp:0..2/2s", [0, 1_414_213_562]),
        ("ramp:2..0/2s", [0, 585_786_438]),
        ("steps:2@1s,0@10s,1@2s", [0, S // 2, 11 * S, 12 * S]),
        ("steps:0.4@1s,0.4@2s,10@0.1s", [0, 2_500_000_000, 3_080_000_000]),
    ],
)
def test_instants_without_chance_are_exact(text: str, due_ns: list[int]) -> None:
    """The instants of arrivals without chance are those of their formula, and end where it ends."""
    assert list(islice(_open(text).due_ns(0), len(due_ns) + (text[0] in "rs"))) == due_ns


def test_a_constant_rate_never_drifts() -> None:
    """Request one million at 3 per second is due within half a nanosecond of its exact instant."""
    *_, last = islice(_open("constant:3").due_ns(0), 1_000_000, 1_000_001)
    assert abs(Fraction(last, S) - Fraction(1_000_000, 3)) <= Fraction(1, 2 * S)


@pytest.mark.parametrize(
    ("text", "due_ns"),
    [
        ("poisson:20", [92005737, 139048003, 206257900]),
        ("gamma:20,cv=2", [3675219, 476473994, 476483717]),
        ("gamma:20,cv=0.5", [18745716, 51904739, 119577996]),
    ],
)
def test_a_seed_means_the_same_for_ever(text: str, due_ns: list[int]) -> None:
    """Seed 0 gives these instants, in any process and any Python."""
    assert list(islice(_open(text).due_ns(0), 3)) == due_ns


@pytest.mark.parametrize(
    ("text", "n", "until_s", "count"),
    [
        ("burst", 7, None, 7),
        ("burst", 7, 1, 7),
        ("constant:10", None, 2, 20),
        ("constant:10", 5, 2, 5),
        ("ramp:0..10/2s", None, None, 10),
        ("ramp:0..10/2s", 4, None, 4),
        ("steps:10@2s", None, 1, 10),
        ("steps:0.1@25s", None, None, 3),
    ],
)
def test_a_run_takes_as_many_as_it_asks_for(text: str, n: int | None, until_s: int | None, count: int) -> None:
    """At most n requests, only those due before the end, and no more than there are."""
    until_ns = None if until_s is None else until_s * S
    assert len(list(due_instants(_open(text), 0, n=n, until_ns=until_ns))) == count


@pytest.mark.parametrize(
    ("text", "until_ns"), [("burst", None), ("burst", S), ("poisson:3", None), ("burst:1/1s", None)]
)
def test_endless_arrivals_need_an_end(text: str, until_ns: int | None) -> None:
    """Without a number of requests or a duration that ends them, endless arrivals are refused."""
    with pytest.raises(WorkloadError, match="never end"):
        due_instants(_open(text), 0, until_ns=until_ns)


def _open(text: str) -> Arrivals:
    arrivals = parse(text)
    assert arrivals.facts.open_loop
    return arrivals
