"""From where on the client, not the server, was the limit. One table; each row says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COALESCING_LATE_S = 0.001
"""Reads that held several events are the client's doing only if it was at least this late."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a figure of the client may be, and what follows when it is more."""

    figure: str
    most: float
    unit: str
    meaning: str


LIMITS = (
    Limit("error_share", 0.05, "share", "the error bar of a stamp is more than a twentieth of the median TTFT"),
    Limit("send_late_p99_s", 0.1, "s", "requests left too late to be a burst: more --workers send sooner"),
    Limit("cpu_share", 0.95, "share", "a worker had no processor time left: the server may have waited for it"),
    Limit("late_p99_s", 0.25, "s", "answers lay unread so long that TCP may have held the server back"),
    Limit("stall_max_s", 1.0, "s", "the client stood still for a second or more"),
    Limit("coalesced_late_share", 0.05, "share", "late reads held several events: inter-token gaps are blurred"),
    Limit("clock_step_s", 0.001, "s", "the wall clock was stepped during the run, and receive stamps with it"),
    Limit("worker_lost", 0, "requests", "worker processes died and their requests are unknown"),
    Limit("dropped", 0, "requests", "requests were never sent"),
)


def reasons(figures: Mapping[str, Any]) -> list[str]:
    """One line per limit that is exceeded. Figures that are None are not known and exceed nothing."""
    return [
        f"{limit.meaning} ({limit.figure} {figures[limit.figure]:.3g} {limit.unit}, limit {limit.most:g})"
        for limit in LIMITS
        if figures.get(limit.figure) is not None and figures[limit.figure] > limit.most
    ]
