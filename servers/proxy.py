"""HTTP proxies: connections to the server through the proxy that `--proxy` names.

For https, loadgen asks the proxy for a tunnel to the server (CONNECT), and TLS begins inside the tunnel. For http,
each request is sent to the proxy with the whole URL of the server. In both cases the connection to the proxy carries
the server's bytes, so packets are timestamped as without a proxy.
"""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from loadgen.servers.auth import register_secret, require_no_credentials
from loadgen.servers.errors import SecretError

PROXY_AUTH_VARIABLE = "LOADGEN_PROXY_AUTH"
"""Environment variable that holds the user and the password of the proxy, as USER:PASSWORD."""
PROXY_PORT = 3128
"""Port of a proxy whose URL states no port. Squid listens on this port."""
TUNNEL_HEAD_BYTES = 65_536
"""Maximum size in bytes of a proxy's response to CONNECT."""
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?\r?\n")


class ProxyError(OSError):
    """The proxy did not open a tunnel to the server."""


class Proxy(msgspec.Struct, frozen=True):
    """An HTTP proxy. Its password is only in `headers`, which is never stored."""

    host: str
    port: int
    headers: dict[str, str] = {}
    """Headers with the credentials for the proxy. Empty if there are none."""

    @property
    def url(self) -> str:
        """The URL of the proxy, without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class Tunnel:
    """The CONNECT request for one connection through a proxy, and the proxy's response to this request."""

    def __init__(self, proxy: Proxy, host: str, port: int) -> None:
        """Prepare a tunnel to `port` of `host`, the server behind the proxy."""
        self._proxy = proxy
        self._server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {self._server} HTTP/1.1", f"Host: {self._server}"]
        lines += [f"{name}: {value}" for name, value in proxy.headers.items()]
        self.unsent = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        """The request, or b"" after `take_request`."""
        self._head = b""

    def take_request(self) -> bytes:
        """Return the bytes of the CONNECT request at the first call, and b"" at later calls."""
        request, self.unsent = self.unsent, b""
        return request

    def receive(self, received: bytes) -> bool:
        """Process the next bytes from the proxy. Return True once the tunnel is open.

        Raises ProxyError if the proxy refuses the tunnel, or does not answer in HTTP."""
        if not received:
            raise ProxyError(f"the proxy {self._proxy.url} closed the connection instead of opening a tunnel")
        self._head += received
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end and len(head) <= TUNNEL_HEAD_BYTES and (head.startswith(b"HTTP/") or len(head) < len(b"HTTP/")):
            return False
        status = _STATUS_LINE.match(self._head)
        if status is None or not end:
            raise ProxyError(f"the proxy {self._proxy.url} does not answer in HTTP: {self._head[:40]!r}")
        if not status[1].startswith(b"2"):
            reason = (status[2] or b"").decode("latin-1").strip()
            answer = f"{status[1].decode()} {reason}".strip()
            advice = f"; {credentials_advice(self._proxy)}" if status[1] == b"407" else ""
            raise ProxyError(f"the proxy {self._proxy.url} answers {answer} to CONNECT {self._server}{advice}")
        if rest:
            raise ProxyError(f"the proxy {self._proxy.url} sent data before the server could")
        return True


def credentials_advice(proxy: Proxy) -> str:
    """Return the advice to show if the proxy answers with status 407 (Proxy Authentication Required).

    The proxy either requires credentials, or has refused those that it received.
    """
    if proxy.headers:
        return f"it refuses the user and password in {PROXY_AUTH_VARIABLE}"
    return f"it requires a user and a password: put USER:PASSWORD into {PROXY_AUTH_VARIABLE}"


def normalise_proxy_url(url: str) -> str:
    """Return the URL of a proxy with `http://` and a port. Raises ValueError for a URL that cannot be a proxy.

    Raises SecretError if the URL contains a password, because the URL is stored with the run."""
    text = url.strip()
    if "@" in text:
        try:
            require_no_credentials(text if "://" in text else f"http://{text}")
        except SecretError as error:
            raise SecretError(
                "--proxy must not contain a user or a password: it is stored with the run",
                f"Put USER:PASSWORD into the environment variable {PROXY_AUTH_VARIABLE}.",
            ) from error
    scheme, separator, _ = text.partition("://")
    if separator and scheme.lower() != "http":
        raise ValueError(f"must be an HTTP proxy, http://HOST:PORT; {scheme}:// proxies are not supported")
    try:
        parts = urlsplit(text if separator else f"http://{text}")
        port = parts.port or PROXY_PORT
        host = (parts.hostname or "").encode("idna").decode()
    except ValueError as error:
        raise ValueError(f"is not a valid URL: {error}") from None
    has_more = parts.path not in ("", "/") or parts.query or parts.fragment
    if not 0 < len(host) < 254 or re.search(r"[\x00-\x20\x7f]", text) or has_more:
        raise ValueError("must be written http://HOST:PORT")
    return Proxy(host, port).url


def proxy_at(url: str, environ: Mapping[str, str] = os.environ) -> Proxy:
    """Return the proxy at `url`, which must be in a form that `normalise_proxy_url` accepts.

    If the variable PROXY_AUTH_VARIABLE in `environ` contains credentials, they are sent to the proxy. Raises
    SecretError if they do not have the form USER:PASSWORD, or contain a character that an HTTP header cannot contain.
    """
    parts = urlsplit(normalise_proxy_url(url))
    credentials = environ.get(PROXY_AUTH_VARIABLE, "").strip()
    headers = {}
    if credentials:
        user, colon, password = credentials.partition(":")
        if not (user and colon and password) or not re.fullmatch("[ -~\u00a0-\u00ff]*", credentials):
            raise SecretError(
                f"{PROXY_AUTH_VARIABLE} must be written USER:PASSWORD", f"Set it: export {PROXY_AUTH_VARIABLE}=..."
            )
        encoded = b64encode(credentials.encode()).decode()
        register_secret(password, source=PROXY_AUTH_VARIABLE)
        register_secret(encoded)
        headers = {"Proxy-Authorization": f"Basic {encoded}"}
    assert parts.port is not None
    return Proxy(parts.hostname or "", parts.port, headers)


def unused_proxy_hint(url: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a hint that the environment names a proxy for an unreachable server, but that loadgen did not use this
    proxy.

    Return "" if the environment names no proxy for this URL, or if NO_PROXY excludes the host of the URL.
    """
    from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

    parts = urlsplit(url)
    proxies = getproxies_environment()
    proxy_url = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy_url or not parts.hostname or proxy_bypass_environment(parts.hostname, proxies):
        return ""
    names = (f"{parts.scheme}_proxy", f"{parts.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    variable = next((name for name in names if environ.get(name)), names[1])
    named = urlsplit(proxy_url if "://" in proxy_url else f"http://{proxy_url}")
    option = f"--proxy {named.scheme}://{named.netloc.rpartition('@')[2]}"
    secret = f", with its USER:PASSWORD in {PROXY_AUTH_VARIABLE}" if "@" in named.netloc else ""
    return f"{variable} is set, but loadgen uses a proxy only if an option names it: {option}{secret}"
