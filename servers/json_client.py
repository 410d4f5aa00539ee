"""A small HTTP client for the JSON requests that probe a server, count tokens or read metrics. The load does not use
it.

The client uses http.client from the standard library, because its requests must be cheap: counting the tokens of a
thousand prompts takes a thousand requests. A request costs 0.1 ms of CPU time with http.client, and 0.3 ms with httpx.
The import of httpx alone takes 0.1 s.

The client ignores proxy settings in environment variables. Otherwise, a run might measure a proxy that the user did not
name.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import ssl
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from loadgen.servers.auth import NO_AUTH, Access, hide_secrets, key_hint, tls_context
from loadgen.servers.backends.error_messages import error_text, one_line
from loadgen.servers.errors import DECODE_ERRORS, ClientLimitError, UnauthorizedError, UnreachableError, decompress
from loadgen.servers.http2 import (
    REFUSED_HTTP1_STATUSES,
    open_tunnel,
    refuses_http1,
    speaks_http2,
    start_translator,
    translator_socket,
)
from loadgen.servers.marks import HEADER, Mark, in_header, in_value
from loadgen.servers.proxy import ProxyError, credentials_advice, unused_proxy_hint
from loadgen.servers.target import Address, split_unix_url
from loadgen.servers.wire import local_limits
from loadgen.workloads.request import merged_headers

NO_HEADERS: Mapping[str, str] = {}
TIMEOUT_S = 10.0
ANSWER_LIMIT_BYTES = 64 << 20
BUSY_STATUSES = (429, 503)
"""HTTP statuses after which the same request may succeed later: Too Many Requests and Service Unavailable."""
RETRY_DELAYS_S = (0.25, 0.5, 1.0)
"""Pauses before a request is repeated if the server is busy and states no Retry-After."""
MAX_RETRY_WAIT_S = 30.0
"""Maximum total time that one client waits because of Retry-After, in seconds."""
REDIRECT_STATUSES = (301, 302, 303, 307, 308)


INTERIM_RESPONSES_MAX = 100
"""Maximum number of interim responses, such as `103 Early Hints`, before a response."""
INTERIM_LINE_BYTES = 65_536
"""Maximum number of bytes in a header line of an interim response."""
_SPEAKS_TLS = re.compile(rb"HTTP request (was sent )?to (an )?HTTPS|plain HTTP to an SSL")
"""Text of nginx, of Go servers and of Apache in the response to a request in plain HTTP on a port for TLS."""
_INTERIM = re.compile(rb"HTTP/1\.[01] 1(?!01)\d\d ")
"""Matches the status line of an interim response. 101 Switching Protocols is a final response."""


class JsonResponse(NamedTuple):
    """The response to one request outside the load."""

    status: int
    content: bytes
    location: str = ""
    """URL to which a redirect leads. Empty if the response is not a redirect."""
    retry_after: str = ""
    """Value of the header Retry-After. Empty if there is none."""
    headers: Mapping[str, str] = {}
    """Header values by name in lower case. They may contain secrets, so no message shows them."""

    @property
    def value(self) -> Any:
        """The decoded JSON, or None if the content is not JSON. A byte order mark at the start is skipped."""
        try:
            return msgspec.json.decode(self.content.removeprefix(BOM_UTF8))
        except DECODE_ERRORS:
            return None

    @property
    def words(self) -> str:
        """The HTTP status, and the server's error message or the target of a redirect, such as `503: Loading model`."""
        if self.location:
            return f"{self.status}, a redirect to {one_line(self.location)}"
        if self.status == http.client.OK:
            return str(self.status)
        message = error_text(self.status, hide_secrets(self.content)) if self.content.strip() else ""
        # Pages of proxies repeat the status: `503 Service Unavailable`.
        return f"{self.status}: {message.removeprefix(str(self.status)).lstrip(': ')}" if message else str(self.status)

    @property
    def retry_after_s(self) -> float | None:
        """The time in seconds after which the server allows a retry, or None if the server states no such time.

        The header Retry-After contains a number of seconds or an HTTP date. The number 0 and a date in the past give
        None, because they do not say when the busy server will be ready."""
        seconds = 0.0
        try:
            seconds = float(self.retry_after)
        except ValueError:
            with suppress(ValueError, TypeError, OverflowError):
                seconds = (parsedate_to_datetime(self.retry_after) - datetime.now(UTC)).total_seconds()
        return seconds if seconds > 0 else None  # a comparison with NaN is false


class JsonClient:
    """Sends requests to one server over a persistent connection, which is reopened if the server has closed it."""

    def __init__(
        self,
        url: str,
        access: Access = NO_AUTH,
        timeout_s: float | None = None,
        say: Callable[[str], None] | None = None,
        *,
        retry: bool = True,
        address: Address | None = None,
    ) -> None:
        """Prepare a client for the server at `url`. The first request opens the connection.

        - `url` is the base URL. Each request appends its path to this URL. If the URL has a query, every request gets
          this query.
        - `access` contains the credentials and TLS settings.
        - `timeout_s` is the time limit of a response in seconds (default: 10).
        - `say` is called with a line of text whenever the client waits for a busy server.
        - `retry`: if False, the client does not wait for a busy server.
        - `address` is the network address to connect to (default: any address of the host).
        """
        base, _, query = url.partition("?")
        unix = split_unix_url(base)
        self._socket_path, parts = (unix[0], urlsplit(f"http://localhost{unix[1]}")) if unix else ("", urlsplit(base))
        self._say = say
        self._query = f"?{query}" if query else ""
        self._can_wait_s = MAX_RETRY_WAIT_S if retry else 0.0
        self._retries_help = retry
        self._timeout_s = timeout_s or TIMEOUT_S
        self._timeout_hint = "is the server still loading?"
        if timeout_s:
            self._timeout_hint += " --timeout sets a longer limit"
        self._url = url
        self._prefix = parts.path.rstrip("/")
        has_type = any(name.lower() == "content-type" for name in access.headers)
        self._headers = {**({} if has_type else {"content-type": "application/json"}), **access.headers}
        self.mark: Mark | None = None
        """The first mark of a simulated server in the responses."""
        host = parts.hostname or ""
        self._access = access
        self._address = address
        self._tls: ssl.SSLContext | None = None
        """The TLS settings of connections through a proxy, from the first such connection on."""
        self._connection = (
            http.client.HTTPSConnection(host, parts.port, timeout=self._timeout_s, context=access.tls)
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, parts.port, timeout=self._timeout_s)
        )
        if translator_socket(base):
            self._use_translator()
        elif access.proxy and parts.scheme == "http" and not unix:  # without a tunnel, the proxy needs the whole URL
            self._prefix = f"http://{parts.netloc}{self._prefix}"
            self._headers |= access.proxy.headers

    def __call__(self, path: str, body: object = None) -> tuple[int, Any]:
        """Send GET `path`, or POST `path` if there is a `body`. Return the HTTP status and the decoded JSON.

        The second value is None if the response is not JSON. Raises UnreachableError if the request fails, and
        UnauthorizedError if the status is 401 or 403."""
        response = self.request(path, body)
        if response.status in (401, 403):
            raise self.unauthorized(path, response)
        value = response.value
        self.note_mark(value)
        return response.status, value

    def note_mark(self, value: object) -> None:
        """Remember that the server is simulated if `value` has the field that only simulated servers send.

        `value` is the decoded JSON of a response."""
        self.mark = self.mark or in_value(value)

    def request(self, path: str, body: object = None, headers: Mapping[str, str] = NO_HEADERS) -> JsonResponse:
        """Send GET `path`, or POST `path` if there is a `body`, and return the response.

        The body is sent as JSON, or as it is if it consists of bytes. `headers` are sent only with this request. If the
        server is busy (429 or 503), the request is repeated after the time in the header Retry-After. Without this
        header, the request is repeated up to three times within two seconds. Raises UnreachableError if the request
        fails.
        """
        method = "GET" if body is None else "POST"
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        attempt = 0
        while True:
            response = self._send(method, path + self._query, data, headers, self._timeout_s, ANSWER_LIMIT_BYTES)
            delay_s = self._retry_delay_s(response, attempt)
            if delay_s is None:
                return response
            if self._say and (attempt == 0 or delay_s >= 1):
                self._say(f"{self._url}{path} answers {response.words}; trying again in {delay_s:.2g} s")
            sleep(delay_s)
            attempt += 1

    def _retry_delay_s(self, response: JsonResponse, attempt: int) -> float | None:
        """Return the time in seconds to wait before a request is repeated, or None if it must not be repeated.

        If a server sends no Retry-After and stays busy through all attempts, later requests are not repeated either,
        because the server would probably still be busy."""
        if response.status not in BUSY_STATUSES:
            return None
        stated_s = response.retry_after_s
        if stated_s is not None:
            delay_s = max(stated_s, RETRY_DELAYS_S[0])
            if delay_s > self._can_wait_s:
                return None
            self._can_wait_s -= delay_s
            return delay_s
        if attempt < len(RETRY_DELAYS_S) and self._retries_help:
            return RETRY_DELAYS_S[attempt]
        self._retries_help = False
        return None

    def page(self, path: str, accept: str, *, limit_s: float, limit_bytes: int) -> tuple[int, bytes]:
        """Send GET `path`. Return the HTTP status and the body. The body may have any content type.

        `limit_s` is the time limit in seconds, for connecting and separately for reading the page. Raises
        UnreachableError if the request fails or exceeds the limit, or if the page is incomplete or has more than
        `limit_bytes` bytes.
        """
        response = self._send("GET", path + self._query, None, {"accept": accept}, limit_s, limit_bytes)
        return response.status, response.content

    def unauthorized(self, path: str, response: JsonResponse) -> UnauthorizedError:
        """Return the error for a 401 or 403 response to a request for `path`, with the server's error message."""
        hint = key_hint(self._headers)
        if response.status == http.client.FORBIDDEN:
            hint += "; a gateway may require another header, such as --header 'X-Tenant: NAME'"
        return UnauthorizedError(
            f"{self._url} answers {response.words} to {path}: it requires an API key, or refuses the one that was sent",
            hint,
        )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _use_translator(self) -> None:
        """Send all requests through the translator from HTTP/1.1 to HTTP/2 (loadgen.servers.http2)."""
        parts = urlsplit(self._url.partition("?")[0])
        self._socket_path = start_translator(self._url, self._access)
        self._prefix = parts.path.rstrip("/")
        self._headers["Host"] = parts.netloc
        self._connection = http.client.HTTPConnection(parts.hostname or "")

    def _speaks_only_http2(self) -> bool:
        """Return True if the server, which has refused a request in HTTP/1.1, speaks HTTP/2."""
        return not self._socket_path and speaks_http2(self._url, self._access)

    def _connect(self, limit_s: float) -> None:
        """Open the connection: directly, to the server's Unix socket, or through the proxy.

        Raises the errors of http.client and ProxyError."""
        proxy = self._access.proxy
        connection = self._connection
        if self._socket_path:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(limit_s)
            connection.sock.connect(self._socket_path)
        elif proxy is None and self._address is not None:
            family, peer = self._address
            connection.sock = socket.socket(family, socket.SOCK_STREAM)
            connection.sock.settimeout(limit_s)
            connection.sock.connect(peer)
            self._begin_tls(connection)
        elif proxy is None:
            connection.connect()
        else:
            connection.sock = sock = socket.create_connection((proxy.host, proxy.port), limit_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if isinstance(connection, http.client.HTTPSConnection):
                open_tunnel(sock, proxy, connection.host, connection.port)
            self._begin_tls(connection)

    def _begin_tls(self, connection: http.client.HTTPConnection) -> None:
        """Do the TLS handshake on a connection whose socket this client has opened, if the URL begins with https."""
        if isinstance(connection, http.client.HTTPSConnection):
            self._tls = self._tls or self._access.tls or tls_context()
            connection.sock = self._tls.wrap_socket(connection.sock, server_hostname=connection.host)

    def _send(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], limit_s: float, limit_bytes: int
    ) -> JsonResponse:
        """Send a request and return the response. Raises UnreachableError if the request fails.

        If the server refuses HTTP/1.1 and speaks HTTP/2, this request and all later ones are translated to HTTP/2."""
        send_once = partial(self._send_once, method, path, data, headers, limit_s, limit_bytes)
        try:
            if self._connection.sock:
                # Servers close idle connections after a few seconds. Requests of this client change nothing on the
                # server, so a second attempt is safe.
                with suppress(ConnectionError):
                    return send_once()
                self.close()
            response = send_once()
            if response.status not in REFUSED_HTTP1_STATUSES or not self._speaks_only_http2():
                return response
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.close()
            if not (refuses_http1(error) and self._speaks_only_http2()):
                raise self._failure(error, limit_s) from error
        self.close()
        self._use_translator()
        return self._send(method, path, data, headers, limit_s, limit_bytes)

    def _send_once(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], limit_s: float, limit_bytes: int
    ) -> JsonResponse:
        """Send a request on the open connection, or on a new one, and return the response.

        Raises OSError, ValueError or http.client.HTTPException if the request fails."""
        self._connection.timeout = limit_s
        if self._connection.sock is None:
            self._connect(limit_s)
        assert isinstance(self._connection.sock, socket.socket)
        self._connection.sock.settimeout(limit_s)
        with_deadline: Any = partial(_DeadlineReader, deadline_s=monotonic() + limit_s)
        self._connection.response_class = lambda sock, **options: http.client.HTTPResponse(  # type: ignore[assignment]
            with_deadline(sock), **options
        )
        self._connection.request(method, self._prefix + path, data, merged_headers(self._headers, headers))
        response = self._connection.getresponse()
        self.mark = self.mark or in_header(response.getheader(HEADER))
        content = response.read(limit_bytes)
        if len(content) < limit_bytes and response.length is None and not response.chunked:
            content += response.read(1)  # a body without a length ends with the connection, which this read detects
        if not response.isclosed():
            if len(content) < limit_bytes:
                raise http.client.IncompleteRead(content)
            raise http.client.HTTPException(f"more than {limit_bytes:,} bytes")
        # Some proxies compress responses although the request does not accept compression.
        coding = (response.getheader("content-encoding") or "").strip().lower()
        location = response.getheader("location") or "" if response.status in REDIRECT_STATUSES else ""
        if response.status == http.client.PROXY_AUTHENTICATION_REQUIRED and self._access.proxy:
            advice = credentials_advice(self._access.proxy)
            raise ProxyError(f"the proxy {self._access.proxy.url} answers 407: {advice}")
        content = hide_secrets(decompress(content, coding, limit_bytes), whole=True)
        if response.status == http.client.BAD_REQUEST and _SPEAKS_TLS.search(content):
            raise UnreachableError(f"{self._url} speaks TLS, not plain HTTP", "use https:// instead of http://")
        return JsonResponse(
            response.status,
            content,
            hide_secrets(location.strip()),
            (response.getheader("retry-after") or "").strip(),
            {name.lower(): value for name, value in response.getheaders()},
        )

    def _failure(self, error: Exception, limit_s: float) -> UnreachableError:
        """Return the error for a request that failed with `error`, with a hint about proxies.

        Raises ClientLimitError if a limit of this machine caused `error`."""
        proxy = self._access.proxy
        is_from_proxy = isinstance(error, ProxyError)
        hint = "" if proxy or self._socket_path else unused_proxy_hint(self._url)
        if isinstance(error, OSError) and not (self._socket_path or is_from_proxy):
            peer = (proxy.host, proxy.port) if proxy else (self._connection.host, self._connection.port)
            if not isinstance(error, TimeoutError | ssl.SSLError):
                raise_if_local_limit(self._url, *peer, error, hint)
        if proxy and is_from_proxy:
            message, advice = f"{self._url} cannot be reached: {error}", "check --proxy and --url"
            return UnreachableError(message, advice)
        if proxy and isinstance(error, ConnectionRefusedError | socket.gaierror):
            return UnreachableError(f"the proxy {proxy.url} cannot be reached: {error.strerror}", "check --proxy")
        return _unreachable(self._url, error, limit_s, self._timeout_hint, hint)


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket until a deadline.

    A timeout per read would never stop a response that the server sends byte by byte."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._deadline_s = deadline_s

    def makefile(self, _mode: str) -> io.BufferedIOBase:
        """Return a buffered reader that begins at the final response of the server.

        http.client calls this method, because it uses this object in place of a socket. A server may send interim
        responses, such as `103 Early Hints`, before the final response. This method skips them, because http.client
        skips only `100 Continue`.
        """
        reader = io.BufferedReader(self)
        try:
            for _ in range(INTERIM_RESPONSES_MAX):
                if not _INTERIM.match(reader.peek()):
                    break
                while reader.readline(INTERIM_LINE_BYTES).strip():
                    pass
        except OSError:
            reader.close()
            raise
        return reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        remaining_s = self._deadline_s - monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._sock.settimeout(remaining_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def raise_if_local_limit(url: str, host: str, port: int, error: OSError, hint: str = "") -> None:
    """Raise ClientLimitError if a limit of this machine caused the connection error `error`.

    `hint` is added to the hint of the ClientLimitError."""
    limit = local_limits.local_limit_of_host(host, port, error)
    if limit is not None:
        cause, _, remedy = str(limit.strerror).partition(". ")
        advice = "; ".join(filter(None, (remedy, hint)))
        raise ClientLimitError(f"{url} cannot be reached from here: {cause}", advice) from error


_RIGHT_NAME = "use a host name of the certificate in --url"
_CERTIFICATE_REMEDIES = {10: "renew the certificate of the server", 62: _RIGHT_NAME, 64: _RIGHT_NAME}
"""Remedies by verification error of OpenSSL: an expired certificate (X509_V_ERR_CERT_HAS_EXPIRED), and a certificate
for another host name or IP address (X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH)."""
_TLS_HINT = "check which TLS versions and client certificates the server requires; --cert and --key name a certificate"


def _unreachable(
    url: str, error: Exception, limit_s: float, timeout_hint: str, proxy_hint: str = ""
) -> UnreachableError:
    """Return an UnreachableError that describes the failed request and tells the user how to fix the problem.

    `proxy_hint` is added to the hint if the server may be reachable only through a proxy."""
    reason = one_line(hide_secrets(str(error))) or type(error).__name__
    match error:
        case TimeoutError():
            message, hint = f"{url} did not answer within {limit_s:g} s", timeout_hint
        case socket.gaierror():
            message, hint = f"{url}: no such host", "check the host name in --url"
        case ssl.SSLCertVerificationError():
            remedy = _CERTIFICATE_REMEDIES.get(error.verify_code, "pass the authority with --ca-file")
            message, hint = f"{url}: {reason}", f"{remedy}, or --insecure to skip the check"
        case ssl.SSLError(reason=str(code)) if "_ALERT_" in code:  # an alert from the server, so it speaks TLS
            message, hint = f"{url} refused the TLS connection: {reason}", _TLS_HINT
        case ssl.SSLEOFError() | ConnectionResetError() | BrokenPipeError() if url.startswith("https:"):
            # A server that refuses a client after the handshake often closes at once, so that its alert is lost.
            message = f"{url} closed the TLS connection without a response: {reason}"
            hint = f"{_TLS_HINT}; use http:// if the server does not speak TLS"
        case ssl.SSLError():
            message, hint = f"{url} does not speak TLS: {reason}", "use http:// instead of https://"
        case http.client.IncompleteRead():
            message = f"{url} did not complete its response: the connection ended early, or the length was wrong"
            hint = "try again; if it happens again, look at the logs of the server and of any proxy in front of it"
        case http.client.HTTPException() | ConnectionResetError() | BrokenPipeError():
            message = f"{url} does not answer in HTTP: {reason}"
            hint = "check --url; use https:// if the server speaks TLS"
        case _:
            message = f"nothing listens at {url}: {reason}"
            hint = "start the server, or check host and port in --url"
    may_need_proxy = isinstance(error, OSError) and not isinstance(error, ssl.SSLError)
    return UnreachableError(message, "; ".join(filter(None, (hint, proxy_hint if may_need_proxy else ""))))
