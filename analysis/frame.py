"""The Frame: a Run's Records as flat arrays, built once, so that every metric is a few array operations.

Chunks of all requests lie end to end in two arrays; `offsets[i]:offsets[i + 1]` are those of request i. Instants are
float64 nanoseconds from the run's start: exact to 2**53 ns, which is 104 days, and NaN where something never happened.
A million requests of 64 chunks take 0.8 GB, so whatever walks over chunks does it in `blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.record import State

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

ENTRIES_PER_BLOCK = 1 << 20


class Ending(NamedTuple):
    """How a request ended, in the words of its Record."""

    measured: bool
    state: State
    kind: str
    detail: str
    http_status: int | None


class Source(NamedTuple):
    """Who counted a request's tokens, and who stamped them."""

    measured: bool
    state: State
    counted_by: str
    stamps: str


class Seen(NamedTuple):
    """How many requests ended in one way, and the first of them."""

    number: int
    id: int


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch that the figures are of, in nanoseconds from the run's start, and who chose it and why."""

    from_ns: float
    to_ns: float
    chosen: Literal["auto", "set"]
    reason: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One row per Record, in the order of the run file, and one entry per chunk."""

    id: Integers
    measured: Booleans
    """False for warm-up requests, which are in no figure."""
    complete: Booleans
    dropped: Booleans
    """Never sent, because too many were in flight or their session had ended."""
    turn: Integers
    """Of its session, from 0."""
    due_ns: Floats
    sent_ns: Floats
    sent_end_ns: Floats
    first_byte_ns: Floats
    """The newest byte of the first read."""
    end_ns: Floats
    """The dialect's end marker, or the instant the request was given up, or its last chunk where neither is known."""
    first_ns: Floats
    """First chunk; NaN where there was none."""
    last_ns: Floats
    """Last chunk; NaN where there was none."""
    first_tokens: Floats
    """Tokens in the first chunk; NaN where there was none."""
    arrived_tokens: Floats
    """The sum over chunks."""
    prompt_asked: Floats
    """NaN where it could not be known beforehand."""
    prompt_reported: Floats
    """NaN where the server did not say."""
    output_asked: Floats
    output_reported: Floats
    """NaN where the server did not say."""
    worker: Integers
    late_ns_max: Integers
    reads: Integers
    coalesced_reads: Integers
    first_token_merged: Booleans
    reopened: Integers
    chunk_ns: Floats
    chunk_tokens: NDArray[np.unsignedinteger]
    offsets: Integers
    """Length of the rows + 1."""
    endings: Mapping[Ending, Seen]
    sources: Mapping[Source, int]
    window: Window | None = None
    """None is the whole run, from the first byte sent to the last end."""

    def __len__(self) -> int:
        return len(self.complete)

    @property
    def chunk_counts(self) -> Integers:
        """Chunks per row."""
        return np.diff(self.offsets)

    @property
    def output_tokens(self) -> Floats:
        """The reported count, else the sum over chunks: what arrived, also of a request that failed later."""
        return np.where(np.isnan(self.output_reported), self.arrived_tokens, self.output_reported)

    @property
    def prompt_tokens(self) -> Floats:
        """The reported count, else what was asked."""
        return np.where(np.isnan(self.prompt_reported), self.prompt_asked, self.prompt_reported)

    @property
    def later_turn(self) -> Booleans:
        """Turns of a session but its first: their instants follow answers and not the arrivals."""
        return self.turn > 0

    @property
    def sent(self) -> Booleans:
        """Measured requests of which a byte was sent."""
        return self.measured & ~np.isnan(self.sent_ns)

    @property
    def inside(self) -> Booleans:
        """Measured requests due inside the window: those whose latencies count, if they are complete."""
        if self.window is None:
            return self.measured
        return self.measured & (self.due_ns >= self.window.from_ns) & (self.due_ns <= self.window.to_ns)

    @property
    def sampled(self) -> Booleans:
        """The rows that latencies are of."""
        return self.complete & self.inside

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows and their chunks, piece by piece: see `blocks`."""
        return blocks(self.offsets)


def blocks(offsets: Integers) -> Iterator[tuple[slice, slice]]:
    """Rows, and their entries in a flat array, in pieces of about ENTRIES_PER_BLOCK entries.

    What is made on the way of a computation then never has the size of the flat array itself.
    """
    starts = np.unique(np.searchsorted(offsets, np.arange(0, max(1, int(offsets[-1])), ENTRIES_PER_BLOCK)))
    for first, last in zip(starts, [*starts[1:], len(offsets) - 1], strict=True):
        yield slice(first, last), slice(int(offsets[first]), int(offsets[last]))


def sum_by_row(values: NDArray[np.number] | Booleans, offsets: Integers) -> Floats:
    """Sum of a flat array over each row's part of it; 0 for a row without entries."""
    sums = np.zeros(len(offsets) - 1)
    for rows, entries in blocks(offsets):
        firsts = offsets[rows] - entries.start
        held = np.diff(offsets[rows.start : rows.stop + 1]) > 0
        if held.any():
            sums[rows][held] = np.add.reduceat(values[entries], firsts[held], dtype=np.float64)
    return sums
