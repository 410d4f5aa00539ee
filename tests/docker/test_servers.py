"""The three servers in a real engine's containers: by Compose's own commands, by `loadgen servers`, and in a matrix."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from loadgen.analysis.run import runfile
from tests.docker.conftest import IMAGES, PORTS, VOLUME, Desk


@pytest.mark.parametrize("server", IMAGES)
def test_by_composes_own_commands(desk: Desk, server: str) -> None:
    """A profile is up and healthy, takes a burst, is left alone by a second `up`, and goes without a trace."""
    up = ("--profile", server, "up", "--detach", "--wait")
    desk.compose(*up)
    before = desk.containers()
    summary, _ = desk.burst(server, f"http://127.0.0.1:{PORTS[server]}", "run")
    assert summary["server"]["model"] in ("tiny", "/models/tiny")
    assert 4096 in summary["server"]["limits"].values()
    desk.compose(*up)
    assert desk.containers() == before
    began_s = time.monotonic()
    desk.compose("--profile", server, "down")
    assert time.monotonic() - began_s < 60, "stop_grace_period was sat out"


@pytest.mark.parametrize(
    ("server", "way"),
    [("vllm", "shell"), ("tgi", ".env"), ("lightllm", "hosts file"), ("sglang", "shell"), ("tei", "shell")],
)
def test_by_loadgen_servers(desk: Desk, server: str, way: str) -> None:
    """Wherever its port was set, the server is found; and each command says what is so, from `up` to after `down`."""
    variable, port = f"{server.upper()}_PORT", PORTS[server] + 100
    del desk.env[variable]
    if way == "shell":
        desk.env[variable] = str(port)
    elif way == ".env":
        (desk.folder / ".env").write_text(f"{variable}={port}\n")
    else:
        with (desk.folder / "hosts.toml").open("a") as file:
            file.write(f'env = {{{variable} = "{port}"}}\n')
    url = f"http://127.0.0.1:{port}"
    told = json.loads(desk.servers("up", server, "--model", "tiny", "--json").out)
    assert told["url"] == url
    assert told["facts"]["ready_s"] > 0
    assert told["facts"]["image"] == f"{IMAGES[server]}:stand-in"
    again = desk.servers("up", server, "--model", "tiny").out
    assert f"was already running at {url}" in again
    assert f"--url {url}" in again
    until_s = time.monotonic() + 60
    while "(starting)" in (status := desk.servers("status", server, code=(0, 3)).out) and time.monotonic() < until_s:
        time.sleep(0.5)  # Docker's own check may come after ours
    assert f"running (healthy) on test at {url}" in status
    assert re.search("arguments: .*/models/tiny", desk.servers("logs", server, "--lines", "0").out)

    summary, printed = desk.burst(server, url, "proxied")
    inside = summary["server"]["proxied_to"]
    assert inside, "docker-proxy was not seen"
    assert "docker-proxy forwards every byte" in printed
    summary, printed = desk.burst(server, inside, "direct")
    assert not summary["server"]["proxied_to"]
    assert "docker-proxy" not in printed

    assert f"{server} on test: down" in desk.servers("down", server).out
    assert f"{server} is down on test" in desk.servers("logs", server, code=3).err
    desk.servers("status", server, code=3)


def test_a_model_that_is_not_there(desk: Desk) -> None:
    """The container ends, its log says why, and it is gone again."""
    said = desk.servers("up", "tgi", "--model", "absent", code=3).err
    assert "the server does not find the model" in said
    assert "/models/absent does not appear to have" in said


def test_an_image_that_is_not_there(desk: Desk) -> None:
    """Whether the registry is out of reach or answers that it has none, there is a word for it."""
    said = desk.servers("up", "lightllm", code=3, LIGHTLLM_TAG="v0.0.0-none").err
    assert "the registry of the image cannot be reached" in said or "there is no image" in said
    assert "docker load" in said


def test_a_port_that_is_taken(desk: Desk) -> None:
    """Two servers on two GPUs want one port: the second start fails with the port named, and the first stays."""
    desk.servers("up", "vllm", "--model", "tiny")
    said = desk.servers("up", "tgi", "--model", "tiny", code=3, TGI_PORT=str(PORTS["vllm"]), TGI_GPU="1").err
    assert f"the port 127.0.0.1:{PORTS['vllm']} is in use" in said
    assert list(desk.containers()) == ["vllm"]
    desk.servers("down", "vllm")


def test_a_start_that_is_interrupted_ends_soon(desk: Desk) -> None:
    """A server that handles no signal while it loads does not sit out its grace period of two minutes."""
    words = ("servers", "up", "--server", "vllm", "--host", "test", "--model", "slow", "--file", "compose.yml")
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen", *words],
        cwd=desk.folder,
        env=os.environ | desk.env,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not desk.containers("--filter", "status=running"):
        assert process.poll() is None
        time.sleep(0.2)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    began_s = time.monotonic()
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130
    assert time.monotonic() - began_s < 60
    assert "stopping vllm on test" in said


def test_a_matrix_of_two(desk: Desk) -> None:
    """Each server is started, measured and ended; what image it was is kept with its run."""
    (desk.folder / "plan.toml").write_text(
        f"""
name = "two"
launch = "compose"
hosts_file = "hosts.toml"
servers = ["vllm", "tgi"]
hosts = ["test"]
models = ["tiny"]
repeats = 2
options = {{file = "{desk.folder}/compose.yml"}}

[[workloads]]
name = "burst"
n = 10
input_tokens = 16
output_tokens = 4
"""
    )
    desk.loadgen("matrix", "plan.toml", "--out", "matrix", code=(0, 5))
    found = json.loads((desk.folder / "matrix/matrix.json").read_text())
    assert {cell["server"]: cell["state"] for cell in found["cells"]} == {"vllm": "measured", "tgi": "measured"}
    for server in ("vllm", "tgi"):
        header = runfile.read(desk.folder / f"matrix/cells/test/tiny/{server}/burst/repeat-1").header
        assert header.server["launch"]["image"] == f"{IMAGES[server]}:stand-in"
    assert VOLUME in desk.run("docker", "volume", "ls", "--quiet").out
