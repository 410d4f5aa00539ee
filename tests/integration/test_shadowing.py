"""A user's own `analysis`, `servers` and `workloads` beside which loadgen is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, ROOT, start
from tests.support.simulated import running

TAKEN = "raise RuntimeError('this is the user\\'s own')\n"
BURST = ("burst", "--server", "tgi", "--n", "3", "--workers", "2", "--speed", "100", "--lengths", "server")
SCRIPT = """
from loadgen import Plan, compare, read, run
plan = Plan(server="vllm", n=3, input_tokens=16, output_tokens=4, speed=100)
assert run(plan, out="run").summary.requests.complete == 3
assert compare("run", "run", anyway=True) and read("run").figure
"""
FRESH = {"LOADGEN_TOKEN": "a token of the tests", "PYTHONPATH": str(ROOT)}
"""The environment of an interpreter that has imported nothing yet."""
WAYS = {
    "module": [sys.executable, "-m", "loadgen", *BURST],
    "command": [str(Path(sys.executable).with_name("loadgen")), *BURST],
    "api": [sys.executable, "script.py"],
    "simulated": [sys.executable, "-c", "from loadgen import simulated\nwith simulated('tgi') as url: assert url"],
    "locust": [sys.executable, "-m", "loadgen", "ui", "--help"],
}


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with modules of our names."""
    for name in ("analysis", "servers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(TAKEN)
    (tmp_path / "workloads.py").write_text(TAKEN)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize("way", WAYS)
def test_modules_of_our_names_are_not_ours(beside: Path, way: str) -> None:
    """The command, the module, the API and every process that they start find our own packages."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(beside)}
    done = subprocess.run(WAYS[way], cwd=beside, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in {0, 5}, done.stderr
    assert "own" not in done.stderr


def test_machines_find_our_own_packages(beside: Path) -> None:
    """So do a master, a worker machine, and the Locust process of each."""
    with running(SimulatedConfig(server="tgi", **FAST)) as server:
        words = ("--server", "tgi", "--url", server.url, "--n", "3", "--output-tokens", "4", "--input-tokens", "16")
        several = ("--distributed", "--expect-workers", "1", "--bind", "127.0.0.1:0")
        with start(beside, *words, *several, **FRESH) as master:
            assert master.stdout is not None
            address = next(line for line in master.stdout if "waiting for" in line).split()[-1]
            with start(beside, "--master", address, command="worker", **FRESH) as worker:
                (_, ours), (_, theirs) = worker.communicate(timeout=100), master.communicate(timeout=100)
    assert (worker.returncode, master.returncode in {0, 5}, "own" in ours + theirs) == (0, True, False), ours + theirs


def test_a_module_of_our_name_that_came_first_does_no_harm(beside: Path) -> None:
    """Only the name `loadgen` is ours: a script may import its own `workloads` before or after it."""
    (beside / "workloads.py").write_text("OWN = True\n")
    script = "import workloads, loadgen, sys\nfrom loadgen.workloads.request import Request\n"
    script += "assert workloads.OWN and not [finder for finder in sys.meta_path if 'loadgen' in repr(finder)]"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=beside, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
