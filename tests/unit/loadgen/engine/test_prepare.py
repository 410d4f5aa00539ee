"""A plan's arrivals as numbers, and each worker's share."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from loadgen.engine import prepare
from loadgen.engine.prepare import PromptProgress, build_schedule, until_file_ends, with_file_endpoint
from loadgen.engine.resolve_server import max_length
from loadgen.engine.worker import own_prompts
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.workloads.lengths import Fixed, parse
from loadgen.workloads.sessions import MultiTurn
from loadgen.workloads.workload import Prompts, SharedPrefix, Synthetic, WorkloadSpec


@pytest.mark.parametrize(
    ("settings", "count", "clients", "in_flight", "spare", "at_once"),
    [
        ({"n": 1000}, 1000, 0, 1000, 1000, 1000),
        ({"arrivals": "burst:50/2s", "n": 100}, 100, 0, 100, 50, 1),
        ({"arrivals": "constant:20", "duration_s": 10}, 200, 0, 200, 20, 1),
        ({"arrivals": "constant:20", "duration_s": 10, "max_in_flight": 5}, 200, 0, 5, 5, 1),
        ({"arrivals": "constant:20", "duration_s": 10, "concurrency": 5}, 200, 0, 5, 5, 1),
        ({"n": 1000, "arrivals": "burst", "concurrency": 8}, 1000, 0, 8, 8, 8),
        ({"arrivals": "constant:2", "n": 100}, 100, 0, 100, 8, 1),
        ({"arrivals": "closed:16", "n": 100}, 100, 16, 16, 16, 16),
        ({"arrivals": "closed:16", "n": 4}, 4, 4, 4, 4, 4),
        ({"arrivals": "closed:16,think=1s", "duration_s": 5}, None, 16, 16, 16, 16),
    ],
)
def test_what_each_kind_of_arrivals_comes_to(
    settings: dict[str, object], count: int | None, clients: int, in_flight: int, spare: int, at_once: int
) -> None:
    """How many requests, by whom, how many at a time, and how many connections are opened beforehand."""
    load = build_schedule(Plan(server="tgi", **settings))
    got = (load.count, load.clients, load.in_flight, load.spare, load.at_once)
    assert got == (count, clients, in_flight, spare, at_once)


def test_each_worker_needs_a_share_of_the_concurrency() -> None:
    """A worker that may send nothing would wait forever."""
    plan = Plan(server="tgi", rate=20, concurrency=5, n=100, workers=3)
    schedule = build_schedule(plan)
    shares = [schedule.share_for(worker, 3) for worker in range(3)]
    assert [share.in_flight for share in shares] == [2, 2, 1]
    assert all(share.queues for share in shares)
    with pytest.raises(PlanError, match="6 workers cannot share --concurrency 5"):
        build_schedule(plan.replaced(workers=6))
    closed_loop = Plan(server="tgi", concurrency=2, n=100, workers=2)
    assert build_schedule(closed_loop).clients == 2
    with pytest.raises(PlanError, match="4 workers cannot share --concurrency 2") as refusal:
        build_schedule(closed_loop.replaced(workers=4))
    assert refusal.value.hint == "Use --workers 2 or fewer. Workers on all machines count together."


def test_due_instants_are_those_of_the_arrivals() -> None:
    """Nothing is due at or after the duration."""
    load = build_schedule(Plan(server="tgi", arrivals="constant:4", duration_s=1))
    assert list(load.due_ns or ()) == [0, 250_000_000, 500_000_000, 750_000_000]


def test_parts_add_up_to_the_whole() -> None:
    """Whatever the number of workers, nothing is lost and nothing dealt twice."""
    for clients in range(1, 12):
        whole = build_schedule(Plan(server="tgi", arrivals=f"closed:{clients}", n=100))
        for workers in range(1, 5):
            parts = [whole.share_for(worker, workers) for worker in range(workers)]
            assert sum(part.clients for part in parts) == sum(part.spare for part in parts) == clients
            assert sum(part.count or 0 for part in parts) == 100


def test_the_longest_length_is_known_where_it_can_be() -> None:
    """Fixed and uniform lengths have a longest; of others nothing can be checked beforehand."""
    assert [max_length(text) for text in (512, "uniform:10..90", "lognormal:mean=50,cv=1")] == [512, 90, 1]


@pytest.mark.parametrize("workload", [Synthetic(), SharedPrefix(groups=2, tokens=1)])
def test_a_worker_draws_only_its_own_prompts(workload: Synthetic | SharedPrefix) -> None:
    """Together they ask what one would, each prompt drawn once."""
    drawn = list[int]()

    def prompt(number: int, input_tokens: int, shared: Sequence[tuple[int, int]] = ()) -> str:
        drawn.append(number)
        return f"{number} of {input_tokens} with {[*shared]}"

    prompts = Prompts(WorkloadSpec(workload, parse("uniform:2..9"), Fixed(4), 7, 10), prompt, len)
    alone, before = [*prompts.requests()], drawn.copy()
    drawn.clear()
    dealt = [
        request
        for worker in range(3)
        for request in islice(own_prompts(prompts, worker, 3).requests(), worker, None, 3)
    ]
    assert (sorted(dealt, key=lambda request: request.id), sorted(drawn)) == (alone, before)


def test_a_worker_builds_only_the_questions_of_its_sessions() -> None:
    """Of six sessions with three turns each, the second of two workers builds the questions of every other one."""
    drawn = list[int]()

    def prompt(number: int, input_tokens: int, shared: Sequence[tuple[int, int]] = ()) -> str:
        drawn.append(number)
        return f"{number} of {input_tokens} with {[*shared]}"

    prompts = Prompts(WorkloadSpec(MultiTurn(3, None), Fixed(9), Fixed(4), 7, 6), prompt, len)
    sessions = [*islice(own_prompts(prompts, 1, 2, group=3).conversations(), 1, None, 2)]
    assert drawn == [3, 4, 5, 9, 10, 11, 15, 16, 17]
    assert all(turn.question for session in sessions for turn in session.turns)


def test_progress_of_prompts_is_shown_after_a_moment_and_not_for_each_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run whose prompts are ready at once shows no progress. Later the number is shown ten times a second."""
    now_s = 100.0
    monkeypatch.setattr(prepare.time, "monotonic", lambda: now_s)
    shown = list[tuple[str, int]]()
    progress = PromptProgress(lambda phase, counts: shown.append((phase, counts.prepared)))
    progress(10)
    for step in range(8):
        now_s = 100.6 + 0.06 * step
        progress(100 + step)
    assert shown == [("building prompts", number) for number in (100, 102, 104, 106)]


def test_the_number_of_prompts_in_a_file_ends_its_load(tmp_path: Path) -> None:
    """Only where nothing else ends the load. A file without prompts, or with fewer than workers, is an error."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    settings: dict[str, Any] = {"server": "tgi", "workload": f"jsonl:{file}", "arrivals": "closed:4"}
    assert until_file_ends(Plan(**settings)).n == 2
    assert until_file_ends(Plan(**settings, n=1)).n == 1
    assert until_file_ends(Plan(**settings, duration_s=9.0)).n is None
    with pytest.raises(PlanError, match="holds 2 prompts for 3 workers"):
        until_file_ends(Plan(**settings, workers=3))
    file.write_text("")
    with pytest.raises(PlanError, match="holds 0 prompts"):
        until_file_ends(Plan(**settings))


def test_messages_are_sent_to_the_chat_endpoint_unless_another_is_requested(tmp_path: Path) -> None:
    """The first line decides. Prompts keep the server's native endpoint."""
    file = tmp_path / "prompts.jsonl"
    settings: dict[str, Any] = {"server": "tgi", "workload": f"jsonl:{file}", "n": 1}
    file.write_text('{"prompt": "a"}\n')
    assert with_file_endpoint(Plan(**settings)).endpoint is None
    file.write_text('{"messages": [{"role": "user", "content": "Hi."}]}\n')
    assert with_file_endpoint(Plan(**settings)).endpoint == "chat"
    assert with_file_endpoint(Plan(**settings, endpoint="generate")).endpoint == "generate"
