"""The base of a locustfile: a user who asks a server in its own dialect, and is timed as exactly as a burst.

    from loadgen.interactive.user import LoadgenUser, task, constant

    class Reader(LoadgenUser):
        wait_time = constant(2)

        @task
        def summarise(self):
            self.ask("Summarise: ...", output_tokens=64, endpoint="chat")

Runs under `loadgen ui --locustfile FILE` and under plain `locust -f FILE`, where it adds its own options, page and Run.
`loadgen ui` itself takes this file for a locustfile: its users ask the prompts of the start form.

gevent supplies the waiting. Sending, reading and stamps are loadgen.servers.wire.transport's:

    greenlet of a user ── send ──> socket ──> waits for the Exchange's end
    hub of gevent      ── readable ──> Exchange: recvmsg, append, "ended?" ── ended ──> wakes the greenlet

Reads run in the hub itself: no switch of greenlets lies between the kernel and a read.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from functools import partial, partialmethod
from time import monotonic_ns
from typing import Any, cast

import gevent
from gevent import get_hub
from gevent import socket as gevent_socket
from gevent.event import Event
from locust import User, between, constant, constant_pacing, task
from locust.exception import StopUser

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.token_counts import generated_tokens
from loadgen.interactive.live_run import LiveTarget, detail_of
from loadgen.interactive.session import EXPECTED, SESSION
from loadgen.servers.auth import Address, Target
from loadgen.servers.backends.dialect import Dialect
from loadgen.servers.wire.addresses import ATTEMPT_S, Rotation, error_to_report
from loadgen.servers.wire.connection import READ_BYTES, Connection
from loadgen.servers.wire.http1 import encode_post
from loadgen.servers.wire.local_limits import explain_late_error
from loadgen.servers.wire.poller import Poller
from loadgen.servers.wire.timestamps import TimestampSource
from loadgen.servers.wire.transport import Exchange

__all__ = ["LoadgenUser", "between", "constant", "constant_pacing", "task"]

READ, WRITE = 1, 2  # of libev


class RequestError(Exception):
    """How a request that was not complete is named to Locust: by our kind, then in the server's words or ours."""


class LoadgenUser(User):  # type: ignore[misc] # Locust has no types
    """One user: a connection of its own, and one request at a time. Without tasks of its own it asks the prompts of the
    start form, one after the other."""

    abstract = True
    wait_time = constant(0)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A locustfile that has such a user gets the options, the page and the Run."""
        super().__init_subclass__(**kwargs)
        SESSION.attach()

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        target = SESSION.target
        assert target is not None
        self._connection = UserConnection(target, SESSION.stamps)

    def on_start(self) -> None:
        """Connect before the first request, as a burst does."""
        self._connection.open()

    def on_stop(self) -> None:
        """Hang up."""
        self._connection.close()

    @task  # type: ignore[untyped-decorator]
    def request(self) -> None:
        """One request of the start form's prompts."""
        self.ask()

    def ask(
        self, prompt: str | None = None, *, output_tokens: int | None = None, endpoint: str | None = None
    ) -> Record:
        """Send one request, wait for its end, and report it to Locust and to the Run; what happened is in the Record.
        Without a `prompt` the next one of the start form is taken. A prompt of your own is as long as it is: nobody
        checks its length. `endpoint` is completions, chat or generate; the server's native one otherwise."""
        target, run = SESSION.target, SESSION.run
        if target is None or run is None:
            raise StopUser  # the run could not begin; what was wrong has been said
        try:
            dialect = target.dialect(endpoint)
            if prompt is None:
                target.prompts(dialect)  # built at an endpoint's first use, which takes its time
            # A user who is stopped just as its wait ends is killed as it waits for its turn, and has sent nothing.
            with SESSION.turn():
                request = target.request(dialect, prompt, output_tokens or SESSION.output_tokens)
        except EXPECTED as error:
            SESSION.fail(error)
            raise StopUser from None
        try:
            with SESSION.turn():
                body = dialect.encode(request, target.facts.model)
        except ValueError as error:  # of text that UTF-8 cannot hold, for example
            record = run.not_encoded(target.numbered(request), error)
            self._report(record, dialect)
            return record
        due_ns = monotonic_ns()
        try:
            connection = self._connection.take()
        except OSError as error:
            record = run.give_up(target.numbered(request), due_ns, error)
            self._report(record, dialect)
            return record
        # A user who is stopped while connecting has sent nothing: only from here on is there a request.
        request = target.numbered(request)
        headers = {**target.headers, "X-Request-Id": str(request.id)}
        payload = encode_post(target.address.path + dialect.path, target.address.host_field, headers, body)
        exchange = self._connection.send(connection, payload)
        run.in_flight.add(exchange)
        with contextlib.ExitStack() as stack:
            try:
                self._connection.wait(exchange)
                stack.enter_context(SESSION.turn())
            finally:  # also of a user who is being stopped: what came until now is kept, and the stop goes on
                record = run.take(exchange, request, dialect, due_ns, connection.opened_ns)
                self._report(record, dialect)
        return record

    def _report(self, record: Record, dialect: Dialect) -> None:
        """Locust's own table, history and CSV; its times are milliseconds from the send to the end. A request that was
        cut off because its user was stopped has not failed: Locust counts those that end."""
        if record.error_kind == "cancelled":
            return
        took_ns = (record.end_ns or 0) - record.sent_ns if record.sent_ns is not None else 0
        failure = RequestError(f"{record.error_kind}: {detail_of(record)}") if record.state != "complete" else None
        self.environment.events.request.fire(
            request_type="POST",
            name=dialect.path,
            response_time=took_ns / 1e6,
            response_length=generated_tokens(record),
            exception=failure,
            context={"record": record},
        )


class PromptUser(LoadgenUser):
    """Asks one prompt of the start form after the other, without a pause."""


class UserConnection:
    """One user's connection, and to the Exchanges on it, one after another, their Poller and its event loop at
    once, in gevent's hub."""

    late = False
    largest_read = 0
    bytes_read = 0

    def __init__(self, target: LiveTarget, stamps: TimestampSource) -> None:
        self.loop = self
        self._watchers: dict[tuple[int, int], Any] = {}
        self._timeout_s = target.plan.timeout_s
        self._connect = partial(connect, target.address, target.rotation, self._timeout_s, stamps)
        self._idle: Connection | None = None
        self._ended = Event()

    def open(self) -> None:
        """Have a connection ready before the first request. One that fails is tried again by the request itself."""
        with contextlib.suppress(OSError):
            self._idle = self._connect()

    def take(self) -> Connection:
        """The idle connection, or a new one. Raises OSError, which includes TimeoutError and ssl.SSLError."""
        idle, self._idle = self._idle, None
        if idle is not None:
            if not idle.closed_by_peer():
                return idle
            idle.close()
        return self._connect()

    def send(self, connection: Connection, request: bytes) -> Exchange:
        """Send a request; `wait` follows."""
        ended = self._ended = Event()
        exchange = Exchange(cast("Poller", self), lambda _: ended.set())
        exchange.prepare(connection, connection.seal(request))
        exchange.send()
        exchange.listen()
        return exchange

    def wait(self, exchange: Exchange) -> None:
        """Wait for the end, the time limit or the end of this greenlet; the Exchange says which it was. A greenlet that
        is killed here leaves an Exchange that was cancelled, and goes on being killed."""
        try:
            if not self._ended.wait(self._timeout_s):
                exchange.fail("timeout", f"no end after {self._timeout_s:g} s")
        except gevent.GreenletExit:
            exchange.fail("cancelled", "cut off, because its user was stopped")
            raise
        finally:
            self._idle, exchange.reusable_connection = exchange.reusable_connection, None

    def close(self) -> None:
        """Close what is idle."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def _watch(self, event: int, sock: socket.socket, callback: Callable[[], None]) -> None:
        """Call back in the hub whenever `sock` can be read, which includes that it has been closed, or has room."""
        watcher = self._watchers[sock.fileno(), event] = get_hub().loop.io(sock.fileno(), event)
        watcher.start(callback)

    def _forget(self, event: int, sock: socket.socket) -> None:
        """No more calls, before the socket is closed; one that is not watched is ignored."""
        watcher = self._watchers.pop((sock.fileno(), event), None)
        if watcher is not None:
            watcher.stop()
            watcher.close()

    add, remove = partialmethod(_watch, READ), partialmethod(_forget, READ)
    add_writer, remove_writer = partialmethod(_watch, WRITE), partialmethod(_forget, WRITE)


def connect(target: Target, rotation: Rotation, timeout_s: float, stamps: TimestampSource) -> Connection:
    """Open one connection, TLS handshake included, while other greenlets run. Addresses of the target are tried in the
    order of `rotation`. Raises OSError: a LocalLimitError if this machine is the reason."""
    errors = list[OSError]()
    addresses = rotation.order()
    for address in addresses:
        limit_s = timeout_s if address == addresses[-1] else min(timeout_s, ATTEMPT_S)
        try:
            return _connect(target, address, limit_s, stamps)
        except OSError as error:
            errors.append(explain_late_error(error, address))
            rotation.failed(address)
    raise error_to_report(errors)


def _connect(target: Target, address: Address, timeout_s: float, stamps: TimestampSource) -> Connection:
    """Open one connection to one address."""
    family, index = address
    sock = gevent_socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect(index)
        watched = stamps.watch(cast("socket.socket", sock))
        connection = Connection(cast("socket.socket", sock), monotonic_ns(), watched)
        if target.tls is not None:
            connection.begin_tls(target)
        while connection.handshaking:
            if sealed := connection.next_handshake_bytes():
                sock.sendall(sealed)
            if connection.handshaking:
                connection.receive_handshake(sock.recv(READ_BYTES))
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return connection
