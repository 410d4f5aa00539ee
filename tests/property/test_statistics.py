"""What holds for every set of samples and every run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from loadgen.analysis import stats
from loadgen.analysis.frame import build_frame
from loadgen.analysis.report.chart_data import distribution, plotted_ranks, throughput_series
from loadgen.analysis.run.record import Record
from tests.support.runs import complete, failed, truncated

SHARES = st.sampled_from(list(stats.PERCENTILES.values()))


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    """Some requests, each with a few chunks of some tokens; some of them not complete."""
    found: list[Record] = []
    for request_id in range(draw(st.integers(0, 8))):
        gaps = draw(st.lists(st.integers(0, 10**9), max_size=6))
        tokens = draw(st.lists(st.integers(1, 5), min_size=len(gaps), max_size=len(gaps)))
        instants = np.cumsum(gaps, dtype=np.int64).tolist()
        kind = draw(st.sampled_from(["complete", "truncated", "failed"]))
        if kind == "complete" and instants:
            found.append(complete(request_id, instants, tokens=tokens))
        elif kind == "truncated" and instants:
            found.append(truncated(request_id, instants))
        else:
            found.append(failed(request_id))
    return found


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), SHARES)
def test_percentiles_agree_with_numpy(samples: list[float], share: float) -> None:
    """Linear interpolation between order statistics, as numpy does by default."""
    assert stats.percentile(np.sort(samples), share) == pytest.approx(float(np.quantile(samples, share)), abs=1e-9)


@given(st.integers(1, 20_000), SHARES)
def test_intervals_hold_what_they_promise(count: int, share: float) -> None:
    """Whatever the distribution, the interval misses the quantile on either side with a chance of 2.5% at most,
    and the next narrower one would not keep that."""
    lower, upper = stats.interval_ranks(count, share)
    below = -1 if lower is None else lower
    assert binom.cdf(below, count, share) <= 0.025 + 1e-9
    assert binom.cdf(below + 1, count, share) > 0.025 - 1e-9
    if upper is None:
        assert binom.sf(count - 1, count, share) > 0.025 - 1e-9
    else:
        assert binom.sf(upper, count, share) <= 0.025 + 1e-9
        assert binom.sf(upper - 1, count, share) > 0.025 - 1e-9


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=200))
def test_figures_are_in_order(samples: list[float]) -> None:
    """Minimum, percentiles and maximum ascend, and each interval holds its percentile or is open."""
    described = stats.describe(np.array(samples))
    ascending = [described.of(name) for name in ("min", "p50", "p90", "p95", "p99", "max")]
    assert ascending == sorted(ascending)
    for name, (low, high) in described.ci95.items():
        assert low is None or low <= described.of(name) + 1e-9
        assert high is None or high >= described.of(name) - 1e-9


@given(records())
def test_inter_token_times_add_up(found: list[Record]) -> None:
    """Over all complete requests they sum to last chunk minus first, as the inter-chunk times do, and n tokens give
    n - 1 of them."""
    frame = build_frame(found)
    whole = [record for record in found if record.state == "complete"]
    span_s = sum(record.chunk_ns[-1] - record.chunk_ns[0] for record in whole) / 1e9
    assert frame.token_gaps_s().sum() == pytest.approx(span_s)
    assert frame.gaps_s().sum() == pytest.approx(span_s)
    assert len(frame.token_gaps_s()) == sum(sum(record.chunk_tokens) - 1 for record in whole)


@given(records())
def test_the_frame_says_what_the_records_say(found: list[Record]) -> None:
    """Every column has the record's value, and NaN where the record has none."""
    frame = build_frame(found)
    for row, record in enumerate(found):
        part = slice(frame.offsets[row], frame.offsets[row + 1])
        assert frame.chunk_ns[part].tolist() == record.chunk_ns
        assert frame.chunk_tokens[part].tolist() == record.chunk_tokens
        assert bool(np.isnan(frame.first_ns[row])) == (not record.chunk_ns)
        assert bool(frame.complete[row]) == (record.state == "complete")


@given(records())
def test_no_token_is_lost_on_the_way_to_the_chart(found: list[Record]) -> None:
    """Tokens per second times seconds, over all pieces of the window, are the tokens that arrived in it."""
    frame = build_frame([record for record in found if record.chunk_ns])
    drawn = throughput_series(frame)
    starts = drawn["start_s"]
    if starts:
        window_s = (frame.end_ns.max() - frame.sent_ns.min()) / 1e9
        widths = np.diff([*starts, window_s])
        tokens = float(np.dot(widths, drawn["tokens_per_s"]))
        assert tokens == pytest.approx(float(frame.chunk_tokens.sum()), abs=0.02 * window_s * len(starts) + 1e-3)


@given(st.integers(0, 5000))
def test_thinned_curves_keep_their_ends(count: int) -> None:
    """However many samples: at most 700 are drawn, in order, and the fifty at each end are all there."""
    ranks = plotted_ranks(count).tolist()
    assert len(ranks) <= 700
    assert ranks == sorted(set(ranks))
    assert set(range(min(50, count))) <= set(ranks)
    assert set(range(max(0, count - 50), count)) <= set(ranks)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_a_distribution_function_ends_at_one(samples: list[float]) -> None:
    """x ascends to the largest sample and y to 1."""
    drawn = distribution(np.sort(samples), len(samples))
    assert drawn["x"] == sorted(drawn["x"])
    assert drawn["x"][-1] == pytest.approx(max(samples), abs=1e-6)
    assert drawn["y"][-1] == 1
