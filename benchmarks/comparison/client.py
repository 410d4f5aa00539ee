"""The interface of a load generator in the comparison: how to install it, start it, and read its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The burst that every load generator sends, and the files for it."""

    url: str
    """URL of the simulated vLLM server."""
    n: int
    """Number of requests, which are all sent at once."""
    input_tokens: int
    output_tokens: int
    model: Path
    """Model folder that `model.make` has written."""
    scratch: Path
    """Empty folder for this run. It is the client's working directory and receives the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Latencies that a load generator reports: medians over its requests."""

    ttft_ms: float
    tpot_ms: float
    """Time per output token after the first one. aiperf and guidellm call it ITL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A load generator that can be started from a command line."""

    name: str
    version: str
    install: Callable[[Path], None]
    """Installs the client in a folder. Raises CalledProcessError or OSError."""
    command: Callable[[Path, Load], list[str]]
    """Returns the command line for a load. The first argument is the folder in which the client is installed."""
    reported: Callable[[Path], Reported]
    """Reads the client's results from the scratch folder of a run. Raises OSError, ValueError or LookupError."""
    environment: Mapping[str, str] = field(default_factory=dict)
    exit_codes: tuple[int, ...] = (0,)
    """Exit codes of the client with which it has written results."""
