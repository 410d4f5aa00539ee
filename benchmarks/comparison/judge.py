"""Computes the true figures of a burst from the simulated server's log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loadgen.servers.wire.timestamp_sources import least_exact_source

_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """True figures of one run, as the server measured them."""

    requests: int
    """Number of requests that arrived, including warm-up requests and requests that the client cancelled."""
    events: int
    """Number of sends with tokens, over all requests."""
    first_request_ns: int
    """Arrival of the first request for tokens, in ns (CLOCK_REALTIME)."""
    skew_ms: float
    """Time from the arrival of the first request of the burst to the arrival of its last request, in ms."""
    ttft_ms: float
    """Median time from a request's arrival to the send of its first token, in ms. No client can measure less."""
    tpot_ms: float
    """Median of `(last send - first send) / (tokens - tokens of the first send)`, in ms."""
    server_late_ms: float
    """p99 of the server's delay between the due time and the send of a token, in ms."""
    stamps: str
    """Source of the arrival times: `ring` (timestamps of the kernel) or `user` (times at which the server read)."""


def read_log(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the requests for tokens, in order of arrival, and the summary line of a server log.

    Raises OSError, ValueError or LookupError if the log cannot be read.
    """
    *requests, last = (json.loads(line) for line in file.read_text("utf-8").splitlines())
    return sorted(requests, key=lambda line: int(line["received_ns"])), last["summary"]


def judge(requests: Sequence[dict[str, Any]], summary: dict[str, Any], n: int) -> Truth:
    """Return the true figures of a burst of `n` requests.

    Raises ValueError if fewer than `n` requests were answered with tokens.
    """
    answered = [(int(line["received_ns"]), line) for line in requests if line["sent_ns"]]
    if len(answered) < n:
        raise ValueError(f"the server answered {len(answered)} of {n} requests")
    burst = _closest(answered, n)
    return Truth(
        requests=len(requests),
        events=sum(len(line["sent_ns"]) for line in requests),
        first_request_ns=int(requests[0]["received_ns"]),
        skew_ms=(burst[-1][0] - burst[0][0]) / _NS_PER_MS,
        ttft_ms=median(line["sent_ns"][0] - at for at, line in burst) / _NS_PER_MS,
        tpot_ms=median(tpot_ms(line) for _, line in burst),
        server_late_ms=summary["late_ns"]["p99"] / _NS_PER_MS,
        stamps=least_exact_source(line["stamps"] for _, line in burst),
    )


def _closest(answered: list[tuple[int, dict[str, Any]]], n: int) -> list[tuple[int, dict[str, Any]]]:
    """Return the burst: the `n` consecutive requests that arrived within the shortest time.

    Some load generators send test requests before the burst, or start a second burst before the first one has ended."""
    start = min(range(len(answered) - n + 1), key=lambda first: answered[first + n - 1][0] - answered[first][0])
    return answered[start : start + n]


def tpot_ms(line: dict[str, Any]) -> float:
    """Return the TPOT of one request of the log, in ms."""
    sent_ns: list[int] = line["sent_ns"]
    tokens: list[int] = line["tokens"]
    return (sent_ns[-1] - sent_ns[0]) / max(1, sum(tokens) - tokens[0]) / _NS_PER_MS
