"""Checks whether the throughput, the latency and the number of requests in flight of a run agree with Little's law.

The law L = lambda * W applies to any system (Little, "A proof for the queuing formula L = lambda W", 1961). L is the
mean number of requests in flight, lambda is the throughput, and W is the mean latency. A run measures all three
independently. If lambda * W differs from L, the throughput and the latency cover different requests. For example, a
window may contain the end of a stall, but not the requests that waited during the stall.

Over a whole run, the law is exact if L counts only complete requests. Incomplete requests in flight are counted
separately.

In a shorter window, the law holds only approximately. About L requests are in flight at each end of the window. Each of
these requests is partly inside the window and partly outside:

- In lambda * W, the request counts with its full latency if it ends inside the window, and not at all otherwise. The
  mean latency is E[W].
- In L, the request counts with the part of its latency that is inside the window. At a random instant, the mean
  remaining latency of the requests in flight is E[W^2] / (2 E[W]).

A request at an end of the window therefore adds between 0 and E[W] to lambda * W, and about E[W^2] / (2 E[W]) to L. The
tolerance allows for both values, for all requests at the two ends. It also allows for 10% of L, and for the latency
W_max of the slowest request. If T is the length of the window, the tolerance is

    0.1 L + 2 (L (E[W] + E[W^2] / (2 E[W])) + W_max) / T.

W_max allows for random differences, which matter if few requests are in flight. For a whole run, the tolerance is only
the first term.
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
    """Compare the mean number of requests in flight with the product of the throughput and the mean E2E latency.

    By Little's law, the two numbers are about equal. Return None if no complete request was due inside the measurement
    window.
    """
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
    in_flight = max(expected, complete + incomplete)
    tolerance = MIN_SHARE * in_flight
    if not frame.whole:
        remaining = float(np.square(e2e).mean()) / (2 * mean) if mean else 0.0
        tolerance += 2 * (in_flight * (mean + remaining) + float(e2e.max())) / length
    return LittlesLaw(
        in_flight=_rounded(complete + incomplete),
        expected=_rounded(expected),
        incomplete=_rounded(incomplete),
        tolerance=_rounded(tolerance),
    )


def _time_inside(begins: Floats, ends: Floats, rows: Booleans, span: tuple[float, float]) -> float:
    """Return the total time in ns that the requests selected by the mask `rows` spent in the window `span`.

    Request i lasts from `begins[i]` to `ends[i]`.
    """
    return float(np.nansum(np.clip(ends[rows], *span) - np.clip(begins[rows], *span)))


def _stopped(frame: Frame) -> Booleans:
    """Return a mask of the requests that ended because the run was stopped, and not because of the server."""
    stopped = np.array([outcome.kind == STOPPED for outcome in frame.outcomes] or [False], np.bool_)
    return stopped[frame.outcome_index]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
