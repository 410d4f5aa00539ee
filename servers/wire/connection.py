"""Connections of the measuring path: one resolved target, opened before the clock starts, with kernel stamps on."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any
from urllib.parse import urlsplit

from servers.wire.stamps import PLAIN, StampSource

READ_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes: one resolved address, and how to speak to it."""

    host: str
    port: int
    path: str
    """Path prefix of the URL, without a trailing slash."""
    tls: ssl.SSLContext | None
    family: int
    address: tuple[Any, ...]
    """As `getaddrinfo` gives it."""

    @property
    def host_field(self) -> str:
        """The Host header field: brackets around IPv6, and the port where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def target_of(url: str, tls: ssl.SSLContext | None) -> Target:
    """Resolve an http:// or https:// URL. Raises OSError when its name has no address."""
    parts = urlsplit(url)
    host = parts.hostname or "127.0.0.1"
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return Target(host, port, parts.path.rstrip("/"), tls if secure else None, family, address)


def tls_context(ca_file: Path | None, insecure: bool) -> ssl.SSLContext:
    """Certificates are checked against the system's authorities, or `ca_file`, unless `insecure`."""
    context = ssl.create_default_context(cafile=ca_file)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Connection:
    """One open connection. With TLS, bytes go through memory BIOs, so that reads keep their kernel stamps."""

    __slots__ = ("incoming", "losses", "opened_ns", "outgoing", "sock", "tls")

    def __init__(self, sock: socket.socket, opened_ns: int) -> None:
        self.sock = sock
        self.opened_ns = opened_ns
        self.losses = (0, 0)
        """What servers.wire.stamps.losses said of it when it was last asked."""
        self.tls: ssl.SSLObject | None = None
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()

    def seal(self, request: bytes) -> bytes:
        """The bytes to send for `request`: itself, or its TLS records, made before the clock starts."""
        if self.tls is None:
            return request
        self.tls.write(request)
        return self.outgoing.read()

    def gone(self) -> bool:
        """True when the peer has closed this connection while it was idle."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK) == b""
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close without waiting for anything."""
        self.sock.close()


async def connect(target: Target, timeout_s: float, stamps: StampSource = PLAIN) -> Connection:
    """Open one connection, TLS handshake included, whose reads `stamps` stamps.

    Raises OSError, ssl.SSLError or TimeoutError.
    """
    sock = socket.socket(target.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, target.address)
            connection = Connection(sock, monotonic_ns())
            if target.tls is not None:
                await _handshake(loop, connection, target)
        stamps.watch(sock)
    except BaseException:
        sock.close()
        raise
    return connection


async def _handshake(loop: asyncio.AbstractEventLoop, connection: Connection, target: Target) -> None:
    assert target.tls is not None
    tls = target.tls.wrap_bio(connection.incoming, connection.outgoing, server_hostname=target.host)
    while True:
        try:
            tls.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            done = False
        if sealed := connection.outgoing.read():
            await loop.sock_sendall(connection.sock, sealed)
        if done:
            break
        received = await loop.sock_recv(connection.sock, READ_BYTES)
        if not received:
            raise ConnectionResetError("the server closed the connection during the TLS handshake")
        connection.incoming.write(received)
    connection.tls = tls
