"""The driver sends each request when it is due, and the recorder creates the Records of the requests.

Each worker process has one driver and one recorder. Requests that are due at the same instant form a group. The driver
prepares one group in advance, which is called the waiting group.

The life of a request:

1. Before the request is due, the driver encodes and encrypts it, and chooses a connection for it. The requests of a
   burst are prepared before the run starts, so the driver only makes `send` calls during the burst.
2. When the request is due, the driver sends all requests of its group, and then waits for data from the server.
3. When data arrives, the driver adds the data to the response, and checks whether the response has ended
   (loadgen.servers.wire.transport.Exchange).
4. After the response has ended, the recorder decodes the response and creates the Record. The recorder normally handles
   one response per turn of the event loop. If more than BACKLOG responses wait, it handles several.

The load decides what happens if a request cannot be sent when it is due:

- Open loop: The due times never change. If no connection is free, the request is sent late, and its Record shows the
  delay. If the maximum number of requests is in flight, the request is dropped, and its Record says so.
- Open loop with `--concurrency`: If the maximum number of requests is in flight, the request waits until another
  request has ended.
- Closed loop: No request is dropped. A client pauses if its requests fail immediately (loadgen.engine.back_off).

A server may close an idle connection just when a request is sent on it. If no byte of a response has arrived, the
driver sends the request once more, on a new connection (`Driver._may_send_again`). The TTFT of such a request is
measured from the second send.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence, Set
from functools import partial
from itertools import compress, islice
from operator import attrgetter
from typing import Literal

from loadgen.analysis.run.record import ErrorKind, NoneOrKind, Record, unsent_record
from loadgen.analysis.run.runfile import RunWriter, Telemetry
from loadgen.analysis.run.token_counts import generated_tokens
from loadgen.engine.back_off import AT_ONCE_NS, GIVE_UP_NS, BackOff, was_refused
from loadgen.engine.client_health import FirstTokens, Health, LiveCounters
from loadgen.engine.clock import ClockPairs, SystemClock
from loadgen.engine.closed_loop import GraphRequests, RequestQueue, SessionQueue, Turns, answer_text
from loadgen.engine.live_figures import SAMPLED_BYTES, TokenRate, received_bytes, tpot_ns
from loadgen.engine.record_buffer import RecordBuffer
from loadgen.engine.record_builder import build_records, first_token_end, tokens_so_far
from loadgen.engine.replica_pools import ReplicaPools
from loadgen.engine.request_queue import ScheduledRequest
from loadgen.engine.session_progress import SessionProgress
from loadgen.servers.backends.dialect import Dialect
from loadgen.servers.errors import LocalLimitError
from loadgen.servers.target import connection_error
from loadgen.servers.wire.connection import Connection
from loadgen.servers.wire.disk_spill import DiskSpill
from loadgen.servers.wire.pool import Pool
from loadgen.servers.wire.timestamps import RETRY_S, TimestampSource
from loadgen.servers.wire.transport import Exchange
from loadgen.workloads.cancellation import Cancellation
from loadgen.workloads.sessions import TRANSCRIPT_LIMIT

TICK_S = 0.05
"""Interval in seconds of the housekeeping ticks. Stalls of the event loop are measured with an error of up to one
interval."""
TICKS_PER_CHECK, TICKS_PER_SAMPLE = 5, 20
"""Number of ticks between two checks of time limits and connections, and between two health samples."""
SEND_AGAIN_NS = 5_000_000_000
"""A request is sent again only if its idle connection was closed within this time in ns after sending.

A server that has read the request usually works on it for longer than this before it closes the connection.
"""
GROUP_LOOK_NS = 20_000_000
"""The connections of a waiting group are checked only if the group is due in more than this time in ns, because checks
take time."""
MANY_IN_FLIGHT = 1024
"""With more requests in flight than this, the live counters are updated once a second instead of four times."""
SAMPLED, SAMPLED_EVERY_NS = 64, 1_000_000_000
"""Number of unfinished responses from which one is chosen to count its tokens, and the minimum time in ns between two
such samples."""
CHECKED_GROUP = 64
"""Maximum size of a group whose connections are checked once more right before the group is sent."""
BACKLOG = 64
TURN_NS = 20_000_000
QUIET_NS = 2_000_000
"""Limits on how many requests are recorded in one turn of the event loop. A request is recorded after it has ended.

- A turn normally records one request, and only if no request has ended for QUIET_NS. Requests that are ending now are
  more urgent, because the next requests may wait for them.
- While more than BACKLOG requests wait to be recorded, a turn continues for TURN_NS.
- A turn records at least `1 + waiting // BACKLOG` requests. Otherwise a fast closed loop would fill the memory.
"""
TOGETHER, TOGETHER_BYTES = 16, 1 << 19
"""Maximum number and maximum total size in bytes of responses that are decoded together. Responses are decoded together
only while more than BACKLOG requests wait."""
NOT_SENT: tuple[ErrorKind, str] = ("cancelled", "not sent, the run was interrupted")  # error kind and detail
GAVE_UP = f"not sent, because every request had failed at once for {GIVE_UP_NS // 10**9} s"


class Driver:
    """Sends the requests of `queue` over connections of `pool`, and passes requests that have ended to `recorder`."""

    def __init__(
        self,
        queue: RequestQueue,
        pool: Pool | ReplicaPools,
        exchange: Callable[[Callable[[Exchange], None]], Exchange],
        recorder: Recorder,
        *,
        clock: SystemClock,
        timeout_s: float,
        in_flight_max: int | None,
        queues: bool = False,
    ) -> None:
        """Create the driver that sends the requests of `queue`.

        - `pool` has the connections to the server, or to each of its replicas.
        - `exchange` creates an Exchange, which stands for one request with its response. The argument of `exchange` is
          a function, which is called when the response has ended.
        - `in_flight_max` is the maximum number of requests in flight. Further requests are dropped, or wait if `queues`
          is True. For a closed loop, `in_flight_max` is None, because the number of clients already limits the requests
          in flight.
        """
        self._queue = queue
        self._following = queue.following if isinstance(queue, SessionQueue) else None
        self._pool = pool
        self._replicas = pool if isinstance(pool, ReplicaPools) else None
        self._exchange = exchange
        self._clock = clock
        self._timeout_s = timeout_s
        self._in_flight_max = in_flight_max
        self._queues = queues
        self._by_session: dict[tuple[int, int], Connection] = {}
        """With the connections of sessions: the idle connection of each session to each replica between two turns."""
        self._counts = recorder.counts
        self._recorder = recorder
        recorder.on_idle = self._check_done
        recorder.on_turn = self._on_turn
        recorder.on_record = self._on_record
        self._group: list[ScheduledRequest] = []
        """The next requests. They are prepared and wait until they are due."""
        self._in_flight: dict[Exchange, ScheduledRequest] = {}
        self._opening: dict[asyncio.Task[None], ScheduledRequest] = {}
        """Requests that wait for a new connection. A request is here or in `_in_flight`, never in both."""
        self._resendable: deque[tuple[int, ScheduledRequest]] = deque()
        """Requests that may have to be sent again, each with a time (CLOCK_MONOTONIC). After this time, the payload of
        the request is no longer needed."""
        self._back_off = BackOff() if queue.closed else None
        self._looks_inside = False
        """True while clients of the closed loop wait for the Record of each response with status 200."""
        self._gave_up: tuple[ErrorKind, str] | None = None
        """Error kind and detail of the requests that are not sent because the server counts as down. None while the
        closed loop still sends requests."""
        self._last_failure: ErrorKind = "connect"
        """Error kind of the last connection that could not be opened: `connect` (caused by the server) or
        `client_limit` (caused by this machine)."""
        self._retry_at_ns: int | None = None
        """Time at which the next waiting client of the closed loop retries. None if no retry is scheduled."""
        self._thinking: dict[ScheduledRequest, None] = {}
        """The next requests of closed loops and sessions. They wait until they are due. A dictionary, because removing
        a request from a list of many clients takes long, just before the request is sent."""
        self._waiting: deque[ScheduledRequest] = deque()
        """Requests that were due while `in_flight_max` requests were in flight, in order. While requests wait, the next
        group of the queue is not drawn, so that few encoded requests are in memory."""
        self._releasing = False
        """True while a call of `_release` is scheduled."""
        self._building = False
        """True while a call of `_build_ahead` is scheduled."""
        self._released_ns = 0
        """Time at which a waiting request was last sent. Requests that are sent later but were due earlier have waited
        until then."""
        self._started = False
        self._interrupted = False
        self._all_done = asyncio.Event()

    async def open(self) -> None:
        """Fill the pool with open connections, and prepare the requests that are due first."""
        await self._pool.fill()
        self._take_group()

    async def run(self, start_ns: int) -> None:
        """Send all requests, starting at `start_ns` (CLOCK_MONOTONIC). Return when every request has a Record."""
        await self._reopen_closed()
        self._recorder.begin(start_ns)
        self._started = True
        self._tick_again(1)
        if self._interrupted:
            self.interrupt()
        self._arm()
        self._check_done()
        await self._all_done.wait()
        self._ticking.cancel()
        self._recorder.sample(self._clock.now_ns())
        self._recorder.watch(self._in_flight.keys())

    def interrupt(self) -> None:
        """Send no more requests, and end the requests in flight. The bytes received so far are kept."""
        self._interrupted = True
        if not self._started:
            return  # `run` calls this method again once the start time is known
        for exchange in list(self._in_flight):
            exchange.give_up("cancelled", "cut off by an interrupt")
        for task in self._opening:
            task.cancel()
        if self._back_off is not None:
            self._back_off.clear()
        waiting = [*self._group, *self._thinking, *self._waiting]
        self._group = []
        self._thinking = {}
        self._waiting.clear()
        for slot in waiting:
            self._give_up(slot, *NOT_SENT)
        self._check_done()

    def drop_thinking(self) -> None:
        """Discard the requests that wait for the end of a think time. They get no Records."""
        self._thinking = {}
        self._check_done()

    # Before requests are due.

    def _take_group(self) -> None:
        self._group = self._queue.group()
        self._counts.due += sum(slot.turns for slot in self._group)
        self._prepare(self._group)

    def _prepare(self, group: Sequence[ScheduledRequest]) -> None:
        """Attach a connection to each request before it is due, and encrypt the request if the connection uses TLS.

        If there are fewer free connections than requests, the last requests of the group stay without a connection.

        With `--balance least-busy`, this method does nothing for a small group, because the replicas of its requests
        are chosen only when the group is due. In this case, `_send` attaches the connections.
        """
        if self._replicas is not None and self._replicas.waits_until_due(group):
            return
        self._attach_all(group)

    def _attach_all(self, group: Sequence[ScheduledRequest]) -> None:
        """Attach a free connection to each request of a group, until no connection is free."""
        for slot in group:
            if slot.not_encoded:
                continue
            if self._replicas is not None:
                self._replicas.assign(slot, self._clock.now_ns())
            connection = self._take_connection(slot)
            if connection is not None:
                self._attach(slot, connection)
            elif self._replicas is None:
                break

    def _pool_of(self, slot: ScheduledRequest) -> Pool:
        if isinstance(self._pool, ReplicaPools):
            return self._pool.pools[slot.replica or 0]
        return self._pool

    def _take_connection(self, slot: ScheduledRequest) -> Connection | None:
        """Return an idle connection for the request of `slot`, or None if there is none.

        If a connection was kept for the session of the request, it is returned, unless the server has closed it in the
        meantime. In all other cases, any idle connection is returned.
        """
        session = slot.request.session
        connection = None if session is None else self._by_session.pop((session, slot.replica or 0), None)
        if connection is None:
            return self._pool_of(slot).take()
        if connection.closed_by_peer():
            connection.close()
            slot.reopened += 1
            return self._pool_of(slot).take()
        return connection

    def _attach(self, slot: ScheduledRequest, connection: Connection) -> Exchange:
        exchange = slot.exchange = self._exchange(lambda exchange: self._on_end(exchange, slot))
        slot.connected_ns, slot.reused = connection.opened_ns, connection.reused
        exchange.dialect = slot.dialect
        if slot.cancellation is not None and slot.cancellation.after_tokens:
            exchange.gives_up = partial(self._recorder.abandoned_by_now, slot.cancellation)
        exchange.prepare(connection, connection.seal(slot.payload))
        return exchange

    async def _reopen_closed(self) -> None:
        """Replace connections that the server has closed between their opening and the start of the run."""
        closed = self._drop_closed()
        if closed:
            await self._pool.fill()
            self._prepare(closed)

    def _drop_closed(self) -> list[ScheduledRequest]:
        """Check the connections of the requests that will be sent next. Close each connection that the server has
        closed.

        Return the requests whose connections were closed.
        """
        closed = [slot for slot in self._group if slot.closed_by_peer()]
        for slot in closed:
            slot.reopened += 1
            slot.close()
        return closed

    def _refresh_group(self, now_ns: int) -> None:
        """Replace closed connections of the group of requests that is due next.

        Servers close idle connections after a few seconds, so this method is called while the group waits. Nothing is
        done if the group is due very soon, because the check takes time. A group of more than CHECKED_GROUP requests is
        checked only here, and not again when it is sent.
        """
        if self._group and self._recorder.start_ns + self._group[0].due_ns - now_ns > GROUP_LOOK_NS:
            self._prepare([slot for slot in self._group if slot.exchange is None])
            if self._drop_closed():
                self._pool.top_up()  # the next check attaches the new connections

    def _arm(self) -> None:
        if self._group:
            self._clock.at(self._recorder.start_ns + self._group[0].due_ns, self._on_due)

    # When requests are due.

    def _on_due(self) -> None:
        """Send the group of requests that is now due, and prepare the group that is due next."""
        group, self._group = self._group, []
        self._send(group)
        if not (self._interrupted or self._waiting):
            self._take_group()
            self._arm()
        self._check_done()

    def _send(self, group: Sequence[ScheduledRequest], *, look: bool = True) -> None:
        room = len(group) if self._in_flight_max is None else self._room()
        ready = []
        chosen = self._queue_up(group, room) if self._queues else group[:room]
        if self._replicas is not None and self._replicas.waits_until_due(group):
            self._attach_all([slot for slot in chosen if slot.exchange is None])
        for slot in chosen:
            exchange = slot.exchange
            if exchange is not None and look and len(group) <= CHECKED_GROUP and slot.closed_by_peer():
                slot.reopened += 1
                slot.close()
            if slot.exchange is None:
                if slot.not_encoded:
                    self._give_up(slot, "not_encoded", slot.not_encoded)
                else:
                    self._open(slot, self._open_and_send(slot))
            elif exchange is not None:
                ready.append((exchange, slot))
        if ready:
            first, *others = [exchange for exchange, _ in ready]
            first.send(*others)
        for exchange, slot in ready:
            self._listen(exchange, slot)
        for slot in () if self._queues else group[room:]:
            self._give_up(slot, "dropped", f"{self._in_flight_max} requests were in flight")
        self._counts.sent += len(ready)

    def _room(self) -> int:
        """Return how many more requests of an open loop may be in flight. Closed loops do not use this limit."""
        return max(0, (self._in_flight_max or 0) - len(self._in_flight) - len(self._opening))

    def _queue_up(self, group: Sequence[ScheduledRequest], room: int) -> Sequence[ScheduledRequest]:
        """Return the requests of a group that can be sent now, and let its other requests wait.

        `room` is the number of further requests that may be in flight. If earlier requests are already waiting, they
        are sent first, so no request of the group can be sent now.
        """
        if self._waiting:
            room = 0  # earlier requests are sent first
        self._waiting.extend(group[room:])
        for slot in group[:room]:
            if slot.due_ns < self._released_ns:
                slot.released_ns = self._released_ns
        return group[:room]

    def _release_soon(self) -> None:
        """Schedule `_release`, because a request has ended and a waiting request may be sent."""
        if not self._releasing:
            self._releasing = True
            self._clock.at(self._clock.now_ns(), self._release)

    def _release(self) -> None:
        """Send waiting requests until the maximum number of requests is in flight.

        If no request waits after that, the next group of requests is taken from the request queue.
        """
        self._releasing = False
        group = [self._waiting.popleft() for _ in range(min(self._room(), len(self._waiting)))]
        if group:
            self._released_ns = self._clock.now_ns() - self._recorder.start_ns
            later, self._waiting = self._waiting, deque()
            self._prepare([slot for slot in group if slot.exchange is None])
            self._send(group)
            self._waiting.extend(later)
        if not (self._waiting or self._group or self._interrupted):
            self._take_group()
            self._arm()
        self._check_done()

    def _listen(self, exchange: Exchange, slot: ScheduledRequest) -> None:
        if exchange.error_kind:
            return  # the send failed, and the request has been recorded
        if slot.reused and slot.first_sent_ns is None:
            self._resendable.append(((exchange.sent_ns or 0) + SEND_AGAIN_NS, slot))
        else:
            slot.payload = b""
        self._in_flight[exchange] = slot
        exchange.listen()
        if slot.cancellation is not None and slot.cancellation.after_ns:
            detail = slot.cancellation.detail
            self._clock.at(
                (exchange.sent_ns or 0) + slot.cancellation.after_ns, lambda: exchange.give_up("abandoned", detail)
            )
        if slot.progress is not None:
            self._on_node_sent(slot, exchange)

    def _on_node_sent(self, slot: ScheduledRequest, exchange: Exchange) -> None:
        """After a request of a session graph was sent, prepare the requests that wait for it.

        Requests that wait for its start are scheduled. For requests that wait for its end, the prompts are built in the
        meantime, unless they contain the response.
        """
        assert isinstance(self._following, GraphRequests)
        self._following.on_sent(slot)
        if not self._building:
            self._building = True
            asyncio.get_running_loop().call_soon(self._build_ahead)
        if slot.starts_others and slot.first_sent_ns is None:
            sent_ns = (exchange.sent_ns or 0) - self._recorder.start_ns
            for following in self._following.after_start(slot, sent_ns):
                self._wait(following)

    def _build_ahead(self) -> None:
        """Build one request that will be due when a request in flight has ended, so that the new request is ready in
        time.

        The method schedules itself again until there is no such request left to build.
        """
        assert isinstance(self._following, GraphRequests)
        self._building = not self._interrupted and self._following.build_next()
        if self._building:
            asyncio.get_running_loop().call_soon(self._build_ahead)

    def _open(self, slot: ScheduledRequest, opening: Coroutine[None, None, None]) -> None:
        """Start the coroutine `opening` as a task. The task opens a connection and sends the request `slot`."""
        task = asyncio.get_running_loop().create_task(opening)
        self._opening[task] = slot
        task.add_done_callback(self._on_opened)

    def _end_opening(self) -> None:
        """Remove the current task from `_opening`, because its request no longer waits for a connection."""
        task = asyncio.current_task()
        assert task is not None
        del self._opening[task]

    def _on_opened(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a task that `_open` has started, and check whether the run is over.

        If the task was cancelled before it began, record its request as not sent.
        """
        slot = self._opening.pop(task, None)
        if slot is not None and task.cancelled():
            self._give_up(slot, *NOT_SENT)
        self._check_done()

    async def _open_and_send(self, slot: ScheduledRequest) -> None:
        """Send a request late, on a new connection, because no open connection was free."""
        try:
            pool = self._pool_of(slot)
            connection = pool.take() or await pool.open()
        except (OSError, TimeoutError) as error:
            self._end_opening()
            self._give_up(slot, _kind_of(error), connection_error(error))
            return
        self._end_opening()
        exchange = self._attach(slot, connection)
        self._counts.sent += 1
        exchange.send()
        self._listen(exchange, slot)

    # When a request was lost on an idle connection.

    def _may_send_again(self, exchange: Exchange, slot: ScheduledRequest) -> bool:
        """Return True if the request `slot` was lost and may be sent once more. `exchange` is the attempt that failed.

        A server may close an idle connection just as a request is sent on it (RFC 9112, section 9.3.1). The request is
        then lost: no byte of a response arrives. A lost request is not sent again in these cases:

        - It was the first request of its connection. A server that closes a new connection has refused the request.
        - The connection was closed more than SEND_AGAIN_NS after the request was sent.
        - The request has already been sent twice.
        - The run was interrupted.
        """
        if exchange.error_kind != "connect" or not slot.reused or slot.first_sent_ns is not None:
            return False
        lost_after_ns = (exchange.ended_at_ns or 0) - (exchange.sent_ns or 0)
        return bool(slot.payload) and lost_after_ns <= SEND_AGAIN_NS and not self._interrupted

    async def _send_again(self, slot: ScheduledRequest, lost: Exchange) -> None:
        """Send a request for the second time, on a new connection.

        `lost` is the first attempt. The server closed the first connection before it sent a byte of the response.
        """
        try:
            connection = await self._pool_of(slot).open()
        except (OSError, TimeoutError) as error:
            self._end_opening()
            lost.error_kind = _kind_of(error)
            lost.error_detail += f"; it could not be sent again: {connection_error(error)}"
            self._end(slot, lost)
            return
        self._end_opening()
        slot.first_sent_ns = lost.sent_ns
        exchange = self._attach(slot, connection)
        exchange.send()
        self._listen(exchange, slot)

    # After a request has ended.

    def _on_end(self, exchange: Exchange, slot: ScheduledRequest) -> None:
        self._in_flight.pop(exchange, None)
        connection, exchange.reusable_connection = exchange.reusable_connection, None
        more = (self._queue.more or self._waiting) and not self._interrupted
        if connection is not None and more and self._pool.use == "pooled":
            connection.reused = True
            self._pool_of(slot).put(connection)
        elif connection is not None and more and self._keeps_for_session(slot):
            connection.reused = True
            self._by_session[slot.request.session or 0, slot.replica or 0] = connection
        elif connection is not None:
            connection.close()
        if more and self._pool.use != "pooled":
            self._pool.top_up()
        if self._may_send_again(exchange, slot):
            self._open(slot, self._send_again(slot, exchange))
        else:
            self._end(slot, exchange)

    def _keeps_for_session(self, slot: ScheduledRequest) -> bool:
        """Return True if the connection of a request is kept for a later request of the same session.

        A session keeps only one idle connection to each replica, even if several of its requests were in flight at the
        same time.
        """
        has_one = (slot.request.session, slot.replica or 0) in self._by_session
        return self._pool.use == "session" and not slot.is_last_turn and not has_one

    def _end(self, slot: ScheduledRequest, exchange: Exchange) -> None:
        """Pass a request that has ended to the recorder, and let its client continue with the next request."""
        if self._replicas is not None:
            self._replicas.ended(slot, exchange.error_kind, exchange.framing.status, self._clock.now_ns())
        if exchange.error_kind in ("connect", "client_limit"):
            self._last_failure = exchange.error_kind
        slot.awaited = self._looks_inside and exchange.framing.status == 200
        self._recorder.take(slot, exchange)
        if self._waiting:
            self._release_soon()
        if not (slot.in_session or slot.awaited):
            self._follow(slot, refused=was_refused(exchange.error_kind, exchange.framing.status))

    def _give_up(self, slot: ScheduledRequest, kind: ErrorKind, detail: str) -> None:
        """Record a request that was not sent. `kind` and `detail` state the reason."""
        slot.close()
        if self._replicas is not None:
            self._replicas.ended(slot, kind, None, self._clock.now_ns())
        if kind in ("connect", "client_limit"):
            self._last_failure = kind
        self._recorder.take(slot, None, kind, detail)
        if self._waiting:
            self._release_soon()
        if not slot.in_session:
            self._follow(slot, refused=kind != "not_encoded")

    def _on_record(self, slot: ScheduledRequest, record: Record) -> None:
        """Handle a new Record: build one request in advance, and let a client continue if it waited for this Record.

        A client of a closed loop normally sends its next request as soon as a response has ended, before the Record is
        created. However, some servers reject a request with an error inside a response of status 200. Only the Record
        shows such an error, so the clients of such a server wait for the Record.
        """
        self._queue.draw()
        if self._back_off is None or slot.in_session:
            return
        rejected = record.state == "rejected"
        if rejected and record.http_status == 200:
            self._looks_inside = True
        if slot.awaited:
            self._looks_inside = rejected or self._back_off.waiting > 0
            self._follow(slot, refused=rejected)

    def _on_turn(self, slot: ScheduledRequest, record: Record, answer: str) -> None:
        """After a turn of a session was recorded, schedule the next turn or end the session."""
        if slot.progress is not None:
            self._on_node(slot, slot.progress, record, answer)
            return
        assert isinstance(self._following, Turns)
        assert slot.conversation is not None
        now_ns = self._clock.now_ns() - self._recorder.start_ns
        continues = record.state == "complete" and not self._interrupted
        following = self._following.next_turn(slot.conversation, answer, now_ns) if continues else None
        if following is not None:
            self._wait(following)
            return
        self._close_session(slot)
        why = f"turn {record.turn} of its session was {record.state}"
        why += f" ({record.error_kind})" if record.error_kind != record.state else ""
        if record.state == "complete":
            why = f"the session had grown past {TRANSCRIPT_LIMIT:,} characters"
        for request in slot.conversation.remaining_requests():
            kind: ErrorKind = "abandoned" if record.state == "abandoned" else "session_ended"
            ending = NOT_SENT if self._interrupted else (kind, f"not sent, {why}")
            self._recorder.take(ScheduledRequest(request, b"", now_ns), None, *ending)
        self._follow(slot, refused=record.state == "rejected" or was_refused(record.error_kind, record.http_status))

    def _on_node(self, slot: ScheduledRequest, progress: SessionProgress, record: Record, answer: str) -> None:
        """Schedule the next requests of a session after its request `slot` has ended.

        - If the request was complete, the requests that wait for its response are scheduled.
        - Otherwise, the requests that can no longer become due are recorded as not sent.

        `progress` is the progress of the session, `record` is the Record of the request, and `answer` is the response.
        If no request of the session is left, the session ends.
        """
        assert isinstance(self._following, GraphRequests)
        now_ns = self._clock.now_ns() - self._recorder.start_ns
        if record.state == "complete" and not self._interrupted:
            end_ns = now_ns if record.end_ns is None else record.end_ns
            for following in self._following.after_end(slot, end_ns, answer):
                self._wait(following)
        else:
            error = f" ({record.error_kind})" if record.error_kind != record.state else ""
            why = f"not sent, request {record.id} of its session was {record.state}{error}"
            kind: ErrorKind = "abandoned" if record.state == "abandoned" else "session_ended"
            ending = NOT_SENT if self._interrupted else (kind, why)
            for request in self._following.drop(slot):
                self._recorder.take(ScheduledRequest(request, b"", now_ns), None, *ending)
        if not progress.unfinished:
            self._close_session(slot)
            self._follow(slot, refused=record.state == "rejected" or was_refused(record.error_kind, record.http_status))

    def _close_session(self, slot: ScheduledRequest) -> None:
        """Close the idle connections of a session that is over, if it has any."""
        for replica in range(len(self._replicas.pools) if self._replicas is not None else 1):
            connection = self._by_session.pop((slot.request.session or 0, replica), None)
            if connection is not None:
                connection.close()

    def _follow(self, ended: ScheduledRequest, *, refused: bool) -> None:
        """Let a closed-loop client send its next request, or let the client pause first.

        `ended` is the last request of this client. The client pauses if `refused` is True and `ended` was due at most
        AT_ONCE_NS (1 s) ago. `refused` states that the next request would probably fail too if it were sent now.
        Without pauses, a server that refuses requests would get very many of them.
        """
        if self._interrupted:
            return
        now_ns = self._clock.now_ns() - self._recorder.start_ns
        if self._back_off is None:
            self._queue.next_after_completion(now_ns)
            return
        if self._gave_up is not None:
            self._give_up_next()
            return
        if refused and now_ns - ended.due_ns <= AT_ONCE_NS:
            self._back_off.failed(now_ns, was_retry=ended.is_retry)
        else:
            self._back_off.went_on(now_ns, was_retry=ended.is_retry)
            self._next(now_ns)
        self._arm_try()

    def _next(self, now_ns: int, *, is_retry: bool = False) -> bool:
        """Schedule the next request of a closed loop. Return False if no request is left, otherwise True.

        `is_retry` is True if the client has paused before this request.
        """
        slot = self._queue.next_after_completion(now_ns)
        if slot is None:
            return False
        slot.is_retry = is_retry
        self._counts.due += slot.turns
        self._wait(slot)
        return True

    def _arm_try(self) -> None:
        """Schedule the call of `_on_retry` for the time when the next paused client of the closed loop may send again.

        If no client is paused, or an earlier call is already scheduled, do nothing.
        """
        back_off = self._back_off
        if back_off is None or not back_off.waiting:
            return
        if self._retry_at_ns is None or back_off.next_try_ns < self._retry_at_ns:
            self._retry_at_ns = back_off.next_try_ns
            self._clock.at(self._recorder.start_ns + self._retry_at_ns, self._on_retry)

    def _on_retry(self) -> None:
        """Let paused clients of a closed loop send their next requests. This method is called at the end of a pause.

        A client pauses if its last request failed immediately. `BackOff.take` decides how many of the paused clients
        continue.

        If every request of the last 60 s (GIVE_UP_NS) has failed immediately, the server counts as down. No more
        requests are sent, and the remaining requests are recorded as not sent. A loop with a fixed duration is an
        exception: its clients keep trying until the loop ends.
        """
        assert self._back_off is not None
        now_ns = self._clock.now_ns() - self._recorder.start_ns
        self._retry_at_ns = None
        if self._back_off.gives_up(now_ns) and not self._queue.timed:
            self._gave_up = self._last_failure, GAVE_UP
            clients = self._back_off.waiting
            self._back_off.clear()
            for _ in range(clients):
                self._give_up_next()
            return
        for waited_ns in self._back_off.take(now_ns):
            self._recorder.health.pause(waited_ns)
            if not self._next(now_ns, is_retry=True):
                self._back_off.clear()
                break
        self._arm_try()
        self._check_done()

    def _give_up_next(self) -> None:
        """Record the next request of a closed loop as not sent, because the server counts as down.

        Every further request is recorded in the same way, until no request is left:

        - After a request without a session, this method schedules another call of itself.
        - After a request of a session, `_on_turn` ends the session, which leads to another call of this method.
        """
        slot = self._queue.next_after_completion(self._clock.now_ns() - self._recorder.start_ns)
        if slot is None:
            self._check_done()
            return
        slot.payload = b""
        self._counts.due += slot.turns
        assert self._gave_up is not None
        self._recorder.take(slot, None, *self._gave_up)
        if not slot.in_session:  # a session goes on in `_on_turn`
            asyncio.get_running_loop().call_soon(self._give_up_next)

    def _wait(self, slot: ScheduledRequest) -> None:
        self._thinking[slot] = None
        self._clock.at(self._recorder.start_ns + slot.due_ns, lambda: self._on_thought(slot))

    def _on_thought(self, slot: ScheduledRequest) -> None:
        if slot in self._thinking:  # not after an interrupt or `drop_thinking`
            del self._thinking[slot]
            self._prepare([slot])
            self._send([slot], look=False)

    def _check_done(self) -> None:
        """Let the method `run` return if no request is left."""
        if not self._started:  # the pool may still be filling, and the first group may not have been taken yet
            return
        busy = self._group or self._in_flight or self._opening or self._thinking or self._recorder.ended
        if not (busy or self._waiting or self._releasing) and not (self._back_off and self._back_off.waiting):
            self._all_done.set()

    # Housekeeping.

    def _tick_again(self, ticks: int) -> None:
        due_ns = self._clock.now_ns() + int(TICK_S * 1e9)
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick, ticks, due_ns)

    def _tick(self, ticks: int, due_ns: int) -> None:
        """Do the housekeeping of one tick.

        - Every tick: measure the stall of the event loop.
        - Four times a second: check time limits and connections.
        - Once a second: sample the client's health.
        """
        now_ns = self._clock.now_ns()
        self._recorder.health.stall(now_ns - due_ns)
        if ticks % TICKS_PER_CHECK == 0:
            limit_ns = now_ns - int(self._timeout_s * 1e9)
            for exchange in [*self._in_flight]:  # in order of sending
                if (exchange.sent_ns or now_ns) > limit_ns:
                    break
                exchange.give_up("timeout", f"no end after {self._timeout_s:g} s")
            counts = len(self._in_flight) <= MANY_IN_FLIGHT or ticks % TICKS_PER_SAMPLE == 0
            self._recorder.watch(self._in_flight.keys(), counts=counts)
            while self._resendable and self._resendable[0][0] <= now_ns:
                self._resendable.popleft()[1].payload = b""
            self._refresh_group(now_ns)
            if self._queue.more:
                self._pool.top_up()
        if ticks % TICKS_PER_SAMPLE == 0:
            self._recorder.sample(now_ns)
        self._tick_again(ticks + 1)


def _kind_of(error: OSError) -> Literal["connect", "client_limit"]:
    """Return the error kind of a request for which no connection could be opened."""
    return "client_limit" if isinstance(error, LocalLimitError) else "connect"


class Recorder:
    """Turns the ended requests of a worker process into Records, and updates the live counters.

    The recorder normally decodes one response per turn of the event loop.
    """

    on_idle: Callable[[], None]
    """Called when every queued request has been recorded."""
    on_record: Callable[[ScheduledRequest, Record], object]
    """Called after each Record. This is the best time for work that takes a while."""
    on_head: Callable[..., None] | None = None
    """Called with the request and the head of the response after each turn of a session."""
    on_response: Callable[[ScheduledRequest, Exchange | None, Record], None] | None = None
    """Called with each request, its response and its Record, before the Record is written. The exchange is None if the
    request was not sent. None, the usual case: no function needs the responses."""
    replica_header = ""
    """Response header that names the replica, in lower case. Empty: none."""
    server_timing = False
    """True if Records get the times that the server states about each request."""
    samples_client = True
    """True if samples of the client's health are taken. The recorder of canaries leaves them to that of the load."""
    on_turn: Callable[[ScheduledRequest, Record, str], None]
    """Called after a turn of a session was recorded, with the Record and the text of the answer. If the turn is not
    complete, the text is empty."""

    def __init__(
        self,
        dialect: Dialect,
        sink: RunWriter | RecordBuffer,
        worker: int,
        counts: LiveCounters,
        stamps: TimestampSource,
        max_read_delay_ns: Callable[[], int] = int,
        disk_spill: DiskSpill | None = None,
    ) -> None:
        """Create a recorder for the worker process with the number `worker`.

        - `dialect` is the response format of all requests that do not name another format.
        - `sink` receives the Records.
        - `counts` contains the live counters that the recorder updates.
        - `stamps` is the source of timestamps.
        - `max_read_delay_ns` is a function that returns the longest delay between two socket reads since its last call.
        - `disk_spill` moves long unfinished responses from memory to disk.
        """
        self.start_ns = 0
        """Start time of the run (CLOCK_MONOTONIC)."""
        self.health = Health()
        self.counts = counts
        self._dialect = dialect
        self._sink = sink
        self._worker = worker
        self._stamps = stamps
        self._max_read_delay_ns = max_read_delay_ns
        self._disk_spill = disk_spill
        self._clocks = ClockPairs()
        self.ended: deque[tuple[ScheduledRequest, Exchange | None, NoneOrKind, str]] = deque()
        """Requests that have ended and are not recorded yet. If nothing was sent, the error kind and detail are stored
        too."""
        self._rate = TokenRate()
        self._sampled_ns = 0
        self._tpot = counts.tpot
        self._ttfa = counts.ttfa
        self._span_ns = 1 << 62, 0
        """When the first recorded request was sent, and the last one ended, in ns from the run's start."""
        self._last_end_ns = 0
        self._next_turn: asyncio.TimerHandle | None = None
        self._first = FirstTokens(counts, stamps, self._clocks.to_monotonic, partial(first_token_end, dialect=dialect))

    def begin(self, start_ns: int) -> None:
        """Prepare to record requests of a run that starts at `start_ns` (CLOCK_MONOTONIC).

        The method measures the offset between CLOCK_REALTIME and CLOCK_MONOTONIC, and resets the client's health
        counters. The driver calls it before it sends the first request.
        """
        self.start_ns = start_ns
        self._clocks.take()
        self.health.sample()

    def take(self, slot: ScheduledRequest, exchange: Exchange | None, kind: NoneOrKind = "", detail: str = "") -> None:
        """Add a request that has ended to the queue of requests to record.

        If nothing was sent, `exchange` is None, and `kind` and `detail` state the reason.
        """
        self.ended.append((slot, exchange, kind, detail))
        self._last_end_ns = time.monotonic_ns()
        if len(self.ended) in (1, BACKLOG):
            self._record_after(0)

    def abandoned_by_now(self, cancellation: Cancellation, exchange: Exchange) -> str:
        """Return why a request is abandoned now, or "" if it is not abandoned yet.

        `cancellation` states how many tokens must arrive before the request is abandoned. The result is the error
        detail of the Record. The whole response is decoded again at each read, which is acceptable because few requests
        are abandoned.
        """
        tokens, _ = tokens_so_far(exchange.raw, exchange.dialect or self._dialect)
        return cancellation.detail if tokens >= cancellation.after_tokens else ""

    def sample(self, now_ns: int) -> None:
        """Read CLOCK_REALTIME and CLOCK_MONOTONIC, and write a sample of the client's health to the part file."""
        self._clocks.take()
        if not self.samples_client:
            return
        values = self.health.sample() | self._stamps.counts() | {"sweep_ns_max": self._max_read_delay_ns()}
        values["clock_disagreement_ns"] = self._clocks.disagreement_ns
        self._sink.add(Telemetry(source="client", at_ns=now_ns - self.start_ns, worker=self._worker, values=values))
        self._sink.flush()
        self.counts.unwritten_bytes = self._sink.unwritten_bytes

    def watch(self, in_flight: Set[Exchange], *, counts: bool = True) -> None:
        """Collect new timestamps from the timestamp source, and spill long unfinished responses to disk.

        With `counts`, also update the live counters from the requests in flight.
        """
        self._stamps.collect()
        if counts:
            now_ns = time.monotonic_ns()
            arriving = self._stamps.arrived_bytes(in_flight)
            ended = [received_bytes(exchange) for _, exchange, *_ in self.ended if exchange is not None]
            unrecorded = sum(arriving) + sum(ended)
            unrecorded += self._stamps.unsorted_bytes if unrecorded or in_flight else 0
            self._first.look([*compress(in_flight, arriving)])
            if self._rate.needs_sample and now_ns - self._sampled_ns >= SAMPLED_EVERY_NS:
                self._sampled_ns = now_ns
                self._sample(in_flight)
            self.counts.streaming = len(arriving) - arriving.count(0)
            self.counts.tokens = self._rate.tokens(unrecorded)
            self.counts.tokens_per_s = self._rate.per_second(now_ns, unrecorded)
            if self._span_ns[1]:
                self.counts.span(*self._span_ns)
        if self._disk_spill is not None:
            self._disk_spill.spill(in_flight)

    def _sample(self, in_flight: Set[Exchange]) -> None:
        """Update the estimated number of tokens per byte from one response that is still being received.

        The function takes the longest of the first SAMPLED responses in flight. The estimate does not change if no data
        of these responses has arrived.
        """
        begun = [exchange for exchange in islice(in_flight, SAMPLED) if exchange.size and not exchange.spilled]
        if begun:
            longest = max(begun, key=attrgetter("size"))
            self._rate.sample(*tokens_so_far(longest.raw[:SAMPLED_BYTES], longest.dialect or self._dialect))

    def _record_first(self, count: int) -> None:
        """Record the first `count` requests of `ended`. Their responses are decoded together."""
        ended = [*islice(self.ended, count)]
        received = [(exchange, slot.request) for slot, exchange, *_ in ended if exchange is not None]
        records = build_records(
            received,
            self._dialect,
            self._clocks,
            self.start_ns,
            self.health,
            self._stamps,
            replica_header=self.replica_header,
            server_timing=self.server_timing,
        )
        decoded = iter(records)
        for slot, exchange, kind, detail in ended:
            record = unsent_record(slot.request, kind, detail) if exchange is None else next(decoded)
            record.worker = self._worker
            record.due_ns = slot.due_ns
            record.connected_ns = None if slot.connected_ns is None else slot.connected_ns - self.start_ns
            record.released_ns = slot.released_ns
            record.reopened = slot.reopened
            record.first_sent_ns = None if slot.first_sent_ns is None else slot.first_sent_ns - self.start_ns
            if self.on_response is not None:
                self.on_response(slot, exchange, record)
            self._sink.add(record)
            self._count(exchange, record)
            setattr(self.counts, record.state, getattr(self.counts, record.state) + 1)
            slot.exchange = None
            slot.payload = b""
            if slot.in_session:
                complete = exchange is not None and record.state == "complete"
                if self.on_head is not None and exchange is not None:
                    self.on_head(slot.request, exchange.framing.head, last=slot.is_last_turn)
                needed = complete and (slot.progress is None or slot.progress.keeps_answer(slot.node))
                answer = answer_text(exchange, exchange.dialect or self._dialect) if exchange and needed else ""
                self.on_turn(slot, record, answer)
            self.ended.popleft()
            self.on_record(slot, record)

    def _count(self, exchange: Exchange | None, record: Record) -> None:
        """Update the live figures with a Record. `exchange` is None if the request was not sent."""
        self._rate.record(generated_tokens(record), 0 if exchange is None else received_bytes(exchange))
        self._first.take(exchange, record)
        if record.sent_ns is not None and record.end_ns is not None:
            self._span_ns = min(self._span_ns[0], record.sent_ns), max(self._span_ns[1], record.end_ns)
        per_token_ns = tpot_ns(record) if record.state == "complete" else None
        if per_token_ns is not None:
            self._tpot.add(per_token_ns)
        first_answer_ns = record.marks.get("first_answer_ns")
        if first_answer_ns is not None and record.sent_ns is not None and record.state == "complete":
            self._ttfa.add(first_answer_ns - record.sent_ns)

    def _record_after(self, wait_s: float) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._next_turn = asyncio.get_running_loop().call_later(wait_s, self._record_some)

    def _record_some(self) -> None:
        """Record some of the requests in `ended`, the queue of requests that have ended but have no Record yet.

        Normally, each call records one request. While responses are ending, the call records nothing and is repeated
        after QUIET_NS. There is no such delay if the first Record is needed at once, for example by the next turn of a
        session, or if the queue has BACKLOG requests or more. If the queue has more than BACKLOG requests, a call
        records several.
        """
        now_ns = time.monotonic_ns()
        first = self.ended[0][0]
        is_awaited = first.in_session or first.awaited
        if now_ns - self._last_end_ns < QUIET_NS and len(self.ended) < BACKLOG and not is_awaited:
            # Responses are ending right now. They are handled first, because no client waits for this Record.
            self._record_after(QUIET_NS / 1e9)
            return

        # Requests that end during this turn are left for the next one.
        remaining = len(self.ended)
        recorded = 0
        minimum = len(self.ended) // BACKLOG
        until_ns = now_ns + TURN_NS
        while remaining and (recorded <= minimum or (len(self.ended) > BACKLOG and time.monotonic_ns() <= until_ns)):
            # Normally one response is decoded at a time. With a backlog, decoding several together costs less.
            count = self._ready_count(min(remaining, TOGETHER) if len(self.ended) > BACKLOG else 1)
            if not count:
                self._record_after(RETRY_S)  # timestamps of the first response are still missing
                return
            self._record_first(count)
            remaining -= count
            recorded += count
        if self.ended:
            self._record_after(0)
        else:
            self.on_idle()

    def _ready_count(self, maximum: int) -> int:
        """Return how many requests of `ended` can be recorded now, in one batch. The result is at most `maximum`.

        The batch contains the first requests of `ended`. It stops before the first response whose timestamps are not
        all known. It also stops before its responses exceed TOGETHER_BYTES bytes in total. A single larger response is
        recorded alone.
        """
        size = 0
        for count, (_, exchange, *_) in enumerate(islice(self.ended, maximum)):
            size += exchange.size if exchange is not None else 0
            if (count and size > TOGETHER_BYTES) or not (exchange is None or self._stamps.ready(exchange)):
                return count
        return maximum
