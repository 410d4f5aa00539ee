"""The compact set of request ids, compared with a set of Python integers."""

from __future__ import annotations

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


def test_a_request_takes_about_a_bit() -> None:
    """A million ids take 128 kB, and three million take three times that: far less than any other part of a run."""
    sizes = []
    for count in (100_000, 1_000_000):
        numbers = IdSet()
        for number in range(count):
            numbers.add(number)
        sizes.append(numbers.size_bytes)
    assert sizes == [16_384, 131_072]
