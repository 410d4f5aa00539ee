"""Where long answers wait for their end when they take much memory together: a file without a name, of as many blocks
as wait at once. What has been looked at of an answer is not needed again before it is recorded."""

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
"""What answers under way may take of a worker's memory."""
AT_ONCE_BYTES = 6 << 20
"""What of them is laid aside at a time: nothing else is done meanwhile."""
_SIZE = attrgetter("size")


def bytes_in_memory(exchange: Exchange) -> int:
    """Bytes of it that take memory."""
    return exchange.size - BLOCK_BYTES * len(exchange.spilled)


class DiskSpill:
    """Blocks of bytes that are not needed yet. Nothing is left of it when it is closed, or the process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self._blocks = 0
        self._free: list[int] = []
        self._full = False

    def spill(self, in_flight: Collection[Exchange]) -> None:
        """Lay aside what these take more than HELD_BYTES, a little of it each time. What the disk refuses stays."""
        if self._full or sum(map(_SIZE, in_flight)) <= MEMORY_LIMIT_BYTES:
            return
        if max(map(_SIZE, in_flight)) < 2 * BLOCK_BYTES:
            return
        more = min(sum(map(bytes_in_memory, in_flight)) - MEMORY_LIMIT_BYTES, AT_ONCE_BYTES)
        for exchange in [*in_flight] if more > 0 else ():
            if bytes_in_memory(exchange) >= 2 * BLOCK_BYTES and more > 0:  # seldom, then: it is looked at each time
                more -= bytes_in_memory(exchange)
                try:
                    self._lay(exchange)
                except OSError:
                    self._full = True
                    return

    def _lay(self, exchange: Exchange) -> None:
        exchange.scan()
        tail, at, framing = exchange.tail(), 0, exchange.framing
        seen = framing.position - (exchange.size - len(tail)) if framing.chunked else len(tail)
        try:
            while at + BLOCK_BYTES <= seen:
                number = self.put(tail[at : at + BLOCK_BYTES])
                exchange.spilled.append(partial(self.take, number))
                at += BLOCK_BYTES
        finally:
            exchange.parts = [tail[at:]]

    def put(self, block: bytes) -> int:
        """Keep BLOCK_BYTES; the number by which they are taken back. Raises OSError, as of a full disk."""
        if self._file < 0:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._file = os.dup(file.fileno())
        number = self._free.pop() if self._free else self._blocks
        self._blocks = max(self._blocks, number + 1)
        if os.pwrite(self._file, block, number * BLOCK_BYTES) < len(block):
            raise OSError("the disk is full")
        return number

    def take(self, number: int) -> bytes:
        """Such a block, which is kept no longer."""
        self._free.append(number)
        return os.pread(self._file, BLOCK_BYTES, number * BLOCK_BYTES)

    def close(self) -> None:
        """Nothing is kept any more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
