"""What gets one into a server besides its address: headers, an API key among them, and how certificates are checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
    import ssl  # 30 ms that plain HTTP must not cost

    context = ssl.create_default_context(cafile=ca_file)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


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
