"""What the charts draw, on runs small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.gather import frame_of
from analysis.report.curves import course, curves, distribution, sends
from analysis.report.spacing import nice_step
from loadgen.record import Record
from tests.runs import MILLISECOND_NS as MS
from tests.runs import burst, complete, dropped, failed, loop

RECORDS = [
    complete(1, [100 * MS, 200 * MS], tokens=[1, 3], end_ns=200 * MS),
    complete(2, [150 * MS, 900 * MS], sent_ns=50 * MS, end_ns=1600 * MS),
    dropped(3),
]


def test_the_course_counts_tokens_and_streams_in_each_piece() -> None:
    """1.6 s in 160 pieces of 10 ms: tokens over the piece's length, and the most streams open at once."""
    drawn = course(frame_of(RECORDS))
    assert drawn["bin_s"] == 0.01
    assert len(drawn["start_s"]) == 160
    assert {i: rate for i, rate in enumerate(drawn["tokens_per_s"]) if rate} == {10: 100, 15: 100, 20: 300, 90: 100}
    assert [drawn["in_flight"][i] for i in (0, 4, 5, 19, 20, 21, 159)] == [1, 1, 2, 2, 2, 1, 1]
    assert [drawn["receiving"][i] for i in (9, 10, 15, 20, 21, 90, 91)] == [0, 1, 2, 2, 1, 1, 0]


def test_a_short_dip_does_not_hide_the_most_streams() -> None:
    """Streams that end and begin within one piece count together only while both are open."""
    records = [
        complete(1, [1 * MS], end_ns=105 * MS),
        complete(2, [107 * MS], sent_ns=106 * MS, end_ns=160_000 * MS),
    ]
    assert max(course(frame_of(records))["in_flight"]) == 1


def test_warm_up_is_drawn_before_zero_and_not_counted_as_sent() -> None:
    """The course begins at the first warm-up request, at its negative instant; the sends are those that count."""
    drawn = curves(frame_of(loop(100, warmup=2)))
    assert drawn["course"]["start_s"][0] == pytest.approx(-1.02 + 20e-6)
    assert drawn["course"]["in_flight"][0] == 1
    assert drawn["sends"]["n"] == drawn["cdf"]["ttft_s"]["n"] == 100


@pytest.mark.parametrize("records", [[], [dropped(1)], [failed(1, sent_ns=None, sent_end_ns=None, end_ns=None)]])
def test_nothing_sent_draws_nothing(records: list[Record]) -> None:
    """Every curve of such a run is empty, and none raises."""
    drawn = curves(frame_of(records))
    assert drawn["course"]["start_s"] == drawn["sends"]["x"] == []
    assert all(curve["x"] == [] for curve in drawn["cdf"].values())


def test_the_burst_counts_from_its_first_request() -> None:
    """When each request left after the first one, in order; one never sent is not drawn."""
    drawn = sends(frame_of([*RECORDS, complete(4, [9 * MS], sent_ns=20 * MS)]))
    assert drawn["x"] == [0.0, 0.02, 0.05]
    assert drawn["y"] == [1, 2, 3]


def test_a_thinned_curve_says_so() -> None:
    """Of 5,000 samples about 700 are drawn; both numbers are there, and the extremes among what is drawn."""
    samples = np.random.default_rng(1).gamma(2, 1, 5000)
    drawn = distribution(samples, 1000)
    assert drawn["n"] == 5000
    assert drawn["drawn"] == len(drawn["x"]) <= 700
    assert (drawn["x"][0], drawn["x"][-1]) == (round(samples.min(), 7), round(samples.max(), 7))


def test_the_band_counts_requests_not_gaps() -> None:
    """ITL has many samples per request; its band is as wide as that of one sample each."""
    drawn = curves(frame_of(burst(50, 20)))["cdf"]
    assert drawn["itl_s"]["n"] == 50 * 19
    assert drawn["itl_s"]["margin"] == drawn["ttft_s"]["margin"]


@pytest.mark.parametrize(("least", "step"), [(1.0, 1), (1.1, 2), (2.5, 5), (7.0, 10), (0.03, 0.05), (2e9, 2e9)])
def test_pieces_have_round_lengths(least: float, step: float) -> None:
    """1, 2 or 5 times a power of ten, the next one up."""
    assert nice_step(least) == pytest.approx(step)
