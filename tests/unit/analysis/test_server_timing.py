"""TTFT split by the server's own times (--server-timing)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.report import TableCell
from loadgen.analysis.report.findings import server_timing_finding
from loadgen.analysis.report.tables import server_timing
from loadgen.analysis.run.runfile import Telemetry
from loadgen.analysis.summary import Summary
from loadgen.servers.server_timing import INFERENCE, PREFILL, QUEUE
from tests.support.runs import burst, header, healthy, run_of

REQUESTS = 20


def summary_with(
    folder: Path,
    share: float,
    *,
    server: str = "vllm",
    rtt_us: int | None = 1_000,
    unknown_names: Sequence[str] = (),
    **units: int,
) -> Summary:
    """Return the summary of a run whose server states that queue and prefill together took this share of TTFT.

    The queue is a quarter of it. `units` may contain `queue=0`, for a server that does not state its queue, and
    `stated`, the number of responses that state times. There is one health sample for each of `unknown_names`.
    """
    records = []
    for number, record in enumerate(burst(REQUESTS, 8)):
        ttft_us = (record.chunk_ns[0] - (record.sent_ns or 0)) / 1e3
        marks = {QUEUE: round(0.25 * share * ttft_us), PREFILL: round(0.75 * share * ttft_us)}
        marks |= {INFERENCE: 10 * marks[PREFILL]}
        if not units.get("queue", 1):
            del marks[QUEUE]
        stated = number < units.get("stated", REQUESTS)
        records.append(replace(record, min_rtt_us=rtt_us, marks=marks if stated else {}))
    samples = [*healthy(), Telemetry(source="client", at_ns=1, values={"timing_sources": ["metrics"]})]
    samples += [Telemetry(source="client", at_ns=1, values={"unknown_timing_names": [name]}) for name in unknown_names]
    plan = header(REQUESTS, server=server).plan | {"server_timing": True}
    return summarise(run_of(folder / "run", records, telemetry=samples, server=server, plan=plan))


def test_ttft_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    """Queue, prefill, network and remainder of each request add up to its TTFT, and the finding is a note."""
    summary = summary_with(tmp_path, 0.9)
    timing = summary.server_timing
    assert timing is not None
    assert (timing.latency, timing.requests, timing.complete, timing.longer) == ("ttft", REQUESTS, REQUESTS, 0)
    assert [part.name for part in timing.parts] == ["queue", "prefill", "network", "remainder"]
    ttft_s = summary.latency.ttft.p50
    queue, prefill, network, remainder = (part.p50_s for part in timing.parts)
    assert queue == pytest.approx(0.225 * ttft_s, rel=1e-3)
    assert prefill == pytest.approx(0.675 * ttft_s, rel=1e-3)
    assert network == 0.001
    assert remainder == pytest.approx(0.1 * ttft_s - 0.001, rel=1e-3)
    assert summary.latencies["outside_s"].p50 == pytest.approx(0.1 * ttft_s, rel=1e-3)
    finding = server_timing_finding(summary)
    assert finding is not None
    assert finding.level == "note"
    assert f"of {REQUESTS} of {REQUESTS} responses" in finding.sentence
    table = server_timing([summary])
    assert len(table.rows) == 5
    cells = [row.cells[-1] for row in table.rows]
    assert all(isinstance(cell, TableCell) and cell.thin and cell.text.endswith("*") for cell in cells)
    assert [note for note in table.notes if "p99 662 needed" in note]


@pytest.mark.parametrize(("is_burst", "level"), [(False, "warning"), (True, "note")])
def test_much_time_outside_the_server_is_a_warning(tmp_path: Path, is_burst: bool, level: str) -> None:
    """The remainder is a warning from a fifth of TTFT on, except in a burst, which waits in the HTTP server."""
    summary = summary_with(tmp_path, 0.5)
    summary.run.load = replace(summary.run.load, burst=is_burst)
    finding = server_timing_finding(summary)
    assert finding is not None
    assert finding.level == level
    assert "outside the server's queue and prefill" in finding.sentence


def test_times_that_cannot_be_true_are_a_warning(tmp_path: Path) -> None:
    """Queue and prefill that are longer than TTFT are not subtracted without a word."""
    summary = summary_with(tmp_path, 1.5)
    assert summary.server_timing is not None
    assert summary.server_timing.longer == REQUESTS
    finding = server_timing_finding(summary)
    assert finding is not None
    assert finding.level == "warning"
    assert "are longer than the measured TTFT" in finding.sentence


def test_unknown_parts_say_so(tmp_path: Path) -> None:
    """A server that states no queue, and a kernel without round-trip times: the remainder contains both."""
    summary = summary_with(tmp_path, 0.5, rtt_us=None, queue=0)
    assert summary.server_timing is not None
    assert summary.server_timing.unknown == ["queue", "network"]
    finding = server_timing_finding(summary)
    assert finding is not None
    assert finding.level == "note"  # the remainder may be the queue
    assert "queue unknown (the server does not state it)" in finding.sentence
    assert "network unknown (the kernel reported no round-trip time)" in finding.sentence


@pytest.mark.parametrize(
    ("server", "remedy"),
    [
        ("vllm", "--enable-per-request-metrics"),
        ("sglang", "--endpoint generate"),
        ("tgi", "not streamed"),
        ("openai", "a proxy can add a `Server-Timing` header"),
    ],
)
def test_a_server_without_times_gets_its_remedy(tmp_path: Path, server: str, remedy: str) -> None:
    """If no response states times, a warning says how the server can be made to state them."""
    summary = summary_with(tmp_path, 0.5, server=server, stated=0)
    finding = server_timing_finding(summary)
    assert finding is not None
    assert finding.level == "warning"
    assert "No response states the server's times." in finding.sentence
    assert remedy in finding.sentence
    assert not server_timing([summary]).rows


@pytest.mark.parametrize(
    ("unknown_names", "source"),
    [
        (("db",), "Server-Timing, where db is an unknown name"),
        (("db", "cache", "db"), "Server-Timing, where cache, db are unknown names"),
        (
            [f"span-{number}" for number in range(99)],
            "Server-Timing, where span-0, span-1, span-10 and more are unknown names",
        ),
    ],
)
def test_unknown_names_are_one_source(tmp_path: Path, unknown_names: Sequence[str], source: str) -> None:
    """All unknown names of a run together are one source with a few examples, and the finding names them."""
    summary = summary_with(tmp_path, 0.5, stated=0, unknown_names=unknown_names)
    assert summary.server_timing is not None
    assert summary.server_timing.sources == [source, "metrics"]
    finding = server_timing_finding(summary)
    assert finding is not None
    assert f"There is {source}." in finding.sentence


def test_a_run_without_the_option_has_no_section(tmp_path: Path) -> None:
    """Neither the summary nor the findings mention the server's times."""
    summary = summarise(run_of(tmp_path / "run", burst(REQUESTS, 8)))
    assert summary.server_timing is None
    assert server_timing_finding(summary) is None
    assert np.isnan(summary.latencies["outside_s"].p50 or np.nan)
