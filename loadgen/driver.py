"""The driver: sends each request at its due instant and gathers what comes back. One per worker process.

connections open, bytes sealed, collector frozen   (before the clock starts)
due ──> send, send, send ... ──> listen            (a burst is nothing but `send` calls)
readable ──> recvmsg, append, "ended?"             (servers.transport.Exchange)
ended ──> decoded, one per turn of the loop        (so that reads are never held up for long)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loadgen.clock import ClockPairs, monotonic_ns
from loadgen.health import Health
from loadgen.record import Record
from loadgen.recorder import PartFile, record_of
from loadgen.runfile import Telemetry
from servers.connection import Connection, Target, connect
from servers.dialects.base import Dialect
from servers.transport import Exchange
from workloads.request import Request

CONNECTS_AT_ONCE = 64
"""Below the smallest listen backlog among the servers (hypercorn's 100), so that no SYN is dropped."""
TICK_S = 0.25
SPIN_NS = 2_000_000
"""uvloop's timers have a resolution of 1 ms: sleep up to here before an instant, then watch the clock."""


@dataclass(slots=True)
class Slot:
    """One request's place in the plan: when it is due, its bytes, and what becomes of it."""

    request: Request
    payload: bytes
    due_ns: int
    """Offset from the start instant."""
    exchange: Exchange | None = None
    connected_ns: int | None = None
    reopened: int = 0


@dataclass(slots=True)
class Progress:
    """Counts to watch while it runs. `tokens` takes each read of an unfinished answer for one token."""

    sent: int = 0
    streaming: int = 0
    complete: int = 0
    truncated: int = 0
    failed: int = 0
    tokens: int = 0


class Driver:
    """Drives `slots` (sorted by due instant) against one target and writes their Records to a part file."""

    def __init__(
        self,
        slots: Sequence[Slot],
        target: Target,
        dialect: Dialect,
        part: PartFile,
        *,
        timeout_s: float,
        kernel_stamps: bool = True,
        worker: int,
        report: Callable[[Progress], None],
    ) -> None:
        self._slots = slots
        self._target = target
        self._dialect = dialect
        self._part = part
        self._timeout_ns = int(timeout_s * 1e9)
        self._kernel_stamps = kernel_stamps
        self._connect_timeout_s = min(timeout_s, 30.0)
        self._worker = worker
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._clocks = ClockPairs()
        self._health = Health()
        self._progress = Progress()
        self._start_ns = 0
        self._in_flight: dict[Exchange, Slot] = {}
        self._ended: deque[tuple[Exchange, Slot]] = deque()
        self._open = len(slots)
        self._all_done = asyncio.Event()
        self._interrupted = asyncio.Event()

    async def open(self) -> None:
        """Open a connection per slot, paced. A slot whose connection fails becomes a failed Record when it is due."""
        gate = asyncio.Semaphore(CONNECTS_AT_ONCE)
        await asyncio.gather(*(self._open_slot(slot, gate) for slot in self._slots))

    async def run(self, start_ns: int) -> None:
        """Send everything from `start_ns` (CLOCK_MONOTONIC) on and return when each request has a Record."""
        self._start_ns = start_ns
        await self._reopen_closed()
        self._clocks.take()
        ticking = self._loop.create_task(self._tick())
        for first, last in _same_instant(self._slots):
            await self._sleep_until(start_ns + self._slots[first].due_ns)
            if self._interrupted.is_set():
                self._cancel(self._slots[first:])
                break
            self._send(self._slots[first:last])
        if self._open:
            await self._all_done.wait()
        ticking.cancel()
        self._sample()

    def interrupt(self) -> None:
        """Send nothing more and end what is in flight, keeping what came."""
        self._interrupted.set()
        for exchange in list(self._in_flight):
            exchange.fail("cancelled", "cut off by an interrupt")

    def _cancel(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            assert slot.exchange is not None
            if slot.exchange.connection is None:
                self._on_end(slot.exchange, slot)
            else:
                slot.exchange.fail("cancelled", "not sent, the run was interrupted")

    async def _open_slot(self, slot: Slot, gate: asyncio.Semaphore) -> None:
        exchange = slot.exchange = Exchange(self._loop, lambda exchange: self._on_end(exchange, slot))
        async with gate:
            try:
                connection = await connect(self._target, self._connect_timeout_s, stamped=self._kernel_stamps)
            except (OSError, TimeoutError) as error:
                exchange.error_kind, exchange.error_detail = "connect", _reason(error)
                return
        self._attach(slot, connection)

    def _attach(self, slot: Slot, connection: Connection) -> None:
        assert slot.exchange is not None
        slot.connected_ns = connection.opened_ns
        slot.exchange.prepare(connection, connection.seal(slot.payload))

    async def _reopen_closed(self) -> None:
        """Servers close idle connections; a request on a closed one would fail for a reason that is ours."""
        gate = asyncio.Semaphore(CONNECTS_AT_ONCE)
        closed = [slot for slot in self._slots if _is_closed(slot)]
        for slot in closed:
            assert slot.exchange is not None
            assert slot.exchange.connection is not None
            slot.exchange.connection.close()
            slot.reopened += 1
        await asyncio.gather(*(self._open_slot(slot, gate) for slot in closed))

    async def _sleep_until(self, instant_ns: int) -> None:
        wait_ns = instant_ns - monotonic_ns() - SPIN_NS
        if wait_ns > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._interrupted.wait(), wait_ns / 1e9)
        while monotonic_ns() < instant_ns and not self._interrupted.is_set():
            pass

    def _send(self, slots: Sequence[Slot]) -> None:
        ready = []
        for slot in slots:
            exchange = slot.exchange
            assert exchange is not None
            if exchange.connection is None:
                self._on_end(exchange, slot)
            else:
                ready.append((exchange, slot))
        for exchange, _ in ready:
            exchange.send()
        for exchange, slot in ready:
            if not exchange.error_kind:
                self._in_flight[exchange] = slot
                exchange.listen()
        self._progress.sent += len(ready)

    def _on_end(self, exchange: Exchange, slot: Slot) -> None:
        self._in_flight.pop(exchange, None)
        self._ended.append((exchange, slot))
        if len(self._ended) == 1:
            self._loop.call_soon(self._record_one)

    def _record_one(self) -> None:
        exchange, slot = self._ended[0]
        record = record_of(exchange, slot.request, self._dialect, self._clocks, self._start_ns, self._health)
        record.worker = self._worker
        record.due_ns = slot.due_ns
        record.connected_ns = None if slot.connected_ns is None else slot.connected_ns - self._start_ns
        record.reopened = slot.reopened
        self._part.add(record)
        self._count(record)
        slot.exchange, slot.payload = None, b""
        self._ended.popleft()
        self._open -= 1
        if self._ended:
            self._loop.call_soon(self._record_one)
        elif not self._open:
            self._all_done.set()

    def _count(self, record: Record) -> None:
        progress = self._progress
        progress.tokens += sum(record.chunk_tokens)
        if record.state == "complete":
            progress.complete += 1
        elif record.state == "truncated":
            progress.truncated += 1
        else:
            progress.failed += 1

    async def _tick(self) -> None:
        """Housekeeping, four times a second: time limits, clock pairs, flushing, health and progress."""
        ticks = 0
        while True:
            before_ns = monotonic_ns()
            await asyncio.sleep(TICK_S)
            now_ns = monotonic_ns()
            self._health.stall(now_ns - before_ns - int(TICK_S * 1e9))
            ticks += 1
            self._expire(now_ns)
            if ticks % 4 == 0:
                self._sample()
            self._show()

    def _expire(self, now_ns: int) -> None:
        limit_ns = now_ns - self._timeout_ns
        expired = [exchange for exchange in self._in_flight if (exchange.sent_ns or now_ns) <= limit_ns]
        for exchange in expired:
            exchange.fail("timeout", f"no end after {self._timeout_ns / 1e9:g} s")

    def _sample(self) -> None:
        self._clocks.take()
        values = self._health.sample() | {"clock_disagreement_ns": self._clocks.disagreement_ns}
        at_ns = monotonic_ns() - self._start_ns
        self._part.add(Telemetry(source="client", at_ns=at_ns, worker=self._worker, values=values))
        self._part.flush()
        self._show()

    def _show(self) -> None:
        arriving = [exchange for exchange in self._in_flight if exchange.sizes]
        tokens = self._progress.tokens + sum(len(exchange.sizes) for exchange in arriving)
        self._report(replace(self._progress, streaming=len(arriving), tokens=tokens))


def _same_instant(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """Index ranges of slots that are due at the same instant."""
    ranges: list[tuple[int, int]] = []
    for index, slot in enumerate(slots):
        if ranges and slots[ranges[-1][0]].due_ns == slot.due_ns:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges


def _is_closed(slot: Slot) -> bool:
    connection = slot.exchange.connection if slot.exchange is not None else None
    return connection is not None and connection.gone()


def _reason(error: OSError | TimeoutError) -> str:
    """In the system's words: asyncio's own would name the address instead of the cause."""
    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {getattr(error, 'verify_message', '') or error.reason or error}"
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
