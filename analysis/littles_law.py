"""Checks the report against itself with Little's law.

In any system the mean number in flight equals the throughput times the mean time in flight (Little, "A proof for the
queuing formula L = lambda W", 1961). All three figures are measured here independently. The product differs from the
measured number in flight if throughput and latency come from different requests. For example, a window may contain the
end of a stall, but not the requests that waited in it.

The law is exact if every request begins and ends inside the window. Over a whole run the product therefore equals the
number of complete requests in flight, and the rest belongs to requests that did not complete. A shorter window cuts
about L requests at each end: they began before it or end after it. A cut request counts fully in the product (W on
average), but only with its part inside the window in the measured number. Seen from a random instant, a request lasts
another E[W^2] / 2 E[W] on average. So each end may shift the sum of times by L times both of these. The tolerance adds
one request as slow as the slowest inside, to allow for chance where few requests are in flight.
"""

from __future__ import annotations

import numpy as np

from loadgen.analysis.frame import Booleans, Floats, Frame
from loadgen.analysis.summary import LittlesLaw

MIN_SHARE = 0.1
"""Differences below this share of the number in flight are tolerated, because they change no conclusion."""
STOPPED = "cancelled"
"""Error kind of a request that ended because the run was stopped."""


def check(frame: Frame) -> LittlesLaw | None:
    """Compare throughput times mean E2E with the number in flight; None if no complete request was due inside."""
    span = frame.span_ns
    e2e = (frame.last_ns - frame.sent_ns)[frame.sampled]
    e2e = e2e[~np.isnan(e2e)]
    if span is None or len(e2e) == 0:
        return None
    length = span[1] - span[0]
    mean = float(e2e.mean())
    expected = frame.completed_inside / length * mean
    complete = _time_inside(frame.sent_ns, frame.last_ns, frame.sent & frame.complete, span) / length
    failed = frame.sent & ~frame.complete & ~_stopped(frame)
    incomplete = _time_inside(frame.sent_ns, frame.end_ns, failed, span) / length
    level = max(expected, complete + incomplete)
    tolerance = MIN_SHARE * level
    if not frame.whole:
        remaining = float(np.square(e2e).mean()) / (2 * mean) if mean else 0.0
        tolerance += 2 * (level * (mean + remaining) + float(e2e.max())) / length
    return LittlesLaw(
        in_flight=_rounded(complete + incomplete),
        expected=_rounded(expected),
        incomplete=_rounded(incomplete),
        tolerance=_rounded(tolerance),
    )


def _time_inside(begins: Floats, ends: Floats, rows: Booleans, span: tuple[float, float]) -> float:
    """Return the total time in ns between two instants of each row, as far as it lies in the window."""
    return float(np.nansum(np.clip(ends[rows], *span) - np.clip(begins[rows], *span)))


def _stopped(frame: Frame) -> Booleans:
    """Return which requests ended because the run was stopped; the server did not cause that."""
    stopped = np.array([outcome.kind == STOPPED for outcome in frame.outcomes] or [False], np.bool_)
    return stopped[frame.outcome_index]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
