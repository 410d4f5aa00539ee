"""What all ways to start a server share: what is wanted, and what came up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from servers.errors import LaunchError
from servers.launch.hosts import Host

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


def tensor_parallel(wanted: Wanted) -> int:
    """How many GPUs the model is spread over: options["tensor_parallel"], else one."""
    return int(wanted.options.get("tensor_parallel") or 1)


def gpus_of(wanted: Wanted) -> str:
    """The GPUs to use, with commas between, as Docker's engine and CUDA both take them; empty: whatever is usual.

    options["gpus"] wins; then the first ones that the host names for this server; then, for several, its first ones.
    """
    if wanted.options.get("gpus"):
        return str(wanted.options["gpus"])
    count = tensor_parallel(wanted)
    named = wanted.host.gpus.get(wanted.server, "").split(",")
    if len(named) >= count:
        return ",".join(named[:count])
    return ",".join(map(str, range(count)))


def check_options(wanted: Wanted, known: frozenset[str]) -> None:
    """Raises LaunchError for options that this way of starting would pass over."""
    if unknown := sorted(wanted.options.keys() - known):
        raise LaunchError(
            f"--launch {wanted.how} has no option {', '.join(unknown)}", f"it has {', '.join(sorted(known))}"
        )


@dataclass(frozen=True, slots=True)
class Launched:
    """A server that is up and has answered."""

    url: str
    facts: Mapping[str, Any]
    """What to keep with a run: `launch`, `ready_s` (start-up, where we started it) and image, digest, command, ..."""
    pids: tuple[int, ...] = ()
    """Its processes on this machine; empty where it runs in containers or elsewhere."""
