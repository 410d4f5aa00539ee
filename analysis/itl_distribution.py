"""Computes the latency distributions of a run.

If a run has too many gaps between chunks to sort, the gaps are processed block by block, with exactly the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from loadgen.analysis.child_process import ChildProcess, can_fork
from loadgen.analysis.chunk_columns import OrderStatistics
from loadgen.analysis.frame import NS_PER_S, Floats, Frame, Integers, offsets_of
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
    sum_of_squares,
)

Distributions = dict[str, Distribution]
"""Distribution of each metric, by metric name."""


@contextmanager
def start_gap_metrics(metrics: Sequence[Metric], frame: Frame) -> Iterator[Callable[[], Distributions]]:
    """Start a process that computes the distributions of gap metrics, if there are too many gaps to sort.

    A gap is the time between two chunks of a response. A gap metric, such as ITL, is computed from gaps. The other
    `metrics` are ignored.

    This context manager yields a function that waits for the end of the process and returns the distributions. The
    function returns an empty dictionary if no process was started or if the process failed.
    """
    gap_metrics = [metric for metric in metrics if metric.zero_counts(frame) is not None]
    if not gap_metrics or not can_fork():
        yield dict
        return
    with ChildProcess(lambda: describe_metrics(gap_metrics, frame)) as child:
        yield lambda: child.result() or {}


def describe_metrics(
    metrics: Sequence[Metric], frame: Frame, gap_metrics: Callable[[], Distributions] = dict
) -> Distributions:
    """Return the distribution of each metric, by metric name.

    `gap_metrics` is a function that returns the distributions that a second process computes (`start_gap_metrics`). The
    function waits until this process has ended. All other metrics are therefore described before the call.

    If every chunk holds one token, the inter-token latency (ITL) and the inter-chunk latency (ICL) have the same
    samples. Their distribution is then computed only once.
    """
    zeros_by_name = {metric.name: metric.zero_counts(frame) for metric in metrics}
    sorted_metrics = [metric for metric in metrics if zeros_by_name[metric.name] is None]
    one_token_chunks = bool((frame.later_counts == frame.gap_counts).all())
    known = Distributions()

    def key(metric: Metric) -> str:
        return "gaps" if one_token_chunks and metric.per in ("chunk", "token") else metric.name

    for metric in sorted_metrics:
        if key(metric) not in known:
            known[key(metric)] = describe(metric.values(frame), metric.groups(frame), sorted_values(metric, frame))
    distributions = {metric.name: known[key(metric)] for metric in sorted_metrics} | gap_metrics()
    ranked: OrderStatistics | None = None
    for metric in metrics:
        if metric.name in distributions:
            continue
        if key(metric) not in known:
            zeros = zeros_by_name[metric.name]
            assert zeros is not None
            ranked = ranked_gaps(frame, 0) if ranked is None else ranked
            known[key(metric)] = describe_gaps(frame, zeros, ranked)
        distributions[metric.name] = known[key(metric)]
    return {metric.name: distributions[metric.name] for metric in metrics}


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


def describe_gaps(frame: Frame, zeros: Integers, ranked: OrderStatistics) -> Distribution:
    """Return the distribution of the inter-token gaps in `frame`: the gaps between chunks, and additional gaps of 0.

    An additional gap is 0 because its two tokens arrived in the same chunk. `zeros[i]` is the number of additional gaps
    in row i. `ranked` contains only the gaps between chunks. These gaps are processed block by block, because there are
    too many to sort.
    """
    gaps, ordered = frame.gap_counts, ranked.with_zeros(int(zeros.sum()))
    counts, count = gaps + zeros, len(ordered)
    has_gaps = gaps > 0
    total_ns = (frame.last_ns - frame.first_ns)[has_gaps].astype(np.int64).sum()  # the sum of all gaps
    mean = int(total_ns) / NS_PER_S / count
    deviations = (block / NS_PER_S - mean for _, block in frame.gap_blocks())
    squares = math.fsum([sum_of_squares(block) for block in deviations] + [int(zeros.sum()) * mean**2])
    # All ranks that follow are looked up in one call, because every call takes several passes over the gaps.
    ranks = [0, count - 1]
    for share in PERCENTILES.values():
        below = int(share * (count - 1))
        ranks += [min(count - 1, below), min(count - 1, below + 1)]
    ordered.values_at(ranks)
    bounds_ns = [_largest_ns_within(percentile(ordered, share)) for share in PERCENTILES.values()]
    within = np.repeat(zeros.astype(np.float64)[None], len(bounds_ns), axis=0)
    counter = np.min_scalar_type(int(gaps.max()))  # NumPy counts small integers several times as fast as floats.
    for rows, block in frame.gap_blocks():
        filled = has_gaps[rows]
        firsts = offsets_of(gaps[rows])[:-1][filled]
        for index, bound_ns in enumerate(bounds_ns):
            if len(block):
                within[index, rows][filled] += np.add.reduceat(block <= bound_ns, firsts, dtype=counter)
    sizes = {name: effective_group_size(row, counts) for name, row in zip(PERCENTILES, within, strict=True)}
    ends = (interval_indices(count, PERCENTILES[name], sizes[name]) for name in WITH_INTERVAL)
    ordered.values_at([index for pair in ends for index in pair if index is not None])
    return describe_sorted(ordered, mean, squares, sizes)


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
    return OrderStatistics(lambda: (block for _, block in frame.gap_blocks()), count, zeros, largest, NS_PER_S)
