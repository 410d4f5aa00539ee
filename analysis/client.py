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
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from analysis.calibration import WATCH_S, quoted
from analysis.frame import Booleans, Floats, Frame, Integers
from analysis.report.format import UNKNOWN, duration, share
from analysis.stats import percentile, rounded
from analysis.summary import ClientHealth, Distribution
from loadgen.runfile import Run, StampFacts, Telemetry, stamp_facts

SLEW_MAX = 500e-6
"""Fastest that Linux lets a clock be slewed (adjtimex(2), 500 ppm); a larger disagreement is a step, while slewing
itself is converted away."""
BUCKETS_PER_OCTAVE = 4
"""Of lateness (engine.health)."""
SAMPLE_S_MIN = 0.5
"""A shorter health sample says nothing about how busy a second was."""
COALESCING_LATE_S = 0.001
"""Reads that held several events are the client's doing only if it was at least this late."""
SHARE = 0.99
"""Of the samples that an error bar holds for."""
STEPS_PER_OCTAVE = 16
"""Errors of gaps are counted in buckets and taken for their upper ends: at most 4.4 % too large, never too small."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most that a figure of the client may be, and what is to be feared when it is more."""

    figure: str
    title: str
    most: float
    meaning: str


LIMITS = (
    Ceiling("error_share", "error of the median TTFT, beside it", 0.05, "the figures are not worth their digits"),
    Ceiling(
        "send_late_share",
        "sends late, p99 beside the median E2E",
        0.05,
        "they left later than due; more --workers send sooner",
    ),
    Ceiling("cpu_share", "busiest second", 0.95, "no processor time left: the server may have waited for the client"),
    Ceiling("late_p99_s", "reads late, p99", 0.25, "answers lay unread so long that TCP may have held the server back"),
    Ceiling("stall_max_s", "longest stall", 0.2, "the client stood still, and what came meanwhile shares a stamp"),
    Ceiling("coalesced_late_share", "late reads of several tokens", 0.05, "the times between tokens are blurred"),
    Ceiling("full_reads", "reads of a full window", 0, "so much lay unread that TCP held the server back"),
    Ceiling("retransmit_share", "segments sent again, per request", 0.01, "the network lost parts of requests"),
    Ceiling(
        "out_of_order_share", "segments out of order, per read", 0.01, "the network lost or swapped parts of answers"
    ),
    Ceiling("clock_step_s", "clock step", 0.001, "the wall clock was set during the run, and receive stamps with it"),
    Ceiling("worker_lost", "requests lost with their worker", 0, "what became of them is unknown"),
    # Not turns of a session that had ended: what ended it was a turn that the server did not answer whole.
    Ceiling("dropped", "requests never sent", 0, "the load was less than asked"),
)


def health(run: Run, frame: Frame, latency: Mapping[str, Distribution]) -> ClientHealth:
    """The `client` part of the summary, given its `latency` part."""
    samples = [sample for sample in run.telemetry if sample.source == "client"]
    measured = frame.measured
    found = of_samples(
        samples,
        _stamps(run, frame),
        np.sort((frame.sent_ns - frame.due_ns)[frame.sent]) / 1e9,
        reads=int(frame.reads[measured].sum()),
        coalesced=int(frame.coalesced_reads[measured].sum()),
        last_s=max((sample.at_ns for sample in run.telemetry), default=0) / 1e9,
    )
    found.late_max_s = int(frame.late_ns_max[measured].max(initial=0)) / 1e9 if found.source.exact else None
    found.first_token_merged = int(frame.first_token_merged[measured].sum())
    found.reopened = int(frame.reopened[measured].sum())
    found.worker_lost = _ended(frame, "worker_lost")
    found.calibration = quoted(run.header.client.get("calibration"), found.stamps)
    if (own := own_error(found)) is not None:
        for name, bar in error_bars(frame, own).items():
            setattr(found, name, None if bar is None else rounded(bar))
    found.reasons = reasons(found, latency["ttft_s"].p50, latency["e2e_s"].p50, _ended(frame, "dropped"))
    if not samples:
        found.reasons.append("the run holds no health samples: nothing is known about the client")
    found.verdict = "limited" if found.reasons else "ok"
    return found


def reasons(
    found: ClientHealth, ttft_p50_s: float | None, e2e_p50_s: float | None, dropped: int | None = None
) -> list[str]:
    """One line per limit that is exceeded. Figures that are None are not known and exceed nothing."""
    stamps_s = found.error_ttft_p50_s if _was_away(found) else found.error_bar_e2e_s
    derived = {
        "error_share": _ratio(stamps_s, ttft_p50_s),
        "send_late_share": _ratio(found.send_late_p99_s, e2e_p50_s),
        "coalesced_late_share": found.coalesced_share if (found.late_p99_s or 0) > COALESCING_LATE_S else 0,
        "dropped": dropped,
    }
    return [
        f"{limit.title} {text(limit.figure, value)}, limit {text(limit.figure, limit.most)}: {limit.meaning}"
        for limit in LIMITS
        if (value := derived[limit.figure] if limit.figure in derived else getattr(found, limit.figure)) is not None
        and value > limit.most
    ]


def text(figure: str, value: float | None) -> str:
    """A figure of the client in the unit that the end of its name gives."""
    if value is None:
        return UNKNOWN
    if figure.endswith("_s"):
        return duration(value)
    return share(value) if figure.endswith("_share") else f"{value:,.0f}"


def late_percentile_s(counts: Counter[int], share: float) -> float | None:
    """Upper end of the lateness bucket that holds the `share`-quantile: at most 19 % more than the truth."""
    wanted, seen = share * counts.total(), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return rounded(math.exp2((bucket + 1) / BUCKETS_PER_OCTAVE) * 1e-6)
    return None


def of_samples(
    samples: Sequence[Telemetry], stamps: StampFacts, sends_late_s: Floats, *, reads: int, coalesced: int, last_s: float
) -> ClientHealth:
    """What the client's own telemetry says of it, with how late each request was sent (in order), how many of its reads
    held several events, and when the last of all this was. Also of a run that goes on."""
    late = Counter[int]()
    if stamps.exact:
        for sample in samples:
            late.update({int(bucket): count for bucket, count in sample.values.get("late_counts", {}).items()})
    disagreement_s = _most(samples, "clock_disagreement_ns")
    step_s = None if disagreement_s is None else max(0.0, disagreement_s - SLEW_MAX * max(1.0, last_s))
    busy = [(sample.values.get("cpu_ns", 0), sample.values.get("wall_ns", 0)) for sample in samples]
    return ClientHealth(
        stamps=stamps.name,
        source=stamps,
        late_p50_s=late_percentile_s(late, 0.50),
        late_p99_s=late_percentile_s(late, 0.99),
        coalesced_share=rounded(coalesced / reads) if reads else None,
        send_late_p99_s=rounded(percentile(sends_late_s, 0.99)) if len(sends_late_s) else None,
        clock_disagreement_s=disagreement_s,
        clock_step_s=None if step_s is None else rounded(step_s),
        cpu_share=max((round(cpu / wall, 4) for cpu, wall in busy if wall >= SAMPLE_S_MIN * 1e9), default=None),
        full_reads=_total(samples, "full_reads"),
        retransmit_share=_ratio(_total(samples, "retransmits"), len(sends_late_s)),
        out_of_order_share=_ratio(_total(samples, "out_of_order"), _total(samples, "reads")),
        stall_max_s=_most(samples, "stall_ns_max"),
        workers=len({sample.worker for sample in samples}),
        samples=len(samples),
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _ended(frame: Frame, kind: str) -> int:
    return sum(seen.number for end, seen in frame.endings.items() if end.measured and end.kind == kind)


def _stamps(run: Run, frame: Frame) -> StampFacts:
    """The run's source only if every answer was stamped by it: one without is one whose error is unknown."""
    used = {source.stamps for source in frame.sources if source.measured and source.stamps}
    if not used:
        return run.header.stamps
    name = used.pop() if len(used) == 1 else "user"
    return run.header.stamps if name == run.header.stamps.name else stamp_facts(name)


def own_error(found: ClientHealth) -> StampError | None:
    """Exact stamps: their own error and a clock step. Others: how long the loop stood still at most: so late
    may they be, those of tokens read together too."""
    stall_s = found.stall_max_s
    if found.source.error_s is not None:
        stamp_s = found.source.error_s + (found.clock_step_s or 0.0)
        return StampError(stamp_s, 2 * stamp_s, None if stall_s is None else stall_s + WATCH_S)
    return None if stall_s is None else StampError(stall_s, stall_s, 0.0)


def _was_away(found: ClientHealth) -> bool:
    """Whether tokens that were read together may have waited for the client. Where it was prompt the server, or
    something on the way, had put them into one packet: the error bar cannot tell, but the client is not to blame."""
    return (found.late_p99_s or 0) > COALESCING_LATE_S or (found.stall_max_s or 0) > WATCH_S


def _most(samples: Sequence[Telemetry], name: str) -> float | None:
    values = [sample.values[name] for sample in samples if name in sample.values]
    return max(values) / 1e9 if values else None


def _total(samples: Sequence[Telemetry], name: str) -> int | None:
    values = [sample.values[name] for sample in samples if name in sample.values]
    return sum(values) if values else None


@dataclass(frozen=True, slots=True)
class StampError:
    """What a stamp is off by that stands for one token alone, and a difference of two such stamps. Seconds."""

    stamp_s: float
    pair_s: float
    away_s: float | None
    """The longest that the client may have been away; 0 where that is in `stamp_s`, None where nobody looked."""


class _Reads(NamedTuple):
    """The reads of a block of rows that brought several tokens."""

    rows: Integers
    sizes: Integers
    """Tokens' chunks in each."""
    first: Booleans
    """Whether it holds the answer's first token."""
    off_ns: Floats
    """The most that a stamp in it may be off by."""


def error_bars(frame: Frame, own: StampError) -> dict[str, float | None]:
    """What 99 % of the stamps, TTFTs, TPOTs and ITLs of the complete requests are off by at most, and E2E, which ends
    with the newest token of a read; and what the median TTFT is off by. In seconds, None where there is no sample."""
    off_first_ns = np.zeros(len(frame))
    stamps, gaps = _Counted(), _Counted()
    for reads in _merged(frame, own.away_s):
        off_first_ns[reads.rows[reads.first]] = reads.off_ns[reads.first]
        stamps.add(reads.off_ns, reads.sizes - 1)
        gaps.add(reads.off_ns, reads.sizes - reads.first)  # the gaps within a read, and the one before it
    chunks = frame.chunk_counts[frame.sampled]
    later = (frame.output_tokens - frame.first_tokens)[frame.sampled]
    off_first_s = off_first_ns[frame.sampled] / 1e9
    ttft_s = (frame.first_ns - frame.sent_ns)[frame.sampled] / 1e9
    return {
        "error_bar_s": own.stamp_s + stamps.quantile_ns(int(chunks.sum())) / 1e9,
        "error_bar_ttft_s": own.stamp_s + (_quantile(off_first_s) or 0.0),
        "error_ttft_p50_s": own.stamp_s + median_off_s(ttft_s, off_first_s),
        "error_bar_tpot_s": _quantile((off_first_s + own.pair_s)[later > 0] / later[later > 0]),
        "error_bar_itl_s": own.pair_s + gaps.quantile_ns(int(np.maximum(chunks - 1, 0).sum())) / 1e9,
        "error_bar_e2e_s": own.stamp_s,
    }


def first_off_s(frame: Frame) -> Floats:
    """By how much the TTFT of each request may be too large at most, in seconds, if nothing is known of how long the
    client was away; 0 where its first token was read alone."""
    off_ns = np.zeros(len(frame))
    for reads in _merged(frame, None):
        off_ns[reads.rows[reads.first]] = reads.off_ns[reads.first]
    return off_ns / 1e9


def median_off_s(ttft_s: Floats, off_s: Floats) -> float:
    """What the median of these TTFTs is too large by at most, if each is too large by at most what stands in `off_s`:
    the true median lies between that of all of them lessened and this. NaN among them is no sample."""
    return _median(ttft_s) - _median(ttft_s - off_s)


class _Counted:
    """Errors by size, in as little room for a hundred million as for ten."""

    def __init__(self) -> None:
        self._counts = np.zeros(64 * STEPS_PER_OCTAVE, np.int64)

    def add(self, off_ns: Floats, times: Integers) -> None:
        """Count each error so many times."""
        buckets = np.ceil(np.log2(np.maximum(off_ns, 1.0)) * STEPS_PER_OCTAVE).astype(np.int64)
        self._counts += np.bincount(buckets, times, len(self._counts)).astype(np.int64)

    def quantile_ns(self, total: int) -> float:
        """What all but 1 % of `total` keep; those that were not counted are not off."""
        beyond = total - int(np.ceil(SHARE * total))
        from_above = np.cumsum(self._counts[::-1])[::-1]
        larger = np.flatnonzero(from_above > beyond)
        return float(2.0 ** (larger[-1] / STEPS_PER_OCTAVE)) if len(larger) else 0.0


def _quantile(values: Floats) -> float | None:
    return float(np.percentile(values, 100 * SHARE, method="inverted_cdf")) if len(values) else None


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else 0.0


def _merged(frame: Frame, away_s: float | None) -> Iterator[_Reads]:
    """The reads of complete requests that brought several tokens, block by block."""
    most_ns = np.inf if away_s is None else away_s * 1e9
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
        kept = sampled[row]
        at, sizes, row = at[kept], sizes[kept], row[kept]
        first = begins[at]
        since_ns = stamps[at] - np.where(first, before_ns[row], stamps[at - 1])
        yield _Reads(row, sizes, first, np.clip(since_ns, 0.0, most_ns))
