"""Figures of sessions that are graphs: makespans, sessions in flight, delays between requests, and time for tools."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.analysis import stats, summary
from loadgen.analysis.frame import Frame
from loadgen.analysis.graph_columns import GraphColumns
from loadgen.analysis.metrics import METRICS

DECIDES_NS = 1_000
"""An edge decided when its request was due if the edge was met at the due time, with this tolerance in ns."""


def session_figures(frame: Frame) -> summary.SessionFigures | None:
    """Return figures of the sessions in `frame`, such as their durations, or None if the sessions are not graphs.

    A graph states for each request which other requests of the session it follows.
    """
    graphs = frame.graphs
    if graphs is None:
        return None
    rows = graphs.row
    names, place = np.unique(graphs.session, return_inverse=True)
    complete = np.ones(len(names), bool)
    np.logical_and.at(complete, place, frame.complete[rows])
    start_ns, end_ns = _spans(frame, graphs, place, len(names))
    makespan_s = (end_ns - start_ns)[complete] / 1e9
    tool_ns = np.zeros(len(names))
    np.add.at(tool_ns, place, np.where(frame.complete[rows], graphs.tool_ns, 0))
    instants, levels = sessions_in_flight(frame)
    total_ns = instants[-1] - instants[0] if len(instants) else 0
    mean = float((levels[:-1] * np.diff(instants)).sum() / total_ns) if total_ns else None
    return summary.SessionFigures(
        n=len(names),
        complete=int(complete.sum()),
        requests=len(rows),
        makespan_s=stats.describe(makespan_s),
        in_flight_peak=int(levels.max(initial=0)),
        in_flight_mean=None if mean is None else round(mean, 3),
        edges=_edges(frame, graphs),
        roles=_roles(frame, graphs),
        tool_s=stats.describe(tool_ns[complete & (tool_ns > 0)] / 1e9),
        tool_share=_tool_share(tool_ns[complete], makespan_s),
    )


def sessions_in_flight(frame: Frame) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the number of sessions in flight over time, as two arrays.

    The first array contains the times in ns at which the number changes. The second contains the number after each
    change.
    """
    graphs = frame.graphs
    if graphs is None:
        return np.empty(0), np.empty(0, np.int64)
    names, place = np.unique(graphs.session, return_inverse=True)
    start_ns, end_ns = _spans(frame, graphs, place, len(names))
    known = np.isfinite(start_ns) & np.isfinite(end_ns)
    times = np.concatenate((start_ns[known], end_ns[known]))
    changes = np.concatenate((np.ones(known.sum(), np.int64), -np.ones(known.sum(), np.int64)))
    order = np.lexsort((changes, times))
    return times[order], np.cumsum(changes[order])


def _spans(frame: Frame, graphs: GraphColumns, place: NDArray[Any], count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the starts and the ends of the sessions in ns, as two arrays with one element per session.

    A session starts at the earliest due time of its requests, and ends when the last of them ends. Requests that were
    not sent are ignored. `place[i]` is the index of the session to which request i in `graphs` belongs, and `count` is
    the number of sessions.
    """
    start_ns, end_ns = np.full(count, np.inf), np.full(count, -np.inf)
    sent = ~np.isnan(frame.sent_ns[graphs.row])
    np.minimum.at(start_ns, place[sent], frame.due_ns[graphs.row][sent])
    ends = frame.end_ns[graphs.row]
    ended = sent & ~np.isnan(ends)
    np.maximum.at(end_ns, place[ended], ends[ended])
    return start_ns, end_ns


def _tool_share(tool_ns: NDArray[Any], makespan_s: NDArray[Any]) -> float | None:
    total_s = float(makespan_s.sum())
    return round(float(tool_ns.sum()) / 1e9 / total_s, 6) if total_s else None


def _edges(frame: Frame, graphs: GraphColumns) -> list[summary.EdgeFigures]:
    """Return figures on the delays between the requests of session graphs: as requested, and as measured.

    An edge leads from a parent request to a later request. The later request is due no earlier than a given delay after
    the end (or the start) of its parent. If several edges lead to a request, this request is due when the last of their
    delays is over. Only the edge with this last delay is included in the distributions.
    """
    order = np.argsort(frame.id)
    ids = frame.id[order]
    found = np.minimum(np.searchsorted(ids, graphs.edge_parent), len(ids) - 1)
    parent = order[found]
    known = frame.id[parent] == graphs.edge_parent
    from_start = graphs.edge_start == 1
    event_ns = np.where(from_start, frame.sent_ns[parent], frame.end_ns[parent])
    due_ns, sent_ns = frame.due_ns[graphs.edge_row], frame.sent_ns[graphs.edge_row]
    sent = known & ~np.isnan(sent_ns) & ~np.isnan(event_ns)
    decides = sent & (np.abs(due_ns - event_ns - graphs.edge_delay_ns) <= DECIDES_NS)
    result = []
    for after, mask in (("end", ~from_start), ("start", from_start)):
        if not mask.any():
            continue
        shown = mask & decides
        actual_s = (sent_ns - event_ns)[shown] / 1e9
        requested_s = graphs.edge_delay_ns[shown] / 1e9
        result.append(
            summary.EdgeFigures(
                after=after,
                n=int(mask.sum()),
                sent=int((mask & sent).sum()),
                deciding=int(shown.sum()),
                requested_s=stats.describe(requested_s),
                actual_s=stats.describe(actual_s),
                late_s=stats.describe(actual_s - requested_s),
            )
        )
    return result


def _roles(frame: Frame, graphs: GraphColumns) -> list[summary.RoleLatency]:
    result = []
    sampled = frame.sampled
    ttft_s, e2e_s = (METRICS[name].rows(frame) for name in ("ttft_s", "e2e_s"))
    for index, role in enumerate(graphs.roles):
        rows = graphs.row[(graphs.role == index) & sampled[graphs.row]]
        result.append(
            summary.RoleLatency(
                role=role,
                n=len(rows),
                ttft_s=stats.describe(_known(ttft_s[rows])),
                e2e_s=stats.describe(_known(e2e_s[rows])),
            )
        )
    return result


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    known: NDArray[np.float64] = values[~np.isnan(values)]
    return known
