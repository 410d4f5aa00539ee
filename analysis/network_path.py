"""Describes the network between the client and the server: its round-trip time, and the gateways on the way.

Gateways are recognised by the headers that they add to responses. TTFT includes at least one round trip: the request
travels to the server, and the first token travels back. Reports therefore show the round-trip time next to TTFT. It is
never subtracted from TTFT, because users wait for it too.
"""

from __future__ import annotations

import numpy as np

from loadgen.analysis.frame import Frame
from loadgen.analysis.metrics import US_PER_S
from loadgen.analysis.objectives import Distribution
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.stats import percentiles, round_to_ns
from loadgen.analysis.summary import NetworkPath


def describe_path(run: Run, frame: Frame, ttft_s: Distribution) -> NetworkPath | None:
    """Return the network path of a run, or None if nothing is known about it, as for runs in virtual time.

    `ttft_s` is the distribution of TTFT.
    """
    rtt_s = frame.min_rtt_us[frame.measured & ~np.isnan(frame.min_rtt_us)] / US_PER_S
    gateways = {
        name for sample in run.telemetry if sample.source == "client" for name in sample.values.get("gateways", ())
    }
    if not len(rtt_s):
        if not gateways:
            return None
        return NetworkPath(
            rtt_min_s=None, rtt_p50_s=None, rtt_p99_s=None, ttft_share=None, requests=0, gateways=sorted(gateways)
        )
    p50, p99 = percentiles(rtt_s, 0.5, 0.99)
    return NetworkPath(
        rtt_min_s=round_to_ns(float(rtt_s.min())),
        rtt_p50_s=round_to_ns(p50),
        rtt_p99_s=round_to_ns(p99),
        ttft_share=round(p50 / ttft_s.p50, 4) if ttft_s.p50 else None,
        requests=len(rtt_s),
        gateways=sorted(gateways),
    )
