"""Prints how the memory of a run with --soak grows with its number of requests.

    python -m benchmarks.soak_memory
    python -m benchmarks.soak_memory --sizes 3000 9000      # a quick look

Each run is a closed loop of 64 clients against a simulated server, whose clock goes ten times faster. Each response has
one token. The memory of a process is read four times a second. Its growth is the difference between the medians of the
second fifth and of the last fifth of the run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from loadgen.analysis.run.record_files import record_files
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn_process

CLIENTS = 64
MIB = 1 << 20
PAGE_BYTES = 4096


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 300_000])
    given = parser.parse_args(arguments)
    print("| requests | time | files of Records | process | memory at the end, MiB | growth, MiB |")
    print("| ---: | ---: | ---: | --- | ---: | ---: |")
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            started = time.monotonic()
            samples = memory_of_run(run, size)
            files = len(record_files(run))
            for name, values in samples.items():
                print(
                    f"| {size:,} | {time.monotonic() - started:,.0f} s | {files} | {name} | {values[-1] / MIB:.1f} "
                    f"| {growth(values) / MIB:.1f} |",
                    flush=True,
                )


def memory_of_run(folder: Path, requests: int) -> dict[str, list[int]]:
    """Run the load, and return the resident memory of each process in bytes, over time."""
    samples: dict[str, list[int]] = {}
    with spawn_process(SimulatedConfig(server="vllm", clock="batching", speed=10.0)) as (url, _):
        command = [sys.executable, "-m", "loadgen", "run", "--soak", "--url", url, "--server", "vllm", "--quiet"]
        command += ["--arrivals", f"closed:{CLIENTS}", "--n", str(requests), "--out", str(folder), "--no-report"]
        process = subprocess.Popen([*command, "--input-tokens", "8", "--output-tokens", "1"])
        while process.poll() is None:
            children = children_of(process.pid)
            if len(children) == 2 and (folder / "run.jsonl").exists():
                for name, pid in {"coordinator": process.pid, **children}.items():
                    samples.setdefault(name, []).append(resident_bytes(pid))
            time.sleep(0.25)
        if process.returncode not in (0, 5):
            sys.exit(f"the run of {requests} requests ended with {process.returncode}")
    return {name: [value for value in values if value] for name, values in samples.items()}


def children_of(pid: int) -> dict[str, int]:
    """Return the child processes by name: the worker, and the process that compresses files of Records."""
    names = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline")
        is_keeper = b"record_keeper" in (command.read_bytes() if command.exists() else b"")
        names["compression" if is_keeper else "worker"] = int(child)
    return names


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, or 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def growth(values: Sequence[int]) -> float:
    """Return the growth of a series from its second fifth to its last."""
    fifth = max(1, len(values) // 5)
    return statistics.median(values[-fifth:]) - statistics.median(values[fifth : 2 * fifth])


if __name__ == "__main__":
    main()
