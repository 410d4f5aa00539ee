"""Measures the errors of TTFT, TPOT and receive timestamps against the log of a simulated server.

    python -m benchmarks.accuracy                                # 1000 streams, 64 tokens, 500 ms, then 20 ms apart
    python -m benchmarks.accuracy --server vllm --endpoint responses     # another endpoint of the server
    python -m benchmarks.accuracy --busy --itl 40ms              # other processes compete for every core
    python -m benchmarks.accuracy --stop 2s --output-tokens 256  # every worker process is stopped for 2 s in mid-run
    python -m benchmarks.accuracy --n 20000 --workers 2 --itl 4s --output-tokens 8     # time to open connections
    python -m benchmarks.accuracy --n 2000 --output-tokens 1500  # 100,000 tokens a second for 30 s: dropped packets
    python -m benchmarks.accuracy --concurrency 64               # closed loop: time from a response to the next request
    python -m benchmarks.accuracy --tls                          # TLS 1.3, with the log of benchmarks.tls_server
    python -m benchmarks.accuracy --tls --concurrency 64         # TLS 1.3 on connections that are reused

The default is one burst of `loadgen calibrate`. The output contains the row that this command would print, and the
distributions of the values behind the row. With `--tls`, the exit code is 1 if the p99 of the TTFT error is above 0.05
ms.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import numpy as np

from benchmarks.comparison.machine import pinned
from benchmarks.tls_server import make_certificate, serving
from loadgen.analysis.calibration import (
    ServerLogLine,
    StampComparison,
    compare_with_log,
    read_log,
    stamps_heading,
    stamps_notes,
    stamps_row,
)
from loadgen.analysis.run import runfile
from loadgen.cli.calibrate import TTFT_S, run_calibration_point
from loadgen.cli.options import seconds
from loadgen.machine import CalibrationPoint
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn

PERCENTILES = (0, 1, 10, 50, 90, 99, 99.9, 100)
STOPPED_AFTER_S = 1.0
TLS_ITL_S = 0.1
"""Time between two tokens over TLS, in s. The server is written in Python and needs 30 us per token."""
TLS_TTFT_ERROR_S = 0.05e-3
"""Maximum p99 of the TTFT error over TLS, in s."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make one run and print its errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="tgi", choices=("vllm", "tgi", "lightllm"))
    parser.add_argument("--endpoint", help="endpoint of the server; default: its native one")
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--itl", type=seconds, help="time between tokens; default 20ms, over TLS 100ms")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--stamps", default="auto")
    parser.add_argument("--busy", action="store_true", help="keep every core busy with an endless loop")
    parser.add_argument("--stop", type=seconds, default=0.0, help="time for which every worker process is stopped")
    parser.add_argument("--concurrency", type=int, help="run a closed loop with this number of clients, not a burst")
    parser.add_argument("--tls", action="store_true", help="measure over TLS, with the server of benchmarks.tls_server")
    asked = parser.parse_args(arguments)
    asked.itl = asked.itl or (TLS_ITL_S if asked.tls else 0.02)
    if asked.tls:
        over_tls(asked)
        return
    if asked.concurrency:
        closed_loop(asked)
        return
    point = CalibrationPoint(
        asked.server, asked.n, asked.itl, asked.output_tokens, asked.workers, asked.stamps, asked.endpoint
    )
    with tempfile.TemporaryDirectory() as folder, others(busy=asked.busy):
        if asked.stop:
            Thread(target=stop_workers, args=(Path(folder) / "run", asked.stop), daemon=True).start()
        run, log = run_calibration_point(point, Path(folder))
        show(runfile.read(run), log)


@contextmanager
def others(*, busy: bool) -> Iterator[None]:
    """Run an endless loop of normal priority on every core while this context is open.

    If `busy` is False, no loops are started.
    """
    loops = []
    for core in os.sched_getaffinity(0) if busy else ():
        loops.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        os.sched_setaffinity(loops[-1].pid, {core})
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def stop_workers(run: Path, for_s: float) -> None:
    """Wait until the run has started, then stop its worker processes for `for_s` seconds.

    A worker process is one that has a part file of the run open.
    """
    while not (run / "run.jsonl").exists():
        time.sleep(0.01)
    time.sleep(STOPPED_AFTER_S)
    writing = set[int]()
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if file.readlink().match(f"{run}/part-*.jsonl"):
                writing.add(int(file.parts[2]))
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for worker in writing:
            os.kill(worker, number)
        time.sleep(for_s)
    print(f"{len(writing)} processes, all that write the run, were stopped for {for_s:g} s")


def show(run: runfile.Run, log: Path, *, burst: bool = True) -> StampComparison:
    """Print the counts of a run, its timestamp errors, and possible causes of lateness. Return the comparison with the
    log.
    """
    sends = read_log(log)
    comparison = compare_with_log(run, sends)
    client = json.loads((run.path.parent / "summary.json").read_text("utf-8"))["client"]
    tokens = sum(sum(record.chunk_tokens) for record in run.records)
    skew_ns = max(r.sent_end_ns or 0 for r in run.records) - min(r.sent_ns or 0 for r in run.records)
    opened = [record.connected_ns for record in run.records if record.connected_ns is not None]
    events = sum(len(line.sent_ns) for line in sends.values())
    print(f"{comparison.requests} of {len(run.records)} requests compared; {tokens} tokens, {events} events logged")
    print(f"connections opened within {(max(opened) - min(opened)) / 1e9:.2f} s")
    skew = f"burst skew {skew_ns / 1e6:.2f} ms; " if burst else ""
    print(f"{skew}of the gaps {comparison.coalesced_share:.2%} within one read")
    print(f"verdict {client['verdict']}; the ring dropped {client['ring_drops']} segments")
    print("\n".join((stamps_heading(), stamps_row(comparison), *stamps_notes(comparison))))
    print(f"\n{'':24}" + "".join(f"{f'p{p:g}':>10}" for p in PERCENTILES))
    percentiles("read lateness, ms", [record.late_ns_max for record in run.records])
    percentiles("server lateness, ms", np.concatenate([np.subtract(s.sent_ns, s.due_ns) for s in sends.values()]))
    show_first_sends(run, sends)
    return comparison


def show_first_sends(run: runfile.Run, sends: Mapping[int, ServerLogLine]) -> None:
    """Print how many first tokens were timestamped before the server's call that sent them had returned.

    The log contains the time before this call. The packet leaves during the call, so a TTFT error below the duration of
    the call is time that the server and its kernel spent on sending, not an error of the client's timestamp.
    """
    start_ns = run.header.start_realtime_ns
    pairs = [(record, sends[record.id]) for record in run.records if record.chunk_ns and record.id in sends]
    pairs = [(record, line) for record, line in pairs if line.first_send_end_ns]
    if not pairs:
        return
    within = sum(record.chunk_ns[0] + start_ns <= line.first_send_end_ns for record, line in pairs)
    percentiles("first send call, ms", [line.first_send_end_ns - line.sent_ns[0] for _, line in pairs])
    print(f"{within} of {len(pairs)} first tokens were timestamped before the server's send call had returned")


def over_tls(asked: argparse.Namespace) -> None:
    """Send a burst, or a closed loop over kept connections, and compare the run with the TLS server's log.

    Exit with code 1 if the p99 of the TTFT error is above TLS_TTFT_ERROR_S.
    """
    with tempfile.TemporaryDirectory() as name, others(busy=asked.busy):
        folder = Path(name)
        certificate, log, jitter_s = make_certificate(folder), folder / "sent.jsonl", 0.0
        load = ["burst"]
        if asked.concurrency:
            load, jitter_s = ["run", f"--arrivals=closed:{asked.concurrency}"], asked.itl / 2
        with serving(certificate, log, TTFT_S, asked.itl, jitter_s) as url:
            options = [f"--url={url}", f"--ca-file={certificate}", "--lengths=approximate", f"--stamps={asked.stamps}"]
            options += [f"--n={asked.n}", f"--output-tokens={asked.output_tokens}", f"--workers={asked.workers}"]
            options += [f"--out={folder}/run", "--quiet", "--no-report"]
            if asked.stop:
                Thread(target=stop_workers, args=(folder / "run", asked.stop), daemon=True).start()
            subprocess.run([sys.executable, "-m", "loadgen", *load, *options], check=False)
        error_s = show(runfile.read(folder / "run"), log, burst=not asked.concurrency).ttft_s.p99
    met = error_s <= TLS_TTFT_ERROR_S
    print(f"TTFT error p99 {error_s * 1e3:.4f} ms over TLS: {'within' if met else 'beyond'} 0.05 ms")
    if not met:
        sys.exit(1)


def closed_loop(asked: argparse.Namespace) -> None:
    """Run a closed loop and print how soon the client notices that a response has ended.

    The end of each response makes the next request due. The delay is the time from the arrival of the end to the due
    time.

    The server shifts each token by up to half of `itl`, so that responses do not end at the same time. The server has a
    separate core. On a shared core, the client would wait some milliseconds for the server."""
    server_core, *client_cores = sorted(os.sched_getaffinity(0))
    script = SimulatedConfig(server=asked.server, ttft_s=0.05, itl_s=asked.itl, jitter_s=asked.itl / 2)
    with (
        tempfile.TemporaryDirectory() as folder,
        others(busy=asked.busy),
        pinned(server_core),
        spawn(script) as url,
        pinned(*(client_cores or [server_core])),
    ):
        load = (f"--arrivals=closed:{asked.concurrency}", f"--n={asked.n}", f"--output-tokens={asked.output_tokens}")
        options = (f"--server={asked.server}", f"--url={url}", f"--workers={asked.workers}", f"--out={folder}/run")
        command = [sys.executable, "-m", "loadgen", "run", *load, *options, "--quiet", "--no-report"]
        subprocess.run(command, check=False)
        records = runfile.read(Path(folder) / "run").records
        client = json.loads((Path(folder) / "run" / "summary.json").read_text("utf-8"))["client"]
    due_ns = sorted(record.due_ns for record in records)[asked.concurrency :]
    ends_ns = sorted(record.end_ns or 0 for record in records)[: len(due_ns)]
    print(f"{len(records)} requests, {asked.concurrency} at a time; verdict {client['verdict']}")
    print(f"\n{'':24}" + "".join(f"{f'p{p:g}':>10}" for p in PERCENTILES))
    percentiles("ends seen after, ms", np.subtract(due_ns, ends_ns))
    percentiles("sent after due, ms", [(record.sent_ns or 0) - record.due_ns for record in records])


def percentiles(name: str, values_ns: Sequence[int] | np.ndarray) -> None:
    """Print one line with the percentiles of these values, converted from ns to ms."""
    print(f"{name:24}" + "".join(f"{value / 1e6:>10.4f}" for value in np.percentile(values_ns, PERCENTILES)))


if __name__ == "__main__":
    main()
