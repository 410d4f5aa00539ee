"""A run over several machines: master and worker machines in network namespaces, with slow links and another clock."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from analysis.calibration import read_log
from loadgen import runfile
from loadgen.record import Record
from servers.simulated.config import SimulatedConfig
from servers.simulated.server import arguments
from tests.command import ROOT, accounted, summary_of
from tests.network import MASTER, SERVER, Network, network

DELAYS_MS = {"a": 5, "b": 20}
AHEAD_S = {"a": 0, "b": 3}
"""By how much each machine's CLOCK_MONOTONIC is ahead of the master's."""
STREAMS = 10_000

Processes = dict[str, subprocess.Popen[str]]


@pytest.fixture
def net() -> Iterator[Network]:
    """A server, a master and two worker machines."""
    with network(DELAYS_MS) as built:
        yield built


def loadgen(net: Network, machine: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a command of ours on a machine."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder),
        "LOADGEN_TOKEN": "a token of the tests",
    }
    command = [sys.executable, "-m", "loadgen", *options]
    return net.start(machine, *command, ahead_s=AHEAD_S.get(machine, 0), cwd=folder, env=environment, stdin=subprocess.PIPE)


def serve(net: Network, folder: Path, **config: float) -> tuple[subprocess.Popen[str], str]:
    """A simulated server on its machine, which logs, and its URL."""
    log = folder / "sim.jsonl"
    told = SimulatedConfig(server="vllm", host=SERVER, log=log, **config)  # type: ignore[arg-type]
    server = loadgen(net, "server", folder, *arguments(told))
    assert server.stdout is not None
    found = re.search(r"http://\S+:\d+", server.stdout.readline())
    assert found
    return server, found[0]


def spread(net: Network, folder: Path, url: str, *options: str) -> Processes:
    """Start the master and a worker on each machine."""
    common = ["--server", "vllm", "--url", url, "--input-tokens", "32", "--no-report", "--out", str(folder / "run")]
    several = ["--distributed", "--expect-workers", "2", "--bind", MASTER]
    started = {"master": loadgen(net, "master", folder, *options, *common, *several)}
    for machine in DELAYS_MS:
        own = folder / machine
        own.mkdir()
        started[machine] = loadgen(net, machine, own, "worker", "--master", MASTER, "--quiet")
    return started


def finish(processes: Processes) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of each."""
    ends = {}
    for name, process in processes.items():
        out, err = process.communicate(timeout=90)
        assert "Traceback" not in err, err
        ends[name] = process.returncode, out, err
    return ends


def test_ten_thousand_streams_from_two_machines(net: Network, tmp_path: Path) -> None:
    """Everything is accounted for in one file; offsets are found within their uncertainty, also of a clock that is 3 s
    off; converted instants agree with the server's log; the skew comes with what the clocks leave open."""
    server, url = serve(net, tmp_path, ttft_s=4.0, itl_s=0.5)
    ends = finish(spread(net, tmp_path, url, "burst", "--n", str(STREAMS), "--output-tokens", "4"))
    server.communicate(timeout=30)
    print(ends["master"][1])
    assert ends["master"][0] in (0, 5), ends
    assert (ends["a"][0], ends["b"][0]) == (0, 0), ends
    assert accounted(tmp_path, STREAMS) == {"complete": STREAMS}
    run = runfile.read(tmp_path / "run")
    machines = run.header.client["machines"]
    assert [machine["workers"] for machine in machines] == [[0], [1]]
    delays = {record.worker: 0 for record in run.records}
    assert set(delays) == {0, 1}
    by_skew = sorted(machines, key=lambda machine: machine["offset_ns"])
    for machine, name in zip(by_skew, ("a", "b"), strict=True):
        assert abs(machine["offset_ns"] - AHEAD_S[name] * 1e9) <= machine["uncertainty_ns"]
        assert machine["uncertainty_ns"] >= DELAYS_MS[name] * 1e6
    for machine in machines:
        _agrees_with_the_log(run, machine, tmp_path / "sim.jsonl")
    burst = summary_of(tmp_path)["burst"]
    low_s, high_s = burst["skew_range_s"]
    assert low_s <= burst["skew_s"] <= high_s
    assert "clocks" in ends["master"][1]


def _agrees_with_the_log(run: runfile.Run, machine: dict[str, object], log: Path) -> None:
    """Kernel stamps of arrivals on the master's clock, against the server's own instants of sending, which is that clock
    too. Nothing arrives before it was sent, and the quickest arrivals take next to no time."""
    sent = {int(line.request_id): line.sent_ns for line in read_log(log)}
    to_real_ns = run.header.start_realtime_ns
    records = [record for record in run.records if record.worker in machine["workers"]]
    took_ns = [_quickest(record, sent[record.id], to_real_ns) for record in records]
    assert abs(min(took_ns)) <= machine["uncertainty_ns"]


def _quickest(record: Record, sent_ns: Sequence[int], to_real_ns: int) -> int:
    return min(arrived + to_real_ns - sent for arrived, sent in zip(record.chunk_ns, sent_ns, strict=False))
