"""Every command line of docs/which-command.md runs as it stands, with a smaller load."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.errors import install_hint
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, ROOT, Forked, in_process
from tests.support.simulated import running

COMMANDS = re.findall(r"`(loadgen .+?)`", (ROOT / "docs/which-command.md").read_text("utf-8"))
SMALL = ["--n", "2", "--output-tokens", "4", "--no-report", "--out", "small"]
SMALLER = {
    "burst": SMALL,
    "run": SMALL,
    "ui": ["--headless", "--users", "2", "--run-time", "1s", "--output-tokens", "4"],
    "matrix": ["--dry-run"],
    "calibrate": ["--quick", "--n", "20", "--output-tokens", "8"],
    "mock-server": ["--port", "0"],
    "sweep": ["--n", "2", "--output-tokens", "4", "--max-runs", "2", "--out", "small"],
    "simulate": ["--n", "50", "--no-report", "--out", "small"],
}
TOKEN = "a token of the tests"
RECORDED = ("burst", "burst-again")
FINE = {0, 5, 6}  # a busy machine may be the limit, and a small load may decide nothing
GOES_ON = ("loadgen mock-server ", "loadgen worker", "--distributed")
NEEDS_TORCH = "loadgen dissect"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A simulated vLLM with room for long contexts."""
    with running(SimulatedConfig(server="vllm", max_model_len=40_000, **FAST)) as server:
        yield server.url


def start(command: str, folder: Path, url: str, *more: str) -> subprocess.Popen[str]:
    """It, in a folder with all the files that the page speaks of."""
    _, name, *words = shlex.split(command)
    smaller = SMALLER.get(name, [])
    if {"transcriptions", "speech"} & {*words}:  # audio has no tokens
        smaller = ["--n", "2", "--no-report", "--out", "small"]
    elif any("traffic" in word for word in words):  # each class has its own number and length of requests
        smaller = ["--duration", "3s", "--no-report", "--out", "small"]
    said = [name, *words, *smaller, *more]
    # Locust starts threads, and an interpreter of its own.
    run, said = (subprocess.Popen[str], [sys.executable, "-m", "loadgen", *said]) if name == "ui" else (Forked, said)
    own = {"LOADGEN_VLLM_URL": url, "LOADGEN_TOKEN": TOKEN, "XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return run(said, cwd=folder, env=os.environ | own, stdout=pipe, stderr=pipe, text=True)


def copy_recorded(name: str, target: Path) -> str:
    """Copy a recorded run, as if its simulated server had been chosen with --simulated and had run at real speed; the
    folder of the copy."""
    shutil.copytree(ROOT / "tests/data/recorded" / name, target)
    file = target / "run.jsonl"
    lines = file.read_text("utf-8").splitlines(keepends=True)
    header = json.loads(lines[0])
    header["server"]["speed"] = header["plan"]["speed"] = 1.0
    header["plan"]["simulated"] = True
    file.write_text("".join([json.dumps(header) + "\n", *lines[1:]]), "utf-8")
    return str(target)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the server that was recorded."""
    folder = tmp_path_factory.mktemp("twin")
    code, _, err = in_process(folder, "twin", "fit", *(copy_recorded(each, folder / each) for each in RECORDED))
    assert code == 0, err
    return folder / "twin.json"


@pytest.fixture
def folder(tmp_path: Path, twin: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run before and after a change that changed nothing, others of that server and its twin, a trace, prompts, plans
    and a model."""
    monkeypatch.setattr("loadgen.studies.capacity.REQUEST_COUNTS", range(100, 501))  # as the other loads, a smaller one
    data = ROOT / "tests/data"
    for name, recorded in {"before": "burst", "after": "burst", "burst": "burst", "closed": "burst-again"}.items():
        copy_recorded(recorded, tmp_path / "runs" / name)
    shutil.copy(twin, tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(data / "traces/mooncake.jsonl", tmp_path)
    (tmp_path / "models/llama-8b").mkdir(parents=True)
    (tmp_path / "models/llama-8b/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    shutil.copy(data / "datasets/prompts.jsonl", tmp_path)
    chat = {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 4}
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    (tmp_path / "tools.json").write_text(json.dumps({"tools": [tool], "tool_choice": "none"}))
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 50)
    call = {"startTime": 0.0, "endTime": 0.1, "call_type": "acompletion", "prompt_tokens": 20, "completion_tokens": 4}
    (tmp_path / "litellm.jsonl").write_text("".join(json.dumps(call | {"id": name}) + "\n" for name in "ab"))
    nodes = [{"id": "1", "input_tokens": 20, "output_tokens": 4}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps({"session": s, "nodes": nodes}) + "\n" for s in "ab"))
    return tmp_path


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if not any(word in line for word in (*GOES_ON, NEEDS_TORCH))]
)
def test_each_command_ends_well(command: str, folder: Path, url: str) -> None:
    """Its exit code is that of a command that was understood and carried out."""
    process = start(command, folder, url)
    out, err = process.communicate(timeout=100)
    assert process.returncode in FINE, out + err


@pytest.mark.parametrize("command", [line for line in COMMANDS if NEEDS_TORCH in line])
def test_what_needs_torch_says_how_to_get_it(command: str, folder: Path, url: str) -> None:
    """Its options are understood; `make test-dissect` carries such commands out."""
    out, err = start(command, folder, url).communicate(timeout=100)
    assert (out, install_hint("dissect") in err) == ("", True), err


def test_the_server_serves(folder: Path, url: str) -> None:
    """Until it is told to stop."""
    (command,) = (line for line in COMMANDS if "loadgen mock-server " in line)
    process = start(command, folder, url)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready http://")
    process.terminate()
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, ""), out


def test_machines_find_each_other(folder: Path, url: str) -> None:
    """The master's line, and on two machines the workers'; only the address is this machine's."""
    master_line, worker_line = (line for line in COMMANDS if "--distributed" in line or "loadgen worker" in line)
    master = start(master_line, folder, url, "--bind", "127.0.0.1:0")
    assert master.stdout is not None
    port = next(found[1] for line in master.stdout if (found := re.search(r"waiting for .*:(\d+)$", line)))
    here = worker_line.replace("10.0.0.5", f"127.0.0.1:{port}")
    workers = [start(here, folder, url) for _ in range(2)]
    out, err = master.communicate(timeout=100)
    ends = [worker.communicate(timeout=100) for worker in workers]
    assert master.returncode in FINE, (out, err, ends)
    assert [worker.returncode for worker in workers] == [0, 0], ends
