"""A plan's arrivals as numbers, and each worker's share."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.engine.prepare import build_schedule
from loadgen.engine.resolve_server import max_length
from loadgen.engine.worker import WorkerTask
from loadgen.plan import Plan
from loadgen.workloads.lengths import Fixed, parse
from loadgen.workloads.workload import Prompts, SharedPrefix, Synthetic, WorkloadSpec


@pytest.mark.parametrize(
    ("settings", "count", "clients", "in_flight", "spare", "at_once"),
    [
        ({"n": 1000}, 1000, 0, 1000, 1000, 1000),
        ({"arrivals": "burst:50/2s", "n": 100}, 100, 0, 100, 50, 1),
        ({"arrivals": "constant:20", "duration_s": 10}, 200, 0, 200, 20, 1),
        ({"arrivals": "constant:20", "duration_s": 10, "max_in_flight": 5}, 200, 0, 5, 5, 1),
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
    shares: Any = [SimpleNamespace(prompts=prompts, worker=worker, workers=3) for worker in range(3)]
    dealt = sorted((each for share in shares for each in WorkerTask.requests(share)), key=lambda each: each.id)
    assert (dealt, sorted(drawn)) == (alone, before)
