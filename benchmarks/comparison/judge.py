"""What really happened in a burst, from the simulated server's log."""

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
    """One run as the server's side knows it."""

    requests: int
    """That came, warm-ups and those that the client gave up included."""
    events: int
    """Sends that held tokens, in all of them."""
    first_request_ns: int
    """CLOCK_REALTIME at which the first request for tokens had come."""
    skew_ms: float
    """From the first request of the burst to its last."""
    ttft_ms: float
    """Median: from a request's arrival to the server's send of its first token. No client can see less."""
    tpot_ms: float
    """Median: (last send - first send) / (tokens - those of the first send)."""
    server_late_ms: float
    """p99 of how much later than its clock wanted the server sent."""
    stamps: str
    """Where arrivals are from: `ring`, the kernel's stamps, or `user`, what the server noted when it read them."""


def read_log(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The requests for tokens, in order of arrival, and the summary. Raises OSError, ValueError, LookupError."""
    *requests, last = (json.loads(line) for line in file.read_text("utf-8").splitlines())
    return sorted(requests, key=lambda line: int(line["received_ns"])), last["summary"]


def judge(requests: Sequence[dict[str, Any]], summary: dict[str, Any], n: int) -> Truth:
    """Says what happened to the burst. Raises ValueError when there is none: fewer than `n` requests got tokens."""
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
    """The burst: of all runs of `n` neighbours the shortest. Some clients send others first, to try the server, or
    start again while the last answers are still coming."""
    start = min(range(len(answered) - n + 1), key=lambda first: answered[first + n - 1][0] - answered[first][0])
    return answered[start : start + n]


def tpot_ms(line: dict[str, Any]) -> float:
    """Of one request of the log."""
    sent_ns: list[int] = line["sent_ns"]
    tokens: list[int] = line["tokens"]
    return (sent_ns[-1] - sent_ns[0]) / max(1, sum(tokens) - tokens[0]) / _NS_PER_MS
