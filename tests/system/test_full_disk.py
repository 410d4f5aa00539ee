"""A burst whose files may not grow any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn
from tests.support.command import FAST, ROOT


def test_a_disk_that_fills_up_during_the_run_loses_nothing(tmp_path: Path) -> None:
    """Files may not grow past 20 KiB: the run says what it could not write and where the rest is."""
    with spawn(SimulatedConfig(server="tgi", **FAST)) as url:
        limited = f"ulimit -f 20; exec {sys.executable} -m loadgen burst --out {tmp_path}/run --server tgi --url {url}"
        limited += " --n 28 --output-tokens 64 --no-report"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
        done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "part files" in done.stderr
    kept = runfile.read(tmp_path / "run")
    rescued = next(tmp_path.glob("loadgen-*-part-0.jsonl"))
    with (tmp_path / "run" / "part-0.jsonl").open("ab") as part:
        part.write(rescued.read_bytes())
    assert 0 < len(kept.records) < 28
    assert sorted(record.id for record in runfile.read(tmp_path / "run").records) == list(range(28))
