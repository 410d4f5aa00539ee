"""A real engine with stand-ins for the servers' images, and the ways to drive it; `make test-docker` makes both."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MADE = os.environ.get("TEST_DOCKER_ENGINE") == "made"
IMAGES = {
    "vllm": "vllm/vllm-openai",
    "tgi": "ghcr.io/huggingface/text-generation-inference",
    "lightllm": "ghcr.io/modeltc/lightllm",
    "sglang": "lmsysorg/sglang",
    "tei": "ghcr.io/huggingface/text-embeddings-inference",
}
PORTS = {"vllm": 18001, "tgi": 18002, "lightllm": 18003, "sglang": 18004, "tei": 18005}
"""Not the usual ones: a server of the machine's own may be there."""
VOLUME = "loadgen-test-models"
PROJECT = "loadgen-test"
"""The host of the hosts file is `test`, so that no project of somebody's is touched."""


class Said(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


class Desk:
    """A folder to work in, with a docker-compose.yml that this machine can start and a hosts file."""

    def __init__(self, folder: Path) -> None:
        """`folder` is empty."""
        self.folder = folder
        (folder / "change.yml").write_text(_changes())
        include = {"include": [{"path": [str(ROOT / "docker-compose.yml"), str(folder / "change.yml")]}]}
        (folder / "compose.yml").write_text(yaml.safe_dump(include))
        (folder / "hosts.toml").write_text(f'[test]\nplatform = "stand-in"\nmodel_volume = "{VOLUME}"\n')
        # Real names; a tag of our own, so that on somebody's engine no real image loses its name.
        self.env = {f"{server.upper()}_TAG": "stand-in" for server in IMAGES}
        self.env |= {f"{server.upper()}_PORT": str(port) for server, port in PORTS.items()}
        self.env |= {"MODELS_VOLUME": VOLUME, "MODEL_NAME": "tiny", "XDG_STATE_HOME": str(folder / "state")}

    def run(self, *words: str, code: int | tuple[int, ...] = 0, timeout_s: float = 200, **env: str) -> Said:
        """A command in this folder, which must end with this exit code."""
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=os.environ | self.env | env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode in (code if isinstance(code, tuple) else (code,)), f"{words}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return Said(done.returncode, done.stdout, done.stderr)

    def loadgen(self, *words: str, code: int | tuple[int, ...] = 0, **env: str) -> Said:
        """`loadgen ...` of this checkout."""
        return self.run(sys.executable, "-m", "loadgen", *words, code=code, **env)

    def servers(self, command: str, server: str, *words: str, code: int | tuple[int, ...] = 0, **env: str) -> Said:
        """`loadgen servers ...` on the host `test`."""
        file = str(self.folder / "compose.yml")
        return self.loadgen(
            "servers", command, "--server", server, "--host", "test", "--file", file, *words, code=code, **env
        )

    def compose(self, *words: str, code: int = 0, **env: str) -> Said:
        """`docker compose ...` as docs/guides/servers.md has it."""
        file = str(self.folder / "compose.yml")
        return self.run("docker", "compose", "--file", file, "--project-name", PROJECT, *words, code=code, **env)

    def burst(self, server: str, url: str, out: str, n: int = 20) -> tuple[dict[str, Any], str]:
        """A small burst: its summary, and what was printed. Exit code 5, a busy machine, is no matter here."""
        words = ("--server", server, "--url", url, "--real", "--n", str(n), "--input-tokens", "32")
        said = self.loadgen("burst", *words, "--output-tokens", "8", "--out", out, code=(0, 5))
        summary = json.loads((self.folder / out / "summary.json").read_text())
        assert summary["requests"]["complete"] == n
        return summary, said.out

    def containers(self, *more: str) -> dict[str, str]:
        """The id of each container of the project by service."""
        words = ("--no-trunc", "--filter", f"label=com.docker.compose.project={PROJECT}", *more)
        form = '{{.Label "com.docker.compose.service"}} {{.ID}}'
        lines = self.run("docker", "ps", "--all", *words, "--format", form).out.splitlines()
        return dict(line.split() for line in lines)

    def networks(self) -> str:
        """The project's networks."""
        words = ("--filter", f"label=com.docker.compose.project={PROJECT}")
        return self.run("docker", "network", "ls", "--quiet", *words).out


def _changes() -> str:
    """What a machine without GPUs, or with low limits, must leave out of docker-compose.yml, and nothing else."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    low = MADE and hard != resource.RLIM_INFINITY and hard < 65536
    lines = ["services:"]
    for server in IMAGES:
        left_out = ["ulimits: !reset {}"] * low + ["deploy: !reset {}"] * (not MADE)
        lines.append(f"  {server}: {{{', '.join(left_out)}}}")
        lines.append(f"  sim-{server}: {{{'ulimits: !reset {}' if low else ''}}}")
    return "\n".join(lines)


@pytest.fixture(scope="session")
def images() -> None:
    """The image of the Dockerfile, and a stand-in for each server's."""
    build = ["docker", "build", "--quiet"]
    subprocess.run([*build, "--tag=llm-loadgen:0.1.0", "."], cwd=ROOT, check=True, timeout=400, capture_output=True)
    for server, name in IMAGES.items():
        words = [*build, f"--target={server}", f"--tag={name}:stand-in", "."]
        subprocess.run(words, cwd=ROOT / "tests/docker/stand_in", check=True, timeout=60, capture_output=True)
    fill = "mkdir -p /models/tiny /models/slow"
    volume = ["docker", "run", "--rm", "--user=0", "--entrypoint=sh", f"--volume={VOLUME}:/models"]
    subprocess.run([*volume, "llm-loadgen:0.1.0", "-c", fill], check=True, timeout=60)


@pytest.fixture
def desk(images: None, tmp_path: Path) -> Iterator[Desk]:
    """A folder to work in; nothing is left behind, and nothing but volumes was by the test itself."""
    there = Desk(tmp_path)
    try:
        yield there
        left = there.containers()
        networks = there.networks()
    finally:
        profiles = ("vllm", "tgi", "lightllm", "sglang", "tei", "sim", "monitoring")
        there.compose(*(f"--profile={each}" for each in profiles), "down", "--volumes", "--timeout", "5")
    assert (left, networks) == ({}, "")
