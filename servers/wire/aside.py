"""Where long answers wait for their end: a file without a name, of as many blocks as wait at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

BLOCK_BYTES = 32_768


class Aside:
    """Blocks of bytes that are not needed yet. Nothing is left of it when it is closed, or the process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self._blocks = 0
        self._free: list[int] = []

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
