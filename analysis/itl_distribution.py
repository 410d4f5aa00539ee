"""Distributions of a run, those of its gaps also where they are too many to be sorted: block by block, and exact."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from loadgen.analysis.chunk_columns import OrderStatistics
from loadgen.analysis.frame import NS_PER_S, Floats, Frame, Integers, offsets_of, sum_by_row
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
)


def describe_metrics(metrics: Iterable[Metric], frame: Frame) -> dict[str, Distribution]:
    """Each of these metrics, by its name. With one token in each chunk ITL is ICL, and what takes long is done once."""
    alike, known = bool((frame.later_counts == frame.gap_counts).all()), dict[str, Distribution]()
    keys = {metric: "gaps" if alike and metric.per in ("chunk", "token") else metric.name for metric in metrics}
    for metric, key in keys.items():
        known[key] = known.get(key) or _described(metric, frame)
    return {metric.name: known[key] for metric, key in keys.items()}


def _described(metric: Metric, frame: Frame) -> Distribution:
    zeros = metric.zero_counts(frame)
    return describe(metric.values(frame), metric.groups(frame)) if zeros is None else describe_gaps(frame, zeros)


def metric_samples(metric: Metric, frame: Frame) -> Floats | OrderStatistics:
    """To be drawn: all of them, or where they are too many, those of any ranks."""
    zeros = metric.zero_counts(frame)
    return metric.values(frame) if zeros is None else ranked_gaps(frame, int(zeros.sum()))


def describe_gaps(frame: Frame, zeros: Integers) -> Distribution:
    """The figures of the gaps of a frame, with so many zeros more in each row, block by block."""
    gaps, ordered = frame.gap_counts, ranked_gaps(frame, int(zeros.sum()))
    counts, count = gaps + zeros, len(ordered)
    mean = sum(int(part.sum(dtype=np.int64)) for _, part in frame.gap_blocks()) / NS_PER_S / count
    squares = math.fsum(
        [float(each @ each) for each in (part / NS_PER_S - mean for _, part in frame.gap_blocks())]
        + [int(zeros.sum()) * mean**2]
    )
    places = [int(share * (count - 1)) + more for share in PERCENTILES.values() for more in (0, 1)]
    ordered.at([0, count - 1, *(min(count - 1, index) for index in places)])  # at once: each time takes passes
    bounds = [_most_within(percentile(ordered, share)) for share in PERCENTILES.values()]
    within = np.repeat(zeros.astype(np.float64)[None], len(bounds), axis=0)
    for rows, part in frame.gap_blocks():
        offsets = offsets_of(gaps[rows])
        for each, bound in enumerate(bounds):
            within[each, rows] += sum_by_row(part <= bound, offsets)
    sizes = {name: effective_group_size(each, counts) for name, each in zip(PERCENTILES, within, strict=True)}
    ends = (interval_indices(count, PERCENTILES[name], sizes[name]) for name in WITH_INTERVAL)
    ordered.at([index for pair in ends for index in pair if index is not None])
    return describe_sorted(ordered, mean, squares, sizes)


def _most_within(bound_s: float) -> int:
    """The largest number of nanoseconds that is no longer, as a float64 of seconds."""
    maximum = math.ceil(bound_s * NS_PER_S) + 1
    while maximum / NS_PER_S > bound_s:
        maximum -= 1
    return maximum


def ranked_gaps(frame: Frame, zeros: int) -> OrderStatistics:
    """Gaps in seconds and so many zeros, in ascending order."""
    maximum = max((int(part.max()) for _, part in frame.gap_blocks() if len(part)), default=0)
    count = int(frame.gap_counts.sum()) + zeros
    return OrderStatistics(lambda: (part for _, part in frame.gap_blocks()), count, zeros, maximum, NS_PER_S)
