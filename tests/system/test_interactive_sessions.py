"""Users of `loadgen ui` that run sessions: graphs from a file, and chats."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
from loadgen.servers.simulated.process import spawn
from loadgen.servers.simulated.stream_sender import LogLine
from loadgen.workloads.request import number_of_wire_id
from tests.support.command import FAST
from tests.support.ui import Ui, headless, page

OK = (0, 5)  # 5: this machine was too busy, which is not what is tested here
MS = 1_000_000
NODES: list[dict[str, Any]] = [
    {"id": "plan", "input_tokens": 60, "output_tokens": 4},
    *(
        {"id": name, "input_tokens": 30, "output_tokens": tokens, "after": ["plan"], "role": "sub-agent"}
        | {"history": "fresh"}
        for name, tokens in (("a", 40), ("b", 30))
    ),
    {"id": "answer", "input_tokens": 20, "output_tokens": 5, "after": [{"node": "a", "delay_s": 0.05}, "b"]}
    | {"history": "inherited", "continues": "a"},
]


def sessions(folder: Path, count: int = 3) -> str:
    path = folder / "sessions.jsonl"
    path.write_text("".join(json.dumps({"session": f"{n}", "nodes": NODES}) + "\n" for n in range(count)))
    return f"sessions:{path}"


def test_users_run_the_sessions_of_a_file(tmp_path: Path) -> None:
    """Edges and delays are those of the file, two sub-agents run at once, and the file starts again after its end."""
    log = tmp_path / "sim.jsonl"
    with spawn(SimulatedConfig(server="vllm", ttft_s=0.02, itl_s=0.002, log=log)) as url:
        load = ("--workload", sessions(tmp_path, 1), "--users", "2", "--run-time", "6s", "--no-report")
        code, _, err = headless(tmp_path, "--server", "vllm", "--url", url, *load, "--session-header", "dynamo")
    assert code in OK, err
    records = {record.id: record for record in runfile.read(tmp_path / "run").records}
    assert {record.state for record in records.values()} == {"complete"}
    assert len(records) >= 8  # two users, and one session in the file
    assert set(records) == set(range(len(records)))
    assert len(records) % 4 == 0
    lines = {}
    for text in log.read_bytes().splitlines():
        line = msgspec.json.decode(text, type=LogLine) if b"request_id" in text else None
        if line is not None and line.session:
            lines[number_of_wire_id(line.request_id)] = line
    for first in range(0, len(records), 4):
        plan, one, other, answer = (records[first + node] for node in range(4))
        assert [record.session for record in (plan, one, other, answer)] == [first] * 4
        assert [record.role for record in (plan, one, other, answer)] == ["root", "sub-agent", "sub-agent", "root"]
        assert one.due_ns == other.due_ns == plan.end_ns
        assert answer.due_ns == max((one.end_ns or 0) + 50 * MS, other.end_ns or 0)
        assert (answer.prompt_tokens or 0) > 30 + 40  # the prompt and the response of `a` come first
        assert lines[first + 2].received_ns < lines[first + 1].sent_ns[-1]  # both sub-agents were in flight
        values = [lines[first + node].session.rpartition("-")[2] for node in range(4)]
        assert values == [f"s{first}", f"a{first + 1}", f"a{first + 2}", f"s{first}"]


@pytest.mark.parametrize("workload", ["graph", "multi-turn:turns=3"])
def test_a_failed_request_ends_its_session(workload: str, tmp_path: Path) -> None:
    """The requests that would have followed it are recorded as dropped, and the user runs the next session."""
    rule = parse_rule("reset@2=0.2")
    config = SimulatedConfig(server="vllm", faults=(rule,), **FAST)
    with spawn(config) as url:
        source = sessions(tmp_path) if workload == "graph" else workload
        load = ("--workload", source, "--users", "2", "--run-time", "6s", "--no-report", "--output-tokens", "4")
        headless(tmp_path, "--server", "vllm", "--url", url, *load)
    run = runfile.read(tmp_path / "run")
    states = {(record.state, record.error_kind) for record in run.records}
    assert ("dropped", "session_ended") in states
    assert ("complete", "") in states
    assert run.footer is not None
    assert run.footer.sent == sum(record.sent_ns is not None for record in run.records)


def test_users_run_sessions_of_whole_requests(tmp_path: Path) -> None:
    """Bodies of two endpoints in one session follow each other, and are sent as they are."""
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
        {"prompt": "Once upon a time", "max_tokens": 5},
    ]
    path = tmp_path / "bodies.jsonl"
    path.write_text("".join(json.dumps({"session": "a", "body": body}) + "\n" for body in bodies))
    with spawn(SimulatedConfig(server="vllm", **FAST)) as url:
        load = ("--workload", f"requests:{path},sessions=yes", "--users", "1", "--run-time", "5s", "--no-report")
        code, _, err = headless(tmp_path, "--server", "vllm", "--url", url, *load)
    assert code in OK, err
    records = sorted(runfile.read(tmp_path / "run").records, key=lambda record: record.id)
    assert len(records) >= 2
    assert [record.output_tokens for record in records] == [4, 5] * (len(records) // 2)
    for first, second in zip(records[::2], records[1::2], strict=True):
        assert (first.session, second.session, second.turn) == (first.id, first.id, 1)
        assert (second.sent_ns or 0) >= (first.end_ns or 0)


def complete_requests(ui: Ui) -> int:
    run = ui.live()["run"] or {"requests": {}}
    return int(run["requests"].get("complete", 0))


def test_stop_on_the_page_cuts_sessions_off(tmp_path: Path) -> None:
    """Requests of the session that were not sent are recorded as cancelled, so the session is not complete."""
    nodes = [NODES[0], NODES[1], NODES[3] | {"after": [{"node": "a", "delay_s": 60}]}]
    path = tmp_path / "slow.jsonl"
    path.write_text(json.dumps({"session": "1", "nodes": nodes}) + "\n")
    with (
        spawn(SimulatedConfig(server="vllm", **FAST)) as url,
        page(tmp_path, "--server", "vllm", "--url", url, "--workload", f"sessions:{path}") as ui,
    ):
        with urlopen(f"{ui.url}/swarm", data=b"user_count=1&spawn_rate=1", timeout=30) as reply:
            assert json.load(reply)["success"]
        deadline = time.monotonic() + 60
        while complete_requests(ui) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        with urlopen(f"{ui.url}/stop", data=b"", timeout=30) as reply:
            assert json.load(reply)["success"]
    records = sorted(runfile.read(tmp_path / "run").records, key=lambda record: record.id)
    assert [(record.state, record.error_kind) for record in records] == [
        ("complete", ""),
        ("complete", ""),
        ("failed", "cancelled"),
    ]
    assert records[2].sent_ns is None
