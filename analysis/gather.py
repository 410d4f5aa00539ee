"""Gathers Records into a Frame: blocks of Records become columns as they come.

A Record of 64 chunks is 5 kB of Python objects and 0.7 kB of columns, so a block is the most that is ever held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.frame import Ending, EndingCount, Floats, Frame, Integers, Origin, offsets_of, sum_by_row
from analysis.window import windowed
from loadgen.record import Record
from loadgen.runfile import Run, RunFileError, scan

RECORDS_PER_BLOCK = 256
DETAILS_MAX = 1000
"""Different words of errors that are told apart; a server may put something new into each."""
OTHER_DETAIL = "(other words)"
NUMBERS = ("id", "worker", "late_ns_max", "reads", "coalesced_reads", "reopened", "turn")


def load(path: Path) -> tuple[Run, Frame]:
    """A Run without its Records, and the Frame of them with its measuring window. Raises RunFileError."""
    gathering = Gathering()
    try:
        run = scan(path, gathering.add)
    except OSError as error:
        raise RunFileError(f"cannot read {path}: {error.strerror}") from error
    return run, windowed(gathering.frame(), run.header)


def frame_of_run(run: Run) -> Frame:
    """The Frame of a Run that holds its Records, with its measuring window."""
    return windowed(frame_of(run.records), run.header)


def frame_of(records: Iterable[Record]) -> Frame:
    """The Frame of these Records; its window is the whole run."""
    gathering = Gathering()
    for record in records:
        gathering.add(record)
    return gathering.frame()


class Gathering:
    """Takes Records one by one; `frame` is called once, after the last."""

    def __init__(self) -> None:
        self._pending: list[Record] = []
        self._columns: dict[str, GrowingArray] = {}
        self._endings: dict[Ending, EndingCount] = {}
        self._sources = Counter[Origin]()

    def add(self, record: Record) -> None:
        """Take one Record."""
        self._pending.append(record)
        if len(self._pending) == RECORDS_PER_BLOCK:
            self._close_block()

    def frame(self) -> Frame:
        """The Frame of everything taken."""
        self._close_block()
        columns: dict[str, Any] = {name: column.array() for name, column in self._columns.items()}
        counts = columns.pop("chunk_counts")
        return Frame(**columns, offsets=offsets_of(counts), endings=self._endings, sources=self._sources)

    def _close_block(self) -> None:
        records, self._pending = self._pending, []
        for name, values in _block(records).items():
            self._columns.setdefault(name, GrowingArray(values.dtype)).extend(values)
        for record in records:
            measured, state = record.phase == "measured", record.state
            self._sources[Origin(measured, state, record.counted_by, record.stamps)] += 1
            kind = "" if state == "complete" else record.error_kind or state
            ending = Ending(measured, state, kind, record.error_detail if kind else "", record.http_status)
            if ending not in self._endings and len(self._endings) >= DETAILS_MAX:
                ending = ending._replace(detail=OTHER_DETAIL)
            number, first = self._endings.get(ending, (0, record.id))
            self._endings[ending] = EndingCount(number + 1, first)


class GrowingArray:
    """An array that grows in place: arrays kept in pieces and joined at the end need their room twice."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._bytes = bytearray()

    def extend(self, values: NDArray[Any]) -> None:
        """Append; where the values need a wider type, all change to it."""
        wider = np.promote_types(self._dtype, values.dtype)
        if wider != self._dtype:
            self._bytes = bytearray(self.array().astype(wider).data)
            self._dtype = wider
        self._bytes += values.astype(wider, copy=False).data

    def array(self) -> NDArray[Any]:
        """What it holds, not copied."""
        return np.frombuffer(self._bytes, self._dtype)


def _block(records: Sequence[Record]) -> dict[str, NDArray[Any]]:
    """One pass per column over the Records, one over the chunks."""
    counts = np.fromiter((len(record.chunk_ns) for record in records), np.int64, len(records))
    offsets = offsets_of(counts)
    total = int(offsets[-1])
    chunk_ns = np.fromiter(chain.from_iterable(record.chunk_ns for record in records), np.float64, total)
    chunk_tokens = np.fromiter(chain.from_iterable(record.chunk_tokens for record in records), np.int64, total)
    end_ns, last_ns = _instants(records, "end_ns"), _at_chunk(chunk_ns, offsets[1:] - 1, counts)
    return {
        "chunk_counts": counts,
        "chunk_ns": chunk_ns,
        "chunk_tokens": chunk_tokens.astype(np.min_scalar_type(int(chunk_tokens.max(initial=0)))),
        "measured": np.fromiter((record.phase == "measured" for record in records), np.bool_, len(records)),
        **{
            state: np.array([record.state == state for record in records], np.bool_)
            for state in ("complete", "dropped")
        },
        "end_ns": np.where(np.isnan(end_ns), last_ns, end_ns),
        "first_ns": _at_chunk(chunk_ns, offsets[:-1], counts),
        "last_ns": last_ns,
        "first_tokens": _at_chunk(chunk_tokens.astype(np.float64), offsets[:-1], counts),
        "arrived_tokens": sum_by_row(chunk_tokens, offsets),
        "prompt_asked": np.array([record.prompt_tokens_asked or np.nan for record in records], np.float64),
        "prompt_reported": _instants(records, "prompt_tokens"),
        "output_asked": _instants(records, "output_tokens_asked"),
        "output_reported": _instants(records, "output_tokens"),
        "first_token_merged": np.fromiter((record.first_token_merged for record in records), np.bool_, len(records)),
        **{name: _instants(records, name) for name in ("due_ns", "sent_ns", "sent_end_ns", "first_byte_ns")},
        **{name: np.array([getattr(record, name) for record in records], np.int64) for name in NUMBERS},
    }


def _instants(records: Sequence[Record], name: str) -> Floats:
    """A column in which None is NaN."""
    return np.array([getattr(record, name) for record in records], dtype=np.float64)


def _at_chunk(values: Floats, positions: Integers, counts: Integers) -> Floats:
    result = np.full(len(counts), np.nan)
    held = counts > 0
    result[held] = values[positions[held]]
    return result
