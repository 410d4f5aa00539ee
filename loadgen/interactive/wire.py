"""The gevent side of the wire: it supplies the waiting. Sending, reading and stamps are servers.wire.transport's.

    greenlet of a user ── send ──> socket ──> waits for the Exchange's end
    hub of gevent      ── readable ──> Exchange: recvmsg, append, "ended?" ── ended ──> wakes the greenlet

Reads run in the hub itself: no switch of greenlets lies between the kernel and a read.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, cast

import gevent
from gevent import get_hub
from gevent import socket as gevent_socket
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from servers.wire.connection import READ_BYTES, Connection, Target
from servers.wire.poller import Poller
from servers.wire.stamps import stamp_reads
from servers.wire.transport import Exchange

READ, WRITE = 1, 2  # of libev
ONE_LOOK_S = 1e-6
"""A timer is only looked at after the sockets; a sleep of 0 s is not one."""


class HubPoller:
    """What an Exchange asks of servers.wire.poller.Poller and its event loop, from gevent's hub."""

    def __init__(self) -> None:
        self._watchers: dict[tuple[int, int], Any] = {}

    @property
    def loop(self) -> HubPoller:
        """Itself: both parts are one here."""
        return self

    def add(self, sock: socket.socket, callback: Callable[[], None]) -> None:
        """Call back in the hub whenever `sock` can be read, which includes that it has been closed or reset."""
        self._watch(sock, READ, callback)

    def remove(self, sock: socket.socket) -> None:
        """No more calls for `sock`. Before the socket is closed."""
        self._forget(sock, READ)

    def add_writer(self, sock: socket.socket, callback: Callable[[], None]) -> None:
        """Call back in the hub whenever `sock` has room."""
        self._watch(sock, WRITE, callback)

    def remove_writer(self, sock: socket.socket) -> None:
        """See `add_writer`; a socket that is not watched is ignored."""
        self._forget(sock, WRITE)

    def _watch(self, sock: socket.socket, event: int, callback: Callable[[], None]) -> None:
        watcher = get_hub().loop.io(sock.fileno(), event)
        self._watchers[sock.fileno(), event] = watcher
        watcher.start(callback)

    def _forget(self, sock: socket.socket, event: int) -> None:
        watcher = self._watchers.pop((sock.fileno(), event), None)
        if watcher is not None:
            watcher.stop()
            watcher.close()


class Turns:
    """The longer work of users, such as decoding an answer and building the next request: one at a time, and the hub
    reads what has come before each. gevent would run fifty greenlets before it looks at the sockets again, and streams
    that began together end together: tokens would share a stamp.
    """

    def __init__(self) -> None:
        self._turn = BoundedSemaphore(1)

    def begin(self) -> None:
        """Wait for one's turn."""
        self._turn.acquire()
        try:
            gevent.sleep(ONE_LOOK_S)
        except BaseException:
            self._turn.release()
            raise

    def end(self) -> None:
        """The next one, please."""
        self._turn.release()

    def __enter__(self) -> None:
        """See begin."""
        self.begin()

    def __exit__(self, *_: object) -> None:
        """See end."""
        self.end()


class Line:
    """One user's connection and the Exchanges on it, one after another."""

    def __init__(self, poller: HubPoller, target: Target, *, timeout_s: float, stamped: bool) -> None:
        self._poller = poller
        self._target = target
        self._timeout_s = timeout_s
        self._stamped = stamped
        self._idle: Connection | None = None

    def open(self) -> None:
        """Have a connection ready before the first request. One that fails is tried again by the request itself."""
        try:
            self._idle = connect(self._target, self._timeout_s, stamped=self._stamped)
        except OSError:
            self._idle = None

    def connection(self) -> Connection:
        """The idle connection, or a new one. Raises OSError, which includes TimeoutError and ssl.SSLError."""
        idle, self._idle = self._idle, None
        if idle is not None:
            if not idle.gone():
                return idle
            idle.close()
        return connect(self._target, self._timeout_s, stamped=self._stamped)

    def exchange(self, connection: Connection, request: bytes, started: Callable[[Exchange], None]) -> Exchange:
        """Send and wait for the end, the time limit or the end of this greenlet; the Exchange says which it was.

        `started` is called after the send. A greenlet that is killed here leaves an Exchange that was cancelled, and
        goes on being killed.
        """
        ended = Event()
        exchange = Exchange(cast("Poller", self._poller), lambda _: ended.set())
        exchange.prepare(connection, connection.seal(request))
        exchange.send()
        exchange.listen()
        started(exchange)
        try:
            if not ended.wait(self._timeout_s):
                exchange.fail("timeout", f"no end after {self._timeout_s:g} s")
        except gevent.GreenletExit:
            exchange.fail("cancelled", "cut off, because its user was stopped")
            raise
        finally:
            self._idle, exchange.free = exchange.free, None
        return exchange

    def close(self) -> None:
        """Close what is idle."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None


def connect(target: Target, timeout_s: float, *, stamped: bool) -> Connection:
    """Open one connection, TLS handshake included, while other greenlets run. Raises OSError."""
    sock = gevent_socket.socket(target.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect(target.address)
        connection = Connection(cast("socket.socket", sock), monotonic_ns())
        if target.tls is not None:
            _handshake(connection, target.tls, target.host)
        sock.setblocking(False)
        if stamped:
            stamp_reads(cast("socket.socket", sock))
    except BaseException:
        sock.close()
        raise
    return connection


def _handshake(connection: Connection, context: ssl.SSLContext, host: str) -> None:
    tls = context.wrap_bio(connection.incoming, connection.outgoing, server_hostname=host)
    while True:
        try:
            tls.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            done = False
        if sealed := connection.outgoing.read():
            connection.sock.sendall(sealed)
        if done:
            break
        received = connection.sock.recv(READ_BYTES)
        if not received:
            raise ConnectionResetError("the server closed the connection during the TLS handshake")
        connection.incoming.write(received)
    connection.tls = tls
