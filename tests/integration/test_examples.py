"""The examples run as they stand, against the simulated servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--n", "8", "--input-tokens", "16", "--output-tokens", "4", "--speed", "20", "--no-report"]


@pytest.fixture
def path_with_loadgen(tmp_path: Path) -> dict[str, str]:
    """An environment whose `loadgen` and `python3` are those of this interpreter, wherever the package is installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, arguments in {"loadgen": "-m loadgen", "python3": ""}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', "utf-8")
        script.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def test_compare_servers_prints_a_line_for_each(path_with_loadgen: dict[str, str], tmp_path: Path) -> None:
    """Three servers, three lines, each marked as simulated."""
    lines = _run([ROOT / "examples/compare_servers.sh", *SMALL], path_with_loadgen, tmp_path).splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "(SIMULATED)"] for name in ("vllm", "tgi", "lightllm")]


def test_gate_passes_when_every_request_was_complete(path_with_loadgen: dict[str, str], tmp_path: Path) -> None:
    """The burst is quiet, so the verdict is all that is printed."""
    verdict = _run([ROOT / "examples/gate.sh", "tgi", *SMALL], path_with_loadgen, tmp_path)
    assert verdict == "pass: every request was complete\n"


def test_first_tokens_reads_a_run(path_with_loadgen: dict[str, str], tmp_path: Path) -> None:
    """The run file alone says when first tokens came."""
    run = tmp_path / "run"
    _run(["loadgen", "burst", "--server", "tgi", "--quiet", "--out", run, *SMALL], path_with_loadgen, tmp_path)
    lines = _run([sys.executable, ROOT / "examples/first_tokens.py", run], path_with_loadgen, tmp_path).splitlines()
    assert lines[0] == "tgi: 8 of 8 requests complete"
    assert lines[1].startswith("first token after ")


def test_every_example_is_listed() -> None:
    """The list of examples names each file beside it."""
    listed = (ROOT / "examples/README.md").read_text("utf-8")
    examples = {file.name for file in (ROOT / "examples").iterdir() if file.suffix in {".sh", ".py"}}
    assert examples
    assert all(f"]({name})" in listed for name in examples)


def _run(command: list[str | Path], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
