"""Detects streams whose tokens a proxy or the server holds back, so that they arrive in groups.

A buffering proxy collects events until its buffer is full or the response has ended. TTFT, TPOT and ITL then describe
the proxy: TTFT is too long, most gaps are about zero, and a few gaps are long. Timestamps of packets show this, because
the events of a group arrive in the same packet or in packets directly after each other.
"""

from __future__ import annotations

import msgspec
import numpy as np

from loadgen.analysis.frame import Frame, sum_by_row

MIN_CHUNKS = 8
"""Minimum number of chunks of a response that is examined."""
MIN_GROUP = 5.0
"""Minimum mean number of chunks per group of a response that counts as held back. Engines with several scheduler steps
per iteration, or with speculative decoding, send smaller groups."""
MIN_SHARE = 0.5
"""Minimum share of responses that are held back, for a finding."""
TOGETHER_SHARE = 0.05
"""Maximum gap between two chunks of a group, as a share of the mean time per chunk of the response."""
TOGETHER_NS = 1e6
"""Maximum gap between two chunks of a group, in ns."""


class HeldBack(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the responses whose chunks arrive in groups, because a proxy or the server holds them back."""

    responses: int
    """Number of responses whose chunks arrive in groups of at least MIN_GROUP chunks on average."""
    examined: int
    """Number of complete responses with at least MIN_CHUNKS chunks."""
    in_one_piece: int
    """Number of responses whose chunks all arrived together."""
    chunks_per_group: float
    """Median over the held-back responses of the mean number of chunks per group."""
    zero_gap_share: float
    """Share of the gaps between chunks, in these responses, that lie inside a group."""

    @property
    def common(self) -> bool:
        """Return True if a large share of the responses is held back.

        The latencies of the run then describe the proxy or the server's buffer that holds the tokens back.
        """
        return self.responses >= MIN_SHARE * self.examined


def find_held_back(frame: Frame) -> HeldBack | None:
    """Return facts about the responses whose chunks arrive in groups, or None if there are no such responses."""
    gaps = frame.gap_counts
    chunks = np.where(gaps > 0, gaps + 1, 0)
    examined = chunks >= MIN_CHUNKS
    if not examined.any():
        return None
    response_ns = np.where(examined, frame.end_ns - frame.sent_ns, 0.0)
    together_ns = (
        np.minimum(TOGETHER_NS, TOGETHER_SHARE * response_ns / np.maximum(chunks, 1)).clip(0).astype(np.uint32)
    )
    inside = np.zeros(len(gaps))
    for rows, steps, _ in frame.step_blocks():
        offsets = frame.offsets[rows.start : rows.stop + 1]
        together = steps <= np.repeat(together_ns[rows], np.diff(offsets))
        # The step of the first chunk of a row is 0, but it is no gap.
        inside[rows] = np.where(examined[rows], sum_by_row(together, offsets - offsets[0]) - 1, 0)
    groups = np.maximum(chunks - inside, 1)
    held = examined & (chunks / groups >= MIN_GROUP)
    if not held.any():
        return None
    return HeldBack(
        responses=int(held.sum()),
        examined=int(examined.sum()),
        in_one_piece=int((held & (groups == 1)).sum()),
        chunks_per_group=round(float(np.median(chunks[held] / groups[held])), 1),
        zero_gap_share=round(float(inside[held].sum() / gaps[held].sum()), 4),
    )
