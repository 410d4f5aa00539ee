"""Names that group the rows of a Frame, such as the model or the class of traffic of each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.analysis.chunk_columns import GrowingArray
from loadgen.analysis.record_groups import RecordGroups

MAX_NAMES = 100
"""Maximum number of different names. Rows with further names are grouped under OTHER_NAME."""
OTHER_NAME = "(other)"


class RowLabels(msgspec.Struct, frozen=True, eq=False):
    """One name for each row of a Frame, for example the name of the model that the row's request was sent to."""

    names: tuple[str, ...]
    index: NDArray[np.integer]
    """Index of each row's name in `names`. A name may occur twice in `names` until `renamed` has joined its rows."""

    def rows(self, name: str) -> NDArray[np.bool_]:
        """Return a mask of the rows with this name."""
        rows: NDArray[np.bool_] = self.index == self.names.index(name)
        return rows

    def renamed(self, names: Mapping[str, str]) -> RowLabels:
        """Return the labels with some names replaced. Rows whose names become equal are grouped together."""
        new = [names.get(name, name) for name in self.names]
        distinct = tuple(dict.fromkeys(new))
        positions = np.array([distinct.index(name) for name in new], np.int64)
        return RowLabels(distinct, positions[self.index])


class RowLabelsBuilder:
    """Collects the labels of rows that are added in blocks."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {"": 0}
        self._index = GrowingArray(np.dtype(np.uint8))

    def extend(self, groups: RecordGroups, names: Sequence[str]) -> None:
        """Add one row for each Record of `groups`. `names` contains the name of each group, or "" for no name."""
        self._index.extend(groups.spread(np.array([self._position(name) for name in names], np.uint8)))

    def absorb(self, later: RowLabelsBuilder) -> None:
        """Add the rows of the builder `later` after the rows of this builder."""
        positions = np.array([self._position(name) for name in later._names], np.uint8)
        self._index.extend(positions[later._index.array()])

    def _position(self, name: str) -> int:
        if name not in self._names and len(self._names) >= MAX_NAMES:
            name = OTHER_NAME
        return self._names.setdefault(name, len(self._names))

    def labels(self) -> RowLabels | None:
        """Return the labels of all rows, or None if no row has a name."""
        return None if len(self._names) == 1 else RowLabels(tuple(self._names), self._index.array())
