"""How exact are our TTFT and TPOT? One burst against the script clock, stamp by stamp against the server's own log.

    python -m benchmarks.accuracy                          # 1000 streams, 64 tokens, 500 ms, then 20 ms apart
    python -m benchmarks.accuracy --n 2000 --itl 40ms

It is one burst of `loadgen calibrate`, which see, with the whole distribution of what went into its row.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.client import compare_with_log, read_log, stamps_heading, stamps_notes, stamps_row
from loadgen import runfile
from loadgen.cli.calibrate import drive
from loadgen.cli.options import seconds
from loadgen.host import Point

PERCENTILES = (0, 1, 10, 50, 90, 99, 99.9, 100)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="tgi", choices=("vllm", "tgi", "lightllm"))
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--itl", type=seconds, default=0.02)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--stamps", default="auto")
    asked = parser.parse_args(arguments)
    point = Point(asked.server, asked.n, asked.itl, asked.output_tokens, asked.workers, asked.stamps)
    with tempfile.TemporaryDirectory() as folder:
        run, log = drive(point, Path(folder))
        show(runfile.read(run), log)


def show(run: runfile.Run, log: Path) -> None:
    """What was asked, what came, the errors, and what there was to be late about."""
    sends = read_log(log)
    comparison = compare_with_log(run, sends)
    tokens = sum(sum(record.chunk_tokens) for record in run.records)
    skew_ns = max(r.sent_end_ns or 0 for r in run.records) - min(r.sent_ns or 0 for r in run.records)
    events = sum(len(line.sent_ns) for line in sends.values())
    print(f"{comparison.requests} of {len(run.records)} requests compared; {tokens} tokens, {events} events logged")
    print(f"burst skew {skew_ns / 1e6:.2f} ms; of the gaps {comparison.coalesced_share:.2%} within one read")
    print("\n".join((stamps_heading(), stamps_row(comparison), *stamps_notes(comparison))))
    print(f"\n{'':24}" + "".join(f"{f'p{p:g}':>10}" for p in PERCENTILES))
    percentiles("read lateness, ms", [record.late_ns_max for record in run.records])
    percentiles("server lateness, ms", np.concatenate([np.subtract(s.sent_ns, s.due_ns) for s in sends.values()]))


def percentiles(name: str, values_ns: Sequence[int] | np.ndarray) -> None:
    """One line of percentiles."""
    print(f"{name:24}" + "".join(f"{value / 1e6:>10.4f}" for value in np.percentile(values_ns, PERCENTILES)))


if __name__ == "__main__":
    main()
