"""The base class for the users of a locustfile. Their requests are timed as exactly as those of `loadgen burst`.

    from loadgen.interactive.user import LoadgenUser, task, constant

    class Reader(LoadgenUser):
        wait_time = constant(2)

        @task
        def summarise(self):
            self.ask("Summarise: ...", output_tokens=64, endpoint="chat")

Run a locustfile with `loadgen ui --locustfile FILE` or with `locust -f FILE`. In both cases, this module adds loadgen's
options to the command line, adds loadgen's page to Locust's web interface, and writes a run file.

If `loadgen ui` runs without --locustfile, this module itself is the locustfile. The users then send prompts as defined
in the form on Locust's start page.

Each user is a greenlet of gevent. The module loadgen.servers.wire.transport sends requests, reads responses and takes
timestamps:

    greenlet of a user    Sends the request, and waits until the response has ended.
    hub of gevent         Reads from the socket into the Exchange, and wakes the greenlet when the response has ended.

The hub itself reads from the sockets, so a read never waits for a switch to another greenlet.
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
from msgspec.structs import replace

from loadgen.analysis.run.record import ErrorKind, Record
from loadgen.analysis.run.token_counts import generated_tokens
from loadgen.engine.closed_loop import answer_text
from loadgen.interactive.live_run import LiveTarget, detail_of
from loadgen.interactive.session import EXPECTED, SESSION
from loadgen.interactive.user_sessions import SentRequest, first_id_of, run_chat, run_graph
from loadgen.servers.backends.dialect import Dialect
from loadgen.servers.backends.output_check import expected_output
from loadgen.servers.target import Address, Target
from loadgen.servers.wire.addresses import ATTEMPT_S, Rotation, error_to_report
from loadgen.servers.wire.connection import READ_BYTES, Connection
from loadgen.servers.wire.http1 import encode_post
from loadgen.servers.wire.local_limits import explain_late_error
from loadgen.servers.wire.poller import Poller
from loadgen.servers.wire.timestamps import TimestampSource
from loadgen.servers.wire.transport import Exchange
from loadgen.workloads.request import Request, merged_headers, wire_id
from loadgen.workloads.session_graph import SessionGraph

__all__ = ["LoadgenUser", "between", "constant", "constant_pacing", "task"]

READ, WRITE = 1, 2  # libev's event flags


class RequestError(Exception):
    """The exception that loadgen reports to Locust for a request that was not complete.

    Its text contains the error kind and the error message.
    """


class LoadgenUser(User):  # type: ignore[misc] # Locust has no types
    """A Locust user with one connection and at most one request in flight.

    A subclass without tasks sends the prompts of a workload one after the other. The workload is chosen in the form on
    Locust's start page.
    """

    abstract = True
    wait_time = constant(0)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add loadgen's options, page and run file to the locustfile that defines the subclass."""
        super().__init_subclass__(**kwargs)
        SESSION.attach()

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        target = SESSION.target
        assert target is not None
        self._connection = UserConnection(target, SESSION.stamps)
        self._more_connections: list[UserConnection] = []
        """Further connections of sessions with several requests in flight, which are not in use."""

    def on_start(self) -> None:
        """Open the user's connection, so that the first request does not have to wait for a connection."""
        self._connection.open()

    def on_stop(self) -> None:
        """Close the connections."""
        for connection in (self._connection, *self._more_connections):
            connection.close()

    @task  # type: ignore[untyped-decorator]
    def request(self) -> None:
        """Send the next prompt of the workload that is chosen in the form on Locust's start page.

        If the workload has sessions, send all requests of the next session. The end of the run time does not interrupt
        a session, but the Stop button does. If the plan has classes of traffic, a random class is chosen by weight.
        """
        target = self._next_target(None)
        if target.plan.uses_sessions:
            self._run_session(target, None)
        else:
            self._ask(target, None, None, None)

    def _next_target(self, sessions: bool | None) -> LiveTarget:
        """Choose a class of traffic at random, and return the LiveTarget that sends its requests.

        If `sessions` is True, only classes with sessions are considered. If it is False, only classes with single
        requests are considered.

        Raises StopUser if the run could not begin, or if there is no suitable class. In both cases the reason has
        already been reported.
        """
        if SESSION.target is None or SESSION.run is None:
            raise StopUser
        try:
            return SESSION.target.next_class(sessions=sessions)
        except EXPECTED as error:
            SESSION.fail(error)
            raise StopUser from None

    def run_session(self, endpoint: str | None = None) -> None:
        """Run the next session of the workload that is chosen in the form on Locust's start page.

        `endpoint` is the name of an endpoint, such as `chat`. The default is the endpoint of the command line, or the
        first endpoint that the server accepts if the command line names none.
        """
        self._run_session(self._next_target(True), endpoint)

    def _run_session(self, target: LiveTarget, endpoint: str | None) -> None:
        """Run the next session of a class of traffic."""
        if SESSION.run is None:
            raise StopUser
        try:
            self._session_target = target
            self._session_dialect = dialect = target.dialect(endpoint)
            target.prompts(dialect)
            with SESSION.turn():
                session = target.session(dialect)
        except EXPECTED as error:
            SESSION.fail(error)
            raise StopUser from None
        try:
            if isinstance(session, SessionGraph):
                run_graph(self, session)
            else:
                run_chat(self, session)
        finally:
            SESSION.run.identities[target.name].forget(first_id_of(session))

    def send_in_session(self, request: Request, due_ns: int, on_sent: Callable[[int], object]) -> SentRequest:
        """Send a request of a session, and wait for the end of its response. Return the Record and the text of the
        response.

        `due_ns` is the time at which the request is due. `on_sent` is called with the time of sending in ns
        (CLOCK_MONOTONIC).
        """
        target = self._session_target
        assert SESSION.run is not None
        request = target.with_model(request)
        connection = self._more_connections.pop() if self._more_connections else self._new_connection(target)
        try:
            record, exchange = self._exchange(target, request, self._session_dialect, connection, due_ns, on_sent)
        finally:
            self._more_connections.append(connection)
        quoted = exchange is not None and record.state == "complete" and not request.raw
        answer = answer_text(exchange, exchange.dialect or self._session_dialect) if quoted and exchange else ""
        return SentRequest(record, answer, SESSION.run.start_ns + (record.end_ns or 0))

    def record_unsent(self, request: Request, kind: ErrorKind, detail: str) -> None:
        """Record that a request of a session is not sent. `kind` and `detail` state the reason."""
        if SESSION.run is not None:
            SESSION.run.not_sent(request, kind, detail)

    def _new_connection(self, target: LiveTarget) -> UserConnection:
        if self._connection.in_use:
            return UserConnection(target, SESSION.stamps)
        self._connection.in_use = True
        return self._connection

    def ask(
        self, prompt: str | None = None, *, output_tokens: int | None = None, endpoint: str | None = None
    ) -> Record:
        """Send one request, wait for the end of its response, and return its Record.

        The request is also reported to Locust and to the run file. By default, the next prompt of the workload that is
        chosen in the form on Locust's start page is sent. If you pass a `prompt`, its length is not checked. `endpoint`
        is the name of an endpoint, such as `chat`. The default is the endpoint of the command line, or the first
        endpoint that the server accepts if the command line names none.
        """
        return self._ask(self._next_target(False), prompt, output_tokens, endpoint)

    def _ask(self, target: LiveTarget, prompt: str | None, output_tokens: int | None, endpoint: str | None) -> Record:
        """Send one request to `target`, wait for the end of its response, and return its Record.

        `target` sends the requests of one class of traffic. `prompt`, `output_tokens` and `endpoint` have the same
        meaning as in `ask`.
        """
        try:
            dialect = target.dialect(endpoint)
            if prompt is None:
                target.prompts(dialect)  # built at an endpoint's first use, which takes a while
            # If Locust stops the user now, the greenlet is killed while it waits for its turn, and nothing is sent.
            with SESSION.turn():
                request = target.request(dialect, prompt, output_tokens or SESSION.output_tokens)
        except EXPECTED as error:
            SESSION.fail(error)
            raise StopUser from None
        return self._exchange(target, request, dialect, self._connection, None, lambda _: None)[0]

    def _exchange(
        self,
        target: LiveTarget,
        request: Request,
        dialect: Dialect,
        user_connection: UserConnection,
        due_ns: int | None,
        on_sent: Callable[[int], object],
    ) -> tuple[Record, Exchange | None]:
        """Send `request`, wait for its response, and return its Record and its Exchange.

        The Exchange contains the bytes of the request and of the response. It is None if nothing was sent.

        - `due_ns` is the due time of `request` if it belongs to a session. Such a request already has its final id.
          Otherwise `due_ns` is None: the request is due now, and its id is assigned here.
        - `on_sent` is called with the time at which the request was sent.
        """
        run = SESSION.run
        assert run is not None
        identity = run.identities[target.name]
        user_connection.timeout_s = target.plan.timeout_s
        number = target.numbered if due_ns is None else _unchanged
        try:
            with SESSION.turn():
                body, dialect = target.encoded(request, dialect)
                request = replace(request, expected=expected_output(body))
        except ValueError as error:  # for example text that UTF-8 cannot hold
            record = run.not_encoded(number(request), error)
            self._report(record, dialect)
            return record, None
        due_ns = monotonic_ns() if due_ns is None else due_ns
        try:
            connection = user_connection.take()
        except OSError as error:
            record = run.give_up(number(request), due_ns, error)
            self._report(record, dialect)
            return record, None
        # If Locust stops the user while it connects, nothing is sent. The request exists only from here on.
        request = number(request)
        address = target.address
        headers = dialect.media_headers | {"X-Request-Id": wire_id(run.id_prefix, request.id)}
        headers |= identity.headers(request, run.id_prefix)
        headers = merged_headers(headers, target.headers(dialect), request.headers, address.proxy_headers)
        payload = encode_post(address.request_target(dialect.path), address.host_field, headers, body)
        exchange = user_connection.send(connection, payload)
        run.in_flight.add(exchange)
        on_sent(exchange.sent_ns or monotonic_ns())
        with contextlib.ExitStack() as stack:
            try:
                user_connection.wait(exchange)
                stack.enter_context(SESSION.turn())
            finally:  # also when the user is being stopped: the received part is kept, and the stop goes on
                identity.capture(request, exchange.framing.head, last=False)
                record = run.take(exchange, request, dialect, due_ns, connection.opened_ns)
                self._report(record, dialect)
        return record, exchange

    def _report(self, record: Record, dialect: Dialect) -> None:
        """Report a request to Locust's own table, history and CSV. Its response time is the time from send to end in
        ms.

        A request that was cut off because its user was stopped is not reported, because it is not a failure.
        """
        if record.error_kind == "cancelled":
            return
        took_ns = 0
        if record.sent_ns is not None:
            took_ns = (record.end_ns or 0) - record.sent_ns
        failure = None
        if record.state != "complete":
            failure = RequestError(f"{record.error_kind}: {detail_of(record)}")
        self.environment.events.request.fire(
            request_type="POST",
            name=dialect.path,
            response_time=took_ns / 1e6,
            response_length=generated_tokens(record),
            exception=failure,
            context={"record": record},
        )


def _unchanged(request: Request) -> Request:
    return request


class PromptUser(LoadgenUser):
    """A user that sends the prompts of a workload one after the other, without pauses.

    The workload is chosen in the form on Locust's start page.
    """


class UserConnection:
    """The connection of one Locust user to the server.

    An Exchange (a request with its response) normally waits for its socket with a Poller and an asyncio event loop.
    Locust uses gevent instead of asyncio. This class therefore replaces both for the Exchanges of a Locust user, and
    waits with gevent's event loop.
    """

    in_use = False
    """True if the connection was used by a session of its user."""
    late = False
    largest_read = 0
    bytes_read = 0

    def __init__(self, target: LiveTarget, stamps: TimestampSource) -> None:
        self.loop = self
        self._watchers: dict[tuple[int, int], Any] = {}
        self.timeout_s = target.plan.timeout_s
        self._connect = partial(connect, target.address, target.rotation, self.timeout_s, stamps)
        self._idle: Connection | None = None
        self._ended = Event()

    def open(self) -> None:
        """Open a connection before the first request.

        If this fails, no error is raised. The first request tries again.
        """
        with contextlib.suppress(OSError):
            self._idle = self._connect()

    def take(self) -> Connection:
        """Return the idle connection, or a new one if there is none or the server has closed it.

        Raises OSError, which includes TimeoutError and ssl.SSLError.
        """
        idle = self._idle
        self._idle = None
        if idle is not None:
            if not idle.closed_by_peer():
                return idle
            idle.close()
        return self._connect()

    def send(self, connection: Connection, request: bytes) -> Exchange:
        """Send a request and return its Exchange. The caller must call `wait` next."""
        ended = self._ended = Event()
        exchange = Exchange(cast("Poller", self), lambda _: ended.set())
        exchange.prepare(connection, connection.seal(request))
        exchange.send()
        exchange.listen()
        return exchange

    def wait(self, exchange: Exchange) -> None:
        """Wait until the response has ended, the timeout has passed, or this greenlet is killed.

        A timeout is stored in the Exchange as the error `timeout`. If the greenlet is killed, the error is `cancelled`,
        and GreenletExit is raised again.
        """
        try:
            if not self._ended.wait(self.timeout_s):
                exchange.fail("timeout", f"no end after {self.timeout_s:g} s")
        except gevent.GreenletExit:
            exchange.fail("cancelled", "cut off, because its user was stopped")
            raise
        finally:
            self._idle = exchange.reusable_connection
            exchange.reusable_connection = None

    def close(self) -> None:
        """Close the idle connection."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def _watch(self, event: int, sock: socket.socket, callback: Callable[[], None]) -> None:
        """Call `callback` in gevent's event loop (the hub) whenever the socket is ready for `event`.

        The event READ means that the socket is readable, or that the server has closed the connection. The event WRITE
        means that the socket is writable.
        """
        watcher = self._watchers[sock.fileno(), event] = get_hub().loop.io(sock.fileno(), event)
        watcher.start(callback)

    def _forget(self, event: int, sock: socket.socket) -> None:
        """Stop watching a socket that will be closed. Do nothing if the socket is not watched."""
        watcher = self._watchers.pop((sock.fileno(), event), None)
        if watcher is not None:
            watcher.stop()
            watcher.close()

    add, remove = partialmethod(_watch, READ), partialmethod(_forget, READ)
    add_writer, remove_writer = partialmethod(_watch, WRITE), partialmethod(_forget, WRITE)


def connect(target: Target, rotation: Rotation, timeout_s: float, stamps: TimestampSource) -> Connection:
    """Open a connection to `target`, including the handshakes of a proxy and of TLS.

    Other greenlets run during this time. The addresses of the target are tried in the order of `rotation`. If an
    address refuses the connection, or does not answer within ATTEMPT_S, the next address is tried. The last address has
    `timeout_s` seconds to answer. `stamps` is the source of the timestamps for this connection.

    Raises LocalLimitError if a limit of this machine prevents the connection, and OSError if all addresses fail.
    """
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
    family, socket_address = address
    sock = gevent_socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        if target.over_ip:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect(socket_address)
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
