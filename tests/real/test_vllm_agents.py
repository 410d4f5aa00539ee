"""Real traffic on a real vLLM: sessions of agents with tools, clients that give up, shared prefixes, and vLLM's log."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loadgen.workloads.session_files import SessionFile
from loadgen.workloads.session_graph import Node
from tests.real.conftest import BURST_TIMEOUT_S, ROOT, Outcome, http_get, running_vllm
from tests.real.test_vllm import counted

if TYPE_CHECKING:
    from tests.real.conftest import Engine

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
CALL = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "bazu"}'}}
QUESTION = [{"role": "system", "content": "fola wemi"}, {"role": "user", "content": "bazu dori keno"}]
RESULT = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
RESULT += [{"role": "tool", "tool_call_id": "call-1", "content": "vitu"}]
TOOLS: dict[str, Any] = {"tools": [TOOL], "body": {"tool_choice": "none"}, "output_tokens": 12}
AGENT = [
    {"id": "plan", "messages": QUESTION, **TOOLS},
    {"id": "result", "after": ["plan"], "history": "fresh", "messages": RESULT, "tool_s": 0.2, **TOOLS},
    {"id": "helper", "after": ["plan"], "history": "fresh", "role": "sub-agent", "messages": QUESTION, **TOOLS},
    {"id": "answer", "after": ["result", "helper"], "messages": [{"role": "user", "content": "gohu"}], **TOOLS},
]
SESSIONS, TURNS = 10, 4
BLOCK_TOKENS, SYSTEM_BLOCKS, TURN_BLOCKS = 16, 16, 10


@pytest.fixture(scope="module")
def logging_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A vLLM that logs its requests."""
    options = ("--enable-log-requests", "--enable-log-outputs", "--log-level", "DEBUG")
    with running_vllm(tmp_path_factory.mktemp("vllm"), *options) as engine:
        yield engine


def run(engine: Engine, folder: Path, *options: object) -> Outcome:
    """Run `loadgen run` against the engine."""
    command = [sys.executable, "-m", "loadgen", "run", "--url", engine.url, "--out", str(folder), "--json"]
    done = subprocess.run(
        [*command, "--no-report", *map(str, options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BURST_TIMEOUT_S,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr, folder)


def written(folder: Path, nodes_of_sessions: list[list[dict[str, Any]]], **fields: Any) -> Path:
    path = folder / "trace.jsonl"
    rows = [{"session": f"{number}", **fields, "nodes": nodes} for number, nodes in enumerate(nodes_of_sessions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_agents_with_tools(logging_vllm: Engine, tmp_path: Path) -> None:
    """vLLM accepts tools, tool calls and results; every edge and delay is that of the file; counters agree."""
    trace = written(tmp_path, [AGENT] * 6)
    load = ("--workload", f"sessions:{trace}", "--endpoint", "chat", "--concurrency", 3)
    measured = counted(logging_vllm, 24, lambda: run(logging_vllm, tmp_path / "run", *load))
    measured.outcome.check_all_complete(24)
    records = measured.outcome.records
    for first in range(0, 24, 4):
        plan, result, helper, answer = records[first : first + 4]
        assert result.due_ns == (plan.end_ns or 0) + 200_000_000
        assert helper.due_ns == plan.end_ns
        assert answer.due_ns == max(result.end_ns or 0, helper.end_ns or 0)
        assert (answer.prompt_tokens or 0) >= (result.prompt_tokens or 0) + 12
    assert [record.output_tokens for record in records] == [12] * 24
    assert measured.gained["vllm:prompt_tokens_total"] == sum(record.prompt_tokens or 0 for record in records)
    assert measured.gained["vllm:generation_tokens_total"] == 12 * 24
    sessions = measured.summary["sessions"]
    assert (sessions["n"], sessions["complete"]) == (6, 6)


def test_clients_that_give_up(logging_vllm: Engine, tmp_path: Path) -> None:
    """The chosen requests are abandoned after their tokens, the others complete, and vLLM stops the abandoned ones."""
    load = ("--n", 30, "--concurrency", 6, "--input-tokens", 64, "--output-tokens", 300)
    outcome = run(logging_vllm, tmp_path / "run", *load, "--cancel", "40% after 10 tokens")
    assert outcome.exit_code in (0, 5), outcome.stderr
    states = Counter(record.state for record in outcome.records)
    assert states["abandoned"] + states["complete"] == 30
    assert 4 <= states["abandoned"] <= 20
    for record in outcome.records:
        if record.state == "abandoned":
            assert 10 <= sum(record.chunk_tokens) < 300  # a chunk may hold several tokens
    deadline = time.monotonic() + 30
    while logging_vllm.counters()["vllm:num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert logging_vllm.counters()["vllm:num_requests_running"] == 0
    assert outcome.summary["abandoned"]["requests"] == states["abandoned"]


def test_prefix_cache_hits_are_those_of_the_trace(logging_vllm: Engine, tmp_path: Path) -> None:
    """vLLM's counter of hits differs by less than 5 % from what the blocks of the trace predict."""
    ids = iter(range(SYSTEM_BLOCKS, 10**6))
    conversations = []
    for _ in range(SESSIONS):
        own = [next(ids) for _ in range(TURNS * TURN_BLOCKS)]
        nodes: list[dict[str, Any]] = []
        for turn in range(TURNS):
            blocks = [*range(SYSTEM_BLOCKS), *own[: (turn + 1) * TURN_BLOCKS]]
            after = [{"node": f"{turn - 1}", "delay_s": 0.02}] if turn else []
            nodes.append(
                {"id": f"{turn}", "after": after, "history": "fresh", "output_tokens": 4, "blocks": blocks}
                | {"input_tokens": len(blocks) * BLOCK_TOKENS}
            )
        conversations.append(nodes)
    trace = written(tmp_path, conversations, block_tokens=BLOCK_TOKENS)
    load = ("--workload", f"sessions:{trace}", "--endpoint", "completions", "--concurrency", 2)
    requests = SESSIONS * TURNS
    measured = counted(logging_vllm, requests, lambda: run(logging_vllm, tmp_path / "run", *load))
    measured.outcome.check_all_complete(requests)
    nodes_in_order = [node for session in SessionFile(trace).sessions(0) for node in session.nodes]
    by_sending = sorted(measured.outcome.records, key=lambda record: record.sent_ns or 0)
    predicted = predicted_hits([nodes_in_order[record.id] for record in by_sending], block_size(logging_vllm))
    assert predicted > 0.3 * measured.gained["vllm:prompt_tokens_total"]
    assert measured.gained["vllm:prefix_cache_hits_total"] == pytest.approx(predicted, rel=0.05)


def block_size(engine: Engine) -> int:
    """Return the number of tokens per block of vLLM's cache, which is 128 on a CPU."""
    found = re.search(r'vllm:cache_config_info\{(?:[^}]*,)?block_size="(\d+)"', http_get(f"{engine.url}/metrics"))
    assert found
    return int(found[1])


def predicted_hits(nodes: list[Node], size: int) -> int:
    """Return the prompt tokens that a cache of full blocks of `size` tokens holds when each request is sent."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    hits = 0
    for node in nodes:
        tokens = [(span, offset) for span, length in node.spans for offset in range(length)]
        blocks = [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]
        usable = blocks[: (len(tokens) - 1) // size]  # at least one token is computed
        known = next((index for index, block in enumerate(usable) if block not in seen), len(usable))
        hits += known * size
        seen.update(blocks)
    return hits


def test_vllms_own_log_becomes_a_trace(logging_vllm: Engine, tmp_path: Path) -> None:
    """The log has every prompt with its tokens, and the trace has their lengths and no text."""
    load = ("--n", 5, "--endpoint", "chat", "--input-tokens", 40, "--output-tokens", 9, "--concurrency", 1)
    outcome = run(logging_vllm, tmp_path / "run", *load, "--lengths", "approximate")
    outcome.check_all_complete(5)
    time.sleep(0.5)  # vLLM writes its log in a process of its own
    trace = tmp_path / "trace.jsonl"
    command = [sys.executable, "-m", "loadgen", "anonymise", str(logging_vllm.log), "--json", "--out", str(trace)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["formats"] == ["vLLM log"]
    assert set(report["input_lengths"]) == {"token ids in the log"}
    nodes = [node for session in SessionFile(trace).sessions(0) for node in session.nodes]
    assert [node.input_tokens for node in nodes[-5:]] == [record.prompt_tokens for record in outcome.records]
    assert all(0 < (node.output_tokens or 0) <= 9 for node in nodes[-5:])  # vLLM logs no tokens without text
    assert "user" not in trace.read_text()
