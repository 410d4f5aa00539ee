"""Errors of writing and reading runs."""

from __future__ import annotations

from loadgen.workloads.errors import LoadgenError


class OutputError(LoadgenError):
    """A run or one of its results cannot be written where it should go."""


class RunFileError(Exception):
    """A folder or file that is not a readable Run; the message says what to do."""
