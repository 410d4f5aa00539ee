"""What servers, GPUs and hosts report about themselves while a run is on: beside the load, never in its path.

A Source is read now and then, and can fail without failing the run:

GapError               one reading failed: a gap in the curve, with its reason
└── NotMeasuredError   it cannot be read here at all
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

EXTRA = "pip install 'llm-loadgen[telemetry]'"
"""What to do where a library is missing."""


class GapError(Exception):
    """One reading failed; the message is the reason."""


class NotMeasuredError(GapError):
    """Nothing can be read here at all; the message is the reason."""


class Source(Protocol):
    """One thing that is read again and again, always by one thread at a time."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What stays the same during the run: for the header."""

    def read(self, limit_s: float) -> dict[str, Any]:
        """The values of this moment. May take `limit_s`, roughly. Raises GapError."""

    def close(self) -> None:
        """Let go of connections and libraries; `read` opens them again."""
