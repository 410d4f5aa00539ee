"""What a run over several machines says of them, and what their clocks leave open of the skew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Telemetry
from tests.support.runs import MILLISECOND_NS, complete, healthy, run_of, summarise, text_of


def told(name: str, worker: int, uncertainty_ms: int) -> dict[str, Any]:
    """One machine, as the header has it."""
    return {
        "name": name,
        "workers": [worker],
        "host": {},
        "offset_ns": 3_000_000_000 * worker,
        "uncertainty_ns": uncertainty_ms * MILLISECOND_NS,
        "exchanges": 22,
    }


def sent(first_ms: float, last_ms: float, worker: int) -> list[Record]:
    """Two requests of a worker, from the first byte of one to the last byte of the other."""
    ends = (first_ms, first_ms), (last_ms, last_ms)
    return [
        complete(
            2 * index + worker,
            [900 * MILLISECOND_NS],
            worker=worker,
            sent_ns=round(begin * MILLISECOND_NS),
            sent_end_ns=round(end * MILLISECOND_NS),
        )
        for index, (begin, end) in enumerate(ends)
    ]


def summary_of(folder: Path, records: Sequence[Record], telemetry: Sequence[Telemetry] = ()) -> dict[str, Any]:
    client = {"stamps": "socket", "machines": [told("bench-1", 0, 5), told("bench-2", 1, 20)]}
    return summarise(run_of(folder, records, telemetry=[*healthy(), *telemetry], client=client))


@pytest.mark.parametrize(
    ("one", "other", "skew_ms", "least_ms", "most_ms"),
    [
        ((0, 40), (1, 39), 40, 40, 64),  # both ends on one machine; the other may have been 25 ms off
        ((0, 10), (30, 60), 60, 35, 85),  # one end on each
        ((0, 1), (0.5, 1.5), 1.5, 1, 26.5),  # no less than what one machine alone took
    ],
)
def test_the_skew_is_as_exact_as_the_clocks(
    one: tuple[float, float],
    other: tuple[float, float],
    skew_ms: float,
    least_ms: float,
    most_ms: float,
    tmp_path: Path,
) -> None:
    """Between two machines stand both uncertainties, 5 and 20 ms; on one machine none."""
    burst = summary_of(tmp_path / "run", [*sent(*one, 0), *sent(*other, 1)])["burst"]
    assert burst["skew_s"] == pytest.approx(skew_ms / 1e3)
    assert burst["skew_range_s"] == pytest.approx([least_ms / 1e3, most_ms / 1e3])


def test_each_machine_is_listed(tmp_path: Path) -> None:
    """With its requests, and its clock as it was found before the start and in the end; the worse of both counts."""
    values = {"machine": "bench-2", "workers": [1], "offset_ns": 3_000_000_500, "uncertainty_ns": 30 * MILLISECOND_NS}
    first = values | {"offset_ns": 3_000_000_000, "uncertainty_ns": 20 * MILLISECOND_NS}
    clock = [
        Telemetry(source="clock", at_ns=at_ns, worker=1, values=found) for at_ns, found in ((-5, first), (5, values))
    ]
    summary = summary_of(tmp_path / "run", [*sent(0, 1, 0), *sent(0, 1, 1)], clock)
    one, two = summary["machines"]
    assert (one["name"], one["requests"], one["complete"], one["drift_s"]) == ("bench-1", 2, 2, 0)
    assert (two["offset_s"], two["uncertainty_s"], two["drift_s"]) == (3.0, 0.03, 5e-7)
    text = " ".join(text_of(summary).split())
    assert "2 machines, clock uncertainty: bench-1 ±5.00 ms, bench-2 ±30.0 ms." in text
    assert "1.00 ms to 36.0 ms, given the clock uncertainty" in text


def test_a_machine_that_sent_nothing_leaves_the_skew_alone(tmp_path: Path) -> None:
    """It was lost before its first byte."""
    burst = summary_of(tmp_path / "run", sent(0, 7, 0))["burst"]
    assert burst["skew_range_s"] == pytest.approx([0.007, 0.007])


def test_one_machine_is_not_spoken_of(tmp_path: Path) -> None:
    """A run that was not spread has neither."""
    summary = summarise(run_of(tmp_path / "run", sent(0, 1, 0)))
    assert "machines" not in summary
    assert summary["burst"].keys() == {"skew_s"}
