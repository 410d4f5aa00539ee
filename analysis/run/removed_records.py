"""The part of a run whose Records were removed while the run was in progress (--keep-records)."""

from __future__ import annotations

import msgspec

from loadgen.analysis.run.record import Count, Integer


class RemovedWindow(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Figures of the measured requests that ended in one time window, and whose Records were removed with one file.

    Latencies are percentiles over the complete requests, in ns. A latency is None if no request of the window has it.
    """

    from_ns: Integer
    """Start of the window, in ns from the start of the run."""
    to_ns: Integer
    requests: Count
    complete: Count
    output_tokens: Count = 0
    ttft_p50_ns: Integer | None = None
    ttft_p99_ns: Integer | None = None
    tpot_p50_ns: Integer | None = None
    tpot_p99_ns: Integer | None = None
    e2e_p50_ns: Integer | None = None
    e2e_p99_ns: Integer | None = None


class RemovedRecords(msgspec.Struct, tag_field="type", tag="removed", kw_only=True, frozen=True):
    """The summary of a removed file of Records: the number of requests by state, and figures by time window."""

    file: str
    """Name of the file in the folder of the run."""
    worker: Count
    states: dict[str, Count]
    """Number of measured requests by state."""
    windows: list[RemovedWindow]
    ids: bytes = b""
    """Ids of the measured requests in the file (loadgen.analysis.run.packed_ids), in base64."""

    @property
    def requests(self) -> int:
        """Number of measured requests in the file."""
        return sum(self.states.values())
