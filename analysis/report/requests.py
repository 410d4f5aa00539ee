"""Single requests on the page: TTFT against prompt length and against place in the queue, and the timeline of each.

Of many requests some are drawn. Which ones is a rule that the page states: every k-th in the order sent, and beside
them the slowest and those that failed, so that nothing remarkable is thinned away. Lines through the points are of all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.frame import Booleans, Floats, Frame, Integers

POINTS_MAX = 1500
ROWS_MAX = 1000
SLOWEST = 100
BAD_MOST = 100
PARTS_MAX = 24
PART_LEAST = 25
CHUNKS_MAX = 130_000
"""Token instants kept for the timeline: about four bytes each in the page."""
TICK_NS = 100_000


def first_tokens(frame: Frame) -> dict[str, Any]:
    """TTFT of complete requests by prompt length and by place in the queue (1 is the first sent)."""
    order = _order_sent(frame)
    positions = np.zeros(len(frame), np.int64)
    positions[order] = np.arange(1, len(order) + 1)
    rows = order[(frame.sampled & ~np.isnan(frame.first_ns))[order]]
    ttft_s = (frame.first_ns - frame.sent_ns)[rows] / 1e9
    prompts = frame.prompt_tokens[rows]
    drawn = _some(len(rows), POINTS_MAX, ttft_s)
    return {
        "request": frame.id[rows][drawn].tolist(),
        "position": positions[rows][drawn].tolist(),
        "prompt": prompts[drawn].astype(np.int64).tolist(),
        "ttft_s": np.round(ttft_s[drawn], 6).tolist(),
        "n": len(rows),
        "drawn": len(drawn),
        "by_position": _middles(positions[rows].astype(np.float64), ttft_s),
        "by_prompt": _middles(prompts, ttft_s),
        "prompts": [int(prompts.min()), int(prompts.max())] if len(prompts) else [],
    }


def timeline(frame: Frame) -> dict[str, Any]:
    """When each request was sent, got its first and its last token, and ended; and its tokens, where they fit."""
    order = _order_sent(frame)
    bad = ~frame.complete[order]
    taken_ns = (frame.end_ns - frame.sent_ns)[order]
    chosen = _some(len(order), ROWS_MAX, taken_ns, bad)
    rows = order[chosen]
    columns = {"sent_s": frame.sent_ns, "first_s": frame.first_ns, "last_s": frame.last_ns, "end_s": frame.end_ns}
    return {
        "request": frame.id[rows].tolist(),
        "position": (chosen + 1).tolist(),
        **{name: _seconds(values[rows]) for name, values in columns.items()},
        "bad": (~frame.complete[rows]).astype(int).tolist(),
        "tokens": _ticks(frame, rows),
        "n": len(order),
        "drawn": len(rows),
        "every": 1 if len(rows) == len(order) else round(len(order) / _evenly(ROWS_MAX)),
        "tick_s": TICK_NS / 1e9,
    }


def _order_sent(frame: Frame) -> Integers:
    """The rows of measured requests that were sent, first sent first."""
    rows = np.flatnonzero(frame.sent)
    return rows[np.argsort(frame.sent_ns[rows], kind="stable")]


def _evenly(most: int) -> int:
    return most - SLOWEST - BAD_MOST


def _some(count: int, most: int, slowness: Floats, bad: Booleans | None = None) -> Integers:
    """Which of `count` to draw: all up to `most`, else every k-th, the slowest, and of the bad ones every k-th."""
    if count <= most:
        return np.arange(count)
    slowest = np.argsort(np.where(np.isnan(slowness), -np.inf, slowness), kind="stable")[-SLOWEST:]
    failed = np.empty(0, np.int64) if bad is None else np.flatnonzero(bad)
    if len(failed) > BAD_MOST:
        failed = failed[np.linspace(0, len(failed) - 1, BAD_MOST).astype(np.int64)]
    even = np.linspace(0, count - 1, _evenly(most)).astype(np.int64)
    return np.unique(np.concatenate((even, slowest, failed)))


def _middles(x: Floats, y: Floats) -> dict[str, list[float]]:
    """Median and p90 of y along x: in up to PARTS_MAX parts of equally many, none of fewer than PART_LEAST."""
    empty: dict[str, list[float]] = {"x": [], "p50": [], "p90": []}
    parts = min(PARTS_MAX, len(x) // PART_LEAST)
    if parts < 2 or x.min() == x.max():
        return empty
    order = np.argsort(x, kind="stable")
    cuts = np.unique(np.searchsorted(x[order], x[order][np.linspace(0, len(x) - 1, parts + 1).astype(np.int64)[1:-1]]))
    for part in np.split(order, cuts):  # a part holds all requests of one x, or none of them
        if len(part):
            empty["x"].append(round(float(np.median(x[part])), 1))
            for name, share in (("p50", 50), ("p90", 90)):
                empty[name].append(round(float(np.percentile(y[part], share)), 6))
    return empty


def _seconds(instants_ns: Floats) -> list[float | None]:
    return [None if np.isnan(value) else round(value / 1e9, 6) for value in instants_ns.tolist()]


def _ticks(frame: Frame, rows: Integers) -> list[list[int]]:
    """Each row's chunks as steps of TICK_NS from one to the next, the first from when the request was sent.

    Empty lists where the chunks of all rows together are too many; then every k-th row has its own.
    """
    counts = frame.chunk_counts[rows]
    every = max(1, int(np.ceil(counts.sum() / CHUNKS_MAX)))
    kept = []
    for place, row in enumerate(rows):
        begins, ends = (int(each) for each in frame.offsets[row : row + 2])
        steps = np.rint((frame.chunk_ns[begins:ends] - frame.sent_ns[row]) / TICK_NS).astype(np.int64)
        kept.append(np.diff(steps, prepend=0).tolist() if place % every == 0 else [])
    return kept
