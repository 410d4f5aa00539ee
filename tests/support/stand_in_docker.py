"""A stand-in for the `docker` command, which records every call and prints the recorded output of a real Docker.

The class `Docker` installs the program `docker_program.py` into a folder. Tests put this folder first on PATH. The file
`rules.marshal` contains a list of rules. A call gets the output of the first rule whose words are all among the
arguments of the call. A rule with a number `times` is used at most that many times.
"""

from __future__ import annotations

import ast
import json
import marshal
import stat
import sys
from pathlib import Path
from typing import Any

CONTAINER = "6f1c0e5d8a7b"
DIGEST = "vllm/vllm-openai@sha256:0f7d3c2a"

HEALTHY: list[dict[str, Any]] = [
    {"words": ["version", "--short"], "out": "2.39.1\n"},
    {"words": ["version"], "out": "28.2.2\n"},
    {"words": ["container", "ls"], "out": ""},
    {"words": ["config"], "out": "{}"},
    {"words": ["up"], "err": " Container loadgen-vllm-1  Created\n Container loadgen-vllm-1  Started\n"},
    {"words": ["down"], "err": " Container loadgen-vllm-1  Removed\n"},
    {"words": ["logs"], "out": "INFO 11-21 12:00:01 Loading safetensors checkpoint shards: 50% Completed\n"},
    {
        "words": ["ps"],
        "out": json.dumps(
            {
                "ID": CONTAINER,
                "Name": "loadgen-vllm-1",
                "Service": "vllm",
                "Image": "vllm/vllm-openai:v0.32.0",
                "State": "running",
                "Health": "healthy",
                "ExitCode": 0,
                "Publishers": [{"URL": "127.0.0.1", "TargetPort": 8000, "PublishedPort": "VLLM_PORT"}],
            }
        )
        + "\n",
    },
    {"words": ["image", "inspect"], "out": json.dumps([DIGEST]) + "\n"},
    {"words": ["inspect", "{{.State.OOMKilled}}"], "out": "false\n"},
    {
        "words": ["inspect"],
        "out": json.dumps(
            [
                {
                    "Id": CONTAINER,
                    "Image": "sha256:aa11",
                    "State": {"StartedAt": "2026-11-21T12:00:00Z"},
                    "Config": {
                        "Image": "vllm/vllm-openai:v0.32.0",
                        "Cmd": ["/models/tiny"],
                        "Env": ["HF_TOKEN=hf_never_kept"],
                    },
                    "HostConfig": {"ShmSize": 67108864, "IpcMode": "host", "DeviceRequests": [{"DeviceIDs": ["0"]}]},
                }
            ]
        ),
    },
    {"words": ["exec", "nvidia-smi"], "out": "550.163.01, NVIDIA A800-SXM4-80GB\n"},
]
"""Rules of a Docker engine on which every call succeeds."""


class Docker:
    """An installed stand-in for the `docker` command: sets its rules, and returns its recorded calls."""

    def __init__(self, folder: Path) -> None:
        """Install the program into `folder`. The files of its rules and calls are in the same folder."""
        self.folder = folder
        program = folder / "docker"
        program.write_text(
            f"#!{sys.executable} -IS\n" + Path(__file__).with_name("docker_program.py").read_text("utf-8")
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.answer()

    def answer(self, *rules: dict[str, Any]) -> None:
        """Write the rules of the stand-in: `rules`, followed by HEALTHY, with which every call succeeds."""
        (self.folder / "rules.marshal").write_bytes(marshal.dumps([*rules, *HEALTHY]))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls so far, each with its `arguments` and some environment variables."""
        file = self.folder / "calls"
        return [ast.literal_eval(line) for line in file.read_text().splitlines()] if file.exists() else []

    def call(self, *words: str) -> dict[str, Any]:
        """Return the call whose arguments contain all `words`. Raises ValueError unless there is exactly one."""
        (found,) = [call for call in self.calls if set(words) <= set(call["arguments"])]
        return found


def ps(state: str, health: str = "", code: int = 0) -> dict[str, Any]:
    """Return a rule for `docker compose ps` that reports a container in this state, health and exit code."""
    row: dict[str, Any] = {"ID": CONTAINER, "Service": "vllm", "State": state, "Health": health, "ExitCode": code}
    row["Publishers"] = [{"TargetPort": 8000, "PublishedPort": "VLLM_PORT"}] if state == "running" else []
    return {"words": ["ps"], "out": json.dumps(row) + "\n"}
