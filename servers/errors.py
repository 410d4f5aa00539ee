"""What can be wrong with the server under test, found out before the first request is sent: each is a ServerError."""

from __future__ import annotations

import msgspec

NOT_READABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises on bytes: not JSON, not of the type asked for, not UTF-8, nested too deeply."""


class ServerError(Exception):
    """An error about the server, with a hint that says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UnreachableError(ServerError):
    """Nothing answers at the URL: refused, timed out, unknown name, bad certificate."""


class WrongServerError(ServerError):
    """Something answers at the URL, but it is not the server that was named."""


class UnauthorizedError(ServerError):
    """The server wants an API key, or refuses the one it got."""


class EndpointError(ServerError):
    """The server has no endpoint of the name asked for."""


class ModelError(ServerError):
    """The server does not list the model asked for; the message lists those it does."""


class LimitError(ServerError):
    """The server would refuse or shorten what the plan asks; the message lists every limit."""


class VersionError(ServerError):
    """This version of the server is known to mislead on the endpoint asked for."""


class UncountableError(ServerError):
    """The server does not say how many tokens a prompt has."""


class HostsError(ServerError):
    """The hosts file is wrong; the message lists every mistake."""


class LaunchError(ServerError):
    """The server could not be started, or ended while it started."""

    def __init__(self, message: str, hint: str = "", *, log_tail: str = "") -> None:
        super().__init__(message, hint)
        self.log_tail = log_tail
        """The last lines of the server's log; empty where there is none."""
