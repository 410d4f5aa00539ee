"""Accounts of requests that have ended, kept when nothing is due: a burst's streams all end within a moment, and what
counting one costs would be what the last tokens of the others are late."""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass

from servers.simulated.log import Log, LogLine
from servers.simulated.metrics import Finished
from servers.simulated.stream import Stream
from servers.simulated.wire import Site

_LONGEST = 10_000
"""Entries that may wait. A server that is never idle settles one when it gets another."""
_COLLECT_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One request for tokens that has ended; `stream` is None when it was refused."""

    request_id: str
    fault: str
    received_ns: int
    ended_ns: int
    realtime_offset_ns: int
    """CLOCK_REALTIME minus CLOCK_MONOTONIC at the end: one offset for the line, as streams last seconds."""
    stream: Stream | None


class Ledger:
    """Turns entries into lines of the log and counts of the metrics."""

    def __init__(self, site: Site, log: Log) -> None:
        self._site = site
        self._log = log
        self._entries: deque[Entry] = deque()
        self._collected_s = time.monotonic()

    def add(self, entry: Entry) -> None:
        """Takes an entry; settles everything when no stream is left that could be made late."""
        self._entries.append(entry)
        if not self._site.streams:
            self.settle()
            self._collect()
        elif len(self._entries) > _LONGEST:
            self._settle_one()

    def settle(self) -> None:
        """Accounts for every request that has ended, for somebody who wants to read the totals."""
        while self._entries:
            self._settle_one()
        self._log.flush()

    def _settle_one(self) -> None:
        entry = self._entries.popleft()
        stream, offset_ns = entry.stream, entry.realtime_offset_ns
        if stream is not None:
            self._site.metrics.finish(_finished(entry, stream))
        self._log.append(
            LogLine(
                request_id=entry.request_id,
                received_ns=entry.received_ns + offset_ns,
                due_ns=[instant + offset_ns for instant in stream.due_ns] if stream else [],
                sent_ns=[instant + offset_ns for instant in stream.sent_ns] if stream else [],
                tokens=stream.tokens if stream else [],
                prompt_tokens=stream.generation.prompt_tokens if stream else 0,
                output_tokens=sum(stream.tokens) if stream else 0,
                fault=entry.fault,
            )
        )

    def _collect(self) -> None:
        """Full collections happen here and not in the middle of a burst, which one would stop for tens of ms."""
        now_s = time.monotonic()
        if now_s - self._collected_s > _COLLECT_PAUSE_S:
            self._collected_s = now_s
            gc.collect()


def _finished(entry: Entry, stream: Stream) -> Finished:
    generation = stream.generation
    reached_end = stream.ending == "complete" and stream.sent_ns
    return Finished(
        prompt_tokens=generation.prompt_tokens,
        output_tokens=stream.count,
        asked_tokens=generation.asked_tokens,
        finish_reason=generation.finish_reason if reached_end else "abort",
        received_ns=entry.received_ns,
        sent_ns=stream.sent_ns,
        ended_ns=entry.ended_ns,
    )
