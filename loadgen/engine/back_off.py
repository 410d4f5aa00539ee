"""The back-off of a closed loop: a client waits before its next request if its last request failed immediately.

    a request fails immediately   ──> its client waits; the first such client starts a pause of 0.1 s
    the pause is over             ──> the client that has waited longest sends its next request (a try)
    the try fails immediately     ──> the next pause is twice as long: 0.2 s, 0.4 s, 0.8 s, then always 1 s
    the try does not fail         ──> the next client sends at once, and the pauses shrink: 50 ms, 25 ms, 12.5 ms ...
    the pause is below 1 ms       ──> all waiting clients send their next requests

During an outage, only one request per client and a few tries fail, however many clients there are. The loop is back at
full load within two seconds after the server is available again. Clients whose requests do not fail never wait.
"""

from __future__ import annotations

from collections import deque

AT_ONCE_NS = 1_000_000_000
"""A request counts as failed immediately if it was refused within this time in ns after it was due."""
FIRST_PAUSE_NS = 100_000_000
"""Length in ns of the pause before the first retry."""
MIN_PAUSE_NS = 1_000_000
"""When the pause is shorter than this time in ns, every waiting client continues."""
MAX_PAUSE_NS = 1_000_000_000
"""Length in ns of the longest pause."""
GIVE_UP_NS = 60_000_000_000
"""If every request has failed immediately for this time in ns, the server counts as down.

A run with a fixed number of requests then sends no more requests.
"""
TOO_MANY_REQUESTS, FIRST_SERVER_ERROR = 429, 500


def was_refused(error_kind: str, http_status: int | None) -> bool:
    """Return True if a request was refused, so that another request sent now would probably fail too.

    A request was refused if its connection could not be opened or was closed before the first byte of the response, or
    if the HTTP status is 429 or 5xx.
    """
    if http_status is None:
        return error_kind in ("connect", "client_limit")
    return http_status == TOO_MANY_REQUESTS or http_status >= FIRST_SERVER_ERROR


class BackOff:
    """Decides how long clients of a closed loop pause after a request that failed immediately.

    All times are in ns from the run's start.
    """

    def __init__(self) -> None:
        self.next_try_ns = 0
        """Time at which the client that has waited longest may send again."""
        self._waiting_since = deque[int]()
        self._pause_ns = FIRST_PAUSE_NS
        self._tries_under_way = 0
        self._failing_since_ns: int | None = None

    @property
    def waiting(self) -> int:
        """Return the number of clients that are waiting before their next request."""
        return len(self._waiting_since)

    def failed(self, now_ns: int, *, was_retry: bool) -> None:
        """Let a client pause, because its request failed within AT_ONCE_NS (1 s) after it was due.

        `now_ns` is the time of the failure. `was_retry` is True if the client had also paused before this request. In
        this case, the next pause is longer.
        """
        if self._failing_since_ns is None:
            self._failing_since_ns = now_ns
        if was_retry:
            self._tries_under_way -= 1
            self._pause_ns = min(MAX_PAUSE_NS, 4 * self._pause_ns)  # double: `take` has halved it
            self.next_try_ns = now_ns + self._pause_ns
        elif not self._waiting_since and not self._tries_under_way:
            self._pause_ns = FIRST_PAUSE_NS
            self.next_try_ns = now_ns + self._pause_ns
        self._waiting_since.append(now_ns)

    def went_on(self, now_ns: int, *, was_retry: bool) -> None:
        """Note that a client sends its next request without a pause, because its last request did not fail immediately.

        A request fails immediately if the server refuses it within AT_ONCE_NS (1 s) after it was due.

        `now_ns` is the current time. `was_retry` is True if the client had paused before its last request. The server
        then accepts requests again, so the client that has waited longest may also send at once.
        """
        self._failing_since_ns = None
        if was_retry:
            self._tries_under_way -= 1
            self._pause_ns = min(self._pause_ns, FIRST_PAUSE_NS)
            self.next_try_ns = now_ns

    def take(self, now_ns: int) -> list[int]:
        """Let waiting clients of a closed loop send again, if the current pause is over.

        Return how long each of these clients has waited, in ns. The list is empty if the pause is not over, or if no
        client waits.

        The method halves the pause, and lets one client send: the client that has waited longest. If the halved pause
        is shorter than MIN_PAUSE_NS, the method lets all waiting clients send.
        """
        if not self._waiting_since or now_ns < self.next_try_ns:
            return []
        self._pause_ns //= 2
        count = 1 if self._pause_ns >= MIN_PAUSE_NS else len(self._waiting_since)
        self._tries_under_way += count
        self.next_try_ns = now_ns + self._pause_ns
        return [now_ns - self._waiting_since.popleft() for _ in range(count)]

    def gives_up(self, now_ns: int) -> bool:
        """Return True if the server counts as down.

        It counts as down if every request of the last GIVE_UP_NS (60 s) failed immediately.
        """
        return self._failing_since_ns is not None and now_ns - self._failing_since_ns >= GIVE_UP_NS

    def clear(self) -> None:
        """Remove all waiting clients, because no more requests will be sent."""
        self._waiting_since.clear()
