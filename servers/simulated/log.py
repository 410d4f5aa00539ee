"""What a simulated server really did: one line per request, written when its answer has ended, and one at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

_BUFFER_BYTES = 1 << 20


class LogLine(msgspec.Struct, frozen=True):
    """One request. Every instant is in nanoseconds on CLOCK_REALTIME, as the kernel's receive stamps are."""

    request_id: str
    """The client's X-Request-Id; empty when it sent none."""
    received_ns: int
    """When the request's head had been read."""
    due_ns: list[int]
    """When the clock wanted each send to happen."""
    sent_ns: list[int]
    """Read immediately before the call that sent it."""
    tokens: list[int]
    """How many tokens left with it."""
    prompt_tokens: int
    output_tokens: int
    """Tokens that left."""
    fault: str
    """The fault this request was given; empty for none."""


class Log:
    """Writes lines to `path`, or hands them to `keep`, or drops them when there is neither."""

    def __init__(self, path: Path | None = None, keep: Callable[[LogLine], None] | None = None) -> None:
        self._file = path.open("wb", buffering=_BUFFER_BYTES) if path else None
        self._keep = keep

    def append(self, line: LogLine) -> None:
        """Costs some microseconds for a hundred instants, and no system call until the buffer is full."""
        if self._keep:
            self._keep(line)
        if self._file:
            self._file.write(msgspec.json.encode(line) + b"\n")

    def flush(self) -> None:
        """Lets others read what has been written."""
        if self._file:
            self._file.flush()

    def close(self, summary: dict[str, Any]) -> None:
        """Adds the line that says how the server did as a whole."""
        if self._file:
            self._file.write(msgspec.json.encode({"summary": summary}) + b"\n")
            self._file.close()
            self._file = None
