"""Compares the TTFT of the replicas of a server, to find replicas that are slower than others.

Replicas are several engines that serve the same model. A load balancer or loadgen distributes the requests among them.
"""

from __future__ import annotations

import math

import numpy as np

from loadgen.analysis.frame import NS_PER_S, Booleans, Floats, Frame, Integers
from loadgen.analysis.frame_parts import NO_REPLICA
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.summary import ReplicaDifference

MIN_REQUESTS = 20
"""Minimum number of complete requests of a replica that is compared."""
MIN_RATIO = 1.2
"""Minimum ratio of the longest to the shortest median TTFT, for a difference. A smaller one is of little importance."""
REQUESTS_PER_INTERVAL, MAX_INTERVALS = 5, 10
"""Mean number of requests of each replica in an interval of the run, and the maximum number of intervals."""
MAX_P_VALUE = 0.001
"""Maximum p-value for a difference."""
LEFT_OUT = 0.4
"""Share of the intervals that are left out: those with the largest difference. A shorter pause is no difference."""
MAX_REST_P_VALUE = 0.05
"""Maximum p-value for a difference in the intervals that are not left out."""
MAX_BLOCKS, REQUESTS_PER_BLOCK = 15, 2
"""Maximum number of blocks of consecutive requests whose sums are treated as independent, and their minimum size."""
MAX_EQUAL_LOAD_P_VALUE = 0.02
"""Maximum p-value for a difference among requests that met equally many requests in flight, for two replicas."""
MIN_COMPARABLE = 0.15
"""Minimum number of pairs of requests that met equally many requests in flight, one at each replica, relative to the
number of requests of the replica that has fewer."""


def compare_replicas(frame: Frame) -> ReplicaDifference | None:
    """Return the difference between the fastest and the slowest replica, or None if they do not differ significantly.

    The result is also None if fewer than two replicas have enough requests. TTFTs are compared by the test of Kruskal
    and Wallis, "Use of ranks in one-criterion variance analysis", 1952. The test assumes independent requests, but
    requests that wait in one queue depend on each other. Three more conditions must therefore hold:

    - The ratio of the medians is at least MIN_RATIO.
    - The slowest replica is slower in most of the run.
    - The slowest replica is also slower at an equal load (`_is_slower_at_equal_load`). Otherwise, its queue may only
      have been longer by chance.

    If all requests were sent together, the last two conditions are not checked, and the field `together` of the result
    is True.
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
    pair = [known & frame.replicas.rows(name) for name in (fastest, slowest)]
    sent_ns = frame.sent_ns[pair[0] | pair[1]]
    together = float(sent_ns.max() - sent_ns.min()) / NS_PER_S <= medians[fastest]
    if not together and not (
        _is_steady(frame.sent_ns, ttft_s, *pair) and _is_slower_at_equal_load(frame, ttft_s, *pair)
    ):
        return None
    return ReplicaDifference(
        fastest=fastest,
        slowest=slowest,
        fastest_ttft_s=round(medians[fastest], 9),
        slowest_ttft_s=round(medians[slowest], 9),
        p_value=float(f"{p_value:.3g}"),
        together=together,
    )


def _is_steady(sent_ns: Floats, ttft_s: Floats, faster: Booleans, slower: Booleans) -> bool:
    """Return True if the slower replica is slower than the faster replica in most of the run, and not only during a
    pause.

    `sent_ns` and `ttft_s` contain the send time and the TTFT of each request. `faster` and `slower` select the requests
    of the two replicas.

    The requests are divided, in order of time, into intervals with equal numbers of requests. On average, an interval
    has at least REQUESTS_PER_INTERVAL requests of each replica. In each interval, a rank sum compares the TTFTs of the
    two replicas.

    A pause of a replica makes many of its requests slow, but only in a few intervals. The share LEFT_OUT of the
    intervals is therefore ignored: the intervals in which the slower replica is slowest. The test of van Elteren
    combines the rank sums of the remaining intervals ("On the combination of independent two sample tests of Wilcoxon",
    1960).
    """
    from scipy.stats import norm, rankdata

    rows = np.flatnonzero(faster | slower)
    rows = rows[np.argsort(sent_ns[rows], kind="stable")]
    count = min(int(faster.sum()), int(slower.sum())) // REQUESTS_PER_INTERVAL
    excesses, variances = list[float](), list[float]()
    for interval in np.array_split(rows, min(max(count, 1), MAX_INTERVALS)):
        is_slower = slower[interval]
        number, slow_number = len(interval), int(is_slower.sum())
        if 0 < slow_number < number:
            ranks = rankdata(ttft_s[interval])
            excesses.append(float(ranks[is_slower].sum()) / (number + 1) - slow_number / 2)
            variances.append(slow_number * (number - slow_number) / 12 / (number + 1))
    excess, variance = np.array(excesses), np.array(variances)
    kept = np.argsort(excess / np.sqrt(variance))[: len(excess) - int(LEFT_OUT * len(excess))]
    if not len(kept):
        return False
    return float(norm.sf(excess[kept].sum() / np.sqrt(variance[kept].sum()))) < MAX_REST_P_VALUE


def _is_slower_at_equal_load(frame: Frame, ttft_s: Floats, faster: Booleans, slower: Booleans) -> bool:
    """Return True if one replica is slower than the other replica, and random differences in load do not explain this.

    `faster` and `slower` select the requests of the two replicas, and `ttft_s` contains the TTFT of each request. The
    load of a request is the number of requests that were in flight at its replica when the request was sent. For each
    load, a rank sum compares the TTFTs of the two replicas at this load. The rank sums of all loads are added. Two
    corrections are made:

    - Consecutive requests are not independent, so the variance of the total is estimated from blocks of consecutive
      requests.
    - The two replicas were chosen as the fastest and the slowest of all, so the p-value is multiplied by the number of
      pairs of replicas (Bonferroni).

    A special case is that too few requests of the two replicas had equal loads. In this case, TTFTs cannot be compared.
    The result is then True, because the loads of the replicas differed during almost the whole run. Random differences
    would not last so long, so one replica must be slower.
    """
    from scipy.stats import rankdata, t

    assert frame.replicas is not None
    in_flight = np.full(len(frame), -1, np.int64)
    for rows in (faster, slower):
        in_flight[rows] = _met_in_flight(frame, rows)
    excess = np.full(len(frame), np.nan)
    comparable = 0
    for number in np.unique(in_flight[faster | slower]):
        indices = np.flatnonzero((faster | slower) & (in_flight == number))
        is_slower = slower[indices]
        slow_number = int(is_slower.sum())
        if 0 < slow_number < len(indices):
            comparable += min(slow_number, len(indices) - slow_number)
            ranks = rankdata(ttft_s[indices]) / (len(indices) + 1) - 0.5
            excess[indices] = (is_slower - slow_number / len(indices)) * ranks
    compared = np.flatnonzero(~np.isnan(excess))
    blocks = min(MAX_BLOCKS, len(compared) // REQUESTS_PER_BLOCK)
    if comparable < MIN_COMPARABLE * min(int(faster.sum()), int(slower.sum())) or blocks < 2:
        return True
    compared = compared[np.argsort(frame.sent_ns[compared], kind="stable")]
    sums = np.array([excess[block].sum() for block in np.array_split(compared, blocks)])
    error = float(sums.std(ddof=1)) / math.sqrt(blocks)
    mean = float(sums.mean())
    if error == 0:
        return mean > 0
    pairs = math.comb(len([name for name in frame.replicas.names if name != NO_REPLICA]), 2)
    return float(t.sf(mean / error, blocks - 1)) * pairs <= MAX_EQUAL_LOAD_P_VALUE


def _met_in_flight(frame: Frame, rows: Booleans) -> Integers:
    """Return how many requests were in flight at a replica when each of the requests in `rows` was sent to it.

    `rows` selects requests of one replica. All requests of this replica count as in flight, including failed requests
    and requests that `rows` does not select.
    """
    assert frame.replicas is not None
    replica = frame.replicas.index[int(np.flatnonzero(rows)[0])]
    own = (frame.replicas.index == replica) & ~np.isnan(frame.sent_ns)
    sent_ns, end_ns = np.sort(frame.sent_ns[own]), np.sort(frame.end_ns[own & ~np.isnan(frame.end_ns)])
    instants = frame.sent_ns[rows]
    return np.searchsorted(sent_ns, instants, "left") - np.searchsorted(end_ns, instants, "right")
