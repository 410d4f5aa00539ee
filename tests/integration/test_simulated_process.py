"""The simulated server in a process of its own: as a child of a test or a benchmark, and as a command."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from loadgen.cli import main
from loadgen.servers.simulated import StartError
from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
from loadgen.servers.simulated.process import spawn
from tests.support.simulated import running

ROOT = Path(__file__).parents[2]


def test_a_child_has_the_whole_config(tmp_path: Path) -> None:
    """Every field reaches the process: its answers, faults, key and log are those of the config."""
    log = tmp_path / "sim.jsonl"
    rules = (parse_rule("429:1"),)
    config = SimulatedConfig(
        server="vllm", model="m", api_key="sesame", faults=rules, log=log, speed=7, ttft_s=0.004, itl_s=0.0005
    )
    headers = {"Authorization": "Bearer sesame", "X-Request-Id": "5"}
    with spawn(config) as url, httpx.Client(base_url=url) as client:
        assert client.post("/v1/completions", json={"prompt": [5]}).status_code == 401
        statuses = [
            client.post("/v1/completions", json={"prompt": [5], "max_tokens": 3}, headers=headers).status_code
            for _ in range(2)
        ]
        status = client.get("/simulated/status").json()
    assert statuses == [200, 429]
    assert (status["speed"], status["model"], status["server"]) == (7, "m", "vllm")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line.get("fault") for line in lines] == ["", "429", None]
    assert lines[0]["output_tokens"] == 3
    assert lines[2]["summary"]["requests"] == 2


def test_a_child_that_cannot_start_says_why() -> None:
    """The error holds the child's own words."""
    with running(SimulatedConfig(server="tgi")) as first:
        taken = SimulatedConfig(server="tgi", port=urlsplit(first.url).port or 0)
        with pytest.raises(StartError, match="in use"), spawn(taken):
            pass


def test_a_child_dies_with_its_parent() -> None:
    """When the parent is killed, nobody tells the child; it notices that its standard input has ended."""
    script = (
        "import os, signal\n"
        "from loadgen.servers.simulated.config import SimulatedConfig\n"
        "from loadgen.servers.simulated.process import spawn\n"
        "with spawn(SimulatedConfig(server='tgi')) as url:\n"
        "    print(url, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    address = urlsplit(parent.stdout.strip())
    end_s = time.monotonic() + 10
    while _listens(address.hostname or "", address.port or 0):
        assert time.monotonic() < end_s, "the child outlived its parent"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_cleanly_with_a_stream_open(number: signal.Signals) -> None:
    """It says how late its tokens left, and exits 0, though a client is in the middle of an answer."""
    command = [sys.executable, "-m", "loadgen", "mock-server", "--server", "tgi", "--ttft", "1ms", "--itl", "1ms"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().removeprefix("ready ").strip()
        long = {"inputs": "a", "parameters": {"max_new_tokens": 4000}}
        with httpx.stream("POST", f"{url}/generate_stream", json=long) as response:
            pieces = response.iter_raw()
            next(pieces)
            server.send_signal(number)
            assert server.wait(10) == 0
            with pytest.raises(httpx.RemoteProtocolError):
                list(pieces)  # the answer of four seconds was not waited for
        assert "1 request," in server.stdout.read()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server", "nobody"], "server must be one of vllm, tgi, lightllm"),
        (["--server", "tgi", "--fault", "explode"], "unknown fault 'explode'"),
        (["--server", "tgi", "--ttft", "soon"], "not a duration"),
        (["--server", "vllm", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is empty or not set"),
    ],
)
def test_wrong_options_are_explained(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, a message that says what to write, and no traceback."""
    monkeypatch.setattr(sys, "argv", ["loadgen", "mock-server", *options])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def _listens(host: str, port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex((host, port)) == 0
