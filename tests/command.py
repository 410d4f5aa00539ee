"""Running `loadgen burst` as a person would, and reading what it left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

from loadgen import runfile

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


def in_process(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """`loadgen ...` with this process's own interpreter, for what only has messages, files and an exit code."""
    from loadgen.cli import main

    out, err, argv, before = io.StringIO(), io.StringIO(), sys.argv, Path.cwd()
    sys.argv = ["loadgen", *arguments]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code: object = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
        os.chdir(before)
    return code if isinstance(code, int) else 0, out.getvalue(), err.getvalue()
