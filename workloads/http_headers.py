"""Checks the names and values of HTTP headers that a user writes, on the command line or in a file."""

from __future__ import annotations

import re

from loadgen.workloads.spec_syntax import WorkloadError

HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): *([ -~\u00a0-\u00ff]*)")
"""Matches a header line, without the line end."""
FRAMING = ("content-length", "transfer-encoding", "connection")
"""Headers that define where a request ends. Only the code that writes the request may set them."""


def check_header(name: str, value: str) -> None:
    """Raise WorkloadError if a header cannot be sent, or if only loadgen may set it. The message omits the value."""
    if not HEADER.fullmatch(f"{name}: {value}"):
        hint = "write name and value in Latin letters, on one line"
        raise WorkloadError(f"header {name[:40]!r} cannot be sent", hint)
    if name.lower() in FRAMING:
        raise WorkloadError(f"header {name!r} cannot be set", f"leave it out: loadgen sets {name} itself")
