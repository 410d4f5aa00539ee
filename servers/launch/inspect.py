"""What is kept of a container with a run: image and digest, how it was started, driver and GPU."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from servers.errors import LaunchError
from servers.launch.docker import docker
from servers.launch.hosts import Host

_LIMITS = ("ShmSize", "IpcMode", "DeviceRequests", "Ulimits", "Memory")


def versions(host: Host) -> dict[str, str]:
    """Versions of Compose and of the engine. Raises LaunchError where either is missing or does not answer."""
    compose = docker(host, "compose", "version", "--short").strip()
    engine = docker(host, "version", "--format", "{{.Server.Version}}").strip()
    return {"compose_version": compose, "engine_version": engine}


def container(host: Host, name: str) -> dict[str, Any]:
    """Image, digest, command and limits of a container, and the driver it sees. What cannot be had is left out.

    Its environment is not kept: it may hold tokens.
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
    return {key: value for key, value in (facts | _gpu(host, name)).items() if value}


def killed_for_memory(host: Host, name: str) -> bool:
    """Whether the kernel ended the container because memory ran out."""
    with suppress(LaunchError):
        return docker(host, "inspect", "--format", "{{.State.OOMKilled}}", name).strip() == "true"
    return False


def _gpu(host: Host, name: str) -> dict[str, str]:
    query = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    with suppress(LaunchError, ValueError):
        driver, gpu = docker(host, "exec", name, *query).strip().splitlines()[0].split(", ", 1)
        return {"driver_version": driver, "gpu": gpu}
    return {}
