"""What the master makes of its worker machines, told by a link that says what a test has it say."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from loadgen.analysis.run.runfile import Header
from loadgen.distributed import DistributedError, TokenError, master, protocol
from loadgen.distributed.master import MachinePlan, Master
from loadgen.distributed.protocol import (
    Address,
    Assign,
    Bye,
    ClockSample,
    Hello,
    Joined,
    Listening,
    PeerLost,
    PromptsReady,
    Sealed,
    Unable,
    Wait,
    address_of,
)
from loadgen.engine.telemetry_sampler import Sampler
from loadgen.engine.worker import WorkerTask
from loadgen.plan import Plan
from loadgen.workloads.request import Request

VERSION = master.version("llm-loadgen")
SERVER = {"name": "tgi", "version": "3", "model": "m", "simulated": True, "url": "http://127.0.0.1:9"}


def unheard(*_: object) -> None:
    """Takes what nobody looks at."""


class Script:
    """A link that says these events and keeps what it is told, by node."""

    def __init__(self, *events: protocol.Event) -> None:
        self.events = deque(events)
        self.told: list[tuple[str, Any]] = []

    def available(self, timeout_s: float) -> Iterator[protocol.Event]:  # noqa: ARG002 - never waits
        while self.events:
            yield self.events.popleft()

    def send(self, word: Any, node: str = "") -> None:
        self.told.append((node, word))

    def post(self, order: protocol.ClockSeries) -> None:
        self.events += [protocol.Exchanged(order.node, ClockSample(0, 0, 1)), order]


def heard(node: str, word: protocol.Message) -> Sealed:
    return Sealed(node, msgspec.msgpack.encode(word))


def hello(node: str, name: str = "bench", version: str = VERSION) -> tuple[Joined, Sealed]:
    return Joined(node), heard(node, Hello(version, {"hostname": name}, f"/parts/{node}"))


def task(worker: int) -> Any:
    """A worker's task that sends the byte of its number."""
    dialect = SimpleNamespace(encode=lambda request, _: bytes([request.id]))
    return SimpleNamespace(
        number=worker,
        requests=lambda: iter([Request(worker, "", 0, 1)]),
        dialect=dialect,
        model="m",
        part=Path("/dev/null"),
        id_prefix="",
    )


def master_of(script: Script, workers: int, say: Any = unheard, folder: Path = Path("/nowhere")) -> Master:
    """A master with a place for each worker, that waits for a tenth of a second."""
    header = Header(version="", started_at="", start_ns=0, plan={}, server=SERVER)
    places = [[task(worker)] for worker in range(workers)]
    spread = MachinePlan(workers, Address("127.0.0.1"), 0.1)
    return Master(script, header, places, spread, header.plan, folder, say, unheard)  # type: ignore[arg-type]


def after(*events: protocol.Event) -> tuple[Master, Script, list[str]]:
    """Two places, and what was said after these events."""
    said: list[str] = []
    script = Script(*events)
    found = master_of(script, 2, said.append)
    found.listen()
    return found, script, said


def test_a_machine_that_leaves_before_the_start_is_replaced() -> None:
    """By the one that waited, with the same place; hosts of one name get numbers."""
    events = [event for node in ("a", "b", "c") for event in hello(node)]
    found, script, said = after(Listening(1), *events, PeerLost("a", "it left"))
    assert [machine.node for machine in found.present] == ["c", "b"]
    assert [machine.name for machine in found.present] == ["bench (3)", "bench (2)"]
    assert found.present[0].workers == [0]
    assert ("c", Wait("all 2 places are taken")) in script.told
    assigned = [(node, word.first) for node, word in script.told if isinstance(word, Assign)]
    assert assigned == [("a", 0), ("b", 1), ("c", 0)]
    assert "bench was lost before the start (it left); waiting for another machine" in said


def test_a_machine_with_another_version_is_sent_away() -> None:
    """The same seed gives the same prompts in the same version only."""
    found, script, said = after(Listening(1), *hello("old_1", version="0.0"))
    assert not found.present
    assert script.told == [("old_1", Bye(f"the master is loadgen {VERSION}, and this machine has 0.0", kept=False))]
    assert said == [f"refused old: it has loadgen 0.0, not {VERSION}"]


def test_who_cannot_take_part_calls_the_run_off() -> None:
    """In its own words, with its hint."""
    with pytest.raises(DistributedError, match="bench cannot take part: no key") as raised:
        after(Listening(1), *hello("a"), heard("a", Unable("no key", "export one")))
    assert raised.value.hint == "export one"


def test_a_port_that_is_taken_is_said() -> None:
    """Before anybody could come."""
    with pytest.raises(DistributedError, match="cannot listen: something else"):
        after(PeerLost("", "something else listens there"))


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        (None, "not every machine was ready after 0.1 s"),
        (PromptsReady([b""], SERVER), "draws other prompts from the same seed"),
        (
            PromptsReady([], {**SERVER, "version": "2"}),
            "reaches another server at http://127.0.0.1:9: version 2, not 3",
        ),
    ],
)
def test_machines_have_to_ask_the_same(drawn: PromptsReady | None, said: str, tmp_path: Path) -> None:
    """The same bytes of the same server, in time; otherwise everybody is told that the run is off."""
    events = [Listening(1), *hello("a"), *([] if drawn is None else [heard("a", drawn)])]
    script = Script(*events)
    with pytest.raises(DistributedError, match=said):
        master_of(script, 1, folder=tmp_path).run(Sampler({}))
    node, bye = script.told[-1]
    assert (node, bye.kept, "the run was cancelled" in bye.reason) == ("a", False, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("bind", "token", "said"),
    [
        ("0.0.0.0", "", "without a token the master listens only on this machine"),
        ("127.0.0.1:0", "too-short", "it needs 16 or more"),
    ],
)
def test_strangers_do_not_reach_the_master(
    bind: str, token: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the server is asked anything."""
    monkeypatch.setenv("LOADGEN_TOKEN", token)
    spread = MachinePlan(2, address_of(bind, "--bind", listening=True), 1.0)
    with pytest.raises(TokenError, match=said):
        master.run(
            Plan(server="tgi", n=2),
            spread,
            tmp_path,
            command=[],
            say=unheard,
            on_progress=unheard,
        )


def test_an_address_has_a_host_and_a_port() -> None:
    """The port has a default. Only an address for listening may name every address, or port 0 for any free port."""
    assert address_of("bench-1", "--bind") == Address("bench-1", 5557)
    assert address_of("[::1]:5000", "--master") == Address("[::1]", 5000)
    assert address_of("*:0", "--bind", listening=True) == Address("*", 0)


@pytest.mark.parametrize(
    "text", ["", ":5557", "bench:port", "bench:65536", "127.0.0.1:0", ":0", "*", "a b", "http://bench-1:5557", "b:-1"]
)
def test_other_text_is_no_address_of_a_master(text: str) -> None:
    """A worker must not wait for minutes at an address where no master can be. The message names the option."""
    with pytest.raises(DistributedError, match=re.escape(f"--master {text or repr(text)}: not an address")) as caught:
        address_of(text, "--master")
    assert "HOST:PORT" in caught.value.hint


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({"due_ns": [0, 1, 2]}, 3),  # an open loop: its due instants
        ({"due_ns": [0, 1], "of_sessions": True}, 5),  # of sessions: their turns
        ({"due_ns": None}, 5),  # a closed loop that its requests end
        ({"due_ns": None, "until_ns": 10**9}, 2),  # one that the clock ends: what was due by then
    ],
)
def test_the_rest_of_a_lost_task_counts_where_it_is_known(load: dict[str, Any], expected: int) -> None:
    """Two requests had their turn when the machine was lost, of five that the plan gave it."""
    schedule = SimpleNamespace(due_ns=load["due_ns"], until_ns=load.get("until_ns"))
    prompts = SimpleNamespace(has_sessions=load.get("of_sessions", False), has_graphs=False)
    lost = SimpleNamespace(schedule=schedule, prompts=prompts, requests=lambda: iter(range(5)))
    assert WorkerTask.planned(lost, 2) == expected  # type: ignore[arg-type]


def test_machines_get_the_plan_without_the_settings_of_the_first_class(tmp_path: Path) -> None:
    """The header states the endpoint of the first class. A class without an endpoint must not inherit it elsewhere."""
    traffic = [{"name": "a", "endpoint": "embeddings", "rate": 5}, {"name": "b", "rate": 5}]
    plan = Plan(server="vllm", traffic=traffic, duration_s=1.0)
    header_plan = plan.to_dict() | {"endpoint": "embeddings", "output_tokens": 0}
    assert Plan(**master.plan_of_machines(plan, header_plan)) == plan
