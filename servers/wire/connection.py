"""Connections of the measuring path. A pool (loadgen.servers.wire.pool) opens them before the run starts."""

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

from loadgen.servers.auth import Address, Target
from loadgen.servers.wire.local_limits import explain_local_limit
from loadgen.servers.wire.timestamps import PLAIN, TimestampSource

READ_BYTES = 65_536


@dataclass(slots=True, eq=False)
class Connection:
    """An open connection. TLS bytes pass through memory buffers, so that every read of the socket keeps its kernel
    timestamp.

    `received` counts every byte that was read from the socket, because packet timestamps are found by that offset.
    With TLS, `feed` is the only place that counts. TLS itself may send records at any time: session tickets, key
    updates, alerts. A read that skips `feed` would shift all later timestamps to earlier packets."""

    sock: socket.socket
    opened_ns: int
    tcp_stream: Any = None  # What TimestampSource.watch returned
    reused: bool = False  # Whether it has carried a request before
    received: int = 0  # Bytes read from the socket; without TLS, bytes of finished responses
    losses: tuple[int, int] = (0, 0)  # Last result of loadgen.servers.wire.tcp_info.losses
    tls: ssl.SSLObject | None = None
    handshaking: bool = False  # Whether a TLS handshake is under way
    incoming: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)
    outgoing: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)

    def begin_tls(self, target: Target) -> None:
        """Start TLS if the target uses it. While `handshaking` is True, the caller sends `next_handshake_bytes` and
        passes received bytes to `receive_handshake`."""
        if target.tls is not None:
            self.tls = target.tls.wrap_bio(self.incoming, self.outgoing, server_hostname=target.host)
            self.handshaking = True

    def next_handshake_bytes(self) -> bytes:
        """Return the next bytes of the handshake to send. Raises ssl.SSLError."""
        assert self.tls is not None
        with suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
            self.handshaking = False
        return self.outgoing.read()

    def receive_handshake(self, received: bytes) -> None:
        """Take the next bytes of the handshake from the server. Raises ConnectionResetError at the end of the
        connection."""
        if not received:
            raise ConnectionResetError("the server closed the connection during the TLS handshake")
        self.feed(received)

    def feed(self, received: bytes) -> None:
        """Count bytes that were read from the socket and pass them to TLS."""
        self.received += len(received)
        self.incoming.write(received)

    def seal(self, request: bytes) -> bytes:
        """Return the bytes to send for `request`: the request itself, or its TLS records. The driver calls this before
        the request is due."""
        if self.tls is None:
            return request
        self.tls.write(request)
        return self.outgoing.read()

    def flush(self) -> None:
        """Send what TLS itself has to send, as when a TLS 1.2 server renegotiates before it responds. Call this only
        when no sealed request waits to be sent, because TLS records must leave in the order in which they were made.
        Bytes that the socket does not take leave with the next request."""
        own = self.outgoing.read()
        try:
            sent = self.sock.send(own)
        except OSError:
            sent = 0  # a broken connection shows at the next read
        self.outgoing.write(own[sent:])

    def closed_by_peer(self) -> bool:
        """Return True if the peer closed this idle connection or sent data that no request asked for, which would be
        taken for the next response. TLS records without data, such as session tickets, are allowed."""
        try:
            received = self.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            received = None
        except OSError:
            return True
        if self.tls is None or received == b"":
            return received is not None
        if received:
            self.feed(received)
        return not self._quiet()

    def _quiet(self) -> bool:
        """Return True if TLS holds neither data nor the end of the session."""
        assert self.tls is not None
        try:
            self.tls.read(1)
        except ssl.SSLWantReadError:
            # A server that renegotiates (TLS 1.2) wants a reply first, but a request may be sealed already. The reply
            # to a key update (TLS 1.3) is no obstacle: OpenSSL makes it with the next request.
            return not self.outgoing.pending
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close without waiting for anything."""
        self.sock.close()


def connect(
    target: Target,
    timeout_s: float,
    stamps: TimestampSource = PLAIN,
    receive_buffer: int = 0,
    address: Address | None = None,
) -> Connection | Coroutine[Any, Any, Connection]:
    """Open one connection to an address of the target (default: its first), including the TLS handshake. Return the
    connection if it is open at once, as on the same machine, else a coroutine that opens it.

    `stamps` timestamps the connection's reads. `receive_buffer` is the receive buffer to ask for, in bytes (0: the
    system's choice). Raises OSError: a LocalLimitError if this machine is the reason, and in the coroutine also
    ssl.SSLError and TimeoutError."""
    address = address or target.addresses[0]
    family, peer = address
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise explain_local_limit(error, address) from None
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        stamps.claim(sock)
        connected = _connected(sock, address)
        if connected and target.tls is None:
            return Connection(sock, monotonic_ns(), stamps.watch(sock))
    except BaseException:
        sock.close()
        raise
    return _finish(sock, None if connected else peer, target, timeout_s, stamps)


async def _finish(
    sock: socket.socket, peer: tuple[Any, ...] | None, target: Target, timeout_s: float, stamps: TimestampSource
) -> Connection:
    """Wait until a socket is connected to `peer` (None: it is already), and do the TLS handshake if there is one."""
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            if peer is not None:
                await loop.sock_connect(sock, peer)
            connection = Connection(sock, monotonic_ns(), stamps.watch(sock))
            connection.begin_tls(target)
            while connection.handshaking:
                handshake = connection.next_handshake_bytes()
                if handshake:
                    await loop.sock_sendall(sock, handshake)
                if connection.handshaking:
                    connection.receive_handshake(await loop.sock_recv(sock, READ_BYTES))
    except BaseException:
        sock.close()
        raise
    return connection


def _connected(sock: socket.socket, address: Address) -> bool:
    """Begin to connect. Return True if the connection is open at once, as on the same machine, which a second call
    reports. Raises OSError. Errors of the first call are the kernel's own; those of the second may be the server's."""
    for attempt in range(2):
        code = sock.connect_ex(address[1])
        if code in (0, errno.EISCONN):
            return True
        if code not in (errno.EINPROGRESS, errno.EALREADY):
            error = OSError(code, os.strerror(code))
            raise error if attempt else explain_local_limit(error, address)
    return False
