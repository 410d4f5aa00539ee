"""Tells which of many sockets can be read, with an epoll of its own inside the event loop.

    uvloop ── watches one descriptor ──> epoll ── watches all sockets ──> callbacks

Not the loop's `add_reader`: when a connection is reset right behind its last bytes, libuv stops watching it after one
callback (uv__poll_io, POLLERR), so the reset would never be seen. It is also cheaper: one turn of the loop serves all
sockets that are ready.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable

EVENTS_PER_TURN = 256
"""Sockets served before timers and other callbacks get their turn."""


class Poller:
    """Readiness to read, level-triggered. Where there is no epoll the event loop itself is asked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            loop.add_reader(self._epoll.fileno(), self._run)

    def add(self, sock: socket.socket, callback: Callable[[], None]) -> None:
        """Call back whenever `sock` can be read, which includes that it has been closed or reset."""
        if self._epoll is None:
            self.loop.add_reader(sock, callback)
            return
        self._callbacks[sock.fileno()] = callback
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def remove(self, sock: socket.socket) -> None:
        """No more calls for `sock`; one that is not watched is ignored. Before the socket is closed."""
        if self._epoll is None:
            self.loop.remove_reader(sock)
        elif self._callbacks.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def close(self) -> None:
        """Watch nothing any more."""
        if self._epoll is not None:
            self.loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._callbacks.clear()

    def _run(self) -> None:
        assert self._epoll is not None
        callbacks = self._callbacks
        for descriptor, _ in self._epoll.poll(0, EVENTS_PER_TURN):
            callback = callbacks.get(descriptor)
            if callback is not None:  # removed by a callback before it in this very turn
                callback()
