"""The base of a locustfile: a user who asks a server in its own dialect, and is timed as exactly as a burst.

    from loadgen.interactive.user import LoadgenUser, task, constant

    class Reader(LoadgenUser):
        wait_time = constant(2)

        @task
        def summarise(self):
            self.ask("Summarise: ...", output_tokens=64, endpoint="chat")

Runs under `loadgen ui --locustfile FILE` and under plain `locust -f FILE`, where it adds its own options, page and Run.
"""

from __future__ import annotations

import logging
import ssl
from time import monotonic_ns
from typing import Any

from locust import User, between, constant, constant_pacing, task
from locust.exception import StopUser

from loadgen.interactive.desk import DESK, MEANT_FOR_USERS
from loadgen.interactive.figures import detail_of
from loadgen.interactive.ledger import Ledger
from loadgen.interactive.setting import Setting
from loadgen.interactive.wire import Line
from loadgen.record import Record
from servers.kinds.base import Dialect
from servers.wire.connection import Connection
from servers.wire.http1 import post
from servers.wire.transport import Exchange
from workloads.request import Request

__all__ = ["LoadgenUser", "between", "constant", "constant_pacing", "task"]

CONNECT_LIMIT_S = 30.0


class RequestError(Exception):
    """How a request that was not complete is named to Locust: by our kind, then in the server's words or ours."""


class LoadgenUser(User):  # type: ignore[misc] # Locust has no types
    """One user: a connection of its own, and one request at a time.

    Without tasks of its own it asks the prompts of the start form, one after the other.
    """

    abstract = True
    wait_time = constant(0)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A locustfile that has such a user gets the options, the page and the Run."""
        super().__init_subclass__(**kwargs)
        DESK.attach()

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        desk, setting = DESK, DESK.setting
        assert setting is not None
        self._line = Line(
            desk.poller,
            setting.target,
            timeout_s=setting.plan.timeout_s,
            stamped=setting.plan.stamps == "kernel",
        )

    def on_start(self) -> None:
        """Connect before the first request, as a burst does."""
        self._line.open()

    def on_stop(self) -> None:
        """Hang up."""
        self._line.close()

    @task  # type: ignore[untyped-decorator]
    def request(self) -> None:
        """One request of the start form's prompts."""
        self.ask()

    def ask(
        self, prompt: str | None = None, *, output_tokens: int | None = None, endpoint: str | None = None
    ) -> Record:
        """Send one request, wait for its end, and report it to Locust and to the Run; what happened is in the Record.

        Without a `prompt` the next one of the start form is taken. A prompt of your own is as long as it is: nobody
        checks its length. `endpoint` is completions, chat or generate; the server's native one otherwise.
        """
        setting, ledger = DESK.setting, DESK.ledger
        if setting is None or ledger is None:
            raise StopUser  # the run could not begin; what was wrong has been said
        try:
            dialect = setting.dialect(endpoint)
            if prompt is None:
                setting.prompts_for(dialect)  # built at an endpoint's first use, which takes its time
            with DESK.turns:  # a user who is stopped just as its wait ends is killed here, and has sent nothing
                request = setting.request(dialect, prompt, output_tokens or DESK.output_tokens)
                body = dialect.encode(request, setting.facts.model)
        except MEANT_FOR_USERS as error:
            DESK.fail(error)
            raise StopUser from None
        due_ns = monotonic_ns()
        try:
            connection = self._line.connection()
        except (OSError, TimeoutError) as error:
            record = ledger.give_up(setting.numbered(request), due_ns, "connect", _reason(error))
            self._report(record, dialect)
        else:
            # A user who is stopped while connecting has sent nothing: only from here on is there a request.
            record = self._exchanged(ledger, setting, connection, dialect, setting.numbered(request), body, due_ns)
        return record

    def _exchanged(
        self,
        ledger: Ledger,
        setting: Setting,
        connection: Connection,
        dialect: Dialect,
        request: Request,
        body: bytes,
        due_ns: int,
    ) -> Record:
        headers = {**setting.headers, "X-Request-Id": str(request.id)}
        payload = post(setting.target.path + dialect.path, setting.target.host_field, headers, body)
        begun: list[Exchange] = []

        def started(exchange: Exchange) -> None:
            begun.append(exchange)
            ledger.in_flight.add(exchange)

        try:
            self._line.exchange(connection, payload, started)
            DESK.turns.begin()
        except BaseException:  # the user is being stopped: what came until now is kept, and the stop goes on
            self._taken(ledger, begun[0], request, dialect, due_ns, connection)
            raise
        try:
            return self._taken(ledger, begun[0], request, dialect, due_ns, connection)
        finally:
            DESK.turns.end()

    def _taken(
        self,
        ledger: Ledger,
        exchange: Exchange,
        request: Request,
        dialect: Dialect,
        due_ns: int,
        connection: Connection,
    ) -> Record:
        record = ledger.take(exchange, request, dialect, due_ns, connection.opened_ns)
        self._report(record, dialect)
        return record

    def _report(self, record: Record, dialect: Dialect) -> None:
        """Locust's own table, history and CSV; its times are milliseconds from the send to the end."""
        took_ns = (record.end_ns or 0) - record.sent_ns if record.sent_ns is not None else 0
        failure = RequestError(f"{record.error_kind}: {detail_of(record)}") if record.state != "complete" else None
        self.environment.events.request.fire(
            request_type="POST",
            name=dialect.path,
            response_time=took_ns / 1e6,
            response_length=sum(record.chunk_tokens),
            exception=failure,
            context={"record": record},
        )


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {getattr(error, 'verify_message', '') or error.reason or error}"
    if isinstance(error, TimeoutError):
        return "no connection in time"
    logging.getLogger(__name__).debug("no connection", exc_info=error)
    return error.strerror or str(error)
