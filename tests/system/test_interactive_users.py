"""Locustfiles of one's own: their ends, endpoints that mislead, and plain Locust."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, ROOT
from tests.support.simulated import running
from tests.support.stub_server import LIGHTLLM_1_1, answering
from tests.support.tiny_tokenizers import save
from tests.support.ui import environment, headless

OK = (0, 5)  # 5: this machine was too busy, which is not what is tested here
SMALL = ("--input-tokens", "16", "--output-tokens", "8", "--run-time", "3s", "--no-report")


WAKES_AS_IT_IS_STOPPED = """
from gevent.event import Event
from locust.user.task import LOCUST_STATE_RUNNING, LOCUST_STATE_WAITING
from loadgen.interactive.user import LoadgenUser, task

class Steady(LoadgenUser):
    pass

class Waking(LoadgenUser):
    def on_start(self):
        super().on_start()
        self.end_of_wait = Event()

    @task
    def wait_and_ask(self):
        self._state = LOCUST_STATE_WAITING
        self.end_of_wait.wait()
        self._state = LOCUST_STATE_RUNNING
        self.ask("Anything more?", output_tokens=3)

    def stop(self, force=False):
        self.end_of_wait.set()
        return super().stop(force)
"""


def test_answers_are_finished_when_the_time_is_up(tmp_path: Path) -> None:
    """Without a page, the end of --run-time cuts nothing off; a user whose wait ends just then asks nothing more, which
    is no failure."""
    (tmp_path / "users.py").write_text(WAKES_AS_IT_IS_STOPPED)
    with running(SimulatedConfig(server="vllm", ttft_s=1.2, itl_s=0.002)) as simulated:
        users = ("--users", "6", "--locustfile", str(tmp_path / "users.py"))
        code, _, err = headless(tmp_path, "--server", "vllm", "--url", simulated.url, *SMALL, *users)
    assert code in OK, err
    run = runfile.read(tmp_path / "run")
    assert sorted(record.id for record in run.records) == list(range(len(run.records)))
    assert len(run.records) >= 3
    assert {(record.state, record.output_tokens_asked) for record in run.records} == {("complete", 8)}


ASKS_FOR_CHAT = """
from loadgen.interactive.user import LoadgenUser, task

class Own(LoadgenUser):
    @task
    def chat(self):
        self.ask("Hello", endpoint="chat")
"""


def test_an_endpoint_that_misleads_is_refused(tmp_path: Path) -> None:
    """A version whose chat streams mislead, where a user of one's own asks for chat: exit code 2 and why."""
    (tmp_path / "users.py").write_text(ASKS_FOR_CHAT)
    tokenizer = str(save("byte_level", tmp_path))
    tokens = Tokenizer.from_file(tokenizer)

    def count(body: Any) -> Any:
        return {"ntokens": len(tokens.encode(body["text"]).ids)}

    with answering(LIGHTLLM_1_1 | {"POST /tokens": count}) as stub:
        named = ("--server", "lightllm", "--url", stub.url, "--tokenizer", tokenizer, *SMALL[:-3], "--run-time", "5s")
        code, _, err = headless(tmp_path, *named, "--locustfile", str(tmp_path / "users.py"))
        assert (code, "have no end marker" in err, "--force" in err) == (2, True, True), err
        assert "POST /v1/chat/completions" not in stub.heard


def test_the_example_runs_under_locust_itself(tmp_path: Path) -> None:
    """Plain `locust -f`: two endpoints, prompts of its own, Locust's table, and a Run beside it."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "locust",
                "-f",
                str(ROOT / "examples/locustfile.py"),
                "--headless",
                "-u",
                "8",
                "-r",
                "8",
                "-t",
                "2",
                "-s",
                "5",
                "--only-summary",
                "--server",
                "vllm",
                "--url",
                simulated.url,
                "--input-tokens",
                "16",
                "--output-tokens",
                "8",
                "--out",
                str(tmp_path / "run"),
            ],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            cwd=tmp_path,
            env=environment(tmp_path),
            check=False,
        )
    run = runfile.read(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert {record.state for record in run.records} == {"complete"}
    assert len(run.records) > 8
    assert {record.output_tokens_asked for record in run.records} == {32, 8}
    assert "/v1/chat/completions" in done.stderr
