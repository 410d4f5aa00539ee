"""Lengths keep the mean, the variation and the tail of their name; cap and floor do what the page says.

Seeds are fixed and bounds are five standard errors, as for arrivals.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from loadgen.workloads.lengths import Empirical, parse

N = 100_000
ERRORS = 5.0

EACH = ["512", "uniform:128..384", "lognormal:mean=161.31,cv=1,max=2048", "exponential:mean=128,min=10,max=512"]


@pytest.mark.parametrize(("mean", "cv"), [(161.31, 1.0), (2047.8, 0.96), (27.9, 2.15), (1000, 0.2)])
def test_lognormal_lengths_keep_mean_and_variation(mean: float, cv: float) -> None:
    """Mean and coefficient of variation are those named; rounding to whole tokens moves the mean by less than 0.5%.

    The standard error of the mean is cv mean / sqrt(n). That of the cv is bounded through the fourth moment of the
    lognormal, whose excess kurtosis is w**4 + 2 w**3 + 3 w**2 - 6 with w = 1 + cv**2.
    """
    tokens = _tokens(f"lognormal:mean={mean},cv={cv}")
    assert abs(tokens.mean() / mean - 1) < ERRORS * cv / math.sqrt(N) + 0.005
    w = 1 + cv**2
    kurtosis = w**4 + 2 * w**3 + 3 * w**2 - 3
    found = tokens.std() / tokens.mean()
    assert abs(found / cv - 1) < ERRORS * (math.sqrt((kurtosis - 1) / (4 * N)) + cv / math.sqrt(N))


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 0.001])
def test_the_lognormal_tail_is_not_cut(share: float) -> None:
    """As many lengths exceed the quantile as should: binomial, with the threshold put between two whole numbers."""
    sigma = math.sqrt(math.log(1 + 1.5**2))
    law = stats.lognorm(sigma, scale=1000 / math.exp(sigma**2 / 2))
    threshold = math.floor(law.isf(share)) + 0.5
    expected = law.sf(threshold)
    above = np.count_nonzero(_tokens("lognormal:mean=1000,cv=1.5") > threshold)
    assert abs(above - N * expected) < ERRORS * math.sqrt(N * expected * (1 - expected))


@pytest.mark.parametrize(("cap", "mean"), [(32, 17.3), (128, 54.3), (512, 118.9), (1536, 128.4)])
def test_capped_exponential_lengths_have_the_published_mean(cap: int, mean: float) -> None:
    """Mean 128, drawn again above the cap, at least 10: the expected lengths of the companion data set come out.

    They are given to one decimal; the spread is at most 128, so five standard errors are at most 2.1 tokens.
    """
    tokens = _tokens(f"exponential:mean=128,min=10,max={cap}")
    assert abs(tokens.mean() - mean) < ERRORS * tokens.std() / math.sqrt(N) + 0.05
    assert (tokens.min(), tokens.max()) == (10, cap) if cap <= 512 else tokens.max() <= cap


def test_a_cap_makes_no_heap() -> None:
    """Lengths at the cap are no more frequent than just below it: what exceeds it is drawn again, not cut to it."""
    tokens = _tokens("exponential:mean=128,max=64")
    at_cap, below = np.count_nonzero(tokens == 64), np.count_nonzero(tokens == 60)
    assert at_cap < below + ERRORS * math.sqrt(below)


def test_uniform_lengths_reach_every_value_alike() -> None:
    """A chi-square test over all 257 values from 128 to 384 does not reject at p = 0.001."""
    counts = np.bincount(_tokens("uniform:128..384"), minlength=385)
    assert counts[:128].sum() == 0
    assert len(counts) == 385
    assert stats.chisquare(counts[128:]).pvalue > 0.001


def test_empirical_lengths_are_those_of_the_file(tmp_path: Path) -> None:
    """Each line of the file is drawn alike, a value that stands there twice twice as often."""
    file = tmp_path / "lengths.txt"
    file.write_text("10\n10\n500\n3000\n", "utf-8")
    tokens = np.array(list(islice(Empirical(file).tokens(1, "input"), N)))
    found = [np.count_nonzero(tokens == value) for value in (10, 500, 3000)]
    assert stats.chisquare(found, [N / 2, N / 4, N / 4]).pvalue > 0.001


@pytest.mark.parametrize("text", EACH)
def test_a_shorter_run_is_the_beginning_of_a_longer_one(text: str) -> None:
    """The first k of m lengths are the first k of n, and the same seed gives them again."""
    longer = list(islice(parse(text).tokens(5, "input"), 1500))
    assert list(islice(parse(text).tokens(5, "input"), 700)) == longer[:700]


@pytest.mark.parametrize("text", EACH[1:])
def test_input_and_output_are_drawn_apart(text: str) -> None:
    """The streams of prompts and of answers differ, and so do those of two seeds."""
    streams = {tuple(islice(parse(text).tokens(seed, what), 9)) for seed in (0, 1) for what in ("input", "output")}
    assert len(streams) == 4


@given(
    st.one_of(
        st.builds("uniform:{}..{}".format, st.integers(1, 999), st.integers(1000, 10_000_000)),
        st.builds(
            "lognormal:mean={},cv={}".format, st.decimals(1, 10**7, places=9), st.decimals("0.01", 100, places=4)
        ),
        st.builds("exponential:mean={},min={}".format, st.decimals(1, 10**7, places=2), st.integers(1, 10**7)),
    ),
    st.integers(),
)
def test_lengths_are_whole_and_at_least_one(text: str, seed: int) -> None:
    """Whatever is named and whatever the seed, lengths can be sent; the canonical text is a fixed point."""
    lengths = parse(text)
    assert parse(str(lengths)) == lengths
    assert all(type(length) is int and length >= 1 for length in islice(lengths.tokens(seed, "input"), 20))


@cache
def _tokens(text: str) -> np.ndarray:
    return np.array(list(islice(parse(text).tokens(1, "input"), N)))
