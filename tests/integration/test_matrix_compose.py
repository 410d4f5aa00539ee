"""A matrix over two GPU hosts, with a stand-in for the `docker` command: one comes up, the other has no GPU runtime."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst
from tests.support.simulated import running
from tests.support.stand_in_docker import DIGEST, Docker

HOSTS = """
[gpu-a]
platform = "A800"
docker = "gpu-a"
env = {{VLLM_PORT = "{port}"}}

[gpu-b]
platform = "RTX4090"
docker = "gpu-b"
env = {{VLLM_PORT = "{port}", NCCL_P2P_DISABLE = "1"}}
"""
PLAN = """
name = "two-hosts"
launch = "compose"
hosts_file = "hosts.toml"
servers = ["vllm"]
hosts = ["gpu-a", "gpu-b"]
models = ["tiny"]
repeats = 2
options = {poll_s = 0.01, tensor_parallel = 2}

[[cases]]
host = "gpu-b"
options = {gpus = "4,5"}

[[workloads]]
name = "burst"
n = 5
input_tokens = 16
output_tokens = 4
"""
NO_RUNTIME = 'Error response from daemon: could not select device driver "nvidia" with capabilities: [[gpu]]\n'


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    """The stand-in, first on PATH; on gpu-b it plays a missing NVIDIA Container Toolkit."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    stand_in = Docker(folder)
    stand_in.answer({"words": ["gpu-b", "up"], "err": NO_RUNTIME, "code": 1})
    return stand_in


def test_one_host_fails_and_the_other_is_measured(tmp_path: Path, docker: Docker) -> None:
    """Each host is spoken to through its own context; the failure says what to do; what image ran is kept with the run;
    the model is spread over the first GPUs unless others are named; the container is removed at the end."""
    with running(SimulatedConfig(server="vllm", model="tiny", **FAST)) as server:
        (tmp_path / "hosts.toml").write_text(HOSTS.format(port=server.url.rpartition(":")[2]), encoding="utf-8")
        (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
        code, out, err = burst(tmp_path, "plan.toml", command="matrix")
    assert code == 3, err
    found = json.loads((tmp_path / "run/matrix.json").read_text("utf-8"))
    assert {cell["host"]: cell["state"] for cell in found["cells"]} == {"gpu-a": "measured", "gpu-b": "failed"}
    assert [line["repeat"] for line in found["failures"]] == [1, 2]
    assert "NVIDIA Container Toolkit" in found["failures"][0]["reason"] + found["failures"][0]["hint"]
    assert "failed: vLLM on RTX4090" in out
    header = runfile.read(tmp_path / "run/cells/gpu-a/tiny/vllm/burst/repeat-1").header
    assert header.server["launch"]["image_digest"] == DIGEST
    assert DIGEST in (tmp_path / "run/matrix.html").read_text("utf-8")
    ups = {call["arguments"][1]: call for call in docker.calls if "up" in call["arguments"]}
    assert set(ups) == {"gpu-a", "gpu-b"}
    assert {call["environment"]["TENSOR_PARALLEL"] for call in ups.values()} == {"2"}
    assert {name: call["environment"]["VLLM_GPU"] for name, call in ups.items()} == {"gpu-a": "0,1", "gpu-b": "4,5"}
    assert [call["arguments"][1] for call in docker.calls if "down" in call["arguments"]].count("gpu-a") == 1
