"""Measures how late the requests of many concurrent sessions follow the requests before them.

    python -m benchmarks.sessions                       # about 200 sessions at a time, each a graph of 8 requests
    python -m benchmarks.sessions --per-s 5 --rounds 5

Sessions start evenly, 20 per second, and take about 10 s each. Each session has the shape of an agent: a plan, three
sub-agents of two requests each after it, and an answer that waits for all of them. The simulated server runs on the
same machine. A request is late by the time from its due time, which is the end of the response before it plus a delay
of 50 ms, to its send. The goal is a p99 below 5 ms for 200 sessions on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.cli.options import seconds
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn

DELAY_S = 0.05
COLUMNS = ("sessions in flight: mean, peak", "requests", "requests/s", "late p50 / p99 / max, ms", "makespan p50, s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sessions, round by round, and print a row for each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-s", type=float, default=20.0, help="sessions that start per second")
    parser.add_argument("--n", type=int, default=400, help="number of sessions")
    parser.add_argument("--ttft", type=seconds, default="300ms")
    parser.add_argument("--itl", type=seconds, default="60ms")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    print(f"| {' | '.join(COLUMNS)} |\n|{' ---: |' * len(COLUMNS)}")
    for _ in range(options.rounds):
        print(measured(options), flush=True)


def session(number: int, at_s: float) -> dict[str, Any]:
    """Return a session in loadgen's own format."""
    nodes: list[dict[str, Any]] = [{"id": "plan", "input_tokens": 400, "output_tokens": 40}]
    for agent in range(3):
        for turn in range(2):
            parent = f"{agent}/{turn - 1}" if turn else "plan"
            fields = {"id": f"{agent}/{turn}", "after": [{"node": parent, "delay_s": DELAY_S}], "role": "sub-agent"}
            nodes.append(fields | {"history": "fresh", "input_tokens": 300, "output_tokens": 30})
    last = [{"node": f"{agent}/1", "delay_s": DELAY_S} for agent in range(3)]
    nodes.append({"id": "answer", "after": last, "history": "fresh", "input_tokens": 500, "output_tokens": 40})
    return {"session": f"{number}", "at_s": at_s, "nodes": nodes}


def measured(options: argparse.Namespace) -> str:
    """Run all sessions once against a simulated server, and return a row of the table."""
    config = SimulatedConfig(server="vllm", ttft_s=options.ttft, itl_s=options.itl)
    with tempfile.TemporaryDirectory() as folder, spawn(config) as url:
        trace = Path(folder, "sessions.jsonl")
        trace.write_text(
            "".join(json.dumps(session(number, number / options.per_s)) + "\n" for number in range(options.n))
        )
        command = [sys.executable, "-m", "loadgen", "run", "--server", "vllm", "--url", url, "--out", f"{folder}/run"]
        command += ["--workload", f"sessions:{trace}", "--quiet", "--no-report"]
        subprocess.run(command, check=False, capture_output=True)
        summary = json.loads(Path(folder, "run/summary.json").read_text())
    figures = summary["sessions"]
    (edges,) = figures["edges"]
    late = " / ".join(f"{1e3 * edges['late_s'][name]:.2f}" for name in ("p50", "p99", "max"))
    rate = summary["throughput"]["requests_per_s"]
    makespan = figures["makespan_s"]["p50"]
    in_flight = f"{figures['in_flight_mean']:.0f}, {figures['in_flight_peak']}"
    return f"| {in_flight} | {figures['requests']:,} | {rate:.0f} | {late} | {makespan:.2f} |"


if __name__ == "__main__":
    main()
