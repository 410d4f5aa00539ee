"""Splits TTFT into the times that the server states about each request, the round trip, and the remainder.

The module is used with --server-timing. A server knows how long a request waited in its queue and how long prefill
took. The kernel knows the round-trip time of the connection. The remainder of TTFT is the time that neither of them
knows, such as the time in gateways, in the HTTP server and in the tokenizer. The first token of a response that is not
streamed does not arrive separately, so the E2E latency of such a response is split instead.
"""

from __future__ import annotations

import numpy as np

from loadgen.analysis.frame import NS_PER_S, Booleans, Floats, Frame
from loadgen.analysis.metrics import US_PER_S
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.stats import percentiles, round_to_ns
from loadgen.analysis.summary import PartName, ServerTiming, TimePart
from loadgen.servers.server_timing import INFERENCE, PREFILL, QUEUE

NOT_STATED = "the server does not state it"
MAX_EXAMPLES = 3
"""Maximum number of unknown names of times in the summary."""
NO_RTT = "the kernel reported no round-trip time"
LONGER_SHARE, LONGER_S = 0.02, 0.002
"""The times that a server states count as longer than the measured latency if they exceed it by more than LONGER_SHARE
of the latency plus LONGER_S seconds. The seconds are needed because TGI and TEI round their times to ms."""


def find_server_timing(run: Run, frame: Frame) -> ServerTiming | None:
    """Divide the latency of the requests into parts, such as the time in the server's queue.

    The latency is TTFT, or E2E if the server states only the time of the whole inference. The parts are the times that
    the server states, the round trip of the network, and the remainder. Return None without --server-timing.
    """
    if not run.header.plan.get("server_timing"):
        return None
    samples = [sample.values for sample in run.telemetry if sample.source == "client"]
    sources = {source for values in samples for source in values.get("timing_sources", ())}
    unknown_names = {name for values in samples for name in values.get("unknown_timing_names", ())}
    if unknown_names:
        sources.add(_unknown_source(unknown_names))
    queue_s, prefill_s, inference_s = (frame.mark(name) / US_PER_S for name in (QUEUE, PREFILL, INFERENCE))
    streamed = frame.is_streamed
    splits_ttft = bool((frame.sampled & streamed & ~np.isnan(prefill_s)).any()) or not _known(frame, inference_s).any()
    if splits_ttft:
        total_s = np.where(streamed, frame.first_ns - frame.sent_ns, np.nan) / NS_PER_S
        work_s = prefill_s
    else:
        total_s = (frame.last_ns - frame.sent_ns) / NS_PER_S
        work_s = inference_s
    rows = frame.sampled & ~np.isnan(total_s) & ~(np.isnan(queue_s) & np.isnan(work_s))
    stated: dict[PartName, tuple[Floats, str]] = {
        "queue": (queue_s[rows], NOT_STATED),
        "prefill" if splits_ttft else "inference": (work_s[rows], NOT_STATED),
        "network": (frame.min_rtt_us[rows] / US_PER_S, NO_RTT),
    }
    parts = []
    remainder_s = total_s[rows].copy()
    if rows.any():
        for name, (values, reason) in stated.items():
            parts.append(_describe(name, values, reason))
            remainder_s -= np.nan_to_num(values)
        parts.append(_describe("remainder", remainder_s))
    server_s = np.nan_to_num(queue_s[rows]) + np.nan_to_num(work_s[rows])
    p50_s, p99_s = _percentiles(total_s[rows])
    return ServerTiming(
        latency="ttft" if splits_ttft else "e2e",
        requests=int(rows.sum()),
        complete=int(frame.sampled.sum()),
        p50_s=p50_s,
        p99_s=p99_s,
        parts=parts,
        sources=sorted(sources),
        longer=int((server_s > total_s[rows] * (1 + LONGER_SHARE) + LONGER_S).sum()),
    )


def _unknown_source(names: set[str]) -> str:
    """Return a text about a `Server-Timing` header with unknown names, such as
    `Server-Timing, where db is an unknown name`.

    The report lists this text among the sources of the server's times. The text contains at most MAX_EXAMPLES of the
    names.
    """
    examples = ", ".join(sorted(names)[:MAX_EXAMPLES])
    if len(names) == 1:
        return f"Server-Timing, where {examples} is an unknown name"
    more = " and more" if len(names) > MAX_EXAMPLES else ""
    return f"Server-Timing, where {examples}{more} are unknown names"


def _known(frame: Frame, values: Floats) -> Booleans:
    return frame.sampled & ~np.isnan(values)


def _describe(name: PartName, values: Floats, reason: str = "") -> TimePart:
    known = values[~np.isnan(values)]
    p50_s, p99_s = _percentiles(known)
    unknown = "" if len(known) else reason
    return TimePart(name=name, requests=len(known), p50_s=p50_s, p99_s=p99_s, unknown=unknown)


def _percentiles(values: Floats) -> tuple[float | None, float | None]:
    if not len(values):
        return None, None
    p50, p99 = percentiles(values, 0.5, 0.99)
    return round_to_ns(p50), round_to_ns(p99)
