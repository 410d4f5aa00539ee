"""From where on the client, not the server, was the limit. One table; each row says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis import words

COALESCING_LATE_S = 0.001
"""Reads that held several events are the client's doing only if it was at least this late."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a figure of the client may be, and what is to be feared when it is more."""

    figure: str
    title: str
    most: float
    meaning: str


LIMITS = (
    Limit("error_share", "error of the median TTFT, beside it", 0.05, "the figures are not worth their digits"),
    Limit(
        "send_late_share",
        "sends late, p99 beside the median E2E",
        0.05,
        "they left later than due; more --workers send sooner",
    ),
    Limit("cpu_share", "busiest second", 0.95, "no processor time left: the server may have waited for the client"),
    Limit("late_p99_s", "reads late, p99", 0.25, "answers lay unread so long that TCP may have held the server back"),
    Limit("stall_max_s", "longest stall", 0.2, "the client stood still, and what came meanwhile shares a stamp"),
    Limit("coalesced_late_share", "late reads of several tokens", 0.05, "the times between tokens are blurred"),
    Limit("full_reads", "reads of a full window", 0, "so much lay unread that TCP held the server back"),
    Limit("retransmit_share", "segments sent again, per request", 0.01, "the network lost parts of requests"),
    Limit(
        "out_of_order_share", "segments out of order, per read", 0.01, "the network lost or swapped parts of answers"
    ),
    Limit("clock_step_s", "clock step", 0.001, "the wall clock was set during the run, and receive stamps with it"),
    Limit("worker_lost", "requests lost with their worker", 0, "what became of them is unknown"),
    # Not turns of a session that had ended: what ended it was a turn that the server did not answer whole.
    Limit("dropped", "requests never sent", 0, "the load was less than asked"),
)


def reasons(figures: Mapping[str, Any]) -> list[str]:
    """One line per limit that is exceeded. Figures that are None are not known and exceed nothing."""
    return [
        f"{limit.title} {text(limit.figure, value)}, limit {text(limit.figure, limit.most)}: {limit.meaning}"
        for limit in LIMITS
        if (value := figures.get(limit.figure)) is not None and value > limit.most
    ]


def text(figure: str, value: float | None) -> str:
    """A figure of the client in the unit that the end of its name gives."""
    if value is None:
        return words.UNKNOWN
    if figure.endswith("_s"):
        return words.duration(value)
    return words.share(value) if figure.endswith("_share") else f"{value:,.0f}"
