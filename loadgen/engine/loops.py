"""Which request is next, where answers say it: closed loops and sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from loadgen.engine.feed import OpenLoop, Slot
from workloads.sessions import Conversation


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
