"""A simulated server that a command of --at pauses: the report shows the time to recover."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import burst

pytestmark = pytest.mark.alone  # another load would disturb the figures before and after the pause

PAUSE_AT_S, PAUSE_S, DURATION_S = 14, 3, 26


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
            process.kill()  # it may still be stopped


def test_a_paused_server_recovers(server: tuple[str, int], tmp_path: Path) -> None:
    """A server that is stopped for three seconds is disturbed for about as long."""
    url, pid = server
    pause = f"kill -STOP {pid}; sleep {PAUSE_S}; kill -CONT {pid}"
    code, _, err = burst(
        tmp_path,
        *("--url", url, "--rate", "40", "--duration", f"{DURATION_S}s", "--output-tokens", "8", "--input-tokens", "16"),
        *("--at", f"{PAUSE_AT_S}s", pause, "--goodput", "ttft < 2s"),
        command="run",
    )
    assert code in (0, 5), err
    [effect] = json.loads((tmp_path / "run" / "summary.json").read_text())["commands"]
    assert effect["exit_code"] == 0
    assert effect["at_s"] >= PAUSE_AT_S
    assert effect["took_s"] >= PAUSE_S
    ttft = next(figure for figure in effect["figures"] if figure["figure"].startswith("ttft."))
    assert ttft["disturbed"]
    assert ttft.get("recovered_s", DURATION_S) >= PAUSE_S - 2 * ttft["window_s"]
