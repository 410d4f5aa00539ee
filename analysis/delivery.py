"""Delivery: was the requested load the load that was sent?

Two comparisons. Due against name: does the seeded plan have the rate and the variation it claims? Sent against due:
did the client keep to it? Gaps are those between consecutive requests in order of time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.frame import NS_PER_S, Floats
from analysis.stats import gamma_cdf, kolmogorov_smirnov, rounded
from analysis.summary import Delivery, GapTest, GapTests, SendLateness, TargetDueSent
from loadgen.runfile import LoadFacts

Instants = Sequence[int] | Sequence[int | None] | Floats
RESOLUTION_MAX = 0.1
"""Gaps known no better than to this share of their mean fit any name, so that nothing would be checked."""
GAPS_FOR_CHECK = 8
"""Fewer gaps than this say nothing about a distribution."""


def delivery(due_ns: Instants, sent_ns: Instants, arrivals: str, load: LoadFacts) -> Delivery:
    """Compare what was asked for with what went out.

    `due_ns` and `sent_ns` are a run's due and send instants in whole nanoseconds from its start, one pair per request;
    `sent_ns` is None or NaN where nothing was sent (dropped, or no connection).

    The test takes each gap as known to within `resolution_s`: due instants are whole nanoseconds, and send instants
    are late by what `late_s` says (its p99 is taken). Without it, clumps of requests that are due within the same
    microsecond, of which gamma arrivals are full, would look like another distribution. Where that is more than a
    tenth of the mean gap there is no test: it would pass whatever was sent.

    Raises ValueError when the two sequences differ in length.
    """
    if len(due_ns) != len(sent_ns):
        raise ValueError(f"{len(due_ns)} due instants and {len(sent_ns)} send instants are not of the same requests")
    due_at, sent_at = np.asarray(due_ns, np.float64), np.asarray(sent_ns, np.float64)
    sent = ~np.isnan(sent_at)
    due_gaps = _gaps_s(due_at if load.open_loop else due_at[:0])
    sent_gaps = _gaps_s(sent_at[sent])
    late_s = _late_s((sent_at - due_at)[sent]) if load.open_loop else None
    return Delivery(
        arrivals=arrivals,
        asked=len(due_at),
        sent=int(sent.sum()),
        not_sent=int((~sent).sum()),
        rate_per_s=TargetDueSent(named=load.rate_per_s, due=_rate_per_s(due_gaps), sent=_rate_per_s(sent_gaps)),
        cv=TargetDueSent(named=load.cv, due=_cv(due_gaps), sent=_cv(sent_gaps)),
        ks=GapTests(
            due=_check(due_gaps, load, 1 / NS_PER_S),
            sent=_check(sent_gaps, load, max(late_s.p99, 1 / NS_PER_S)) if late_s else None,
        ),
        late_s=late_s,
    )


def _check(gaps_s: Floats, load: LoadFacts, resolution_s: float) -> GapTest | None:
    rate_per_s, cv = load.rate_per_s, load.cv
    if load.law != "gamma" or not rate_per_s or not cv or len(gaps_s) < GAPS_FOR_CHECK:
        return None
    if resolution_s * rate_per_s > RESOLUTION_MAX:
        return None
    least, most = np.maximum(np.sort(gaps_s) - resolution_s, 0), np.sort(gaps_s) + resolution_s
    below, above = (gamma_cdf(gaps * (rate_per_s / cv**2), 1 / cv**2) for gaps in (least, most))
    statistic, p_value = kolmogorov_smirnov(below, above)
    return GapTest(statistic=statistic, p_value=p_value, gaps=len(gaps_s), resolution_s=resolution_s)


def _gaps_s(instants_ns: Floats) -> Floats:
    """Exact: the instants are whole nanoseconds below 2**53."""
    return np.diff(np.sort(instants_ns)) / NS_PER_S


def _rate_per_s(gaps_s: Floats) -> float | None:
    return rounded(float(1 / gaps_s.mean())) if len(gaps_s) and gaps_s.any() else None


def _cv(gaps_s: Floats) -> float | None:
    """Needs two gaps, and requests that did not all come at once."""
    return rounded(float(gaps_s.std(ddof=1) / gaps_s.mean())) if len(gaps_s) > 1 and gaps_s.any() else None


def _late_s(late_ns: Floats) -> SendLateness | None:
    if not len(late_ns):
        return None
    p50, p90, p99, most = (rounded(float(late) / NS_PER_S) for late in np.percentile(late_ns, [50, 90, 99, 100]))
    return SendLateness(p50=p50, p90=p90, p99=p99, max=most)
