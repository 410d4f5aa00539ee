"""What a benchmark knows about a client: how to install it, start it, and read what it reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One burst, the same for every client."""

    url: str
    """Of the simulated vLLM."""
    n: int
    """Requests, all at once."""
    input_tokens: int
    output_tokens: int
    model: Path
    """A folder as `model.make` leaves it."""
    scratch: Path
    """An empty folder of this run's own, where the client starts and leaves its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What the client says it measured, as medians over its requests."""

    ttft_ms: float
    tpot_ms: float
    """Per token after the first: what is called ITL in aiperf and in guidellm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A load generator that can be driven from a command line."""

    name: str
    version: str
    install: Callable[[Path], None]
    """Makes everything the client needs in a folder; raises CalledProcessError or OSError."""
    command: Callable[[Path, Load], list[str]]
    """The command line, given the folder it was installed in."""
    reported: Callable[[Path], Reported]
    """Reads its results from the scratch folder of a run; raises OSError, ValueError or LookupError."""
    environment: Mapping[str, str] = field(default_factory=dict)
    exit_codes: tuple[int, ...] = (0,)
    """Those with which there are results."""
