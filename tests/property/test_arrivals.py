"""Every arrival process keeps the mean, the variation and the tail of its name.

Seeds are fixed, so nothing here is left to luck twice. Bounds are five standard errors: a right process stays within
them for all but 6 in 10 million seeds, and one that clips or rescales its gaps by a per cent does not at this size.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from loadgen.workloads.arrival_facts import Arrivals
from loadgen.workloads.arrival_processes import Constant, Ramp, Steps
from loadgen.workloads.arrivals import parse

S = 1_000_000_000
GAPS = 100_000
ERRORS = 5.0

PROCESSES = [
    ("poisson:20", 20.0, 1.0),
    ("poisson:0.01", 0.01, 1.0),
    ("poisson:1000000", 1e6, 1.0),
    ("gamma:20,cv=1", 20.0, 1.0),
    ("gamma:20,cv=0.1", 20.0, 0.1),
    ("gamma:20,cv=0.5", 20.0, 0.5),
    ("gamma:20,cv=2", 20.0, 2.0),
    ("gamma:20,cv=5", 20.0, 5.0),
    ("gamma:1000,cv=0.01", 1000.0, 0.01),
]
each_process = pytest.mark.parametrize(("text", "rate", "cv"), PROCESSES, ids=[text for text, _, _ in PROCESSES])
ALL = ["burst", "burst:7/3s", "constant:7", "ramp:0..100/40s", "ramp:90..3/40s", "steps:50@20s,0@5s,70@20s"]
every_kind = pytest.mark.parametrize("text", ALL + [text for text, _, _ in PROCESSES])


@each_process
def test_the_mean_is_the_named_one(text: str, rate: float, cv: float) -> None:
    """The mean gap is 1 / rate. Its standard error over n gaps is cv / (rate sqrt(n))."""
    assert abs(_gaps_s(text).mean() * rate - 1) < ERRORS * cv / math.sqrt(GAPS)


@each_process
def test_the_variation_is_the_named_one(text: str, rate: float, cv: float) -> None:
    """The coefficient of variation is the one named.

    Its standard error for gamma gaps is cv sqrt((1 + cv**2) / (2 n)), by the delta method from their skewness 2 cv
    and kurtosis 3 + 6 cv**2.
    """
    gaps_s = _gaps_s(text)
    found = gaps_s.std(ddof=1) / gaps_s.mean()
    assert abs(found / cv - 1) < ERRORS * math.sqrt((1 + cv**2) / (2 * GAPS))


@each_process
@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 0.001])
def test_the_tail_is_the_named_one(text: str, rate: float, cv: float, share: float) -> None:
    """As many gaps exceed the gap that a `share` of them should exceed: no long gap is clipped.

    The count is binomial, with standard deviation sqrt(n p (1 - p)). The instants' nanosecond adds the share of gaps
    that lie within one of the threshold.
    """
    shape = 1 / cv**2
    threshold_s = special.gammainccinv(shape, share) / (rate * shape)
    blurred = np.abs(_gaps_s(text) - threshold_s) <= 1.5e-9
    above = np.count_nonzero(_gaps_s(text) > threshold_s)
    bound = ERRORS * math.sqrt(GAPS * share * (1 - share)) + np.count_nonzero(blurred)
    assert abs(above - GAPS * share) < bound


@pytest.mark.parametrize(("text", "cv"), [("poisson:20", 1.0), ("gamma:20,cv=0.5", 0.5), ("gamma:0.001,cv=2", 2.0)])
def test_the_whole_distribution_is_the_named_one(text: str, cv: float) -> None:
    """SciPy's Kolmogorov-Smirnov test does not tell 100,000 gaps from the named distribution at p = 0.001."""
    shape = 1 / cv**2
    rate = float(text.partition(":")[2].partition(",")[0])
    assert stats.kstest(_gaps_s(text), stats.gamma(shape, scale=1 / (rate * shape)).cdf).pvalue > 0.001


@pytest.mark.parametrize("text", ["poisson:20", "gamma:20,cv=0.5"])
def test_gaps_do_not_follow_from_each_other(text: str) -> None:
    """Consecutive gaps are uncorrelated: the lag-1 correlation is within five standard errors 1 / sqrt(n) of 0."""
    gaps_s = _gaps_s(text)
    assert abs(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) < ERRORS / math.sqrt(GAPS)


@pytest.mark.parametrize("rate", [5, 50])
def test_poisson_counts_vary_as_much_as_their_mean(rate: int) -> None:
    """Requests per second have variance equal to mean, from the first second on.

    The index of dispersion over n windows has a standard error of about sqrt(2 / n).
    """
    windows = 2000
    due_ns = np.array(list(islice(_open(f"poisson:{rate}").due_ns(11), rate * windows * 2)))
    counts = np.bincount(due_ns // S, minlength=windows)[:windows]
    assert abs(counts.mean() / rate - 1) < ERRORS / math.sqrt(rate * windows)
    assert abs(counts.var() / counts.mean() - 1) < ERRORS * math.sqrt(2 / windows)


@every_kind
def test_instants_never_go_back(text: str) -> None:
    """Due instants are whole, not negative, and in order."""
    due_ns = list(islice(_open(text).due_ns(5), 2000))
    assert all(type(instant) is int for instant in due_ns)
    assert due_ns[0] >= 0
    assert all(earlier <= later for earlier, later in pairwise(due_ns))


@every_kind
def test_a_shorter_run_is_the_beginning_of_a_longer_one(text: str) -> None:
    """The first k of m instants are the first k of n, and the same seed gives them again."""
    longer = list(islice(_open(text).due_ns(5), 1500))
    assert list(islice(_open(text).due_ns(5), 700)) == longer[:700]


@pytest.mark.parametrize("text", ["poisson:20", "gamma:20,cv=3"])
def test_another_seed_is_another_run(text: str) -> None:
    """Seeds 0, 1, -1 and a large one all differ: zero is a seed."""
    starts = {tuple(islice(_open(text).due_ns(seed), 3)) for seed in (0, 1, -1, 2**70)}
    assert len(starts) == 4


rates = st.decimals(min_value="0.001", max_value=1_000_000, places=3).map(Fraction)
lengths_ns = st.integers(1_000_000, 10_000 * S)


@given(rate=rates, index=st.integers(0, 3000))
def test_constant_instants_are_the_nearest_nanosecond(rate: Fraction, index: int) -> None:
    """|due_i - i / rate| is at most half a nanosecond for any rate."""
    due_ns = next(islice(Constant(rate).due_ns(0), index, None))
    assert abs(due_ns - index * S / rate) <= Fraction(1, 2)


@given(first=rates | st.just(Fraction(0)), last=rates, length_ns=lengths_ns, turned=st.booleans())
def test_a_ramp_reaches_each_count_on_time(first: Fraction, last: Fraction, length_ns: int, turned: bool) -> None:
    """The integral of the rate passes i within half a nanosecond of due_i, up to and down from any rate."""
    ramp = Ramp(last, first, length_ns) if turned else Ramp(first, last, length_ns)
    half = Fraction(1, 2) + Fraction(1, 1000)
    for index, due_ns in enumerate(islice(ramp.due_ns(0), 200)):
        assert 0 <= due_ns <= length_ns
        assert _ramp_area(ramp, due_ns - half) <= index
        assert _ramp_area(ramp, due_ns + half) >= index


@given(st.lists(st.tuples(rates | st.just(Fraction(0)), lengths_ns), min_size=1, max_size=5))
def test_steps_reach_each_count_on_time(steps: list[tuple[Fraction, int]]) -> None:
    """At due_i, to the nanosecond, the requests due so far number i: nothing is lost from one step to the next."""
    half = Fraction(1, 2)
    for index, due_ns in enumerate(islice(Steps(tuple(steps)).due_ns(0), 200)):
        assert _steps_area(steps, due_ns - half) <= index
        assert _steps_area(steps, due_ns + half) >= index


@given(first=rates, last=rates, length_ns=st.integers(1_000_000, S // 100))
def test_a_ramp_sends_as_many_as_its_area(first: Fraction, last: Fraction, length_ns: int) -> None:
    """Every count from 0 that the integral of the rate exceeds is sent, and no other."""
    ramp = Ramp(first, last, length_ns)
    assert len(list(ramp.due_ns(0))) == math.ceil(_ramp_area(ramp, Fraction(length_ns)))


@given(
    st.one_of(
        st.builds("constant:{}".format, st.decimals("0.001", 1_000_000, places=3)),
        st.builds(
            "gamma:{},cv={}".format, st.decimals("0.001", 1_000_000, places=9), st.decimals("0.01", 100, places=2)
        ),
        st.builds("ramp:{}..{}/{}ms".format, st.integers(0, 1000), st.integers(1, 1000), st.integers(1, 10**6)),
        st.builds("closed:{},think={}us".format, st.integers(1, 100_000), st.integers(0, 10**9)),
        st.builds("burst:{}/{}ns".format, st.integers(1, 10**6), st.integers(1, 10**12 - 1)),
    )
)
def test_canonical_text_is_a_fixed_point(text: str) -> None:
    """Printing what was read and reading it again changes nothing, whatever the digits."""
    arrivals = parse(text)
    assert parse(str(arrivals)) == arrivals
    assert str(parse(str(arrivals))) == str(arrivals)


@cache
def _gaps_s(text: str) -> np.ndarray:
    return np.diff(np.array(list(islice(_open(text).due_ns(1), GAPS + 1)), dtype=np.int64)) / S


def _ramp_area(ramp: Ramp, instant_ns: Fraction) -> Fraction:
    t = min(max(instant_ns, Fraction(0)), Fraction(ramp.length_ns)) / S
    return ramp.first * t + (ramp.last - ramp.first) * S / ramp.length_ns * t * t / 2


def _steps_area(steps: list[tuple[Fraction, int]], instant_ns: Fraction) -> Fraction:
    area, begin_ns = Fraction(0), 0
    for rate, length_ns in steps:
        area += rate * min(max(instant_ns - begin_ns, Fraction(0)), Fraction(length_ns)) / S
        begin_ns += length_ns
    return area


def _open(text: str) -> Arrivals:
    arrivals = parse(text)
    assert arrivals.facts.open_loop
    return arrivals
