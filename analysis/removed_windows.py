"""Summarises a file of Records before the file is removed (--keep-records). Only the summary remains."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loadgen.analysis.frame import Booleans, Floats, Frame, FrameBuilder
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.run.packed_ids import pack_ids
from loadgen.analysis.run.record_files import worker_of
from loadgen.analysis.run.removed_records import RemovedRecords, RemovedWindow
from loadgen.analysis.run.runfile import scan_records
from loadgen.analysis.stats import percentiles

MAX_WINDOWS = 60
MIN_WINDOW_NS = 60_000_000_000
LATENCIES = ("ttft", "tpot", "e2e")
"""Names of the metrics of RemovedWindow, without their unit."""
NS_PER_S = 1_000_000_000


def describe_removed(file: Path) -> RemovedRecords:
    """Return a summary of `file`, a file of Records that will be removed.

    The summary contains the number of measured requests by state, and figures of these requests by time window. A
    request belongs to the window in which it ended. If it has no end, it belongs to the window in which it was due.

    The windows follow one another without gaps, and have equal lengths. There are at most MAX_WINDOWS windows. Each
    lasts at least a minute, unless there is only one window.
    """
    builder = FrameBuilder()
    scan_records([file], builder.add, builder.add_block)
    frame = builder.frame()
    states: dict[str, int] = {}
    for outcome, count in frame.outcomes.items():
        if outcome.measured:
            states[outcome.state] = states.get(outcome.state, 0) + count.requests
    windows = list(_windows(frame)) if states else []
    return RemovedRecords(
        file=file.name,
        worker=worker_of(file),
        states=states,
        windows=windows,
        ids=pack_ids(frame.id[frame.measured].tolist()),
    )


def _windows(frame: Frame) -> list[RemovedWindow]:
    ends = np.where(np.isnan(frame.end_ns), frame.due_ns, frame.end_ns)
    ends_measured = ends[frame.measured]
    first, last = float(ends_measured.min()), float(ends_measured.max())
    count = int(min(MAX_WINDOWS, max(1, (last - first) // MIN_WINDOW_NS)))
    edges = np.linspace(first, last, count + 1).astype(np.int64)
    windows = []
    for number, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        before_end = ends <= end if number == count - 1 else ends < end
        windows.append(_window(frame, frame.measured & (ends >= begin) & before_end, begin, end))
    return windows


def _window(frame: Frame, rows: Booleans, begin: int, end: int) -> RemovedWindow:
    complete = rows & frame.complete
    figures: dict[str, int] = {}
    for name in LATENCIES:
        values = METRICS[f"{name}_s"].rows(frame) * NS_PER_S
        samples: Floats = values[complete & ~np.isnan(values)]
        if len(samples):
            p50, p99 = percentiles(samples, 0.5, 0.99)
            figures |= {f"{name}_p50_ns": round(p50), f"{name}_p99_ns": round(p99)}
    return RemovedWindow(
        from_ns=begin,
        to_ns=end,
        requests=int(rows.sum()),
        complete=int(complete.sum()),
        output_tokens=int(np.nansum(frame.output_tokens[complete])),
        **figures,
    )
