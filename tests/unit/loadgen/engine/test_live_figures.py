"""Live figures: percentiles of a histogram, TPOT of a Record, and a token rate that no late read changes."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from loadgen.analysis.run.record import Record
from loadgen.analysis.stats import percentiles
from loadgen.engine.client_health import LiveCounters, sum_counters
from loadgen.engine.live_figures import BUCKETS, LatencyHistogram, TokenRate, tpot_ns

SECOND_NS = 1_000_000_000


@pytest.mark.parametrize("count", [1, 2, 7, 2_000])
def test_percentiles_are_those_of_the_report(count: int) -> None:
    """Interpolated alike, and exact to half a bucket."""
    random = Random(count)
    latencies_s = [random.lognormvariate(-2, 1.5) for _ in range(count)]
    histogram = LatencyHistogram()
    for latency_s in latencies_s:
        histogram.add(latency_s * 1e9)
    shares = (0.0, 0.5, 0.99, 1.0)
    assert histogram.percentiles_s(*shares) == pytest.approx(percentiles(np.array(latencies_s), *shares), rel=0.006)


def test_an_empty_histogram_has_no_percentiles() -> None:
    """Neither at first nor after everything was taken back."""
    histogram = LatencyHistogram()
    assert histogram.percentiles_s(0.5) == []
    histogram.remove(histogram.add(5e6))
    assert histogram.percentiles_s(0.5) == []


@pytest.mark.parametrize(("latency_ns", "bucket"), [(-5, 0), (0, 0), (10**18, BUCKETS - 1)])
def test_any_latency_has_a_bucket(latency_ns: int, bucket: int) -> None:
    """Also one that cannot be."""
    assert LatencyHistogram().add(latency_ns) == bucket


def test_counters_of_workers_are_added_up() -> None:
    """Counts and rates are sums, and the run lasts from the first request of any worker to the last."""
    workers = [LiveCounters(sent=2, tokens=10, tokens_per_s=1.5), LiveCounters(), LiveCounters(sent=3, tokens=30)]
    workers[0].span(5 * SECOND_NS, 7 * SECOND_NS)
    workers[2].span(3 * SECOND_NS, 6 * SECOND_NS)
    workers[0].ttft.add(1e9)
    workers[2].ttft.add(3e9)
    total = sum_counters(workers)
    assert (total.sent, total.tokens, total.tokens_per_s) == (5, 40, 1.5)
    assert total.mean_tokens_per_s == 10
    assert total.ttft.percentiles_s(0.5) == pytest.approx([2.0], rel=0.01)
    assert sum_counters([]).mean_tokens_per_s == 0


@pytest.mark.parametrize(
    ("chunk_ns", "chunk_tokens", "expected"),
    [
        ([], [], None),
        ([10], [1], None),
        ([10, 40], [1, 1], 30),
        ([10, 40, 90], [2, 1, 3], 20),
        ([10, 40], [1, 0], None),
    ],
)
def test_tpot_counts_the_tokens_after_the_first_chunk(
    chunk_ns: list[int], chunk_tokens: list[int], expected: float | None
) -> None:
    """As the report does."""
    record = Record(id=0, state="complete", sent_ns=0, chunk_ns=chunk_ns, chunk_tokens=chunk_tokens)
    assert tpot_ns(record) == expected


def test_a_steady_stream_has_a_steady_rate() -> None:
    """100 bytes a token and 50 tokens/s arrive. Nothing is read for 5 s, then everything is recorded at once: the rate
    and the number of tokens do not jump."""
    rate = TokenRate()
    rate.sample(30, 3_000)
    rates = []
    for tick in range(1, 41):
        now_ns, arrived = tick * SECOND_NS // 4, tick * 1_250
        recorded = arrived // 100 * 100 if tick % 20 == 0 else 0
        if recorded:
            already = rate.recorded_tokens * 100
            rate.record((recorded - already) // 100, recorded - already)
        unrecorded = arrived - rate.recorded_tokens * 100
        rates.append(rate.per_second(now_ns, unrecorded))
        assert rate.tokens(unrecorded) == pytest.approx(tick * 12.5, abs=1)
    assert rates[1:] == pytest.approx([50.0] * 39)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    """Not that of the whole run."""
    rate = TokenRate()
    rate.record(1_000, 100_000)
    for second in range(10):
        rate.per_second(second * SECOND_NS, 100 * second)
    assert rate.per_second(10 * SECOND_NS, 900 + 5_000) == pytest.approx(52 / 3)


def test_without_tokens_there_is_no_rate() -> None:
    """Bytes of errors, or of heads, are no tokens."""
    rate = TokenRate()
    rate.record(0, 500)
    rate.sample(0, 0)
    assert (rate.per_second(0, 0), rate.per_second(SECOND_NS, 900), rate.tokens(900)) == (0, 0, 0)
