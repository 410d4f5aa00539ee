"""Tests whether one worker process can receive 100,000 tokens a second for 30 s.

    python -m benchmarks.firehose                       # 2,000 streams of 1,500 tokens
    python -m benchmarks.firehose --per-second 150000
    python -m benchmarks.firehose --tiny                # a quick check that it runs

The server is written in C, because the simulated server reaches only a third of this rate on one core. Server and
client use different cores. The output states the numbers of sent and received tokens, and how many packets the packet
ring dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.comparison import machine
from benchmarks.comparison.install import run
from loadgen.analysis.run import runfile

SOURCE = Path(__file__).with_suffix(".c")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make one run and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=2_000)
    parser.add_argument("--output-tokens", type=int, default=1_500)
    parser.add_argument("--per-second", type=int, default=100_000)
    parser.add_argument("--tiny", action="store_true", help="10 streams of 20 tokens")
    asked = parser.parse_args(arguments)
    n, tokens = (10, 20) if asked.tiny else (asked.n, asked.output_tokens)
    server_core, client_cores = machine.cores()
    with (
        tempfile.TemporaryDirectory() as place,
        pouring(Path(place), n, tokens, asked.per_second, server_core) as server,
    ):
        url, folder = f"http://127.0.0.1:{server.stdout.readline().strip()}", Path(place) / "run"
        load = (
            f"--url={url}",
            f"--n={n}",
            f"--output-tokens={tokens}",
            "--input-tokens=16",
            "--lengths=approximate",
            "--timeout=120s",
        )
        command = [sys.executable, "-m", "loadgen", "burst", "--server=openai", *load, f"--out={folder}", "--no-report"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "--quiet"], check=False, preexec_fn=lambda: os.sched_setaffinity(0, client_cores))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        sent, seconds = server.stdout.readline().split()
        client = json.loads((folder / "summary.json").read_text("utf-8"))["client"]
        records = runfile.read(folder).records
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    came = sum(sum(record.chunk_tokens) for record in records)
    print(f"{int(sent):,} tokens sent in {seconds} s: {int(sent) / float(seconds):,.0f} a second")
    print(f"{came:,} came, by {', '.join({record.stamps for record in records})} stamps")
    print(f"the ring dropped {client['ring_drops']}, merged {sum(record.coalesced_reads for record in records)}")
    print(f"verdict {client['verdict']} {client['reasons']}; {cpu_s / came * 1e6:.1f} us of CPU per token")


@contextmanager
def pouring(place: Path, n: int, tokens: int, per_second: int, core: int) -> Iterator[subprocess.Popen[str]]:
    """Compile the server, start it on `core`, and yield its process. The first line of its output is its port."""
    run("cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(place / "firehose"), str(SOURCE))
    command = [place / "firehose", str(n), str(tokens), str(per_second)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        os.sched_setaffinity(server.pid, {core})
        yield server
        server.stdin.close()


if __name__ == "__main__":
    main()
