"""How far stamps may be off because several tokens came in one read: the error bars of TTFT, TPOT and ITL.

    arrived     a_0            a_1   a_2   a_3
    read        |                              |      one stamp per read, that of its newest byte
    stamped     s_0 = a_0      s     s     s = a_3
                |<-------- d = s - s_0 ------->|

Tokens of one answer with equal stamps were read together: the last of them has its own stamp, and the others came
between the stamp before, s_0, and s. So each is off by at most d, and by no more than the client was away, as it reads
what lies there once it is back. Before a first token there is the first byte of the answer, where it came in an earlier
read, else the instant of sending.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from analysis.frame import Booleans, Floats, Frame, Integers

SHARE = 0.99
"""Of the samples that an error bar holds for."""
STEPS_PER_OCTAVE = 16
"""Errors of gaps are counted in buckets and taken for their upper ends: at most 4.4 % too large, never too small."""


@dataclass(frozen=True, slots=True)
class Own:
    """What a stamp is off by that stands for one token alone, and a difference of two such stamps. Seconds."""

    stamp_s: float
    pair_s: float
    away_s: float | None
    """The longest that the client may have been away; 0 where that is in `stamp_s`, None where nobody looked."""


class _Reads(NamedTuple):
    """The reads of a block of rows that brought several tokens."""

    rows: Integers
    sizes: Integers
    """Tokens' chunks in each."""
    first: Booleans
    """Whether it holds the answer's first token."""
    off_ns: Floats
    """The most that a stamp in it may be off by."""


def error_bars(frame: Frame, own: Own) -> dict[str, float | None]:
    """What 99 % of the stamps, TTFTs, TPOTs and ITLs of the complete requests are off by at most, and E2E, which ends
    with the newest token of a read; and what the median TTFT is off by. In seconds, None where there is no sample."""
    off_first_ns = np.zeros(len(frame))
    stamps, gaps = _Counted(), _Counted()
    for reads in _merged(frame, own.away_s):
        off_first_ns[reads.rows[reads.first]] = reads.off_ns[reads.first]
        stamps.add(reads.off_ns, reads.sizes - 1)
        gaps.add(reads.off_ns, reads.sizes - reads.first)  # the gaps within a read, and the one before it
    chunks = frame.chunk_counts[frame.sampled]
    later = (frame.output_tokens - frame.first_tokens)[frame.sampled]
    off_first_s = off_first_ns[frame.sampled] / 1e9
    ttft_s = (frame.first_ns - frame.sent_ns)[frame.sampled] / 1e9
    return {
        "error_bar_s": own.stamp_s + stamps.quantile_ns(int(chunks.sum())) / 1e9,
        "error_bar_ttft_s": own.stamp_s + (_quantile(off_first_s) or 0.0),
        "error_ttft_p50_s": own.stamp_s + median_off_s(ttft_s, off_first_s),
        "error_bar_tpot_s": _quantile((off_first_s + own.pair_s)[later > 0] / later[later > 0]),
        "error_bar_itl_s": own.pair_s + gaps.quantile_ns(int(np.maximum(chunks - 1, 0).sum())) / 1e9,
        "error_bar_e2e_s": own.stamp_s,
    }


def first_off_s(frame: Frame) -> Floats:
    """By how much the TTFT of each request may be too large at most, in seconds, if nothing is known of how long the
    client was away; 0 where its first token was read alone."""
    off_ns = np.zeros(len(frame))
    for reads in _merged(frame, None):
        off_ns[reads.rows[reads.first]] = reads.off_ns[reads.first]
    return off_ns / 1e9


def median_off_s(ttft_s: Floats, off_s: Floats) -> float:
    """What the median of these TTFTs is too large by at most, if each is too large by at most what stands in `off_s`:
    the true median lies between that of all of them lessened and this. NaN among them is no sample."""
    return _median(ttft_s) - _median(ttft_s - off_s)


class _Counted:
    """Errors by size, in as little room for a hundred million as for ten."""

    def __init__(self) -> None:
        self._counts = np.zeros(64 * STEPS_PER_OCTAVE, np.int64)

    def add(self, off_ns: Floats, times: Integers) -> None:
        """Count each error so many times."""
        buckets = np.ceil(np.log2(np.maximum(off_ns, 1.0)) * STEPS_PER_OCTAVE).astype(np.int64)
        self._counts += np.bincount(buckets, times, len(self._counts)).astype(np.int64)

    def quantile_ns(self, total: int) -> float:
        """What all but 1 % of `total` keep; those that were not counted are not off."""
        beyond = total - int(np.ceil(SHARE * total))
        from_above = np.cumsum(self._counts[::-1])[::-1]
        larger = np.flatnonzero(from_above > beyond)
        return float(2.0 ** (larger[-1] / STEPS_PER_OCTAVE)) if len(larger) else 0.0


def _quantile(values: Floats) -> float | None:
    return float(np.percentile(values, 100 * SHARE, method="inverted_cdf")) if len(values) else None


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else 0.0


def _merged(frame: Frame, away_s: float | None) -> Iterator[_Reads]:
    """The reads of complete requests that brought several tokens, block by block."""
    most_ns = np.inf if away_s is None else away_s * 1e9
    sampled, counts = frame.sampled, frame.chunk_counts
    headed = frame.first_byte_ns < frame.first_ns
    before_ns = np.where(headed, frame.first_byte_ns, frame.sent_ns)
    for rows, chunks in frame.blocks():
        stamps = frame.chunk_ns[chunks]
        begins = np.zeros(len(stamps), np.bool_)
        begins[frame.offsets[rows][counts[rows] > 0] - chunks.start] = True
        new = begins.copy()
        new[1:] |= stamps[1:] != stamps[:-1]
        at = np.flatnonzero(new)
        sizes = np.diff(at, append=len(stamps))
        at, sizes = at[sizes > 1], sizes[sizes > 1]
        row = np.searchsorted(frame.offsets, at + chunks.start, side="right") - 1
        kept = sampled[row]
        at, sizes, row = at[kept], sizes[kept], row[kept]
        first = begins[at]
        since_ns = stamps[at] - np.where(first, before_ns[row], stamps[at - 1])
        yield _Reads(row, sizes, first, np.clip(since_ns, 0.0, most_ns))
