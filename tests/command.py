"""Running `loadgen burst` as a person would, and reading what it left behind."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from urllib.request import urlopen

from loadgen import runfile
from loadgen.cli import main

ROOT = Path(__file__).parents[1]
FAST = {"ttft_s": 0.02, "itl_s": 0.002}
"""A simulated server's clock for tests that are not about time."""


def start(folder: Path, *arguments: str, command: str = "burst", **environment: str) -> subprocess.Popen[str]:
    """Start `loadgen burst --out folder/run ...`, or another command that takes a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "loadgen", command, "--out", str(folder / "run"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)} | environment,
    )


def burst(folder: Path, *arguments: str, command: str = "burst", **environment: str) -> tuple[int, str, str]:
    """Run it to its end; exit code, stdout, stderr. A traceback is never right."""
    process = start(folder, *arguments, command=command, **environment)
    out, err = process.communicate(timeout=100)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def called(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process, for what is messages, exit codes or files; exit code, stdout, stderr."""
    out, err, told = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["loadgen", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = told
    return code, out.getvalue(), err.getvalue()


def summary_of(folder: Path) -> dict[str, dict[str, object]]:
    loaded: dict[str, dict[str, object]] = json.loads((folder / "run" / "summary.json").read_text())
    return loaded


def accounted(folder: Path, n: int) -> Counter[str]:
    """Every request has exactly one Record; how many ended in each state."""
    run = runfile.read(folder / "run")
    assert sorted(record.id for record in run.records) == list(range(n))
    assert run.footer is not None
    states = Counter[str](record.state for record in run.records)
    assert run.footer.sent == n == run.footer.complete + run.footer.truncated + run.footer.failed
    assert states["complete"] == run.footer.complete
    return states


def events_sent(url: str) -> int:
    """How many events the simulated server has sent."""
    with urlopen(f"{url}/simulated/status", timeout=10) as answer:
        return int(json.load(answer)["events"])


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
