"""The instrument held back on purpose: its figures stay right, because the kernel stamps, and the verdict says why not
to trust it further.

Everything is compared with the server's own log, never with a clock of the test. The server logs an instant and then
sends; where the machine is busy it may be put aside in between, which moves single tokens by milliseconds and no
median. So medians are what is looked at, and they must be far below what the client was held back by.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import msgspec
import psutil
import pytest

from loadgen.analysis.calibration import compare_with_log, read_log
from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn
from tests.support.command import events_sent, start, summary_of, wait_for

pytestmark = pytest.mark.alone

N = 30
PAUSE_S = 0.5
"""Of a stopped worker. The client looks twenty times a second whether it stood still: it sees at least half of this."""
ERROR_S = 1e-3
"""A hundred times what it is on a machine that is not busy, and a tenth of what the client is held back by at least."""
BURN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


@dataclass(frozen=True)
class Burst:
    """A burst that is on: the server's address, and the process that sends."""

    url: str
    worker: psutil.Process

    def until_sent(self, events: int) -> None:
        """Wait until the server has sent so many tokens."""
        while events_sent(self.url) < events:
            time.sleep(0.005)


def stop(burst: Burst) -> None:
    """SIGSTOP before the first tokens, SIGCONT half a second after them, amid a gap: not as a token comes."""
    burst.worker.send_signal(signal.SIGSTOP)
    burst.until_sent(N)
    time.sleep(PAUSE_S)
    burst.worker.send_signal(signal.SIGCONT)


def doze(burst: Burst) -> None:
    """A receiver that sleeps: 80 ms asleep, 10 ms awake, from the second tokens until the server is done."""
    burst.until_sent(2 * N)
    while active(burst.url):
        burst.worker.send_signal(signal.SIGSTOP)
        time.sleep(0.08)
        burst.worker.send_signal(signal.SIGCONT)
        time.sleep(0.01)


def starve(burst: Burst) -> None:
    """The worker's core is another process's as well, and the worker gets what that leaves: SCHED_IDLE, sched(7)."""
    burst.until_sent(2 * N)
    cores = os.sched_getaffinity(0)
    core = max(cores)
    os.sched_setaffinity(burst.worker.pid, {core})
    os.sched_setscheduler(burst.worker.pid, os.SCHED_IDLE, os.sched_param(0))
    with subprocess.Popen([sys.executable, "-c", BURN, str(core)], stdout=subprocess.PIPE) as burner:
        assert burner.stdout is not None
        try:
            while active(burst.url):
                time.sleep(0.02)
        finally:
            burner.kill()
            os.sched_setaffinity(burst.worker.pid, cores)


@pytest.mark.parametrize(
    ("hold", "itl_s", "output_tokens", "causes"),
    [
        (stop, 2.0, 2, ("Longest stall",)),
        (doze, 0.03, 40, ("Late coalesced reads",)),
        (starve, 0.03, 40, ("Late coalesced reads", "Read delay", "Longest stall")),
    ],
)
def test_figures_stay_right_and_the_verdict_names_the_cause(
    hold: Callable[[Burst], None], itl_s: float, output_tokens: int, causes: tuple[str, ...], tmp_path: Path
) -> None:
    """A worker that is stopped, that sleeps, or whose core is taken: TTFT and TPOT agree with the server's log, reads
    were late by far more than that, and the run is called limited for a reason that fits."""
    run, log = held_back(hold, itl_s, output_tokens, tmp_path)
    alone = [record for record in run.records if not record.first_token_merged]
    assert alone, "no first token came alone in its read"
    seen = compare_with_log(msgspec.structs.replace(run, records=alone), read_log(log))
    assert (seen.stamps, seen.not_compared) == ("socket", 0)
    assert seen.ttft_s.p50 < ERROR_S
    assert seen.tpot_s.p50 * (output_tokens - 1) < ERROR_S
    client = summary_of(tmp_path)["client"]
    assert float(str(client["late_max_s"])) > 10 * ERROR_S
    assert client["verdict"] == "limited"
    reasons = client["reasons"]
    assert isinstance(reasons, list)
    assert any(str(reason).lower().startswith(cause.lower()) for reason in reasons for cause in causes)


def test_first_tokens_that_waited_for_others_are_marked_and_bounded(tmp_path: Path) -> None:
    """A client stopped while several tokens come reads them at once, with the newest stamp: each such answer is marked,
    its TTFT is never too small, and too large by no more than the client was away; its error bar holds that."""
    run, log = held_back(stop, 0.05, 20, tmp_path)
    seen = compare_with_log(run, read_log(log))
    assert seen.merged == N
    assert seen.merged_s_max > PAUSE_S / 2
    assert seen.merged_beyond == 0
    assert seen.merged_s_max < float(str(summary_of(tmp_path)["client"]["error_bar_ttft_s"])) < seen.lag_s + ERROR_S
    sends = read_log(log)
    ours_ns = [record.chunk_ns[0] + run.header.start_realtime_ns for record in run.records]
    assert all(ours > sends[record.id].sent_ns[0] for ours, record in zip(ours_ns, run.records, strict=True))
    assert any("coalesced with later ones" in line for line in (tmp_path / "out").read_text().splitlines())


@pytest.mark.parametrize(("hold", "itl_s", "output_tokens"), [(stop, 0.2, 8), (doze, 0.03, 40), (starve, 0.03, 40)])
def test_with_a_packet_ring_nothing_merges_and_nothing_is_blurred(
    hold: Callable[[Burst], None], itl_s: float, output_tokens: int, tmp_path: Path
) -> None:
    """Whatever is done to the worker: each token has its own stamp, gaps agree with the server's log as TTFT does, and
    the receive windows, which were looked at, say that the server was not held back: the run is valid."""
    run, log = held_back(hold, itl_s, output_tokens, tmp_path, "ring")
    seen = compare_with_log(run, read_log(log))
    assert (seen.stamps, seen.not_compared, seen.merged, seen.coalesced_share) == ("ring", 0, 0, 0)
    assert max(seen.ttft_s.p50, seen.icl_s.p50, seen.tpot_s.p50 * (output_tokens - 1)) < ERROR_S
    client = summary_of(tmp_path)["client"]
    assert float(str(client["late_max_s"])) > 10 * ERROR_S
    assert int(str(client["windows"])) > 0
    assert (client["verdict"], client["full_reads"], client["ring_missed"]) == ("ok", 0, 0), client["reasons"]


def active(url: str) -> int:
    """How many requests the simulated server is answering."""
    with urlopen(f"{url}/simulated/status", timeout=10) as answer:
        return int(json.load(answer)["active"])


def held_back(
    hold: Callable[[Burst], None], itl_s: float, output_tokens: int, folder: Path, stamps: str = "socket"
) -> tuple[runfile.Run, Path]:
    """A burst during which `hold` was done to its worker, and the server's log."""
    log = folder / "sim.jsonl"
    config = SimulatedConfig(server="vllm", ttft_s=1.0, itl_s=itl_s, max_concurrent_requests=N, log=log)
    with spawn(config) as url:
        options = ["--n", str(N), "--output-tokens", str(output_tokens), "--no-report", "--stamps", stamps]
        options += ["--client-priority", "normal"]  # a session of its own would shield the worker from other processes
        process = start(folder, "--server", "vllm", "--url", url, *options)
        try:
            wait_for(lambda: active(url) == N, process)
            (worker,) = psutil.Process(process.pid).children()
            hold(Burst(url, worker))
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode in (0, 5), err
    (folder / "out").write_text(" ".join(out.split()))
    return runfile.read(folder / "run"), log
