"""Compares a run's receive timestamps with the log of the simulated server (`loadgen calibrate`).

The log states when the server began each `send`, sent_k. The error of TTFT is stamp_1 - sent_1, because both count from
the same send time. The error of TPOT is ((stamp_k - stamp_1) - (sent_k - sent_1)) / (k - 1), with one token per event.
The error of a gap is that of the difference of its two ends. The server's own lateness is in neither side. Both clocks
are CLOCK_REALTIME; the run's timestamps are converted with its pair of clock readings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from loadgen.analysis.client_health import ring_difference_counts
from loadgen.analysis.format import duration, percent
from loadgen.analysis.frame import Integers
from loadgen.analysis.run.runfile import Run, stamp_facts
from loadgen.analysis.stats import percentiles, ring_difference_s, round_to_ns
from loadgen.analysis.timestamp_errors import STALL_CHECK_S

EXACT_TTFT_ERROR_S = 1e-3
"""A client is exact if the p99 of its TTFT error is below this."""
KEPT_UP_SHARE = 0.9
"""A server that sent less than this share of the requested rate was the limit itself."""
COALESCED_SHARE = 0.01
"""From this share of gaps within one read on, the p99 of the gap error is that of unmeasured gaps."""


class ServerLogLine(msgspec.Struct, frozen=True):
    """One line of the simulated server's log, with the fields that are needed here. Instants are ns on
    CLOCK_REALTIME."""

    request_id: str = ""
    due_ns: list[int] = []
    sent_ns: list[int] = []


class ErrorSizes(msgspec.Struct, frozen=True):
    """Absolute errors in seconds."""

    p50: float
    p99: float
    max: float


class StampComparison(msgspec.Struct, frozen=True):
    """The comparison of one run with the server's log."""

    stamps: str
    requests: int
    """Complete requests with the same number of chunks in the run as events in the log."""
    not_compared: int
    """All other requests."""
    ttft_s: ErrorSizes
    tpot_s: ErrorSizes
    icl_s: ErrorSizes
    merged: int
    """First tokens that were read together with later ones and have the timestamp of the last."""
    merged_s_max: float
    """Largest TTFT error among these."""
    merged_beyond: int
    """Number of these with a TTFT error larger than `lag_s`."""
    coalesced_share: float
    """Share of gaps between two events of one read."""
    lag_s: float
    """Longest time for which the client may not have read: its longest stall plus the interval of its stall checks."""
    events_per_s: float
    """Event rate that the server reached."""
    asked_per_s: float
    """Event rate that was requested."""
    server_late_p99_s: float
    ring_off_s: tuple[float | None, float | None] = (None, None)
    """Difference between ring and socket timestamps of a read at p50 and p99; None if they were not compared."""

    @property
    def exact(self) -> bool:
        """True if TTFT is exact to the millisecond."""
        return self.ttft_s.p99 < EXACT_TTFT_ERROR_S

    @property
    def server_kept_up(self) -> bool:
        """True if the server reached the requested rate. Otherwise a faster client would not have measured more."""
        return self.events_per_s >= KEPT_UP_SHARE * self.asked_per_s


def read_log(path: Path) -> dict[int, ServerLogLine]:
    """Read the server's log, by request id. Raises OSError and msgspec.DecodeError."""
    decoder = msgspec.json.Decoder(ServerLogLine)
    lines = map(decoder.decode, path.read_bytes().splitlines())
    return {int(line.request_id): line for line in lines if line.request_id}


def compare_with_log(run: Run, log: Mapping[int, ServerLogLine]) -> StampComparison:
    """Compare all timestamps of complete requests with the log. Raises ValueError if there is nothing to compare."""
    pairs = [(record, log[record.id]) for record in run.records if record.id in log and record.state == "complete"]
    # Chunk j of the run must be send j of the log, with at least one gap.
    pairs = [(record, line) for record, line in pairs if len(record.chunk_ns) == len(line.sent_ns) > 1]
    if not pairs:
        raise ValueError("no complete request has as many tokens as the server's log has sends")
    records, lines = zip(*pairs, strict=True)
    gaps = np.concatenate([np.diff(np.array(record.chunk_ns)) for record in records])
    true_gaps = np.concatenate([np.diff(np.array(line.sent_ns)) for line in lines])
    start_ns = run.header.start_realtime_ns
    ttft_ns = [record.chunk_ns[0] - (line.sent_ns[0] - start_ns) for record, line in pairs]
    merged_ns = [error for record, error in zip(records, ttft_ns, strict=True) if record.first_token_merged]
    lag_s = STALL_CHECK_S + max((sample.values.get("stall_ns_max", 0) for sample in run.telemetry), default=0) / 1e9
    server_late_ns = np.concatenate([np.subtract(line.sent_ns, line.due_ns) for line in lines])
    ring_differences = ring_difference_counts(run.telemetry)
    return StampComparison(
        stamps=stamp_facts(*(record.stamps for record in records)).name,
        requests=len(pairs),
        not_compared=len(run.records) - len(pairs),
        ttft_s=_sizes(ttft_ns),
        tpot_s=_sizes([_tpot_ns(record.chunk_ns) - _tpot_ns(line.sent_ns) for record, line in pairs]),
        icl_s=_sizes(gaps - true_gaps),
        merged=len(merged_ns),
        merged_s_max=max(merged_ns, default=0) / 1e9,
        merged_beyond=sum(error / 1e9 > lag_s for error in merged_ns),
        coalesced_share=float(np.mean(gaps == 0)),
        lag_s=lag_s,
        events_per_s=_rate(line.sent_ns for line in lines),
        asked_per_s=_rate(line.due_ns for line in lines),
        server_late_p99_s=_sizes(server_late_ns).p99,
        ring_off_s=(ring_difference_s(ring_differences, 0.50), ring_difference_s(ring_differences, 0.99)),
    )


def stamps_heading() -> str:
    """Return the two heading lines of the table of `stamps_row`."""
    parts = "".join(f"{title:^27}" for title in ("TTFT error, ms", "TPOT error, ms", "gap error, ms"))
    return f"{'':20}{parts}".rstrip() + f"\n{'stamps':8}{'events/s':>10}  " + f"{'p50':>9}{'p99':>9}{'max':>9}" * 3


def stamps_row(comparison: StampComparison) -> str:
    """Return one burst as a table row."""
    errors = (comparison.ttft_s, comparison.tpot_s, comparison.icl_s)
    cells = [f"{value * 1e3:9.4f}" for sizes in errors for value in (sizes.p50, sizes.p99, sizes.max)]
    return f"{comparison.stamps:8}{comparison.events_per_s:10,.0f}  {''.join(cells)}"


def stamps_notes(comparison: StampComparison) -> list[str]:
    """Return the notes on a table row."""
    notes = []
    if comparison.merged:
        beyond = f"{comparison.merged_beyond:,} of them" if comparison.merged_beyond else "none of them"
        notes += [
            f"  {comparison.merged:,} of {comparison.requests:,} first tokens were read together with later ones: off "
            f"by up to {duration(comparison.merged_s_max)}, and marked in the run",
            f"  {beyond} by more than the {duration(comparison.lag_s)} for which the client may not have read",
        ]
    p50_s, p99_s = comparison.ring_off_s
    if p50_s is not None and p99_s is not None:
        notes.append(
            f"  compared with the socket's timestamp of each read: within {duration(p50_s)}, p99 {duration(p99_s)}"
        )
    if comparison.coalesced_share > COALESCED_SHARE:
        notes.append(f"  {percent(comparison.coalesced_share)} of the gaps are within one read and were not measured")
    if not comparison.server_kept_up:
        notes.append(
            f"  the simulated server sent {comparison.events_per_s:,.0f} of the {comparison.asked_per_s:,.0f} "
            f"requested events/s, late by {duration(comparison.server_late_p99_s)} at p99. This is no timestamp error."
        )
    if comparison.not_compared:
        notes.append(f"  {comparison.not_compared:,} requests were not compared: incomplete, or not in the log")
    return notes


def exact_up_to(fastest: StampComparison | None, limited_by: str) -> str:
    """Return the result of the search as a sentence. `limited_by` is `client`, `server` or `time`."""
    error = duration(EXACT_TTFT_ERROR_S)
    if fastest is None:
        return f"TTFT was never exact to {error} at p99."
    reason = {
        "client": "above that, the client is not exact",
        "server": "the simulated server sent no faster",
        "time": "no higher rate was tried",
    }[limited_by]
    return f"TTFT is exact to {error} at p99 up to {fastest.events_per_s:,.0f} events/s: {reason}."


def _tpot_ns(instants: Sequence[int]) -> float:
    """Return (t_k - t_1) / (k - 1), with one token per event."""
    return float(instants[-1] - instants[0]) / (len(instants) - 1)


def _sizes(errors_ns: Sequence[float] | Integers) -> ErrorSizes:
    return ErrorSizes(*map(round_to_ns, percentiles(np.abs(np.asarray(errors_ns, np.float64)) / 1e9, 0.5, 0.99, 1.0)))


def _rate(instants: Iterable[Sequence[int]]) -> float:
    """Return the events per second while streams were running: all gaps / time from the first event to the last."""
    streams = list(instants)
    gaps = sum(len(stream) - 1 for stream in streams)
    span_ns = max(stream[-1] for stream in streams) - min(stream[0] for stream in streams)
    return round(gaps / max(span_ns, 1) * 1e9, 1)
