"""Users of `loadgen ui` on both newer endpoints, with checked outputs, and with prompts that cannot be encoded."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST
from tests.support.simulated import running
from tests.support.ui import headless

OK = (0, 5)  # 5: this machine was too busy, which is not what is tested here
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["days"],
}
JSON_FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
ASKS_BOTH = """
from loadgen.interactive.user import LoadgenUser, task

class Own(LoadgenUser):
    @task
    def both(self):
        for endpoint in ("responses", "messages"):
            self.ask("Hello", output_tokens=4, endpoint=endpoint)
"""
ASKS_FOR_HALF_A_CHARACTER = """
from loadgen.interactive.user import LoadgenUser, task

class Own(LoadgenUser):
    @task
    def cut(self):
        record = self.ask("a cut emoji \\ud83d here", endpoint="chat")
        assert record.error_kind == "not_encoded"
        self.ask("a whole one", endpoint="chat")
"""


def test_outputs_of_interactive_users_are_checked(tmp_path: Path) -> None:
    """`loadgen ui` compares JSON with its schema as `loadgen burst` does."""
    config = SimulatedConfig(server="vllm", ttft_s=0.02, itl_s=0.001, structured=True)
    with running(config) as simulated:
        where = ("--server", "vllm", "--endpoint", "chat", "--url", simulated.url)
        load = ("--input-tokens", "16", "--output-tokens", "max:64", "--run-time", "2s", "--users", "2", "--no-report")
        code, out, err = headless(tmp_path, *where, *load, "--extra-body", json.dumps(JSON_FORMAT), "--json")
    assert code in (0, 5), err  # 5: this machine is busy
    summary = json.loads(out)
    assert summary["outputs"]["checked"] == summary["outputs"]["valid"] == summary["requests"]["complete"] > 0


def test_interactive_users_ask_both(tmp_path: Path) -> None:
    """`ask` takes either endpoint, and every answer has the requested length."""
    (tmp_path / "users.py").write_text(ASKS_BOTH)
    with running(SimulatedConfig(server="vllm", ttft_s=0.01, itl_s=0.002)) as simulated:
        small = ("--input-tokens", "16", "--output-tokens", "4", "--run-time", "2s", "--no-report", "--users", "2")
        code, _, err = headless(
            tmp_path, "--server", "vllm", "--url", simulated.url, *small, "--locustfile", str(tmp_path / "users.py")
        )
    assert code in OK, err
    records = runfile.read(tmp_path / "run").records
    assert len(records) >= 4
    assert {(record.state, record.output_tokens) for record in records} == {("complete", 4)}


def test_a_user_goes_on_after_a_prompt_that_cannot_be_encoded(tmp_path: Path) -> None:
    """In `loadgen ui` the request is a failed Record, and the user's next request is sent."""
    (tmp_path / "users.py").write_text(ASKS_FOR_HALF_A_CHARACTER)
    words = ("--input-tokens", "16", "--output-tokens", "4", "--run-time", "2s", "--no-report", "--users", "2")
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        _, _, err = headless(
            tmp_path, "--server", "vllm", "--url", server.url, *words, "--locustfile", str(tmp_path / "users.py")
        )
    kinds = Counter(record.error_kind for record in runfile.read(tmp_path / "run").records)
    assert kinds["not_encoded"] > 0, err
    assert kinds[""] > 0, err
    assert "Traceback" not in err
