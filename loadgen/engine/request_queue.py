"""Which request is next, and when: open loops follow the plan's instants (others, loadgen.engine.closed_loop)."""

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
    """What a plan's arrivals come to: when, how many, how many at once. Of a run, or of one worker's part of it."""

    due_ns: Sequence[int] | None
    """Open loop: every due offset, in order, of requests or sessions. None: a closed loop."""
    count: int | None
    """How many in all; None for a closed loop that only its duration ends."""
    clients: int
    think_ns: int
    until_ns: int | None
    """Closed loop: clients, their think time, and the offset from which on nothing more is due."""
    in_flight: int
    """Requests sent and not ended; past it a request that is due is dropped."""
    spare: int
    """Connections to open before they are needed."""

    @property
    def at_once(self) -> int:
        """Requests that are certainly under way together: all of a burst, every client of a closed loop."""
        if self.due_ns is None:
            return self.clients
        return len(self.due_ns) if self.due_ns and self.due_ns[0] == self.due_ns[-1] else 1

    def share_for(self, worker: int, workers: int) -> Schedule:
        """One worker's part, dealt out in turn."""

        def part(whole: int) -> int:
            return whole // workers + (worker < whole % workers)

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
    """One request's turn: when it is due, its bytes, and what becomes of it."""

    request: Request
    payload: bytes
    due_ns: int
    """Offset from the start instant; a closed loop's is set when its turn comes."""
    exchange: Exchange | None = None
    connected_ns: int | None = None
    reused: bool = False
    """Whether its connection had carried another request before."""
    reopened: int = 0
    first_sent_ns: int | None = None
    """When it was first sent (CLOCK_MONOTONIC), if it had to be sent again."""
    is_retry: bool = False
    """Whether its client of a closed loop had waited, because the request before had failed at once."""
    awaited: bool = False
    """Whether its client of a closed loop goes on only when this request has been recorded."""
    conversation: Conversation | None = None
    """The session at this turn."""
    not_encoded: str = ""
    """Why the request has no bytes to send. Empty: `payload` holds them."""

    def closed_by_peer(self) -> bool:
        """Whether the server has closed its connection."""
        connection = self.exchange.connection if self.exchange is not None else None
        return connection is not None and connection.closed_by_peer()

    def close(self) -> None:
        """Close its connection, if it has one."""
        if self.exchange is not None and self.exchange.connection is not None:
            self.exchange.connection.close()
        self.exchange = None

    @property
    def turns(self) -> int:
        """How many requests come due with this one: a session's are taken for due when it starts."""
        return 1 if self.conversation is None else len(self.conversation.turns)


class OpenLoop:
    """Slots at the plan's due instants, in their order; those of one instant go together."""

    closed = timed = False

    def __init__(self, slots: Iterator[ScheduledRequest]) -> None:
        self._slots = slots
        self._next = next(slots, None)
        self._drawn: list[ScheduledRequest] = []

    def group(self) -> list[ScheduledRequest]:
        """The next slots that share a due instant; empty at the end of the plan."""
        while self.draw():
            pass
        group, self._drawn = self._drawn, []
        return group

    def draw(self) -> bool:
        """There is time: draw one slot of the next group. False when all are drawn."""
        drawn, following = self._drawn, self._next
        if following is None or (drawn and following.due_ns != drawn[0].due_ns):
            return False
        drawn.append(following)
        self._next = next(self._slots, None)
        return True

    def next_after_completion(self, ended_ns: int) -> ScheduledRequest | None:  # noqa: ARG002 - what ends does not matter here
        """Nothing: no answer brings a request forward."""
        return None

    @property
    def more(self) -> bool:
        """Whether the plan goes on."""
        return self._next is not None or bool(self._drawn)
