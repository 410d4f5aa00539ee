"""Counts the gaps between chunks by their length and by the position of the token after the gap.

The charts of gaps and of latency parts use these counts, so a run needs only one pass over all of its chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.analysis.chunk_columns import is_constant
from loadgen.analysis.format import nice_step
from loadgen.analysis.frame import Booleans, Floats, Frame, Integers

DROPPED_BITS = 16
"""Number of bits of a float32 that are ignored to find the bucket of a gap. Seven bits of the fraction remain, so the
upper end of a bucket is at most 0.8% above its lower end. A logarithm per gap would take several times as long."""
BUCKET_WIDTH = 1 / 128
"""Maximum width of a bucket, relative to its lower end."""


def _bits(gap_ns: float) -> int:
    return int(np.float32(gap_ns).view(np.int32)) >> DROPPED_BITS


FIRST_BUCKET = _bits(1e3)
BUCKETS = _bits(1e12) - FIRST_BUCKET + 1
"""Number of buckets, from 1 us to 1,000 s. Gaps outside this range are counted in the first or last bucket."""
TOKEN_BINS_MAX = 128
LONGEST = 20
"""Number of longest gaps that are listed."""


class LongGap(NamedTuple):
    """One of the longest gaps of a run."""

    gap_ns: int
    chunk: int
    """Index of the chunk after the gap, in the flat arrays of the Frame."""
    token: int
    """Position of the first token in this chunk, counted from 1 in its response."""


class GapCounts(NamedTuple):
    """The gaps between the chunks of the complete requests in the measurement window.

    A bin is a range of `width` token positions: bin i contains the gaps before token `width * i` to token
    `width * (i + 1) - 1`.
    """

    counts: Integers
    """Number of gaps by bin (row) and by bucket of their length (column)."""
    largest_ns: NDArray[np.integer]
    """Largest gap of each bin; 0 if it has none."""
    width: int
    longest: list[LongGap]
    """The longest gaps of the run, beginning with the longest. Of equal gaps, the last ones are listed."""

    @property
    def median_s(self) -> float | None:
        """The median of all gaps in s, accurate to 1%, or None if there are no gaps."""
        by_bucket = self.counts.sum(axis=0)
        if not by_bucket.any():
            return None
        return float(bucket_middles_s()[int((np.cumsum(by_bucket) >= by_bucket.sum() / 2).argmax())])


def bucket_middles_s() -> Floats:
    """Return the geometric middle of each bucket in s."""
    edges = ((FIRST_BUCKET + np.arange(BUCKETS + 1, dtype=np.int32)) << DROPPED_BITS).view(np.float32) / 1e9
    return np.sqrt(edges[:-1] * edges[1:])


def count_gaps(frame: Frame) -> GapCounts:
    """Count the gaps of the rows that the mask `sampled` of the Frame selects."""
    sampled = frame.sampled
    all_steps = frame.chunk_ns.steps
    maximum = int(frame.arrived_tokens[sampled].max(initial=0))
    width = max(1, round(nice_step(maximum / TOKEN_BINS_MAX))) if maximum else 1
    bins = maximum // width + 1
    counts = np.zeros((bins + 1) * BUCKETS, np.int64)  # the last bin contains the chunks that end no gap
    largest_ns = np.zeros(bins + 1, all_steps.dtype)  # `maximum.at` is slow if data types differ
    longest: list[LongGap] = []
    for rows, chunks in frame.blocks():
        steps = all_steps[chunks]
        tokens, ends_gap = _tokens_after_gaps(frame, sampled, rows, chunks)
        binned = np.where(ends_gap, tokens if width == 1 else tokens // width, bins)
        buckets = (steps.astype(np.float32).view(np.int32) >> DROPPED_BITS) - FIRST_BUCKET
        np.clip(buckets, 0, BUCKETS - 1, out=buckets)
        counts += np.bincount(binned * BUCKETS + buckets, minlength=len(counts))
        np.maximum.at(largest_ns, binned, steps)
        longest = _with_longest(longest, steps, ends_gap, tokens, chunks.start)
    return GapCounts(counts.reshape(bins + 1, BUCKETS)[:-1], largest_ns[:-1], width, longest)


def _tokens_after_gaps(
    frame: Frame, sampled: Booleans, rows: slice, chunks: slice
) -> tuple[NDArray[np.integer], Booleans]:
    """Return two arrays about the chunks of one block of the Frame, with one value per chunk.

    - The position of the first token in the chunk, counted from 1 in its response.
    - A mask of the chunks that end a gap: all but the first chunk of each row that the mask `sampled` selects.

    `rows` and `chunks` delimit the block.
    """
    counts = np.diff(frame.offsets[rows.start : rows.stop + 1])
    firsts = (frame.offsets[rows] - chunks.start).astype(np.int32)
    indices = np.arange(chunks.stop - chunks.start, dtype=np.int32)
    position = indices - np.repeat(firsts, counts)
    ends_gap = position > 0
    if not sampled[rows].all():
        ends_gap &= np.repeat(sampled[rows], counts)
    chunk_tokens = frame.chunk_tokens[chunks]
    is_small = chunk_tokens.dtype == np.uint8 and len(indices) < 1 << 22
    dtype = np.dtype(np.int32 if is_small else np.int64)
    if is_constant(chunk_tokens):
        return position.astype(dtype) * int(chunk_tokens[0]) + 1, ends_gap
    tokens_before: NDArray[np.integer] = np.cumsum(chunk_tokens, dtype=dtype) - chunk_tokens
    started = np.zeros(len(counts), dtype)
    started[counts > 0] = tokens_before[firsts[counts > 0]]
    return tokens_before - np.repeat(started, counts) + 1, ends_gap


def _with_longest(
    longest: list[LongGap],
    steps: NDArray[np.integer],
    ends_gap: Booleans,
    tokens: NDArray[np.integer],
    first_chunk: int,
) -> list[LongGap]:
    """Return the longest gaps among `longest` and those of a block whose first chunk has the index `first_chunk`."""
    candidates = ends_gap & (steps >= longest[-1].gap_ns) if len(longest) == LONGEST else ends_gap
    top = np.flatnonzero(candidates)
    if len(top) > LONGEST:  # if gaps are equal, keep the last ones
        gaps = steps[top]
        minimum = np.partition(gaps, -LONGEST)[-LONGEST]
        top = np.concatenate((top[gaps == minimum][-LONGEST:], top[gaps > minimum]))
    found = [
        LongGap(gap_ns, first_chunk + index, token)
        for gap_ns, index, token in zip(steps[top].tolist(), top.tolist(), tokens[top].tolist(), strict=True)
    ]
    return sorted([*longest, *found], reverse=True)[:LONGEST]
