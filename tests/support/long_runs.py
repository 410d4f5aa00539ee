"""Fabricates the Records of long runs with a constant load, whose latency may change with time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Run, Telemetry, load_facts
from tests.support.runs import complete, header, run_of

S = 1_000_000_000
CHUNKS = 4
SEED = 3


def constant(_: float) -> float:
    """Return the time to the first token of a server that never changes, in seconds."""
    return 0.1


def requests_over(
    duration_s: float,
    ttft_s: Callable[[float], float] = constant,
    *,
    rate_per_s: float = 2.0,
    spread: float = 0.2,
    seed: int = SEED,
) -> list[Record]:
    """Return the Records of requests with Poisson arrivals.

    `ttft_s` is the median time to the first token of a request, by its due time in seconds. `spread` is the standard
    deviation of its logarithm. Further tokens follow after 20 ms each.
    """
    random = np.random.default_rng(seed)
    due_s = np.cumsum(random.exponential(1 / rate_per_s, int(duration_s * rate_per_s)))
    noise = random.lognormal(0, spread, len(due_s))
    records = []
    for number, (due, factor) in enumerate(zip(due_s.tolist(), noise.tolist(), strict=True)):
        due_ns = int(due * S)
        first_ns = due_ns + int(ttft_s(due) * factor * S)
        chunks = [first_ns + index * S // 50 for index in range(CHUNKS)]
        records.append(complete(number, chunks, due_ns=due_ns, sent_ns=due_ns + 20_000, sent_end_ns=due_ns + 25_000))
    return records


def long_run(folder: Path, records: list[Record], telemetry: list[Telemetry] | None = None) -> Run:
    """Write and read the run file of these Records, as of a run with a constant rate."""
    facts = header(len(records)).plan | {"arrivals": "poisson:2"}
    return run_of(folder / "run", records, telemetry=telemetry, plan=facts, load=load_facts("poisson:2", ""))
