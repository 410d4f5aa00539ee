"""Errors while writing and reading runs."""

from __future__ import annotations

from loadgen.workloads.errors import LoadgenError


class OutputError(LoadgenError):
    """A run or a result cannot be written."""


class RunFileError(Exception):
    """A folder or file is not a readable run. The message says what to do."""
