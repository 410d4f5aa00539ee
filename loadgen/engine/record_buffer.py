"""Buffers the Records of warm-up requests in memory until the start time of the run is known."""

from __future__ import annotations

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Telemetry


class RecordBuffer:
    """Keeps the Records of warm-up requests in memory. It replaces the writer of a run file during the warm-up."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, item: Record | Telemetry) -> None:
        """Store a Record, and ignore Telemetry.

        Telemetry describes the health of the client. No figure covers the warm-up, so its telemetry is not needed.
        """
        if isinstance(item, Record):
            self.records.append(item)

    def flush(self) -> None:
        """Do nothing, because the Records remain in memory. RunWriter has a method of the same name."""
