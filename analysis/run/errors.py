"""Exceptions raised while run files are written or read."""

from __future__ import annotations

from loadgen.workloads.errors import LoadgenError


class OutputError(LoadgenError):
    """Raised when a run file or a result file cannot be written."""


class RunFileError(Exception):
    """Raised when a folder or file does not contain a readable run."""
