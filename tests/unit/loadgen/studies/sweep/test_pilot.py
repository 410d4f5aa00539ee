"""The pilot of a sweep: when a level of it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loadgen.engine.client_health import LiveCounters
from loadgen.studies.sweep import Watch
from loadgen.studies.sweep.pilot import LevelWatch, is_complete, levels_of


def level(complete: Callable[[float], float], concurrency: int, previous_rate: float = 0.0) -> tuple[LevelWatch, float]:
    """Return the watch of a level with this number of complete requests, and when it ended the level."""
    now = [0.0]
    watch = LevelWatch(Watch(lambda _phase, _counts: None, clock=lambda: now[0]), concurrency, previous_rate)
    for tick in range(1, 601):
        now[0] = tick / 10
        counts = LiveCounters(sent=3 * concurrency, complete=round(complete(now[0])), streaming=1)
        if watch("running", counts):
            break
    return watch, now[0]


def test_a_level_lasts_for_two_waves() -> None:
    """All clients start together, so that the first responses end together."""
    watch, at_s = level(lambda at_s: 16 * (at_s // 2), 16)
    assert watch.enough
    assert at_s == pytest.approx(4.0)


def test_a_level_ends_at_once_where_more_clients_change_nothing() -> None:
    """A server with one slot answers evenly at the same rate. The second wave of 64 would take a minute."""
    watch, at_s = level(lambda at_s: 2 * at_s, 64, previous_rate=2.0)
    assert watch.enough
    assert at_s < 6
    _, at_s = level(lambda at_s: 4 * at_s, 64, previous_rate=2.0)
    assert at_s > 30


def test_a_server_that_refuses_everything_ends_the_pilot() -> None:
    """Three errors and no response are enough."""
    now = [0.0]
    watch = LevelWatch(Watch(lambda _phase, _counts: None, clock=lambda: now[0]), 4, 0.0)
    assert watch("running", LiveCounters(sent=4, failed=4)) is None
    now[0] = 1.0
    assert watch("running", LiveCounters(sent=8, failed=4, rejected=4)) is not None
    assert watch.refused


def test_the_journal_has_the_levels() -> None:
    """A level without a rate ended the pilot, and says nothing itself."""
    lines = [
        {"type": "plan"},
        {"type": "pilot", "concurrency": 4, "rate": 3.0, "run_s": 2.0, "last": False},
        {"type": "pilot", "concurrency": 16, "rate": 0.0, "run_s": 2.0, "last": True},
    ]
    assert levels_of(lines) == [(4, 3.0)]
    assert is_complete(lines)
    assert not is_complete(lines[:2])
