"""Which request is next, and when: open loops follow the plan's instants, closed loops and sessions the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from servers.wire.transport import Exchange
from workloads.request import Request
from workloads.sessions import Conversation


@dataclass(frozen=True, slots=True)
class Schedule:
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

    def dealt(self, worker: int, workers: int) -> Schedule:
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
class Slot:
    """One request's turn: when it is due, its bytes, and what becomes of it."""

    request: Request
    payload: bytes
    due_ns: int
    """Offset from the start instant; a closed loop's is set when its turn comes."""
    exchange: Exchange | None = None
    connected_ns: int | None = None
    reopened: int = 0
    conversation: Conversation | None = None
    """The session at this turn."""

    def gone(self) -> bool:
        """Whether the server has closed its connection."""
        connection = self.exchange.connection if self.exchange is not None else None
        return connection is not None and connection.gone()

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

    def __init__(self, slots: Iterator[Slot]) -> None:
        self._slots = slots
        self._next = next(slots, None)

    def group(self) -> list[Slot]:
        """The next slots that share a due instant; empty at the end of the plan."""
        group: list[Slot] = []
        while self._next is not None and (not group or self._next.due_ns == group[0].due_ns):
            group.append(self._next)
            self._next = next(self._slots, None)
        return group

    def after_end(self, ended_ns: int) -> Slot | None:  # noqa: ARG002 - what ends does not matter here
        """Nothing: no answer brings a request forward."""
        return None

    @property
    def more(self) -> bool:
        """Whether the plan goes on."""
        return self._next is not None


class ClosedLoop:
    """`clients` slots at once; each end makes the next one due, `think_ns` later, until `until_ns` (an offset)."""

    def __init__(self, slots: Iterator[Slot], clients: int, think_ns: int = 0, until_ns: int | None = None) -> None:
        self._slots = slots
        self._starting = clients
        self._think_ns = think_ns
        self._until_ns = until_ns
        self._next = next(slots, None)

    def group(self) -> list[Slot]:
        """Each client's first slot; empty from then on."""
        group = []
        while self._starting and self._next is not None:
            self._starting -= 1
            group.append(self._take(0))
        self._starting = 0
        return group

    def after_end(self, ended_ns: int) -> Slot | None:
        """The slot that this end makes due."""
        due_ns = ended_ns + self._think_ns
        if self._next is None or (self._until_ns is not None and due_ns >= self._until_ns):
            return None
        return self._take(due_ns)

    @property
    def more(self) -> bool:
        """Whether there are requests left."""
        return self._next is not None

    def _take(self, due_ns: int) -> Slot:
        slot = self._next
        assert slot is not None
        slot.due_ns = due_ns
        self._next = next(self._slots, None)
        return slot


class Sessions:
    """Sessions that start as `starts` says, an open or a closed loop of first turns. The next turn of each is due when
    the answer to the last one has been decoded, `think_ns` later."""

    def __init__(self, starts: OpenLoop | ClosedLoop, slot_of: Callable[[Conversation, int], Slot]) -> None:
        self._starts = starts
        self._slot_of = slot_of
        self._under_way = 0

    def group(self) -> list[Slot]:
        """The first turns of the sessions that start together next."""
        group = self._starts.group()
        self._under_way += len(group)
        return group

    def after_end(self, ended_ns: int) -> Slot | None:
        """A session has ended: the first turn of the one that this makes due."""
        self._under_way -= 1
        slot = self._starts.after_end(ended_ns)
        self._under_way += slot is not None
        return slot

    def next_turn(self, conversation: Conversation, answer: str, decoded_ns: int) -> Slot | None:
        """The turn after this one; None when the session is over."""
        following = conversation.after(answer)
        return None if following is None else self._slot_of(following, decoded_ns + following.think_ns)

    @property
    def more(self) -> bool:
        """Whether sessions are to start or may go on."""
        return self._starts.more or self._under_way > 0


Feed = OpenLoop | ClosedLoop | Sessions
