"""Splits the Frame of a run into parts: the requests for each model, of each class of traffic, or to each replica.

The rates of the parts refer to the time span of the whole run, so that they add up to the rate of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.analysis.chunk_columns import ChunkInstants
from loadgen.analysis.frame import Booleans, Frame, Integers, Outcome, OutcomeCount, offsets_of
from loadgen.analysis.row_labels import RowLabels
from loadgen.analysis.run.runfile import Header, TrafficFacts

NO_REPLICA = "(no replica)"
"""Name of the part with the requests whose responses name no replica, such as requests without a response."""
OTHER_COLUMNS = ("chunk_ns", "chunk_tokens", "offsets")
"""Arrays of a Frame that do not have one entry per row."""


def class_indices(ids: Integers, traffic: Sequence[TrafficFacts]) -> NDArray[np.intp]:
    """Return, for each request, the index of its class of traffic in `traffic`.

    The id of a request determines its class, because each class has a separate range of ids.
    """
    first_ids = np.array([facts.first_id for facts in traffic])
    numbers = np.where(ids >= 0, ids, -1 - ids)
    return np.maximum(np.searchsorted(first_ids, numbers, "right") - 1, 0)


def label_rows(frame: Frame, header: Header) -> Frame:
    """Return the Frame with the class of traffic, the model and the replica of each row.

    - Class of traffic: the header and the id of the request determine the class.
    - Model: a Record names its model only if it is not the default model of the run or of the class. Otherwise the name
      comes from the header.
    - Replica: requests that no replica answered are grouped under NO_REPLICA.
    """
    if frame.replicas is not None:
        frame = replace(frame, replicas=frame.replicas.renamed({"": NO_REPLICA}))
    if not header.traffic:
        if frame.models is None:
            return frame
        return replace(frame, models=frame.models.renamed({"": str(header.server.get("model") or "")}))
    classes = class_indices(frame.id, header.traffic)
    named = frame.models or RowLabels(("",), np.zeros(len(frame), np.int64))
    default = str(header.server.get("model") or "")
    names = [facts.model or default for facts in header.traffic] + list(named.names)
    unnamed = named.rows("") if "" in named.names else np.zeros(len(frame), np.bool_)
    models = RowLabels(tuple(names), np.where(unnamed, classes, named.index + len(header.traffic))).renamed({})
    used = [name for name in models.names if models.rows(name).any()]
    return replace(
        frame,
        classes=RowLabels(tuple(facts.name for facts in header.traffic), classes),
        models=models if len(used) > 1 else None,
    )


def frame_parts(frame: Frame, labels: RowLabels | None) -> Iterator[tuple[str, Frame]]:
    """Yield the name and the Frame of each part of a run, such as a model or a class of traffic.

    `labels` contains the name of the part to which each row belongs. Parts without measured requests are left out.
    """
    if labels is None:
        return
    for name in labels.names:
        rows = labels.rows(name)
        if (rows & frame.measured).any():
            yield name, select_rows(frame, rows)


def find_part(frame: Frame, name: str) -> Frame | None:
    """Return the Frame of the class of traffic, the model or the replica with this name, or None if there is none."""
    for labels in (frame.classes, frame.models, frame.replicas):
        if labels is not None and name in labels.names:
            return select_rows(frame, labels.rows(name))
    return None


def select_rows(frame: Frame, rows: Booleans) -> Frame:
    """Return the Frame of the rows in a mask. This Frame keeps the window and the time span of the whole run.

    Columns about sessions, counts of timestamp sources and counts of invalid outputs are left out, because they
    describe only whole runs.
    """
    counts = frame.chunk_counts
    chunks = np.repeat(rows, counts)
    offsets = offsets_of(counts[rows])
    columns = {
        name: getattr(frame, name)[rows]
        for name in frame.__struct_fields__
        if isinstance(getattr(frame, name), np.ndarray) and name not in OTHER_COLUMNS
    }
    return replace(
        frame,
        **columns,
        chunk_ns=ChunkInstants(frame.chunk_ns.steps[chunks], frame.first_ns[rows], offsets),
        chunk_tokens=frame.chunk_tokens[chunks],
        offsets=offsets,
        outcomes=_outcomes(frame, rows),
        sources={},
        marks={name: column[rows] for name, column in frame.marks.items()},
        graphs=None,
        output_errors={},
        span_of_run=frame.span_ns,
        models=_selected(frame.models, rows),
        replicas=_selected(frame.replicas, rows),
        classes=_selected(frame.classes, rows),
    )


def _selected(labels: RowLabels | None, rows: Booleans) -> RowLabels | None:
    return None if labels is None else RowLabels(labels.names, labels.index[rows])


def _outcomes(frame: Frame, rows: Booleans) -> dict[Outcome, OutcomeCount]:
    """Return the number of selected rows with each outcome. The mask `rows` selects the rows.

    A row of a Frame does not store its outcome, but an index into `frame.outcomes`. The result therefore contains all
    of these outcomes in the same order, even those that no selected row has.
    """
    index, ids = frame.outcome_index[rows], frame.id[rows]
    counts = np.bincount(index, minlength=len(frame.outcomes))
    result = {}
    for position, outcome in enumerate(frame.outcomes):
        first_id = int(ids[index == position].min(initial=np.iinfo(np.int64).max)) if counts[position] else 0
        result[outcome] = OutcomeCount(int(counts[position]), first_id)
    return result
