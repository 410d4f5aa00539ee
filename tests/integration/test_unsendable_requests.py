"""Requests that cannot be encoded: refused before any byte is sent, and otherwise failed alone."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst
from tests.support.simulated import running

CUT = "a cut emoji \ud83d here"
COUNT = 40
BAD = 25


def dataset(folder: Path, kind: str, bad: Any) -> Path:
    """Write a dataset of COUNT prompts, in which number BAD is `bad`."""
    prompts = [bad if number == BAD else f"{number}: name a river" for number in range(COUNT)]
    file = folder / "data"
    if kind == "jsonl":
        file.write_text("".join(json.dumps({"prompt": prompt, "output_tokens": 4}) + "\n" for prompt in prompts))
    elif kind == "alpaca":
        file.write_text(json.dumps([{"instruction": prompt, "output": "Rhine"} for prompt in prompts]))
    else:
        turns = [[("human", prompt), ("gpt", "Rhine"), ("human", "why?"), ("gpt", "so")] for prompt in prompts]
        said = [{"conversations": [{"from": who, "value": text} for who, text in each]} for each in turns]
        file.write_text(json.dumps(said))
    return file


@pytest.mark.parametrize("kind", ["jsonl", "alpaca", "sharegpt", "multi-turn"])
def test_a_prompt_that_cannot_be_sent_is_refused_before_a_byte_is_sent(
    tmp_path: Path, listener: socket.socket, kind: str
) -> None:
    """Exit 2 with file, place and field; no connection was made to the server, no run file is left."""
    file = dataset(tmp_path, kind, CUT)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    words = ("--server", "vllm", "--url", url, "--arrivals", "closed:4", "--n", str(COUNT))
    code, _, err = burst(tmp_path, *words, "--workload", f"{kind}:{file}", command="run")
    assert code == 2
    assert f"{file}, {'line' if kind == 'jsonl' else 'element'} {BAD + 1}: " in " ".join(err.split())
    assert "half of a surrogate pair, \\ud83d, at character 13" in " ".join(err.split())
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert not (tmp_path / "run/run.jsonl").exists()


@pytest.mark.parametrize(
    "body", ['{"temperature": NaN}', '{"a": [1e999]}', '{"stop": "\\ud83d"}', '{"seed": 1' + "0" * 25 + "}"]
)
@pytest.mark.parametrize("way", ["option", "file", "line"])
def test_a_body_that_cannot_be_sent_is_refused_before_a_byte_is_sent(
    tmp_path: Path, listener: socket.socket, body: str, way: str
) -> None:
    """On the command line, in a file of fields and in a line of a dataset alike."""
    (tmp_path / "fields.json").write_text(body)
    (tmp_path / "data").write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", "body": {body}}}\n')
    options = {
        "option": ("--extra-body", body),
        "file": ("--extra-body", "@fields.json"),
        "line": ("--workload", "jsonl:data"),
    }
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    code, _, err = burst(tmp_path, "--server", "vllm", "--url", url, "--n", "2", *options[way], command="run")
    assert code == 2
    assert ("data, line 2: body." if way == "line" else "--extra-body") in err
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("arrivals", ["closed:4", "burst", "constant:200", "closed:4,think=1ms"])
def test_a_request_that_cannot_be_encoded_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrivals: str
) -> None:
    """Even without the check of the file, one request has failed as `not_encoded`, and all others are complete."""
    monkeypatch.setattr("loadgen.workloads.datasets.check_text", lambda *_: None)
    monkeypatch.setattr(
        "loadgen.workloads.token_counter.approximate", lambda texts: [len(text) // 4 + 1 for text in texts]
    )
    file = dataset(tmp_path, "jsonl", CUT)
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        words = ("--server", "openai", "--endpoint", "chat", "--url", server.url, "--arrivals", arrivals)
        code, out, err = burst(
            *(tmp_path, *words, "--n", str(COUNT), "--workload", f"jsonl:{file}", "--output-tokens", "4"),
            *("--lengths", "approximate", "--workers", "2"),
            command="run",
        )
    assert code == 1, out + err
    records = runfile.read(tmp_path / "run").records
    assert Counter(record.error_kind for record in records) == {"": COUNT - 1, "not_encoded": 1}
    (failed,) = [record for record in records if record.error_kind]
    assert (failed.id, failed.state, failed.sent_ns) == (BAD, "failed", None)
    assert "could not be encoded: UnicodeEncodeError" in failed.error_detail
    assert "not_encoded" in out


def test_a_turn_that_cannot_be_encoded_ends_its_session_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session's later turn is not sent; every other session has both of its turns."""
    monkeypatch.setattr("loadgen.workloads.datasets.check_text", lambda *_: None)
    monkeypatch.setattr(
        "loadgen.workloads.token_counter.approximate", lambda texts: [len(text) // 4 + 1 for text in texts]
    )
    file = dataset(tmp_path, "multi-turn", CUT)
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        words = ("--server", "openai", "--endpoint", "chat", "--url", server.url, "--arrivals", "closed:4")
        code, out, err = burst(
            *(tmp_path, *words, "--n", str(COUNT), "--workload", f"multi-turn:{file}", "--output-tokens", "4"),
            *("--lengths", "approximate"),
            command="run",
        )
    assert code == 1, out + err
    kinds = Counter(record.error_kind for record in runfile.read(tmp_path / "run").records)
    assert kinds == {"": 2 * COUNT - 2, "not_encoded": 1, "session_ended": 1}
