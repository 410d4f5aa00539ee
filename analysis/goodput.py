"""Goodput and attainment: how many requests were good enough, each by itself.

A request is good when it is complete and keeps every bound asked for. Its *need* is the factor by which all bounds
would have to be scaled for it to keep them: the largest of its latencies over their bounds; infinite where it is not
complete. So the share of needs of at most x is the attainment with all bounds scaled by x: one sorted array is the
whole curve, and its 90 % point is what 90 % of the requests would have met. A latency that a request does not have
(TPOT of a single token) binds it to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis import stats
from analysis.formulas import window_ns
from analysis.frame import Floats, Frame
from analysis.objectives import Bound

POINTS_MAX = 300
SHARES = (0.5, 0.9, 0.95, 0.99)


def goodput(frame: Frame, bounds: Sequence[Bound], unrecorded: int = 0) -> dict[str, Any]:
    """The `goodput` part of the summary. Requests due in the window count, sent or not; latencies are in seconds.

    `per_s` is good requests that ended inside the window, per second of it; `attainment` good / all, with its exact
    interval (Clopper and Pearson); `met_by` for each share the scale at which so many keep all bounds together, and
    those bounds.
    """
    needed = needs(frame, bounds)
    lost = np.full(unrecorded, math.inf)
    everyone = np.sort(np.concatenate((needed[frame.inside], lost)))
    total, good = len(everyone), int((everyone <= 1).sum())
    return {
        "bounds": [bound.text for bound in bounds],
        "good": good,
        "requests": total,
        "attainment": good / total if total else None,
        "attainment_ci95": list(stats.share_interval(good, total)),
        "per_s": _per_s(frame, needed),
        "each": {bound.text: _share(needs(frame, [bound])[frame.inside], total) for bound in bounds},
        "met_by": {f"{share:.0%}": _met_by(everyone, share, bounds) for share in SHARES},
        "curve": curve(everyone),
    }


def needs(frame: Frame, bounds: Sequence[Bound]) -> Floats:
    """Per request the scale of all bounds at which it keeps them; infinite for one that is not complete."""
    found = np.zeros(len(frame))
    for bound in bounds:
        ratio = latency_of(frame, bound.latency) / bound.bound_s
        found = np.fmax(found, np.where(np.isnan(ratio), 0.0, ratio))
    return np.where(frame.complete, found, math.inf)


def latency_of(frame: Frame, latency: str) -> Floats:
    """One latency of every row in seconds, NaN where it has none, as analysis.formulas defines them."""
    starts = frame.due_ns if latency.endswith("_due") else frame.sent_ns
    if latency.startswith("ttft"):
        return (frame.first_ns - starts) / 1e9
    if latency == "e2e_stream":
        return (frame.end_ns - starts) / 1e9
    if latency == "tpot":
        later = frame.output_tokens - frame.first_tokens
        return (frame.last_ns - frame.first_ns) / np.where(later > 0, later, np.nan) / 1e9
    taken = (frame.last_ns - starts) / 1e9
    if latency == "normalised":
        return taken / np.where(frame.output_tokens > 0, frame.output_tokens, np.nan)
    return taken


def curve(ordered: Floats) -> dict[str, Any]:
    """Attainment over the scale of the bounds, from sorted needs: x and y of its steps, thinned evenly where they are
    many. It ends below 1 where some requests would never be good."""
    finite = ordered[np.isfinite(ordered)]
    ranks = np.unique(np.linspace(0, len(finite) - 1, min(len(finite), POINTS_MAX)).astype(np.int64))
    x, y = finite[ranks], (ranks + 1) / max(1, len(ordered))
    return {"x": np.round(x, 6).tolist(), "y": np.round(y, 6).tolist(), "n": len(ordered), "drawn": len(ranks)}


def _per_s(frame: Frame, needed: Floats) -> float | None:
    span = window_ns(frame)
    if span is None:
        return None
    within = np.ones(len(frame), np.bool_) if frame.window is None else (
        (frame.end_ns >= span[0]) & (frame.end_ns <= span[1])
    )  # fmt: skip
    good = frame.measured & (needed <= 1) & within
    return round(float(good.sum()) / (span[1] - span[0]) * 1e9, stats.DECIMALS)


def _share(needed: Floats, total: int) -> float | None:
    return float((needed <= 1).sum()) / total if total else None


def _met_by(ordered: Floats, share: float, bounds: Sequence[Bound]) -> dict[str, Any] | None:
    """The least scale at which at least this share is good: an order statistic, so that it is exact."""
    place = math.ceil(share * len(ordered)) - 1
    if place < 0 or not math.isfinite(ordered[place]):
        return None
    scale = float(ordered[place])
    return {
        "scale": round(scale, 6),
        "bounds_s": {bound.latency: round(scale * bound.bound_s, stats.DECIMALS) for bound in bounds},
    }
