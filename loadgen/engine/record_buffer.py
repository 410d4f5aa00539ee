"""Stores the Records of warm-up requests in memory until the start time of the run is known."""

from __future__ import annotations

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Telemetry


class RecordBuffer:
    """Keeps Records in memory that do not belong to the run file: those of warm-up requests and of canaries.

    It replaces the writer of a run file while these requests are sent.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.unwritten_bytes = 0
        """Always 0. The attribute exists because RunWriter has it."""

    def add(self, item: Record | Telemetry) -> None:
        """Store `item` if it is a Record, and ignore it if it is Telemetry.

        The results contain no telemetry of the warm-up.
        """
        if isinstance(item, Record):
            self.records.append(item)

    def flush(self) -> None:
        """Do nothing. The method exists because RunWriter, which this class replaces, has it."""
