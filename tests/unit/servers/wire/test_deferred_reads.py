"""Sweeps: sockets that may be read late are read late, and only while that is worth something."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest
import uvloop

from loadgen.servers.wire import deferred_reads as sweeps
from loadgen.servers.wire import poller
from loadgen.servers.wire.deferred_reads import ReadPacer
from loadgen.servers.wire.poller import Poller


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
        self._poller.largest_read = max(self._poller.largest_read, len(data))

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
    monkeypatch.setattr(sweeps, "core_demand_ns", lambda: round(share * sweeps.time.monotonic_ns()))

    async def held() -> None:
        nonlocal share
        pace = ReadPacer(0.05, busy=0.4)
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
    monkeypatch.setattr(sweeps, "core_demand_ns", sweeps.time.monotonic_ns)

    async def held() -> None:
        watched = Poller(asyncio.get_running_loop(), ReadPacer(0.2, busy=0.4))
        with read_by(watched) as reader:
            most = 4 * reader.ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // sweeps.SWEPT_SHARE
            assert max(size for size, _ in await said(reader, 4000, 1.0)) < most

    uvloop.run(held())


def test_what_all_sockets_hold_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little each of them: it is the system's memory."""
    now, begin = 0, sweeps.time.monotonic_ns()
    monkeypatch.setattr(sweeps, "core_demand_ns", lambda: now)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pace = ReadPacer(4.0, busy=0.4)
        pace.watch(ours)

        def apart_s(total: int) -> float:
            nonlocal now
            now += 2 * sweeps.LOOK_NS
            return pace.next_delay_s(begin + now, 1, total)

        assert [apart_s(1) for _ in range(8)][-1] == 4.0
        assert apart_s(sweeps.SWEPT_BYTES + 1) == 2.0
        assert apart_s(sweeps.SWEPT_BYTES // 2) == 4.0


def test_a_sweep_in_which_streams_end_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when fewer are left than were served, as at a burst's end: none waits for the next sweep, seconds later."""
    monkeypatch.setattr(poller, "EVENTS_PER_TURN", 2)
    served, at_ends = list[int](), list[int]()

    class Once(ReadPacer):
        def next_delay_s(self, *_: int) -> float:
            at_ends.append(len(served))
            return 60.0

    async def held() -> None:
        watched, pairs = Poller(asyncio.get_running_loop(), Once(60.0, busy=0.4)), list[socket.socket]()
        for number in range(8):
            ours, theirs = socket.socketpair()
            pairs += ours, theirs
            theirs.send(b"the end")
            watched.add(ours, lambda ours=ours, number=number: (served.append(number), watched.remove(ours)))
        while not at_ends:
            await asyncio.sleep(0.001)
        watched.close()
        for each in pairs:
            each.close()

    uvloop.run(held())
    assert (sorted(served), at_ends) == ([*range(8)], [8])


def test_windows_are_looked_at_of_few_sockets_while_reads_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those served first in a sweep; of all behind a large read, and in the sweep after it."""
    monkeypatch.setattr(poller, "EVENTS_PER_TURN", 2)
    monkeypatch.setattr(poller, "LATE_NS", -1)

    async def looked_at(*sizes: int) -> list[int]:
        found, watched = list[int](), Poller(asyncio.get_running_loop())
        readers = [Reader(watched) for _ in range(6)]
        for number, size in enumerate(sizes, 1):
            for reader in readers:
                reader.theirs.send(bytes(size))
            while sum(len(reader.reads) for reader in readers) < number * len(readers):
                await asyncio.sleep(0)
            found.append(sum(reader.reads[-1][1] for reader in readers))
        for reader in readers:
            reader.close()
        watched.close()
        return found

    assert uvloop.run(looked_at(10, 10, 2 * poller.LITTLE_BYTES, 10, 10)) == [2, 2, 6, 6, 2]


@pytest.mark.parametrize(
    ("came", "falls"),
    [
        ([10, 10, 10, 10, 10, 7], [5]),
        ([10, 20, 10, 20, 10, 20, 10], []),  # 0.4 s apart, asked four times a second
        ([10, 0, 10, 0, 10, 0, 0, 0, 0], [6]),  # and each 0.5 s
        ([0, 0, 0, 10, 10, 0, 0, 0], [6]),
        ([40, 37, 35, 33, 31, 29, 27], []),
    ],
)
def test_less_comes_than_at_any_time_before(came: list[int], falls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of many streams come in steps, and a step without them is no end; two are one, once."""
    asked = iter(range(0, 10**12, 250_000_000))
    monkeypatch.setattr(sweeps.time, "monotonic_ns", lambda: next(asked))
    ebb, found = sweeps.RateDropDetector(), []
    for each in came:
        ebb.arrived += each
        found.append(ebb.rate_dropped())
    assert [place for place, fell in enumerate(found) if fell] == falls


def test_a_long_pause_ends_when_less_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then answers may have ended; while as much comes as before, the pause goes on."""
    monkeypatch.setattr(sweeps, "core_demand_ns", sweeps.time.monotonic_ns)
    monkeypatch.setattr(sweeps, "MIN_DELAY_S", 5.0)
    ebbing = [False, False, True]

    async def held() -> None:
        watched = Poller(asyncio.get_running_loop(), ReadPacer(5.0, busy=0.4, rate_dropped=lambda: ebbing.pop(0)))
        with read_by(watched) as reader:
            await said(reader, for_s=0.2)
            paused = monotonic()
            while ebbing:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert 2 * sweeps.RATE_CHECK_S < monotonic() - paused < 5.0
            assert [late for _, late in reader.reads] == [True]

    uvloop.run(held())


def test_without_leave_everything_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stamps depend on reads nothing is put off."""
    monkeypatch.setattr(sweeps, "core_demand_ns", sweeps.time.monotonic_ns)

    async def held() -> None:
        watched = Poller(asyncio.get_running_loop())
        with read_by(watched) as reader:
            await said(reader, for_s=0.2)
            assert len(reader.reads) > 10

    uvloop.run(held())
