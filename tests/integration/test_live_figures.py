"""The figures shown during a run are those of its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen import Plan, api
from loadgen.engine.client_health import LiveCounters
from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
from tests.support.simulated import running

BUCKET = 0.012  # relative width of a bucket


def observed(server: SimulatedConfig, tmp_path: Path, **settings: Any) -> tuple[list[LiveCounters], Any]:
    """The live counters while requests were sent and at the end, and the summary of the run."""
    seen: list[LiveCounters] = []

    def keep(phase: str, counts: LiveCounters) -> None:
        if phase != "connecting":
            seen.append(counts)

    with running(server) as simulated:
        plan = Plan(server=server.server, url=simulated.url, input_tokens=16, **settings)
        result = api.run(plan, out=tmp_path / "run", progress=keep)
    return seen, result.summary


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("endpoint", "fault"), [("completions", "cut@8:3,7"), ("chat", "role-first")])
def test_the_last_live_figures_are_those_of_the_report(endpoint: str, fault: str, workers: int, tmp_path: Path) -> None:
    """TTFT and TPOT of complete requests, and the output throughput. Two of the completions are cut off; chats begin
    with an event without a token, long before the first token."""
    server = SimulatedConfig(
        server="vllm", ttft_s=0.4, itl_s=0.01, jitter_s=0.2, seed=3, faults=(parse_rule(fault),), max_model_len=1024
    )
    seen, summary = observed(server, tmp_path, endpoint=endpoint, n=40, output_tokens=32, workers=workers)
    last = seen[-1]
    for name, histogram in (("ttft_s", last.ttft), ("tpot_s", last.tpot)):
        latency = summary.latency[name]
        assert histogram.percentiles_s(0.5, 0.99) == pytest.approx([latency.p50, latency.p99], rel=BUCKET), name
        assert sum(histogram.by_bucket().values()) == summary.requests.complete
    assert last.mean_tokens_per_s == pytest.approx(summary.throughput.output_tokens_per_s, rel=0.01)
    # No event without a token counted as a first token, not even for a moment.
    lowest_s = min(percentiles[0] for counts in seen if (percentiles := counts.ttft.percentiles_s(0.0)))
    assert lowest_s >= summary.latency["ttft_s"].min * (1 - BUCKET)


def test_the_live_rate_of_a_steady_stream_is_steady(tmp_path: Path) -> None:
    """40 streams of 50 tokens/s each: from the third second to the last token, every live rate is about 2,000 tokens/s,
    also when requests end and are recorded."""
    server = SimulatedConfig(server="tgi", ttft_s=0.01, itl_s=0.02)
    seen, summary = observed(server, tmp_path, n=40, output_tokens=300)
    assert summary.requests.complete == 40
    steady = [counts.tokens_per_s for counts in seen if 40 * 160 <= counts.tokens <= 40 * 295]
    assert len(steady) > 5
    middle = sorted(steady)[len(steady) // 2]
    assert steady == pytest.approx([middle] * len(steady), rel=0.15)
    assert middle == pytest.approx(40 * summary.latency["tpot_s"].p50 ** -1, rel=0.1)
