"""Divides a run into equal time windows, and computes a figure for each window.

The windows cover the time in which requests were due, as far as it lies inside the measurement window of the run.

- A latency counts in the time window in which its request was due. If the server becomes slow, the slow responses thus
  count in the time window in which the slowness began, even if they end much later.
- A token counts in the time window in which it arrived.
- The end of a request counts in the time window in which the request ended.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from msgspec.structs import replace

from loadgen.analysis.frame import NS_PER_S, Floats, Frame, Integers, Window
from loadgen.analysis.metrics import Metric
from loadgen.analysis.stats import RESIDENCE_TIMES_PER_BATCH, batch_rates, percentile, samples_needed

MIN_REQUESTS = 20
"""Minimum mean number of complete requests per window."""


class WindowSeries(msgspec.Struct, frozen=True):
    """A figure in consecutive time windows of equal length."""

    from_s: float
    """Start of the first window, in seconds from the start of the run."""
    window_s: float
    values: Floats
    """The figure in each window; NaN for a window without requests."""

    @property
    def middles_s(self) -> Floats:
        """The middle of each window, in seconds from the start of the run."""
        indices = np.arange(len(self.values), dtype=np.float64)
        return self.from_s + self.window_s * (indices + 0.5)

    def ends_s(self, index: int) -> tuple[float, float]:
        """Return the start and the end of the window at `index`, in seconds from the start of the run."""
        return self.from_s + self.window_s * index, self.from_s + self.window_s * (index + 1)


def loaded_span_ns(frame: Frame) -> tuple[float, float] | None:
    """Return the first and the last due time in ns of the sent requests inside the measurement window.

    Return None if fewer than two different times are known.
    """
    due_ns = frame.due_ns[frame.inside & frame.sent]
    if not len(due_ns) or due_ns.max() <= due_ns.min():
        return None
    return float(due_ns.min()), float(due_ns.max())


def window_count(frame: Frame, span_ns: tuple[float, float], max_windows: int, samples_per_window: int = 1) -> int:
    """Return the number of equal windows into which the time `span_ns` can be divided, at most `max_windows`.

    `span_ns` contains the start and the end of this time in ns. The number of windows is limited by two conditions:

    - Each window lasts at least RESIDENCE_TIMES_PER_BATCH times the median time that a request is in flight.
      Neighbouring windows are then nearly independent.
    - The average number of complete requests per window is at least MIN_REQUESTS and at least `samples_per_window`.

    The result is 0 if no complete request was due in this time.
    """
    rows = frame.sampled & (frame.due_ns >= span_ns[0]) & (frame.due_ns <= span_ns[1])
    requests = int(rows.sum())
    if not requests:
        return 0
    residence_ns = float(np.median((frame.end_ns - frame.sent_ns)[rows]))
    by_length = (span_ns[1] - span_ns[0]) / max(1.0, RESIDENCE_TIMES_PER_BATCH * residence_ns)
    return int(min(max_windows, by_length, requests / max(MIN_REQUESTS, samples_per_window)))


def latency_windows(frame: Frame, metric: Metric, statistic: str, share: float | None, count: int) -> WindowSeries:
    """Return a statistic of the latency `metric` in each of `count` time windows.

    `statistic` is `mean`, `min`, `max` or a percentile such as `p99`. For a percentile, `share` is the number after the
    `p` as a fraction, such as 0.99. Call this function only for a frame whose `loaded_span_ns` is known.
    """
    span_ns = loaded_span_ns(frame)
    assert span_ns is not None
    rows = np.flatnonzero(frame.sampled)
    index = window_index(frame.due_ns[rows], span_ns, count)
    offsets = metric.groups(frame)
    if offsets is None:
        samples = metric.rows(frame)[rows]
    else:
        samples, index = metric.values(frame), np.repeat(index, np.diff(offsets))
    known = ~np.isnan(samples)
    samples, index = samples[known], index[known]
    order = np.argsort(index, kind="stable")
    bounds = np.searchsorted(index[order], np.arange(count + 1))
    values = np.full(count, np.nan)
    for window in range(count):
        part = samples[order[bounds[window] : bounds[window + 1]]]
        if len(part):
            values[window] = _statistic(part, statistic, share)
    return _series(span_ns, values)


def samples_for(share: float | None) -> int:
    """Return how many samples a time window needs for a statistic.

    `share` is the percentile as a fraction, for example 0.99 for p99. It is None for any other statistic, such as the
    mean.
    """
    return MIN_REQUESTS if share is None else samples_needed(max(share, 1 - share))


def rate_windows(frame: Frame, name: str, count: int) -> WindowSeries:
    """Return the rate `name`, such as `output_tokens_per_s`, in each of `count` time windows.

    Every value is NaN if the run has no such rate. For example, a run of chat requests has no rate of audio. Call this
    function only if `loaded_span_ns(frame)` is not None.
    """
    span_ns = loaded_span_ns(frame)
    assert span_ns is not None
    part = replace(frame, window=Window(*span_ns, "set", "time in which requests were due"), span_of_run=None)
    return _series(span_ns, batch_rates(part, count).get(name, np.full(count, np.nan)))


def window_index(instants_ns: Floats, span_ns: tuple[float, float], count: int) -> Integers:
    """Return the index of the time window that contains each instant.

    The windows are `count` equal parts of the time `span_ns`. Instants outside this time belong to the nearest window.
    """
    begins, ends = span_ns
    return np.clip((instants_ns - begins) / (ends - begins) * count, 0, count - 1).astype(np.int64)


def _series(span_ns: tuple[float, float], values: Floats) -> WindowSeries:
    return WindowSeries(span_ns[0] / NS_PER_S, (span_ns[1] - span_ns[0]) / NS_PER_S / len(values), values)


def _statistic(samples: Floats, statistic: str, share: float | None) -> float:
    if share is None:
        figures = {"mean": float(samples.mean()), "min": float(samples.min()), "max": float(samples.max())}
        return figures[statistic]
    below = math.floor(share * (len(samples) - 1))
    ranks = [below, min(below + 1, len(samples) - 1)]
    return percentile(np.partition(samples, ranks), share)  # partitioning takes a third of the time of sorting
