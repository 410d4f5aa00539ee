"""Did the client keep up so far? The figures that analysis.limits holds against its limits, of a run that goes on."""

from __future__ import annotations

import math
from typing import Any

from loadgen.health import BUCKETS_PER_OCTAVE
from loadgen.interactive.ledger import Ledger


def health(ledger: Ledger) -> dict[str, Any]:
    """Named as in `client` of summary.json; what only the whole run can tell (clock steps, error bar) is left to the
    report. The first second is left out of `cpu_share`, as there is no whole second to speak of."""
    totals = ledger.totals
    requests = max(1, ledger.figures.sent)
    reads = max(1, totals["reads"])
    late_p99_s = _late_s(ledger, 0.99)
    coalesced = totals["coalesced_reads"] / reads
    return {
        "stamps": ledger.stamps,
        "late_p50_s": _late_s(ledger, 0.5),
        "late_p99_s": late_p99_s,
        "coalesced_late_share": coalesced if (late_p99_s or 0) > 0.001 else 0.0,
        "coalesced_share": coalesced,
        "cpu_share": ledger.cpu_share_max,
        "stall_max_s": totals["stall_ns_max"] / 1e9,
        "full_reads": totals["full_reads"],
        "retransmit_share": totals["retransmits"] / requests,
        "out_of_order_share": totals["out_of_order"] / reads,
    }


def _late_s(ledger: Ledger, share: float) -> float | None:
    """Upper end of the lateness bucket that holds the quantile, as analysis.client.late_percentile_s."""
    counts = ledger.figures.late
    wanted, seen = share * counts.total(), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return math.exp2((bucket + 1) / BUCKETS_PER_OCTAVE) * 1e-6
    return None
