"""A pool of connections that are opened before they are needed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Literal

from loadgen.servers.wire.connection import Connection

MAX_CONCURRENT_CONNECTS = 64
"""Maximum number of connections that are opened at one time. It is below the smallest listen backlog of the servers
(hypercorn's 100), so that no SYN is dropped."""
ACCEPTED_S = 0.003
"""Time in seconds in which a server accepts MAX_CONCURRENT_CONNECTS connections."""


ConnectionUse = Literal["pooled", "session", "new"]
"""Which requests share a connection: any (`pooled`), those of one session (`session`) or none (`new`)."""


class Pool:
    """A pool of idle connections to one target, oldest first.

    The pool keeps `spare` connections open for future requests.
    """

    def __init__(
        self,
        connect: Callable[[], Connection | Awaitable[Connection]],
        *,
        spare: int,
        meanwhile: Callable[[], bool] = bool,
        use: ConnectionUse = "pooled",
    ) -> None:
        """Create a pool without connections.

        - `connect` opens a connection. It returns the connection if it is open at once, otherwise an awaitable.
        - `spare` is the number of idle connections to keep open.
        - `meanwhile` does a part of some other work while connections are being opened. It returns True if work is
          left.
        - `use` states which requests may share a connection. The pool only stores `use` for the load driver, which
          closes or keeps a connection accordingly when a response has ended.
        """
        self.use = use
        self._connect = connect
        self._spare = spare
        self._meanwhile = meanwhile
        self._idle: deque[Connection] = deque()
        self._gate = asyncio.Semaphore(MAX_CONCURRENT_CONNECTS)
        self._opening: set[asyncio.Task[None]] = set()
        self._missing = 0
        """Number of connections that the tasks in `_opening` have not opened yet."""

    async def fill(self) -> None:
        """Open the spare connections, and wait until every attempt has ended.

        A failed attempt is not repeated. If a request later finds no idle connection, it opens a connection itself."""
        self.top_up()
        await asyncio.gather(*self._opening)

    async def open(self) -> Connection:
        """Open one connection for a request that found no idle connection. Raises the errors of `connect`."""
        async with self._gate:
            opening = self._connect()
            return opening if isinstance(opening, Connection) else await opening

    def take(self) -> Connection | None:
        """Remove an idle connection from the pool and return it, or return None if there is none.

        Connections that the server has closed are discarded."""
        while self._idle:
            connection = self._idle.popleft()
            if not connection.closed_by_peer():
                return connection
            connection.close()
        return None

    def put(self, connection: Connection) -> None:
        """Put an idle connection back into the pool, so that a later request can use it.

        The connection is closed instead if the pool was created with `spare=0`, or after `close`. Otherwise, the pool
        accepts any number of connections: `spare` is only the number of connections that it opens in advance.
        """
        if self._spare:
            self._idle.append(connection)
        else:
            connection.close()

    def top_up(self) -> None:
        """Open connections in the background until `spare` connections are idle."""
        missing = self._spare - len(self._idle) - self._missing
        if missing > 0:
            self._missing += missing
            task = asyncio.get_running_loop().create_task(self._open_idle(missing))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def close(self) -> None:
        """Close the idle connections and open no new ones."""
        self._spare = 0
        for task in self._opening:
            task.cancel()
        while self._idle:
            self._idle.popleft().close()

    async def _open_idle(self, count: int) -> None:
        while count:
            at_once = min(count, MAX_CONCURRENT_CONNECTS)
            # A connection that opens at once needs no task, which would take as long as connecting.
            pending = [self._begin() for _ in range(at_once)]
            await asyncio.gather(*[self._end(opening) for opening in pending if opening is not None])
            self._missing -= at_once
            count -= at_once
            if count:
                until_s = monotonic() + ACCEPTED_S
                while monotonic() < until_s and self._meanwhile():
                    pass
                await asyncio.sleep(until_s - monotonic())

    def _begin(self) -> Awaitable[Connection] | None:
        """Start opening one connection. Return an awaitable of the connection, or None if there is nothing to wait for.

        The result is None if the connection was opened at once and put into the pool, or if the attempt failed.
        """
        with suppress(OSError):
            opening = self._connect()
            if not isinstance(opening, Connection):
                return opening
            self.put(opening)
        return None

    async def _end(self, opening: Awaitable[Connection]) -> None:
        with suppress(OSError):
            async with self._gate:
                self.put(await opening)
