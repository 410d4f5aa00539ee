"""Tests whether the client's scheduling priority keeps it on time if a server on the same machine uses all cores.

    python -m benchmarks.priority                      # a closed loop of 8, two endless loops on every core
    python -m benchmarks.priority --loops 0            # without endless loops: are the figures the same?
    python -m benchmarks.priority --loops 0 --arrivals burst --n 1000 --ttft 500ms --itl 20ms --output-tokens 64

The endless loops stand for the server. They run in a separate session, like a server that was started in another
terminal. The simulated server competes with them at normal priority. Every priority is measured once per round, so that
runs of the same round can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from loadgen.analysis.calibration import compare_with_log, read_log
from loadgen.analysis.run import runfile
from loadgen.cli.options import seconds
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn

PRIORITIES = ("normal", "auto", "realtime")
COLUMNS = (
    *("priority", "dispatch delay p50 / p99 / max, ms", "mean in flight", "requests/s", "TTFT p50, ms"),
    *("TTFT error p50 / p99, ms", "waited for a core, ms", "tokens per CPU-s"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each priority, round by round, and print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrivals", default="closed:8")
    parser.add_argument("--n", type=int, default=160)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--ttft", type=seconds, default="20ms")
    parser.add_argument("--itl", type=seconds, default="4ms")
    parser.add_argument("--loops", type=int, default=2, help="endless loops per core")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    print(f"| {' | '.join(COLUMNS)} |\n| --- |{' ---: |' * (len(COLUMNS) - 1)}")
    for _ in range(options.rounds):
        for priority in PRIORITIES:
            with endless_loops(options.loops * len(os.sched_getaffinity(0))):
                print(measured(priority, options), flush=True)


@contextmanager
def endless_loops(count: int) -> Iterator[None]:
    """Run `count` endless loops in separate processes and sessions, at normal priority, while this context is open."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measured(priority: str, options: argparse.Namespace) -> str:
    """Make one run at this priority and return its row."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run, log = folder / "run", folder / "sends.jsonl"
        config = SimulatedConfig(server="vllm", ttft_s=options.ttft, itl_s=options.itl, log=log)
        url = stack.enter_context(spawn(config))
        command = [sys.executable, "-m", "loadgen", "run", "--server=vllm", f"--url={url}", f"--out={run}", "--quiet"]
        command += [f"--arrivals={options.arrivals}", f"--n={options.n}", "--input-tokens=16"]
        command += [f"--output-tokens={options.output_tokens}", f"--client-priority={priority}"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # 5: the client was the limit
        errors = compare_with_log(runfile.read(run), read_log(log)).ttft_s
        records = runfile.read(run).records
        client = json.loads((run / "summary.json").read_text("utf-8"))["client"]
    sent = [record for record in records if record.sent_ns is not None]
    delays_ms = np.array([(record.sent_ns or 0) - record.due_ns for record in sent]) / 1e6
    ttft_ms = np.array([record.chunk_ns[0] - (record.sent_ns or 0) for record in sent if record.chunk_ns]) / 1e6
    ends_ns = [record.end_ns or 0 for record in sent]
    span_ns = max(ends_ns) - min(record.due_ns for record in sent)
    in_flight = sum(end_ns - (record.sent_ns or 0) for record, end_ns in zip(sent, ends_ns, strict=True)) / span_ns
    delays = " / ".join(f"{delay:.2f}" for delay in np.percentile(delays_ms, (50, 99, 100)))
    cells = [priority, delays, f"{in_flight:.2f}", f"{len(sent) / span_ns * 1e9:.1f}", f"{np.median(ttft_ms):.2f}"]
    cells += [f"{errors.p50 * 1e3:.3f} / {errors.p99 * 1e3:.3f}"]
    cells += ["unknown" if client["core_wait_s"] is None else f"{client['core_wait_s'] * 1e3:.0f}"]
    cells += [f"{sum(sum(record.chunk_tokens) for record in sent) / client['cpu_s']:,.0f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
