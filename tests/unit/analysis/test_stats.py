"""Percentiles, their intervals, and from how many samples on they mean something."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from scipy.stats import binom

from loadgen.analysis import stats
from loadgen.analysis.objectives import AdjustedDistribution


@pytest.mark.parametrize(("name", "needed"), [("p50", 11), ("p90", 64), ("p95", 130), ("p99", 662), ("p99_9", 6636)])
def test_samples_needed_follow_the_rule_of_mlperf(name: str, needed: int) -> None:
    """With the number needed, fewer than two samples beyond the percentile are a 1% chance; with one less, more."""
    share = stats.PERCENTILES[name]
    assert stats.samples_needed(share) == needed
    assert binom.cdf(1, needed, 1 - share) <= 0.01 < binom.cdf(1, needed - 1, 1 - share)


@pytest.mark.parametrize(("count", "thin"), [(1, 4), (11, 3), (64, 2), (130, 1), (661, 1), (662, 0)])
def test_thin_percentiles_are_named_and_still_there(count: int, thin: int) -> None:
    """Below the number needed a percentile has its value and stands in `thin`, the outermost ones first to do so."""
    described = stats.describe(np.arange(count, dtype=float))
    assert described.thin == ["p50", "p90", "p95", "p99"][4 - thin :]
    assert described.p99 == pytest.approx(float(np.percentile(np.arange(count), 99)))


def test_p99_9_appears_only_with_enough_samples() -> None:
    """Nobody asks for p99.9 of a thousand samples, so it is there from 6636 on and not before."""
    assert stats.describe(np.arange(6635.0)).p99_9 is None
    assert stats.describe(np.arange(6636.0)).p99_9 == pytest.approx(6628.365)


def test_no_sample_is_described_as_none() -> None:
    """An empty distribution has n = 0 and no figure; nothing is printed as zero."""
    described = stats.describe(np.empty(0))
    assert not any(msgspec.to_builtins(described).values())
    assert described.p50 is None


def test_one_sample_has_no_spread() -> None:
    """A single sample is its own mean and percentiles; its deviation is unknown, not zero."""
    described = stats.describe(np.array([0.25]))
    assert (described.mean, described.p50, described.max, described.std) == (0.25, 0.25, 0.25, None)


def test_an_interval_is_open_where_no_sample_bounds_it() -> None:
    """With 100 samples nothing can bound p99 from above; with 1000 the 996th can."""
    assert stats.describe(np.arange(100.0)).ci95["p99"] == (96.0, None)
    assert stats.describe(np.arange(1000.0)).ci95["p99"] == (982.0, 996.0)


def test_samples_of_one_request_are_not_taken_for_independent_ones() -> None:
    """A hundred requests with ten equal samples each say as much as a hundred samples, and the interval shows it."""
    single = np.random.default_rng(3).gamma(2, 1, 100)
    repeated, offsets = np.repeat(single, 10), np.arange(0, 1001, 10)
    apart, grouped = stats.describe(single), stats.describe(repeated, offsets)
    assert 90 <= stats.effective_size(repeated, offsets, 0.5, np.sort(repeated)) <= 110
    assert grouped.ci95["p50"] == pytest.approx(apart.ci95["p50"], rel=0.1)
    assert stats.describe(repeated).ci95["p50"][0] > grouped.ci95["p50"][0]
    assert "p99" in grouped.thin


def test_independent_samples_keep_their_number() -> None:
    """Where the samples of a request are no more alike than others, grouping them changes little."""
    samples = np.random.default_rng(4).gamma(2, 1, 10_000)
    size = stats.effective_size(samples, np.arange(0, 10_001, 10), 0.5, np.sort(samples))
    assert 8_000 < size <= 10_000


def test_failures_count_as_infinite() -> None:
    """With one failure in ten the p90 lies next to infinity and the median moves up; None stands for infinity."""
    described = stats.describe_adjusted(np.arange(1.0, 10.0), 1)
    figures = {"p50": 5.5, "p90": None, "p95": None, "p99": None}
    assert described == AdjustedDistribution(n=10, failures=1, **figures, thin=list(figures))


def test_without_failures_the_adjusted_figures_are_the_same() -> None:
    """Nothing failed: both distributions agree."""
    samples = np.random.default_rng(5).random(700)
    plain, adjusted = stats.describe(samples), stats.describe_adjusted(samples, 0)
    assert [getattr(adjusted, name) for name in stats.WITH_INTERVAL] == [plain.of(name) for name in stats.WITH_INTERVAL]


@pytest.mark.parametrize(("count", "margin"), [(0, 1.0), (1, 1.0), (1000, math.sqrt(math.log(40) / 2000))])
def test_the_band_of_a_distribution_function(count: int, margin: float) -> None:
    """The half-width is Massart's, and never more than everything."""
    assert stats.dkw_margin(count) == pytest.approx(margin)
