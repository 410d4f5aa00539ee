"""Connections of the measuring path: opened before the clock starts, by a pool (servers.wire.pool)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from servers.access import Target
from servers.wire.stamps import PLAIN, StampSource

READ_BYTES = 65_536


@dataclass(slots=True, eq=False)
class Connection:
    """One open connection. With TLS, bytes go through memory BIOs, so that reads keep their kernel stamps."""

    sock: socket.socket
    opened_ns: int
    watched: Any = None  # What the source of stamps gave of it
    reused: bool = False  # Whether it has carried a request before
    received: int = 0  # Bytes that were read from it and are of no exchange that is under way
    losses: tuple[int, int] = (0, 0)  # What servers.wire.stamps.losses said of it when it was last asked
    tls: ssl.SSLObject | None = None
    shaking: bool = False  # Whether a TLS handshake is under way
    incoming: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)
    outgoing: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)

    def begin_tls(self, target: Target) -> None:
        """With TLS a handshake is to come: while `shaking`, send what `shake` gives, and `heard` takes what comes."""
        if target.tls is not None:
            self.tls = target.tls.wrap_bio(self.incoming, self.outgoing, server_hostname=target.host)
            self.shaking = True

    def shake(self) -> bytes:
        """The next bytes of the handshake to send. Raises ssl.SSLError."""
        assert self.tls is not None
        with suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
            self.shaking = False
        return self.outgoing.read()

    def heard(self, received: bytes) -> None:
        """The next bytes of the handshake that came."""
        if not received:
            raise ConnectionResetError("the server closed the connection during the TLS handshake")
        self.received += len(received)
        self.incoming.write(received)

    def seal(self, request: bytes) -> bytes:
        """The bytes to send for `request`: itself, or its TLS records, made before the clock starts."""
        if self.tls is None:
            return request
        self.tls.write(request)
        return self.outgoing.read()

    def gone(self) -> bool:
        """True when the peer has closed this connection while it was idle, or has said what nobody asked for, which
        would be taken for the next answer. TLS may bring tickets, which are none of it."""
        try:
            received = self.sock.recv(READ_BYTES)
            if received and self.tls is not None:
                self.incoming.write(received)
                self.tls.read(1)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Close without waiting for anything."""
        self.sock.close()


def connect(
    target: Target, timeout_s: float, stamps: StampSource = PLAIN, room: int = 0
) -> Connection | Coroutine[Any, Any, Connection]:
    """Open one connection, TLS handshake included, whose reads `stamps` stamps, and with so much `room` for what is not
    read (0: the system's choice). At once where that takes no time, as on this machine, else by what is to be awaited.
    Raises OSError; what is awaited also ssl.SSLError or TimeoutError."""
    sock = socket.socket(target.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if room:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        stamps.claim(sock)
        if target.tls is None and _connected(sock, target.address):
            return Connection(sock, monotonic_ns(), stamps.watch(sock))
    except BaseException:
        sock.close()
        raise
    return _connect(sock, target, timeout_s, stamps)


async def _connect(sock: socket.socket, target: Target, timeout_s: float, stamps: StampSource) -> Connection:
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, target.address)
            connection = Connection(sock, monotonic_ns(), stamps.watch(sock))
            connection.begin_tls(target)
            while connection.shaking:
                if sealed := connection.shake():
                    await loop.sock_sendall(sock, sealed)
                if connection.shaking:
                    connection.heard(await loop.sock_recv(sock, READ_BYTES))
    except BaseException:
        sock.close()
        raise
    return connection


def _connected(sock: socket.socket, address: Any) -> bool:
    """Begin to connect. True where that takes no time, as on this machine: asked a second time it has been done. Raises
    OSError."""
    for _ in range(2):
        if (said := sock.connect_ex(address)) in (0, errno.EISCONN):
            return True
        if said not in (errno.EINPROGRESS, errno.EALREADY):
            raise OSError(said, os.strerror(said))
    return False
