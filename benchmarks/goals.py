"""Compares loadgen with its performance goals, with a client in C, and with vLLM's client in Rust, under the same
loads.

    python -m benchmarks.goals                    # half an hour
    python -m benchmarks.goals --without-rust     # without a download of vLLM's wheel
    python -m benchmarks.goals --tiny             # a check of some seconds that it runs

The server has one core and the client another one, even if the client has two worker processes. The errors are those of
single requests: the difference between loadgen's record of a request and the server's log of this request.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.comparison import baseline, drive, judge, machine, model, ours, table, vllm_bench
from benchmarks.comparison.client import Client
from benchmarks.comparison.install import ensure
from benchmarks.peers import BEGIN, ENVIRONMENTS, PEAK, RATE, SKEW, WALL
from loadgen.analysis.run import runfile
from loadgen.workloads.request import number_of_wire_id

RATIO, LATE = "of C's rate", "server late p99, ms"
TTFT_P99, TPOT_P99 = "TTFT error p99, ms", "TPOT error p99, ms"
DROPS = "ring drops"
COLUMNS = (
    table.Column(RATE, 0, table.larger),
    table.Column(RATIO, 2, table.larger),
    table.Column(WALL, 1, table.smaller),
    table.Column(BEGIN, 2, table.smaller),
    table.Column(PEAK, 0, table.smaller),
    table.Column(SKEW, 1, table.smaller),
    table.Column(TTFT_P99, 4, table.smaller),
    table.Column(TPOT_P99, 4, table.smaller),
    table.Column(DROPS, 0, table.smaller),
    table.Column(LATE, 2, table.smaller),
    table.Column(drive.OTHERS, 2),
)


@dataclass(frozen=True, slots=True)
class Goal:
    """A load for which loadgen has performance goals."""

    n: int
    output_tokens: int
    ttft_s: float = 0.5
    itl_s: float = 0.02
    workers: int = 1

    def __str__(self) -> str:
        times = f"first after {self.ttft_s * 1e3:g} ms, then every {self.itl_s * 1e3:g} ms"
        workers = f"; {self.workers} workers" if self.workers > 1 else ""
        return f"{self.n:,} x {self.output_tokens} tokens, {times}{workers}"


GOALS = (
    Goal(10, 128),
    Goal(1000, 128),
    Goal(1000, 512),
    Goal(1000, 128, itl_s=0.04),
    # Again 50,000 events a second. The server needs seconds to accept this number of requests. It must have accepted
    # all of them before the first token is due, because its own lateness would otherwise hide that of the client.
    Goal(10_000, 64, ttft_s=8, itl_s=0.2, workers=2),
    # The largest number of streams for a server process with a limit of 20,000 open files.
    Goal(19_900, 8, ttft_s=12, itl_s=0.4, workers=2),
)
TINY = (Goal(4, 5, 0.02, 0.002), Goal(4, 5, 0.02, 0.002, workers=2))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every load with every client, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tries", type=int, default=3, help="maximum number of runs if other processes disturb a run")
    parser.add_argument("--patience-s", type=float, default=60, help="maximum wait for other processes before a run")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--without-rust", action="store_true")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the goals to run, from 1 on")
    parser.add_argument("--envs", type=Path, default=ENVIRONMENTS, help="folder in which the client in C is installed")
    options = parser.parse_args(arguments)
    print(machine.described(), end="\n\n", flush=True)
    rows: dict[str, table.Row | str] = {}
    with tempfile.TemporaryDirectory() as place:
        server_core, client_cores = machine.cores()
        setting = drive.Setting(server_core=server_core, client_cores=client_cores, model=model.make(Path(place)))
        goals = TINY if options.tiny else GOALS
        for goal in [goals[place - 1] for place in options.only] if options.only else goals:
            rows |= _rows(goal, setting, options)
    print(table.markdown(COLUMNS, rows).replace("**", ""))


def _rows(goal: Goal, setting: drive.Setting, options: argparse.Namespace) -> dict[str, table.Row | str]:
    """Return the median figures of each client under one load, or the reason why a client failed.

    The clients alternate, because the speed of a machine changes over minutes.
    """
    setting = replace(setting, n=goal.n, output_tokens=goal.output_tokens, ttft_s=goal.ttft_s, itl_s=goal.itl_s)
    clients = {"loadgen": ours.client(goal.workers), "C": baseline.CLIENT}
    if not (options.tiny or options.without_rust):
        clients["vllm-rs"] = vllm_bench.RUST
    found: dict[str, table.Row | str] = {}
    turns: dict[str, list[table.Row]] = {name: [] for name in clients}
    for turn, name in product(range(options.repeats + 1), clients):
        if name in found:
            continue
        try:
            turns[name].append(_turn(clients[name], setting, options, memory=turn == 0))
        except (drive.FailedError, OSError) as problem:
            found[name] = f"failed: {problem}"
    found = {name: found.get(name) or table.medians(rows) for name, rows in turns.items()}
    if not isinstance(floor := found["C"], str):
        found = {
            name: row if isinstance(row, str) else {**row, RATIO: row[RATE] / floor[RATE]}
            for name, row in found.items()
        }
    return {f"{name}: {goal}": row for name, row in found.items()}


def _turn(client: Client, setting: drive.Setting, options: argparse.Namespace, *, memory: bool) -> table.Row:
    """Make one run of a client and return its figures. With `memory`, only the peak memory is measured."""
    run = partial(_run, client, ensure(client, options.envs), setting, memory=memory)
    return drive.quietest(run, options.tries, options.patience_s)


def _run(client: Client, folder: Path, setting: drive.Setting, *, memory: bool) -> table.Row:
    with drive.once(client, folder, setting, memory=memory) as outcome:
        print(f"{client.name}: {outcome.truth}", file=sys.stderr, flush=True)
        if outcome.peak_bytes is not None:
            return {PEAK: outcome.peak_bytes / 1e6, drive.OTHERS: outcome.others_cores}
        row = {
            drive.OTHERS: outcome.others_cores,
            RATE: outcome.truth.events / max(outcome.cpu_s, 1e-9),
            WALL: outcome.wall_s,
            BEGIN: outcome.first_byte_s,
            SKEW: outcome.truth.skew_ms,
            LATE: outcome.truth.server_late_ms,
        }
        return {**row, **(errors(outcome) if (outcome.scratch / ours.RUN).exists() else {})}


def errors(outcome: drive.Outcome) -> table.Row:
    """Return the p99 of the absolute TTFT and TPOT errors over all requests, and the number of dropped packets.

    An error is the recorded minus the logged value. Both TTFTs begin when the client sent the request.
    """
    run = runfile.read(outcome.scratch / ours.RUN)
    log = {number_of_wire_id(line["request_id"]): line for line in outcome.requests}
    pairs = [(record, log[record.id]) for record in run.records if record.state == "complete"]
    start_ns = run.header.start_realtime_ns
    ttft_ms = [(record.chunk_ns[0] - (line["sent_ns"][0] - start_ns)) / 1e6 for record, line in pairs]
    tpot_ms = [
        (record.chunk_ns[-1] - record.chunk_ns[0]) / max(1, sum(record.chunk_tokens) - record.chunk_tokens[0]) / 1e6
        - judge.tpot_ms(line)
        for record, line in pairs
    ]
    return {
        TTFT_P99: float(np.percentile(np.abs(ttft_ms), 99)),
        TPOT_P99: float(np.percentile(np.abs(tpot_ms), 99)),
        DROPS: float(sum(each.values.get("ring_drops", 0) for each in run.telemetry if each.source == "client")),
    }


if __name__ == "__main__":
    main()
