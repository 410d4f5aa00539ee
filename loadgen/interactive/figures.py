"""Exact figures of a run that goes on: what the page shows, from samples that are kept as they are.

Nothing is put into buckets. Of each metric the newest samples are kept, up to a limit that is stated beside the figure
as soon as it is reached; the run file keeps everything.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.stats import DECIMALS, percentile
from loadgen.record import Record

REQUEST_SAMPLES = 1_000_000
TOKEN_SAMPLES = 4_000_000
"""Newest samples kept of a metric per request, and of one per token: 8 bytes each, 64 MB for all five."""
FAILURES = 1_000
"""Different words of failures that are told apart; a server may put something new into each."""
POINTS = 3_600
"""Seconds that the charts reach back."""
METRICS = {
    "ttft_s": "Time to first token",
    "tpot_s": "Time per output token",
    "itl_s": "Inter-token latency",
    "e2e_s": "End-to-end latency",
}
SHARES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


class Samples:
    """The newest `limit` samples of one metric, in nanoseconds."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values = array("d")
        self.seen = 0

    def add(self, value: float) -> None:
        """Take one; the oldest gives way once the limit is reached."""
        if len(self._values) < self._limit:
            self._values.append(value)
        else:
            self._values[self.seen % self._limit] = value
        self.seen += 1

    @property
    def kept(self) -> int:
        """How many figures are of."""
        return len(self._values)

    def copy(self) -> NDArray[np.float64]:
        """The samples, in no order, safe to work on in another thread."""
        return np.array(self._values, np.float64)


def described(values: NDArray[np.float64]) -> dict[str, float | int | None]:
    """n, mean, exact percentiles, min and max in seconds, as analysis.stats gives them; None of no samples."""
    ordered = np.sort(values) / 1e9
    if not len(ordered):
        return {"n": 0, "mean": None, **dict.fromkeys(SHARES), "min": None, "max": None}
    figures = {name: percentile(ordered, share) for name, share in SHARES.items()}
    ends = {"mean": float(np.mean(ordered)), **figures, "min": float(ordered[0]), "max": float(ordered[-1])}
    return {"n": len(ordered), **{name: round(value, DECIMALS) for name, value in ends.items()}}


class Figures:
    """Everything the page shows of one run."""

    def __init__(self) -> None:
        self.states = Counter[str]()
        self.failures = Counter[tuple[str, str]]()
        self.late = Counter[int]()
        self.sent = 0
        self.tokens = 0
        self.reads = self.coalesced_reads = 0
        self.send_late = Samples(REQUEST_SAMPLES)
        self.points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self.points_seen = 0
        self.samples = {name: Samples(TOKEN_SAMPLES if name == "itl_s" else REQUEST_SAMPLES) for name in METRICS}
        self.first_off = Samples(REQUEST_SAMPLES)
        """Beside each TTFT, what its stamp may be off by (analysis.stamp_errors)."""
        self._recent: dict[str, list[float]] = {"ttft_s": [], "tpot_s": []}

    def add(self, record: Record) -> None:
        """Take the Record of a request that has ended. Latencies are of complete requests, as in every report."""
        self.states[record.state] += 1
        if record.sent_ns is not None:
            self.sent += 1
            self.send_late.add(record.sent_ns - record.due_ns)
        self.tokens += sum(record.chunk_tokens)
        self.reads += record.reads
        self.coalesced_reads += record.coalesced_reads
        if record.state == "complete":
            for name, value in latencies(record).items():
                self.samples[name].add(value)
                if name in self._recent:
                    self._recent[name].append(value)
                if name == "ttft_s":
                    self.first_off.add(first_off_ns(record))
            self._add_gaps(record)
        else:
            key = (record.error_kind, detail_of(record))
            known = key in self.failures or len(self.failures) < FAILURES
            self.failures[key if known else (record.error_kind, "(other words)")] += 1

    def point(self, **beside: Any) -> None:
        """One second of the charts: percentiles of the requests that ended in it, and what is given."""
        recent, self._recent = self._recent, {name: [] for name in self._recent}
        percentiles = {
            f"{name}_{share}": percentile(np.sort(np.array(values)) / 1e9, SHARES[share]) if values else None
            for name, values in recent.items()
            for share in ("p50", "p99")
        }
        self.points.append({"at": self.points_seen, **percentiles, **beside})
        self.points_seen += 1

    def _add_gaps(self, record: Record) -> None:
        """Inter-chunk times, and for each further token of a chunk a zero (see analysis.formulas.inter_token)."""
        add = self.samples["itl_s"].add
        for before, after in pairwise(record.chunk_ns):
            add(after - before)
        for _ in range(sum(record.chunk_tokens) - len(record.chunk_ns)):
            add(0)


def latencies(record: Record) -> Mapping[str, float]:
    """TTFT, TPOT and E2E of a complete request in ns, by the definitions of analysis.metrics; what is undefined is not
    there."""
    chunks = record.chunk_ns
    if not chunks or record.sent_ns is None:
        return {}
    found: dict[str, float] = {"ttft_s": chunks[0] - record.sent_ns, "e2e_s": chunks[-1] - record.sent_ns}
    tokens = record.output_tokens if record.output_tokens is not None else sum(record.chunk_tokens)
    later = tokens - record.chunk_tokens[0]
    if later > 0:
        found["tpot_s"] = (chunks[-1] - chunks[0]) / later
    return found


def detail_of(record: Record) -> str:
    """The words of a failure with its numbers left out, so that the same failure is counted as one."""
    return "".join("#" if letter.isdigit() else letter for letter in record.error_detail)[:200]


def first_off_ns(record: Record) -> float:
    """What the stamp of an answer's first token may be off by at most: read together with the next one, it came at any
    time since the answer's first byte, where that came before, or else since the request was sent."""
    chunks, began = record.chunk_ns, record.first_byte_ns
    if len(chunks) < 2 or chunks[0] != chunks[1] or record.sent_ns is None:
        return 0
    return chunks[0] - (began if began is not None and began < chunks[0] else record.sent_ns)
