"""The back-off of a closed loop, whose clients wait when their requests fail at once.

    a request fails at once ──> its client waits
    the pause is over       ──> the client that has waited longest tries again
    the try fails at once   ──> the next pause is twice as long: 0.1 s, 0.2 s, 0.4 s, 0.8 s, then 1 s
    it does not             ──> the next pause is half as long, and so on until every client is back

So an outage costs one request per client and a few tries, however many clients there are, and the loop is back within
two seconds after the server. Clients whose requests do not fail never wait.
"""

from __future__ import annotations

from collections import deque

AT_ONCE_NS = 1_000_000_000
"""A request that fails later than this after it was due has not failed at once."""
FIRST_PAUSE_NS = 100_000_000
"""The pause before the first retry."""
MIN_PAUSE_NS = 1_000_000
"""When the pause falls below this, every waiting client continues."""
MAX_PAUSE_NS = 1_000_000_000
"""The longest pause."""
GIVE_UP_NS = 60_000_000_000
"""If every request has failed at once for this long, a run with a fixed number of requests does not send the rest."""
TOO_MANY_REQUESTS, FIRST_SERVER_ERROR = 429, 500


def was_refused(error_kind: str, http_status: int | None) -> bool:
    """Return whether a request failed so that the next one would too: no connection, no byte of a response, status 429
    or 5xx."""
    if http_status is None:
        return error_kind in ("connect", "client_limit")
    return http_status == TOO_MANY_REQUESTS or http_status >= FIRST_SERVER_ERROR


class BackOff:
    """Decides when the waiting clients of one worker's closed loop try again. Instants are in ns, on one clock."""

    def __init__(self) -> None:
        self.next_try_ns = 0
        """When the client that has waited longest may try again."""
        self._waiting_since = deque[int]()
        self._pause_ns = FIRST_PAUSE_NS
        self._tries_under_way = 0
        self._failing_since_ns: int | None = None

    @property
    def waiting(self) -> int:
        """The number of clients that wait."""
        return len(self._waiting_since)

    def failed(self, now_ns: int, *, was_retry: bool) -> None:
        """Let the client of a request that failed at once wait. `was_retry` says that the client had waited before."""
        if self._failing_since_ns is None:
            self._failing_since_ns = now_ns
        if was_retry:
            self._tries_under_way -= 1
            self._pause_ns = min(MAX_PAUSE_NS, 4 * self._pause_ns)  # `take` has halved it: double the old value
            self.next_try_ns = now_ns + self._pause_ns
        elif not self._waiting_since and not self._tries_under_way:
            self._pause_ns = FIRST_PAUSE_NS
            self.next_try_ns = now_ns + self._pause_ns
        self._waiting_since.append(now_ns)

    def went_on(self, now_ns: int, *, was_retry: bool) -> None:
        """Note that a request has ended and did not fail at once."""
        self._failing_since_ns = None
        if was_retry:
            self._tries_under_way -= 1
            self._pause_ns = min(self._pause_ns, FIRST_PAUSE_NS)
            self.next_try_ns = now_ns

    def take(self, now_ns: int) -> list[int]:
        """Return how long each client that tries now has waited, in ns. An empty list means that it is too early."""
        if not self._waiting_since or now_ns < self.next_try_ns:
            return []
        self._pause_ns //= 2
        count = 1 if self._pause_ns >= MIN_PAUSE_NS else len(self._waiting_since)
        self._tries_under_way += count
        self.next_try_ns = now_ns + self._pause_ns
        return [now_ns - self._waiting_since.popleft() for _ in range(count)]

    def gives_up(self, now_ns: int) -> bool:
        """Return True if every request has failed at once for GIVE_UP_NS, so that the server counts as gone."""
        return self._failing_since_ns is not None and now_ns - self._failing_since_ns >= GIVE_UP_NS

    def clear(self) -> None:
        """Let no client wait any more, because nothing more will be sent."""
        self._waiting_since.clear()
