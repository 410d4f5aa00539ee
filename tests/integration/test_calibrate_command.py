"""`loadgen calibrate` as a person runs it, and the runs that quote it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.accuracy import main
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, ROOT, burst, loadgen
from tests.support.simulated import running

SMALL = ("--n", "20", "--itl", "5ms", "--output-tokens", "8")


def calibrate(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end, remembering in `folder`."""
    return loadgen(folder, "calibrate", *SMALL, *options, XDG_CACHE_HOME=str(folder))


def test_a_memory_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    """What was found is printed all the same, with a note; and a run says in one line that it could not be read."""
    (tmp_path / "llm-loadgen").write_text("in the way")
    done = calibrate(tmp_path, "--quick")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Not saved: " in done.stdout
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        common = ["--server", "tgi", "--url", simulated.url, "--n", "3", "--output-tokens", "4", "--no-report"]
        code, out, _ = burst(tmp_path, *common)
    assert code in (0, 5)  # 5: this machine was too busy for three requests, which is not what is tested here
    assert "ignoring saved calibrations" in out


def test_a_burst_that_cannot_be_is_explained(tmp_path: Path) -> None:
    """Exit code 2, the burst's own words, and no traceback."""
    done = calibrate(tmp_path, "--workers", "21")
    assert done.returncode == 2
    assert "21 workers for 20 requests" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_accuracy_benchmark_has_a_closed_loop(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long after its arrival each end was seen, and how long after that the next request was sent."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    main(["--concurrency", "3", "--n", "9", "--output-tokens", "4", "--itl", "2ms"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("9 requests, 3 at a time")
    seen = next(line for line in lines if line.startswith("ends seen after"))
    assert 0 < float(seen.split()[-8]) <= float(seen.split()[-1])
