"""How exact were the stamps of a run? Each is held against the simulated server's own log of when it sent.

    server:  sent_1 ........ sent_2 ........ sent_3      read immediately before each `send`
    run:       stamp_1 ........ stamp_2 ........ stamp_3

    TTFT error   stamp_1 - sent_1, because both count from the same instant of sending
    TPOT error   ((stamp_k - stamp_1) - (sent_k - sent_1)) / (k - 1), one token per event
    gap error    (stamp_j+1 - stamp_j) - (sent_j+1 - sent_j), for every gap

The server's own lateness is in neither side: it is judged by what it really did. Both clocks are CLOCK_REALTIME, ours
by way of the run's pair of readings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from analysis.report.format import duration, share
from analysis.summary import QuotedCalibration
from loadgen.runfile import Run

Integers = NDArray[np.int64]

EXACT_S = 1e-3
"""A client is exact as long as the p99 of its TTFT error stays below this."""
KEPT_UP_SHARE = 0.9
"""A server that reached less than this share of the rate asked was the limit itself."""
COALESCED_SHARE = 0.01
"""From here on the p99 of the gap error is that of gaps which were not seen."""
WATCH_S = 0.05
"""How often a client looks whether it stood still (engine.driver.TICK_S); between two looks a pause may hide."""


class Sends(msgspec.Struct, frozen=True):
    """One line of the simulated server's log, as far as it is needed here. Instants are ns on CLOCK_REALTIME."""

    request_id: str = ""
    due_ns: list[int] = []
    sent_ns: list[int] = []


@dataclass(frozen=True, slots=True)
class ErrorSizes:
    """Sizes of errors, in seconds."""

    p50: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class StampComparison:
    """One run against the server's log."""

    stamps: str
    requests: int
    """Complete, and with as many events in the log as chunks in the run."""
    not_compared: int
    """The others."""
    ttft_s: ErrorSizes
    tpot_s: ErrorSizes
    icl_s: ErrorSizes
    merged: int
    """First tokens that came in one read with later ones, so that the later stamp stands for them too."""
    merged_s_max: float
    """Largest TTFT error among these."""
    merged_beyond: int
    """How many of these are off by more than the lag."""
    coalesced_share: float
    """Of the gaps, those between two events of one read."""
    lag_s: float
    """Longest that the client can have been away: its longest stall, and as long again as its watch sees none."""
    events_per_s: float
    """What the server really sent."""
    asked_per_s: float
    """What its clock wanted."""
    server_late_p99_s: float

    @property
    def exact(self) -> bool:
        """Whether TTFT can be believed to the millisecond."""
        return self.ttft_s.p99 < EXACT_S

    @property
    def server_kept_up(self) -> bool:
        """Whether the rate is what was asked; if not, a faster client would have seen no more."""
        return self.events_per_s >= KEPT_UP_SHARE * self.asked_per_s


def read_log(path: Path) -> dict[int, Sends]:
    """The server's log by request id. Raises OSError, msgspec.DecodeError."""
    decoder = msgspec.json.Decoder(Sends)
    lines = (decoder.decode(line) for line in path.read_bytes().splitlines())
    return {int(line.request_id): line for line in lines if line.request_id}


def compare(run: Run, log: Mapping[int, Sends]) -> StampComparison:
    """Every stamp of the complete requests against the log. Raises ValueError when there is nothing to compare."""
    pairs = [(record, log[record.id]) for record in run.records if record.id in log and record.state == "complete"]
    # Chunk j of the run is send j of the log, and there is a gap to look at.
    pairs = [(record, line) for record, line in pairs if len(record.chunk_ns) == len(line.sent_ns) > 1]
    if not pairs:
        raise ValueError("no complete request has as many tokens as the server's log has sends")
    records, lines = zip(*pairs, strict=True)
    gaps = np.concatenate([np.diff(np.array(record.chunk_ns)) for record in records])
    true_gaps = np.concatenate([np.diff(np.array(line.sent_ns)) for line in lines])
    start_ns = run.header.start_realtime_ns
    ttft_ns = [record.chunk_ns[0] - (line.sent_ns[0] - start_ns) for record, line in pairs]
    merged_ns = [error for record, error in zip(records, ttft_ns, strict=True) if record.first_token_merged]
    lag_s = WATCH_S + max((sample.values.get("stall_ns_max", 0) for sample in run.telemetry), default=0) / 1e9
    return StampComparison(
        stamps=names.pop() if len(names := {record.stamps for record in records}) == 1 else "user",
        requests=len(pairs),
        not_compared=len(run.records) - len(pairs),
        ttft_s=_spread(ttft_ns),
        tpot_s=_spread([_tpot_ns(record.chunk_ns) - _tpot_ns(line.sent_ns) for record, line in pairs]),
        icl_s=_spread(gaps - true_gaps),
        merged=len(merged_ns),
        merged_s_max=max(merged_ns, default=0) / 1e9,
        merged_beyond=sum(error / 1e9 > lag_s for error in merged_ns),
        coalesced_share=float(np.mean(gaps == 0)),
        lag_s=lag_s,
        events_per_s=_rate(line.sent_ns for line in lines),
        asked_per_s=_rate(line.due_ns for line in lines),
        server_late_p99_s=_spread(np.concatenate([np.subtract(line.sent_ns, line.due_ns) for line in lines])).p99,
    )


def quoted(found: Any, stamps: str) -> QuotedCalibration | None:
    """Of a calibration (loadgen.host) in a run's header, what is said of stamps of this kind; None for
    anything else."""
    try:
        p99_s = found["errors"][stamps]["ttft_s"]["p99"]
        return msgspec.convert({**found, "ttft_p99_s": p99_s}, QuotedCalibration)
    except (TypeError, KeyError, msgspec.ValidationError):
        return None


def heading() -> str:
    """Two lines above rows."""
    parts = "".join(f"{title:^27}" for title in ("TTFT error, ms", "TPOT error, ms", "gap error, ms"))
    return f"{'':20}{parts}".rstrip() + f"\n{'stamps':8}{'events/s':>10}  " + f"{'p50':>9}{'p99':>9}{'max':>9}" * 3


def row(comparison: StampComparison) -> str:
    """One burst in a line."""
    spreads = (comparison.ttft_s, comparison.tpot_s, comparison.icl_s)
    cells = [f"{value * 1e3:9.4f}" for spread in spreads for value in (spread.p50, spread.p99, spread.max)]
    return f"{comparison.stamps:8}{comparison.events_per_s:10,.0f}  {''.join(cells)}"


def notes(comparison: StampComparison) -> list[str]:
    """What a reader of the row must know."""
    found = []
    if comparison.merged:
        said = f"  {comparison.merged:,} of {comparison.requests:,} first tokens came in one read with later ones"
        found.append(f"{said}: off by up to {duration(comparison.merged_s_max)}, and marked in the run")
        beyond = f"{comparison.merged_beyond:,} of them" if comparison.merged_beyond else "none"
        found.append(f"  {beyond} by more than the {duration(comparison.lag_s)} the client may have been away")
    if comparison.coalesced_share > COALESCED_SHARE:
        found.append(
            f"  {share(comparison.coalesced_share)} of the gaps lie within one read: no gap was measured there"
        )
    if not comparison.server_kept_up:
        said = (
            f"  the simulated server sent {comparison.events_per_s:,.0f} of the {comparison.asked_per_s:,.0f} events/s"
        )
        found.append(f"{said} asked, late by {duration(comparison.server_late_p99_s)} at p99, which is no error")
    if comparison.not_compared:
        found.append(f"  {comparison.not_compared:,} requests were not complete, and are not compared")
    return found


def reached(fastest: StampComparison | None, limited_by: str) -> str:
    """The result of the search in a sentence."""
    if fastest is None:
        return f"TTFT was never exact to {duration(EXACT_S)} at p99."
    because = {
        "client": "beyond that the client is not exact any more",
        "server": "the simulated server sent no faster",
        "time": "nothing faster was tried",
    }[limited_by]
    return f"TTFT is exact to {duration(EXACT_S)} at p99 up to {fastest.events_per_s:,.0f} events/s: {because}."


def _tpot_ns(instants: Sequence[int]) -> float:
    """(t_k - t_1) / (k - 1), one token per event."""
    return float(instants[-1] - instants[0]) / (len(instants) - 1)


def _spread(errors_ns: Sequence[float] | Integers) -> ErrorSizes:
    sizes_s = np.abs(np.asarray(errors_ns, dtype=np.float64)) / 1e9
    return ErrorSizes(*(round(float(value), 9) for value in np.percentile(sizes_s, (50, 99, 100))))


def _rate(instants: Iterable[Sequence[int]]) -> float:
    """Events per second while streams were running: gaps, by the time from the first event to the last."""
    streams = list(instants)
    gaps = sum(len(stream) - 1 for stream in streams)
    span_ns = max(stream[-1] for stream in streams) - min(stream[0] for stream in streams)
    return round(gaps / max(span_ns, 1) * 1e9, 1)
