"""Requests that are sent side by side give the results of requests that are sent one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from loadgen.servers.errors import UncountableError
from loadgen.servers.side_by_side import map_side_by_side


def test_results_are_in_the_order_of_the_items() -> None:
    """Four threads work at the same time, which the barrier proves, and the results keep the order of the items."""
    together = threading.Barrier(4, timeout=30)

    def square(item: int) -> int:
        together.wait()
        return item * item

    assert map_side_by_side([square] * 4, range(40)) == [item * item for item in range(40)]
    assert threading.active_count() == 1


def test_one_function_needs_no_thread() -> None:
    """A single connection, or a single text, is processed by the calling thread."""
    threads = [map_side_by_side([lambda _: threading.current_thread()] * n, [1])[0] for n in (1, 5)]
    assert threads == [threading.main_thread()] * 2
    assert map_side_by_side([str], []) == []


def test_a_server_that_allows_one_connection_is_asked_one_by_one() -> None:
    """After a refusal on another connection, the first connection processes all remaining items."""
    counted = list[str]()

    def count(item: int, name: str) -> int:
        if name != "first":
            raise UncountableError("429")
        counted.append(name)
        return item

    functions: list[Callable[[int], int]] = [partial(count, name=name) for name in ("first", "second", "third")]
    assert map_side_by_side(functions, range(50)) == list(range(50))
    assert len(counted) == 50


def test_an_error_of_the_first_connection_is_raised() -> None:
    """A server that refuses everything is an error after a few requests."""
    calls = list[int]()

    def refuse(item: int) -> int:
        calls.append(item)
        raise UncountableError("500")

    with pytest.raises(UncountableError, match="500"):
        map_side_by_side([refuse] * 4, range(1000))
    assert len(calls) < 10


def test_an_unexpected_error_stops_all_threads() -> None:
    """An interrupt or a defect does not wait for the remaining items."""
    calls = list[int]()

    def fail(item: int) -> int:
        calls.append(item)
        raise ZeroDivisionError

    def slow(item: int) -> int:
        calls.append(item)
        time.sleep(0.01)
        return item

    with pytest.raises(ZeroDivisionError):
        map_side_by_side([fail, slow], range(100_000))
    assert len(calls) < 10_000
