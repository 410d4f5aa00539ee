"""Figures of sessions that are graphs, computed from Records whose times are known."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.analysis.frame import build_frame
from loadgen.analysis.run.record import Record
from loadgen.analysis.session_graphs import session_figures, sessions_in_flight
from loadgen.workloads.request import ParentEdge

MS = 1_000_000


def record(number: int, session: int, due: float, end: float, *parents: tuple[int, str, int], **fields: Any) -> Record:
    """Return the Record of a request due at `due` and ended at `end`, in ms, which was sent 1 ms after it was due."""
    edges = [ParentEdge(parent, after, delay * MS) for parent, after, delay in parents]
    times = {"due_ns": round(due * MS), "sent_ns": round((due + 1) * MS), "end_ns": round(end * MS)}
    values: dict[str, Any] = {"state": "complete", "role": "root", "chunk_ns": [round((due + 3) * MS)]}
    values |= {"chunk_tokens": [1], "output_tokens": 1, "output_tokens_asked": 1, "counted_by": "server"}
    return Record(id=number, session=session, parents=edges, **(times | values | fields))


RECORDS = [
    record(0, 0, 0, 100),
    record(1, 0, 110, 150, (0, "end", 10), role="sub-agent", tool_ns=10 * MS),
    record(2, 0, 51, 90, (0, "start", 50)),
    record(3, 0, 150, 200, (1, "end", 0), (2, "end", 20)),
    record(4, 4, 120, 400),
    Record(id=5, session=4, state="dropped", role="root", parents=[ParentEdge(4, "end", 0)], due_ns=400 * MS),
]


def test_figures_of_two_sessions() -> None:
    """A session with a dropped request has no makespan. Only edges that decided count for the delays."""
    figures = session_figures(build_frame(RECORDS))
    assert figures is not None
    assert (figures.n, figures.complete, figures.requests) == (2, 1, 6)
    assert (figures.makespan_s.n, figures.makespan_s.p50) == (1, 0.2)
    assert figures.in_flight_peak == 2
    assert figures.in_flight_mean == pytest.approx((120 + 2 * 80 + 200) / 400, abs=1e-3)
    ends, starts = figures.edges
    assert (ends.after, ends.n, ends.sent, ends.deciding) == ("end", 4, 3, 2)
    assert (starts.after, starts.n, starts.deciding) == ("start", 1, 1)
    assert (ends.requested_s.max, ends.actual_s.max, ends.late_s.max) == (0.01, 0.011, 0.001)
    assert (starts.requested_s.max, starts.actual_s.max) == (0.05, 0.051)
    assert {role.role: role.n for role in figures.roles} == {"root": 4, "sub-agent": 1}
    assert figures.tool_share == 0.05


def test_sessions_in_flight_over_time() -> None:
    """The number changes when a session starts and when its last response ends."""
    instants, levels = sessions_in_flight(build_frame(RECORDS))
    assert [round(instant / MS) for instant in instants] == [0, 120, 200, 400]
    assert levels.tolist() == [1, 2, 1, 0]


def test_other_workloads_have_no_such_figures() -> None:
    """Records without roles and edges give None."""
    frame = build_frame([Record(id=0, state="complete", sent_ns=0, end_ns=1)])
    assert session_figures(frame) is None
    assert not len(sessions_in_flight(frame)[0])
