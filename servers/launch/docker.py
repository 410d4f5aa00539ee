"""Calls of the `docker` command, on the engine of this machine, of a context, or of a host reached by ssh; and what it
says about engines and containers."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import msgspec

from servers.errors import LaunchError
from servers.launch.spec import SAY_EVERY_S, Host, Say, known_fault, tail

CALL_TIMEOUT_S = 60.0
"""For every call but those that may pull an image or stop a server."""


def docker(
    host: Host,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    say: Say | None = None,
) -> str:
    """Run `docker` against the host's engine; its standard output.

    `env` is for this call alone. `say` gets the last line that Docker has printed, every ten seconds. Raises
    LaunchError with a message of its own for each known failure.
    """
    program = shutil.which("docker")
    if program is None:
        raise LaunchError(
            "docker is not installed on this machine",
            "install Docker's command line with the Compose plugin, or start without Docker: --launch process",
        )
    context: list[str] = []
    environment = dict(os.environ)
    if host.docker:  # a host that names its engine must not be led elsewhere
        environment.pop("DOCKER_HOST", None)
        environment.pop("DOCKER_CONTEXT", None)
    if host.docker.startswith("ssh://"):
        environment["DOCKER_HOST"] = host.docker
    elif host.docker:
        context = ["--context", host.docker]
    code, out, err = _run([program, *context, *arguments], environment | dict(env or {}), timeout_s, say)
    if code:
        printed = err or out
        if known := known_fault(printed, "docker"):
            raise LaunchError(*known, log_tail=tail(printed, 6))
        what = f"docker {' '.join(arguments)} on {host.name} ended with {code}"
        raise LaunchError(what, "Docker's own words are above", log_tail=tail(printed))
    return out


def container_facts(host: Host, name: str) -> dict[str, Any]:
    """What is kept of a container with a run: image, digest, command and limits, and the driver and GPU that it sees.

    What cannot be had is left out. Its environment is not kept: it may hold tokens.
    """
    facts: dict[str, Any] = {}
    with suppress(LaunchError, msgspec.DecodeError, LookupError):
        said = msgspec.json.decode(docker(host, "inspect", name))[0]
        config, limits = said.get("Config") or {}, said.get("HostConfig") or {}
        facts |= {"image": config.get("Image"), "image_id": said.get("Image"), "command": config.get("Cmd")}
        facts |= {"started": (said.get("State") or {}).get("StartedAt")}
        facts["limits"] = {
            key: limits.get(key) for key in ("ShmSize", "IpcMode", "DeviceRequests", "Ulimits", "Memory")
        }
        text = docker(host, "image", "inspect", "--format", "{{json .RepoDigests}}", str(said.get("Image")))
        facts["image_digest"] = next(iter(msgspec.json.decode(text) or ()), "")
    query = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    with suppress(LaunchError, ValueError, LookupError):
        seen = docker(host, "exec", name, *query).strip().splitlines()[0]
        facts["driver_version"], facts["gpu"] = seen.split(", ", 1)
    return {key: value for key, value in facts.items() if value}


def _run(command: Sequence[str], env: Mapping[str, str], timeout_s: float, say: Say | None) -> tuple[int, str, str]:
    """Through files, so that a child which outlives the call (ssh's connection sharing) holds up no pipe."""
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        child = subprocess.Popen(  # noqa: S603 - docker, with arguments of ours
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        began_s = time.monotonic()
        try:
            while child.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(min(SAY_EVERY_S, timeout_s))
                    break
                passed_s = time.monotonic() - began_s
                if passed_s > timeout_s:
                    raise LaunchError(
                        f"{' '.join(command[1:4])} ... did not end within {timeout_s:.0f} s",
                        "is the host reachable, and its Docker engine well?",
                        log_tail=tail(_text(err)),
                    )
                if say:
                    say(f"{passed_s:.0f} s: {tail(_text(err), 1).strip()}")
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
        return child.wait(), _text(out), _text(err)


def _text(file: IO[bytes]) -> str:
    # Without moving the position in it, which the child shares and may be writing at.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
