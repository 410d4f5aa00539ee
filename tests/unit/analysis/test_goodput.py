"""Goodput, attainment, and the figures beside throughput and length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.analysis.frame import build_frame
from loadgen.analysis.goodput import attainment_curve, bound_scale, goodput
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.objectives import BoundsMet, ObjectiveError, parse_bounds
from loadgen.analysis.run.record import Record
from tests.support.runs import MILLISECOND_NS, complete, failed, rejected


def record(place: int, ttft_ms: int, itl_ms: int, tokens: int = 5, **changes: object) -> Record:
    """An answer at an even pace."""
    instants = [(ttft_ms + step * itl_ms) * MILLISECOND_NS for step in range(tokens)]
    return complete(place, instants, **changes)


def test_a_request_is_good_when_it_keeps_everything() -> None:
    """One keeps both bounds, one only TTFT, one only TPOT, one failed: attainment 1 of 4, and the curve says at which
    scale each of them would have been good."""
    frame = build_frame([record(0, 100, 10), record(1, 100, 40), record(2, 600, 10), failed(3)])
    found = goodput(frame, parse_bounds(["ttft < 200ms", "tpot <= 20ms"]))
    assert (found.good, found.requests, found.attainment) == (1, 4, 0.25)
    assert found.each == {"ttft < 200ms": 0.5, "tpot <= 20ms": 0.5}
    assert found.curve.x == [0.5, 2.0, 3.0]
    assert found.curve.y == [0.25, 0.5, 0.75]
    assert found.met_by["50%"] == BoundsMet(scale=2.0, bounds_s={"ttft": 0.4, "tpot": 0.04})
    assert found.met_by["90%"] is None
    assert found.per_s == pytest.approx(1 / (frame.end_ns.max() / 1e9), rel=1e-6)


def test_a_rejected_request_is_a_miss() -> None:
    """A user whose request was refused was not served well, however soon the refusal came."""
    frame = build_frame([record(0, 100, 10), rejected(1), rejected(2), rejected(3)])
    found = goodput(frame, parse_bounds(["ttft < 200ms"]))
    assert (found.good, found.requests, found.attainment) == (1, 4, 0.25)


def test_a_single_token_has_no_pace_to_keep() -> None:
    """A request without a TPOT is judged by the other bounds alone."""
    frame = build_frame([record(0, 100, 0, tokens=1)])
    assert goodput(frame, parse_bounds(["tpot < 1us", "ttft < 1s"])).good == 1


@pytest.mark.parametrize("records", [[], [failed(0)], [failed(0), failed(1)]])
def test_nothing_good_is_said_so(records: list[Record]) -> None:
    """No request, or none complete: no attainment above 0, no scale that would have helped."""
    found = goodput(build_frame(records), parse_bounds(["e2e < 1s"]), unrecorded=2)
    assert (found.good, found.attainment, found.met_by["50%"]) == (0, 0, None)
    assert found.requests == len(records) + 2


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 50)), min_size=1, max_size=30), st.floats(0.01, 10))
def test_the_curve_is_the_attainment_at_each_scale(shapes: list[tuple[int, int]], scale: float) -> None:
    """Scaling all bounds gives the attainment that the curve has there, and more generous bounds never lose one."""
    frame = build_frame([record(place, *shape) for place, shape in enumerate(shapes)])
    bounds = parse_bounds(["ttft < 200ms", "tpot < 20ms"])
    needed = np.sort(bound_scale(frame, bounds))
    drawn = attainment_curve(needed)
    assert drawn.y == sorted(drawn.y)
    assert drawn.x == sorted(drawn.x)
    scaled = parse_bounds([f"ttft < {0.2 * scale:.12f}s", f"tpot < {0.02 * scale:.12f}s"])
    expected = float((needed <= scale).mean())
    if not np.isclose(needed, scale, rtol=1e-6).any():
        assert goodput(frame, scaled).attainment == pytest.approx(expected)


def test_wrong_bounds_are_all_named() -> None:
    """A statistic, a rate, the wrong side and no time: one line each."""
    wrong = ["ttft.p99 < 1s", "skew < 1s", "tpot > 5ms", "e2e", "ttft < 5 h", "itl < 1ms", "ttft < 0s", "ttft < 800"]
    with pytest.raises(ObjectiveError) as error:
        parse_bounds(["ttft < 1s", *wrong])
    assert len(str(error.value).splitlines()) == len(wrong)
    assert "write 800ms or 800s" in str(error.value)
    assert "ttft < 500ms" in error.value.hint


def test_throughput_before_the_tail() -> None:
    """Twenty requests of one token, nineteen within 1.9 s and one after 20 s: 10 per second before it, 1 in all."""
    ends = [*(100 * MILLISECOND_NS * place for place in range(1, 20)), 20_000 * MILLISECOND_NS]
    frame = build_frame([complete(place, [end], end_ns=end) for place, end in enumerate(ends)])
    assert METRICS["output_tokens_per_s"].formula(frame) == pytest.approx(1)
    assert METRICS["steady_output_tokens_per_s"].formula(frame) == pytest.approx(10)
    assert METRICS["tail_share"].formula(frame) == pytest.approx(1 - 1.9 / 20)


def test_latency_at_the_length_asked() -> None:
    """Half of the tokens asked, at 10 ms each: the rest is added at the same pace; a full answer stays as it is."""
    short = record(0, 100, 10, tokens=5, output_tokens_asked=10)
    whole = record(1, 100, 10, tokens=10)
    assert METRICS["e2e_asked_s"].values(build_frame([short, whole])) == pytest.approx([0.19, 0.19])
