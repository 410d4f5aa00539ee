"""Servers that state the times of each request, measured with --server-timing."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen import Plan, run
from loadgen.analysis.run import runfile
from loadgen.analysis.summary import Summary
from loadgen.servers.server_timing import INFERENCE, PREFILL, QUEUE
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.stream_sender import LogLine
from tests.support.simulated import running

TTFT_S, ITL_S, REQUESTS, TOKENS = 0.1, 0.01, 8, 6
PARTS = ["queue", "prefill", "network", "remainder"]


def measured(
    folder: Path,
    config: SimulatedConfig,
    endpoint: str | None = None,
    *,
    timing: bool = True,
    log: list[LogLine] | None = None,
) -> Summary:
    """Return the summary of a burst of REQUESTS requests to a simulated server. Its log is appended to `log`."""
    with running(config) as server:
        plan = Plan(
            url=server.url,
            endpoint=endpoint,
            n=REQUESTS,
            input_tokens="16",
            output_tokens=str(TOKENS),
            server_timing=timing,
        )
        summary = run(plan, out=folder / "run").summary
    if log is not None:
        log += server.log
    return summary


@pytest.mark.parametrize(
    ("server", "endpoint", "source"),
    [("vllm", "completions", "metrics"), ("vllm", "chat", "metrics"), ("sglang", "generate", "meta_info")],
)
def test_the_parts_are_those_of_the_servers_log(tmp_path: Path, server: str, endpoint: str, source: str) -> None:
    """Prefill is the time from the reception of a request to its first token, as the server logs it."""
    more = {"per_request_metrics": True} if server == "vllm" else {}
    config = SimulatedConfig(server=server, ttft_s=TTFT_S, itl_s=ITL_S, **more)
    log: list[LogLine] = []
    summary = measured(tmp_path, config, endpoint, log=log)
    timing = summary.server_timing
    assert timing is not None
    assert (timing.requests, timing.longer, timing.sources) == (REQUESTS, 0, [source])
    assert [part.name for part in timing.parts] == PARTS
    assert timing.unknown == []
    lines = {int(line.request_id.rpartition("-")[2]): line for line in log if line.request_id}
    for record in runfile.read(tmp_path / "run").records:
        line = lines[record.id]
        stated_us = record.marks[QUEUE] + record.marks[PREFILL]
        assert record.marks[QUEUE] == 0
        assert stated_us <= (record.chunk_ns[0] - (record.sent_ns or 0)) / 1e3
        if server == "vllm":
            logged_us = (line.sent_ns[0] - line.received_ns) / 1e3
            assert stated_us == pytest.approx(logged_us, abs=1)


def test_a_busy_engine_states_its_queue(tmp_path: Path) -> None:
    """With a batching engine that runs few requests at once, the others state a time in the queue."""
    config = SimulatedConfig(server="vllm", clock="batching", kv_tokens=64, per_request_metrics=True, speed=20)
    timing = measured(tmp_path, config).server_timing
    assert timing is not None
    queue = timing.part("queue")
    assert queue is not None
    assert queue.p99_s is not None
    assert queue.p99_s > 0
    assert timing.longer == 0


def test_a_server_that_states_nothing_is_named(tmp_path: Path) -> None:
    """vLLM without its option states no times. The figures are those of a run without --server-timing."""
    timing = measured(tmp_path, SimulatedConfig(server="vllm", ttft_s=TTFT_S, itl_s=ITL_S)).server_timing
    assert timing is not None
    assert (timing.requests, timing.parts, timing.complete) == (0, [], REQUESTS)


def test_nothing_is_read_without_the_option(tmp_path: Path) -> None:
    """The server states times, and no Record contains them."""
    config = SimulatedConfig(server="vllm", ttft_s=TTFT_S, itl_s=ITL_S, per_request_metrics=True)
    assert measured(tmp_path, config, timing=False).server_timing is None
    assert not any(QUEUE in record.marks for record in runfile.read(tmp_path / "run").records)


def test_embeddings_are_split_by_their_inference(tmp_path: Path) -> None:
    """TEI states queue and inference in headers. A response without tokens has its E2E latency split."""
    timing = measured(tmp_path, SimulatedConfig(server="tei", ttft_s=TTFT_S)).server_timing
    assert timing is not None
    assert (timing.latency, timing.requests) == ("e2e", REQUESTS)
    assert [part.name for part in timing.parts] == ["queue", "inference", "network", "remainder"]
    assert all(INFERENCE in record.marks for record in runfile.read(tmp_path / "run").records)
