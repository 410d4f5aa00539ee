"""Sweeps: sockets that may be read late are read late, and only while that is worth something."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest
import uvloop

from servers.wire import sweeps
from servers.wire.poller import Poller
from servers.wire.sweeps import Sweeps


class Reader:
    """A pair of sockets, one of which a Poller reads; how much came at each read, and whether it may have waited."""

    def __init__(self, watched: Poller) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.reads: list[tuple[int, bool]] = []
        self._poller = watched
        watched.add(self.ours, self._read)

    def _read(self) -> None:
        data = self.ours.recv(65_536)
        self.reads.append((len(data), self._poller.late))
        self._poller.most = max(self._poller.most, len(data))

    def close(self) -> None:
        self._poller.remove(self.ours)
        self.ours.close()
        self.theirs.close()


@contextmanager
def read_by(watched: Poller) -> Iterator[Reader]:
    reader = Reader(watched)
    try:
        yield reader
    finally:
        reader.close()
        watched.close()


async def said(reader: Reader, size: int = 10, for_s: float = 0.5) -> list[tuple[int, bool]]:
    """Send a little every millisecond; the reads of the second half, when the pace has been found."""
    end = monotonic() + for_s
    reader.reads.clear()
    while (left := end - monotonic()) > 0:
        reader.theirs.send(bytes(size))
        if left > for_s / 2:
            reader.reads.clear()
        await asyncio.sleep(0.001)
    return reader.reads


def test_reads_are_put_off_while_they_take_much_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the share that is allowed sweeps are farther apart, and several pieces come in one read; below the least
    they are closer again, until everything is read at once."""
    share = 1.0
    monkeypatch.setattr(sweeps, "wanted_ns", lambda: round(share * sweeps.time.monotonic_ns()))

    async def held() -> None:
        nonlocal share
        pace = Sweeps(0.05, busy=0.4)
        watched = Poller(asyncio.get_running_loop(), pace)
        with read_by(watched) as reader:
            assert max(size for size, _ in await said(reader)) > 10 * 5
            assert 0 < pace.widest_ns() <= 50_000_000
            assert any(late for _, late in reader.reads)
            share = 0.0
            await said(reader, for_s=1.0)
            pace.widest_ns()
            assert pace.widest_ns() == 0

    uvloop.run(held())


def test_a_socket_that_holds_much_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the process: what waits must never fill a receive buffer."""
    monkeypatch.setattr(sweeps, "wanted_ns", sweeps.time.monotonic_ns)

    async def held() -> None:
        watched = Poller(asyncio.get_running_loop(), Sweeps(0.2, busy=0.4))
        with read_by(watched) as reader:
            most = 4 * reader.ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // sweeps.SWEPT_SHARE
            assert max(size for size, _ in await said(reader, 4000, 1.0)) < most

    uvloop.run(held())


def test_a_long_pause_ends_when_less_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then answers may have ended; while as much comes as before, the pause goes on."""
    monkeypatch.setattr(sweeps, "wanted_ns", sweeps.time.monotonic_ns)
    monkeypatch.setattr(sweeps, "SWEEP_S_LEAST", 5.0)
    ebbing = [False, False, True]

    async def held() -> None:
        watched = Poller(asyncio.get_running_loop(), Sweeps(5.0, busy=0.4, ebbs=lambda: ebbing.pop(0)))
        with read_by(watched) as reader:
            await said(reader, for_s=0.2)
            paused = monotonic()
            while ebbing:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert 2 * sweeps.EBB_S < monotonic() - paused < 5.0
            assert [late for _, late in reader.reads] == [True]

    uvloop.run(held())


def test_without_leave_everything_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stamps depend on reads nothing is put off."""
    monkeypatch.setattr(sweeps, "wanted_ns", sweeps.time.monotonic_ns)

    async def held() -> None:
        watched = Poller(asyncio.get_running_loop())
        with read_by(watched) as reader:
            await said(reader, for_s=0.2)
            assert len(reader.reads) > 10

    uvloop.run(held())
