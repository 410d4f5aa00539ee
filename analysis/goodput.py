"""Computes the goodput of a run: the requests that meet all bounds of --goodput.

A request is good if it is complete and meets all bounds of --goodput. A latency that the request does not have is
ignored, such as the TPOT of a single token. The time to the first answer is an exception: if a response ends during its
reasoning, this time is infinite. The *bound scale* of a request is max(latency / bound) over all bounds, or
infinity if the request is not complete. The bound scale is the smallest factor by which all bounds must be multiplied
for the request to meet them.

If all bounds are multiplied by x, the attainment is the share of requests with a bound scale of at most x. The sorted
bound scales therefore give the whole attainment curve. Their 90th percentile is the factor at which 90% of the
requests meet the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadgen.analysis import stats
from loadgen.analysis.frame import Floats, Frame
from loadgen.analysis.frame_parts import frame_parts
from loadgen.analysis.objectives import LATENCIES, AttainmentCurve, BoundsMet, Goodput, Objective, parse_bounds
from loadgen.analysis.reasoning import unanswered
from loadgen.analysis.row_labels import RowLabels
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.summary import PartFigures, Summary

MAX_POINTS = 300
"""Maximum number of points of the attainment curve."""
UNTIL_ANSWER = ("ttfa", "think")
"""Latencies that end with the first token of the answer. A response without an answer misses their bounds."""
SHARES = (0.5, 0.9, 0.95, 0.99)
"""Shares of the requests for which `met_by` reports the scaled bounds."""


def goodput(frame: Frame, bounds: Sequence[Objective], unrecorded: int = 0) -> Goodput:
    """Return the goodput of a run: how many requests met all `bounds`, and related figures for the summary.

    `unrecorded` is the number of requests that a killed run did not record. These requests count as not good.
    """
    scales = bound_scale(frame, bounds)
    ordered = np.sort(np.concatenate((scales[frame.inside], np.full(unrecorded, math.inf))))
    total, good = len(ordered), int((ordered <= 1).sum())
    span = frame.span_ns
    good_ended_inside = int((frame.measured & (scales <= 1) & frame.within(frame.end_ns)).sum())
    good_per_bound = {bound.text: int((bound_scale(frame, [bound])[frame.inside] <= 1).sum()) for bound in bounds}
    return Goodput(
        bounds=[bound.text for bound in bounds],
        good=good,
        requests=total,
        attainment=good / total if total else None,
        attainment_ci95=stats.share_interval(good, total),
        per_s=None if span is None else stats.round_to_ns(good_ended_inside / (span[1] - span[0]) * 1e9),
        each={text: count / total if total else None for text, count in good_per_bound.items()},
        met_by={f"{share:.0%}": _met_by(ordered, share, bounds) for share in SHARES},
        curve=attainment_curve(ordered),
    )


def add_part_goodput(run: Run, frame: Frame, summary: Summary, bounds: Sequence[Objective]) -> None:
    """Add the goodput of each class of traffic, of each model and of each replica to the summary of a run.

    `bounds` are the bounds of the whole run. If a class has separate bounds, only these apply to the class.
    """
    class_bounds = {facts.name: facts.goodput for facts in run.header.traffic}
    parts_by_labels: list[tuple[RowLabels | None, Sequence[PartFigures]]] = [
        (frame.classes, summary.traffic),
        (frame.models, summary.models),
        (frame.replicas, summary.replicas),
    ]
    for labels, parts in parts_by_labels:
        figures = {part.name: part for part in parts}
        for name, rows in frame_parts(frame, labels):
            own = class_bounds.get(name) if labels is frame.classes else None
            part_bounds = parse_bounds(own) if own else bounds
            if part_bounds:
                figures[name].goodput = goodput(rows, part_bounds)


def bound_scale(frame: Frame, bounds: Sequence[Objective]) -> Floats:
    """Return the bound scale of each request: the smallest factor at which the request meets all bounds.

    If all bounds are multiplied by this factor, the request just meets them. The bound scale is therefore max(latency /
    bound) over all bounds. It is infinite for a request that is not complete. It is also infinite for a response
    without an answer, if a bound is on the answer.
    """
    result = np.zeros(len(frame))
    if any(bound.figure in UNTIL_ANSWER for bound in bounds):
        result[unanswered(frame)] = math.inf
    for bound in bounds:
        ratio = LATENCIES[bound.figure].rows(frame) / bound.bound
        result = np.fmax(result, np.where(np.isnan(ratio), 0.0, ratio))
    return np.where(frame.complete, result, math.inf)


def attainment_curve(ordered: Floats) -> AttainmentCurve:
    """Return the attainment curve: for each x, the share of requests that are good if all bounds are multiplied by x.

    `ordered` contains the bound scale of each request, in ascending order. The bound scale of a request is the smallest
    x at which the request is good (see `bound_scale`).

    The curve has at most MAX_POINTS points, evenly spaced by rank. Some requests, such as incomplete ones, are not good
    at any x. If there are such requests, the curve ends below 1.
    """
    finite = ordered[np.isfinite(ordered)]
    ranks = np.unique(np.linspace(0, len(finite) - 1, min(len(finite), MAX_POINTS)).astype(np.int64))
    x, y = finite[ranks], (ranks + 1) / max(1, len(ordered))
    return AttainmentCurve(x=np.round(x, 6).tolist(), y=np.round(y, 6).tolist(), n=len(ordered), drawn=len(ranks))


def _met_by(ordered: Floats, share: float, bounds: Sequence[Objective]) -> BoundsMet | None:
    """Return the factor by which `bounds` must be multiplied so that just enough requests meet them.

    - `ordered` contains one number per request: the smallest factor at which this request meets the bounds. It is
      infinite if the request is not complete. The numbers are in ascending order.
    - `share` is the share of the requests that must meet the bounds, such as 0.99.

    The result contains the factor and the multiplied bounds. With a factor below 1, the requests meet even stricter
    bounds than `bounds`. Return None if no finite factor is sufficient, or if there are no requests.
    """
    index = math.ceil(share * len(ordered)) - 1
    if index < 0 or not math.isfinite(ordered[index]):
        return None
    scale = float(ordered[index])
    bounds_s = {bound.figure: stats.round_to_ns(scale * bound.bound) for bound in bounds}
    return BoundsMet(scale=float(f"{scale:.6g}"), bounds_s=bounds_s)
