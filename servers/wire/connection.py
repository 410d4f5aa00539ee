"""Opens connections to the server for measured requests, with or without TLS and a proxy.

A pool (loadgen.servers.wire.pool) opens connections in advance, and keeps them open between requests.
"""

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

from loadgen.servers.proxy import Tunnel
from loadgen.servers.target import Address, Target
from loadgen.servers.wire.local_limits import explain_local_limit
from loadgen.servers.wire.tcp_info import NOTHING_MEASURED, NetworkFacts
from loadgen.servers.wire.timestamps import PLAIN, TimestampSource

READ_BYTES = 65_536


@dataclass(slots=True, eq=False)
class Connection:
    """An open connection to the server, with or without TLS.

    With TLS, encrypted bytes are read from the socket and then decrypted in memory. In this way, the kernel timestamp
    of every read is known.

    `received` is the number of bytes that were read from the socket. The timestamp of a packet is found by this number,
    so every byte must be counted:

    - Without TLS, the number is updated at the end of each response.
    - With TLS, all received bytes must be passed to `feed`, which updates the number. This includes TLS records without
      response data, such as session tickets, key updates and alerts.
    - With a proxy, the proxy's response to CONNECT is counted too.
    """

    sock: socket.socket
    opened_ns: int
    tcp_stream: Any = None  # What TimestampSource.watch returned
    address: str = ""  # Address of the server, if connections go to several addresses; otherwise ""
    reused: bool = False  # Whether the connection has carried a request before
    received: int = 0  # Number of bytes read from the socket; without TLS, only those of finished responses
    network: NetworkFacts = NOTHING_MEASURED  # at the end of the last response
    tls: ssl.SSLObject | None = None
    handshaking: bool = False  # Whether a handshake with the proxy or the TLS server is under way
    tunnel: Tunnel | None = None  # The handshake with a proxy, until the proxy has opened its tunnel
    incoming: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)
    outgoing: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)

    def begin_tls(self, target: Target) -> None:
        """Start a TLS session if the target uses TLS. If the target has a proxy, the session uses a tunnel.

        While `handshaking` is True, the caller sends `next_handshake_bytes` and passes received bytes to
        `receive_handshake`."""
        if target.tls is not None:
            self.tls = target.tls.wrap_bio(self.incoming, self.outgoing, server_hostname=target.host)
            self.handshaking = True
            if target.proxy is not None:
                self.tunnel = Tunnel(target.proxy, target.host, target.port)

    def next_handshake_bytes(self) -> bytes:
        """Advance the handshake with the proxy or the TLS server, and return the bytes to send.

        Raises ssl.SSLError if the TLS handshake fails."""
        if self.tunnel is not None:
            return self.tunnel.take_request()
        assert self.tls is not None
        with suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
            self.handshaking = False
        return self.outgoing.read()

    def receive_handshake(self, received: bytes) -> None:
        """Process the next bytes of the handshake from the proxy or the TLS server.

        Raises ConnectionResetError if `received` is empty, which means that the server closed the connection. Raises
        loadgen.servers.proxy.ProxyError if the proxy opens no tunnel."""
        if self.tunnel is not None:
            self.received += len(received)
            if self.tunnel.receive(received):
                self.tunnel = None
            return
        if not received:
            raise ConnectionResetError("the server closed the connection during the TLS handshake")
        self.feed(received)

    def feed(self, received: bytes) -> None:
        """Count bytes that were read from the socket, and pass them to TLS."""
        self.received += len(received)
        self.incoming.write(received)

    def seal(self, request: bytes) -> bytes:
        """Return the bytes to send for `request`: with TLS its encrypted records, otherwise the request itself.

        The load driver calls this method before the request is due, so that encryption does not delay the request."""
        if self.tls is None:
            return request
        self.tls.write(request)
        return self.outgoing.read()

    def flush(self) -> None:
        """Send TLS records that TLS itself has created, such as the reply to a TLS 1.2 server that renegotiates.

        TLS records must be sent in the order of their creation. Do not call this method after `seal` has encrypted a
        request and before this request is sent. Bytes that the socket does not accept are sent with the next request.
        """
        own = self.outgoing.read()
        try:
            sent = self.sock.send(own)
        except OSError:
            sent = 0  # a broken connection shows at the next read
        self.outgoing.write(own[sent:])

    def closed_by_peer(self) -> bool:
        """Return True if this idle connection cannot carry another request.

        This is the case if the server closed the connection. It is also the case if the server sent data, which would
        be mistaken for the next response. TLS records without response data, such as session tickets, do no harm.
        """
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
        return not self._tls_is_reusable()

    def _tls_is_reusable(self) -> bool:
        """Return True if an idle TLS connection can carry another request. It cannot in these cases:

        - TLS has received response data, which would be mistaken for the next response.
        - The server has ended the TLS session.
        - TLS must reply to the server before it can send anything else.
        """
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
        """Close the connection without waiting."""
        self.sock.close()


def connect(
    target: Target,
    timeout_s: float,
    stamps: TimestampSource = PLAIN,
    receive_buffer: int = 0,
    address: Address | None = None,
) -> Connection | Coroutine[Any, Any, Connection]:
    """Open one connection to an address of the target (default: its first), including the TLS handshake.

    The result is the connection if it is open at once, and otherwise a coroutine that opens it. A connection to the
    same machine without TLS is usually open at once.

    - `stamps` is the timestamp source of the connection.
    - `receive_buffer` is the requested receive buffer size in bytes (0: the system's default).

    Raises OSError, or its subclass LocalLimitError if this machine is the cause. The coroutine also raises ssl.SSLError
    and TimeoutError.
    """
    address = address or target.addresses[0]
    family, peer = address
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise explain_local_limit(error, address) from None
    try:
        sock.setblocking(False)
        if target.over_ip:
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
    sock: socket.socket, peer: tuple[Any, ...] | str | None, target: Target, timeout_s: float, stamps: TimestampSource
) -> Connection:
    """Finish opening a connection, and return the connection.

    This function waits until `sock` is connected. Then it does the handshake with the proxy and the TLS handshake, if
    they are needed. `peer` is the address to connect to, or None if the socket is already connected. `stamps` is the
    timestamp source of the connection.
    """
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
    """Start connecting a socket. Return True if the connection is open at once, as is usual on the same machine.

    The function calls `connect_ex` twice: first to start, then to find out whether the connection is open. Raises
    OSError if either call fails. An error of the first call comes from this machine's kernel. An error of the second
    call may come from the server.
    """
    for attempt in range(2):
        code = sock.connect_ex(address[1])
        if code in (0, errno.EISCONN):
            return True
        if code not in (errno.EINPROGRESS, errno.EALREADY):
            error = OSError(code, os.strerror(code))
            raise error if attempt else explain_local_limit(error, address)
    return False
