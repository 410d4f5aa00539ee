"""Delivery: was the requested load the load that was sent?

Two comparisons. Due against name: does the seeded plan have the rate and the variation it claims? Sent against due:
did the client keep to it? Gaps are those between consecutive requests in order of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.frame import NS_PER_S, Floats
from analysis.stats import gamma_cdf, kolmogorov_smirnov, rounded
from analysis.summary import Delivery, GapTest, GapTests, SendLateness, TargetDueSent

RESOLUTION_MAX = 0.1
"""Gaps known no better than to this share of their mean fit any name, so that nothing would be checked."""
GAPS_FOR_CHECK = 8
"""Fewer gaps than this say nothing about a distribution."""


class Named(NamedTuple):
    """What the arrivals' text promises; None where it promises nothing."""

    rate_per_s: float | None = None
    cv: float | None = None
    stochastic: bool = False
    open_loop: bool = True


def delivery(due_ns: Sequence[int] | Floats, sent_ns: Sequence[int | None] | Floats, arrivals: str) -> Delivery:
    """Compare what was asked for with what went out.

    `due_ns` and `sent_ns` are a run's due and send instants in whole nanoseconds from its start, one pair per request;
    `sent_ns` is None or NaN where nothing was sent (dropped, or no connection). `arrivals` is the canonical text,
    `str(workloads.arrivals.parse(...))`.

    The test takes each gap as known to within `resolution_s`: due instants are whole nanoseconds, and send instants
    are late by what `late_s` says (its p99 is taken). Without it, clumps of requests that are due within the same
    microsecond, of which gamma arrivals are full, would look like another distribution. Where that is more than a
    tenth of the mean gap there is no test: it would pass whatever was sent.

    Raises ValueError when the two sequences differ in length.
    """
    if len(due_ns) != len(sent_ns):
        raise ValueError(f"{len(due_ns)} due instants and {len(sent_ns)} send instants are not of the same requests")
    named = named_by(arrivals)
    due_at, sent_at = np.asarray(due_ns, np.float64), np.asarray(sent_ns, np.float64)
    sent = ~np.isnan(sent_at)
    due_gaps = _gaps_s(due_at if named.open_loop else due_at[:0])
    sent_gaps = _gaps_s(sent_at[sent])
    late_s = _late_s((sent_at - due_at)[sent]) if named.open_loop else None
    return Delivery(
        arrivals=arrivals,
        asked=len(due_at),
        sent=int(sent.sum()),
        not_sent=int((~sent).sum()),
        rate_per_s=TargetDueSent(named=named.rate_per_s, due=_rate_per_s(due_gaps), sent=_rate_per_s(sent_gaps)),
        cv=TargetDueSent(named=named.cv, due=_cv(due_gaps), sent=_cv(sent_gaps)),
        ks=GapTests(
            due=_check(due_gaps, named, 1 / NS_PER_S),
            sent=_check(sent_gaps, named, max(late_s.p99, 1 / NS_PER_S)) if late_s else None,
        ),
        late_s=late_s,
    )


def named_by(arrivals: str) -> Named:
    """The rate and coefficient of variation in the text of arrivals."""
    kind, _, rest = arrivals.partition(":")
    if kind == "constant":
        return Named(float(rest), 0.0)
    if kind == "poisson":
        return Named(float(rest), 1.0, stochastic=True)
    if kind == "gamma":
        rate, _, cv = rest.partition(",cv=")
        return Named(float(rate), float(cv), stochastic=True)
    return Named(open_loop=kind not in ("closed", "interactive"))


def _check(gaps_s: Floats, named: Named, resolution_s: float) -> GapTest | None:
    if not named.stochastic or named.rate_per_s is None or not named.cv or len(gaps_s) < GAPS_FOR_CHECK:
        return None
    if resolution_s * named.rate_per_s > RESOLUTION_MAX:
        return None
    shape = 1 / named.cv**2
    scale = named.rate_per_s * shape
    ordered = np.sort(gaps_s)
    below = gamma_cdf(np.maximum(ordered - resolution_s, 0) * scale, shape)
    above = gamma_cdf((ordered + resolution_s) * scale, shape)
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
    figures = zip(("p50", "p90", "p99", "max"), np.percentile(late_ns, [50, 90, 99, 100]), strict=True)
    return SendLateness(**{name: rounded(float(late) / NS_PER_S) for name, late in figures})
