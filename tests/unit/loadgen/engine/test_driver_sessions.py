"""Sessions under the fake clock: each turn exactly a think time after its answer, and every turn accounted for."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.engine.closed_loop import ClosedLoop, SessionQueue, Turns
from loadgen.engine.request_queue import OpenLoop, ScheduledRequest
from loadgen.workloads.sessions import Conversation, Turn
from tests.unit.loadgen.engine.test_driver import FakeClock, FakeExchange, FakeNet, drive

ANSWER_NS = 200_000_000
THINK_NS = 50_000_000
STEP_NS = ANSWER_NS + THINK_NS


class Answering(FakeExchange):
    """Ends with a TGI stream that says which request it answers; ids in `cut` end without their last event."""

    cut: frozenset[int] = frozenset()

    def _end(self) -> None:
        event = {"token": {"id": 1, "text": "x"}, "generated_text": f"<{self._id}>", "details": {"generated_tokens": 1}}
        payload = b"" if self._id in self.cut else b"data:" + msgspec.json.encode(event) + b"\n\n"
        self.raw = payload
        self.sizes, self.kernel_timespecs = [max(1, len(payload))], array("q", [0, 0]).tobytes()
        self.user_ns = array("q", [self.net.clock.now])
        self.losses = (0, 0)
        bounds = array("q", (0, len(payload)))
        framed = SimpleNamespace(status=200, coding="", ended=True, events=False, body_bounds=lambda _raw: bounds)
        self.framing = framed  # type: ignore[assignment]
        super()._end()


def sessions(turns: list[int]) -> list[Conversation]:
    """Of so many turns each; request ids run on from one to the next."""
    firsts = accumulate(turns, initial=0)
    return [Conversation(first, (Turn("q", 1, 1),) * k, THINK_NS) for first, k in zip(firsts, turns, strict=False)]


def slot_of(conversation: Conversation, due_ns: int) -> ScheduledRequest:
    request = conversation.request()
    return ScheduledRequest(request, str(request.id).encode(), due_ns, conversation=conversation)


async def run(
    starts: Callable[[Any], OpenLoop | ClosedLoop],
    given: list[tuple[Conversation, int]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    cut: frozenset[int] = frozenset(),
    in_flight: int = 10**6,
) -> tuple[FakeNet, dict[int, Any], dict[int, str], Any]:
    """Sends, Records by id, the prompts sent by id, counts."""
    prompts: dict[int, str] = {}

    def noted(conversation: Conversation, due_ns: int) -> ScheduledRequest:
        slot = slot_of(conversation, due_ns)
        prompts[slot.request.id] = str(slot.request.prompt)
        return slot

    def exchange(net: FakeNet, on_end: Callable[[Any], None]) -> Answering:
        return Answering(net, on_end)

    monkeypatch.setattr(FakeNet, "exchange", exchange)
    monkeypatch.setattr(Answering, "cut", cut)
    feed = SessionQueue(starts(noted(conversation, due) for conversation, due in given), Turns(noted))
    net, held, counts = await drive(feed, FakeClock(), ANSWER_NS, in_flight)
    records = {record.id: record for record in held.records}
    assert len(records) == len(held.records) == counts.due == sum(len(one.turns) for one, _ in given)
    return net, records, prompts, counts


async def test_each_turn_is_sent_a_think_time_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open loop: sessions start as the arrivals say, and their turns follow the answers, word for word."""
    dues = [0, 100_000_000, 130_000_000]
    given = list(zip(sessions([3, 1, 2]), dues, strict=True))
    net, records, prompts, _ = await run(OpenLoop, given, monkeypatch)
    assert dict(net.sends) == {0: 0, 1: STEP_NS, 2: 2 * STEP_NS, 3: dues[1], 4: dues[2], 5: dues[2] + STEP_NS}
    assert {number: record.due_ns for number, record in records.items()} == dict(net.sends)
    assert prompts[2] == "q<0>\nq<1>\nq"
    assert [(records[i].session, records[i].turn) for i in range(6)] == [(0, 0), (0, 1), (0, 2), (3, 0), (4, 0), (4, 1)]
    assert {record.state for record in records.values()} == {"complete"}


async def test_a_client_of_a_closed_loop_runs_one_session_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients, sessions of two turns: at most two in flight, and the next session starts when one has ended."""
    given = [(one, 0) for one in sessions([2, 2, 2, 2])]
    net, _, _, _ = await run(lambda slots: ClosedLoop(slots, clients=2), given, monkeypatch)
    assert net.open_most == 2
    second = STEP_NS + ANSWER_NS
    assert dict(net.sends) == dict(enumerate([0, STEP_NS, 0, STEP_NS] + [second, second + STEP_NS] * 2))


async def test_a_turn_that_fails_ends_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns after it are not sent; each has a Record that says why, and the closed loop goes on."""
    given = [(one, 0) for one in sessions([3, 2])]
    net, records, _, counts = await run(
        lambda slots: ClosedLoop(slots, clients=1), given, monkeypatch, cut=frozenset({1})
    )
    assert [number for number, _ in net.sends] == [0, 1, 3, 4]
    assert (records[2].state, records[2].error_kind, records[2].sent_ns) == ("dropped", "session_ended", None)
    assert "turn 1 of its session was" in records[2].error_detail
    assert counts.dropped == 1


async def test_a_dropped_turn_ends_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the limit in flight a session does not start, and none of its turns is lost without a word."""
    given = [(one, 0) for one in sessions([2, 2])]
    _, records, _, _ = await run(OpenLoop, given, monkeypatch, in_flight=1)
    assert [records[i].error_kind for i in range(4)] == ["", "", "dropped", "session_ended"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_a_feed_gives_every_turn_once_and_in_order(turns: list[int], clients: int, data: st.DataObject) -> None:
    """Whatever order answers come in: each turn once, each after the one before, `more` until the last has ended."""
    later_turns = Turns(slot_of)
    feed = SessionQueue(ClosedLoop((slot_of(one, 0) for one in sessions(turns)), clients), later_turns)
    open_slots, seen, now = feed.group(), [], 0
    while open_slots:
        assert feed.more
        now += 1
        slot = open_slots.pop(data.draw(st.integers(0, len(open_slots) - 1)))
        seen.append((slot.request.session, slot.request.turn))
        assert slot.conversation is not None
        following = later_turns.next_turn(slot.conversation, "a", now)
        if following is None:
            following = feed.next_after_completion(now)
        else:
            assert following.due_ns == now + THINK_NS
        open_slots += [following] if following else []
        assert len(open_slots) <= clients
    assert not feed.more
    assert len(set(seen)) == len(seen) == sum(turns)
    assert all((session, turn - 1) in seen[:place] for place, (session, turn) in enumerate(seen) if turn)
