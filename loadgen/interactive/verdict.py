"""Did the client keep up so far? The figures that analysis.client holds against its limits, of a run that goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from analysis.client import clock_step_s, late_percentile_s, median_off_s, own_error, reasons
from analysis.stats import percentile
from analysis.summary import ClientHealth
from loadgen.interactive.ledger import Ledger


def health(ledger: Ledger, latency: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """As `client` of summary.json, whose limits and formulas these are; `latency` is exact so far.

    The first second is left out of `cpu_share`, as there is no whole second to speak of.
    """
    found = _figures(ledger)
    if (own := own_error(found)) is not None:
        ttft_s, off_s = ledger.figures.samples["ttft_s"].copy() / 1e9, ledger.figures.first_off.copy() / 1e9
        both = min(len(ttft_s), len(off_s))  # one more may have come in between
        off_s = np.clip(off_s[:both], 0.0, np.inf if own.away_s is None else own.away_s)
        found.error_ttft_p50_s = own.stamp_s + median_off_s(ttft_s[:both], off_s)
        found.error_bar_e2e_s = own.stamp_s
    found.reasons = reasons(found, latency["ttft_s"]["p50"], latency["e2e_s"]["p50"])
    shown: dict[str, Any] = msgspec.to_builtins(found)
    return shown


def _figures(ledger: Ledger) -> ClientHealth:
    totals, figures = ledger.totals, ledger.figures
    kernel = ledger.stamps == "kernel"
    return ClientHealth(
        stamps=ledger.stamps,
        late_p50_s=late_percentile_s(figures.late, 0.50) if kernel else None,
        late_p99_s=late_percentile_s(figures.late, 0.99) if kernel else None,
        coalesced_share=figures.coalesced_reads / max(1, figures.reads),
        send_late_p99_s=_p99_s(ledger),
        clock_step_s=clock_step_s(ledger.disagreement_ns / 1e9, (time.monotonic_ns() - ledger.start_ns) / 1e9),
        cpu_share=ledger.cpu_share_max,
        stall_max_s=totals["stall_ns_max"] / 1e9,
        full_reads=totals["full_reads"],
        retransmit_share=totals["retransmits"] / max(1, figures.sent),
        out_of_order_share=totals["out_of_order"] / max(1, totals["reads"]),
    )


def _p99_s(ledger: Ledger) -> float | None:
    late_ns = np.sort(ledger.figures.send_late.copy())
    return percentile(late_ns, 0.99) / 1e9 if len(late_ns) else None
