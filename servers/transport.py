"""The sockets of the measuring path: open before the clock starts, send, and read with kernel receive stamps.

Linux attaches to each `recvmsg` the instant at which the last byte returned was received, when SO_TIMESTAMPING
asks for RX_SOFTWARE | SOFTWARE (Documentation/networking/timestamping.rst). The stamp is right however late this
process gets round to reading, so the read path does nothing but `recvmsg`, append, and "has this body ended?".
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns, sleep
from typing import Any
from urllib.parse import urlsplit

from servers.http1 import Framing, ProtocolError

SO_TIMESTAMPING = 37  # <asm-generic/socket.h>; also the type of the control message that comes back
RX_SOFTWARE_AND_SOFTWARE = 1 << 3 | 1 << 4  # <linux/net_tstamp.h>
TIMESPEC_BYTES = 16  # the control message holds three; the first is the software stamp

READ_BYTES = 65_536
CONTROL_BYTES = 128
RESPONSE_LIMIT_BYTES = 64 << 20
STAMP_TRIES = 200
_NO_STAMP = bytes(TIMESPEC_BYTES)


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

    __slots__ = ("incoming", "opened_ns", "outgoing", "sock", "tls")

    def __init__(self, sock: socket.socket, opened_ns: int) -> None:
        self.sock = sock
        self.opened_ns = opened_ns
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


async def connect(target: Target, timeout_s: float) -> Connection:
    """Open one connection, TLS handshake included. Raises OSError, ssl.SSLError or TimeoutError."""
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
        stamp_reads(sock)
    except BaseException:
        sock.close()
        raise
    return connection


def stamp_reads(sock: socket.socket) -> bool:
    """Ask the kernel for receive stamps. False where it has none to give (not Linux, some sandboxes)."""
    if sys.platform != "linux":
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, RX_SOFTWARE_AND_SOFTWARE)
    except OSError:
        return False
    return True


def hold_stamps() -> socket.socket | None:
    """Have the kernel stamp packets from now on; None where it does not. Keep the socket while stamps are needed.

    Linux starts stamping shortly after the first socket asks and stops after the last one is gone
    (net/core/dev.c, `net_enable_timestamp` defers to a work queue), so the first answers of a run could come
    without. This socket asks early, and sends itself datagrams until one arrives stamped.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.settimeout(0.1)
    with contextlib.suppress(OSError):
        for _ in range(STAMP_TRIES if stamp_reads(sock) else 0):
            sock.sendto(b"?", sock.getsockname())
            if sock.recvmsg(1, CONTROL_BYTES)[1]:
                return sock
            sleep(0.001)
    sock.close()
    return None


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


class Exchange:
    """One request on the wire: what was sent when, and every byte that came back with its stamps.

    A plain mutable class, because it is the measuring path. All instants are CLOCK_MONOTONIC ns except
    `kernel`, which holds the kernel's own timespecs (CLOCK_REALTIME) as bytes, 16 per read, zero where it
    gave none. `sizes[i]` is the length of `raw` after read i.
    """

    __slots__ = (
        "_loop",
        "_on_end",
        "_sealed",
        "connection",
        "error_detail",
        "error_kind",
        "framing",
        "given_up_ns",
        "kernel",
        "raw",
        "sent_end_ns",
        "sent_ns",
        "sizes",
        "user",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[Exchange], None]) -> None:
        self._loop = loop
        self._on_end = on_end
        self._sealed: bytes | memoryview = b""
        self.connection: Connection | None = None
        self.framing = Framing()
        self.raw = bytearray()
        self.sizes = array("q")
        self.user = array("q")
        self.kernel = bytearray()
        self.sent_ns: int | None = None
        self.sent_end_ns: int | None = None
        self.given_up_ns: int | None = None
        self.error_kind = ""
        self.error_detail = ""

    def prepare(self, connection: Connection, sealed: bytes) -> None:
        """Take a connection and the bytes to send on it; nothing is sent yet."""
        self.connection = connection
        self._sealed = sealed

    def send(self) -> None:
        """Send the request; the rest waits for room in the socket's buffer when it does not fit at once."""
        connection = self.connection
        assert connection is not None
        self.sent_ns = monotonic_ns()
        try:
            count = connection.sock.send(self._sealed)
        except BlockingIOError:
            count = 0
        except OSError as error:
            self.fail("connect", f"send failed: {error.strerror or error}")
            return
        if count == len(self._sealed):
            self.sent_end_ns = monotonic_ns()
        else:
            self._sealed = memoryview(self._sealed)[count:]
            self._loop.add_writer(connection.sock, self._on_writable)

    def listen(self) -> None:
        """Start reading. Called after the whole burst is out, so that no read delays a send."""
        if self.connection is not None and not self.error_kind:
            self._loop.add_reader(self.connection.sock, self._on_readable)

    def fail(self, kind: str, detail: str) -> None:
        """End this exchange now, keeping what came."""
        self.error_kind, self.error_detail = kind, detail
        self._finish()

    def _on_writable(self) -> None:
        connection = self.connection
        assert connection is not None
        try:
            count = connection.sock.send(self._sealed)
        except BlockingIOError:
            return
        except OSError as error:
            self.fail("connect", f"send failed: {error.strerror or error}")
            return
        self._sealed = memoryview(self._sealed)[count:]
        if not self._sealed:
            self.sent_end_ns = monotonic_ns()
            self._loop.remove_writer(connection.sock)

    def _on_readable(self) -> None:
        connection = self.connection
        assert connection is not None
        try:
            data, control, _, _ = connection.sock.recvmsg(READ_BYTES, CONTROL_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._closed(f"connection lost: {error.strerror or error}")
            return
        now = monotonic_ns()
        if not data:
            self._closed("the server closed the connection")
            return
        if connection.tls is not None:
            data = self._unseal(connection, data)
            if not data:
                return
        raw, framing = self.raw, self.framing
        raw += data
        size = len(raw)
        self.sizes.append(size)
        self.user.append(now)
        self.kernel += control[0][2][:TIMESPEC_BYTES] if control else _NO_STAMP
        if size > RESPONSE_LIMIT_BYTES:
            self.fail("protocol", f"answer longer than {RESPONSE_LIMIT_BYTES >> 20} MiB")
        # A chunked body can only have ended in a read that ends with an empty line, or in one too short to show it.
        elif data[-4:] == b"\r\n\r\n" or len(data) < 5 if framing.chunked else size >= framing.need:
            self._scan()

    def _scan(self) -> None:
        try:
            if self.framing.scan(self.raw):
                self._finish()
        except ProtocolError as error:
            self.fail("protocol", str(error))

    def _unseal(self, connection: Connection, data: bytes) -> bytes:
        """Plain bytes out of TLS records. A closed session shows as the end of the connection that follows it."""
        assert connection.tls is not None
        connection.incoming.write(data)
        parts = []
        try:
            while part := connection.tls.read(READ_BYTES):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            self.fail("protocol", f"TLS: {error.reason or error}")
        return b"".join(parts)

    def _closed(self, detail: str) -> None:
        if self.framing.at_eof(self.raw):
            self._finish()
        elif self.raw:
            self.fail("truncated", detail)
        else:
            self.fail("connect", f"{detail} before any answer")

    def _finish(self) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        self.given_up_ns = monotonic_ns()
        if self.sent_ns is not None:
            self._loop.remove_writer(connection.sock)
            self._loop.remove_reader(connection.sock)
        connection.close()
        self._on_end(self)
