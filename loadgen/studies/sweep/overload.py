"""Detects during a run that the server cannot keep up with the load, so that the run can be ended early."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from loadgen.engine.client_health import LiveCounters
    from loadgen.engine.prepare import OnProgress

MIN_BACKLOG = 50
"""Minimum number of unfinished requests that count as a backlog, and of rejections that count as an overload."""
REJECTED_FRACTION = 0.1
"""A larger fraction of rejected requests is an overload. The value is far above the 1 % at which a completed step
fails."""
MIN_OVERLOAD_S = 10.0
"""Minimum duration of a run in s before an overload is reported, because servers and clients can stall briefly."""


class BacklogRule(NamedTuple):
    """A rule for the minimum fraction of requests that must have ended.

    The server cannot keep up if `ended < min_fraction * sent`, where both numbers count the second half of the run so
    far. The rule applies once the run has lasted `first_latencies` times as long as the latency of the first response.
    Before that time, the throughput of the server may still be rising.
    """

    first_latencies: float
    min_fraction: float


SETTLED = BacklogRule(10, 0.7)
CLEAR = BacklogRule(3, 0.2)


class BacklogSample(NamedTuple):
    """The numbers of requests that had been sent and that had ended at the time `at_s`."""

    at_s: float
    sent: int
    ended: int


class OverloadDetector:
    """A progress callback that ends a step early if the server clearly cannot keep up or rejects many requests.

    Backlogs are detected only if `watch_backlog` is set. It is set for steps at a given rate, because a closed loop
    cannot build up a backlog.
    """

    def __init__(
        self,
        show: OnProgress,
        *,
        watch_backlog: bool,
        deadline_s: float | None = None,
        rejections_allowed: bool = False,
    ) -> None:
        self._show = show
        self._watch_backlog = watch_backlog
        self._deadline_s = deadline_s
        self._rejections_allowed = rejections_allowed
        self._history: deque[BacklogSample] = deque()
        """Samples of the second half of the run so far, after the last sample of the first half."""
        self._began_s = 0.0
        self._first_response_s = 0.0
        self._sent = 0
        self._last_sent_s = 0.0
        """Time at which `_sent` last grew."""
        self.overloaded = False
        """True if the step was ended because of an overload."""
        self.late = False
        """True if the step was ended because the deadline had passed."""

    def __call__(self, phase: str, counts: LiveCounters) -> str | None:
        """Show the progress. Return the reason why the run must end now, or None if it may continue."""
        self._show(phase, counts)
        if phase != "running":
            return None
        now_s = time.monotonic()
        if self._watch_backlog and counts.sent and self._has_backlog(now_s, counts):
            self.overloaded = True
            return "stopped early: the server did not keep up with this load"
        if not self._rejections_allowed and self._rejects(now_s, counts):
            self.overloaded = True
            return f"stopped early: the server rejected {counts.rejected:,} of {counts.sent:,} requests"
        if self._deadline_s is not None and now_s > self._deadline_s:
            self.late = True
            return "stopped: --max-time was reached"
        return None

    def _rejects(self, now_s: float, counts: LiveCounters) -> bool:
        """Return True if the number of rejected requests shows an overload.

        This requires a run of at least MIN_OVERLOAD_S with at least MIN_BACKLOG rejections, which must be more than
        REJECTED_FRACTION of the requests sent.
        """
        self._began_s = self._began_s or now_s
        enough = counts.rejected >= MIN_BACKLOG and counts.rejected > REJECTED_FRACTION * counts.sent
        return enough and now_s - self._began_s >= MIN_OVERLOAD_S

    def _has_backlog(self, now_s: float, counts: LiveCounters) -> bool:
        """Return True if far fewer requests have ended than were sent."""
        sent = counts.sent
        ended = counts.complete + counts.truncated + counts.failed + counts.rejected
        self._began_s = self._began_s or now_s
        if ended and not self._first_response_s:
            self._first_response_s = now_s
        if sent > self._sent:
            self._sent = sent
            self._last_sent_s = now_s
        half_s = (self._began_s + now_s) / 2
        self._history.append(BacklogSample(now_s, sent, ended))
        while len(self._history) > 1 and self._history[1].at_s <= half_s:
            self._history.popleft()
        elapsed_s = now_s - self._began_s
        if elapsed_s < MIN_OVERLOAD_S:
            return False
        first_latency_s = self._first_response_s - self._began_s
        first_latencies = elapsed_s / first_latency_s if first_latency_s > 0 else 0.0
        if half_s > self._last_sent_s:
            # Everything has been sent, and waiting for the rest already takes longer than sending took.
            return first_latencies > CLEAR.first_latencies and sent - ended >= MIN_BACKLOG
        half = self._history[0]
        recently_sent = sent - half.sent
        recently_ended = ended - half.ended
        min_fraction = 0.0
        for rule in (CLEAR, SETTLED):
            if first_latencies > rule.first_latencies:
                min_fraction = rule.min_fraction
        min_ended = min_fraction * recently_sent
        # Three standard deviations of a Poisson count, so that chance does not end a run.
        return recently_sent >= MIN_BACKLOG and recently_ended < min_ended - 3 * min_ended**0.5
