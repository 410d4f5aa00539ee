"""The driver under a fake clock: every send instant exact, every drop counted, nothing shifted by a slow server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any
from unittest.mock import Mock

import pytest

from loadgen.engine.client_health import LiveCounters
from loadgen.engine.closed_loop import ClosedLoop
from loadgen.engine.driver import BACKLOG, MANY_IN_FLIGHT, TICKS_PER_CHECK, TICKS_PER_SAMPLE, Driver, Recorder
from loadgen.engine.record_buffer import RecordBuffer
from loadgen.engine.request_queue import OpenLoop, ScheduledRequest
from loadgen.servers.wire.timestamps import PLAIN, TimestampSource
from loadgen.workloads import arrivals
from loadgen.workloads.request import Request
from tests.support.dialects import DIALECTS

START_NS = 5_000_000_000
FOREVER_NS = 10**15


class FakeClock:
    """Time that only the test moves. `late_ns` is how late every wake-up comes."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now = 0
        self.late_ns = late_ns
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._asked = 0

    def now_ns(self) -> int:
        return self.now

    def at(self, instant_ns: int, callback: Callable[[], None]) -> None:
        self._asked += 1
        heappush(self._agenda, (instant_ns, self._asked, callback))

    async def play(self, running: asyncio.Task[None]) -> None:
        """Let everything happen in order of time until the run is over."""
        while not running.done():
            for _ in range(8):  # what is due now in the event loop itself
                await asyncio.sleep(0)
            if self._agenda and not running.done():
                instant_ns, _, callback = heappop(self._agenda)
                self.now = max(self.now, instant_ns + self.late_ns)
                callback()


@dataclass
class FakeNet:
    """Connections that are always there, and exchanges that end `answer_ns` after they were sent."""

    clock: FakeClock
    answer_ns: int
    sends: list[tuple[int, int]] = field(default_factory=list)
    """(request id, instant after the start) of every send."""
    open_now: int = 0
    open_most: int = 0
    use: str = "pooled"

    async def fill(self) -> None:
        """See Pool."""

    def take(self) -> Any:
        return FakeConnection()

    def put(self, connection: Any) -> None:
        """See Pool."""

    def top_up(self) -> None:
        """See Pool."""

    def exchange(self, on_end: Callable[[Any], None]) -> Any:
        return FakeExchange(self, on_end)


class FakeConnection:
    """A connection without a socket."""

    opened_ns = 0
    reused = False

    def seal(self, request: bytes) -> bytes:
        return request

    def closed_by_peer(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to close."""


class FakeExchange:
    """Ends by the clock; what it carries is an error, so that nothing need be decoded."""

    window_checks = full_windows = size = 0
    dialect = None
    min_rtt_us = None
    address = ""

    def __init__(self, net: FakeNet, on_end: Callable[[Any], None]) -> None:
        self.net, self._on_end = net, on_end
        self.connection: Any = None
        self.reusable_connection: Any = None
        self.error_kind = self.error_detail = ""
        self.sent_ns: int | None = None
        self.sent_end_ns = self.ended_at_ns = None
        self.sizes: list[int] = []
        self.read_ends: list[int] = []
        self.framing = type("Head", (), {"status": None})()

    def prepare(self, connection: Any, sealed: bytes) -> None:
        self.connection, self._id = connection, int(sealed)

    def send(self, *others: FakeExchange) -> None:
        net = self.net
        for each in (self, *others):
            each.sent_ns = net.clock.now
            net.sends.append((each._id, net.clock.now - START_NS))
            net.open_now += 1
            net.open_most = max(net.open_most, net.open_now)
            net.clock.at(net.clock.now + net.answer_ns, each._end)

    def listen(self) -> None:
        """Ends by itself."""

    def give_up(self, kind: str, detail: str) -> None:
        self.error_kind, self.error_detail = kind, detail
        self._end()

    def _end(self) -> None:
        if self.connection is not None:
            self.net.open_now -= 1
            self.connection, self.reusable_connection = None, self.connection
            self._on_end(self)


def slots(due_ns: list[int]) -> list[ScheduledRequest]:
    return [ScheduledRequest(Request(i, "x", 1, 1), str(i).encode(), due) for i, due in enumerate(due_ns)]


async def drive(
    feed: Any,
    clock: FakeClock,
    answer_ns: int,
    in_flight: int = 10**6,
    *,
    queues: bool = False,
    patience_s: float = 20,
) -> tuple[FakeNet, RecordBuffer, LiveCounters]:
    net, held, counts = FakeNet(clock, answer_ns), RecordBuffer(), LiveCounters()
    recorder = Recorder(DIALECTS["tgi", "generate"], held, 0, counts, PLAIN)
    limits = {"timeout_s": FOREVER_NS / 1e9, "in_flight_max": in_flight, "queues": queues}
    driver = Driver(feed, net, net.exchange, recorder, clock=clock, **limits)  # type: ignore[arg-type]
    await driver.open()
    running = asyncio.create_task(driver.run(START_NS))
    await asyncio.wait_for(clock.play(running), patience_s)
    return net, held, counts


@pytest.mark.parametrize(
    "text",
    ["burst", "burst:7/3s", "constant:40", "poisson:40", "gamma:40,cv=3", "ramp:1..90/5s", "steps:5@2s,60@2s"],
)
@pytest.mark.parametrize("answer_ns", [1_000, 30_000_000_000])
async def test_every_send_is_at_its_due_instant_however_slow_the_server(text: str, answer_ns: int) -> None:
    """Each arrival process: each request goes out exactly when it is due; a slow server shifts nothing."""
    due_ns = list(arrivals.due_instants(arrivals.parse(text), 3, n=100))
    net, held, counts = await drive(OpenLoop(iter(slots(due_ns))), FakeClock(), answer_ns)
    assert net.sends == list(enumerate(due_ns))
    assert sorted(record.due_ns for record in held.records) == due_ns
    assert counts.due == counts.sent == len(due_ns)


def queued_sends(due_ns: list[int], limit: int, answer_ns: int) -> list[int]:
    """Return when each request is sent if at most `limit` are in flight and the others wait in order."""
    sends: list[int] = []
    for index, due in enumerate(due_ns):
        sends.append(max(due, sends[index - limit] + answer_ns if index >= limit else due))
    return sends


@pytest.mark.parametrize("text", ["burst", "burst:7/3s", "constant:40", "poisson:40", "steps:5@2s,60@2s"])
@pytest.mark.parametrize("limit", [1, 4, 99, 100])
@pytest.mark.parametrize("answer_ns", [1_000, 130_000_000, 3_000_000_000])
async def test_requests_beyond_the_concurrency_wait_and_keep_their_due_times(
    text: str, limit: int, answer_ns: int
) -> None:
    """Each waiting request is sent in order when another one ends, and its Record says when it could be sent."""
    due_ns = list(arrivals.due_instants(arrivals.parse(text), 3, n=100))
    net, held, counts = await drive(OpenLoop(iter(slots(due_ns))), FakeClock(), answer_ns, limit, queues=True)
    expected = queued_sends(due_ns, limit, answer_ns)
    assert net.sends == list(enumerate(expected))
    assert net.open_most <= limit
    records = sorted(held.records, key=lambda record: record.id)
    assert [record.due_ns for record in records] == due_ns
    waited = [None if sent == due else sent for due, sent in zip(due_ns, expected, strict=True)]
    assert [record.released_ns for record in records] == waited
    assert not [record for record in records if record.state == "dropped"]
    assert counts.due == counts.sent == len(due_ns)


async def test_an_interrupt_ends_requests_that_wait_for_others() -> None:
    """They are recorded as not sent, and the run ends."""
    held, net = RecordBuffer(), FakeNet(FakeClock(), 10**12)
    recorder = Recorder(DIALECTS["tgi", "generate"], held, 0, LiveCounters(), PLAIN)
    limits: Any = {"timeout_s": FOREVER_NS / 1e9, "in_flight_max": 2, "queues": True}
    driver = Driver(OpenLoop(iter(slots([0] * 9))), net, net.exchange, recorder, clock=net.clock, **limits)  # type: ignore[arg-type]
    await driver.open()
    net.clock.at(START_NS + 1000, driver.interrupt)
    await asyncio.wait_for(net.clock.play(asyncio.create_task(driver.run(START_NS))), 20)
    assert [request for request, _ in net.sends] == [0, 1]
    assert Counter(record.error_kind for record in held.records) == {"cancelled": 9}


async def test_requests_that_are_dropped_before_the_start_do_not_end_the_run() -> None:
    """The first group is taken later, when the connections are open, and is sent and recorded."""
    held, net = RecordBuffer(), FakeNet(FakeClock(), 1_000)
    recorder = Recorder(DIALECTS["tgi", "generate"], held, 0, LiveCounters(), PLAIN)
    limits: Any = {"timeout_s": FOREVER_NS / 1e9, "in_flight_max": None}
    feed = ClosedLoop(iter(slots([20] * 9)), clients=3)
    driver = Driver(feed, net, net.exchange, recorder, clock=net.clock, **limits)  # type: ignore[arg-type]
    driver.drop_thinking()
    await driver.open()
    await asyncio.wait_for(net.clock.play(asyncio.create_task(driver.run(START_NS))), 20)
    assert len(net.sends) == len(held.records) == 9


async def test_late_wake_ups_make_requests_late_and_never_shift_the_plan() -> None:
    """A client that wakes 3 ms late sends each request 3 ms after it was due, not later and later."""
    due_ns = [index * 10_000_000 for index in range(50)]
    net, held, _ = await drive(OpenLoop(iter(slots(due_ns))), FakeClock(late_ns=3_000_000), 1_000)
    assert net.sends == [(index, due + 3_000_000) for index, due in enumerate(due_ns)]
    assert [record.due_ns for record in sorted(held.records, key=lambda record: record.id)] == due_ns


async def test_past_the_limit_in_flight_requests_are_dropped_and_recorded() -> None:
    """Ten a second, answers of one second, three at a time: the others are dropped when due, and counted."""
    due_ns = [index * 100_000_000 for index in range(40)]
    net, held, counts = await drive(OpenLoop(iter(slots(due_ns))), FakeClock(), 1_000_000_000, in_flight=3)
    dropped = [record for record in held.records if record.state == "dropped"]
    assert net.open_most == 3
    assert len(dropped) == counts.dropped == 40 - len(net.sends) > 20
    assert all(record.sent_ns is None and record.error_kind == "dropped" for record in dropped)
    assert sorted(record.id for record in held.records) == list(range(40))


async def test_a_closed_loop_sends_on_the_end_of_an_answer_and_a_think_time() -> None:
    """Three clients, answers of 200 ms, 50 ms of thinking: each client sends every 250 ms."""
    feed = ClosedLoop(iter(slots([0] * 12)), clients=3, think_ns=50_000_000)
    net, held, _ = await drive(feed, FakeClock(), 200_000_000)
    assert [sent for _, sent in net.sends] == [turn * 250_000_000 for turn in range(4) for _ in range(3)]
    assert net.open_most == 3
    assert sorted(record.due_ns for record in held.records) == [sent for _, sent in net.sends]


async def test_waiting_requests_are_found_without_comparing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests compare by identity, so the cost of a send does not grow with the number of waiting clients."""
    first, second = slots([0])[0], slots([0])[0]
    assert first != second
    assert len({first, second}) == 2
    feed = ClosedLoop(iter(slots([0] * 60)), clients=20, think_ns=50_000_000)
    compared = Mock(return_value=False)
    monkeypatch.setattr(ScheduledRequest, "__eq__", compared, raising=False)
    monkeypatch.setattr(ScheduledRequest, "__hash__", object.__hash__, raising=False)
    net, _, _ = await drive(feed, FakeClock(), 200_000_000)
    assert len(net.sends) == 60
    compared.assert_not_called()


async def test_a_closed_loop_ends_with_its_duration() -> None:
    """Nothing is due at or after the end; what is in flight is finished."""
    feed = ClosedLoop(iter(slots([0] * 1000)), clients=2, think_ns=0, until_ns=1_000_000_000)
    net, held, _ = await drive(feed, FakeClock(), 300_000_000)
    assert [sent for _, sent in net.sends] == [turn * 300_000_000 for turn in range(4) for _ in range(2)]
    assert len(held.records) == 8


async def test_answers_that_end_together_are_followed_by_slots_drawn_before() -> None:
    """As many are drawn ahead as there are clients, one more for each that is recorded, and none past the last: what an
    end makes due is there already."""
    drawn, at_sends = list[int](), list[int]()

    def drawing() -> Iterator[ScheduledRequest]:
        for slot in slots([0] * 12):
            drawn.append(slot.request.id)
            yield slot

    feed = ClosedLoop(drawing(), clients=3)
    after_end = feed.next_after_completion
    feed.next_after_completion = lambda ended_ns: (at_sends.append(len(drawn)), after_end(ended_ns))[1]  # type: ignore[method-assign]
    _, held, _ = await drive(feed, FakeClock(), 200_000_000)
    assert all(seen >= min(12, 4 + ended) for ended, seen in enumerate(at_sends))
    assert (at_sends[0], len(at_sends)) == (6, 12)
    assert (len(drawn), len(held.records)) == (12, 12)


def test_a_slot_that_was_not_drawn_ahead_is_drawn_when_it_is_due() -> None:
    """Ends that outrun what is recorded lose no request."""
    feed = ClosedLoop(iter(slots([0] * 12)), clients=3)
    taken = [*feed.group(), *iter(lambda: feed.next_after_completion(0), None)]
    assert [slot.request.id for slot in taken if slot is not None] == list(range(12))


@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
@pytest.mark.parametrize(("closed", "drawable"), [(False, 3), (True, 5)])
def test_drawing_ahead_ends_with_the_next_group_and_changes_nothing(ahead: int, *, closed: bool, drawable: int) -> None:
    """Three are due at once and two later; a closed loop of three has as many more drawn."""
    planned = slots([0, 0, 0, 5, 5])
    feed = ClosedLoop(iter(planned), clients=3) if closed else OpenLoop(iter(planned))
    before = int(closed)  # of a closed loop one is drawn to know whether there is any
    assert [feed.draw() for _ in range(ahead)] == [place < drawable - before for place in range(ahead)]
    assert feed.more
    assert feed.group() == planned[:3]
    if not closed:
        assert [feed.draw() for _ in range(3)] == [True, True, False]
        assert feed.more
        assert feed.group() == planned[3:]
        assert not feed.more


@pytest.mark.parametrize("at_once", [4, BACKLOG])
async def test_what_has_ended_does_not_pile_up(at_once: int) -> None:
    """Several ends per turn of the loop for a long time: past BACKLOG as many are recorded as end."""
    held = RecordBuffer()
    recorder = Recorder(DIALECTS["tgi", "generate"], held, 0, LiveCounters(), PLAIN)
    waiting_when_idle: list[int] = []
    recorder.on_idle = lambda: waiting_when_idle.append(len(recorder.ended))
    recorder.on_record = Mock()
    for turn in range(12_000 // at_once):
        for place in range(at_once):
            recorder.take(
                ScheduledRequest(Request(at_once * turn + place, "text", 5, 3), b"", 0), None, "cancelled", ""
            )
        await asyncio.sleep(0)
        assert len(recorder.ended) <= 2 * BACKLOG
    while recorder.ended:
        await asyncio.sleep(0)
    assert [record.id for record in held.records] == list(range(12_000 // at_once * at_once))
    # A pause of the process may leave time to record everything before the end, too.
    assert set(waiting_when_idle) == {0}


@pytest.mark.parametrize(("under_way", "counted"), [(MANY_IN_FLIGHT, 8), (MANY_IN_FLIGHT + 1, 2)])
async def test_many_answers_under_way_are_counted_once_a_second(under_way: int, counted: int) -> None:
    """Fewer of them four times; the stamps that have come are taken each time."""
    recorder, net = Mock(), FakeNet(FakeClock(), 1)
    limits: Any = {"timeout_s": 60.0, "in_flight_max": under_way}
    driver = Driver(Mock(more=False, closed=False), Mock(), Mock(), recorder, clock=net.clock, **limits)  # type: ignore[arg-type]
    driver._in_flight = {FakeExchange(net, Mock()): Mock() for _ in range(under_way)}  # type: ignore[misc]
    for ticks in range(1, 2 * TICKS_PER_SAMPLE + 1):
        driver._tick(ticks, 0)
        driver._ticking.cancel()
    looks = [call.kwargs["counts"] for call in recorder.watch.call_args_list]
    assert (len(looks), looks.count(True)) == (2 * TICKS_PER_SAMPLE // TICKS_PER_CHECK, counted)


class LateStamps(TimestampSource):
    """Knows of an exchange when it is asked for the third time."""

    asked = 0

    def ready(self, received: object) -> bool:  # noqa: ARG002 - as a StampSource
        self.asked += 1
        return self.asked > 2


async def test_what_waits_for_its_stamps_is_recorded_once_and_in_order() -> None:
    """Only the first is asked for, again and again; those behind it come after it, and then there is quiet."""
    held, stamps = RecordBuffer(), LateStamps()
    recorder = Recorder(DIALECTS["tgi", "generate"], held, 0, LiveCounters(), stamps)
    idle = recorder.on_idle = Mock()
    recorder.on_record = Mock()
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    exchange = FakeExchange(FakeNet(FakeClock(), 1), Mock())
    recorder.take(ScheduledRequest(Request(0, "text", 5, 3), b"", 0), exchange)
    for number in range(1, 4):
        recorder.take(ScheduledRequest(Request(number, "text", 5, 3), b"", 0), None, "cancelled", "")
    exchange.sizes.append(100)
    exchange.size = 100
    recorder._rate.sample(tokens=1, byte_count=100)
    recorder.watch(set())
    assert (recorder.counts.streaming, recorder.counts.tokens) == (0, 1)  # of what has ended nothing is forgotten
    exchange.sizes.clear()
    async with asyncio.timeout(60):
        while not idle.called:
            await asyncio.sleep(0.001)
    assert [record.id for record in held.records] == [0, 1, 2, 3]
    assert (stamps.asked, failures) == (3, [])
    idle.assert_called_once()
