"""The Frame: a Run's Records as flat arrays, built once, so that every metric is a few array operations.

Chunks of all requests lie end to end in two arrays; `offsets[i]:offsets[i + 1]` are those of request i. Instants are
float64 nanoseconds from the run's start: exact to 2**53 ns, which is 104 days, and NaN where something never happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.record import Record
from loadgen.runfile import Run

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Frame:
    """One row per Record, in the order of the run file, and one entry per chunk."""

    complete: Booleans
    due_ns: Floats
    sent_ns: Floats
    sent_end_ns: Floats
    end_ns: Floats
    """The dialect's end marker, or the instant the request was given up, or its last chunk where neither is known."""
    first_ns: Floats
    """First chunk; NaN where there was none."""
    last_ns: Floats
    """Last chunk; NaN where there was none."""
    first_tokens: Floats
    """Tokens in the first chunk; NaN where there was none."""
    output_tokens: Floats
    """The reported count, else the sum over chunks: what arrived, also of a request that failed later."""
    prompt_tokens: Floats
    """The reported count, else what was asked."""
    chunk_ns: Floats
    chunk_tokens: Integers
    offsets: Integers
    """Length of the rows + 1."""

    def __len__(self) -> int:
        return len(self.complete)

    @property
    def chunk_counts(self) -> Integers:
        """Chunks per row."""
        return np.diff(self.offsets)


def measured(run: Run) -> Run:
    """The Run without its warm-up requests, which are in no figure."""
    return msgspec.structs.replace(run, records=[record for record in run.records if record.phase == "measured"])


def frame_of(records: Sequence[Record]) -> Frame:
    """Gather the columns: one pass per column over the records, one over the chunks, nothing kept per record."""
    counts = np.fromiter((len(record.chunk_ns) for record in records), np.int64, len(records))
    offsets = np.concatenate(([0], np.cumsum(counts)))
    total = int(offsets[-1])
    chunk_ns = np.fromiter(chain.from_iterable(record.chunk_ns for record in records), np.float64, total)
    chunk_tokens = np.fromiter(chain.from_iterable(record.chunk_tokens for record in records), np.int64, total)
    last_ns = _at_chunk(chunk_ns, offsets[1:] - 1, counts)
    end_ns = _column(record.end_ns for record in records)
    reported = _column(record.output_tokens for record in records)
    prompt = _column(record.prompt_tokens for record in records)
    asked = _column(record.prompt_tokens_asked for record in records)
    return Frame(
        complete=np.fromiter((record.state == "complete" for record in records), np.bool_, len(records)),
        due_ns=_column(record.due_ns for record in records),
        sent_ns=_column(record.sent_ns for record in records),
        sent_end_ns=_column(record.sent_end_ns for record in records),
        end_ns=np.where(np.isnan(end_ns), last_ns, end_ns),
        first_ns=_at_chunk(chunk_ns, offsets[:-1], counts),
        last_ns=last_ns,
        first_tokens=_at_chunk(chunk_tokens.astype(np.float64), offsets[:-1], counts),
        output_tokens=np.where(np.isnan(reported), sum_by_row(chunk_tokens, offsets), reported),
        prompt_tokens=np.where(np.isnan(prompt), asked, prompt),
        chunk_ns=chunk_ns,
        chunk_tokens=chunk_tokens,
        offsets=offsets,
    )


def sum_by_row(values: NDArray[np.int64] | NDArray[np.float64], offsets: Integers) -> Floats:
    """Sum of a flat array over each row's part of it; 0 for a row without entries."""
    sums = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    return sums[offsets[1:]] - sums[offsets[:-1]]


def _column(values: Iterable[int | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _at_chunk(values: Floats, positions: Integers, counts: Integers) -> Floats:
    result = np.full(len(counts), np.nan)
    held = counts > 0
    result[held] = values[positions[held]]
    return result
