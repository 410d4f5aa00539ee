"""Connections that are open before they are needed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic

from loadgen.servers.wire.connection import Connection

MAX_CONCURRENT_CONNECTS = 64  # Below the smallest listen backlog of the servers (hypercorn's 100) ...
ACCEPTED_S = 0.003  # ... which accept them in about so long: no SYN is dropped


class Pool:
    """Idle connections to one target, oldest first. `spare` of them are kept while more requests are to come."""

    def __init__(
        self,
        connect: Callable[[], Connection | Awaitable[Connection]],
        *,
        spare: int,
        meanwhile: Callable[[], bool] = bool,
    ) -> None:
        """`connect` opens one, at once or when it is awaited. While the server accepts them `meanwhile` is called,
        again as long as it is true."""
        self._connect, self._spare, self._meanwhile = connect, spare, meanwhile
        self._idle: deque[Connection] = deque()
        self._gate = asyncio.Semaphore(MAX_CONCURRENT_CONNECTS)
        self._opening: set[asyncio.Task[None]] = set()
        self._missing = 0
        """How many are still to be opened by these tasks."""

    async def fill(self) -> None:
        """Open the spare connections. One that fails is not tried again here: whoever needs it opens its own."""
        self.top_up()
        await asyncio.gather(*self._opening)

    async def open(self) -> Connection:
        """Open one connection, for a request that cannot wait for an idle one. Raises as `connect` does."""
        async with self._gate:
            begun = self._connect()
            return begun if isinstance(begun, Connection) else await begun

    def take(self) -> Connection | None:
        """An idle connection that is still open, or None."""
        while self._idle:
            connection = self._idle.popleft()
            if not connection.closed_by_peer():
                return connection
            connection.close()
        return None

    def put(self, connection: Connection) -> None:
        """Give back a connection that may serve another request. It is kept beside those that were opened while it was
        away: closing it would have `top_up` open another for each request under way at its next look."""
        if self._spare:
            self._idle.append(connection)
        else:
            connection.close()

    def top_up(self) -> None:
        """Open connections in the background until `spare` are idle."""
        if (missing := self._spare - len(self._idle) - self._missing) > 0:
            self._missing += missing
            task = asyncio.get_running_loop().create_task(self._open_idle(missing))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def close(self) -> None:
        """Close what is idle and open nothing more."""
        self._spare = 0
        for task in self._opening:
            task.cancel()
        while self._idle:
            self._idle.popleft().close()

    async def _open_idle(self, count: int) -> None:
        while count:
            at_once = min(count, MAX_CONCURRENT_CONNECTS)
            begun = [self._begin() for _ in range(at_once)]  # no task for each: it would take as long as to connect
            await asyncio.gather(*[self._end(each) for each in begun if each is not None])
            self._missing -= at_once
            if count := count - at_once:
                until_s = monotonic() + ACCEPTED_S
                while monotonic() < until_s and self._meanwhile():
                    pass
                await asyncio.sleep(until_s - monotonic())

    def _begin(self) -> Awaitable[Connection] | None:
        """Open one. What is to be awaited, where it is not open yet."""
        with suppress(OSError):
            begun = self._connect()
            if not isinstance(begun, Connection):
                return begun
            self.put(begun)
        return None

    async def _end(self, begun: Awaitable[Connection]) -> None:
        with suppress(OSError):
            async with self._gate:
                self.put(await begun)
