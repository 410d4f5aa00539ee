"""Drifts and restarts of simulated servers: each is found, and a server without one raises no warning."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import burst
from tests.support.simulated import running

LOAD = ("--rate", "40", "--duration", "12s", "--output-tokens", "4", "--input-tokens", "16")


@pytest.mark.parametrize(
    ("slower_per_hour", "objective", "verdict"),
    [(900.0, "ttft.p50 drift < 2000%/h", "fail"), (0.0, "ttft.p50 drift < 40000%/h", "pass")],
)
def test_a_server_that_becomes_slower_misses_its_bound(
    slower_per_hour: float, objective: str, verdict: str, tmp_path: Path
) -> None:
    """A TTFT that grows fourfold in twelve seconds misses the bound on its drift. One that stays meets a wide bound."""
    config = SimulatedConfig(server="vllm", ttft_s=0.05, itl_s=0.002, slower_per_hour=slower_per_hour)
    with running(config) as simulated:
        code, _, err = burst(tmp_path, "--url", simulated.url, *LOAD, "--assert", objective, command="run")
    assert code in ((4,) if verdict == "fail" else (0, 5)), err
    [result] = json.loads((tmp_path / "run" / "summary.json").read_text())["objectives"]
    assert result["verdict"] == verdict
    assert result["unit"] == "share per hour"
    assert result["interval"][0] <= result["measured"] <= result["interval"][1]


def words_of_server(port: int) -> list[str]:
    return [sys.executable, "-m", "loadgen", "mock-server", "--server", "vllm", "--port", str(port), "--ttft", "20ms"]


@pytest.fixture
def server() -> Iterator[tuple[str, int, int]]:
    """A simulated vLLM in its own process: its URL, port and process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(words_of_server(port), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        try:
            yield url, port, process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("restarts", [True, False])
def test_a_restart_is_seen(restarts: bool, server: tuple[str, int, int], tmp_path: Path) -> None:
    """A server that is killed and started again has a later start time in its metrics. A command that does nothing to
    the server is no restart."""
    url, port, pid = server
    command = f"kill -9 {pid}; exec {shlex.join(words_of_server(port))}" if restarts else "true"
    code, out, err = burst(tmp_path, "--url", url, *LOAD, "--at", "3s", command, command="run")
    assert code in ((0, 1, 5) if restarts else (0, 5)), err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    found = summary.get("course", {}).get("restarts", [])
    assert [restart["evidence"] for restart in found] == ["start_time"] * restarts
    assert ("The server restarted between" in " ".join(out.split())) == restarts
    if restarts:
        assert found[0]["to_s"] > 3
        assert summary["commands"][0]["ended_with_run"]
