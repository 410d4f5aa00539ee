"""Spills long unfinished responses to an unlinked temporary file when they use too much memory.

Only bytes that have already been searched for the end of the response are spilled. These bytes are not needed again
before the response is recorded. The file reuses the positions of freed blocks. Its size is therefore limited by the
maximum number of blocks that were spilled at the same time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadgen.servers.wire.transport import Exchange

BLOCK_BYTES = 32_768
MEMORY_LIMIT_BYTES = 64 << 20
"""Memory that unfinished responses may use in one worker."""
AT_ONCE_BYTES = 6 << 20
"""Bytes that one call spills at most, because the worker does nothing else meanwhile."""
_SIZE = attrgetter("size")


def bytes_in_memory(exchange: Exchange) -> int:
    """Return the number of received bytes of an exchange (one request and its response) that are in memory."""
    return exchange.size - BLOCK_BYTES * len(exchange.spilled)


class DiskSpill:
    """Stores blocks of received bytes in a temporary file, which disappears when the process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self._blocks = 0
        self._free: list[int] = []
        self._full = False

    def spill(self, in_flight: Collection[Exchange]) -> None:
        """Write received bytes to disk if the exchanges in flight use more than MEMORY_LIMIT_BYTES of memory in total.

        An exchange is one request and its response. One call writes at most about AT_ONCE_BYTES. If a write fails, the
        remaining bytes stay in memory, and later calls do nothing."""
        if self._full or sum(map(_SIZE, in_flight)) <= MEMORY_LIMIT_BYTES:
            return
        if max(map(_SIZE, in_flight)) < 2 * BLOCK_BYTES:
            return
        excess = min(sum(map(bytes_in_memory, in_flight)) - MEMORY_LIMIT_BYTES, AT_ONCE_BYTES)
        if excess <= 0:
            return
        for exchange in [*in_flight]:
            # Small exchanges are skipped, so that each one is scanned seldom.
            if bytes_in_memory(exchange) >= 2 * BLOCK_BYTES and excess > 0:
                excess -= bytes_in_memory(exchange)
                try:
                    self._spill_one(exchange)
                except OSError:
                    self._full = True
                    return

    def _spill_one(self, exchange: Exchange) -> None:
        """Write received bytes of one exchange to disk, in whole blocks.

        Only bytes that have already been searched for the end of the response are written.

        Raises OSError if a block cannot be written."""
        exchange.scan()
        tail = exchange.tail()
        framing = exchange.framing
        scanned = framing.position - (exchange.size - len(tail)) if framing.chunked else len(tail)
        start = 0
        try:
            while start + BLOCK_BYTES <= scanned:
                number = self.put(tail[start : start + BLOCK_BYTES])
                exchange.spilled.append(partial(self.take, number))
                start += BLOCK_BYTES
        finally:
            exchange.parts = [tail[start:]]

    def put(self, block: bytes) -> int:
        """Store a block of BLOCK_BYTES bytes, and return its number, which `take` accepts.

        Raises OSError if the block cannot be written, for example because the disk is full."""
        if self._file < 0:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._file = os.dup(file.fileno())
        number = self._free.pop() if self._free else self._blocks
        self._blocks = max(self._blocks, number + 1)
        if os.pwrite(self._file, block, number * BLOCK_BYTES) < len(block):
            raise OSError("the disk is full")
        return number

    def take(self, number: int) -> bytes:
        """Return block `number`, and remove it from the file."""
        self._free.append(number)
        return os.pread(self._file, BLOCK_BYTES, number * BLOCK_BYTES)

    def close(self) -> None:
        """Close the file. All blocks in the file are lost."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
