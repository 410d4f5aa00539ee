"""`loadgen matrix` with a sweep as its workload: several servers, interrupted and killed, one frontier."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from loadgen.studies.sweep import measured_steps, read_lines
from tests.support.command import burst, start

PLAN = """
name = "carries"
launch = "simulated"
servers = ["vllm", "tgi"]
repeats = 1
hosts = [{name = "a800", platform = "A800", gpu = "A800-80GB SXM", gpu_hour_cost = 2.0}]
models = [{name = "tiny", shape = "TinyLlama-1.1B"}]

[[workloads]]
name = "load"
duration_s = 1.5
input_tokens = 64
output_tokens = 8
sweep = {objectives = ["ttft.p90 < 10s"], rates = "10,20"}
"""


def sweeps_in(folder: Path) -> dict[Path, list[dict[str, Any]]]:
    """The steps that have ended, by the folder of their sweep."""
    return {file.parent: measured_steps(read_lines(file.parent)) for file in (folder / "run").rglob("sweep.jsonl")}


def stopped_after_steps(folder: Path, number: int, with_signal: signal.Signals, *arguments: str) -> int:
    """Start it, and stop it in the step after so many."""
    process = start(folder, "plan.toml", *arguments, command="matrix")
    deadline = time.monotonic() + 120
    while sum(map(len, sweeps_in(folder).values())) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(with_signal)
    process.communicate(timeout=60)
    return process.returncode


def test_each_server_is_swept_and_all_are_on_one_frontier(tmp_path: Path) -> None:
    """Interrupted in the first sweep and killed in the second, it goes on with both; no step is measured again; every
    figure leads to its run, and what differs is told by the servers' names."""
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    assert stopped_after_steps(tmp_path, 1, signal.SIGINT) == 130
    assert json.loads((tmp_path / "run/matrix.json").read_text("utf-8"))["interrupted"]
    assert stopped_after_steps(tmp_path, 3, signal.SIGKILL, "--resume") == -signal.SIGKILL
    before = {file: file.read_bytes() for each in sweeps_in(tmp_path) for file in each.glob("step-*/summary.json")}
    assert len(before) >= 3
    code, out, err = burst(tmp_path, "plan.toml", "--resume", command="matrix")
    assert code in (0, 5), err
    assert {file: file.read_bytes() for file in before} == before
    assert [len(steps) for steps in sweeps_in(tmp_path).values()] == [2, 2]
    found = json.loads((tmp_path / "run/matrix.json").read_text("utf-8"))
    assert (found["cells"], found["interrupted"]) == ([], False)
    page = (tmp_path / "run/frontier-load.html").read_text("utf-8")
    assert "frontier-load.html" in (tmp_path / "run/matrix.html").read_text("utf-8")
    assert "frontier-load.html" in out
    for each in found["sweeps"]:
        assert each["state"] == "measured"
        assert [step["load"] for step in each["result"]["steps"]] == [10, 20]
        assert all(step["cost_per_million_tokens"] > 0 for step in each["result"]["steps"])
        assert all(f"{each['folder']}/{step['folder']}/report.html" in page for step in each["result"]["steps"])
    assert "2 sweeps" in page
    code, _, err = burst(tmp_path, "plan.toml", "--resume", "--quiet", command="matrix")
    assert code in (0, 5), err
    assert [len(steps) for steps in sweeps_in(tmp_path).values()] == [2, 2]
