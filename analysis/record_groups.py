"""Groups the Records of a block by the fields that are equal in most Records, such as the state and the HTTP status.

What depends only on these fields is then computed once per group and not once per Record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.analysis.chunk_columns import constant_array
from loadgen.analysis.run.record import Record, State


class GroupFields(NamedTuple):
    """The fields of a Record that are equal in all Records of a group. `Record` documents them."""

    phase: str
    state: State
    error_kind: str
    error_detail: str
    http_status: int | None
    counted_by: str
    stamps: str
    chunk_counts: str
    hidden_tokens: int
    refuted_total: int | None
    output_error: str
    first_token_merged: bool
    worker: int
    turn: int
    reopened: int
    model: str
    replica: str

    @property
    def measured(self) -> bool:
        return self.phase == "measured"


_FIELDS_OF = attrgetter(*GroupFields._fields)


class RecordGroups:
    """The groups of a block of Records, in the order of their first Records."""

    def __init__(self, records: Sequence[Record]) -> None:
        known: dict[Any, int] = {}
        self.index = np.array([known.setdefault(fields, len(known)) for fields in map(_FIELDS_OF, records)], np.intp)
        """Index of each Record's group in `fields`."""
        self.fields = [GroupFields._make(fields) for fields in known]
        self.counts: list[int] = np.bincount(self.index, minlength=len(known)).tolist()
        """Number of Records in each group."""

    def first_ids(self, ids: NDArray[np.int64]) -> list[int]:
        """Return the id of the first Record of each group. `ids` contains the id of each Record of the block."""
        result = np.zeros(len(self.fields), np.int64)
        result[self.index[::-1]] = ids[::-1]  # the first Record is assigned last
        return result.tolist()

    def column(self, value_of: Callable[[GroupFields], Any], dtype: Any) -> NDArray[Any]:
        """Return a value for each Record, which depends only on the fields of its group."""
        return self.spread(np.array([value_of(fields) for fields in self.fields], dtype))

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return a value for each Record, given a value for each group."""
        if len(values) and (values == values[0]).all():
            return constant_array(values[0], values.dtype, len(self.index))
        return values[self.index]
