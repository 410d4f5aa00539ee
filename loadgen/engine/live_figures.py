"""Live figures of a run: latency percentiles from histograms in shared memory, and the rate at which tokens arrive.

The definitions are those of the report (loadgen.analysis.metrics). The live figures at the end of a run equal those of
the report, except that a percentile may differ by the width of a histogram bucket.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from ctypes import Structure, c_int32
from itertools import accumulate
from math import log2
from typing import TYPE_CHECKING

from loadgen.analysis.run.token_counts import streamed_tokens

if TYPE_CHECKING:
    from loadgen.analysis.run.record import Record
    from loadgen.servers.wire.transport import Exchange

LOWEST_NS = 1_000
BUCKETS_PER_OCTAVE = 64
BUCKETS = 32 * BUCKETS_PER_OCTAVE
"""A bucket is 1.1% wide, so a percentile is exact to 0.55%. The buckets range from 1 us to more than an hour."""
RATE_WINDOW_NS = 3_000_000_000
"""Time in ns over which a rate is averaged. Engines alternate between prefill and decode, so the average over a shorter
time would fluctuate."""


SAMPLED_BYTES = 16_384
"""Number of bytes at the beginning of an unfinished response whose tokens are counted for a sample."""


class LatencyHistogram(Structure):
    """A histogram of latencies with logarithmic buckets. As a ctypes structure, it can be part of shared memory."""

    _fields_ = [("counts", c_int32 * BUCKETS)]

    def add(self, latency_ns: float) -> int:
        """Add a latency to the histogram, and return the index of its bucket. `remove` takes this index."""
        bucket = int(log2(latency_ns / LOWEST_NS) * BUCKETS_PER_OCTAVE) if latency_ns > LOWEST_NS else 0
        if bucket >= BUCKETS:
            bucket = BUCKETS - 1
        self.counts[bucket] += 1
        return bucket

    def remove(self, bucket: int) -> None:
        """Remove one latency from the histogram. `bucket` is the index that `add` returned for it."""
        self.counts[bucket] -= 1

    def merge(self, counts: dict[int, int]) -> None:
        """Add the counts of another histogram, as its `by_bucket` returned them. Unknown bucket indexes are ignored."""
        for bucket, count in counts.items():
            if 0 <= bucket < BUCKETS:
                self.counts[bucket] += count

    def by_bucket(self) -> dict[int, int]:
        """Return the count of each bucket that is not empty, by bucket index."""
        return {bucket: count for bucket, count in enumerate(self.counts) if count}

    def percentiles_s(self, *shares: float) -> list[float]:
        """Return the latency in seconds at each of the given `shares`. For example, the share 0.5 gives the median.

        Values between two latencies are interpolated linearly, as in the report. If the histogram is empty, return an
        empty list.
        """
        totals = [*accumulate(self.counts[:])]  # a slice of a ctypes array is a list, which is read faster
        if totals[-1] <= 0:
            return []
        return [_quantile_ns(totals, share) / 1e9 for share in shares]


def _quantile_ns(totals: list[int], share: float) -> float:
    """Return a quantile of a histogram of latencies, in ns. `share` is from 0 to 1, and 0.5 gives the median.

    `totals` contains, for each bucket, the number of latencies in this bucket and all lower buckets.
    """
    position = share * (totals[-1] - 1)
    below = int(position)
    low_ns, high_ns = (
        LOWEST_NS * 2 ** ((bisect_right(totals, rank) + 0.5) / BUCKETS_PER_OCTAVE)
        for rank in (below, min(below + 1, totals[-1] - 1))
    )
    return low_ns + (position - below) * (high_ns - low_ns)


def tpot_ns(record: Record) -> float | None:
    """Return the time per output token of a request in ns, or None if no token came after the first chunk."""
    if len(record.chunk_ns) < 2:
        return None
    streamed = streamed_tokens(record)
    later_tokens = streamed.tokens - streamed.first
    return (record.chunk_ns[-1] - record.chunk_ns[0]) / later_tokens if later_tokens > 0 else None


def received_bytes(exchange: Exchange) -> int:
    """Return how many bytes of a response have been read from the connection so far.

    If the connection uses TLS and a packet ring timestamps its packets, the encrypted bytes are counted.
    """
    if exchange.read_ends and exchange.tcp_stream is not None:
        return exchange.read_ends[-1] - exchange.stream_start
    return exchange.size


class TokenRate:
    """Estimates how many tokens have arrived, and how many arrive per second.

    The tokens of a response are counted only after the response has ended. For an unfinished response, only the number
    of bytes is known. Its tokens are estimated: the number of bytes is multiplied by the tokens per byte of the
    finished responses. Until the first response has finished, the tokens per byte come from a sample, which is the
    beginning of one unfinished response.
    """

    def __init__(self, window_ns: int = RATE_WINDOW_NS) -> None:
        self._window_ns = window_ns
        self.recorded_tokens = 0
        self._recorded_bytes = 0
        self._sample_tokens = 0
        self._sample_bytes = 0
        self._observed: deque[tuple[int, int]] = deque()
        """Pairs of a time in ns (CLOCK_MONOTONIC) and the number of bytes that had arrived until this time. The pairs
        cover the last `window_ns`."""

    @property
    def needs_sample(self) -> bool:
        """True until a response with tokens has been recorded."""
        return not self.recorded_tokens

    def record(self, tokens: int, byte_count: int) -> None:
        """Add the tokens and the bytes of a recorded response."""
        self.recorded_tokens += tokens
        self._recorded_bytes += byte_count

    def sample(self, tokens: int, byte_count: int) -> None:
        """Set the sample: how many tokens and bytes of one unfinished response have arrived so far.

        Until the first response is recorded, the sample provides the ratio of tokens to bytes. The estimates multiply
        byte counts by this ratio. Later, the recorded responses provide the ratio.
        """
        self._sample_tokens, self._sample_bytes = tokens, byte_count

    @property
    def _tokens_per_byte(self) -> float:
        if self.recorded_tokens:
            return self.recorded_tokens / self._recorded_bytes
        return self._sample_tokens / self._sample_bytes if self._sample_bytes else 0.0

    def tokens(self, unrecorded_bytes: int) -> int:
        """Return an estimate of the number of tokens that have arrived.

        The tokens of recorded responses are known. `unrecorded_bytes` is the number of bytes of all other responses,
        and the tokens in these bytes are estimated.
        """
        return self.recorded_tokens + round(self._tokens_per_byte * unrecorded_bytes)

    def per_second(self, now_ns: int, unrecorded_bytes: int) -> float:
        """Return the mean number of tokens that arrived per second in the last `window_ns`.

        `now_ns` is the current time (CLOCK_MONOTONIC). `unrecorded_bytes` is the number of bytes in responses that have
        no Record yet. Their tokens are estimated.
        """
        self._observed.append((now_ns, self._recorded_bytes + unrecorded_bytes))
        while len(self._observed) > 2 and self._observed[1][0] <= now_ns - self._window_ns:
            self._observed.popleft()
        first_ns, first_bytes = self._observed[0]
        arrived = self._observed[-1][1] - first_bytes
        return max(0.0, self._tokens_per_byte * arrived / max(now_ns - first_ns, 1) * 1e9)
