"""Checks of response texts, and the loop that asks canaries during the load."""

from __future__ import annotations

import pytest

from loadgen.engine.canaries import CanaryLoop, suspect_marks
from loadgen.engine.request_queue import ScheduledRequest
from loadgen.workloads.canaries import build_canaries, canary_request

PROSE = "The lighthouse stands on a rock. Its lamp turns all night, and ships pass it at a safe distance. "


@pytest.mark.parametrize(
    ("text", "finish_reason", "marks"),
    [
        (PROSE * 2, "stop", set()),
        ("", "length", {"blank_text"}),
        (" \n\t", "length", {"blank_text"}),
        (PROSE + "and so on " * 20, "length", {"looping_text"}),
        (PROSE + "ha" * 60, "length", {"looping_text"}),
        ("no no no no no no", "stop", set()),
        ("-" * 99, "stop", set()),
        ("caf\ufffd", "stop", {"replacement_text"}),
        ('{"name": "A", "age": 3}', "stop", set()),
        ('{"name": "A", "age"', "stop", {"cut_json"}),
        ('{"name": "A", "age"', "length", set()),
        ("[1, 2", "stop", {"cut_json"}),
        ("\ufffd" * 200, "length", {"looping_text", "replacement_text"}),
    ],
)
def test_suspect_texts(text: str, finish_reason: str, marks: set[str]) -> None:
    """Texts that a working server rarely generates are marked. JSON that reached the requested length is not."""
    assert set(suspect_marks(text, finish_reason)) == marks


def test_the_loop_ends_when_it_is_stopped() -> None:
    """Clients continue with the next canary until `stop` is called."""
    (canary,) = build_canaries(1, seed=0)
    slots = (ScheduledRequest(canary_request(canary, serial, {}), b"", 0) for serial in range(100))
    loop = CanaryLoop(slots, 2, think_ns=5)
    assert len(loop.group()) == 2
    following = loop.next_after_completion(10)
    assert following is not None
    assert following.due_ns == 15
    loop.stop()
    assert loop.next_after_completion(20) is None
