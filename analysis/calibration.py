"""Compares a run's receive timestamps with the log of the simulated server (`loadgen calibrate`).

For each request, the log contains the times at which the server began its `send` calls: sent_1 to sent_k, one for each
chunk. The receive timestamps of these chunks are t_1 to t_k. The errors of one request are:

- TTFT: `t_1 - sent_1`. The measured and the true TTFT start at the same send time, which therefore cancels out.
- TPOT: `((t_k - t_1) - (sent_k - sent_1)) / (k - 1)`, with one token per chunk.
- Gap between chunks: `(t_{j+1} - t_j) - (sent_{j+1} - sent_j)`.

If the server sends chunk j late, both sent_j and t_j are late, so the delay is not part of any error. All times are on
CLOCK_REALTIME. The timestamps of the run are converted with the pair of clock readings in its header.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from loadgen.analysis.client_health import ring_difference_counts
from loadgen.analysis.format import duration, percent, pluralise
from loadgen.analysis.frame import Integers
from loadgen.analysis.run.runfile import Run, stamp_facts
from loadgen.analysis.stats import percentiles, ring_difference_s, round_to_ns
from loadgen.analysis.timestamp_errors import STALL_CHECK_S
from loadgen.workloads.request import number_of_wire_id

EXACT_TTFT_ERROR_S = 1e-3
"""The client is exact if the p99 of its absolute TTFT error is below this value, in seconds."""
KEPT_UP_SHARE = 0.9
"""Minimum share of the requested event rate that the simulated server must reach. Below this share, the server itself
was the limit."""
COALESCED_SHARE = 0.01
"""If more than this share of the gaps are unmeasured, the p99 of the gap error describes unmeasured gaps. A gap is
unmeasured if both of its chunks arrived in one read."""


class ServerLogLine(msgspec.Struct, frozen=True):
    """One line of the simulated server's log: the fields that are compared with the run. Times are in ns
    (CLOCK_REALTIME).
    """

    request_id: str = ""
    due_ns: list[int] = []
    sent_ns: list[int] = []
    first_send_end_ns: int = 0
    """Time when the call that sent the first token returned. 0 in logs of other servers, which do not note it."""


class ErrorSizes(msgspec.Struct, frozen=True):
    """Percentiles of absolute errors, in seconds."""

    p50: float
    p99: float
    max: float


class StampComparison(msgspec.Struct, frozen=True):
    """The result of comparing a run's receive timestamps with the simulated server's log."""

    stamps: str
    requests: int
    """Complete requests for which the run has as many chunks as the log has events."""
    not_compared: int
    """Requests of the run that could not be compared with the log."""
    ttft_s: ErrorSizes
    tpot_s: ErrorSizes
    icl_s: ErrorSizes
    merged: int
    """Number of merged first tokens: first tokens that were read together with later tokens, whose timestamp they
    share."""
    merged_s_max: float
    """Largest TTFT error of a merged first token, in seconds."""
    merged_beyond: int
    """Number of merged first tokens with a TTFT error above `lag_s`."""
    coalesced_share: float
    """Share of gaps whose two chunks arrived in one read, so that the measured gap is 0."""
    lag_s: float
    """Longest time for which the client may not have read, in seconds: its longest stall + the interval of its stall
    checks."""
    events_per_s: float
    """Rate at which the server sent events."""
    asked_per_s: float
    """Requested event rate: the rate at which events were due."""
    server_late_p99_s: float
    ring_off_s: tuple[float | None, float | None] = (None, None)
    """Difference between the ring timestamp and the socket timestamp of a read: p50 and p99 in seconds, or None if they
    were not compared."""

    @property
    def exact(self) -> bool:
        """True if the receive timestamps are exact: the p99 of the TTFT error is below 1 ms."""
        return self.ttft_s.p99 < EXACT_TTFT_ERROR_S

    @property
    def server_kept_up(self) -> bool:
        """True if the simulated server sent events at 90% or more of the requested rate.

        If False, the server was the limit, not the client.
        """
        return self.events_per_s >= KEPT_UP_SHARE * self.asked_per_s


def read_log(path: Path) -> dict[int, ServerLogLine]:
    """Return the lines of the simulated server's log by request id. Raises OSError and msgspec.DecodeError."""
    decoder = msgspec.json.Decoder(ServerLogLine)
    lines = map(decoder.decode, path.read_bytes().splitlines())
    return {number_of_wire_id(line.request_id): line for line in lines if line.request_id}


def compare_with_log(run: Run, log: Mapping[int, ServerLogLine]) -> StampComparison:
    """Compare the receive timestamps of the complete requests with the simulated server's log.

    A request is compared if it has at least two chunks and the log contains the same number of `send` calls for it.
    Raises ValueError if no request can be compared.
    """
    pairs = [(record, log[record.id]) for record in run.records if record.id in log and record.state == "complete"]
    # Chunk j of the run must be send j of the log, with at least one gap.
    pairs = [(record, line) for record, line in pairs if len(record.chunk_ns) == len(line.sent_ns) > 1]
    if not pairs:
        raise ValueError("no complete request has at least two chunks and the number of chunks in the server's log")
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
    """Return the heading (two lines of text) of the calibration table. `stamps_row` returns its rows."""
    parts = "".join(f"{title:^27}" for title in ("TTFT error, ms", "TPOT error, ms", "gap error, ms"))
    return f"{'':20}{parts}".rstrip() + f"\n{'stamps':8}{'events/s':>10}  " + f"{'p50':>9}{'p99':>9}{'max':>9}" * 3


def stamps_row(comparison: StampComparison) -> str:
    """Return one row of the calibration table as text.

    The row contains the timestamp source, the event rate, and the errors of TTFT, TPOT and gaps.
    """
    errors = (comparison.ttft_s, comparison.tpot_s, comparison.icl_s)
    cells = [f"{value * 1e3:9.4f}" for sizes in errors for value in (sizes.p50, sizes.p99, sizes.max)]
    return f"{comparison.stamps:8}{comparison.events_per_s:10,.0f}  {''.join(cells)}"


def stamps_notes(comparison: StampComparison) -> list[str]:
    """Return the notes on a comparison, to be printed below the row of the comparison in the calibration table."""
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
        notes.append(f"  not compared: {pluralise(comparison.not_compared, 'request')}, incomplete or not in the log")
    return notes


def exact_up_to(fastest: StampComparison | None, limited_by: str) -> str:
    """Return a sentence that states the highest event rate at which the measured TTFT is exact.

    TTFT is exact if the p99 of its error is below 1 ms. `fastest` is the comparison at the highest rate with an exact
    TTFT, or None if TTFT was never exact. `limited_by` says why the sentence names no higher rate:

    - `client`: TTFT was not exact at a higher rate.
    - `server`: The simulated server could not send events at a higher rate.
    - `time`: No higher rate was tried.
    """
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
    """Return the time per token of one request in ns: (t_k - t_1) / (k - 1) for the event times t_1 to t_k.

    Each event holds one token.
    """
    return float(instants[-1] - instants[0]) / (len(instants) - 1)


def _sizes(errors_ns: Sequence[float] | Integers) -> ErrorSizes:
    return ErrorSizes(*map(round_to_ns, percentiles(np.abs(np.asarray(errors_ns, np.float64)) / 1e9, 0.5, 0.99, 1.0)))


def _rate(instants: Iterable[Sequence[int]]) -> float:
    """Return the rate of events of all streams together, in events per second.

    `instants` contains the event times of each stream in ns. A stream of n events counts as n - 1 events, the number of
    its gaps. The sum over all streams is divided by the time from the first event to the last event of the run.
    """
    streams = list(instants)
    gaps = sum(len(stream) - 1 for stream in streams)
    span_ns = max(stream[-1] for stream in streams) - min(stream[0] for stream in streams)
    return round(gaps / max(span_ns, 1) * 1e9, 1)
