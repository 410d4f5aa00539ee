"""Compares the replicas of a server: the engines behind one URL between which a balancer distributes the requests."""

from __future__ import annotations

import numpy as np

from loadgen.analysis.frame import Floats, Frame
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
    if frame.replicas is None or len(frame.replicas.names) < 2:
        return None
    ttft_s = METRICS["ttft_s"].rows(frame)
    known = frame.sampled & ~np.isnan(ttft_s)
    samples = {name: ttft_s[known & frame.replicas.rows(name)] for name in frame.replicas.names if name}
    compared = {name: values for name, values in samples.items() if len(values) >= MIN_REQUESTS}
    if len(compared) < 2:
        return None
    medians = {name: float(np.median(values)) for name, values in compared.items()}
    fastest, slowest = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    if medians[slowest] < MIN_RATIO * medians[fastest]:
        return None
    p_value = kruskal_wallis(list(compared.values()))
    if p_value > MAX_P_VALUE:
        return None
    return ReplicaDifference(
        fastest=fastest,
        slowest=slowest,
        fastest_ttft_s=round(medians[fastest], 9),
        slowest_ttft_s=round(medians[slowest], 9),
        p_value=float(f"{p_value:.3g}"),
    )


def kruskal_wallis(groups: list[Floats]) -> float:
    """Return the p-value of the Kruskal-Wallis test that all groups come from the same distribution.

    Equal values get their mean rank, and the statistic is corrected for them. Its distribution is approximated by chi
    squared.
    """
    from scipy.special import gammaincc

    values = np.concatenate(groups)
    total = len(values)
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2
    ranks = mean_ranks[index]
    sums, first = 0.0, 0
    for group in groups:
        sums += ranks[first : first + len(group)].sum() ** 2 / len(group)
        first += len(group)
    correction = 1 - float((counts**3.0 - counts).sum()) / (total**3.0 - total)
    if correction <= 0:  # all values are equal
        return 1.0
    statistic = (12 / (total * (total + 1)) * sums - 3 * (total + 1)) / correction
    return float(gammaincc((len(groups) - 1) / 2, max(0.0, statistic) / 2))
