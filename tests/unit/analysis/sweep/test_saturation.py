"""The full throughput from closed loops of growing concurrency."""

from __future__ import annotations

import pytest

from loadgen.analysis.sweep.saturation import (
    PilotLevel,
    estimate,
    full_concurrency,
    full_rate,
    is_saturated,
    next_concurrency,
    response_s,
)


def levels_of(base_s: float, per_request_s: float, most: int) -> list[PilotLevel]:
    """Return the levels of a server with the response time `base + per_request * N` up to `most` at a time."""
    levels: list[PilotLevel] = []
    while not is_saturated(levels):
        concurrency = next_concurrency(levels)
        running = min(concurrency, most)
        levels.append(PilotLevel(concurrency, running / (base_s + per_request_s * running)))
    return levels


@pytest.mark.parametrize(
    ("base_s", "per_request_s", "most"),
    [(0.9, 0.02, 1024), (0.9, 0.02, 128), (0.5, 0.0, 1), (5.0, 0.11, 256), (0.02, 0.001, 64)],
)
def test_the_concurrency_grows_until_the_throughput_does_not(base_s: float, per_request_s: float, most: int) -> None:
    """The estimate is near the throughput with any concurrency, and the response time is one that occurs."""
    levels = levels_of(base_s, per_request_s, most)
    full = most / (base_s + per_request_s * most)
    assert levels[-1].concurrency <= 1024
    assert 0.85 * full <= estimate(levels) <= 1.06 * full
    assert full_rate(levels) <= full * (1 + 1e-9)
    assert base_s <= response_s(levels) <= levels[-1].concurrency / levels[-1].rate
    assert full_concurrency(levels) <= levels[-1].concurrency


def test_a_single_level_is_its_own_estimate() -> None:
    """There is no growth to extrapolate."""
    assert estimate([PilotLevel(4, 3.0)]) == 3.0
    assert response_s([PilotLevel(4, 2.0)]) == 2.0
