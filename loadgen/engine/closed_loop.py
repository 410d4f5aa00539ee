"""Request queues whose next request depends on responses: closed loops and sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from loadgen.engine.request_queue import OpenLoop, ScheduledRequest
from loadgen.engine.session_progress import DueNode, SessionProgress
from loadgen.servers.backends.dialect import Dialect
from loadgen.servers.wire.http1 import join_pieces
from loadgen.servers.wire.sse import split_events
from loadgen.workloads.request import Request
from loadgen.workloads.sessions import Session

if TYPE_CHECKING:
    from loadgen.servers.wire.transport import Exchange


class ClosedLoop:
    """The request queue of a closed loop with `clients` clients.

    When a request of a client has ended, the client's next request is due after the think time `think_ns`. The loop
    ends at `until_ns`, in ns from the run's start: no request becomes due after this time.

    Requests are built and encoded in advance. Otherwise they would be sent late, especially when several requests end
    at the same time.
    """

    closed = True

    def __init__(
        self, slots: Iterator[ScheduledRequest], clients: int, think_ns: int = 0, until_ns: int | None = None
    ) -> None:
        self._slots = slots
        self._clients = clients
        self._starting = clients
        self._think_ns = think_ns
        self._until_ns = until_ns
        self._ahead = deque(islice(slots, 1))

    def group(self) -> list[ScheduledRequest]:
        """Return the first request of each client. Later calls return an empty list."""
        while self.draw():
            pass
        group = [self._ahead.popleft() for _ in range(min(self._starting, len(self._ahead)))]
        self._starting = 0
        return group

    def draw(self) -> bool:
        """Build and encode one request before it is due.

        Return True if a request was built. Return False if enough requests are ready for all clients, or if no request
        is left.
        """
        drawn = [*islice(self._slots, len(self._ahead) < self._starting + self._clients)]
        self._ahead.extend(drawn)
        return bool(drawn)

    def next_after_completion(self, ended_ns: int) -> ScheduledRequest | None:
        """Return the next request of a client whose request ended at `ended_ns`, or None if the loop has ended.

        The next request is due `think_ns` after `ended_ns`, which is in ns from the run's start.
        """
        due_ns = ended_ns + self._think_ns
        if not self._ahead or (self._until_ns is not None and due_ns >= self._until_ns):
            return None
        slot = self._ahead.popleft()
        slot.due_ns = due_ns
        if not self._ahead:  # keeps `more` correct
            self.draw()
        return slot

    @property
    def more(self) -> bool:
        """Return True while there are requests left to send."""
        return bool(self._ahead)

    @property
    def timed(self) -> bool:
        """Return True if the loop ends after a duration."""
        return self._until_ns is not None


class SessionQueue:
    """The request queue of a workload with sessions. It starts the sessions, and counts the sessions in progress.

    `starts` is an open or closed loop that contains only the first request of each session. It decides when each
    session starts. `following` decides when the later requests of a session become due.
    """

    def __init__(self, starts: OpenLoop | ClosedLoop, following: Turns | GraphRequests) -> None:
        self.following = following
        self._starts = starts
        self._active = 0

    def group(self) -> list[ScheduledRequest]:
        """Return the first requests of all sessions that start at the next start time."""
        group = self._starts.group()
        self._active += len(group)
        return group

    def draw(self) -> bool:
        """Build and encode the first request of a later session in advance. Return True if a request was built."""
        return self._starts.draw()

    def next_after_completion(self, ended_ns: int) -> ScheduledRequest | None:
        """Return the first request of the next session, after another session has ended at `ended_ns`.

        Return None if the end of a session starts no other session, as in an open loop, or if no session is left.
        """
        self._active -= 1
        slot = self._starts.next_after_completion(ended_ns)
        self._active += slot is not None
        return slot

    @property
    def closed(self) -> bool:
        """Return True if a new session starts whenever another session has ended (a closed loop)."""
        return self._starts.closed

    @property
    def timed(self) -> bool:
        """Return True if the run starts sessions until a given duration has passed."""
        return self._starts.timed

    @property
    def more(self) -> bool:
        """Return True while requests may still become due, because sessions are in progress or have not started yet."""
        return self._starts.more or self._active > 0


class Turns:
    """Creates the later turns of chat sessions. After a response, the next turn is due when a think time has passed.

    The think time begins when the response has been decoded. `slot_of` takes a session and a due time. It encodes the
    request of the session's current turn, and returns this request with its due time.
    """

    def __init__(self, slot_of: Callable[[Session, int], ScheduledRequest]) -> None:
        self._slot_of = slot_of

    def next_turn(self, conversation: Session, answer: str, decoded_ns: int) -> ScheduledRequest | None:
        """Return the next turn of a session, or None if the session is over.

        `answer` is the response to the current turn. The think time before the next turn begins at `decoded_ns`, in ns
        from the run's start.
        """
        following = conversation.after(answer)
        return None if following is None else self._slot_of(following, following.due_after(decoded_ns))


class GraphRequests:
    """Builds the later requests of sessions. The sessions are graphs (loadgen.workloads.session_graph).

    The first request of a session is built elsewhere. Every later request is due a certain time after other requests of
    the session were sent or ended, for example 2 s after two of them have ended. The file with the sessions states
    these times.

    `slot_of` takes a session in progress, the index of a request in this session, and a due time in ns. It builds the
    request and returns it, encoded and ready to send, as a ScheduledRequest.
    """

    def __init__(self, slot_of: Callable[[SessionProgress, int, int], ScheduledRequest]) -> None:
        self._slot_of = slot_of
        self._unbuilt: deque[tuple[SessionProgress, int]] = deque()
        """Requests whose prompts need no response, and that follow a request in flight. They are built in advance."""
        self._built: dict[tuple[int, int], ScheduledRequest] = {}
        """Requests built in advance, by the id of the session's first request and the index of the node."""

    def build_next(self) -> bool:
        """Build and encode one request that will soon be due. Return False if there is no such request."""
        while self._unbuilt:
            progress, node = self._unbuilt.popleft()
            key = progress.graph.first_id, node
            if key not in self._built and progress.waits(node):
                self._built[key] = self._slot_of(progress, node, 0)
                return True
        return False

    def on_sent(self, slot: ScheduledRequest) -> None:
        """Note the requests that follow `slot`, so that `build_next` builds them before they are due."""
        assert slot.progress is not None
        self._unbuilt.extend((slot.progress, node) for node in slot.progress.independent_children(slot.node))

    def drop(self, slot: ScheduledRequest) -> list[Request]:
        """Remove all requests that can never be sent because the request `slot` failed, and return them.

        These are the requests that wait for `slot`, directly or through other requests. The returned requests have no
        prompts.
        """
        assert slot.progress is not None
        requests = slot.progress.failed(slot.node)
        first_id = slot.progress.graph.first_id
        for request in requests:
            self._built.pop((first_id, request.id - first_id), None)
        return requests

    def after_start(self, slot: ScheduledRequest, sent_ns: int) -> list[ScheduledRequest]:
        """Return the requests that become due because `slot` was sent at `sent_ns`, in ns from the run's start."""
        assert slot.progress is not None
        return self._slots(slot.progress, slot.progress.started(slot.node, sent_ns))

    def after_end(self, slot: ScheduledRequest, end_ns: int, answer: str) -> list[ScheduledRequest]:
        """Return the requests that become due because the response to `slot` was complete at `end_ns`.

        `answer` is the text of this response. `end_ns` is in ns from the run's start.
        """
        assert slot.progress is not None
        return self._slots(slot.progress, slot.progress.ended(slot.node, end_ns, answer))

    def _slots(self, progress: SessionProgress, due: list[DueNode]) -> list[ScheduledRequest]:
        slots = []
        for node, due_ns in due:
            slot = self._built.pop((progress.graph.first_id, node), None)
            if slot is None:
                slot = self._slot_of(progress, node, due_ns)
            slot.due_ns = due_ns
            slots.append(slot)
        return slots


def answer_text(exchange: Exchange, dialect: Dialect) -> str:
    """Return the text of a complete response. The prompt of the session's next turn contains this text."""
    body = join_pieces(exchange.raw, exchange.framing.body_bounds(exchange.raw))
    return dialect.text(split_events(body)[0])


RequestQueue = OpenLoop | ClosedLoop | SessionQueue
