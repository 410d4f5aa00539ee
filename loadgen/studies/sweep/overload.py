"""Ends a step of a sweep early, as soon as it is clear whether the server can handle the load.

A step also ends early if the server refuses every request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from loadgen.analysis.sweep.queue_growth import GrowthTest
    from loadgen.engine.client_health import LiveCounters
    from loadgen.engine.prepare import OnProgress

MIN_BACKLOG = 50
"""Minimum number of unfinished requests that count as a backlog, and of rejections that count as an overload."""
REJECTED_FRACTION = 0.1
"""A larger fraction of rejected requests is an overload. The value is far above the 1% at which a completed step
fails."""
MIN_OVERLOAD_S = 10.0
"""Minimum duration of a run in s before an overload is reported, because servers and clients can stall briefly."""


MIN_REFUSED = 3
"""Minimum number of refused requests before the server is considered to refuse every request."""
MIN_REFUSED_S = 0.5
"""Minimum duration of a run in s before the server is considered to refuse every request."""


class StepSettings(NamedTuple):
    """Settings of one step that depend on its load."""

    duration_s: float | None = None
    """Duration of the step, or None for that of the plan."""
    growth: GrowthTest | None = None
    """Test that detects whether the server's queue grows. None if the sweep has no pilot."""
    decides: bool = False
    """True if `growth` alone decides the step, because the sweep has no objectives."""


DEFAULTS = StepSettings()


class BacklogRule(NamedTuple):
    """A rule that detects a server that cannot keep up with the load.

    The rule looks at the second half of the run so far. In this half, `sent` requests were sent, and `ended` requests
    ended. The server cannot keep up if `ended < min_fraction * sent`.

    The rule applies only if the run is longer than `first_latencies` times the latency of the first response. Before
    that time, the throughput of the server may still be rising.
    """

    first_latencies: float
    min_fraction: float


SETTLED = BacklogRule(10, 0.7)
CLEAR = BacklogRule(3, 0.2)


class BacklogSample(NamedTuple):
    """The number of requests sent and the number of requests ended, from the start of a run to the time `at_s`."""

    at_s: float
    sent: int
    ended: int


class OverloadDetector:
    """A progress callback that ends a step of a sweep early.

    A step ends early in these cases:

    - The server's queue clearly grows. This is checked only if the settings contain a test for it (`growth`).
    - The backlog of unfinished requests grows. This is checked only with `watch_backlog`, which is for steps at a given
      rate. A closed loop cannot build up a backlog.
    - The server rejects many requests. This is not checked with `rejections_allowed`.
    - The server refuses every request.
    - The deadline of the sweep (`deadline_s`) has passed.

    If the sweep has no objectives, a step also ends when the server clearly keeps up, or when the time of the step is
    over.
    """

    def __init__(
        self,
        show: OnProgress,
        *,
        watch_backlog: bool,
        deadline_s: float | None = None,
        rejections_allowed: bool = False,
        settings: StepSettings = DEFAULTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show = show
        self.settings = settings
        self._clock = clock
        self._watch_backlog = watch_backlog
        self._deadline_s = deadline_s
        self._rejections_allowed = rejections_allowed
        self._reason: str | None = None
        """Reason why the run must end."""
        self._history: deque[BacklogSample] = deque()
        """Samples of the second half of the run so far, after the last sample of the first half."""
        self._began_s: float | None = None
        self._first_response_s = 0.0
        self._sent = 0
        self._last_sent_s = 0.0
        """Time at which `_sent` last grew."""
        self.overloaded = False
        """True if the step was ended because of an overload."""
        self.late = False
        """True if the step was ended because the deadline had passed."""
        self.decided = False
        """True if the step was ended because the server keeps up, or because the time of the step was over."""
        self.refused = False
        """True if the step was ended because the server refused every request."""

    def __call__(self, phase: str, counts: LiveCounters) -> str | None:
        """Pass the arguments on to the progress display. Return the reason why the run must end now, or None."""
        self._show(phase, counts)
        if phase != "running":
            return None
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
        if self._reason is None:
            self._reason = self._stop_reason(now_s, now_s - self._began_s, counts)
        if self._reason is None and self._deadline_s is not None and time.monotonic() > self._deadline_s:
            self.late = True
            self._reason = "stopped: --max-time was reached"
        return self._reason

    def _stop_reason(self, now_s: float, elapsed_s: float, counts: LiveCounters) -> str | None:
        """Return the reason why the run must end now, or None if it may continue.

        Also set the attribute `refused`, `overloaded` or `decided` to True, depending on the reason.
        """
        if self._refuses_all(elapsed_s, counts):
            self.refused = True
            return "stopped early: the server refused every request"
        growth = self.settings.growth
        if growth is not None and counts.sent:
            verdict = growth.add(elapsed_s, counts.sent, _ended(counts))
            self.overloaded = verdict == "grows"
        elif self._watch_backlog and counts.sent:
            self.overloaded = self._has_backlog(now_s, elapsed_s, counts)
        if self.overloaded:
            return "stopped early: the server did not keep up with this load"
        if not self._rejections_allowed and self._rejects(elapsed_s, counts):
            self.overloaded = True
            return f"stopped early: the server rejected {counts.rejected:,} of {counts.sent:,} requests"
        if self.settings.decides and growth is not None:
            self.decided = growth.verdict == "steady" or self._time_is_over(elapsed_s)
            if self.decided:
                keeps_up = "the server keeps up with this load" if growth.verdict else "its time was over"
                return f"stopped early: {keeps_up}"
        return None

    def _time_is_over(self, elapsed_s: float) -> bool:
        duration_s = self.settings.duration_s
        return duration_s is not None and elapsed_s >= duration_s

    def _refuses_all(self, elapsed_s: float, counts: LiveCounters) -> bool:
        """Return True if every response so far is an error.

        This requires at least MIN_REFUSED responses and a run of at least MIN_REFUSED_S.
        """
        refused = counts.failed + counts.rejected
        answered = counts.complete + counts.truncated + counts.streaming
        return refused >= MIN_REFUSED and not answered and elapsed_s >= MIN_REFUSED_S

    def _rejects(self, elapsed_s: float, counts: LiveCounters) -> bool:
        """Return True if the number of rejected requests shows an overload.

        Three conditions must hold: the run has lasted at least MIN_OVERLOAD_S, the server has rejected at least
        MIN_BACKLOG requests, and these are more than the fraction REJECTED_FRACTION of the requests sent.
        """
        enough = counts.rejected >= MIN_BACKLOG and counts.rejected > REJECTED_FRACTION * counts.sent
        return enough and elapsed_s >= MIN_OVERLOAD_S

    def _has_backlog(self, now_s: float, elapsed_s: float, counts: LiveCounters) -> bool:
        """Return True if the number of unfinished requests shows that the server cannot keep up.

        `now_s` is the time on the detector's clock, and `elapsed_s` is the duration of the run so far.
        """
        sent = counts.sent
        ended = _ended(counts)
        if ended and not self._first_response_s:
            self._first_response_s = now_s
        if sent > self._sent:
            self._sent = sent
            self._last_sent_s = now_s
        began_s = now_s - elapsed_s
        half_s = began_s + elapsed_s / 2
        self._history.append(BacklogSample(now_s, sent, ended))
        while len(self._history) > 1 and self._history[1].at_s <= half_s:
            self._history.popleft()
        if elapsed_s < MIN_OVERLOAD_S:
            return False
        first_latency_s = self._first_response_s - began_s
        first_latencies = elapsed_s / first_latency_s if first_latency_s > 0 else 0.0
        if half_s > self._last_sent_s:
            # Every request has been sent, and waiting for the last responses already takes longer than sending took.
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


def _ended(counts: LiveCounters) -> int:
    """Return the number of sent requests that have ended."""
    return counts.complete + counts.truncated + counts.failed + counts.rejected
