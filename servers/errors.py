"""Errors about the server under test, and safe readers for external files and response bodies.

An error that is detected before a run sends its first request is a ServerError. The readers limit the size of their
input, so that a hostile file or response cannot block them for long. They raise only the errors that they document.
"""

from __future__ import annotations

import re
import tomllib
import zlib
from pathlib import Path
from typing import Any

import msgspec

from loadgen.workloads.input_files import open_input
from loadgen.workloads.spec_syntax import UnknownCountError

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Every exception that msgspec raises on bytes: invalid JSON, unexpected type, invalid UTF-8, too deep nesting."""

SETTINGS_LIMIT_BYTES = 1 << 20
"""Maximum size of a settings file that a user wrote."""
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*\.[ \t]*{_PART}){{32}}")
"""Matches a dotted key of more than 32 parts. tomllib takes minutes for a key of very many parts."""


def read_settings(path: Path) -> str:
    """Return the text of a settings file.

    Raises OSError if the file cannot be read, and ValueError if the file is too large or not UTF-8."""
    with open_input(path) as file:
        content = file.read(SETTINGS_LIMIT_BYTES + 1)
    if len(content) > SETTINGS_LIMIT_BYTES:
        raise ValueError(f"it has more than {SETTINGS_LIMIT_BYTES:,} bytes")
    return content.decode()


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises OSError if the file cannot be read, and ValueError if the file is too large or not valid TOML."""
    text = read_settings(path)
    long_key = _LONG_KEY.search(text)
    if long_key:
        raise ValueError(f"a key has too many parts: {long_key[0][:60]}...")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class ServerError(Exception):
    """Base class of errors about the server. The `hint` tells the user how to fix the problem."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UnreachableError(ServerError):
    """No server answers at the URL: connection refused, timeout, unknown host or invalid certificate."""


class ClientLimitError(UnreachableError):
    """This machine cannot open a connection: no free port or file descriptor, no route, or no permission.

    The server is not the cause, so the exit code of the command differs from that of other ServerErrors.
    """


class LocalLimitError(OSError):
    """An OSError that replaces the original error if a limit of this machine prevented a connection.

    `strerror` names the cause and the remedy (see loadgen.servers.wire.local_limits)."""


class WrongServerError(ServerError):
    """The server that answers at the URL is not the requested one."""


class UnauthorizedError(ServerError):
    """The server requires an API key, or refuses the key that was sent."""


class SecretError(ServerError):
    """An API key cannot be sent, or the user wrote a secret into a value that would be stored.

    The message does not contain the secret."""


class EndpointError(ServerError):
    """The server does not have the requested endpoint."""


class NoEndpointError(ServerError):
    """The server refuses or redirects the requests on every endpoint that was tried."""


class RefusedModelError(ServerError):
    """The server refuses requests for the model. The hint names the models that the server lists."""


class LimitError(ServerError):
    """The server would refuse or shorten the planned requests. The message lists every exceeded limit."""


class VersionError(ServerError):
    """The version of the server is known to give misleading measurements on the requested endpoint."""


class UncountableError(ServerError, UnknownCountError):
    """The server does not report the number of tokens of a prompt."""


class HostsError(ServerError):
    """The hosts file, which lists the hosts of a test matrix, is invalid. The message lists every mistake."""


class CacheResetError(ServerError):
    """The server could not empty its prefix cache, or still uses it afterwards."""


class LaunchError(ServerError):
    """The server could not be started, or exited during startup."""

    def __init__(self, message: str, hint: str = "", *, log_tail: str = "") -> None:
        super().__init__(message, hint)
        self.log_tail = log_tail
        """The last lines of the server's log. Empty if there is no log."""


def decompress(body: bytes, coding: str, limit_bytes: int) -> bytes:
    """Return the first `limit_bytes` bytes of a decompressed gzip or deflate body.

    `coding` is the Content-Encoding of the body. A body that has another coding or is corrupted is returned
    unchanged."""
    if coding not in ("gzip", "x-gzip", "deflate"):
        return body
    try:
        # Adding 32 makes zlib detect gzip and deflate by their first bytes.
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, limit_bytes)
    except zlib.error:
        return body
