"""Runs by hand are equal work only where as many users were there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from loadgen.analysis.compare import CHECKS
from loadgen.analysis.run.runfile import Telemetry


@pytest.mark.parametrize(
    ("seen", "said"),
    [([{"users": 20}, {"users": 100}, {"users": 0}], "up to 100 by hand"), ([{"reads": 3}], "as planned")],
)
def test_the_most_users_tell_runs_by_hand_apart(seen: list[dict[str, int]], said: str) -> None:
    """The most at a time count; other runs have none, and are alike in that."""
    (users,) = [of for what, _, of in CHECKS if what == "users"]
    lines = [Telemetry(source="client", at_ns=0, values=values) for values in seen]
    assert users(SimpleNamespace(run=SimpleNamespace(telemetry=lines))) == said
