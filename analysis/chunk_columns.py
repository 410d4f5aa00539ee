"""What there is of each chunk of very many requests, exact and in little room: instants are steps from one chunk of a
request to the next, and where there are too many samples to be sorted, those of given ranks are found by counting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

DIGIT_BITS = 20
"""So many bits of a number are told apart in one pass over all of them, the highest first."""
MAX_COUNTERS = 1 << 23


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


class GrowingTokens:
    """Tokens of each chunk, which take no room while each holds one."""

    def __init__(self) -> None:
        self._ones, self._all = 0, GrowingArray(np.dtype(np.uint8))

    def extend(self, values: NDArray[Any]) -> None:
        """Append."""
        if self._ones >= 0 and bool((values == 1).all()):
            self._ones += len(values)
            return
        if self._ones > 0:
            self._all.extend(np.ones(self._ones, np.uint8))
        self._ones = -1
        self._all.extend(values)

    def array(self) -> NDArray[Any]:
        """What it holds, not copied."""
        return np.broadcast_to(np.uint8(1), self._ones) if self._ones >= 0 else self._all.array()


class ChunkInstants(msgspec.Struct, frozen=True, eq=False):
    """When each chunk came, in nanoseconds; `[first:last]` makes an array of that part."""

    steps: NDArray[np.integer]
    """From the chunk before; 0 for the first of a row."""
    first_ns: Floats
    """Of each row, NaN where it has no chunk."""
    offsets: Integers

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, chunks: slice) -> Floats:
        first, last, _ = chunks.indices(len(self.steps))
        if last <= first:
            return np.empty(0)
        row, end = int(np.searchsorted(self.offsets, first, "right")) - 1, int(np.searchsorted(self.offsets, last))
        begins = int(self.offsets[row])
        counts = np.minimum(self.offsets[row + 1 : end + 1], last) - self.offsets[row:end]
        held = counts > 0
        reached = np.cumsum(self.steps[begins:last], dtype=np.int64)
        base = self.first_ns[row:end][held].astype(np.int64) - reached[self.offsets[row:end][held] - begins]
        reached += np.repeat(base, counts[held])
        return reached[first - begins :].astype(np.float64)


def chunk_steps(instants: Integers, offsets: Integers) -> NDArray[np.integer]:
    """From the chunk before, in four bytes where they fit."""
    steps = np.empty_like(instants)
    np.subtract(instants[1:], instants[:-1], out=steps[1:])
    steps[offsets[:-1][np.diff(offsets) > 0]] = 0
    fits = int(steps.view(np.uint64).max(initial=0)) < 1 << 32  # what is negative is large there
    return steps.astype(np.uint32) if fits else steps


class OrderStatistics:
    """Whole numbers of 0 to `most` that come in blocks, and so many zeros more: those of some ranks, counted from 0 in
    ascending order, divided by `scale`, as if they were sorted."""

    def __init__(
        self, blocks: Callable[[], Iterable[NDArray[np.integer]]], count: int, zeros: int, most: int, scale: float
    ) -> None:
        self._blocks, self._count, self._zeros, self._scale = blocks, count, zeros, scale
        self._bits = max(1, most.bit_length())
        self._known = dict[int, float]()

    def __len__(self) -> int:
        """The zeros included."""
        return self._count

    def __getitem__(self, rank: int) -> float:
        return self.at([rank])[0]

    def at(self, ranks: Sequence[int] | Integers) -> list[float]:
        """The numbers of these ranks."""
        requested = [int(rank) + self._count * (rank < 0) for rank in ranks]
        self._known |= dict.fromkeys((rank for rank in requested if rank < self._zeros), 0.0)
        if wanted := sorted({*requested} - self._known.keys()):
            result = self._found(np.array(wanted) - self._zeros) / self._scale
            self._known |= dict(zip(wanted, result.tolist(), strict=True))
        return [self._known[rank] for rank in requested]

    def _found(self, ranks: Integers) -> Integers:
        """Digit by digit: which numbers begin as the wanted ones do, and how many of those are smaller."""
        prefixes, left, bits = np.zeros(len(ranks), np.int64), ranks.copy(), self._bits
        while bits > 0:
            groups, of = np.unique(prefixes, return_inverse=True)
            digit = min(bits, DIGIT_BITS, max(1, (MAX_COUNTERS // len(groups)).bit_length() - 1))
            counts = np.zeros((len(groups), 1 << digit), np.int64)
            for block in self._blocks():
                counts += _counted(block, groups, bits, digit, self._bits).reshape(counts.shape)
            smaller = np.cumsum(counts, axis=1)
            for each, group in enumerate(of):
                index = int(np.searchsorted(smaller[group], left[each], "right"))
                left[each] -= smaller[group][index - 1] if index else 0
                prefixes[each] = (prefixes[each] << digit) + index
            bits -= digit
        return prefixes


def _counted(block: NDArray[np.integer], groups: Integers, bits: int, digit: int, whole: int) -> Integers:
    """How many numbers of `whole` bits that begin as each group does, but for their last `bits`, go on with each
    digit."""
    length = len(groups) << digit
    if bits == whole:
        return np.bincount((block >> (bits - digit)).astype(np.intp), minlength=length)
    begins = block >> bits
    if whole - bits <= DIGIT_BITS:  # a table is several times as fast
        table = np.full(1 << (whole - bits), -1, np.int32)
        table[groups] = np.arange(len(groups))
        index = table[begins]
        retained = index >= 0
    else:
        index = np.minimum(np.searchsorted(groups, begins), len(groups) - 1)
        retained = groups[index] == begins
    digits = (block[retained] >> (bits - digit)).astype(np.int64) & ((1 << digit) - 1)
    return np.bincount((index[retained].astype(np.int64) << digit) + digits, minlength=length)
