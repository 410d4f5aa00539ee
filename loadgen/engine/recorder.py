"""The recorder: takes ended requests, decodes one per turn of the event loop, and keeps the counts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from loadgen.engine.clock import ClockPairs
from loadgen.engine.decode import record_of, said
from loadgen.engine.feed import Slot
from loadgen.engine.health import Counts, Health
from loadgen.record import NoneOrKind, Record, unsent
from loadgen.runfile import Telemetry
from servers.kinds.base import Dialect
from servers.wire.stamps import StampSource
from servers.wire.transport import Exchange


class RecordSink(Protocol):
    """Somewhere Records and Telemetry go."""

    def add(self, item: Record | Telemetry) -> None:
        """Take one line."""

    def flush(self) -> None:
        """Make sure that others can see it."""


class Held:
    """A sink in memory: warm-up Records wait here until the run's instant 0 is known."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, item: Record | Telemetry) -> None:
        """Keep a Record; the client's health during warm-up is in no figure."""
        if isinstance(item, Record):
            self.records.append(item)

    def flush(self) -> None:
        """See RecordSink. Nobody else looks here."""


class Recorder:
    """Turns ended Exchanges into Records of one worker. `on_idle` is called when everything taken has been recorded,
    `on_turn` when a session's turn has been: with its Record, and with the answer's text where it is complete."""

    def __init__(
        self,
        dialect: Dialect,
        sink: RecordSink,
        worker: int,
        counts: Counts,
        stamps: StampSource,
        on_idle: Callable[[], None],
        on_turn: Callable[[Slot, Record, str], None],
    ) -> None:
        self.start_ns = 0
        """CLOCK_MONOTONIC at the run's instant 0."""
        self.health = Health()
        self._dialect = dialect
        self._sink = sink
        self._worker = worker
        self._counts = counts
        self._stamps = stamps
        self._on_idle = on_idle
        self._on_turn = on_turn
        self._clocks = ClockPairs()
        self._ended: deque[tuple[Slot, Exchange | None, NoneOrKind, str]] = deque()
        self._tokens = 0

    @property
    def busy(self) -> bool:
        """Whether something taken is still to be recorded."""
        return bool(self._ended)

    def begin(self, start_ns: int) -> None:
        """The clock is about to start: read both clocks, and forget what the client's health was until now."""
        self.start_ns = start_ns
        self._clocks.take()
        self.health.sample()

    def take(self, slot: Slot, exchange: Exchange | None, kind: NoneOrKind = "", detail: str = "") -> None:
        """An ended request. Without an exchange nothing was sent, and `kind` and `detail` say why."""
        self._ended.append((slot, exchange, kind, detail))
        if len(self._ended) == 1:
            asyncio.get_running_loop().call_soon(self._record_one)

    def sample(self, now_ns: int) -> None:
        """Read the clocks, write the client's health, and flush."""
        self._clocks.take()
        values = self.health.sample() | self._stamps.counts()
        values["clock_disagreement_ns"] = self._clocks.disagreement_ns
        self._sink.add(Telemetry(source="client", at_ns=now_ns - self.start_ns, worker=self._worker, values=values))
        self._sink.flush()

    def watch(self, in_flight: Collection[Exchange]) -> None:
        """Bring the counts of unfinished requests up to date."""
        arriving = [len(exchange.sizes) for exchange in in_flight if exchange.sizes]
        self._counts.streaming = len(arriving)
        self._counts.tokens = self._tokens + sum(arriving)

    def _record_one(self) -> None:
        slot, exchange, kind, detail = self._ended[0]
        if exchange is None:
            record = unsent(slot.request, kind, detail)
        else:
            record = record_of(
                exchange, slot.request, self._dialect, self._clocks, self.start_ns, self.health, self._stamps
            )
        record.worker = self._worker
        record.due_ns = slot.due_ns
        record.connected_ns = None if slot.connected_ns is None else slot.connected_ns - self.start_ns
        record.reopened = slot.reopened
        self._sink.add(record)
        self._tokens += sum(record.chunk_tokens)
        setattr(self._counts, record.state, getattr(self._counts, record.state) + 1)
        slot.exchange, slot.payload = None, b""
        if slot.conversation is not None:
            complete = exchange is not None and record.state == "complete"
            self._on_turn(slot, record, said(exchange, self._dialect) if exchange and complete else "")
        self._ended.popleft()
        if self._ended:
            asyncio.get_running_loop().call_soon(self._record_one)
        else:
            self._on_idle()
