"""The real vLLM in a matrix: started twice as a process, measured under two workloads, and compared with itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from loadgen.analysis.run import runfile
from loadgen.servers.launch import process

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / ".engine"
PLAN = f"""
name = "real"
launch = "process"
servers = ["vllm"]
hosts = [{{name = "cpu", platform = "this machine's CPU"}}]
models = [{{name = "tiny", path = "{ENGINE}/model"}}]
repeats = 2

[options]
python = "{ENGINE}/vllm/bin/python"
arguments = ["--max-model-len", "2048", "--dtype", "bfloat16", "--enforce-eager"]
timeout_s = 240

[[workloads]]
name = "burst"
n = 16
input_tokens = 128
output_tokens = 8
warmup = 2

[[workloads]]
name = "closed"
arrivals = "closed:4"
n = 16
input_tokens = "uniform:64..128"
output_tokens = 8
"""


def test_two_repeats_of_a_real_engine(tmp_path: Path) -> None:
    """One start serves both repeats of both workloads; all is complete and exact, its memory is read, and it is down
    afterwards."""
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    environment = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path), "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "loadgen", "matrix", "plan.toml", "--out", "m"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode in (0, 5), done.stdout + done.stderr
    found = json.loads((tmp_path / "m/matrix.json").read_text("utf-8"))
    (up,) = found["server_starts"]
    assert up["facts"]["version"] == "0.32.0"
    assert not process.group_members(up["facts"]["pid"])
    assert [cell["state"] for cell in found["cells"]] == ["measured", "measured"]
    for cell in found["cells"]:
        assert (cell["requests"]["sent"], cell["requests"]["complete"]) == (32, 32)
        assert (cell["lengths"]["mean"], cell["lengths"]["differ"]) == (8.0, 0)
        assert not cell["simulated"]
        # The engine takes both cores: a run in which the client may have been the limit is left out of the figures.
        of = cell["figures"]["output_tokens_per_s"]
        assert (of["n"], of["ci95"]) == (cell["verdicts"].get("ok") or 2, None)
        assert sum(cell["verdicts"].values()) == len(cell["runs"]) == 2
        assert any(each["of"].startswith("process") and each["peak_bytes"] > 1e8 for each in cell["memory"]["levels"])
    colds = [run["cold"] for cell in found["cells"] for run in cell["runs"]]
    assert colds.count(True) == 1
    prompts = [
        [record.prompt_tokens for record in runfile.read(file).records if record.phase == "measured"]
        for file in sorted((tmp_path / "m/cells").rglob("burst/repeat-?"))
    ]
    assert prompts == [[128] * 16, [128] * 16]
