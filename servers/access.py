"""What gets one into a server besides its address: headers, an API key among them, and how certificates are checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    import ssl

HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): *([ -~\u00a0-\u00ff]*)")
_FRAMING = ("content-length", "transfer-encoding", "connection")
"""Headers that say where a request ends: only who writes it knows."""
_SECRET = re.compile("auth|cookie|credential|key|password|secret|signature|token", re.IGNORECASE)
_VARIABLE = re.compile(r"(?<!\$)(?:\$\$)*\$[A-Za-z_{]")


class Access(NamedTuple):
    """How to get at a server: never written to the Run."""

    headers: dict[str, str] = {}  # noqa: RUF012 - nobody writes to it
    """What each request carries."""
    tls: ssl.SSLContext | None = None
    """How certificates are checked, if not against the system's: reading those takes 90 ms, of who speaks TLS only."""


OPEN = Access()
"""Of a server that asks for nothing."""


def bearer(key: str | None) -> dict[str, str]:
    """The header of an API key, where there is one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def tls_context(ca_file: Path | None = None, insecure: bool = False) -> ssl.SSLContext:
    """Certificates are checked against the system's authorities, or `ca_file`, unless `insecure`."""
    import ssl

    context = ssl.create_default_context(cafile=ca_file)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def certificates(file: Path | None) -> Path | None:
    """A file of authorities. Raises ValueError."""
    try:
        if file:
            tls_context(file)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror
        raise ValueError(f"cannot be read as certificates in PEM: {reason}") from None
    return file


def server_url(url: str) -> str:
    """The URL with its host's name in ASCII. Raises ValueError."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    if re.search(r"[\x00-\x20\x7f]", url):
        raise ValueError("has a blank or a control character in it")
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").encode("idna").decode()
    except ValueError as error:
        raise ValueError(f"is no URL: {error}") from None
    if not 0 < len(host) < 254:
        raise ValueError("names no host that can be: http://HOST:PORT")
    if not parts.path.isascii() or parts.query or parts.fragment:
        raise ValueError("may have a path, with what is not ASCII as %C3%BC, and nothing behind it")
    if not parts.netloc.isascii():
        parts = parts._replace(netloc=host if port is None else f"{host}:{port}")
    return urlunsplit(parts)


def header_lines(lines: tuple[str, ...]) -> tuple[str, ...]:
    """These headers as they are written. Raises ValueError."""
    for line in lines:
        found = HEADER.fullmatch(line)
        if not found:
            raise ValueError("must be written 'Name: value'")
        if found[1].lower() in _FRAMING:
            raise ValueError(f"loadgen sets {found[1]} itself")
    return lines


def redacted(line: str) -> str:
    """A header as it may be kept: in place of a secret, the environment variable that may hold it."""
    name, _, value = line.partition(":")
    secret = _SECRET.search(name) and not _VARIABLE.search(value)
    return f"{name}: ${re.sub(r'[^A-Za-z0-9]', '_', name).upper()}" if secret else line
