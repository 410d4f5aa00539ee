"""Records are grouped by the fields that are equal in most of them, and each group is evaluated once."""

from __future__ import annotations

import numpy as np

from loadgen.analysis.chunk_columns import is_constant
from loadgen.analysis.record_groups import RecordGroups
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import complete, rejected

RECORDS = [complete(7, [MS]), rejected(3), complete(9, [MS], model="b"), complete(5, [2 * MS]), rejected(2)]


def test_groups_are_in_the_order_of_their_first_records() -> None:
    """Their numbers of Records and the ids of their first Records are in the same order."""
    groups = RecordGroups(RECORDS)
    assert [fields.state for fields in groups.fields] == ["complete", "rejected", "complete"]
    assert [fields.model for fields in groups.fields] == ["", "", "b"]
    assert groups.counts == [2, 2, 1]
    assert groups.first_ids(np.array([record.id for record in RECORDS])) == [7, 3, 9]


def test_a_column_has_the_value_of_each_records_group() -> None:
    """The column states which Records are complete."""
    groups = RecordGroups(RECORDS)
    column = groups.column(lambda fields: fields.state == "complete", np.bool_)
    assert column.tolist() == [True, False, True, True, False]


def test_a_column_of_equal_values_is_constant() -> None:
    """Even if the groups differ in other fields."""
    column = RecordGroups(RECORDS).column(lambda fields: fields.measured, np.bool_)
    assert is_constant(column)
    assert column.tolist() == [True] * len(RECORDS)


def test_no_records_have_no_groups() -> None:
    """A column of no Records is empty."""
    groups = RecordGroups([])
    assert groups.fields == groups.counts == []
    assert groups.column(lambda fields: fields.turn, np.int64).tolist() == []
