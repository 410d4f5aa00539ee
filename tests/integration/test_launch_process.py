"""Servers as processes: found by a later command, ended with all they started, and honest about what went wrong."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen.servers.discovery import probe
from loadgen.servers.errors import LaunchError
from loadgen.servers.launch import LaunchMethod, LaunchSpec, launched_server, process
from loadgen.servers.launch.spec import LOCAL, Host
from tests.support import command

ROOT = Path(__file__).parents[2]

VLLM = f"""#!{sys.executable}
# A stand-in for `vllm serve`: the simulated server behind vLLM's own options, with a child as vLLM has one.
import os, subprocess, sys
assert sys.argv[1] == "serve"
said = dict(zip(sys.argv[3::2], sys.argv[4::2]))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
sim = ["-m", "loadgen", "mock-server", "--server", "vllm", "--model", said["--served-model-name"]]
os.execv(sys.executable, [sys.executable, *sim, "--host", said["--host"], "--port", said["--port"]])
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """States and logs go to the test's folder; what a test has left running is ended, by its id."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    for server in ("vllm", "tgi", "lightllm"):
        if left := process.read_background_server(server):
            process.down(left)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment that has vLLM."""
    folder = tmp_path / "environment" / "bin"
    folder.mkdir(parents=True)
    program(folder / "vllm", VLLM)
    (folder / "python").symlink_to(sys.executable)
    return folder / "python"


def program(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def broken(folder: Path, text: str, code: int = 1) -> Path:
    """The interpreter of an environment whose vLLM prints this and ends."""
    folder.mkdir(exist_ok=True)
    program(folder / "vllm", f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    return program(folder / "python", "#!/bin/sh\n")


def wanted(
    server: str = "vllm", how: LaunchMethod = "process", host: Host = LOCAL, model: str = "tiny", **options: Any
) -> LaunchSpec:
    return LaunchSpec(server, host, model, how, options)


def test_a_server_is_up_and_then_down_with_all_it_started(python: Path) -> None:
    """Inside it answers under the name asked, its processes are named; afterwards none of its group is left."""
    with launched_server(wanted(python=python, name="mine"), print) as server:
        assert probe(server.url, "vllm").model == "mine"
        assert len(server.pids) == 2
        assert server.facts["pid"] in server.pids
        assert server.facts["command"][:3] == [str(python.parent / "vllm"), "serve", "tiny"]
        assert server.facts["ready_s"] > 0
        assert "ready" in Path(server.facts["log"]).read_text()
    assert not any(process.start_ticks(pid) for pid in server.pids)
    assert process.read_background_server("vllm") is None


def test_a_server_left_running_is_found_again(python: Path) -> None:
    """Its state is kept: a second one of the same name is refused, and a later command ends the first."""
    left = process.up(wanted(python=python), print)
    again = process.read_background_server("vllm")
    assert again == left
    assert again.alive
    with pytest.raises(LaunchError, match=f"runs already, as process {left.pid}") as caught:
        process.up(wanted(python=python), print)
    assert "servers down" in caught.value.hint
    process.down(again)
    assert not left.alive
    assert process.read_background_server("vllm") is None


def test_a_stale_state_is_not_taken_for_a_server(python: Path) -> None:
    """Process ids come round again: one that was started at another instant is another process, and is left alone."""
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        process.write_background_server(
            process.BackgroundServer("vllm", "http://127.0.0.1:1", innocent.pid, 1, "/dev/null", "earlier", {})
        )
        kept = process.read_background_server("vllm")
        assert kept is not None
        assert not kept.alive
        process.down(kept)
        assert innocent.poll() is None
        process.down(process.up(wanted(python=python), print))
    finally:
        innocent.kill()
        innocent.wait()


@pytest.mark.parametrize(
    ("printed", "what", "hint"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "not have enough free memory",
            "nvidia-smi",
        ),
        ("OSError: [Errno 98] Address already in use", "the server's port is in use", "--port"),
        ("ModuleNotFoundError: No module named 'vllm'", "lacks a module: vllm", "--python"),
        ("vllm: error: unrecognized arguments: --no-such", "does not support --no-such", "another version"),
        ("no word that anybody knows", "ended during startup, with exit code 1", "log is in"),
    ],
)
def test_a_server_that_ends_says_why(tmp_path: Path, printed: str, what: str, hint: str) -> None:
    """What its log says becomes a message that says what to do, with the log's end."""
    with pytest.raises(LaunchError) as caught:
        process.up(wanted(python=broken(tmp_path / "bin", printed)), print)
    assert what in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.log_tail == printed
    assert process.read_background_server("vllm") is None


def test_the_first_error_is_shown_above_the_end_of_the_log(tmp_path: Path) -> None:
    """vLLM's engine says what is wrong a hundred lines before its API process gives up, pointing at it."""
    cause = (
        "(Worker pid=7) ValueError: Available memory on node 0 (10.89/12.59 GiB) on startup is less than desired CPU"
    )
    lines = [f"{cause} memory utilization (0.92, 11.58 GiB).", *(f"  frame {each}" for each in range(100))]
    lines.append("RuntimeError: Engine core initialization failed. See root cause above.")
    with pytest.raises(
        LaunchError, match=r"not enough free memory for vLLM on its CPU: .* \(10.89/12.59 GiB\)"
    ) as caught:
        process.up(wanted(python=broken(tmp_path / "bin", "\n".join(lines))), print)
    assert "VLLM_CPU_KVCACHE_SPACE" in caught.value.hint
    shown = caught.value.log_tail.splitlines()
    assert (shown[0], shown[1], shown[-1]) == (lines[0], "...", lines[-1])


def test_a_killed_server_says_so(tmp_path: Path) -> None:
    """The kernel's killer leaves no word in the log."""
    python = broken(tmp_path / "bin", "loading")
    program(python.parent / "vllm", "#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(LaunchError, match="run out of memory"):
        process.up(wanted(python=python), print)


def test_a_server_that_does_not_get_ready_is_ended(tmp_path: Path) -> None:
    """After the time-out nothing of it is left, and the message names --timeout and the log."""
    python = broken(tmp_path / "bin", "")
    program(python.parent / "vllm", f"#!/bin/sh\necho $$ > {tmp_path}/pid\necho loading\nexec sleep 600\n")
    with pytest.raises(LaunchError, match=r"did not get ready within 0\.3 s") as caught:
        process.up(wanted(python=python, timeout_s=0.3), print)
    assert "--timeout" in caught.value.hint
    assert caught.value.log_tail == "loading"
    assert process.start_ticks(int((tmp_path / "pid").read_text())) is None


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """With what it started, and without waiting for ever."""
    ready = tmp_path / "ready"
    script = program(
        tmp_path / "stubborn", f"#!/bin/sh\ntrap '' TERM\ntouch {ready}\nwhile :; do sleep 600 & wait; done\n"
    )
    pid = process.start_process([str(script)], {}, tmp_path / "log")
    while not ready.exists():
        time.sleep(0.01)
    process.end_process(pid, timeout_s=0.1)
    assert process.group_members(pid) == ()


def test_only_its_owner_reads_the_log(tmp_path: Path) -> None:
    """Servers print their keys, and the log is theirs. A file that was there before changes too; a device does not."""
    (log := tmp_path / "log").touch(0o644)
    device = Path(os.devnull).stat().st_mode
    for each in (log, Path(os.devnull)):
        process.end_process(
            process.start_process([str(program(tmp_path / "short", "#!/bin/sh\necho done\n"))], {}, each)
        )
    assert (log.stat().st_mode & 0o777, Path(os.devnull).stat().st_mode) == (0o600, device)


def test_what_cannot_be_started_is_said_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TGI is no Python package, another host is not this machine, an interpreter must exist, vLLM must be installed."""
    with pytest.raises(LaunchError, match="not a Python package"):
        process.up(wanted("tgi"), print)
    with pytest.raises(LaunchError, match="only be started on this machine, not on gpu-a"):
        process.up(wanted(host=Host("gpu-a", docker="gpu-a")), print)
    with pytest.raises(LaunchError, match="does not exist"):
        process.up(wanted(python=tmp_path / "none"), print)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="vllm is not installed"):
        process.up(wanted(), print)
    with pytest.raises(LaunchError, match="cannot start"):
        process.start_and_wait(
            "vllm", process.Command(("no-such-program",), {}), "http://127.0.0.1:1", tmp_path / "log", print
        )


def test_commands_are_made_for_a_burst(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits raised, caches off, the GPU of the host, no look at the Hub for a model that is a folder, options last."""
    host = Host("local", gpus={"vllm": "1"}, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    asked = wanted(host=host, model=str(tmp_path), python=python, arguments=["--dtype", "bfloat16"])
    made = process.command_of(asked, "127.0.0.1", 9)
    assert made.words[-2:] == ("--dtype", "bfloat16")
    assert {"--no-enable-prefix-caching", "--max-num-seqs"} <= set(made.words)
    assert made.env == {
        "PYTHONSAFEPATH": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    monkeypatch.chdir(tmp_path.parent)
    relative = process.command_of(wanted(model=tmp_path.name, python=python), "127.0.0.1", 9).words
    assert relative[2] == str(tmp_path)  # else vLLM takes it for a name on the Hub
    below = wanted(model=tmp_path.name, python=python, host=Host("local", model_dir=str(tmp_path.parent)))
    assert process.command_of(below, "127.0.0.1", 9).words[2] == str(tmp_path)
    spread = wanted(python=python, tensor_parallel=2, env={"OMP_NUM_THREADS": "8"})
    made = process.command_of(spread, "127.0.0.1", 9)
    assert made.words[made.words.index("--tensor-parallel-size") + 1] == "2"
    assert (made.env["CUDA_VISIBLE_DEVICES"], made.env["OMP_NUM_THREADS"]) == ("0,1", "8")
    with pytest.raises(LaunchError, match="no option colour"):
        process.up(wanted(colour="red"), print)
    (python.parent / "vllm").unlink()
    old = process.command_of(asked, "127.0.0.1", 9).words
    assert old[:5] == (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path))
    light = process.command_of(wanted("lightllm", model="/models/llama/", python=python), "127.0.0.1", 9).words
    assert light[:3] == (str(python), "-m", "lightllm.server.api_server")
    assert light[light.index("--model_name") + 1] == "llama"


def loadgen(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`loadgen servers ...` as a person would run it."""
    return command.loadgen(Path(os.environ["XDG_STATE_HOME"]), "servers", *arguments)


def test_the_commands_find_what_an_earlier_one_left(python: Path) -> None:
    """Up in one command, status and logs in others, down in the last; then there is nothing to be found."""
    up = loadgen("up", "--server", "vllm", "--launch", "process", "--model", "tiny", "--python", str(python), "--quiet")
    assert (up.returncode, up.stdout, up.stderr) == (0, "", "")
    there = process.read_background_server("vllm")
    assert there is not None
    status = loadgen("status", "--server", "vllm")
    assert (status.returncode, f"ready at {there.url}" in status.stdout) == (0, True)
    assert f"ready {there.url}" in loadgen("logs", "--server", "vllm").stdout
    assert f"process {there.pid} stopped" in loadgen("down", "--server", "vllm").stdout
    status = loadgen("status", "--server", "vllm", "--launch", "process")
    assert (status.returncode, status.stdout.split()) == (3, ["vllm", "down"])


def test_a_server_that_died_by_itself_is_said_to_have(python: Path) -> None:
    """The status says so once, with its log, and the state is gone."""
    left = process.up(wanted(python=python), print)
    process.end_process(left.pid)
    status = loadgen("status", "--server", "vllm")
    assert status.returncode == 3
    assert f"ended unexpectedly; its log is in {left.log}" in status.stdout
    assert process.read_background_server("vllm") is None


def test_a_simulated_server_can_be_left_running(tmp_path: Path) -> None:
    """The same way, and everything says that it is simulated; JSON has the URL and the facts."""
    up = loadgen(
        "up", "--server", "tgi", "--launch", "simulated", "--json", "--n", "100", "--", "--gpu", "A100-80GB SXM"
    )
    assert up.returncode == 0, up.stderr
    assert '"launch": "simulated"' in up.stdout
    assert "SIMULATED" in loadgen("status", "--server", "tgi").stdout
    assert loadgen("down", "--server", "tgi").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["up", "--server", "ollama"], "unknown; choose vllm, tgi, lightllm, sglang, tei"),
        (["up", "--server", "vllm", "--launch", "podman"], "unknown; choose compose, process, simulated"),
        (["up", "--server", "vllm", "--host", "gpu-z"], "unknown; choose local"),
        (["up", "--server", "vllm", "--python", "/usr/bin/python3"], "--launch compose does not take --python"),
        (["up", "--server", "vllm", "--", "--dtype", "half"], "does not take options after --"),
        (["up", "--server", "vllm", "--launch", "process"], "needs --model"),
        (["up", "--server", "vllm", "--hosts", "none.toml"], "cannot read none.toml"),
    ],
)
def test_mistakes_on_the_command_line_are_usage_errors(arguments: list[str], part: str) -> None:
    """Exit code 2, and what is possible."""
    done = loadgen(*arguments)
    assert done.returncode == 2
    assert part in " ".join(done.stderr.replace("│", " ").split())
