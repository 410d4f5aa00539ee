"""Fabricates the records, headers and run files of load tests, with requests in any state (complete, failed, ...)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.analysis import build_summary as summarising
from loadgen.analysis.frame import Frame
from loadgen.analysis.report.findings import findings
from loadgen.analysis.report.run_document import ReportedRun, brief_document, prepare_run
from loadgen.analysis.report.terminal import render
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Footer, Header, Run, Telemetry, read
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.summary import Summary, as_dict
from loadgen.servers.backends import BACKENDS

MILLISECOND_NS = 1_000_000
VERSION_NOTES: dict[str, dict[str, Any]] = {"tgi": {"prompt_piece_tokens": 1024}}
"""By server, the notes that the probe adds to the server's notes for the version in `header`."""


def summarise(run: Run, frame: Frame | None = None) -> dict[str, Any]:
    """Return the content of summary.json for this run."""
    return as_dict(summarising.summarise(run, frame))


def typed(found: Mapping[str, Any] | Summary) -> Summary:
    """Convert the content of summary.json to a Summary. Raises msgspec.ValidationError if the content is invalid.

    A Summary is returned unchanged.
    """
    if isinstance(found, Summary):
        return found
    return msgspec.convert({**found, "memory": found["memory"] or None}, Summary)


def header(n: int = 1000, *, server: str = "tgi", simulated: bool = False, **changes: Any) -> Header:
    """Return the header of a run file of `loadgen burst` with `n` requests. `changes` replace fields of the header."""
    facts: dict[str, Any] = {
        "name": server,
        "version": "3.3.5",
        "model": "Llama-2-7b-chat",
        "url": "http://127.0.0.1:8002",
        "simulated": simulated,
        "limits": {"max_concurrent_requests": 1000, "max_total_tokens": 4096},
        "notes": {**BACKENDS[server].notes, **VERSION_NOTES.get(server, {})} if server in BACKENDS else {},
    }
    plan = {
        "server": server,
        "endpoint": "generate",
        "url": facts["url"],
        "n": n,
        "input_tokens": 512,
        "output_tokens": 64,
        "seed": 7,
        "workers": 1,
        "timeout_s": 600.0,
        "label": "burst",
    }
    values: dict[str, Any] = {
        "version": "0.1.0",
        "command": ["loadgen", "burst", "--server", server, "--n", str(n), "--seed", "7"],
        "started_at": "2026-11-21T09:00:00Z",
        "start_ns": 1_000_000_000,
        "plan": plan,
        "server": facts | ({"speed": 5.0} if simulated else {}),
        "host": {"hostname": "bench-1", "os": "Linux", "kernel": "6.1", "python": "3.11.9", "cpu": "EPYC", "cores": 2},
        "client": {"stamps": "socket", "prompts": "server's own /tokenize"},
    }
    return Header(**(values | changes))


def complete(
    request_id: int, chunk_ns: Sequence[int], *, tokens: Sequence[int] | None = None, **changes: Any
) -> Record:
    """Return the record of a complete request that was sent at time 0 and whose chunks arrived at `chunk_ns`.

    `tokens` contains the number of tokens per chunk (default: 1). `changes` replace fields of the record.
    """
    counts = list(tokens or [1] * len(chunk_ns))
    values: dict[str, Any] = {
        "state": "complete",
        "connected_ns": -50 * MILLISECOND_NS,
        "sent_ns": 0,
        "sent_end_ns": 5_000,
        "first_byte_ns": chunk_ns[0] if chunk_ns else None,
        "chunk_ns": list(chunk_ns),
        "chunk_tokens": counts,
        "end_ns": chunk_ns[-1] + 100_000 if chunk_ns else None,
        "http_status": 200,
        "finish_reason": "length",
        "prompt_tokens_asked": 512,
        "prompt_tokens": 512,
        "output_tokens_asked": sum(counts),
        "output_tokens": sum(counts),
        "counted_by": "server",
        "stamps": "socket",
        "late_ns_max": 400_000,
        "reads": len(chunk_ns) + 1,
    }
    return Record(id=request_id, **(values | changes))


def burst(n: int = 1000, chunks: int = 64, *, seed: int = 1, running: int = 128, pace: float = 1.0) -> list[Record]:
    """Return the records of a burst of `n` requests on a server that runs `running` requests at a time.

    The first tokens therefore arrive in waves. The latencies are random and proportional to `pace`.
    """
    random = np.random.default_rng(seed)
    records = []
    for request_id in range(n):
        sent_ns = request_id * 9_000
        wave = request_id // running
        start_ns = int((120 + wave * chunks * 22 * pace + random.gamma(4, 15)) * MILLISECOND_NS) + sent_ns
        gaps = (random.gamma(30, 20 * pace / 30, chunks - 1) * MILLISECOND_NS).astype(np.int64)
        instants = [start_ns, *(start_ns + np.cumsum(gaps)).tolist()]
        records.append(complete(request_id, instants, sent_ns=sent_ns, sent_end_ns=sent_ns + 6_000))
    return records


def failed(request_id: int, kind: str = "http_status", detail: str = "Model is overloaded", **changes: Any) -> Record:
    """Return the record of a request that failed without a response. `changes` replace fields of the record."""
    values: dict[str, Any] = {
        "state": "failed",
        "sent_ns": request_id * 9_000,
        "sent_end_ns": request_id * 9_000 + 6_000,
        "end_ns": 40 * MILLISECOND_NS,
        "error_kind": kind,
        "error_detail": detail,
        "http_status": 429 if kind == "http_status" else None,
        "prompt_tokens_asked": 512,
        "output_tokens_asked": 64,
    }
    return Record(id=request_id, **(values | changes))


def truncated(request_id: int, chunk_ns: Sequence[int], **changes: Any) -> Record:
    """Return the record of a request whose stream ended too early. `changes` replace fields of the record."""
    values: dict[str, Any] = {
        "state": "truncated",
        "error_kind": "truncated",
        "error_detail": "the response ended, after 3 tokens and without the end marker",
        "output_tokens": None,
        "output_tokens_asked": 64,
        "counted_by": "",
    }
    return complete(request_id, chunk_ns, **(values | changes))


def rejected(request_id: int, detail: str = "Model is overloaded (overloaded)", **changes: Any) -> Record:
    """Return the record of a request that an overloaded server rejected. `changes` replace fields of the record."""
    return failed(request_id, "rejected", detail, **({"state": "rejected", "http_status": 429} | changes))


def dropped(request_id: int) -> Record:
    """Return the record of a request that was dropped instead of sent."""
    return Record(id=request_id, state="dropped", error_kind="dropped", prompt_tokens_asked=512, output_tokens_asked=64)


def healthy(seconds: int = 10, **changes: Any) -> list[Telemetry]:
    """Return the health telemetry, one sample per second, of a client that was not the bottleneck.

    `changes` replace values of every sample.
    """
    values: dict[str, Any] = {
        "cpu_ns": 300_000_000,
        "wall_ns": 1_000_000_000,
        "reads": 6_500,
        "coalesced_reads": 0,
        "stall_ns_max": 2_000_000,
        "clock_disagreement_ns": 900,
        "late_counts": {"20": 5_000, "28": 1_400, "36": 100},
    }
    return [
        Telemetry(source="client", at_ns=(second + 1) * 1_000_000_000, values=values | changes)
        for second in range(seconds)
    ]


def footer(records: Sequence[Record], **changes: Any) -> Footer:
    """Return a run file's footer that is consistent with the records. `changes` replace fields of the footer."""
    states = [record.state for record in records]
    counts = {state: states.count(state) for state in ("complete", "truncated", "failed", "rejected", "dropped")}
    last_ns = max((record.end_ns or 0 for record in records), default=0)
    return Footer(**({"ended_ns": last_ns + 1_000_000, "sent": len(records) - counts["dropped"], **counts} | changes))


def write(folder: Path, lines: Iterable[Any]) -> Path:
    """Write `run.jsonl` into a new folder, and return the folder.

    A line of type bytes is written unchanged, so that a test can write a malformed line.
    """
    folder.mkdir(parents=True)
    encoded = [line if isinstance(line, bytes) else msgspec.json.encode(line) for line in lines]
    (folder / "run.jsonl").write_bytes(b"\n".join(encoded) + b"\n")
    return folder


def run_of(
    folder: Path, records: Sequence[Record], *, telemetry: Sequence[Telemetry] | None = None, **changes: Any
) -> Run:
    """Write the run file of a finished run, and read it. `changes` replace fields of the header."""
    samples = healthy() if telemetry is None else telemetry
    write(folder, [header(len(records), **changes), *records, *samples, footer(records)])
    return read(folder)


def part_of(run: Run) -> ReportedRun:
    """Return the data from which the HTML report of this run is made."""
    summary = typed(summarise(run))
    return prepare_run(run, frame_of_run(run), summary)


def text_of(summary: Any, *, width: int = 80, colour: bool = False) -> str:
    """Return the terminal report of a summary."""
    return render(brief_document(typed(summary)), width=width, colour=colour)


def said(summary: Any, name: str) -> str:
    """Return the sentences of all findings with the id `name`, joined by spaces."""
    return " ".join(each.sentence for each in findings(typed(summary)) if each.id == name)


def loop(number: int = 400, *, warmup: int = 0, rate_per_s: float = 100, stay_ms: int = 500) -> list[Record]:
    """Return the records of an open loop with a constant rate, on a server with a constant latency of `stay_ms`.

    The warm-up requests come before time 0, one after another.
    """
    gap_ns = round(1e9 / rate_per_s)
    before = [-(warmup - index) * (stay_ms + 10) * MILLISECOND_NS for index in range(warmup)]
    dues = [*before, *(index * gap_ns for index in range(number))]
    return [
        complete(
            index - warmup,
            [due + step * stay_ms * MILLISECOND_NS // 10 for step in range(1, 11)],
            due_ns=due,
            sent_ns=due + 20_000,
            sent_end_ns=due + 26_000,
            end_ns=due + stay_ms * MILLISECOND_NS,
            phase="warmup" if index < warmup else "measured",
        )
        for index, due in enumerate(dues)
    ]
