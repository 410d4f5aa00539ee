"""Proof of delivery: figures from hand-made runs, and a check that accepts what is right and refuses what is not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest
from scipy import stats
from scipy.special import kolmogorov

from loadgen.analysis import stats as of_instants
from loadgen.analysis.run.runfile import load_facts
from loadgen.analysis.stats import gamma_cdf, kolmogorov_smirnov, kolmogorov_tail
from loadgen.analysis.summary import Delivery, GapTests, QueueWait, SendLateness, TargetDueSent
from loadgen.workloads.arrival_processes import ClosedLoopArrivals
from loadgen.workloads.arrivals import parse

S = 1_000_000_000
US = 1_000


def delivery(due_ns: Sequence[int], sent_ns: Sequence[int | None], arrivals: str) -> Delivery:
    """What became of these arrivals."""
    return of_instants.check_delivery(due_ns, sent_ns, arrivals, load_facts(arrivals, ""))


def test_what_was_not_sent_is_counted() -> None:
    """Requests without a send instant are asked for and not sent, and are in no lateness."""
    found = delivery([0, S, 2 * S, 3 * S], [0, None, 2 * S + 500, None], "constant:1")
    assert (found.asked, found.sent, found.not_sent) == (4, 2, 2)
    assert found.late_s.max == 5e-7


def test_waiting_for_other_requests_is_no_delay_of_the_client() -> None:
    """The wait until a request could be sent is counted, and only the rest of its lateness is a send delay."""
    due_ns = np.cumsum(np.random.default_rng(5).exponential(0.1 * S, 200)).round()
    released_ns = np.where(np.arange(200) % 4, due_ns + 2 * S, np.nan)
    sent_ns = np.fmax(due_ns, released_ns) + US
    found = of_instants.check_delivery(
        due_ns, sent_ns, "poisson:10", load_facts("poisson:10", "", 4), released_ns=released_ns
    )
    assert found.late_s is not None
    assert found.late_s.max == 1e-6
    assert found.queue_wait == QueueWait(requests=150, p50=2.0, p99=2.0, max=2.0)
    assert found.ks.due is not None
    assert found.ks.sent is None


def test_rate_and_variation_are_those_of_the_gaps() -> None:
    """Gaps of 1 s and 3 s are 0.5 per second with a standard deviation of sqrt(2) around a mean of 2."""
    found = delivery([0, S, 4 * S], [0, S, 4 * S], "poisson:0.5")
    assert found.rate_per_s == TargetDueSent(named=0.5, due=0.5, sent=0.5)
    assert found.cv.named == 1.0
    assert found.cv.due == found.cv.sent == pytest.approx(2**0.5 / 2)


def test_lateness_is_sent_minus_due() -> None:
    """Percentiles are exact, with linear interpolation."""
    late_ns = [US * step for step in range(101)]
    due_ns = [S * step for step in range(101)]
    found = delivery(due_ns, [due + late for due, late in zip(due_ns, late_ns, strict=True)], "constant:1")
    assert found.late_s == SendLateness(p50=50e-6, p90=90e-6, p99=99e-6, max=100e-6)


def test_order_of_the_requests_does_not_matter() -> None:
    """Workers report in any order; gaps are between neighbours in time."""
    due_ns = [0, 2 * S, S, 3 * S]
    assert delivery(due_ns, due_ns, "constant:1") == delivery(sorted(due_ns), sorted(due_ns), "constant:1")


def test_a_closed_loop_has_no_lateness() -> None:
    """Its sends follow the answers, so there is nothing to be late for, but a rate was achieved."""
    found = delivery([0, 0, 0], [0, S, 3 * S], "closed:1")
    assert found.late_s is None
    assert found.ks == GapTests(due=None, sent=None)
    assert found.rate_per_s.due is None
    assert found.rate_per_s.sent == pytest.approx(2 / 3)


@pytest.mark.parametrize(("due_ns", "sent_ns"), [([], []), ([5], [5]), ([5], [None]), ([0, 0, 0], [7, 7, 7])])
def test_too_little_gives_none_and_no_error(due_ns: list[int], sent_ns: list[int | None]) -> None:
    """No request, one request, or all at the same instant have no rate, no variation and nothing to test."""
    found = delivery(due_ns, sent_ns, "poisson:3")
    assert found.rate_per_s.sent is None
    assert found.cv.sent is None
    assert found.ks == GapTests(due=None, sent=None)


@pytest.mark.parametrize("text", ["poisson:20", "gamma:20,cv=0.5", "gamma:20,cv=2", "gamma:20,cv=5", "gamma:3,cv=0.02"])
def test_delivered_arrivals_pass_the_check(text: str) -> None:
    """Gaps of the named distribution, sent up to 40 us late one after another, are not told from it at p = 0.01."""
    due_ns = _due_ns(text)
    found = delivery(due_ns, _one_by_one(due_ns, 40 * US), text)
    assert found.ks.due.gaps == len(due_ns) - 1
    assert found.ks.due.p_value > 0.01
    assert found.ks.sent.p_value > 0.01


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ("constant:20", "poisson:20"),
        ("poisson:22", "poisson:20"),
        ("gamma:20,cv=2", "poisson:20"),
        ("gamma:20,cv=1.1", "poisson:20"),
        ("poisson:20", "gamma:20,cv=0.9"),
    ],
)
def test_another_load_than_named_fails_the_check(sent: str, named: str) -> None:
    """5000 gaps of another rate or variation are told from the named ones at p = 0.001."""
    due_ns = _due_ns(sent)
    assert delivery(due_ns, due_ns, named).ks.sent.p_value < 0.001


def test_clipped_gaps_fail_the_check() -> None:
    """A Poisson source whose long gaps are clipped at twice the mean, a fault seen elsewhere, is found out."""
    gaps_ns = np.minimum(np.diff(_due_ns("poisson:20")), S // 10)
    due_ns = [0, *np.cumsum(gaps_ns).tolist()]
    assert delivery(due_ns, due_ns, "poisson:20").ks.due.p_value < 0.001


@pytest.mark.parametrize(("n", "tolerance"), [(8, 0.025), (20, 0.02), (100, 0.012), (1000, 0.005)])
def test_the_test_agrees_with_scipy(n: int, tolerance: float) -> None:
    """Statistics are SciPy's; p-values are within the stated tolerance of its exact ones."""
    random = np.random.default_rng(5)
    for _ in range(20):
        values = np.sort(random.exponential(size=n))
        cdf = gamma_cdf(values, 1.0)
        statistic, p_value = kolmogorov_smirnov(cdf, cdf)
        exact = stats.kstest(values, stats.expon.cdf)
        assert statistic == pytest.approx(exact.statistic, abs=1e-12)
        assert abs(p_value - exact.pvalue) < tolerance


def test_p_values_are_uniform_when_the_name_is_right() -> None:
    """Over 200 seeds, p-values of right arrivals are uniform: the check refuses no more often than it says."""
    p_values = [delivery(due, due, "poisson:20").ks.due.p_value for due in map(_short, range(200))]
    assert stats.kstest(p_values, "uniform").pvalue > 0.001


def _short(seed: int) -> list[int]:
    return _due_ns("poisson:20", seed, 401)


def _due_ns(text: str, seed: int = 1, n: int = 5001) -> list[int]:
    arrivals = parse(text)
    assert not isinstance(arrivals, ClosedLoopArrivals)
    return list(islice(arrivals.due_ns(seed), n))


def _one_by_one(due_ns: list[int], cost_ns: int) -> list[int | None]:
    """A client that needs `cost_ns` per send and sends in order."""
    sent_ns: list[int | None] = []
    free_ns = 0
    for due in due_ns:
        free_ns = max(due, free_ns) + cost_ns
        sent_ns.append(free_ns)
    return sent_ns


@pytest.mark.parametrize("x", [-1.0, 0.0, 0.04, 0.06, 0.3, 0.999, 1.0, 1.36, 2.5, 6.0])
def test_the_tail_of_kolmogorovs_distribution_is_that_of_scipy(x: float) -> None:
    """Both series, and the limits at which they are exchanged."""
    assert kolmogorov_tail(x) == pytest.approx(kolmogorov(x), rel=1e-13, abs=1e-300)
