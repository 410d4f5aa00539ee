"""Traces of two formats, replayed: the server's own log and the bodies it received show what the file says."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn
from loadgen.servers.simulated.stream_sender import LogLine
from loadgen.workloads.request import number_of_wire_id
from loadgen.workloads.session_files import SessionFile
from tests.support.command import FAST, in_process
from tests.support.command import burst as command
from tests.support.stub_server import VLLM, answering

run = partial(command, command="run")
MS = 1_000_000


def bailian_rows() -> list[dict[str, Any]]:
    """Return twelve chats of three requests: a root and two that follow it, with blocks that chats share."""
    rows = []
    for chat in range(12):
        first = 3 * chat
        for offset, parent, at_s, length in ((0, -1, 0.0, 60), (1, first, 0.12, 90), (2, first, 0.15, 85)):
            blocks = [1, 2, *(100 * chat + block for block in range(-(-length // 16) - 2))]
            rows.append(
                {"chat_id": first + offset, "parent_chat_id": parent, "timestamp": round(0.04 * chat + at_s, 3)}
                | {"input_length": length, "output_length": 4 + offset, "type": "text", "turn": 1 + (offset > 0)}
                | {"hash_ids": blocks}
            )
    return sorted(rows, key=lambda row: row["timestamp"])


def weka_rows() -> list[dict[str, Any]]:
    """Return ten conversations in which a sub-agent with two requests runs between two requests of the agent."""

    def call(t: float, length: int, out: int, first: int, think: float) -> dict[str, Any]:
        ids = list(range(first, first + length // 64))
        return {"t": t, "type": "s", "model": "m", "in": length, "out": out, "hash_ids": ids, "think_time": think}

    rows = []
    for number in range(10):
        agent = {"t": 1.0, "type": "subagent", "agent_id": "a", "subagent_type": "Explore", "status": "completed"}
        inner = [call(1.0, 130, 3, 50, 0), call(2.0, 200, 4, 50, 0.06)]
        requests = [call(0, 150 + number, 5, 1, 0) | {"api_time": 0.98}, agent | {"requests": inner, "models": []}]
        requests.append(call(3.0, 300 + number, 6, 1, 0.03))
        rows.append({"id": f"trace_{number}", "block_size": 64, "hash_id_scope": "local", "requests": requests})
    return rows


@pytest.mark.parametrize(("rows", "workers"), [(bailian_rows(), 1), (weka_rows(), 2)], ids=["bailian", "weka"])
def test_every_request_is_as_the_file_says(rows: list[Any], workers: int, tmp_path: Path) -> None:
    """Instants, lengths, edges and delays, for every request, by the log of the server."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sessions = list(SessionFile(trace).sessions(0))
    log = tmp_path / "sim.jsonl"
    with spawn(SimulatedConfig(server="vllm", log=log, **FAST)) as url:
        load = ["--workload", f"sessions:{trace}", "--workers", str(workers), "--endpoint", "completions"]
        _, out, err = run(tmp_path, "--server", "vllm", "--url", url, *load)
    assert f"{len(sessions)} sessions from trace.jsonl, as recorded in trace.jsonl" in " ".join(out.split())
    records = {record.id: record for record in runfile.read(tmp_path / "run").records}
    decoded = [
        msgspec.json.decode(line, type=LogLine) for line in log.read_bytes().splitlines() if b"request_id" in line
    ]
    lines = {number_of_wire_id(line.request_id): line for line in decoded if line.request_id}
    assert len(records) == sum(len(session.nodes) for session in sessions), err
    assert set(records) <= set(lines)
    first_id = 0
    for session in sessions:
        root = records[first_id]
        assert root.due_ns == session.start_ns
        for index, node in enumerate(session.nodes):
            record, line = records[first_id + index], lines[first_id + index]
            assert (record.state, record.session) == ("complete", first_id)
            assert (line.prompt_tokens, line.output_tokens) == (node.input_tokens, node.output_tokens)
            if node.edges:
                events = (
                    (records[first_id + edge.parent].end_ns or 0)
                    if edge.after == "end"
                    else (records[first_id + edge.parent].sent_ns or 0)
                    for edge in node.edges
                )
                due_ns = max(event + edge.delay_ns for event, edge in zip(events, node.edges, strict=True))
                assert record.due_ns == due_ns
            assert (record.sent_ns or 0) >= record.due_ns
            for edge in node.edges:  # by the server's clock: no request arrives before its parent's last byte was sent
                parent = lines[first_id + edge.parent]
                # A start is known to the client before the request arrives, so its arrival says less than an end.
                earliest_ns, slack_ns = (
                    (parent.sent_ns[-1], MS) if edge.after == "end" else (parent.received_ns, 50 * MS)
                )
                assert line.received_ns - earliest_ns >= edge.delay_ns - slack_ns
        first_id += len(session.nodes)


def test_shared_blocks_are_shared_tokens(tmp_path: Path) -> None:
    """Two prompts begin with the same tokens exactly as far as their block ids are equal."""
    rows = bailian_rows()
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with spawn(SimulatedConfig(server="vllm", **FAST)) as url:
        _, _, err = run(tmp_path, "--server", "vllm", "--url", url, "--workload", f"sessions:{trace},speed=10")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["tokens"]["prompt_mismatches"] == 0, err
    sessions = list(SessionFile(trace).sessions(0))
    spans = [node.spans for session in sessions for node in session.nodes]
    routes = VLLM | {"POST /v1/completions": lambda _: answer()}
    (tmp_path / "stub").mkdir()
    with answering(routes) as stub:
        run(tmp_path / "stub", "--server", "vllm", "--url", stub.url, "--workload", f"sessions:{trace},speed=10")
    prompts = [body["prompt"] for body in stub.bodies if body and body.get("stream")]
    by_length: dict[int, list[Any]] = {}
    for prompt in prompts:
        by_length.setdefault(len(prompt if isinstance(prompt, list) else prompt.split()), []).append(prompt)
    assert spans
    for one, other in itertools.pairwise(by_length.get(60, [])):
        first, second = (prompt if isinstance(prompt, list) else prompt.split() for prompt in (one, other))
        common = next((place for place, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), 60)
        assert common == 32


def test_sub_agents_name_themselves_or_their_session(tmp_path: Path) -> None:
    """By the server's log: with `dynamo` and `=own`, a sub-agent has its own value; otherwise its session's."""
    rows = weka_rows()[:4]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for header in ("dynamo", "X-Session-ID", "X-Session-ID=own"):
        folder = tmp_path / header
        folder.mkdir()
        with spawn(SimulatedConfig(server="vllm", log=folder / "sim.jsonl", **FAST)) as url:
            load = ["--workload", f"sessions:{trace},speed=20", "--endpoint", "completions", "--session-header", header]
            code, _, err = run(folder, "--server", "vllm", "--url", url, *load)
        assert code in (0, 5), err
        lines = {}
        for text in (folder / "sim.jsonl").read_bytes().splitlines():
            line = msgspec.json.decode(text, type=LogLine) if b"request_id" in text else None
            if line is not None and line.session:
                lines[number_of_wire_id(line.request_id)] = line
        prefix = lines[0].request_id.rpartition("-")[0]
        for number in range(4):
            first = 4 * number
            session = f"{prefix}-s{first}"
            child = session if header == "X-Session-ID" else f"{session}-a{first + 1}"
            parent = session if header == "dynamo" else ""
            values = [(lines[first + node].session, lines[first + node].parent_session) for node in range(4)]
            assert values == [(session, ""), (child, parent), (child, parent), (session, "")]


def litellm_rows() -> list[dict[str, Any]]:
    """Return the log of eight sessions of two requests with one system prompt. Only the log has their text."""
    system = {"role": "system", "content": "Answer as the librarian of Alexandria would, with one sentence. " * 6}
    rows = []
    for number in range(8):
        first = [system, {"role": "user", "content": f"Who wrote scroll {number}, and on which island was it found?"}]
        second = [*first, {"role": "assistant", "content": "Nobody knows."}, {"role": "user", "content": "Guess!"}]
        start_s = 1_790_000_000 + 0.05 * number
        for turn, messages in enumerate((first, second)):
            rows.append(
                {"id": f"{number}/{turn}", "trace_id": f"session-of-user-{number}", "call_type": "acompletion"}
                | {"startTime": start_s + 0.3 * turn, "endTime": start_s + 0.2 + 0.3 * turn, "model": "gpt"}
                | {"prompt_tokens": 96 + 10 * turn + number, "completion_tokens": 3 + turn, "messages": messages}
            )
    return rows


def test_a_log_is_replayed_without_its_text(tmp_path: Path) -> None:
    """A log of LiteLLM, anonymised and replayed: the server receives its lengths, times and shared prefixes."""
    rows = litellm_rows()
    (tmp_path / "litellm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = in_process(tmp_path, "anonymise", "litellm.jsonl")
    assert code == 0, err
    log = tmp_path / "sim.jsonl"
    with spawn(SimulatedConfig(server="vllm", log=log, **FAST)) as url:
        load = ["--workload", f"sessions:{tmp_path / 'trace.jsonl'}", "--endpoint", "completions"]
        code, _, err = run(tmp_path, "--server", "vllm", "--url", url, *load)
    assert code in (0, 5), err
    records = sorted(runfile.read(tmp_path / "run").records, key=lambda record: record.id)
    lines = [msgspec.json.decode(line, type=LogLine) for line in log.read_bytes().splitlines() if b"request_id" in line]
    received = {number_of_wire_id(line.request_id): line for line in lines if line.request_id}
    lengths = [(received[record.id].prompt_tokens, received[record.id].output_tokens) for record in records]
    assert lengths == [(row["prompt_tokens"], row["completion_tokens"]) for row in rows]
    for number, (first, second) in enumerate(zip(records[::2], records[1::2], strict=True)):
        assert first.due_ns == number * 50 * MS
        assert second.due_ns == (first.end_ns or 0) + 100 * MS
    sessions = list(SessionFile(tmp_path / "trace.jsonl").sessions(0))
    beginnings = [[span for span, _ in session.nodes[0].spans] for session in sessions]
    assert len({tuple(spans[:3]) for spans in beginnings}) == 1
    assert len({tuple(spans) for spans in beginnings}) == 8


def answer() -> bytes:
    """Return a response of one token in vLLM's format."""
    events = [
        {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    ]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def test_a_mistake_in_the_file_ends_the_command(tmp_path: Path) -> None:
    """Exit code 2, with the file, the line and what to do. With a stated seed, no server is contacted before."""
    trace = tmp_path / "trace.jsonl"
    rows = bailian_rows()
    rows[4]["hash_ids"] = [1]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = ["--workload", f"sessions:{trace}", "--seed", "1"]
    code, _, err = run(tmp_path, "--server", "vllm", "--url", "http://127.0.0.1:9", *load)
    assert code == 2
    assert "trace.jsonl, line 5: 1 block ids cannot be a prompt of" in " ".join(err.split())
