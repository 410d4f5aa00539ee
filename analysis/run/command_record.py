"""Defines the record of a shell command that ran during a run (option --at). A run file has one record per command."""

from __future__ import annotations

import msgspec

from loadgen.analysis.run.record import Integer

MAX_OUTPUT = 4_096
"""Maximum number of characters of a command's output that are stored. Of a longer output, the end is stored."""


class CommandRecord(msgspec.Struct, tag_field="type", tag="command", kw_only=True):
    """One command of --at. Times are in ns from the start of the run."""

    command: str
    at_ns: Integer
    """Time at which the command started."""
    end_ns: Integer | None = None
    """Time at which the command ended by itself, or was terminated at the end of the run."""
    exit_code: int | None = None
    """Exit code of the shell, or the negative number of the signal that ended it. None if the command could not be
    started, or was terminated at the end of the run."""
    ended_with_run: bool = False
    """True if the command was still running at the end of the run, and was terminated."""
    output: str = ""
    """Standard output and standard error together, without secrets. Only the end of a long output is stored."""
