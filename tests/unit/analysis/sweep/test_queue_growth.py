"""The sequential test on the requests in flight, with servers that fill and queues that grow."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from loadgen.analysis.sweep.queue_growth import GrowthTest, Verdict

RATE = 40.0
RESPONSE_S = 3.0
FULL = 250.0


def decide(in_flight: Callable[[float], float], *, until_s: float = 120.0, **changes: float) -> tuple[Verdict, float]:
    """Return the verdict on a course of the requests in flight, and when it was clear."""
    settings = {"rate": RATE, "response_s": RESPONSE_S, "full_in_flight": FULL, "variation": 0.0} | changes
    test = GrowthTest(
        settings["rate"],
        response_s=settings["response_s"],
        full_in_flight=settings["full_in_flight"],
        variation=settings["variation"],
    )
    for tick in range(round(until_s * 4)):
        at_s = tick / 4
        sent = round(settings["rate"] * at_s)
        if test.add(at_s, sent, max(0, sent - round(in_flight(at_s)))):
            break
    return test.verdict, at_s


def filling(until: float, response_s: float) -> Callable[[float], float]:
    """Return the requests in flight of a server that fills to `until`."""
    return lambda at_s: until * (1 - math.exp(-at_s / response_s))


@pytest.mark.parametrize("response_s", [0.3, 3.0, 15.0])
def test_a_server_that_fills_keeps_up(response_s: float) -> None:
    """The verdict needs some response times, however long a response takes."""
    verdict, at_s = decide(filling(40 * response_s, response_s), response_s=response_s, full_in_flight=60 * response_s)
    assert verdict == "steady"
    assert 5 * response_s <= at_s <= max(2.0, 9 * response_s)


@pytest.mark.parametrize("excess", [0.1, 0.3, 0.6])
def test_a_queue_that_grows_is_an_overload(excess: float) -> None:
    """The queue grows in addition to the filling, at a constant rate."""
    fill = filling(FULL, RESPONSE_S)
    verdict, at_s = decide(lambda at_s: fill(at_s) + excess * RATE * at_s)
    assert verdict == "grows"
    assert at_s >= 8 * RESPONSE_S


def test_filling_is_not_read_as_a_queue() -> None:
    """A slow server whose requests in flight grow for a minute, up to fewer than a full closed loop has, keeps up."""
    verdict, at_s = decide(filling(0.9 * FULL, 20.0), response_s=5.0, rate=6.0, until_s=300)
    assert (verdict, at_s > 40) == ("steady", True)


def test_random_work_needs_a_longer_run() -> None:
    """With few requests and random lengths, the same course is judged later."""
    course = filling(30, 4.0)
    _, even_s = decide(course, rate=8.0, response_s=4.0)
    _, random_s = decide(course, rate=8.0, response_s=4.0, variation=1.0)
    assert random_s > 2 * even_s


def test_a_run_without_a_verdict_says_little() -> None:
    """The probability is then far from 0 and 1."""
    test = GrowthTest(RATE, response_s=RESPONSE_S, full_in_flight=FULL, variation=0.0)
    assert test.chance_over == 0.5
    for tick in range(40):
        test.add(tick / 4, 10 * tick, 10 * tick - min(10 * tick, 100))
    assert 0.1 < test.chance_over < 0.9
