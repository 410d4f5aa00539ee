"""Did the client keep up, and what is the error bar of its stamps? From the Records and its own telemetry."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.calibration import WATCH_S, quoted
from analysis.frame import Frame
from analysis.limits import COALESCING_LATE_S, reasons
from analysis.stamp_errors import Own, error_bars
from analysis.stats import DECIMALS, percentile
from loadgen.runfile import Run, Telemetry

KERNEL_STAMP_ERROR_S = 20e-6
"""99 % of kernel stamps lie within 0.011 ms of the server's own log (docs, concepts/stamps), rounded up generously."""
SLEW_MAX = 500e-6
"""Fastest that Linux lets a clock be slewed (adjtimex(2), 500 ppm); a larger disagreement is a step."""
UNKNOWN_BARS = dict.fromkeys(
    (f"error_{of}_s" for of in ("bar", "bar_ttft", "ttft_p50", "bar_tpot", "bar_itl", "bar_e2e")), None
)
BUCKETS_PER_OCTAVE = 4
SAMPLE_S_MIN = 0.5
"""A shorter health sample says nothing about how busy a second was."""


def health(run: Run, frame: Frame, latency: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The `client` part of the summary, given its `latency` part. Figures are None where unknown."""
    samples = [sample for sample in run.telemetry if sample.source == "client"]
    figures = _figures(run, frame, samples)
    figures["calibration"] = quoted(run.header.client.get("calibration"), figures["stamps"])
    own = own_error(figures)
    figures |= {name: _rounded(bar) for name, bar in (UNKNOWN_BARS if own is None else error_bars(frame, own)).items()}
    found = reasons({**figures, **beside(figures, latency), "dropped": _ended(frame, "dropped")})
    if not samples:
        found.append("the run holds no health samples: nothing is known about the client")
    return {"verdict": "limited" if found else "ok", "reasons": found, **figures}


def late_percentile_s(counts: Counter[int], share: float) -> float | None:
    """Upper end of the lateness bucket that holds the `share`-quantile: at most 19 % more than the truth."""
    wanted, seen = share * counts.total(), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return math.exp2((bucket + 1) / BUCKETS_PER_OCTAVE) * 1e-6
    return None


def _figures(run: Run, frame: Frame, samples: list[Telemetry]) -> dict[str, Any]:
    kernel = _stamps(run, frame) == "kernel"
    measured = frame.measured
    late = Counter[int]()
    for sample in samples:
        late.update({int(bucket): count for bucket, count in sample.values.get("late_counts", {}).items()})
    send_late = np.sort((frame.sent_ns - frame.due_ns)[frame.sent]) / 1e9
    disagreement_s = _most(samples, "clock_disagreement_ns")
    return {
        "stamps": _stamps(run, frame),
        "late_p50_s": _rounded(late_percentile_s(late, 0.50)) if kernel else None,
        "late_p99_s": _rounded(late_percentile_s(late, 0.99)) if kernel else None,
        "late_max_s": int(frame.late_ns_max[measured].max(initial=0)) / 1e9 if kernel else None,
        "coalesced_share": _coalesced_share(frame),
        "send_late_p99_s": _rounded(percentile(send_late, 0.99)) if len(send_late) else None,
        "clock_disagreement_s": disagreement_s,
        "clock_step_s": _rounded(clock_step_s(disagreement_s, _last_s(run))),
        "cpu_share": _cpu_share(samples),
        "full_reads": _total(samples, "full_reads"),
        "retransmit_share": _ratio(_total(samples, "retransmits"), len(send_late)),
        "out_of_order_share": _ratio(_total(samples, "out_of_order"), _total(samples, "reads")),
        "stall_max_s": _most(samples, "stall_ns_max"),
        "first_token_merged": int(frame.first_token_merged[measured].sum()),
        "reopened": int(frame.reopened[measured].sum()),
        "worker_lost": _ended(frame, "worker_lost"),
        "workers": len({sample.worker for sample in samples}),
        "samples": len(samples),
    }


def beside(figures: Mapping[str, Any], latency: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures that have a limit and no place in the summary: they follow from others there."""
    bar = figures["error_ttft_p50_s" if _was_away(figures) else "error_bar_e2e_s"]
    return {
        "error_share": _ratio(bar, latency["ttft_s"]["p50"]),
        "send_late_share": _ratio(figures["send_late_p99_s"], latency["e2e_s"]["p50"]),
        "coalesced_late_share": figures["coalesced_share"] if (figures["late_p99_s"] or 0) > COALESCING_LATE_S else 0,
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _ended(frame: Frame, kind: str) -> int:
    return sum(seen.number for end, seen in frame.endings.items() if end.measured and end.kind == kind)


def _stamps(run: Run, frame: Frame) -> str:
    """`kernel` only if every answer had kernel stamps: one without is one whose error is unknown."""
    used = {source.stamps for source in frame.sources if source.measured and source.stamps}
    if not used:
        return str(run.header.client.get("stamps", "user"))
    return "kernel" if used == {"kernel"} else "user"


def own_error(figures: Mapping[str, Any]) -> Own | None:
    """Kernel stamps: their own error and a clock step. User-space stamps: how long the loop stood still at most,
    because that is how late they may be, those of tokens read together too."""
    stall_s = figures["stall_max_s"]
    if figures["stamps"] == "kernel":
        stamp_s = KERNEL_STAMP_ERROR_S + (figures["clock_step_s"] or 0.0)
        return Own(stamp_s, 2 * stamp_s, None if stall_s is None else stall_s + WATCH_S)
    return None if stall_s is None else Own(stall_s, stall_s, 0.0)


def _was_away(figures: Mapping[str, Any]) -> bool:
    """Whether tokens that were read together may have waited for the client. Where it was prompt the server, or
    something on the way, had put them into one packet: the error bar cannot tell, but the client is not to blame."""
    return (figures["late_p99_s"] or 0) > COALESCING_LATE_S or (figures["stall_max_s"] or 0) > WATCH_S


def _last_s(run: Run) -> float:
    return max((sample.at_ns for sample in run.telemetry), default=0) / 1e9


def clock_step_s(disagreement_s: float | None, last_s: float) -> float | None:
    """How far the clocks moved against each other beyond what slewing explains; slewing itself is converted away."""
    if disagreement_s is None:
        return None
    return max(0.0, disagreement_s - SLEW_MAX * max(1.0, last_s))


def _coalesced_share(frame: Frame) -> float | None:
    reads = int(frame.reads[frame.measured].sum())
    return round(int(frame.coalesced_reads[frame.measured].sum()) / reads, DECIMALS) if reads else None


def _cpu_share(samples: list[Telemetry]) -> float | None:
    """Share of one core that the busiest worker used in its busiest sample of at least half a second."""
    pairs = [(sample.values.get("cpu_ns", 0), sample.values.get("wall_ns", 0)) for sample in samples]
    shares = [cpu / wall for cpu, wall in pairs if wall >= SAMPLE_S_MIN * 1e9]
    return round(max(shares), 4) if shares else None


def _most(samples: list[Telemetry], name: str) -> float | None:
    values = [sample.values[name] for sample in samples if name in sample.values]
    return max(values) / 1e9 if values else None


def _total(samples: list[Telemetry], name: str) -> int | None:
    values = [sample.values[name] for sample in samples if name in sample.values]
    return sum(values) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DECIMALS)
