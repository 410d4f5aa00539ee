"""Writes a run file of any size, as if recorded from a long Poisson load on a busy server.

    python -m benchmarks.make_run FOLDER --n 1000000 --chunks 64
    python -m benchmarks.make_run FOLDER --n 1000        # small enough to look at

The same seed gives the same bytes. The file has these properties:

- Requests arrive at 200 per second.
- The first token takes at least 50 ms, and 170 ms on average.
- Further tokens arrive after gamma-distributed gaps of 20 ms on average. One chunk in a thousand has two tokens.
- One response in a thousand fails, and one in a thousand is truncated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Footer, Header, Telemetry

RATE_PER_S = 200
BLOCK = 1000
SECOND_NS = 1_000_000_000
PROMPT_TOKENS = 512


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    print(make_run(given.folder, given.n, given.chunks, given.seed))


def make_run(folder: Path, n: int, chunks: int = 64, seed: int = 0) -> Path:
    """Write `folder/run.jsonl` and return its path. The folder must not exist yet."""
    folder.mkdir(parents=True)
    encode = msgspec.json.Encoder().encode
    counts = dict.fromkeys(("complete", "truncated", "failed"), 0)
    with (folder / "run.jsonl").open("wb") as file:
        file.write(encode(_header(n, chunks, seed)) + b"\n")
        for record in _records(n, chunks, seed):
            counts[record.state] += 1
            file.write(encode(record) + b"\n")
        seconds = n // RATE_PER_S + chunks // 50 + 2
        for second in range(seconds):
            file.write(encode(_telemetry(second)) + b"\n")
        file.write(encode(Footer(ended_ns=seconds * SECOND_NS, sent=n, rejected=0, dropped=0, **counts)) + b"\n")
    return folder / "run.jsonl"


def _records(n: int, chunks: int, seed: int) -> Iterator[Record]:
    random = np.random.default_rng(seed)
    begun_ns = 0
    for first in range(0, n, BLOCK):
        size = min(BLOCK, n - first)
        due_ns = begun_ns + np.cumsum(random.exponential(SECOND_NS / RATE_PER_S, size)).astype(np.int64)
        begun_ns = int(due_ns[-1])
        waits_ns = (50_000_000 + random.gamma(4, 30_000_000, (size, 1))).astype(np.int64)
        gaps_ns = np.concatenate((waits_ns, random.gamma(30, 20_000_000 / 30, (size, chunks - 1)).astype(np.int64)), 1)
        chunk_ns = (due_ns[:, None] + np.cumsum(gaps_ns, axis=1)).tolist()
        tokens = (1 + (random.random((size, chunks)) < 0.001)).tolist()
        luck = random.random(size).tolist()
        for index in range(size):
            yield _record(first + index, int(due_ns[index]), chunk_ns[index], tokens[index], luck[index])


def _record(number: int, due_ns: int, chunk_ns: list[int], tokens: list[int], luck: float) -> Record:
    sent = {
        "id": number,
        "due_ns": due_ns,
        "connected_ns": due_ns - 1_000_000,
        "sent_ns": due_ns + 30_000,
        "sent_end_ns": due_ns + 36_000,
        "prompt_tokens_asked": PROMPT_TOKENS,
        "output_tokens_asked": sum(tokens),
    }
    if luck < 0.001:
        said = f"queue is full, request {number} refused"
        failure = {"error_kind": "http_status", "http_status": 429, "error_detail": said}
        return Record(**sent, state="failed", end_ns=due_ns + 2_000_000, **failure)
    answered = {
        "first_byte_ns": chunk_ns[0],
        "http_status": 200,
        "prompt_tokens": PROMPT_TOKENS,
        "stamps": "socket",
        "late_ns_max": 400_000,
    }
    if luck < 0.002:
        half = len(chunk_ns) // 2
        cut: dict[str, Any] = {"chunk_ns": chunk_ns[:half], "chunk_tokens": tokens[:half], "end_ns": chunk_ns[half]}
        return Record(**sent, **answered, **cut, state="truncated", error_kind="truncated", error_detail="cut off")
    return Record(
        **sent,
        **answered,
        state="complete",
        chunk_ns=chunk_ns,
        chunk_tokens=tokens,
        end_ns=chunk_ns[-1] + 20_000,
        finish_reason="length",
        output_tokens=sum(tokens),
        counted_by="server",
        reads=len(chunk_ns) + 1,
    )


def _telemetry(second: int) -> Telemetry:
    values = {
        "cpu_ns": 300_000_000,
        "wall_ns": SECOND_NS,
        "reads": 13_000,
        "coalesced_reads": 2,
        "stall_ns_max": 2_000_000,
        "clock_disagreement_ns": 900,
        "late_counts": {"20": 10_000, "28": 2_800, "36": 200},
    }
    return Telemetry(source="client", at_ns=(second + 1) * SECOND_NS, values=values)


def _header(n: int, chunks: int, seed: int) -> Header:
    plan = {
        "server": "vllm",
        "endpoint": "completions",
        "url": "http://127.0.0.1:8001",
        "arrivals": f"poisson:{RATE_PER_S}",
        "n": n,
        "input_tokens": PROMPT_TOKENS,
        "output_tokens": chunks,
        "seed": seed,
        "workers": 1,
        "timeout_s": 600.0,
        "label": "made",
    }
    return Header(
        version="0.1.0",
        command=["loadgen", "run", "--server", "vllm", "--arrivals", plan["arrivals"], "--n", str(n)],
        started_at="2026-01-01T00:00:00Z",
        start_ns=SECOND_NS,
        plan=plan,
        server={"name": "vllm", "version": "0", "model": "made up", "simulated": True, "limits": {}},
        client={"stamps": "socket", "prompts": "made up"},
    )


if __name__ == "__main__":
    main()
