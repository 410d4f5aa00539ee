"""Gaps are counted in buckets of at most 1%, so that percentiles need no sorting."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.analysis.frame import build_frame
from loadgen.analysis.report.gap_counts import BUCKET_WIDTH, BUCKETS, bucket_middles_s, count_gaps
from tests.support.runs import complete, rejected


@pytest.mark.parametrize("gap_ns", [1_000, 1_001, 77_777, 20_000_000, 4_294_967_295, 4_294_967_296, 999_000_000_000])
def test_the_median_is_within_half_a_bucket(gap_ns: int) -> None:
    """From a microsecond to 1,000 s, also where a gap no longer fits into four bytes."""
    counts = count_gaps(build_frame([complete(0, [5, 5 + gap_ns], end_ns=5 + gap_ns)]))
    assert counts.median_s == pytest.approx(gap_ns / 1e9, rel=BUCKET_WIDTH / 2)
    assert counts.largest_ns.max() == gap_ns


def test_buckets_have_no_gaps_between_them() -> None:
    """Each middle is less than a bucket's width above the one before it."""
    ratios = np.diff(np.log(bucket_middles_s()))
    assert len(ratios) == BUCKETS - 1
    assert 0 < ratios.min() <= ratios.max() <= np.log1p(BUCKET_WIDTH)


@pytest.mark.parametrize(("gap_ns", "bucket"), [(0, 0), (1, 0), (5_000_000_000_000, BUCKETS - 1)])
def test_gaps_outside_the_range_are_in_the_first_or_last_bucket(gap_ns: int, bucket: int) -> None:
    """Gaps below 1 us and above 1,000 s are counted, too."""
    counts = count_gaps(build_frame([complete(0, [5, 5 + gap_ns], end_ns=5 + gap_ns)]))
    assert np.flatnonzero(counts.counts.sum(axis=0)).tolist() == [bucket]


def test_without_gaps_there_is_no_median() -> None:
    """A response with one chunk and a rejected request have no gaps."""
    counts = count_gaps(build_frame([complete(0, [5]), rejected(1)]))
    assert counts.median_s is None
    assert counts.longest == []
