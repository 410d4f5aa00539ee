"""Detects that TTFT forms two separate groups, as it does behind a URL with a fast and a slow replica.

Means and percentiles over such a run describe neither group. Two tests detect it:

- The two groups must be far apart.
- The order of fast and slow requests in time must be random or alternating. A load balancer causes such an order when
  it distributes the requests to replicas.

The second test excludes another cause of two groups: a server that computes one batch of requests after another. The
requests of one group are then sent or served completely before those of the other group.
"""

from __future__ import annotations

import math

import numpy as np

from loadgen.analysis.frame import Floats, Frame
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.stats import percentile
from loadgen.analysis.summary import ResponseGroups

MIN_REQUESTS = 40
"""Minimum number of requests of a run that is examined."""
MIN_SHARE = 0.1
"""Minimum share of the requests in each group."""
MIN_RATIO = 2.0
"""Minimum ratio of the smallest TTFT of the slow group to the largest TTFT of the fast group, without outliers."""
OUTLIERS = 0.05
"""Share of each group, on the side of the other group, that is ignored because the requests may be outliers."""
GAP_TO_SPREAD = 2.0
"""Minimum distance between the groups, as a multiple of the wider spread inside a group. Logarithms are compared."""
MIXED_Z = -4.0
"""Minimum z-score of the number of changes between the groups, in the order in which the requests were sent. Groups
that follow each other change much less often than by chance (Wald and Wolfowitz, 1940)."""


def find_groups(run: Run, frame: Frame) -> ResponseGroups | None:
    """Return the two groups that the TTFTs of a run form, or None if there are no two separate groups.

    Return None also if the requests share prefixes, or differ in length, turn, model or class of traffic. Such requests
    have different TTFTs on any server, so the groups would not be a finding about the server.
    """
    different = any(workload.has_own_lengths or workload.shares_prefixes for workload in run.header.workloads)
    different = different or frame.classes is not None or bool((frame.turn > 0).any())
    if different or (frame.models is not None and len(frame.models.names) > 1) or _lengths_differ(frame):
        return None
    ttft_s = METRICS["ttft_s"].rows(frame)
    sampled = np.flatnonzero(frame.sampled & ~np.isnan(ttft_s) & (ttft_s > 0))
    if len(sampled) < MIN_REQUESTS:
        return None
    values = ttft_s[sampled]
    split = _widest_gap(np.sort(values))
    if split is None:
        return None
    slow = values > split
    order = np.lexsort((frame.id[sampled], frame.sent_ns[sampled]))
    if _changes_z(slow[order]) < MIXED_Z:
        return None
    return ResponseGroups(
        fast_requests=int((~slow).sum()),
        slow_requests=int(slow.sum()),
        fast_ttft_s=round(float(np.median(values[~slow])), 6),
        slow_ttft_s=round(float(np.median(values[slow])), 6),
    )


def _lengths_differ(frame: Frame) -> bool:
    """Return True if the requested lengths of prompts, outputs or recordings differ among the measured requests."""
    for column in (frame.prompt_asked, frame.output_asked, frame.audio_s):
        lengths = column[frame.measured & ~np.isnan(column)]
        if len(lengths) and lengths.min() < lengths.max():
            return True
    return False


def _widest_gap(ordered: Floats) -> float | None:
    """Return a value between two groups of samples that a wide gap separates, or None if there are no such groups.

    `ordered` contains positive samples in ascending order.
    """
    smallest = max(1, math.ceil(MIN_SHARE * len(ordered)))
    logs = np.log(ordered)
    steps = np.diff(logs)[smallest - 1 : len(ordered) - smallest]
    if not len(steps):
        return None
    first = int(steps.argmax()) + smallest
    fast, slow = logs[:first], logs[first:]
    gap = percentile(slow, OUTLIERS) - percentile(fast, 1 - OUTLIERS)
    spread = max(percentile(group, 1 - OUTLIERS) - percentile(group, OUTLIERS) for group in (fast, slow))
    if gap < math.log(MIN_RATIO) or gap < GAP_TO_SPREAD * spread:
        return None
    return float(np.exp((logs[first - 1] + logs[first]) / 2))


def _changes_z(slow: np.ndarray) -> float:
    """Return a z-score that shows in which order the True and False values of `slow` occur.

    A run is a sequence of equal values. The score compares the number of runs with the number that is expected for a
    random order (Wald and Wolfowitz, 1940):

    - About 0: the order is random.
    - Positive: the values alternate.
    - Very negative: all values of one group precede all values of the other group.
    """
    ones, zeros = int(slow.sum()), int((~slow).sum())
    total = ones + zeros
    runs = 1 + int((slow[1:] != slow[:-1]).sum())
    expected = 1 + 2 * ones * zeros / total
    variance = (expected - 1) * (expected - 2) / (total - 1)
    return (runs - expected) / math.sqrt(variance) if variance > 0 else 0.0
