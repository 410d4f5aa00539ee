"""`loadgen run --workload multi-turn:...` against simulated servers: what is sent holds what was answered."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn
from tests.support.command import FAST, events_sent, start, summary_of, wait_for
from tests.support.command import burst as command
from tests.support.simulated import running
from tests.support.stub_server import VLLM, answering

run = partial(command, command="run")
ASKING = (("human", "ask"), ("gpt", "recorded"))


@pytest.mark.parametrize(("server", "endpoint"), [("vllm", "completions"), ("tgi", "chat"), ("lightllm", "generate")])
def test_sessions_run_on_every_server(server: Any, endpoint: str, tmp_path: Path) -> None:
    """Two workers, three sessions of three turns: all complete, each on one worker, each turn due after its answer and
    longer than the one before by the server's own count, and a first turn of the length asked."""
    with running(SimulatedConfig(server=server, **FAST)) as simulated:
        load = ["--workload", "multi-turn:turns=3,think=10ms", "--arrivals", "constant:50", "--n", "3"]
        asked = [*load, "--input-tokens", "40", "--output-tokens", "6", "--workers", "2", "--endpoint", endpoint]
        _, _, err = run(tmp_path, "--server", server, "--url", simulated.url, *asked)
    records = sorted(runfile.read(tmp_path / "run").records, key=lambda record: record.id)
    assert [(record.session, record.turn) for record in records] == [(3 * s, t) for s in range(3) for t in range(3)], (
        err
    )
    assert {record.state for record in records} == {"complete"}
    assert len({(record.session, record.worker) for record in records}) == 3
    for before, record in itertools.pairwise(records):
        if record.turn:
            assert record.due_ns >= (before.end_ns or 0) + 10_000_000
            assert (record.sent_ns or 0) >= record.due_ns
            if record.prompt_tokens is not None and before.prompt_tokens is not None:
                assert record.prompt_tokens >= before.prompt_tokens + 40
    assert {record.prompt_tokens for record in records if not record.turn} <= {40, None}
    summary = summary_of(tmp_path)
    assert summary["tokens"]["prompt_mismatches"] == 0
    assert summary["delivery"]["asked"] == 3


def _answer(body: Any) -> bytes:
    """A chat answer that nobody could guess from the question: reasoning, which is not part of it, and two lines."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "Grüße\n"}]
    events: list[Any] = [{"choices": [{"delta": delta}]} for delta in [*deltas, {"content": f"{turn}"}]]
    if body["messages"][-1]["content"] == "ask 3":
        events = [{"error": {"message": "boom"}}]
    else:
        events.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
        events.append({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}})
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def test_the_history_sent_is_the_answers_that_came(tmp_path: Path) -> None:
    """Turns of a file's dialogue quote the server's own answers, word for word, and not the recorded ones; the turn
    that fails ends the session, and the one after it has a Record that says so."""
    said = [{"from": who, "value": f"{word} {turn}"} for turn in range(5) for who, word in ASKING]
    (tmp_path / "dialogues.json").write_text(json.dumps([{"conversations": said}]))
    routes = VLLM | {
        "POST /tokenize": lambda _: {"count": 2, "max_model_len": 2048, "tokens": [1, 2], "token_strs": None},
        "POST /v1/chat/completions": _answer,
    }
    with answering(routes) as stub:
        load = ["--workload", "multi-turn:dialogues.json", "--arrivals", "closed:1", "--n", "1", "--output-tokens", "4"]
        _, _, err = run(tmp_path, "--server", "vllm", "--url", stub.url, "--endpoint", "chat", *load)
    _, *sent = [body["messages"] for body in stub.bodies if body and body.get("stream")]
    assert len(sent) == 4, err
    expected: list[dict[str, str]] = []
    for turn, messages in enumerate(sent):
        expected.append({"role": "user", "content": f"ask {turn}"})
        assert messages == expected
        expected.append({"role": "assistant", "content": f"Grüße\n{turn}"})
    records = sorted(runfile.read(tmp_path / "run").records, key=lambda record: record.id)
    assert [record.error_kind for record in records] == ["", "", "", "in_band_error", "session_ended"]
    summary = summary_of(tmp_path)
    assert summary["requests"]["dropped"] == 1
    assert summary["tokens"]["prompt_unknown"] == 2


def test_an_interrupt_accounts_for_the_turns_that_were_not_sent(tmp_path: Path) -> None:
    """Every turn of every session that had started has a Record; those not sent were cancelled."""
    with spawn(SimulatedConfig(server="vllm", ttft_s=0.01, itl_s=0.05)) as url:
        load = ["--workload", "multi-turn:turns=4", "--arrivals", "burst", "--n", "5", "--output-tokens", "20"]
        process = start(tmp_path, "--server", "vllm", "--url", url, *load, "--workers", "2", command="run")
        wait_for(lambda: events_sent(url) >= 20, process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    run_read = runfile.read(tmp_path / "run")
    assert sorted(record.id for record in run_read.records) == list(range(20))
    assert Counter(record.error_kind for record in run_read.records)["cancelled"] == 20
    assert all(record.session == record.id - record.turn for record in run_read.records)


def test_a_lost_worker_leaves_a_record_of_every_turn(tmp_path: Path) -> None:
    """A worker that is killed takes its answers along, and not the names of its sessions' turns."""
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.01, itl_s=0.05)) as url:
        load = ["--workload", "multi-turn:turns=3", "--arrivals", "burst", "--n", "4", "--output-tokens", "20"]
        process = start(tmp_path, "--server", "tgi", "--url", url, *load, command="run")
        wait_for(lambda: events_sent(url) >= 8, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        process.communicate(timeout=60)
    records = sorted(runfile.read(tmp_path / "run").records, key=lambda record: record.id)
    assert [(record.session, record.turn) for record in records] == [(3 * s, t) for s in range(4) for t in range(3)]
    assert {record.error_kind for record in records} == {"worker_lost"}
