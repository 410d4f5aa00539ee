"""Judges whether the client was the limit, which means that the load generator may have distorted the figures.

The judgement is based on a run's Records and on the client's own telemetry. Each health figure of the client, such as
its CPU use, has a limit (LIMITS). A run that exceeds a limit is invalid, because the client may have influenced its
results. The report gives the reason and the remedy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from loadgen.analysis.format import UNKNOWN, duration, percent
from loadgen.analysis.frame import Floats, Frame
from loadgen.analysis.objectives import Distribution
from loadgen.analysis.run.packed_values import unpack_values
from loadgen.analysis.run.runfile import Run, SchedulingFacts, StampFacts, Telemetry, stamp_facts
from loadgen.analysis.stats import late_percentile_s, percentile, ring_difference_s, round_to_ns
from loadgen.analysis.summary import ClientHealth, QuotedCalibration
from loadgen.analysis.timestamp_errors import STALL_CHECK_S, error_bars, timestamp_error

MAX_SLEW = 500e-6
"""Maximum rate at which Linux slews a clock: 500 ppm (adjtimex(2)). Slewing is corrected when timestamps are converted.
If two clocks disagree by more, one of them was stepped."""
MIN_SAMPLE_S = 0.5
"""Minimum duration of a health sample, in seconds. The CPU use in shorter samples is ignored."""
COALESCING_LATE_S = 0.001
"""If the p99 of the read delay exceeds this value, in seconds, reads of several events are attributed to the client."""


class HealthLimit(msgspec.Struct, frozen=True):
    """The maximum of one health figure of the client, such as its CPU use, and the meaning of a larger value."""

    figure: str
    title: str
    maximum: float
    meaning: str
    when_waited: str = ""
    """Text that replaces `meaning` if the client waited for a CPU core. Empty if such a wait cannot be the cause."""


RING_OFF = "difference of packet ring and socket timestamps (p99)"
"""Title of the limit on the disagreement of two timestamps. Exceeding this limit does not mean that the client was
slow."""
CLIENT_LIMIT = "client_limit"
"""Error kind of requests that the client machine could not send. The figure that counts these requests has the same
name."""
MAX_CAUSES = 3
"""Maximum number of causes of `client_limit` errors that a reason lists."""
MIN_SOURCE_SHARE = 0.005
"""Minimum share of the responses with a timestamp source, for the source to describe the run. Fewer responses change no
percentile up to p99."""
HELD_BACK = "TCP may have slowed the server down meanwhile"
SHARED_STAMP = "tokens that arrived meanwhile share a timestamp"
SENT_LATE = "requests were sent late"
FEWER_REQUESTS = "the load was smaller than requested"
NOT_ACCEPTED = "the server or a gateway did not accept connections in time"
"""Meaning of retransmits if no segment arrived out of order: a full queue of new connections drops segments, and a
network that loses segments usually reorders others."""
CORE_WAIT_SHARE = 0.5
"""Waits for a core explain late requests only if they reach this share of the send delay and of the client's CPU
time."""
MIN_CORE_WAIT_S = 0.001
"""Minimum duration of a wait for a core that may explain late requests, in seconds."""
LIMITS = (
    HealthLimit("error_share", "median TTFT uncertain by", 0.05, "treat it as approximate"),
    HealthLimit(
        "send_late_share",
        "dispatch delay (p99) relative to the median E2E",
        0.05,
        f"{SENT_LATE}; use more --workers",
        SENT_LATE,
    ),
    HealthLimit(
        "cpu_share",
        "CPU use in the busiest second",
        0.95,
        "no CPU time was left, so the server may have waited for the client",
    ),
    HealthLimit("late_p99_s", "read delay (p99)", 0.25, HELD_BACK, HELD_BACK),
    HealthLimit("stall_max_s", "longest stall", 0.2, SHARED_STAMP, SHARED_STAMP),
    HealthLimit("coalesced_late_share", "late coalesced reads", 0.05, "inter-token latencies are blurred"),
    HealthLimit("full_reads", "reads of a full TCP window", 0, "TCP slowed the server down"),
    HealthLimit("retransmit_share", "TCP retransmits per request", 0.01, "the network lost parts of requests"),
    HealthLimit(
        "out_of_order_share", "TCP segments out of order, per read", 0.01, "the network lost or reordered segments"
    ),
    HealthLimit("ring_off_p99_s", RING_OFF, 1e-4, "one of the two timestamps is wrong"),
    HealthLimit(
        "clock_step_s", "clock step", 0.001, "the wall clock was set during the run, which shifted receive timestamps"
    ),
    HealthLimit("worker_lost", "requests lost with their worker", 0, "their outcome is unknown"),
    HealthLimit(CLIENT_LIMIT, "requests that this machine could not send", 0, FEWER_REQUESTS),
    # Turns after the end of their session do not count: the session ended because the server did not complete a turn.
    HealthLimit("dropped", "requests never sent", 0, FEWER_REQUESTS),
)


def health(run: Run, frame: Frame, latency: Mapping[str, Distribution]) -> ClientHealth:
    """Return the `client` part of the summary.

    `latency` contains the latency distributions of the summary by metric name.
    """
    samples = [sample for sample in run.telemetry if sample.source == "client"]
    measured = frame.measured
    result = health_from_samples(
        samples,
        _stamps(run, frame),
        np.sort(frame.send_delay_ns[frame.sent]) / 1e9,
        reads=int(frame.reads[measured].sum()),
        coalesced=int(frame.coalesced_reads[measured].sum()),
        last_s=max((sample.at_ns for sample in run.telemetry), default=0) / 1e9,
    )
    result.late_max_s = int(frame.late_ns_max[measured].max(initial=0)) / 1e9 if result.source.exact else None
    result.first_token_merged = int(frame.first_token_merged[measured].sum())
    result.reopened = int(frame.reopened[measured].sum())
    result.sent_again = int(frame.sent_again[measured].sum())
    result.worker_lost = _error_count(frame, "worker_lost")
    result.client_limit = _error_count(frame, CLIENT_LIMIT)
    result.scheduling = _scheduling(run)
    if result.scheduling is not None and result.scheduling.policy == "realtime":
        result.realtime_given_up = len({sample.worker for sample in samples if sample.values.get("realtime") is False})
    result.lacking = str(run.header.client.get("stamps_lacking", ""))
    result.calibration = quoted_calibration(run.header.client.get("calibration"), result.stamps)
    own_error = timestamp_error(result)
    if own_error is not None:
        for name, bar in error_bars(frame, own_error).items():
            setattr(result, name, None if bar is None else round_to_ns(bar))
    result.reasons = reasons(
        result,
        latency["ttft_s"].p50,
        latency["e2e_s"].p50,
        _error_count(frame, "dropped"),
        waited_for=not run.header.load.open_loop,
        causes=_client_limit_causes(frame),
    )
    if not samples:
        result.reasons.append("the run has no health samples, so the state of the client is unknown")
    result.verdict = "limited" if result.reasons else "ok"
    return result


def reasons(
    health: ClientHealth,
    ttft_p50_s: float | None,
    e2e_p50_s: float | None,
    dropped: int = 0,
    *,
    waited_for: bool = True,
    causes: Sequence[str] = (),
) -> list[str]:
    """Return one sentence for each health figure that exceeds its limit. Unknown figures are skipped.

    `dropped` is the number of dropped requests. `waited_for` is True if requests become due when earlier requests end,
    as in a closed loop. `causes` are texts that explain why this machine could not send some requests, with the
    remedies.
    """
    # Tokens that are read together may have waited for a client that was late or stalled. If the client was prompt, the
    # server or the network put them into one packet, and the client is not the cause.
    late = (health.late_p99_s or 0) > COALESCING_LATE_S
    was_away = late or (health.stall_max_s or 0) > STALL_CHECK_S
    derived = {
        "error_share": _ratio(health.error_ttft_p50_s if was_away else health.error_bar_e2e_s, ttft_p50_s),
        "send_late_share": _ratio(health.send_late_p99_s, e2e_p50_s),
        "coalesced_late_share": health.coalesced_share if late else 0,
        "dropped": dropped,
    }
    irrelevant = _irrelevant_figures(health, waited_for=waited_for)
    exceeded = []
    for limit in LIMITS:
        value = derived[limit.figure] if limit.figure in derived else getattr(health, limit.figure)
        if limit.figure not in irrelevant and value is not None and value > limit.maximum:
            exceeded.append((limit, value))
    meanings = _meanings([limit for limit, _ in exceeded], health, causes)
    return [
        f"{limit.title} {figure_text(limit.figure, value)} (limit {figure_text(limit.figure, limit.maximum)}): "
        f"{meanings[limit.figure]}"
        for limit, value in exceeded
    ]


def _meanings(exceeded: Sequence[HealthLimit], health: ClientHealth, causes: Sequence[str]) -> dict[str, str]:
    """Return an explanation of each exceeded limit, by the name of the health figure that exceeds it.

    If other figures in `health` reveal the cause, the explanation includes this cause. `causes` are texts that explain
    why this machine could not send some requests. They become the explanation of the limit CLIENT_LIMIT.
    """
    meanings = {limit.figure: limit.meaning for limit in exceeded}
    if "retransmit_share" in meanings and not health.out_of_order_share:
        meanings["retransmit_share"] = (
            f"{NOT_ACCEPTED} (its queue of new connections was full), or the network is lossy"
        )
        if "send_late_share" in meanings:
            meanings["send_late_share"] = f"{SENT_LATE}, because {NOT_ACCEPTED}"
    if causes and CLIENT_LIMIT in meanings:
        meanings[CLIENT_LIMIT] = "; ".join(causes)
    if waited_for_core(health):
        delayed = [limit for limit in exceeded if limit.when_waited]
        for limit in delayed:
            advice = core_wait_advice(health) if limit is delayed[0] else "the client waited for a CPU core"
            meanings[limit.figure] = f"{limit.when_waited}; {advice}"
    return meanings


def _irrelevant_figures(health: ClientHealth, *, waited_for: bool) -> set[str]:
    """Return the names of the health figures whose limits do not apply to this run.

    For example, there is a limit on stalls of the client, because a stall delays reads. The limit does not apply if the
    kernel timestamps every packet, because a late read then does not change the timestamp. `waited_for` is True if
    requests become due when earlier requests end, as in a closed loop.
    """
    irrelevant = set[str]()
    if not health.source.by_read:
        # Timestamps do not depend on reads, so stalls do not blur them.
        irrelevant |= {"stall_max_s", "coalesced_late_share"}
        if health.windows:
            # The receive windows were checked before late reads, and show whether the server was slowed down.
            irrelevant.add("late_p99_s")
            if not waited_for:
                irrelevant.add("cpu_share")
    if health.ring_rejected is not None:  # Requests with contradictory packet timestamps have socket timestamps.
        irrelevant.add("ring_off_p99_s")
    return irrelevant


def figure_text(figure: str, value: float | None) -> str:
    """Format a health figure of the client as text.

    The end of the figure's name determines the format: a duration for `_s`, a percentage for `_share`, otherwise a
    count.
    """
    if value is None:
        return UNKNOWN
    if figure.endswith("_s"):
        return duration(value)
    return percent(value) if figure.endswith("_share") else f"{value:,.0f}"


def ring_difference_counts(samples: Sequence[Telemetry]) -> Counter[int]:
    """Return a histogram of the differences between packet ring timestamps and socket timestamps, over all reads.

    The key is the bit length of the difference in ns, and the value is the number of reads.
    """
    counts = Counter[int]()
    for sample in samples:
        _add_histogram(counts, sample.values.get("ring_off_counts", {}))
    return counts


class _Totals:
    """Totals of the client's health figures over all samples of a run: sums, maxima and histograms.

    The samples themselves are not kept, because a long run has many of them.
    """

    def __init__(self, samples: Iterable[Telemetry]) -> None:
        self.sums = Counter[str]()
        self.maxima: dict[str, int] = {}
        self.late = Counter[int]()
        """Number of reads by the bucket of their delay."""
        self.ring_differences = Counter[int]()
        self.cpu_ns = 0
        self.cpu_share: float | None = None
        """Largest share of a CPU core in a sample of at least MIN_SAMPLE_S."""
        for sample in samples:
            self._add(unpack_values(sample.values))

    def sum(self, name: str) -> int | None:
        """Return the sum of a figure, or None if no sample has the figure."""
        return self.sums[name] if name in self.maxima else None

    def _add(self, values: Mapping[str, Any]) -> None:
        sums, maxima = self.sums, self.maxima
        for name, value in values.items():
            if type(value) is int:
                sums[name] += value
                if value > maxima.get(name, value - 1):
                    maxima[name] = value
        _add_histogram(self.late, values.get("late_counts", {}))
        _add_histogram(self.ring_differences, values.get("ring_off_counts", {}))
        cpu_ns, wall_ns = values.get("cpu_ns", 0), values.get("wall_ns", 0)
        self.cpu_ns += values.get("cpu_sum_ns", cpu_ns)
        if wall_ns >= MIN_SAMPLE_S * 1e9:
            self.cpu_share = max(self.cpu_share or 0.0, round(cpu_ns / wall_ns, 4))


def _add_histogram(counts: Counter[int], histogram: Mapping[str, int]) -> None:
    """Add a histogram to `counts`. Its keys are numbers as text, as in JSON."""
    for key, count in histogram.items():
        counts[int(key)] += count


def health_from_samples(
    samples: Sequence[Telemetry], stamps: StampFacts, sends_late_s: Floats, *, reads: int, coalesced: int, last_s: float
) -> ClientHealth:
    """Return the health figures that are computed from the client's telemetry. The run may still be in progress.

    `stamps` describes the timestamp source. `sends_late_s` contains the sorted send delays in seconds. `reads` is the
    number of all reads, and `coalesced` is the number of reads that held several events. `last_s` is the time of the
    last sample in seconds from the run's start.
    """
    totals = _Totals(samples)
    late = totals.late if stamps.exact else Counter[int]()
    ring_differences = totals.ring_differences
    disagreement_s = _ratio(totals.maxima.get("clock_disagreement_ns"), 1e9)
    return ClientHealth(
        stamps=stamps.name,
        source=stamps,
        late_p50_s=late_percentile_s(late, 0.50),
        late_p99_s=late_percentile_s(late, 0.99),
        coalesced_share=round_to_ns(coalesced / reads) if reads else None,
        send_late_p99_s=round_to_ns(percentile(sends_late_s, 0.99)) if len(sends_late_s) else None,
        clock_disagreement_s=disagreement_s,
        clock_step_s=_clock_step_s(disagreement_s, last_s),
        cpu_s=_ratio(totals.cpu_ns, 1e9),
        core_wait_s=_ratio(totals.sum("core_wait_ns"), 1e9),
        core_wait_max_s=_ratio(totals.maxima.get("core_wait_ns"), 1e9),
        cpu_share=totals.cpu_share,
        full_reads=totals.sum("full_reads"),
        windows=totals.sum("windows"),
        sweep_max_s=_ratio(totals.maxima.get("sweep_ns_max"), 1e9),
        retransmit_share=_ratio(totals.sum("retransmits"), len(sends_late_s)),
        out_of_order_share=_ratio(totals.sum("out_of_order"), totals.sum("reads")),
        ring_drops=totals.sum("ring_drops"),
        ring_missed=totals.sum("ring_missed"),
        ring_rejected=totals.sum("ring_rejected"),
        ring_given_up=_ring_given_up(samples),
        socket_rejected=totals.sum("socket_rejected"),
        ring_off_p50_s=ring_difference_s(ring_differences, 0.50),
        ring_off_p99_s=ring_difference_s(ring_differences, 0.99),
        ring_off_max_s=ring_difference_s(ring_differences, 1.0),
        stall_max_s=_ratio(totals.maxima.get("stall_ns_max"), 1e9),
        pauses=totals.sum("pauses"),
        paused_s=_ratio(totals.sum("paused_ns"), 1e9),
        workers=len({sample.worker for sample in samples}),
        samples=len(samples),
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _clock_step_s(disagreement_s: float | None, last_s: float) -> float | None:
    """Return the size of the step of the wall clock during the run, in seconds, or None if it is unknown.

    A clock can be corrected gradually (slewing) or at once (a step). `disagreement_s` is the drift between the wall
    clock and the monotonic clock during a run of `last_s` seconds. Slewing explains a drift of up to `MAX_SLEW *
    last_s`. The result is the drift that slewing does not explain, or 0 if slewing explains the whole drift.
    """
    return None if disagreement_s is None else round_to_ns(max(0.0, disagreement_s - MAX_SLEW * max(1.0, last_s)))


def _error_count(frame: Frame, kind: str) -> int:
    """Return the number of measured requests whose error kind is `kind`."""
    outcomes = frame.outcomes.items()
    return sum(counted.requests for outcome, counted in outcomes if outcome.measured and outcome.kind == kind)


def _client_limit_causes(frame: Frame) -> list[str]:
    """Return the most frequent error messages of the requests that this machine could not send."""
    causes = Counter[str]()
    for outcome, counted in frame.outcomes.items():
        if outcome.measured and outcome.kind == CLIENT_LIMIT and outcome.detail:
            causes[outcome.detail] += counted.requests
    return [cause for cause, _ in causes.most_common(MAX_CAUSES)]


def _stamps(run: Run, frame: Frame) -> StampFacts:
    """Return the source from which the responses of a run got their timestamps.

    - If there are several sources, the result is the least exact of them. A source is ignored if its share of the
      responses is less than MIN_SOURCE_SHARE.
    - Only complete responses are considered. If there are none, all responses are considered.
    - If no response has timestamps, the result is the source in the header of the run file.
    """
    sources = {source: count for source, count in frame.sources.items() if source.measured and source.stamps}
    complete = {source: count for source, count in sources.items() if source.state == "complete"}
    responses = Counter[str]()
    for source, count in (complete or sources).items():
        responses[source.stamps] += count
    used = {name for name, count in responses.items() if count >= MIN_SOURCE_SHARE * responses.total()}
    if not used or used == {run.header.stamps.name}:
        return run.header.stamps
    return stamp_facts(*used)


def _ring_given_up(samples: Sequence[Telemetry]) -> int | None:
    """Return the number of workers that stopped using packet timestamps, or None if no sample contains this
    information."""
    known = [sample for sample in samples if "ring_given_up" in sample.values]
    return len({sample.worker for sample in known if sample.values["ring_given_up"]}) if known else None


def _scheduling(run: Run) -> SchedulingFacts | None:
    """Return the client's scheduling priority from the run's header, or None for runs of older versions."""
    facts = run.header.client.get("scheduling")
    return None if facts is None else msgspec.convert(facts, SchedulingFacts)


def waited_for_core(health: ClientHealth) -> bool:
    """Return True if requests were sent late because the client waited for a CPU core, not because the client was busy.

    Both of these conditions must hold:

    - The longest wait is at least 1 ms, and at least half of the p99 of the send delay.
    - The total wait is at least half of the client's own CPU time. Otherwise, the client was probably late because of
      its own work.
    """
    longest_s = health.core_wait_max_s or 0.0
    total_s = health.core_wait_s or 0.0
    delay_s = health.send_late_p99_s or 0.0
    enough_s = max(MIN_CORE_WAIT_S, CORE_WAIT_SHARE * delay_s)
    return longest_s >= enough_s and total_s >= CORE_WAIT_SHARE * (health.cpu_s or 0.0)


def core_wait_advice(health: ClientHealth) -> str:
    """Return advice for a client that waited for a CPU core: the total wait, the likely cause and the remedy."""
    scheduling = health.scheduling
    own_workers = f"or its {health.workers} workers " if health.workers > 1 else ""
    cause = f"other processes, probably the server, {own_workers}use all cores"
    separate = "give client and server separate cores (`taskset`), or run the client on another host"
    raise_priority = "raise its priority (`chrt -r 1 loadgen ...` as root)"
    if scheduling is not None and scheduling.policy == "realtime":
        remedy = separate
    elif scheduling is not None and scheduling.refused:
        remedy = (
            f"loadgen may not raise its priority ({scheduling.refused}): run it as root, grant CAP_SYS_NICE, or start "
            f"it with `sudo chrt -r 1 loadgen ...`; or {separate}"
        )
    elif scheduling is not None and scheduling.requested == "auto":
        remedy = f"use --client-priority realtime (`chrt -r 1 loadgen ...`), {separate}"
    elif scheduling is not None and scheduling.requested == "normal":
        remedy = f"remove --client-priority normal, {raise_priority}, {separate}"
    else:
        remedy = f"{raise_priority}, {separate}"
    return f"the client waited {duration(health.core_wait_s)} for a CPU core: {cause}; {remedy}"


def quoted_calibration(calibration: Any, stamps: str) -> QuotedCalibration | None:
    """Return the calibration result for the timestamp source `stamps`, or None if there is no valid result.

    `calibration` is the result of `loadgen calibrate` that the run's header contains.
    """
    try:
        p99_s = calibration["errors"][stamps]["ttft_s"]["p99"]
        return msgspec.convert({**calibration, "ttft_p99_s": p99_s}, QuotedCalibration)
    except (TypeError, KeyError, msgspec.ValidationError):
        return None
