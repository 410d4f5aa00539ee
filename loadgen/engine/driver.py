"""The driver sends each request at its due instant; its recorder takes what has ended. One of each per worker process.

    next due ──> bytes encoded and sealed, connection attached    (before its instant; a burst: before the clock starts)
    instant  ──> send, send, send ... ──> listen                  (a burst is nothing but `send` calls)
    readable ──> recvmsg, append, "ended?"                        (servers.wire.transport.Exchange)
    ended    ──> Recorder                                         (decodes one per turn of the loop; BACKLOG)

Nothing shifts the plan: a request without a free connection goes out late and is recorded late; past the limit on
requests in flight it is dropped and recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from itertools import islice

from loadgen.engine.clock import ClockPairs, SystemClock
from loadgen.engine.decode import records_of
from loadgen.engine.feed import Slot
from loadgen.engine.health import Counts, FirstTokens, Health
from loadgen.engine.loops import Feed, Sessions, said
from loadgen.engine.warmup import Held
from loadgen.record import ErrorKind, NoneOrKind, Record, unsent
from loadgen.runfile import RunWriter, Telemetry
from servers.access import no_connection
from servers.kinds.dialect import Dialect
from servers.wire.aside import Aside
from servers.wire.connection import Connection
from servers.wire.pool import Pool
from servers.wire.stamps import RETRY_S, StampSource
from servers.wire.transport import Exchange
from workloads.sessions import TRANSCRIPT_LIMIT

TICK_S = 0.05
"""A stall shorter than this may go unseen; a longer one shows as at least its length less this."""
TICKS_PER_LOOK, TICKS_PER_SAMPLE = 5, 20
MANY = 1024  # Of more requests in flight, what has come is counted once a second
CHECKED_GROUP = 64  # Groups up to this size have their connections looked at once more right before they are sent
BACKLOG, TURN_NS, QUIET_NS = 64, 20_000_000, 2_000_000
"""One exchange is recorded per turn of the loop, once none has ended for QUIET_NS: others that end now come first, as
the next requests may wait for them. With more than BACKLOG waiting they are as many as take TURN_NS, and
with each BACKLOG at least one more: else a closed loop that ends faster than the loop turns would hold ever more."""
TOGETHER, TOGETHER_BYTES = 16, 1 << 19  # Answers that are decoded at once, where many wait, and their bytes
NOT_SENT: tuple[ErrorKind, str] = ("cancelled", "not sent, the run was interrupted")  # Error kind and detail


class Driver:
    """Drives what `feed` gives over connections of `pool`, and has it recorded."""

    def __init__(
        self,
        feed: Feed,
        pool: Pool,
        exchange: Callable[[Callable[[Exchange], None]], Exchange],
        recorder: Recorder,
        *,
        clock: SystemClock,
        timeout_s: float,
        in_flight_most: int,
    ) -> None:
        """`exchange` makes an Exchange, given what to call when it has ended. With `in_flight_most` requests sent and
        not ended, one that is due is dropped."""
        self._feed = feed
        self._pool = pool
        self._exchange = exchange
        self._clock = clock
        self._timeout_s = timeout_s
        self._in_flight_most = in_flight_most
        self._counts = recorder.counts
        self._recorder = recorder
        recorder.on_idle, recorder.on_turn, recorder.on_record = self._check_done, self._on_turn, feed.draw
        self._group: list[Slot] = []
        """Encoded or prepared, and waiting for its instant."""
        self._in_flight: dict[Exchange, Slot] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._thinking: list[Slot] = []
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
        waiting, self._group, self._thinking = [*self._group, *self._thinking], [], []
        for slot in waiting:
            self._give_up(slot, *NOT_SENT)
        self._check_done()

    # Before the instant.

    def _take_group(self) -> None:
        self._group = self._feed.group()
        self._counts.due += sum(slot.turns for slot in self._group)
        self._prepare(self._group)

    def _prepare(self, group: Sequence[Slot]) -> None:
        """Attach connections and seal the bytes, while there is time."""
        for slot in group:
            connection = self._pool.take()
            if connection is None:
                break
            self._attach(slot, connection)

    def _attach(self, slot: Slot, connection: Connection) -> Exchange:
        exchange = slot.exchange = self._exchange(lambda exchange: self._on_end(exchange, slot))
        slot.connected_ns = connection.opened_ns
        exchange.prepare(connection, connection.seal(slot.payload))
        return exchange

    async def _reopen_closed(self) -> None:
        """Servers close idle connections; a request on a closed one would fail for a reason that is ours."""
        closed = [slot for slot in self._group if slot.gone()]
        for slot in closed:
            slot.reopened += 1
            slot.close()
        if closed:
            await self._pool.fill()
            self._prepare(closed)

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

    def _send(self, group: Sequence[Slot], *, look: bool = True) -> None:
        room = max(0, self._in_flight_most - len(self._in_flight) - len(self._opening))
        ready = []
        for slot in group[:room]:
            exchange = slot.exchange
            if exchange is None or (look and len(group) <= CHECKED_GROUP and slot.gone()):
                self._send_late(slot)
            else:
                ready.append((exchange, slot))
        if ready:
            first, *others = [exchange for exchange, _ in ready]
            first.send(*others)
        for exchange, slot in ready:
            self._listen(exchange, slot)
        for slot in group[room:]:
            self._give_up(slot, "dropped", f"{self._in_flight_most} requests were in flight")
        self._counts.sent += len(ready)

    def _listen(self, exchange: Exchange, slot: Slot) -> None:
        slot.payload = b""
        if not exchange.error_kind:
            self._in_flight[exchange] = slot
            exchange.listen()

    def _send_late(self, slot: Slot) -> None:
        task = asyncio.get_running_loop().create_task(self._open_and_send(slot))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        task.add_done_callback(lambda _: self._check_done())

    async def _open_and_send(self, slot: Slot) -> None:
        """No connection was free: open one and send late."""
        try:
            connection = self._pool.take() or await self._pool.open()
        except (OSError, TimeoutError) as error:
            self._give_up(slot, "connect", no_connection(error))
            return
        except asyncio.CancelledError:
            self._give_up(slot, *NOT_SENT)
            return
        exchange = self._attach(slot, connection)
        self._counts.sent += 1
        exchange.send()
        self._listen(exchange, slot)

    # After the end.

    def _on_end(self, exchange: Exchange, slot: Slot) -> None:
        self._in_flight.pop(exchange, None)
        free, exchange.free = exchange.free, None
        if free is not None and self._feed.more and not self._interrupted:
            self._pool.put(free)
        elif free is not None:
            free.close()
        self._recorder.take(slot, exchange)
        if slot.conversation is None:
            self._follow()

    def _give_up(self, slot: Slot, kind: ErrorKind, detail: str) -> None:
        """End a request of which nothing was sent."""
        slot.close()
        self._recorder.take(slot, None, kind, detail)
        if slot.conversation is None:
            self._follow()

    def _on_turn(self, slot: Slot, record: Record, answer: str) -> None:
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
        for request in slot.conversation.to_come():
            ending = NOT_SENT if self._interrupted else ("session_ended", f"not sent, {why}")
            self._recorder.take(Slot(request, b"", now_ns), None, *ending)
        self._follow()

    def _follow(self) -> None:
        """In a closed loop an end makes the next request due."""
        if self._interrupted:
            return
        slot = self._feed.after_end(self._clock.now_ns() - self._recorder.start_ns)
        if slot is not None:
            self._counts.due += slot.turns
            self._wait(slot)

    def _wait(self, slot: Slot) -> None:
        self._thinking.append(slot)
        self._clock.at(self._recorder.start_ns + slot.due_ns, lambda: self._on_thought(slot))

    def _on_thought(self, slot: Slot) -> None:
        if not self._interrupted:
            self._thinking.remove(slot)
            self._prepare([slot])
            self._send([slot], look=False)

    def _check_done(self) -> None:
        busy = self._group or self._in_flight or self._opening or self._thinking or self._recorder.ended
        if not busy:
            self._all_done.set()

    # Beside it all.

    def _tick_again(self, ticks: int) -> None:
        due_ns = self._clock.now_ns() + int(TICK_S * 1e9)
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick, ticks, due_ns)

    def _tick(self, ticks: int, due_ns: int) -> None:
        """Housekeeping: stalls at every tick, time limits and progress four times a second, health once."""
        now_ns = self._clock.now_ns()
        self._recorder.health.stall(now_ns - due_ns)
        if ticks % TICKS_PER_LOOK == 0:
            limit_ns = now_ns - int(self._timeout_s * 1e9)
            for exchange in [*self._in_flight]:  # in the order in which they were sent
                if (exchange.sent_ns or now_ns) > limit_ns:
                    break
                exchange.give_up("timeout", f"no end after {self._timeout_s:g} s")
            counts = len(self._in_flight) <= MANY or ticks % TICKS_PER_SAMPLE == 0
            self._recorder.watch(self._in_flight.keys(), counts=counts)
            if self._feed.more:
                self._pool.top_up()
        if ticks % TICKS_PER_SAMPLE == 0:
            self._recorder.sample(now_ns)
        self._tick_again(ticks + 1)


class Recorder:
    """Turns ended Exchanges into Records of one worker, one per turn of the loop as a rule, and keeps the counts."""

    on_idle: Callable[[], None]
    """Called when everything taken has been recorded."""
    on_record: Callable[[], object]
    """Called after each one: what may take a while is best done now."""
    on_turn: Callable[[Slot, Record, str], None]
    """Called when a session's turn has been, with its Record and, where it is complete, the answer's text."""

    def __init__(
        self,
        dialect: Dialect,
        sink: RunWriter | Held,
        worker: int,
        counts: Counts,
        stamps: StampSource,
        sweep_ns: Callable[[], int] = int,
        aside: Aside | None = None,
    ) -> None:
        """`sweep_ns` says how far apart reads were at most since it was last asked; `aside` takes what is long."""
        self.start_ns = 0
        """CLOCK_MONOTONIC at the run's instant 0."""
        self.health = Health()
        self.counts = counts
        self._dialect = dialect
        self._sink = sink
        self._worker = worker
        self._stamps = stamps
        self._sweep_ns = sweep_ns
        self._aside = aside
        self._clocks = ClockPairs()
        self.ended: deque[tuple[Slot, Exchange | None, NoneOrKind, str]] = deque()
        """Taken and still to be recorded."""
        self._tokens = self._took_ns = 0
        self._planned: asyncio.TimerHandle | None = None
        self._first = FirstTokens(counts, stamps, self._clocks.to_monotonic)

    def begin(self, start_ns: int) -> None:
        """The clock is about to start: read both clocks, and forget what the client's health was until now."""
        self.start_ns = start_ns
        self._clocks.take()
        self.health.sample()

    def take(self, slot: Slot, exchange: Exchange | None, kind: NoneOrKind = "", detail: str = "") -> None:
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
            arriving = self._stamps.pieces(in_flight)
            ended = self._stamps.pieces([exchange for _, exchange, *_ in self.ended if exchange is not None])
            self.counts.streaming = len(arriving) - arriving.count(0)
            self.counts.tokens = self._tokens + sum(arriving) + sum(ended) + self._stamps.unsorted
            self._first.look(in_flight)
        if self._aside is not None:
            self._aside.relieve(in_flight)

    def _record_first(self, count: int) -> None:
        taken = [*islice(self.ended, count)]
        received = [(exchange, slot.request) for slot, exchange, *_ in taken if exchange is not None]
        decoded = iter(records_of(received, self._dialect, self._clocks, self.start_ns, self.health, self._stamps))
        for slot, exchange, kind, detail in taken:
            record = unsent(slot.request, kind, detail) if exchange is None else next(decoded)
            record.worker = self._worker
            record.due_ns = slot.due_ns
            record.connected_ns = None if slot.connected_ns is None else slot.connected_ns - self.start_ns
            record.reopened = slot.reopened
            self._sink.add(record)
            self._tokens += sum(record.chunk_tokens)
            self._first.take(exchange, record)
            setattr(self.counts, record.state, getattr(self.counts, record.state) + 1)
            slot.exchange, slot.payload = None, b""
            if slot.conversation is not None:
                complete = exchange is not None and record.state == "complete"
                self.on_turn(slot, record, said(exchange, self._dialect) if exchange and complete else "")
            self.ended.popleft()
            self.on_record()

    def _record_after(self, wait_s: float) -> None:
        if self._planned is not None:
            self._planned.cancel()
        self._planned = asyncio.get_running_loop().call_later(wait_s, self._record_some)

    def _record_some(self) -> None:
        now_ns, waited_for = time.monotonic_ns(), self.ended[0][0].conversation is not None
        if now_ns - self._took_ns < QUIET_NS and len(self.ended) < BACKLOG and not waited_for:
            self._record_after(QUIET_NS / 1e9)
            return
        left, done, least, until_ns = len(self.ended), 0, len(self.ended) // BACKLOG, now_ns + TURN_NS
        while left and (done <= least or (len(self.ended) > BACKLOG and time.monotonic_ns() <= until_ns)):
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
