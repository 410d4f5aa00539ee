"""Commands that tests start as forks behave like commands that a user starts (tests/support/command.py)."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.command import SERVER, Forked, loadgen

VERSION = "loadgen 0.0 of a test"


def test_a_command_of_the_fork_server_has_its_own_folder_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is below the folder of the command, and the server's URL comes from the environment."""
    monkeypatch.setenv("LOADGEN_VLLM_URL", "http://127.0.0.1:1")
    done = loadgen(tmp_path, "burst", "--server", "vllm", "--n", "1", "--out", "run")
    assert SERVER.usable
    assert done.returncode == 3, done.stderr
    assert "http://127.0.0.1:1" in done.stderr
    (tmp_path / "plan.toml").write_text("colour = 1\n", "utf-8")
    refused = loadgen(tmp_path, "run", "plan.toml")
    assert (refused.returncode, "colour" in refused.stderr) == (2, True), refused.stderr


def test_a_command_has_what_a_test_has_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement reaches the command while it lasts, and no later command."""
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda distribution_name: "0.0 of a test")  # noqa: ARG005
        assert loadgen(tmp_path, "--version").stdout.strip() == VERSION
    assert loadgen(tmp_path, "--version").stdout.strip() != VERSION


def test_a_signal_is_the_exit_code_of_a_command(tmp_path: Path) -> None:
    """A command that is killed has the negative number of the signal, as any child process."""
    words = ["mock-server", "--server", "vllm", "--port", "0"]
    with Forked(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "http://" in process.stdout.readline()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
