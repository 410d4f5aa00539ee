"""Checks of response texts, and the loop that asks canaries during the load."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadgen.engine.canaries import DELAY_NS, CanaryAsker, CanaryLog, CanaryLoop, CanaryTask, suspect_marks
from loadgen.engine.client_health import LiveCounters
from loadgen.engine.driver import Driver, Recorder
from loadgen.engine.record_buffer import RecordBuffer
from loadgen.engine.request_queue import ScheduledRequest
from loadgen.servers.wire.timestamps import PLAIN
from loadgen.workloads.canaries import build_canaries, canary_request
from loadgen.workloads.request import Request
from tests.support.dialects import DIALECTS
from tests.unit.loadgen.engine.test_driver import FOREVER_NS, FakeClock, FakeNet

PROSE = "The lighthouse stands on a rock. Its lamp turns all night, and ships pass it at a safe distance. "


@pytest.mark.parametrize(
    ("text", "finish_reason", "marks"),
    [
        (PROSE * 2, "stop", set()),
        ("", "length", {"blank_text"}),
        (" \n\t", "length", {"blank_text"}),
        (PROSE + "and so on " * 20, "length", {"looping_text"}),
        (PROSE + "ha" * 60, "length", {"looping_text"}),
        ("no no no no no no", "stop", set()),
        ("-" * 99, "stop", set()),
        ("caf\ufffd", "stop", {"replacement_text"}),
        ('{"name": "A", "age": 3}', "stop", set()),
        ('{"name": "A", "age"', "stop", {"cut_json"}),
        ('{"name": "A", "age"', "length", set()),
        ("[1, 2", "stop", {"cut_json"}),
        ("\ufffd" * 200, "length", {"looping_text", "replacement_text"}),
    ],
)
def test_suspect_texts(text: str, finish_reason: str, marks: set[str]) -> None:
    """Texts that a working server rarely generates are marked. JSON that reached the requested length is not."""
    assert set(suspect_marks(text, finish_reason)) == marks


def test_the_loop_ends_when_it_is_stopped() -> None:
    """Clients continue with the next canary until `stop` is called."""
    (canary,) = build_canaries(1, seed=0)
    slots = (ScheduledRequest(canary_request(canary, serial, {}), b"", 0) for serial in range(100))
    loop = CanaryLoop(slots, 2, think_ns=5)
    assert len(loop.group()) == 2
    following = loop.next_after_completion(10)
    assert following is not None
    assert following.due_ns == 15
    loop.stop()
    assert loop.next_after_completion(20) is None


class SlowNet(FakeNet):
    """Connections that are open once the test sets `filled`."""

    filled: asyncio.Event

    async def fill(self) -> None:
        await self.filled.wait()


def asker_on(net: FakeNet) -> CanaryAsker:
    """Return an asker of two canaries, whose drivers use the connections and the clock of `net`."""
    dialect = DIALECTS["tgi", "generate"]
    log = CanaryLog(dialect)

    def encode(request: Request, due_ns: int) -> ScheduledRequest:
        return ScheduledRequest(request, str(request.id).encode(), due_ns)

    def build_driver(loop: CanaryLoop, _clients: int) -> Driver:
        recorder = Recorder(dialect, RecordBuffer(), 0, LiveCounters(), PLAIN)
        recorder.on_response = log.take
        limits: Any = {"timeout_s": FOREVER_NS / 1e9, "in_flight_max": None}
        return Driver(loop, net, net.exchange, recorder, clock=net.clock, **limits)  # type: ignore[arg-type]

    return CanaryAsker(CanaryTask(build_canaries(2, seed=0), {}), log, encode, build_driver)


async def test_a_load_that_ends_while_connections_are_opened_leaves_no_canaries_for_later() -> None:
    """No canary is asked for the moment `during`, and each one is asked for the moment `after`."""
    net = SlowNet(FakeClock(), 1_000)
    net.filled = asyncio.Event()
    asker = asker_on(net)
    during = asyncio.create_task(asker.ask_during(0))
    await asyncio.sleep(0)
    asker.stop()
    net.filled.set()
    await asyncio.wait_for(during, 20)
    assert net.sends == []
    await asyncio.wait_for(net.clock.play(asyncio.create_task(asker.ask_alone("after"))), 20)
    assert [(canary.number, canary.moment) for canary in asker.log.canaries] == [(0, "after"), (1, "after")]


async def test_a_load_that_ends_before_the_first_canary_ends_the_canaries() -> None:
    """`ask_during` returns at once if the load had ended before it began."""
    net = FakeNet(FakeClock(), 1_000)
    asker = asker_on(net)
    asker.stop()
    await asyncio.wait_for(asker.ask_during(0), 20)
    assert net.sends == []


async def test_no_canary_waits_for_its_turn_after_the_load() -> None:
    """When the load ends, clients that wait before their next canary send it no more, so that they do not delay the
    end of the run."""
    net = FakeNet(FakeClock(), 1_000)
    asker = asker_on(net)
    net.clock.at(DELAY_NS + 2_000, asker.stop)
    await asyncio.wait_for(net.clock.play(asyncio.create_task(asker.ask_during(0))), 20)
    assert len(net.sends) == 2
    assert [canary.moment for canary in asker.log.canaries] == ["during"] * 2
