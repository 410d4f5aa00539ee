"""Measures the cost of `loadgen report` on runs of different sizes: time, peak memory, and CPU time per request.

    python -m benchmarks.report_scale
    python -m benchmarks.report_scale --sizes 1000 10000 --chunks 16     # a quick look

Each measurement is one complete command in a separate process, on a file from make_run.py. The start-up cost is the CPU
time for a run with one request. It is subtracted before the cost per request is computed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from benchmarks.make_run import make_run

ROOT = Path(__file__).parents[1]


class Cost(NamedTuple):
    """Time, memory and file sizes of one `loadgen report` command."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    page_bytes: int
    run_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--chunks", type=int, default=64)
    given = parser.parse_args(arguments)
    start_s = cost(1, given.chunks).cpu_s
    print(f"processor time of a run of one request: {start_s:.2f} s")
    print("| requests | run file | time | processor time | per request | peak memory | page |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for size in given.sizes:
        found = cost(size, given.chunks)
        each_us = max(0.0, found.cpu_s - start_s) / size * 1e6
        print(
            f"| {size:,} | {found.run_bytes / 1e6:,.0f} MB | {found.wall_s:.1f} s | {found.cpu_s:.1f} s "
            f"| {each_us:.0f} us | {found.peak_bytes / 1e6:,.0f} MB | {found.page_bytes / 1e6:.2f} MB |",
            flush=True,
        )


def cost(requests: int, chunks: int) -> Cost:
    """Write a run file, measure `loadgen report` on it, and delete the file."""
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", requests, chunks)
        command = [sys.executable, "-m", "loadgen", "report", str(run.parent), "--quiet"]
        begun = perf_counter()
        process = subprocess.Popen(command, cwd=ROOT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = perf_counter() - begun
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with {process.returncode}")
        page = (run.parent / "report.html").stat().st_size
        return Cost(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, page, run.stat().st_size)


if __name__ == "__main__":
    main()
