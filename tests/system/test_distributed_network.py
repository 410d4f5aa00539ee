"""A run over several machines: master and worker machines in network namespaces, with slow links and another clock."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import pytest

from loadgen.analysis.calibration import read_log
from loadgen.analysis.run import runfile
from loadgen.servers.own_process import own_process
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import ROOT, accounted, summary_of, wait_for
from tests.support.network import MASTER, SERVER, Network, network

DELAYS_MS = {"bench-1": 5, "bench-2": 20}
AHEAD_S = {"bench-1": 0, "bench-2": 3}
"""By how much each machine's CLOCK_MONOTONIC is ahead of the master's."""
STREAMS = 10_000
BREAK_S = 3
"""How long the links to the master stand still; Locust misses a machine after about eight seconds."""

pytestmark = pytest.mark.timeout(300)  # ten thousand streams, on a machine that may be busy

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
    return net.start(machine, *command, ahead_s=AHEAD_S.get(machine, 0), env=environment, stdin=subprocess.PIPE)


def serve(net: Network, folder: Path, **times_s: float) -> tuple[subprocess.Popen[str], str]:
    """A simulated server on its machine, which logs, and its URL."""
    log = folder / "sim.jsonl"
    told = SimulatedConfig(server="tgi", host=SERVER, log=log, max_concurrent_requests=STREAMS, **times_s)  # type: ignore[arg-type]
    server = net.start(
        "server",
        *own_process("loadgen.servers.simulated"),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
    )
    assert server.stdin is not None
    server.stdin.write(told.to_json().decode())
    server.stdin.flush()
    assert server.stdout is not None
    found = re.search(r"http://\S+:\d+", server.stdout.readline())
    assert found
    return server, found[0]


def spread(net: Network, folder: Path, url: str, *options: str) -> Processes:
    """Start the master and a worker on each machine."""
    common = ["--server", "tgi", "--url", url, "--input-tokens", "32", "--no-report", "--out", str(folder / "run")]
    several = ["--distributed", "--expect-workers", "2", "--bind", MASTER]
    started = {"master": loadgen(net, "master", folder, *options, *common, *several)}
    for machine in DELAYS_MS:
        own = ["--master", MASTER, "--out", str(folder / machine), "--quiet"]
        started[machine] = loadgen(net, machine, folder, "worker", *own)
    return started


def finish(processes: Processes) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of each."""
    ends = {}
    for name, process in processes.items():
        out, err = process.communicate(timeout=200)
        assert "Traceback" not in err, err
        ends[name] = process.returncode, out, err
    return ends


@pytest.mark.parametrize("streams", [1_000, pytest.param(STREAMS, marks=[pytest.mark.alone, pytest.mark.scale])])
def test_two_machines_send_one_burst(net: Network, tmp_path: Path, streams: int) -> None:
    """Everything is accounted for in one file; offsets are found within their uncertainty, also of a clock that is 3 s
    off; converted instants agree with the server's log; the skew comes with what the clocks leave open."""
    server, url = serve(net, tmp_path, ttft_s=4.0, itl_s=0.5)
    ends = finish(spread(net, tmp_path, url, "burst", "--n", str(streams), "--output-tokens", "4"))
    server.communicate(timeout=30)
    assert ends["master"][0] in (0, 5), ends
    assert (ends["bench-1"][0], ends["bench-2"][0]) == (0, 0), ends
    assert accounted(tmp_path, streams) == {"complete": streams}
    run = runfile.read(tmp_path / "run")
    machines = run.header.client["machines"]
    assert sorted(machine["name"] for machine in machines) == list(DELAYS_MS)
    for machine in machines:
        truth_ns, least_ns = AHEAD_S[machine["name"]] * 1e9, DELAYS_MS[machine["name"]] * 1e6
        assert abs(machine["offset_ns"] - truth_ns) <= machine["uncertainty_ns"]
        assert machine["uncertainty_ns"] >= least_ns
        assert abs(ahead_of_the_server_ns(run, machine["workers"], tmp_path / "sim.jsonl")) <= machine["uncertainty_ns"]
    summary = summary_of(tmp_path)
    low_s, high_s = summary["burst"]["skew_range_s"]
    assert low_s <= summary["burst"]["skew_s"] <= high_s
    assert [machine["complete"] for machine in summary["machines"]] == [streams // 2] * 2
    assert "2 machines, clock uncertainty: " in ends["master"][1]


def test_a_machine_that_dies_is_noticed_and_the_run_goes_on(net: Network, tmp_path: Path) -> None:
    """A break of the links to the master, three seconds long, costs nothing. Then a machine loses its power in the
    middle of an open loop. Its requests without a Record are counted as lost with
    its name, those that it had sent back stay, the other machine's are all complete, and the sum is what was asked."""
    n = 1200
    server, url = serve(net, tmp_path, ttft_s=0.1, itl_s=0.05)
    started = spread(net, tmp_path, url, "run", "--arrivals", "constant:150", "--n", str(n), "--output-tokens", "4")
    parts = [tmp_path / "run" / f"part-{worker}.jsonl" for worker in (0, 1)]
    wait_for(lambda: all(part.exists() and b'"request"' in part.read_bytes() for part in parts), started["master"])
    with net.broken():
        time.sleep(BREAK_S)
    sizes = {part: part.stat().st_size for part in parts}
    wait_for(lambda: all(part.stat().st_size > size for part, size in sizes.items()), started["master"])
    net.die("bench-1")
    ends = finish(started)
    server.communicate(timeout=30)
    assert ends["master"][0] == 1
    assert ends["bench-2"][0] == 0
    states = accounted(tmp_path, n)
    run = runfile.read(tmp_path / "run")
    (lost,) = next(each["workers"] for each in run.header.client["machines"] if each["name"] == "bench-1")
    assert states["complete"] + states["failed"] == n
    mine = [record for record in run.records if record.worker == lost]
    assert {record.state for record in mine} == {"complete", "failed"}
    assert len(mine) == n // 2
    failed = [record for record in mine if record.state == "failed"]
    assert all("its machine bench-1 (its heartbeats stopped" in record.error_detail for record in failed)
    assert run.footer is not None
    assert str(tmp_path / "bench-1") in " ".join(run.footer.notes)
    assert "bench-1 is lost" in ends["master"][1]


def ahead_of_the_server_ns(run: runfile.Run, workers: Sequence[int], log: Path) -> float:
    """How much later tokens arrived, on the master's clock, than the server sent them, which is on that clock too."""
    sent = read_log(log)
    return median(
        arrived + run.header.start_realtime_ns - left
        for record in run.records
        if record.worker in workers
        for arrived, left in zip(record.chunk_ns, sent[record.id].sent_ns, strict=False)
    )
