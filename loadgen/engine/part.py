"""Part files: where a worker's lines go while the run is on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import msgspec

from loadgen.record import Record
from loadgen.runfile import Telemetry

FLUSH_BYTES = 1 << 20


class Part(Protocol):
    """Somewhere Records and Telemetry go."""

    def add(self, item: Record | Telemetry) -> None:
        """Take one line."""

    def flush(self) -> None:
        """Make sure that others can see it."""


class Held:
    """A Part in memory: warm-up Records wait here until the run's instant 0 is known."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, item: Record | Telemetry) -> None:
        """Keep a Record; the client's health during warm-up is in no figure."""
        if isinstance(item, Record):
            self.records.append(item)

    def flush(self) -> None:
        """See Part. Nobody else looks here."""


class PartFile:
    """One worker's part of the Run: lines are kept until the disk has taken them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self._pending = bytearray()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.error: OSError | None = None
        """Why the last flush could not write everything; None when it could."""

    def add(self, item: Record | Telemetry) -> None:
        """Append one line. Written when a mebibyte has gathered or `flush` is called."""
        self.add_line(self._encoder.encode(item) + b"\n")

    def add_line(self, line: bytes) -> None:
        """Append a line that is encoded already, with its end."""
        self._pending += line
        if len(self._pending) >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is pending; what the disk refuses stays pending and `error` says why."""
        self.error = None
        try:
            while self._pending:
                del self._pending[: os.write(self._file, self._pending)]
        except OSError as error:
            self.error = error

    def close(self, rescue: Path) -> Path | None:
        """Flush and close. What the disk refused goes to the file `rescue`, whose path is returned.

        Raises OSError when that cannot be written either.
        """
        self.flush()
        os.close(self._file)
        if not self._pending:
            return None
        rescue.write_bytes(self._pending)
        return rescue
