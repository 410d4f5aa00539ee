"""Arrivals out of a packet ring against a model, for any loss, repetition and order."""

from __future__ import annotations

from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loadgen.servers.wire.packet_ring import UNKNOWN, TcpStream, TcpStreamTable
from loadgen.servers.wire.packet_ring import arrivals_batch as several
from tests.support.packets import PORT, SYN, Sent, came

CUT = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@st.composite
def journeys(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int]]]:
    """A first sequence number, a length, and segments (start, end, stamp) in the order in which they came."""
    sizes = draw(CUT)
    pieces = [(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]
    total = sum(sizes)
    again = st.integers(0, total - 1).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, total)))
    order = draw(st.permutations(pieces + draw(st.lists(again, max_size=4))))
    steps = draw(st.lists(st.integers(0, 5), min_size=len(order), max_size=len(order)))
    came_at = [100 + sum(steps[: at + 1]) for at in range(len(order))]
    return draw(st.integers(0, 2**32 - 1)), total, [(*piece, at) for piece, at in zip(order, came_at, strict=True)]


def deliverable(total: int, segments: list[tuple[int, int, int]]) -> list[int]:
    """For each byte when it and all before it had come; those that never came hold nothing back."""
    found, so_far = [], 0
    for byte in range(total):
        first = min((at for start, end, at in segments if start <= byte < end), default=UNKNOWN)
        so_far = max(so_far, first)
        found.append(UNKNOWN if first == UNKNOWN else so_far)
    return found


def arrivals(first: int, total: int, segments: list[tuple[int, int, int]], cuts: set[int]) -> list[int]:
    """Of each byte."""
    return received(first, segments, cuts).arrivals(range(1, total + 1))


def received(first: int, segments: list[tuple[int, int, int]], cuts: set[int]) -> TcpStream:
    """Through blocks, read in several goes."""
    flows = TcpStreamTable()
    flow = flows.watch(PORT, 50)
    flows.add(came([Sent((first - 1) % 2**32, 0, 10, flags=SYN | 0x10)]))
    sent = [Sent((first + start) % 2**32, end - start, at) for start, end, at in segments]
    ends = [*sorted(cut for cut in cuts if cut < len(sent)), len(sent)]
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        flows.add(came(sent[begin:end]))
    return flow


@given(journeys(), st.sets(st.integers(1, 15)))
def test_arrivals_equal_the_model(journey: tuple[int, int, list[tuple[int, int, int]]], cuts: set[int]) -> None:
    """When everything came, in whatever order and however often, each byte arrived when it was deliverable."""
    first, total, segments = journey
    assert arrivals(first, total, segments, cuts) == deliverable(total, segments)


@given(st.lists(st.tuples(journeys(), st.booleans()), max_size=4), st.sets(st.integers(1, 15)))
def test_those_of_several_are_those_of_each(seen: list[tuple[Any, bool]], cuts: set[int]) -> None:
    """Whether all of them came or not."""
    of_each = [
        (received(first, segments[lost:], cuts), array("q", range(1, total + 1)))
        for (first, total, segments), lost in seen
    ]
    assert several(of_each) == [each for flow, offsets in of_each for each in flow.arrivals(offsets)]


@given(journeys(), st.sets(st.integers(1, 15)), st.data())
def test_what_the_ring_dropped_is_unknown_and_no_more(
    journey: tuple[int, int, list[tuple[int, int, int]]], cuts: set[int], data: st.DataObject
) -> None:
    """Without some of the segments, bytes that were seen keep an instant at which they were there, the first one unless
    they came twice; others have none."""
    first, total, segments = journey
    seen = data.draw(st.lists(st.sampled_from(segments), unique=True).map(sorted))
    seen = [each for each in segments if each in seen]
    found, model = arrivals(first, total, seen, cuts), deliverable(total, seen)
    assert [each == UNKNOWN for each in found] == [each == UNKNOWN for each in model]
    assert all(instant <= each <= segments[-1][2] for each, instant in zip(found, model, strict=True))
    if sum(end - start for start, end, _ in seen) == total - model.count(UNKNOWN):
        assert found == model
