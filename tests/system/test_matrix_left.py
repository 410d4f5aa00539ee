"""Servers that a killed matrix left running are taken down before it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen.servers.launch import process
from loadgen.studies.matrix import MatrixPlan, build_matrix, journal
from loadgen.studies.matrix.run import stop_leftover_server


def plan(launch: str) -> MatrixPlan:
    workloads: list[dict[str, Any]] = [{"name": "burst", "n": 1}]
    return MatrixPlan(name="x", servers=["vllm"], models=["m"], workloads=workloads, launch=launch)


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> process.BackgroundServer:
    """A process that stands for a server, kept as `--launch process` keeps one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    pid = process.start_process(["sleep", "60"], {}, tmp_path / "log")
    ticks = process.start_ticks(pid)
    assert ticks is not None
    kept = process.BackgroundServer("vllm", "http://127.0.0.1:1", pid, ticks, str(tmp_path / "log"), "now", {})
    process.write_background_server(kept)
    return kept


@pytest.mark.parametrize(("down", "other", "ends"), [(False, False, True), (True, False, False), (False, True, False)])
def test_a_process_left_running_is_ended(
    tmp_path: Path, left: process.BackgroundServer, down: bool, other: bool, ends: bool
) -> None:
    """The one whose start has no end in the journal, if it is still that very process; no other."""
    matrix = build_matrix(plan("process"), tmp_path / "m", [])
    said: list[str] = []
    try:
        with journal(matrix.folder, matrix.journal_plan, resume=False) as book:
            book.write("up", start=1, server="vllm", model="m", seconds=1.0, facts={"pid": left.pid + other})
            if down:
                book.write("down", start=1)
            stop_leftover_server(matrix, book, said.append)
        assert (process.start_ticks(left.pid) is None) == ends
        assert (process.read_background_server("vllm") is None) == ends
        assert bool(said) == ends
    finally:
        process.down(left)
