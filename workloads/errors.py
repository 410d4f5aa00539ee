"""The base class of errors that are meant for the user."""

from __future__ import annotations


class LoadgenError(Exception):
    """An error with a hint that says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
