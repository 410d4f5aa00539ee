"""Computes the latency distributions of a run.

If a run has too many gaps between chunks to sort, the gaps are processed block by block, with exactly the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np

from loadgen.analysis.child_process import ChildProcess, can_fork
from loadgen.analysis.chunk_columns import KnownSamples, OrderStatistics
from loadgen.analysis.frame import NS_PER_S, Floats, Frame, Integers
from loadgen.analysis.metrics import Metric
from loadgen.analysis.objectives import Distribution
from loadgen.analysis.stats import (
    PERCENTILES,
    WITH_INTERVAL,
    describe,
    describe_sorted,
    effective_group_size,
    interval_indices,
    percentile,
    plotted_ranks,
    sum_of_squares,
)

Distributions = dict[str, Distribution]
"""Distribution of each metric, by metric name."""


class GapFigures(NamedTuple):
    """Figures on the gaps between chunks of a run with too many gaps to sort."""

    distributions: Distributions
    samples: Mapping[str, KnownSamples]
    """The samples that a chart of the distribution shows, by metric name."""


NO_FIGURES = GapFigures({}, {})


@contextmanager
def start_gap_figures(metrics: Sequence[Metric], frame: Frame) -> Iterator[Callable[[], GapFigures]]:
    """Start a process that computes the distributions of gap metrics, if there are too many gaps to sort.

    A gap is the time between two chunks of a response. A gap metric, such as ITL, is computed from gaps. The other
    `metrics` are ignored.

    This context manager yields a function that waits for the end of the process and returns the figures. The function
    returns NO_FIGURES if no process was started or if the process failed.
    """
    gap_metrics = [metric for metric in metrics if metric.zero_counts(frame) is not None]
    if not gap_metrics or not can_fork():
        yield lambda: NO_FIGURES
        return
    with ChildProcess(lambda: describe_gap_metrics(gap_metrics, frame)) as child:
        yield cache(lambda: child.result() or NO_FIGURES)


def describe_metrics(metrics: Sequence[Metric], frame: Frame) -> Distributions:
    """Return the distribution of each metric, by metric name."""
    return with_gap_metrics(describe_sorted_metrics(metrics, frame), metrics, frame, lambda: NO_FIGURES)


def describe_sorted_metrics(metrics: Sequence[Metric], frame: Frame) -> Distributions:
    """Return the distribution of each metric whose samples are few enough to be sorted, by metric name."""
    key = _key_of_samples(frame)
    known = Distributions()
    distributions = Distributions()
    for metric in metrics:
        if metric.zero_counts(frame) is not None:
            continue
        if key(metric) not in known:
            known[key(metric)] = describe(metric.values(frame), metric.groups(frame), sorted_values(metric, frame))
        distributions[metric.name] = known[key(metric)]
    return distributions


def with_gap_metrics(
    distributions: Distributions, metrics: Sequence[Metric], frame: Frame, gap_figures: Callable[[], GapFigures]
) -> Distributions:
    """Return the distribution of each metric, by metric name.

    - `distributions` is the result of `describe_sorted_metrics` for these metrics.
    - `gap_figures` is a function that returns the figures that a second process computes (`start_gap_figures`). The
      function waits until this process has ended. If it returns no figures, this process computes them.
    """
    missing = [metric for metric in metrics if metric.name not in distributions]
    known = gap_figures().distributions if missing else {}
    if missing and not known:
        known = describe_gap_metrics(missing, frame).distributions
    return {metric.name: {**distributions, **known}[metric.name] for metric in metrics}


def describe_gap_metrics(metrics: Sequence[Metric], frame: Frame) -> GapFigures:
    """Return figures on gap metrics of a run with too many gaps to sort."""
    key = _key_of_samples(frame)
    ranked = ranked_gaps(frame, 0)
    known: dict[str, tuple[Distribution, KnownSamples]] = {}
    for metric in metrics:
        if key(metric) not in known:
            zeros = metric.zero_counts(frame)
            assert zeros is not None
            known[key(metric)] = describe_gaps(frame, zeros, ranked)
    return GapFigures(
        {metric.name: known[key(metric)][0] for metric in metrics},
        {metric.name: known[key(metric)][1] for metric in metrics},
    )


def _key_of_samples(frame: Frame) -> Callable[[Metric], str]:
    """Return a function that returns a text for a metric. Metrics with the same samples have the same text.

    If every chunk holds one token, the inter-token latency (ITL) and the inter-chunk latency (ICL) have the same
    samples. Their distribution is then computed only once.
    """
    one_token_chunks = bool((frame.later_counts == frame.gap_counts).all())
    return lambda metric: "gaps" if one_token_chunks and metric.per in ("chunk", "token") else metric.name


def sorted_values(metric: Metric, frame: Frame) -> Floats:
    """Return all samples of a metric in ascending order."""
    if metric.per == "chunk":
        return frame.sorted_gaps_s()
    if metric.per == "token":
        return frame.sorted_token_gaps_s()
    return np.sort(metric.values(frame))


def sorted_samples(metric: Metric, frame: Frame) -> Floats | OrderStatistics:
    """Return all samples of a metric in ascending order, or their order statistics if they are too many to sort."""
    zeros = metric.zero_counts(frame)
    return sorted_values(metric, frame) if zeros is None else ranked_gaps(frame, int(zeros.sum()))


def describe_gaps(frame: Frame, zeros: Integers, ranked: OrderStatistics) -> tuple[Distribution, KnownSamples]:
    """Return the distribution of the inter-token gaps in `frame`, and the samples that its chart shows.

    The inter-token gaps are the gaps between chunks, and additional gaps of 0.

    An additional gap is 0 because its two tokens arrived in the same chunk. `zeros[i]` is the number of additional gaps
    in row i. `ranked` contains only the gaps between chunks. These gaps are processed block by block, because there are
    too many to sort.
    """
    gaps, ordered = frame.gap_counts, ranked.with_zeros(int(zeros.sum()))
    counts, count = gaps + zeros, len(ordered)
    has_gaps = gaps > 0
    total_ns = (frame.last_ns - frame.first_ns)[has_gaps].astype(np.int64).sum()  # the sum of all gaps
    mean = int(total_ns) / NS_PER_S / count
    squares = math.fsum([*_squares_of_blocks(frame, mean), int(zeros.sum()) * mean**2])
    # All ranks that follow are looked up in one call, because every call takes several passes over the gaps.
    ranks = [0, count - 1, *plotted_ranks(count).tolist()]
    for share in PERCENTILES.values():
        below = int(share * (count - 1))
        ranks += [min(count - 1, below), min(count - 1, below + 1)]
    ordered.values_at(ranks)
    bounds_ns = [_largest_ns_within(percentile(ordered, share)) for share in PERCENTILES.values()]
    within = np.repeat(zeros.astype(np.float64)[None], len(bounds_ns), axis=0)
    # NumPy counts small integers several times as fast as floats.
    chunk_counts = frame.chunk_counts
    counter = np.min_scalar_type(int(chunk_counts.max(initial=0)))
    for rows, steps, _ in frame.step_blocks():
        has_chunks = chunk_counts[rows] > 0
        firsts = (frame.offsets[rows] - frame.offsets[rows.start])[has_chunks]
        selected = has_gaps[rows][has_chunks]
        if not selected.any():
            continue
        for index, bound_ns in enumerate(bounds_ns):
            steps_within = np.add.reduceat(steps <= bound_ns, firsts, dtype=counter)
            # The step of the first chunk of a row is 0, so it is within every bound, but it is no gap.
            within[index, rows][has_gaps[rows]] += steps_within[selected] - 1.0
    sizes = {name: effective_group_size(row, counts) for name, row in zip(PERCENTILES, within, strict=True)}
    ends = (interval_indices(count, PERCENTILES[name], sizes[name]) for name in WITH_INTERVAL)
    ordered.values_at([index for pair in ends for index in pair if index is not None])
    return describe_sorted(ordered, mean, squares, sizes), ordered.known()


def _squares_of_blocks(frame: Frame, mean_s: float) -> Iterator[float]:
    """Yield the sum of the squared deviations of the gaps of each block from `mean_s` seconds, in s²."""
    for _, steps, ignored in frame.step_blocks():
        deviations = steps / NS_PER_S - mean_s
        deviations[ignored] = 0
        yield sum_of_squares(deviations)


def _largest_ns_within(bound_s: float) -> int:
    """Return the largest whole number of nanoseconds that is not greater than `bound_s` seconds.

    The number is converted to seconds (float64) for this comparison.
    """
    nanoseconds = math.ceil(bound_s * NS_PER_S) + 1
    while nanoseconds / NS_PER_S > bound_s:
        nanoseconds -= 1
    return nanoseconds


def ranked_gaps(frame: Frame, zeros: int) -> OrderStatistics:
    """Return the order statistics, in seconds, of all gaps between chunks and of `zeros` further samples that are 0."""
    largest = int(frame.chunk_ns.steps.max(initial=0))
    count = int(frame.gap_counts.sum()) + zeros
    return OrderStatistics(lambda: (block[1:] for block in frame.step_blocks()), count, zeros, largest, NS_PER_S)
