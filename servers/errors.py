"""What can be wrong with the server under test, found out before the first request is sent: each is a ServerError.
And what others wrote, read so that nothing in it takes long or raises anything unforeseen."""

from __future__ import annotations

import re
import tomllib
import zlib
from pathlib import Path
from typing import Any

import msgspec

from loadgen.workloads.input_files import open_input

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises on bytes: not JSON, not of the type asked for, not UTF-8, nested too deeply."""

SETTINGS_LIMIT_BYTES = 1 << 20
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*\.[ \t]*{_PART}){{32}}")
"""A key of very many parts takes tomllib minutes."""


def read_settings(path: Path) -> str:
    """Return the text of a file that somebody wrote by hand. Raises OSError, and ValueError for a file that is larger
    than such files are or is no text."""
    with open_input(path) as file:
        content = file.read(SETTINGS_LIMIT_BYTES + 1)
    if len(content) > SETTINGS_LIMIT_BYTES:
        raise ValueError(f"it has more than {SETTINGS_LIMIT_BYTES:,} bytes")
    return content.decode()


def read_toml(path: Path) -> dict[str, Any]:
    """Likewise, in TOML. Raises OSError, ValueError."""
    text = read_settings(path)
    if result := _LONG_KEY.search(text):
        raise ValueError(f"a key of so many parts: {result[0][:60]}...")
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
    """Nothing answers at the URL: refused, timed out, unknown name, bad certificate."""


class ClientLimitError(UnreachableError):
    """This machine cannot open a connection: no free port or file, no route, no permission. The server is not to blame,
    and commands end with the exit code for a client that was the limit."""


class LocalLimitError(OSError):
    """A connection could not be opened because of this machine (loadgen.servers.wire.local_limits). `strerror` names
    the cause and the remedy."""


class WrongServerError(ServerError):
    """Something answers at the URL, but it is not the server that was named."""


class UnauthorizedError(ServerError):
    """The server wants an API key, or refuses the one it got."""


class SecretError(ServerError):
    """A key that cannot be sent, or a secret where it would be kept; the message does not show it."""


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


def decompress(body: bytes, coding: str, limit_bytes: int) -> bytes:
    """A body as it was before gzip or deflate, up to a limit; as it is in any other coding, or where it is damaged."""
    if coding not in ("gzip", "x-gzip", "deflate"):
        return body
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, limit_bytes)  # of both, by their first bytes
    except zlib.error:
        return body
