"""Snapshots of a run in progress, and the history of these snapshots. Their figures are defined as in the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from loadgen.engine.client_health import LiveCounters

PREPARING = ("building prompts", "connecting")
"""Phases of a run before its first request is sent."""
OVER = ("compressing", "ended")
"""Phases of a run after its last request has ended."""
MAX_SNAPSHOTS = 2_400
"""Maximum number of snapshots in the history of a page: ten minutes at four per second."""
INTERVAL_S = 0.25
"""Time between two snapshots of a history that has not been thinned."""


class LiveSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at one instant, as live displays show it.

    Latencies are in seconds. They are percentiles over all requests so far, or None if no request has such a latency
    yet. The fields about the server, such as `server_running`, are None if they are not measured.
    """

    elapsed_s: float
    """Time since the command began to prepare the run."""
    running_s: float = 0.0
    """Time since the run started to connect to the server and to send requests."""
    phase: str
    planned: int | None = None
    """Number of requests of the run, or None if another limit ends the run."""
    duration_s: float | None = None
    """Planned duration of the run, or None if another limit ends the run."""
    done: float | None = None
    """Completed share of the run from 0 to 1, or None if the end of the run is unknown."""
    prepared: int = 0
    """Number of requests whose prompts have been built."""
    sent: int = 0
    streaming: int = 0
    """Number of requests in flight whose response has begun to arrive."""
    complete: int = 0
    truncated: int = 0
    failed: int = 0
    rejected: int = 0
    dropped: int = 0
    abandoned: int = 0
    tokens_per_s: float = 0.0
    """Tokens per second in the last seconds. After the last request, the mean of the run."""
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p99_s: float | None = None
    ttfa_p50_s: float | None = None
    ttfa_p99_s: float | None = None
    server_running: int | None = None
    """Number of requests that the server processes, according to its metrics."""
    server_waiting: int | None = None
    """Number of requests in the server's queue, according to its metrics."""
    kv_used: float | None = None
    """Used share of the server's KV cache, from 0 to 1."""
    unwritten_bytes: int = 0
    """Size of the Records that wait in memory because they could not be written to disk."""

    @property
    def ended(self) -> int:
        """Return the number of requests that have ended: complete, incomplete and abandoned requests."""
        return self.complete + self.incomplete + self.abandoned

    @property
    def incomplete(self) -> int:
        """Return the number of requests that have ended without a complete response."""
        return self.truncated + self.failed + self.rejected + self.dropped

    @property
    def in_flight(self) -> int:
        """Return the number of requests that were sent and have not ended."""
        return max(0, self.sent + self.dropped - self.ended)

    @property
    def incomplete_text(self) -> str:
        """Return the numbers of incomplete requests by outcome, such as `2 failed, 1 dropped`, or an empty text."""
        states = ("failed", "truncated", "rejected", "dropped")
        return ", ".join(f"{getattr(self, state):,} {state}" for state in states if getattr(self, state))

    @property
    def remaining_text(self) -> str:
        """Return the remaining work, such as `1:20 left` or `512 of 1,000 left`."""
        if self.duration_s is not None and self.running_s < self.duration_s:
            minutes, seconds = divmod(math.ceil(self.duration_s - self.running_s), 60)
            return f"{minutes}:{seconds:02} left"
        if self.planned is not None and self.duration_s is None:
            return f"{self.planned - self.ended:,} of {self.planned:,} left"
        return f"{self.in_flight:,} in flight"


class PlannedEnd(NamedTuple):
    """The limits that end a run. A field is None if the limit is unknown or does not exist."""

    requests: int | None = None
    duration_s: float | None = None
    tokens: int | None = None
    """Number of output tokens of all requests together."""

    def done(self, snapshot: LiveSnapshot, tokens: int) -> float | None:
        """Return the completed share of the run from 0 to 1, or None if it is unknown.

        If a duration ends the run, return the share of the duration that has passed, or None when the duration is over.
        If a number of requests ends the run, return one of two shares, whichever is larger: the share of requests that
        have ended, and the share of tokens that have arrived. In a burst all requests end at about the same time, so
        the tokens show the progress better. `tokens` is the number of tokens that have arrived.
        """
        if self.duration_s is not None:
            return snapshot.running_s / self.duration_s if snapshot.running_s < self.duration_s else None
        if not self.requests:
            return None
        of_tokens = tokens / self.tokens if self.tokens else 0.0
        return min(1.0, max(snapshot.ended / self.requests, of_tokens))


class SnapshotTaker:
    """Takes snapshots of one run from its live counters. `clock` returns the time in s, such as time.monotonic."""

    def __init__(self, end: PlannedEnd, clock: Callable[[], float]) -> None:
        self.end = end
        self._clock = clock
        self._started_s = clock()
        self._running_s: float | None = None

    def take(self, phase: str, counts: LiveCounters) -> LiveSnapshot:
        """Return a snapshot of the run at this instant, from its phase and its live counters."""
        now_s = self._clock()
        if self._running_s is None and phase not in PREPARING:
            self._running_s = now_s
        ttft_p50_s, ttft_p99_s = counts.ttft.percentiles_s(0.5, 0.99) or (None, None)
        tpot_p50_s, tpot_p99_s = counts.tpot.percentiles_s(0.5, 0.99) or (None, None)
        ttfa_p50_s, ttfa_p99_s = counts.ttfa.percentiles_s(0.5, 0.99) or (None, None)
        snapshot = LiveSnapshot(
            elapsed_s=now_s - self._started_s,
            running_s=0.0 if self._running_s is None else now_s - self._running_s,
            phase=phase,
            planned=self.end.requests,
            duration_s=self.end.duration_s,
            prepared=counts.prepared,
            sent=counts.sent,
            streaming=counts.streaming,
            complete=counts.complete,
            truncated=counts.truncated,
            failed=counts.failed,
            rejected=counts.rejected,
            dropped=counts.dropped,
            abandoned=counts.abandoned,
            tokens_per_s=counts.mean_tokens_per_s if phase in OVER else counts.tokens_per_s,
            ttft_p50_s=ttft_p50_s,
            ttft_p99_s=ttft_p99_s,
            tpot_p50_s=tpot_p50_s,
            tpot_p99_s=tpot_p99_s,
            ttfa_p50_s=ttfa_p50_s,
            ttfa_p99_s=ttfa_p99_s,
            server_running=_whole(counts.server_running),
            server_waiting=_whole(counts.server_waiting),
            kv_used=None if math.isnan(counts.kv_used) else counts.kv_used,
            unwritten_bytes=counts.unwritten_bytes,
        )
        # The counters of the workers are read one after the other, so a stream may have ended meanwhile.
        streaming = min(snapshot.streaming, snapshot.in_flight)
        return msgspec.structs.replace(snapshot, streaming=streaming, done=self.end.done(snapshot, counts.tokens))


def _whole(value: float) -> int | None:
    """Round a figure of the server to a whole number. Return None if the figure is NaN."""
    return None if math.isnan(value) else round(value)


class History:
    """Snapshots of a run at regular intervals, at most `limit` of them.

    If a snapshot is added to a full history, every second stored snapshot is removed first. From then on, snapshots are
    added at twice the previous interval.
    """

    def __init__(self, limit: int = MAX_SNAPSHOTS) -> None:
        self._limit = limit
        self.snapshots: list[LiveSnapshot] = []
        self._interval_s = INTERVAL_S

    def add(self, snapshot: LiveSnapshot) -> bool:
        """Add a snapshot if it is due. Return True if it was added. The last snapshot of a run is always added."""
        # The caller has its own rhythm, so a snapshot that comes slightly early counts as due.
        due_s = self.snapshots[-1].elapsed_s + 0.9 * self._interval_s if self.snapshots else 0.0
        if snapshot.elapsed_s < due_s and snapshot.phase != "ended":
            return False
        if len(self.snapshots) >= self._limit:
            del self.snapshots[1::2]
            self._interval_s *= 2
        self.snapshots.append(snapshot)
        return True
