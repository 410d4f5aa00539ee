"""The examples run as they stand: against the simulated servers, or against every way a burst can end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.simulated import running

ROOT = Path(__file__).parents[2]
SERVERS = ("vllm", "tgi", "lightllm", "sglang")
SMALL = ["--n", "8", "--input-tokens", "16", "--output-tokens", "4", "--no-report"]
CLIENT_LIMITED = 5  # a busy machine may be the limit, which is no fault of an example

Environment = dict[str, str]


@pytest.fixture(scope="module")
def servers() -> Iterator[Environment]:
    """A simulated server of each kind, named as a user would name a real one, so that nothing else is asked."""
    with ExitStack() as stack:
        yield {
            f"LOADGEN_{name.upper()}_URL": stack.enter_context(
                running(SimulatedConfig(server=name, ttft_s=0.05, itl_s=0.02))
            ).url
            for name in SERVERS
        }


@pytest.fixture
def environment(servers: Environment, tmp_path: Path) -> Environment:
    """Its `loadgen` and `python3` are those of this interpreter, wherever the package is installed."""
    _command(tmp_path, "loadgen", f'exec "{sys.executable}" -m loadgen "$@"')
    _command(tmp_path, "python3", f'exec "{sys.executable}" "$@"')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, **servers, "PATH": path, "PYTHONPATH": str(ROOT)}


def test_compare_servers_prints_a_line_for_each(environment: Environment, tmp_path: Path) -> None:
    """Three servers, three lines, each marked as simulated."""
    done = _run([ROOT / "examples/compare_servers.sh", *SMALL], environment, tmp_path)
    names = [line.split()[:2] for line in done.stdout.splitlines()]
    assert names == [[name, "(SIMULATED)"] for name in SERVERS], done.stderr


@pytest.mark.parametrize(
    ("exit_code", "verdict", "passes"),
    [
        (0, "pass", True),
        (1, "fail", False),
        (2, "void", False),
        (3, "void", False),
        (4, "fail", False),
        (5, "void", False),
        (6, "void", False),
    ],
)
def test_gate_passes_only_when_all_is_well(
    environment: Environment, tmp_path: Path, exit_code: int, verdict: str, passes: bool
) -> None:
    """Each exit code of a burst has its verdict, and the gate lets one of them through."""
    _command(tmp_path, "loadgen", f"exit {exit_code}")
    done = _run([ROOT / "examples/gate.sh", "tgi"], environment, tmp_path)
    assert (done.stdout.partition(":")[0], done.returncode == 0) == (verdict, passes)


def test_first_tokens_reads_a_run(environment: Environment, tmp_path: Path) -> None:
    """The run file alone says when first tokens came."""
    run = tmp_path / "run"
    burst = _run(["loadgen", "burst", "--server", "tgi", "--quiet", "--out", run, *SMALL], environment, tmp_path)
    assert burst.returncode in {0, CLIENT_LIMITED}, burst.stderr
    done = _run([sys.executable, ROOT / "examples/first_tokens.py", run], environment, tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0] == "tgi: 8 of 8 requests complete", done.stderr
    assert lines[1].startswith("first token after ")


def test_questions_has_one_answer_from_both(environment: Environment, tmp_path: Path) -> None:
    """A burst, exported: pandas and DuckDB give the same answer to each of the three questions."""
    burst = ["loadgen", "burst", "--server", "vllm", "--quiet", "--out", tmp_path / "run", *SMALL]
    assert _run(burst, environment, tmp_path).returncode in {0, CLIENT_LIMITED}
    _run(["loadgen", "export", tmp_path / "run", "--parquet", tmp_path / "tables"], environment, tmp_path)
    done = _run([sys.executable, ROOT / "examples/questions.py", tmp_path / "tables"], environment, tmp_path)
    questions = done.stdout.split("\n\n")
    assert len(questions) == 3, done.stderr
    for question in questions:
        rows = [line.split() for line in question.splitlines()[2:]]
        assert rows
        assert all(row[-1] == row[-2] != "NaN" for row in rows), question


def test_notebook_runs_and_compares(environment: Environment, tmp_path: Path) -> None:
    """Two bursts from Python, their figures, and a verdict for each figure."""
    done = _run([sys.executable, ROOT / "examples/notebook.py"], environment, tmp_path)
    assert done.stdout.count("40 of 40 complete") == 2, done.stderr
    (median,) = [line.split() for line in done.stdout.splitlines() if line.startswith("ttft.p50 ")]
    assert (median[1], median[3], median[4], median[6]) == ("A", "s", "B", "s")
    assert "Chart: SIMULATED  Time to first token" in done.stdout


def test_the_guide_to_python_runs(environment: Environment, tmp_path: Path) -> None:
    """Its program, followed by what its table names."""
    program = (ROOT / "docs/guides/python.md").read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    more = "print(result.frame().shape[0], 'ttft_s' in result.figures, result.figure('ttft').data != ())\n"
    done = _run([sys.executable, "-c", program + more + "print(read(result.path).text())"], environment, tmp_path)
    assert done.stdout.startswith("100 True True\n"), done.stderr
    assert "SIMULATED" in done.stdout


def test_mixed_traffic_runs(environment: Environment, tmp_path: Path) -> None:
    """The plan with three classes runs on the simulated server, and the report has a row for each class."""
    plan = ROOT / "examples/mixed_traffic.toml"
    done = _run(["loadgen", "run", plan, "--simulated", "--duration", "2s", "--no-report"], environment, tmp_path)
    _, _, table = done.stdout.partition("Traffic, latencies in ms")
    assert [line.split()[0] for line in table.splitlines()[2:6]] == ["chat", "documents", "batch", "all"], done.stderr


def test_every_example_is_listed() -> None:
    """The list of examples names each file beside it."""
    listed = (ROOT / "examples/README.md").read_text("utf-8")
    examples = {file.name for file in (ROOT / "examples").iterdir() if file.suffix in {".sh", ".py", ".toml"}}
    assert examples
    assert all(f"]({name})" in listed for name in examples)


def _command(folder: Path, name: str, line: str) -> None:
    script = folder / "bin" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/sh\n{line}\n", "utf-8")
    script.chmod(0o755)


def _run(command: list[str | Path], environment: Environment, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
