"""A closed loop and a server that is gone, under the fake clock: no request is dropped, few fail, the run goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from loadgen.engine.back_off import GIVE_UP_NS
from loadgen.engine.balance import InFlightTable, LeastBusy
from loadgen.engine.client_health import LiveCounters
from loadgen.engine.closed_loop import ClosedLoop
from loadgen.engine.driver import Driver, Recorder
from loadgen.engine.record_buffer import RecordBuffer
from loadgen.engine.replica_pools import ReplicaPools
from loadgen.engine.request_queue import OpenLoop
from loadgen.servers.errors import LocalLimitError
from loadgen.servers.target import Target
from loadgen.servers.wire.timestamps import PLAIN
from tests.support.dialects import DIALECTS
from tests.unit.loadgen.engine.test_driver import START_NS, FakeClock, FakeConnection, FakeExchange, FakeNet, slots

MS = 1_000_000
ANSWER_NS = 20 * MS


class Unreliable(FakeNet):
    """Connections have to be opened for each request, which the server refuses while it is `gone`."""

    def __init__(self, clock: FakeClock, gone: Callable[[int], bool]) -> None:
        super().__init__(clock, ANSWER_NS)
        self.closed_by_peer = gone
        self.refused = list[int]()

    def take(self) -> Any:
        return None

    async def open(self) -> Any:
        await asyncio.sleep(0)
        since_start_ns = self.clock.now - START_NS
        if self.closed_by_peer(since_start_ns):
            self.refused.append(since_start_ns)
            raise ConnectionRefusedError(111, "Connection refused")
        return FakeConnection()


class Refusing(FakeExchange):
    """Ends at once with a status, while the server is `gone`."""

    status = 503

    def send(self, *others: FakeExchange) -> None:
        net = self.net
        assert isinstance(net, Proxied)
        for each in (self, *others):
            gone = net.closed_by_peer(net.clock.now - START_NS)
            each.framing.status = self.status if gone else None
            each.sent_ns = net.clock.now
            net.sends.append((each._id, net.clock.now - START_NS))
            net.open_now += 1
            net.open_most = max(net.open_most, net.open_now)
            net.clock.at(net.clock.now + (MS if gone else net.answer_ns), each._end)


class Proxied(FakeNet):
    """A proxy in front of a server: while the server is `gone`, the proxy answers each request with a status."""

    def __init__(self, clock: FakeClock, gone: Callable[[int], bool]) -> None:
        super().__init__(clock, ANSWER_NS)
        self.closed_by_peer = gone

    def exchange(self, on_end: Callable[[Any], None]) -> Any:
        return Refusing(self, on_end)


async def drive(
    feed: Any, net: FakeNet, in_flight_max: int | None = None
) -> tuple[RecordBuffer, LiveCounters, list[int]]:
    """Drive a feed to its end. Return also how long each client waited after a request had failed at once, in ns."""
    held, counts, waits = RecordBuffer(), LiveCounters(), list[int]()
    recorder = Recorder(DIALECTS["tgi", "generate"], held, 0, counts, PLAIN)
    recorder.health.pause = waits.append  # type: ignore[method-assign]
    limits: dict[str, Any] = {"timeout_s": 1e6, "in_flight_max": in_flight_max}
    driver = Driver(feed, net, net.exchange, recorder, clock=net.clock, **limits)  # type: ignore[arg-type]
    await driver.open()
    running = asyncio.create_task(driver.run(START_NS))
    await asyncio.wait_for(net.clock.play(running), 60)
    return held, counts, waits


def outage(begin_ms: int, end_ms: int) -> Callable[[int], bool]:
    """Return a function that says whether an instant after the start is in this outage."""
    return lambda since_start_ns: begin_ms * MS <= since_start_ns < end_ms * MS


async def test_late_connections_do_not_count_twice_against_the_clients() -> None:
    """Every connection is opened late: a closed loop of three drops no request and always has three under way."""
    net = Unreliable(FakeClock(), lambda _: False)
    held, counts, _ = await drive(ClosedLoop(iter(slots([0] * 60)), clients=3), net)
    assert {record.state for record in held.records} == {"failed"}  # answers of the fake net hold nothing
    assert len(net.sends) == counts.sent == counts.due == 60
    assert net.open_most == 3


async def test_late_connections_of_an_open_loop_count_once_against_the_limit() -> None:
    """Two requests at a time, a limit of two, connections opened late: no request is dropped."""
    net = Unreliable(FakeClock(), lambda _: False)
    due_ns = [turn * 30 * MS for turn in range(20) for _ in range(2)]
    held, counts, _ = await drive(OpenLoop(iter(slots(due_ns))), net, in_flight_max=2)
    assert (len(net.sends), counts.dropped, len(held.records)) == (40, 0, 40)


@pytest.mark.parametrize("clients", [1, 8, 50])
@pytest.mark.parametrize("end_ms", [1_000, 10_000])
async def test_an_outage_costs_a_closed_loop_one_request_per_client_and_a_few_tries(clients: int, end_ms: int) -> None:
    """The server refuses connections for a while: the tries are counted, and afterwards every client is busy again."""
    net = Unreliable(FakeClock(), outage(100, end_ms))
    n = 20 * clients
    held, counts, waits = await drive(ClosedLoop(iter(slots([0] * n)), clients), net)
    kinds = Counter(record.error_kind for record in held.records)
    assert len(held.records) == counts.due == n
    assert kinds["dropped"] == 0
    assert len(net.refused) == kinds["connect"] <= clients + 4 + end_ms // 1000
    after = [sent for _, sent in net.sends if sent >= end_ms * MS]
    assert after[0] < (end_ms + 1_000) * MS
    assert net.open_most == clients
    assert len(waits) >= clients
    assert min(waits) >= 50 * MS or clients > 1


async def test_a_replica_that_is_down_gets_few_requests() -> None:
    """`least-busy`: one of two replicas refuses connections. One request per second tries it, and the others are sent
    to the other replica, although the first one never has requests in flight."""
    clock = FakeClock()
    down, up = Unreliable(clock, lambda _: True), Unreliable(clock, lambda _: False)
    target = Target("a.test", 80, "", None, ((2, ("127.0.0.1", 80)),))
    pools: Any = [down, up]
    pool = ReplicaPools(pools, [target, target], LeastBusy(InFlightTable(workers=1, replicas=2), 0))
    requests = slots([turn * 20 * MS for turn in range(200)])
    for slot in requests:
        slot.replica = None
    held, counts = RecordBuffer(), LiveCounters()
    recorder = Recorder(DIALECTS["tgi", "generate"], held, 0, counts, PLAIN)
    limits: Any = {"clock": clock, "timeout_s": 1e6, "in_flight_max": 100}
    driver = Driver(OpenLoop(iter(requests)), pool, up.exchange, recorder, **limits)
    await driver.open()
    await asyncio.wait_for(clock.play(asyncio.create_task(driver.run(START_NS))), 60)
    assert len(held.records) == 200
    assert 3 <= len(down.refused) <= 4  # in 4 s
    assert len(up.sends) == 200 - len(down.refused)


async def test_a_proxy_that_answers_503_counts_as_an_outage_too() -> None:
    """Fast refusals by status are followed by pauses as refused connections are."""
    net = Proxied(FakeClock(), outage(100, 3_000))
    held, _, _ = await drive(ClosedLoop(iter(slots([0] * 400)), clients=8), net)
    refused = [record for record in held.records if record.http_status == 503]
    assert len(held.records) == 400
    assert 8 <= len(refused) <= 16


async def test_a_request_that_is_refused_for_good_is_not_paused_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 400 says that the request is wrong: the next ones follow at once."""
    monkeypatch.setattr(Refusing, "status", 400)
    net = Proxied(FakeClock(), lambda _: True)
    held, _, waits = await drive(ClosedLoop(iter(slots([0] * 400)), clients=8), net)
    assert len(held.records) == 400
    assert net.clock.now - START_NS < 1_000 * MS
    assert waits == []


async def test_a_closed_loop_gives_up_when_the_server_is_gone_for_a_minute() -> None:
    """The rest of a given number of requests is recorded as failed, without being sent."""
    net = Unreliable(FakeClock(), lambda _: True)
    held, counts, _ = await drive(ClosedLoop(iter(slots([0] * 1_000)), clients=8), net)
    assert {(record.state, record.error_kind) for record in held.records} == {("failed", "connect")}
    assert len(held.records) == counts.due == 1_000
    assert len(net.refused) < 100
    assert GIVE_UP_NS <= net.clock.now - START_NS <= GIVE_UP_NS + 2_000 * MS
    not_sent = [record for record in held.records if "every request had failed at once" in record.error_detail]
    assert len(not_sent) == 1_000 - len(net.refused)


class WithoutPorts(FakeNet):
    """This machine has no port for any connection."""

    def take(self) -> Any:
        return None

    async def open(self) -> Any:
        await asyncio.sleep(0)
        raise LocalLimitError(99, "no free local port")


async def test_a_closed_loop_that_gives_up_for_want_of_ports_does_not_blame_the_server() -> None:
    """Every request is `client_limit`, also those that are not tried any more, and the loop pauses between tries."""
    held, counts, _ = await drive(ClosedLoop(iter(slots([0] * 500)), clients=4), WithoutPorts(FakeClock(), ANSWER_NS))
    assert {(record.state, record.error_kind) for record in held.records} == {("failed", "client_limit")}
    assert len(held.records) == counts.due == 500
    tried = [record for record in held.records if record.error_detail == "no free local port"]
    assert 4 <= len(tried) < 100


async def test_a_closed_loop_with_a_duration_tries_until_its_end() -> None:
    """Nothing is due after the end, and no request that was not tried is recorded."""
    net = Unreliable(FakeClock(), lambda _: True)
    feed = ClosedLoop(iter(slots([0] * 10_000)), clients=8, until_ns=5_000 * MS)
    held, counts, _ = await drive(feed, net)
    assert len(held.records) == counts.due == len(net.refused) < 8 + 10
    assert all(record.due_ns < 5_000 * MS for record in held.records)


async def test_an_open_loop_never_pauses() -> None:
    """An outage fails every request that is due in it, and shifts none."""
    net = Unreliable(FakeClock(), outage(100, 400))
    due_ns = [turn * 10 * MS for turn in range(100)]
    held, _, _ = await drive(OpenLoop(iter(slots(due_ns))), net, in_flight_max=100)
    assert len(net.refused) == 30
    assert sorted(record.due_ns for record in held.records) == due_ns
