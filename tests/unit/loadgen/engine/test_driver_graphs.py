"""Sessions that are graphs, under the fake clock: every request at its due time, and every request accounted for."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from loadgen.engine.closed_loop import ClosedLoop, GraphRequests, SessionQueue
from loadgen.engine.request_queue import OpenLoop, ScheduledRequest
from loadgen.engine.session_progress import SessionProgress
from loadgen.workloads.session_graph import DraftNode, SessionGraph, graph_of
from tests.unit.loadgen.engine.test_driver import FakeClock, FakeNet, drive
from tests.unit.loadgen.engine.test_driver_sessions import Answering

ANSWER_NS = 200_000_000
MS = 1_000_000
After = list[tuple[str, Any, int]]


def graph(first_id: int, nodes: dict[str, After], **fields: Any) -> SessionGraph:
    """Return a graph of these nodes, whose prompts are their names."""
    drafts = [DraftNode(name, after, 1, output_tokens=1, input_tokens=1, **fields) for name, after in nodes.items()]
    recorded = graph_of("s", 0, drafts, "file")
    return SessionGraph(
        first_id, "s", recorded.nodes, (1,) * len(nodes), lambda number, _tokens, _shared=(): f"q{number}"
    )


def answering(net: FakeNet, on_end: Callable[[Any], None]) -> Answering:
    return Answering(net, on_end)


def slot_of(progress: SessionProgress, node: int, due_ns: int) -> ScheduledRequest:
    request = progress.request(node)
    payload = str(request.id).encode()
    return ScheduledRequest(
        request, payload, due_ns, progress=progress, node=node, starts_others=progress.starts_others(node)
    )


async def run(
    graphs: Sequence[SessionGraph],
    dues: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    clients: int = 0,
    cut: frozenset[int] = frozenset(),
    note: Callable[[ScheduledRequest], object] = lambda _: None,
) -> tuple[dict[int, int], dict[int, Any], FakeNet]:
    """Return the send times by request id, the Records by id, and the net."""

    def noted(progress: SessionProgress, node: int, due_ns: int) -> ScheduledRequest:
        slot = slot_of(progress, node, due_ns)
        note(slot)
        return slot

    monkeypatch.setattr(FakeNet, "exchange", answering)
    monkeypatch.setattr(Answering, "cut", cut)
    slots = (noted(SessionProgress(one), 0, due_ns) for one, due_ns in zip(graphs, dues, strict=True))
    starts = ClosedLoop(slots, clients) if clients else OpenLoop(slots)
    net, kept, counts = await drive(SessionQueue(starts, GraphRequests(noted)), FakeClock(), ANSWER_NS, patience_s=200)
    records = {record.id: record for record in kept.records}
    assert len(records) == len(kept.records) == counts.due == sum(len(one.nodes) for one in graphs)
    return dict(net.sends), records, net


async def test_requests_follow_ends_and_starts_with_their_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with several conditions is due when the last one is met."""
    nodes: dict[str, After] = {
        "plan": [],
        "search": [("plan", "end", 30 * MS)],
        "watch": [("plan", "start", 50 * MS)],
        "answer": [("search", "end", 10 * MS), ("watch", "end", 500 * MS)],
    }
    sends, records, _ = await run([graph(0, nodes)], [7 * MS], monkeypatch)
    assert sends == {0: 7 * MS, 1: 237 * MS, 2: 57 * MS, 3: 757 * MS}
    assert {number: record.due_ns for number, record in records.items()} == sends
    assert [(edge.id, edge.after, edge.delay_ns) for edge in records[3].parents] == [
        (1, "end", 10 * MS),
        (2, "end", 500 * MS),
    ]
    assert [records[number].turn for number in range(4)] == [0, 1, 1, 2]


async def test_a_failed_request_drops_its_descendants_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dropped request has a Record that names the reason. Another branch and the next session go on."""
    nodes: dict[str, After] = {
        "plan": [],
        "bad": [("plan", "end", 0)],
        "good": [("plan", "end", 0)],
        "join": [("bad", "end", 0), ("good", "end", 0)],
        "last": [("join", "end", 0)],
    }
    graphs = [graph(0, nodes), graph(5, {"only": []})]
    sends, records, _ = await run(graphs, [0, 0], monkeypatch, clients=1, cut=frozenset({1}))
    assert sorted(sends) == [0, 1, 2, 5]
    assert [records[number].error_kind for number in (3, 4)] == ["session_ended"] * 2
    assert "request 1 of its session was truncated" in records[3].error_detail
    assert sends[5] == 2 * ANSWER_NS


async def test_prompts_contain_the_answers_of_their_own_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inherited and forked histories hold every message and answer on the way, and fresh prompts hold none."""
    drafts = [
        DraftNode("plan", [], 1, input_tokens=1),
        DraftNode("left", [("plan", "end", 0)], 1, history="inherited", input_tokens=1),
        DraftNode("right", [("plan", "end", 0)], 1, history="forked", input_tokens=1),
        DraftNode("leaf", [("right", "end", 0), ("left", "end", 0)], 1, history="inherited", input_tokens=1),
        DraftNode("fresh", [("leaf", "end", 0)], 1, input_tokens=1),
    ]
    nodes = graph_of("s", 0, drafts, "file").nodes
    one = SessionGraph(0, "s", nodes, (1,) * 5, lambda number, _tokens, _shared=(): f"q{number}")
    prompts: dict[int, str] = {}
    await run([one], [0], monkeypatch, note=lambda slot: prompts.update({slot.request.id: str(slot.request.prompt)}))
    assert prompts == {
        0: "q0",
        1: "q0\n<0>\nq1",
        2: "q0\n<0>\nq2",
        3: "q0\n<0>\nq2\n<2>\nq3",
        4: "q4",
    }


async def test_ten_thousand_nodes_with_fan_out_and_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fan-out 8, and a join of every 8 requests: each is sent when its last parent has ended, plus the delay."""
    nodes: dict[str, After] = {"0": []}
    while len(nodes) < 9_992:
        root = f"{len(nodes) - 1}"
        leaves = [f"{len(nodes) + index}" for index in range(8)]
        nodes |= {leaf: [(root, "end", index * MS)] for index, leaf in enumerate(leaves)}
        nodes[f"{len(nodes)}"] = [(leaf, "end", 3 * MS) for leaf in leaves]
    nodes |= {f"{number}": [("0", "start", number)] for number in range(len(nodes), 10_000)}
    sends, records, net = await run([graph(0, nodes)], [0], monkeypatch)
    expected: list[int] = []
    for after in nodes.values():
        times = [expected[int(parent)] + (ANSWER_NS if on == "end" else 0) + delay for parent, on, delay in after]
        expected.append(max(times, default=0))
    assert len(sends) == 10_000
    assert sends == dict(enumerate(expected))
    assert {record.state for record in records.values()} == {"complete"}
    assert net.open_most <= 16


async def test_memory_follows_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty times the sessions, one at a time, take hardly more memory for sessions that have ended."""

    async def peak(count: int) -> int:
        nodes: dict[str, After] = {"0": []} | {f"{i}": [(f"{i - 1}", "end", 0)] for i in range(1, 50)}
        progress: list[int] = []

        def sessions() -> Any:
            for number in range(count):
                progress.append(tracemalloc.get_traced_memory()[0])
                yield slot_of(SessionProgress(graph(50 * number, nodes, body={"x": "y" * 1000})), 0, 0)

        monkeypatch.setattr(FakeNet, "exchange", answering)
        tracemalloc.start()
        queue = SessionQueue(ClosedLoop(sessions(), 1), GraphRequests(slot_of))
        await drive(queue, FakeClock(), ANSWER_NS, patience_s=200)
        tracemalloc.stop()
        return max(after - before for before, after in pairwise(progress[2:]))

    assert await peak(20) < 1_000_000
