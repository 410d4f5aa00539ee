"""The driver sends each request at its due instant; its recorder takes what has ended. One of each per worker process.

    next due ──> bytes encoded and sealed, connection attached    (before its instant; a burst: before the clock starts)
    instant  ──> send, send, send ... ──> listen                  (a burst is nothing but `send` calls)
    readable ──> recvmsg, append, "ended?"                        (loadgen.servers.wire.transport.Exchange)
    ended    ──> Recorder                                         (decodes one per turn of the loop; BACKLOG)

Nothing shifts the plan of an open loop: a request without a free connection goes out late and is recorded late; past
the limit on requests in flight it is dropped and recorded. A closed loop never drops a request. It pauses when requests
fail at once (loadgen.engine.back_off).

A server may close an idle connection just as a request is sent on it. No byte of a response comes then, and the request
is sent once more, on a new connection (`Driver._may_send_again`). Its TTFT counts from that second send.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence, Set
from functools import partial
from itertools import islice
from typing import Literal

from loadgen.analysis.run.record import ErrorKind, NoneOrKind, Record, unsent_record
from loadgen.analysis.run.runfile import RunWriter, Telemetry
from loadgen.analysis.run.token_counts import generated_tokens
from loadgen.engine.back_off import AT_ONCE_NS, GIVE_UP_NS, BackOff, was_refused
from loadgen.engine.client_health import FirstTokens, Health, LiveCounters
from loadgen.engine.clock import ClockPairs, SystemClock
from loadgen.engine.closed_loop import RequestQueue, Sessions, answer_text
from loadgen.engine.record_buffer import RecordBuffer
from loadgen.engine.record_builder import build_records, first_token_end
from loadgen.engine.request_queue import ScheduledRequest
from loadgen.servers.auth import connection_error
from loadgen.servers.backends.dialect import Dialect
from loadgen.servers.errors import LocalLimitError
from loadgen.servers.wire.connection import Connection
from loadgen.servers.wire.disk_spill import DiskSpill
from loadgen.servers.wire.pool import Pool
from loadgen.servers.wire.timestamps import RETRY_S, TimestampSource
from loadgen.servers.wire.transport import Exchange
from loadgen.workloads.sessions import TRANSCRIPT_LIMIT

TICK_S = 0.05
"""A stall shorter than this may go unseen; a longer one shows as at least its length less this."""
TICKS_PER_CHECK, TICKS_PER_SAMPLE = 5, 20
SEND_AGAIN_NS = 5_000_000_000
"""A request is sent again only if its idle connection was closed within this time. A server that read the request
before it closed the connection has usually worked on it for longer."""
GROUP_LOOK_NS = 20_000_000
"""Connections of a waiting group are not looked at when the group is due sooner than this: looking takes time."""
MANY_IN_FLIGHT = 1024  # Of more requests in flight, what has come is counted once a second
CHECKED_GROUP = 64  # Groups up to this size have their connections looked at once more right before they are sent
BACKLOG, TURN_NS, QUIET_NS = 64, 20_000_000, 2_000_000
"""One exchange is recorded per turn of the loop, once none has ended for QUIET_NS: others that end now come first, as
the next requests may wait for them. With more than BACKLOG waiting they are as many as take TURN_NS, and
with each BACKLOG at least one more: else a closed loop that ends faster than the loop turns would hold ever more."""
TOGETHER, TOGETHER_BYTES = 16, 1 << 19  # Answers that are decoded at once, where many wait, and their bytes
NOT_SENT: tuple[ErrorKind, str] = ("cancelled", "not sent, the run was interrupted")  # Error kind and detail
GAVE_UP = f"not sent, because every request had failed at once for {GIVE_UP_NS // 10**9} s"


class Driver:
    """Drives what `feed` gives over connections of `pool`, and has it recorded."""

    def __init__(
        self,
        feed: RequestQueue,
        pool: Pool,
        exchange: Callable[[Callable[[Exchange], None]], Exchange],
        recorder: Recorder,
        *,
        clock: SystemClock,
        timeout_s: float,
        in_flight_max: int | None,
    ) -> None:
        """Drive `feed`. `exchange` makes an Exchange from the function to call at its end. While `in_flight_max`
        requests are in flight, further requests are dropped. None means no limit: a closed loop limits itself."""
        self._feed = feed
        self._pool = pool
        self._exchange = exchange
        self._clock = clock
        self._timeout_s = timeout_s
        self._in_flight_max = in_flight_max
        self._counts = recorder.counts
        self._recorder = recorder
        recorder.on_idle, recorder.on_turn, recorder.on_record = self._check_done, self._on_turn, self._on_record
        self._group: list[ScheduledRequest] = []
        """Encoded or prepared, and waiting for its instant."""
        self._in_flight: dict[Exchange, ScheduledRequest] = {}
        self._opening: dict[asyncio.Task[None], ScheduledRequest] = {}
        """Requests that wait for a connection of their own. A request is here or in `_in_flight`, never in both."""
        self._kept: deque[tuple[int, ScheduledRequest]] = deque()
        """Requests that may have to be sent again, each with the instant (CLOCK_MONOTONIC) from which its payload is no
        longer needed for that."""
        self._back_off = BackOff() if feed.closed else None
        self._looks_inside = False
        """Whether clients of the closed loop wait for the Record of a response with status 200."""
        self._gave_up: tuple[ErrorKind, str] | None = None
        """The error kind and detail of what is left of a closed loop that has given up; None before that."""
        self._last_failure: ErrorKind = "connect"
        """Why no connection could be opened when that last failed: the server, or this machine."""
        self._try_at_ns: int | None = None
        """When the clock will next look for a waiting client of the closed loop."""
        self._thinking: list[ScheduledRequest] = []
        """The next slots of closed loops and sessions, waiting for their instants."""
        self._started = False
        self._interrupted = False
        self._all_done = asyncio.Event()

    async def open(self) -> None:
        """Open the spare connections and prepare what is due first."""
        await self._pool.fill()
        self._take_group()

    async def run(self, start_ns: int) -> None:
        """Send everything from `start_ns` (CLOCK_MONOTONIC) on and return when each request has a Record."""
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
        """Send nothing more and end what is in flight, keeping what came."""
        self._interrupted = True
        if not self._started:
            return  # `run` comes back here once there is an instant 0
        for exchange in list(self._in_flight):
            exchange.give_up("cancelled", "cut off by an interrupt")
        for task in self._opening:
            task.cancel()
        if self._back_off is not None:
            self._back_off.clear()
        waiting, self._group, self._thinking = [*self._group, *self._thinking], [], []
        for slot in waiting:
            self._give_up(slot, *NOT_SENT)
        self._check_done()

    # Before the instant.

    def _take_group(self) -> None:
        self._group = self._feed.group()
        self._counts.due += sum(slot.turns for slot in self._group)
        self._prepare(self._group)

    def _prepare(self, group: Sequence[ScheduledRequest]) -> None:
        """Attach connections and seal the bytes, while there is time."""
        for slot in group:
            if slot.not_encoded:
                continue
            connection = self._pool.take()
            if connection is None:
                break
            self._attach(slot, connection)

    def _attach(self, slot: ScheduledRequest, connection: Connection) -> Exchange:
        exchange = slot.exchange = self._exchange(lambda exchange: self._on_end(exchange, slot))
        slot.connected_ns, slot.reused = connection.opened_ns, connection.reused
        exchange.prepare(connection, connection.seal(slot.payload))
        return exchange

    async def _reopen_closed(self) -> None:
        """Replace the connections of the waiting group that the server has closed, before the run starts."""
        closed = self._close_gone()
        if closed:
            await self._pool.fill()
            self._prepare(closed)

    def _close_gone(self) -> list[ScheduledRequest]:
        """Close our end of the waiting group's connections that the server has closed, and return their requests."""
        closed = [slot for slot in self._group if slot.closed_by_peer()]
        for slot in closed:
            slot.reopened += 1
            slot.close()
        return closed

    def _refresh_group(self, now_ns: int) -> None:
        """While a group waits for its instant, replace connections that the server closes: servers close idle ones
        after a few seconds, and a large group is sent without another look."""
        if self._group and self._recorder.start_ns + self._group[0].due_ns - now_ns > GROUP_LOOK_NS:
            self._prepare([slot for slot in self._group if slot.exchange is None])
            if self._close_gone():
                self._pool.top_up()  # the next look takes them

    def _arm(self) -> None:
        if self._group:
            self._clock.at(self._recorder.start_ns + self._group[0].due_ns, self._on_due)

    # At the instant.

    def _on_due(self) -> None:
        """Send the group and prepare the next one."""
        group, self._group = self._group, []
        self._send(group)
        if not self._interrupted:
            self._take_group()
            self._arm()
        self._check_done()

    def _send(self, group: Sequence[ScheduledRequest], *, look: bool = True) -> None:
        room = len(group)
        if self._in_flight_max is not None:
            room = max(0, self._in_flight_max - len(self._in_flight) - len(self._opening))
        ready = []
        for slot in group[:room]:
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
        for slot in group[room:]:
            self._give_up(slot, "dropped", f"{self._in_flight_max} requests were in flight")
        self._counts.sent += len(ready)

    def _listen(self, exchange: Exchange, slot: ScheduledRequest) -> None:
        if exchange.error_kind:
            return  # the send failed, and that has been dealt with
        if slot.reused and slot.first_sent_ns is None:
            self._kept.append(((exchange.sent_ns or 0) + SEND_AGAIN_NS, slot))
        else:
            slot.payload = b""
        self._in_flight[exchange] = slot
        exchange.listen()

    def _open(self, slot: ScheduledRequest, opening: Coroutine[None, None, None]) -> None:
        """Start to open a connection for this request alone."""
        task = asyncio.get_running_loop().create_task(opening)
        self._opening[task] = slot
        task.add_done_callback(self._on_opened)

    def _end_opening(self) -> None:
        """Note, in the task itself, that its request is no longer opening: it must not count as in flight as well."""
        task = asyncio.current_task()
        assert task is not None
        del self._opening[task]

    def _on_opened(self, task: asyncio.Task[None]) -> None:
        """Account for a request whose task was cancelled before it began, and look whether the run is over."""
        slot = self._opening.pop(task, None)
        if slot is not None and task.cancelled():
            self._give_up(slot, *NOT_SENT)
        self._check_done()

    async def _open_and_send(self, slot: ScheduledRequest) -> None:
        """Send a request late, on a new connection, because no open one was free."""
        try:
            connection = self._pool.take() or await self._pool.open()
        except (OSError, TimeoutError) as error:
            self._end_opening()
            self._give_up(slot, _kind_of(error), connection_error(error))
            return
        self._end_opening()
        exchange = self._attach(slot, connection)
        self._counts.sent += 1
        exchange.send()
        self._listen(exchange, slot)

    # Requests that an idle connection lost.

    def _may_send_again(self, exchange: Exchange, slot: ScheduledRequest) -> bool:
        """Return whether a request was lost because the server closed an idle connection as the request was sent on it
        (RFC 9112, section 9.3.1). No byte of a response has come. A connection that carried no request before was not
        idle: a server that closes such a connection has refused the request. No request is sent a third time."""
        if exchange.error_kind != "connect" or not slot.reused or slot.first_sent_ns is not None:
            return False
        lost_after_ns = (exchange.ended_at_ns or 0) - (exchange.sent_ns or 0)
        return bool(slot.payload) and lost_after_ns <= SEND_AGAIN_NS and not self._interrupted

    async def _send_again(self, slot: ScheduledRequest, lost: Exchange) -> None:
        """Send a request once more, on a new connection."""
        try:
            connection = await self._pool.open()
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

    # After the end.

    def _on_end(self, exchange: Exchange, slot: ScheduledRequest) -> None:
        self._in_flight.pop(exchange, None)
        free, exchange.reusable_connection = exchange.reusable_connection, None
        if free is not None and self._feed.more and not self._interrupted:
            free.reused = True
            self._pool.put(free)
        elif free is not None:
            free.close()
        if self._may_send_again(exchange, slot):
            self._open(slot, self._send_again(slot, exchange))
        else:
            self._end(slot, exchange)

    def _end(self, slot: ScheduledRequest, exchange: Exchange) -> None:
        """Record a request that was sent and has ended, and let the next one follow."""
        if exchange.error_kind in ("connect", "client_limit"):
            self._last_failure = exchange.error_kind
        slot.awaited = self._looks_inside and exchange.framing.status == 200
        self._recorder.take(slot, exchange)
        if slot.conversation is None and not slot.awaited:
            self._follow(slot, refused=was_refused(exchange.error_kind, exchange.framing.status))

    def _give_up(self, slot: ScheduledRequest, kind: ErrorKind, detail: str) -> None:
        """End a request of which nothing was sent."""
        slot.close()
        if kind in ("connect", "client_limit"):
            self._last_failure = kind
        self._recorder.take(slot, None, kind, detail)
        if slot.conversation is None:
            self._follow(slot, refused=kind != "not_encoded")

    def _on_record(self, slot: ScheduledRequest, record: Record) -> None:
        """Use the time after a Record to draw ahead. A closed loop also learns here that a server rejects requests
        inside responses with status 200: from then on its clients wait for the Record of such a response."""
        self._feed.draw()
        if self._back_off is None or slot.conversation is not None:
            return
        rejected = record.state == "rejected"
        if rejected and record.http_status == 200:
            self._looks_inside = True
        if slot.awaited:
            self._looks_inside = rejected or self._back_off.waiting > 0
            self._follow(slot, refused=rejected)

    def _on_turn(self, slot: ScheduledRequest, record: Record, answer: str) -> None:
        """A session's turn has been recorded: the next one follows the answer, or none does."""
        assert isinstance(self._feed, Sessions)
        assert slot.conversation is not None
        now_ns = self._clock.now_ns() - self._recorder.start_ns
        going_on = record.state == "complete" and not self._interrupted
        following = self._feed.next_turn(slot.conversation, answer, now_ns) if going_on else None
        if following is not None:
            self._wait(following)
            return
        why = f"turn {record.turn} of its session was {record.state}"
        why += f" ({record.error_kind})" if record.error_kind != record.state else ""
        if record.state == "complete":
            why = f"the session had grown past {TRANSCRIPT_LIMIT:,} characters"
        for request in slot.conversation.remaining_requests():
            ending = NOT_SENT if self._interrupted else ("session_ended", f"not sent, {why}")
            self._recorder.take(ScheduledRequest(request, b"", now_ns), None, *ending)
        self._follow(slot, refused=record.state == "rejected" or was_refused(record.error_kind, record.http_status))

    def _follow(self, ended: ScheduledRequest, *, refused: bool) -> None:
        """In a closed loop make the next request due: now, or after a pause if the last one failed at once."""
        if self._interrupted:
            return
        now_ns = self._clock.now_ns() - self._recorder.start_ns
        if self._back_off is None:
            self._feed.next_after_completion(now_ns)
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
        """Make the next request of a closed loop due. Return False when none is left."""
        slot = self._feed.next_after_completion(now_ns)
        if slot is None:
            return False
        slot.is_retry = is_retry
        self._counts.due += slot.turns
        self._wait(slot)
        return True

    def _arm_try(self) -> None:
        """Have the clock look for a waiting client of the closed loop once the pause is over."""
        back_off = self._back_off
        if back_off is None or not back_off.waiting:
            return
        if self._try_at_ns is None or back_off.next_try_ns < self._try_at_ns:
            self._try_at_ns = back_off.next_try_ns
            self._clock.at(self._recorder.start_ns + self._try_at_ns, self._on_try)

    def _on_try(self) -> None:
        """Let the waiting clients try whose pause is over. When the server counts as gone, end the loop."""
        assert self._back_off is not None
        now_ns = self._clock.now_ns() - self._recorder.start_ns
        self._try_at_ns = None
        if self._back_off.gives_up(now_ns) and not self._feed.timed:
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
        """Record one client's next request as not sent, and then those after it, because the loop has given up."""
        slot = self._feed.next_after_completion(self._clock.now_ns() - self._recorder.start_ns)
        if slot is None:
            self._check_done()
            return
        slot.payload = b""
        self._counts.due += slot.turns
        assert self._gave_up is not None
        self._recorder.take(slot, None, *self._gave_up)
        if slot.conversation is None:  # a session goes on in `_on_turn`
            asyncio.get_running_loop().call_soon(self._give_up_next)

    def _wait(self, slot: ScheduledRequest) -> None:
        self._thinking.append(slot)
        self._clock.at(self._recorder.start_ns + slot.due_ns, lambda: self._on_thought(slot))

    def _on_thought(self, slot: ScheduledRequest) -> None:
        if not self._interrupted:
            self._thinking.remove(slot)
            self._prepare([slot])
            self._send([slot], look=False)

    def _check_done(self) -> None:
        busy = self._group or self._in_flight or self._opening or self._thinking or self._recorder.ended
        if not busy and not (self._back_off and self._back_off.waiting):
            self._all_done.set()

    # Beside it all.

    def _tick_again(self, ticks: int) -> None:
        due_ns = self._clock.now_ns() + int(TICK_S * 1e9)
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick, ticks, due_ns)

    def _tick(self, ticks: int, due_ns: int) -> None:
        """Housekeeping: stalls at every tick, time limits and progress four times a second, health once."""
        now_ns = self._clock.now_ns()
        self._recorder.health.stall(now_ns - due_ns)
        if ticks % TICKS_PER_CHECK == 0:
            limit_ns = now_ns - int(self._timeout_s * 1e9)
            for exchange in [*self._in_flight]:  # in the order in which they were sent
                if (exchange.sent_ns or now_ns) > limit_ns:
                    break
                exchange.give_up("timeout", f"no end after {self._timeout_s:g} s")
            counts = len(self._in_flight) <= MANY_IN_FLIGHT or ticks % TICKS_PER_SAMPLE == 0
            self._recorder.watch(self._in_flight.keys(), counts=counts)
            while self._kept and self._kept[0][0] <= now_ns:
                self._kept.popleft()[1].payload = b""
            self._refresh_group(now_ns)
            if self._feed.more:
                self._pool.top_up()
        if ticks % TICKS_PER_SAMPLE == 0:
            self._recorder.sample(now_ns)
        self._tick_again(ticks + 1)


def _kind_of(error: OSError) -> Literal["connect", "client_limit"]:
    """Return the error kind of a request for which no connection could be opened."""
    return "client_limit" if isinstance(error, LocalLimitError) else "connect"


class Recorder:
    """Turns ended Exchanges into Records of one worker, one per turn of the loop as a rule, and keeps the counts."""

    on_idle: Callable[[], None]
    """Called when everything taken has been recorded."""
    on_record: Callable[[ScheduledRequest, Record], object]
    """Called after each Record. This is the best moment for work that takes a while."""
    on_turn: Callable[[ScheduledRequest, Record, str], None]
    """Called when a session's turn has been, with its Record and, where it is complete, the answer's text."""

    def __init__(
        self,
        dialect: Dialect,
        sink: RunWriter | RecordBuffer,
        worker: int,
        counts: LiveCounters,
        stamps: TimestampSource,
        sweep_ns: Callable[[], int] = int,
        disk_spill: DiskSpill | None = None,
    ) -> None:
        """`sweep_ns` says how far apart reads were at most since it was last asked; `disk_spill` takes what is long."""
        self.start_ns = 0
        """CLOCK_MONOTONIC at the run's instant 0."""
        self.health = Health()
        self.counts = counts
        self._dialect = dialect
        self._sink = sink
        self._worker = worker
        self._stamps = stamps
        self._sweep_ns = sweep_ns
        self._disk_spill = disk_spill
        self._clocks = ClockPairs()
        self.ended: deque[tuple[ScheduledRequest, Exchange | None, NoneOrKind, str]] = deque()
        """Taken and still to be recorded."""
        self._tokens = self._took_ns = 0
        self._planned: asyncio.TimerHandle | None = None
        self._first = FirstTokens(counts, stamps, self._clocks.to_monotonic, partial(first_token_end, dialect=dialect))

    def begin(self, start_ns: int) -> None:
        """The clock is about to start: read both clocks, and forget what the client's health was until now."""
        self.start_ns = start_ns
        self._clocks.take()
        self.health.sample()

    def take(self, slot: ScheduledRequest, exchange: Exchange | None, kind: NoneOrKind = "", detail: str = "") -> None:
        """An ended request. Without an exchange nothing was sent, and `kind` and `detail` say why."""
        self.ended.append((slot, exchange, kind, detail))
        self._took_ns = time.monotonic_ns()
        if len(self.ended) in (1, BACKLOG):
            self._record_after(0)

    def sample(self, now_ns: int) -> None:
        """Read the clocks, write the client's health, and flush."""
        self._clocks.take()
        values = self.health.sample() | self._stamps.counts() | {"sweep_ns_max": self._sweep_ns()}
        values["clock_disagreement_ns"] = self._clocks.disagreement_ns
        self._sink.add(Telemetry(source="client", at_ns=now_ns - self.start_ns, worker=self._worker, values=values))
        self._sink.flush()

    def watch(self, in_flight: Set[Exchange], *, counts: bool = True) -> None:
        """Take the stamps that have come, and bring the `counts` of unfinished requests up to date."""
        self._stamps.collect()
        if counts:
            arriving = self._stamps.piece_counts(in_flight)
            ended = self._stamps.piece_counts([exchange for _, exchange, *_ in self.ended if exchange is not None])
            self.counts.streaming = len(arriving) - arriving.count(0)
            self.counts.tokens = self._tokens + sum(arriving) + sum(ended) + self._stamps.unsorted
            self._first.look(in_flight)
        if self._disk_spill is not None:
            self._disk_spill.spill(in_flight)

    def _record_first(self, count: int) -> None:
        taken = [*islice(self.ended, count)]
        received = [(exchange, slot.request) for slot, exchange, *_ in taken if exchange is not None]
        decoded = iter(build_records(received, self._dialect, self._clocks, self.start_ns, self.health, self._stamps))
        for slot, exchange, kind, detail in taken:
            record = unsent_record(slot.request, kind, detail) if exchange is None else next(decoded)
            record.worker = self._worker
            record.due_ns = slot.due_ns
            record.connected_ns = None if slot.connected_ns is None else slot.connected_ns - self.start_ns
            record.reopened = slot.reopened
            record.first_sent_ns = None if slot.first_sent_ns is None else slot.first_sent_ns - self.start_ns
            self._sink.add(record)
            self._tokens += generated_tokens(record)
            self._first.take(exchange, record)
            setattr(self.counts, record.state, getattr(self.counts, record.state) + 1)
            slot.exchange, slot.payload = None, b""
            if slot.conversation is not None:
                complete = exchange is not None and record.state == "complete"
                self.on_turn(slot, record, answer_text(exchange, self._dialect) if exchange and complete else "")
            self.ended.popleft()
            self.on_record(slot, record)

    def _record_after(self, wait_s: float) -> None:
        if self._planned is not None:
            self._planned.cancel()
        self._planned = asyncio.get_running_loop().call_later(wait_s, self._record_some)

    def _record_some(self) -> None:
        now_ns, first = time.monotonic_ns(), self.ended[0][0]
        waited_for = first.conversation is not None or first.awaited
        if now_ns - self._took_ns < QUIET_NS and len(self.ended) < BACKLOG and not waited_for:
            self._record_after(QUIET_NS / 1e9)
            return
        left, done, minimum, until_ns = len(self.ended), 0, len(self.ended) // BACKLOG, now_ns + TURN_NS
        while left and (done <= minimum or (len(self.ended) > BACKLOG and time.monotonic_ns() <= until_ns)):
            count = self._ready(min(left, TOGETHER) if len(self.ended) > BACKLOG else 1)
            if not count:
                self._record_after(RETRY_S)
                return
            self._record_first(count)
            left, done = left - count, done + count
        if self.ended:
            self._record_after(0)
        else:
            self.on_idle()

    def _ready(self, most: int) -> int:
        """How many of the first that have ended can be decoded together now."""
        size = 0
        for count, (_, exchange, *_) in enumerate(islice(self.ended, most)):
            size += exchange.size if exchange is not None else 0
            if (count and size > TOGETHER_BYTES) or not (exchange is None or self._stamps.ready(exchange)):
                return count
        return most
