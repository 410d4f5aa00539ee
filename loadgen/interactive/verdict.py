"""Did the client keep up so far? The figures that analysis.limits holds against its limits, of a run that goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.client import KERNEL_STAMP_ERROR_S, beside, clock_step_s, late_percentile_s
from analysis.limits import reasons
from analysis.stats import percentile
from loadgen.interactive.ledger import Ledger

COALESCED_SHARE = 0.01


def health(ledger: Ledger, latency: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Named and judged as `client` of summary.json, whose limits and formulas these are; `latency` is exact so far.

    The first second is left out of `cpu_share`, as there is no whole second to speak of.
    """
    figures = _figures(ledger)
    figures |= dict.fromkeys(("error_bar_s", "error_bar_e2e_s", "error_ttft_p50_s"), _bar_s(figures))
    return {**figures, "reasons": reasons({**figures, **beside(figures, latency)})}


def _bar_s(figures: Mapping[str, Any]) -> float:
    """A bar for the time being: where more than 1 % of the reads held several tokens, how late reads were. The report
    has that of every stream (analysis.stamp_errors), for which the whole run has to be there."""
    if figures["stamps"] != "kernel":
        return float(figures["stall_max_s"])
    blurred = figures["late_p99_s"] if figures["coalesced_share"] > COALESCED_SHARE else None
    return float(KERNEL_STAMP_ERROR_S + (figures["clock_step_s"] or 0.0) + (blurred or 0.0))


def _figures(ledger: Ledger) -> dict[str, Any]:
    totals, figures = ledger.totals, ledger.figures
    kernel = ledger.stamps == "kernel"
    return {
        "stamps": ledger.stamps,
        "late_p50_s": late_percentile_s(figures.late, 0.50) if kernel else None,
        "late_p99_s": late_percentile_s(figures.late, 0.99) if kernel else None,
        "coalesced_share": figures.coalesced_reads / max(1, figures.reads),
        "send_late_p99_s": _p99_s(ledger),
        "clock_step_s": clock_step_s(ledger.disagreement_ns / 1e9, (time.monotonic_ns() - ledger.start_ns) / 1e9),
        "cpu_share": ledger.cpu_share_max,
        "stall_max_s": totals["stall_ns_max"] / 1e9,
        "full_reads": totals["full_reads"],
        "retransmit_share": totals["retransmits"] / max(1, figures.sent),
        "out_of_order_share": totals["out_of_order"] / max(1, totals["reads"]),
    }


def _p99_s(ledger: Ledger) -> float | None:
    late_ns = np.sort(ledger.figures.send_late.copy())
    return percentile(late_ns, 0.99) / 1e9 if len(late_ns) else None
