"""The base class of errors that are shown to the user."""

from __future__ import annotations


class LoadgenError(Exception):
    """An error that is shown to the user. `hint` says how to fix the problem."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
