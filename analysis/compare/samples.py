"""The samples of a run in the order of time, which is what shows how they depend on each other."""

from __future__ import annotations

import numpy as np

from analysis.compare.loaded import Loaded
from analysis.compare.noise import PIECES, STRATUM, Samples, ordered_by, parts
from analysis.frame import Booleans, Frame, blocks
from analysis.metrics import METRICS

PACES = ("tpot", "normalised")
TOKENS_MOST = 4_000_000
"""Of a run with more, the gaps of every k-th request: those of one step are alike, so that little is lost."""


def samples_of(run: Loaded, latency: str) -> Samples:
    """The samples of `ttft`, `tpot`, `e2e`, ... or `itl`.

    How long a request of a burst waits follows from its place in the order of sending, so such samples are cut into
    strata of neighbours; all others into stretches of time. A pace is never due to the place: whoever ran at the same
    time had the same.
    """
    if latency in ("itl", "icl"):
        return _gaps(run.frame)
    frame = run.frame
    values = METRICS[f"{latency}_s"].values(frame)
    rows = frame.sampled & _defined(frame, latency)
    assert len(values) == int(rows.sum())
    ordered = ordered_by(values, (frame.sent_ns if run.one_burst else frame.due_ns)[rows])
    by_plan = run.one_burst and latency not in PACES
    return Samples(ordered, parts(len(ordered), len(ordered) // STRATUM if by_plan else PIECES), by_plan)


def _defined(frame: Frame, latency: str) -> Booleans:
    """Rows that have this latency, as its formula says."""
    if latency == "tpot":
        return ~np.isnan(frame.first_ns) & (frame.output_tokens > frame.first_tokens)
    if latency == "e2e_stream":
        return ~np.isnan(frame.end_ns - frame.sent_ns)
    held = ~np.isnan(frame.first_ns)
    return held & (frame.output_tokens > 0) if latency == "normalised" else held


def _gaps(frame: Frame) -> Samples:
    """Gaps between tokens in the order in which they ended: a chunk of c tokens gives one gap and c - 1 zeros."""
    sampled = frame.sampled.copy()
    every = max(1, round(float(frame.arrived_tokens[sampled].sum()) / TOKENS_MOST))
    kept_rows = np.zeros(len(sampled), np.bool_)
    kept_rows[np.flatnonzero(sampled)[::every]] = True
    gaps, ends = [], []
    for rows, chunks in blocks(frame.offsets):
        counts = np.diff(frame.offsets[rows.start : rows.stop + 1])
        kept = np.repeat(kept_rows[rows], counts)
        firsts = frame.offsets[rows][counts > 0] - chunks.start
        instants, tokens = frame.chunk_ns[chunks], frame.chunk_tokens[chunks].astype(np.int64)
        gap = np.diff(instants, prepend=0.0) / 1e9
        more = tokens - 1
        more[~kept] = 0
        kept[firsts] = False  # a request's first chunk ends no gap
        gaps += [gap[kept], np.zeros(int(more.sum()))]
        ends += [instants[kept], np.repeat(instants, more)]
    values = ordered_by(np.concatenate([*gaps, np.empty(0)]), np.concatenate([*ends, np.empty(0)]))
    return Samples(values, parts(len(values), PIECES), strata=False)
