"""The schedule of a run, its requests, and the request queue of an open loop.

An open loop follows the due times of the plan. Queues that depend on responses are in loadgen.engine.closed_loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from loadgen.workloads.cancellation import Cancellation
from loadgen.workloads.request import Request
from loadgen.workloads.sessions import Session

if TYPE_CHECKING:
    from loadgen.engine.session_progress import SessionProgress
    from loadgen.servers.backends.dialect import Dialect
    from loadgen.servers.wire.transport import Exchange


class Schedule(msgspec.Struct, frozen=True):
    """The schedule of a run, or of one worker: due times, number of requests, and maximum number in flight."""

    due_ns: Sequence[int] | None
    """In an open loop: the time in ns from the run's start at which each request or session is due, in order. None in a
    closed loop."""
    count: int | None
    """Total number of requests or sessions. None for a closed loop that only its duration ends."""
    clients: int
    """In a closed loop: the number of concurrent clients."""
    think_ns: int
    """In a closed loop: the time in ns between the end of a request and the client's next request."""
    until_ns: int | None
    """In a closed loop: the time in ns from the run's start after which no request becomes due."""
    in_flight: int
    """Maximum number of requests in flight. Further requests are dropped, or wait if `queues` is True."""
    spare: int
    """Number of connections to open in advance."""
    queues: bool = False
    """True if requests beyond `in_flight` wait until another request has ended. They keep their due times."""

    @property
    def at_once(self) -> int:
        """Return the number of requests that are certainly in flight at the same time.

        - In a closed loop: the number of clients.
        - In an open loop whose requests are all due at the same time: the number of requests. If `queues` is True, the
          result is at most `in_flight`.
        - In any other open loop: 1.
        """
        if self.due_ns is None:
            return self.clients
        due_together = len(self.due_ns) if self.due_ns and self.due_ns[0] == self.due_ns[-1] else 1
        return min(due_together, self.in_flight) if self.queues else due_together

    def share_for(self, worker: int, workers: int) -> Schedule:
        """Return one worker's share of the schedule. Requests are assigned to the workers in turn."""

        def part(total: int) -> int:
            return total // workers + (worker < total % workers)

        return replace(
            self,
            due_ns=None if self.due_ns is None else self.due_ns[worker::workers],
            count=None if self.count is None else part(self.count),
            clients=part(self.clients),
            in_flight=part(self.in_flight),
            spare=part(self.spare),
        )


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One request of a run with its due time, its encoded bytes and its connection. Requests compare by identity."""

    request: Request
    payload: bytes
    due_ns: int
    """Due time in ns from the start of the run. In a closed loop it is set when the request becomes due."""
    exchange: Exchange | None = None
    connected_ns: int | None = None
    reused: bool = False
    """True if the connection had carried another request before."""
    reopened: int = 0
    """Number of times that the connection was replaced before the request was sent."""
    first_sent_ns: int | None = None
    """Time of the first send (CLOCK_MONOTONIC), if the request had to be sent again."""
    released_ns: int | None = None
    """Time in ns from the start of the run at which the end of another request allowed this request to be sent. None if
    the request did not have to wait."""
    is_retry: bool = False
    """True if the closed-loop client had waited because its previous request had failed immediately."""
    awaited: bool = False
    """True if the closed-loop client continues only after this request has been recorded."""
    conversation: Session | None = None
    """The session to which this request belongs. None for a single request."""
    progress: SessionProgress | None = None
    """The progress of the session if the session is a graph. None for a request of any other workload."""
    node: int = 0
    """Index of the request's node in the graph of its session."""
    starts_others: bool = False
    """True if another request of the session waits for the start of this request."""
    dialect: Dialect | None = None
    """The dialect of the request if it differs from the dialect of the run."""
    cancellation: Cancellation | None = None
    """When the request is abandoned. None: never."""
    replica: int | None = 0
    """Index of the replica that the request goes to. None: the driver chooses it (`--balance least-busy`)."""
    counted: bool = False
    """True while the request counts as in flight on its replica (loadgen.engine.balance.InFlightTable)."""
    not_encoded: str = ""
    """Reason why the request could not be encoded. Empty if `payload` holds its bytes."""

    def closed_by_peer(self) -> bool:
        """Return True if the server has closed the request's connection."""
        connection = self.exchange.connection if self.exchange is not None else None
        return connection is not None and connection.closed_by_peer()

    def close(self) -> None:
        """Close the request's connection, if it has one."""
        if self.exchange is not None and self.exchange.connection is not None:
            self.exchange.connection.close()
        self.exchange = None

    @property
    def is_last_turn(self) -> bool:
        """Return True if no further turn follows in the session, or if the request belongs to no session."""
        if self.progress is not None:
            return self.progress.unfinished <= 1
        return self.request.turn + 1 >= self.turns

    @property
    def turns(self) -> int:
        """Number of requests that are counted as due when this request becomes due.

        This number is 1 for a request without a session. For the first request of a session, it is the number of
        requests in the session, because all of them are counted when the session starts.
        """
        if self.progress is not None:
            return len(self.progress.graph.nodes)
        return 1 if self.conversation is None else len(self.conversation.turns)

    @property
    def in_session(self) -> bool:
        """Return True if the request belongs to a session."""
        return self.conversation is not None or self.progress is not None


class OpenLoop:
    """The request queue of an open loop: all requests in the order of their due times.

    Requests with the same due time are sent together.
    """

    closed = False
    timed = False

    def __init__(self, slots: Iterator[ScheduledRequest]) -> None:
        self._slots = slots
        self._next = next(slots, None)
        self._drawn: list[ScheduledRequest] = []

    def group(self) -> list[ScheduledRequest]:
        """Return the requests with the next due time, or an empty list if no request is left."""
        while self.draw():
            pass
        group, self._drawn = self._drawn, []
        return group

    def draw(self) -> bool:
        """Build one request of the next group in advance. A group consists of all requests with the same due time.

        Return True if a request was built. Return False if all requests of the group are already built.
        """
        slot = self._next
        if slot is None or (self._drawn and slot.due_ns != self._drawn[0].due_ns):
            return False
        self._drawn.append(slot)
        self._next = next(self._slots, None)
        return True

    def next_after_completion(self, ended_ns: int) -> ScheduledRequest | None:  # noqa: ARG002 - ends do not matter here
        """Return None. In an open loop, the end of a request does not make another request due."""
        return None

    @property
    def more(self) -> bool:
        """Return True while there are requests left to send."""
        return self._next is not None or bool(self._drawn)
