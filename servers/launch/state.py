"""What is kept of servers that were started as processes and left running, so that a later command finds them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from servers.launch import processes


@dataclass(frozen=True, slots=True)
class State:
    """One server that was left running."""

    server: str
    url: str
    pid: int
    """Leader of a process group of its own."""
    ticks: int
    """When the kernel started it, so that another process with the same id is not taken for it."""
    log: str
    command: list[str]
    since: str
    """ISO 8601, local time with offset."""
    facts: dict[str, Any]

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        return processes.started_ticks(self.pid) == self.ticks


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where states and logs are kept: $XDG_STATE_HOME/loadgen, or ~/.local/state/loadgen. Made when missing."""
    base = environ.get("XDG_STATE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".local" / "state"
    made = root / "loadgen"
    made.mkdir(parents=True, exist_ok=True)
    return made


def read(server: str) -> State | None:
    """What was kept of this server; None when nothing, or nothing that can be read, was."""
    try:
        return msgspec.json.decode(_file(server).read_bytes(), type=State)
    except (OSError, msgspec.DecodeError):
        return None


def write(state: State) -> None:
    """Keep it, in place of what was there."""
    file = _file(state.server)
    beside = file.with_suffix(".new")
    beside.write_bytes(msgspec.json.encode(state))
    beside.replace(file)


def forget(server: str) -> None:
    """Remove what was kept."""
    _file(server).unlink(missing_ok=True)


def log_file(server: str, host: str) -> Path:
    """Where the log of a server goes; the one before is overwritten."""
    return folder() / f"{host}-{server}.log"


def _file(server: str) -> Path:
    return folder() / f"{server}.json"
