"""Where the Records of warm-up requests wait for the run's instant 0."""

from __future__ import annotations

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Telemetry


class RecordBuffer:
    """A sink in memory: warm-up Records wait here until the run's instant 0 is known."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, item: Record | Telemetry) -> None:
        """Keep a Record; the client's health during warm-up is in no figure."""
        if isinstance(item, Record):
            self.records.append(item)

    def flush(self) -> None:
        """Nobody else looks here."""
