"""Health counters of a worker process."""

from __future__ import annotations

from loadgen.engine.client_health import MAX_UNKNOWN_NAMES, Health


def test_unknown_names_of_times_are_limited_when_they_are_added() -> None:
    """A server that sends a new name with every response fills neither the memory nor the sample."""
    health = Health()
    for number in range(1_000):
        health.timing_sources |= {"Server-Timing"}
        health.add_unknown_timing_names({f"span-{number}"})
    assert len(health._unknown_timing_names) == MAX_UNKNOWN_NAMES
    values = health.sample()
    assert values["timing_sources"] == ["Server-Timing"]
    assert values["unknown_timing_names"] == ["span-0", "span-1", "span-2", "span-3"]
    assert "unknown_timing_names" not in health.sample()
