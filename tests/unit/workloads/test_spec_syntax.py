"""Durations, which options, plan files, arrivals and objectives parse with one function."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer import BadParameter

from loadgen.analysis import objectives
from loadgen.cli.options import interval, seconds, seconds_with_unit
from loadgen.plan import Plan
from loadgen.workloads.arrivals import parse
from loadgen.workloads.spec_syntax import WorkloadError, format_duration, parse_duration_ns, parse_seconds

SECONDS = {
    "500ms": 0.5,
    "2s": 2,
    "0.5": 0.5,
    ".5": 0.5,
    "2.": 2,
    "20us": 20e-6,
    " 1 ": 1,
    "2m": 120,
    "2min": 120,
    "5m": 300,
    "1m30s": 90,
    "1h": 3600,
    "1h30m": 5400,
    "1h2m3s4ms": 3723.004,
    "1.5min": 90,
    "600.0": 600,
}


@pytest.mark.parametrize(("text", "value"), SECONDS.items())
def test_every_option_parses_durations_alike(text: str, value: float) -> None:
    """Plain numbers are seconds, and several units may be combined."""
    assert parse_seconds(text) == seconds(text) == pytest.approx(value)
    assert interval(f"0s..{text}") == (0, pytest.approx(value))


@pytest.mark.parametrize("text", ["", "fast", "-1s", "5q", "1e3", "1m30", "30s1m", "1s1s", "1m 30s", "\uff11s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    """The message shows what to write."""
    with pytest.raises(BadParameter, match="write 500ms, 10s, 2m, 1m30s or 1h"):
        seconds(text)
    with pytest.raises(WorkloadError, match=r"length .* is not a duration"):
        parse_duration_ns(text, "length")


def test_a_time_that_is_usually_in_milliseconds_needs_a_unit() -> None:
    """A plain number would silently be seconds."""
    assert seconds_with_unit("1m30s") == 90
    with pytest.raises(BadParameter, match="200 has no unit: write 200ms or 200s"):
        seconds_with_unit("200")


@pytest.mark.parametrize("text", ["2m", "1m30s", "1h", "500ms"])
def test_plans_arrivals_and_objectives_accept_the_same_durations(text: str, tmp_path: Path) -> None:
    """As in `--duration 2m`, `ramp:1..50/2m` and `e2e.p99 < 2m`."""
    value = SECONDS[text]
    ramp = parse(f"ramp:1..50/{text}")
    assert str(ramp) == f"ramp:1..50/{format_duration(round(value * 1e9))}"
    assert objectives.parse([f"e2e.p99 < {text}"])[0].bound == value
    plan = Plan(url="http://127.0.0.1:9", arrivals="poisson:5", duration_s=text, timeout_s=text, window_s=f"0s..{text}")
    assert (plan.duration_s, plan.timeout_s, plan.window_s) == (value, value, (0, value))
