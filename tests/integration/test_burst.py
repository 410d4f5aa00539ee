"""`loadgen burst` as a person runs it, against simulated servers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, ROOT, accounted, burst, summary_of
from tests.support.simulated import running


@pytest.mark.parametrize(
    ("server", "endpoint"),
    [
        ("vllm", "native"),
        ("vllm", "chat"),
        ("tgi", "native"),
        ("tgi", "chat"),
        ("lightllm", "native"),
        ("lightllm", "chat"),
    ],
)
def test_every_server_is_measured_end_to_end(server: str, endpoint: str, tmp_path: Path) -> None:
    """Complete, exact prompts and outputs, files in place, the folder's name printed last."""
    chosen = [] if endpoint == "native" else ["--endpoint", endpoint]
    with running(SimulatedConfig(server=server, **FAST)) as simulated:
        code, out, _ = burst(
            tmp_path,
            *("--server", server, "--url", simulated.url, "--n", "20", "--output-tokens", "16"),
            *chosen,
            report=True,
        )
    assert accounted(tmp_path, 20) == {"complete": 20}
    assert code in (0, 5)  # 5: this machine was too busy for 20 requests, which is not what is tested here
    summary = summary_of(tmp_path)
    assert summary["tokens"]["prompt_mismatches"] == summary["tokens"]["output_mismatches"] == 0
    assert summary["tokens"]["prompt_reported"] == 20 * 512
    assert summary["tokens"]["output_reported"] == 20 * 16
    assert summary["server"]["simulated"] is True
    assert out.splitlines()[0].startswith(f"SIMULATED {server}")
    assert out.splitlines()[-1].endswith("report.html")
    assert (tmp_path / "run" / "report.html").stat().st_size > 100_000
    assert [line.prompt_tokens for line in simulated.log[-20:]] == [512] * 20


DIGEST = """
import hashlib, re, sys
from pathlib import Path
from urllib.request import urlopen
from loadgen.engine import prepare
from loadgen.engine.client_health import LiveCounters
from loadgen.plan import Plan
plan = Plan(server="tgi", url=sys.argv[1], n=20, seed=int(sys.argv[2]))
with prepare.prepare(plan, Path("."), lambda line: None) as prepared:
    sent = b"".join(slot.payload for task in prepared.tasks for slot in task.request_queue(LiveCounters()).group())
sent = re.sub(rb"X-Request-Id: \\w+-", b"X-Request-Id: ", sent)  # the prefix of the ids is random on purpose
print(hashlib.sha256(sent).hexdigest(), len(sent))
"""


def test_the_same_seed_makes_the_same_bytes() -> None:
    """Whatever the process and its hash seed: byte-identical requests for one seed, others for another."""
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        digests = [
            subprocess.run(
                [sys.executable, "-c", DIGEST, simulated.url, seed],
                env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed, hash_seed in (("7", "1"), ("7", "2"), ("8", "1"))
        ]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_several_workers_share_one_burst(tmp_path: Path) -> None:
    """Requests are split, started together, and all accounted for in one file without parts left over."""
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        burst(
            tmp_path, "--server", "tgi", "--url", simulated.url, "--n", "30", "--workers", "3", "--output-tokens", "8"
        )
    assert accounted(tmp_path, 30) == {"complete": 30}
    run = runfile.read(tmp_path / "run")
    assert {record.worker for record in run.records} == {0, 1, 2}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["run.jsonl", "summary.json"]


def test_json_prints_the_summary_and_nothing_else(tmp_path: Path) -> None:
    """stdout is exactly summary.json; quiet prints nothing but what is wrong."""
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        common = ["--server", "tgi", "--url", simulated.url, "--n", "3", "--output-tokens", "4", "--no-report"]
        _, out, _ = burst(tmp_path, *common, "--json")
        assert json.loads(out) == summary_of(tmp_path)
        code, out, err = burst(tmp_path / "run", *common, "--quiet")
    assert (code, out, err) == (0, "", "") or (code, out, len(err.splitlines())) == (5, "", 1)  # this machine is busy


def test_the_api_key_is_used_and_never_written(tmp_path: Path) -> None:
    """The key comes from the environment, goes into each request, and is in no file. Without it: exit 3 and a hint."""
    with running(SimulatedConfig(server="vllm", api_key="hunter2", **FAST)) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--n", "3", "--output-tokens", "4"]
        code, _, err = burst(tmp_path, *common)
        assert code == 3
        assert "LOADGEN_API_KEY" in err
        burst(tmp_path, *common, "--api-key-env", "MY_KEY", MY_KEY="hunter2")
    assert accounted(tmp_path, 3) == {"complete": 3}
    assert all(b"hunter2" not in path.read_bytes() for path in (tmp_path / "run").iterdir())


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
