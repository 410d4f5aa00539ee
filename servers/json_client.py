"""Calls beside the load: one JSON question, one JSON answer, and errors that say what to do.

The standard library's client, because a thousand prompts are a thousand small questions before the burst: a call costs
0.1 ms of CPU here and 0.3 ms with httpx, whose import alone takes 0.1 s. It does not follow proxy settings of the
environment either, which would have a proxy measured.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import msgspec

from loadgen.servers.auth import NO_AUTH, Access, hide_secrets
from loadgen.servers.errors import DECODE_ERRORS, ClientLimitError, UnauthorizedError, UnreachableError, decompress
from loadgen.servers.marks import HEADER, Mark, in_header, in_value
from loadgen.servers.wire import local_limits

TIMEOUT_S = 10.0
ANSWER_LIMIT_BYTES = 64 << 20


class JsonClient:
    """Asks one server over one kept connection, which is opened anew when the server has closed it meanwhile."""

    def __init__(self, url: str, access: Access = NO_AUTH, timeout_s: float | None = None) -> None:
        """Paths count from `url`. `timeout_s`: how long an answer may take, if not 10 s."""
        parts = urlsplit(url)
        self._timeout_s = timeout_s or TIMEOUT_S
        self._late = f"is the server still loading?{' --timeout gives it longer' if timeout_s else ''}"
        self._url = url
        self._prefix = parts.path.rstrip("/")
        self._headers = {"content-type": "application/json", **access.headers}
        self.mark: Mark | None = None
        """The first mark of a simulated server in what it has answered."""
        host = parts.hostname or ""
        self._connection = (
            http.client.HTTPSConnection(host, parts.port, timeout=self._timeout_s, context=access.tls)
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, parts.port, timeout=self._timeout_s)
        )

    def __call__(self, path: str, body: object = None) -> tuple[int, Any]:
        """GET `path`, or POST `body` to it: HTTP status and JSON, which is None when the answer is not JSON. Raises
        UnreachableError and UnauthorizedError."""
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        status, content = self._asked(method, path, data, {}, self._timeout_s, ANSWER_LIMIT_BYTES)
        if status in (401, 403):
            raise UnauthorizedError(
                f"{self._url} answers {status} to {path}: it wants an API key, or another one",
                "put the key into the environment variable that --api-key-env names (LOADGEN_API_KEY)",
            )
        try:
            value = msgspec.json.decode(content)
        except DECODE_ERRORS:
            return status, None
        self.mark = self.mark or in_value(value)
        return status, value

    def page(self, path: str, accept: str, *, limit_s: float, limit_bytes: int) -> tuple[int, bytes]:
        """GET a page of any kind: HTTP status and body. It may take `limit_s` to connect and as long again to arrive.
        Raises UnreachableError, also for a page that takes longer, has more than `limit_bytes` or breaks off."""
        return self._asked("GET", path, None, {"accept": accept}, limit_s, limit_bytes)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _asked(
        self, method: str, path: str, data: bytes | None, more: Mapping[str, str], limit_s: float, limit_bytes: int
    ) -> tuple[int, bytes]:
        def once() -> tuple[int, bytes]:
            self._connection.timeout = limit_s
            if self._connection.sock is None:
                self._connection.connect()
            assert isinstance(self._connection.sock, socket.socket)
            self._connection.sock.settimeout(limit_s)
            timed: Any = partial(_Until, until_s=monotonic() + limit_s)
            self._connection.response_class = lambda sock, **told: http.client.HTTPResponse(timed(sock), **told)  # type: ignore[assignment]
            self._connection.request(method, self._prefix + path, data, {**self._headers, **more})
            answer = self._connection.getresponse()
            self.mark = self.mark or in_header(answer.getheader(HEADER))
            content = answer.read(limit_bytes)
            if len(content) < limit_bytes and answer.length is None and not answer.chunked:
                content += answer.read(1)  # the end of such a body is that of the connection, which this read finds
            if not answer.isclosed():
                raise (
                    http.client.IncompleteRead(content)
                    if len(content) < limit_bytes
                    else http.client.HTTPException(f"more than {limit_bytes:,} bytes")
                )
            # Some proxies compress what nobody asked them to.
            coding = (answer.getheader("content-encoding") or "").strip().lower()
            return answer.status, hide_secrets(decompress(content, coding, limit_bytes), whole=True)

        try:
            if self._connection.sock:
                # Servers close idle connections after a few seconds. No question changes anything, so asking again is
                # safe.
                with suppress(ConnectionError):
                    return once()
                self.close()
            return once()
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError | ssl.SSLError):
                raise_if_local_limit(self._url, self._connection.host, self._connection.port, error)
            raise _unreachable(self._url, error, limit_s, self._late) from error


class _Until(io.RawIOBase):
    """What a socket receives until an instant: a server that sends byte by byte never meets a limit of each read."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self._sock, self._raw, self._until_s = sock, sock.makefile("rb", buffering=0), until_s

    def makefile(self, _mode: str) -> io.BufferedReader:
        """As http.client asks a socket for it."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if (left_s := self._until_s - monotonic()) <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def raise_if_local_limit(url: str, host: str, port: int, error: OSError) -> None:
    """Raise a ClientLimitError if a connection failed because of this machine."""
    limit = local_limits.local_limit_of_host(host, port, error)
    if limit is not None:
        cause, _, remedy = str(limit.strerror).partition(". ")
        raise ClientLimitError(f"{url} cannot be reached from here: {cause}", remedy) from error


_TLS_HINT = "check which TLS versions and client certificates it asks for; loadgen sends no certificate"


def _unreachable(url: str, error: Exception, limit_s: float, late: str) -> UnreachableError:
    reason = hide_secrets(str(error)) or type(error).__name__
    match error:
        case TimeoutError():
            said = f"{url} did not answer within {limit_s:g} s", late
        case socket.gaierror():
            said = f"{url}: no such host", "check the host name in --url"
        case ssl.SSLCertVerificationError():
            said = f"{url}: {reason}", "pass the authority with --ca-file, or --insecure to skip the check"
        case ssl.SSLError(reason=str(code)) if "_ALERT_" in code:  # the server's own words, so it speaks TLS
            said = f"{url} refused the TLS connection: {reason}", _TLS_HINT
        case ssl.SSLEOFError() | ConnectionResetError() | BrokenPipeError() if url.startswith("https:"):
            # A server that refuses a client after the handshake often closes at once, so that its words are lost.
            hint = f"{_TLS_HINT}; use http:// where it does not speak TLS"
            said = f"{url} closed the TLS connection without a response: {reason}", hint
        case ssl.SSLError():
            said = f"{url} does not speak TLS: {reason}", "use http:// instead of https://"
        case http.client.HTTPException() | ConnectionResetError() | BrokenPipeError():
            said = f"{url} does not answer in HTTP: {reason}", "check --url; https:// where it speaks TLS"
        case _:
            said = f"nothing listens at {url}: {reason}", "start the server, or check host and port in --url"
    return UnreachableError(*said)
