"""Counts of a worker that other processes can watch while the run is on."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Structure, c_int64


class Counts(Structure):
    """Lives in shared memory; one worker writes, the coordinator reads.

    `due`: requests whose turn has come, sent or not: the first so many of the worker's share; a session that starts
    brings all of its turns. `streaming`: those in
    flight of which something has arrived. `tokens` takes each read of an unfinished answer for one token.
    """

    _fields_ = (
        ("due", c_int64),
        ("sent", c_int64),
        ("streaming", c_int64),
        ("complete", c_int64),
        ("truncated", c_int64),
        ("failed", c_int64),
        ("dropped", c_int64),
        ("tokens", c_int64),
    )

    due: int
    sent: int
    streaming: int
    complete: int
    truncated: int
    failed: int
    dropped: int
    tokens: int


def total(counts: Iterable[Counts]) -> Counts:
    """The sum of several workers' counts."""
    summed = Counts()
    for each in counts:
        for name, _ in Counts._fields_:
            setattr(summed, name, getattr(summed, name) + getattr(each, name))
    return summed
