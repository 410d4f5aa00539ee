"""Little's law: throughput times mean E2E against the number in flight, over the same window."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.analysis.frame import build_frame
from loadgen.analysis.littles_law import check
from loadgen.analysis.run.record import Record
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import burst, complete, failed, header, run_of, said, summarise


def asked_at(due_ms: Sequence[float], stay_ms: Sequence[float] | float) -> list[Record]:
    """Complete requests that are sent when due and are in flight for these times."""
    stays = np.broadcast_to(stay_ms, len(due_ms)).tolist()
    return [
        complete(
            number,
            [round((due + stay / 2) * MS), round((due + stay) * MS)],
            due_ns=round(due * MS),
            sent_ns=round(due * MS),
            sent_end_ns=round(due * MS),
            end_ns=round((due + stay) * MS),
        )
        for number, (due, stay) in enumerate(zip(due_ms, stays, strict=True))
    ]


def summary_of(folder: Path, records: Sequence[Record], arrivals: str, **plan: Any) -> dict[str, Any]:
    return summarise(run_of(folder, records, plan=header(len(records)).plan | {"arrivals": arrivals} | plan))


def stalled() -> list[Record]:
    """Eight clients whose first requests wait 11.6 s; all later ones take 500 ms."""
    later = [11_600.0 + turn * 500 for turn in range(20) for _ in range(8)]
    return asked_at([0.0] * 8 + later, [11_600.0] * 8 + [500.0] * 160)


def test_a_whole_run_agrees_with_itself() -> None:
    """Over a whole run in which every request completed the law is exact, whatever the load looked like."""
    random = np.random.default_rng(2)
    for records in (burst(200, 8), stalled(), asked_at(random.uniform(0, 9000, 90).tolist(), random.gamma(1, 900, 90))):
        law = check(build_frame(records))
        assert law is not None
        assert law.in_flight == pytest.approx(law.expected, rel=1e-4)
        assert law.holds


def test_figures_of_other_requests_are_a_contradiction(tmp_path: Path) -> None:
    """A window that begins during a stall holds the requests that end it, and not their latencies."""
    summary = summary_of(tmp_path / "run", stalled(), "closed:8", window_s=[4.0, 14.0])
    law = summary["littles_law"]
    assert law["in_flight"] == pytest.approx(8, rel=0.01)
    assert law["expected"] == pytest.approx(40 / 10 * 0.5, rel=0.01)
    assert said(summary, "littles_law") == (
        "Throughput and latencies contradict each other: 4.00 requests/s x 500 ms mean E2E = 2.00 in flight by "
        "Little's law, 8.00 measured (tolerance ±2.1)."
    )


def test_time_in_requests_that_failed_is_told_apart(tmp_path: Path) -> None:
    """Timeouts fill the server and are in no latency: the finding says how much of it they took."""
    hung = [failed(100 + place, "timeout", sent_ns=0, end_ns=10_000 * MS, http_status=None) for place in range(6)]
    quick = asked_at([turn * 500.0 for turn in range(20) for _ in range(2)], 500)
    summary = summary_of(tmp_path / "run", [*quick, *hung], "closed:8")
    assert said(summary, "littles_law") == (
        "Latencies exclude much of the load on the server: 4.00 requests/s x 500 ms mean E2E = 2.00 in flight by "
        "Little's law, 8.00 measured, 6.00 of them in requests that did not complete."
    )


def test_what_an_interrupt_cut_off_is_no_contradiction() -> None:
    """Requests that were in flight when the run was stopped say nothing about the server."""
    cut = [failed(100 + place, "cancelled", sent_ns=0, end_ns=900 * MS, http_status=None) for place in range(8)]
    law = check(build_frame([*asked_at([0.0] * 8, 500), *cut]))
    assert law is not None
    assert law.holds


def test_a_run_without_an_answer_has_no_law() -> None:
    """There is no mean E2E to multiply with."""
    assert check(build_frame([])) is None
    assert check(build_frame([failed(0), failed(1)])) is None


@pytest.mark.parametrize("shape", [0.25, 1.0, 16.0], ids=["heavy tail", "exponential", "even"])
@pytest.mark.parametrize("rate_per_s", [0.5, 5, 100])
def test_good_open_loops_raise_no_alarm(rate_per_s: float, shape: float) -> None:
    """Poisson arrivals of any rate with short and long answers, long ones at the edges of the window included."""
    for seed in range(40):
        random = np.random.default_rng(seed)
        due_ms = np.cumsum(random.exponential(1000 / rate_per_s, 400))
        stay_ms = random.gamma(shape, 1000 / shape, 400) + 1
        law = _of_window(asked_at(due_ms.tolist(), stay_ms), float(due_ms[20]), float(due_ms[-1]))
        assert law.holds, (seed, law)


def test_a_window_of_a_few_answers_raises_no_alarm() -> None:
    """Of eight clients in a window that is twice as long as an answer takes, wherever it lies."""
    records = asked_at([turn * 1000.0 + client * 90 for turn in range(20) for client in range(8)], 999)
    for from_ms in range(2000, 9000, 130):
        assert _of_window(records, from_ms, from_ms + 2000).holds


def _of_window(records: Sequence[Record], from_ms: float, to_ms: float) -> Any:
    from msgspec.structs import replace

    from loadgen.analysis.frame import Window

    law = check(replace(build_frame(records), window=Window(from_ms * MS, to_ms * MS, "set", "set by the plan")))
    assert law is not None
    return law
