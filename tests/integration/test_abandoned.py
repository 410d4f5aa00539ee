"""Clients that give up: a chosen share of the requests is cut off on purpose, and counts neither as failed nor in any
latency."""

from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.workloads.cancellation import parse
from loadgen.workloads.request import number_of_wire_id
from tests.support.command import burst, summary_of
from tests.support.simulated import running

REQUESTS, TOKENS = 24, 60
READ_TOO_LATE_NS = 500_000_000
"""A server that sends a token every 10 ms needs longer than this for the tokens after the fifth one."""


@pytest.mark.parametrize("moment", ["after 40ms", "after 10 tokens"])
@pytest.mark.parametrize("arrivals", ["constant:100", "closed:4"])
def test_a_share_is_abandoned_and_the_rest_is_measured(tmp_path: Path, moment: str, arrivals: str) -> None:
    """The seed chooses the requests. The server sees the disconnects, and stops working on these requests."""
    cancel = parse(f"30% {moment}")
    chosen = {number for number in range(REQUESTS) if cancel.chooses(3, number)}
    with running(SimulatedConfig(server="vllm", ttft_s=0.005, itl_s=0.01)) as simulated:
        code, out, _ = burst(
            tmp_path, "--url", simulated.url, "--arrivals", arrivals, "-n", str(REQUESTS),
            "--output-tokens", str(TOKENS), "--seed", "3", "--cancel", str(cancel), command="run",
        )  # fmt: skip
        tokens_sent = {
            number_of_wire_id(line.request_id): len(line.sent_ns) for line in simulated.log if line.request_id
        }
    assert code in (0, 5), out
    records = runfile.read(tmp_path / "run").records
    abandoned = {record.id for record in records if record.state == "abandoned"}
    assert abandoned == chosen
    assert {record.state for record in records} == {"complete", "abandoned"}
    for record in records:
        if record.id in abandoned:
            assert record.error_kind == "abandoned"
            assert record.sent_ns is not None
            assert record.end_ns is not None
            assert tokens_sent[record.id] < TOKENS
            if cancel.after_ns:
                assert record.end_ns - record.sent_ns >= cancel.after_ns
            else:
                assert cancel.after_tokens <= sum(record.chunk_tokens) < TOKENS
    summary = summary_of(tmp_path)
    assert summary["requests"]["abandoned"] == len(chosen)
    assert summary["requests"]["errors"] == {}
    assert summary["latency"]["ttft_s"]["n"] == REQUESTS - len(chosen)
    assert summary["abandoned"]["running_later"] == 0
    assert f"All {REQUESTS - len(chosen)} requests complete" in out.replace("\n", " ")
    assert f"{len(chosen)} requests abandoned on purpose ({cancel})" in out.replace("\n", " ")


def test_a_session_ends_when_its_client_gives_up(tmp_path: Path) -> None:
    """The turns that are not sent any more are abandoned too, and no turn is dropped or failed.

    On a busy machine, a response may be read so late that it is complete by then. Its client then does not give up.
    """
    with running(SimulatedConfig(server="vllm", ttft_s=0.005, itl_s=0.01)) as simulated:
        code, out, _ = burst(
            tmp_path, "--url", simulated.url, "--workload", "multi-turn:turns=3", "--arrivals", "closed:3", "-n", "6",
            "--input-tokens", "16", "--output-tokens", str(TOKENS), "--cancel", "30% after 5 tokens", command="run",
        )  # fmt: skip
    assert code in (0, 5), out
    records = {record.id: record for record in runfile.read(tmp_path / "run").records}
    cancel = parse("30% after 5 tokens")
    for session in range(0, 18, 3):
        turns = [records[session + number] for number in range(3)]
        gave_up = next(
            (turn.turn for turn in turns if cancel.chooses(0, turn.id) and turn.late_ns_max < READ_TOO_LATE_NS), 3
        )
        assert [turn.state for turn in turns] == ["complete"] * gave_up + ["abandoned"] * (3 - gave_up)
        assert all(turn.sent_ns is None for turn in turns[gave_up + 1 :])
