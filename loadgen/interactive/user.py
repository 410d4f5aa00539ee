"""The base of a locustfile: a user who asks a server in its own dialect, and is timed as exactly as a burst.

    from loadgen.interactive.user import LoadgenUser, task, constant

    class Reader(LoadgenUser):
        wait_time = constant(2)

        @task
        def summarise(self):
            self.ask("Summarise: ...", output_tokens=64, endpoint="chat")

Runs under `loadgen ui --locustfile FILE` and under plain `locust -f FILE`, where it adds its own options, page and Run.
`loadgen ui` itself takes this file for a locustfile: its users ask the prompts of the start form.
"""

from __future__ import annotations

import logging
import ssl
from contextlib import ExitStack
from time import monotonic_ns
from typing import Any

from locust import User, between, constant, constant_pacing, task
from locust.exception import StopUser

from loadgen.interactive.live_run import detail_of
from loadgen.interactive.page import extend
from loadgen.interactive.session import EXPECTED, SESSION
from loadgen.interactive.target import UserConnection
from loadgen.record import Record
from servers.kinds.base import Dialect
from servers.wire.http1 import post

__all__ = ["LoadgenUser", "between", "constant", "constant_pacing", "task"]


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
        SESSION.attach(extend)

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        target = SESSION.target
        assert target is not None
        self._connection = UserConnection(SESSION.poller, target, SESSION.stamps)

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
        checks its length. `endpoint` is completions, chat or generate; the server's native one otherwise.
        """
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
                body = dialect.encode(request, target.facts.model)
        except EXPECTED as error:
            SESSION.fail(error)
            raise StopUser from None
        due_ns = monotonic_ns()
        try:
            connection = self._connection.take()
        except OSError as error:
            record = run.give_up(target.numbered(request), due_ns, _reason(error))
            self._report(record, dialect)
            return record
        # A user who is stopped while connecting has sent nothing: only from here on is there a request.
        request = target.numbered(request)
        headers = {**target.headers, "X-Request-Id": str(request.id)}
        payload = post(target.address.path + dialect.path, target.address.host_field, headers, body)
        exchange = self._connection.send(connection, payload)
        run.in_flight.add(exchange)
        with ExitStack() as stack:
            try:
                self._connection.wait(exchange)
                stack.enter_context(SESSION.turn())
            finally:  # also of a user who is being stopped: what came until now is kept, and the stop goes on
                record = run.take(exchange, request, dialect, due_ns, connection.opened_ns)
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


class PromptUser(LoadgenUser):
    """Asks one prompt of the start form after the other, without a pause."""


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {getattr(error, 'verify_message', '') or error.reason or error}"
    if isinstance(error, TimeoutError):
        return "no connection in time"
    logging.getLogger(__name__).debug("no connection", exc_info=error)
    return error.strerror or str(error)
