"""Request ids on the wire, and the headers of a request."""

import pytest

from loadgen.workloads.request import merged_headers, new_id_prefix, number_of_wire_id, wire_id


@pytest.mark.parametrize("number", [0, 17, 999_999, -1, -20])
def test_the_number_of_a_request_can_be_read_from_its_id(number: int) -> None:
    """The id on the wire ends in the number of the Record, also for warm-up requests, whose numbers are negative."""
    assert number_of_wire_id(wire_id(new_id_prefix(), number)) == number


def test_ids_of_two_runs_differ() -> None:
    """Two runs on one server have different ids for requests with the same number, and no id occurs twice in a run."""
    first, second = new_id_prefix(), new_id_prefix()
    ids = [wire_id(prefix, number) for prefix in (first, second) for number in range(-3, 100)]
    assert len(set(ids)) == len(ids)


def test_a_later_header_wins_in_any_spelling() -> None:
    """A header of the user replaces loadgen's header of the same name, however the user spells the name."""
    assert merged_headers({"X-Request-Id": "1", "A": "a"}, {"x-REQUEST-id": "mine"}, {"B": "b"}) == {
        "x-REQUEST-id": "mine",
        "A": "a",
        "B": "b",
    }
