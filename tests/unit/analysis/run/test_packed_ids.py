"""Ids of removed Records, packed into a few bytes."""

from __future__ import annotations

import random

import pytest

from loadgen.analysis.run.packed_ids import pack_ids, unpack_ids


@pytest.mark.parametrize("ids", [[], [7], [3, 1, 2], [-4, -1, 0, 1 << 40], list(range(0, 300_000, 3))])
def test_ids_are_returned_in_order(ids: list[int]) -> None:
    """The order of the Records in the file does not matter."""
    assert list(unpack_ids(pack_ids(ids))) == sorted(ids)


def test_ids_of_a_file_take_little_space() -> None:
    """A file has about 50,000 Records. Its figures must fit into the space that is reserved on a full disk."""
    draw = random.Random(5)
    turns = [100 * session + turn for session in range(5_000) for turn in sorted(draw.sample(range(100), 10))]
    assert len(pack_ids(range(50_000))) < 1_000
    assert len(pack_ids(turns)) < 80_000


def test_no_bytes_are_no_ids() -> None:
    """Older run files do not contain the ids."""
    assert list(unpack_ids(b"")) == []
