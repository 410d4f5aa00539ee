"""Which request is next, where answers say it: closed loops and sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from loadgen.engine.request_queue import OpenLoop, ScheduledRequest
from loadgen.servers.backends.dialect import Dialect
from loadgen.servers.wire.http1 import join_pieces
from loadgen.servers.wire.sse import split_events
from loadgen.workloads.sessions import Conversation

if TYPE_CHECKING:
    from loadgen.servers.wire.transport import Exchange


class ClosedLoop:
    """`clients` slots at once; each end makes the next one due, `think_ns` later, until `until_ns` (an offset). As many
    more are drawn ahead: ends may come together, and to draw and encode a slot then would delay the next."""

    closed = True

    def __init__(
        self, slots: Iterator[ScheduledRequest], clients: int, think_ns: int = 0, until_ns: int | None = None
    ) -> None:
        self._slots = slots
        self._clients = self._starting = clients
        self._think_ns = think_ns
        self._until_ns = until_ns
        self._ahead = deque(islice(slots, 1))

    def group(self) -> list[ScheduledRequest]:
        """Each client's first slot; empty from then on."""
        while self.draw():
            pass
        group = [self._ahead.popleft() for _ in range(min(self._starting, len(self._ahead)))]
        self._starting = 0
        return group

    def draw(self) -> bool:
        """There is time: draw one ahead. False when enough are drawn, or none are left."""
        drawn = [*islice(self._slots, len(self._ahead) < self._starting + self._clients)]
        self._ahead.extend(drawn)
        return bool(drawn)

    def next_after_completion(self, ended_ns: int) -> ScheduledRequest | None:
        """The slot that this end makes due."""
        due_ns = ended_ns + self._think_ns
        if not self._ahead or (self._until_ns is not None and due_ns >= self._until_ns):
            return None
        slot = self._ahead.popleft()
        slot.due_ns = due_ns
        if not self._ahead:  # else nobody would know that there are more
            self.draw()
        return slot

    @property
    def more(self) -> bool:
        """Whether there are requests left."""
        return bool(self._ahead)

    @property
    def timed(self) -> bool:
        """Whether a duration ends the loop."""
        return self._until_ns is not None


class Sessions:
    """Sessions that start as `starts` says, an open or a closed loop of first turns. The next turn of each is due when
    the answer to the last one has been decoded, `think_ns` later."""

    def __init__(self, starts: OpenLoop | ClosedLoop, slot_of: Callable[[Conversation, int], ScheduledRequest]) -> None:
        self._starts = starts
        self._slot_of = slot_of
        self._under_way = 0

    def group(self) -> list[ScheduledRequest]:
        """The first turns of the sessions that start together next."""
        group = self._starts.group()
        self._under_way += len(group)
        return group

    def draw(self) -> bool:
        """There is time: draw a session's first turn ahead. False when enough are drawn, or none are left."""
        return self._starts.draw()

    def next_after_completion(self, ended_ns: int) -> ScheduledRequest | None:
        """A session has ended: the first turn of the one that this makes due."""
        self._under_way -= 1
        slot = self._starts.next_after_completion(ended_ns)
        self._under_way += slot is not None
        return slot

    def next_turn(self, conversation: Conversation, answer: str, decoded_ns: int) -> ScheduledRequest | None:
        """The turn after this one; None when the session is over."""
        following = conversation.after(answer)
        return None if following is None else self._slot_of(following, decoded_ns + following.think_ns)

    @property
    def closed(self) -> bool:
        """Whether the end of a session makes the next one due."""
        return self._starts.closed

    @property
    def timed(self) -> bool:
        """Whether a duration ends the closed loop of sessions."""
        return isinstance(self._starts, ClosedLoop) and self._starts.timed

    @property
    def more(self) -> bool:
        """Whether sessions are to start or may go on."""
        return self._starts.more or self._under_way > 0


def answer_text(exchange: Exchange, dialect: Dialect) -> str:
    """The text of an answer that was recorded as complete. The next turn quotes it."""
    body = join_pieces(exchange.raw, exchange.framing.body_bounds(exchange.raw))
    return dialect.text(split_events(body)[0])


RequestQueue = OpenLoop | ClosedLoop | Sessions
