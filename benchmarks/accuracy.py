"""How exact are our TTFT and TPOT? One burst against the script clock, stamp by stamp against the server's own log.

    python benchmarks/accuracy.py                          # 1000 streams, 64 tokens, 500 ms, then 20 ms apart
    python benchmarks/accuracy.py --n 2000 --itl 40ms

The simulated server runs in a process of its own on this machine and logs CLOCK_REALTIME immediately before each
`send`. Error of TTFT: (our t_1 - our t_sent) - (the server's first send - our t_sent). Error of TPOT: our TPOT minus
the same quotient over the server's send instants. The errors' whole distribution is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from loadgen import runfile
from loadgen.record import Record
from servers.simulated.config import SimulatedConfig
from servers.simulated.server import spawn

PERCENTILES = (0, 1, 10, 50, 90, 99, 99.9, 100)


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="tgi", choices=("vllm", "tgi", "lightllm"))
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--ttft-ms", type=float, default=500)
    parser.add_argument("--itl-ms", type=float, default=20)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        show(*measure(options, Path(folder)))


def measure(options: argparse.Namespace, folder: Path) -> tuple[runfile.Run, dict[int, dict[str, list[int]]]]:
    """One burst; the run, and the server's log by request id."""
    log = folder / "sim.jsonl"
    config = SimulatedConfig(
        server=options.server,
        clock="script",
        ttft_s=options.ttft_ms / 1e3,
        itl_s=options.itl_ms / 1e3,
        max_concurrent_requests=options.n,
        log=log,
    )
    with spawn(config) as url:
        command = ["burst", "--server", options.server, "--url", url, "--n", str(options.n), "--no-report", "--quiet"]
        command += ["--output-tokens", str(options.output_tokens), "--workers", str(options.workers)]
        subprocess.run([sys.executable, "-m", "loadgen", *command, "--out", str(folder / "run")], check=False)
    lines = (json.loads(line) for line in log.read_text().splitlines())
    return runfile.read(folder / "run"), {int(line["request_id"]): line for line in lines if line.get("request_id")}


def show(run: runfile.Run, log: dict[int, dict[str, list[int]]]) -> None:
    """Print what was asked, what came, and the errors."""
    complete = [record for record in run.records if record.state == "complete"]
    pairs = [(record, np.array(log[record.id]["sent_ns"]) - run.header.start_realtime_ns) for record in complete]
    tokens = sum(sum(record.chunk_tokens) for record in run.records)
    sends = sum(len(line["sent_ns"]) for line in log.values())
    print(f"{len(run.records)} requests, {len(complete)} complete; {tokens} tokens counted, {sends} events logged")
    skew = max(r.sent_end_ns or 0 for r in complete) - min(r.sent_ns or 0 for r in complete)
    print(f"burst skew {skew / 1e6:.2f} ms; stamps {complete[0].stamps}")
    print(f"{'':24}" + "".join(f"{f'p{p:g}':>10}" for p in PERCENTILES))
    row("TTFT error, ms", [(record.chunk_ns[0] - sent[0]) / 1e6 for record, sent in pairs])
    row("TPOT error, ms", [(tpot(record.chunk_ns) - tpot(sent)) / 1e6 for record, sent in pairs])
    row("stamp error, ms", np.concatenate([stamp_errors(record, sent) for record, sent in pairs]) / 1e6)
    row("read lateness, ms", [record.late_ns_max / 1e6 for record in complete])
    server_late = [np.array(log[r.id]["sent_ns"]) - np.array(log[r.id]["due_ns"]) for r in complete]
    row("server lateness, ms", np.concatenate(server_late) / 1e6)
    print(f"coalesced reads {sum(record.coalesced_reads for record in complete)}")


def tpot(instants: list[int] | np.ndarray) -> float:
    """(t_k - t_1) / (k - 1), one token per event."""
    return float(instants[-1] - instants[0]) / (len(instants) - 1)


def stamp_errors(record: Record, sent: np.ndarray) -> np.ndarray:
    """Our stamp minus the server's send instant, per event."""
    ours = np.array(record.chunk_ns)
    return ours - sent if len(ours) == len(sent) else np.array([])


def row(name: str, values: list[float] | np.ndarray) -> None:
    """One line of percentiles."""
    print(f"{name:24}" + "".join(f"{value:>10.4f}" for value in np.percentile(np.asarray(values), PERCENTILES)))


if __name__ == "__main__":
    main()
