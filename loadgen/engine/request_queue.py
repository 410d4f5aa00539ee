"""The schedule of a run, its requests, and the queue of an open loop, which follows the plan's due instants.

Queues that depend on responses are in loadgen.engine.closed_loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from loadgen.workloads.request import Request
from loadgen.workloads.sessions import Conversation

if TYPE_CHECKING:
    from loadgen.servers.wire.transport import Exchange


class Schedule(msgspec.Struct, frozen=True):
    """The schedule of a run, or of one worker's share of it: when requests are due, how many, and how many at once."""

    due_ns: Sequence[int] | None
    """Open loop: the due offset of every request or session, in order. None: a closed loop."""
    count: int | None
    """Total number of requests or sessions. None: a closed loop that only its duration ends."""
    clients: int
    """Closed loop: number of concurrent clients."""
    think_ns: int
    """Closed loop: time between the end of a request and the client's next one."""
    until_ns: int | None
    """Closed loop: offset from which on no request becomes due."""
    in_flight: int
    """Maximum number of requests in flight. Further requests are dropped."""
    spare: int
    """Number of connections to open before they are needed."""

    @property
    def at_once(self) -> int:
        """Requests that are certainly in flight together: all of a burst, or one per client of a closed loop."""
        if self.due_ns is None:
            return self.clients
        return len(self.due_ns) if self.due_ns and self.due_ns[0] == self.due_ns[-1] else 1

    def share_for(self, worker: int, workers: int) -> Schedule:
        """Return one worker's share. Workers take the requests in turn."""

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


@dataclass(slots=True)
class ScheduledRequest:
    """One request with its due instant and its encoded bytes, while it is sent and received."""

    request: Request
    payload: bytes
    due_ns: int
    """Offset from the start instant. A closed loop sets it when the request becomes due."""
    exchange: Exchange | None = None
    connected_ns: int | None = None
    reused: bool = False
    """Whether its connection had carried another request before."""
    reopened: int = 0
    """How often its connection was replaced before it was sent."""
    first_sent_ns: int | None = None
    """When it was first sent (CLOCK_MONOTONIC), if it had to be sent again."""
    is_retry: bool = False
    """Whether its closed-loop client had waited, because the previous request had failed at once."""
    awaited: bool = False
    """Whether its closed-loop client continues only when this request has been recorded."""
    conversation: Conversation | None = None
    """The session, if this request is one of its turns."""
    not_encoded: str = ""
    """Why the request has no bytes to send. Empty: `payload` holds them."""

    def closed_by_peer(self) -> bool:
        """Return whether the server has closed its connection."""
        connection = self.exchange.connection if self.exchange is not None else None
        return connection is not None and connection.closed_by_peer()

    def close(self) -> None:
        """Close its connection, if it has one."""
        if self.exchange is not None and self.exchange.connection is not None:
            self.exchange.connection.close()
        self.exchange = None

    @property
    def turns(self) -> int:
        """The number of requests that count as due with this one: all turns of a session, when it starts."""
        return 1 if self.conversation is None else len(self.conversation.turns)


class OpenLoop:
    """A queue of requests at the plan's due instants, in order. Requests with the same instant are sent together."""

    closed = False
    timed = False

    def __init__(self, slots: Iterator[ScheduledRequest]) -> None:
        self._slots = slots
        self._next = next(slots, None)
        self._drawn: list[ScheduledRequest] = []

    def group(self) -> list[ScheduledRequest]:
        """Return the next requests with the same due instant, or an empty list at the end of the plan."""
        while self.draw():
            pass
        group, self._drawn = self._drawn, []
        return group

    def draw(self) -> bool:
        """Draw one request of the next group ahead. Return False if the group is complete."""
        slot = self._next
        if slot is None or (self._drawn and slot.due_ns != self._drawn[0].due_ns):
            return False
        self._drawn.append(slot)
        self._next = next(self._slots, None)
        return True

    def next_after_completion(self, ended_ns: int) -> ScheduledRequest | None:  # noqa: ARG002 - ends do not matter here
        """Return None, because responses do not change when requests are due."""
        return None

    @property
    def more(self) -> bool:
        """True while there are requests left to send."""
        return self._next is not None or bool(self._drawn)
