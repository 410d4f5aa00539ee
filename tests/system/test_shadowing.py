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


LIBRARY_MODULES = ("attr", "msgspec", "numpy", "gevent", "jinja2")
"""Modules of libraries that the processes of loadgen import."""
QUICK_BURST = ("--server", "tgi", "--simulated", "--n", "3", "--output-tokens", "4", "--speed", "100", "--out", "run")
STARTS = {
    "burst with a live page": ["-m", "loadgen", "burst", *QUICK_BURST, "--live"],
    "calibrate": ["-m", "loadgen", "calibrate", "--server", "tgi", "--n", "3", "--output-tokens", "4", "--quick"],
    "api": ["script.py"],
    "ui": [
        *(
            "-m",
            "loadgen",
            "ui",
            "--headless",
            "--server",
            "tgi",
            "--simulated",
            "--speed",
            "100",
            "--output-tokens",
            "4",
        ),
        *("--users", "2", "--run-time", "1s", "--out", "run"),
    ],
}


@pytest.fixture
def among_library_names(tmp_path: Path) -> Path:
    """A folder whose Python files have the names of library modules and must not be imported."""
    for name in LIBRARY_MODULES:
        (tmp_path / f"{name}.py").write_text(TAKEN)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize("start_words", STARTS.values(), ids=STARTS)
def test_files_of_the_working_directory_do_not_replace_libraries(
    among_library_names: Path, start_words: list[str]
) -> None:
    """Processes that loadgen starts import libraries from the environment, not from the working directory.

    The tests start the first process with -P, because Python itself lets `python -m` import from the working directory.
    """
    command = [sys.executable, "-P", *start_words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(among_library_names / "cache")}
    done = subprocess.run(
        command, cwd=among_library_names, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode in {0, 5}, done.stderr
    assert "this is the user" not in done.stderr


def test_locust_processes_do_not_import_from_the_working_directory(among_library_names: Path) -> None:
    """The Locust processes of a master and of a worker import libraries from the environment."""
    with running(SimulatedConfig(server="tgi", **FAST)) as server:
        words = ("--server", "tgi", "--url", server.url, "--n", "3", "--output-tokens", "4", "--input-tokens", "16")
        several = ("--distributed", "--expect-workers", "1", "--bind", "127.0.0.1:0")
        with start(among_library_names, *words, *several) as master:
            assert master.stdout is not None
            address = next(line for line in master.stdout if "waiting for" in line).split()[-1]
            with start(among_library_names, "--master", address, command="worker") as worker:
                (_, ours), (_, theirs) = worker.communicate(timeout=100), master.communicate(timeout=100)
    assert (worker.returncode, master.returncode in {0, 5}) == (0, True), ours + theirs
