"""What holds for every bound and every run, and for the intervals that verdicts rest on."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace
from scipy.stats import t as student

from loadgen.analysis import stats
from loadgen.analysis.frame import build_frame
from loadgen.analysis.objectives import COMPARISONS, LATENCIES, STATES, ObjectiveError, parse
from loadgen.analysis.run.record import Record
from loadgen.analysis.slo import judge
from loadgen.analysis.summary import BurstSkew, RequestCounts, Summary
from tests.support.command import ROOT
from tests.support.runs import MILLISECOND_NS, complete, failed, typed

PLAIN: SearchStrategy[tuple[str, str]] = st.sampled_from([("skew", "ms"), ("requests_per_s", ""), ("failed", "")])
SHARES: SearchStrategy[tuple[str, str]] = st.tuples(st.sampled_from(STATES), st.just("%"))
STATISTICS = st.one_of(st.sampled_from(["mean", "min", "max", "p99.9"]), st.integers(1, 99).map("p{}".format))
UNITS = {name: "ms" if metric.timed else "" for name, metric in LATENCIES.items()}
DISTRIBUTIONS: SearchStrategy[tuple[str, str]] = st.builds(
    lambda name, statistic: (f"{name}.{statistic}", UNITS[name]), st.sampled_from(tuple(UNITS)), STATISTICS
)
FIGURES = st.one_of(PLAIN, SHARES, DISTRIBUTIONS)
BOUNDS = st.integers(0, 100)
GOLDEN = typed(json.loads((ROOT / "tests/golden/burst/summary.json").read_text("utf-8")))
COUNTS = ("sent", "complete", "truncated", "failed", "dropped", "unrecorded", "warmup")
PIECES = ["ttft", "complete", "skew", ".", "p99", "mean", "<", ">=", " ", "5", "0.1", "%", "ms", "x"]


def wider(comparison: str, bounds: tuple[int, int]) -> tuple[int, int]:
    """The two bounds, the stricter one first."""
    low, high = sorted(bounds)
    return (low, high) if comparison.startswith("<") else (high, low)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Record], Summary]:
    """Some requests with first tokens and gaps of up to 100 ms, some failed, and what a summary says of them."""
    instants = draw(st.lists(st.tuples(*[st.integers(1, 100)] * 3), max_size=40))
    records = [
        complete(place, (np.cumsum(gaps) * MILLISECOND_NS).tolist(), due_ns=-draw(st.integers(0, 5)))
        for place, gaps in enumerate(instants)
    ]
    broken = draw(st.integers(0, 3))
    records += [failed(len(instants) + place) for place in range(broken)]
    counts = {"sent": len(records), "complete": len(instants), "failed": broken}
    requests = RequestCounts(**(dict.fromkeys(COUNTS, 0) | counts), errors={}, examples={})
    throughput = replace(GOLDEN.throughput, requests_per_s=draw(st.floats(0, 100)))
    summary = replace(GOLDEN, requests=requests, burst=BurstSkew(skew_s=draw(st.floats(0, 0.1))), throughput=throughput)
    return records, summary


@given(FIGURES, st.sampled_from(list(COMPARISONS)), st.tuples(BOUNDS, BOUNDS), runs())
def test_widening_a_bound_never_fails_what_passed(
    figure: tuple[str, str], comparison: str, bounds: tuple[int, int], run: tuple[list[Record], Summary]
) -> None:
    """A looser bound is kept by whatever kept a stricter one; and a stricter one is not kept by what broke a looser."""
    name, unit = figure
    asked = [f"{name} {comparison} {bound}{unit}" for bound in wider(comparison, bounds)]
    records, summary = run
    strict, loose = (entry.verdict for entry in judge(parse(asked), build_frame(records), summary))
    assert (strict, loose) != ("pass", "fail")


@given(FIGURES, BOUNDS, runs())
def test_opposite_bounds_are_never_both_kept(
    figure: tuple[str, str], bound: int, run: tuple[list[Record], Summary]
) -> None:
    """One of `<` and `>=` passes only where the other fails; what cannot be told cannot be told either way."""
    name, unit = figure
    records, summary = run
    asked = parse([f"{name} < {bound}{unit}", f"{name} >= {bound}{unit}"])
    below, above = judge(asked, build_frame(records), summary)
    assume(below.measured is not None)
    opposite = {"pass": "fail", "fail": "pass", "inconclusive": "inconclusive"}
    assert above.verdict == opposite[below.verdict]


@given(st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES), max_size=8).map("".join)))
def test_any_text_is_an_objective_or_a_mistake(text: str) -> None:
    """Nothing else comes of it than an objective that is written the same, or one line that quotes it."""
    try:
        said = parse([text])[0].text
    except ObjectiveError as error:
        said = str(error)
    assert said == " ".join(text.split()) or said.startswith(f"--assert {text!r}: ")
    assert len(said.splitlines()) <= 1


@given(st.lists(st.floats(0, 1e3), min_size=4, max_size=50))
def test_mean_intervals_are_those_of_student(samples: list[float]) -> None:
    """For independent samples: mean and t times s / sqrt(n), the quantile of t within 1%."""
    low, high = stats.mean_interval(np.array(samples))
    n = len(samples)
    margin = float(student.ppf(0.975, n - 1)) * float(np.std(samples, ddof=1)) / math.sqrt(n)
    assert (low + high) / 2 == pytest.approx(float(np.mean(samples)), abs=1e-6)
    assert (high - low) / 2 == pytest.approx(margin, rel=0.01, abs=1e-6)


@given(st.lists(st.floats(0, 1e3), min_size=4, max_size=30), st.integers(1, 5))
def test_repeating_a_sample_adds_nothing(samples: list[float], times: int) -> None:
    """A request with several equal samples says as much about the mean as one with a single sample."""
    repeated, offsets = np.repeat(samples, times), np.arange(0, len(samples) * times + 1, times)
    single = stats.mean_interval(np.array(samples))
    assert stats.mean_interval(repeated, offsets) == pytest.approx(single, abs=1e-6)


@given(st.floats(0, 1), st.floats(0.001, 0.999), st.integers(0, 1000))
def test_the_samples_that_tell_do_tell(reached: float, share: float, more_than: int) -> None:
    """With that many the interval of a share lies on one side, and it is more than there were."""
    needed = stats.samples_to_decide(reached, share, more_than)
    assume(needed is not None)
    assert needed is not None
    assert needed > more_than
    low, high = stats.share_interval(round(reached * needed), needed)
    assert low > share - 1e-9 or high < share + 1e-9
