"""`--at` on a simulated server: commands run during the load, and the report shows the time to recover."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from tests.support.command import burst

PAUSE_AT_S, PAUSE_S, DURATION_S = 8, 3, 18


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """A simulated vLLM in its own process: its URL and its process id."""
    words = [sys.executable, "-m", "loadgen", "mock-server", "--server", "vllm", "--ttft", "50ms", "--itl", "5ms"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        try:
            yield url, process.pid
        finally:
            process.terminate()


def test_a_paused_server_recovers(server: tuple[str, int], tmp_path: Path) -> None:
    """A server that is stopped for three seconds is disturbed for about as long. Output and exit code are recorded, a
    command that would run after the end is not, and the API key that a command prints is hidden."""
    url, pid = server
    pause = f"kill -STOP {pid}; sleep {PAUSE_S}; kill -CONT {pid}; echo $LOADGEN_API_KEY"
    code, _, err = burst(
        tmp_path,
        *("--url", url, "--rate", "40", "--duration", f"{DURATION_S}s", "--output-tokens", "8", "--input-tokens", "16"),
        *("--at", f"{PAUSE_AT_S}s", pause, "--at", "10m", "echo never", "--goodput", "ttft < 2s"),
        command="run",
        LOADGEN_API_KEY="sk-soak-0123456789",
    )
    assert code in (0, 5), err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    [effect] = summary["commands"]
    assert effect["exit_code"] == 0
    assert effect["output"] == "***"
    assert effect["at_s"] == pytest.approx(PAUSE_AT_S, abs=2)
    ttft = next(figure for figure in effect["figures"] if figure["figure"] == "ttft.p99")
    assert ttft["disturbed"]
    assert ttft.get("recovered_s", DURATION_S) >= PAUSE_S - 2 * ttft["window_s"]
    assert len(runfile.read(tmp_path / "run").commands) == 1
    assert not list((tmp_path / "run").glob("part-*"))
    assert "sk-soak-0123456789" not in (tmp_path / "run" / "run.jsonl").read_text()
