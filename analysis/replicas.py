"""Compares the replicas of a server: the engines behind one URL between which a balancer distributes the requests."""

from __future__ import annotations

import numpy as np

from loadgen.analysis.frame import Frame
from loadgen.analysis.frame_parts import NO_REPLICA
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.summary import ReplicaDifference

MIN_REQUESTS = 20
"""Minimum number of complete requests of a replica that is compared."""
MIN_RATIO = 1.2
"""Minimum ratio of the longest to the shortest median TTFT, for a difference. A smaller one is of little importance."""
MAX_P_VALUE = 0.001
"""Maximum p-value for a difference."""


def compare_replicas(frame: Frame) -> ReplicaDifference | None:
    """Return the difference between the replicas, or None if they are alike, or if there are fewer than two.

    TTFTs are compared by the test of Kruskal and Wallis, "Use of ranks in one-criterion variance analysis", 1952. The
    test assumes independent requests. Requests that wait for each other in one queue are not independent, so a minimum
    ratio of the medians is required too.
    """
    if frame.replicas is None:
        return None
    ttft_s = METRICS["ttft_s"].rows(frame)
    known = frame.sampled & ~np.isnan(ttft_s)
    samples = {name: ttft_s[known & frame.replicas.rows(name)] for name in frame.replicas.names if name != NO_REPLICA}
    compared = {name: values for name, values in samples.items() if len(values) >= MIN_REQUESTS}
    if len(compared) < 2:
        return None
    medians = {name: float(np.median(values)) for name, values in compared.items()}
    fastest, slowest = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    if medians[slowest] < MIN_RATIO * medians[fastest]:
        return None
    from scipy.stats import kruskal  # takes half a second, which only runs with slow replicas need

    p_value = float(kruskal(*compared.values()).pvalue)
    if p_value > MAX_P_VALUE:
        return None
    return ReplicaDifference(
        fastest=fastest,
        slowest=slowest,
        fastest_ttft_s=round(medians[fastest], 9),
        slowest_ttft_s=round(medians[slowest], 9),
        p_value=float(f"{p_value:.3g}"),
    )
