"""Columns of a Frame for sessions that are graphs, in which requests wait for other requests.

There are columns for the session and the role of each request, and columns for the edges of the graphs. An edge is a
pair: a request, and another request for which it waits.
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.analysis.run.record import Record

ROLES_SHOWN = 8
"""Maximum number of roles with separate figures. Further roles count as `other`."""


class GraphColumns(msgspec.Struct, frozen=True):
    """Columns about sessions that are graphs: their requests, and the edges between these requests.

    An edge leads from a parent to a request of the same session that waits for this parent. The fields `edge_...` have
    one entry per edge. All other fields except `roles` have one entry per request.
    """

    roles: tuple[str, ...]
    row: NDArray[np.int64]
    """Index of the request's row in the Frame."""
    session: NDArray[np.int64]
    role: NDArray[np.int64]
    """Index of the request's role in `roles`."""
    tool_ns: NDArray[np.int64]
    edge_row: NDArray[np.int64]
    """For each edge: index of the row of the request that waits."""
    edge_parent: NDArray[np.int64]
    """For each edge: id of the parent, for which this request waits."""
    edge_start: NDArray[np.int64]
    """For each edge: 1 if the request waits for the start of the parent, 0 if it waits for the end."""
    edge_delay_ns: NDArray[np.int64]


class GraphColumnsBuilder:
    """Builds the columns of a Frame that describe session graphs.

    A session graph is a session in which a request may wait for several other requests.
    """

    def __init__(self) -> None:
        self._requests = [array("q") for _ in range(4)]
        self._edges = [array("q") for _ in range(4)]
        self._roles: dict[str, int] = {}

    def add(self, row: int, record: Record) -> None:
        """Add the Record in this row of the Frame. A Record whose request is not part of a session graph is ignored."""
        if not (record.role or record.parents):
            return
        role = record.role if record.role in self._roles or len(self._roles) < ROLES_SHOWN else "other"
        index = self._roles.setdefault(role, len(self._roles))
        values = row, record.id if record.session is None else record.session, index, record.tool_ns
        for column, value in zip(self._requests, values, strict=True):
            column.append(value)
        for edge in record.parents:
            edge_values = row, edge.id, int(edge.after == "start"), edge.delay_ns
            for column, value in zip(self._edges, edge_values, strict=True):
                column.append(value)

    def absorb(self, later: GraphColumnsBuilder, rows: int) -> None:
        """Add the requests of the builder `later`, whose rows follow the first `rows` rows of the Frame."""
        indices = []
        for role in later._roles:
            known = role if role in self._roles or len(self._roles) < ROLES_SHOWN else "other"
            indices.append(self._roles.setdefault(known, len(self._roles)))
        changes = {0: lambda row: row + rows, 2: lambda role: indices[role]}
        for position, (column, values) in enumerate(zip(self._requests, later._requests, strict=True)):
            column.extend(map(changes.get(position, int), values))
        for position, (column, values) in enumerate(zip(self._edges, later._edges, strict=True)):
            column.extend(map(changes[0] if position == 0 else int, values))

    def columns(self) -> GraphColumns | None:
        """Return the collected columns. Return None if no request belongs to a session that is a graph of requests."""
        if not self._requests[0]:
            return None
        arrays = [np.array(column, np.int64) for column in (*self._requests, *self._edges)]
        return GraphColumns(tuple(self._roles), *arrays)
