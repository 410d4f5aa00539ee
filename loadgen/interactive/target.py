"""Whom an interactive run asks, and what; and the gevent side of the wire, which supplies the waiting. Sending, reading
and stamps are servers.wire.transport's.

    greenlet of a user ── send ──> socket ──> waits for the Exchange's end
    hub of gevent      ── readable ──> Exchange: recvmsg, append, "ended?" ── ended ──> wakes the greenlet

Reads run in the hub itself: no switch of greenlets lies between the kernel and a read.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, partialmethod
from itertools import count
from time import monotonic_ns
from typing import Any, cast

import gevent
from gevent import get_hub
from gevent import socket as gevent_socket
from gevent.event import Event

from loadgen import prepare
from loadgen.errors import PlanError
from loadgen.plan import Plan, access_of
from servers.find import dialect_on, of_version, tokenizer_of
from servers.kinds.base import Dialect, ServerFacts
from servers.wire.connection import READ_BYTES, Connection, Target, target_of
from servers.wire.poller import Poller
from servers.wire.stamps import StampSource
from servers.wire.transport import Exchange
from workloads import workload
from workloads.request import Request
from workloads.workload import Prompts

TEXTS = 2_000
"""Prompts built beforehand where the server takes text only; after them the first comes again."""
SIMULATED_STREAMS = 4_000
SIMULATED_TOKENS = 32_768
READ, WRITE = 1, 2  # of libev
ONE_LOOK_S = 1e-6
"""A timer is only looked at after the sockets; a sleep of 0 s is not one."""


@dataclass(slots=True)
class LiveTarget:
    """The server, and the prompts for each of its endpoints, without end. One for all users; the start form changes
    what is asked."""

    plan: Plan
    facts: ServerFacts
    address: Target
    headers: Mapping[str, str]
    say: Callable[[str], None]
    _dialects: dict[str, Dialect] = field(default_factory=dict)
    _prompts: dict[str, Prompts] = field(default_factory=dict)
    _draws: dict[str, Iterator[Request]] = field(default_factory=dict)
    _ids: Iterator[int] = field(default_factory=count)

    def dialect(self, endpoint: str | None) -> Dialect:
        """The server's dialect on an endpoint, as its version speaks it.

        Raises EndpointError where it has none, VersionError where it is known to mislead there and nobody forced it.
        """
        found = dialect_on(self.plan.server, endpoint or self.plan.endpoint)
        if found.endpoint not in self._dialects:
            self._dialects[found.endpoint] = of_version(found, self.facts, self.say, force=self.plan.force)
        return self._dialects[found.endpoint]

    def request(self, dialect: Dialect, prompt: str | None, output_tokens: int) -> Request:
        """The next Request for this endpoint, or one with a prompt of its own; it has no id yet."""
        if prompt is not None:
            return Request(0, prompt, 0, output_tokens)
        if dialect.endpoint not in self._draws:
            self._draws[dialect.endpoint] = _endless(self.prompts(dialect))
        return next(self._draws[dialect.endpoint])

    def numbered(self, request: Request) -> Request:
        """The same Request with an id of its own."""
        return replace(request, id=next(self._ids))

    def prompts(self, dialect: Dialect) -> Prompts:
        """Built at first use, which asks the server to count. Raises PromptError, PlanError, WorkloadError."""
        if dialect.endpoint not in self._prompts:
            plan, access = self.plan, access_of(self.plan)
            if not (dialect.token_ids or self._of_file):
                plan = plan.model_copy(update={"n": TEXTS})
            with tokenizer_of(self.facts, dialect.endpoint, api_key=access.api_key, verify=access.tls) as server:
                self._prompts[dialect.endpoint] = prepare.prompts_of(plan, prepare.schedule_of(plan), dialect, server)
        return self._prompts[dialect.endpoint]

    def how(self, dialect: Dialect) -> str:
        """How the length of prompts is made exact, and whether they come again."""
        how = self.prompts(dialect).how
        endless = dialect.token_ids and not self._of_file
        return how if endless else f"{how}; repeated from the first after the last"

    @property
    def _of_file(self) -> bool:
        return isinstance(workload.parse(self.plan.workload), workload.Dataset)

    def changed(self, plan: Plan) -> LiveTarget:
        """The same server, asked something else."""
        return replace(self, plan=plan, _prompts={}, _draws={}, _ids=count())

    def restarted(self) -> LiveTarget:
        """The same server asked the same, from the first prompt and id 0 on."""
        return replace(self, _draws={}, _ids=count())


def find_target(plan: Plan, stack: ExitStack, say: Callable[[str], None]) -> LiveTarget:
    """Find the server as `loadgen burst` does; the built-in simulated one lives as long as `stack`.

    Raises servers.errors.ServerError.
    """
    access = access_of(plan)
    server = prepare.server_for(plan, access, say, at_once=1, streams=SIMULATED_STREAMS, tokens=SIMULATED_TOKENS)
    facts = stack.enter_context(server)
    return LiveTarget(plan, facts, target_of(facts.url, access.tls), access.headers, say)


def _endless(prompts: Prompts) -> Iterator[Request]:
    if next(iter(prompts.requests()), None) is None:
        raise PlanError("the workload holds no prompt", "Name another file.")
    while True:
        yield from prompts.requests()


class HubPoller:
    """What an Exchange asks of servers.wire.poller.Poller and its event loop, from gevent's hub."""

    def __init__(self) -> None:
        self.loop = self  # both parts are one here
        self._watchers: dict[tuple[int, int], Any] = {}

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


class UserConnection:
    """One user's connection and the Exchanges on it, one after another."""

    def __init__(self, poller: HubPoller, target: LiveTarget, stamps: StampSource) -> None:
        self._poller = poller
        self._timeout_s = target.plan.timeout_s
        self._connect = partial(connect, target.address, self._timeout_s, stamps)
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
            if not idle.gone():
                return idle
            idle.close()
        return self._connect()

    def send(self, connection: Connection, request: bytes) -> Exchange:
        """Send a request; `wait` follows."""
        ended = self._ended = Event()
        exchange = Exchange(cast("Poller", self._poller), lambda _: ended.set())
        exchange.prepare(connection, connection.seal(request))
        exchange.send()
        exchange.listen()
        return exchange

    def wait(self, exchange: Exchange) -> None:
        """Wait for the end, the time limit or the end of this greenlet; the Exchange says which it was.

        A greenlet that is killed here leaves an Exchange that was cancelled, and goes on being killed.
        """
        try:
            if not self._ended.wait(self._timeout_s):
                exchange.fail("timeout", f"no end after {self._timeout_s:g} s")
        except gevent.GreenletExit:
            exchange.fail("cancelled", "cut off, because its user was stopped")
            raise
        finally:
            self._idle, exchange.free = exchange.free, None

    def close(self) -> None:
        """Close what is idle."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None


def connect(target: Target, timeout_s: float, stamps: StampSource) -> Connection:
    """Open one connection, TLS handshake included, while other greenlets run. Raises OSError."""
    sock = gevent_socket.socket(target.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect(target.address)
        connection = Connection(cast("socket.socket", sock), monotonic_ns())
        if target.tls is not None:
            connection.begin_tls(target)
        while connection.shaking:
            if sealed := connection.shake():
                sock.sendall(sealed)
            if connection.shaking:
                connection.heard(sock.recv(READ_BYTES))
        sock.setblocking(False)
        stamps.watch(cast("socket.socket", sock))
    except BaseException:
        sock.close()
        raise
    return connection
