"""The client's verdict on itself, from its telemetry and the Records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from loadgen.analysis.client_health import LIMITS
from loadgen.analysis.objectives import ObjectiveVerdict
from loadgen.analysis.report.findings import client_sentence, findings, verdict
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Telemetry
from loadgen.analysis.stats import late_percentile_s
from loadgen.analysis.summary import Summary
from loadgen.cli.output import exit_code
from loadgen.engine.client_health import LATE_BOUNDS_NS, Health
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import burst, complete, dropped, failed, healthy, run_of, said, summarise, typed


def client_of(
    folder: Path, records: Sequence[Record] | None = None, telemetry: Sequence[Telemetry] | None = None
) -> dict[str, Any]:
    """The `client` part of the summary of a run with these records and samples."""
    found: dict[str, Any] = summarise(run_of(folder / "run", records or burst(20, 4), telemetry=telemetry))["client"]
    return found


def test_a_client_that_kept_up_is_ok(tmp_path: Path) -> None:
    """Every figure within its limit: verdict ok, no reason, and the error bar is that of a kernel stamp."""
    client = client_of(tmp_path)
    assert (client["verdict"], client["reasons"], client["stamps"]) == ("ok", [], "socket")
    assert client["error_bar_s"] == 20e-6


LATE = {"late_counts": {"72": 1000}}  # 262 ms and more
CASES = {
    "error_share": ([complete(1, [300_000, 400_000])], healthy()),
    "send_late_share": ([complete(1, [900 * MS], sent_ns=50 * MS)], healthy()),
    "cpu_share": (burst(20, 4), healthy(cpu_ns=990_000_000)),
    "late_p99_s": (burst(20, 4), healthy(**LATE)),
    "stall_max_s": (burst(20, 4), healthy(stall_ns_max=1_200 * MS)),
    "coalesced_late_share": (
        [complete(1, [500 * MS, 600 * MS, 700 * MS], coalesced_reads=2)],
        healthy(late_counts={"48": 1000}),
    ),
    "full_reads": (burst(20, 4), healthy(full_reads=1)),
    "retransmit_share": (burst(20, 4), healthy(retransmits=1, out_of_order=1)),
    "out_of_order_share": (burst(20, 4), healthy(out_of_order=100)),
    "ring_off_p99_s": (burst(20, 4), healthy(ring_off_counts={"10": 90, "20": 10})),
    "clock_step_s": (burst(20, 4), healthy(clock_disagreement_ns=30 * MS)),
    "worker_lost": ([*burst(20, 4), failed(50, "worker_lost", "its worker process ended")], healthy()),
    "client_limit": ([*burst(20, 4), failed(50, "client_limit", "")], healthy()),
    "dropped": ([*burst(20, 4), dropped(50)], healthy()),
}


@pytest.mark.parametrize("limit", LIMITS, ids=[limit.figure for limit in LIMITS])
def test_each_limit_is_enforced_and_says_why(tmp_path: Path, limit: Any) -> None:
    """One figure beyond its limit gives verdict limited, and a reason that names it and what it means."""
    records, telemetry = CASES[limit.figure]
    client = client_of(tmp_path, records, telemetry)
    assert client["verdict"] == "limited"
    assert any(reason.startswith(limit.title) and limit.meaning in reason for reason in client["reasons"])


def test_losses_that_no_sample_mentions_are_unknown(tmp_path: Path) -> None:
    """A run of an older version counted no full reads and no losses: that is no zero, and no reason."""
    client = client_of(tmp_path)
    assert [client[name] for name in ("full_reads", "retransmit_share", "out_of_order_share")] == [None] * 3
    assert client["verdict"] == "ok"


def test_losses_are_counted_beside_what_could_be_lost(tmp_path: Path) -> None:
    """Segments sent again per request sent, segments out of order per read, full reads as they are."""
    lossy = healthy(2, retransmits=0, out_of_order=13, full_reads=0)
    client = client_of(tmp_path, telemetry=lossy)
    assert [client[name] for name in ("full_reads", "retransmit_share", "out_of_order_share")] == [0, 0, 0.002]


def test_a_full_queue_of_connections_is_not_a_network_that_loses_parts(tmp_path: Path) -> None:
    """Retransmits without a single segment out of order: the server or a gateway accepts connections too slowly."""
    late = [complete(1, [900 * MS], sent_ns=50 * MS)]
    reasons = client_of(tmp_path, late, healthy(retransmits=1, out_of_order=0))["reasons"]
    assert not [reason for reason in reasons if "network lost" in reason]
    assert len([reason for reason in reasons if "did not accept connections in time" in reason]) == 2


def test_silence_is_not_taken_for_health(tmp_path: Path) -> None:
    """A run without any health sample does not get the verdict ok: nothing is known."""
    client = client_of(tmp_path, telemetry=[])
    assert client["verdict"] == "limited"
    assert client["reasons"] == ["the run has no health samples, so the state of the client is unknown"]
    assert client["late_p99_s"] is None


def test_user_space_stamps_have_no_lateness_and_a_wide_error_bar(tmp_path: Path) -> None:
    """Without kernel stamps lateness cannot be known, so the longest stall is the error bar."""
    records = [complete(1, [800 * MS, 900 * MS]), complete(2, [800 * MS], stamps="user")]
    client = client_of(tmp_path, records, healthy(stall_ns_max=30 * MS))
    assert client["stamps"] == "user"
    assert [client[name] for name in ("late_p50_s", "late_p99_s", "late_max_s")] == [None, None, None]
    assert [client[f"error_bar{of}_s"] for of in ("", "_ttft", "_itl", "_e2e")] == [0.03] * 4


def test_coalescing_without_lateness_is_the_servers_doing(tmp_path: Path) -> None:
    """A server that sends two tokens in one packet does not make the client the limit."""
    record = complete(1, [500 * MS, 600 * MS, 700 * MS], coalesced_reads=2)
    assert client_of(tmp_path, [record], healthy(late_counts={"30": 100}))["verdict"] == "ok"


def test_a_slewed_clock_is_not_a_stepped_one(tmp_path: Path) -> None:
    """Clocks that drift by 500 ppm, the fastest that slewing goes, are converted; what goes beyond is a step."""
    slewed = client_of(tmp_path / "slewed", telemetry=healthy(10, clock_disagreement_ns=5 * MS))
    assert (slewed["verdict"], slewed["clock_step_s"]) == ("ok", 0)
    stepped = client_of(tmp_path / "stepped", telemetry=healthy(10, clock_disagreement_ns=5 * MS + 2 * MS))
    assert (stepped["verdict"], stepped["clock_step_s"]) == ("limited", 0.002)


def test_the_busiest_worker_counts(tmp_path: Path) -> None:
    """The processor share is that of one worker's busiest second, and a sample of a few ms does not count."""
    samples = healthy(3)
    samples[1].worker, samples[1].values["cpu_ns"] = 1, 800 * MS
    samples[2].values |= {"cpu_ns": 20 * MS, "wall_ns": 20 * MS}
    client = client_of(tmp_path, telemetry=samples)
    assert (client["cpu_share"], client["workers"], client["samples"]) == (0.8, 2, 3)


@pytest.mark.parametrize("late_ns", [0, 999, 1_000, 1_189, 1_190, 37_000, 1_000_000, 263_000_000])
def test_late_reads_are_bounded_from_above_within_a_fifth(late_ns: int) -> None:
    """A read's lateness, counted by the sender's buckets, comes back as at most 19% more, and never as less."""
    health = Health()
    health.add([late_ns], 0, 0, 0, 0, 0)
    counts = Counter({int(bucket): count for bucket, count in health.sample()["late_counts"].items()})
    found_s = late_percentile_s(counts, 0.99)
    assert found_s is not None
    assert late_ns <= found_s * 1e9 + 1 <= max(late_ns, LATE_BOUNDS_NS[0]) * 1.19 + 2


def test_late_percentiles_count_all_reads() -> None:
    """98 prompt reads and 2 late ones: the median is prompt, the p99 late; of no reads nothing is known."""
    counts = Counter({-1: 98, 40: 2})
    assert late_percentile_s(counts, 0.5) == pytest.approx(1e-6)
    assert late_percentile_s(counts, 0.99) == pytest.approx(2**10.25 * 1e-6)
    assert late_percentile_s(Counter(), 0.5) is None


def test_merged_first_tokens_and_reopened_connections_are_counted(tmp_path: Path) -> None:
    """What bounds a TTFT instead of fixing it, and what was opened twice, is in the summary."""
    records = [complete(1, [500 * MS], first_token_merged=True), complete(2, [500 * MS], reopened=2)]
    client = client_of(tmp_path, records)
    assert (client["first_token_merged"], client["reopened"]) == (1, 2)


def ring(**values: Any) -> list[Telemetry]:
    """Health samples of a worker with a packet ring."""
    return healthy(ring_drops=0, ring_missed=0, **values)


def test_a_stall_blurs_nothing_where_each_packet_has_its_stamp(tmp_path: Path) -> None:
    """Tokens that were read together after a stall have stamps of their own: the bars are those of a stamp, and neither
    the stall nor the late reads of several tokens are a reason."""
    stalled = {"stall_ns_max": 180 * MS, "late_counts": {"64": 1000}}
    tokens = [500 * MS, 600 * MS, 600 * MS, 700 * MS]
    records = [complete(each, tokens, coalesced_reads=1) for each in range(20)]
    by_socket = client_of(tmp_path / "socket", records, healthy(**{**stalled, "stall_ns_max": 300 * MS}))
    assert any("Longest stall".lower() in reason for reason in by_socket["reasons"])
    run = run_of(
        tmp_path / "ring",
        [replace(each, stamps="ring") for each in records],
        telemetry=ring(**stalled),
        client={"stamps": "ring"},
    )
    client = summarise(run)["client"]
    assert (client["verdict"], client["stamps"], client["error_bar_itl_s"]) == ("ok", "ring", 40e-6)


@pytest.mark.parametrize("arrivals", ["burst", "closed:4"])
def test_a_busy_processor_costs_a_burst_nothing_where_packets_are_stamped(tmp_path: Path, arrivals: str) -> None:
    """The windows say that the server never waited; in a closed loop the next request would have."""
    records = [replace(each, stamps="ring") for each in burst(20, 4)]
    busy = ring(cpu_ns=990_000_000, windows=100)
    run = run_of(tmp_path / "run", records, telemetry=busy, client={"stamps": "ring"}, plan={"arrivals": arrivals})
    assert summarise(run)["client"]["verdict"] == ("ok" if arrivals == "burst" else "limited")


def test_the_ring_is_held_against_the_socket(tmp_path: Path) -> None:
    """Every run says how far the two stamps of a read are apart, and what the ring lost."""
    samples = healthy(1, ring_drops=3, ring_missed=2, ring_off_counts={"0": 90, "10": 9, "11": 1})
    client = client_of(tmp_path, telemetry=samples)
    apart = [client[f"ring_off_{name}_s"] for name in ("p50", "p99", "max")]
    assert apart == [pytest.approx(1e-9), pytest.approx(1.024e-6), pytest.approx(2.048e-6)]
    assert (client["ring_drops"], client["ring_missed"]) == (3, 2)
    assert said(summarise(run_of(tmp_path / "again", burst(20, 4), telemetry=samples)), "client").endswith(
        "the packet ring lost 3 segments; 2 timestamps missing in the packet ring: socket timestamps used for those."
    )


def instrument(folder: Path, rejected: int, given_up: int, **more: Any) -> Summary:
    """The summary of a run of 20 requests, this number of which had packet timestamps that were wrong."""
    sources = ["socket"] * rejected + ["ring"] * (20 - rejected)
    records = [replace(each, stamps=source) for each, source in zip(burst(20, 4), sources, strict=True)]
    facts = {"ring_drops": 0, "ring_missed": 0, "ring_off_counts": {"10": 80, "25": 20}}
    samples = healthy(1, ring_rejected=rejected, ring_given_up=given_up, **facts, **more)
    return typed(summarise(run_of(folder / "run", records, telemetry=samples, client={"stamps": "ring"})))


def test_a_ring_that_was_given_up_is_a_warning_about_the_instrument(tmp_path: Path) -> None:
    """The figures have the socket's timestamps, so they are valid, and the client is not blamed."""
    summary = instrument(tmp_path, 12, 1)
    client = summary.client
    assert (client.verdict, client.reasons, client.stamps) == ("ok", [], "socket")
    assert (client.ring_rejected, client.ring_given_up, client.error_bar_s) == (12, 1, 20e-6)
    found = findings(summary)
    assert verdict(summary, found).sentence == "Valid, with 1 warning below."
    [warning] = [each.sentence for each in found if each.level == "warning"]
    assert warning == client_sentence(summary).replace("Valid: the", "The")
    words = "packet timestamps and socket timestamps disagreed in 12 of 20 requests: socket timestamps used."
    assert client_sentence(summary).endswith(words)


def test_a_few_wrong_packet_timestamps_are_a_note(tmp_path: Path) -> None:
    """Only the requests in question have the socket's timestamps."""
    summary = instrument(tmp_path, 1, 0)
    assert verdict(summary, findings(summary)).sentence == "Valid: every check passed."
    assert client_sentence(summary).endswith("disagreed in 1 of 20 requests: socket timestamps used for those.")


def test_wrong_kernel_timestamps_are_a_warning(tmp_path: Path) -> None:
    """User-space timestamps are not exact, and the run says how many requests have them."""
    summary = instrument(tmp_path, 0, 0, socket_rejected=2)
    assert verdict(summary, findings(summary)).sentence == "Valid, with 1 warning below."
    assert client_sentence(summary).endswith(
        "kernel timestamps contradicted 2 of 20 requests: user-space timestamps used for those."
    )


def test_an_older_run_whose_timestamps_disagree_blames_the_timestamps(tmp_path: Path) -> None:
    """Its version did not choose the socket's timestamps, so its figures may be wrong, but the client was no limit."""
    samples = ring(ring_off_counts={"10": 80, "25": 20})
    summary = typed(summarise(run_of(tmp_path / "run", burst(20, 4), telemetry=samples)))
    expected = "Invalid: packet timestamps and socket timestamps disagree."
    assert (summary.client.verdict, verdict(summary, findings(summary)).sentence) == ("limited", expected)


def test_the_source_of_a_failed_request_says_nothing_of_the_figures(tmp_path: Path) -> None:
    """Latencies are those of complete requests."""
    records = [replace(each, stamps="ring") for each in burst(20, 4)]
    records += [replace(failed(50, "http_status", "HTTP 408"), stamps="user")]
    run = run_of(tmp_path / "run", records, telemetry=ring(), client={"stamps": "ring"})
    assert summarise(run)["client"]["stamps"] == "ring"


@pytest.mark.parametrize(("without_ring", "stamps"), [(1, "ring"), (2, "socket")])
def test_few_responses_without_packet_timestamps_do_not_describe_a_run(
    without_ring: int, stamps: str, tmp_path: Path
) -> None:
    """The run has the least exact source of at least one response in 200. Fewer responses are only counted."""
    sources = ["socket"] * without_ring + ["ring"] * (400 - without_ring)
    records = [replace(record, stamps=source) for record, source in zip(burst(400, 4), sources, strict=True)]
    samples = healthy(1, ring_drops=0, ring_missed=0, ring_rejected=without_ring, ring_given_up=0)
    run = run_of(tmp_path / "run", records, telemetry=samples, client={"stamps": "ring"})
    summary = summarise(run)
    assert summary["client"]["stamps"] == stamps
    assert f"disagreed in {without_ring} of 400 requests" in said(summary, "client")


def test_one_answer_without_the_ring_makes_the_run_the_sockets(tmp_path: Path) -> None:
    """The run is as good as the least of the sources that stamped its answers."""
    records = [replace(each, stamps="socket" if each.id == 3 else "ring") for each in burst(20, 4)]
    run = run_of(tmp_path / "run", records, telemetry=ring(), client={"stamps": "ring"})
    assert summarise(run)["client"]["stamps"] == "socket"


FAILED = ObjectiveVerdict(
    objective="complete >= 99%",
    figure="complete",
    verdict="fail",
    marginal=False,
    whole_interval=False,
    unit="share",
    bound=0.99,
    measured=0.5,
    interval=None,
    confidence=0.95,
    requests=6,
    left_out=0,
    requests_needed=None,
    said="50%",
)


def test_what_this_machine_could_not_send_is_its_own_fault(tmp_path: Path) -> None:
    """The reason quotes cause and remedy, most frequent first; the verdict names this machine, also if nothing at all
    was complete; and the exit code is 5 whatever an objective says."""
    no_port = "Cannot assign requested address: this machine has no free local port. Widen it"
    no_route = "Network is unreachable: this machine has no route to 10.0.0.1. Check it"
    limited = [failed(number, "client_limit", no_port) for number in (50, 51)]
    limited += [failed(52, "client_limit", no_route)]
    for name, records in (("some", [*burst(20, 4), *limited]), ("none", limited)):
        summary = typed(summarise(run_of(tmp_path / name, records, telemetry=healthy())))
        assert summary.client.client_limit == 3
        reason = f"requests that this machine could not send 3 (limit 0): {no_port}; {no_route}"
        assert reason in summary.client.reasons
        assert "this machine could not send every request" in verdict(summary, findings(summary)).sentence
        summary.objectives = [FAILED]
        assert exit_code([summary]) == 5
        summary.run.interrupted = True
        assert exit_code([summary]) == 130
