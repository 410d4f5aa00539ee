"""Offsets between clocks: exact where both directions take equally long, within half the round trip in any case."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.analysis.run.record import Record
from loadgen.distributed.master import ClockOffset, converted, offset_of
from loadgen.distributed.protocol import ClockSample, exchanged

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000 * MILLISECOND_NS


def test_an_exchange_over_equal_ways_is_exact() -> None:
    """5 ms each way, 1 ms until the answer, a clock that is 3 s ahead."""
    ahead, way, wait = 3 * SECOND_NS, 5 * MILLISECOND_NS, MILLISECOND_NS
    sample = exchanged(1000, 1000 + way + ahead, 1000 + way + wait + ahead, 1000 + 2 * way + wait)
    assert (sample.round_trip_ns, sample.facts) == (2 * way, {"offset_ns": ahead, "uncertainty_ns": way})


@given(
    ahead=st.integers(-(10**12), 10**12),
    there=st.integers(0, 10**9),
    wait=st.integers(0, 10**9),
    back=st.integers(0, 10**9),
)
def test_the_truth_is_within_half_the_round_trip(ahead: int, there: int, wait: int, back: int) -> None:
    """However unequal the two ways are."""
    sample = exchanged(0, there + ahead, there + wait + ahead, there + wait + back)
    assert sample.round_trip_ns == there + back
    assert abs(sample.offset_ns - ahead) <= sample.facts["uncertainty_ns"] + 1


def test_the_quickest_exchange_counts() -> None:
    """Of before the start and of after it, each."""
    slow, quick = ClockSample(10, 700, 90), ClockSample(20, 500, 30)
    late, later = ClockSample(110, 900, 50), ClockSample(120, 520, 40)
    offset = offset_of([slow, quick, late, later], 100)
    assert (offset.before, offset.after) == (quick, later)
    assert offset.drift_ns == 20
    assert offset_of([slow, quick], 100) == ClockOffset(quick, quick)
    with pytest.raises(ValueError, match="empty"):
        offset_of([late], 100)


@pytest.mark.parametrize(("at", "expected"), [(0, 0), (100, 0), (150, -5), (200, -10), (900, -10)])
def test_between_two_exchanges_a_clock_drifts_evenly(at: int, expected: int) -> None:
    """And before and after them it is as far ahead as at the nearer one."""
    offset = ClockOffset(ClockSample(100, 1000, 10), ClockSample(200, 1010, 10))
    assert offset.correction(90, at - 90) == expected


def test_a_record_moves_as_a_whole() -> None:
    """By the drift until it was sent: durations stay, and the due instant of an open loop, which is the plan's."""
    offset = ClockOffset(ClockSample(0, 5 * SECOND_NS, 10), ClockSample(100 * SECOND_NS, 5 * SECOND_NS + 1000, 10))
    record = Record(
        id=1,
        state="complete",
        due_ns=40 * SECOND_NS,
        sent_ns=50 * SECOND_NS,
        chunk_ns=[60 * SECOND_NS],
        chunk_tokens=[1],
    )
    line = msgspec.json.encode(record)
    moved = msgspec.json.decode(converted(offset, 0, line), type=Record)
    assert (moved.due_ns, moved.sent_ns, moved.chunk_ns) == (
        40 * SECOND_NS,
        50 * SECOND_NS - 500,
        [60 * SECOND_NS - 500],
    )
    closed = msgspec.json.decode(converted(offset, 0, line, closed=True), type=Record)
    assert closed.due_ns == 40 * SECOND_NS - 500


def test_what_is_no_record_stays() -> None:
    """Telemetry, and a line that was cut off."""
    offset = ClockOffset(ClockSample(0, 0, 10), ClockSample(100, 1000, 10))
    for line in (b'{"type":"telemetry","source":"client","at_ns":5,"values":{}}\n', b'{"type":"req'):
        assert converted(offset, 0, line) == line
