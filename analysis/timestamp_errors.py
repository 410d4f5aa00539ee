"""Error bars of receive timestamps.

Timestamps are inexact if several tokens arrived in one read:

    arrived     a_0            a_1   a_2   a_3
    read        |                              |      one timestamp per read, that of its last byte
    stamped     s_0 = a_0      s     s     s = a_3
                |<-------- d = s - s_0 ------->|

Tokens of one response with equal timestamps were read together. The timestamp of the last token is exact. The other
tokens arrived between the previous timestamp s_0 and s, so the error of each timestamp is at most d. The error is also
at most the time for which the client did not read, because every read returns all data that has arrived.

For the first token of a response, s_0 is the arrival of the response's first byte. If this byte was in the same read as
the token, s_0 is the send time of the request.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from loadgen.analysis.frame import Floats, Frame, Integers
from loadgen.analysis.stats import percentiles
from loadgen.analysis.summary import ClientHealth

STALL_CHECK_S = 0.05
"""Interval in seconds at which a client checks for its own stalls (loadgen.engine.driver.TICK_S). Shorter stalls are
not detected."""
ERROR_BAR_SHARE = 0.99
"""Share of the samples whose error is at most the error bar."""
BUCKETS_PER_OCTAVE = 16
"""Number of error buckets per factor of two. The upper end of a bucket represents its errors, so it is at most 4.4%
too large and never too small."""


class StampError(msgspec.Struct, frozen=True):
    """Maximum errors of receive timestamps, in seconds.

    The errors are those of tokens that the client read one at a time, without other tokens in the same read.
    """

    stamp_s: float
    pair_s: float
    """Error of the difference of two such timestamps."""
    away_s: float | None
    """Longest time that the client may have spent without reading. None if this time was not measured. 0 if `stamp_s`
    includes it, or if tokens that are read together have separate timestamps."""


def timestamp_error(health: ClientHealth) -> StampError | None:
    """Return the maximum timestamp error of a token that was read alone, or None if this error is unknown.

    A token was read alone if the same read returned no other token of its response. There are two cases:

    - The timestamp source (for example packet timestamps) has a known error. The result is the sum of this error and of
      the time by which the wall clock was set forward or back during the run.
    - The source has no known error. The result is the longest stall of the client's event loop, or None if stalls were
      not measured. In this case, the result applies to every token.
    """
    stall_s = health.stall_max_s
    if health.source.error_s is None:
        return None if stall_s is None else StampError(stall_s, stall_s, 0.0)
    stamp_s = health.source.error_s + (health.clock_step_s or 0.0)
    away_s: float | None = 0.0
    if health.source.by_read:
        away_s = None if stall_s is None else stall_s + STALL_CHECK_S
    return StampError(stamp_s, 2 * stamp_s, away_s)


def error_bars(frame: Frame, own: StampError) -> dict[str, float | None]:
    """Return the errors of timestamps and latencies in seconds.

    The result contains the error bars of timestamps, TTFT, TPOT, ITL and E2E, and the error of the median TTFT. The
    error bar of a figure is the error that 99% of its samples do not exceed. The samples are those of the complete
    requests in `frame`. The error bar of TPOT is None if no request has a TPOT.

    `own` contains the maximum errors for a token that was read alone. If one read contains several tokens, all of them
    get the timestamp of the last token. The errors of the earlier tokens of this read are therefore larger than those
    in `own`. E2E ends with the last token of a response, so its error bar is the error of a single timestamp.
    """
    ttft_errors_ns, stamps, gaps = _merged_read_errors(frame, own.away_s)
    chunks = frame.chunk_counts[frame.sampled]
    later = np.nan_to_num(frame.later_tokens)[frame.sampled]
    ttft_errors_s = ttft_errors_ns[frame.sampled] / 1e9
    ttft_s = (frame.first_ns - frame.sent_ns)[frame.sampled] / 1e9
    return {
        "error_bar_s": own.stamp_s + _bucket_quantile_ns(stamps, int(chunks.sum())) / 1e9,
        "error_bar_ttft_s": own.stamp_s + (_quantile(ttft_errors_s) or 0.0),
        "error_ttft_p50_s": own.stamp_s + median_ttft_error_s(ttft_s, ttft_errors_s),
        "error_bar_tpot_s": _quantile((ttft_errors_s + own.pair_s)[later > 0] / later[later > 0]),
        "error_bar_itl_s": own.pair_s + _bucket_quantile_ns(gaps, int(np.maximum(chunks - 1, 0).sum())) / 1e9,
        "error_bar_e2e_s": own.stamp_s,
    }


def max_ttft_errors_s(frame: Frame) -> Floats:
    """Return, for each request in `frame`, the largest amount in seconds by which its TTFT may be too large.

    The amount is 0 if the first token of the response was read alone. If it was read together with later tokens, it may
    have arrived at any time since the previous timestamp of the response. The amount is then the time since that
    timestamp.
    """
    return _merged_read_errors(frame, None)[0] / 1e9


def median_ttft_error_s(ttft_s: Floats, max_errors_s: Floats) -> float:
    """Return the amount by which the median TTFT may be too large, in seconds.

    `ttft_s` contains the TTFT of each request, and `max_errors_s` contains its maximum error. The result is
    median(ttft_s) - median(ttft_s - max_errors_s). Requests with a TTFT of NaN are ignored.
    """
    known = ~np.isnan(ttft_s)
    if not known.any():
        return 0.0
    (largest_s,) = percentiles(ttft_s[known], 0.5)
    (smallest_s,) = percentiles((ttft_s - max_errors_s)[known], 0.5)
    return largest_s - smallest_s


def _bucket_quantile_ns(counts: Integers, total: int) -> float:
    """Return the error in ns that 99% of `total` timestamps or gaps do not exceed.

    `counts` contains the number of inexact timestamps or gaps in each bucket of errors. All others have an error of 0.
    """
    beyond = total - int(np.ceil(ERROR_BAR_SHARE * total))
    larger = np.flatnonzero(np.cumsum(counts[::-1])[::-1] > beyond)
    return float(2.0 ** (larger[-1] / BUCKETS_PER_OCTAVE)) if len(larger) else 0.0


def _quantile(values: Floats) -> float | None:
    return float(np.sort(values)[math.ceil(ERROR_BAR_SHARE * len(values)) - 1]) if len(values) else None


def _merged_read_errors(frame: Frame, away_s: float | None) -> tuple[Floats, Integers, Integers]:
    """Return the maximum errors of timestamps that several tokens share. One read from the socket returned all these
    tokens.

    The tokens of a read may have arrived one after another before the read. `away_s` is the longest time in seconds for
    which the client did not read. No error is larger than this time. None means that the time is unknown. Only complete
    requests count. The result consists of three arrays:

    - the maximum error of the TTFT of each request, in ns.
    - the number of inexact timestamps by size of their maximum error. Errors of similar size are counted together, in
      one bucket. This keeps the array small, even for a hundred million tokens.
    - the number of inexact gaps between tokens, in the same buckets.
    """
    max_error_ns = np.inf if away_s is None else away_s * 1e9
    ttft_errors_ns = np.zeros(len(frame))
    stamp_buckets, gap_buckets = np.zeros((2, 64 * BUCKETS_PER_OCTAVE), np.int64)
    if max_error_ns == 0:
        return ttft_errors_ns, stamp_buckets, gap_buckets
    sampled, counts = frame.sampled, frame.chunk_counts
    # The timestamp before the first chunk of each row.
    head_came_earlier = frame.first_byte_ns < frame.first_ns
    before_first_ns = np.where(head_came_earlier, frame.first_byte_ns, frame.sent_ns)
    for rows, chunks in frame.blocks():
        starts_read = frame.chunk_ns.steps[chunks] != 0
        starts_row = np.zeros(len(starts_read), np.bool_)
        starts_row[frame.offsets[rows][counts[rows] > 0] - chunks.start] = True
        starts_read |= starts_row
        if starts_read.all():  # No chunks were read together.
            continue
        stamps = frame.chunk_ns[chunks]
        # Each read is described by the index of its first chunk and its number of chunks.
        reads = np.flatnonzero(starts_read)
        sizes = np.diff(reads, append=len(stamps))
        merged = sizes > 1
        reads, sizes = reads[merged], sizes[merged]
        row = np.searchsorted(frame.offsets, reads + chunks.start, side="right") - 1
        counted = sampled[row]
        reads, sizes = reads[counted], sizes[counted]
        row = row[counted]
        holds_first = starts_row[reads]
        before_ns = np.where(holds_first, before_first_ns[row], stamps[reads - 1])
        errors_ns = np.clip(stamps[reads] - before_ns, 0.0, max_error_ns)
        ttft_errors_ns[row[holds_first]] = errors_ns[holds_first]
        buckets = np.ceil(np.log2(np.maximum(errors_ns, 1.0)) * BUCKETS_PER_OCTAVE).astype(np.int64)
        # The last token of a read has its own timestamp; all others are inexact.
        stamp_buckets += np.bincount(buckets, sizes - 1, len(stamp_buckets)).astype(np.int64)
        # The gaps within a read are inexact, and so is the gap before it, if there is one.
        gap_buckets += np.bincount(buckets, sizes - holds_first, len(gap_buckets)).astype(np.int64)
    return ttft_errors_ns, stamp_buckets, gap_buckets
