"""The raw facts of a command that ran at an instant of a run (--at)."""

from __future__ import annotations

import msgspec

from loadgen.analysis.run.record import Integer

MAX_OUTPUT = 4_096
"""Maximum number of characters of a command's output that are stored. The end of a longer output is kept."""


class CommandRecord(msgspec.Struct, tag_field="type", tag="command", kw_only=True):
    """One command of --at. Times are in ns from the start of the run."""

    command: str
    at_ns: Integer
    """Time at which the command started."""
    end_ns: Integer | None = None
    """Time at which the command ended, or was ended with the run."""
    exit_code: int | None = None
    """Exit code of the shell. It is negative for a signal. None if the command could not be started."""
    ended_with_run: bool = False
    """True if the command was still running at the end of the run, and was ended."""
    output: str = ""
    """Standard output and standard error together, without secrets. If they are long, only their end."""
