"""Errors about the server under test, and safe readers of files and bodies that come from outside.

Every error that is found before the first request is a ServerError. The readers limit sizes, so that no content takes
long to read, and they raise only the errors that they document.
"""

from __future__ import annotations

import re
import tomllib
import zlib
from pathlib import Path
from typing import Any

import msgspec

from loadgen.workloads.input_files import open_input

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Every exception that msgspec raises on bytes: no JSON, another type than expected, no UTF-8, nested too deeply."""

SETTINGS_LIMIT_BYTES = 1 << 20
"""Maximum size of a settings file that a user wrote."""
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*\.[ \t]*{_PART}){{32}}")
"""Matches a dotted key of more than 32 parts. tomllib takes minutes for a key of very many parts."""


def read_settings(path: Path) -> str:
    """Return the text of a settings file. Raises OSError, and ValueError for a file that is too large or not UTF-8."""
    with open_input(path) as file:
        content = file.read(SETTINGS_LIMIT_BYTES + 1)
    if len(content) > SETTINGS_LIMIT_BYTES:
        raise ValueError(f"it has more than {SETTINGS_LIMIT_BYTES:,} bytes")
    return content.decode()


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises OSError and ValueError."""
    text = read_settings(path)
    long_key = _LONG_KEY.search(text)
    if long_key:
        raise ValueError(f"a key has too many parts: {long_key[0][:60]}...")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class ServerError(Exception):
    """An error about the server, with a hint that says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UnreachableError(ServerError):
    """No server answers at the URL: connection refused, timeout, unknown host or invalid certificate."""


class ClientLimitError(UnreachableError):
    """This machine cannot open a connection: no free port or file, no route, no permission.

    The server is not to blame. Commands end with the exit code for a client that was the limit."""


class LocalLimitError(OSError):
    """A limit of this machine prevented a connection (see loadgen.servers.wire.local_limits).

    `strerror` names the cause and the remedy."""


class WrongServerError(ServerError):
    """A server answers at the URL, but not the one that was requested."""


class UnauthorizedError(ServerError):
    """The server requires an API key, or refuses the one that was sent."""


class SecretError(ServerError):
    """A key cannot be sent, or a secret stands where it would be stored. The message does not show the secret."""


class EndpointError(ServerError):
    """The server does not have the requested endpoint."""


class ModelError(ServerError):
    """The server does not list the requested model. The message names the models that it lists."""


class LimitError(ServerError):
    """The server would refuse or shorten requests of the plan. The message lists every exceeded limit."""


class VersionError(ServerError):
    """Figures of this server version are known to be misleading on the requested endpoint."""


class UncountableError(ServerError):
    """The server does not report how many tokens a prompt has."""


class HostsError(ServerError):
    """The hosts file is invalid. The message lists every mistake."""


class LaunchError(ServerError):
    """The server could not be started, or ended during startup."""

    def __init__(self, message: str, hint: str = "", *, log_tail: str = "") -> None:
        super().__init__(message, hint)
        self.log_tail = log_tail
        """The last lines of the server's log. Empty without a log."""


def decompress(body: bytes, coding: str, limit_bytes: int) -> bytes:
    """Return at most `limit_bytes` of a body that was compressed with gzip or deflate.

    A body in another coding, or a corrupted one, is returned unchanged."""
    if coding not in ("gzip", "x-gzip", "deflate"):
        return body
    try:
        # Adding 32 makes zlib detect gzip and deflate by their first bytes.
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, limit_bytes)
    except zlib.error:
        return body
