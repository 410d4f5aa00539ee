"""Fabricates runs for tests of `loadgen compare`: bursts with random latencies, and bursts with almost exact ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace as changed

from loadgen.analysis.compare import ComparedRun, read_run
from loadgen.analysis.compare.figures import ComparedFigure
from tests.support.runs import burst, complete, failed, footer, header, healthy, write


def run(
    folder: Path, *, pace: float = 1.0, seed: int = 1, n: int = 60, lost: int = 0, chunks: int = 8, **changes: Any
) -> ComparedRun:
    """Write a fabricated burst of `n` requests with random latencies, and return it as a run to compare.

    The latencies are proportional to `pace`. The last `lost` requests have failed. `changes` are fields of the header.
    """
    records = [*burst(n - lost, chunks, seed=seed, pace=pace), *(failed(n - 1 - place) for place in range(lost))]
    facts = changes.pop("facts", None)
    first = header(n, **changes)
    first.server = facts or first.server
    return read_run(write(folder, [first, *records, *healthy(), footer(records)]))


def limited(run: ComparedRun) -> ComparedRun:
    """Return a copy of the run in which the client, not the server, limited the throughput."""
    client = changed(run.summary.client, verdict="limited", reasons=["reads were late"])
    return replace(run, summary=changed(run.summary, client=client))


def scripted(folder: Path, *, ttft_ms: float = 200, itl_ms: float = 20, chunks: int = 24, seed: int = 1) -> ComparedRun:
    """Write a fabricated burst of 70 requests, and return it as a run to compare.

    Chunk k of each request arrives after `ttft_ms + k * itl_ms`, plus a random delay of at most 1 ms.
    """
    random = np.random.default_rng(seed)
    records = [
        complete(place, [int(1e6 * (ttft_ms + itl_ms * step + random.uniform(0, 1))) for step in range(chunks)])
        for place in range(70)
    ]
    return read_run(write(folder, [header(70), *records, *healthy(), footer(records)]))


def row(**changes: Any) -> ComparedFigure:
    """Return one row of a comparison: run B is 10% slower than run A, with an error of 1%.

    `changes` replace fields of the row.
    """
    values: dict[str, Any] = {
        "figure": "ttft.p99", "unit": "s", "direction": "lower", "a": 1.0, "b": 1.1, "difference": 0.1,
        "difference_ci95": (0.08, 0.12), "ratio": 1.1, "ratio_ci95": (1.08, 1.12), "p_value": 1e-6, "test": "",
        "error": 0.01, "degrees_of_freedom": 30.0, "count": 100,
    }  # fmt: skip
    return ComparedFigure(**(values | changes))
