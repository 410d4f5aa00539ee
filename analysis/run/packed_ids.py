"""Packs the ids of requests into a few bytes. Most ids of a file of Records are consecutive, so they compress well."""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return the ids in ascending order as compressed bytes.

    The bytes contain the differences between neighbouring ids as 64-bit integers (little-endian), because equal
    differences compress well.
    """
    ordered = sorted(ids)
    differences = array("q", (later - earlier for earlier, later in pairwise([0, *ordered])))
    if sys.byteorder == "big":
        differences.byteswap()
    return zlib.compress(differences.tobytes())


def unpack_ids(packed: bytes) -> Iterator[int]:
    """Yield the ids that `pack_ids` has packed, in ascending order. If `packed` is empty, there are no ids."""
    differences = array("q", zlib.decompress(packed) if packed else b"")
    if sys.byteorder == "big":
        differences.byteswap()
    return accumulate(differences)
