"""The compact set of request ids, compared with a set of Python integers."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from loadgen.analysis.run.id_set import IdSet

IDS = st.integers(-(1 << 40), 1 << 40) | st.integers(-300, 300) | st.integers(65_530, 65_545)


@given(st.lists(IDS, max_size=60), st.lists(IDS, max_size=20))
def test_it_holds_what_was_added(added: list[int], others: list[int]) -> None:
    """`add` says whether a number is new, and length and membership are those of a set."""
    compact, expected = IdSet(), set[int]()
    for number in added:
        assert compact.add(number) == (number not in expected)
        expected.add(number)
    assert len(compact) == len(expected)
    for number in (*added, *others):
        assert (number in compact) == (number in expected)


def memory_of(numbers: Iterable[int]) -> int:
    """Return the memory in bytes that a set of these numbers takes."""
    tracemalloc.start()
    try:
        compact = IdSet()
        for number in numbers:
            compact.add(number)
        size, _ = tracemalloc.get_traced_memory()
        return size
    finally:
        tracemalloc.stop()


def test_a_request_takes_about_a_bit() -> None:
    """200,000 consecutive ids take about 25 kB: far less than any other part of a run."""
    assert memory_of(range(200_000)) < 35_000


def test_scattered_ids_take_no_page_each() -> None:
    """Ten thousand ids, each in a page of its own, take less than 1 kB each. A page takes 8 kB."""
    assert memory_of(number << 20 for number in range(10_000)) < 10_000_000


def test_a_page_that_fills_up_keeps_its_ids() -> None:
    """The ids of a page are those that were added, before and after the page changes from a set to bits."""
    compact = IdSet()
    numbers = range(0, 4_000, 10)
    assert all(compact.add(number) for number in numbers)
    assert not any(compact.add(number) for number in numbers)
    assert len(compact) == len(numbers)
    assert [number for number in range(4_000) if number in compact] == list(numbers)
