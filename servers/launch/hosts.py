"""The machines that servers are started on: this one, and those of a hosts file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from servers.errors import HostsError
from servers.kinds import launchable

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
_SECRET = re.compile(r"(?i)(^|_)(token|key|secret|password)$")


@dataclass(frozen=True, slots=True)
class Host:
    """One machine with GPUs, and how its container engine and its servers are reached."""

    name: str
    platform: str = ""
    """What reports call it, such as `A800`; empty: nothing is said."""
    docker: str = ""
    """A Docker context's name, or `ssh://user@host`; empty: the engine of this machine."""
    address: str = "127.0.0.1"
    """Name or address under which this machine reaches it. Servers listen there only."""
    gpus: Mapping[str, str] = field(default_factory=dict)
    """GPU of each server, by index or UUID, or several with commas between; others keep docker-compose.yml's."""
    model_dir: str = ""
    """Folder of that machine that holds the models; empty: the volume as it is there."""
    model_volume: str = "llm-models"
    """Name of the volume that its containers read the models from."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What docker-compose.yml is told beside, such as VLLM_TAG. No secrets: they come from the environment."""


LOCAL = Host("local")
"""This machine: its own container engine, and servers on loopback."""


def read_hosts(path: Path) -> Mapping[str, Host]:
    """The hosts of a TOML file, a table `[NAME]` each, and `local`, which is this machine unless the file has one.

    Raises HostsError that lists every mistake, unknown keys included.
    """
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except OSError as problem:
        raise HostsError(f"cannot read {path}: {problem.strerror}", "examples/hosts.toml shows one") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise HostsError(f"{path} is not TOML: {problem}", "examples/hosts.toml shows one") from problem
    problems = [problem for name, table in tables.items() for problem in _problems(name, table)]
    if problems:
        raise HostsError(f"{path}: {'; '.join(problems)}", f"a host has {', '.join(_KEYS)}; see examples/hosts.toml")
    return {LOCAL.name: LOCAL} | {name: Host(name, **table) for name, table in tables.items()}


def _problems(name: str, table: object) -> Iterator[str]:
    """What is wrong with one table of the file."""
    if not _NAME.fullmatch(name):
        yield f"{name!r} is no name for a host: small letters, digits, - and _ only"
    if not isinstance(table, dict):
        yield f"{name} must be a table"
        return
    for key, value in table.items():
        if key not in _KEYS:
            yield f"{name} has no key {key!r}"
        elif not _KEYS[key](value):
            yield f"{name}.{key} cannot be {value!r}: {_EXPECTED[key]}"


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and not re.search(r"[/\s]", value)


def _is_engine(value: Any) -> bool:
    return isinstance(value, str) and (
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*|ssh://[^\s/-][^\s]*", value) is not None or not value
    )


def _is_folder(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("/")


def _is_volume(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", value) is not None


def _is_gpus(value: Any) -> bool:
    return isinstance(value, dict) and all(
        server in launchable() and isinstance(gpu, str) and all(_GPU.fullmatch(each) for each in gpu.split(","))
        for server, gpu in value.items()
    )


def _is_env(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _VARIABLE.fullmatch(name) and not _SECRET.search(name) and isinstance(text, str) for name, text in value.items()
    )


_KEYS: dict[str, Callable[[Any], bool]] = {
    "platform": _is_text,
    "docker": _is_engine,
    "address": _is_address,
    "gpus": _is_gpus,
    "model_dir": _is_folder,
    "model_volume": _is_volume,
    "env": _is_env,
}
_EXPECTED = {
    "platform": "a text, such as A800",
    "docker": 'the name of a Docker context, or "ssh://user@host", or "" for this machine',
    "address": "a host name or an address, without scheme and port",
    "gpus": f'one GPU per server ({", ".join(launchable())}), by index "0" or UUID "GPU-...", or several: "0,1"',
    "model_dir": "an absolute folder of that machine",
    "model_volume": "the name of a Docker volume",
    "env": "names and texts; secrets come from the environment, never from this file",
}
assert set(_KEYS) == set(_EXPECTED) == {each.name for each in fields(Host)} - {"name"}
