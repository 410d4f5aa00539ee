"""What the charts draw: distribution functions with their band, the course of the run, when requests were sent; and
what `lifetime` and `requests` add to it.

Curves of many samples are drawn through some of them. Which ones never depends on their values, except that the
extremes are always among them, so that no tail is smoothed away; `drawn` and `n` say how many of how many.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.frame import Floats, Frame, Integers
from analysis.metrics import METRICS
from analysis.report.lifetime import lifetime
from analysis.report.requests import first_tokens, timeline
from analysis.report.spacing import nice_step
from analysis.stats import dkw_margin
from analysis.window import in_flight

CDF_METRICS = ("e2e_s", "ttft_s", "tpot_s", "itl_s")
POINTS_MAX = 700
EXTREMES = 50
BINS_MAX = 160


def curves(frame: Frame) -> dict[str, Any]:
    """All curves of one Run as plain lists, ready for JSON."""
    return {
        "cdf": {name: distribution(METRICS[name].values(frame), int(frame.sampled.sum())) for name in CDF_METRICS},
        "course": course(frame),
        "sends": sends(frame),
        "first": first_tokens(frame),
        "lifetime": lifetime(frame),
        "timeline": timeline(frame),
    }


def distribution(samples: Floats, requests: int) -> dict[str, Any]:
    """The empirical distribution function: x in seconds, y the share of samples at or below x.

    `margin` is the half-width of its 95 % band. Samples of one request resemble each other, so it counts requests.
    """
    ordered = np.sort(samples)
    ranks = drawn_ranks(len(ordered))
    return {
        "x": np.round(ordered[ranks], 7).tolist(),
        "y": np.round((ranks + 1) / max(1, len(ordered)), 6).tolist(),
        "n": len(ordered),
        "drawn": len(ranks),
        "margin": round(dkw_margin(min(requests, len(ordered))), 6),
    }


def drawn_ranks(count: int) -> Integers:
    """All ranks of up to POINTS_MAX samples; else evenly spaced ones, and the EXTREMES at both ends."""
    if count <= POINTS_MAX:
        return np.arange(count)
    even = np.linspace(0, count - 1, POINTS_MAX - 2 * EXTREMES).astype(np.int64)
    return np.unique(np.concatenate((np.arange(EXTREMES), even, np.arange(count - EXTREMES, count))))


def course(frame: Frame) -> dict[str, Any]:
    """Output tokens per second and the most streams at once in each of at most BINS_MAX equal pieces of the run.

    Warm-up is part of it, at negative instants.
    """
    sent = ~np.isnan(frame.sent_ns)
    ends = frame.end_ns[sent & ~np.isnan(frame.end_ns)]
    if len(ends) == 0 or ends.max() <= frame.sent_ns[sent].min():
        return {"bin_s": 0, "start_s": [], "tokens_per_s": [], "in_flight": [], "receiving": []}
    begins, last = float(frame.sent_ns[sent].min()), float(ends.max())
    bin_ns = nice_step((last - begins) / BINS_MAX)
    edges = np.minimum(begins + bin_ns * np.arange(int(np.ceil((last - begins) / bin_ns)) + 1), last)
    rates = _tokens_by_bin(frame, begins, bin_ns, len(edges) - 1) / np.maximum(np.diff(edges), 1.0) * 1e9
    return {
        "bin_s": bin_ns / 1e9,
        "start_s": np.round(edges[:-1] / 1e9, 9).tolist(),
        "tokens_per_s": np.round(rates, 2).tolist(),
        "in_flight": _most_at_once(frame.sent_ns, frame.end_ns, edges),
        "receiving": _most_at_once(frame.first_ns, frame.last_ns, edges),
    }


def sends(frame: Frame) -> dict[str, Any]:
    """When each measured request left, in seconds after the first one, and how many had left by then."""
    sent = np.sort(frame.sent_ns[frame.sent])
    ranks = drawn_ranks(len(sent))
    after_s = (sent[ranks] - sent[0]) / 1e9 if len(sent) else sent
    return {"x": np.round(after_s, 9).tolist(), "y": (ranks + 1).tolist(), "n": len(sent), "drawn": len(ranks)}


def _tokens_by_bin(frame: Frame, begins: float, bin_ns: float, bins: int) -> Floats:
    tokens = np.zeros(bins)
    for _, chunks in frame.blocks():
        places = ((frame.chunk_ns[chunks] - begins) / bin_ns).astype(np.int64)
        known = (places >= 0) & (frame.chunk_ns[chunks] <= begins + bins * bin_ns)
        places = np.minimum(places[known], bins - 1)
        tokens += np.bincount(places, weights=frame.chunk_tokens[chunks][known], minlength=bins)
    return tokens


def _most_at_once(begins: Floats, ends: Floats, edges: Floats) -> list[int]:
    """The largest number of intervals open at one instant, for each bin."""
    instants, levels = in_flight(begins, ends)
    positions = np.searchsorted(instants, edges)
    before = np.concatenate(([0], levels))[positions[:-1]]
    return [
        int(max(level, levels[first:last].max(initial=0)))
        for level, first, last in zip(before, positions[:-1], positions[1:], strict=True)
    ]
