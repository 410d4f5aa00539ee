"""Was the load generator a bottleneck, and how far may its stamps be off? From the Records and its own telemetry.

Stamps are off where several tokens came in one read:

    arrived     a_0            a_1   a_2   a_3
    read        |                              |      one stamp per read, that of its newest byte
    stamped     s_0 = a_0      s     s     s = a_3
                |<-------- d = s - s_0 ------->|

Tokens of one answer with equal stamps were read together: the last of them has its own stamp, and the others came
between the stamp before, s_0, and s. So each is off by at most d, and by no more than the client was away, as it reads
what lies there once it is back. Before a first token there is the first byte of the answer, where it came in an earlier
read, else the instant of sending.

`loadgen calibrate` holds stamps against the simulated server's own log, which says when it began each `send`, sent_k.
The error of TTFT is stamp_1 - sent_1, because both count from the same instant of sending; that of TPOT is
((stamp_k - stamp_1) - (sent_k - sent_1)) / (k - 1), one token per event; that of a gap is likewise of its two ends. The
server's own lateness is in neither side. Both clocks are CLOCK_REALTIME, ours by way of the run's pair of readings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.analysis.format import UNKNOWN, duration, percent
from loadgen.analysis.frame import Floats, Frame, Integers
from loadgen.analysis.objectives import Distribution
from loadgen.analysis.run.runfile import Run, SchedulingFacts, StampFacts, Telemetry, stamp_facts
from loadgen.analysis.stats import late_percentile_s, percentile, percentiles, ring_difference_s, round_to_ns
from loadgen.analysis.summary import ClientHealth, QuotedCalibration

STALL_CHECK_S = 0.05
"""How often a client looks for stalls of its own (engine.driver.TICK_S); between two looks one may hide."""
MAX_SLEW = 500e-6
"""Fastest that Linux lets a clock be slewed (adjtimex(2), 500 ppm); a larger disagreement is a step, while slewing
itself is converted away."""
MIN_SAMPLE_S = 0.5
"""A shorter health sample says nothing about how busy a second was."""
COALESCING_LATE_S = 0.001
"""Reads that held several events are the client's doing only if it was at least this late."""
ERROR_BAR_SHARE = 0.99
"""Of the samples that an error bar holds for."""
BUCKETS_PER_OCTAVE = 16
"""Errors of gaps are counted in buckets and taken for their upper ends: at most 4.4 % too large, never too small."""
EXACT_TTFT_ERROR_S = 1e-3
"""A client is exact as long as the p99 of its TTFT error stays below this."""
KEPT_UP_SHARE = 0.9
"""A server that reached less than this share of the rate asked was the limit itself."""
COALESCED_SHARE = 0.01
"""From here on the p99 of the gap error is that of gaps which were not seen."""


class HealthLimit(msgspec.Struct, frozen=True):
    """The most that a figure of the client may be, and what more of it would mean."""

    figure: str
    title: str
    most: float
    meaning: str
    when_waited: str = ""
    """What it means where the client waited for a CPU core. Empty where that wait cannot be the cause."""


RING_OFF = "packet ring against socket stamps, p99"
"""Title of the limit that says nothing of the client but of its timestamps."""
CLIENT_LIMIT = "client_limit"
"""Figure, and error kind, of requests that failed on the client's own machine."""
MAX_CAUSES = 3
"""Causes of such failures that a reason names."""
HELD_BACK = "TCP may have held the server back meanwhile"
SHARED_STAMP = "tokens that came meanwhile share a timestamp"
CORE_WAIT_SHARE = 0.5
"""A wait for a core explains a delay if it is at least this share of it, and of the client's own processor time."""
CORE_WAIT_MIN_S = 0.001
LIMITS = (
    HealthLimit("error_share", "median TTFT uncertain by", 0.05, "treat it as approximate"),
    HealthLimit(
        "send_late_share",
        "dispatch delay (p99) relative to the median E2E",
        0.05,
        "requests left later than due; more --workers send sooner",
        "requests left later than due",
    ),
    HealthLimit(
        "cpu_share", "busiest second", 0.95, "no processor time left: the server may have waited for the client"
    ),
    HealthLimit("late_p99_s", "read delay (p99)", 0.25, HELD_BACK, HELD_BACK),
    HealthLimit("stall_max_s", "longest stall", 0.2, SHARED_STAMP, SHARED_STAMP),
    HealthLimit("coalesced_late_share", "late coalesced reads", 0.05, "inter-token latencies are blurred"),
    HealthLimit("full_reads", "reads of a full TCP window", 0, "TCP held the server back"),
    HealthLimit("retransmit_share", "TCP retransmits per request", 0.01, "the network lost parts of requests"),
    HealthLimit(
        "out_of_order_share", "TCP segments out of order, per read", 0.01, "the network lost or reordered segments"
    ),
    HealthLimit("ring_off_p99_s", RING_OFF, 1e-4, "one of the two is wrong"),
    HealthLimit(
        "clock_step_s", "clock step", 0.001, "the wall clock was set during the run, and receive stamps with it"
    ),
    HealthLimit("worker_lost", "requests lost with their worker", 0, "what became of them is unknown"),
    HealthLimit(CLIENT_LIMIT, "requests that this machine could not send", 0, "the load was less than asked"),
    # Not turns of a session that had ended: what ended it was a turn that the server did not answer whole.
    HealthLimit("dropped", "requests never sent", 0, "the load was less than asked"),
)


def health(run: Run, frame: Frame, latency: Mapping[str, Distribution]) -> ClientHealth:
    """The `client` part of the summary, given its `latency` part."""
    samples = [sample for sample in run.telemetry if sample.source == "client"]
    measured = frame.measured
    result = health_from_samples(
        samples,
        _stamps(run, frame),
        np.sort((frame.first_sent_ns - frame.due_ns)[frame.sent]) / 1e9,
        reads=int(frame.reads[measured].sum()),
        coalesced=int(frame.coalesced_reads[measured].sum()),
        last_s=max((sample.at_ns for sample in run.telemetry), default=0) / 1e9,
    )
    result.late_max_s = int(frame.late_ns_max[measured].max(initial=0)) / 1e9 if result.source.exact else None
    result.first_token_merged = int(frame.first_token_merged[measured].sum())
    result.reopened = int(frame.reopened[measured].sum())
    result.sent_again = int(frame.sent_again[measured].sum())
    result.worker_lost = _ended(frame, "worker_lost")
    result.client_limit = _ended(frame, CLIENT_LIMIT)
    result.scheduling = _scheduling(run)
    if result.scheduling is not None and result.scheduling.policy == "realtime":
        result.realtime_given_up = len({sample.worker for sample in samples if sample.values.get("realtime") is False})
    result.lacking = str(run.header.client.get("stamps_lacking", ""))
    result.calibration = quoted_calibration(run.header.client.get("calibration"), result.stamps)
    if (own := timestamp_error(result)) is not None:
        for name, bar in error_bars(frame, own).items():
            setattr(result, name, None if bar is None else round_to_ns(bar))
    medians = latency["ttft_s"].p50, latency["e2e_s"].p50
    result.reasons = reasons(
        result,
        *medians,
        _ended(frame, "dropped"),
        waited_for=not run.header.load.open_loop,
        causes=_client_limit_causes(frame),
    )
    if not samples:
        result.reasons.append("the run holds no health samples: nothing is known about the client")
    result.verdict = "limited" if result.reasons else "ok"
    return result


def reasons(
    found: ClientHealth,
    ttft_p50_s: float | None,
    e2e_p50_s: float | None,
    dropped: int = 0,
    *,
    waited_for: bool = True,
    causes: Sequence[str] = (),
) -> list[str]:
    """Return one line per limit that a known figure exceeds. `waited_for`: an end makes the next request due. `causes`
    say why this machine could not send requests, and what to do about it."""
    # Tokens that were read together may have waited for a client that was late or away. Where it was prompt, the server
    # or something on the way had put them into one packet: the client is not to blame.
    late = (found.late_p99_s or 0) > COALESCING_LATE_S
    was_away = late or (found.stall_max_s or 0) > STALL_CHECK_S
    # Where reads do not stamp, being away blurs nothing, and windows looked at before late reads say who was held back.
    blurs = {"stall_max_s", "coalesced_late_share"} if not found.source.by_read else set()
    blurs |= {"late_p99_s", "" if waited_for else "cpu_share"} if blurs and found.windows else set()
    if found.ring_rejected is not None:  # where ring and socket disagreed, the figures have the socket's timestamps
        blurs.add("ring_off_p99_s")
    derived = {
        "error_share": _ratio(found.error_ttft_p50_s if was_away else found.error_bar_e2e_s, ttft_p50_s),
        "send_late_share": _ratio(found.send_late_p99_s, e2e_p50_s),
        "coalesced_late_share": found.coalesced_share if late else 0,
        "dropped": dropped,
    }
    exceeded = [
        (limit, value)
        for limit in LIMITS
        if limit.figure not in blurs
        and (value := derived[limit.figure] if limit.figure in derived else getattr(found, limit.figure)) is not None
        and value > limit.most
    ]
    meanings = {limit.figure: limit.meaning for limit, _ in exceeded}
    if causes and CLIENT_LIMIT in meanings:
        meanings[CLIENT_LIMIT] = "; ".join(causes)
    if waited_for_core(found):
        delayed = [limit for limit, _ in exceeded if limit.when_waited]
        for limit in delayed:
            advice = core_wait_advice(found) if limit is delayed[0] else "the client waited for a CPU core"
            meanings[limit.figure] = f"{limit.when_waited}; {advice}"
    return [
        f"{limit.title} {figure_text(limit.figure, value)} (limit {figure_text(limit.figure, limit.most)}): "
        f"{meanings[limit.figure]}"
        for limit, value in exceeded
    ]


def figure_text(figure: str, value: float | None) -> str:
    """A figure of the client in the unit that the end of its name gives."""
    if value is None:
        return UNKNOWN
    if figure.endswith("_s"):
        return duration(value)
    return percent(value) if figure.endswith("_share") else f"{value:,.0f}"


def ring_difference_counts(samples: Sequence[Telemetry]) -> Counter[int]:
    """How many reads had ring and socket stamps so far apart, in bits."""
    off = Counter[int]()
    for sample in samples:
        off.update({int(bits): count for bits, count in sample.values.get("ring_off_counts", {}).items()})
    return off


def health_from_samples(
    samples: Sequence[Telemetry], stamps: StampFacts, sends_late_s: Floats, *, reads: int, coalesced: int, last_s: float
) -> ClientHealth:
    """What the client's own telemetry says of it, with how late each request was sent (in order), how many of its reads
    held several events, and when the last of all this was. Also of a run that goes on."""
    late = Counter[int]()
    if stamps.exact:
        for sample in samples:
            late.update({int(bucket): count for bucket, count in sample.values.get("late_counts", {}).items()})
    off = ring_difference_counts(samples)
    off_s = _ratio(_known(samples, "clock_disagreement_ns", max), 1e9)
    busy = [(sample.values.get("cpu_ns", 0), sample.values.get("wall_ns", 0)) for sample in samples]
    return ClientHealth(
        stamps=stamps.name,
        source=stamps,
        late_p50_s=late_percentile_s(late, 0.50),
        late_p99_s=late_percentile_s(late, 0.99),
        coalesced_share=round_to_ns(coalesced / reads) if reads else None,
        send_late_p99_s=round_to_ns(percentile(sends_late_s, 0.99)) if len(sends_late_s) else None,
        clock_disagreement_s=off_s,
        clock_step_s=None if off_s is None else round_to_ns(max(0.0, off_s - MAX_SLEW * max(1.0, last_s))),
        cpu_s=_ratio(sum(sample.values.get("cpu_sum_ns", sample.values.get("cpu_ns", 0)) for sample in samples), 1e9),
        core_wait_s=_ratio(_known(samples, "core_wait_ns", sum), 1e9),
        core_wait_max_s=_ratio(_known(samples, "core_wait_ns", max), 1e9),
        cpu_share=max((round(cpu / wall, 4) for cpu, wall in busy if wall >= MIN_SAMPLE_S * 1e9), default=None),
        full_reads=_known(samples, "full_reads", sum),
        windows=_known(samples, "windows", sum),
        sweep_max_s=_ratio(_known(samples, "sweep_ns_max", max), 1e9),
        retransmit_share=_ratio(_known(samples, "retransmits", sum), len(sends_late_s)),
        out_of_order_share=_ratio(_known(samples, "out_of_order", sum), _known(samples, "reads", sum)),
        ring_drops=_known(samples, "ring_drops", sum),
        ring_missed=_known(samples, "ring_missed", sum),
        ring_rejected=_known(samples, "ring_rejected", sum),
        ring_given_up=_ring_given_up(samples),
        socket_rejected=_known(samples, "socket_rejected", sum),
        ring_off_p50_s=ring_difference_s(off, 0.50),
        ring_off_p99_s=ring_difference_s(off, 0.99),
        ring_off_max_s=ring_difference_s(off, 1.0),
        stall_max_s=_ratio(_known(samples, "stall_ns_max", max), 1e9),
        pauses=_known(samples, "pauses", sum),
        paused_s=_ratio(_known(samples, "paused_ns", sum), 1e9),
        workers=len({sample.worker for sample in samples}),
        samples=len(samples),
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _ended(frame: Frame, kind: str) -> int:
    return sum(seen.requests for end, seen in frame.outcomes.items() if end.measured and end.kind == kind)


def _client_limit_causes(frame: Frame) -> list[str]:
    """Return the most frequent reasons for which this machine could not send requests, as their Records state them."""
    causes = Counter[str]()
    for end, seen in frame.outcomes.items():
        if end.measured and end.kind == CLIENT_LIMIT and end.detail:
            causes[end.detail] += seen.requests
    return [cause for cause, _ in causes.most_common(MAX_CAUSES)]


def _stamps(run: Run, frame: Frame) -> StampFacts:
    """Return the run's source of timestamps if it stamped every complete response, else the least exact one used."""
    stamped = [source for source in frame.sources if source.measured and source.stamps]
    used = {source.stamps for source in [each for each in stamped if each.state == "complete"] or stamped}
    if not used or used == {run.header.stamps.name}:
        return run.header.stamps
    return stamp_facts(*used)


def _ring_given_up(samples: Sequence[Telemetry]) -> int | None:
    """Return how many workers stopped using packet timestamps; None where no sample says."""
    known = [sample for sample in samples if "ring_given_up" in sample.values]
    return len({sample.worker for sample in known if sample.values["ring_given_up"]}) if known else None


def _scheduling(run: Run) -> SchedulingFacts | None:
    """Return the client's priority as the run's header has it; None in older runs."""
    facts = run.header.client.get("scheduling")
    return None if facts is None else msgspec.convert(facts, SchedulingFacts)


def waited_for_core(found: ClientHealth) -> bool:
    """Return whether requests left late because the client waited for a core, not because it was busy itself.

    The wait must be long enough to explain half of the dispatch delay, and no less than half of the client's own
    processor time: a client that uses most of a core is late by itself.
    """
    longest_s = found.core_wait_max_s or 0.0
    total_s = found.core_wait_s or 0.0
    delay_s = found.send_late_p99_s or 0.0
    enough_s = max(CORE_WAIT_MIN_S, CORE_WAIT_SHARE * delay_s)
    return longest_s >= enough_s and total_s >= CORE_WAIT_SHARE * (found.cpu_s or 0.0)


def core_wait_advice(found: ClientHealth) -> str:
    """Say for how long the client waited for a core, who used the cores, and what to do about it."""
    scheduling = found.scheduling
    others = (
        f"other processes, probably the server, {f'or its {found.workers} workers ' * (found.workers > 1)}use all cores"
    )
    apart = "give client and server separate cores (`taskset`), or run the client on another host"
    raise_it = "raise its priority (`chrt -r 1 loadgen ...` as root)"
    if scheduling is not None and scheduling.policy == "realtime":
        remedy = apart
    elif scheduling is not None and scheduling.refused:
        remedy = (
            f"loadgen may not raise its priority ({scheduling.refused}): run it as root, grant CAP_SYS_NICE, or start "
            f"it with `sudo chrt -r 1 loadgen ...`; or {apart}"
        )
    elif scheduling is not None and scheduling.requested == "auto":
        remedy = f"use --client-priority realtime (`chrt -r 1 loadgen ...`), {apart}"
    elif scheduling is not None and scheduling.requested == "normal":
        remedy = f"leave --client-priority normal out, {raise_it}, {apart}"
    else:
        remedy = f"{raise_it}, {apart}"
    return f"the client waited {duration(found.core_wait_s)} for a CPU core: {others}; {remedy}"


def timestamp_error(found: ClientHealth) -> StampError | None:
    """Exact stamps: their own error and a clock step. Others: the longest stall of the loop: so late
    may they be, those of tokens read together too."""
    stall_s = found.stall_max_s
    if found.source.error_s is not None:
        stamp_s = found.source.error_s + (found.clock_step_s or 0.0)
        away_s = 0.0 if not found.source.by_read else None if stall_s is None else stall_s + STALL_CHECK_S
        return StampError(stamp_s, 2 * stamp_s, away_s)
    return None if stall_s is None else StampError(stall_s, stall_s, 0.0)


def _known(samples: Sequence[Telemetry], name: str, together: Callable[[list[int]], int]) -> int | None:
    """The sum or the most of what the samples say; None where none says anything."""
    values = [sample.values[name] for sample in samples if name in sample.values]
    return together(values) if values else None


class StampError(msgspec.Struct, frozen=True):
    """What a stamp is off by that stands for one token alone, and a difference of two such stamps. Seconds."""

    stamp_s: float
    pair_s: float
    away_s: float | None
    """The longest that the client may have been away; 0 where that is in `stamp_s` or makes no token share a stamp,
    None where nobody looked."""


def error_bars(frame: Frame, own: StampError) -> dict[str, float | None]:
    """What 99 % of the stamps, TTFTs, TPOTs and ITLs of the complete requests are off by at most, and E2E, which ends
    with the newest token of a read; and what the median TTFT is off by. In seconds, None where there is no sample."""
    off_first_ns, stamps, gaps = _merged(frame, own.away_s)
    chunks = frame.chunk_counts[frame.sampled]
    later = np.nan_to_num(frame.later_tokens)[frame.sampled]
    off_first_s = off_first_ns[frame.sampled] / 1e9
    ttft_s = (frame.first_ns - frame.sent_ns)[frame.sampled] / 1e9
    return {
        "error_bar_s": own.stamp_s + _counted_quantile_ns(stamps, int(chunks.sum())) / 1e9,
        "error_bar_ttft_s": own.stamp_s + (_quantile(off_first_s) or 0.0),
        "error_ttft_p50_s": own.stamp_s + median_ttft_error_s(ttft_s, off_first_s),
        "error_bar_tpot_s": _quantile((off_first_s + own.pair_s)[later > 0] / later[later > 0]),
        "error_bar_itl_s": own.pair_s + _counted_quantile_ns(gaps, int(np.maximum(chunks - 1, 0).sum())) / 1e9,
        "error_bar_e2e_s": own.stamp_s,
    }


def max_ttft_errors_s(frame: Frame) -> Floats:
    """By how much the TTFT of each request may be too large at most, in seconds, if nothing is known of how long the
    client was away; 0 where its first token was read alone."""
    return _merged(frame, None)[0] / 1e9


def median_ttft_error_s(ttft_s: Floats, off_s: Floats) -> float:
    """What the median of these TTFTs is too large by at most, if each is by at most `off_s`. NaN is no sample."""
    known = ~np.isnan(ttft_s)
    (maximum,), (minimum,) = percentiles(ttft_s[known], 0.5), percentiles((ttft_s - off_s)[known], 0.5)
    return maximum - minimum if known.any() else 0.0


def _counted_quantile_ns(counts: Integers, total: int) -> float:
    """What all but 1 % of `total` keep; those that were not counted are not off."""
    beyond = total - int(np.ceil(ERROR_BAR_SHARE * total))
    larger = np.flatnonzero(np.cumsum(counts[::-1])[::-1] > beyond)
    return float(2.0 ** (larger[-1] / BUCKETS_PER_OCTAVE)) if len(larger) else 0.0


def _quantile(values: Floats) -> float | None:
    return float(np.sort(values)[math.ceil(ERROR_BAR_SHARE * len(values)) - 1]) if len(values) else None


def _merged(frame: Frame, away_s: float | None) -> tuple[Floats, Integers, Integers]:
    """What the reads that brought several tokens of complete requests leave open: of each row by how many nanoseconds
    its TTFT may be too large at most; and how many stamps, and how many gaps, may be off by how much at most, in
    buckets: as little room for a hundred million as for ten."""
    most_ns = np.inf if away_s is None else away_s * 1e9
    off_first_ns = np.zeros(len(frame))
    stamps_off, gaps_off = np.zeros((2, 64 * BUCKETS_PER_OCTAVE), np.int64)
    if most_ns == 0:
        return off_first_ns, stamps_off, gaps_off
    sampled, counts = frame.sampled, frame.chunk_counts
    headed = frame.first_byte_ns < frame.first_ns
    before_ns = np.where(headed, frame.first_byte_ns, frame.sent_ns)
    for rows, chunks in frame.blocks():
        stamps = frame.chunk_ns[chunks]
        begins = np.zeros(len(stamps), np.bool_)
        begins[frame.offsets[rows][counts[rows] > 0] - chunks.start] = True
        new = begins.copy()
        new[1:] |= stamps[1:] != stamps[:-1]
        at = np.flatnonzero(new)
        sizes = np.diff(at, append=len(stamps))
        at, sizes = at[sizes > 1], sizes[sizes > 1]
        row = np.searchsorted(frame.offsets, at + chunks.start, side="right") - 1
        retained = sampled[row]
        at, sizes, row = at[retained], sizes[retained], row[retained]
        first = begins[at]
        off_ns = np.clip(stamps[at] - np.where(first, before_ns[row], stamps[at - 1]), 0.0, most_ns)
        off_first_ns[row[first]] = off_ns[first]
        buckets = np.ceil(np.log2(np.maximum(off_ns, 1.0)) * BUCKETS_PER_OCTAVE).astype(np.int64)
        stamps_off += np.bincount(buckets, sizes - 1, len(stamps_off)).astype(np.int64)
        # The gaps within a read, and the one before it.
        gaps_off += np.bincount(buckets, sizes - first, len(gaps_off)).astype(np.int64)
    return off_first_ns, stamps_off, gaps_off


def quoted_calibration(found: Any, stamps: str) -> QuotedCalibration | None:
    """Of a calibration (loadgen.machine) in a run's header, what is said of stamps of this kind; None for
    anything else."""
    try:
        p99_s = found["errors"][stamps]["ttft_s"]["p99"]
        return msgspec.convert({**found, "ttft_p99_s": p99_s}, QuotedCalibration)
    except (TypeError, KeyError, msgspec.ValidationError):
        return None


class ServerLogLine(msgspec.Struct, frozen=True):
    """One line of the simulated server's log, as far as it is needed here. Instants are ns on CLOCK_REALTIME."""

    request_id: str = ""
    due_ns: list[int] = []
    sent_ns: list[int] = []


class ErrorSizes(msgspec.Struct, frozen=True):
    """Sizes of errors, in seconds."""

    p50: float
    p99: float
    max: float


class StampComparison(msgspec.Struct, frozen=True):
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
    ring_off_s: tuple[float | None, float | None] = (None, None)
    """How far ring and socket stamps of a read are apart, at p50 and p99; None where they were not compared."""

    @property
    def exact(self) -> bool:
        """Whether TTFT is exact to the millisecond."""
        return self.ttft_s.p99 < EXACT_TTFT_ERROR_S

    @property
    def server_kept_up(self) -> bool:
        """Whether the rate is what was asked; if not, a faster client would have seen no more."""
        return self.events_per_s >= KEPT_UP_SHARE * self.asked_per_s


def read_log(path: Path) -> dict[int, ServerLogLine]:
    """The server's log by request id. Raises OSError, msgspec.DecodeError."""
    decoder = msgspec.json.Decoder(ServerLogLine)
    lines = map(decoder.decode, path.read_bytes().splitlines())
    return {int(line.request_id): line for line in lines if line.request_id}


def compare_with_log(run: Run, log: Mapping[int, ServerLogLine]) -> StampComparison:
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
    lag_s = STALL_CHECK_S + max((sample.values.get("stall_ns_max", 0) for sample in run.telemetry), default=0) / 1e9
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
        server_late_p99_s=_sizes(np.concatenate([np.subtract(line.sent_ns, line.due_ns) for line in lines])).p99,
        ring_off_s=(
            ring_difference_s(off := ring_difference_counts(run.telemetry), 0.50),
            ring_difference_s(off, 0.99),
        ),
    )


def stamps_heading() -> str:
    """Two lines above rows."""
    parts = "".join(f"{title:^27}" for title in ("TTFT error, ms", "TPOT error, ms", "gap error, ms"))
    return f"{'':20}{parts}".rstrip() + f"\n{'stamps':8}{'events/s':>10}  " + f"{'p50':>9}{'p99':>9}{'max':>9}" * 3


def stamps_row(comparison: StampComparison) -> str:
    """One burst in a line."""
    spreads = (comparison.ttft_s, comparison.tpot_s, comparison.icl_s)
    cells = [f"{value * 1e3:9.4f}" for spread in spreads for value in (spread.p50, spread.p99, spread.max)]
    return f"{comparison.stamps:8}{comparison.events_per_s:10,.0f}  {''.join(cells)}"


def stamps_notes(seen: StampComparison) -> list[str]:
    """What a reader of the row must know."""
    result = []
    if seen.merged:
        beyond = f"{seen.merged_beyond:,} of them" if seen.merged_beyond else "none"
        result += [
            f"  {seen.merged:,} of {seen.requests:,} first tokens came in one read with later ones: off by up to "
            f"{duration(seen.merged_s_max)}, and marked in the run",
            f"  {beyond} by more than the {duration(seen.lag_s)} the client may have been away",
        ]
    p50_s, p99_s = seen.ring_off_s
    if p50_s is not None and p99_s is not None:
        result.append(
            f"  checked against the socket's stamp of each read: within {duration(p50_s)}, p99 {duration(p99_s)}"
        )
    if seen.coalesced_share > COALESCED_SHARE:
        result.append(f"  {percent(seen.coalesced_share)} of the gaps lie within one read: no gap was measured there")
    if not seen.server_kept_up:
        result.append(
            f"  the simulated server sent {seen.events_per_s:,.0f} of the {seen.asked_per_s:,.0f} events/s asked, late "
            f"by {duration(seen.server_late_p99_s)} at p99, which is no error"
        )
    if seen.not_compared:
        result.append(f"  {seen.not_compared:,} requests were not complete, and are not compared")
    return result


def exact_up_to(fastest: StampComparison | None, limited_by: str) -> str:
    """The result of the search in a sentence."""
    if fastest is None:
        return f"TTFT was never exact to {duration(EXACT_TTFT_ERROR_S)} at p99."
    because = {
        "client": "beyond that the client is not exact any more",
        "server": "the simulated server sent no faster",
        "time": "nothing faster was tried",
    }[limited_by]
    return (
        f"TTFT is exact to {duration(EXACT_TTFT_ERROR_S)} at p99 up to {fastest.events_per_s:,.0f} events/s: {because}."
    )


def _tpot_ns(instants: Sequence[int]) -> float:
    """(t_k - t_1) / (k - 1), one token per event."""
    return float(instants[-1] - instants[0]) / (len(instants) - 1)


def _sizes(errors_ns: Sequence[float] | Integers) -> ErrorSizes:
    return ErrorSizes(*map(round_to_ns, percentiles(np.abs(np.asarray(errors_ns, np.float64)) / 1e9, 0.5, 0.99, 1.0)))


def _rate(instants: Iterable[Sequence[int]]) -> float:
    """Events per second while streams were running: gaps, by the time from the first event to the last."""
    streams = list(instants)
    gaps = sum(len(stream) - 1 for stream in streams)
    span_ns = max(stream[-1] for stream in streams) - min(stream[0] for stream in streams)
    return round(gaps / max(span_ns, 1) * 1e9, 1)
