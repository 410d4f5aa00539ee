"""Live counters of a worker process, and health counters of the load generator itself.

Other processes can read the live counters during the run. The health counters cover late reads, stalls of the event
loop, and CPU use.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import Structure, c_double, c_int64
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from loadgen.engine.live_figures import LatencyHistogram
from loadgen.engine.priority import core_wait_ns, has_realtime
from loadgen.servers import marks

if TYPE_CHECKING:
    from loadgen.analysis.run.record import Record
    from loadgen.servers.marks import Mark
    from loadgen.servers.wire.timestamps import TimestampSource, ToMonotonic
    from loadgen.servers.wire.transport import Exchange

BUCKETS_PER_OCTAVE = 4
LATE_BOUNDS_NS = [int(1000 * 2 ** (step / BUCKETS_PER_OCTAVE)) for step in range(27 * BUCKETS_PER_OCTAVE)]
"""Lower bounds of the lateness buckets in ns: 1 us, then four per octave up to about 100 s."""

EVENT_COUNTERS = ("reads", "coalesced_reads", "full_reads", "windows", "retransmits", "out_of_order")
"""Names of the event counters in a health sample.

- `reads`: socket reads.
- `coalesced_reads`: reads that returned more than one event.
- `full_reads`: reads that found the receive window full.
- `windows`: checks of the receive window.
- `retransmits`: segments that this machine retransmitted.
- `out_of_order`: segments that arrived out of order.
"""

MAX_UNKNOWN_NAMES = 4
"""Maximum number of unknown names of times in a health sample. A server may send a new name with every response."""
MAX_SEARCHED = 64
"""Maximum number of responses that one call searches for their first token.

A longer search would delay reads, only to update a progress line.
"""
SEARCHED_BYTES, SEARCHED_FIRST_BYTES = 8_192, 2_048
"""Number of bytes at the beginning of a response that are searched for the first token.

The first SEARCHED_FIRST_BYTES bytes are searched before the rest.
"""


class Health:
    """Health counters of one worker process since the last call of `sample`, which returns and resets them."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._late = Counter[int]()
        self._added = dict.fromkeys(EVENT_COUNTERS, 0)
        self._stall_ns_max = 0
        self._pauses = 0
        self._paused_ns = 0
        self.wants_mark = True
        """True until this sample's search for the mark of a simulated server is complete."""
        self.gateways = set[str]()
        """Names of the gateways that the searched responses state (loadgen.servers.gateways)."""
        self.timing_sources = set[str]()
        """Where responses state the server's times (loadgen.servers.server_timing), with `--server-timing`."""
        self._unknown_timing_names = set[str]()
        self.mark: Mark | None = None
        """The mark that identifies a simulated server, if a response contained one."""
        self._cpu_ns = time.process_time_ns()
        self._wall_ns = time.monotonic_ns()
        self._core_wait_ns = core_wait_ns()

    def add(self, late_ns: Sequence[int], *events: int) -> None:
        """Add the counters of one response.

        `late_ns` contains, for each socket read, the time in ns between the arrival of the bytes and the read. `events`
        contains the values of `coalesced_reads`, `full_reads`, `windows`, `retransmits` and `out_of_order`, in this
        order.
        """
        self._late.update(bisect_right(LATE_BOUNDS_NS, late) - 1 for late in late_ns)
        for name, count in zip(EVENT_COUNTERS, (len(late_ns), *events), strict=True):
            self._added[name] += count

    def stall(self, late_ns: int) -> None:
        """Record that the event loop ran a timer `late_ns` too late. The next sample reports the maximum."""
        self._stall_ns_max = max(self._stall_ns_max, late_ns)

    def pause(self, waited_ns: int) -> None:
        """Count one pause of a closed-loop client. The client has waited for `waited_ns`.

        A client pauses before its next request if its last request failed immediately.
        """
        self._pauses += 1
        self._paused_ns += waited_ns

    def add_unknown_timing_names(self, names: Iterable[str]) -> None:
        """Note names in a `Server-Timing` header that loadgen does not know. The first MAX_UNKNOWN_NAMES are kept."""
        for name in names:
            if len(self._unknown_timing_names) < MAX_UNKNOWN_NAMES:
                self._unknown_timing_names.add(name)

    def sample(self) -> dict[str, Any]:
        """Return the values of all counters since the last call, as telemetry, and reset the counters.

        The value `late_counts` is a histogram of read delays: the times from the arrival of bytes to the read of the
        socket. Bucket `b` contains the number of reads with a delay of `2**(b/4)` to `2**((b+1)/4)` us. Bucket -1
        contains the number of reads with a delay of less than 1 us.
        """
        values = {
            "cpu_ns": time.process_time_ns() - self._cpu_ns,
            "wall_ns": time.monotonic_ns() - self._wall_ns,
            **self._added,
            "stall_ns_max": self._stall_ns_max,
            "pauses": self._pauses,
            "paused_ns": self._paused_ns,
            "late_counts": {str(bucket): count for bucket, count in sorted(self._late.items())},
        }
        waited_ns = core_wait_ns()
        if waited_ns is not None and self._core_wait_ns is not None:
            values["core_wait_ns"] = waited_ns - self._core_wait_ns
        values["realtime"] = has_realtime()
        if self.gateways:
            values["gateways"] = sorted(self.gateways)
        if self.timing_sources:
            values["timing_sources"] = sorted(self.timing_sources)
        if self._unknown_timing_names:
            values["unknown_timing_names"] = sorted(self._unknown_timing_names)
        if self.mark is not None:
            values["simulated"] = True
            if self.mark.speed is not None:
                values[marks.FIELD] = self.mark.speed
        self._reset()
        return values


COUNTER_NAMES = (
    *("due", "sent", "streaming", "complete", "truncated", "failed", "rejected", "dropped", "abandoned"),
    *("tokens", "prepared", "unwritten_bytes"),
)
"""Names of the counters that are summed over all workers."""
INTEGER_NAMES = (*COUNTER_NAMES, "first_sent_ns", "last_end_ns")
SERVER_GAUGES = {"server_running": "running", "server_waiting": "waiting", "kv_used": "kv_used"}
"""Fields of LiveCounters that show the state of the server, and the names of these figures in server telemetry."""


class LiveCounters(Structure):
    """Live counters of one worker, in shared memory. The worker writes them, and the coordinator reads them.

    - `due`: number of requests that have become due, whether they were sent or not. Requests become due in order, so
      these are the first requests of the worker. When a session starts, all of its turns count as due.
    - `streaming`: number of requests in flight whose response has begun to arrive.
    - `tokens`: number of tokens that have arrived. If a response is not recorded yet, its tokens are estimated from the
      number of bytes that have arrived.
    - `prepared`: number of requests whose prompts have been built.
    - `unwritten_bytes`: size of the Records that wait in memory because they could not be written to disk.
    - `first_sent_ns`: time at which the first request was sent, in ns from the run's start. 0 if no request was sent.
    - `last_end_ns`: time at which the last request ended, in ns from the run's start. 0 if no request has ended.
    - `tokens_per_s`: rate at which tokens have arrived lately (loadgen.engine.live_figures.TokenRate).
    - `ttft`: histogram of the TTFTs of complete requests, and of requests in flight whose first token has been
      detected.
    - `tpot`: histogram of the TPOTs of complete requests.
    - `ttfa`: histogram of the times to the first token of the answer. Only complete requests whose response begins with
      reasoning are included.

    Three fields describe the server. The coordinator writes them, from the latest metrics of the server. A field is NaN
    if it is not measured.

    - `server_running`: number of requests that the server processes.
    - `server_waiting`: number of requests in the server's queue.
    - `kv_used`: used share of the server's KV cache, from 0 to 1.
    """

    _fields_ = [
        *((name, c_int64) for name in INTEGER_NAMES),
        ("tokens_per_s", c_double),
        *((name, c_double) for name in SERVER_GAUGES),
        ("ttft", LatencyHistogram),
        ("tpot", LatencyHistogram),
        ("ttfa", LatencyHistogram),
    ]

    due: int
    sent: int
    streaming: int
    complete: int
    truncated: int
    failed: int
    rejected: int
    dropped: int
    abandoned: int
    tokens: int
    prepared: int
    unwritten_bytes: int
    first_sent_ns: int
    last_end_ns: int
    tokens_per_s: float
    server_running: float
    server_waiting: float
    kv_used: float
    ttft: LatencyHistogram
    tpot: LatencyHistogram
    ttfa: LatencyHistogram

    def __init__(self, *integers: int, **values: float) -> None:
        """Create counters from integers in the order of INTEGER_NAMES, or from values by name.

        The figures of the server are NaN unless they are given by name.
        """
        super().__init__(*integers, **{**dict.fromkeys(SERVER_GAUGES, math.nan), **values})

    def set_server_gauges(self, values: Mapping[str, Any]) -> None:
        """Set the figures of the server: requests that it processes, requests in its queue, and the used share of its
        KV cache.

        `values` is a reading of the server's metrics. A figure that is missing there becomes NaN.
        """
        for field, name in SERVER_GAUGES.items():
            value = values.get(name)
            setattr(self, field, math.nan if value is None else float(value))

    def span(self, sent_ns: int, end_ns: int) -> None:
        """Extend the time span from the first send to the last end of all requests, so that it includes further
        requests.

        `sent_ns` is the first send of the further requests, and `end_ns` is their last end. Both times are in ns from
        the start of the run.
        """
        self.first_sent_ns = min(self.first_sent_ns or sent_ns, sent_ns)
        self.last_end_ns = max(self.last_end_ns, end_ns)

    @property
    def mean_tokens_per_s(self) -> float:
        """Mean number of tokens per second, from the sending of the first request to the end of the last one.

        The report uses the same definition. The value is 0 until a request has ended.
        """
        return self.tokens / (self.last_end_ns - self.first_sent_ns) * 1e9 if self.last_end_ns else 0.0


def sum_counters(counts: Iterable[LiveCounters]) -> LiveCounters:
    """Return the live counters of all workers together.

    Counters are summed, and histograms are merged. `first_sent_ns` is the earliest value of any worker, and
    `last_end_ns` is the latest. The figures of the server are NaN.
    """
    first, *others = [*counts] or [LiveCounters()]
    summed = LiveCounters.from_buffer_copy(first)
    for count in others:
        for name in (*COUNTER_NAMES, "tokens_per_s"):
            setattr(summed, name, getattr(summed, name) + getattr(count, name))
        if count.last_end_ns:
            summed.span(count.first_sent_ns, count.last_end_ns)
        summed.ttft.merge(count.ttft.by_bucket())
        summed.tpot.merge(count.tpot.by_bucket())
        summed.ttfa.merge(count.ttfa.by_bucket())
    summed.set_server_gauges({})
    return summed


class FirstTokens:
    """Counts the TTFTs of one worker's requests in its live counters.

    A TTFT is counted as soon as the first token is seen, while the response is still arriving. If the request does not
    complete, its TTFT is removed again, because the report's latencies are those of complete requests.
    """

    def __init__(
        self,
        counts: LiveCounters,
        stamps: TimestampSource,
        to_monotonic: ToMonotonic,
        first_token: Callable[..., int | None],
    ) -> None:
        """Create the counter for the requests of one worker.

        - `counts` are the live counters in which TTFTs are counted.
        - `stamps` is the source of timestamps. `to_monotonic` converts these to CLOCK_MONOTONIC.
        - `first_token` is a function that takes the beginning of a response. It returns the offset just past the first
          event with a token, or None if no event has a token. Its optional argument `dialect` is the format of the
          response, if this is not the format of the whole run.
        """
        self._ttft = counts.ttft
        self._stamps = stamps
        self._to_monotonic = to_monotonic
        self._first_token = first_token
        self._seen: dict[Exchange, int] = {}
        """Exchanges in flight whose first token has been counted. The value is the bucket of their TTFT."""
        self._searched: dict[Exchange, int] = {}
        """Exchanges in flight without a token so far. The value is their number of reads when they were last searched.
        """

    def look(self, arriving: Iterable[Exchange]) -> None:
        """Search unfinished responses for their first token, and add each TTFT to the live latencies.

        `arriving` contains the responses that are still arriving. At most MAX_SEARCHED of them are searched per call.
        The first event of a response is often not its first token. For example, a chat response begins with an event
        that only contains the role.
        """
        seen, searched = self._seen, self._searched
        unseen = (
            exchange
            for exchange in arriving
            if exchange not in seen and len(exchange.sizes) != searched.get(exchange, 0) and not exchange.spilled
        )
        for exchange in islice(unseen, MAX_SEARCHED):
            if exchange.sent_ns is None:
                continue
            end = self._search(exchange)
            if end is None:
                searched[exchange] = len(exchange.sizes)
            elif self._stamps.ready(exchange):
                (arrived_ns,), _ = self._stamps.instants(exchange, [end], self._to_monotonic)
                if arrived_ns < exchange.sent_ns:  # impossible: the Record will use another source
                    searched[exchange] = len(exchange.sizes)
                    continue
                seen[exchange] = self._ttft.add(arrived_ns - exchange.sent_ns)

    def _search(self, exchange: Exchange) -> int | None:
        """Return the offset in the response just past its first event with a token.

        Only the first SEARCHED_BYTES bytes are searched. Return None if they contain no token.
        """
        raw = exchange.raw
        if raw.find(b"data:", 0, SEARCHED_BYTES) < 0:
            return None
        first_token = self._first_token
        if exchange.dialect is not None:
            first_token = partial(first_token, dialect=exchange.dialect)
        end = first_token(raw[:SEARCHED_FIRST_BYTES])
        if end is None and len(raw) > SEARCHED_FIRST_BYTES:
            end = first_token(raw[:SEARCHED_BYTES])
        return end

    def take(self, exchange: Exchange | None, record: Record) -> None:
        """Count the TTFT of a request that has ended, if the request is complete. The TTFT comes from `record`.

        The TTFT of this request may have been counted before, while the response (`exchange`) was still arriving. That
        TTFT is removed first.
        """
        if exchange is not None:
            self._searched.pop(exchange, None)
            bucket = self._seen.pop(exchange, None)
            if bucket is not None:
                self._ttft.remove(bucket)
        if record.state == "complete" and record.chunk_ns and record.sent_ns is not None:
            self._ttft.add(record.chunk_ns[0] - record.sent_ns)
