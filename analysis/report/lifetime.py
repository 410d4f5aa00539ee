"""The time between tokens over the life of an answer: where in it the server hesitates, and the longest gaps.

A gap belongs to the token that ends it: the gap before token 2 is the first. Percentiles per token come from a
histogram whose buckets are 1 % wide, so that a million requests cost one pass and two megabytes; largest gaps are
exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.frame import Floats, Frame, Integers
from analysis.report.spacing import nice_step
from analysis.stats import PERCENTILES, samples_needed

BINS_MAX = 128
LONGEST = 20
BUCKET = 1.01
LEAST_S = 1e-6
BUCKETS = int(np.log(1e9) / np.log(BUCKET))
"""From a microsecond to a quarter of an hour; what lies outside counts with the ends."""
SHOWN = ("p50", "p90", "p99")


def lifetime(frame: Frame) -> dict[str, Any]:
    """Percentiles and the largest of complete requests' gaps by token, and the LONGEST of all, with their place."""
    sampled = frame.sampled
    most = int(frame.arrived_tokens[sampled].max(initial=0))
    width = max(1, round(nice_step(most / BINS_MAX))) if most else 1
    bins = most // width + 1
    counts, largest = np.zeros((bins, BUCKETS), np.int64), np.zeros(bins)
    longest: list[tuple[float, int, int, float]] = []
    for rows, chunks in frame.blocks():
        gaps, tokens, places, ends_ns = _gaps(frame, rows, chunks)
        if len(gaps) == 0:
            continue
        binned = tokens // width
        flat = binned * BUCKETS + _bucket(gaps)
        counts += np.bincount(flat, minlength=bins * BUCKETS).reshape(bins, BUCKETS)
        np.maximum.at(largest, binned, gaps)
        top = np.argpartition(gaps, -LONGEST)[-LONGEST:] if len(gaps) > LONGEST else np.arange(len(gaps))
        found = zip(gaps[top], places[top], tokens[top], ends_ns[top], strict=True)
        longest = sorted([*longest, *((float(g), int(p), int(t), float(e)) for g, p, t, e in found)], reverse=True)
        longest = longest[:LONGEST]
    return _drawn(frame, counts, largest, width) | {"longest": [_place(frame, *each) for each in longest]}


def _gaps(frame: Frame, rows: slice, chunks: slice) -> tuple[Floats, Integers, Integers, Floats]:
    """Of one block: each gap in seconds, the token that ends it (counted from 1), its row, and when it ended."""
    counts = np.diff(frame.offsets[rows.start : rows.stop + 1])
    kept = np.repeat(frame.sampled[rows], counts)
    firsts = frame.offsets[rows][counts > 0] - chunks.start
    kept[firsts] = False  # a request's first chunk ends no gap
    kept = kept[1:]
    before = np.cumsum(frame.chunk_tokens[chunks], dtype=np.int64)  # tokens up to and with each chunk, in the block
    started = np.zeros(len(counts), np.int64)
    started[counts > 0] = before[firsts] - frame.chunk_tokens[chunks][firsts]
    tokens = (before[:-1] - np.repeat(started, counts)[1:] + 1)[kept]
    places = np.repeat(np.arange(rows.start, rows.stop), counts)[1:][kept]
    instants = frame.chunk_ns[chunks]
    return np.diff(instants)[kept] / 1e9, tokens, places, instants[1:][kept]


def _bucket(gaps: Floats) -> Integers:
    buckets = np.log(np.maximum(gaps, LEAST_S) * (1 / LEAST_S))
    buckets *= 1 / np.log(BUCKET)
    return np.minimum(buckets.astype(np.int64), BUCKETS - 1)


def _drawn(frame: Frame, counts: Integers, largest: Floats, width: int) -> dict[str, Any]:
    """Only where there are gaps; a percentile only where enough requests reach that far for it to mean something."""
    totals = counts.sum(axis=1)
    held = np.flatnonzero(totals)
    below = np.cumsum(counts, axis=1)
    middles = LEAST_S * BUCKET ** (np.arange(BUCKETS) + 0.5)
    drawn: dict[str, Any] = {
        "token": np.maximum(held * width, 1).tolist(),
        "width": width,
        "n": totals[held].tolist(),
        "requests": int(frame.sampled.sum()),
        "max": [round(float(value), 7) for value in largest[held]],
    }
    for name in SHOWN:
        reached = (below[held] >= PERCENTILES[name] * totals[held, None]).argmax(axis=1)
        enough = totals[held] / width >= samples_needed(PERCENTILES[name])
        values = np.minimum(middles[reached], largest[held])
        drawn[name] = [round(float(value), 7) if fine else None for value, fine in zip(values, enough, strict=True)]
    return drawn


def _place(frame: Frame, gap_s: float, row: int, token: int, ended_ns: float) -> dict[str, Any]:
    """A gap: whose it is, before which token, and from when on, in seconds from the run's start."""
    return {"request": int(frame.id[row]), "token": token, "from_s": round(ended_ns / 1e9 - gap_s, 6), "gap_s": gap_s}
