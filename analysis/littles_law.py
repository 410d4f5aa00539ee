"""Little's law as a check of the report against itself.

In any system the mean number in flight is the throughput times the mean time in flight (Little, "A proof for the
queuing formula L = lambda W", 1961). All three figures are known here independently. When throughput and latency are of
different requests, for example because a window holds the end of a stall and not the requests that waited in it, their
product differs from the number in flight that was measured.

The law is exact when every request begins and ends inside the window. Over a whole run the product therefore equals the
number of complete requests in flight, and what is left over belongs to requests that did not complete. At each end of a
shorter window about L requests are cut: they began before it or end after it. A cut request counts as a whole in the
product (W on average) and by its part inside the window in the measured number. Seen from a random instant, the rest of
a request lasts E[W^2] / 2 E[W] on average. So each end may shift the sum of times by L times both of these, and by one
request as slow as the slowest inside, which allows for chance where few are in flight.
"""

from __future__ import annotations

import numpy as np

from loadgen.analysis.frame import Booleans, Floats, Frame
from loadgen.analysis.summary import LittlesLaw

SHARE = 0.1
"""Differences below this share of the number in flight are no contradiction: they change no conclusion."""
STOPPED = "cancelled"
"""Kind of error of a request that ended because the run was stopped."""


def check(frame: Frame) -> LittlesLaw | None:
    """Compare throughput times mean E2E with the number in flight; None where no complete request was due inside."""
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
    tolerance = SHARE * level
    if not frame.whole:
        rest = float(np.square(e2e).mean()) / (2 * mean) if mean else 0.0
        tolerance += 2 * (level * (mean + rest) + float(e2e.max())) / length
    return LittlesLaw(
        in_flight=_short(complete + incomplete),
        expected=_short(expected),
        incomplete=_short(incomplete),
        tolerance=_short(tolerance),
    )


def _time_inside(begins: Floats, ends: Floats, rows: Booleans, span: tuple[float, float]) -> float:
    """The sum over rows of the time between two instants, as far as it lies in the window, in ns."""
    return float(np.nansum(np.clip(ends[rows], *span) - np.clip(begins[rows], *span)))


def _stopped(frame: Frame) -> Booleans:
    """Which requests ended because the run was stopped, which is not the server's doing."""
    stopped = np.array([ending.kind == STOPPED for ending in frame.outcomes] or [False], np.bool_)
    return stopped[frame.outcome_index]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
