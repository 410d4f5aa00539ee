"""One run against one run: from raw samples, with the sources of chance that a run shows (analysis.compare.noise)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from analysis import stats
from analysis.compare import noise
from analysis.compare.loaded import Loaded
from analysis.compare.samples import samples_of
from analysis.compare.verdicts import Direction, Row, ends, p_value
from analysis.metrics import METRICS
from analysis.objectives import LATENCIES, RATES
from analysis.repeats import ended

SEED = 20_030_711
"""Of the bootstrap: the same runs give the same figures."""
TEST = "bootstrap of the quantile, steps, stamps, and never narrower than runs differ"
PAIRS = "Mann-Whitney"
SHORT = "the run is too short to show how the server varies; repeats would"


def rows(a: Loaded, b: Loaded, figures: Sequence[str]) -> Iterator[Row]:
    """One Row per figure, without its verdict."""
    piece = noise.piece_error(a, b)
    for figure in figures:
        name, _, statistic = figure.partition(".")
        if name in RATES:
            yield _rate(figure, a, b, piece)
        elif name == "complete":
            yield shares(ended(a.summary), ended(b.summary))
        elif statistic == "pairs":
            yield _pairs(name, a, b, piece)
        elif name in LATENCIES:
            yield _quantile(name, statistic, a, b, piece)


def shares(a: tuple[int, int], b: tuple[int, int]) -> Row:
    """Shares of requests that were complete, of (complete, all): Fisher's exact test, and Newcombe's interval.

    Fisher, "Statistical Methods for Research Workers" (1934), section 21.02; Newcombe, "Interval estimation for the
    difference between independent proportions" (1998), method 10.
    """
    if not a[1] or not b[1]:
        return untold("complete", "share", "higher", "nothing was sent")
    share_a, share_b = a[0] / a[1], b[0] / b[1]
    interval = newcombe(a, b)
    # Half its width as so many standard errors, so that sizes can be worked out as for the others.
    error = (interval[1] - interval[0]) / 2 / 1.96
    return Row(
        "complete", "share", "higher", share_a, share_b, share_b - share_a, interval, None, None,
        fisher(a, b), "Fisher's exact test", error, 1e6, count=min(a[1], b[1]),
    )  # fmt: skip


def untold(figure: str, unit: str, direction: Direction, why: str) -> Row:
    """A figure of which nothing can be said."""
    return Row(figure, unit, direction, None, None, None, None, None, None, None, "", why=why)


def fisher(a: tuple[int, int], b: tuple[int, int]) -> float:
    """Two-sided p-value: all tables with these margins that are no likelier than this one."""
    successes, total = a[0] + b[0], a[1] + b[1]
    first, last = max(0, successes - b[1]), min(successes, a[1])
    logs = [_choose(a[1], k) + _choose(b[1], successes - k) - _choose(total, successes) for k in range(first, last + 1)]
    limit = logs[a[0] - first] + 1e-7
    return min(1.0, math.fsum(math.exp(each) for each in logs if each <= limit))


def newcombe(a: tuple[int, int], b: tuple[int, int]) -> tuple[float, float]:
    """95 % interval of share b minus share a, from Wilson's interval of each."""
    (share_a, low_a, high_a), (share_b, low_b, high_b) = _wilson(*a), _wilson(*b)
    difference = share_b - share_a
    low = difference - math.hypot(share_b - low_b, high_a - share_a)
    high = difference + math.hypot(high_b - share_b, share_a - low_a)
    return max(-1.0, low), min(1.0, high)


def _quantile(name: str, statistic: str, a: Loaded, b: Loaded, piece: float) -> Row:
    figure, share = f"{name}.{statistic}", float(statistic.removeprefix("p").replace("_", ".")) / 100
    samples_a, samples_b = samples_of(a, name), samples_of(b, name)
    few = min(len(samples_a.values), len(samples_b.values))
    if few < (needed := stats.samples_needed(share)):
        return untold(figure, "s", "lower", f"too few samples: {statistic} needs {needed:,}, there are {few:,}")
    value_a, value_b = noise.quantile(samples_a, share), noise.quantile(samples_b, share)
    worth = min(noise.worth(samples_a, share, value_a), noise.worth(samples_b, share, value_b))
    if worth < needed:  # a stall is in the gaps of all requests: thousands of gaps may be a few events
        why = f"the samples are worth {worth:,.0f} independent ones: {statistic} needs {needed:,}"
        return untold(figure, "s", "lower", why)
    if min(value_a, value_b) <= 0:
        return untold(figure, "s", "lower", "one of them is 0, which no ratio can be taken of")
    random = np.random.default_rng(SEED)
    within = math.sqrt(
        noise.quantile_error(samples_a, share, random) ** 2
        + noise.quantile_error(samples_b, share, random) ** 2
        + _of_server(name, a, b, piece, (value_a, value_b)) ** 2
        + noise.stamp_error(name, a, b, value_a, value_b) ** 2
    )
    if not math.isfinite(within):
        return untold(figure, "s", "lower", SHORT)
    return _row(figure, "s", "lower", (value_a, value_b), within, min(_requests(a), _requests(b)))


def _rate(figure: str, a: Loaded, b: Loaded, piece: float) -> Row:
    """A rate is what was done by the time it took, so it varies as that time does."""
    value_a, value_b = (METRICS[figure].figure(run.frame) for run in (a, b))
    if not value_a or not value_b or not math.isfinite(piece):
        return untold(figure, "per second", "higher", SHORT)
    spans = noise.span_s(a), noise.span_s(b)
    within = math.hypot(noise.server_error(piece, 1.0), noise.stamp_error(figure, a, b, *spans))
    return _row(figure, "per second", "higher", (value_a, value_b), within, min(_requests(a), _requests(b)))


def _pairs(name: str, a: Loaded, b: Loaded, piece: float) -> Row:
    samples_a, samples_b = samples_of(a, name), samples_of(b, name)
    figure = f"{name}.pairs"
    if min(len(samples_a.values), len(samples_b.values)) < stats.samples_needed(0.5):
        return untold(figure, "share", "lower", f"too few samples: {stats.samples_needed(0.5)} are needed")
    medians = noise.quantile(samples_a, 0.5), noise.quantile(samples_b, 0.5)
    seen = _of_server(name, a, b, piece, medians), noise.stamp_error(name, a, b, *medians)
    together = max(math.hypot(*seen), noise.RUNS_DIFFER)
    if not math.isfinite(together):
        return untold(figure, "share", "lower", SHORT)
    share, error, p = noise.superiority(samples_a, samples_b, together)
    low, high = (max(-0.5, min(0.5, end)) for end in ends(share - 0.5, error, noise.FREEDOM))
    few = min(_requests(a), _requests(b))
    return Row(
        figure,
        "share",
        "lower",
        0.5,
        share,
        share - 0.5,
        (low, high),
        None,
        None,
        p,
        PAIRS,
        error,
        noise.FREEDOM,
        error * noise.RUNS_DIFFER / together,
        few,
    )


def _of_server(name: str, a: Loaded, b: Loaded, piece: float, values: tuple[float, float]) -> float:
    """What chance in the steps does to a latency of one burst, in which all share them. Elsewhere it is in how the
    stretches of the sample differ, as it is for gaps between tokens."""
    if not (a.one_burst and b.one_burst):
        return 0.0
    if name in ("itl", "icl"):
        return noise.server_error(piece, 1.0)
    lengths = values
    if name in ("tpot", "normalised"):  # the time of a whole answer, in place of that by its tokens
        lengths = _answering_s(a, name), _answering_s(b, name)
    stretch = min(length / noise.span_s(run) for length, run in zip(lengths, (a, b), strict=True))
    return noise.server_error(piece, stretch)


def _answering_s(run: Loaded, name: str) -> float:
    """For how long an answer was under way, by the medians: TPOT is of the time after its first token."""
    latency = run.summary["latency"]
    before = latency["ttft_s"]["p50"] if name == "tpot" else 0.0
    return max(0.0, float(latency["e2e_s"]["p50"] - before))


def _row(figure: str, unit: str, direction: Direction, both: tuple[float, float], within: float, count: int) -> Row:
    effect, error = math.log(both[1] / both[0]), max(within, noise.RUNS_DIFFER)
    low, high = (math.exp(end) for end in ends(effect, error, noise.FREEDOM))
    return Row(
        figure,
        unit,
        direction,
        both[0],
        both[1],
        both[1] - both[0],
        (both[0] * (low - 1), both[0] * (high - 1)),
        both[1] / both[0],
        (low, high),
        p_value(effect, error, noise.FREEDOM),
        TEST,
        error,
        noise.FREEDOM,
        noise.RUNS_DIFFER,
        count,
    )


def _requests(run: Loaded) -> int:
    return int(run.frame.sampled.sum())


def _wilson(successes: int, count: int) -> tuple[float, float, float]:
    z = 1.959963984540054
    share = successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return share, centre - half, centre + half


def _choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
