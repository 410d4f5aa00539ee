"""Replays a recorded trace against the built-in simulated server, and compares the server's log with the trace.

    python -m benchmarks.trace_replay conversation_trace.jsonl --n 1000 --speed 10
    python -m benchmarks.trace_replay AzureLLMInferenceTrace_conv.csv --n 1000 --speed 10

The server's log says when each request arrived, and how many tokens its prompt and its response had. This script reads
the trace with its own few lines of code, so that an error of loadgen's reader shows. It understands the layouts of
Mooncake (JSON Lines, timestamps in ms) and of Azure (CSV, dates). It exits with 1 if a request is missing or has other
lengths than the trace says.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.analysis.run import runfile
from loadgen.analysis.run.record import Record
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn
from loadgen.servers.simulated.stream_sender import LogLine
from loadgen.workloads.request import number_of_wire_id

LONGEST_REQUEST_TOKENS = 1 << 20
"""Maximum length of prompt plus output at the simulated server, so that no request of a trace is too long."""


class Row(NamedTuple):
    """One request of a trace."""

    at_s: float
    """Seconds since the first request of the trace."""
    input_tokens: int
    output_tokens: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a trace, print what the server saw, and return 1 if it differs from the trace, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--n", type=int, default=1000, help="number of requests, from the start of the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times faster than recorded")
    options = parser.parse_args(arguments)
    read = read_mooncake if options.trace.suffix == ".jsonl" else read_azure
    rows = read(options.trace, options.n)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "server.jsonl"
        config = SimulatedConfig(server="vllm", log=log, ttft_s=0.02, itl_s=0.001, max_model_len=LONGEST_REQUEST_TOKENS)
        with spawn(config) as url:
            load = ["--arrivals", f"trace:{options.trace},speed={options.speed:g}", "--n", str(len(rows))]
            command = [sys.executable, "-m", "loadgen", "run", "--server", "vllm", "--url", url, *load]
            command += ["--endpoint", "completions", "--out", f"{folder}/run", "--quiet", "--no-report"]
            subprocess.run(command, check=False, capture_output=True)
        records = {record.id: record for record in runfile.read(folder / "run").records}
        arrivals = read_log(log)
    return compare(rows, records, arrivals, options.speed)


def read_mooncake(trace: Path, limit: int) -> list[Row]:
    """Return the first rows of a trace in Mooncake's layout, whose timestamps are in ms."""
    with trace.open(encoding="utf-8") as lines:
        fields = [json.loads(line) for line in islice(lines, limit)]
    start_ms = fields[0]["timestamp"]
    return [
        Row((entry["timestamp"] - start_ms) / 1e3, entry["input_length"], entry["output_length"]) for entry in fields
    ]


def read_azure(trace: Path, limit: int) -> list[Row]:
    """Return the first rows of a trace in Azure's layout, whose timestamps are dates with up to seven decimals."""
    with trace.open(encoding="utf-8", newline="") as lines:
        fields = list(islice(csv.DictReader(lines), limit))
    times = [datetime.fromisoformat(entry["TIMESTAMP"][:26]) for entry in fields]
    return [
        Row((time - times[0]).total_seconds(), int(entry["ContextTokens"]), int(entry["GeneratedTokens"]))
        for time, entry in zip(times, fields, strict=True)
    ]


def read_log(log: Path) -> dict[int, LogLine]:
    """Return the lines of the server's log that belong to requests of the run, by the number of the request."""
    decoded = (
        msgspec.json.decode(line, type=LogLine) for line in log.read_bytes().splitlines() if b"request_id" in line
    )
    return {number_of_wire_id(line.request_id): line for line in decoded if line.request_id}


def compare(rows: Sequence[Row], records: dict[int, Record], arrivals: dict[int, LogLine], speed: float) -> int:
    """Print how the requests that the server received differ from the trace. Return 1 if some differ, or 0."""
    missing = [number for number in range(len(rows)) if number not in arrivals or number not in records]
    present = [number for number in range(len(rows)) if number not in set(missing)]
    wrong_lengths = [
        number
        for number in present
        if (arrivals[number].prompt_tokens, arrivals[number].output_tokens)
        != (rows[number].input_tokens, rows[number].output_tokens)
    ]
    due_s = np.array([records[number].due_ns / 1e9 for number in present])
    planned_s = np.array([rows[number].at_s / speed for number in present])
    late_ms = np.array([((records[number].sent_ns or 0) - records[number].due_ns) / 1e6 for number in present])
    arrived_ms = np.array([arrivals[number].received_ns / 1e6 for number in present]) - planned_s * 1e3
    arrived_ms -= arrived_ms.min()
    print(f"requests of the trace               {len(rows):,}")
    print(f"not received by the server          {len(missing):,}")
    print(f"with other lengths than the trace   {len(wrong_lengths):,}")
    print(f"due time minus time of the trace    at most {np.abs(due_s - planned_s).max() * 1e6:.3f} us")
    print(f"sent after the due time             {_percentiles(late_ms)}")
    print(f"arrival, minus the earliest one     {_percentiles(arrived_ms)}")
    return int(bool(missing or wrong_lengths))


def _percentiles(values_ms: npt.NDArray[np.float64]) -> str:
    median, tail, largest = np.percentile(values_ms, [50, 99, 100])
    return f"p50 {median:.2f} ms, p99 {tail:.2f} ms, largest {largest:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
