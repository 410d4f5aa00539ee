"""The client's scheduling priority in real runs, as the kernel and the run's own files state it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import start, summary_of, wait_for
from tests.support.simulated import running

SLOW = {"ttft_s": 0.2, "itl_s": 0.5}
POLICIES = {os.SCHED_OTHER: "other", os.SCHED_RR: "realtime"}


@pytest.mark.parametrize("requested", ["auto", "realtime", "normal"])
def test_header_and_summary_state_the_priority_that_the_kernel_gave(tmp_path: Path, requested: str) -> None:
    """While requests are under way, nice and policy of the worker are those of the header. Its parent is not raised."""
    with running(SimulatedConfig(server="vllm", **SLOW)) as server:
        options = ("--server", "vllm", "--url", server.url, "--n", "4", "--input-tokens", "16", "--output-tokens", "4")
        command = start(tmp_path, *options, "--client-priority", requested)
        file = tmp_path / "run" / "run.jsonl"
        wait_for(lambda: file.exists() and file.read_bytes().endswith(b"\n"), command)
        facts = json.loads(file.read_bytes().splitlines()[0])["client"]["scheduling"]
        states = {
            (psutil.Process(pid).nice(), POLICIES[os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK])
            for child in psutil.Process(command.pid).children()
            for pid in [child.pid]
        }
        parent = psutil.Process(command.pid).nice(), os.sched_getscheduler(command.pid)
        command.communicate(timeout=60)
    assert command.returncode in (0, 5)
    assert (facts["nice"], facts["policy"]) in states
    assert parent == (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
    assert facts["requested"] == requested
    if requested == "normal":
        assert (facts["nice"], facts["policy"]) == (parent[0], "other")
    client = summary_of(tmp_path)["client"]
    assert client["scheduling"] == facts
    samples = [sample.values for sample in runfile.read(tmp_path / "run").telemetry if sample.source == "client"]
    assert all(sample["realtime"] == (facts["policy"] == "realtime") for sample in samples)


def test_a_worker_in_a_session_of_its_own_ends_with_its_command(tmp_path: Path) -> None:
    """The command is killed in mid-run: no worker goes on sending."""
    with running(SimulatedConfig(server="vllm", ttft_s=0.2, itl_s=60.0)) as server:
        options = ("--server", "vllm", "--url", server.url, "--n", "4", "--input-tokens", "16", "--output-tokens", "4")
        command = start(tmp_path, *options, "--no-report")
        file = tmp_path / "run" / "run.jsonl"
        wait_for(lambda: file.exists() and file.read_bytes().endswith(b"\n"), command)
        workers = psutil.Process(command.pid).children()
        assert workers
        os.kill(command.pid, signal.SIGKILL)
        command.communicate(timeout=60)
        _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
