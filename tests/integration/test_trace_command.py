"""Traces from the command line: what is refused before any byte is sent, and what is said of the rest."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst, loadgen
from tests.support.simulated import running

SECONDS = [{"timestamp": at, "input_length": 10, "output_length": 5} for at in (0.0, 0.2, 0.4)]
TOO_MANY_IDS = [{"timestamp": 0, "input_length": 20, "output_length": 5, "hash_ids": [1, 2]}]
NO_ORDER = [{"timestamp": at, "input_length": 10, "output_length": 5} for at in (200, 100)]
NOT_A_COUNT = [{"timestamp": 0, "input_length": 10, "output_length": -5}]


def write(folder: Path, rows: list[dict[str, object]]) -> Path:
    """Write a trace in JSON Lines."""
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (SECONDS, "the unit of its timestamps is unclear"),
        (TOO_MANY_IDS, "line 1: has 2 hash_ids for an input_length of 20"),
        (NO_ORDER, "line 2: its time is before the time of the line above sort the trace by time"),
        (NOT_A_COUNT, "line 1: expected a count, found -5"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused_before_a_byte_is_sent(
    tmp_path: Path, listener: socket.socket, rows: list[dict[str, object]], problem: str
) -> None:
    """Exit 2 with the place and a remedy, and no connection to the server."""
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    words = ("--server", "vllm", "--url", url, "--arrivals", f"trace:{write(tmp_path, rows)}")
    code, _, err = burst(tmp_path, *words, command="run")
    assert code == 2
    assert problem in " ".join(err.split())
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_run_says_how_it_understood_its_trace(tmp_path: Path) -> None:
    """Requests, span, rate and unit stand in the output, and the requests are due at these instants."""
    file = write(tmp_path, SECONDS)
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        words = ("--server", "vllm", "--url", server.url, "--arrivals", f"trace:{file},unit=s,speed=2")
        code, out, err = burst(tmp_path, *words, command="run")
    assert code in (0, 5), err
    text = " ".join((out + err).split())
    assert "Trace trace.jsonl: 3 requests over 200 ms (10 per second), replayed at 2 times the recorded speed" in text
    assert "timestamps in s" in text
    due_ns = sorted(record.due_ns for record in runfile.read(tmp_path / "run").records)
    assert due_ns == [0, 100_000_000, 200_000_000]


def test_a_simulation_says_how_it_understood_its_trace(tmp_path: Path) -> None:
    """`loadgen simulate` prints the same sentence, and refuses the same traces."""
    file = write(tmp_path, SECONDS)
    model = ("--server", "vllm", "--gpu", "H100", "--model", "llama-3.1-8b", "--no-report")
    result = loadgen(tmp_path, "simulate", *model, "--arrivals", f"trace:{file},unit=s")
    assert result.returncode == 0, result.stderr
    assert "Trace trace.jsonl: 3 requests over 400 ms (5 per second)" in " ".join(result.stdout.split())
    refused = loadgen(tmp_path, "simulate", *model, "--arrivals", f"trace:{file}")
    assert refused.returncode == 2
    assert "unit=s" in refused.stderr
