"""The real vLLM as `loadgen servers` starts it: up in one command, measured by others, down in the last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from loadgen.servers.launch import process

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / ".engine"


def loadgen(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command as a person would run it, with a state folder of the test's own."""
    done = subprocess.run(
        [sys.executable, "-m", "loadgen", *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder), "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_up_measured_and_down(tmp_path: Path) -> None:
    """Ready means ready: a burst right after it is complete. Its limits are compared; nothing of it is left behind."""
    model = ("--launch", "process", "--model", ENGINE / "model", "--python", ENGINE / "vllm" / "bin" / "python")
    options = ("--max-model-len", "2048", "--dtype", "bfloat16", "--enforce-eager")
    up = loadgen(tmp_path, "servers", "up", "--server", "vllm", *model, "--json", "--timeout", "240s", "--", *options)
    assert up.returncode == 0, up.stderr
    there = json.loads(up.stdout)
    pids = process.group_members(there["facts"]["pid"])
    try:
        assert there["limits"]["max_model_len"] == 2048
        assert there["facts"]["version"] == "0.32.0"
        assert len(pids) > 1
        status = loadgen(tmp_path, "servers", "status", "--server", "vllm")
        assert (status.returncode, f"ready at {there['url']}" in status.stdout) == (0, True)
        burst = ("burst", "--server", "vllm", "--url", there["url"], "--n", 16, "--output-tokens", 8, "--no-report")
        sent = loadgen(tmp_path, *burst, "--json", "--out", tmp_path / "run")
        assert sent.returncode in (0, 5), sent.stderr
        assert json.loads(sent.stdout)["requests"]["complete"] == 16
        assert "Application startup complete" in loadgen(tmp_path, "servers", "logs", "--server", "vllm").stdout
    finally:
        down = loadgen(tmp_path, "servers", "down", "--server", "vllm")
    assert "stopped" in down.stdout
    assert not any(process.start_ticks(pid) for pid in pids)


def test_a_mistake_in_its_options_is_explained(tmp_path: Path) -> None:
    """vLLM's own words become ours, with the end of its log."""
    model = ("--launch", "process", "--model", ENGINE / "model", "--python", ENGINE / "vllm" / "bin" / "python")
    up = loadgen(tmp_path, "servers", "up", "--server", "vllm", *model, "--timeout", "240s", "--", "--no-such-option")
    assert up.returncode == 3
    assert "does not support --no-such-option" in up.stderr


def test_a_model_that_is_not_there_is_explained(tmp_path: Path) -> None:
    """A folder without a model is said to be one."""
    model = ("--launch", "process", "--model", tmp_path, "--python", ENGINE / "vllm" / "bin" / "python")
    up = loadgen(tmp_path, "servers", "up", "--server", "vllm", *model, "--timeout", "240s")
    assert up.returncode == 3
    assert "the server does not find the model" in up.stderr
