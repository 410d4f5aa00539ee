"""What all ways to start a server share: what is wanted, and what came up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from servers.hosts import Host

How = Literal["compose", "process", "simulated", "running"]

Say = Callable[[str], None]
"""Takes one line of progress for people."""

READY_TIMEOUT_S = 1800.0
"""Half an hour: large weights come from slow disks."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A server that should be up."""

    server: str
    """`vllm`, `tgi` or `lightllm`."""
    host: Host
    model: str
    """compose: the model's folder in the volume; process: its folder, alone or below the host's model_dir, or its name
    on the Hub; simulated: any name."""
    how: How
    options: Mapping[str, Any] = field(default_factory=dict)
    """What only this way of starting takes; each launcher's docstring lists it."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A server that is up and has answered."""

    url: str
    facts: Mapping[str, Any]
    """What to keep with a run: `launch`, `ready_s` (start-up, where we started it) and image, digest, command, ..."""
    pids: tuple[int, ...] = ()
    """Its processes on this machine; empty where it runs in containers or elsewhere."""
