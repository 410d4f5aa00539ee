"""Computes chart data on the parts of a request's latency, and on the bounds that each request meets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from loadgen.analysis.format import scale_of
from loadgen.analysis.frame import Booleans, Floats, Frame
from loadgen.analysis.objectives import COMPARISONS, Objective, parse, parse_bounds
from loadgen.analysis.report.gap_counts import GapCounts
from loadgen.analysis.summary import Summary

STALL_FACTOR = 5
"""A gap between chunks is a stall if it is longer than this multiple of the median gap."""
REQUESTS_MIN = 10
"""Minimum number of complete requests for the chart of latency parts."""
GROUPS = (("fastest 50%", 0.0, 0.5), ("p50 to p90", 0.5, 0.9), ("p90 to p99", 0.9, 0.99), ("slowest 1%", 0.99, 1.0))
"""Groups of requests by their rank in E2E: the name, and the range of the rank as a share."""
SERVER_GROUP = "server's mean"
SERVER_PARTS = ("queue", "prefill", "decode", "inference")
BOUNDS_POINTS_MAX = 600
"""Maximum number of requests that the scatter chart shows."""
BOUNDED = ("ttft", "tpot")
"""Keys of the latencies that the scatter chart shows."""


def latency_parts(frame: Frame, gaps: GapCounts, phases: Mapping[str, float]) -> dict[str, Any] | None:
    """Return the mean TTFT, decode time and stalls in s, for groups of complete requests with similar E2E latencies.

    A stall is a gap between chunks that is longer than STALL_FACTOR times the median gap of the run. Decode time is the
    E2E latency without TTFT and stalls.

    `phases` contains the mean duration of each phase of a request, such as `prefill`, according to the server's
    metrics. The result contains these durations too. Return None if there are fewer than REQUESTS_MIN complete
    requests, or if responses have no gaps.
    """
    retained = frame.sampled & ~np.isnan(frame.first_ns) & ~np.isnan(frame.end_ns)
    median_gap_s = gaps.median_s
    count = int(retained.sum())
    if count < REQUESTS_MIN or median_gap_s is None:
        return None
    e2e_s = ((frame.end_ns - frame.sent_ns) / 1e9)[retained]
    ttft_s = ((frame.first_ns - frame.sent_ns) / 1e9)[retained]
    stalls_s = _stalls_s(frame, STALL_FACTOR * median_gap_s)[retained]
    order = np.argsort(e2e_s, kind="stable")
    result: dict[str, Any] = {"group": [], "n": [], "ttft_s": [], "decode_s": [], "stalls_s": [], "e2e_s": []}
    for name, low, high in GROUPS:
        rows = order[round(low * count) : round(high * count)]
        if len(rows):
            means = {"ttft_s": ttft_s[rows].mean(), "stalls_s": stalls_s[rows].mean(), "e2e_s": e2e_s[rows].mean()}
            means["decode_s"] = max(0.0, means["e2e_s"] - means["ttft_s"] - means["stalls_s"])
            result["group"].append(name)
            result["n"].append(len(rows))
            for key, value in means.items():
                result[key].append(round(float(value), 6))
    known = {part: round(phases[part], 6) for part in SERVER_PARTS if part in phases}
    if {"queue", "inference"} <= known.keys() or {"queue", "prefill", "decode"} <= known.keys():
        if "prefill" in known:
            known.pop("inference", None)
        total = round(sum(known.values()), 6)
        server = {part: [known[part]] if part in known else [] for part in SERVER_PARTS}
        result["server"] = server | {"total": [total], "n": [round(phases["requests"])]}
    else:
        result["server"] = {name: [] for name in (*SERVER_PARTS, "total", "n")}
    for part in (*SERVER_PARTS, "total"):
        result["server"][f"{part}_group"] = [SERVER_GROUP] * len(result["server"][part])
    return result | {"median_gap_s": median_gap_s}


def _stalls_s(frame: Frame, threshold_s: float) -> Floats:
    """Return the total duration of the gaps above the threshold, in s, for each row of the frame."""
    result = np.zeros(len(frame))
    for rows, chunks in frame.blocks():
        steps_ns = frame.chunk_ns.steps[chunks]
        stalls = np.flatnonzero(steps_ns > threshold_s * 1e9)
        ends = frame.offsets[rows.start + 1 : rows.stop + 1] - chunks.start
        stalled_rows = np.searchsorted(ends, stalls, side="right")
        result[rows] = np.bincount(stalled_rows, steps_ns[stalls] / 1e9, len(ends))
    return result


def latency_bounds(summary: Summary) -> dict[str, Objective]:
    """Return the upper bounds on TTFT and TPOT, by latency key.

    The bounds of --goodput are used. If there are none, the bounds of --assert on percentiles are used. If there are
    several bounds on one latency, the first one is used.
    """
    bounds = parse_bounds(summary.goodput.bounds) if summary.goodput else []
    if not any(bound.figure in BOUNDED for bound in bounds):
        bounds = [bound for bound in parse(each.objective for each in summary.objectives) if bound.percentile]
    result: dict[str, Objective] = {}
    for key in BOUNDED:
        upper = [bound for bound in bounds if bound.figure == key and bound.comparison in ("<", "<=")]
        if upper:
            result[key] = upper[0]
    return result


def bounds_scatter(frame: Frame, summary: Summary) -> dict[str, Any] | None:
    """Return the points of the scatter chart of TTFT and TPOT, the bounds, and the shares of requests that meet them.

    Each complete request is one point. `tpot_met` contains the TPOT of requests that meet all bounds, and `tpot_missed`
    that of the other requests. At most BOUNDS_POINTS_MAX points are returned. The latencies are in the units of the
    axes. `shares` contains the shares of complete requests that meet both bounds, miss only the bound on TTFT, miss
    only the bound on TPOT, or miss both. Return None for a run without bounds on TTFT or TPOT.
    """
    bounds = latency_bounds(summary)
    values_s = {
        "ttft": (frame.first_ns - frame.sent_ns) / 1e9,
        "tpot": (frame.last_ns - frame.first_ns) / frame.later_tokens / 1e9,
    }
    retained = frame.sampled & ~np.isnan(values_s["ttft"]) & ~np.isnan(values_s["tpot"])
    if not bounds or not retained.any():
        return None
    values = {key: column[retained] for key, column in values_s.items()}
    met = {key: _satisfied(values[key], bounds.get(key)) for key in BOUNDED}
    count = int(retained.sum())
    drawn = np.unique(np.linspace(0, count - 1, min(count, BOUNDS_POINTS_MAX)).astype(np.int64))
    result: dict[str, Any] = {
        "n": count,
        "drawn": len(drawn),
        "bounds": [bound.text for bound in bounds.values()],
        "shares": {
            "both": float((met["ttft"] & met["tpot"]).mean()),
            "ttft missed": float((~met["ttft"] & met["tpot"]).mean()),
            "tpot missed": float((met["ttft"] & ~met["tpot"]).mean()),
            "both missed": float((~met["ttft"] & ~met["tpot"]).mean()),
        },
    }
    is_met = (met["ttft"] & met["tpot"])[drawn].tolist()
    scaled = {}
    for key in BOUNDED:
        bound_s = bounds[key].bound if key in bounds else None
        factor, unit = scale_of(max(bound_s or 0.0, float(np.median(values[key]))))
        scaled[key] = [float(f"{value:.4g}") for value in values[key][drawn] * factor]
        result[f"{key}_unit"] = unit
        result[f"{key}_bound"] = None if bound_s is None else bound_s * factor
    return result | {
        "request": frame.id[retained][drawn].tolist(),
        "ttft": scaled["ttft"],
        "tpot_met": [value if good else None for value, good in zip(scaled["tpot"], is_met, strict=True)],
        "tpot_missed": [None if good else value for value, good in zip(scaled["tpot"], is_met, strict=True)],
    }


def _satisfied(values: Floats, bound: Objective | None) -> Booleans:
    """Return a mask of the values that meet the bound. If `bound` is None, all values are selected."""
    if bound is None:
        return np.ones(len(values), np.bool_)
    return np.asarray(COMPARISONS[bound.comparison](values, bound.bound), np.bool_)  # type: ignore[arg-type]
