"""What a lost machine would have sent: so many requests are counted by its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.distributed.master import planned


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ({"due_ns": [0, 1, 2]}, 3),  # an open loop: its due instants
        ({"due_ns": [0, 1], "of_sessions": True}, 5),  # of sessions: their turns
        ({"due_ns": None}, 5),  # a closed loop that its requests end
        ({"due_ns": None, "until_ns": 10**9}, 2),  # one that the clock ends: what was due by then
    ],
)
def test_the_rest_of_a_share_counts_where_it_is_known(share: dict[str, Any], expected: int) -> None:
    """Two requests had their turn when the machine was lost, of five that the plan gave it."""
    schedule = SimpleNamespace(due_ns=share["due_ns"], until_ns=share.get("until_ns"))
    prompts = SimpleNamespace(of_sessions=share.get("of_sessions", False))
    task = SimpleNamespace(schedule=schedule, prompts=prompts, requests=lambda: iter(range(5)))
    assert planned(task, 2) == expected  # type: ignore[arg-type]
