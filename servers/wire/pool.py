"""Open connections that wait for a request: enough of them are opened before they are needed."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from servers.wire.connection import Connection, Target, connect
from servers.wire.stamps import StampSource

CONNECTS_AT_ONCE = 64
"""Below the smallest listen backlog among the servers (hypercorn's 100), so that no SYN is dropped."""


class Pool:
    """Idle connections to one target, oldest first. `spare` of them are kept while more requests are to come."""

    def __init__(self, target: Target, *, spare: int, timeout_s: float, stamps: StampSource) -> None:
        self._target = target
        self._spare = spare
        self._timeout_s = timeout_s
        self._stamps = stamps
        self._idle: deque[Connection] = deque()
        self._gate = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self._opening: set[asyncio.Task[None]] = set()

    async def fill(self) -> None:
        """Open the spare connections. One that fails is not tried again here: whoever needs it opens its own."""
        self.top_up()
        await asyncio.gather(*self._opening)

    async def open(self) -> Connection:
        """Open one connection, for a request that cannot wait for an idle one. Raises as `connect` does."""
        async with self._gate:
            return await connect(self._target, self._timeout_s, self._stamps)

    def take(self) -> Connection | None:
        """An idle connection that is still open, or None."""
        while self._idle:
            connection = self._idle.popleft()
            if not connection.gone():
                return connection
            connection.close()
        return None

    def put(self, connection: Connection) -> None:
        """Give back a connection that may serve another request."""
        if len(self._idle) < self._spare:
            self._idle.append(connection)
        else:
            connection.close()

    def top_up(self) -> None:
        """Open connections in the background until `spare` are idle."""
        for _ in range(self._spare - len(self._idle) - len(self._opening)):
            task = asyncio.get_running_loop().create_task(self._open_idle())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def close(self) -> None:
        """Close what is idle and open nothing more."""
        self._spare = 0
        for task in self._opening:
            task.cancel()
        while self._idle:
            self._idle.popleft().close()

    async def _open_idle(self) -> None:
        with suppress(OSError, TimeoutError):
            self.put(await self.open())
