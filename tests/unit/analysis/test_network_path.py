"""The round-trip time and the gateways of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.report.findings import network_finding
from loadgen.analysis.run.runfile import Telemetry
from loadgen.analysis.summary import NetworkPath, Summary
from tests.support.runs import burst, healthy, run_of


def summary_with(tmp_path: Path, rtt_us: list[int | None], gateways: list[str] | None = None) -> Summary:
    """Return the summary of a burst whose requests have these round-trip times. TTFT is about 0.1 s or longer."""
    records = [replace(record, min_rtt_us=rtt) for record, rtt in zip(burst(len(rtt_us), 8), rtt_us, strict=True)]
    samples = list(healthy())
    samples.append(Telemetry(source="client", at_ns=1, values={"gateways": gateways or []}))
    return summarise(run_of(tmp_path / "run", records, telemetry=samples))


def path_of(summary: Summary) -> NetworkPath:
    assert summary.network is not None
    return summary.network


def test_round_trips_are_shown_beside_ttft(tmp_path: Path) -> None:
    """The minimum, the median and the p99 over requests, and the median as a share of the median TTFT."""
    summary = summary_with(tmp_path, [2_000, 3_000, 4_000, None, 3_000])
    network = path_of(summary)
    assert (network.rtt_min_s, network.rtt_p50_s, network.requests) == (0.002, 0.003, 4)
    assert network.rtt_p99_s == pytest.approx(0.00397)
    assert network.ttft_share == pytest.approx(0.003 / summary.latency.ttft.p50, abs=1e-4)


def test_a_distant_server_is_a_warning(tmp_path: Path) -> None:
    """A round trip that is a fifth of TTFT or more is a warning; a shorter one is a note."""
    ttft_us = int(summary_with(tmp_path / "first", [1] * 10).latency.ttft.p50 * 1e6)
    for share, level in ((0.5, "warning"), (0.1, "note")):
        finding = network_finding(summary_with(tmp_path / level, [max(1_000, int(share * ttft_us))] * 10))
        assert finding is not None
        assert finding.level == level
        assert "TTFT includes the network: a round trip takes" in finding.sentence


def test_a_near_server_without_a_gateway_is_not_mentioned(tmp_path: Path) -> None:
    """A round trip below a millisecond is in the summary, but not a finding."""
    summary = summary_with(tmp_path, [50] * 10)
    assert path_of(summary).rtt_p50_s == 50e-6
    assert network_finding(summary) is None


def test_gateways_are_named_once(tmp_path: Path) -> None:
    """Gateways of all health samples are listed, also if the kernel reports no round-trip time."""
    summary = summary_with(tmp_path, [None] * 10, ["nginx/1.22.1 (Server)", "nginx/1.22.1 (Server)"])
    assert path_of(summary).gateways == ["nginx/1.22.1 (Server)"]
    finding = network_finding(summary)
    assert finding is not None
    assert (finding.level, finding.sentence) == ("note", "Responses came through nginx/1.22.1 (Server).")


def test_nothing_is_known_about_an_older_run(tmp_path: Path) -> None:
    """Runs of older versions have neither round-trip times nor gateways."""
    summary = summary_with(tmp_path, [None] * 10)
    assert summary.network is None
    assert network_finding(summary) is None
