"""The resolved address of the server under test, to which connections are opened.

Connections go to the server's host, to a proxy, or to a Unix socket.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from loadgen.servers.auth import tls_context
from loadgen.servers.errors import LocalLimitError
from loadgen.servers.http2 import PROTOCOL, translator_socket

if TYPE_CHECKING:
    import ssl

    from loadgen.servers.proxy import Proxy

Address = tuple[int, tuple[Any, ...] | str]
"""Family and socket address, as `getaddrinfo` returns them. The socket address of a Unix socket is its path."""
UNIX_SCHEME = "unix:"
"""Beginning of the URL of a server that listens on a Unix socket, such as `unix:/run/vllm.sock`."""


def address_text(address: Address) -> str:
    """Return the IP address as text, without the port. For a Unix socket, return its path."""
    socket_address = address[1]
    return socket_address if isinstance(socket_address, str) else str(socket_address[0])


def split_unix_url(url: str) -> tuple[str, str] | None:
    """Return the socket path and the HTTP path of a URL such as `unix:/run/vllm.sock:/base`, or None for other URLs."""
    if not url.startswith(UNIX_SCHEME):
        return None
    socket_path, _, http_path = url.removeprefix(UNIX_SCHEME).partition(":/")
    return socket_path, f"/{http_path}".rstrip("/")


class Target(msgspec.Struct, frozen=True):
    """The resolved address of the server under test, and the TLS settings and proxy for connections to this server."""

    host: str
    port: int
    path: str  # Path prefix of the URL, without a trailing slash
    tls: ssl.SSLContext | None
    addresses: tuple[Address, ...]  # Addresses that connections use, at least one; those of the proxy if there is one
    unused: Mapping[str, str] = {}
    """Other addresses of the host, with the reason why each is not used (see loadgen.servers.wire.addresses)."""
    proxy: Proxy | None = None
    translated_host: str = ""
    """Value of the Host header if a local process translates the requests to HTTP/2 (loadgen.servers.http2).
    Connections then go to the Unix socket of this process. Empty: the server speaks HTTP/1.1."""

    @property
    def host_field(self) -> str:
        """The value of the Host header.

        An IPv6 address is written in brackets. The port is omitted if it is the default port: 80, or 443 with TLS."""
        if self.translated_host:
            return self.translated_host
        host = f"[{self.host}]" if ":" in self.host else self.host
        default_port = 443 if self.tls else 80
        return host if self.port == default_port else f"{host}:{self.port}"

    @property
    def connects_to(self) -> str:
        """Name of the host to which connections are opened: the proxy if there is one, otherwise the server."""
        return self.proxy.host if self.proxy else self.host

    @property
    def over_ip(self) -> bool:
        """True if connections use TCP over IP. False if they use a Unix socket."""
        return not isinstance(self.addresses[0][1], str)

    @property
    def uses_tunnel(self) -> bool:
        """True if connections begin with a CONNECT request to the proxy, which is the case for https."""
        return self.proxy is not None and self.tls is not None

    def request_target(self, path: str) -> str:
        """Return the target of a request for `path` below the base URL, as the first line of the request states it.

        A proxy without a tunnel needs the whole URL (RFC 9112, section 3.2.2)."""
        whole_path = self.path + path
        return f"http://{self.host_field}{whole_path}" if self.proxy and not self.uses_tunnel else whole_path

    @property
    def proxy_headers(self) -> dict[str, str]:
        """Headers that the proxy requires in each request. Empty if there is no proxy.

        Also empty if connections to the server use a tunnel, because the proxy does not see the requests in the tunnel.
        """
        return self.proxy.headers if self.proxy and not self.uses_tunnel else {}

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the connections to the server, for the header of a run file.

        Normally these are the addresses that connections use, the unused addresses of the host, and the URL of the
        proxy. If a local process translates the requests to HTTP/2, the only fact is the protocol.
        """
        if self.translated_host:
            return {"protocol": PROTOCOL}
        unused = {"addresses_unused": dict(self.unused)} if self.unused else {}
        proxy = {"proxy": self.proxy.url} if self.proxy else {}
        return {"addresses": [address_text(address) for address in self.addresses], **unused, **proxy}


def resolve_target(url: str, tls: ssl.SSLContext | None, proxy: Proxy | None = None) -> Target:
    """Resolve the host of an http:// or https:// URL to all of its addresses. With a `proxy`, resolve the proxy's host.

    `tls` holds the TLS settings for https. By default, the certificate authorities of the operating system are trusted.
    A URL that begins with `unix:` needs no resolution. Raises OSError if the host name has no address."""
    import socket

    unix = split_unix_url(url)
    if unix:
        return Target("localhost", 80, unix[1], None, ((int(socket.AF_UNIX), unix[0]),))
    parts = urlsplit(url)
    host = parts.hostname or "127.0.0.1"
    translator = translator_socket(url)
    if translator:
        addresses: tuple[Address, ...] = ((int(socket.AF_UNIX), translator),)
        return Target("localhost", 80, parts.path.rstrip("/"), None, addresses, translated_host=parts.netloc)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    peer = (proxy.host, proxy.port) if proxy else (host, port)
    results = socket.getaddrinfo(*peer, type=socket.SOCK_STREAM)
    addresses = tuple(dict.fromkeys((int(family), address) for family, _, _, _, address in results))
    context = (tls or tls_context()) if secure else None
    return Target(host, port, parts.path.rstrip("/"), context, addresses, proxy=proxy)


def connection_error(error: OSError | TimeoutError) -> str:
    """Return the reason why a connection failed, as text.

    For most errors, this is the operating system's message for the error number, because asyncio's own message only
    names the address.
    """
    import ssl

    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, LocalLimitError):
        return str(error.strerror)
    if isinstance(error, ssl.SSLError):
        if error.reason and error.reason.endswith("CERTIFICATE_REQUIRED"):
            return f"TLS: the server requires a client certificate, which --cert and --key name ({error.reason})"
        return f"TLS: {getattr(error, 'verify_message', '') or error.reason or error}"
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
